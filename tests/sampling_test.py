import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from opid_jax import layout, learner, policy, sampling, settings, sharding
from opid_jax.models import qwen

MAX_PROMPT, MAX_RESPONSE = 12, 6
LENGTHS = (1, 3, 4, 5, 8, 9, 12, 12, 2, 7)
PROMPTS = [prompt for prompt, _ in tiny.make_sequences([(n, 0) for n in LENGTHS])]


class Ends:
  """All that a sampler reads of a tokenizer. Eight of 64 tokens end a response, so that lengths differ."""

  end_ids = (2, 3, 5, 7, 11, 13, 17, 19)


@functools.cache
def params():
  return jax.device_put(tiny.make_params())


@functools.cache
def make(slots=4, rows=2, chunk=3, bucket=6, top_k=0, top_p=1.0):
  """A sampler on one device, as the loop builds it; kept, so that slots are reused between tests as well."""
  mesh = sharding.make_mesh(jax.devices()[:1])
  agent = policy.Policy(tiny.QWEN3, qwen.Options(), Ends(), '')
  config = settings.make({
    'rollout.slots': slots, 'rollout.prefill_rows': rows, 'rollout.decode_chunk': chunk, 'rollout.bucket': bucket,
    'rollout.top_k': top_k, 'rollout.top_p': top_p,
  })  # fmt: skip
  return policy.make_sampler(
    agent, params(), mesh, config.rollout, max_prompt=MAX_PROMPT, max_response=MAX_RESPONSE
  )


def drain(sampler, requests, *, temperature):
  sampler.use(params(), temperature)
  for request in requests:
    sampler.submit(request)
  responses = {}
  for _ in range(1000):
    if len(responses) == len(requests):
      return responses
    responses |= {response.id: response for response in sampler.poll()}
  raise AssertionError('requests are still open after 1000 visits')


def requests(prompts=PROMPTS, max_tokens=MAX_RESPONSE):
  return [sampling.Request(i, prompt, (7, 1, i), max_tokens) for i, prompt in enumerate(prompts)]


@functools.cache
def forward():
  """All log-probs of sequences padded to one length."""

  @jax.jit
  def run(tokens, temperature):
    return jax.nn.log_softmax(qwen.logits(params(), tiny.QWEN3, tokens) / temperature, axis=-1)

  def one(tokens, temperature=1.0):
    padded = np.zeros((1, MAX_PROMPT + MAX_RESPONSE), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(run(padded, np.float32(temperature)))[0, : len(tokens)]

  return one


def assert_same(got, expected):
  for i, response in expected.items():
    np.testing.assert_array_equal(got[i].tokens, response.tokens)
    np.testing.assert_allclose(got[i].logp, response.logp, atol=1e-5)
    assert got[i].is_cut == response.is_cut


def test_greedy_decoding_is_the_argmax_of_the_full_forward_pass():
  # Ten prompts of every length up to the limit in four slots: buckets and reused slots are part of it.
  for i, response in drain(make(), requests(), temperature=0.0).items():
    tokens = list(PROMPTS[i])
    for t, token in enumerate(response.tokens):
      logp = forward()(tokens)[-1]
      assert token == logp.argmax()
      assert response.logp[t] == pytest.approx(logp.max(), abs=1e-4)
      tokens.append(token)


def test_sampled_log_probs_equal_scored_ones():
  responses = drain(make(), requests(), temperature=0.7)
  pairs = [(PROMPTS[i], responses[i].tokens) for i in range(len(PROMPTS))]
  packed, place = layout.pack(pairs, row_length=40, slots=20)
  score = functools.partial(learner.score, config=tiny.QWEN3, options=qwen.Options(), temperature=0.7, head_chunk=0)
  logp = layout.unpack(np.asarray(jax.jit(score)(params(), packed)[0]), place, MAX_RESPONSE)
  for i, response in responses.items():
    np.testing.assert_allclose(response.logp, logp[i, : len(response.tokens)], atol=1e-4)


@pytest.mark.parametrize(
  'shape', [{'slots': 1, 'rows': 1, 'bucket': 12}, {'slots': 10, 'rows': 5, 'chunk': 6, 'bucket': 12}]
)
def test_what_is_sampled_depends_on_no_slot_batch_or_chunk(shape):
  expected = drain(make(), requests(), temperature=1.0)
  assert_same(drain(make(**shape), requests(), temperature=1.0), expected)


def test_what_is_sampled_depends_on_no_order_and_no_neighbour():
  expected = drain(make(), requests(), temperature=1.0)
  assert_same(drain(make(), requests()[::-1], temperature=1.0), expected)
  assert_same(drain(make(), requests()[4:5], temperature=1.0), {4: expected[4]})


def test_the_seed_decides_what_is_sampled():
  prompt = PROMPTS[3]
  seeds = [(0, 0, 5, 0, 0), (0, 0, 5, 0, 0), (0, 0, 5, 0, 1), (0, 0, 5, 1, 0), (0, -1, 5, 0, 0), (1, 0, 5, 0, 0)]
  asked = [sampling.Request(i, prompt, seed, MAX_RESPONSE) for i, seed in enumerate(seeds)]
  drawn = [tuple(response.tokens) for _, response in sorted(drain(make(), asked, temperature=2.0).items())]
  assert drawn[0] == drawn[1]
  assert len(set(drawn)) == 5


def test_end_tokens_are_kept_and_a_response_without_one_is_cut():
  asked = [sampling.Request(i, PROMPTS[i % 10], (3, i), 1 + i % MAX_RESPONSE) for i in range(30)]
  responses = drain(make(), asked, temperature=2.0)
  assert {response.is_cut for response in responses.values()} == {True, False}
  ends = set()
  for i, response in responses.items():
    is_end = np.isin(response.tokens, Ends.end_ids)
    assert not is_end[:-1].any()
    assert response.is_cut == (not is_end[-1])
    assert len(response.tokens) == len(response.logp) <= asked[i].max_tokens
    assert not response.is_cut or len(response.tokens) == asked[i].max_tokens
    ends |= {int(response.tokens[-1])} - {0} if is_end[-1] else set()
  assert len(ends) > 1  # B03: any of the end tokens ends.


def test_c13_ragged_prompts_decode_as_if_alone():
  (short, _), (long, _) = tiny.make_sequences([(3, 0), (11, 0)], seed=3)
  following = tiny.make_sequences([(10, 0)], seed=4)[0][0].reshape(5, 2)

  @jax.jit
  def run(tokens, length, follow):
    """Logits [1 + 5, B, V] after the prompt and after each token that follows."""
    cache = qwen.prefill(params(), tiny.QWEN3, qwen.Options(), tokens, length)
    cache = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 6), (0, 0), (0, 0))), cache)
    last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]

    def one(carry, read):
      cache, position = carry
      hidden, cache = qwen.decode(params(), tiny.QWEN3, qwen.Options(), read, position, cache)
      return (cache, position + 1), qwen.head(params(), tiny.QWEN3, hidden)

    return jax.lax.scan(one, (cache, length - 1), jnp.concatenate([last[None], follow]))[1]

  padded = np.full((2, 11), 9, np.int32)
  padded[0, :3], padded[1] = short, long
  length = np.array([3, 11], np.int32)
  together = run(padded, length, following)
  for row, prompt in enumerate((short, long)):
    alone = run(padded[row : row + 1], length[row : row + 1], following[:, row : row + 1])
    np.testing.assert_allclose(together[:, row], alone[:, 0], atol=1e-5)
    whole = forward()([*prompt, *following[:, row]])[len(prompt) - 1 :]
    np.testing.assert_allclose(jax.nn.log_softmax(together[:, row]), whole, atol=1e-5)


@functools.cache
def chooser(top_k, top_p):
  return jax.jit(functools.partial(sampling.choose, top_k=top_k, top_p=top_p))


PROBABILITIES = np.array([0.4, 0.25, 0.2, 0.1, 0.04, 0.01])


@pytest.mark.parametrize(
  ('temperature', 'top_k', 'top_p', 'kept'),
  [(1.0, 0, 1.0, 6), (0.5, 0, 1.0, 6), (2.0, 0, 1.0, 6), (1.0, 3, 1.0, 3), (1.0, 0, 0.6, 2), (1.0, 0, 0.66, 3),
   (1.0, 2, 0.99, 2), (1.0, 0, 1e-9, 1)],
)  # fmt: skip
def test_choice_follows_the_truncated_distribution(temperature, top_k, top_p, kept):
  n = 8000
  order = np.array([3, 0, 5, 1, 4, 2])  # The likeliest token is not the first.
  logits = np.broadcast_to(np.log(PROBABILITIES[order]).astype(np.float32), (n, 6)) + 3
  key = np.random.default_rng(0).integers(0, 2**32, (n, 2), dtype=np.uint32)
  token, logp = chooser(top_k, top_p)(logits, key, np.zeros(n, np.int32), np.float32(temperature))
  p = PROBABILITIES ** (1 / temperature) / np.sum(PROBABILITIES ** (1 / temperature))
  expected = np.where(np.arange(6) < kept, p, 0)
  share = np.bincount(order[token], minlength=6) / n
  np.testing.assert_allclose(share, expected / expected.sum(), atol=0.02)
  assert not share[kept:].any()
  # C14: over the whole vocabulary, as the trainer scores it.
  np.testing.assert_allclose(logp, np.log(p[order[token]]), atol=1e-5)


def test_tokens_of_one_response_are_drawn_independently():
  n = 8000
  logits = np.zeros((n, 6), np.float32)
  key = np.zeros((n, 2), np.uint32)  # One response: only the count differs.
  token, _ = chooser(0, 1.0)(logits, key, np.arange(n, dtype=np.int32), np.float32(1))
  pairs = np.bincount(6 * np.asarray(token)[:-1] + np.asarray(token)[1:], minlength=36) / (n - 1)
  np.testing.assert_allclose(pairs, 1 / 36, atol=0.01)


def test_greedy_takes_the_first_of_equal_logits_and_ignores_the_key():
  logits = np.array([[1.0, 3.0, 3.0, 2.0]] * 5, np.float32)
  key = np.random.default_rng(0).integers(0, 2**32, (5, 2), dtype=np.uint32)
  token, logp = jax.jit(functools.partial(sampling.choose, top_p=0.5))(logits, key, np.arange(5), np.float32(0))
  assert token.tolist() == [1] * 5
  np.testing.assert_allclose(logp, 3 - np.log(np.exp([1, 3, 3, 2]).sum()), atol=1e-6)


def test_short_batches_wait_for_company_while_others_run():
  sampler = make().use(params(), 0.0)
  assert list(sampler.poll()) == []
  sampler.submit(sampling.Request('a', PROMPTS[6], (0,), MAX_RESPONSE))
  sampler.poll()  # Nothing runs, so a lone request starts at once.
  sampler.submit(sampling.Request('b', PROMPTS[1], (1,), 1))
  seen = [response.id for _ in range(2 * MAX_RESPONSE) for response in sampler.poll()]
  assert sorted(seen) == ['a', 'b']


@pytest.mark.parametrize(
  ('prompt', 'max_tokens', 'message'),
  [
    (PROMPTS[0][:0], 1, 'A prompt of 0 tokens'),
    (np.zeros(MAX_PROMPT + 1, np.int32), 1, 'rollout.max_prompt_tokens is 12'),
    (PROMPTS[0], 0, '0 tokens asked for'),
    (PROMPTS[0], MAX_RESPONSE + 1, 'a slot holds 1 to 6'),
  ],
)
def test_requests_that_no_slot_holds_are_refused(prompt, max_tokens, message):
  with pytest.raises(ValueError, match=message):
    make().submit(sampling.Request(0, prompt, (0,), max_tokens))


def test_parameters_do_not_change_under_a_running_request():
  sampler = make().use(params(), 1.0)
  sampler.submit(requests()[0])
  with pytest.raises(ValueError, match='in flight'):
    sampler.use(params(), 1.0)
  drain_rest = [response.id for _ in range(20) for response in sampler.poll()]
  assert drain_rest == [0]
  sampler.use(params(), 1.0)
