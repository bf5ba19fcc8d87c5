import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from opid_jax import optimizer, sharding
from opid_jax.models import qwen

MODELS = {
  'qwen3 tied': tiny.QWEN3,
  'qwen3 untied': dataclasses.replace(tiny.QWEN3, tied=False),
  'qwen2 tied': dataclasses.replace(tiny.QWEN2, tied=True),
  'qwen2 untied': tiny.QWEN2,
}


def mesh_of(count=4, **sizes):
  return sharding.make_mesh(jax.devices()[:count], **sizes)


def shapes_of(config):
  return jax.eval_shape(lambda: qwen.init(jax.random.key(0), config))


def specs(tree, mesh):
  leaves = jax.tree_util.tree_leaves_with_path(sharding.shard_tree(tree, mesh))
  return {sharding.path_of(path): leaf.spec for path, leaf in leaves}


@pytest.mark.parametrize('name', MODELS)
def test_rules_cover_every_parameter_and_moment(name):
  params, mesh = shapes_of(MODELS[name]), mesh_of(fsdp=2, tensor=2)
  of_params = specs(params, mesh)
  assert len(of_params) == len(jax.tree.leaves(params))
  transform = optimizer.make(b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, clip_norm=1.0)
  of_state = specs(jax.eval_shape(transform.init, params), mesh)
  # Both moments lie where their parameter does, or every update would move them.
  for path, spec in of_params.items():
    moments = [found for name, found in of_state.items() if name.endswith('/' + path)]
    assert moments == [spec, spec]
  assert len(of_state) == 2 * len(of_params) + 1
  # Every matrix is split both ways; only vectors of norms are whole.
  for path, spec in of_params.items():
    split = {axis for axis in spec if axis}
    expected = set() if path.endswith('scale') else {'tensor'} if path.endswith('bias') else {'fsdp', 'tensor'}
    assert split == expected, path


def test_the_layer_axis_stays_whole():
  found = specs(shapes_of(tiny.QWEN2), mesh_of(fsdp=2, tensor=2))
  assert found['layers/attn/q/kernel'] == P(None, 'fsdp', 'tensor')
  assert found['layers/attn/o/kernel'] == found['layers/mlp/down/kernel'] == P(None, 'tensor', 'fsdp')
  assert found['embed/embedding'] == P('tensor', 'fsdp')
  assert found['head/kernel'] == P('fsdp', 'tensor')


def test_a_dimension_that_does_not_divide_stays_whole():
  tree = {'embed': {'embedding': np.zeros((7, 8))}, 'head': {'kernel': np.zeros((6, 4))}}
  found = specs(tree, mesh_of(fsdp=2, tensor=2))
  assert found == {'embed/embedding': P(None, 'fsdp'), 'head/kernel': P('fsdp', 'tensor')}


def test_an_unknown_parameter_is_named():
  with pytest.raises(ValueError, match=r'No sharding rule for parameter layers/moe/router \(2, 8\); add one'):
    sharding.shard_tree({'layers': {'moe': {'router': np.zeros((2, 8))}}}, mesh_of())


def test_scalars_are_replicated():
  assert specs({'count': np.zeros(())}, mesh_of()) == {'count': P()}


@pytest.mark.parametrize(
  ('sizes', 'shape'),
  [
    ({}, (1, 4, 1)), ({'tensor': 2}, (1, 2, 2)), ({'data': -1, 'fsdp': 2}, (2, 2, 1)),
    ({'data': 4, 'fsdp': 1}, (4, 1, 1)),
  ],
)  # fmt: skip
def test_one_axis_takes_what_is_left(sizes, shape):
  mesh = mesh_of(**sizes)
  assert tuple(mesh.shape[name] for name in ('data', 'fsdp', 'tensor')) == shape
  assert sharding.num_row_shards(mesh) == shape[0] * shape[1]


@pytest.mark.parametrize(
  'sizes', [{'tensor': 3}, {'fsdp': 2}, {'data': -1}, {'data': 2, 'fsdp': 4}, {'tensor': 0}, {'tensor': -2}]
)
def test_sizes_that_do_not_fit_are_refused(sizes):
  with pytest.raises(ValueError, match='does not fit 4 devices'):
    mesh_of(**sizes)


def test_rows_go_to_data_and_fsdp_and_come_back():
  mesh = mesh_of(data=2, fsdp=2)
  values = {'a': np.arange(24, dtype=np.int32).reshape(8, 3), 'b': np.arange(8.0, dtype=np.float32)}
  placed = sharding.put_rows(values, mesh)
  jax.tree.map(np.testing.assert_array_equal, placed, values)
  assert [shard.data.shape for shard in placed['a'].addressable_shards] == [(2, 3)] * 4
  assert placed['b'].sharding.is_equivalent_to(sharding.rows(mesh), 1)


def test_rows_are_repeated_along_tensor():
  placed = sharding.put_rows(np.arange(8), mesh_of(fsdp=2, tensor=2))
  assert sorted(shard.data.tolist() for shard in placed.addressable_shards) == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2


def test_cache_heads_are_split_where_they_divide():
  mesh = mesh_of(fsdp=2, tensor=2)
  assert sharding.cache_sharding(mesh, 2).spec == P(None, ('data', 'fsdp'), None, 'tensor', None)
  assert sharding.cache_sharding(mesh, 3).spec == P(None, ('data', 'fsdp'), None, None, None)


def test_activations_are_pinned_to_rows_where_they_divide():
  mesh = mesh_of()
  pin = jax.jit(sharding.constrain(mesh))
  assert pin(jnp.zeros((8, 3, 2))).sharding.is_equivalent_to(sharding.rows(mesh), 3)
  lone = np.zeros((1, 3, 2))
  assert sharding.constrain(mesh)(lone) is lone


def test_segment_sum_runs_on_sharded_rows():
  # Why the mesh has Auto axes: with Explicit ones this raises.
  placed = sharding.put_rows(np.ones((8, 2), np.float32), mesh_of())
  total = jax.jit(lambda x: jax.ops.segment_sum(x, jnp.arange(8) % 2, num_segments=2))(placed)
  assert total.tolist() == [[4, 4], [4, 4]]
