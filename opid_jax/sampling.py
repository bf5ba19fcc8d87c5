"""Sampling with a key/value cache: slots are filled by bucketed prefill and decoded many tokens per host visit.

A slot's random numbers depend on its own key and the number of tokens it has sampled, and on nothing else, so
what is sampled does not depend on which slot or batch a prompt lands in (beyond rounding).
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opid_jax.models import qwen


class Slots(NamedTuple):
  """Device state of S slots; donated from call to call.

  Attributes:
    cache: keys and values.
    token: [S] int32, next token to read.
    position: [S] int32, its position.
    count: [S] int32, tokens sampled so far.
    limit: [S] int32, tokens that may be sampled.
    active: [S] bool.
    key: [S, 2] uint32, key data of the response.
    tokens: [S, T] int32, what was sampled.
    logp: [S, T] float32, nats at the sampling temperature, over the whole vocabulary.
  """

  cache: qwen.Cache
  token: Any
  position: Any
  count: Any
  limit: Any
  active: Any
  key: Any
  tokens: Any
  logp: Any


def empty_slots(config: qwen.QwenConfig, *, num_slots, max_tokens, max_response, dtype) -> Slots:
  """Slots for sequences of at most `max_tokens` tokens, of which `max_response` are sampled."""
  shape = (config.num_layers, num_slots, max_tokens, config.num_kv_heads, config.head_dim)

  def zeros(*shape, dtype=jnp.int32):
    return jnp.zeros(shape, dtype)

  return Slots(
    cache=qwen.Cache(zeros(*shape, dtype=dtype), zeros(*shape, dtype=dtype)),
    token=zeros(num_slots),
    position=zeros(num_slots),
    count=zeros(num_slots),
    limit=zeros(num_slots),
    active=zeros(num_slots, dtype=bool),
    key=zeros(num_slots, 2, dtype=jnp.uint32),
    tokens=zeros(num_slots, max_response),
    logp=zeros(num_slots, max_response, dtype=jnp.float32),
  )


def prefill(params, slots: Slots, tokens, length, slot, limit, key, *, config, options) -> Slots:
  """Puts prompts into slots.

  Args:
    tokens: [B, P] int32, padded on the right.
    length: [B] int32, at least 1.
    slot: [B] int32 slot of each prompt; a number past the last slot marks a padding row, which is dropped.
    limit: [B] int32 tokens that may be sampled.
    key: [B, 2] uint32.
  """
  new = qwen.prefill(params, config, options, tokens, length)
  width = tokens.shape[1]
  cache = jax.tree.map(lambda old, kv: old.at[:, slot, :width].set(kv.astype(old.dtype), mode='drop'), slots.cache, new)
  # The last prompt token is read again by the first decode step: it yields the first logits, so prefill has no head.
  last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]

  def put(old, value):
    return old.at[slot].set(value, mode='drop')

  return Slots(
    cache=cache,
    token=put(slots.token, last),
    position=put(slots.position, length - 1),
    count=put(slots.count, 0),
    limit=put(slots.limit, limit),
    active=put(slots.active, limit > 0),
    key=put(slots.key, key),
    tokens=put(slots.tokens, 0),
    logp=put(slots.logp, 0.0),
  )


def truncate(logits, *, top_k: int, top_p: float):
  """Logits [.., V] with everything outside the top k and the nucleus p at -inf; 0 and 1.0 switch them off."""
  if top_k:
    kth = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
    logits = jnp.where(logits < kth, -jnp.inf, logits)
  if top_p < 1:
    ordered = -jnp.sort(-logits, axis=-1)
    p = jax.nn.softmax(ordered, axis=-1)
    # Kept: tokens before which less than top_p of the mass lies; the first one always.
    inside = jnp.cumsum(p, axis=-1) - p < top_p
    lowest = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    logits = jnp.where(logits < lowest, -jnp.inf, logits)
  return logits


def choose(logits, key, count, temperature, *, top_k=0, top_p=1.0):
  """Samples one token per slot; temperature 0 is greedy.

  Args:
    logits: [S, V] float32.
    key: [S, 2] uint32 key data.
    count: [S] int32, folded into the key.
    temperature: [] float32 >= 0.

  Returns:
    (token [S] int32, logp [S] float32 over the whole vocabulary at the temperature, at 1 when greedy).
  """
  is_greedy = temperature == 0
  logits = logits / jnp.where(is_greedy, 1.0, temperature)

  def noise(key, count):
    return jax.random.gumbel(jax.random.fold_in(jax.random.wrap_key_data(key), count), logits.shape[1:])

  noisy = truncate(logits, top_k=top_k, top_p=top_p) + jnp.where(is_greedy, 0.0, jax.vmap(noise)(key, count))
  token = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
  logp = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
  return token, logp


def decode(params, slots: Slots, temperature, *, config, options, end_ids, num_tokens, top_k=0, top_p=1.0) -> Slots:
  """Samples up to `num_tokens` tokens in every active slot; stops early when no slot is active.

  A slot ends with the first of `end_ids` (kept as part of the response) or at its limit.
  """
  end_ids = jnp.asarray(end_ids, jnp.int32)

  def one(carry):
    step, slots = carry
    hidden, cache = qwen.decode(params, config, options, slots.token, slots.position, slots.cache)
    logits = qwen.head(params, config, hidden, options)
    token, logp = choose(logits, slots.key, slots.count, temperature, top_k=top_k, top_p=top_p)
    row = jnp.arange(token.shape[0])
    # An idle slot writes nowhere: its column is past the end and dropped.
    column = jnp.where(slots.active, slots.count, slots.tokens.shape[1])
    count = slots.count + slots.active
    ended = jnp.any(token[:, None] == end_ids[None], axis=1) | (count >= slots.limit)
    slots = slots._replace(
      cache=cache,
      token=jnp.where(slots.active, token, slots.token),
      position=slots.position + slots.active,
      count=count,
      active=slots.active & ~ended,
      tokens=slots.tokens.at[row, column].set(token, mode='drop'),
      logp=slots.logp.at[row, column].set(logp, mode='drop'),
    )
    return step + 1, slots

  def more(carry):
    return (carry[0] < num_tokens) & jnp.any(carry[1].active)

  return jax.lax.while_loop(more, one, (jnp.zeros((), jnp.int32), slots))[1]


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt waiting for its response.

  Attributes:
    id: the caller's name for it.
    prompt: [P] int32.
    seed: integers from which its random numbers come, for example (seed, step, task, attempt, turn).
    max_tokens: tokens that may be sampled.
  """

  id: Any
  prompt: np.ndarray
  seed: tuple[int, ...]
  max_tokens: int


@dataclasses.dataclass(frozen=True)
class Response:
  """What was sampled: tokens [T] int32, logp [T] float32; `is_cut` when the limit ended it."""

  id: Any
  tokens: np.ndarray
  logp: np.ndarray
  is_cut: bool


class Sampler:
  """Host side of the slots: a queue of requests, filled into free slots; owns the device state.

  Args:
    prefill, decode: jitted functions `(params, slots, tokens, length, slot, limit, key) -> slots` and
      `(params, slots, temperature) -> slots`, donating the slots.
    slots: device state.
    prefill_rows: prompts per prefill call.
    bucket: prompt lengths are padded to a multiple of this (and to at most `max_prompt`), one program each.
    end_ids: tokens that end a response.
  """

  def __init__(self, prefill: Callable, decode: Callable, slots: Slots, *, prefill_rows, bucket, max_prompt, end_ids):
    self._prefill, self._decode, self._slots = prefill, decode, slots
    self._rows, self._bucket, self._max_prompt = prefill_rows, bucket, max_prompt
    self._end_ids = frozenset(end_ids)
    self._queue: collections.deque[Request] = collections.deque()
    self._running: list[Request | None] = [None] * slots.token.shape[0]
    self._params = self._temperature = None

  @property
  def num_slots(self) -> int:
    return len(self._running)

  def use(self, params, temperature: float) -> 'Sampler':
    """Samples from these parameters at this temperature from now on; nothing may be in flight."""
    if self._queue or any(self._running):
      raise ValueError('Requests are in flight: drain the sampler before changing its parameters.')
    self._params, self._temperature = params, np.float32(temperature)
    return self

  def submit(self, request: Request) -> None:
    """Queues a request.

    Raises:
      ValueError: if the prompt is empty or too long, or more tokens are asked for than a slot holds.
    """
    if not 0 < len(request.prompt) <= self._max_prompt:
      raise ValueError(f'A prompt of {len(request.prompt)} tokens; rollout.max_prompt_tokens is {self._max_prompt}.')
    if not 0 < request.max_tokens <= self._slots.tokens.shape[1]:
      raise ValueError(f'{request.max_tokens} tokens asked for; a slot holds 1 to {self._slots.tokens.shape[1]}.')
    self._queue.append(request)

  def poll(self) -> Sequence[Response]:
    """One visit: fills free slots, decodes, and returns the responses that ended (perhaps none)."""
    while self._queue and None in self._running:
      # Short batches are held back while other slots keep the device busy.
      if len(self._queue) < self._rows and any(self._running):
        break
      self._fill()
    if not any(self._running):
      return []
    self._slots = self._decode(self._params, self._slots, self._temperature)
    active, count, tokens, logp = jax.device_get(
      (self._slots.active, self._slots.count, self._slots.tokens, self._slots.logp)
    )
    ended = []
    for slot, request in enumerate(self._running):
      if request is not None and not active[slot]:
        self._running[slot] = None
        row = tokens[slot, : count[slot]].copy()
        ended.append(Response(request.id, row, logp[slot, : count[slot]].copy(), int(row[-1]) not in self._end_ids))
    return ended

  def _fill(self) -> None:
    free = [slot for slot, request in enumerate(self._running) if request is None][: self._rows]
    batch = [self._queue.popleft() for _ in range(min(len(free), len(self._queue)))]
    longest = max(len(request.prompt) for request in batch)
    width = min(-(-longest // self._bucket) * self._bucket, self._max_prompt)
    tokens = np.zeros((self._rows, width), np.int32)
    length = np.ones(self._rows, np.int32)
    slot = np.full(self._rows, self.num_slots, np.int32)
    limit = np.zeros(self._rows, np.int32)
    key = np.zeros((self._rows, 2), np.uint32)
    for row, (request, where) in enumerate(zip(batch, free, strict=False)):
      tokens[row, : len(request.prompt)] = request.prompt
      length[row], slot[row], limit[row] = len(request.prompt), where, request.max_tokens
      # SeedSequence is stable across NumPy versions and machines.
      key[row] = np.random.SeedSequence([int(x) % 2**63 for x in request.seed]).generate_state(2, np.uint32)
      self._running[where] = request
    self._slots = self._prefill(self._params, self._slots, tokens, length, slot, limit, key)
