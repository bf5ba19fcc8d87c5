"""Checkpoints with Orbax: everything that a resumed run needs, written in the background, committed at once.

`FOLDER/STEP/` holds three items: `params` (the float32 master weights), `optimizer` (its state, and the step)
and `host` (JSON: config, task position, counts, data description). A step's folder gets its name only when it
is whole; a killed run leaves at most a folder with `.orbax-checkpoint-tmp` in its name, never restored.
"""

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from opid_jax.types import TrainState

_UNFINISHED = re.compile(r'\d+\.orbax-checkpoint-tmp')
# No space, no quota, no larger files: each means that this write will fail again.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def open(
  folder: str | os.PathLike, *, keep: int = 2, every: int = 1, on_full_disk: str = 'stop', like: Any = None
) -> 'Checkpoints':
  """Opens a run's checkpoint folder for writing; left-overs of a killed run are removed, nothing else.

  Args:
    folder: created if needed.
    keep: newest checkpoints kept.
    every: training steps between two checkpoints.
    on_full_disk: 'stop' raises when a save fails for want of space, 'continue' warns and trains on.
    like: the train state or its shapes; when given, too little space for `keep` checkpoints is warned of now.

  Returns:
    The open folder; close it at the end of the run.
  """
  folder = Path(folder).absolute()
  folder.mkdir(parents=True, exist_ok=True)
  if jax.process_index() == 0:
    _remove_unfinished(folder)
  if like is not None:
    # One more than are kept: the oldest goes after the newest is complete.
    need, free = (keep + 1) * _num_bytes(like), shutil.disk_usage(folder).free
    if free < need:
      message = f'{folder} has {_size(free)} free, but keeping {keep} checkpoints needs about {_size(need)}.'
      warnings.warn(message, stacklevel=2)
  return Checkpoints(folder, _manager(folder, keep), every, on_full_disk)


class Checkpoints:
  """An open checkpoint folder; made by `open`. At most one save is on its way."""

  def __init__(self, folder: Path, manager: Any, every: int, on_full_disk: str):
    self.folder = folder
    self._manager, self._every, self._on_full_disk = manager, every, on_full_disk
    self._saving: int | None = None

  def is_due(self, step: int) -> bool:
    """Whether the finished training step `step` is one of those to be saved."""
    return step > 0 and step % self._every == 0

  def latest(self) -> int | None:
    """Step of the newest complete checkpoint; None if there is none."""
    return self._manager.latest_step()

  def save(self, step: int, state: TrainState, host: Mapping[str, Any]) -> None:
    """Starts writing a checkpoint; returns when the state has been copied and may be donated.

    A step that is already there is left as it is.

    Args:
      step: finished training steps; must equal `state.step`.
      state: train state, sharded or not.
      host: what the host side needs to go on; must survive JSON.

    Raises:
      ValueError: if `step` is not the state's own, or `host` holds what JSON cannot.
      OSError: if the disk is full, now or in the save before this one, and `on_full_disk` is 'stop'.
    """
    import orbax.checkpoint as ocp

    if int(state.step) != step:
      raise ValueError(f'The checkpoint is called {step} but its state has finished {int(state.step)} steps.')
    host = _as_json(host)
    self.wait()
    if step in self._manager.all_steps():
      return
    need, free = _num_bytes(state), shutil.disk_usage(self.folder).free
    # Several hosts may see different numbers, and all of them must take part in a save or none.
    if free < need and jax.process_count() == 1:
      self._full(step, f'about {_size(need)} are needed, {_size(free)} are free')
      return
    items = ocp.args.Composite(
      params=ocp.args.StandardSave(state.params),
      optimizer=ocp.args.StandardSave(_optimizer(state)),
      host=ocp.args.JsonSave(host),
    )
    self._saving = step
    with _FullDisk(self):
      self._manager.save(step, args=items)

  def wait(self) -> None:
    """Returns when the last save is committed.

    Raises:
      OSError: as `save`.
    """
    with _FullDisk(self):
      self._manager.wait_until_finished()
    self._saving = None

  def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Reads a checkpoint, also one that was written on another number of devices.

    Args:
      step: one of the steps that are there.
      like: a train state or its shapes (`jax.ShapeDtypeStruct`); gives structure, types and shardings of the
        result. NumPy leaves come back as NumPy arrays, shapes without a sharding on the first device.

    Returns:
      The train state, and what was saved with it for the host: {}, with a warning, if that item is missing.

    Raises:
      ValueError: if there is no such step, or it differs from `like` in structure, shapes or types.
    """
    import orbax.checkpoint as ocp

    path = self.folder / str(step)
    if step not in self._manager.all_steps():
      there = sorted(self._manager.all_steps())
      raise ValueError(f'No checkpoint of step {step} in {self.folder}; there are {there}.')
    targets = {'params': like.params, 'optimizer': _optimizer(like)}
    saved = self._manager.item_metadata(step)
    for item, target in targets.items():
      _compare(path / item, saved[item], target, exact_types=True)
    items = {item: ocp.args.StandardRestore(_abstract(target)) for item, target in targets.items()}
    has_host = (path / 'host').is_dir()
    if has_host:
      items['host'] = ocp.args.JsonRestore()
    else:
      warnings.warn(
        f'{path} has no host item: the run goes on with the parameters and the optimizer of step {step}, '
        'but its counts and task position start anew.',
        stacklevel=2,
      )
    found = self._manager.restore(step, args=ocp.args.Composite(**items))
    state = _state(found['params'], found['optimizer'], like)
    if int(state.step) != step:
      raise ValueError(f'{path} holds the state of step {int(state.step)}: the folder was renamed.')
    return state, (found['host'] if has_host else {})

  def close(self) -> None:
    """Waits for the last save and ends the background threads."""
    self.wait()
    self._manager.close()

  def _full(self, step: int, why: str) -> None:
    """The disk is full: the half-written folder goes, the older checkpoints stay."""
    if jax.process_index() == 0:
      _remove_unfinished(self.folder)
    newest = self.latest()
    message = (
      f'The checkpoint of step {step} could not be written to {self.folder}: the disk is full ({why}). '
      f'Newest complete checkpoint: {"none" if newest is None else newest}.'
    )
    if self._on_full_disk == 'continue':
      warnings.warn(message, stacklevel=3)
      return
    raise OSError(
      errno.ENOSPC,
      f'{message} Make room and run the same command again, or set checkpoint.on_full_disk=continue.',
    )


class _FullDisk:
  """Turns the storage layer's errors about a full disk, of several types, into one; others pass."""

  def __init__(self, checkpoints: Checkpoints):
    self._checkpoints = checkpoints

  def __enter__(self):
    return self

  def __exit__(self, kind, error, trace):
    code = re.search(r"os_error_code='(\d+)'", str(error)) if error else None
    number = int(code[1]) if code else getattr(error, 'errno', None)
    if number not in _FULL:
      return False
    step, self._checkpoints._saving = self._checkpoints._saving, None
    self._checkpoints._full(step, os.strerror(number))
    return True


def restore_params(path: str | os.PathLike, like: Any) -> Any:
  """Only the parameters, for evaluation and export, whatever the optimizer and the host item hold.

  Args:
    path: `RUN/checkpoints/STEP`, or `RUN/checkpoints` for its newest step.
    like: parameters or their shapes, as for `Checkpoints.restore`; floats are cast to its types.

  Returns:
    The parameters.

  Raises:
    ValueError: if there is no complete checkpoint, or names or shapes of the parameters differ.
  """
  import orbax.checkpoint as ocp

  folder = _resolve(Path(path).absolute())
  step = int(folder.name)
  # Read only: the run that owns the folder may be writing to it.
  options = ocp.CheckpointManagerOptions(read_only=True)
  handlers = {'params': ocp.StandardCheckpointHandler()}
  with ocp.CheckpointManager(folder.parent, options=options, item_handlers=handlers) as manager:
    _compare(folder / 'params', manager.item_metadata(step)['params'], like, exact_types=False)
    items = ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(like)))
    return manager.restore(step, args=items)['params']


def read_host(path: str | os.PathLike) -> dict[str, Any]:
  """What was saved for the host beside the parameters, such as the config; {} if there is none.

  Raises:
    ValueError: if there is no complete checkpoint at `path` (as for `restore_params`).
  """
  file = _resolve(Path(path).absolute()) / 'host' / 'metadata'
  return json.loads(file.read_text()) if file.is_file() else {}


def _manager(folder: Path, keep: int):
  import orbax.checkpoint as ocp

  return ocp.CheckpointManager(
    folder,
    options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True),
    item_handlers={
      'params': ocp.StandardCheckpointHandler(),
      'optimizer': ocp.StandardCheckpointHandler(),
      'host': ocp.JsonCheckpointHandler(),
    },
  )


def _resolve(path: Path) -> Path:
  """The folder of one complete checkpoint, given itself or the folder of all of them."""
  if path.name.isdigit() and (path / 'params').is_dir():
    return path
  steps = [entry for entry in path.iterdir() if entry.name.isdigit()] if path.is_dir() else []
  if not steps:
    raise ValueError(f'No complete checkpoint at {path}; expected RUN/checkpoints or RUN/checkpoints/STEP.')
  return max(steps, key=lambda entry: int(entry.name))


def _remove_unfinished(folder: Path) -> None:
  for entry in folder.iterdir():
    if entry.is_dir() and _UNFINISHED.match(entry.name):
      shutil.rmtree(entry)


def _by_name(tree: Any) -> dict[str, Any]:
  """Leaves by path, `1/0/mu/layers/attn/q/kernel`: plain names survive changes of the containers' types."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}


def _optimizer(state: TrainState) -> dict[str, Any]:
  leaves = _by_name(state.opt_state)
  return {'step': state.step, **{f'opt_state/{name}': leaf for name, leaf in leaves.items()}}


def _state(params: Any, optimizer: Mapping[str, Any], like: TrainState) -> TrainState:
  """Rebuilds the exact containers of `like` (F04: a list in place of a tuple breaks optax)."""
  names, structure = list(_by_name(like.opt_state)), jax.tree.structure(like.opt_state)
  opt_state = jax.tree.unflatten(structure, [optimizer[f'opt_state/{name}'] for name in names])
  return TrainState(optimizer['step'], params, opt_state)


def _abstract(tree: Any) -> Any:
  def one(leaf):
    if isinstance(leaf, np.ndarray | np.generic):
      return np.asarray(leaf)
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  return jax.tree.map(one, tree)


def _compare(path: Path, metadata: Any, target: Any, *, exact_types: bool) -> None:
  """Refuses another structure before anything is read: Orbax itself would fill wrong shapes in silence."""
  saved, wanted = _by_name(metadata.tree), _by_name(target)
  differ = [f'{name} is not in the checkpoint' for name in wanted if name not in saved]
  differ += [f'{name} is only in the checkpoint' for name in saved if name not in wanted]
  for name in wanted.keys() & saved.keys():
    there, here = saved[name], wanted[name]
    if tuple(there.shape) != tuple(here.shape) or (exact_types and np.dtype(there.dtype) != here.dtype):
      differ.append(f'{name} is {_describe(there)} in the checkpoint, {_describe(here)} in this run')
  if differ:
    lines = sorted(differ)[:8] + ([f'and {len(differ) - 8} more'] if len(differ) > 8 else [])
    hint = 'It was written with another model.'
    if path.name == 'optimizer':
      hint = 'It was written with another optimizer; evaluate and export read only the parameters of it.'
    raise ValueError('\n  '.join([f'{path} does not fit this run:', *lines]) + f'\n{hint}')


def _describe(leaf: Any) -> str:
  return f'{np.dtype(leaf.dtype)}{list(leaf.shape)}'


def _as_json(host: Mapping[str, Any]) -> dict[str, Any]:
  try:
    return json.loads(json.dumps(dict(host)))
  except TypeError as error:
    raise ValueError(f'The host part of a checkpoint must survive JSON: {error}.') from error


def _num_bytes(tree: Any) -> int:
  """Bytes that all processes together write."""
  return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _size(num_bytes: int) -> str:
  return f'{num_bytes / 2**30:.1f} GiB' if num_bytes >= 2**30 else f'{num_bytes / 2**20:.1f} MiB'
