"""The pages of the shop and what a click does: pure functions of a catalogue and a visit.

Pages are lists of the texts a browser would show, in order, as in the text mode of WebShop
(https://arxiv.org/abs/2207.01206): no HTML is produced or parsed.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from opid_jax.envs.webshop.catalogue import Product

SEPARATOR = ' [SEP] '

_ACTION = re.compile(r'(.+)\[(.+)\]')
_SUB_PAGES = ('description', 'features', 'reviews')


@dataclasses.dataclass(frozen=True)
class Shop:
  """A catalogue ready to be browsed.

  Attributes:
    products: in file order.
    by_asin: lower-case asin -> product.
    search: query -> indices of the products found, best first.
    results_per_page: products on a results page.
  """

  products: tuple[Product, ...]
  by_asin: Mapping[str, Product]
  search: Callable[[str], Sequence[int]]
  results_per_page: int


@dataclasses.dataclass(frozen=True)
class Visit:
  """Where a shopper is.

  Attributes:
    page: 'index', 'results', 'item', 'description', 'features', 'reviews' or 'done'.
    query: the last search.
    number: results page, from 1.
    asin: lower-case asin of the item looked at.
    options: ((option name, value), ...) selected on its page.
    purchase: parts of the purchase score once done, see `reward.score`.
  """

  page: str = 'index'
  query: str = ''
  number: int = 1
  asin: str = ''
  options: tuple[tuple[str, str], ...] = ()
  purchase: Mapping[str, float] | None = None


def parse_action(action: str) -> tuple[str, str | None]:
  """Splits `name[argument]` at the last bracket that allows it; the argument is None if it does not match.

  The match starts at the beginning, stays on one line, and ignores what follows the last bracket.
  """
  match = _ACTION.match(action)
  return (match[1], match[2]) if match else (action, None)


def visible_products(shop: Shop, visit: Visit) -> list[Product]:
  """The products on the current results page."""
  first = (visit.number - 1) * shop.results_per_page
  hits = shop.search(visit.query)
  return [shop.products[i] for i in hits[first:first + shop.results_per_page]]


def page_texts(shop: Shop, visit: Visit, instruction: str) -> list[str]:
  """The visible texts of the current page, in order; empty ones vanish."""
  if visit.page == 'index':
    return ['WebShop', 'Instruction:', instruction, 'Search']
  if visit.page == 'done':
    return ['Thank you for shopping with us!']
  texts = ['Instruction:', instruction, 'Back to Search']
  if visit.page == 'results':
    texts.append(f'Page {visit.number} (Total results: {len(shop.search(visit.query))})')
    texts += ['< Prev', 'Next >'] if visit.number > 1 else ['Next >']
    for product in visible_products(shop, visit):
      texts += [product.asin, product.name, product.price_tag]
    return _shown(texts)
  product = shop.by_asin[visit.asin]
  texts.append('< Prev')
  if visit.page == 'item':
    for name, values in product.options:
      texts += [name, *values]
    texts += [product.name, f'Price: {product.price_tag}', 'Rating: N.A.']
    texts += ['Description', 'Features', 'Reviews', 'Buy Now']
  elif visit.page == 'description':
    texts.append(product.description)
  elif visit.page == 'features':
    texts += product.bullets
  return _shown(texts)


def clickables(shop: Shop, visit: Visit) -> list[str]:
  """What `click[...]` accepts on the current page: buttons, then products, then option values."""
  if visit.page in ('index', 'done'):
    return []
  if visit.page == 'results':
    buttons = ['back to search', '< prev', 'next >'] if visit.number > 1 else ['back to search', 'next >']
    return buttons + [product.asin.lower() for product in visible_products(shop, visit)]
  if visit.page == 'item':
    values = (value for _, values in shop.by_asin[visit.asin].options for value in values)
    return list(dict.fromkeys(['back to search', '< prev', *_SUB_PAGES, 'buy now', *values]))
  return ['back to search', '< prev']


def act(shop: Shop, visit: Visit, action: str) -> Visit | None:
  """The visit after an action, or None if the page cannot execute it.

  A search is accepted on every page. Buying leads to the page 'done'.
  """
  name, argument = parse_action(action)
  if argument is None:
    return None
  argument = argument.lower()
  if name == 'search':
    return Visit(page='results', query=argument)
  if name != 'click' or argument not in clickables(shop, visit):
    return None
  return _click(shop, visit, argument)


def _click(shop, visit, target):
  if target == 'back to search':
    return Visit()
  if visit.page == 'results':
    if target in ('next >', '< prev'):
      return dataclasses.replace(visit, number=visit.number + (1 if target == 'next >' else -1))
    return dataclasses.replace(visit, page='item', asin=target)
  if visit.page in _SUB_PAGES:
    return dataclasses.replace(visit, page='item')
  # The item page. Two options may share a value; then the last one gets it, as in WebShop.
  owners = [name for name, values in shop.by_asin[visit.asin].options if target in values]
  if owners:
    return dataclasses.replace(visit, options=tuple({**dict(visit.options), owners[-1]: target}.items()))
  if target == '< prev':
    return Visit(page='results', query=visit.query, number=visit.number)
  return dataclasses.replace(visit, page='done' if target == 'buy now' else target)


def _shown(texts):
  return [text.strip() for text in texts if text.strip()]
