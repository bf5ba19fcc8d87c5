"""Where arrays live: a mesh of (data, fsdp, tensor), rules for parameters, rows for batches.

Parameters and optimizer state are split over `fsdp` along the model dimension and over `tensor` along heads, MLP
features or vocabulary; rows of a batch over `data` and `fsdp` together.
"""

import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# (regular expression on the path, axes). First match wins; layer leaves carry the scan axis in front.
RULES = (
  (r'embed/embedding$', P('tensor', 'fsdp')),
  (r'head/kernel$', P('fsdp', 'tensor')),
  (r'layers/attn/[qkv]/kernel$', P(None, 'fsdp', 'tensor')),
  (r'layers/attn/[qkv]/bias$', P(None, 'tensor')),
  (r'layers/attn/o/kernel$', P(None, 'tensor', 'fsdp')),
  (r'layers/mlp/(gate|up)/kernel$', P(None, 'fsdp', 'tensor')),
  (r'layers/mlp/down/kernel$', P(None, 'tensor', 'fsdp')),
  (r'scale$', P()),
)
ROWS = ('data', 'fsdp')


def make_mesh(devices, *, data=1, fsdp=-1, tensor=1) -> Mesh:
  """A mesh over `devices`; one of the sizes may be -1 and takes what is left.

  Raises:
    ValueError: if the sizes do not multiply to the number of devices.
  """
  devices = np.asarray(devices).reshape(-1)
  sizes = [data, fsdp, tensor]
  known = int(np.prod([size for size in sizes if size != -1]))
  wrong = min(sizes) < -1 or 0 in sizes or sizes.count(-1) > 1
  if wrong or len(devices) % known or (-1 not in sizes and known != len(devices)):
    raise ValueError(
      f'mesh (data={data}, fsdp={fsdp}, tensor={tensor}) does not fit {len(devices)} devices: the sizes must '
      f'multiply to that number, and at most one may be -1.'
    )
  sizes = [len(devices) // known if size == -1 else size for size in sizes]
  # Auto axes: with the default Explicit ones a segment_sum over sharded rows raises.
  return Mesh(devices.reshape(sizes), ('data', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3)


def path_of(keys) -> str:
  """A leaf's path as text, `layers/attn/q/kernel`."""
  return '/'.join(str(getattr(k, 'key', getattr(k, 'name', getattr(k, 'idx', k)))) for k in keys)


def shard_tree(tree, mesh: Mesh):
  """`NamedSharding` of every leaf of parameters, gradients or optimizer state.

  A dimension that its mesh axis does not divide stays whole; scalars are replicated.

  Raises:
    ValueError: if a leaf of rank 1 or more matches no rule, naming its path.
  """

  def one(keys, leaf):
    if not leaf.ndim:
      return NamedSharding(mesh, P())
    path = path_of(keys)
    spec = next((spec for pattern, spec in RULES if re.search(pattern, path)), None)
    if spec is None:
      raise ValueError(f'No sharding rule for parameter {path} {leaf.shape}; add one to sharding.RULES.')
    axes = [
      axis if axis is not None and size % mesh.shape[axis] == 0 else None
      for axis, size in zip(tuple(spec) + (None,) * (leaf.ndim - len(spec)), leaf.shape, strict=True)
    ]
    return NamedSharding(mesh, P(*axes))

  return jax.tree_util.tree_map_with_path(one, tree)


def rows(mesh: Mesh) -> NamedSharding:
  """Sharding of arrays whose leading axis is rows; also a prefix for whole batches."""
  return NamedSharding(mesh, P(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, P())


def num_row_shards(mesh: Mesh) -> int:
  """Row counts must be multiples of this."""
  return mesh.shape['data'] * mesh.shape['fsdp']


def cache_sharding(mesh: Mesh, kv_heads: int) -> NamedSharding:
  """Key/value cache [num_layers, S, M, h, d]: slots like rows, heads over `tensor` where that divides them."""
  heads = 'tensor' if kv_heads % mesh.shape['tensor'] == 0 else None
  return NamedSharding(mesh, P(None, ROWS, None, heads, None))


def constrain(mesh: Mesh):
  """Pins activations [B, L, D] to rows; B = 1 or a B that does not divide is left to the compiler."""

  def pin(x):
    if x.shape[0] % num_row_shards(mesh):
      return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(ROWS)))

  return pin


def constrain_head(mesh: Mesh):
  """Splits the product of hidden states [B, .., D] and head weight [V, D] over the vocabulary.

  Every chip sees the rows of its `data` slice and V / (fsdp * tensor) tokens of the vocabulary. Left to itself the
  compiler gathers the whole weight, and sums its whole gradient over the chips, once per block of scored tokens; the
  hidden states of those tokens are much smaller. A vocabulary that does not divide is left to the compiler.
  """
  vocabulary = ('tensor', 'fsdp')

  def pin(x, weight):
    if weight.shape[0] % (mesh.shape['tensor'] * mesh.shape['fsdp']) or x.shape[0] % mesh.shape['data']:
      return x, weight
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('data')))
    return x, jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, P(vocabulary)))

  return pin


def put_rows(tree, mesh: Mesh):
  """Host rows -> global arrays. On several processes each hands in its own rows."""
  sharding = rows(mesh)
  return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), tree)
