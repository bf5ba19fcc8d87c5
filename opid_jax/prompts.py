"""Prompts: from slots to text, with or without a skill, and shortening to a token budget. No JAX.

A skill goes in by structure: it is one more slot, so the skilled text equals the plain text with one block
inserted, white space included, and both contexts keep task, turn anchor and instructions.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from opid_jax.types import Prompt


class Style(NamedTuple):
  """How a skill is worded.

  Attributes:
    episode: block of an episode skill, with `{}` for the skill.
    step: block of a step skill.
    cut: mark left where text was taken out.
  """

  episode: str
  step: str
  cut: str


STYLES = {
  # For language models. The empty lines belong to the block, so that the plain text has none of them.
  'full': Style(
    '\n**Skill for this episode**\nFollow this advice for the whole task wherever it applies:\n[{}]\n',
    '\n**Skill for this step**\nThis step is critical; let this advice decide your next action:\n[{}]\n',
    '[... cut ...]',
  ),
  # For a small policy with a short context.
  'brief': Style('Hint: {}', 'Hint: {}', '...'),
}


def _style(style: str) -> Style:
  if style not in STYLES:
    raise ValueError(f'Unknown prompt style {style!r}. Available: {", ".join(STYLES)}.')
  return STYLES[style]


def block(skill: str, *, kind: str, style: str = 'full') -> str:
  """The text that a skill adds to a prompt, without the line break that separates it; '' for a blank skill.

  Args:
    skill: one skill.
    kind: 'episode' or 'step'.
    style: a name in `STYLES`.
  """
  if kind not in ('episode', 'step'):
    raise ValueError(f"Unknown kind of skill {kind!r}. Available: 'episode', 'step'.")
  chosen = _style(style)
  template = chosen.episode if kind == 'episode' else chosen.step
  return template.replace('{}', skill.strip()) if skill.strip() else ''


def render(prompt: Prompt, *, episode_skill: str = '', step_skill: str = '', style: str = 'full') -> str:
  """The text of a prompt.

  Slots in the order head, [episode skill], history, observation, actions, [step skill], turn; those that are
  empty are left out, the others are separated by one line break. An introduction without records is left out.

  Args:
    prompt: the slots.
    episode_skill: advice for the whole task; blank for none.
    step_skill: advice for this turn; blank for none.
    style: a name in `STYLES`.

  Raises:
    ValueError: for an unknown style.
  """
  history = [prompt.history_intro, *prompt.history] if prompt.history else []
  slots = [
    prompt.head,
    block(episode_skill, kind='episode', style=style),
    *history,
    prompt.observation,
    prompt.actions,
    block(step_skill, kind='step', style=style),
    prompt.turn,
  ]
  return '\n'.join(slot for slot in slots if slot)


def history_records(history: Sequence[tuple[str, str]], history_length: int) -> tuple[str, ...]:
  """The last `history_length` turns as records "[Observation k: '..', Action k: '..']".

  Args:
    history: (observation before the action, action) of all turns, oldest first.
    history_length: records to keep; 0 or less for none.

  Returns:
    Records, oldest first; k is the 1-based number of the turn in the episode.
  """
  first = max(len(history) - max(history_length, 0), 0)
  return tuple(
    f"[Observation {k}: '{observation}', Action {k}: '{action}']"
    for k, (observation, action) in enumerate(history[first:], start=first + 1)
  )


def _units(text: str) -> list[str]:
  """Words with the white space before them; very long words in pieces, so that any text can be shortened."""
  return re.findall(r'\s*\S{1,40}', text)


def _most(upper: int, fits: Callable[[int], bool]) -> int:
  """The largest count in [0, upper] found to fit; 0 is taken to fit."""
  low, high = 0, upper
  while low < high:
    middle = (low + high + 1) // 2
    low, high = (middle, high) if fits(middle) else (low, middle - 1)
  return low


def _shorten(text: str, kept: int, mark: str) -> str:
  """Keeps `kept` units, two thirds of them in front, and leaves the mark between the two parts."""
  units = _units(text)
  front = -(-2 * kept // 3)
  head, tail = ''.join(units[:front]), ''.join(units[len(units) - (kept - front) :])
  return ' '.join(part for part in (head.rstrip(), mark, tail.strip()) if part)


def fit(
  prompt: Prompt, count_tokens: Callable[[str], int], *, max_tokens: int, style: str = 'full'
) -> tuple[Prompt, bool]:
  """Shortens a prompt to a token budget before it is rendered; rendered tokens are never cut.

  First drops history records, oldest first. Then cuts the observation in the middle and, if that does not
  suffice, the actions, leaving a mark. Head and turn (the task, the turn anchor and the instructions) are
  never touched. Skills are not counted: both contexts of a step are made from the one shortened prompt, and
  a skill has a budget of its own (`clip_skill`).

  Args:
    prompt: the slots.
    count_tokens: tokens of the whole prompt made from a rendered text, chat template included.
    max_tokens: the budget.
    style: a name in `STYLES`; gives the mark.

  Returns:
    (prompt that fits, whether it had to be shortened).

  Raises:
    ValueError: if head and turn alone exceed the budget.
  """
  mark = _style(style).cut

  def fits(**slots) -> bool:
    return count_tokens(render(dataclasses.replace(prompt, **slots))) <= max_tokens

  if fits():
    return prompt, False
  while prompt.history:
    prompt = dataclasses.replace(prompt, history=prompt.history[1:])
    if fits():
      return prompt, True
  for name in ('observation', 'actions'):
    text = getattr(prompt, name)

    def cut(kept: int, text=text, name=name) -> dict[str, str]:
      return {name: _shorten(text, kept, mark)}

    if text and fits(**cut(0)):
      most = _most(len(_units(text)) - 1, lambda kept, cut=cut: fits(**cut(kept)))
      return dataclasses.replace(prompt, **cut(most)), True
    prompt = dataclasses.replace(prompt, **(cut(0) if text else {}))
  prompt = dataclasses.replace(prompt, observation='', actions='')
  if fits():
    return prompt, True
  raise ValueError(
    f'The task and the instructions alone take {count_tokens(render(prompt))} tokens, but '
    f'rollout.max_prompt_tokens is {max_tokens}. Raise it, or choose shorter instructions (env.instructions).'
  )


def clip_skill(
  skill: str,
  count_tokens: Callable[[str], int],
  *,
  max_tokens: int,
  kind: str = 'episode',
  style: str = 'full',
) -> str:
  """Cuts a skill so that what it adds to a prompt, heading included, stays within a budget of its own.

  Ends at the end of a clause where that keeps at least half of what fits, else after a word.

  Args:
    skill: one skill.
    count_tokens: tokens of a piece of text, without any chat template.
    max_tokens: the budget.
    kind: 'episode' or 'step'.
    style: a name in `STYLES`.

  Returns:
    The skill, stripped; '' for a blank one.

  Raises:
    ValueError: if the budget does not even hold the heading and the first word.
  """
  skill = skill.strip()
  units = _units(skill)

  def fits(text: str) -> bool:
    return count_tokens('\n' + block(text, kind=kind, style=style) + '\n') <= max_tokens

  if not skill or fits(skill):
    return skill
  kept = ''.join(units[: _most(len(units), lambda k: fits(''.join(units[:k])))])
  if not kept:
    needed = count_tokens(block(units[0], kind=kind, style=style))
    raise ValueError(
      f'A skill does not fit: rollout.max_skill_tokens is {max_tokens}, the heading and one word take '
      f'{needed} tokens. Raise it or set rollout.prompt_style=brief.'
    )
  ends = [m.end() for m in re.finditer(r'[.;!?,](?=\s|$)', kept)]
  if ends and 2 * ends[-1] >= len(kept):
    kept = kept[: ends[-1]].rstrip(',;')
  return kept


_TASK_LINES = ('Your task is to:', 'Your current task is:', 'Your task is:', 'Your question:')
_TURN_ANCHORS = ("Now it's your turn to", "Now it's your turn")


def _insert(text: str, section: str, at: int) -> str:
  """Puts a section between two parts of a text, with exactly one empty line on each side."""
  parts = (text[:at].rstrip(), section, text[at:].lstrip())
  return '\n\n'.join(part for part in parts if part)


def _turn_anchor(text: str) -> int:
  """Where the turn anchor begins, or the end of the text."""
  return next((at for at in map(text.find, _TURN_ANCHORS) if at >= 0), len(text))


def insert_reference(
  text: str, *, episode_skill: str, step_skill: str, episode_header: str, step_header: str
) -> str:
  """Inserts skills into a finished prompt by searching its text, exactly as the authors' code does.

  The episode section goes after the first line with a task marker, else before the turn anchor, else to the
  end; the step section before the turn anchor, else to the end. The text is stripped. This is the reference's
  behaviour, kept for comparison: it depends on the wording, finds markers inside observations and changes
  white space elsewhere. Training uses `render`.

  Args:
    text: the user prompt.
    episode_skill: blank for none.
    step_skill: blank for none.
    episode_header: heading lines above an episode skill.
    step_header: heading lines above a step skill.
  """
  text = text.strip()
  if episode_skill.strip():
    section = f'{episode_header}\n[{episode_skill.strip()}]'
    # White space after the colon may span a line break: an empty task line takes the next line with it.
    lines = (re.search(rf'\b{re.escape(marker)}\s*[^\n]*', text) for marker in _TASK_LINES)
    line = next((found for found in lines if found), None)
    text = _insert(text, section, line.end() if line else _turn_anchor(text))
  if step_skill.strip():
    text = _insert(text, f'{step_header}\n[{step_skill.strip()}]', _turn_anchor(text))
  return text
