"""WebShop's data files, and a compact one-product-a-line form of them.

A folder holds either the official files `items_shuffle*.json`, `items_ins_v2*.json` and, for human goals,
`items_human_ins.json`, or one `products_*.jsonl`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opid_jax.envs.webshop.catalogue import HumanWish, Product, price_of, price_tag

MAX_ASIN_CHARS = 10
UNKNOWN_PRICE = 100.0

_PRICE = re.compile(r'\d[\d,]*(?:\.\d+)?|\.\d+')
_NOUN = re.compile(r"[a-z][a-z0-9']*")
# Words that are hardly ever the nouns of a product title.
_NOT_NOUNS = frozenset(
  'a an and are as at by for from in into is it its of off on or per the this to up with without you '
  'your our all any best big cheap compatible cute easy free great large long mini natural new non old '
  'perfect portable premium pure small soft super ultra very'.split()
)


def load_products(data_dir: str, *, seed: int, human: bool) -> list[Product]:
  """Reads a catalogue in file order; too long and repeated asins are dropped, as WebShop does.

  Args:
    data_dir: a folder, or the product file in it where the folder holds several.
    seed: of prices that the files give as a range.
    human: whether human instructions are needed.

  Raises:
    ValueError: naming the file and what is missing or wrong in it.
  """
  path = _product_file(Path(data_dir).expanduser())
  rows, fields_of = _compact(path) if path.suffix == '.jsonl' else _official(path, human)
  products: dict[str, Product] = {}
  for number, row in enumerate(rows):
    asin = row.get('asin') if isinstance(row, dict) else None
    if not isinstance(asin, str):
      raise ValueError(f'{path}: product {number} has no asin (found {asin!r}); expected a string.')
    # The engine finds products in lower case, so asins that differ in case only would hide each other.
    if asin == 'nan' or len(asin) > MAX_ASIN_CHARS or asin.lower() in products:
      continue
    try:
      products[asin.lower()] = _product(fields_of(row), seed)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
      raise ValueError(f'{path}: product {number} ({asin}) cannot be read: {error!r}.') from error
  if not products:
    raise ValueError(f'{path} holds no product; expected a non-empty list. Is the download complete?')
  return list(products.values())


def title_nouns(name: str) -> tuple[str, ...]:
  """Stand-in for the noun tagger of the WebShop rules: title words not known to be anything else."""
  return tuple(word for word in _NOUN.findall(name.lower()) if word not in _NOT_NOUNS)


def _product_file(path: Path) -> Path:
  if path.is_file():
    return path
  if not path.is_dir():
    raise ValueError(f'WebShop data folder {path} does not exist. Set env.data_dir to the folder with '
                     'items_shuffle*.json, or to "" for the embedded catalogue.')
  found = sorted(path.glob('items_shuffle*.json')) or sorted(path.glob('products_*.jsonl'))
  if len(found) != 1:
    names = ', '.join(file.name for file in found) or 'neither'
    raise ValueError(f'WebShop data folder {path} must hold one items_shuffle*.json or products_*.jsonl; '
                     f'found {names}. Set env.data_dir to the file itself to choose one.')
  return found[0]


def _compact(path: Path) -> tuple[list[dict], Callable[[dict], dict]]:
  lines = path.read_text(encoding='utf-8').splitlines()
  rows = [_parse(line, f'{path}, line {i + 1}', dict) for i, line in enumerate(lines) if line.strip()]
  return rows, lambda row: {**row, 'human': row.get('human_instructions') or ()}


def _official(path: Path, human: bool) -> tuple[list[dict], Callable[[dict], dict]]:
  suffix = path.stem.removeprefix('items_shuffle')
  mined = _read(path.with_name(f'items_ins_v2{suffix}.json'), dict)
  wishes = _read(path.with_name('items_human_ins.json'), dict) if human else {}

  def fields_of(row: dict) -> dict:
    own = mined.get(row['asin'], {})
    return {
      'asin': row['asin'],
      'name': row['name'],
      'category': row.get('category'),
      'query': (row.get('query') or '').lower().strip(),
      'product_category': row.get('product_category'),
      'pricing': _pricing(row.get('pricing')),
      'full_description': row.get('full_description'),
      'small_description': row.get('small_description'),
      'options': _options(row.get('customization_options')),
      'attributes': own.get('attributes'),
      'instruction': own.get('instruction'),
      'instruction_attributes': own.get('instruction_attributes'),
      'human': wishes.get(row['asin'], ()),
    }

  return _read(path, list), fields_of


def _product(row: Mapping[str, Any], seed: int) -> Product:
  bullets = row['small_description'] or []
  pricing = [float(price) for price in row['pricing']] or [UNKNOWN_PRICE]
  nouns = row.get('name_nouns')
  return Product(
    asin=row['asin'],
    name=row['name'],
    category=row['category'] or '',
    query=row['query'] or '',
    product_category=row['product_category'] or '',
    price=price_of(pricing, row['asin'], seed=seed),
    price_tag=row.get('price_tag') or price_tag(pricing),
    description=row['full_description'] or '',
    bullets=(bullets,) if isinstance(bullets, str) else tuple(bullets),
    options=tuple((name, tuple(values)) for name, values in row['options'].items()),
    attributes=tuple(row['attributes'] or ()),
    nouns=title_nouns(row['name']) if nouns is None else tuple(nouns),
    instruction=(row['instruction'] or '').strip('.'),
    instruction_attributes=tuple(row['instruction_attributes'] or ()),
    human=tuple(_wish(wish) for wish in row['human']),
  )


def _wish(wish: Mapping[str, Any]) -> HumanWish:
  return HumanWish(
    wish['instruction'], tuple(wish['instruction_attributes']), tuple(wish['instruction_options']))


def _pricing(text: str | None) -> list[float]:
  """Prices of '$12.50' or '$5.00 - $9.00'; none when the text is empty."""
  return [float(price.replace(',', '')) for price in _PRICE.findall(text or '')][:2]


def _options(customization: Mapping[str, Sequence[Mapping] | None] | str | None) -> dict[str, list[str]]:
  """Option values as the pages show and click them."""
  options = {}
  for name, values in (customization or {}).items():
    if values:
      texts = [value['value'].strip().replace('/', ' | ').lower() for value in values]
      options[name.lower()] = texts
  return options


def _read(path: Path, kind: type) -> Any:
  if not path.is_file():
    raise ValueError(f'WebShop data file {path.name} is missing in {path.parent}; it belongs to the official '
                     'download, beside items_shuffle*.json.')
  return _parse(path.read_text(encoding='utf-8'), path, kind)


def _parse(text: str, where: Path | str, kind: type) -> Any:
  try:
    value = json.loads(text)
  except json.JSONDecodeError as error:
    raise ValueError(f'{where} is not valid JSON ({error}). Is the download complete?') from error
  if not isinstance(value, kind):
    raise ValueError(f'{where} holds a {type(value).__name__}; expected a {kind.__name__}.')
  return value
