"""The main job on real input: a short training run on the small WebShop set, in the official wording."""

import json

import pytest
import tinyrun
from shared import shared_path
from tinyrun import compiled, one_device  # noqa: F401 (fixtures)

from opid_jax import train

DATA = shared_path('data', 'webshop')

pytestmark = pytest.mark.usefixtures('compiled', 'one_device')


def test_training_on_the_real_shop_ends_cleanly_and_records_its_sizes(tmp_path):
  config = tinyrun.make_config(
    num_steps=2,
    env__data_dir=str(DATA),
    env__instructions='full',
    env__num_heldout=500,
    env__results_per_page=10,
    rollout__prompt_style='full',
    rollout__max_prompt_tokens=640,
    rollout__max_skill_tokens=128,
    rollout__bucket=640,
    learner__row_length=832,
    evaluate__num_tasks=8,
  )
  train.train(config, str(tmp_path))
  data = json.loads((tmp_path / 'config.json').read_text())['data']
  assert (data['products'], data['goals'], data['heldout_goals']) == (1000, 6910, 500)
  assert data['data_dir'] == str(DATA) and len(data['data_hash']) == 16
  rows = tinyrun.rows(tmp_path)
  assert [row['step'] for row in rows] == [0, 1, 2, 2]
  assert all(row['gap/max'] < 1e-3 and row['train/episodes'] == 8 for row in rows if 'update/loss' in row)
  assert rows[-1]['eval/num_tasks'] == 8
