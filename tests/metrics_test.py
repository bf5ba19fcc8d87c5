"""Sums with denominators, intervals, and files that a killed process may leave behind."""

import io
import json
import math
import sys

import numpy as np
import pytest

from opid_jax import metrics
from opid_jax.metrics import Mean


def test_means_over_parts_are_the_mean_over_the_whole():
  parts = [{'loss': Mean(6.0, 3), 'kl': Mean(1.0, 2)}, {'loss': Mean(4.0, 1)}]
  assert metrics.flatten(metrics.combine(parts)) == {'loss': 2.5, 'kl': 0.5}


def test_a_mean_of_nothing_is_absent():
  assert metrics.flatten({'shift': Mean(0.0, 0), 'steps': 3}) == {'steps': 3}


def test_array_scalars_become_plain_numbers():
  flat = metrics.flatten({'a': np.float32(0.5), 'b': np.int32(2), 'c': Mean(np.float32(1), np.int32(2))})
  assert flat == {'a': 0.5, 'b': 2, 'c': 0.5} and [type(v) for v in flat.values()] == [float, int, float]


def test_wilson_interval_by_its_defining_equation():
  """Its ends are the rates p whose normal test just accepts what was seen: |p̂ - p| = z √(p(1-p)/n)."""
  for end in metrics.wilson(7, 20):
    assert abs(7 / 20 - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / 20))


def test_wilson_interval_at_the_ends():
  assert metrics.wilson(0, 0) == (0.0, 1.0)
  low, high = metrics.wilson(0, 10)
  assert low == 0.0 and 0.25 < high < 0.3
  assert metrics.wilson(10, 10) == (pytest.approx(1 - high), 1.0)
  with pytest.raises(ValueError, match='11 successes of 10'):
    metrics.wilson(11, 10)


def test_interval_of_a_mean():
  low, high = metrics.mean_interval([0.0, 1.0, 2.0])
  assert (low, high) == (pytest.approx(1 - 1.96 / math.sqrt(3)), pytest.approx(1 + 1.96 / math.sqrt(3)))
  assert metrics.mean_interval([0.3]) == (0.3, 0.3)
  with pytest.raises(ValueError, match='at least one'):
    metrics.mean_interval([])


def row(rate, score, low=0.0, high=1.0):
  names = ('success_rate', 'success_low', 'success_high', 'score', 'score_low', 'score_high')
  values = (rate, low, high, score, low, high)
  return {f'eval/{name}': value for name, value in zip(names, values, strict=True)} | {'eval/num_tasks': 200}


def test_table_shows_before_and_after():
  lines = metrics.before_and_after(row(0.25, 0.5, 0.2, 0.3), row(0.5, 0.625)).splitlines()
  assert '200 tasks' in lines[0]
  assert '25.0 [20.0, 30.0]' in lines[1] and '50.0 [0.0, 100.0]' in lines[1] and '+25.0' in lines[1]
  assert '+12.5' in lines[2]


def test_table_is_aligned():
  assert metrics.table([('a', 1.23456), ('long name', 'x')]) == 'a          1.235\nlong name  x'
  with pytest.raises(ValueError, match='one length'):
    metrics.table([('a',), ('b', 'c')])


def test_rows_come_back_as_written(tmp_path):
  writer = metrics.Writer(tmp_path)
  writer.write(0, {'eval/score': 0.1})
  writer.write(1, {'loss': math.nan, 'ratio': -math.inf, 'kl': Mean(1.0, 3)})
  writer.close()
  first, second = metrics.read(tmp_path / 'metrics.jsonl')
  assert first == {'step': 0, 'eval/score': 0.1}
  assert math.isnan(second['loss']) and second['ratio'] == -math.inf and second['kl'] == 1 / 3
  for line in (tmp_path / 'metrics.jsonl').read_text().splitlines():
    json.loads(line, parse_constant=lambda name: pytest.fail(f'{name} is not JSON'))


def test_resumed_file_equals_the_unbroken_one(tmp_path):
  def run(folder, start, stop):
    writer = metrics.Writer(folder, resume_step=start)
    for step in range(start + 1, stop + 1):
      writer.write(step, {'loss': 1 / (step + 1)})
    writer.close()

  run(tmp_path / 'unbroken', -1, 6)
  run(tmp_path / 'killed', -1, 5)
  with open(tmp_path / 'killed' / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 6, "lo')  # killed while writing
  run(tmp_path / 'killed', 3, 6)  # the last checkpoint was that of step 3
  killed, unbroken = ((tmp_path / name / 'metrics.jsonl').read_bytes() for name in ('killed', 'unbroken'))
  assert killed == unbroken
  assert [path.name for path in (tmp_path / 'killed').iterdir()] == ['metrics.jsonl']


def test_unfinished_last_line_is_left_out(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"st')
  assert metrics.read(path) == [{'step': 1}]
  path.write_text('{"st\n{"step": 1}\n')
  with pytest.raises(ValueError, match='line 1'):
    metrics.read(path)


def test_fresh_start_drops_an_older_run(tmp_path):
  for _ in range(2):
    writer = metrics.Writer(tmp_path)
    writer.write(0, {'loss': 0.5})
    writer.close()
  assert len(metrics.read(tmp_path / 'metrics.jsonl')) == 1


def test_tensorboard_events_are_written(tmp_path):
  writer = metrics.Writer(tmp_path, tensorboard=True)
  writer.write(1, {'loss': 0.5})
  writer.close()
  (events,) = (tmp_path / 'tensorboard').iterdir()
  assert b'loss' in events.read_bytes()


def test_missing_wandb_says_what_to_install(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'wandb', None)
  with pytest.raises(ModuleNotFoundError, match=r"pip install '.\[wandb\]'"):
    metrics.Writer(tmp_path, wandb_project='p')


def test_curves_become_a_picture(tmp_path):
  writer = metrics.Writer(tmp_path)
  writer.write(0, row(0.2, 0.4))
  writer.write(1, {'train/success_rate': 0.3, 'train/reward': 3.0})
  writer.write(2, row(0.4, 0.5))
  writer.close()
  metrics.plot_curves(tmp_path / 'metrics.jsonl', tmp_path / 'curves.png', title='OPID')
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
  assert sorted(path.name for path in tmp_path.iterdir()) == ['curves.png', 'metrics.jsonl']


def test_curves_of_an_empty_run(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('')
  metrics.plot_curves(tmp_path / 'metrics.jsonl', tmp_path / 'curves.png')
  assert (tmp_path / 'curves.png').exists()


def test_log_has_a_line_every_ten_seconds():
  now, log = [0.0], io.StringIO()
  with metrics.Progress('train', 10, num_steps=2, stream=log, clock=lambda: now[0]) as progress:
    for step in range(2):
      for attempt in range(10):
        now[0] += 2.0
        progress.episode(attempt < 5)
      progress.step(f'reward {step}')
  lines = log.getvalue().splitlines()
  assert lines[0] == 'train: step 0/2, episode 5/10, success 100.0% of 5, 0:30 left'
  assert lines[1] == 'train: step 0/2, episode 10/10, success 50.0% of 10, 0:20 left'
  assert lines[-1] == 'train: step 2/2, episode 0/10, success 50.0% of 20, reward 1, 0:00 left'
  assert len(lines) == 5


def test_time_left_counts_only_this_process():
  now = [0.0]
  progress = metrics.Progress('train', 1, num_steps=10, done=8, stream=io.StringIO(), clock=lambda: now[0])
  assert progress.text().endswith('? left')
  now[0] = 30.0
  progress.step()
  assert progress.text().endswith('0:30 left')


def test_terminal_shows_a_bar():
  class Terminal(io.StringIO):
    def isatty(self):
      return True

  screen = Terminal()
  with metrics.Progress('evaluate', 4, stream=screen) as progress:
    progress.doing('compiling')
    progress.episode(True)
    progress.say('a line of its own')
  assert 'episode 1/4' in screen.getvalue() and 'a line of its own' in screen.getvalue()
