"""Catalogues, search, goals and their split."""

import dataclasses
import hashlib
import itertools
import json

import pytest
from shared import shared_path

from opid_jax.envs.webshop import generate, goals, load, reward, search


@pytest.fixture(scope='module')
def small():
  return load.load_products(str(shared_path('data', 'webshop')), seed=233, human=True)


@pytest.fixture(scope='module')
def embedded():
  return generate.generate_products(1000, seed=233)


def test_small_set_makes_6910_synthetic_and_13_human_goals(small):
  assert len(small) == 1000
  assert len(goals.synthetic_goals(small, seed=233)) == 6910
  assert len(goals.human_goals(small, seed=233)) == 13


def test_search_ranks_like_lucene(small):
  found = search.build_search(small, max_results=50, seed=0)
  lines = shared_path('data', 'webshop', 'lucene_bm25_top50.jsonl').read_text(encoding='utf-8').splitlines()
  overlaps = []
  for line in lines:
    row = json.loads(line)
    ours = {small[i].asin for i in found(row['query'])[:10]}
    overlaps.append(len(ours & {asin for asin, _ in row['hits'][:10]}) / 10)
  assert len(overlaps) == 200
  assert sum(overlaps) / len(overlaps) >= 0.95


def test_search_terms_are_words_without_stop_words_possessives_and_endings():
  assert search.tokens("The women's Running shoes, 3.5 inch") == ['women', 'run', 'shoe', '3.5', 'inch']


def test_equal_scores_keep_catalogue_order_and_no_match_finds_nothing(embedded):
  twins = [dataclasses.replace(embedded[0], asin=f'b{i}') for i in range(4)]
  found = search.build_search([*twins, embedded[1]], max_results=3, seed=0)
  assert found(embedded[0].name) == (0, 1, 2)
  assert found('zzz') == found('the') == found(' ') == ()


def test_search_prefixes_list_by_exact_match(embedded):
  found = search.build_search(embedded, max_results=2000, seed=0)
  assert {embedded[i].query for i in found('<q> shampoo')} == {'shampoo'}
  assert {embedded[i].category for i in found('<c> beauty')} == {'beauty'}
  assert all('vegan' in embedded[i].attributes for i in found('<a> vegan'))
  assert sorted(found('<r>')) == list(range(1000))


def test_generated_catalogue_is_the_same_everywhere(embedded):
  assert embedded == generate.generate_products(1000, seed=233)
  assert embedded != generate.generate_products(1000, seed=234)
  digest = hashlib.sha256(repr(embedded).encode()).hexdigest()
  # The embedded policy was trained on this catalogue, and recorded results depend on it.
  assert digest[:16] == '94e3329ca8dad9c0'


def test_generated_texts_are_short_over_a_small_vocabulary(embedded):
  words = {word for p in embedded for text in (p.name, p.description, *p.bullets) for word in text.split()}
  assert len(words) < 300
  assert all(4 <= len(p.name.split()) <= 8 and len(p.asin) == 10 for p in embedded)
  assert len({p.asin for p in embedded}) == 1000


def test_asins_of_one_query_start_differently(embedded):
  for _, own in itertools.groupby(sorted(embedded, key=lambda p: p.query), key=lambda p: p.query):
    assert len({p.asin[:6] for p in own}) == 10


def test_generated_words_are_never_taken_for_one_another():
  for words in generate._ATTRIBUTES.values():
    for a, b in itertools.permutations(words.split(', '), 2):
      assert not reward.matches(a, b) and a not in b
  for offered in generate._OPTIONS.values():
    for (name, values), (_, others) in itertools.product(offered.items(), repeat=2):
      for a, b in itertools.product(values.split(', '), others.split(', ')):
        assert a == b or not reward.matches(f'{name} {a}', reward.normalize_color(b))
  kinds = ' '.join(text.replace(',', '') for text in generate._QUERIES.values()).split()
  assert len(kinds) == len(set(kinds))


def test_buying_the_wrong_twin_costs_the_success(embedded):
  """Of the products that a search for a wish lists first, few solve it."""
  wishes = goals.synthetic_goals(embedded, seed=233, max_per_product=3)[::20]
  solving = [sum(p.query == goal.query and reward.score(p, dict(goal.options), goal)[0] == 1.0
                 and all(value in dict(p.options).get(name, ()) for name, value in goal.options)
                 for p in embedded) for goal in wishes]
  assert min(solving) >= 1
  assert 1.0 <= sum(solving) / len(solving) < 1.6


@pytest.mark.parametrize('number', [0, 15, 1010])
def test_generator_refuses_other_sizes(number):
  with pytest.raises(ValueError, match='multiple of 10 from 10 to 1000'):
    generate.generate_products(number, seed=0)


def test_goal_names_options_and_a_limit_above_the_price(embedded):
  prices = {product.asin: product.price for product in embedded}
  for goal in goals.synthetic_goals(embedded, seed=233, max_per_product=3):
    assert 0 < goal.price_upper - prices[goal.asin] <= 50
    assert goal.text.endswith(f', and price lower than {goal.price_upper:.2f} dollars')
    assert all(f'{name}: {value}' in goal.text for name, value in goal.options)


def test_expensive_products_have_no_price_clause(embedded):
  dear = dataclasses.replace(embedded[0], price=985.0)
  goal = goals.synthetic_goals([dear], seed=0)[0]
  assert goal.price_upper == goals.NO_LIMIT and 'price' not in goal.text


def test_price_limit_depends_on_the_product_not_on_its_neighbours(embedded):
  every = {goal.text for goal in goals.synthetic_goals(embedded, seed=7)}
  assert {goal.text for goal in goals.synthetic_goals(embedded[500:], seed=7)} <= every


def test_no_product_and_no_sentence_is_on_both_sides_of_the_split(embedded):
  every = goals.synthetic_goals(embedded, seed=233, max_per_product=3)
  for seed in range(3):
    train, heldout = goals.split_goals(every, seed=seed, num_heldout=200)
    assert len(heldout) == 200
    assert not {goal.asin for goal in train} & {goal.asin for goal in heldout}
    assert not {goal.text for goal in train} & {goal.text for goal in heldout}


def test_panel_takes_each_product_once_before_any_twice(small):
  _, heldout = goals.split_goals(goals.synthetic_goals(small, seed=233), seed=233, num_heldout=500)
  firsts = len({goal.asin for goal in heldout})
  assert firsts > 60
  assert len({goal.asin for goal in heldout[:firsts]}) == firsts


def test_split_that_leaves_nothing_to_train_on_is_refused(small):
  human = goals.human_goals(small, seed=233)
  with pytest.raises(ValueError, match=r'num_heldout \(13\).*13 goals of 13 products'):
    goals.split_goals(human, seed=233, num_heldout=13)


ITEM = {
  'asin': 'B000000001', 'name': 'Acme Blue Cotton Shirt', 'category': 'fashion', 'query': "Men's Shirts",
  'product_category': 'Clothing › Men › Shirts', 'pricing': '$1,005.50 - $1,200.00', 'full_description': None,
  'small_description': ['soft', 'warm'], 'average_rating': 4.5,
  'customization_options': {'Color': [{'value': ' Red/Blue ', 'image': None}], 'Size': None},
}
INS = {'B000000001': {
  'attributes': ['cotton'], 'instruction': 'Find me cotton shirts', 'instruction_attributes': ['cotton']}}
HUMAN = {'B000000001': [{
  'instruction': 'i want a shirt.', 'attributes': ['cotton'], 'options': ['color: red'],
  'instruction_attributes': ['cotton'], 'instruction_options': ['red'], 'worker_id': 'x'}]}


def _folder(path, items=(ITEM,), ins=INS, human=HUMAN, suffix=''):
  for name, value in ((f'items_shuffle{suffix}', list(items)), (f'items_ins_v2{suffix}', ins),
                      ('items_human_ins', human)):
    if value is not None:
      (path / f'{name}.json').write_text(json.dumps(value), encoding='utf-8')
  return str(path)


def test_official_files_are_read(tmp_path):
  long, again = {**ITEM, 'asin': 'B0000000011'}, {**ITEM, 'name': 'again'}
  unpriced = {**ITEM, 'asin': 'B000000002', 'pricing': ''}
  folder = _folder(tmp_path, [ITEM, long, again, unpriced], suffix='_1000')
  first, second = load.load_products(folder, seed=0, human=True)
  assert first.price_tag == '$1005.5 to $1200.0' and 1005.5 <= first.price <= 1200.0
  assert first.query == "men's shirts" and first.options == (('color', ('red | blue',)),)
  assert first.description == '' and first.bullets == ('soft', 'warm') and first.attributes == ('cotton',)
  assert first.nouns == ('acme', 'blue', 'cotton', 'shirt')
  assert (second.price, second.price_tag, second.attributes) == (100.0, '$100.0', ())
  assert goals.human_goals([first], seed=0)[0].options == ('red',)
  assert goals.synthetic_goals([first], seed=0)[0].text == 'Find me cotton shirts with color: red | blue'


def test_price_of_a_range_is_the_same_in_every_run(tmp_path):
  folder = _folder(tmp_path)
  prices = [load.load_products(folder, seed=seed, human=False)[0].price for seed in (1, 1, 2)]
  assert prices[0] == prices[1] != prices[2]


@pytest.mark.parametrize(('change', 'message'), [
  ({'ins': None}, 'items_ins_v2.json is missing'),
  ({'human': None}, 'items_human_ins.json is missing'),
  ({'ins': []}, 'holds a list; expected a dict'),
  ({'items': []}, 'holds no product'),
  ({'items': [{'name': 'x'}]}, 'product 0 has no asin'),
  ({'items': [{'asin': 'B1'}]}, r"product 0 \(B1\) cannot be read: KeyError\('name'\)"),
  ({'items': [{**ITEM, 'customization_options': {'Color': [{}]}}]}, r"cannot be read: KeyError\('value'\)"),
  ({'items': [7]}, 'product 0 has no asin'),
])
def test_broken_folder_is_refused_by_name(tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    load.load_products(_folder(tmp_path, **change), seed=0, human=True)


def test_missing_empty_ambiguous_and_truncated_data_are_refused(tmp_path):
  with pytest.raises(ValueError, match=r'nowhere does not exist. Set env.data_dir'):
    load.load_products(str(tmp_path / 'nowhere'), seed=0, human=False)
  with pytest.raises(ValueError, match='found neither'):
    load.load_products(str(tmp_path), seed=0, human=False)
  (tmp_path / 'products_1.jsonl').write_text('{"asin": "B1", ', encoding='utf-8')
  with pytest.raises(ValueError, match=r'products_1.jsonl, line 1 is not valid JSON'):
    load.load_products(str(tmp_path), seed=0, human=False)
  (tmp_path / 'products_2.jsonl').write_text('', encoding='utf-8')
  with pytest.raises(ValueError, match='found products_1.jsonl, products_2.jsonl'):
    load.load_products(str(tmp_path), seed=0, human=False)
  with pytest.raises(ValueError, match='products_2.jsonl holds no product'):
    load.load_products(str(tmp_path / 'products_2.jsonl'), seed=0, human=False)
