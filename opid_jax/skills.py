"""Critical-first routing: which skill each step is re-scored with, and with which weight. No JAX."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from opid_jax.types import Skills, Trajectory

ROUTINGS = ('critical_first', 'additive', 'episode', 'step')


class Hint(NamedTuple):
  """One skill for one step.

  Attributes:
    kind: 'episode' (inserted after the task) or 'step' (inserted before the turn anchor).
    text: the skill, not blank.
    weight: lambda of its shift in the advantage, above 0.
  """

  kind: str
  text: str
  weight: float


def _check(routing: str) -> None:
  if routing not in ROUTINGS:
    raise ValueError(f'Unknown routing {routing!r}. Available: {", ".join(ROUTINGS)}.')


def num_contexts(routing: str) -> int:
  """Skill contexts that a step can have: 2 with 'additive' (episode, step), else 1.

  Raises:
    ValueError: for an unknown routing.
  """
  _check(routing)
  return 2 if routing == 'additive' else 1


def is_on(step: int, *, start_step: int, stop_step: int) -> bool:
  """Whether the schedule lets skills count in this training step.

  Args:
    step: 0-based training step.
    start_step: first step with skills.
    stop_step: first step without them again; 0 for never.
  """
  return step >= start_step and (stop_step <= 0 or step < stop_step)


def route(
  trajectory: Trajectory, skills: Skills, *, routing: str, episode_weight: float, step_weight: float
) -> list[tuple[Hint, ...]]:
  """The hints of each step: a critical step gets its own skill, any other step the episode's.

  'critical_first' is the paper's rule (https://arxiv.org/abs/2606.26790): at most one hint per step.
  'additive' gives a critical step both, each scored in its own context. 'episode' and 'step' know one kind
  only. A weight of 0 switches a kind off: without step skills every step falls back to the episode's.

  Unlike the reference, a trajectory whose episode skill is blank keeps its step skills.

  Args:
    trajectory: the attempt that was analyzed.
    skills: its hindsight; without usable skills every step gets no hint and trains on the outcome alone.
    routing: one of `ROUTINGS`.
    episode_weight: lambda of episode skills, at least 0.
    step_weight: lambda of step skills, at least 0.

  Returns:
    For each step of the trajectory its hints, at most `num_contexts(routing)`.

  Raises:
    ValueError: for an unknown routing, a negative weight, or a skill of a step that does not exist.
  """
  _check(routing)
  if min(episode_weight, step_weight) < 0:
    raise ValueError(f'Skill weights must be at least 0, found {episode_weight} and {step_weight}.')
  num_steps = len(trajectory.steps)
  strays = sorted(i for i in skills.steps if not 0 <= i < num_steps)
  if strays:
    raise ValueError(
      f'Skills for steps {strays} of a trajectory with {num_steps} steps; the analyzer must drop them.'
    )
  if not skills.usable:
    return [()] * num_steps

  episode = skills.episode.strip() if episode_weight > 0 and routing != 'step' else ''
  hints = []
  for index in range(num_steps):
    step = skills.steps.get(index, '').strip() if step_weight > 0 and routing != 'episode' else ''
    use_episode = episode and (routing == 'additive' or not step)
    hints.append(
      ((Hint('episode', episode, episode_weight),) if use_episode else ())
      + ((Hint('step', step, step_weight),) if step else ())
    )
  return hints


def contexts(hints: Sequence[tuple[Hint, ...]], *, routing: str) -> list[tuple[Hint | None, ...]]:
  """Lays the hints of N steps out as skill contexts 1 .. C-1.

  Args:
    hints: for each step its hints, from `route`.
    routing: the one they were routed with.

  Returns:
    C - 1 tuples of N entries, None where the step is not scored in that context. With 'additive' the first
    context holds the episode skills and the second the step skills.
  """
  if num_contexts(routing) == 1:
    return [tuple(h[0] if h else None for h in hints)]
  return [tuple(next((x for x in h if x.kind == kind), None) for h in hints) for kind in ('episode', 'step')]


def weights(placed: Sequence[tuple[Hint | None, ...]]) -> np.ndarray:
  """[C - 1, N] float32 weight of each context and step, 0 where there is no hint."""
  return np.array([[h.weight if h else 0.0 for h in context] for context in placed], np.float32)


def counts(hints: Sequence[tuple[Hint, ...]]) -> dict[str, int]:
  """How many steps are scored with an episode skill, with a step skill, and with none."""
  kinds = [{h.kind for h in step} for step in hints]
  return {
    'episode': sum('episode' in k for k in kinds),
    'step': sum('step' in k for k in kinds),
    'none': sum(not k for k in kinds),
  }
