"""What a product is."""

import dataclasses
import random
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Product:
  """One product.

  Attributes:
    asin: unique name, shown as it is, clicked in lower case.
    name: title.
    category: one of the five departments.
    query: search phrase under which the product was listed.
    product_category: levels joined by ' › '.
    price: dollars; what a purchase costs.
    price_tag: what the pages show.
    description: full description.
    bullets: feature list.
    options: ((option name, (value, ...)), ...), lower case.
    attributes: what the reward compares with the goal's attributes.
    nouns: lower-case nouns of the title.
    instruction: the synthetic wish, '' when there is none.
    instruction_attributes: the attributes that it names.
    human: wishes written by people.
  """

  asin: str
  name: str
  category: str
  query: str
  product_category: str
  price: float
  price_tag: str
  description: str
  bullets: tuple[str, ...]
  options: tuple[tuple[str, tuple[str, ...]], ...]
  attributes: tuple[str, ...]
  nouns: tuple[str, ...]
  instruction: str = ''
  instruction_attributes: tuple[str, ...] = ()
  human: tuple['HumanWish', ...] = ()


@dataclasses.dataclass(frozen=True)
class HumanWish:
  """An instruction written by a person, with the attributes and option values that it names."""

  instruction: str
  attributes: tuple[str, ...]
  options: tuple[str, ...]


def price_of(pricing: Sequence[float], asin: str, *, seed: int) -> float:
  """The price in dollars: the only one, or one between low and high that depends on (seed, asin) alone."""
  if len(pricing) == 1:
    return float(pricing[0])
  return random.Random(f'{seed}/{asin}/price').uniform(*pricing[:2])


def price_tag(pricing: Sequence[float]) -> str:
  """What the pages show for a price or a price range."""
  return ' to '.join(f'${price}' for price in pricing[:2])
