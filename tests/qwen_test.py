import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from opid_jax.models import qwen

FAMILIES = {'qwen3 tied': tiny.QWEN3, 'qwen2 untied': tiny.QWEN2}
PLAIN = qwen.Options()
OTHER_WAYS = [qwen.Options(remat='layer', attention_block=5), qwen.Options(remat='attention')]
TOKENS = np.stack([np.concatenate(pair) for pair in tiny.make_sequences([(6, 6), (6, 6)])])


@pytest.fixture(params=FAMILIES)
def config(request):
  return FAMILIES[request.param]


@functools.cache
def logits_of(config, options=PLAIN):
  return jax.jit(lambda params, tokens: qwen.logits(params, config, tokens, options))


def test_no_position_sees_what_comes_later(config):
  params, run = tiny.make_params(config), logits_of(config)
  before = run(params, TOKENS)
  changed = TOKENS.copy()
  changed[:, 7] = (changed[:, 7] + 1) % 64
  after = run(params, changed)
  np.testing.assert_array_equal(before[:, :7], after[:, :7])
  assert (np.abs(before[:, 7:] - after[:, 7:]).max(axis=-1) > 1e-3).all()


def test_every_parameter_matters(config):
  params = tiny.make_params(config)

  @jax.jit
  def gradient(params):
    return jax.grad(lambda p: jnp.sum(jnp.tanh(qwen.logits(p, config, TOKENS)[:, -1])))(params)

  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient(params)))


@pytest.mark.parametrize('options', OTHER_WAYS)
def test_ways_to_run_change_no_value_and_no_gradient(options):
  params = tiny.make_params()

  def run(options):
    def value(p):
      return jnp.sum(jnp.sin(qwen.logits(p, tiny.QWEN3, TOKENS, options)))

    return jax.jit(jax.value_and_grad(value))(params)

  for a, b in zip(jax.tree.leaves(run(options)), jax.tree.leaves(plain_gradient()), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@functools.cache
def plain_gradient():
  return jax.jit(
    jax.value_and_grad(lambda p: jnp.sum(jnp.sin(qwen.logits(p, tiny.QWEN3, TOKENS))))
  )(tiny.make_params())


def test_bfloat16_stays_near_float32():
  config = tiny.QWEN3
  params = tiny.make_params(config)
  low, high = (logits_of(config, qwen.Options(dtype=dtype))(params, TOKENS) for dtype in ('bfloat16', 'float32'))
  assert low.dtype == high.dtype == jnp.float32
  assert np.abs(low - high).max() < 0.05 * np.abs(high).max()


def test_tied_head_is_the_embedding_and_the_other_is_not():
  tied, untied = (
    jax.eval_shape(functools.partial(qwen.init, config=config), jax.random.key(0)) for config in FAMILIES.values()
  )
  assert 'head' not in tied and untied['head']['kernel'].shape == (32, 64)
  per_layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32
  assert qwen.count_parameters(tied) == 64 * 32 + 32 + 2 * (per_layer + 2 * 8)
  assert qwen.count_parameters(untied) == 2 * 64 * 32 + 32 + 2 * (per_layer + 32 + 2 * 16)


def test_head_dim_need_not_be_width_over_heads():
  config = dataclasses.replace(tiny.QWEN3, head_dim=12)
  shapes = jax.eval_shape(functools.partial(qwen.init, config=config), jax.random.key(0))
  assert shapes['layers']['attn']['q']['kernel'].shape == (2, 32, 48)
  assert shapes['layers']['attn']['o']['kernel'].shape == (2, 48, 32)
  assert np.isfinite(logits_of(config)(tiny.make_params(config), TOKENS)).all()


def test_only_differences_of_positions_matter():
  # RoPE: packed rows may stand anywhere, a sequence's own positions need not start at 0.
  params, near = tiny.make_params(), np.broadcast_to(np.arange(12, dtype=np.int32), (2, 12))
  run = jax.jit(lambda position: qwen.hidden(
    params, tiny.QWEN3, qwen.Options(), TOKENS, position, np.full((2, 12), 12, np.int32)
  ))  # fmt: skip
  np.testing.assert_allclose(run(near), run(near + 300), atol=2e-3)
  assert np.abs(run(near) - run(2 * near)).max() > 0.1


def test_positions_above_256_stay_apart_in_bfloat16():
  # bfloat16 has no 257: with angles in it, neighbours would get one position.
  config = dataclasses.replace(tiny.QWEN3, num_layers=1)
  params, options = tiny.make_params(config), qwen.Options(dtype='bfloat16')

  def run(distance):
    position = np.array([[301 - distance, 301]], np.int32)
    return qwen.hidden(params, config, options, TOKENS[:1, :2], position, np.full((1, 2), 2, np.int32))[0, 1]

  run = jax.jit(run, static_argnums=0)
  assert np.abs(run(1).astype(jnp.float32) - run(2).astype(jnp.float32)).max() > 0.05


def test_plain_and_linear_frequencies_are_powers_of_theta():
  frequencies, factor = qwen.rope_frequencies(tiny.QWEN3)
  np.testing.assert_allclose(frequencies, [1, 0.1, 0.01, 0.001], rtol=1e-6)
  assert factor == 1
  slower, _ = qwen.rope_frequencies(dataclasses.replace(tiny.QWEN3, rope_scaling=('linear', 4.0)))
  np.testing.assert_allclose(slower, frequencies / 4, rtol=1e-6)


@pytest.mark.parametrize(
  'scaling', [('llama3', 8.0, 1.0, 4.0, 64), ('yarn', 4.0, 64, 32.0, 1.0, 0.1 * math.log(4) + 1)]
)
def test_scaled_frequencies_keep_the_fast_and_stretch_the_slow(scaling):
  config = dataclasses.replace(tiny.QWEN3, head_dim=32, rope_scaling=scaling)
  plain, _ = qwen.rope_frequencies(dataclasses.replace(config, rope_scaling=()))
  scaled, factor = qwen.rope_frequencies(config)
  stretch = plain / scaled
  assert stretch[0] == pytest.approx(1) and stretch[-1] == pytest.approx(scaling[1])
  assert (np.diff(stretch) > -1e-4).all()
  assert factor == (scaling[-1] if scaling[0] == 'yarn' else 1)


def test_unknown_scaling_is_refused():
  with pytest.raises(ValueError, match="'dynamic' is not supported. Supported: linear, llama3, yarn"):
    qwen.rope_frequencies(dataclasses.replace(tiny.QWEN3, rope_scaling=('dynamic', 2.0)))
