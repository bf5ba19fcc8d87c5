import numpy as np
import pytest
from shared import golden_cases

from opid_jax import advantages

NORM = {True: 'mean', False: 'mean_std'}
STATS = {True: 'row', False: 'trajectory'}


def ids(names):
  return np.unique(names, return_inverse=True)[1]


def expected_outcome(case, stats):
  """The recorded advantage, with the documented better behaviour: ties and lone attempts get 0."""
  scores, group, trajectory = case['row_score'], case['index'], case['traj_index']
  expected = np.array(case['advantage_per_row'])
  for g in set(group):
    rows = [i for i in range(len(group)) if group[i] == g]
    members = rows if stats == 'row' else {trajectory[i]: i for i in reversed(rows)}.values()
    if len(members) == 1 or len({scores[i] for i in rows}) == 1:
      expected[rows] = 0.0
  return expected


def check_group_relative(case, norm):
  stats = STATS[case['compute_mean_std_cross_steps']]
  a = advantages.group_relative(
    case['row_score'], ids(case['index']), ids(case['traj_index']), norm=norm, stats=stats
  )
  on_tokens = np.array(case['mask_len']) > 0
  np.testing.assert_allclose(np.where(on_tokens, a, 0), expected_outcome(case, stats), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('case', golden_cases('advantage_episode'))
def test_group_relative_equals_the_reference(case):
  assert case['epsilon'] == 1e-6
  check_group_relative(case, NORM[case['remove_std']])


@pytest.mark.parametrize('case', golden_cases('advantage_baselines', lambda c: c['estimator'] == 'grpo'))
def test_grpo_and_dr_grpo_equal_the_reference(case):
  check_group_relative(case, NORM[not case['norm_adv_by_std_in_grpo']])


@pytest.mark.parametrize('rewards', [[0.0] * 4, [1.0] * 4, [0.7] * 8, [9.9] * 13, [0.1] * 7, [1 / 3] * 9])
@pytest.mark.parametrize('norm', advantages.NORMS)
@pytest.mark.parametrize('stats', advantages.STATS)
@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_equal_rewards_give_exactly_zero(rewards, norm, stats, dtype):
  n = len(rewards)
  rewards = np.array(rewards, dtype)
  a = advantages.group_relative(rewards, np.zeros(n, int), np.arange(n), norm=norm, stats=stats)
  assert not a.any()


@pytest.mark.parametrize('win', [1.0, 10.0])
def test_one_win_of_four_does_not_depend_on_the_reward_scale(win):
  a = advantages.group_relative([win, 0, 0, 0], [0] * 4, range(4), norm='mean_std')
  np.testing.assert_allclose(a, [1.5, -0.5, -0.5, -0.5], atol=1e-3)  # sample std


def test_tied_groups_are_found():
  score = [0, 0, 10, 0, 5]
  np.testing.assert_array_equal(advantages.tied(score, [0, 0, 1, 1, 2], range(5)), [True, False, True])


def test_groups_do_not_mix_and_order_means_nothing():
  score, group = np.array([0.0, 1, 10, 11]), np.array([7, 7, 3, 3])
  a = advantages.group_relative(score, group, np.arange(4), norm='mean_std')
  np.testing.assert_allclose(a, np.array([-1, 1, -1, 1]) / np.sqrt(2), atol=1e-5)
  order = np.array([2, 0, 3, 1])
  shuffled = advantages.group_relative(score[order], group[order], order, norm='mean_std')
  np.testing.assert_array_equal(shuffled, a[order])


def test_a_long_failure_does_not_outvote_a_short_success():
  score, trajectory = np.array([10.0] + [0.0] * 9), np.array([0] + [1] * 9)
  np.testing.assert_allclose(advantages.group_relative(score, np.zeros(10, int), trajectory)[[0, 1]], [5, -5])
  np.testing.assert_allclose(
    advantages.group_relative(score, np.zeros(10, int), trajectory, stats='row')[[0, 1]], [9, -1]
  )


def test_a_penalty_in_a_tied_group_is_not_divided_by_nothing():
  score = advantages.penalise([0.0, 0, 0, 0], [1, 0, 1, 1], 0.1)  # the second step of trajectory 0 is invalid
  a = advantages.group_relative(score, [0] * 4, [0, 0, 1, 1], norm='mean_std')
  np.testing.assert_allclose(a, [0, -0.1, 0, 0], atol=1e-7)


def test_no_rows_give_no_advantages():
  assert advantages.group_relative([], [], []).shape == (0,)


@pytest.mark.parametrize('keywords', [{'norm': 'std'}, {'stats': 'token'}])
def test_unknown_words_are_refused(keywords):
  with pytest.raises(ValueError, match='Available'):
    advantages.group_relative([1.0], [0], [0], **keywords)


def test_shapes_that_differ_are_refused():
  with pytest.raises(ValueError, match=r'score \[2\], group \[1\]'):
    advantages.group_relative([1.0, 2.0], [0], [0, 1])


@pytest.mark.parametrize('case', golden_cases('reward_placement'))
def test_penalty_equals_the_reference(case):
  score = np.array(case['episode_rewards'])
  if case['normalize_by_length']:
    score = score / np.array(case['episode_lengths'])
  penalised = advantages.penalise(score, case['is_action_valid'], case['coef'])
  # The reference writes a row's score on one token; the row sum is what advantages are made of.
  np.testing.assert_allclose(penalised, np.sum(case['scores_after_penalty'], axis=1), rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(score, np.sum(case['reward_tensor'], axis=1), rtol=1e-5)


@pytest.mark.parametrize('case', golden_cases('step_returns'))
def test_step_returns_equal_the_reference(case):
  returns = advantages.step_returns(case['rewards'], ids(case['traj_uid']), gamma=case['gamma'])
  np.testing.assert_allclose(returns, case['returns'], rtol=1e-5, atol=1e-6)


def teacher(case):
  """`skill_advantage` of one skill context, from the reference's names; its skill mask joins the mask."""
  old, mask = np.array(case['old_log_prob'], np.float32), np.array(case['response_mask'])
  skill_mask = np.ones(1) if case['skill_mask'] is None else np.array(case['skill_mask'])
  if skill_mask.ndim == 1 and skill_mask.shape != mask.shape[:1]:
    skill_mask = np.broadcast_to(skill_mask, mask.shape[:1])
  mask = mask * (skill_mask[:, None] if skill_mask.ndim == 1 else skill_mask)
  shift = advantages.skill_shift(np.stack([old, np.array(case['teacher_log_prob'], np.float32)]), mask)
  return advantages.skill_advantage(
    shift,
    np.ones((1, len(old))),
    mask,
    center=case['normalize'],
    rms=case['normalize'],
    clip=case['clip_range'] or 0.0,
    epsilon=case['epsilon'],
  )


def has_both_scores(case):
  """A missing score is zeros in the reference; here it cannot be expressed."""
  return 'error' not in case and case['teacher_log_prob'] is not None


@pytest.mark.parametrize('case', golden_cases('advantage_teacher', has_both_scores))
def test_skill_advantage_equals_the_reference(case):
  np.testing.assert_allclose(teacher(case), case['advantages'], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('shapes', [((2, 2, 4), (2, 3)), ((2, 3), (2, 3)), ((2, 2, 3), (2, 4))])
def test_misshapen_log_probabilities_are_refused(shapes):
  with pytest.raises(ValueError, match='Expected logp'):
    advantages.skill_shift(np.zeros(shapes[0]), np.zeros(shapes[1]))


@pytest.mark.parametrize('weight', [(1, 3), (2, 2), (2,)])
def test_misshapen_weights_are_refused(weight):
  with pytest.raises(ValueError, match='Expected shift'):
    advantages.skill_advantage(np.zeros((1, 2, 3)), np.ones(weight), np.ones((2, 3)))


def test_centring_and_scaling_are_separate():
  shift, weight, mask = np.array([[[1.0, 3.0]]]), np.array([[1.0]]), np.ones((1, 2))
  np.testing.assert_allclose(advantages.skill_advantage(shift, weight, mask, center=True), [[-1, 1]])
  np.testing.assert_allclose(
    advantages.skill_advantage(shift, weight, mask, rms=True), np.array([[1, 3]]) / np.sqrt(5), rtol=1e-5
  )
  np.testing.assert_allclose(advantages.skill_advantage(shift, weight, mask, clip=2.0), [[1, 2]])


def test_padding_and_steps_without_a_skill_change_nothing():
  shift = np.array([[[1.0, 3.0, np.nan], [np.nan, np.nan, np.nan]]])
  mask = np.array([[1, 1, 0], [1, 0, 0]])
  a = advantages.skill_advantage(shift, np.array([[0.5, 0.0]]), mask, center=True, rms=True)
  np.testing.assert_allclose(a, [[-0.5, 0.5, 0], [0, 0, 0]], rtol=1e-5)


def test_without_a_skill_context_the_skill_advantage_is_the_empty_sum():
  mask = np.ones((2, 3))
  shift = advantages.skill_shift(np.zeros((1, 2, 3)), mask)
  assert shift.shape == (0, 2, 3)
  assert not advantages.skill_advantage(shift, np.zeros((0, 2)), mask).any()


@pytest.mark.parametrize('case', golden_cases('advantage_opid', lambda c: c['step_advantage_w'] == 0))
def test_opid_total_equals_the_reference(case):
  mask = np.array(case['response_mask'])
  score = np.sum(np.array(case['token_rewards'], np.float32), axis=1)
  norm = case['norm_mode'].removesuffix('_norm')
  outcome = advantages.group_relative(
    score, ids(case['index']), ids(case['traj_index']), norm=norm, stats='row'
  )
  logp = [case['old_log_prob'], case['episode_teacher_log_prob'], case['step_teacher_log_prob']]
  shift = advantages.skill_shift(np.array(logp, np.float32), mask)
  weight = np.stack(
    [
      case['w_episode_skill'] * np.array(case['episode_skill_mask']),
      case['w_step_skill'] * np.array(case['step_skill_mask']),
    ]
  )
  skill = advantages.skill_advantage(
    shift,
    weight,
    mask,
    center=case['normalize_teacher'],
    rms=case['normalize_teacher'],
    clip=case['clip_teacher'] or 0.0,
  )
  np.testing.assert_allclose(skill, case['out']['teacher'], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
    advantages.opid_total(outcome, skill, mask), case['out']['total'], rtol=1e-5, atol=1e-6
  )
