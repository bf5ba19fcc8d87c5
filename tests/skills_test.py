import numpy as np
import pytest
from shared import golden_cases

from opid_jax import advantages, prompts, skills
from opid_jax.types import Prompt, Skills, Step, Task, Trajectory

ROUTING = {'step_priority': 'critical_first', 'additive': 'additive'}


def attempt(num_steps):
  tokens = np.zeros(1, np.int32)
  prompt = Prompt('Your task is to: do A', '', (), 'obs', '', "Now it's your turn to act")
  step = Step(prompt, tokens, tokens, np.zeros(1, np.float32), 'obs', 'r', 'a', True, 0.0)
  return Trajectory(Task('t', 0, 'do A'), 'g', 0, (step,) * num_steps, False, 0.0)


def kinds(hints):
  return [tuple(h.kind for h in step) for step in hints]


def route(num_steps, found, routing='critical_first', episode_weight=0.5, step_weight=0.25):
  return skills.route(
    attempt(num_steps), found, routing=routing, episode_weight=episode_weight, step_weight=step_weight
  )


@pytest.mark.parametrize('case', golden_cases('skill_routing', lambda c: 'error' not in c))
def test_routing_equals_the_reference(case):
  found = Skills(episode='ep', steps={0: case['step_skill']})
  (step,) = route(
    1,
    found,
    ROUTING[case['mode']],
    float(case['episode_skill_enabled']),
    float(case['step_skill_enabled']),
  )
  got = [h.kind for h in step]
  assert ['episode' in got, 'step' in got] == case['out']


def analyzed_skills(case, name, num_steps):
  plan = case['analyzer_plan'][name]
  if name not in [a['traj'] for a in case['analyzed']]:
    return Skills(reason='skipped')
  if plan == 'raise' or plan.get('err'):
    return Skills(reason='failed')
  steps = {int(i): text for i, text in plan['st'].items() if int(i) < num_steps}
  return Skills(episode=plan['ep'], steps=steps)


@pytest.mark.parametrize('case', golden_cases('teacher_signals'))
def test_skill_rows_equal_the_reference(case):
  config = case['opid_config']
  schedule = {
    'start_step': config.get('opd_start_after_steps', 0),
    'stop_step': config.get('opd_stop_after_steps', 0),
  }
  on = skills.is_on(case['global_step'] - 1, **schedule)  # The reference counts steps from 1.
  assert on == case['teacher_enabled_by_schedule']
  if not on:
    return  # Nothing is routed then; the reference's row masks are not used either.
  hints = []
  for name, num_steps in case['trajectories']:
    hints += route(
      num_steps,
      analyzed_skills(case, name, num_steps),
      ROUTING[config.get('skill_teacher_mode', 'step_priority')],
      config.get('episode_skill_teacher_advantage_w', 0.001),
      config.get('step_skill_teacher_advantage_w', 0.001),
    )
  got = kinds(hints)
  expected = list(case['step_skill_rows'])
  if case['name'].startswith('empty episode skill'):
    expected[0] = True  # The step skill of trajectory A is kept here.
  assert ['episode' in k for k in got] == case['episode_skill_rows']
  assert ['step' in k for k in got] == expected


@pytest.mark.parametrize(
  'step, on', [(0, False), (2, False), (3, True), (5, True), (6, False)], ids=lambda x: str(x)
)
def test_schedule_counts_from_the_first_step_with_skills(step, on):
  assert skills.is_on(step, start_step=3, stop_step=6) == on


def test_without_a_stop_skills_never_end():
  assert skills.is_on(10**9, start_step=0, stop_step=0)


def test_critical_steps_get_their_own_skill_and_others_the_episodes():
  hints = route(3, Skills(episode=' ep ', steps={1: 'st'}))
  ep, st = skills.Hint('episode', 'ep', 0.5), skills.Hint('step', 'st', 0.25)
  assert hints == [(ep,), (st,), (ep,)]


@pytest.mark.parametrize(
  'routing, expected',
  [
    ('critical_first', [('episode',), ('step',)]),
    ('additive', [('episode',), ('episode', 'step')]),
    ('episode', [('episode',), ('episode',)]),
    ('step', [(), ('step',)]),
  ],
)
def test_ablations_route_by_name(routing, expected):
  assert kinds(route(2, Skills(episode='ep', steps={1: 'st'}), routing)) == expected


def test_a_blank_step_skill_falls_back_to_the_episode_skill():
  assert kinds(route(2, Skills(episode='ep', steps={0: ' \n', 1: ''}))) == [('episode',)] * 2


def test_an_unusable_analysis_gives_no_hints():
  assert route(2, Skills(episode='ep', steps={0: 'st'}, reason='timeout')) == [(), ()]


@pytest.mark.parametrize('keywords', [{'routing': 'x'}, {'episode_weight': -1.0}, {'step_weight': -0.1}])
def test_bad_settings_are_refused(keywords):
  with pytest.raises(ValueError, match='routing|weights'):
    route(1, Skills(episode='ep'), **keywords)


@pytest.mark.parametrize('index', [-1, 2])
def test_a_skill_of_a_step_that_does_not_exist_is_refused(index):
  with pytest.raises(ValueError, match='trajectory with 2 steps'):
    route(2, Skills(episode='ep', steps={index: 'st'}))


@pytest.mark.parametrize(
  'routing, expected', [('critical_first', [0.2, 0.25, 0.0]), ('additive', [0.2, 0.45, 0.0])]
)
def test_skill_weights_reach_the_advantage(routing, expected):
  both = Skills(episode='ep', steps={1: 'st'})
  hints = route(2, both, routing) + route(1, Skills(reason='timeout'), routing)
  placed = skills.contexts(hints, routing=routing)
  shift = {'episode': 0.4, 'step': 1.0}
  logp = np.zeros((1 + len(placed), 3, 2))
  for c, context in enumerate(placed):
    for n, hint in enumerate(context):
      logp[c + 1, n] = shift[hint.kind] if hint else np.nan
  mask = np.array([[1, 1], [1, 0], [1, 0]])
  a = advantages.skill_advantage(advantages.skill_shift(logp, mask), skills.weights(placed), mask)
  np.testing.assert_allclose(a, np.array(expected)[:, None] * mask, rtol=1e-6)


def test_every_routed_skill_is_counted_and_stands_in_its_prompt():
  found = Skills(episode='keep to the plan', steps={1: 'open the drawer'})
  hints = route(3, found) + route(2, Skills(reason='timeout'))
  assert skills.counts(hints) == {'episode': 2, 'step': 1, 'none': 2}
  prompt = attempt(1).steps[0].prompt
  for step in hints:
    for hint in step:
      assert hint.text in prompts.render(prompt, **{f'{hint.kind}_skill': hint.text})


@pytest.mark.parametrize('routing, n', [('critical_first', 1), ('additive', 2), ('episode', 1), ('step', 1)])
def test_contexts_have_one_entry_per_step(routing, n):
  placed = skills.contexts(route(3, Skills(episode='ep', steps={2: 'st'}), routing), routing=routing)
  assert skills.num_contexts(routing) == len(placed) == n
  assert skills.weights(placed).shape == (n, 3)
