import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opid_jax import attention

# One compilation per shape instead of one per operation.
attend = jax.jit(attention.attend, static_argnames='block')

# One row as a prefix tree: a shared stem (columns 0-2), two branches (3-5 and 6-8), one of them with a twig of its
# own (8 is seen by itself only), and padding that nobody sees.
TREE = [9, 9, 9, 6, 6, 6, 9, 9, 9, 0, 0]
# The same columns as plain packing: two sequences of 5 and 4, then padding.
PACKED = [5, 5, 5, 5, 5, 9, 9, 9, 9, 0, 0]


def draw(rows, keys, *, heads=4, kv_heads=2, dim=3, queries=None, seed=0):
  rng = np.random.default_rng(seed)
  shapes = [(rows, queries or keys, heads, dim), (rows, keys, kv_heads, dim), (rows, keys, kv_heads, dim)]
  return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def columns(rows, length):
  return np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))


def loop(q, k, v, column, visible_to):
  """The definition, one query and one key at a time; a query that sees nothing gives NaN."""
  q, k, v = (x.astype(np.float64) for x in (q, k, v))
  out = np.full(q.shape, np.nan)
  per_kv = q.shape[2] // k.shape[2]
  for b, i, h in np.ndindex(q.shape[:3]):
    keys = [j for j in range(k.shape[1]) if j <= column[b, i] < visible_to[b, j]]
    if keys:
      score = np.array([q[b, i, h] @ k[b, j, h // per_kv] for j in keys]) / np.sqrt(q.shape[-1])
      weight = np.exp(score - score.max())
      out[b, i, h] = weight @ np.array([v[b, j, h // per_kv] for j in keys]) / weight.sum()
  return out


def assert_equal_where_visible(got, expected):
  seen = ~np.isnan(expected)
  np.testing.assert_allclose(np.asarray(got)[seen], expected[seen], atol=1e-5)
  assert np.isfinite(np.asarray(got)).all()


@pytest.mark.parametrize('block', [0, 1, 4, 11, 64])
def test_tree_packing_and_padding_equal_the_loop(block):
  q, k, v = draw(2, 11)
  visible_to = np.array([TREE, PACKED], np.int32)
  got = attend(q, k, v, columns(2, 11), visible_to, block=block)
  assert_equal_where_visible(got, loop(q, k, v, columns(2, 11), visible_to))


def test_random_visibility_equals_the_loop():
  rng = np.random.default_rng(1)
  q, k, v = draw(3, 9, heads=2, kv_heads=1, seed=1)
  visible_to = rng.integers(0, 10, (3, 9)).astype(np.int32)
  got = attend(q, k, v, columns(3, 9), visible_to, block=4)
  assert_equal_where_visible(got, loop(q, k, v, columns(3, 9), visible_to))


def test_a_branch_of_the_tree_is_a_sequence_of_its_own():
  q, k, v = draw(1, 11)
  whole = attend(q, k, v, columns(1, 11), np.array([TREE], np.int32))
  alone = [0, 1, 2, 6, 7, 8]  # The stem, then the second branch.
  part = attend(*(x[:, alone] for x in (q, k, v)), columns(1, 6), np.full((1, 6), 6, np.int32))
  np.testing.assert_allclose(whole[:, alone], part, atol=1e-6)


def test_cached_decoding_is_one_query_at_its_column():
  q, k, v = draw(2, 8)
  causal = attend(q, k, v, columns(2, 8), np.full((2, 8), 8, np.int32))
  at = np.array([[3], [6]], np.int32)  # Each row has read another number of tokens; what lies behind is stale.
  one = attend(np.take_along_axis(q, at[..., None, None], 1), k, v, at, np.full((2, 8), 8, np.int32))
  np.testing.assert_allclose(one[:, 0], np.stack([causal[0, 3], causal[1, 6]]), atol=1e-6)


def test_each_group_of_query_heads_reads_its_own_key_head():
  q, k, v = draw(1, 4)
  v[:, :, 1] = 7.0  # Heads 2 and 3 read the second key/value head.
  out = attend(q, k, v, columns(1, 4), np.full((1, 4), 4, np.int32))
  np.testing.assert_allclose(out[:, :, 2:], 7.0, atol=1e-5)
  assert not np.any(np.isclose(out[:, :, :2], 7.0))


@pytest.mark.parametrize('tree', [TREE, PACKED])
def test_gradient_flows_exactly_along_visible_pairs(tree):
  q, k, v = draw(1, 11, heads=1, kv_heads=1, dim=1)
  visible_to = np.array([tree], np.int32)

  def out(v):
    return attend(q, k, v, columns(1, 11), visible_to)[0, :, 0, 0]

  flow = jax.jit(jax.jacobian(out))(v)[:, 0, :, 0, 0]
  seen = np.array([[j <= i < tree[j] for j in range(11)] for i in range(11)])
  real = seen.any(axis=1)  # A query that sees nothing has garbage, which nobody reads.
  np.testing.assert_array_equal((np.asarray(flow) != 0)[real], seen[real])


@pytest.mark.parametrize('block', [1, 4, 8])
def test_blocks_change_no_gradient(block):
  q, k, v = draw(2, 11)
  visible_to = np.array([TREE, PACKED], np.int32)
  direction = np.random.default_rng(2).normal(size=q.shape).astype(np.float32) * (columns(2, 11) < 9)[..., None, None]

  def gradient(block):
    def value(q, k, v):
      return jnp.sum(attend(q, k, v, columns(2, 11), visible_to, block=block) * direction)

    return jax.jit(jax.grad(value, argnums=(0, 1, 2)))(q, k, v)

  for got, expected in zip(gradient(block), gradient(0), strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize('block', [0, 4])
def test_a_row_of_padding_gives_no_nan_gradient(block):
  q, k, v = draw(1, 6)
  nobody = np.zeros((1, 6), np.int32)

  def value(q, k, v):
    return jnp.sum(attend(1e3 * q, k, v, columns(1, 6), nobody, block=block) ** 2)

  assert all(np.isfinite(g).all() for g in jax.jit(jax.grad(value, argnums=(0, 1, 2)))(q, k, v))


def test_bfloat16_keeps_its_dtype_and_sums_in_float32():
  q, k, v = draw(1, 32, dim=16)
  args = columns(1, 32), np.full((1, 32), 32, np.int32)
  low = attend(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), *args)
  assert low.dtype == jnp.bfloat16
  np.testing.assert_allclose(low.astype(jnp.float32), attend(q, k, v, *args), atol=0.05)


def test_mismatched_shapes_are_refused():
  q, k, v = draw(2, 5)
  good = columns(2, 5), np.full((2, 5), 5, np.int32)
  with pytest.raises(AssertionError):
    attend(q, k, v[:, :4], *good)
  with pytest.raises(AssertionError):
    attend(q, k, v, good[0][:, :4], good[1])
  with pytest.raises(AssertionError):
    attend(q, k, v, good[0], good[1][:1])
