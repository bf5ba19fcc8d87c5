"""Hindsight without a language model: what did the better attempts of the group do at the same observation?

Value of an attempt: its total reward, scaled to [0, 1] within the group, plus a tenth of its score, scaled
again. So the score decides between attempts of equal reward, and a group of failures still has better and
worse ones. Attempts of equal value teach nothing: reason 'no_contrast', which is not a failure.

Value of an action at an observation: the mean over the attempts that took it there of
0.95^(steps that followed) x value; an attempt counts once, with its last visit.

A step is critical if at least two attempts saw its observation and the values of what was done there differ
by more than 0.1. What this attempt has already done at the same observation is not advised again (a page may
look the same after an option was chosen). Its skill is `Do: <best action>` if a distinctly worse action was taken,
else `Do: <action taken>`. An attempt that went well is not talked out of what it did: there, worse means that its
own value is lower, too. Where even the best action leads to less than the group's mean, the mistake was made
before and there is nothing to recommend: `Avoid: <action>` if it was distinctly worse, else no skill. The most
divergent `max_step_skills` are kept.

The episode skill of a success is `Workflow: <action>, then <action>, ...`, that of the group's best attempt.
That of a failure is `Avoid: <action>`, its first fatal mistake. Until the last observation from which another
attempt did distinctly better nothing was lost; the mistake is the last action there that none of those better
attempts took. If all its actions there were theirs too (something was left out, not done wrongly), the skill is
the workflow of the best attempt, if that succeeded.

Deterministic; reads only what the trajectories contain. Compare the anchor states of GiGPO
(https://arxiv.org/abs/2505.10978).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from opid_jax.analyzers.base import Answer, Pending, Settings, read_settings
from opid_jax.types import Skills, Step, Trajectory

DISCOUNT = 0.95
MIN_GAP = 0.1
SCORE_SHARE = 0.1
MAX_WORKFLOW_CHARS = 400
_ROUNDING = 1e-9


class Choice(NamedTuple):
  """An action that attempts took at an anchor observation.

  Attributes:
    action: the action; '' for all responses that held none.
    value: mean discounted value of the attempts that took it.
    outcome: mean value of those attempts.
    best_outcome: value of the best of them.
    attempts: how many.
  """

  action: str
  value: float
  outcome: float
  best_outcome: float
  attempts: int


class Verdict(NamedTuple):
  """A critical step: what was done, what would have been best, how far the choices lie apart.

  `is_mistake`: what was done is distinctly worse, by the group's experience and by this attempt's own.
  """

  step: int
  taken: Choice
  best: Choice
  gap: float
  is_mistake: bool


# The choices at every observation that several attempts saw, by observation and action.
Anchors = Mapping[str, Mapping[str, Choice]]


def make(settings: Mapping[str, Any], *, generate: Any = None) -> 'ContrastAnalyzer':
  """An analyzer that compares the attempts of each group. `generate` is not used.

  Raises:
    ValueError: if a setting is wrong.
  """
  del generate
  return ContrastAnalyzer(read_settings(settings))


class ContrastAnalyzer:
  """See `opid_jax.analyzers.base.Analyzer`."""

  def __init__(self, settings: Settings):
    self._settings = settings

  def submit(self, trajectories: Sequence[Trajectory]) -> Pending:
    """Compares at once; it takes milliseconds."""
    skills = contrast(trajectories, max_step_skills=self._settings.max_step_skills)
    return Pending(lambda: [Answer(one) for one in skills], self._settings.max_failure_share)


def contrast(trajectories: Sequence[Trajectory], *, max_step_skills: int) -> list[Skills]:
  """Skills of every trajectory, in order. Groups may be of any size and interleaved."""
  groups: dict[str, list[int]] = {}
  for number, trajectory in enumerate(trajectories):
    groups.setdefault(trajectory.group, []).append(number)
  skills = [Skills(reason='no_contrast')] * len(trajectories)
  for members in groups.values():
    group = [trajectories[number] for number in members]
    for number, found in zip(members, _compare(group, max_step_skills), strict=True):
      skills[number] = found
  return skills


def attempt_values(group: Sequence[Trajectory]) -> list[float] | None:
  """Values in [0, 1] of the attempts at one task, or None if they are all the same."""
  rewards = _scaled([attempt.total_reward for attempt in group]) or [0.0] * len(group)
  scores = [attempt.score for attempt in group]
  return _scaled([reward + SCORE_SHARE * score for reward, score in zip(rewards, scores, strict=True)])


def _scaled(values: Sequence[float]) -> list[float] | None:
  low, high = min(values), max(values)
  return [(value - low) / (high - low) for value in values] if high - low > _ROUNDING else None


def _compare(group: Sequence[Trajectory], max_step_skills: int) -> list[Skills]:
  values = attempt_values(group)
  if values is None:
    return [Skills(reason='no_contrast')] * len(group)
  mean = math.fsum(values) / len(values)
  anchors = _anchors(group, values)
  # The best attempt: solved, of high value, short, early.
  first = max(range(len(group)), key=lambda n: (group[n].success, values[n], -len(group[n].steps), -n))
  workflow = _workflow(group[first]) if group[first].success else ''
  solved = sum(attempt.success for attempt in group)
  result = []
  for attempt, value in zip(group, values, strict=True):
    verdicts = _verdicts(attempt, value, anchors)
    telling = sorted(verdicts, key=lambda verdict: (-verdict.gap, verdict.step))[:max_step_skills]
    steps = {verdict.step: text for verdict in sorted(telling) if (text := _step_skill(verdict, mean))}
    episode = workflow if attempt.success else _fatal_mistake(attempt, value, anchors) or workflow
    if not episode and not steps:
      result.append(Skills(reason='no_contrast'))
      continue
    ending = 'did' if attempt.success else 'did not'
    summary = f'{solved} of {len(group)} attempts solved the task; this one {ending}.'
    result.append(Skills(episode=episode, steps=steps, summary=summary))
  return result


def _anchors(group: Sequence[Trajectory], values: Sequence[float]) -> Anchors:
  """The choices at every observation that at least two attempts saw."""
  visits: dict[str, dict[tuple[str, int], float]] = {}
  for number, (attempt, value) in enumerate(zip(group, values, strict=True)):
    for at, step in enumerate(attempt.steps):
      discounted = value * DISCOUNT ** (len(attempt.steps) - 1 - at)
      visits.setdefault(step.observation, {})[_action(step), number] = discounted
  anchors = {}
  for observation, taken in visits.items():
    if len({number for _, number in taken}) < 2:
      continue
    choices = {}
    for action in dict.fromkeys(action for action, _ in taken):
      numbers = [number for other, number in taken if other == action]
      outcomes = [values[number] for number in numbers]
      # Exact sums, so that the order of attempts decides nothing.
      mean = math.fsum(taken[action, number] for number in numbers) / len(numbers)
      choices[action] = Choice(action, mean, math.fsum(outcomes) / len(numbers), max(outcomes), len(numbers))
    anchors[observation] = choices
  return anchors


def _verdicts(attempt: Trajectory, value: float, anchors: Anchors) -> list[Verdict]:
  """The critical steps of an attempt of that value, in order."""
  verdicts = []
  done: dict[str, set[str]] = {}
  for at, step in enumerate(attempt.steps):
    choices = anchors.get(step.observation)
    if choices is None:
      continue
    taken = choices[_action(step)]
    before = done.setdefault(step.observation, set())
    known = [choice for choice in choices.values() if choice is taken or choice.action not in before]
    before.add(taken.action)
    advisable = [choice for choice in known if choice.action]
    if not advisable:
      continue
    # Of equal values the one that more attempts chose, then the first in the alphabet.
    best = max(sorted(advisable), key=lambda choice: (choice.value, choice.attempts))
    gap = best.value - min(choice.value for choice in known)
    if gap > MIN_GAP:
      own = value * DISCOUNT ** (len(attempt.steps) - 1 - at)
      verdicts.append(Verdict(at, taken, best, gap, best.value - max(own, taken.value) > MIN_GAP))
  return verdicts


def _step_skill(verdict: Verdict, mean: float) -> str:
  """The skill or ''; `mean`: mean value of the group's attempts."""
  if verdict.best.outcome < mean - _ROUNDING:
    return f'Avoid: {verdict.taken.action}' if verdict.is_mistake and verdict.taken.action else ''
  is_fine = verdict.taken.action and not verdict.is_mistake
  return f'Do: {verdict.taken.action if is_fine else verdict.best.action}'


def _fatal_mistake(attempt: Trajectory, value: float, anchors: Anchors) -> str:
  """`Avoid: <action>` or ''; `value`: that of the attempt."""
  def best_outcome(step: Step) -> float:
    return max((choice.best_outcome for choice in anchors.get(step.observation, {}).values()), default=0.0)

  hopeful = [step.observation for step in attempt.steps if best_outcome(step) > value + MIN_GAP]
  for step in reversed(attempt.steps):
    action = _action(step)
    if hopeful and action and step.observation == hopeful[-1]:
      if anchors[step.observation][action].best_outcome <= value + MIN_GAP:
        return f'Avoid: {action}'
  return ''


def _workflow(attempt: Trajectory) -> str:
  """`Workflow: <action>, then <action>, ...`: the executable actions, as many as fit; '' if there is none."""
  text = ''
  for action in filter(None, map(_action, attempt.steps)):
    longer = f'{text}, then {action}' if text else f'Workflow: {action}'
    if len(longer) > MAX_WORKFLOW_CHARS:
      break
    text = longer
  return text


def _action(step: Step) -> str:
  """The action on one line, '' if it could not be executed."""
  return ' '.join(step.action.split()) if step.valid else ''
