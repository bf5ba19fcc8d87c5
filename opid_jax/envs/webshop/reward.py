"""The purchase score of WebShop: product type, attributes, options and price.

See "WebShop" by Yao et al. (https://arxiv.org/abs/2207.01206), section 3.1; constants and edge cases follow
the environment's code, because published scores depend on them (golden vectors `webshop_reward`).
"""

from collections.abc import Mapping

from rapidfuzz import fuzz, utils

from opid_jax.envs.webshop.catalogue import Product
from opid_jax.envs.webshop.goals import Goal

# The colour words of the WebShop rules. The order matters: the first word found replaces the whole text.
COLORS = tuple(
  'alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy '
  'camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral '
  'cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite '
  'grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta '
  'maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy nude olive orange '
  'peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell silver skull slate '
  'steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white wine '
  'yellow'.split()
)


def normalize_color(text: str) -> str:
  """The first colour word that occurs in `text`, case-sensitive and also inside a word; else `text`."""
  return next((color for color in COLORS if color in text), text)


def matches(a: str, b: str) -> bool:
  """Fuzzy equality of the WebShop rules: the token sets agree to more than 85 %."""
  return round(fuzz.token_set_ratio(a, b, processor=utils.default_process)) > 85


def score(product: Product, chosen: Mapping[str, str], goal: Goal) -> tuple[float, dict[str, float]]:
  """Scores a purchase.

  score = r_type · (attribute hits + option hits + [price <= limit]) / (attributes + options + 1).

  Args:
    product: what was bought; its `price` is in dollars.
    chosen: option name -> value selected on the item page. Options beyond the goal's cost nothing.
    goal: what was asked for.

  Returns:
    The score in [0, 1] (1 exactly when everything matches), and its parts: `r_type`, `r_att`, `r_option`,
    `r_price` in [0, 1], their weights `w_*`, `query_match`, `category_match`, `title_score`.
    `r_option` and `w_option` are absent when the goal names no option, `r_att` when it names no attribute.
  """
  info = _type_match(product, goal)
  attributes = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
  values = [normalize_color(value) for value in chosen.values()]
  wanted = [_wanted_option(option) for option in goal.options]
  options = sum(any(matches(value, want) for value in values) for want in wanted)
  in_budget = product.price <= goal.price_upper
  total = len(goal.attributes) + len(goal.options) + 1
  if goal.attributes:
    info |= {'r_att': attributes / len(goal.attributes)}
  if goal.options:
    info |= {'r_option': options / len(goal.options), 'w_option': len(goal.options) / total}
  info |= {'w_att': len(goal.attributes) / total, 'r_price': in_budget, 'w_price': 1 / total}
  return info['r_type'] * ((attributes + options + in_budget) / total), info


def _has_attribute(product, attribute):
  if any(matches(own, attribute) for own in product.attributes):
    return True
  texts = (product.name, ' '.join(product.bullets), product.description)
  return any(attribute in text.lower() for text in texts)


def _wanted_option(option):
  """The goal's side of an option. A (name, value) pair is compared as the text 'name value', unless one of
  the two *is* a colour word; a plain value is normalised like the chosen one."""
  if isinstance(option, str):
    return normalize_color(option)
  return next((color for color in COLORS if color in option), ' '.join(option))


def _type_match(product, goal):
  query_match = product.query == goal.query
  category_match = len(_levels(product.product_category) & _levels(goal.product_category)) >= 2
  title_score = 0.2
  if goal.nouns:
    title_score = len(set(product.nouns) & set(goal.nouns)) / len(goal.nouns)
  r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
  # A title that shares nothing overrides an equal query or category.
  if title_score < 0.1:
    r_type = 0.1
  if title_score == 0.0:
    r_type = 0.0
  return {
    'r_type': r_type,
    'query_match': query_match,
    'category_match': category_match,
    'title_score': title_score,
  }


def _levels(product_category):
  return {level.strip() for level in product_category.split('›')}
