"""Whole runs that take seconds: a policy of 37,000 parameters that writes well-formed actions, in a small shop."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from opid_jax import checkpoint, metrics, policy, runfolder, settings, sharding

ROOT = Path(__file__).resolve().parents[1]
POLICY = ROOT / 'tests' / 'data' / 'tiny_policy'

TINY = {
  'num_steps': 3,
  'env.instructions': 'brief',
  'env.num_products': 60,
  'env.num_heldout': 20,
  'env.max_turns': 4,
  'env.results_per_page': 3,
  'model.path': str(POLICY),
  'rollout.tasks_per_step': 2,
  'rollout.group_size': 4,
  'rollout.slots': 8,
  'rollout.max_prompt_tokens': 288,
  'rollout.max_skill_tokens': 48,
  'rollout.max_response_tokens': 32,
  'rollout.prompt_style': 'brief',
  'rollout.bucket': 288,  # One prefill program, so that little is compiled.
  'algorithm.episode_weight': 0.2,
  'algorithm.step_weight': 0.2,
  'optimizer.learning_rate': 1e-3,
  'learner.minibatch_steps': 16,
  'learner.row_length': 384,
  'learner.slots_per_row': 128,
  'learner.rows_per_call': 2,
  'evaluate.every': 0,
  'evaluate.num_tasks': 8,
  'checkpoint.every': 1,
}


def make_config(**changes: Any):
  """The tiny config; `group__field` in place of `group.field`."""
  return settings.make(TINY | {name.replace('__', '.'): value for name, value in changes.items()})


@pytest.fixture(scope='session')
def compiled(tmp_path_factory) -> Path:
  """Compiled programs, shared by all runs of a session, those in other processes included."""
  folder = tmp_path_factory.mktemp('compiled')
  runfolder.set_compile_cache(str(folder))
  compilation_cache.reset_cache()  # What was compiled before this fixture had decided that there is none.
  return folder


@pytest.fixture
def one_device(monkeypatch) -> None:
  """A machine with one device, which compiles much faster than the eight simulated ones."""
  first = jax.devices()[:1]
  monkeypatch.setattr(jax, 'devices', lambda: first)


def flags(changes: Mapping[str, Any]) -> list[str]:
  """The same config on a command line."""
  fields = TINY | dict(changes)
  return [f'--config={ROOT / "configs" / "base.py"}', *(f'--config.{name}={value}' for name, value in fields.items())]


def start(module: str, *arguments: str, folder: Path) -> subprocess.Popen:
  """`python -m opid_jax.<module>`, in `folder`, on one device."""
  path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get('PYTHONPATH'))))
  env = {**os.environ, 'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'}
  env.pop('XLA_FLAGS', None)
  command = [sys.executable, '-m', f'opid_jax.{module}', *arguments]
  return subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen, timeout_s: float = 600) -> tuple[int, str]:
  """(exit code, everything it printed)."""
  text, _ = process.communicate(timeout=timeout_s)
  return process.returncode, text


def stop_when(process: subprocess.Popen, is_time: Callable[[], bool], number: int, timeout_s: float = 600) -> None:
  """Sends a signal to a running process as soon as `is_time`; fails if it ends by itself before."""
  deadline = time.monotonic() + timeout_s
  while not is_time():
    assert process.poll() is None, f'ended too early:\n{process.communicate()[0]}'
    assert time.monotonic() < deadline, 'the moment to stop the run never came'
    time.sleep(0.02)
  process.send_signal(signal.Signals(number))


def rows(folder: Path) -> list[dict[str, Any]]:
  """Rows of a run without the times, which no two runs share."""
  found = metrics.read(folder / 'metrics.jsonl')
  return [{name: value for name, value in row.items() if not name.startswith('time/')} for row in found]


def steps(folder: Path) -> list[int]:
  """Training steps with a complete checkpoint, in order."""
  here = folder / 'checkpoints'
  return sorted(int(entry.name) for entry in here.iterdir() if entry.name.isdigit()) if here.is_dir() else []


def params(folder: Path, step: int) -> dict[str, np.ndarray]:
  """Parameters of a checkpoint by name."""
  mesh = sharding.make_mesh(jax.devices()[:1])
  tree = checkpoint.restore_params(folder / 'checkpoints' / str(step), policy.shapes(_policy(), mesh))
  return {sharding.path_of(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_equal_params(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
  """Bit for bit."""
  assert one.keys() == other.keys()
  for name, value in one.items():
    np.testing.assert_array_equal(value, other[name], err_msg=name)


def _policy() -> policy.Policy:
  return policy.describe(make_config(), None)
