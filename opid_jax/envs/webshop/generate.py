"""The embedded catalogue: generated products in WebShop's own format, with a small vocabulary.

Ten products stand under each of up to a hundred queries, as five pairs of twins. The two of a pair share the
attributes in their titles and differ in one thing that a shopper must look up: the price (on the results
page), the option values (on the item page) or an attribute that only the bullets name (which search reads).
Words of different queries never overlap, so that a product of the wrong type scores nothing.
"""

import itertools
import random
from collections.abc import Mapping

from opid_jax.envs.webshop.catalogue import Product, price_tag

PRODUCTS_PER_QUERY = 10
GOALS_PER_PRODUCT = 3

_QUERIES: Mapping[str, str] = {
  'beauty': (
    'shampoo, conditioner, face cream, lip balm, body lotion, nail polish, bath salt, clay mask, '
    'mascara, perfume, toothpaste, razor, sunscreen, toner, hair serum, eyeliner, soap, sponge, '
    'tweezers, comb'
  ),
  'electronics': (
    'headphones, speaker, tablet case, laptop, keyboard, mouse, charger, power bank, webcam, '
    'monitor, usb cable, microphone, projector, router, smart watch, camera, remote, earbuds, '
    'tripod, printer'
  ),
  'garden': (
    'sofa, bookcase, desk lamp, rug, side table, pillow, curtain, mattress, nightstand, mirror, '
    'candle, blanket, stool, planter, shelf, vase, ottoman, dresser, bench, wall clock'
  ),
  'fashion': (
    'dress, jeans, shirt, sneakers, boots, jacket, sweater, skirt, socks, hat, scarf, gloves, '
    'belt, sandals, pajamas, hoodie, shorts, swimsuit, blazer, leggings'
  ),
  'grocery': (
    'coffee, tea, granola, snack bar, popcorn, almonds, cookies, pasta, rice, olive oil, honey, '
    'crackers, soup, salsa, juice, oatmeal, pretzels, jerky, cereal, jam'
  ),
}
_DEPARTMENTS = {
  'beauty': 'Beauty',
  'electronics': 'Electronics',
  'garden': 'Home',
  'fashion': 'Clothing',
  'grocery': 'Food',
}
_ATTRIBUTES = {
  'beauty': 'vegan, organic, gentle, mild, natural, long lasting, cruelty free, travel size',
  'electronics': 'wireless, waterproof, portable, compact, durable, heavy duty, fast charging, easy setup',
  'garden': 'wooden, modern, sturdy, foldable, handmade, easy clean, space saving, rustic',
  'fashion': 'cotton, stretchy, warm, casual, vintage, slim fit, machine wash, breathable',
  'grocery': 'organic, crunchy, kosher, keto, gluten free, low sodium, roasted, raw',
}
_OPTIONS: Mapping[str, Mapping[str, str]] = {
  'beauty': {'scent': 'rose, lemon, vanilla, lavender, mint, musk', 'size': 'small, medium, large, giant'},
  'electronics': {'color': 'black, white, red, blue, silver, pink', 'style': 'basic, deluxe, sport, studio'},
  'garden': {'color': 'gray, white, green, brown, blue, beige', 'size': 'small, medium, large, giant'},
  'fashion': {'color': 'black, white, red, blue, green, pink', 'size': 'small, medium, large, giant'},
  'grocery': {'flavor': 'berry, lemon, vanilla, maple, salty, hot', 'pack': 'single, double, triple, bulk'},
}
_BRANDS = (
  'lumo kora velt nira dapo sumi tarn olby fesk wren zeda hilo murk jaxo pelu rovi brix cavo yuna '
  'ikto'.split()
)
# An asin is 'b0' and two of these: two or three pieces for a tokenizer that has seen them, easy to copy.
_SYLLABLES = [a + b for a, b in itertools.product(
  ('ba', 'de', 'fi', 'go', 'ku', 'la', 'me', 'ni'), ('ro', 'ta', 've', 'xi', 'zu'))]
_TWINS = ('price', 'price', 'options', 'options', 'detail')


def generate_products(num_products: int, *, seed: int) -> list[Product]:
  """The first `num_products` products of the catalogue that belongs to `seed`, shuffled.

  Args:
    num_products: a positive multiple of 10, at most 1,000.
    seed: decides everything.

  Raises:
    ValueError: if `num_products` is out of range.
  """
  queries = [(category, query) for group in itertools.zip_longest(
    *([(category, query) for query in words.split(', ')] for category, words in _QUERIES.items())
  ) for category, query in group]
  limit = PRODUCTS_PER_QUERY * len(queries)
  if not 0 < num_products <= limit or num_products % PRODUCTS_PER_QUERY:
    raise ValueError(
      f'num_products ({num_products}) must be a multiple of {PRODUCTS_PER_QUERY} from {PRODUCTS_PER_QUERY} '
      f'to {limit}.'
    )
  asins = _asins(random.Random(f'{seed}/asin'), limit)
  products = []
  for number, (category, query) in enumerate(queries[:num_products // PRODUCTS_PER_QUERY]):
    own = asins[number::len(queries)]
    products += _listing(random.Random(f'{seed}/{query}'), category, query, own)
  random.Random(f'{seed}/order').shuffle(products)
  return products


def _asins(rng, count):
  """Distinct asins such that every 10 taken at a stride of 100 start with different syllables."""
  starts, ends = list(_SYLLABLES), list(_SYLLABLES)
  rng.shuffle(starts)
  rng.shuffle(ends)
  pairs = [(starts[i // 25 % 40], ends[(i + i // 25) % 40]) for i in range(count)]
  return [f'b0{start}{end}' for start, end in pairs]


def _listing(rng, category, query, asins):
  """The ten products of one query."""
  attributes = rng.sample(_ATTRIBUTES[category].split(', '), 5)
  couples = rng.sample(list(itertools.combinations(attributes, 2)), len(_TWINS))
  names = rng.choice([[], [0], [0], [1], [0, 1], [0, 1]])
  offered = list(_OPTIONS[category].items())
  kinds = [(name, values.split(', ')) for name, values in (offered[i] for i in names)]
  products = []
  for twins, couple in zip(_TWINS, couples, strict=True):
    if twins == 'options' and not kinds:
      twins = 'price'
    spare = rng.sample([a for a in _ATTRIBUTES[category].split(', ') if a not in attributes], 2)
    base = 5.0 * rng.randint(1, 12)
    values = [[(name, tuple(rng.sample(pool, rng.choice([2, 3])))) for name, pool in kinds]] * 2
    if twins == 'options':
      values = list(zip(*(_disjoint(rng, name, pool) for name, pool in kinds), strict=True))
    for which in range(2):
      price = base + 5.0 * rng.randint(6, 9) if twins == 'price' and which else base
      detail = spare[which] if twins == 'detail' else ''
      products.append(_product(
        category, query, asins[len(products)], rng.choice(_BRANDS), couple, detail, values[which], price))
  return products


def _disjoint(rng, name, pool):
  """Two value lists of one option without a common value."""
  shuffled = rng.sample(pool, len(pool))
  half = len(pool) // 2
  return (name, tuple(shuffled[:half])), (name, tuple(shuffled[half:]))


def _product(category, query, asin, brand, couple, detail, options, price):
  department = _DEPARTMENTS[category]
  named = [*couple, detail] if detail else list(couple)
  return Product(
    asin=asin,
    name=f'{brand} {" ".join(couple)} {query}',
    category=category,
    query=query,
    product_category=f'{department} › {department} {query} › {query}',
    price=price,
    price_tag=price_tag([price]),
    description=f'{query} made by {brand}',
    bullets=(f'this one is {detail or "new"}', f'sold by {brand}'),
    options=tuple(options),
    attributes=tuple(named),
    # The brand is left out: a shared brand alone would make any two products the same type.
    nouns=tuple(query.split()),
    instruction=f'find me {" ".join(named)} {query}',
    instruction_attributes=tuple(named),
  )
