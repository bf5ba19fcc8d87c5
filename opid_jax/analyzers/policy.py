"""The policy looks back at its own attempts and writes the skills itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opid_jax.analyzers import prompt, reply
from opid_jax.analyzers.base import Answer, Pending, Settings, Usage, read_settings
from opid_jax.types import Trajectory

Generate = Callable[[list[str]], list[str]]


def make(settings: Mapping[str, Any], *, generate: Generate | None = None) -> 'PolicyAnalyzer':
  """An analyzer that asks `generate`.

  Args:
    settings: fields of `config.analyzer`.
    generate: texts of the prompts to texts of the replies, in the same order.

  Raises:
    ValueError: if `generate` is missing or a setting is wrong.
  """
  if generate is None:
    raise ValueError('The analyzer "policy" needs `generate`, a function from prompts to replies.')
  return PolicyAnalyzer(read_settings(settings), generate)


class PolicyAnalyzer:
  """See `opid_jax.analyzers.base.Analyzer`."""

  def __init__(self, settings: Settings, generate: Generate):
    self._settings = settings
    self._generate = generate

  def submit(self, trajectories: Sequence[Trajectory]) -> Pending:
    """Nothing runs before `result`: generating is device work, which belongs to the caller's thread."""
    return Pending(lambda: self._answer(trajectories), self._settings.max_failure_share)

  def _answer(self, trajectories: Sequence[Trajectory]) -> list[Answer]:
    s = self._settings
    prompts = [
      prompt.build(trajectory, max_step_skills=s.max_step_skills, max_chars=s.max_prompt_chars)
      for trajectory in trajectories
    ]
    replies = self._generate(prompts) if prompts else []
    if len(replies) != len(prompts):
      raise ValueError(f'generate returned {len(replies)} replies for {len(prompts)} prompts, not one each.')
    answers = []
    for trajectory, text in zip(trajectories, replies, strict=True):
      skills, dropped = reply.parse_counted(
        text, num_steps=len(trajectory.steps), max_step_skills=s.max_step_skills)
      answers.append(Answer(skills, detail=repr(text[-120:]), dropped=dropped, usage=Usage(requests=1)))
    return answers
