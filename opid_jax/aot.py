"""Compiles a run's programs for a TPU pod on a machine that has none, and shows what they take of each chip.

python -m opid_jax.aot --config=configs/webshop.py:qwen2.5-3b --topology=v5e:4x4
  Needs the TPU compiler (`pip install -e '.[tpu]'`), a CPU and some minutes; no weights, no TPU, no network.
"""

import importlib.util
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.extend.core import jaxprs_in_params

from opid_jax import flags, learner, metrics, settings, sharding, train
from opid_jax import policy as policies
from opid_jax.models import hf, qwen
from opid_jax.types import Packed

OPTIONS = {
  'topology': flags.Option('v5e:4x4', 'chips to compile for, as libtpu names them: v5e:4x4, v5p:4x4x4, v6e:8x8'),
  'programs': flags.Option('score,accumulate,apply,prefill,decode', 'which programs, comma-separated'),
}
# Shapes of the models that the presets name, so that no file of theirs is needed; checked against their
# config.json wherever the folder is there.
SHAPES = {
  'qwen2.5-3b': qwen.QwenConfig(
    'qwen2', 151936, 2048, 36, 16, 2, 128, 11008, 1e6, tied=True, attention_bias=True, qk_norm=False
  ),
  'qwen2.5-7b': qwen.QwenConfig(
    'qwen2', 152064, 3584, 28, 28, 4, 128, 18944, 1e6, tied=False, attention_bias=True, qk_norm=False
  ),
  'qwen3-1.7b': qwen.QwenConfig('qwen3', 151936, 2048, 28, 16, 8, 128, 6144, 1e6, max_positions=40960),
}
END_IDS = (151645, 151643)  # <|im_end|>, <|endoftext|>: of both families.


class Program(NamedTuple):
  """A jitted function and what it is called with; `resident` are the bytes per chip that wait beside it."""

  function: Any
  arguments: tuple
  resident: int


class Compiled(NamedTuple):
  """A compiled program; bytes are per chip.

  Attributes:
    executable: with the compiler's own analyses and text.
    peak: arguments, results and temporaries, or the compiler's own peak where that is larger.
    argument: size of what it is called with.
    total: `peak` and whatever else of the run stays on the chip meanwhile.
    flops: of the matrix products, all chips together; a while loop's body counts once.
    seconds: of tracing and compiling.
  """

  executable: Any
  peak: int
  argument: int
  total: int
  flops: int
  seconds: float


def find_topology(name: str):
  """Descriptions of TPU chips that need not exist.

  Args:
    name: generation and shape, for example 'v5e:4x4'.

  Returns:
    The devices, in the order of a real slice.

  Raises:
    ValueError: if the TPU compiler is not installed or another process holds it, or it knows no such topology.
  """
  if importlib.util.find_spec('libtpu') is None:
    raise ValueError("The TPU compiler is not installed (no module libtpu). Install it: pip install -e '.[tpu]'")
  # Without these the compiler looks for a TPU host's metadata server, and asks on until it gives up.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
  try:
    return topologies.get_topology_desc(platform='tpu', topology_name=name).devices
  except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
    if 'lockfile' in str(error):
      raise ValueError(
        'Another process on this machine holds the TPU compiler. Wait until it ends; if it uses no TPU either, '
        'set ALLOW_MULTIPLE_LIBTPU_LOAD=1.'
      ) from error
    raise ValueError(f'No topology {name!r}: {error}. Expected for example v5e:4x4, v5p:4x4x4 or v6e:8x8.') from error


def model_shape(config) -> qwen.QwenConfig:
  """Shape of the model in `model.path`, or of the known model that the folder is named after.

  Raises:
    ValueError: if there is neither.
  """
  folder = config.model.path or policies.embedded_folder(config.env.name)
  if (Path(folder) / 'config.json').is_file():
    return hf.load_config(folder)
  name = Path(folder).name.lower()
  shape = next((shape for known, shape in SHAPES.items() if name.startswith(known)), None)
  if shape is None:
    raise ValueError(
      f'model.path is {folder!r}: no config.json there, and the name is not of a known model '
      f'({", ".join(SHAPES)}). Give a folder with a config.json.'
    )
  return shape


def programs(config, model: qwen.QwenConfig, mesh) -> dict[str, Program]:
  """The programs of a training run with the shapes of their arguments, by name."""
  agent = policies.Policy(model, policies.make_options(config, mesh), None, '')
  params = policies.shapes(agent, mesh)
  state = train.state_shapes(config, params, mesh)
  r, c = config.rollout, config.learner
  jitted = train.make_programs(config, agent, state, mesh)
  empty, prefill, decode = policies.sampler_programs(
    agent, params, mesh, r, end_ids=END_IDS, max_prompt=r.max_prompt_tokens, max_response=r.max_response_tokens
  )
  slots = jax.tree.map(
    lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
    jax.eval_shape(empty),
    policies.slots_sharding(model, mesh),
  )

  def array(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)

  row, slot = (c.rows_per_call, c.row_length), (c.rows_per_call, c.slots_per_row)
  packed = Packed(array(*row), array(*row), array(*row), array(*slot), array(*slot), array(*slot, dtype=jnp.float32))
  targets = learner.Targets(*[array(*slot, dtype=jnp.float32)] * len(learner.Targets._fields))
  sums = jax.eval_shape(learner.Sums.zeros)
  prompts = (array(r.prefill_rows, r.max_prompt_tokens), *[array(r.prefill_rows)] * 3)
  calls = {
    'score': (jitted.score, (params, packed)),
    'accumulate': (jitted.accumulate, (params, params, sums, packed, targets)),
    'apply': (jitted.apply, (state, params, sums)),
    'prefill': (prefill, (params, slots, *prompts, array(r.prefill_rows, 2, dtype=jnp.uint32))),
    'decode': (decode, (params, slots, array(dtype=jnp.float32))),
  }
  parts = {'params': params, 'opt_state': state.opt_state, 'slots': slots}
  size = {name: _bytes_per_chip(tree) for name, tree in parts.items()}
  reference = size['params'] * jnp.dtype(config.model.reference_dtype).itemsize // 4 if config.loss.kl_coef else 0
  everything = sum(size.values()) + reference
  takes = {'apply': ('params', 'opt_state'), 'prefill': ('params', 'slots'), 'decode': ('params', 'slots')}
  return {
    name: Program(*call, everything - sum(size[part] for part in takes.get(name, ('params',))))
    for name, call in calls.items()
  }


def compile_program(program: Program) -> Compiled:
  """Compiles for the devices of the program's shardings.

  Raises:
    ValueError: if the program does not fit the chip's memory; says by how much.
  """
  begin = time.monotonic()
  traced = program.function.trace(*program.arguments)
  try:
    executable = traced.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    raise ValueError(
      f'It does not fit: {str(error).splitlines()[0]} Lower learner.rows_per_call or row_length (or rollout.slots), '
      'set model.attention_block, learner.head_chunk and model.remat, or take more chips.'
    ) from error
  memory = executable.memory_analysis()
  results = memory.output_size_in_bytes - memory.alias_size_in_bytes  # Donated memory counts once.
  # The compiler's own peak knows lifetimes but not always every result; neither number bounds the other.
  peak = max(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes, memory.peak_memory_in_bytes)
  return Compiled(
    executable,
    peak,
    memory.argument_size_in_bytes,
    peak + program.resident,
    matmul_flops(traced.jaxpr.jaxpr),
    time.monotonic() - begin,
  )


def matmul_flops(jaxpr) -> int:
  """Multiplications and additions in the matrix products of a jaxpr.

  Counted here because the compiler's own number takes the layers' loop for one layer. A scan counts in full, the
  body of any other loop once.
  """
  total = 0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'dot_general':
      (contracted, _), _ = eqn.params['dimension_numbers']
      lengths = [eqn.invars[0].aval.shape[axis] for axis in contracted]
      total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lengths)
    inner = sum(matmul_flops(body) for body in jaxprs_in_params(eqn.params))
    total += inner * (eqn.params['length'] if eqn.primitive.name == 'scan' else 1)
  return total


def _bytes_per_chip(tree) -> int:
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def rows(compiled: dict[str, Compiled], num_chips: int) -> Iterator[tuple]:
  """Lines of the table: GiB per chip, TFLOPs per chip, seconds."""
  yield ('program', 'peak GiB', 'arguments', 'with the rest', 'TFLOP', 'compiled in s')
  for name, c in compiled.items():
    sizes = (f'{value / 2**30:.2f}' for value in (c.peak, c.argument, c.total))
    yield (name, *sizes, f'{c.flops / num_chips / 1e12:.2f}', f'{c.seconds:.0f}')


def main(argv: Sequence[str]) -> None:
  config, option = flags.read_or_exit(argv, OPTIONS, __doc__)
  jax.config.update('jax_platforms', 'cpu')  # Whatever this machine has stays free.
  try:
    mesh = sharding.make_mesh(find_topology(option['topology']), **config.mesh)
    settings.validate(config, num_devices=mesh.size)
    model = model_shape(config)
    known = programs(config, model, mesh)
    names = [name.strip() for name in option['programs'].split(',')]
    unknown = [name for name in names if name not in known]
    if unknown:
      raise ValueError(f'Unknown program {unknown[0]!r}. Available: {", ".join(known)}.')
  except ValueError as error:
    sys.exit(f'aot: {error}')
  axes = ', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
  r, c = config.rollout, config.learner
  print(
    f'{model.family}, {model.num_layers} layers of width {model.width}, {config.model.dtype}, for '
    f'{option["topology"]} ({axes}): {c.rows_per_call} rows of {c.row_length} tokens and {c.slots_per_row} scored '
    f'per call, {r.slots} slots',
    flush=True,
  )
  compiled = {}
  for name in names:
    try:
      compiled[name] = compile_program(known[name])
    except ValueError as error:
      sys.exit(f'aot: {name}: {error}')
    print(f'{name}: {compiled[name].peak / 2**30:.2f} GiB per chip, {compiled[name].seconds:.0f} s', flush=True)
  print(metrics.table(list(rows(compiled, mesh.size))))


if __name__ == '__main__':
  main(sys.argv)
