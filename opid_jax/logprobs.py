"""Response log-probabilities from hidden states, without ever holding logits for whole sequences."""

import chex
import jax
import jax.numpy as jnp


def from_hidden(hidden, target, head, *, temperature=1.0, chunk=0):
  """Log-probability of each target and the entropy of its distribution.

  log p(target) = logits[target] / T - logsumexp(logits / T), in float32. The vocabulary axis exists for `chunk`
  slots of a row at a time, in the forward and (recomputed) in the backward pass.

  Args:
    hidden: [R, K, D] hidden states that predict the targets.
    target: [R, K] int32 token ids.
    head: function [R, k, D] -> [R, k, V] float32 logits.
    temperature: sampling temperature T the policy acts at; > 0.
    chunk: slots at a time, 0 for all.

  Returns:
    (logp, entropy), both [R, K] float32, nats.

  Raises:
    AssertionError: at trace time, on a shape mismatch.
  """
  chex.assert_rank([hidden, target], [3, 2])
  chex.assert_equal_shape_prefix([hidden, target], 2)
  rows, slots, width = hidden.shape
  chunk = min(chunk or slots, slots)
  padding = -slots % chunk

  @jax.checkpoint
  def score(pair):
    h, t = pair
    logits = head(h)
    # Centred before anything else: differences of large logits would lose the digits of a small entropy.
    logits = (logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))) / temperature
    # A masked sum instead of a gather: it partitions along a sharded vocabulary and fuses.
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    chosen = jnp.sum(jnp.where(ids == t[..., None], logits, 0.0), axis=-1)
    logz = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))  # At least 0: the largest logit is 0.
    entropy = logz - jnp.sum(jnp.exp(logits - logz[..., None]) * logits, axis=-1)
    return chosen - logz, entropy

  h = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0))).reshape(rows, -1, chunk, width)
  t = jnp.pad(target, ((0, 0), (0, padding))).reshape(rows, -1, chunk)
  logp, entropy = jax.lax.map(score, (jnp.moveaxis(h, 1, 0), jnp.moveaxis(t, 1, 0)))
  return tuple(jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :slots] for x in (logp, entropy))
