"""A model, a tokenizer, an environment and a sampler, each small enough to check by hand."""

import collections
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np

from opid_jax.models import qwen
from opid_jax.rollout import Limits
from opid_jax.types import Prompt, State, Task

QWEN3 = qwen.QwenConfig(
  family='qwen3', vocab_size=64, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=48,
  rope_theta=1e4, max_positions=512,
)  # fmt: skip
QWEN2 = dataclasses.replace(QWEN3, family='qwen2', tied=False, attention_bias=True, qk_norm=False)


def make_params(config=QWEN3, seed=0):
  """Parameters of which every leaf matters: sharp logits, biases and norms off their initial values."""
  leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: qwen.init(jax.random.key(0), config)))
  paths = [str(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree.unflatten(leaves))]
  rng = np.random.default_rng(seed)
  values = []
  for path, leaf in zip(paths, leaves, strict=True):
    base = 1.0 if 'scale' in path else 0.0
    values.append((base + 0.25 * rng.normal(size=leaf.shape)).astype(np.float32))
  return jax.tree.map(jax.numpy.asarray, tree.unflatten(values))


def make_sequences(lengths, seed=0, vocab=64):
  """Random (prompt, response) pairs of the given (P, T)."""
  rng = np.random.default_rng(seed)
  return [tuple(rng.integers(0, vocab, n).astype(np.int32) for n in pair) for pair in lengths]


class Characters:
  """One token per character; ids 1 to 4 are control tokens, and text never becomes one of them."""

  end_ids = (2, 3)
  size = 260

  def encode(self, text):
    return [5 + byte for byte in text.encode('latin-1', 'replace')]

  def decode(self, ids, *, skip_special=False):
    return ''.join(chr(i - 5) if i >= 5 else '' if skip_special else f'<{i}>' for i in ids)

  def chat(self, messages, *, thinking=None):
    """<1>text<2> per message, then the generation header <4>."""
    assert thinking in (None, True, False)
    body = [i for _, text in messages for i in (1, *self.encode(text), 2)]
    return [*body, 4]

  def reply(self, text):
    """What a policy samples that says `text`: ids with the end of the turn."""
    return [*self.encode(text), 2]


LIMITS = Limits(
  max_prompt_tokens=200, max_skill_tokens=40, max_response_tokens=8, max_episode_tokens=0, style='brief', thinking=None
)


def make_tasks(*turns):
  """Tasks that end after the given numbers of 'go'."""
  return [Task(f'train/{i}', i, f'go {n} times', data=n) for i, n in enumerate(turns)]


class Corridor:
  """'go' walks on, anything else is invalid; the end of the corridor pays 10. Counts the calls of `step`."""

  max_turns = 6

  def __init__(self):
    self.calls = collections.Counter()

  def reset(self, task):
    return State(task, 'door 0', ('go',), inner=0)

  def step(self, state, response):
    assert not state.is_done, 'stepped after its end'
    self.calls[state.task.id] += 1
    valid = response.strip() == 'go'
    at = state.inner + valid
    done = at == state.task.data
    return dataclasses.replace(
      state, observation=f'door {at}', history=(*state.history, (state.observation, response)), turn=state.turn + 1,
      action=response if valid else '', valid=valid, reward=10.0 * done, is_done=done, success=done, score=1.0 * done,
      inner=at,
    )  # fmt: skip

  def prompt(self, state):
    records = tuple(f'saw {seen}, did {did}' for seen, did in state.history)
    return Prompt(f'Your task: {state.task.text}', 'Before:', records, state.observation, 'go', 'Act now.')


def make_request(**fields):
  return SimpleNamespace(**fields)


class Scripted:
  """A sampler that answers from a function of the request and takes a given number of visits for it.

  Args:
    answer: request -> token ids; cut at the request's `max_tokens`.
    visits: request -> visits until the response ends, at least 1.
  """

  def __init__(self, answer, *, num_slots, visits=lambda request: 1):
    self.num_slots, self.answer, self.visits = num_slots, answer, visits
    self.requests, self.running, self.queue = [], [], collections.deque()

  def use(self, params, temperature):
    assert not self.running and not self.queue
    return self

  def submit(self, request):
    self.requests.append(request)
    self.queue.append(request)

  def poll(self):
    while self.queue and len(self.running) < self.num_slots:
      request = self.queue.popleft()
      self.running.append([request, self.visits(request)])
    assert self.running, 'polled with nothing to do: the caller would wait for ever'
    for entry in self.running:
      entry[1] -= 1
    ended = [request for request, left in self.running if left <= 0]
    self.running = [entry for entry in self.running if entry[1] > 0]
    return [self.respond(request) for request in ended]

  def respond(self, request):
    ids = list(self.answer(request))
    tokens = np.asarray(ids[: request.max_tokens], np.int32)
    logp = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return SimpleNamespace(
      id=request.id, tokens=tokens, logp=logp, is_cut=int(tokens[-1]) not in Characters.end_ids
    )
