"""The purchase score."""

import pytest
from shared import golden

from opid_jax.envs.webshop import reward
from opid_jax.envs.webshop.catalogue import Product
from opid_jax.envs.webshop.goals import Goal


def _product(case):
  own = case['product']
  return Product(
    asin='b0', name=own['Title'], category='', query=own['query'], product_category=own['product_category'],
    price=case['price'], price_tag='', description=own['Description'], bullets=tuple(own['BulletPoints']),
    options=(), attributes=tuple(own['Attributes']), nouns=tuple(case['nouns']['product']))


def _goal(case):
  goal = case['goal']
  options = goal['goal_options']
  return Goal(
    asin='b0', text='', instruction='', attributes=tuple(goal['attributes']),
    options=tuple(options.items() if isinstance(options, dict) else options), price_upper=goal['price_upper'],
    query=goal['query'], product_category=goal['product_category'], nouns=tuple(case['nouns']['goal']))


def test_scores_equal_the_recorded_ones():
  for case in golden('webshop_reward')['cases']:
    score, info = reward.score(_product(case), case['chosen_options'], _goal(case))
    assert score == pytest.approx(case['reward'], abs=1e-9), case['name']
    assert (score == 1.0) == case['won'], case['name']
    assert info == pytest.approx(case['info']), case['name']


def test_colours_are_normalised_as_recorded():
  for case in golden('webshop_color')['cases']:
    assert reward.normalize_color(case['text']) == case['out'], case['text']


def test_there_are_102_colour_words_in_alphabetical_order():
  assert len(reward.COLORS) == 102
  assert list(reward.COLORS) == sorted(reward.COLORS)
