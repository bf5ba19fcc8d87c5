"""Device functions of training: score packed rows, add up gradients over calls, apply one optimizer update.

All are pure and unjitted here; `train.py` jits them with their donation and shardings.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from opid_jax import logprobs, losses
from opid_jax.models import qwen
from opid_jax.types import Packed, TrainState


class Targets(NamedTuple):
  """What the loss needs per scored slot, all [R, K] float32.

  Attributes:
    logp_old: log-probability under the policy that acted, nats.
    logp_ref: under the frozen reference; ignored when `kl_coef` is 0.
    advantage: of the token.
    weight: the aggregation as a per-token weight, 0 on padding; the loss is the sum of weight * l.
  """

  logp_old: Any
  logp_ref: Any
  advantage: Any
  weight: Any


class LossSettings(NamedTuple):
  """Hyperparameters of the loss; see `losses`."""

  clip_low: float
  clip_high: float
  dual_clip: float
  kl: str
  kl_coef: float
  entropy_coef: float
  temperature: float
  head_chunk: int


class Sums(NamedTuple):
  """Sums over the trained tokens (scored, and with a weight) of calls, with their denominator; float32 scalars.

  `policy`, `kl`, `entropy` are weighted as in the loss, so they add up to it; the `*_tokens` are counts.
  """

  policy: Any
  kl: Any
  entropy: Any
  entropy_total: Any
  kl_total: Any
  log_ratio_total: Any
  clipped_tokens: Any
  dual_clipped_tokens: Any
  tokens: Any
  ratio_gap: Any  # max |ratio - 1|; a maximum, not a sum.

  @classmethod
  def zeros(cls):
    return cls(*(jnp.zeros((), jnp.float32) for _ in cls._fields))

  def add(self, other):
    summed = jax.tree.map(jnp.add, self, other)
    return summed._replace(ratio_gap=jnp.maximum(self.ratio_gap, other.ratio_gap))


def score(params, packed: Packed, *, config, options, temperature, head_chunk):
  """Log-probabilities and entropies [R, K] float32 of the scored tokens, nats; garbage in unused slots.

  Embed, decode under the tree mask, gather the hidden states at `score_at`, and only those meet the head.
  """
  hidden = qwen.hidden(params, config, options, packed.tokens, packed.positions, packed.visible_to)
  hidden = jnp.take_along_axis(hidden, packed.score_at[..., None], axis=1)
  return logprobs.from_hidden(
    hidden, packed.target, lambda h: qwen.head(params, config, h, options), temperature=temperature, chunk=head_chunk
  )


def loss(params, packed: Packed, targets: Targets, *, config, options, settings: LossSettings):
  """Clipped surrogate + KL to the reference - entropy bonus, summed with the tokens' weights.

  Returns:
    (loss [], `Sums`).
  """
  chex.assert_equal_shape([packed.target, *targets])
  logp, entropy = score(
    params, packed, config=config, options=options, temperature=settings.temperature, head_chunk=settings.head_chunk
  )
  # A token without weight is masked out: it counts in no sum and cannot keep an empty update from being skipped.
  used = (packed.is_scored > 0) & (targets.weight > 0)
  # Unused slots get ratio 1 and KL 0 before any exponential, so that neither value nor gradient can be NaN there.
  logp = jnp.where(used, logp, 0.0)
  logp_old = jnp.where(used, targets.logp_old, 0.0)
  logp_ref = jnp.where(used, targets.logp_ref, 0.0)
  surrogate, info = losses.clipped_surrogate(
    logp,
    logp_old,
    targets.advantage,
    clip_low=settings.clip_low,
    clip_high=settings.clip_high,
    dual_clip=settings.dual_clip,
  )
  kl = losses.KL[settings.kl](logp, logp_ref) if settings.kl_coef else jnp.zeros_like(logp)
  entropy = jnp.where(used, entropy, 0.0)
  policy = jnp.sum(targets.weight * surrogate)
  kl_term = settings.kl_coef * jnp.sum(targets.weight * kl)
  entropy_term = -settings.entropy_coef * jnp.sum(targets.weight * entropy)
  log_ratio = logp - logp_old

  def count(flag):
    return jnp.sum(jnp.where(used, flag, False).astype(jnp.float32))

  sums = Sums(
    policy=policy,
    kl=kl_term,
    entropy=entropy_term,
    entropy_total=jnp.sum(entropy),
    kl_total=jnp.sum(kl),
    log_ratio_total=jnp.sum(log_ratio),
    clipped_tokens=count(info.is_clipped),
    dual_clipped_tokens=count(info.is_dual_clipped),
    tokens=jnp.sum(used.astype(jnp.float32)),
    ratio_gap=jnp.max(jnp.where(used, jnp.abs(info.ratio - 1), 0.0)),
  )
  return policy + kl_term + entropy_term, jax.lax.stop_gradient(sums)


def accumulate(params, gradient, sums: Sums, packed: Packed, targets: Targets, *, loss_fn: Callable):
  """Adds one call's gradient and sums; exact for any cut into calls, because the loss is a plain sum."""
  new, more = jax.grad(loss_fn, has_aux=True)(params, packed, targets)
  return jax.tree.map(jnp.add, gradient, new), sums.add(more)


def apply(state: TrainState, gradient, sums: Sums, *, transform, learning_rate: Callable):
  """One optimizer update; skipped, moments included, when no token was trained on or the gradient is not finite.

  Args:
    learning_rate: function of the training step (not of the number of updates), as the reference does it.

  Returns:
    (state with the same `step`, gradient norm before clipping). A NaN or infinite norm is the caller's sign to
    stop; the state is then unchanged.
  """
  norm = optax.tree.norm(gradient)
  updates, opt_state = transform.update(gradient, state.opt_state, state.params)
  rate = learning_rate(state.step)
  params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
  good = jnp.isfinite(norm) & (sums.tokens > 0)
  params, opt_state = jax.tree.map(
    lambda new, old: jnp.where(good, new, old), (params, opt_state), (state.params, state.opt_state)
  )
  return TrainState(state.step, params, opt_state), norm
