import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared import golden_cases

from opid_jax import losses

PPO = {'clip_low': 0.2, 'clip_high': 0.2, 'dual_clip': 3.0}
KL_NAMES = {'k1': 'k1', 'abs': 'abs', 'k2': 'mse', 'k3': 'low_var_kl'}


def array(x):
  return np.array(x, np.float32)


def pad(x, shape=(8, 8)):
  """To one common shape, so that the cases share a compilation."""
  x = array(x)
  return np.pad(x, [(0, want - have) for want, have in zip(shape, x.shape, strict=True)])


@functools.partial(jax.jit, static_argnames='dual_clip')
def weighted_loss(logp, old, advantage, weight, clip_low, clip_high, dual_clip):
  def loss(logp):
    token, info = losses.clipped_surrogate(
      logp, old, advantage, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return jnp.sum(weight * token), info

  return jax.value_and_grad(loss, has_aux=True)(logp)


@pytest.mark.parametrize('case', golden_cases('policy_loss'))
def test_policy_loss_and_gradient_equal_the_reference(case):
  mask, norm_length = pad(case['mask']), len(case['mask'][0])
  weight = losses.token_weights(mask, aggregation=case['loss_agg_mode'], norm_length=norm_length)
  logp, old, advantage = (pad(case[name]) for name in ('log_prob', 'old_log_prob', 'advantages'))
  (value, info), gradient = weighted_loss(
    logp, old, advantage, weight, case['clip_ratio_low'], case['clip_ratio_high'], case['clip_ratio_c']
  )
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()
  if case['loss'] == 'NaN':  # An empty row under seq-mean-token-mean: skipped here.
    assert value == pytest.approx(np.sum(weight * pad(loss_per_token(case))), rel=1e-5)
    return
  assert value == pytest.approx(case['loss'], rel=1e-5, abs=1e-6)
  # The reference's gradient is NaN where exp overflows; there the right one is 0, the clip is active.
  expected = np.nan_to_num(pad(case['grad_log_prob']))
  np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
  count = max(mask.sum(), 1)
  assert np.sum(info.is_clipped * mask) / count == pytest.approx(case['clipfrac'], abs=1e-6)
  assert np.sum(info.is_dual_clipped * mask) / count == pytest.approx(case['clipfrac_lower'], abs=1e-6)
  assert np.sum((old - logp) * mask) / count == pytest.approx(case['ppo_kl'], rel=1e-5, abs=1e-6)


def loss_per_token(case):
  """The definition, written out for one token at a time."""
  out = np.zeros(array(case['log_prob']).shape)
  low, high = 1 - case['clip_ratio_low'], 1 + case['clip_ratio_high']
  for at in np.ndindex(out.shape):
    r = np.exp(array(case['log_prob'])[at] - array(case['old_log_prob'])[at])
    a = array(case['advantages'])[at]
    out[at] = max(-a * r, -a * min(max(r, low), high))
    if a < 0:
      out[at] = min(out[at], -a * case['clip_ratio_c'])
  return out


def test_before_the_first_update_the_ratio_is_one():
  logp, advantage = array([[-1.3, -0.2, -7.0]]), array([[2.0, -1.0, 0.5]])
  loss, info = losses.clipped_surrogate(logp, logp, advantage, **PPO)
  np.testing.assert_array_equal(loss, -advantage)
  np.testing.assert_array_equal(info.ratio, 1.0)
  assert not info.is_clipped.any()
  np.testing.assert_array_equal(losses.kl_k3(logp, logp), 0.0)


def test_no_gradient_flows_through_old_scores_or_advantages():
  def loss(old, advantage):
    return losses.clipped_surrogate(array([-1.0]), old, advantage, **PPO)[0].sum()

  for gradient in jax.grad(loss, argnums=(0, 1))(array([-1.1]), array([2.0])):
    assert not gradient.any()


@pytest.mark.parametrize('advantage', [-1.0, 0.0, 1.0])
@pytest.mark.parametrize('dual_clip', [0.0, 3.0])
def test_surrogate_is_finite_for_any_ratio(advantage, dual_clip):
  difference = array([-200, -90, -20, 0, 20, 90, 200])

  def loss(logp):
    keywords = PPO | {'dual_clip': dual_clip}
    return losses.clipped_surrogate(logp, jnp.zeros(7), jnp.full(7, advantage), **keywords)[0].sum()

  value, gradient = jax.value_and_grad(loss)(difference)
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()


def test_shapes_that_differ_are_refused():
  with pytest.raises(AssertionError):
    losses.clipped_surrogate(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.zeros(2), **PPO)


@functools.partial(jax.jit, static_argnames='name')
def kl_and_gradient(logp, ref, name):
  return jax.vmap(jax.value_and_grad(losses.KL[name]))(logp, ref)


@pytest.mark.parametrize('case', golden_cases('kl', lambda c: 'out' in c))
@pytest.mark.parametrize('name', list(KL_NAMES))
def test_kl_and_its_gradient_equal_the_reference(case, name):
  logp, ref = pad(case['log_prob'], (8,)), pad(case['ref_log_prob'], (8,))
  value, gradient = kl_and_gradient(logp, ref, name)
  np.testing.assert_allclose(value, pad(case['out'][KL_NAMES[name]], (8,)), rtol=1e-5, atol=1e-6)
  size = len(case['log_prob'])
  expected = np.nan_to_num(array(case['grad'][KL_NAMES[name]]))  # NaN where the reference's exp overflows
  np.testing.assert_allclose(gradient[:size], expected, rtol=1e-4, atol=1e-6)


def test_k3_is_finite_and_never_negative():
  difference = array([-200, -20, 0, 20, 90, 200, 1e-7, -1e-7, 3e-5, 120])
  value, gradient = jax.vmap(jax.value_and_grad(losses.kl_k3))(jnp.zeros(10), difference)
  assert (value >= 0).all()
  assert value[2] == 0
  assert np.isfinite(value).all()
  assert np.isfinite(gradient).all()
  beyond = np.abs(difference) >= 20
  np.testing.assert_array_equal(gradient[beyond], 0)  # no pull, as documented


@pytest.mark.parametrize('case', golden_cases('agg_loss'))
@pytest.mark.parametrize('aggregation', losses.AGGREGATIONS)
def test_weighted_sum_equals_the_reference_aggregation(case, aggregation):
  loss, mask = array(case['loss_mat']), array(case['mask'])
  weight = losses.token_weights(mask, aggregation=aggregation, norm_length=mask.shape[1])
  expected = case['out'][aggregation]
  full = mask.any(axis=1)
  if not full.all() and aggregation == 'seq-mean-token-sum':
    expected *= len(mask) / max(full.sum(), 1)  # The reference divides by empty rows, too.
  if not full.all() and aggregation == 'seq-mean-token-mean':
    assert expected == 'NaN'
    means = [np.mean(row[m > 0]) for row, m in zip(loss, mask, strict=True) if m.any()]
    expected = np.mean(means) if means else 0.0
  assert np.sum(weight * loss) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize('aggregation', losses.AGGREGATIONS)
def test_empty_rows_and_padding_change_nothing(aggregation):
  mask = np.array([[1, 1, 0], [1, 0, 0]])
  wide = np.zeros((3, 6))
  wide[:2, :3] = mask
  weight = losses.token_weights(mask, aggregation=aggregation, norm_length=3.0)
  wider = losses.token_weights(wide, aggregation=aggregation, norm_length=3.0)
  np.testing.assert_array_equal(wider[:2, :3], weight)
  assert not wider[2].any()


@pytest.mark.parametrize('aggregation', losses.AGGREGATIONS)
def test_a_batch_without_tokens_has_zero_weight(aggregation):
  assert not losses.token_weights(np.zeros((2, 3)), aggregation=aggregation, norm_length=3.0).any()


def test_micro_batches_add_up_to_the_token_mean():
  mask = np.array([[1] + [0] * 8, [1] * 9])
  loss = np.where(mask, [[2.0], [1.0]], 0)
  weight = losses.token_weights(mask, aggregation='token-mean')
  first, second = (weight * loss).sum(axis=1)
  assert first + second == pytest.approx(1.1)  # the mean of micro-batch means would be 1.5


@pytest.mark.parametrize('aggregation', losses.AGGREGATIONS)
def test_leaving_out_a_group_leaves_the_other_groups_own_weights(aggregation):
  mask = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
  alone = losses.token_weights(mask[1:], aggregation=aggregation, norm_length=3.0)
  left_out = losses.token_weights(mask * [[0], [1], [1]], aggregation=aggregation, norm_length=3.0)
  np.testing.assert_array_equal(left_out[1:], alone)


def test_only_response_tokens_have_weight():
  # [prompt p p | action a a E | observation o o | action b E]
  mask = np.array([[0, 0, 1, 1, 1, 0, 0, 1, 1]])
  weight = losses.token_weights(mask, aggregation='token-mean')
  np.testing.assert_array_equal(weight > 0, mask > 0)
  assert weight.max() == pytest.approx(1 / 5)


@pytest.mark.parametrize(
  'keywords',
  [{'aggregation': 'mean'}, {'aggregation': 'seq-mean-token-sum-norm'}],
  ids=['unknown', 'no length'],
)
def test_bad_aggregations_are_refused(keywords):
  with pytest.raises(ValueError, match='aggregation|norm_length'):
    losses.token_weights(np.ones((1, 2)), **keywords)


@pytest.mark.parametrize('case', golden_cases('sequence_layout', lambda c: 'responses' in c))
def test_the_mask_ends_with_the_first_end_token(case):
  ends = case['eos'] if isinstance(case['eos'], list) else [case['eos']]
  np.testing.assert_array_equal(losses.response_mask(case['responses'], ends), case['response_mask'])


def test_one_wrong_token_shows_in_the_gap():
  logp, mask = np.zeros((10, 10)), np.ones((10, 10))
  sampled = np.zeros((10, 10))
  band = {'clip_low': 0.2, 'clip_high': 0.2}
  assert losses.score_gap(logp, sampled, mask, **band) == {'mean': 0, 'p99': 0, 'max': 0, 'outside': 0}
  sampled[3, 4] = -5.0
  gap = losses.score_gap(logp, sampled, mask, **band)
  assert (gap['mean'], gap['max'], gap['outside']) == pytest.approx((0.05, 5.0, 0.01))


@pytest.mark.parametrize('ratio, outside', [(0.79, 1), (0.81, 0), (1.19, 0), (1.21, 1)])
def test_the_clip_band_is_one_of_ratios(ratio, outside):
  gap = losses.score_gap(np.log([[ratio]]), np.zeros((1, 1)), np.ones((1, 1)), clip_low=0.2, clip_high=0.2)
  assert gap['outside'] == outside


def test_no_tokens_have_no_gap():
  nothing = np.zeros((1, 2))
  assert losses.score_gap(nothing, nothing, nothing, clip_low=0.2, clip_high=0.2)['max'] == 0
