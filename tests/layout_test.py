import functools
import re

import jax
import numpy as np
import pytest
import tiny

from opid_jax import layout, learner
from opid_jax.models import qwen

LENGTHS = [(7, 4), (3, 9), (12, 1), (1, 1), (5, 0), (9, 6), (2, 2)]
RESPONSES = [t for _, t in LENGTHS]


def walk(packed, place, m):
  """Reads sequence m back from its row: where its first scored column leads, by positions and visibility alone."""
  row, slot, length = place.row[m], place.slot[m], place.length[m]
  last = packed.score_at[row, slot + length - 1]
  first = last - packed.positions[row, last]
  assert (packed.visible_to[row, first : last + 1] == last + 1).all()
  assert (packed.positions[row, first : last + 1] == np.arange(last + 1 - first)).all()
  tokens = packed.tokens[row, first : last + 1]
  return np.append(tokens, packed.target[row, slot + length - 1])


@pytest.mark.parametrize(('row_length', 'slots'), [(16, 9), (24, 24), (64, 32)])
def test_every_sequence_stands_in_its_row_once(row_length, slots):
  sequences = tiny.make_sequences(LENGTHS)
  packed, place = layout.pack(sequences, row_length=row_length, slots=slots)
  for m, (prompt, response) in enumerate(sequences):
    if len(response):
      np.testing.assert_array_equal(walk(packed, place, m), np.concatenate([prompt, response]))
  # Nothing overlaps and nothing else is there.
  assert (packed.visible_to > 0).sum() == sum(p + t - 1 for p, t in LENGTHS if t)
  assert packed.is_scored.sum() == sum(RESPONSES)
  assert place.length.tolist() == RESPONSES


def test_trained_targets_are_the_response_tokens_and_no_others():
  # C12: [p p | a a E]: the first `a` is predicted from the last prompt token, and E is a target only.
  packed, _ = layout.pack([(np.array([8, 9]), np.array([5, 5, 2]))], row_length=6, slots=4)
  assert packed.tokens.tolist() == [[8, 9, 5, 5, 0, 0]]
  assert packed.score_at[packed.is_scored > 0].tolist() == [1, 2, 3]
  assert packed.target[packed.is_scored > 0].tolist() == [5, 5, 2]
  assert packed.visible_to.tolist() == [[4, 4, 4, 4, 0, 0]]


@functools.cache
def scorer():
  """Jitted scoring, and log-probs of one padded sequence per row as the obvious way to do the same."""
  params = tiny.make_params(tiny.QWEN3)
  score = jax.jit(
    functools.partial(learner.score, config=tiny.QWEN3, options=qwen.Options(), temperature=0.8, head_chunk=5)
  )
  logp = jax.jit(lambda tokens: jax.nn.log_softmax(qwen.logits(params, tiny.QWEN3, tokens) / 0.8, axis=-1))
  return functools.partial(score, params), logp


@pytest.mark.parametrize(('row_length', 'slots'), [(16, 9), (40, 20)])
def test_packed_rows_score_like_one_padded_sequence_per_row(row_length, slots):
  sequences = tiny.make_sequences(LENGTHS)
  # B04: the padding id as a real token, everywhere, is a token like any other.
  sequences += [(np.zeros(4, np.int32), np.zeros(3, np.int32))]
  score, logp_of = scorer()
  packed, place = layout.pack(sequences, row_length=row_length, slots=slots)
  logp, entropy = (layout.unpack(np.asarray(x), place, 9) for x in score(packed))
  padded = np.zeros((len(sequences), 16), np.int32)
  for m, pair in enumerate(sequences):
    padded[m, : sum(map(len, pair))] = np.concatenate(pair)
  full = np.asarray(logp_of(padded))
  for m, (prompt, response) in enumerate(sequences):
    at = len(prompt) - 1 + np.arange(len(response))
    expected = full[m, at, response]
    np.testing.assert_allclose(logp[m, : len(response)], expected, atol=1e-5)
    spread = -(np.exp(full[m, at]) * full[m, at]).sum(-1)
    np.testing.assert_allclose(entropy[m, : len(response)], spread, atol=1e-5)
    assert not logp[m, len(response) :].any()


def test_spread_and_unpack_are_inverse():
  packed, place = layout.pack(tiny.make_sequences(LENGTHS), row_length=20, slots=12)
  rng = np.random.default_rng(0)
  values = rng.normal(size=(len(LENGTHS), 9)).astype(np.float32)
  values *= np.arange(9)[None] < np.array(RESPONSES)[:, None]
  rows = layout.spread(values, place, packed)
  assert rows.shape == packed.target.shape
  np.testing.assert_array_equal(layout.unpack(rows, place, 9), values)
  assert not rows[packed.is_scored == 0].any()
  back = layout.spread(layout.unpack(packed.target, place, 9), place, packed)
  np.testing.assert_array_equal(back, packed.target * packed.is_scored)


def test_packing_is_deterministic_and_follows_the_sequences_not_their_order():
  sequences = tiny.make_sequences(LENGTHS)
  first, again = (layout.pack(sequences, row_length=20, slots=12) for _ in range(2))
  jax.tree.map(np.testing.assert_array_equal, first, again)
  order = [4, 2, 6, 0, 1, 3, 5]
  _, place = layout.pack([sequences[m] for m in order], row_length=20, slots=12)
  assert len(set(place.row)) == len(set(first[1].row))


def test_rows_are_filled_and_padded_to_a_multiple():
  sequences = tiny.make_sequences([(8, 3)] * 5)  # 10 columns each: two to a row.
  packed, place = layout.pack(sequences, row_length=21, slots=6, rows_multiple=4)
  assert packed.tokens.shape == (4, 21)
  assert sorted(place.row.tolist()) == [0, 0, 1, 1, 2]
  # Few slots are a reason for a new row as well.
  assert layout.pack(sequences, row_length=21, slots=5)[0].tokens.shape[0] == 5


@pytest.mark.parametrize('sequences', [[], tiny.make_sequences([(5, 0), (3, 0)])])
def test_nothing_to_score_gives_rows_that_nobody_sees(sequences):
  packed, place = layout.pack(sequences, row_length=8, slots=4, rows_multiple=2)
  assert packed.tokens.shape == (2, 8)
  assert not packed.visible_to.any() and not packed.is_scored.any()
  assert layout.unpack(packed.is_scored, place, 3).shape == (len(sequences), 3)


def test_longest_sequence_that_fits_is_taken_and_one_more_is_refused():
  pair = tiny.make_sequences([(10, 7)])
  assert layout.pack(pair, row_length=16, slots=7)[0].tokens.shape == (1, 16)
  with pytest.raises(ValueError, match=re.escape('learner.row_length is 15, learner.slots_per_row is 7')):
    layout.pack(pair, row_length=15, slots=7)
  with pytest.raises(ValueError, match='16 tokens with 7 scored'):
    layout.pack(pair, row_length=16, slots=6)


def test_a_response_without_a_prompt_is_refused():
  with pytest.raises(ValueError, match='Sequence 1 has no prompt'):
    layout.pack(tiny.make_sequences([(2, 2), (0, 3)]), row_length=8, slots=4)


def test_calls_cut_rows_in_order():
  packed, _ = layout.pack(tiny.make_sequences([(8, 3)] * 5), row_length=10, slots=3, rows_multiple=3)
  parts = list(layout.calls(packed, 3))
  assert [part.tokens.shape for part in parts] == [(3, 10), (3, 10)]
  np.testing.assert_array_equal(np.concatenate([part.target for part in parts]), packed.target)


def test_stacked_responses_are_zero_past_their_length():
  stacked = layout.stack_responses([np.ones(2), np.ones(0), np.ones(3)], 3, np.float32)
  assert stacked.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
