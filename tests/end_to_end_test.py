"""The training program as a user meets it: what a run leaves behind, what may change its numbers and what may not."""

import json
import math
import os
import shutil

import jax
import pytest
import tinyrun
from tinyrun import compiled, one_device  # noqa: F401 (fixtures)

from opid_jax import checkpoint, train

pytestmark = pytest.mark.usefixtures('compiled', 'one_device')

EVALUATION = {
  'eval/success_rate', 'eval/success_low', 'eval/success_high', 'eval/num_success', 'eval/score', 'eval/score_low',
  'eval/score_high', 'eval/num_tasks', 'eval/turns', 'eval/valid_action_rate', 'eval/truncated_rate',
}  # fmt: skip
GRPO = {'algorithm__name': 'grpo', 'analyzer__name': 'none'}


@pytest.fixture(scope='module')
def run(tmp_path_factory, compiled):  # noqa: F811
  """A finished run of the default algorithm, with the metrics that it returned."""
  folder = tmp_path_factory.mktemp('runs') / 'opid'
  with pytest.MonkeyPatch.context() as patch:
    first = jax.devices()[:1]
    patch.setattr(jax, 'devices', lambda: first)
    last = train.train(config_of_run(), str(folder))
  return folder, last


def config_of_run(**changes):
  return tinyrun.make_config(**{'evaluate__every': 2, 'log__samples': 2} | changes)


def test_every_training_step_and_evaluation_has_its_row(run):
  steps = [(row['step'], 'eval/score' in row) for row in tinyrun.rows(run[0])]
  assert steps == [(0, True), (1, False), (2, False), (2, True), (3, False), (3, True)]


def test_evaluation_rows_carry_rates_intervals_and_counts(run):
  rows = [row for row in tinyrun.rows(run[0]) if 'eval/score' in row]
  assert all(set(row) == EVALUATION | {'step'} for row in rows)
  assert all(row['eval/num_tasks'] == 8 for row in rows)
  assert {name: run[1][name] for name in rows[-1]} == rows[-1]


def test_first_ratio_is_one_and_the_policy_moves(run):
  rows = [row for row in tinyrun.rows(run[0]) if 'update/loss' in row]
  assert all(row['update/first_ratio_gap'] < 1e-4 for row in rows)
  assert all(row['gap/max'] < 1e-3 for row in rows)
  assert all(row['update/grad_norm'] > 0 and row['train/episodes'] == 8 for row in rows)
  assert all(math.isfinite(value) for row in rows for value in row.values())


def test_run_folder_holds_all_that_is_promised(run):
  folder = run[0]
  there = {entry.name for entry in folder.iterdir()}
  assert there == {
    'checkpoints', 'config.json', 'curves.png', 'metrics.jsonl', 'result.txt', 'samples', 'tensorboard',
  }  # fmt: skip
  assert (folder / 'curves.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
  assert tinyrun.steps(folder) == [2, 3]  # checkpoint.keep = 2
  assert 'held-out panel, 8 tasks' in (folder / 'result.txt').read_text()


def test_config_file_records_fields_sizes_and_versions(run):
  record = json.loads((run[0] / 'config.json').read_text())
  assert record['config']['rollout.group_size'] == 4
  assert record['data']['products'] == 60
  assert record['data']['heldout_goals'] == 20
  assert record['data']['train_goals'] > 0
  assert record['versions']['jax'] == jax.__version__


def test_tensorboard_shows_the_same_numbers(run):
  [events] = (run[0] / 'tensorboard').iterdir()
  written = events.read_bytes()
  names = {name for row in tinyrun.rows(run[0]) for name in row} - {'step'}
  assert not [name for name in names if name.encode() not in written]


def test_samples_show_attempts_with_their_skills(run):
  folder = run[0] / 'samples'
  assert len(list(folder.iterdir())) == 6
  for step in (1, 2, 3):
    text = (folder / f'step_{step:06d}.txt').read_text()
    samples = [json.loads(line) for line in (folder / f'step_{step:06d}.jsonl').read_text().splitlines()]
    assert len({sample['group'] for sample in samples}) == 2
    for sample in samples:
      assert sample['text'] in text and sample['steps'][-1]['response'].strip() in text
      assert sample['skills']['episode'] or sample['skills']['steps'] or sample['skills']['reason']


def test_same_config_gives_the_same_numbers_again(run, tmp_path):
  train.train(config_of_run(), str(tmp_path))
  assert tinyrun.rows(tmp_path) == tinyrun.rows(run[0])
  tinyrun.assert_equal_params(tinyrun.params(tmp_path, 3), tinyrun.params(run[0], 3))


def test_finished_run_trains_no_further(run, tmp_path):
  shutil.copytree(run[0], tmp_path / 'copy')
  assert train.train(config_of_run(), str(tmp_path / 'copy')) == run[1]
  assert (tmp_path / 'copy' / 'metrics.jsonl').read_bytes() == (run[0] / 'metrics.jsonl').read_bytes()


@pytest.mark.parametrize(
  'change, named',
  [
    ({'seed': 1}, 'seed: 0 in the checkpoint, 1 now'),
    ({'rollout__temperature': 0.7}, 'rollout.temperature: 1.0 in the checkpoint, 0.7 now'),
    ({'env__num_products': 70}, 'data data_hash'),
  ],
)
def test_another_config_is_refused_and_nothing_touched(run, change, named):
  before = {path: path.stat().st_mtime_ns for path in run[0].rglob('*') if path.is_file()}
  with pytest.raises(ValueError, match=f'(?s)holds another run.*{named}.*another --workdir'):
    train.train(config_of_run(**change), str(run[0]))
  assert {path: path.stat().st_mtime_ns for path in run[0].rglob('*') if path.is_file()} == before


def test_opid_without_weight_is_grpo(tmp_path):
  short = {'num_steps': 2, 'evaluate__before': False, 'evaluate__num_tasks': 1}
  off = {'algorithm__episode_weight': 0.0, 'algorithm__step_weight': 0.0}
  train.train(tinyrun.make_config(**short, **off), str(tmp_path / 'opid'))
  train.train(tinyrun.make_config(**short, **GRPO), str(tmp_path / 'grpo'))
  opid, grpo = tinyrun.rows(tmp_path / 'opid'), tinyrun.rows(tmp_path / 'grpo')
  assert [{name: row[name] for name in other} for row, other in zip(opid, grpo, strict=True)] == grpo
  assert not any(name.startswith('analyzer/') for row in opid for name in row)  # Nobody was asked for nothing.
  tinyrun.assert_equal_params(tinyrun.params(tmp_path / 'opid', 2), tinyrun.params(tmp_path / 'grpo', 2))


def test_policy_analyzes_itself(tmp_path):
  config = tinyrun.make_config(
    num_steps=1, analyzer__name='policy', analyzer__max_failure_share=1.0, analyzer__max_reply_tokens=8,
    analyzer__max_prompt_tokens=2000, evaluate__before=False, evaluate__num_tasks=1,
  )  # fmt: skip
  train.train(config, str(tmp_path))
  row = tinyrun.rows(tmp_path)[0]
  # The tiny policy writes no JSON, so every trajectory is counted as failed and trains as GRPO.
  assert (row['analyzer/no_json'], row['analyzer/failed'], row['analyzer/trajectories']) == (8, 8, 8)
  assert row['skills/none_steps'] == row_steps(row) and row['advantage/skill_share'] == 0


def row_steps(row):
  return round(row['train/turns'] * row['train/episodes'])


def test_run_that_blows_up_names_the_step_and_the_last_good_checkpoint(tmp_path):
  config = tinyrun.make_config(optimizer__learning_rate=1e30, evaluate__before=False, log__tensorboard=False, **GRPO)
  with pytest.raises(FloatingPointError, match=r'not finite in training step (\d)') as caught:
    train.train(config, str(tmp_path))
  done = tinyrun.steps(tmp_path)
  assert f'training step {len(done) + 1} ' in str(caught.value)
  expected = tmp_path / 'checkpoints' / str(done[-1]) if done else 'none yet'
  assert str(caught.value).endswith(f'last good checkpoint: {expected}.')
  assert [row['step'] for row in tinyrun.rows(tmp_path)] == done


def test_full_disk_stops_with_one_line_and_the_run_goes_on_later(tmp_path, compiled, monkeypatch, capsys):  # noqa: F811
  changes = {'num_steps': 2, 'evaluate.before': False, 'evaluate.num_tasks': 1, 'compile_cache': str(compiled)}
  argv = ['train', *tinyrun.flags(changes), f'--workdir={tmp_path}']
  usage, calls = shutil.disk_usage, []

  def full_after_the_first_save(path):
    calls.append(path)
    return usage(path) if len(calls) <= 2 else usage(path)._replace(free=1000)

  monkeypatch.setattr(checkpoint.shutil, 'disk_usage', full_after_the_first_save)
  with pytest.raises(SystemExit, match=r'checkpoint of step 2 .*disk is full.*Newest complete checkpoint: 1\.'):
    train.main(argv)
  monkeypatch.setattr(checkpoint.shutil, 'disk_usage', usage)
  train.main(argv)
  assert tinyrun.steps(tmp_path) == [1, 2]
  assert 'continued after step 1' in capsys.readouterr().err


def test_run_folder_that_is_a_file_is_refused_at_once(tmp_path):
  (tmp_path / 'file').write_text('mine')
  for name in ('file', 'file/below'):
    with pytest.raises(SystemExit, match='name another --workdir.*file'):
      train.main(['train', *tinyrun.flags({}), f'--workdir={tmp_path / name}'])
  assert (tmp_path / 'file').read_text() == 'mine'


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write everywhere')
def test_run_folder_without_permission_is_refused_at_once(tmp_path):
  tmp_path.chmod(0o500)
  with pytest.raises(SystemExit, match='Permission denied.*name another --workdir'):
    train.main(['train', *tinyrun.flags({}), f'--workdir={tmp_path}'])


def test_checkpoint_without_its_host_part_goes_on_with_a_warning(run, tmp_path):
  shutil.copytree(run[0], tmp_path / 'copy')
  shutil.rmtree(tmp_path / 'copy' / 'checkpoints' / '3' / 'host')
  with pytest.warns(UserWarning, match='has no host item'):
    assert train.train(config_of_run(), str(tmp_path / 'copy')) == run[1]


@pytest.mark.parametrize(
  'argv, message',
  [
    (['--config.algorithm.episode_weigth=0.1'], r'algorithm\.episode_weigth.*algorithm\.episode_weight'),
    (['--config.loss.kl_coef=much'], r'kl_coef.*Expected for loss\.kl_coef: a number'),
    (['--config.num_steps=0'], 'num_steps is 0'),
    (['--config.analyzer.name=none'], 'algorithm.name is opid, which needs skills'),
    (['--config.model.path=/nowhere'], '/nowhere'),
    (['--config.env.data_dir=/nowhere'], '/nowhere'),
  ],
)
def test_wrong_command_ends_before_anything_is_written(tmp_path, argv, message):
  with pytest.raises((SystemExit, ValueError), match=f'(?s){message}'):
    train.main(['train', *tinyrun.flags({}), *argv, f'--workdir={tmp_path / "run"}'])
  assert not list(tmp_path.rglob('*.json*'))
