import numpy as np
import pytest

from opid_jax import batch
from opid_jax.types import Prompt, Step, Task, Trajectory


def step(prompt, response, *, reward=0.0, valid=True, is_cut=False, is_shortened=False):
  tokens = np.array(response, np.int32)
  return Step(
    prompt=Prompt('head', '', (), f'page {prompt}', '', 'turn'), prompt_tokens=np.array(prompt, np.int32),
    response_tokens=tokens, logp_sampled=-np.arange(1, len(tokens) + 1, dtype=np.float32), observation='page',
    response='', action='', valid=valid, reward=reward, is_cut=is_cut, is_shortened=is_shortened,
  )  # fmt: skip


def attempts():
  """Two groups: one of two attempts, one of one; 1, 2 and 1 steps."""
  first = Trajectory(Task('a', 0, 'A'), '0/0', 0, (step([1, 2], [5, 2], reward=10.0),), True, 1.0)
  second = Trajectory(
    Task('a', 0, 'A'), '0/0', 1, (step([1], [6, 6, 2], valid=False, reward=1.0), step([1, 2, 3], [7], is_cut=True)),
    False, 0.25, is_truncated=True,
  )  # fmt: skip
  third = Trajectory(Task('b', 1, 'B'), '0/1', 0, (step([4, 4], [8, 2], is_shortened=True),), False, 0.0)
  return [first, second, third]


def test_every_step_is_a_row_with_its_attempt_and_group():
  made = batch.Batch.of(attempts())
  assert [(p.tolist(), r.tolist()) for p, r in made.sequences] == [
    ([1, 2], [5, 2]), ([1], [6, 6, 2]), ([1, 2, 3], [7]), ([4, 4], [8, 2]),
  ]  # fmt: skip
  assert made.width == 3
  # C15, B04: lengths count response tokens; masks come from lengths, whatever the ids are.
  assert made.mask.tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]]
  assert made.mask.sum(axis=1).tolist() == [2, 3, 1, 2]
  assert made.score.tolist() == [10, 1, 1, 0]  # The total of the attempt on each of its steps.
  assert made.valid.tolist() == [True, False, True, True]
  assert made.group.tolist() == [0, 0, 0, 1]
  assert made.trajectory.tolist() == [0, 1, 1, 2]
  assert [prompt.observation for prompt in made.prompts] == [
    'page [1, 2]', 'page [1]', 'page [1, 2, 3]', 'page [4, 4]',
  ]  # fmt: skip


def test_a_zero_token_counts_as_response():
  lone = Trajectory(Task('a', 0, 'A'), 'g', 0, (step([0], [0, 0]),), False, 0.0)
  assert batch.Batch.of([lone]).mask.tolist() == [[1, 1]]


def test_rollout_metrics_count_attempts_and_steps():
  found = batch.rollout_metrics(attempts())
  expected = {
    'train/success_rate': 1 / 3, 'train/score': 1.25 / 3, 'train/reward': 11 / 3, 'train/episodes': 3,
    'train/turns': 4 / 3, 'train/truncated_episodes': 1, 'train/invalid_action_rate': 1 / 4,
    'train/cut_responses': 1, 'train/shortened_prompts': 1, 'train/prompt_tokens': 2, 'train/response_tokens': 2,
  }  # fmt: skip
  assert found == pytest.approx(expected)


def test_gap_is_zero_for_equal_scores_and_shows_one_wrong_token():
  # C02: a mean hides what the maximum shows.
  made = batch.Batch.of(attempts())
  scored = np.array([[-1, -2, 9], [-1, -2, -3], [-1, 9, 9], [-1, -2, 9]], np.float32)  # 9: padding, never read.
  same = batch.gap_metrics(attempts(), made, scored, 0.2, 0.2)
  assert same == {'gap/mean': 0, 'gap/p99': 0, 'gap/max': 0, 'gap/outside': 0}
  scored[1, 2] += 0.8
  off = batch.gap_metrics(attempts(), made, scored, 0.2, 0.2)
  assert off['gap/mean'] == pytest.approx(0.1)
  assert off['gap/max'] == pytest.approx(0.8)
  assert off['gap/outside'] == pytest.approx(1 / 8)
