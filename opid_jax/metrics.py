"""Numbers of a run: sums with their denominators, intervals, and where they are written.

`metrics.jsonl` holds one JSON object per line with the training step under `step`. Only process 0 writes.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from opid_jax.progress import Progress as Progress


class Mean(NamedTuple):
  """A sum and what it is divided by, so that means over parts add up to the mean over the whole.

  Attributes:
    total: sum of the values.
    count: number (or weight) of the values; 0 means there was nothing to average.
  """

  total: float
  count: float


Values = Mapping[str, Mean | float | int]


def combine(parts: Iterable[Mapping[str, Mean]]) -> dict[str, Mean]:
  """Adds up sums and denominators by name; a name may be absent from some of the parts."""
  combined: dict[str, Mean] = {}
  for part in parts:
    for name, value in part.items():
      before = combined.get(name, Mean(0.0, 0.0))
      combined[name] = Mean(before.total + float(value.total), before.count + float(value.count))
  return combined


def flatten(values: Values) -> dict[str, float | int]:
  """Plain numbers by name. A mean of nothing is left out: zero would look like a measurement."""
  flat: dict[str, float | int] = {}
  for name, value in values.items():
    if isinstance(value, Mean):
      if value.count:
        flat[name] = float(value.total) / float(value.count)
    else:
      # `item` turns NumPy and JAX scalars into the Python number of the same kind.
      flat[name] = value.item() if hasattr(value, 'item') else value
  return flat


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
  """Wilson score interval of a success rate, 95 % for z = 1.96; (0, 1) when n is 0.

  See Wilson (1927), https://doi.org/10.1080/01621459.1927.10502953. Unlike p ± z·σ it does not shrink to a
  point at 0 or n successes.

  Raises:
    ValueError: if there are more successes than attempts, or fewer than none.
  """
  if not 0 <= successes <= n:
    raise ValueError(f'{successes} successes of {n} attempts: expected 0 <= successes <= attempts.')
  if n == 0:
    return 0.0, 1.0
  rate, scale = successes / n, 1 + z * z / n
  middle = (rate + z * z / (2 * n)) / scale
  half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / scale
  # The exact ends at 0 and n successes, which rounding would miss by 1e-17.
  return (0.0 if successes == 0 else middle - half), (1.0 if successes == n else middle + half)


def mean_interval(values: Sequence[float], z: float = 1.96) -> tuple[float, float]:
  """Normal interval of a mean, mean ± z·s/√n with the sample deviation s; the mean itself when n is 1.

  Raises:
    ValueError: if there are no values.
  """
  n = len(values)
  if n == 0:
    raise ValueError('The interval of a mean needs at least one value, found none.')
  mean = math.fsum(values) / n
  variance = math.fsum((value - mean) ** 2 for value in values) / max(n - 1, 1)
  half = z * math.sqrt(variance / n)
  return mean - half, mean + half


def table(rows: Sequence[Sequence[Any]]) -> str:
  """Aligned plain text, one line per row; the first column to the left, numbers with up to four digits.

  Raises:
    ValueError: if the rows differ in length.
  """
  texts = [[f'{cell:.4g}' if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
  if len({len(row) for row in texts}) > 1:
    raise ValueError(f'Rows of {sorted({len(row) for row in texts})} cells: expected one length.')
  widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
  return '\n'.join(
    '  '.join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in texts
  )


def before_and_after(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = 'eval') -> str:
  """The last words of a run: the held-out panel before and after, in percent, with 95 % intervals.

  Args:
    before: a row with `<prefix>/success_rate`, `<prefix>/score`, their `_low` and `_high`, and `num_tasks`.
    after: another one, of the same panel.
    prefix: of the names.

  Returns:
    Aligned text of three lines.
  """

  def cell(row: Mapping[str, Any], *names: str) -> str:
    return '{:.1f} [{:.1f}, {:.1f}]'.format(*(100 * row[f'{prefix}/{name}'] for name in names))

  lines = [(f'held-out panel, {after[f"{prefix}/num_tasks"]} tasks', 'before', 'after', 'change')]
  for label, value, stem in (('success rate, %', 'success_rate', 'success'), ('score, %', 'score', 'score')):
    change = 100 * (after[f'{prefix}/{value}'] - before[f'{prefix}/{value}'])
    cells = [cell(row, value, f'{stem}_low', f'{stem}_high') for row in (before, after)]
    lines.append((label, *cells, f'{change:+.1f}'))
  return table(lines) + '\n[low, high]: 95 % interval'


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Rows of a `metrics.jsonl`, in order; a last line that a killed process left unfinished is left out.

  'NaN' and the like come back as the floats they were.

  Raises:
    ValueError: if another line than the last is not a JSON object.
  """
  lines = Path(path).read_bytes().split(b'\n')
  rows = []
  for number, line in enumerate(lines, 1):
    if not line:
      continue
    try:
      row = json.loads(line)
    except ValueError as error:
      if number == len(lines):  # no line break after it, so it was never finished
        break
      raise ValueError(f'{path}, line {number}: not a JSON object ({error}).') from error
    rows.append({name: _NON_FINITE.get(value, value) for name, value in row.items()})
  return rows


_NON_FINITE = {'NaN': math.nan, 'Infinity': math.inf, '-Infinity': -math.inf}


def encode(step: int, values: Values) -> str:
  """One line of `metrics.jsonl`, without the line break. Non-finite numbers become text, as JSON has none."""
  row: dict[str, Any] = {'step': int(step)}
  for name, value in flatten(values).items():
    if isinstance(value, float) and not math.isfinite(value):
      value = 'NaN' if math.isnan(value) else ('Infinity' if value > 0 else '-Infinity')
    row[name] = value
  return json.dumps(row, allow_nan=False)


class Writer:
  """Writes rows of metrics to JSONL, and to TensorBoard and W&B where wanted.

  Resuming at step k drops the rows after step k, so that a killed and resumed run leaves the same file as an
  unbroken one. A row is one `write` of one whole line.
  """

  def __init__(
    self,
    folder: str | os.PathLike,
    *,
    resume_step: int = -1,
    tensorboard: bool = False,
    wandb_project: str = '',
    config: Mapping[str, Any] | None = None,
  ):
    """Opens the files.

    Args:
      folder: of the run; created if needed.
      resume_step: step of the checkpoint resumed from, whose later rows are dropped; -1 = drop all.
      tensorboard: also write TensorBoard events, below `tensorboard/`.
      wandb_project: also write to this W&B project; '' = no.
      config: what W&B shows as the run's config.

    Raises:
      ModuleNotFoundError: if W&B is asked for and not installed; says what to install.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    self.path = folder / 'metrics.jsonl'
    resumed = _cut(self.path, resume_step)
    self._file = open(self.path, 'ab', buffering=0)
    purge = resume_step + 1 if resumed else None
    self._tensorboard = _tensorboard(folder / 'tensorboard', purge) if tensorboard else None
    self._wandb = _wandb(folder, wandb_project, config or {}) if wandb_project else None

  def write(self, step: int, values: Values) -> None:
    """Appends the row of training step `step` (finished steps: 0 before the first update)."""
    self._file.write(encode(step, values).encode() + b'\n')
    numbers = flatten(values)
    if self._tensorboard:
      for name, value in numbers.items():
        self._tensorboard.add_scalar(name, value, step)
    if self._wandb:
      self._wandb.log(numbers, step=step)

  def flush(self) -> None:
    """Makes what was written survive a power cut; call it before a checkpoint is committed."""
    os.fsync(self._file.fileno())
    if self._tensorboard:
      self._tensorboard.flush()

  def close(self) -> None:
    """Ends the files; no row may follow."""
    self.flush()
    self._file.close()
    if self._tensorboard:
      self._tensorboard.close()
    if self._wandb:
      self._wandb.finish()


def _cut(path: Path, last_step: int) -> bool:
  """Drops rows after `last_step` and an unfinished last line; True if rows are left. The swap is atomic."""
  if not path.exists():
    return False
  whole, _, rest = path.read_bytes().rpartition(b'\n')
  lines = whole.split(b'\n') if whole else []
  kept = [line for line in lines if json.loads(line)['step'] <= last_step]
  if rest or len(kept) < len(lines):
    draft = path.with_suffix('.tmp')
    draft.write_bytes(b''.join(line + b'\n' for line in kept))
    os.replace(draft, path)
  return bool(kept)


def _tensorboard(folder: Path, purge_step: int | None):
  from tensorboardX import SummaryWriter

  # TensorBoard hides earlier events from the purged step on; the resumed run writes them again.
  return SummaryWriter(str(folder), purge_step=purge_step)


def _wandb(folder: Path, project: str, config: Mapping[str, Any]):
  try:
    import wandb
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError("log.wandb is on but wandb is missing: pip install '.[wandb]'.") from error
  # One id per run folder, so that a resumed run continues its curves.
  identity = folder / 'wandb_id'
  if not identity.exists():
    identity.write_text(wandb.util.generate_id())
  name = identity.read_text()
  return wandb.init(project=project, dir=str(folder), id=name, resume='allow', config=dict(config))


_CURVES = (
  # label, held-out quantity, stem of its interval, training quantity
  ('success rate', 'eval/success_rate', 'eval/success', 'train/success_rate'),
  ('score', 'eval/score', 'eval/score', 'train/score'),
  ('reward per episode', '', '', 'train/reward'),
)


def plot_curves(jsonl: str | os.PathLike, png: str | os.PathLike, *, title: str = '') -> None:
  """Draws the learning curves of a `metrics.jsonl` over training steps.

  Success rate and score of the held-out panel with 95 % intervals beside those of the training episodes, and
  the training reward. A curve without points is left out, and so are axes without curves.

  Args:
    jsonl: rows as `Writer` writes them.
    png: picture to write; replaced at once, so that a viewer never sees half of it.
    title: over the picture.
  """
  # A figure of its own: pyplot keeps state and may look for a display.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  rows = read(jsonl)
  names = {name for row in rows for name in row}
  curves = [curve for curve in _CURVES if names & {curve[1], curve[3]}] or _CURVES[:1]
  figure = Figure(figsize=(5 * len(curves), 4), layout='constrained')
  canvas = FigureCanvasAgg(figure)
  for axes, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
    _draw(axes, rows, *curve)
  if title:
    figure.suptitle(title)
  draft = Path(png).with_suffix('.tmp.png')
  canvas.print_png(str(draft))
  os.replace(draft, png)


def _draw(axes, rows: Sequence[Mapping[str, Any]], label: str, value: str, stem: str, training: str) -> None:
  def points(name: str) -> list[tuple[int, float]]:
    return [(row['step'], row[name]) for row in rows if name in row]

  if points(training):
    axes.plot(*zip(*points(training), strict=True), color='0.6', linewidth=1, label='training episodes')
  if points(value):
    steps, middle = zip(*points(value), strict=True)
    axes.plot(steps, middle, color='C0', marker='o', label='held-out panel, 95 % interval')
    low, high = ([y for _, y in points(f'{stem}_{end}')] for end in ('low', 'high'))
    if len(low) == len(high) == len(steps):
      axes.fill_between(steps, low, high, color='C0', alpha=0.2, linewidth=0)
  axes.set(xlabel='training step', ylabel=label)
  axes.xaxis.get_major_locator().set_params(integer=True)
  if value:
    axes.set_ylim(0, 1)
  axes.grid(alpha=0.3)
  if axes.get_legend_handles_labels()[0]:
    axes.legend(loc='best', frameon=False)
