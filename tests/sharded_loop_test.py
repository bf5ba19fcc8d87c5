"""The whole loop on four simulated devices gives one device's numbers, and compiles each program once."""

import collections
import functools
import logging
import re
from typing import NamedTuple

import jax
import numpy as np
import pytest
import tiny

from opid_jax import layout, passes, policy, sampling, settings, sharding, train
from opid_jax.batch import Batch

MESHES = {'one': (1, {}), 'fsdp': (4, {'fsdp': 4}), 'fsdp_tensor': (4, {'fsdp': 2, 'tensor': 2})}
NUM_STEPS = 3
CONFIG = settings.make({
  'num_steps': NUM_STEPS,
  'rollout.slots': 8,
  'rollout.prefill_rows': 4,
  'rollout.decode_chunk': 3,
  'rollout.bucket': 10,
  'rollout.max_prompt_tokens': 10,
  'rollout.max_response_tokens': 6,
  'rollout.temperature': 0.8,
  'loss.kl_coef': 0.1,
  'loss.entropy_coef': 0.01,
  'optimizer.learning_rate': 1e-2,
  'optimizer.eps': 1e-3,  # Tames AdamW's division: a gradient of pure rounding must not become a full step.
  'optimizer.warmup_steps': 0,
  'learner.minibatch_steps': 6,
  'learner.row_length': 20,
  'learner.slots_per_row': 12,
  'learner.rows_per_call': 4,
  'learner.head_chunk': 5,
  'model.remat': 'layer',
})


class Ends:
  """All that the loop here reads of a tokenizer."""

  end_ids = (2, 3, 5, 7)


class Step(NamedTuple):
  """What one training step left behind, on the host."""

  tokens: list
  logp_sampled: list
  logp_old: np.ndarray
  logp_ref: np.ndarray
  metrics: dict
  params: dict


def sample(sampler, params, prompts):
  sampler.use(params, 0.0)
  for i, prompt in enumerate(prompts):
    sampler.submit(sampling.Request(i, prompt, (0, i), CONFIG.rollout.max_response_tokens))
  found = {}
  while len(found) < len(prompts):
    found |= {response.id: response for response in sampler.poll()}
  return [found[i] for i in range(len(prompts))]


def batch_of(prompts, responses) -> Batch:
  width, n = max(len(r.tokens) for r in responses), len(prompts)
  mask = layout.stack_responses([np.ones(len(r.tokens)) for r in responses], width, np.float32)
  sequences = [(prompt, r.tokens) for prompt, r in zip(prompts, responses, strict=True)]
  return Batch(sequences, [], width, mask, *[np.zeros(n, np.float32)] * 4)


def loop(model, count, sizes, compiled):
  """Three training steps; `compiled` gets the names of what is compiled, one list per step."""
  mesh = sharding.make_mesh(jax.devices()[:count], **sizes)
  agent = policy.Policy(model, policy.make_options(CONFIG, mesh), Ends(), '')
  params = tiny.make_params(model)
  params = jax.tree.map(jax.device_put, params, sharding.shard_tree(params, mesh))
  reference = train.copy_reference(CONFIG, params, mesh)
  state = train.init_state(CONFIG, params, mesh)
  programs = train.make_programs(CONFIG, agent, train.state_shapes(CONFIG, params, mesh), mesh)
  sampler = policy.make_sampler(agent, params, mesh, CONFIG.rollout, max_prompt=10, max_response=6)
  del params
  for step in range(NUM_STEPS):
    compiled.append([])
    # Other lengths and another number of rows in every step.
    lengths = np.random.default_rng(step).integers(1, 11, 11 + 2 * step)
    prompts = [prompt for prompt, _ in tiny.make_sequences([(n, 0) for n in lengths], seed=step)]
    responses = sample(sampler, state.params, prompts)
    batch = batch_of(prompts, responses)
    logp_old, _ = passes.score(programs, state.params, batch.sequences, batch.width, CONFIG, mesh)
    logp_ref, _ = passes.score(programs, reference, batch.sequences, batch.width, CONFIG, mesh)
    advantage = np.random.default_rng(step).normal(size=batch.mask.shape).astype(np.float32)
    state, metrics = passes.improve(programs, state, batch, logp_old, logp_ref, advantage, CONFIG, mesh)
    state = state._replace(step=state.step + 1)
    yield Step(
      [r.tokens.tolist() for r in responses], [r.logp for r in responses], logp_old, logp_ref, metrics,
      jax.tree.map(np.asarray, state.params),
    )  # fmt: skip


class Names(logging.Handler):
  """Collects the names in JAX's lines about compilations."""

  def __init__(self, steps):
    super().__init__()
    self.steps = steps

  def emit(self, record):
    found = re.match(r'Compiling (?:jit\()?([^ )]+)', record.getMessage())
    if found and self.steps:
      self.steps[-1].append(found.group(1))


@functools.cache
def run(name, model):
  compiled = []
  handler = Names(compiled)
  logger = logging.getLogger('jax._src.interpreters.pxla')
  logger.addHandler(handler)
  try:
    with jax.log_compiles():
      return list(loop(model, *MESHES[name], compiled)), compiled
  finally:
    logger.removeHandler(handler)


@pytest.mark.parametrize(
  ('name', 'model'),
  [
    ('fsdp', tiny.QWEN3),
    ('fsdp_tensor', tiny.QWEN3),
    pytest.param('fsdp', tiny.QWEN2, marks=pytest.mark.slow),
    pytest.param('fsdp_tensor', tiny.QWEN2, marks=pytest.mark.slow),
  ],
)  # fmt: skip
def test_four_devices_give_the_numbers_of_one(name, model):
  for step, (got, expected) in enumerate(zip(run(name, model)[0], run('one', model)[0], strict=True)):
    assert got.tokens == expected.tokens, f'step {step}'
    for a, b in zip(got.logp_sampled, expected.logp_sampled, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-4)
    np.testing.assert_allclose(got.logp_old, expected.logp_old, atol=1e-4)
    np.testing.assert_allclose(got.logp_ref, expected.logp_ref, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got.params, expected.params)
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize('name', MESHES)
def test_each_program_is_compiled_once(name):
  _, (first, *later) = run(name, tiny.QWEN3)
  assert later == [[]] * (NUM_STEPS - 1)
  counts = collections.Counter(first)
  programs = ('prefill', 'decode', 'score', 'accumulate', 'apply')
  assert {program: counts[program] for program in programs} == dict.fromkeys(programs, 1)
  assert max(counts.values()) == 1, counts


def test_the_loop_trains_and_leaves_the_reference_alone():
  steps, _ = run('one', tiny.QWEN3)
  assert np.abs(steps[0].logp_old - steps[0].logp_ref).max() == 0  # The same policy, before the first update.
  assert np.abs(steps[-1].logp_old - steps[-1].logp_ref).max() > 0.01
  assert all(step.metrics['update/first_ratio_gap'] < 1e-5 for step in steps)
  assert all(step.metrics['update/count'] > 1 for step in steps)
