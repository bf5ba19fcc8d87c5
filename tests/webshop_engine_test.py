"""Pages and clicks."""

from html.parser import HTMLParser

import pytest
from shared import golden, shared_path

from opid_jax.envs.webshop import engine
from opid_jax.envs.webshop.catalogue import Product
from opid_jax.envs.webshop.engine import Shop, Visit


def _product(asin, name='red shirt', options=(), price='$9.0', description='nice', bullets=('soft', ' ')):
  return Product(
    asin=asin, name=name, category='fashion', query='shirt', product_category='A', price=9.0, price_tag=price,
    description=description, bullets=bullets, options=options, attributes=(), nouns=())


def _shop(products, hits=None, per_page=10):
  found = range(len(products)) if hits is None else hits
  return Shop(tuple(products), {p.asin.lower(): p for p in products}, lambda query: tuple(found), per_page)


@pytest.fixture
def shop():
  colours = (('color', ('red', 'blue')), ('size', ('s', 'm')))
  return _shop([_product(f'B0{i}', options=colours) for i in range(5)], per_page=2)


def _walk(shop, *actions):
  visit = Visit()
  for action in actions:
    visit = engine.act(shop, visit, action)
  return visit


def test_action_grammar_equals_the_recorded_one():
  for case in golden('webshop_action')['cases']:
    assert engine.parse_action(case['text']) == (case['name'], case['arg']), case['text']


class _Texts(HTMLParser):
  def __init__(self):
    super().__init__()
    self.texts, self.tag = [], ''

  def handle_starttag(self, tag, attrs):
    self.tag = tag

  def handle_data(self, data):
    if data.strip() and self.tag != 'script':
      self.texts.append(data.strip())


def _html_texts(name):
  parser = _Texts()
  parser.feed(shared_path('data', 'webshop', 'golden_html', name).read_text(encoding='utf-8'))
  return parser.texts


def test_results_page_shows_what_the_original_shows():
  texts = _html_texts('results_ws.html')
  products = [_product(*texts[i:i + 2], price=texts[i + 2]) for i in range(5, len(texts), 3)]
  shop = _shop(products, hits=[*range(10)] * 5)
  assert len(products) == 10
  assert engine.page_texts(shop, _walk(shop, 'search[x]'), texts[1]) == texts


def test_item_pages_show_what_the_original_shows():
  texts = _html_texts('item_page_ws.html')
  description, features = _html_texts('item_page_ws_desc.html'), _html_texts('item_page_ws_feat.html')
  product = _product(
    'B09P87V3LZ', texts[14], (('color', tuple(texts[5:8])), ('size', tuple(texts[9:14]))), '$100.0',
    description[4], tuple(features[4:]))
  shop = _shop([product])
  item = ('search[x]', 'click[b09p87v3lz]')
  assert engine.page_texts(shop, _walk(shop, *item), texts[1]) == texts
  assert engine.page_texts(shop, _walk(shop, *item, 'click[description]'), texts[1]) == description
  assert engine.page_texts(shop, _walk(shop, *item, 'click[features]'), texts[1]) == features


def test_first_page_offers_the_search_only(shop):
  assert engine.page_texts(shop, Visit(), 'wish') == ['WebShop', 'Instruction:', 'wish', 'Search']
  assert engine.clickables(shop, Visit()) == []


def test_results_are_paged_and_the_page_after_the_last_is_empty(shop):
  last = _walk(shop, 'search[x]', 'click[next >]', 'click[next >]')
  assert engine.page_texts(shop, last, 'w')[3:7] == ['Page 3 (Total results: 5)', '< Prev', 'Next >', 'B04']
  empty = engine.act(shop, last, 'click[next >]')
  assert engine.clickables(shop, empty) == ['back to search', '< prev', 'next >']
  assert engine.act(shop, empty, 'click[< prev]') == last


def test_buttons_come_before_option_values(shop):
  item = _walk(shop, 'search[x]', 'click[b00]')
  assert engine.clickables(shop, item) == [
    'back to search', '< prev', 'description', 'features', 'reviews', 'buy now', 'red', 'blue', 's', 'm']


def test_last_value_of_an_option_wins_and_survives_a_sub_page(shop):
  item = _walk(shop, 'search[x]', 'click[b00]', 'click[red]', 'click[m]', 'click[blue]', 'click[features]',
               'click[< prev]')
  assert dict(item.options) == {'color': 'blue', 'size': 'm'}
  assert item.page == 'item'


def test_leaving_an_item_forgets_its_options_but_not_the_results_page(shop):
  back = _walk(shop, 'search[x]', 'click[next >]', 'click[b02]', 'click[red]', 'click[< prev]')
  assert back == Visit(page='results', query='x', number=2)


def test_back_to_search_clears_everything(shop):
  assert _walk(shop, 'search[x]', 'click[b00]', 'click[red]', 'click[back to search]') == Visit()


def test_search_is_accepted_on_every_page(shop):
  for path in ([], ['search[x]'], ['search[x]', 'click[b00]'], ['search[x]', 'click[b00]', 'click[reviews]']):
    assert _walk(shop, *path, 'search[New]') == Visit(page='results', query='new')


def test_value_shared_by_two_options_belongs_to_the_last():
  shop = _shop([_product('B00', options=(('color', ('one', 'two')), ('size', ('one',))))])
  assert _walk(shop, 'search[x]', 'click[b00]', 'click[one]').options == (('size', 'one'),)


@pytest.mark.parametrize('action', [
  '', 'look', 'click[]', 'click[search]', 'click[b09]', 'click[ b00 ]', 'click[buy now]', 'buy now',
  'search[]', 'think[x]', 'a' * 5000, 'click[a]\nclick[b00]',
])
def test_what_the_page_cannot_execute_changes_nothing(shop, action):
  assert engine.act(shop, _walk(shop, 'search[x]'), action) is None
