"""Reads the JSON that language models write: also trailing commas, single quotes and Python literals.

Unlike a repair library it never guesses. It either reads a complete value, or says whether the text
ended too early (`Cut`) or is wrong in the middle (`Malformed`).
"""

import re
from typing import Any

_BLANK = re.compile(r'\s*')
_NUMBER = re.compile(r'[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?')
_WORD = re.compile(r'-?[A-Za-z]+')
_WORDS = {
  'true': True, 'True': True, 'false': False, 'False': False, 'null': None, 'None': None,
  'NaN': float('nan'), 'Infinity': float('inf'), '-Infinity': float('-inf'),
}
_STRING = {
  '"': re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL),
  "'": re.compile(r"[^'\\]*(?:\\.[^'\\]*)*", re.DOTALL),
}
_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))', re.DOTALL)
_ESCAPED = {'n': '\n', 't': '\t', 'r': '\r', 'b': '\b', 'f': '\f'}
_MAX_DEPTH = 32


class Cut(ValueError):
  """The text ends inside the value."""


class Malformed(ValueError):
  """The text is not a value, wherever it ends."""


def read(text: str, start: int) -> tuple[Any, int]:
  """The value that begins at `text[start]`, and the position behind it.

  Duplicate keys: the last wins, as in Python's own reader. Raw line breaks in strings are allowed.

  Raises:
    Cut: if the text ends before the value does.
    Malformed: if the text is wrong before it ends, or nested more than 32 deep.
  """
  return _value(text, start, 0)


def unescape(text: str) -> str:
  """The inside of a string without its escapes; an unknown escape stands for the character itself."""
  return _ESCAPE.sub(_unescape, text)


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
  at = _skip(text, at)
  first = text[at]
  if depth > _MAX_DEPTH:
    raise Malformed(f'nested more than {_MAX_DEPTH} deep')
  if first == '{':
    return _object(text, at + 1, depth + 1)
  if first == '[':
    return _list(text, at + 1, depth + 1)
  if first in _STRING:
    return _string(text, at)
  return _scalar(text, at)


def _object(text: str, at: int, depth: int) -> tuple[dict, int]:
  result: dict = {}
  at = _skip(text, at)
  while text[at] != '}':
    key, at = _string(text, at) if text[at] in _STRING else _scalar(text, at)
    at = _skip(text, at)
    if text[at] != ':':
      raise Malformed(f'expected ":" at {at}')
    result[key], at = _value(text, at + 1, depth)
    at = _comma(text, at, '}')
  return result, at + 1


def _list(text: str, at: int, depth: int) -> tuple[list, int]:
  result: list = []
  at = _skip(text, at)
  while text[at] != ']':
    value, at = _value(text, at, depth)
    result.append(value)
    at = _comma(text, at, ']')
  return result, at + 1


def _string(text: str, at: int) -> tuple[str, int]:
  quote = text[at]
  end = _STRING[quote].match(text, at + 1).end()
  if end >= len(text) or text[end] != quote:
    raise Cut('inside a string')
  return unescape(text[at + 1:end]), end + 1


def _unescape(match: re.Match) -> str:
  code = match.group(1) or match.group(2)
  if code:
    return chr(int(code, 16))
  return _ESCAPED.get(match.group(3), match.group(3))


def _scalar(text: str, at: int) -> tuple[Any, int]:
  word = _WORD.match(text, at)
  if word and word.group() in _WORDS:
    return _WORDS[word.group()], word.end()
  number = _NUMBER.match(text, at)
  end = max(match.end() for match in (word, number) if match) if word or number else at
  if end == len(text):
    raise Cut('inside a number or word')
  # Python refuses to convert integers of thousands of digits; no step has such a number.
  if not number or len(number.group()) > 300:
    raise Malformed(f'expected a value at {at}')
  digits = number.group()
  return (int(digits) if digits.lstrip('+-').isdigit() else float(digits)), number.end()


def _comma(text: str, at: int, closing: str) -> int:
  """Behind an element: skips the comma, if any; what follows is an element or the end."""
  at = _skip(text, at)
  if text[at] == ',':
    return _skip(text, at + 1)
  if text[at] != closing:
    raise Malformed(f'expected "," or "{closing}" at {at}')
  return at


def _skip(text: str, at: int) -> int:
  at = _BLANK.match(text, at).end()
  if at >= len(text):
    raise Cut('the text ends')
  return at
