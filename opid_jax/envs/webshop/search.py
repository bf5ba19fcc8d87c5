"""The product search of WebShop: BM25 over title, description, first bullet and options."""

import functools
import random
import re
import sys
from collections.abc import Callable, Sequence

import numpy as np
import Stemmer

from opid_jax.envs.webshop.catalogue import Product

K1, B = 0.9, 0.4

# Lucene's English stop words.
STOP_WORDS = frozenset(
  'a an and are as at be but by for if in into is it no not of on or such that the their then there '
  'these they this to was will with'.split()
)

# Word boundaries close to those of Lucene's standard tokenizer (Unicode annex 29): letters and digits join
# across an inner apostrophe or full stop, digits also across a comma or semicolon, letters across a colon.
_WORD = re.compile(r"\w+(?:(?:[.'’](?=\w)|(?<=\d)[,;](?=\d)|(?<=[^\W\d_]):(?=[^\W\d_]))\w+)*")
# The stemmer's own cache (0: none) is not safe to share between threads; lru_cache is.
_stem = functools.lru_cache(maxsize=1 << 16)(Stemmer.Stemmer('porter', 0).stemWord)


def tokens(text: str) -> list[str]:
  """Search terms of a text: lower-cased words without possessive 's and stop words, Porter-stemmed."""
  words = (word[:-2] if word.endswith(("'s", '’s')) else word for word in _WORD.findall(text.lower()))
  return [_stem(word) for word in words if word not in STOP_WORDS]


def document(product: Product) -> str:
  """The text under which a product is indexed."""
  options = ', and '.join(f'{name}: {", ".join(values)}' for name, values in product.options)
  bullet = product.bullets[0] if product.bullets else ''
  return ' '.join([product.name, product.description, bullet, options]).lower()


def build_search(
  products: Sequence[Product], *, max_results: int, seed: int
) -> Callable[[str], tuple[int, ...]]:
  """Indexes a catalogue once.

  Beside plain words the WebShop rules know four prefixes: `<r>` (a random sample, here always the same one),
  `<a> attribute`, `<c> category` and `<q> query`, which list products by exact match.

  Args:
    products: the catalogue; ties keep its order.
    max_results: most hits of a search.
    seed: of the random sample.

  Returns:
    query -> indices of the products found, best first. Pure, and remembers recent queries.
  """
  index = _bm25().BM25(method='lucene', k1=K1, b=B)
  index.index([tokens(document(product)) for product in products], show_progress=False)
  fields = {
    '<a>': lambda product, text: text in product.attributes,
    '<c>': lambda product, text: product.category == text,
    '<q>': lambda product, text: product.query == text,
  }

  @functools.lru_cache(maxsize=8192)
  def search(query: str) -> tuple[int, ...]:
    prefix, _, rest = query.strip().partition(' ')
    if prefix == '<r>':
      count = min(max_results, len(products))
      return tuple(random.Random(f'{seed}/search').sample(range(len(products)), count))
    if prefix in fields:
      found = (i for i, product in enumerate(products) if fields[prefix](product, rest.strip()))
      return tuple(found)[:max_results]
    terms = tokens(query)
    if not terms:
      return ()
    scores = index.get_scores(terms)
    best = np.argsort(-scores, kind='stable')[:max_results]
    return tuple(int(i) for i in best if scores[i] > 0)

  return search


def _bm25():
  """The bm25s module, imported without JAX.

  Where JAX is installed, bm25s starts its backend at import, which must not happen in an environment process
  nor before `jax.distributed.initialize`. Only its top-k uses JAX, and it is not used here.
  """
  name = 'jax.lax'
  loaded = sys.modules.get(name)
  sys.modules[name] = None
  try:
    import bm25s
  finally:
    if loaded is None:
      del sys.modules[name]
    else:
      sys.modules[name] = loaded
  return bm25s
