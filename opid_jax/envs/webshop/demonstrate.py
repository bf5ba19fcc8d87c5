"""Demonstrations for the supervised warm start: what a shopper of mixed care does, with and without advice."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from opid_jax.envs.webshop import shopper
from opid_jax.envs.webshop.environment import WebShop
from opid_jax.types import State, Task

# Advice is as good as it comes: a language model heeds a hint whether or not it would have had the idea itself.
_KINDS = ('do', 'do', 'avoid', 'workflow')


class Demonstration(NamedTuple):
  """One reply to imitate.

  Attributes:
    state: where it was given.
    episode_skill, step_skill: advice that stood in the prompt; at most one is not ''.
    response: the reply.
  """

  state: State
  episode_skill: str
  step_skill: str
  response: str


def demonstrate(env: WebShop, task: Task, seed: int, *, care: tuple[float, float], advised: float):
  """One episode of the scripted shopper on a task, as an iterator of `Demonstration`.

  Args:
    seed: decides everything.
    care: range from which the care of the episode's shopper is drawn.
    advised: share of the turns shown with advice; the episode itself goes on as without.
  """
  rng = random.Random(f'{seed}/{task.id}')
  level = rng.uniform(*care)
  plan = _plan(env, task)
  state = env.reset(task)
  while not state.is_done and state.turn < env.max_turns:
    response = shopper.act(env, state, rng, care=level)
    after = env.step(state, response)
    if rng.random() < advised:
      yield _advise(env, state, after.action, plan, rng)
    else:
      yield Demonstration(state, '', '', response)
    state = after


def demonstrations(env: WebShop, tasks, *, seed: int, care, advised: float) -> Iterator[Demonstration]:
  """Every turn of one episode per task, in order."""
  for number, task in enumerate(tasks):
    yield from demonstrate(env, task, seed + number, care=care, advised=advised)


def _plan(env: WebShop, task: Task) -> list[str]:
  """The actions of the shopper who knows the product."""
  state, plan = env.reset(task), []
  while not state.is_done and state.turn < env.max_turns:
    plan.append(shopper.oracle(env, state))
    state = env.step(state, f'<think>x</think><action>{plan[-1]}</action>')
  return plan


def _advise(env, state, would_do: str, plan: list[str], rng) -> Demonstration:
  kind = rng.choice(_KINDS)
  if kind == 'do':
    skill = shopper.do_skill(_some_action(env, state, would_do, plan, rng))
    return Demonstration(state, '', skill, shopper.act(env, state, rng, skill=skill))
  if kind == 'avoid':
    skill = shopper.avoid_skill(would_do)
    response = shopper.act(env, state, rng, skill=skill)
    return Demonstration(state, *((skill, '') if rng.random() < 0.5 else ('', skill)), response)
  skill = shopper.workflow_skill(plan)
  return Demonstration(state, skill, '', shopper.act(env, state, rng, skill=skill))


def _some_action(env, state, would_do, plan, rng) -> str:
  """Sometimes the right thing, sometimes what the shopper had in mind, sometimes anything on the page."""
  chance = rng.random()
  if chance < 0.4:
    return shopper.oracle(env, state)
  if chance < 0.6:
    return would_do
  others = [action for action in state.actions if '<' not in action or action == shopper.BACK]
  return rng.choice(others) if others else plan[0]
