import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from shared import golden_cases

from opid_jax import layout, learner, logprobs, sampling
from opid_jax.models import qwen


@functools.partial(jax.jit, static_argnames='chunk')
def from_logits(logits, target, temperature, chunk=0):
  """With the logits as hidden states the head has nothing to do."""
  return logprobs.from_hidden(logits, target, lambda h: h, temperature=temperature, chunk=chunk)


@pytest.mark.parametrize('case', golden_cases('logprob_entropy'))
def test_logp_and_entropy_equal_the_reference(case):
  logits, target = np.array(case['logits'], np.float32), np.array(case['labels'], np.int32)
  logp, entropy = from_logits(logits, target, case['temperature'], chunk=2)
  np.testing.assert_allclose(logp, case['logprob'], rtol=1e-5, atol=1e-5)
  # The reference itself is 2e-6 off the true entropy where logits are large.
  np.testing.assert_allclose(entropy, case['entropy'], rtol=1e-4, atol=4e-6)


def plain(hidden, target, weight, temperature):
  """All logits at once and `log_softmax`."""
  logp = jax.nn.log_softmax(hidden @ weight / temperature, axis=-1)
  chosen = jnp.take_along_axis(logp, target[..., None], axis=-1)[..., 0]
  return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


@pytest.mark.parametrize('chunk', [0, 1, 3, 100])
def test_any_chunk_gives_the_values_and_gradients_of_log_softmax(chunk):
  rng = np.random.default_rng(0)
  hidden, weight = rng.normal(size=(2, 7, 4)).astype(np.float32), rng.normal(size=(4, 11)).astype(np.float32)
  target = rng.integers(0, 11, (2, 7)).astype(np.int32)
  mix = rng.normal(size=(2, 2, 7)).astype(np.float32)

  def streamed(hidden, target, weight, temperature):
    return logprobs.from_hidden(hidden, target, lambda h: h @ weight, temperature=temperature, chunk=chunk)

  @functools.partial(jax.jit, static_argnums=0)
  def run(score, hidden, weight):
    def value(hidden, weight):
      logp, entropy = score(hidden, target, weight, 0.7)
      return jnp.sum(mix[0] * logp + mix[1] * entropy), (logp, entropy)

    return jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(hidden, weight)

  got, expected = run(streamed, hidden, weight), run(plain, hidden, weight)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def shapes_of(jaxpr):
  """Every array shape of a program, those inside loops and checkpoints included."""
  for equation in jaxpr.eqns:
    yield from (v.aval.shape for v in equation.outvars)
    for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        yield from shapes_of(inner)


def test_no_array_of_sequences_by_vocabulary_exists_forward_or_backward():
  config = qwen.QwenConfig('qwen3', 61, 32, 2, 4, 2, 8, 48, 1e4)
  packed, _ = layout.pack(tiny.make_sequences([(20, 18), (9, 17), (30, 19)]), row_length=56, slots=35)
  targets = learner.Targets(*[np.ones(packed.target.shape, np.float32)] * 4)
  settings = learner.LossSettings(0.2, 0.2, 3.0, 'k3', 0.1, 0.1, 1.0, head_chunk=4)
  loss = functools.partial(learner.loss, config=config, options=qwen.Options(remat='layer'), settings=settings)
  program = jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(
    jax.eval_shape(lambda: qwen.init(jax.random.key(0), config)), packed, targets
  )
  with_vocabulary = {shape for shape in shapes_of(program.jaxpr) if 61 in shape}
  assert (3, 4, 61) in with_vocabulary, 'the walk did not reach the head'
  assert max(np.prod(shape) // 61 for shape in with_vocabulary) <= 32, with_vocabulary  # 32: the embedding itself.


def constant_model():
  """Two tokens, and logits [2, 0] whatever was read: no layer adds to a constant embedding."""
  config = qwen.QwenConfig('qwen3', 2, 8, 1, 2, 1, 4, 8, 1e4, tied=False)
  shapes = jax.eval_shape(lambda: qwen.init(jax.random.key(0), config))
  params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
  params['embed']['embedding'] += 1.0
  params['final_norm']['scale'] += 1.0
  params['head']['kernel'][:, 0] = 2 / 8
  return config, params


def test_c03_sampler_old_new_skill_and_reference_use_the_sampling_temperature():
  config, params = constant_model()
  model = {'config': config, 'options': qwen.Options()}
  expected = -0.01815  # log softmax([2, 0] / 0.5)[0]; without the temperature it would be -0.12693.
  score = jax.jit(functools.partial(learner.score, **model, temperature=0.5, head_chunk=0))
  # The plain history, and the same with a skill in it: one row each.
  history, skilled, response = np.array([1], np.int32), np.array([0, 1], np.int32), np.array([0], np.int32)
  packed, _ = layout.pack([(history, response), (skilled, response)], row_length=2, slots=1)
  old = score(params, packed)[0]  # The reference is scored by the same call.
  np.testing.assert_allclose(old, expected, atol=1e-5)

  settings = learner.LossSettings(0.2, 0.2, 3.0, 'k3', 1.0, 0.0, 0.5, 0)
  at = np.full((2, 1), expected, np.float32)
  _, sums = jax.jit(functools.partial(learner.loss, **model, settings=settings))(
    params, packed, learner.Targets(at, at, at, at)
  )
  assert sums.ratio_gap < 1e-5  # The new log-prob of the update.
  assert abs(sums.kl_total) < 1e-5  # Against a reference scored at the temperature.

  @jax.jit
  def sample(params):
    slots = sampling.empty_slots(config, num_slots=4, max_tokens=8, max_response=6, dtype=jnp.float32)
    key, one = jnp.arange(8, dtype=jnp.uint32).reshape(4, 2), jnp.ones(4, jnp.int32)
    slots = sampling.prefill(params, slots, one[:, None], one, jnp.arange(4), 6 * one, key, **model)
    return sampling.decode(params, slots, jnp.float32(0.5), **model, end_ids=(9,), num_tokens=6)

  slots = jax.tree.map(np.asarray, sample(params))
  assert (slots.tokens == 0).any()
  np.testing.assert_allclose(slots.logp[slots.tokens == 0], expected, atol=1e-5)
  np.testing.assert_allclose(slots.logp[slots.tokens == 1], expected - 4, atol=1e-5)


@pytest.mark.parametrize('temperature', [1e-6, 1e-3])
def test_c04_tiny_temperature_stays_finite(temperature):
  logits = np.array([[[3.0, 2.9, -50000.0]] * 3], np.float32)
  target = np.array([[0, 1, 2]], np.int32)

  def total(logits):
    logp, entropy = from_logits(logits, target, temperature)
    return jnp.sum(logp) + jnp.sum(entropy), logp

  (_, logp), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(logits)
  assert np.isfinite(logp).all()
  assert logp[0, 0] == pytest.approx(0.0, abs=1e-6)
  assert np.isfinite(gradient).all()
  key, count = np.zeros((1, 2), np.uint32), np.zeros(1, np.int32)
  token, sampled = jax.jit(sampling.choose)(logits[:, 0], key, count, temperature)
  assert int(token[0]) == 0
  assert sampled[0] == pytest.approx(0.0, abs=1e-6)


def test_mismatched_shapes_are_refused():
  with pytest.raises(AssertionError):
    from_logits(np.zeros((2, 3, 5)), np.zeros((2, 4), np.int32), 1.0)
