"""Losses of a token, and the weights that aggregate them.

Every loss is elementwise; how tokens are averaged is a weight per token, computed on the host. The loss on
the device is then one sum, and sums over micro-batches, packed rows or devices add up to the same number.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

MAX_LOG_RATIO = 20.0  # e^20 is about 5e8: far outside every clip band, far inside float32.
MAX_K3 = 10.0  # The reference's bound on the k3 estimate of one token, nats.

AGGREGATIONS = ('token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum-norm')


class SurrogateInfo(NamedTuple):
  """What the clipping did, per token; no gradient flows through it.

  Attributes:
    ratio: pi(y) / pi_old(y), bounded by e^+-20.
    is_clipped: the clipped term is the larger loss.
    is_dual_clipped: the dual clip bounds the loss of a token with negative advantage.
  """

  ratio: Any
  is_clipped: Any
  is_dual_clipped: Any


def clipped_surrogate(logp, logp_old, advantage, *, clip_low, clip_high, dual_clip):
  """PPO's clipped policy loss with a second bound for negative advantages.

  With r = exp(logp - logp_old): max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), where A < 0 at most -A c.
  See "PPO" (https://arxiv.org/abs/1707.06347), Eq. 7, and dual-clip PPO (https://arxiv.org/abs/1912.09729),
  Eq. 5.

  The log-ratio is clamped to +-20 before `exp`. Beyond that bound the gradient is zero, which changes nothing
  where a clip is active and avoids the reference's NaN gradient above 88.7 (0 * inf behind its clip).

  Args:
    logp: log-probabilities under the policy being updated, nats, any shape.
    logp_old: under the policy that acted, same shape.
    advantage: same shape.
    clip_low: how far the ratio may fall below 1.
    clip_high: how far it may rise above 1.
    dual_clip: c > 1, or 0 for no second bound.

  Returns:
    (loss of each token, `SurrogateInfo`), in the shape of `logp`.

  Raises:
    AssertionError: at trace time, if the shapes disagree.
  """
  chex.assert_equal_shape([logp, logp_old, advantage])
  logp_old, advantage = jax.lax.stop_gradient((logp_old, advantage))
  ratio = jnp.exp(jnp.clip(logp - logp_old, -MAX_LOG_RATIO, MAX_LOG_RATIO))
  plain = -advantage * ratio
  clipped = -advantage * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  loss = jnp.maximum(plain, clipped)
  is_dual_clipped = jnp.zeros(loss.shape, bool)
  if dual_clip:
    bound = -advantage * dual_clip
    is_dual_clipped = (advantage < 0) & (loss > bound)
    loss = jnp.where(advantage < 0, jnp.minimum(loss, bound), loss)
  return loss, SurrogateInfo(jax.lax.stop_gradient(ratio), clipped > plain, is_dual_clipped)


def kl_k1(logp, logp_ref):
  """log pi - log pi_ref: unbiased, of either sign."""
  return logp - logp_ref


def kl_abs(logp, logp_ref):
  """|log pi - log pi_ref|, with gradient 0 where they are equal (that of `jnp.abs` is 1)."""
  return jnp.maximum(logp - logp_ref, logp_ref - logp)


def kl_k2(logp, logp_ref):
  """(log pi - log pi_ref)^2 / 2."""
  return 0.5 * jnp.square(logp - logp_ref)


def kl_k3(logp, logp_ref):
  """exp(d) - 1 - d with d = log pi_ref - log pi: unbiased for KL(pi || pi_ref) under pi, never negative.

  See "Approximating KL Divergence" by J. Schulman (http://joschu.net/blog/kl-approx.html). Bounded by 10 as
  in the reference: beyond (d above 2.6 or below -11) the value is 10 and the gradient zero. The exponent is
  clamped as well, so both stay finite for any input; at d = 0 both are exactly 0.

  Args:
    logp: log-probabilities under the policy being updated, nats, any shape.
    logp_ref: under the frozen reference, same shape.

  Returns:
    In the shape of `logp`, nats.
  """
  d = jnp.clip(logp_ref - logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  # expm1: exp(d) - 1 - d loses everything below 1e-7 in float32, and its sign.
  return jnp.clip(jnp.expm1(d) - d, 0.0, MAX_K3)


KL = {'k1': kl_k1, 'abs': kl_abs, 'k2': kl_k2, 'k3': kl_k3}


def token_weights(mask, *, aggregation: str, norm_length: float = 0.0) -> np.ndarray:
  """The weight of each token, so that sum(weight * loss) is the aggregated loss. NumPy, on the host.

  With n_i tokens in sequence i and M sequences that have any:
    token-mean               1 / sum_j n_j
    seq-mean-token-sum       1 / M
    seq-mean-token-mean      1 / (M n_i)
    seq-mean-token-sum-norm  1 / norm_length

  Sequences without a token neither count nor divide (the reference counts them, and returns NaN for
  seq-mean-token-mean), so dropping them changes nothing. `norm_length` is a constant of the run; the
  reference takes the width of the current padding, so that padding changes its loss.

  Args:
    mask: [N, T] 1 on the tokens to train on, of everything that one optimizer update sees.
    aggregation: one of `AGGREGATIONS`.
    norm_length: tokens; needed by seq-mean-token-sum-norm only.

  Returns:
    [N, T] float32, zero off the mask and everywhere if no token is trained on.

  Raises:
    ValueError: for an unknown aggregation or a missing `norm_length`.
  """
  if aggregation not in AGGREGATIONS:
    raise ValueError(f'Unknown aggregation {aggregation!r}. Available: {", ".join(AGGREGATIONS)}.')
  mask = np.asarray(mask) > 0
  lengths = mask.sum(axis=1)
  if not lengths.any():
    return np.zeros(mask.shape, np.float32)
  if aggregation == 'token-mean':
    row = np.full(len(mask), 1.0 / lengths.sum())
  elif aggregation == 'seq-mean-token-sum-norm':
    if norm_length <= 0:
      raise ValueError(f'{aggregation} needs a norm_length above 0, found {norm_length}.')
    row = np.full(len(mask), 1.0 / norm_length)
  else:
    row = np.full(len(mask), 1.0 / np.count_nonzero(lengths))
    if aggregation == 'seq-mean-token-mean':
      row = row / np.maximum(lengths, 1)
  return (row[:, None] * mask).astype(np.float32)


def score_gap(logp, logp_sampled, mask, *, clip_low: float, clip_high: float) -> dict[str, float]:
  """How far two scorings of the same tokens are apart, for example trainer and sampler. NumPy, on the host.

  A mean near 0 hides large gaps of single tokens, hence the tail and the share that PPO would clip.

  Args:
    logp: [N, T] log-probabilities, nats.
    logp_sampled: [N, T] the other ones.
    mask: [N, T] 1 on response tokens.
    clip_low: how far the ratio may fall below 1.
    clip_high: how far it may rise above 1.

  Returns:
    `mean`, `p99` and `max` of |difference| in nats, and `outside`, the share of tokens whose ratio is out of
    the clip band; zeros without tokens.
  """
  difference = (np.asarray(logp, np.float64) - np.asarray(logp_sampled, np.float64))[np.asarray(mask) > 0]
  if not difference.size:
    return {'mean': 0.0, 'p99': 0.0, 'max': 0.0, 'outside': 0.0}
  gap = np.abs(difference)
  outside = (difference < np.log1p(-clip_low)) | (difference > np.log1p(clip_high))
  return {
    'mean': float(gap.mean()),
    'p99': float(np.quantile(gap, 0.99)),
    'max': float(gap.max()),
    'outside': float(outside.mean()),
  }


def response_mask(tokens, end_tokens) -> np.ndarray:
  """1 up to and including the first end token, everywhere if there is none. NumPy, on the host.

  Args:
    tokens: [N, T] int, sampled.
    end_tokens: ids that end a turn.

  Returns:
    [N, T] float32.
  """
  is_end = np.isin(np.asarray(tokens), list(end_tokens))
  return (np.cumsum(is_end, axis=1) - is_end == 0).astype(np.float32)
