"""The scripted shopper and its skills."""

import random

import pytest

from opid_jax.envs import webshop
from opid_jax.envs.webshop import shopper


@pytest.fixture(scope='module')
def env():
  return webshop.make({'num_heldout': 200})


def _play(env, task, act):
  states = [env.reset(task)]
  while not states[-1].is_done and states[-1].turn < env.max_turns:
    states.append(env.step(states[-1], act(states[-1])))
  return states


def _success(env, act, n=200):
  return sum(_play(env, task, act)[-1].success for task in env.panel('heldout', n)) / n


def _action(reply):
  return reply.split('<action>')[1].removesuffix('</action>')


def test_all_goals_can_be_reached(env):
  assert _success(env, lambda state: f'<think>x</think><action>{shopper.oracle(env, state)}</action>') > 0.95


def test_care_decides_the_success(env):
  rng = random.Random(0)
  rates = [_success(env, lambda state, care=care: shopper.act(env, state, rng, care=care))
           for care in (0.0, 0.5, 1.0)]
  assert rates[0] < 0.15 and 0.3 < rates[1] < 0.6 and rates[2] > 0.95


def test_replies_are_valid_short_and_reproducible(env):
  for seed, task in enumerate(env.panel('train', 50)):
    rng, again = random.Random(seed), random.Random(seed)
    for state in _play(env, task, lambda state, rng=rng: shopper.act(env, state, rng))[1:]:
      assert state.valid
    state = env.reset(task)
    assert shopper.act(env, state, again) == shopper.act(env, state, random.Random(seed))
    thought = shopper.act(env, state, again).split('<think>')[1].split('</think>')[0]
    assert len(thought.split()) <= 8


def test_do_is_done_exactly_and_thought_of_like_any_other_action(env):
  state = env.step(env.reset(env.panel('train', 1)[0]), '<think>x</think><action>search[soap]</action>')
  for action in (state.actions[-1], 'click[next >]', 'click[back to search]', 'search[wide shoes]'):
    assert _action(shopper.act(env, state, random.Random(0), skill=shopper.do_skill(action))) == action


def test_advice_that_the_page_cannot_execute_is_replaced_by_a_careful_action(env):
  state = env.reset(env.panel('train', 1)[0])
  replies = {shopper.act(env, state, random.Random(seed), skill=shopper.do_skill('click[x]'), care=0.0)
             for seed in range(9)}
  assert {_action(reply) for reply in replies} == {f'search[{state.task.data.instruction[8:]}]'}


def test_avoided_action_is_never_taken(env):
  for seed, task in enumerate(env.panel('train', 30)):
    rng = random.Random(seed)
    for state in _play(env, task, lambda state, rng=rng: shopper.act(env, state, rng))[:-1]:
      for action in (_action(shopper.act(env, state, random.Random(0), care=1.0)), 'click[buy now]'):
        reply = shopper.act(env, state, random.Random(1), skill=shopper.avoid_skill(action))
        assert _action(reply) != action
        assert env.step(state, reply).valid


def test_workflow_of_a_success_is_repeated(env):
  for seed, task in enumerate(env.panel('train', 30)):
    rng = random.Random(seed)
    first = _play(env, task, lambda state, rng=rng: shopper.act(env, state, rng, care=1.0))
    skill = shopper.workflow_skill([state.action for state in first[1:]])
    rng = random.Random(0)
    second = _play(env, task, lambda state, skill=skill, rng=rng: shopper.act(env, state, rng, skill=skill))
    assert [state.action for state in second] == [state.action for state in first]
