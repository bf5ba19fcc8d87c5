"""Trains OPID and GRPO with several seeds and reports them side by side: curves, medians, intervals.

python benchmarks/seeds.py --out=runs/webshop-seeds --config=configs/webshop.py --seeds=0,1,2
  [-- --config.FIELD=VALUE ...]

Runs that are finished are not repeated; an interrupted one goes on. Writes table.md and curves.png into the folder.
Cost: about 24 minutes on 2 CPU cores, 4 per run; result: the table in README.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from opid_jax import metrics

ALGORITHMS = ('opid', 'grpo')


def run(config: str, algorithm: str, seed: int, folder: Path, extra: list[str]) -> None:
  if (folder / 'result.txt').exists():
    return
  command = [sys.executable, '-m', 'opid_jax.train', f'--config={config}:{algorithm}', f'--workdir={folder}']
  print(*command, flush=True)
  subprocess.run([*command, f'--config.seed={seed}', *extra], check=True)


def evaluations(folder: Path) -> list[dict]:
  return [row for row in metrics.read(folder / 'metrics.jsonl') if 'eval/success_rate' in row]


def table(results: dict) -> str:
  """Markdown: one line per run, then the median over seeds per algorithm."""
  lines = [
    '| algorithm | seed | success before, % | success after, % | change | score before | score after | minutes |',
    '|---|---|---|---|---|---|---|---|',
  ]
  for algorithm, runs in results.items():
    for seed, (evals, minutes) in runs.items():
      first, last = evals[0], evals[-1]
      names = ('success_rate', 'success_low', 'success_high')
      cells = ['{:.1f} [{:.1f}, {:.1f}]'.format(*(100 * e[f'eval/{x}'] for x in names)) for e in (first, last)]
      change = 100 * (last['eval/success_rate'] - first['eval/success_rate'])
      scores = [f'{100 * e["eval/score"]:.1f}' for e in (first, last)]
      lines.append(f'| {algorithm} | {seed} | {cells[0]} | {cells[1]} | {change:+.1f} | {scores[0]} | {scores[1]} '
                   f'| {minutes:.1f} |')  # fmt: skip
    changes = [100 * (e[-1]['eval/success_rate'] - e[0]['eval/success_rate']) for e, _ in runs.values()]
    finals = [100 * e[-1]['eval/success_rate'] for e, _ in runs.values()]
    lines.append(f'| **{algorithm}** | median of {len(runs)} | | **{statistics.median(finals):.1f}** '
                 f'| **{statistics.median(changes):+.1f}** | | | |')  # fmt: skip
  return '\n'.join(lines) + '\n\n[low, high]: Wilson 95 % interval of one evaluation of the held-out panel.\n'


def plot(results: dict, path: Path) -> None:
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(10, 4), layout='constrained')
  canvas = FigureCanvasAgg(figure)
  for axes, name in zip(figure.subplots(1, 2), ('success_rate', 'score'), strict=True):
    for color, (algorithm, runs) in zip(('C0', 'C1'), results.items(), strict=False):
      curves = [[(row['step'], 100 * row[f'eval/{name}']) for row in evals] for evals, _ in runs.values()]
      for curve in curves:
        axes.plot(*zip(*curve, strict=True), color=color, alpha=0.3, linewidth=1)
      steps = [step for step, _ in curves[0]]
      middle = [statistics.median(curve[i][1] for curve in curves) for i in range(len(steps))]
      axes.plot(steps, middle, color=color, marker='o', label=f'{algorithm}, median of {len(curves)} seeds')
    axes.set(xlabel='training step', ylabel=f'held-out {name.replace("_", " ")}, %')
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
  canvas.print_png(str(path))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--out', type=Path, required=True)
  parser.add_argument('--config', default='configs/webshop.py')
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('extra', nargs='*', help='further flags of every run, after --')
  options = parser.parse_args()
  results: dict = {}
  for seed in map(int, options.seeds.split(',')):
    for algorithm in ALGORITHMS:
      folder = options.out / f'{algorithm}-seed{seed}'
      run(options.config, algorithm, seed, folder, options.extra)
      rows = metrics.read(folder / 'metrics.jsonl')
      seconds = sum(row.get(f'time/{phase}_s', 0.0) for row in rows for phase in ('act', 'score', 'learn', 'evaluate'))
      results.setdefault(algorithm, {})[seed] = (evaluations(folder), seconds / 60)
  text = table(results)
  (options.out / 'table.md').write_text(text)
  plot(results, options.out / 'curves.png')
  print(text)


if __name__ == '__main__':
  main()
