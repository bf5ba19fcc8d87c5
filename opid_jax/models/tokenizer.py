"""Text to ids and back, and the chat layouts of the Qwen families. No JAX.

Text is data. `encode` and `chat` never turn a string of the text into a control token: turn markers are put
in by structure, and `<|im_end|>` in a product title is a handful of ordinary tokens.
"""

import dataclasses
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from opid_jax.models import bpe

_log = logging.getLogger(__name__)


class Chat(NamedTuple):
  """What tells one family's chat layout from another's.

  Attributes:
    system: the system message where a conversation brings none; None for no system turn.
    thinks: the family has think blocks: those of past turns are dropped from the history, and answers under
      `thinking=False` begin with an empty one.
    opens: the layout itself opens a think block (the thinking-only Qwen3 releases).
  """

  system: str | None = None
  thinks: bool = False
  opens: bool = False


CHATS = {
  'qwen2': Chat(system='You are a helpful assistant.'),
  'qwen2.5': Chat(system='You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'),
  'qwen3': Chat(thinks=True),
  'qwen3-thinking': Chat(thinks=True, opens=True),
  'plain': Chat(),
}
_ROLES = ('system', 'user', 'assistant')


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A vocabulary with its chat layout.

  Attributes:
    vocabulary: how text becomes ids.
    end_ids: ids that end a response; it keeps the one that ended it.
    pad_id: fills unused places. It may equal an end id: lengths say what is padding, never ids.
    family: key of `CHATS`.
  """

  vocabulary: bpe.Bpe
  end_ids: tuple[int, ...]
  pad_id: int
  family: str

  @classmethod
  def load(cls, folder: str | os.PathLike) -> 'Tokenizer':
    """Tokenizer of a Hugging Face folder.

    Reads `tokenizer.json`, or `vocab.json` and `merges.txt`, or a `.tiktoken` file; and where present
    `tokenizer_config.json` (its `chat_family` names the layout, else the chat template tells),
    `generation_config.json` and `config.json`.

    Raises:
      FileNotFoundError: no tokenizer in the folder.
      ValueError: a file is damaged, contradicts another, or names an unknown chat family.
    """
    folder = Path(folder)
    names = ('tokenizer_config.json', 'config.json', 'generation_config.json')
    paths = [folder / name for name in names]
    settings, model, generation = (bpe.read_json(path) if path.exists() else {} for path in paths)
    vocabulary = bpe.load(folder, settings, model.get('model_type', ''))
    end_ids = _end_ids(folder, vocabulary, settings, model, generation)
    pad = vocabulary.added.get(_text(settings.get('pad_token')), model.get('pad_token_id'))
    return cls(
      vocabulary=vocabulary,
      end_ids=end_ids,
      pad_id=pad if pad is not None else end_ids[-1] if end_ids else 0,
      family=_family(folder, settings, model.get('model_type', '')),
    )

  @property
  def size(self) -> int:
    """Largest id plus one; at most the model's embedding rows, often less (see `check_rows`)."""
    return self.vocabulary.size

  def check_rows(self, rows: int) -> None:
    """Refuses a model whose embedding has fewer rows than there are ids; more (padding) is usual.

    Raises:
      ValueError: the tokenizer is larger.
    """
    if self.size > rows:
      raise ValueError(
        f'The tokenizer is larger than the model: {self.size} ids, {rows} embedding rows. They belong to '
        f'different models.'
      )

  def encode(self, text: str, *, markup: bool = False) -> list[int]:
    """Ids of a text taken as data; '' gives []. No token is added in front.

    Args:
      text: any text; control strings in it stay ordinary text.
      markup: recognise the added tokens that control nothing (`<think>`, `<tool_call>`), as `transformers`
        does in any text. For text of one's own, never for that of an environment.
    """
    if not markup:
      return self.vocabulary.encode(text)
    names = {name: i for name, i in self.vocabulary.added.items() if i not in self.vocabulary.control}
    return bpe.split_encode(text, names, self.vocabulary.encode)

  def encode_with_special(self, text: str) -> list[int]:
    """Ids of a text in which every added token is recognised, as in `transformers`. Not for foreign text."""
    return self.vocabulary.encode_with_added(text)

  def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
    """Text of a whole sequence; a cut character becomes U+FFFD, an id behind the vocabulary nothing.

    Args:
      ids: token ids.
      skip_special: leave out control tokens, such as the end of turn; markup stays.
    """
    control = self.vocabulary.control if skip_special else ()
    return self.vocabulary.decode([int(i) for i in ids if int(i) not in control])

  def chat(
    self, messages: Sequence[tuple[str, str]], *, thinking: bool | None = None, markup: bool = False
  ) -> list[int]:
    """Ids of a conversation, ending where the assistant is to answer.

    Past assistant turns lose their think block in the families that have one, as in their own templates; a
    prompt is therefore no extension of the one before, and each step is scored under the very prompt it was
    sampled with.

    Args:
      messages: (role, text), role one of system, user, assistant; the last is not the assistant's.
      thinking: False begins the answer with an empty think block where the family has think blocks; None and
        True leave it to the model.
      markup: as in `encode`, for all messages.

    Raises:
      ValueError: no messages, an unknown role, nothing to answer, or a layout without the tokens it needs.
    """
    chat = CHATS[self.family]
    _check_messages(messages)
    if chat.opens and thinking is False:
      raise ValueError('thinking=False: this model always thinks (its template opens the block). Use None or True.')
    start, end = self._marker('<|im_start|>'), self._marker('<|im_end|>')
    line_break = self.encode('\n')
    turns = list(messages)
    if chat.system is not None and turns[0][0] != 'system':
      turns.insert(0, ('system', chat.system))
    last_question = max((i for i, (role, _) in enumerate(turns) if role == 'user'), default=len(turns))
    ids = []
    for i, (role, text) in enumerate(turns):
      if chat.thinks and role == 'assistant' and i < last_question and '</think>' in text:
        text = text.split('</think>')[-1].lstrip('\n')
      # Role and text in one piece: line breaks at the start of the text merge with the one behind the role.
      ids += [start, *self.encode(f'{role}\n{text}', markup=markup), end, *line_break]
    ids += [start, *self.encode('assistant\n')]
    if chat.opens:
      ids += [*self._think('<think>'), *line_break]
    elif chat.thinks and thinking is False:
      blank = self.encode('\n\n')
      ids += [*self._think('<think>'), *blank, *self._think('</think>'), *blank]
    return ids

  def _marker(self, text) -> int:
    if text not in self.vocabulary.added:
      raise ValueError(f'The chat layout {self.family!r} needs the added token {text!r}; the tokenizer has none.')
    return self.vocabulary.added[text]

  def _think(self, text) -> list[int]:
    """Small vocabularies may spell it out."""
    return [self.vocabulary.added[text]] if text in self.vocabulary.added else self.encode(text)


def _check_messages(messages):
  if not messages:
    raise ValueError('A conversation needs at least one message.')
  for role, text in messages:
    if role not in _ROLES or not isinstance(text, str):
      raise ValueError(f'Message ({role!r}, {type(text).__name__}): expected a role of {_ROLES} and a text.')
  if messages[-1][0] == 'assistant':
    raise ValueError('The last message is the assistant: there is nothing to answer.')


def _text(token) -> str | None:
  """`tokenizer_config.json` gives a special token as a text or as an object."""
  return token.get('content') if isinstance(token, Mapping) else token


def _end_ids(folder, vocabulary, settings, model, generation) -> tuple[int, ...]:
  """Every id that ends a turn: base models say end of text only, though their chat layout ends turns."""
  found = []
  for source in (generation, model):
    value = source.get('eos_token_id')
    found += value if isinstance(value, list) else [] if value is None else [value]
  names = (_text(settings.get('eos_token')), '<|im_end|>', '<|endoftext|>')
  found += [vocabulary.added[name] for name in names if name in vocabulary.added]
  outside = [number for number in found if number >= vocabulary.size]
  if outside:
    _log.warning('%s: eos_token_id %s lies outside the %d ids and is ignored.', folder, outside, vocabulary.size)
  return tuple(dict.fromkeys(number for number in found if number < vocabulary.size))


def _family(folder, settings, model_type) -> str:
  """Named by `chat_family`, else told from the chat template, else from the model's type."""
  named = settings.get('chat_family')
  if named is not None:
    if named not in CHATS:
      raise ValueError(f'{folder}: unknown chat_family {named!r}. Available: {", ".join(CHATS)}.')
    return named
  template = settings.get('chat_template') or ''
  if isinstance(template, list):
    template = next((entry['template'] for entry in template if entry['name'] == 'default'), '')
  if (folder / 'chat_template.jinja').exists():
    template = (folder / 'chat_template.jinja').read_text(encoding='utf-8')
  if not template:
    return {'qwen2': 'qwen2.5', 'qwen3': 'qwen3'}.get(model_type, 'plain')
  if 'enable_thinking' in template:
    return 'qwen3'
  if 'assistant\\n<think>\\n' in template:
    return 'qwen3-thinking'
  for name in ('qwen2.5', 'qwen2'):
    if CHATS[name].system in template:
      return name
  default = re.search(r"<\|im_start\|>system\\n([^'{<]+)<\|im_end\|>", template)
  if default:
    message = '%s: the template has a system message of its own, which is not added by itself: %r. Pass it in.'
    _log.warning(message, folder, default[1])
  return 'qwen3' if '</think>' in template else 'plain'
