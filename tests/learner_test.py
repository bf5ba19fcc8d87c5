import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from shared import golden_cases

from opid_jax import layout, learner, losses, optimizer
from opid_jax.algorithms import ALGORITHMS, AdvantageSettings, Evidence
from opid_jax.models import qwen
from opid_jax.types import TrainState

# Unequal lengths and an empty response (C11).
LENGTHS = [(6, 5), (3, 8), (9, 2), (5, 0), (4, 3), (7, 7)]
WIDTH = 8
SETTINGS = learner.LossSettings(0.2, 0.3, 3.0, 'k3', 0.2, 0.05, 0.9, 4)
MODEL = {'config': tiny.QWEN3, 'options': qwen.Options()}
SEQUENCES = tiny.make_sequences(LENGTHS)
MASK = layout.stack_responses([np.ones(t) for _, t in LENGTHS], WIDTH, np.float32)


@functools.cache
def params():
  return tiny.make_params()


@functools.cache
def scorer():
  return jax.jit(functools.partial(learner.score, **MODEL, temperature=SETTINGS.temperature, head_chunk=4))


@functools.cache
def accumulator(settings):
  loss = functools.partial(learner.loss, **MODEL, settings=settings)
  return jax.jit(functools.partial(learner.accumulate, loss_fn=loss))


@functools.cache
def applier():
  transform = optimizer.make(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01, clip_norm=1.0)
  run = jax.jit(functools.partial(learner.apply, transform=transform, learning_rate=lambda step: 1e-4))
  return run, jax.jit(transform.init)


def draw(seed=1):
  """logp_old, logp_ref and advantage [N, T]; the first two near what the policy says, some ratios far outside."""
  rng = np.random.default_rng(seed)
  packed, place = layout.pack(SEQUENCES, row_length=16, slots=8, rows_multiple=6)
  logp = layout.unpack(np.asarray(scorer()(params(), packed)[0]), place, WIDTH)
  old, ref = (logp + 0.4 * rng.normal(size=logp.shape) for _ in range(2))
  return logp, (old.astype(np.float32), ref.astype(np.float32), rng.normal(size=logp.shape).astype(np.float32))


def gradient_of(values, *, settings=SETTINGS, row_length=16, slots=8, rows=6, mask=MASK, sequences=SEQUENCES):
  """(gradient, sums) of a batch, `rows` packed rows per device call."""
  packed, place = layout.pack(sequences, row_length=row_length, slots=slots, rows_multiple=rows)
  weight = losses.token_weights(mask, aggregation='token-mean')
  targets = learner.Targets(*(layout.spread(x, place, packed) for x in (*values, weight)))
  gradient, sums = jax.tree.map(jnp.zeros_like, params()), learner.Sums.zeros()
  for part, wanted in zip(layout.calls(packed, rows), layout.calls(targets, rows), strict=True):
    gradient, sums = accumulator(settings)(params(), gradient, sums, part, wanted)
  return gradient, sums


def assert_trees_close(got, expected, atol):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, atol=atol, rtol=1e-4)


def naive_loss(params, padded, values, s):
  """One padded sequence per row, all logits, the formulas as the papers write them."""
  old, ref, advantage = values
  logits = jax.nn.log_softmax(qwen.logits(params, tiny.QWEN3, padded) / s.temperature, axis=-1)
  total = 0.0
  for m, (prompt, response) in enumerate(SEQUENCES):
    n = len(response)
    p = logits[m, len(prompt) - 1 : len(prompt) - 1 + n]
    chosen, a = p[np.arange(n), response], advantage[m, :n]
    ratio = jnp.exp(chosen - old[m, :n])
    surrogate = -jnp.minimum(ratio * a, jnp.clip(ratio, 1 - s.clip_low, 1 + s.clip_high) * a)
    surrogate = jnp.where(a < 0, jnp.minimum(surrogate, -a * s.dual_clip), surrogate)
    d = ref[m, :n] - chosen
    kl, entropy = jnp.exp(d) - 1 - d, -jnp.sum(jnp.exp(p) * p, axis=-1)
    total += jnp.sum(surrogate + s.kl_coef * kl - s.entropy_coef * entropy)
  return total / sum(t for _, t in LENGTHS)


def test_loss_and_gradient_equal_one_sequence_per_row():
  _, values = draw()
  padded = np.zeros((len(SEQUENCES), 14), np.int32)
  for m, pair in enumerate(SEQUENCES):
    padded[m, : sum(map(len, pair))] = np.concatenate(pair)
  value, expected = jax.jit(jax.value_and_grad(functools.partial(naive_loss, s=SETTINGS)))(params(), padded, values)
  gradient, sums = gradient_of(values)
  assert float(sums.policy + sums.kl + sums.entropy) == pytest.approx(float(value), abs=1e-5)
  assert sums.tokens == sum(t for _, t in LENGTHS)
  assert sums.clipped_tokens > 0
  assert_trees_close(gradient, expected, atol=2e-6)


def test_c01_ratio_is_one_before_the_first_update_and_the_loss_is_minus_the_advantage():
  logp, (_, ref, advantage) = draw()
  # Scored in another packing than it is trained in, as the loop does when minibatches cut the batch.
  packed, place = layout.pack(SEQUENCES, row_length=24, slots=12)
  again = layout.unpack(np.asarray(scorer()(params(), packed)[0]), place, WIDTH)
  np.testing.assert_allclose(again, logp, atol=1e-5)
  _, sums = gradient_of((logp, ref, advantage))
  assert sums.ratio_gap < 1e-6
  assert sums.clipped_tokens == sums.dual_clipped_tokens == 0
  assert float(sums.policy) == pytest.approx(-(advantage * MASK).sum() / MASK.sum(), abs=1e-6)


@pytest.mark.parametrize('rows', [1, 2])
def test_c09_micro_batches_and_packings_give_one_update(rows):
  _, values = draw()
  run, init = applier()
  state = TrainState(jnp.zeros((), jnp.int32), params(), init(params()))
  whole, sums = gradient_of(values)
  parts, more = gradient_of(values, row_length=24, slots=12, rows=rows)
  assert_trees_close(parts, whole, atol=1e-6)
  np.testing.assert_allclose(more, sums, rtol=1e-4, atol=1e-5)
  (first, _), (second, _) = run(state, whole, sums), run(state, parts, more)
  assert_trees_close(second.params, first.params, atol=1e-6)


def test_c11_sequence_without_a_trained_token_changes_nothing():
  _, values = draw()
  kept = [m for m, (_, t) in enumerate(LENGTHS) if t]
  without, sums = gradient_of(
    [x[kept] for x in values], mask=MASK[kept], sequences=[SEQUENCES[m] for m in kept], row_length=16
  )
  gradient, all_sums = gradient_of(values)
  assert_trees_close((gradient, all_sums), (without, sums), atol=1e-7)
  # Masked out rather than empty: scored, but with no weight, and it counts nowhere.
  mask = MASK * (np.arange(len(LENGTHS)) != 0)[:, None]
  gradient, sums = gradient_of(values, mask=mask)
  assert sums.tokens == mask.sum()
  alone, _ = gradient_of([x[1:] for x in values], mask=MASK[1:], sequences=SEQUENCES[1:])
  assert_trees_close(gradient, alone, atol=1e-6)


def test_c11_batch_without_a_trained_token_is_no_update():
  _, values = draw()
  run, init = applier()
  gradient, sums = gradient_of(values)
  state, _ = run(TrainState(jnp.zeros((), jnp.int32), params(), init(params())), gradient, sums)
  for mask in (0 * MASK, None):
    if mask is None:  # Nothing sampled at all.
      empty = [(prompt, prompt[:0]) for prompt, _ in SEQUENCES]
      gradient, sums = gradient_of(values, sequences=empty, mask=0 * MASK)
    else:
      gradient, sums = gradient_of(values, mask=mask)
    after, norm = run(state, gradient, sums)
    assert norm == 0
    jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_gradient_that_is_not_finite_is_reported_and_not_applied(bad):
  logp, (old, ref, advantage) = draw()
  run, init = applier()
  state = TrainState(jnp.zeros((), jnp.int32), params(), init(params()))
  advantage = advantage.copy()
  advantage[0, 0] = bad
  gradient, sums = gradient_of((logp, ref, advantage))
  after, norm = run(state, gradient, sums)
  assert not np.isfinite(norm)
  jax.tree.map(np.testing.assert_array_equal, after, state)


def test_far_apart_policies_give_a_finite_gradient():
  logp, (_, _, advantage) = draw()
  for shift in (-200.0, 200.0):
    gradient, sums = gradient_of((logp + np.float32(shift), logp - np.float32(shift), advantage))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((gradient, sums)))


def test_zero_skill_weight_is_grpo_bit_for_bit_through_the_update():
  logp, (skill, ref, _) = draw()
  n = len(LENGTHS)
  evidence = Evidence(
    logp=np.stack([logp, skill]),
    mask=MASK,
    score=np.array([10, 10, 0, 0, 10, 0], np.float32),
    valid=np.array([1, 1, 0, 1, 1, 1], bool),
    group=np.zeros(n, np.int32),
    trajectory=np.array([0, 0, 1, 1, 2, 3], np.int32),
    weight=np.zeros((1, n), np.float32),
  )
  run, init = applier()
  state = TrainState(jnp.zeros((), jnp.int32), params(), init(params()))

  def update(name, evidence):
    advantage, _ = ALGORITHMS[name].advantage(evidence, AdvantageSettings(invalid_penalty=0.1, center=True, rms=True))
    return run(state, *gradient_of((logp, ref, advantage)))[0]

  grpo = update('grpo', evidence._replace(logp=logp[None], weight=np.zeros((0, n), np.float32)))
  jax.tree.map(np.testing.assert_array_equal, update('opid', evidence), grpo)
  heeded = update('opid', evidence._replace(weight=np.full((1, n), 0.5, np.float32)))
  assert not np.array_equal(heeded.params['embed']['embedding'], grpo.params['embed']['embedding'])


def test_kl_to_itself_is_zero_and_entropy_bonus_raises_entropy():
  logp, (_, _, advantage) = draw()
  # The reference pulls nowhere when it is the policy, so only the bonus is left.
  gradient, sums = gradient_of((logp, logp, 0 * advantage))
  assert abs(sums.kl) < 1e-8
  assert float(sums.entropy) == pytest.approx(-0.05 * float(sums.entropy_total) / MASK.sum(), rel=1e-5)
  packed, place = layout.pack(SEQUENCES, row_length=16, slots=8, rows_multiple=6)
  moved = jax.tree.map(lambda p, g: p - 0.5 * g, params(), gradient)
  before, after = (layout.unpack(np.asarray(scorer()(x, packed)[1]), place, WIDTH).sum() for x in (params(), moved))
  assert after > before


def test_zero_kl_coefficient_reads_no_reference():
  logp, (old, ref, advantage) = draw()
  plain = SETTINGS._replace(kl_coef=0.0, entropy_coef=0.0)
  first, sums = gradient_of((old, ref, advantage), settings=plain)
  second, _ = gradient_of((old, np.full_like(ref, np.nan), advantage), settings=plain)
  assert sums.kl == sums.kl_total == 0
  jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize('case', golden_cases('adamw'))
def test_apply_follows_the_reference_optimizer(case):
  b1, b2 = case['betas']
  transform = optimizer.make(
    b1=b1, b2=b2, eps=case['eps'], weight_decay=case['weight_decay'], clip_norm=case['max_grad_norm']
  )
  rate = functools.partial(
    optimizer.learning_rate, peak=case['lr'], warmup_steps=case['warmup_steps'], schedule='constant', total_steps=99
  )
  run = jax.jit(functools.partial(learner.apply, transform=transform, learning_rate=rate))
  tree = {name: np.array(case[f'init_{name}'], np.float32) for name in 'pq'}
  state = TrainState(jnp.zeros((), jnp.int32), tree, jax.jit(transform.init)(tree))
  sums = learner.Sums.zeros()._replace(tokens=jnp.ones(()))
  for step in case['steps']:
    state, norm = run(state, {name: np.array(step[f'grad_{name}'], np.float32) for name in 'pq'}, sums)
    state = state._replace(step=state.step + 1)
    assert float(norm) == pytest.approx(step['grad_norm_before_clip'], rel=1e-5)
    for name in 'pq':
      np.testing.assert_allclose(state.params[name], step[name], rtol=1e-5, atol=1e-6)
