"""Checkpoints: whole or absent, exact, and readable on other machines."""

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from opid_jax import checkpoint
from opid_jax.types import TrainState

HOST = {'config': {'seed': 0}, 'task_position': 17, 'counts': {'episodes': 128}}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())


def make_state(step=1, optimizer=OPTIMIZER):
  params = {'embed': {'embedding': jnp.arange(64.0).reshape(8, 8) + step}, 'norm': {'scale': jnp.ones(8)}}
  return TrainState(jnp.int32(step), params, optimizer.init(params))


def on(devices, tree):
  """Shards the leading axis of matrices over some devices."""
  mesh = Mesh(np.array(jax.devices()[:devices]), ('fsdp',))
  where = {2: NamedSharding(mesh, P('fsdp')), 1: NamedSharding(mesh, P()), 0: NamedSharding(mesh, P())}
  return jax.tree.map(lambda x: jax.device_put(x, where[x.ndim]), tree)


def save(folder, state, **settings):
  checkpoints = checkpoint.open(folder, **settings)
  checkpoints.save(int(state.step), state, HOST)
  checkpoints.close()


def assert_equal(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, got, want)


@jax.jit
def next_loss(state):
  """A loss after one more update."""

  def loss(params):
    return jnp.mean(jnp.square(jnp.sin(params['embed']['embedding'] * params['norm']['scale'][None])))

  updates, _ = OPTIMIZER.update(jax.grad(loss)(state.params), state.opt_state)
  return loss(optax.apply_updates(state.params, updates))


@pytest.mark.parametrize('devices', [1, 4])
def test_restores_on_another_number_of_devices(tmp_path, devices):
  """F01: written on 8."""
  state = on(8, make_state())
  save(tmp_path, state)
  like = on(devices, make_state(step=5))
  got, host = checkpoint.open(tmp_path).restore(1, like)
  assert_equal(got, state)
  assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, like)
  assert host == HOST
  assert float(next_loss(got)) == pytest.approx(float(next_loss(state)), abs=1e-6)


def test_restores_from_shapes_alone(tmp_path):
  save(tmp_path, make_state())
  got, _ = checkpoint.open(tmp_path).restore(1, jax.eval_shape(make_state))
  assert_equal(got, make_state())


def test_numpy_stays_numpy(tmp_path):
  state = jax.tree.map(np.asarray, make_state())
  save(tmp_path, state)
  got, _ = checkpoint.open(tmp_path).restore(1, state)
  assert_equal(got, state)
  assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(got.params))


def test_saved_is_what_was_there_when_save_returned(tmp_path):
  """The update may donate the state while the files are still being written."""
  state = on(8, make_state())
  want = jax.tree.map(lambda x: np.array(x, copy=True), state)
  checkpoints = checkpoint.open(tmp_path)
  checkpoints.save(1, state, HOST)
  step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
  jax.block_until_ready(step(state))
  checkpoints.close()
  assert_equal(checkpoint.open(tmp_path).restore(1, make_state())[0], want)


def test_left_over_folder_is_ignored_and_replaced(tmp_path):
  """F02: and nothing else is removed."""
  save(tmp_path, make_state(1))
  shutil.copytree(tmp_path / '1', tmp_path / '2.orbax-checkpoint-tmp-1234')
  shutil.copytree(tmp_path / '1', tmp_path / '2.orbax-checkpoint-tmp')
  (tmp_path / 'notes').mkdir()
  (tmp_path / 'notes.orbax-checkpoint-tmp.txt').write_text('mine')
  checkpoints = checkpoint.open(tmp_path)
  assert checkpoints.latest() == 1
  checkpoints.save(2, make_state(2), HOST)
  checkpoints.close()
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names == ['1', '2', 'notes', 'notes.orbax-checkpoint-tmp.txt']
  assert_equal(checkpoint.open(tmp_path).restore(2, make_state())[0], make_state(2))


def test_copy_without_commit_marker_is_kept(tmp_path):
  """F02: copying tools drop small files; the folder's name is what says that it is complete."""
  save(tmp_path, make_state())
  for marker in (tmp_path / '1').rglob('commit_success.txt'):
    marker.unlink()
  checkpoints = checkpoint.open(tmp_path)
  assert checkpoints.latest() == 1
  assert_equal(checkpoints.restore(1, make_state())[0], make_state())


def test_newest_are_kept(tmp_path):
  checkpoints = checkpoint.open(tmp_path, keep=2, every=2)
  for step in (2, 4, 6):
    checkpoints.save(step, make_state(step), HOST)
    checkpoints.save(step, make_state(step), HOST)  # a signal may ask for a step that is there
  checkpoints.close()
  assert sorted(path.name for path in tmp_path.iterdir()) == ['4', '6']
  assert [checkpoints.is_due(step) for step in (0, 1, 2, 3, 4)] == [False, False, True, False, True]


def test_no_checkpoint_yet(tmp_path):
  checkpoints = checkpoint.open(tmp_path / 'new')
  assert checkpoints.latest() is None
  with pytest.raises(ValueError, match=r'No checkpoint of step 3 .* there are \[\]'):
    checkpoints.restore(3, make_state())


def test_another_optimizer_is_named(tmp_path):
  """F04: and its parameters can still be read."""
  state = make_state(optimizer=optax.scale_by_adam())
  save(tmp_path, state)
  with pytest.raises(ValueError) as error:
    checkpoint.open(tmp_path).restore(1, make_state())
  message = str(error.value)
  assert 'opt_state/1/count is not in the checkpoint' in message and 'opt_state/count is only' in message
  assert 'evaluate and export' in message
  assert_equal(checkpoint.restore_params(tmp_path / '1', state.params), state.params)


@pytest.mark.parametrize(
  'change, part',
  [
    (lambda x: x[:4], 'embed/embedding is float32[8, 8] in the checkpoint, float32[4, 8] in this run'),
    (lambda x: x.astype(jnp.bfloat16), 'float32[8, 8] in the checkpoint, bfloat16[8, 8] in this run'),
  ],
)
def test_another_model_is_named(tmp_path, change, part):
  save(tmp_path, make_state())
  like = make_state()
  like.params['embed']['embedding'] = change(like.params['embed']['embedding'])
  with pytest.raises(ValueError) as error:
    checkpoint.open(tmp_path).restore(1, like)
  assert part in str(error.value) and 'another model' in str(error.value)


def test_exact_types_come_back(tmp_path):
  """F04: optax states are named tuples, and the step keeps its type."""
  save(tmp_path, make_state())
  got, _ = checkpoint.open(tmp_path).restore(1, make_state())
  assert type(got) is TrainState and type(got.opt_state) is tuple
  assert isinstance(got.opt_state[1], optax.ScaleByAdamState) and got.step.dtype == jnp.int32


def test_name_and_counter_agree(tmp_path):
  """F05."""
  checkpoints = checkpoint.open(tmp_path)
  with pytest.raises(ValueError, match='called 100 but its state has finished 101'):
    checkpoints.save(100, make_state(101), HOST)
  checkpoints.save(100, make_state(100), HOST)
  checkpoints.close()
  (tmp_path / '100').rename(tmp_path / '99')
  with pytest.raises(ValueError, match='holds the state of step 100'):
    checkpoint.open(tmp_path).restore(99, make_state())


def test_resumed_optimizer_counts_on(tmp_path):
  """F03, F05, F08: two updates, a restart, two more equal four."""

  def update(state, n):
    for _ in range(n):
      updates, opt_state = OPTIMIZER.update(state.params, state.opt_state)
      state = TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)
    return state

  save(tmp_path, update(make_state(0), 2))
  checkpoints = checkpoint.open(tmp_path)
  resumed, host = checkpoints.restore(checkpoints.latest(), jax.eval_shape(make_state))
  resumed = update(resumed, 2)
  assert_equal(resumed, update(make_state(0), 4))
  assert int(resumed.opt_state[1].count) == int(resumed.step) == 4 and host['task_position'] == 17


# Saves step 1, then forbids files above 4 kB, which the system reports like a full quota, and saves step 2.
FULL_DISK = """
import resource, signal, sys, warnings
import jax.numpy as jnp, numpy as np
from opid_jax import checkpoint
from opid_jax.types import TrainState

def state(step):
  values = np.random.default_rng(step).normal(size=50_000).astype(np.float32)
  return TrainState(jnp.int32(step), {'w': jnp.asarray(values)}, ())

checkpoints = checkpoint.open(sys.argv[1], on_full_disk=sys.argv[2])
checkpoints.save(1, state(1), {})
checkpoints.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    checkpoints.save(2, state(2), {})
    checkpoints.wait()
  print('WARNED', *[w.message for w in caught if 'disk is full' in str(w.message)])
except OSError as error:
  print('STOPPED', error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
restored, _ = checkpoints.restore(1, state(1))
assert bool((restored.params['w'] == state(1).params['w']).all())
checkpoints.save(3, state(3), {})
checkpoints.close()
"""


@pytest.mark.parametrize('choice, word', [('stop', 'STOPPED'), ('continue', 'WARNED')])
def test_full_disk_keeps_the_older_checkpoint(tmp_path, choice, word):
  """F06: with real failed writes; the manager can save again once there is room."""
  run = subprocess.run(
    [sys.executable, '-c', FULL_DISK, str(tmp_path), choice],
    capture_output=True, text=True, timeout=120, cwd=Path(__file__).resolve().parents[1],
  )  # fmt: skip
  assert run.returncode == 0, run.stderr
  assert word in run.stdout and 'step 2 could not be written' in run.stdout, run.stdout
  assert 'Newest complete checkpoint: 1' in run.stdout
  assert sorted(path.name for path in tmp_path.iterdir()) == ['1', '3']


def test_too_little_space_is_noticed_before_writing(tmp_path, monkeypatch):
  """F06."""
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(100, 0, 100))
  with pytest.warns(UserWarning, match='keeping 2 checkpoints needs about'):
    checkpoints = checkpoint.open(tmp_path, like=make_state())
  with pytest.raises(OSError, match='the disk is full .* Newest complete checkpoint: none'):
    checkpoints.save(1, make_state(), HOST)
  assert not list(tmp_path.iterdir())


def test_missing_host_item_is_only_a_warning(tmp_path):
  """F07."""
  save(tmp_path, make_state())
  shutil.rmtree(tmp_path / '1' / 'host')
  with pytest.warns(UserWarning, match='has no host item'):
    got, host = checkpoint.open(tmp_path).restore(1, make_state())
  assert host == {} and checkpoint.read_host(tmp_path / '1') == {}
  assert_equal(got, make_state())


def test_params_alone_for_evaluation(tmp_path):
  """F07: from the newest step, without optimizer and host, cast to another float type."""
  save(tmp_path, make_state(1), keep=2)
  save(tmp_path, make_state(2), keep=2)
  assert checkpoint.read_host(tmp_path) == HOST
  shutil.rmtree(tmp_path / '2' / 'host')
  shutil.rmtree(tmp_path / '2' / 'optimizer')
  like = on(4, jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_state().params))
  got = checkpoint.restore_params(tmp_path, like)
  assert_equal(got, jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_state(2).params))
  assert got['embed']['embedding'].sharding == like['embed']['embedding'].sharding


@pytest.mark.parametrize('name', ['', 'missing', '1.orbax-checkpoint-tmp'])
def test_nothing_to_evaluate_says_where_to_look(tmp_path, name):
  (tmp_path / '1.orbax-checkpoint-tmp' / 'params').mkdir(parents=True)
  with pytest.raises(ValueError, match='expected RUN/checkpoints or RUN/checkpoints/STEP'):
    checkpoint.restore_params(tmp_path / name, make_state().params)


def test_host_part_must_survive_json(tmp_path):
  with pytest.raises(ValueError, match='must survive JSON'):
    checkpoint.open(tmp_path).save(1, make_state(), {'position': np.int32(3)})
