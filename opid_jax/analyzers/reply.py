"""Reads an analyzer's reply: {"episode_summary": text, "episode_skill": text, "step_skills": {"0": text}}.

What the rules are, beyond JSON:
- Thoughts (<think> ... </think>, also without the opening tag) are no answer, whatever they contain.
- Of several objects the last one with an episode skill counts; drafts come first.
- A reply whose last object is cut or cannot be read is refused: neither half sentences nor drafts are used.
- Only text is a skill (a number counts as text, a list of texts is joined); null, true, objects, "None" and
  "..." are no skill. Step skills are refused one by one: no integer index, no such step, no text.
- Without an episode skill the step skills still count. The reference drops them.
- Step skills are ordered by step and the first `max_step_skills` kept. The reference keeps the JSON's order.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from opid_jax.analyzers import loose_json
from opid_jax.types import Skills

MAX_SKILL_CHARS = 400
MAX_SUMMARY_CHARS = 1000

_FIELDS = ('episode_summary', 'episode_skill', 'step_skills')
# Where something of interest starts: an object, or a tag of a thought.
_MARK = re.compile(r'\{|<(/?)(?:think|thinking|thought|thoughts|reasoning)\b[^<>]{0,40}>', re.IGNORECASE)
_THOUGHT_END = re.compile(r'</(?:think|thinking|thought|thoughts|reasoning)\s*>', re.IGNORECASE)
_OBJECT_START = re.compile(r'\{\s*["\']')
_FIELD_START = re.compile(rf'\{{\s*["\'](?:{"|".join(_FIELDS)})["\']')
_NOTHING = frozenset({'none', 'null', 'nan', 'n/a', 'na', 'nil', 'undefined', 'true', 'false'})
_STRICT = json.JSONDecoder(strict=False)


def parse(text: str, *, num_steps: int, max_step_skills: int) -> Skills:
  """Skills of a reply, or the reason why there are none; never an exception.

  Args:
    text: the reply.
    num_steps: steps of the trajectory; indices from 0 to `num_steps - 1` exist.
    max_step_skills: at most so many step skills are kept, those of the earliest steps.

  Returns:
    Skills of one line each, at most 400 characters. Reasons: 'empty', 'truncated', 'no_json', 'invalid_json',
    'no_skill'.
  """
  return parse_counted(text, num_steps=num_steps, max_step_skills=max_step_skills)[0]


def parse_counted(text: str, *, num_steps: int, max_step_skills: int) -> tuple[Skills, int]:
  """As `parse`, and how many step skills were refused (those beyond the limit are not counted)."""
  if not text.strip():
    return Skills(reason='empty'), 0
  found, reason = _objects(text)
  if not found:
    return Skills(reason=reason or 'no_json'), 0
  chosen = _choose(found)
  steps, dropped = _step_skills(chosen.get('step_skills'), num_steps)
  steps = dict(sorted(steps.items())[:max_step_skills])
  episode = _sentence(chosen.get('episode_skill'), MAX_SKILL_CHARS)
  summary = _sentence(chosen.get('episode_summary'), MAX_SUMMARY_CHARS)
  reason = '' if episode or steps else 'no_skill'
  return Skills(episode=episode, steps=steps, summary=summary, reason=reason), dropped


def _objects(text: str) -> tuple[list[dict], str]:
  """The complete objects outside thoughts, in order; or none and the reason."""
  found: list[dict] = []
  reason = ''
  at = 0
  while mark := _MARK.search(text, at):
    at = mark.end()
    if mark.group() != '{':
      if mark.group(1):
        # The chat template may have written the opening tag: all so far was thought.
        found, reason = [], ''
        continue
      end = _THOUGHT_END.search(text, at)
      if not end:
        return found, 'truncated'
      at = end.end()
      continue
    value, end, trouble = _object_at(text, mark.start())
    if value is not None:
      found.append(value)
      reason, at = '', end
    elif trouble:
      # An unfinished draft in a thought without an opening tag is no answer either.
      thought = _THOUGHT_END.search(text, at)
      if thought:
        found, reason, at = [], '', thought.end()
      elif trouble == 'truncated':
        return [], 'truncated'
      else:
        found, reason, at = [], trouble, end
  return found, reason


def _object_at(text: str, start: int) -> tuple[dict | None, int, str]:
  """(object, its end, '') or (None, where to go on, reason); reason '' means the brace is only prose."""
  try:
    value, end = _STRICT.raw_decode(text, start)
    return value, end, ''
  except (ValueError, RecursionError):
    pass
  try:
    value, end = loose_json.read(text, start)
    return value, end, ''
  except loose_json.Cut:
    return None, len(text), 'truncated' if _OBJECT_START.match(text, start) else ''
  except loose_json.Malformed:
    if not _FIELD_START.match(text, start):
      return None, start + 1, ''
  end = _closing_brace(text, start)
  if not end:
    return None, len(text), 'truncated'
  try:
    return _with_bare_quotes(text[start:end]), end, ''
  except loose_json.Malformed:
    return None, end, 'invalid_json'


def _closing_brace(text: str, start: int) -> int:
  """Position behind the brace that closes the one at `start`, or 0. Ignores quotes, which are wrong here."""
  depth = 0
  for brace in re.finditer(r'[{}]', text[start:]):
    depth += 1 if brace.group() == '{' else -1
    if depth == 0:
      return start + brace.end()
  return 0


def _with_bare_quotes(text: str) -> dict:
  """Recovers an object with unescaped quotes, whole or not at all.

  A quote is taken for the end of a text only where the next field of the contract, the next step number or
  the end follows. (Repair libraries guess more, and lose quotes or cut sentences.)

  Raises:
    loose_json.Malformed: if the object is not made of exactly that.
  """
  quote = text[1:].lstrip()[0]
  result: dict = {}
  for name, source in _split(text, quote, '|'.join(_FIELDS)).items():
    if name == 'step_skills':
      steps = _split(source, quote, r'\d{1,6}')
      result[name] = {index: _quoted(sentence, quote) for index, sentence in steps.items()}
    else:
      result[name] = _quoted(source, quote)
  return result


def _split(text: str, quote: str, names: str) -> dict[str, str]:
  """Sources of the values in '{"name": value, ...}', whose names match the pattern `names`."""
  if not text.startswith('{') or not text.endswith('}'):
    raise loose_json.Malformed('no object')
  if not text[1:-1].strip():
    return {}
  starts = list(re.finditer(rf'[{{,]\s*{quote}({names}){quote}\s*:\s*', text))
  if not starts or starts[0].start() or len({start.group(1) for start in starts}) < len(starts):
    raise loose_json.Malformed('an unknown or repeated name')
  ends = [start.start() for start in starts[1:]] + [len(text) - 1]
  values = [text[start.end():end].rstrip() for start, end in zip(starts, ends, strict=True)]
  values[-1] = re.sub(r'(?<=["\'}])\s*,$', '', values[-1])
  return {start.group(1): value for start, value in zip(starts, values, strict=True)}


def _quoted(source: str, quote: str) -> str:
  """The text between the outer quotes, unless it holds what looks like another name."""
  text = source[1:-1]
  if len(source) < 2 or not source[0] == source[-1] == quote or re.search(rf'{quote}\s*:', text):
    raise loose_json.Malformed('no text, or two in one')
  return loose_json.unescape(text)


def _choose(found: list[dict]) -> dict:
  """The last object with an episode skill, else the last with step skills, else the last."""
  candidates = [inner for outer in found for inner in _unwrapped(outer)]
  for wanted in ('episode_skill', 'step_skills'):
    for candidate in reversed(candidates):
      value = candidate.get(wanted)
      if (_sentence(value, MAX_SKILL_CHARS) if wanted == 'episode_skill' else value):
        return candidate
  return candidates[-1] if candidates else {}


def _unwrapped(value: Any, depth: int = 0) -> Iterator[dict]:
  """The object itself, or those inside it where it has none of the contract's fields ({"data": {...}})."""
  if isinstance(value, dict) and any(field in value for field in _FIELDS):
    yield value
  elif isinstance(value, dict | list) and depth < 8:
    for inner in value.values() if isinstance(value, dict) else value:
      yield from _unwrapped(inner, depth + 1)


def _step_skills(value: Any, num_steps: int) -> tuple[dict[int, str], int]:
  """Step skills by index, and how many entries were refused.

  Accepts an object, or a list of objects with the index under "step", "index" or "step_index" and the text
  under "skill", "text" or "step_skill". Anything else means no step skills.
  """
  entries: list[tuple[Any, Any]] = []
  if isinstance(value, dict):
    entries = list(value.items())
  elif isinstance(value, list):
    for item in value:
      if isinstance(item, dict):
        index = next((item[key] for key in ('step', 'index', 'step_index') if key in item), None)
        sentence = next((item[key] for key in ('skill', 'text', 'step_skill') if key in item), None)
        entries.append((index, sentence))
  kept: dict[int, str] = {}
  dropped = 0
  for key, item in entries:
    index = _index(key)
    sentence = _sentence(item, MAX_SKILL_CHARS)
    if index is None or not 0 <= index < num_steps or not sentence:
      dropped += 1
    else:
      kept[index] = sentence
  return kept, dropped


def _index(key: Any) -> int | None:
  if isinstance(key, bool) or not isinstance(key, int | str):
    return None
  try:
    return int(key)
  except ValueError:
    return None


def _sentence(value: Any, max_chars: int) -> str:
  """One line of text, or '' for whatever is not text."""
  if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
    value = ' '.join(value)
  elif isinstance(value, int | float) and not isinstance(value, bool):
    value = str(value)
  if not isinstance(value, str):
    return ''
  # Pairs of escaped surrogates become characters, lone ones a replacement character: they cannot be stored.
  value = value.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
  value = ' '.join(''.join(char if char.isprintable() else ' ' for char in value).split())
  if value.lower().strip(' .') in _NOTHING or not any(char.isalnum() for char in value):
    return ''
  return value if len(value) <= max_chars else _shortened(value, max_chars)


def _shortened(value: str, max_chars: int) -> str:
  """Cut behind a sentence if one ends in the second half, else between words."""
  head = value[:max_chars]
  end = max(head.rfind(mark) for mark in ('. ', '! ', '? ', '; ')) + 1
  if end > max_chars // 2:
    return head[:end].rstrip(' ;')
  space = head.rfind(' ')
  return head[:space] if space > max_chars // 2 else head
