"""The WebShop environment: tasks, episodes and prompts over the engine."""

import dataclasses
import functools
import hashlib
import random
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from opid_jax.envs import projection
from opid_jax.envs.webshop import engine, generate, goals, load, reward, search, wording
from opid_jax.envs.webshop.catalogue import Product
from opid_jax.types import Prompt, State, Task

SUCCESS_REWARD = 10.0
TAIL_CHARS = 20

_PROJECTIONS = {'strict': projection.project_strict, 'reference': projection.project_reference}
_WORDINGS = {'full': wording.full, 'brief': wording.brief}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The fields of `config.env` for WebShop.

  Attributes:
    data_dir: folder with WebShop's data files, or one product file; '' plays on the embedded catalogue.
    goals: 'synthetic' (WebShop's templates) or 'human' (instructions written by people).
    num_heldout: goals held out of training.
    split_seed: of the embedded catalogue, drawn prices, price limits and the split; belongs to the data, not to a run.
    seed: of the order in which training draws its goals.
    num_products: size of the embedded catalogue, a multiple of 10; unused with `data_dir`.
    results_per_page: products on a results page.
    max_results: most hits of a search.
    max_turns: turns after which a rollout gives up; the environment itself never does.
    history_length: past turns in the prompt.
    skip_history_above: characters; a longer prompt is shown without history.
    projection: 'strict', or 'reference' for the authors' rule, loopholes included.
    instructions: 'full' wording, or 'brief' for a tiny policy that knows the shop.
  """

  data_dir: str = ''
  goals: str = 'synthetic'
  num_heldout: int = 500
  split_seed: int = 233
  seed: int = 0
  num_products: int = 1000
  results_per_page: int = 10
  max_results: int = 50
  max_turns: int = 15
  history_length: int = 2
  skip_history_above: int = 20_000
  projection: str = 'strict'
  instructions: str = 'full'

  def __post_init__(self):
    words = {'goals': ('synthetic', 'human'), 'projection': _PROJECTIONS, 'instructions': _WORDINGS}
    for field, known in words.items():
      if getattr(self, field) not in known:
        raise ValueError(f'env.{field} is {getattr(self, field)!r}; expected one of: {", ".join(known)}.')
    for field in ('results_per_page', 'max_results', 'max_turns', 'num_products'):
      if getattr(self, field) < 1:
        raise ValueError(f'env.{field} ({getattr(self, field)}) must be at least 1.')
    for field in ('num_heldout', 'history_length', 'skip_history_above'):
      if getattr(self, field) < 0:
        raise ValueError(f'env.{field} ({getattr(self, field)}) must not be negative.')


def make(settings: Mapping[str, Any]) -> 'WebShop':
  """Loads the catalogue, indexes it and splits the goals.

  Args:
    settings: fields of `Settings`; an absent one keeps its default. `name` is allowed and ignored.

  Raises:
    ValueError: if a field is unknown or out of range, or the data is missing or broken.
  """
  known = {field.name for field in dataclasses.fields(Settings)}
  unknown = sorted(set(settings) - known - {'name'})
  if unknown:
    raise ValueError(f'Unknown WebShop setting(s): {", ".join(unknown)}. Known: {", ".join(sorted(known))}.')
  return WebShop(Settings(**{name: settings[name] for name in known if name in settings}))


class WebShop:
  """`TextEnv` over one catalogue. Immutable once built, so threads may share it."""

  def __init__(self, settings: Settings):
    self.settings = settings
    self.max_turns = settings.max_turns
    products = _products(settings)
    self.shop = engine.Shop(
      products=tuple(products),
      by_asin={product.asin.lower(): product for product in products},
      search=search.build_search(products, max_results=settings.max_results, seed=settings.split_seed),
      results_per_page=settings.results_per_page,
    )
    every = _goals(settings, products)
    train, heldout = goals.split_goals(every, seed=settings.split_seed, num_heldout=settings.num_heldout)
    self._splits = {'train': _tasks('train', train), 'heldout': _tasks('heldout', heldout)}
    self._num_goals = len(every)
    self._data_hash = _hash(products, every)

  def tasks(self, step: int, n: int) -> Sequence[Task]:
    """The `n` training tasks of training step `step`, without replacement within an epoch.

    Steps of equal `n` walk through one permutation of the training goals after another; the permutations
    depend on `seed` and the number of the epoch only.
    """
    train = self._splits['train']
    picked = []
    for position in range(step * n, (step + 1) * n):
      epoch, offset = divmod(position, len(train))
      picked.append(train[_permutation(self.settings.seed, epoch, len(train))[offset]])
    return picked

  def panel(self, split: str, n: int) -> Sequence[Task]:
    """The first `n` tasks of a fixed panel: all held-out goals, or a sample of the training goals.

    Raises:
      ValueError: if the split is unknown or holds fewer than `n` tasks.
    """
    if split not in self._splits:
      raise ValueError(f'Unknown split {split!r}. Available: {", ".join(self._splits)}.')
    own = self._splits[split]
    if n > len(own):
      raise ValueError(f'The {split} panel holds {len(own)} tasks, {n} were asked for. Ask for fewer.')
    if split == 'heldout':
      return own[:n]
    order = _permutation(f'{self.settings.split_seed}/panel', 0, len(own))
    return [own[i] for i in order[:n]]

  def reset(self, task: Task) -> State:
    """The search page, with the task's wish."""
    return self._state(task, engine.Visit())

  def step(self, state: State, response: str) -> State:
    """Projects the response to an action and performs it; what cannot be performed leaves the page as it is.

    Raises:
      ValueError: if the state is already done.
    """
    if state.is_done:
      raise ValueError(f'Task {state.task.id!r} ended after {state.turn} turns. Reset it first.')
    action, valid = _PROJECTIONS[self.settings.projection](response, tail_chars=TAIL_CHARS)
    after = None
    # The authors' code performs an action that it counts as invalid, for example one without a thought.
    if valid or self.settings.projection == 'reference':
      after = self._act(state.inner, action)
    if self.settings.projection == 'strict':
      valid = after is not None
    taken = {'history': (*state.history, (state.observation, action)), 'turn': state.turn + 1,
             'action': action, 'valid': valid}
    if after is None:
      return dataclasses.replace(state, reward=0.0, **taken)
    if after.page == 'done':
      return self._buy(state, after, taken)
    return dataclasses.replace(self._state(state.task, after), **taken)

  def prompt(self, state: State) -> Prompt:
    """The page in the configured wording."""
    return _WORDINGS[self.settings.instructions](
      state,
      history_length=self.settings.history_length,
      skip_history_above=self.settings.skip_history_above,
    )

  def describe(self) -> dict[str, Any]:
    """What a result depends on: data, split and rules."""
    rules = dataclasses.asdict(self.settings)
    del rules['num_products']  # A wish for the embedded catalogue; `products` is what there is.
    return rules | {
      'environment': 'webshop',
      'products': len(self.shop.products),
      # Goals of held-out products that are on no panel are in neither of the next two.
      'goals': self._num_goals,
      'train_goals': len(self._splits['train']),
      'heldout_goals': len(self._splits['heldout']),
      'data_hash': self._data_hash,
      'bm25s': metadata.version('bm25s'),
      'rapidfuzz': metadata.version('rapidfuzz'),
    }

  def _act(self, visit, action):
    name, argument = engine.parse_action(action)
    if self.settings.projection == 'strict' and name == 'search' and not (argument or '').strip():
      return None
    return engine.act(self.shop, visit, action)

  def _state(self, task, visit):
    texts = engine.page_texts(self.shop, visit, task.text)
    actions = [f'click[{name}]' for name in engine.clickables(self.shop, visit)]
    if self.settings.projection == 'strict':
      # An option value with brackets in it breaks the action grammar, so that nobody can click it.
      actions = [action for action in actions if engine.parse_action(action)[0] == 'click']
    if visit.page == 'index':
      actions.insert(0, 'search[<your query>]')
      # Never executable; the authors' prompt lists it because the page has such a button.
      if self.settings.projection == 'reference':
        actions.append('click[search]')
    observation = wording.anchor(texts, task.text)
    return State(task=task, observation=observation, actions=tuple(actions), inner=visit)

  def _buy(self, state, visit, taken):
    score, parts = reward.score(self.shop.by_asin[visit.asin], dict(visit.options), state.task.data)
    done = self._state(state.task, dataclasses.replace(visit, purchase=parts))
    success = score == 1.0
    return dataclasses.replace(
      done, is_done=True, success=success, score=score, reward=SUCCESS_REWARD if success else 0.0, **taken)


def _products(settings) -> list[Product]:
  if not settings.data_dir:
    return generate.generate_products(settings.num_products, seed=settings.split_seed)
  return load.load_products(settings.data_dir, seed=settings.split_seed, human=settings.goals == 'human')


def _goals(settings, products):
  if settings.goals == 'human':
    every = goals.human_goals(products, seed=settings.split_seed)
  else:
    cap = 0 if settings.data_dir else generate.GOALS_PER_PRODUCT
    every = goals.synthetic_goals(products, seed=settings.split_seed, max_per_product=cap)
  if not every:
    origin = settings.data_dir or 'the embedded catalogue'
    raise ValueError(f'No {settings.goals} goals can be made from {origin}; try the other kind of env.goals.')
  return every


def _tasks(split, own):
  return [Task(id=f'{split}/{i:05d}', index=i, text=goal.text, data=goal) for i, goal in enumerate(own)]


@functools.lru_cache(maxsize=4)
def _permutation(seed, epoch, count):
  order = list(range(count))
  random.Random(f'{seed}/epoch/{epoch}').shuffle(order)
  return tuple(order)


def _hash(products, every):
  digest = hashlib.sha256()
  for value in (*products, *every):
    digest.update(repr(value).encode())
  return digest.hexdigest()[:16]
