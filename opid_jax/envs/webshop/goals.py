"""What shoppers want: goals built by WebShop's own construction, and one split of them."""

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

from opid_jax.envs.webshop.catalogue import Product

NO_LIMIT = 1_000_000.0
"""Upper price of a goal whose text names none."""

HELDOUT_GOALS_PER_PRODUCT = 8
"""A held-out product with hundreds of option combinations must not fill the panel."""


@dataclasses.dataclass(frozen=True)
class Goal:
  """One wish.

  Attributes:
    asin: the product it was made from; buying it with the right options scores 1.
    text: the whole task sentence.
    instruction: the task sentence without option and price clauses.
    attributes: attributes the product must have.
    options: (name, value) pairs of a synthetic goal, plain values of a human one.
    price_upper: dollars, inclusive; `NO_LIMIT` when the text names none.
    query, product_category, nouns: of the product, for the type match.
  """

  asin: str
  text: str
  instruction: str
  attributes: tuple[str, ...]
  options: tuple[tuple[str, str], ...] | tuple[str, ...]
  price_upper: float
  query: str
  product_category: str
  nouns: tuple[str, ...]


def synthetic_goals(products: Sequence[Product], *, seed: int, max_per_product: int = 0) -> list[Goal]:
  """One goal per product with an instruction and combination of its option values, in catalogue order.

  Args:
    products: the catalogue.
    seed: of the price limits, which depend on (seed, asin, combination) alone.
    max_per_product: keeps a sample of so many combinations; 0 keeps all, as WebShop does.
  """
  goals = []
  for product in products:
    if not (product.instruction and product.instruction_attributes):
      continue
    for number, options in _combinations(product, seed, max_per_product):
      clause = ', and '.join(f'{name}: {value}' for name, value in options)
      wish = product.instruction + (f' with {clause}' if clause else '')
      goals.append(_goal(product, wish, product.instruction, product.instruction_attributes, options,
                         random.Random(f'{seed}/{product.asin}/limit/{number}')))
  return goals


def human_goals(products: Sequence[Product], *, seed: int) -> list[Goal]:
  """One goal per wish written by a person that names at least one attribute, in catalogue order."""
  goals = []
  for product in products:
    for number, wish in enumerate(product.human):
      if wish.attributes:
        text = wish.instruction.strip('.')
        goals.append(_goal(product, text, text, wish.attributes, wish.options,
                           random.Random(f'{seed}/{product.asin}/human limit/{number}')))
  return goals


def split_goals(goals: Sequence[Goal], *, seed: int, num_heldout: int) -> tuple[list[Goal], list[Goal]]:
  """Splits by product, the same on every machine: no product and no sentence is in both parts.

  Args:
    goals: all goals.
    seed: of the split; nothing else of a run changes it.
    num_heldout: size of the held-out part.

  Returns:
    Training goals in the order of `goals`; held-out goals in panel order, which takes one goal of each
    held-out product before the second of any.

  Raises:
    ValueError: if so many cannot be held out while at least one training goal remains.
  """
  counts = Counter(goal.asin for goal in goals)
  asins = list(counts)
  random.Random(f'{seed}/split').shuffle(asins)
  room = itertools.accumulate(min(counts[asin], HELDOUT_GOALS_PER_PRODUCT) for asin in asins)
  needed = next((i + 1 for i, total in enumerate(room) if total >= num_heldout), None) if num_heldout else 0
  if needed is None or needed >= len(asins):
    raise ValueError(
      f'num_heldout ({num_heldout}) leaves no product for training: there are {len(goals)} goals of '
      f'{len(asins)} products. Choose a smaller number, or load more products.'
    )
  chosen = {asin: [] for asin in asins[:needed]}
  for goal in goals:
    if goal.asin in chosen:
      chosen[goal.asin].append(goal)
  for asin, own in chosen.items():
    random.Random(f'{seed}/panel/{asin}').shuffle(own)
  rounds = itertools.zip_longest(*(own[:HELDOUT_GOALS_PER_PRODUCT] for own in chosen.values()))
  heldout = [goal for row in rounds for goal in row if goal is not None][:num_heldout]
  texts = {goal.text for goal in heldout}
  train = [goal for goal in goals if goal.asin not in chosen and goal.text not in texts]
  return train, heldout


def _combinations(product, seed, max_per_product) -> Iterator[tuple[int, tuple[tuple[str, str], ...]]]:
  named = sorted(product.options)
  every = itertools.product(*([(name, value) for value in values] for name, values in named))
  if not max_per_product:
    return enumerate(every)
  numbered = list(enumerate(every))
  count = min(max_per_product, len(numbered))
  return iter(sorted(random.Random(f'{seed}/{product.asin}/options').sample(numbered, count)))


def _goal(product, wish, instruction, attributes, options, rng) -> Goal:
  """Adds the price clause: of the first four multiples of 10 above the price, the larger of two drawn."""
  above = [limit for limit in range(10, 1000, 10) if limit > product.price][:4]
  price_upper = float(max(rng.sample(above, 2))) if len(above) >= 2 else NO_LIMIT
  clause = f', and price lower than {price_upper:.2f} dollars' if len(above) >= 2 else ''
  return Goal(
    asin=product.asin,
    text=(wish + clause).strip(),
    instruction=instruction,
    attributes=tuple(attributes),
    options=tuple(options),
    price_upper=price_upper,
    query=product.query,
    product_category=product.product_category,
    nouns=product.nouns,
  )
