"""One attention call for every pass: the tree mask of packed rows, prompts and cached decoding alike."""

import chex
import jax
import jax.numpy as jnp

# Finite, so that a padding query (which sees nothing) gives finite garbage and no NaN gradient.
_HIDDEN = -1e30


def attend(q, k, v, column, visible_to, *, block=0):
  """Grouped-query attention under the tree mask.

  The query in column q sees the key in column k iff `k <= q < visible_to[k]`. Plain causal attention over a
  prompt of length n is `visible_to = n`; cached decoding is one query whose column is its position.

  Args:
    q: [B, Q, H, d] queries.
    k: [B, K, h, d] keys; h divides H.
    v: [B, K, h, d] values.
    column: [B, Q] int32, the column of each query.
    visible_to: [B, K] int32, last column, exclusive, that may see the key.
    block: number of queries worked on at a time, 0 for all. Exact for any value; a block's scores are
      recomputed in the backward pass, so memory is O(block * K) and not O(Q * K).

  Returns:
    [B, Q, H, d] in the dtype of `v`.

  Raises:
    AssertionError: at trace time, on a shape mismatch.
  """
  chex.assert_rank([q, k, v, column, visible_to], [4, 4, 4, 2, 2])
  chex.assert_equal_shape([k, v])
  chex.assert_shape(column, q.shape[:2])
  chex.assert_shape(visible_to, k.shape[:2])
  queries = q.shape[1]
  if not block or queries <= block:
    return _attend(q, k, v, column, visible_to)
  padding = -queries % block
  # Padded queries carry column -1: they see nothing and are cut off again.
  q_blocks = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
  c_blocks = jnp.pad(column, ((0, 0), (0, padding)), constant_values=-1)
  q_blocks = jnp.moveaxis(q_blocks.reshape(q.shape[0], -1, block, *q.shape[2:]), 1, 0)
  c_blocks = jnp.moveaxis(c_blocks.reshape(q.shape[0], -1, block), 1, 0)
  one = jax.checkpoint(lambda qc: _attend(qc[0], k, v, qc[1], visible_to))
  out = jnp.moveaxis(jax.lax.map(one, (q_blocks, c_blocks)), 0, 1)
  return out.reshape(q.shape[0], -1, *q.shape[2:])[:, :queries]


def _attend(q, k, v, column, visible_to):
  # Query heads that share a key head become rows of one plain matrix product: XLA's CPU backend takes several times
  # as long for the same sums over five axes.
  batch, queries, heads, dim = q.shape
  keys, key_heads = k.shape[1:3]
  grouped = (batch, key_heads, heads // key_heads, queries)
  merged = (batch, key_heads, -1)
  q = q.reshape(batch, queries, *grouped[1:3], dim).transpose(0, 2, 3, 1, 4).reshape(*merged, dim)
  scores = jnp.einsum('bhqd,bhdk->bhqk', q, k.transpose(0, 2, 3, 1), preferred_element_type=jnp.float32)
  key_column = jnp.arange(keys, dtype=jnp.int32)[None, None]
  seen = (key_column <= column[:, :, None]) & (column[:, :, None] < visible_to[:, None, :])
  scores = jnp.where(seen[:, None, None], scores.reshape(*grouped, keys) * dim**-0.5, _HIDDEN)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(*merged, keys)
  out = jnp.einsum('bhqk,bhkd->bhqd', weights, v.transpose(0, 2, 1, 3))
  return out.reshape(*grouped, dim).transpose(0, 3, 1, 2, 4).reshape(batch, queries, heads, dim)
