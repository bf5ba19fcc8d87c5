"""Algorithms are a table: each is a few small pure functions and two words. A variant is another entry.

On the host, in NumPy, between the scoring pass and the updates. No model, no I/O, no config object.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from opid_jax import advantages


class Evidence(NamedTuple):
  """What is known about the N steps of a training step when credit is assigned.

  Attributes:
    logp: [C, N, T] float32, under the old policy, nats; context 0 is the history the policy acted on.
      Contexts that a step was not scored in may hold anything.
    mask: [N, T] 1 on response tokens.
    score: [N] total reward of the step's trajectory, environment units.
    valid: [N] bool, the action could be executed.
    group: [N] int, equal for the attempts at one task.
    trajectory: [N] int, equal for the steps of one attempt.
    weight: [C - 1, N] weight of the skill in each further context, 0 where the step was given none.
  """

  logp: Any
  mask: Any
  score: Any
  valid: Any
  group: Any
  trajectory: Any
  weight: Any


class AdvantageSettings(NamedTuple):
  """Hyperparameters of credit assignment.

  Attributes:
    norm: 'mean' or 'mean_std', see `advantages.group_relative`.
    stats: 'trajectory' or 'row', same place.
    invalid_penalty: taken from the steps whose action could not be executed; in units of the score with
      `penalty='before'`, in units of the advantage with 'after'.
    penalty: 'after' or 'before' the group normalisation.
    center: subtract the batch mean of the skill shift, see `advantages.skill_advantage`.
    rms: divide it by its root mean square.
    shift_clip: bound on it after both, 0 for none.
  """

  norm: str = 'mean'
  stats: str = 'trajectory'
  invalid_penalty: float = 0.0
  penalty: str = 'after'
  center: bool = False
  rms: bool = False
  shift_clip: float = 0.0


def outcome_advantage(evidence: Evidence, settings: AdvantageSettings) -> np.ndarray:
  """[N] float32 group-relative advantage of each step with the penalty for invalid actions.

  Raises:
    ValueError: for an unknown word in the settings.
  """
  if settings.penalty not in ('after', 'before'):
    raise ValueError(f"Unknown penalty {settings.penalty!r}. Available: 'after', 'before'.")
  score = evidence.score
  if settings.penalty == 'before':
    score = advantages.penalise(score, evidence.valid, settings.invalid_penalty)
  outcome = advantages.group_relative(
    score, evidence.group, evidence.trajectory, norm=settings.norm, stats=settings.stats
  )
  if settings.penalty == 'after':
    outcome = advantages.penalise(outcome, evidence.valid, settings.invalid_penalty)
  return outcome


def _mean(values: np.ndarray) -> float:
  return float(values.mean()) if values.size else 0.0


def _outcome_metrics(evidence: Evidence, outcome: np.ndarray) -> dict[str, float]:
  tokens = np.asarray(evidence.mask) > 0
  # Ties are read off the rewards: a penalty before normalisation would hide them.
  tied = advantages.tied(evidence.score, evidence.group, evidence.trajectory)
  return {
    'advantage/outcome_abs_mean': _mean(np.abs(np.broadcast_to(outcome[:, None], tokens.shape)[tokens])),
    'advantage/tied_groups': _mean(tied),
    'advantage/valid_actions': _mean(np.asarray(evidence.valid, np.float64)),
    'advantage/empty_responses': _mean(~tokens.any(axis=1)),
  }


def grpo(evidence: Evidence, settings: AdvantageSettings) -> tuple[np.ndarray, dict[str, float]]:
  """GRPO: the outcome of the attempt on every token. See https://arxiv.org/abs/2402.03300.

  Returns:
    (advantage [N, T] float32, metrics).
  """
  outcome = outcome_advantage(evidence, settings)
  none = np.zeros(np.shape(evidence.mask), np.float32)
  return advantages.opid_total(outcome, none, evidence.mask), _outcome_metrics(evidence, outcome)


def opid(evidence: Evidence, settings: AdvantageSettings) -> tuple[np.ndarray, dict[str, float]]:
  """OPID: the outcome plus what hindsight would have said, token by token.

  See https://arxiv.org/abs/2606.26790. With no weight anywhere the result is that of `grpo`, bit for bit.
  Where a group is tied, the skill term is the whole signal.

  Returns:
    (advantage [N, T] float32, metrics): of the outcome as in `grpo`; `advantage/skill_abs_mean` and
    `advantage/skill_share` (|A_skill| over |A_outcome| + |A_skill|, means over response tokens); `shift/*` of
    the raw shift in nats over the tokens that a skill was scored for, and their share of response tokens.
  """
  outcome = outcome_advantage(evidence, settings)
  shift = advantages.skill_shift(evidence.logp, evidence.mask)
  skill = advantages.skill_advantage(
    shift, evidence.weight, evidence.mask, center=settings.center, rms=settings.rms, clip=settings.shift_clip
  )
  metrics = _outcome_metrics(evidence, outcome)
  tokens = np.asarray(evidence.mask) > 0
  skill_size, outcome_size = _mean(np.abs(skill[tokens])), metrics['advantage/outcome_abs_mean']
  active = tokens & (np.asarray(evidence.weight) != 0)[:, :, None]
  values = shift[active].astype(np.float64)
  sizes = np.abs(values)
  metrics |= {
    'advantage/skill_abs_mean': skill_size,
    'advantage/skill_share': skill_size / (skill_size + outcome_size) if skill_size else 0.0,
    'shift/mean': _mean(values),
    'shift/abs_mean': _mean(sizes),
    'shift/rms': float(np.sqrt(_mean(np.square(values)))),
    'shift/p99': float(np.quantile(sizes, 0.99)) if sizes.size else 0.0,
    'shift/token_share': float(active.any(axis=0).sum() / max(tokens.sum(), 1)),
  }
  return advantages.opid_total(outcome, skill, evidence.mask), metrics


class Algorithm(NamedTuple):
  """One row of the table.

  Attributes:
    advantage: (Evidence, AdvantageSettings) -> (advantage [N, T], metrics).
    teacher: where further contexts come from: 'none', or 'hindsight' (an analyzer reads finished attempts).
    actor: whether a skill stands in the prompt that the policy acts on.
    auxiliary: a further loss per token in the update, or None.
  """

  advantage: Callable[[Evidence, AdvantageSettings], tuple[np.ndarray, dict[str, float]]]
  teacher: str = 'none'
  actor: bool = False
  auxiliary: Callable | None = None


ALGORITHMS = {
  'grpo': Algorithm(grpo),
  'opid': Algorithm(opid, teacher='hindsight'),
}
