"""Passes over a batch: host rows to device calls and back, around the compiled programs of a training step."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from opid_jax import layout, learner, losses, rollout, sharding
from opid_jax.batch import Batch
from opid_jax.types import Packed, TrainState


class Programs(NamedTuple):
  """The compiled side of a training step; see `learner` for what each does."""

  score: Callable
  zero: Callable
  accumulate: Callable
  apply: Callable


def pack(sequences, config) -> tuple[Packed, layout.Place]:
  """Rows for device calls of the configured size."""
  c = config.learner
  return layout.pack(
    sequences, row_length=c.row_length, slots=c.slots_per_row, rows_multiple=c.rows_per_call
  )


def score(programs: Programs, params, sequences, width, config, mesh) -> tuple[np.ndarray, np.ndarray]:
  """Log-probabilities and entropies [M, T] float32 of the responses; every call is dispatched before one is read."""
  packed, place = pack(sequences, config)
  calls = [
    programs.score(params, sharding.put_rows(call, mesh))
    for call in layout.calls(packed, config.learner.rows_per_call)
  ]
  logp, entropy = (np.concatenate([np.asarray(call[i]) for call in calls]) for i in range(2))
  return layout.unpack(logp, place, width), layout.unpack(entropy, place, width)


def score_contexts(programs, params, batch: Batch, contexts, policy, limits, config, mesh) -> list[np.ndarray]:
  """[N, T] log-probabilities per skill context; zero for steps without a skill there, which weigh nothing."""
  where, sequences = [], []
  for c, context in enumerate(contexts):
    for n, hint in enumerate(context):
      if hint is None:
        continue
      skill = rollout.clip_skill(hint.text, hint.kind, policy.tokenizer, limits)
      prompt = rollout.tokenize(batch.prompts[n], policy.tokenizer, limits, **{f'{hint.kind}_skill': skill})
      where.append((c, n))
      sequences.append((prompt, batch.sequences[n][1]))
  out = [np.zeros(batch.mask.shape, np.float32) for _ in contexts]
  if sequences:
    logp, _ = score(programs, params, sequences, batch.width, config, mesh)
    for (c, n), row in zip(where, logp, strict=True):
      out[c][n] = row
  return out


def improve(programs: Programs, state: TrainState, batch: Batch, logp_old, logp_ref, advantage, config, mesh):
  """One pass over the batch in minibatches, one optimizer update each.

  Returns:
    (state with the same `step`, metrics). The metrics are read once, after the last update was dispatched.
  """
  c, mask = config.learner, batch.mask
  if config.loss.skip_zero_advantage:
    # Nothing to learn there but the KL term; the tokens leave the denominator, too.
    mask = mask * (np.abs(advantage).max(axis=1, keepdims=True) > 0)
  history = []
  for _ in range(c.epochs):
    for begin in range(0, len(batch.sequences), c.minibatch_steps):
      part = slice(begin, begin + c.minibatch_steps)
      packed, place = pack(batch.sequences[part], config)
      weight = losses.token_weights(
        mask[part], aggregation=config.loss.aggregation, norm_length=config.rollout.max_response_tokens
      )
      targets = learner.Targets(
        *(layout.spread(x[part], place, packed) for x in (logp_old, logp_ref, advantage)),
        layout.spread(weight, place, packed),
      )
      gradient, sums = programs.zero(state.params)
      for rows, wanted in zip(
        layout.calls(packed, c.rows_per_call), layout.calls(targets, c.rows_per_call), strict=True
      ):
        gradient, sums = programs.accumulate(
          state.params, gradient, sums, sharding.put_rows(rows, mesh), sharding.put_rows(wanted, mesh)
        )
      state, norm = programs.apply(state, gradient, sums)
      history.append((sums, norm))
  history = jax.device_get(history)
  total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), [sums for sums, _ in history])
  n, tokens = len(history), max(float(total.tokens), 1.0)
  return state, {
    'update/loss': float(total.policy + total.kl + total.entropy) / n,
    'update/policy_loss': float(total.policy) / n,
    'update/kl_loss': float(total.kl) / n,
    'update/kl': float(total.kl_total / tokens),
    'update/log_ratio': float(total.log_ratio_total / tokens),
    'update/clip_fraction': float(total.clipped_tokens / tokens),
    'update/dual_clip_fraction': float(total.dual_clipped_tokens / tokens),
    'update/first_ratio_gap': float(history[0][0].ratio_gap),
    # The largest: a single bad update must not hide behind good ones. NaN stays NaN.
    'update/grad_norm': float(np.max([norm for _, norm in history])),
    'update/count': n,
    'update/tokens': float(total.tokens) / c.epochs,
  }
