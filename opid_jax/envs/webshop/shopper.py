"""A scripted shopper: teacher of the supervised warm start, and proof that the goals can be reached.

It writes replies in the form that the projection reads and, when it is given a skill, follows it. Skills have
one of four forms, which the analyzers write and which `act` understands:

  Do: <action>                              step skill
  Avoid: <action>                           step or episode skill
  Workflow: <action>, then <action>, ...    episode skill
"""

import random
import re
from collections.abc import Sequence

from opid_jax.envs.projection import MAX_ACTION_CHARS
from opid_jax.envs.webshop import engine
from opid_jax.envs.webshop.catalogue import Product
from opid_jax.envs.webshop.environment import WebShop
from opid_jax.envs.webshop.goals import Goal
from opid_jax.types import State

BACK = 'click[< prev]'
BUY = 'click[buy now]'
_THEN = ', then '
_WORDS = re.compile(r'[^\w\'.]+')


def do_skill(action: str) -> str:
  """The step skill that says what to do."""
  return f'Do: {action}'


def avoid_skill(action: str) -> str:
  """The skill that says what not to do."""
  return f'Avoid: {action}'


def workflow_skill(actions: Sequence[str]) -> str:
  """The episode skill that names the actions of a whole attempt."""
  return 'Workflow: ' + _THEN.join(actions)


def act(env: WebShop, state: State, rng: random.Random, *, skill: str = '', care: float = 0.5) -> str:
  """The shopper's reply in a state.

  Args:
    env: the environment of the state.
    state: a state that is not done.
    rng: consumed; the same generator state gives the same reply.
    skill: advice that the action follows where the page allows it; '' for none.
    care: in [0, 1]; probability of choosing well, for each choice. 1 never errs knowingly.

  Returns:
    `<think>...</think><action>...</action>`. The thought depends on the page and the action alone.
  """
  action = _follow(env, state, skill) if skill else ''
  if not action:
    forbidden = skill.removeprefix('Avoid: ') if skill.startswith('Avoid: ') else ''
    action = _choose(env, state, rng, 1.0 if skill else care, forbidden)
  return f'<think>{_thought(state.inner.page, action)}</think><action>{action}</action>'


def oracle(env: WebShop, state: State) -> str:
  """The action of a shopper who knows which product the goal was made from.

  Searches with the words of the wish, or with those of the title where the wish does not find the product.
  With this player the success rate is the ceiling of a panel: what it misses, nobody can solve.
  """
  goal, visit = state.task.data, state.inner
  if visit.page == 'index':
    return f'search[{_query_that_finds(env, goal)}]'
  if visit.page == 'results':
    shown = engine.visible_products(env.shop, visit)
    if any(product.asin == goal.asin for product in shown):
      return f'click[{goal.asin.lower()}]'
    return 'click[next >]' if shown else 'click[back to search]'
  if visit.page == 'item' and visit.asin == goal.asin.lower():
    return next((f'click[{value}]' for _, value in _missing(env, visit, goal)), BUY)
  return BACK


def _query_that_finds(env, goal):
  wish = _WORDS.sub(' ', goal.instruction.lower())
  title = _WORDS.sub(' ', env.shop.by_asin[goal.asin.lower()].name.lower())
  hits = (env.shop.products[i].asin for i in env.shop.search(wish))
  return (wish if goal.asin in hits else title)[:MAX_ACTION_CHARS - len('search[]')]


def _follow(env, state, skill):
  """The action that a skill names for this state, '' if it names none that the page can execute."""
  if skill.startswith('Do: '):
    wanted = skill.removeprefix('Do: ')
  elif skill.startswith('Workflow: '):
    wanted = _next_in_plan(state, skill.removeprefix('Workflow: ').split(_THEN))
  else:
    return ''
  return wanted if engine.act(env.shop, state.inner, wanted) is not None else ''


def _next_in_plan(state, plan):
  """The first action of the plan that is not behind us; any search counts as the planned one."""
  done = {action for _, action in state.history}
  left = [action for action in plan if action not in done]
  if state.inner.page != 'index':
    left = [action for action in left if not action.startswith('search[')]
  return left[0] if left else ''


def _choose(env, state, rng, care, forbidden):
  goal, visit = state.task.data, state.inner
  if visit.page == 'index':
    options = [_search(goal, rng, care), _search(goal, rng, 0.0), f'search[{goal.query}]']
  elif visit.page == 'results':
    options = _results_choices(env, state, rng, care)
  elif visit.page == 'item':
    options = _item_choices(env, state, rng, care)
  else:
    options = [BACK]
  # What is forbidden may be the only idea; then any other admissible action will do.
  others = [action for action in state.actions if action != forbidden and '<your query>' not in action]
  return next((action for action in options if action != forbidden), others[0] if others else forbidden)


def _search(goal: Goal, rng: random.Random, care: float) -> str:
  """All words of the wish, or only the kind of product with at most one more word."""
  words = goal.instruction.lower().removeprefix('find me ').split()
  if rng.random() >= care:
    kind = goal.query.split()
    rest = [word for word in words if word not in kind]
    words = (rng.sample(rest, min(len(rest), rng.choice([0, 1])))) + kind
  return f'search[{" ".join(words)}]'


def _results_choices(env, state, rng, care):
  goal, visit = state.task.data, state.inner
  shown = engine.visible_products(env.shop, visit)
  if not shown:
    return ['click[back to search]']
  seen = {action for _, action in state.history}
  fresh = [product for product in shown if _click(product) not in seen]
  # Carelessness takes what stands on top. As a habit and not a random pick, it stays the likeliest action of an
  # imitator also at a low sampling temperature, so that there is something to unlearn.
  best = sorted(fresh, key=lambda product: _promise(product, goal), reverse=True) if rng.random() < care else fresh
  return [*(_click(product) for product in best), 'click[next >]']


def _item_choices(env, state, rng, care):
  """Selects what the wish names, gives up on an item that lacks it, buys when nothing is left."""
  goal, visit = state.task.data, state.inner
  offered = dict(env.shop.by_asin[visit.asin].options)
  lacking = any(value not in offered.get(name, ()) for name, value in _pairs(goal, offered))
  if lacking and rng.random() < care:
    return [BACK, BUY]
  choices = []
  for name, value in _missing(env, visit, goal):
    # Three quarters of the carelessness forget the option, the rest picks another value.
    if rng.random() < care:
      choices.append(f'click[{value}]')
    elif rng.random() < 0.25:
      choices.append(f'click[{rng.choice(offered[name])}]')
  return [*choices, BUY, BACK]


def _missing(env, visit, goal):
  """(name, value) that the wish names, the item offers and nobody has selected, also not another value."""
  offered = dict(env.shop.by_asin[visit.asin].options)
  selected = dict(visit.options)
  return [(name, value) for name, value in _pairs(goal, offered)
          if value in offered.get(name, ()) and name not in selected]


def _pairs(goal, offered):
  """The goal's options as (name, value); a human goal names values only."""
  for option in goal.options:
    if isinstance(option, str):
      yield next((name for name, values in offered.items() if option in values), ''), option
    else:
      yield option


def _promise(product: Product, goal: Goal) -> tuple[bool, float, bool]:
  """How well the title and price of a result fit the wish."""
  title = product.name.lower()
  kind = all(word in title for word in goal.query.split())
  words = [word for attribute in goal.attributes for word in attribute.split()]
  return kind, sum(word in title for word in words), product.price <= goal.price_upper


def _click(product):
  return f'click[{product.asin.lower()}]'


def _thought(page, action):
  if action.startswith('search['):
    return 'look for it'
  if action in (BACK, 'click[back to search]'):
    return 'not right, go back'
  if page == 'results':
    return 'see more' if action == 'click[next >]' else 'this may fit'
  if action == BUY:
    return 'all set, buy it'
  return 'read more' if action in ('click[description]', 'click[features]', 'click[reviews]') else 'pick this'
