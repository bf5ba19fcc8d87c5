import random

import pytest
from attempts import attempt, step

from opid_jax.analyzers import contrast
from opid_jax.analyzers.contrast import attempt_values
from opid_jax.types import Skills


def look_back(*attempts, max_step_skills=5):
  return contrast.make({'max_step_skills': max_step_skills}).submit(attempts).result()


# Two attempts meet on the results page; the second chose the wrong product.
WIN = attempt([('start', 'search[red]'), ('results', 'click[good]'), ('good', 'click[buy now]')], won=True)
LOSS = attempt([('start', 'search[red]'), ('results', 'click[bad]'), ('bad', 'click[buy now]')], number=1, score=0.5)


def test_win_and_loss_part_where_they_did_different_things():
  won, lost = look_back(WIN, LOSS)
  workflow = 'Workflow: search[red], then click[good], then click[buy now]'
  assert won == Skills(workflow, {1: 'Do: click[good]'}, '1 of 2 attempts solved the task; this one did.')
  assert lost == Skills(
    'Avoid: click[bad]', {1: 'Do: click[good]'}, '1 of 2 attempts solved the task; this one did not.')


@pytest.mark.parametrize('group', [
  [WIN], [LOSS], [WIN, attempt(WIN.steps, number=1, won=True)], [LOSS, attempt(LOSS.steps, number=2, score=0.5)],
])
def test_equal_attempts_teach_nothing(group):
  assert look_back(*group) == [Skills(reason='no_contrast')] * len(group)


def test_groups_are_not_compared_with_each_other():
  other = attempt(LOSS.steps, group='other', score=0.5)
  assert look_back(WIN, other) == [Skills(reason='no_contrast')] * 2
  mixed = look_back(WIN, other, LOSS)
  assert mixed == [look_back(WIN, LOSS)[0], Skills(reason='no_contrast'), look_back(WIN, LOSS)[1]]


def test_score_decides_between_failures_and_reward_before_score():
  half = attempt([('start', 'a')], score=0.5)
  none = attempt([('start', 'b')], score=0.0)
  assert attempt_values([half, none]) == [1.0, 0.0]
  assert [skills.steps for skills in look_back(half, none)] == [{0: 'Do: a'}, {0: 'Do: a'}]
  assert [skills.episode for skills in look_back(half, none)] == ['', 'Avoid: b']
  # Reward 10 and 0 scale to 1 and 0; scores 1 and 0.5 add 0.1 and 0.05; scaled again: 1 and 0.
  assert attempt_values([WIN, LOSS, none]) == pytest.approx([1.0, 0.05 / 1.1, 0.0])


def test_unshared_observations_are_not_critical():
  lonely = attempt([('elsewhere', 'x'), ('far', 'y')], number=1)
  assert look_back(WIN, lonely)[1] == Skills(
    'Workflow: search[red], then click[good], then click[buy now]', {},
    '1 of 2 attempts solved the task; this one did not.')


def test_at_a_bad_place_the_worse_choice_is_to_be_avoided_and_none_recommended():
  best = attempt([('start', 'best'), ('fine', 'buy')], score=0.8)
  bought = attempt([('start', 'wrong'), ('dead', 'buy')], number=1, score=0.2)
  left = attempt([('start', 'wrong'), ('dead', 'leave')], number=2, score=0.0)
  # Values 1, 0.25, 0, mean 0.42. What is done at 'dead' leads to less than the mean in any case.
  assert attempt_values([best, bought, left]) == [1.0, 0.25, 0.0]
  steps = [skills.steps for skills in look_back(best, bought, left)]
  assert steps == [{0: 'Do: best'}, {0: 'Do: best'}, {0: 'Do: best', 1: 'Avoid: leave'}]


def test_small_differences_are_not_critical():
  won = attempt([('start', 'good')], won=True)
  fair = attempt([('start', 'wrong'), ('dead', 'buy')], number=1, score=0.9)
  poor = attempt([('start', 'wrong'), ('dead', 'leave')], number=2, score=0.0)
  # At 'dead' the values are 0.09 / 1.1 and 0.
  assert look_back(won, fair, poor)[2].steps == {0: 'Do: good'}


def test_attempt_that_went_well_is_not_talked_out_of_it():
  # 'risky' won once and lost twice, 'safe' always won: only those who lost are told.
  group = [
    attempt([('start', 'risky')], won=True), attempt([('start', 'risky')], number=1),
    attempt([('start', 'risky')], number=2), attempt([('start', 'safe')], number=3, won=True)]
  assert [skills.steps[0] for skills in look_back(*group)] == ['Do: risky', 'Do: safe', 'Do: safe', 'Do: safe']


def test_mistake_is_not_fatal_while_another_attempt_still_won_from_there():
  # The first search led to the page from which the other attempt won; the purchase there was the mistake.
  lost = attempt([('start', 'search[a]'), ('results', 'click[bad]'), ('bad', 'click[buy now]')], number=1)
  assert look_back(attempt([('start', 'search[b]'), *WIN.steps[1:]], won=True), lost)[1].episode == 'Avoid: click[bad]'


def test_failure_that_only_left_something_out_is_told_the_workflow():
  careful = attempt([('item', 'click[red]'), ('item', 'click[buy now]')], won=True)
  hasty = attempt([('item', 'click[buy now]')], number=1, score=0.5)
  assert look_back(careful, hasty)[1].episode == 'Workflow: click[red], then click[buy now]'


def test_fatal_mistake_is_the_one_nobody_recovered_from():
  # 'detour' was followed by a win once, so the failure that took it names its later mistake.
  group = [
    attempt([('start', 'direct'), ('item', 'buy')], won=True),
    attempt([('start', 'direct'), ('item', 'buy')], number=1, won=True),
    attempt([('start', 'detour'), ('back', 'next'), ('item', 'buy')], number=2, won=True),
    attempt([('start', 'detour'), ('back', 'next'), ('item', 'leave')], number=3),
  ]
  assert look_back(*group)[3].episode == 'Avoid: leave'


def test_action_already_done_at_the_same_observation_is_not_advised_again():
  # Choosing an option leaves the page as it is.
  careful = [('item', 'click[red]'), ('item', 'click[large]'), ('item', 'click[buy now]')]
  hasty = [('item', 'click[buy now]')]
  won, lost = look_back(attempt(careful, won=True), attempt(hasty, number=1, score=0.5))
  # 'buy now' is worth half of what the options are worth, still it is right once they are chosen.
  assert won.steps == {0: 'Do: click[red]', 1: 'Do: click[large]'}
  assert lost.steps == {0: 'Do: click[large]'}


def test_attempt_counts_once_however_often_it_repeats_an_action():
  loop = attempt([('start', 'a'), ('start', 'a'), ('start', 'a'), ('start', 'b')], number=1)
  group = [attempt([('start', 'a')], won=True), attempt([('start', 'c')], number=2), loop]
  # a: mean of 1 and 0, whatever the loop did; best of a, b, c.
  assert [skills.steps[0] for skills in look_back(*group)] == ['Do: a'] * 3


def test_invalid_actions_are_never_named():
  broken = attempt([step('start', 'nonsense', valid=False), step('start', '', valid=False)], number=1)
  won, lost = look_back(attempt([('start', 'a')], won=True), broken)
  assert lost.steps == {0: 'Do: a', 1: 'Do: a'}
  assert lost.episode == 'Workflow: a'
  assert 'nonsense' not in str((won, lost))


def test_most_divergent_steps_are_kept():
  # At 'one' the choices differ by less than at 'two', because another win took the same way at 'one'.
  group = [
    attempt([('one', 'a'), ('two', 'a')], won=True),
    attempt([('one', 'b'), ('x', 'a')], number=1, won=True),
    attempt([('one', 'b'), ('two', 'b')], number=2),
  ]
  assert set(look_back(*group)[2].steps) == {0, 1}
  assert set(look_back(*group, max_step_skills=1)[2].steps) == {1}
  assert look_back(*group, max_step_skills=0)[2].steps == {}


def test_shorter_way_is_better_among_wins():
  long = attempt([('start', 'walk'), *[(f'{i}', 'on') for i in range(5)], ('end', 'buy')], number=1, won=True)
  group = [attempt([('start', 'go'), ('end', 'buy')], won=True), long, attempt([('start', 'stay')], number=2)]
  # 0.95^1 against 0.95^6.
  assert look_back(*group)[1].steps[0] == 'Do: go'
  assert look_back(*group)[1].episode == 'Workflow: go, then buy'


def test_workflow_is_cut_between_actions():
  long = attempt([('start', f'search[{"word " * 12}{i}]') for i in range(9)], won=True)
  workflow = look_back(long, attempt([('start', 'x')], number=1))[0].episode
  assert len(workflow) <= 400 and workflow.endswith(']') and workflow.count(', then ') == 4


def test_order_of_attempts_decides_nothing():
  rng = random.Random(0)
  for _ in range(30):
    group = [
      attempt([(f'page{rng.randrange(3)}', f'act{rng.randrange(3)}') for _ in range(rng.randint(1, 5))],
              number=number, won=rng.random() < 0.4, score=rng.random()) for number in range(6)]
    forward = look_back(*group)
    assert look_back(*group[::-1])[::-1] == forward
    assert look_back(*group) == forward
    for skills, one in zip(forward, group, strict=True):
      assert set(skills.steps) <= set(range(len(one.steps)))
      assert all(text.split(': ')[0] in ('Do', 'Avoid') for text in skills.steps.values())
