import numpy as np
import pytest
from shared import golden_cases

from opid_jax.algorithms import ALGORITHMS, AdvantageSettings, Evidence


def ids(names):
  return np.unique(names, return_inverse=True)[1]


def evidence(seed=0, weight=0.0, contexts=2):
  """Two groups of two attempts of two steps: group 0 is mixed, group 1 tied."""
  rng = np.random.default_rng(seed)
  mask = np.arange(5) < rng.integers(1, 6, size=(8, 1))
  return Evidence(
    logp=-rng.exponential(size=(contexts, 8, 5)).astype(np.float32),
    mask=mask.astype(np.float32),
    score=np.array([10, 10, 0, 0, 0, 0, 0, 0.0]),
    valid=np.array([1, 1, 1, 0, 1, 1, 1, 1]),
    group=np.repeat([0, 1], 4),
    trajectory=np.repeat([0, 1, 2, 3], 2),
    weight=np.full((contexts - 1, 8), weight, np.float32),
  )


@pytest.mark.parametrize('norm', ['mean', 'mean_std'])
@pytest.mark.parametrize('penalty', ['before', 'after'])
@pytest.mark.parametrize('contexts', [1, 2, 3])
def test_opid_without_weight_is_grpo_bit_for_bit(norm, penalty, contexts):
  settings = AdvantageSettings(norm=norm, penalty=penalty, invalid_penalty=0.1, center=True, rms=True)
  e = evidence(contexts=contexts)
  got, _ = ALGORITHMS['opid'].advantage(e, settings)
  expected, _ = ALGORITHMS['grpo'].advantage(e._replace(logp=e.logp[:1], weight=e.weight[:0]), settings)
  assert got.dtype == expected.dtype == np.float32
  assert got.tobytes() == expected.tobytes()


def test_the_table_says_where_skills_come_from():
  assert {name: (a.teacher, a.actor, a.auxiliary) for name, a in ALGORITHMS.items()} == {
    'grpo': ('none', False, None),
    'opid': ('hindsight', False, None),
  }


def test_grpo_spreads_the_outcome_over_the_response():
  e = evidence()
  a, metrics = ALGORITHMS['grpo'].advantage(e, AdvantageSettings())
  np.testing.assert_array_equal(a, np.array([5, 5, -5, -5, 0, 0, 0, 0])[:, None] * e.mask)
  assert metrics['advantage/tied_groups'] == 0.5
  assert metrics['advantage/valid_actions'] == 7 / 8


@pytest.mark.parametrize('penalty, invalid, other', [('after', -0.1, 0.0), ('before', -1.5, 0.5)])
def test_a_penalty_after_normalisation_keeps_its_size(penalty, invalid, other):
  # All four attempts fail, one with an invalid action: the std of (0, 0, 0, -0.1) is 0.05.
  e = Evidence(
    np.zeros((1, 4, 1)), np.ones((4, 1)), np.zeros(4), [1, 1, 1, 0], [0] * 4, range(4), np.zeros((0, 4))
  )
  settings = AdvantageSettings(norm='mean_std', invalid_penalty=0.1, penalty=penalty)
  a, metrics = ALGORITHMS['grpo'].advantage(e, settings)
  assert a[3, 0] == pytest.approx(invalid, abs=1e-3)
  assert a[0, 0] == pytest.approx(other, abs=1e-3)
  assert metrics['advantage/tied_groups'] == 1.0


def test_the_skill_term_works_alone_in_a_tied_group():
  e = evidence(weight=0.5)
  a, metrics = ALGORITHMS['opid'].advantage(e, AdvantageSettings())
  shift = (e.logp[1] - e.logp[0]) * e.mask
  np.testing.assert_allclose(a[4:], 0.5 * shift[4:], rtol=1e-6)
  on = e.mask > 0
  skill, outcome = np.abs(0.5 * shift[on]).mean(), metrics['advantage/outcome_abs_mean']
  assert metrics['advantage/skill_share'] == pytest.approx(skill / (skill + outcome), rel=1e-5)
  assert metrics['shift/abs_mean'] == pytest.approx(np.abs(shift[on]).mean(), rel=1e-5)
  assert metrics['shift/rms'] == pytest.approx(np.sqrt(np.mean(shift[on] ** 2)), rel=1e-5)
  assert metrics['shift/token_share'] == 1.0


def test_calibration_is_a_setting():
  e = evidence(weight=0.2)
  a, _ = ALGORITHMS['opid'].advantage(e, AdvantageSettings(center=True, rms=True, shift_clip=1.0))
  shift = (e.logp[1] - e.logp[0])[e.mask > 0]
  scaled = np.clip((shift - shift.mean()) / shift.std(), -1, 1)
  outcome = (np.array([5, 5, -5, -5, 0, 0, 0, 0])[:, None] * e.mask)[e.mask > 0]
  np.testing.assert_allclose(a[e.mask > 0], outcome + 0.2 * scaled, rtol=1e-4, atol=1e-5)


def test_metrics_of_a_batch_without_tokens_are_zero_not_nan():
  e = evidence(weight=0.5)
  a, metrics = ALGORITHMS['opid'].advantage(e._replace(mask=np.zeros_like(e.mask)), AdvantageSettings())
  assert not a.any()
  assert np.isfinite(list(metrics.values())).all()
  assert metrics['advantage/empty_responses'] == 1.0


def test_an_unknown_penalty_is_refused():
  with pytest.raises(ValueError, match="'after', 'before'"):
    ALGORITHMS['grpo'].advantage(evidence(), AdvantageSettings(penalty='never'))


@pytest.mark.parametrize('case', golden_cases('advantage_opid', lambda c: c['step_advantage_w'] == 0))
def test_opid_equals_the_reference(case):
  names = ('old_log_prob', 'episode_teacher_log_prob', 'step_teacher_log_prob')
  weight = np.array(
    [
      case['w_episode_skill'] * np.array(case['episode_skill_mask']),
      case['w_step_skill'] * np.array(case['step_skill_mask']),
    ]
  )
  e = Evidence(
    logp=np.array([case[name] for name in names], np.float32),
    mask=np.array(case['response_mask']),
    score=np.sum(np.array(case['token_rewards'], np.float32), axis=1),  # The penalty is in it already.
    valid=np.ones(len(weight[0])),
    group=ids(case['index']),
    trajectory=ids(case['traj_index']),
    weight=weight,
  )
  settings = AdvantageSettings(
    norm=case['norm_mode'].removesuffix('_norm'),
    stats='row',
    center=case['normalize_teacher'],
    rms=case['normalize_teacher'],
    shift_clip=case['clip_teacher'] or 0.0,
  )
  a, metrics = ALGORITHMS['opid'].advantage(e, settings)
  out = case['out']
  np.testing.assert_allclose(a, out['total'], rtol=1e-5, atol=1e-6)
  logged = out['metrics']
  close = {'rel': 1e-4, 'abs': 1e-6}
  assert metrics['advantage/skill_share'] == pytest.approx(logged['opid/adv/teacher_share'], **close)
  assert metrics['advantage/skill_abs_mean'] == pytest.approx(logged['opid/adv/teacher_abs_mean'], **close)
  assert metrics['advantage/outcome_abs_mean'] == pytest.approx(logged['opid/adv/episode_abs_mean'], **close)
