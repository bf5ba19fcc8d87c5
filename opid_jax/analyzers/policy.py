"""The policy looks back at its own attempts and writes the skills itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opid_jax.analyzers import prompt, reply
from opid_jax.analyzers.base import Answer, Pending, Settings, Usage, read_settings
from opid_jax.types import Skills, Trajectory

Generate = Callable[[list[str]], list[str]]
Count = Callable[[str], int]


def make(
  settings: Mapping[str, Any], *, generate: Generate | None = None, count: Count = lambda text: 0
) -> 'PolicyAnalyzer':
  """An analyzer that asks `generate`.

  Args:
    settings: fields of `config.analyzer`.
    generate: texts of the prompts to texts of the replies, in the same order.
    count: tokens that `generate` makes of a prompt; longer ones than `analyzer.max_prompt_tokens` are shortened.

  Raises:
    ValueError: if `generate` is missing or a setting is wrong.
  """
  if generate is None:
    raise ValueError('The analyzer "policy" needs `generate`, a function from prompts to replies.')
  return PolicyAnalyzer(read_settings(settings), generate, count)


class PolicyAnalyzer:
  """See `opid_jax.analyzers.base.Analyzer`."""

  def __init__(self, settings: Settings, generate: Generate, count: Count):
    self._settings = settings
    self._generate = generate
    self._count = count

  def submit(self, trajectories: Sequence[Trajectory]) -> Pending:
    """Nothing runs before `result`: generating is device work, which belongs to the caller's thread."""
    return Pending(lambda: self._answer(trajectories), self._settings.max_failure_share)

  def _answer(self, trajectories: Sequence[Trajectory]) -> list[Answer]:
    prompts = [self._prompt(trajectory) for trajectory in trajectories]
    asked = [text for text in prompts if text is not None]
    replies = self._generate(asked) if asked else []
    if len(replies) != len(asked):
      raise ValueError(f'generate returned {len(replies)} replies for {len(asked)} prompts, not one each.')
    left = iter(replies)
    return [
      self._too_long() if text is None else self._read(trajectory, next(left))
      for trajectory, text in zip(trajectories, prompts, strict=True)
    ]

  def _prompt(self, trajectory: Trajectory) -> str | None:
    """The longest prompt that the policy can read; None if even the shortest is too long for it."""
    s = self._settings
    max_chars = s.max_prompt_chars
    while True:
      text = prompt.build(trajectory, max_step_skills=s.max_step_skills, max_chars=max_chars)
      tokens = self._count(text)
      if tokens <= s.max_prompt_tokens:
        return text
      if max_chars == prompt.MIN_CHARS:
        return None
      # In proportion, and a little less, because characters per token differ along the text.
      max_chars = max(prompt.MIN_CHARS, int(0.95 * min(max_chars, len(text)) * s.max_prompt_tokens / tokens))

  def _read(self, trajectory: Trajectory, text: str) -> Answer:
    skills, dropped = reply.parse_counted(
      text, num_steps=len(trajectory.steps), max_step_skills=self._settings.max_step_skills)
    return Answer(skills, detail=repr(text[-120:]), dropped=dropped, usage=Usage(requests=1))

  def _too_long(self) -> Answer:
    limit = self._settings.max_prompt_tokens
    return Answer(Skills(reason='too_long'), detail=f'the shortest prompt has over {limit} tokens '
                                                    '(analyzer.max_prompt_tokens)')
