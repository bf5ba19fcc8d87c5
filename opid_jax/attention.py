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
  batch, queries, heads, dim = q.shape
  q = q.reshape(batch, queries, k.shape[2], heads // k.shape[2], dim)
  scores = jnp.einsum('bqhgd,bkhd->bhgqk', q, k, preferred_element_type=jnp.float32) * dim**-0.5
  key_column = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None]
  seen = (key_column <= column[:, :, None]) & (column[:, :, None] < visible_to[:, None, :])
  scores = jnp.where(seen[:, None, None], scores, _HIDDEN)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  out = jnp.einsum('bhgqk,bkhd->bqhgd', weights, v)
  return out.reshape(batch, queries, heads, dim)
