"""Makes the tiny embedded policy: supervised on episodes of an imperfect scripted actor, with and without advice.

python -m opid_jax.warmstart --config=configs/webshop.py --out=runs/policy
  2 CPU cores: see README. Writes a Hugging Face folder; the result is measured with `opid_jax.evaluate`.

The policy stands in for a pretrained language model where no weights are at hand: like one, it knows the format of
an answer, is middling at the task, and heeds advice in its prompt. It says nothing about the paper's numbers.
"""

import collections
import functools
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from opid_jax import envs, evaluate, flags, learner, prompts, rollout
from opid_jax.models import hf, qwen
from opid_jax.models.tokenizer import Tokenizer
from opid_jax.types import Packed, Prompt

OPTIONS = {
  'out': flags.Option('runs/policy', 'folder to write'),
  'episodes': flags.Option(12000, 'scripted episodes'),
  'updates': flags.Option(2000, 'optimizer updates'),
  'learning_rate': flags.Option(4e-3, 'peak; warm-up over 5 %, then cosine to 0'),
  'care_low': flags.Option(0.1, 'least care of a scripted actor, in [0, 1]'),
  'care_high': flags.Option(0.7, 'most care of a scripted actor, in [0, 1]'),
  'advised': flags.Option(0.5, 'share of the turns with advice in the prompt'),
  'prompt_weight': flags.Option(0.1, 'loss weight of prompt tokens beside 1 for response tokens'),
  'draws': flags.Option(8, 'replies of the scripted actor per turn; they branch off one prompt'),
  'row_length': flags.Option(320, 'tokens of a packed row'),
  'rows': flags.Option(12, 'packed rows per update'),
}

# Qwen3's shape at a million parameters; the vocabulary size is the tokenizer's.
MODEL = qwen.QwenConfig(
  family='qwen3',
  vocab_size=2048,
  width=128,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_dim=32,
  mlp_width=384,
  rope_theta=10000.0,
  tied=True,
  max_positions=1024,
)

# Pieces that the byte-pair merges never cross: tags and separators, asins, words, whole numbers, and anything
# else by itself.
PIECES = '|'.join([
  r"'? \[SEP\] '?",
  r'</?(?:think|action)>',
  r'b0\p{Ll}{8}',
  r' ?\p{L}+',
  r' ?\d+(?:\.\d+)?',
  r'\s|.',
])  # fmt: skip


class Shown(NamedTuple):
  """Replies to imitate, the prompt they were given to, and the advice in it (at most one is not '')."""

  prompt: Prompt
  episode_skill: str
  step_skill: str
  responses: tuple[str, ...]


class Example(NamedTuple):
  """Token ids of one turn.

  Attributes:
    prompt: [P] int32.
    responses: [T_i] int32 each, all different.
    shares: of the draws that gave each of them; they sum to 1.
  """

  prompt: np.ndarray
  responses: list[np.ndarray]
  shares: list[float]

  @property
  def columns(self) -> int:
    """Tokens of a packed row that it takes: the prompt is there once, the last token of a response nowhere."""
    return len(self.prompt) + sum(len(response) - 1 for response in self.responses)

  @property
  def slots(self) -> int:
    """Tokens that are scored: all but the first."""
    return len(self.prompt) - 1 + sum(map(len, self.responses))


def train_tokenizer(texts: Iterable[str], folder: str, *, vocab_size: int) -> None:
  """Byte-pair tokenizer over `texts`, written as a Hugging Face tokenizer folder with Qwen's turn markers."""
  from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
  from tokenizers import Tokenizer as Pieces

  special = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
  pieces = Pieces(models.BPE())
  pieces.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(Regex(PIECES), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  pieces.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=special,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  pieces.train_from_iterator(texts, trainer)
  os.makedirs(folder, exist_ok=True)
  pieces.save(os.path.join(folder, 'tokenizer.json'))
  settings = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'eos_token': '<|im_end|>',
    'pad_token': '<|endoftext|>',
    'model_max_length': MODEL.max_positions,
    'chat_family': 'plain',
    'chat_template': (
      "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
      '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
    ),
  }
  with open(os.path.join(folder, 'tokenizer_config.json'), 'w', encoding='utf-8') as file:
    json.dump(settings, file, indent=2)
  ends = [pieces.token_to_id('<|im_end|>'), pieces.token_to_id('<|endoftext|>')]
  with open(os.path.join(folder, 'generation_config.json'), 'w', encoding='utf-8') as file:
    json.dump({'eos_token_id': ends, 'pad_token_id': ends[1]}, file)


def corpus(shown: Sequence[Shown], style: str) -> Iterable[str]:
  """What the tokenizer is made from: prompts and responses."""
  for d in shown:
    yield prompts.render(d.prompt, episode_skill=d.episode_skill, step_skill=d.step_skill, style=style)
    yield d.responses[0]


def examples(shown: Sequence[Shown], tokenizer, limits: rollout.Limits) -> list[Example]:
  """Demonstrations as ids, through the same path that acting takes."""
  end = tokenizer.end_ids[0]
  out = []
  for d in shown:
    prompt, _, _ = rollout.fit(d.prompt, tokenizer, limits)
    ids = rollout.tokenize(prompt, tokenizer, limits, episode_skill=d.episode_skill, step_skill=d.step_skill)
    counts = collections.Counter(d.responses)
    responses = [np.asarray([*tokenizer.encode(text), end], np.int32) for text in counts]
    out.append(Example(ids, responses, [count / len(d.responses) for count in counts.values()]))
  return out


def pack(data: Sequence[Example], *, row_length: int, slots: int) -> tuple[Packed, np.ndarray, np.ndarray]:
  """Rows in which each prompt stands once and its responses branch off it.

  Returns:
    (`Packed`, weight of prompt tokens [R, K], weight of response tokens [R, K]).

  Raises:
    ValueError: if an example does not fit into a row.
  """
  room: list[list[int]] = []
  rows: list[list[Example]] = []
  for example in sorted(data, key=lambda e: -e.columns):
    if example.columns > row_length or example.slots > slots:
      raise ValueError(f'An example of {example.columns} tokens does not fit into a row of {row_length}.')
    fits = (r for r, (c, k) in enumerate(room) if c >= example.columns and k >= example.slots)
    row = next(fits, len(room))
    if row == len(room):
      room.append([row_length, slots])
      rows.append([])
    room[row][0] -= example.columns
    room[row][1] -= example.slots
    rows[row].append(example)
  packed = Packed(
    *(np.zeros((len(rows), row_length), np.int32) for _ in range(3)),
    *(np.zeros((len(rows), slots), np.int32) for _ in range(2)),
    np.zeros((len(rows), slots), np.float32),
  )
  on_prompt, on_response = np.zeros((2, len(rows), slots), np.float32)
  for row, members in enumerate(rows):
    column = slot = 0
    for example in members:
      column, slot = _write(packed, on_prompt[row], on_response[row], row, column, slot, example)
  return packed, on_prompt, on_response


def _write(packed: Packed, on_prompt, on_response, row: int, column: int, slot: int, example: Example):
  """Puts one example behind what the row holds; returns the next free column and slot."""

  def put(tokens, first_column, first_position, visible_to):
    span = slice(first_column, first_column + len(tokens))
    packed.tokens[row, span] = tokens
    packed.positions[row, span] = first_position + np.arange(len(tokens))
    packed.visible_to[row, span] = visible_to

  def score(columns, targets, weights, weight):
    span = slice(slot, slot + len(targets))
    packed.score_at[row, span], packed.target[row, span], packed.is_scored[row, span] = columns, targets, 1
    weights[span] = weight
    return slot + len(targets)

  length = len(example.prompt)
  put(example.prompt, column, 0, column + example.columns)
  # A tiny model learns to copy from the prompts, too.
  slot = score(column + np.arange(length - 1), example.prompt[1:], on_prompt, 1.0)
  branch = column + length
  for response, share in zip(example.responses, example.shares, strict=True):
    end = branch + len(response) - 1
    put(response[:-1], branch, length, end)
    slot = score([column + length - 1, *range(branch, end)], response, on_response, share)
    branch = end
  return branch, slot


def batches(data: Sequence[Example], *, rows: int, row_length: int, seed: int):
  """Endless (`Packed`, prompt weight, response weight) batches of `rows` rows, in a new order each epoch."""
  rng = np.random.default_rng(seed)
  while True:
    order = rng.permutation(len(data))
    # Packing some thousand at a time keeps first-fit quick and every epoch's rows different.
    for begin in range(0, len(order), 2000):
      chosen = [data[i] for i in order[begin : begin + 2000]]
      packed, *weights = pack(chosen, row_length=row_length, slots=row_length + 64)
      shuffled = rng.permutation(len(packed.tokens))
      for first in range(0, len(shuffled) - rows + 1, rows):
        pick = shuffled[first : first + rows]
        yield Packed(*(x[pick] for x in packed)), *(weight[pick] for weight in weights)


def fit(params, data: Sequence[Example], config: qwen.QwenConfig, option, *, row_length: int, seed: int):
  """Cross-entropy on the examples; returns the trained parameters."""
  rate = optax.warmup_cosine_decay_schedule(
    0.0, option['learning_rate'], max(1, option['updates'] // 20), option['updates']
  )
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01))
  options = qwen.Options(remat='layer')

  def loss(params, packed, on_prompt, on_response):
    logp, _ = learner.score(params, packed, config=config, options=options, temperature=1.0, head_chunk=0)
    logp = jnp.where(packed.is_scored > 0, logp, 0.0)
    weight = option['prompt_weight'] * on_prompt + on_response
    return -jnp.sum(weight * logp) / jnp.sum(weight), -jnp.sum(on_response * logp) / jnp.sum(on_response)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def update(params, opt_state, *batch):
    (_, nats), gradient = jax.value_and_grad(loss, has_aux=True)(params, *batch)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, nats

  opt_state = optimizer.init(params)
  stream = batches(data, rows=option['rows'], row_length=row_length, seed=seed)
  begin, recent = time.monotonic(), []
  for number in range(option['updates']):
    params, opt_state, nats = update(params, opt_state, *next(stream))
    recent.append(nats)
    if (number + 1) % 50 == 0:
      spent = time.monotonic() - begin
      left = spent / (number + 1) * (option['updates'] - number - 1)
      mean = float(np.mean([float(x) for x in recent]))
      where = f'update {number + 1}/{option["updates"]}'
      print(f'{where}: {mean:.4f} nats per response token, {left:.0f} s left', flush=True)
      recent.clear()
  return params


def main(argv: Sequence[str]) -> None:
  config, option = flags.read_or_exit(argv, OPTIONS, __doc__)
  out = Path(option['out'])
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    sys.exit(f'--out={out} is there already. Name a new folder.')
  module = importlib.import_module(f'opid_jax.envs.{config.env.name}.demonstrate')
  env = envs.make(config.env, seed=config.seed)
  demonstrations = module.demonstrations(
    env,
    module.practice_tasks(env, option['episodes'], seed=config.seed),
    seed=config.seed,
    care=(option['care_low'], option['care_high']),
    advised=option['advised'],
    draws=option['draws'],
  )
  shown = [Shown(env.prompt(d.state), d.episode_skill, d.step_skill, d.responses) for d in demonstrations]
  limits = evaluate.limits(config)
  with tempfile.TemporaryDirectory() as folder:
    train_tokenizer(corpus(shown, limits.style), folder, vocab_size=MODEL.vocab_size)
    tokenizer = Tokenizer.load(folder)
    data = examples(shown, tokenizer, limits)
    lengths = [e.columns for e in data]
    print(f'{len(data)} turns, {np.mean(lengths):.0f} tokens on average, {max(lengths)} at most', flush=True)
    params = qwen.init(jax.random.key(config.seed), MODEL)
    print(f'{qwen.count_parameters(params):,} parameters', flush=True)
    params = fit(params, data, MODEL, option, row_length=option['row_length'], seed=config.seed)
    hf.save_folder(out, params, MODEL, dtype='bfloat16', tokenizer_folder=folder)
  print(f'Wrote {out}. Measure it: python -m opid_jax.evaluate --config=... --config.model.path={out}')


if __name__ == '__main__':
  main(sys.argv)
