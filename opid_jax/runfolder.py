"""The folder that a run leaves behind: config, samples, curves, the last table; and whether it may be continued."""

import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opid_jax import metrics, samples, settings

# Fields that may differ when a run is continued: they change no number of it.
FREE = ('compile_cache', 'checkpoint.', 'log.', 'analyzer.concurrency', 'analyzer.api_key_env')
_PACKAGES = ('opid_jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'transformers', 'tokenizers')


def default_name(argv, config) -> str:
  """`runs/<config file>-<algorithm>-seed<seed>`: the same command finds its own run again."""
  given = next(a for i, a in enumerate(argv) if a.startswith(('--config=', '-config=')) or a in ('--config', '-config'))
  path = given.partition('=')[2] or argv[argv.index(given) + 1]
  name = Path(path.partition(':')[0]).stem
  words = [word for word in path.partition(':')[2].split(',') if word and word not in ('opid', 'grpo')]
  return os.path.join('runs', '-'.join([name, *sorted(words), config.algorithm.name, f'seed{config.seed}']))


def versions() -> dict[str, str]:
  """Of Python and the packages that a number may depend on."""
  found = {'python': platform.python_version()}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = 'not installed'
  return found


def make(workdir: str | os.PathLike) -> Path:
  """The run folder, created if needed.

  Raises:
    OSError: if it cannot be created or written; says which path and what to do.
  """
  folder = Path(workdir)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    # Found out now, and not after the first training step.
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as error:
    raise OSError(
      error.errno, f'{error.strerror}; the run cannot write there, name another --workdir', str(folder)
    ) from error
  return folder


def write_config(folder: Path, config, data: Mapping[str, Any]) -> None:
  """`config.json`: every field, the data's description and all versions."""
  record = {'config': settings.flatten(config), 'data': dict(data), 'versions': versions()}
  draft = folder / 'config.json.tmp'
  draft.write_text(json.dumps(record, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')
  os.replace(draft, folder / 'config.json')


def host_state(config, data: Mapping[str, Any], step: int) -> dict[str, Any]:
  """What a checkpoint says besides arrays. Random numbers and tasks are functions of (seed, step), so the next
  step is the whole random state and task position."""
  return {'next_step': step, 'seed': config.seed, 'config': settings.flatten(config), 'data': dict(data)}


def check_same_run(host: Mapping[str, Any], config, data: Mapping[str, Any]) -> None:
  """Refuses to continue a run under another config or on other data.

  Raises:
    ValueError: naming the fields, their old and new values, and the way out.
  """
  if not host:
    return
  old, new = host['config'], json.loads(json.dumps(settings.flatten(config)))
  # A longer run is the same run, unless the learning rate looks at the length.
  free = (*FREE, 'num_steps') if config.optimizer.schedule == 'constant' else FREE
  changed = [
    f'{name}: {old.get(name)!r} in the checkpoint, {new.get(name)!r} now'
    for name in sorted({*old, *new})
    if old.get(name) != new.get(name) and not name.startswith(free)
  ]
  now = json.loads(json.dumps(dict(data)))
  changed += [
    f'data {name}: {host["data"].get(name)!r} in the checkpoint, {now.get(name)!r} now'
    for name in sorted({*host['data'], *now})
    if host['data'].get(name) != now.get(name)
  ]
  if changed:
    lines = '\n  '.join(changed)
    raise ValueError(
      f'The run folder holds another run:\n  {lines}\nGive another --workdir, or the same config to continue it.'
    )


def headline(config, policy, data: Mapping[str, Any], folder: Path, last: int | None) -> str:
  """First line of a run: what learns where, from which step, into which folder."""
  shown = ('catalogue', 'products', 'train_goals', 'heldout_goals')
  where = ', '.join(f'{name} {data[name]}' for name in shown if name in data)
  begin = 'from the beginning' if last is None else f'continued after step {last}'
  return (
    f'{config.algorithm.name} on {config.env.name} ({where}), policy {policy.folder}, {begin}, '
    f'{config.num_steps} steps; run folder {folder}'
  )


def write_samples(folder: Path, step: int, trajectories, found, hints, count: int) -> None:
  """The first attempts at as many different tasks as `count` allows, as text and JSON lines."""
  if not count:
    return
  starts = [0]
  for trajectory in trajectories:
    starts.append(starts[-1] + len(trajectory.steps))
  seen, entries = set(), []
  for index, trajectory in enumerate(trajectories):
    if len(entries) < count and trajectory.group not in seen:
      seen.add(trajectory.group)
      entries.append((trajectory, found[index], hints[starts[index] : starts[index + 1]]))
  samples.write(str(folder / 'samples'), f'step_{step:06d}', entries)


def finish(folder: Path, config) -> dict[str, float]:
  """Draws the curves and prints the table; returns the last evaluation."""
  path = folder / 'metrics.jsonl'
  metrics.plot_curves(path, folder / 'curves.png', title=f'{config.algorithm.name} on {config.env.name}')
  rows = [row for row in metrics.read(path) if 'eval/success_rate' in row]
  text = metrics.before_and_after(rows[0], rows[-1])
  (folder / 'result.txt').write_text(text + '\n', encoding='utf-8')
  print(text)
  print(f'Run folder: {folder} (curves.png, metrics.jsonl, samples/, checkpoints/, tensorboard/)')
  return rows[-1]


def set_compile_cache(folder: str) -> None:
  """Keeps compiled programs between runs; '' is the user's cache folder, 'off' keeps none."""
  import jax

  if folder == 'off':
    return
  base = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
  jax.config.update('jax_compilation_cache_dir', folder or os.path.join(base, 'opid_jax', 'xla'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
