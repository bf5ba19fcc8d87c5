"""Records what the torch-free tests compare with: `data/qwen_tokens.json` and `data/qwen_logits.json`.

    pip install dashscope torch==2.13.0 transformers && python tests/record_qwen.py

Tokens: ids that `transformers` gives with Qwen's real merges (the package dashscope ships them), together with
the part of the vocabulary that these texts can reach: every token that occurs inside one of their pieces, so that
merging them takes the same course as with the whole. Logits: of tiny random models with seeded weights.
"""

import base64
import importlib.util
import json
import unicodedata
from pathlib import Path

import numpy as np
import toymodels

DATA = Path(__file__).parent / 'data'
PATTERN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
CONTROL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
  <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>""".split()
MARKUP = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|>
  <|file_sep|> <tool_response> </tool_response> <think> </think>""".split()
ADDED = {text: 151643 + i for i, text in enumerate(CONTROL + MARKUP)}
TEXTS = [
  '',
  ' ',
  'Hello, world!',
  "I'm sure THEY'LL say it's 12345.67 dollars",
  "search[women's red t-shirt, size x-large, under $40.00]",
  'click[buy now]\n\n\n  next   line\t\ttabs \r\n end  ',
  '          ten spaces, then\n\n\n\n\nfive breaks     ',
  '你好，世界！今天天气很好。１２３',
  'naïve café cafe\u0301 Ångström ﬁne',
  'emoji 🙂👩‍👩‍👧🇩🇪 and 🤖🤖',
  'Привет, мир; こんにちは; שלום; مرحبا; हिन्दी; 한국어',
  'a\u00a0b\u3000c\u200bd\ufeffe',
  '<s>hello</s>',
  'def f(x):\n    return {"a": [1, 2]}  # ok\n',
  ''.join(ADDED),
  'text <|im_end|>\n<|im_start|>user\ninside <think>\n\n</think>\n\nafter',
]


def read_ranks():
  """Qwen's tokens and their ids, from the installed package (not imported)."""
  folder = Path(importlib.util.find_spec('dashscope').origin).parent
  lines = (folder / 'resources' / 'qwen.tiktoken').read_bytes().split(b'\n')
  return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def byte_to_character():
  """GPT-2's printable stand-ins for bytes."""
  printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != ' ' and b not in (0xA0, 0xAD)]
  others = [b for b in range(256) if b not in printable]
  return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def write_vocabulary(folder, ranks):
  """`vocab.json` and `merges.txt` of tiktoken ranks: a token's merge is the last step of encoding it alone."""
  spell = byte_to_character()
  names = {token: ''.join(map(spell.__getitem__, token)) for token in ranks}
  merges = []
  for token in sorted(ranks, key=ranks.__getitem__):
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
      unions = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
      _, i = min(unions)
      parts[i : i + 2] = [parts[i] + parts[i + 1]]
    if len(parts) == 2:
      merges.append(' '.join(names[part] for part in parts))
  folder.mkdir(parents=True, exist_ok=True)
  vocabulary = {names[token]: rank for token, rank in ranks.items()}
  (folder / 'vocab.json').write_text(json.dumps(vocabulary), encoding='utf-8')
  (folder / 'merges.txt').write_text('#version: 0.2\n' + '\n'.join(merges) + '\n', encoding='utf-8')


def transformers_tokenizer(folder, ranks):
  """The tokenizer of `transformers` over a folder written here."""
  import transformers

  write_vocabulary(folder, ranks)
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  assert all(tokenizer.convert_tokens_to_ids(text) == number for text, number in ADDED.items())
  return tokenizer


def write_settings(folder):
  """`tokenizer_config.json` with Qwen3's added tokens."""
  folder.mkdir(parents=True, exist_ok=True)
  flags = {'lstrip': False, 'rstrip': False, 'normalized': False, 'single_word': False}
  added = {str(i): {'content': text, 'special': text in CONTROL} | flags for text, i in ADDED.items()}
  settings = {'tokenizer_class': 'Qwen2Tokenizer', 'added_tokens_decoder': added, 'eos_token': '<|im_end|>'}
  settings |= {'pad_token': '<|endoftext|>', 'unk_token': None, 'additional_special_tokens': CONTROL}
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))


def record_tokens(folder):
  """Texts, their ids with and without added tokens, and the reachable tokens."""
  import regex  # Knows \p{L}; comes with `transformers`.
  from tokenizers import Tokenizer

  ranks = read_ranks()
  write_settings(folder)
  tokenizer = transformers_tokenizer(folder, ranks)
  pieces = {p.encode() for t in TEXTS for p in regex.findall(PATTERN, unicodedata.normalize('NFC', t))}
  inside = {p[i:j] for p in pieces for i in range(len(p)) for j in range(i + 1, len(p) + 1)}
  reach = {token: rank for token, rank in ranks.items() if token in inside or len(token) == 1}
  # Without added tokens: `tokenizers` with an empty list of them.
  plain = json.loads(tokenizer.backend_tokenizer.to_str()) | {'added_tokens': []}
  data = Tokenizer.from_str(json.dumps(plain))
  return {
    'ranks': {base64.b64encode(token).decode(): rank for token, rank in reach.items()},
    'added': ADDED,
    'control': [ADDED[text] for text in CONTROL],
    'cases': [
      {'text': t, 'ids': tokenizer.encode(t, add_special_tokens=False), 'data_ids': data.encode(t).ids} for t in TEXTS
    ],
  }


# One entry per setting that changes the computation: (name, family, changes to toymodels.toy_config).
YARN = {'type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 16}
LLAMA3 = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
SETTINGS = [
  ('qwen2-tied', 'qwen2', {}),
  ('qwen2-untied-theta-1e4', 'qwen2', {'tie_word_embeddings': False, 'rope_theta': 10000.0}),
  ('qwen2-yarn', 'qwen2', {'rope_scaling': YARN, 'rope_theta': 10000.0}),
  ('qwen2-linear', 'qwen2', {'rope_scaling': {'type': 'linear', 'factor': 2.0}}),
  ('qwen3-tied', 'qwen3', {}),
  ('qwen3-untied', 'qwen3', {'tie_word_embeddings': False, 'rms_norm_eps': 1e-5}),
  ('qwen3-yarn-attention-factor', 'qwen3', {'rope_scaling': YARN | {'attention_factor': 0.9, 'beta_fast': 8.0}}),
  ('qwen3-llama3', 'qwen3', {'rope_scaling': LLAMA3 | {'original_max_position_embeddings': 32}, 'rope_theta': 5e4}),
]
TOKENS = np.random.default_rng(7).integers(0, 96, 60)


def torch_logits(folder, tokens=TOKENS):
  """Logits [L, V] float32 of `transformers` in float32."""
  import torch
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  with torch.no_grad():
    return model.eval()(torch.tensor(np.array(tokens)[None])).logits[0].numpy()


def record_logits(folder):
  """Logits at the last position, five digits, for every setting."""
  result = {}
  for name, family, changes in SETTINGS:
    toymodels.write_toy(folder / name, family, **changes)
    result[name] = [round(float(x), 5) for x in torch_logits(folder / name)[-1]]
  return result


if __name__ == '__main__':
  import tempfile

  with tempfile.TemporaryDirectory() as temporary:
    DATA.mkdir(exist_ok=True)
    for name, content in (
      ('qwen_logits', record_logits(Path(temporary))),
      ('qwen_tokens', record_tokens(Path(temporary) / 'tokens')),
    ):
      text = json.dumps(content, ensure_ascii=True, separators=(',', ':'))
      (DATA / f'{name}.json').write_text(text.replace('],"', '],\n"') + '\n')
