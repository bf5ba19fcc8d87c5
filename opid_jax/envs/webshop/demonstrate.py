"""Demonstrations for the supervised warm start: a shopper of mixed care, with and without advice."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from opid_jax.envs.webshop import generate, goals, shopper
from opid_jax.envs.webshop.environment import WebShop
from opid_jax.types import State, Task

_KINDS = ('do', 'do', 'avoid', 'workflow')
_PRACTICE_SEED = 10_000
_PRACTICE_DRAWS = 10


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


def practice_tasks(env: WebShop, count: int, *, seed: int) -> list[Task]:
  """Wishes to practise on: the products of the run's shop with other options and price limits than in its own goals.

  A pretrained model knows the world that it acts in, and so may a policy that stands in for one: it has bought
  the products of training goals and of held-out goals equally often, but has read no sentence of either.

  Args:
    count: of tasks; wishes repeat once there are no more.

  Raises:
    ValueError: if the catalogue has no other wishes.
  """
  sizes = env.describe()
  own = {task.text for split in ('train', 'heldout') for task in env.panel(split, sizes[f'{split}_goals'])}
  wishes: dict[str, goals.Goal] = {}
  for draw in range(_PRACTICE_DRAWS):
    drawn = goals.synthetic_goals(
      env.shop.products, seed=_PRACTICE_SEED + draw, max_per_product=generate.GOALS_PER_PRODUCT
    )
    wishes |= {goal.text: goal for goal in drawn if goal.text not in own}
  if not wishes:
    raise ValueError('The catalogue has no wishes beside its own goals to practise on.')
  order = list(wishes.values())
  random.Random(f'{seed}/practice').shuffle(order)
  picked = [order[i % len(order)] for i in range(count)]
  return [Task(id=f'practice/{i:05d}', index=i, text=goal.text, data=goal) for i, goal in enumerate(picked)]


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
