"""Demonstrations for the supervised warm start: a shopper of mixed care, with and without advice."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from opid_jax.envs.webshop import shopper
from opid_jax.envs.webshop.environment import WebShop
from opid_jax.types import State, Task

_KINDS = ('do', 'do', 'avoid', 'workflow')


class Demonstration(NamedTuple):
  """What to reply in one state.

  Attributes:
    state: where it is replied.
    episode_skill, step_skill: advice that stands in the prompt; at most one is not ''.
    responses: draws from the shopper's replies, with repetitions.
  """

  state: State
  episode_skill: str
  step_skill: str
  responses: tuple[str, ...]


def practice_settings(number: int) -> dict[str, int]:
  """Settings of the shop in which the `number`-th part of the demonstrations is given.

  Each is another generated catalogue, never the default one: a policy that has seen the products of the run would
  know them by heart, the training goals better than the held-out ones, and would not need to read the page.
  """
  return {'catalogue_seed': 1000 + number}


def demonstrate(env: WebShop, task: Task, seed: int, *, care: tuple[float, float], advised: float, draws: int):
  """One episode of the scripted shopper on a task, as an iterator of `Demonstration`.

  Args:
    seed: decides everything.
    care: range from which the care of the episode's shopper is drawn.
    advised: share of the turns shown with advice; the episode itself goes on as without.
    draws: replies per turn; the first one is acted on.
  """
  rng = random.Random(f'{seed}/{task.id}')
  level = rng.uniform(*care)
  plan = _plan(env, task, rng)
  state = env.reset(task)
  while not state.is_done and state.turn < env.max_turns:
    responses = tuple(shopper.act(env, state, rng, care=level) for _ in range(draws))
    after = env.step(state, responses[0])
    if rng.random() < advised:
      yield _advise(env, state, responses, after.action, plan, rng)
    else:
      yield Demonstration(state, '', '', responses)
    state = after


def demonstrations(env: WebShop, tasks, *, seed: int, care, advised: float, draws: int) -> Iterator[Demonstration]:
  """Every turn of one episode per task, in order."""
  for number, task in enumerate(tasks):
    yield from demonstrate(env, task, seed + number, care=care, advised=advised, draws=draws)


def _plan(env: WebShop, task: Task, rng: random.Random) -> list[str]:
  """The actions of a shopper who takes care."""
  state, plan = env.reset(task), []
  while not state.is_done and state.turn < env.max_turns:
    state = env.step(state, shopper.act(env, state, rng, care=1.0))
    plan.append(state.action)
  return plan


def _advise(env, state, responses, would_do: str, plan: list[str], rng) -> Demonstration:
  def heed(skill):
    return tuple(shopper.act(env, state, rng, skill=skill) for _ in responses)

  kind = rng.choice(_KINDS)
  if kind == 'do':
    skill = shopper.do_skill(_some_action(env, state, would_do, plan, rng))
    return Demonstration(state, '', skill, heed(skill))
  if kind == 'avoid':
    # Most mistakes that an episode warns of are made on another page: what is not meant here changes nothing.
    others = [action for action in (*_clicks(state), *plan) if action != would_do]
    avoided = rng.choice(others) if others and rng.random() < 0.6 else would_do
    skill = shopper.avoid_skill(avoided)
    responses = tuple(
      heed(skill)[0] if env.step(state, response).action == avoided else response for response in responses
    )
    return Demonstration(state, *((skill, '') if rng.random() < 0.7 else ('', skill)), responses)
  skill = shopper.workflow_skill(plan)
  return Demonstration(state, skill, '', heed(skill))


def _some_action(env, state, would_do, plan, rng) -> str:
  """Sometimes the right thing, sometimes what the shopper had in mind, sometimes anything on the page: a language
  model heeds a hint whether or not it would have had the idea itself."""
  chance = rng.random()
  if chance < 0.2:
    return shopper.oracle(env, state)
  if chance < 0.4:
    return next((action for action in plan if action in state.actions), would_do)
  if chance < 0.6:
    return would_do
  return rng.choice(_clicks(state) or plan[:1])


def _clicks(state: State) -> list[str]:
  return [action for action in state.actions if '<your query>' not in action]
