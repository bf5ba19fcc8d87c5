"""Passes over a batch: what a step without advantage does to an update, and what precision keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opid_jax import learner, optimizer, passes, settings, sharding, train
from opid_jax import policy as policies
from opid_jax.batch import Batch
from opid_jax.models import qwen
from opid_jax.types import TrainState

MODEL = qwen.QwenConfig('qwen3', 64, 32, 2, 4, 2, 8, 48, 1e4)
MESH = sharding.make_mesh(jax.devices()[:1])


def config(**changes):
  names = {key.replace('__', '.'): value for key, value in changes.items()}
  return settings.make({
    'rollout.max_prompt_tokens': 16, 'rollout.max_skill_tokens': 8, 'rollout.max_response_tokens': 8,
    'learner.row_length': 32, 'learner.slots_per_row': 16, 'learner.rows_per_call': 2,
    'learner.minibatch_steps': 8, 'optimizer.learning_rate': 1e-2, 'loss.kl_coef': 0.5, **names,
  })  # fmt: skip


def batch_of(rows):
  """Steps with the given (prompt length, response length), tokens by a fixed rule."""
  sequences = [
    (np.arange(p, dtype=np.int32) + 3 * n, (np.arange(t, dtype=np.int32) * 7 + n) % 64) for n, (p, t) in enumerate(rows)
  ]
  width = max(t for _, t in rows)
  mask = np.array([[1.0] * t + [0.0] * (width - t) for _, t in rows], np.float32)
  zeros = np.zeros(len(rows))
  return Batch(sequences, [], width, mask, zeros, zeros == 0, zeros.astype(np.int32), np.arange(len(rows)))


def updated(batch, advantage, c):
  policy = policies.Policy(MODEL, policies.make_options(c, MESH), None, '')
  params = jax.device_put(qwen.init(jax.random.key(0), MODEL), sharding.replicated(MESH))
  programs = train.make_programs(c, policy, train.state_shapes(c, params, MESH), MESH)
  state = train.init_state(c, params, MESH)
  old, _ = passes.score(programs, state.params, batch.sequences, batch.width, c, MESH)
  state, metrics = passes.improve(programs, state, batch, old, old + 0.5, advantage, c, MESH)
  return jax.device_get(state), metrics


def first(batch, n):
  return batch._replace(sequences=batch.sequences[:n], mask=batch.mask[:n])


def test_c07_steps_without_advantage_can_be_left_out_kl_and_denominator_included():
  batch = batch_of([(5, 4), (6, 3), (4, 4), (7, 2)])
  advantage = np.array([1.0, -1.0, 0.0, 0.0], np.float32)[:, None] * batch.mask
  both, metrics = updated(batch, advantage, config(loss__skip_zero_advantage=True))
  alone, _ = updated(first(batch, 2), advantage[:2], config())
  assert metrics['update/tokens'] == 7
  for a, b in zip(jax.tree.leaves(both.params), jax.tree.leaves(alone.params), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6)


def test_c07_by_default_the_kl_term_acts_on_them_as_in_the_paper():
  batch = batch_of([(5, 4), (6, 3)])
  with_kl, _ = updated(batch, np.zeros_like(batch.mask), config())
  without, metrics = updated(batch, np.zeros_like(batch.mask), config(loss__skip_zero_advantage=True))
  assert metrics['update/tokens'] == 0 and np.isfinite(metrics['update/grad_norm'])
  start = qwen.init(jax.random.key(0), MODEL)
  assert np.abs(with_kl.params['embed']['embedding'] - start['embed']['embedding']).max() > 1e-3
  # Nothing to train on: parameters and moments are as they were.
  np.testing.assert_array_equal(without.params['embed']['embedding'], start['embed']['embedding'])


@pytest.mark.parametrize('updates', [1000])
def test_a13_small_steps_add_up_in_the_float32_master_weights(updates):
  transform = optimizer.make(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, clip_norm=0.0)
  params = {'scale': jnp.ones((1,))}
  state = TrainState(jnp.zeros((), jnp.int32), params, transform.init(params))
  sums = learner.Sums.zeros()._replace(tokens=jnp.ones(()))

  @jax.jit
  def run(state):
    def one(_, state):
      # The gradient of a bfloat16 computation on the float32 weight.
      gradient = jax.grad(lambda p: -jnp.sum(p['scale'].astype(jnp.bfloat16)).astype(jnp.float32))(state.params)
      return learner.apply(state, gradient, sums, transform=transform, learning_rate=lambda step: 1e-6)[0]

    return jax.lax.fori_loop(0, updates, one, state)

  # A step of 1e-6 is 8.4 spacings of float32 at 1.0 and is rounded to 8: 1.00095. In bfloat16 it would stay 1.0.
  assert abs(float(run(state).params['scale'][0]) - 1.001) < 1e-4
