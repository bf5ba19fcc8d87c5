import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from shared import golden_cases

from opid_jax import optimizer

ADAM = {'b1': 0.9, 'b2': 0.999, 'eps': 1e-8}


@functools.cache
def jitted(**settings):
  transform = optimizer.make(**settings)

  @jax.jit
  def update(params, state, gradient, rate):
    direction, state = transform.update(gradient, state, params)
    return jax.tree.map(lambda p, u: p - rate * u, params, direction), state

  return transform.init, update


@pytest.mark.parametrize('case', golden_cases('adamw'))
def test_trajectory_equals_the_reference(case):
  b1, b2 = case['betas']
  init, update = jitted(
    b1=b1, b2=b2, eps=case['eps'], weight_decay=case['weight_decay'], clip_norm=case['max_grad_norm']
  )
  params = {'p': jnp.array(case['init_p']), 'q': jnp.array(case['init_q'])}
  state = init(params)
  for number, step in enumerate(case['steps']):
    rate = optimizer.learning_rate(
      number, peak=case['lr'], warmup_steps=case['warmup_steps'], schedule='constant', total_steps=100
    )
    assert rate == pytest.approx(step['lr'], rel=1e-6)
    gradient = {'p': jnp.array(step['grad_p']), 'q': jnp.array(step['grad_q'])}
    params, state = update(params, state, gradient, rate)
    np.testing.assert_allclose(params['p'], step['p'], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(params['q'], step['q'], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('case', golden_cases('lr_schedule'))
@pytest.mark.parametrize('schedule, field', [('constant', 'constant'), ('cosine', 'cosine_min0p1_cycles0p5')])
def test_schedule_equals_the_reference(case, schedule, field):
  steps = np.arange(len(case[field]))
  rates = optimizer.learning_rate(
    steps, peak=1.0, warmup_steps=case['warmup'], schedule=schedule, total_steps=case['total']
  )
  np.testing.assert_allclose(rates, case[field], rtol=1e-5, atol=1e-7)


def test_the_rate_is_a_function_of_the_step_under_jit():
  rate = functools.partial(
    optimizer.learning_rate, peak=0.5, warmup_steps=4, schedule='cosine', total_steps=10
  )
  for step in (0, 3, 4, 9):
    assert jax.jit(rate)(step) == pytest.approx(float(rate(step)), rel=1e-6)


def test_the_cosine_stays_at_its_floor_after_the_last_step():
  rate = optimizer.learning_rate(50, peak=1.0, warmup_steps=0, schedule='cosine', total_steps=20)
  assert rate == pytest.approx(0.1)


def test_updates_of_one_training_step_share_a_rate_and_move_the_moments():
  init, update = jitted(weight_decay=0.0, clip_norm=0.0, **ADAM)
  params = {'w': jnp.ones(2)}
  state = init(params)
  for _ in range(3):  # Three minibatches of the first step of a warm-up: the rate is 0, the moments learn.
    params, state = update(params, state, {'w': jnp.ones(2)}, 0.0)
  np.testing.assert_array_equal(params['w'], 1.0)
  assert optax.tree.get(state, 'count') == 3
  assert optax.tree.get(state, 'mu')['w'][0] == pytest.approx(1 - 0.9**3, rel=1e-5)


@pytest.mark.parametrize('clip_norm, scale', [(0.0, 1.0), (1.0, 0.2)])
def test_a_clip_of_zero_is_no_clip(clip_norm, scale):
  transform = optimizer.make(weight_decay=0.0, clip_norm=clip_norm, b1=0.0, b2=0.0, eps=1.0)
  params = {'w': jnp.zeros(2)}
  gradient = {'w': jnp.array([3.0, 4.0])}
  direction, _ = transform.update(gradient, transform.init(params), params)
  g = scale * np.array([3.0, 4.0])
  np.testing.assert_allclose(direction['w'], g / (np.abs(g) + 1.0), rtol=1e-5)


def test_an_unknown_schedule_is_refused():
  with pytest.raises(ValueError, match='Available: constant, cosine'):
    optimizer.learning_rate(0, peak=1.0, warmup_steps=0, schedule='linear', total_steps=10)
