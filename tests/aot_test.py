import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from opid_jax import aot, flags, sharding
from opid_jax.models import qwen

PRESET = '--config=configs/webshop.py:qwen2.5-3b'
GIB = 2**30


@pytest.fixture(autouse=True)
def in_project(request, monkeypatch):
  monkeypatch.chdir(request.config.rootpath)


def read(*overrides):
  return flags.read(['aot', PRESET, *overrides], {})[0]


def avals(jaxpr):
  for eqn in jaxpr.eqns:
    yield from (var.aval for var in eqn.outvars)
    for body in jaxprs_in_params(eqn.params):
      yield from avals(body)


# As the model cards state them; the published file of Qwen3-1.7B holds its tied head twice.
@pytest.mark.parametrize(
  'name, parameters', [('qwen2.5-3b', 3085938688), ('qwen2.5-7b', 7615616512), ('qwen3-1.7b', 1720574976)]
)
def test_known_shapes_have_the_published_size(name, parameters):
  params = jax.eval_shape(lambda key: qwen.init(key, aot.SHAPES[name]), jax.random.key(0))
  assert qwen.count_parameters(params) == parameters


def test_every_model_of_the_preset_has_a_shape():
  for name, shape in aot.SHAPES.items():
    config, _ = flags.read(['aot', f'--config=configs/webshop.py:{name}'], {})
    assert aot.model_shape(config) == shape


def test_unknown_model_is_refused():
  with pytest.raises(ValueError, match='known model .qwen2.5-3b'):
    aot.model_shape(read('--config.model.path=weights/Other-1B'))


def test_a_scan_counts_each_of_its_steps():
  def twice_and_thrice(x, stack):
    return jax.lax.scan(lambda x, w: (x @ w, None), x @ stack[0], stack)[0]

  jaxpr = jax.make_jaxpr(twice_and_thrice)(jnp.ones((2, 4)), jnp.ones((3, 4, 4))).jaxpr
  assert aot.matmul_flops(jaxpr) == (1 + 3) * 2 * 2 * 4 * 4


def test_absent_compiler_is_named(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r"pip install -e '.\[tpu\]'"):
    aot.find_topology('v5e:4x4')


@pytest.mark.parametrize('name', ['score', 'accumulate'])
def test_no_array_spans_tokens_and_vocabulary(name):
  config = read()
  mesh = sharding.make_mesh(jax.devices())
  program = aot.programs(config, aot.SHAPES['qwen2.5-3b'], mesh)[name]
  shapes = {aval.shape for aval in avals(program.function.trace(*program.arguments).jaxpr.jaxpr) if aval.shape}
  vocabulary = {shape for shape in shapes if 151936 in shape}
  assert (16, 512, 151936) in vocabulary  # One block of the head, before it is split over the chips.
  # Rank 3 and more: the weight itself is [vocabulary, width], and its width may equal the slots of a row.
  whole = {config.learner.row_length, config.learner.slots_per_row}
  assert not [shape for shape in vocabulary if len(shape) > 2 and whole & set(shape)]


@pytest.fixture(scope='module')
def tpu():
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip("the TPU compiler is not installed: pip install -e '.[tpu]'")
  return aot.find_topology('v5e:4x4')


@pytest.mark.slow
def test_unknown_topology_is_refused(tpu):
  with pytest.raises(ValueError, match='v5e:4x5'):
    aot.find_topology('v5e:4x5')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['score', 'accumulate', 'apply', 'prefill', 'decode'])
def test_the_paper_preset_fits_16_chips_of_16_gib(tpu, name):
  config = read()
  mesh = sharding.make_mesh(tpu, **config.mesh)
  compiled = aot.compile_program(aot.programs(config, aot.SHAPES['qwen2.5-3b'], mesh)[name])
  assert compiled.argument < compiled.peak < compiled.total < 16 * GIB
  # A chip holds the whole vocabulary or its 16th; in neither form does it meet all tokens of a row.
  text = compiled.executable.as_text()
  shapes = {tuple(map(int, dims.split(','))) for dims in re.findall(r'\w+\[([\d,]+)\]', text)}
  assert not [s for s in shapes if {151936, 151936 // 16} & set(s) and config.learner.row_length in s]
