"""A run that is killed and started again with the same command gives what an unbroken one gives, bit for bit."""

import json
import signal

import pytest
import tinyrun
from tinyrun import compiled  # noqa: F401 (fixture)

CHANGES = {
  'num_steps': 4,
  'evaluate.every': 2,
  'evaluate.num_tasks': 4,
  'checkpoint.every': 2,
  'optimizer.warmup_steps': 3,
}


@pytest.fixture
def command(compiled):  # noqa: F811
  """Starts the run that all tests here are about."""

  def start(folder):
    flags = tinyrun.flags(CHANGES | {'compile_cache': compiled})
    return tinyrun.start('train', *flags, f'--workdir={folder}', folder=folder.parent)

  return start


@pytest.fixture(scope='module')
def unbroken(tmp_path_factory, compiled):  # noqa: F811
  folder = tmp_path_factory.mktemp('unbroken') / 'run'
  flags = tinyrun.flags(CHANGES | {'compile_cache': compiled})
  code, text = tinyrun.finish(tinyrun.start('train', *flags, f'--workdir={folder}', folder=folder.parent))
  assert code == 0, text
  return folder


def assert_same_as(unbroken, folder):
  assert tinyrun.rows(folder) == tinyrun.rows(unbroken)
  assert tinyrun.steps(folder) == tinyrun.steps(unbroken)
  tinyrun.assert_equal_params(tinyrun.params(folder, 4), tinyrun.params(unbroken, 4))
  assert (folder / 'result.txt').read_text() == (unbroken / 'result.txt').read_text()


def has_row(folder, step):
  path = folder / 'metrics.jsonl'
  return path.exists() and any(json.loads(line)['step'] >= step for line in path.read_text().splitlines()[:-1])


def test_killed_run_goes_on_as_if_nothing_had_happened(unbroken, command, tmp_path):
  folder = tmp_path / 'run'
  process = command(folder)
  tinyrun.stop_when(process, lambda: 2 in tinyrun.steps(folder), signal.SIGKILL)
  tinyrun.finish(process)
  # What a run killed while it was saving leaves behind (F02), and a line of which half was written.
  left_over = folder / 'checkpoints' / '4.orbax-checkpoint-tmp-1' / 'params'
  left_over.mkdir(parents=True)
  with open(folder / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 3, "tra')
  code, text = tinyrun.finish(command(folder))
  assert code == 0 and 'continued after step 2' in text, text
  assert not left_over.exists()
  assert_same_as(unbroken, folder)


@pytest.mark.slow
@pytest.mark.parametrize('moment', ['before the first row', 'first row', 'row 1', 'row 2', 'row 3', 'row 4'])
def test_killed_at_any_moment(unbroken, command, tmp_path, moment):
  folder = tmp_path / 'run'
  process = command(folder)
  when = {
    'before the first row': lambda: (folder / 'metrics.jsonl').exists(),
    'first row': lambda: has_row(folder, 0),
  }
  step = int(moment.split()[-1]) if moment.startswith('row ') else 0
  tinyrun.stop_when(process, when.get(moment, lambda: has_row(folder, step)), signal.SIGKILL)
  tinyrun.finish(process)
  code, text = tinyrun.finish(command(folder))
  assert code == 0, text
  assert_same_as(unbroken, folder)


@pytest.mark.slow
def test_killed_again_and_again(unbroken, command, tmp_path):
  folder = tmp_path / 'run'
  for step in (1, 2, 3):
    process = command(folder)
    tinyrun.stop_when(process, lambda step=step: has_row(folder, step), signal.SIGKILL)
    tinyrun.finish(process)
  code, text = tinyrun.finish(command(folder))
  assert code == 0, text
  assert_same_as(unbroken, folder)


def test_terminated_run_saves_the_last_finished_step_and_goes_on(unbroken, command, tmp_path):
  folder = tmp_path / 'run'
  process = command(folder)
  # No multiple of checkpoint.every, so that only the signal makes a checkpoint of it.
  tinyrun.stop_when(process, lambda: has_row(folder, 1), signal.SIGTERM)
  code, text = tinyrun.finish(process)
  assert code == 1 and 'SIGTERM: finished steps are saved; the same command continues the run' in text, text
  finished = max(row['step'] for row in tinyrun.rows(folder))
  assert tinyrun.steps(folder)[-1] == finished < 4
  code, text = tinyrun.finish(command(folder))
  assert code == 0 and f'continued after step {finished}' in text, text
  assert tinyrun.rows(folder) == tinyrun.rows(unbroken)
  tinyrun.assert_equal_params(tinyrun.params(folder, 4), tinyrun.params(unbroken, 4))


def test_learning_rate_warms_up_once(unbroken):
  rates = [row['optimizer/learning_rate'] for row in tinyrun.rows(unbroken) if 'optimizer/learning_rate' in row]
  assert rates == pytest.approx([0.0, 1e-3 / 3, 2e-3 / 3, 1e-3])
