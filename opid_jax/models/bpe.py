"""Byte-pair encoding from a folder's files: tiktoken where it gives the same ids as `tokenizers`, else that.

Both are wrapped as a `Bpe` of three functions. `encode` treats its text as data: no string in it becomes an
added token (`<|im_end|>`, `<think>`, ...), because the tokenizer behind it does not know any.
"""

import base64
import binascii
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# How Qwen cuts text into pieces before merging: contractions, words with one leading sign, single digits,
# signs, line breaks, white space. Data of the model, like its merges.
QWEN_PATTERN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_QWEN_SIZE = 151643  # Tokens without the added ones, in every Qwen2, Qwen2.5 and Qwen3.
# tiktoken's regular expression dies of a white-space run of about 984,000 characters; longer ones are cut.
_LONGEST_SPACE = 500_000
_CONTROL = (
  'endoftext', 'im_start', 'im_end', 'object_ref_start', 'object_ref_end', 'box_start', 'box_end',
  'quad_start', 'quad_end', 'vision_start', 'vision_end', 'vision_pad', 'image_pad', 'video_pad',
)  # fmt: skip
_MARKUP = (
  '<tool_call>', '</tool_call>', '<|fim_prefix|>', '<|fim_middle|>', '<|fim_suffix|>', '<|fim_pad|>',
  '<|repo_name|>', '<|file_sep|>',
)  # fmt: skip
_QWEN3_MARKUP = ('<tool_response>', '</tool_response>', '<think>', '</think>')


class Bpe(NamedTuple):
  """A vocabulary at work.

  Attributes:
    encode: text to ids, all of it ordinary text.
    encode_with_added: text to ids, added tokens recognised.
    decode: ids to text, whole sequences; bytes that are no UTF-8 become U+FFFD.
    size: largest id plus one, added tokens included.
    added: id of every added token.
    control: ids of the added tokens that are flagged special; the others are markup such as `<think>`.
  """

  encode: Callable[[str], list[int]]
  encode_with_added: Callable[[str], list[int]]
  decode: Callable[[Sequence[int]], str]
  size: int
  added: Mapping[str, int]
  control: frozenset[int]


def load(folder: Path, settings: Mapping[str, Any], family: str) -> Bpe:
  """From `tokenizer.json`, else `vocab.json` and `merges.txt`, else a `.tiktoken` file.

  Args:
    folder: where the files are.
    settings: content of `tokenizer_config.json`; its `added_tokens_decoder` adds to what the files say.
    family: 'qwen2' or 'qwen3' names the added tokens where no file does.

  Raises:
    FileNotFoundError: none of these files.
    ValueError: a file is damaged or of a kind that is not supported.
  """
  if (folder / 'tokenizer.json').exists():
    spec = read_json(folder / 'tokenizer.json')
    spec = spec | {'added_tokens': _merge_added(folder, spec.get('added_tokens') or [], settings)}
  elif (folder / 'vocab.json').exists() and (folder / 'merges.txt').exists():
    vocab = read_json(folder / 'vocab.json')
    added = _merge_added(folder, _listed(folder), settings) or _default_added(len(vocab), family)
    spec = _qwen_spec(vocab, _read_merges(folder / 'merges.txt'), added)
  else:
    files = sorted(folder.glob('*.tiktoken'))
    if len(files) != 1:
      raise FileNotFoundError(
        f'{folder} has no tokenizer: expected tokenizer.json, or vocab.json and merges.txt, or one file '
        f'that ends in .tiktoken.'
      )
    ranks = _read_ranks(files[0])
    added = _merge_added(folder, _listed(folder), settings) or _default_added(len(ranks), family)
    return _with_tiktoken(ranks, added)
  ranks = _ranks(spec)
  return _with_tokenizers(folder, spec) if ranks is None else _with_tiktoken(ranks, spec['added_tokens'])


def read_json(path: Path) -> dict[str, Any]:
  """A JSON object.

  Raises:
    ValueError: it holds something else; names the file.
  """
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except (UnicodeDecodeError, json.JSONDecodeError) as error:
    raise ValueError(f'{path} is not JSON ({error}). Download it again.') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path} holds a {type(value).__name__}, expected a JSON object.')
  return value


def _read_merges(path):
  lines = path.read_text(encoding='utf-8').split('\n')
  lines = lines[1:] if lines[0].startswith('#version') else lines
  merges = [tuple(line.rstrip('\r').split(' ')) for line in lines if line.strip()]
  if any(len(merge) != 2 for merge in merges):
    raise ValueError(f'{path}: expected two tokens a line. Download it again.')
  return merges


def _read_ranks(path):
  try:
    pairs = [line.split() for line in path.read_bytes().splitlines() if line.strip()]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
  except (binascii.Error, ValueError) as error:
    raise ValueError(f'{path} is no tiktoken file: expected a base64 token and its rank a line.') from error
  if not ranks or sorted(ranks.values()) != list(range(len(pairs))):
    raise ValueError(f'{path}: the {len(pairs)} ranks are not 0, 1, 2, ... It is cut off or damaged.')
  return ranks


def _listed(folder):
  """Added tokens of the older layout, a map from text to id."""
  path = folder / 'added_tokens.json'
  names = read_json(path) if path.exists() else {}
  control = re.compile(r'<\|(?!fim|repo|file).*\|>')
  return [_added(number, text, control.fullmatch(text) is not None) for text, number in names.items()]


def _added(number, text, special):
  flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False}
  return {'id': number, 'content': text, 'special': special} | flags


def _default_added(start, family):
  """The added tokens of Qwen2.5 and Qwen3, right behind their vocabulary; none for any other."""
  if start != _QWEN_SIZE:
    return []
  texts = [f'<|{name}|>' for name in _CONTROL] + list(_MARKUP)
  texts += _QWEN3_MARKUP if family == 'qwen3' else ()
  return [_added(start + i, text, i < len(_CONTROL)) for i, text in enumerate(texts)]


def _merge_added(folder, added, settings):
  """Added tokens of the vocabulary file and of `tokenizer_config.json`, which must not disagree."""
  by_text = {token['content']: token for token in added}
  for number, token in (settings.get('added_tokens_decoder') or {}).items():
    text = token['content']
    known = by_text.setdefault(text, _added(int(number), text, True) | token | {'id': int(number)})
    if known['id'] != int(number):
      raise ValueError(
        f'{folder}: added token {text!r} has id {number} in tokenizer_config.json and {known["id"]} before.'
      )
  return sorted(by_text.values(), key=lambda token: token['id'])


def _qwen_spec(vocab, merges, added):
  """What `tokenizer.json` would say."""
  return {
    'version': '1.0',
    'added_tokens': added,
    'normalizer': {'type': 'NFC'},
    'pre_tokenizer': {
      'type': 'Sequence',
      'pretokenizers': [
        {'type': 'Split', 'pattern': {'Regex': QWEN_PATTERN}, 'behavior': 'Isolated', 'invert': False},
        {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': False, 'use_regex': False},
      ],
    },
    'post_processor': None,
    'decoder': {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': False, 'use_regex': False},
    'model': {'type': 'BPE', 'vocab': vocab, 'merges': merges},
  }


def _byte_characters():
  """The printable characters that stand for bytes in byte-level vocabularies, as GPT-2 introduced them."""
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _ranks(spec) -> dict[bytes, int] | None:
  """tiktoken's ranks of a `tokenizer.json`, or None unless they provably give the same ids.

  tiktoken merges the pair whose union has the lowest id; `tokenizers` the listed pair that comes first. These
  agree when merges are listed by the id of their union and every union has one merge, as training makes them.
  """
  model, qwen = spec['model'], _qwen_spec({}, [], [])
  flags = ('dropout', 'unk_token', 'continuing_subword_prefix', 'end_of_word_suffix', 'byte_fallback')
  stripping = ('single_word', 'lstrip', 'rstrip', 'normalized')
  plain = (
    model.get('type') == 'BPE'
    and _steps(spec) == _steps(qwen)
    and spec.get('normalizer') == qwen['normalizer']
    and not any(model.get(flag) for flag in (*flags, 'ignore_merges'))
    and not any(token.get(flag) for token in spec['added_tokens'] for flag in stripping)
  )
  if not plain:
    return None
  to_byte = _byte_characters()
  added = {token['content'] for token in spec['added_tokens']}
  try:
    ranks = {bytes(map(to_byte.__getitem__, text)): i for text, i in model['vocab'].items() if text not in added}
    unions = [ranks[bytes(to_byte[c] for part in _pair(merge) for c in part)] for merge in model['merges']]
  except KeyError:
    return None
  singles = sum(len(token) == 1 for token in ranks)
  in_order = all(a < b for a, b in zip(unions, unions[1:], strict=False))
  return ranks if singles == 256 and in_order and len(unions) == len(ranks) - 256 else None


def _steps(spec):
  """How a text is cut; `trim_offsets` concerns offsets, not ids."""
  steps = (spec.get('pre_tokenizer') or {}).get('pretokenizers', ())
  return [{key: value for key, value in step.items() if key != 'trim_offsets'} for step in steps]


def _pair(merge):
  return merge.split(' ') if isinstance(merge, str) else merge


def _with_tiktoken(ranks, added_tokens) -> Bpe:
  import tiktoken  # Loads a native library.

  encoding = tiktoken.Encoding('qwen', pat_str=QWEN_PATTERN, mergeable_ranks=ranks, special_tokens={})
  added = {token['content']: token['id'] for token in added_tokens}
  pieces = {number: token for token, number in ranks.items()}
  pieces |= {number: text.encode() for text, number in added.items()}

  def encode(text):
    text = unicodedata.normalize('NFC', _valid(text))
    return [number for chunk in _chunks(text) for number in encoding.encode_ordinary(chunk)]

  def decode(ids):
    return b''.join(pieces.get(number, b'') for number in ids).decode('utf-8', 'replace')

  return Bpe(
    encode=encode,
    encode_with_added=lambda text: split_encode(text, added, encode),
    decode=decode,
    size=1 + max(pieces),
    added=added,
    control=frozenset(token['id'] for token in added_tokens if token['special']),
  )


def _valid(text):
  """A lone surrogate is no character and has no UTF-8; '?' stands for it."""
  return text.encode('utf-8', 'replace').decode('utf-8')


def _chunks(text):
  """The text whole, but for white-space runs that are too long for tiktoken."""
  if len(text) <= _LONGEST_SPACE:
    return [text]
  runs = [match.span() for match in re.finditer(r'\s+', text)]
  cuts = [cut for start, end in runs for cut in range(start + _LONGEST_SPACE, end, _LONGEST_SPACE)]
  return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def split_encode(text: str, names: Mapping[str, int], encode: Callable[[str], list[int]]) -> list[int]:
  """Ids of a text in which the strings of `names` are tokens and all between them goes through `encode`."""
  if not names:
    return encode(text)
  longest_first = sorted(names, key=len, reverse=True)
  ids = []
  for part in re.split(f'({"|".join(map(re.escape, longest_first))})', text):
    ids += [names[part]] if part in names else encode(part)
  return ids


def _with_tokenizers(folder, spec) -> Bpe:
  from tokenizers import Tokenizer  # Loads a native library.

  spec = spec | {'truncation': None, 'padding': None}
  full = Tokenizer.from_str(json.dumps(spec))
  data = Tokenizer.from_str(json.dumps(_without_added(folder, spec)))

  def decode(ids):
    known = [number for number in ids if full.id_to_token(number) is not None]
    return full.decode(known, skip_special_tokens=False)

  return Bpe(
    encode=lambda text: data.encode(_valid(text), add_special_tokens=False).ids,
    encode_with_added=lambda text: full.encode(_valid(text), add_special_tokens=False).ids,
    decode=decode,
    size=1 + max(full.get_vocab(with_added_tokens=True).values()),
    added={token['content']: token['id'] for token in spec['added_tokens']},
    control=frozenset(token['id'] for token in spec['added_tokens'] if token['special']),
  )


def _without_added(folder, spec):
  """The same tokenizer without its added tokens, which the model's own vocabulary may list as well."""
  model = spec['model']
  if not isinstance(model.get('vocab'), dict):
    kind = model.get('type')
    raise ValueError(f'{folder}: a {kind} tokenizer is not supported. Supported: BPE, WordLevel, WordPiece.')
  added = {token['content'] for token in spec['added_tokens']} - {model.get('unk_token')}
  model = model | {'vocab': {text: number for text, number in model['vocab'].items() if text not in added}}
  if 'merges' in model:
    pairs = [_pair(merge) for merge in model['merges']]
    model['merges'] = [pair for pair in pairs if not added & {*pair, ''.join(pair)}]
  return spec | {'model': model, 'added_tokens': [], 'post_processor': None}
