"""Episodes in many environments, kept in flight over one sampler. Text side: no JAX here.

There is no barrier between turns: as soon as a response ends, its environment acts and its next prompt queues up;
as soon as an episode ends, the next one starts.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from opid_jax import prompts
from opid_jax.envs.base import TextEnv
from opid_jax.types import Prompt, State, Step, Task, Trajectory


class Limits(NamedTuple):
  """Token limits and the form of a prompt.

  Attributes:
    max_prompt_tokens: whole prompt, chat template included.
    max_skill_tokens: a skill is cut to this; comes on top of the prompt when a context is re-scored.
    max_response_tokens: one turn.
    max_episode_tokens: all turns together, 0 for no limit; the last turn is shortened and flagged as cut.
    style: how skills are worded, 'full' or 'brief' (`prompts.render`).
    thinking: thinking switch of the chat template; None leaves it to the template.
  """

  max_prompt_tokens: int
  max_skill_tokens: int
  max_response_tokens: int
  max_episode_tokens: int
  style: str
  thinking: bool | None


class Sampling(Protocol):
  """What `play` needs of `sampling.Sampler`."""

  num_slots: int

  def submit(self, request) -> None: ...

  def poll(self) -> Sequence[Any]: ...


class Attempt(NamedTuple):
  """One episode to play: a task, the group it belongs to, and the number of the attempt."""

  task: Task
  group: str
  attempt: int


@dataclasses.dataclass
class _Episode:
  attempt: Attempt
  state: State
  steps: list[Step]
  asked: tuple[Prompt, np.ndarray, bool] | None = None  # Fitted prompt, its tokens, whether it was shortened.
  used_tokens: int = 0


def tokenize(prompt: Prompt, tokenizer, limits: Limits, *, episode_skill='', step_skill='') -> np.ndarray:
  """The one way from a prompt to ids: acting, re-scoring and evaluation all come through here. [P] int32."""
  text = prompts.render(prompt, episode_skill=episode_skill, step_skill=step_skill, style=limits.style)
  return np.asarray(tokenizer.chat([('user', text)], thinking=limits.thinking), np.int32)


def fit(prompt: Prompt, tokenizer, limits: Limits) -> tuple[Prompt, np.ndarray, bool]:
  """Shortens a prompt until its ids fit `max_prompt_tokens`; returns (prompt, ids, whether it was shortened)."""

  def count(text: str) -> int:
    return len(tokenizer.chat([('user', text)], thinking=limits.thinking))

  tokens = tokenize(prompt, tokenizer, limits)
  if len(tokens) <= limits.max_prompt_tokens:
    return prompt, tokens, False
  fitted, shortened = prompts.fit(prompt, count, max_tokens=limits.max_prompt_tokens, style=limits.style)
  return fitted, tokenize(fitted, tokenizer, limits), shortened


def clip_skill(text: str, kind: str, tokenizer, limits: Limits) -> str:
  """A skill cut to `max_skill_tokens`, what it adds to the prompt included."""
  return prompts.clip_skill(
    text,
    lambda piece: len(tokenizer.encode(piece)),
    max_tokens=limits.max_skill_tokens,
    kind=kind,
    style=limits.style,
  )


def complete(
  texts: Sequence[str], sampler: Sampling, tokenizer, *, thinking, seed: tuple[int, ...], max_tokens, make_request
) -> list[str]:
  """Plain replies of the policy to user messages, in order: how it analyzes its own attempts.

  Raises:
    ValueError: if a message is longer than the sampler's prompts, naming the fields to change.
  """
  for index, text in enumerate(texts):
    prompt = np.asarray(tokenizer.chat([('user', text)], thinking=thinking), np.int32)
    sampler.submit(make_request(id=index, prompt=prompt, seed=(*seed, index), max_tokens=max_tokens))
  replies = {}
  while len(replies) < len(texts):
    for response in sampler.poll():
      replies[response.id] = tokenizer.decode(response.tokens.tolist(), skip_special=True)
  return [replies[index] for index in range(len(texts))]


def play(
  env: TextEnv,
  attempts: Sequence[Attempt],
  sampler: Sampling,
  tokenizer,
  limits: Limits,
  *,
  seed: tuple[int, int],
  make_request: Callable,
  on_done: Callable[[Trajectory], None] = lambda trajectory: None,
) -> list[Trajectory]:
  """Plays every attempt to its end.

  The random numbers of a response come from (seed, step, task, attempt, turn), so a trajectory does not depend
  on what else is in flight.

  Args:
    sampler: anything with `num_slots`, `submit` and `poll`.
    seed: (run seed, training step).
    make_request: `sampling.Request`, handed in because this side imports no JAX.
    on_done: called with each trajectory as it ends, for progress.

  Returns:
    Trajectories in the order of `attempts`.
  """
  results: list[Trajectory | None] = [None] * len(attempts)
  flying: dict[int, _Episode] = {}
  waiting = iter(range(len(attempts)))

  def ask(index: int) -> None:
    episode = flying[index]
    episode.asked = fit(env.prompt(episode.state), tokenizer, limits)
    task, _, attempt = episode.attempt
    room = limits.max_response_tokens
    if limits.max_episode_tokens:
      room = min(room, limits.max_episode_tokens - episode.used_tokens)
    words = (*seed, zlib.crc32(task.id.encode()), attempt, episode.state.turn)
    sampler.submit(make_request(id=index, prompt=episode.asked[1], seed=words, max_tokens=room))

  def start() -> None:
    index = next(waiting, None)
    if index is not None:
      flying[index] = _Episode(attempts[index], env.reset(attempts[index].task), [])
      ask(index)

  for _ in range(sampler.num_slots):
    start()
  while flying:
    for response in sampler.poll():
      episode = flying[response.id]
      _advance(env, episode, response, tokenizer)
      spent = limits.max_episode_tokens and episode.used_tokens >= limits.max_episode_tokens
      if not (episode.state.is_done or episode.state.turn >= env.max_turns or spent):
        ask(response.id)
        continue
      results[response.id] = _finish(flying.pop(response.id))
      on_done(results[response.id])
      start()
  return results


def _advance(env: TextEnv, episode: _Episode, response, tokenizer) -> None:
  """Acts in the environment with a response and records the step."""
  prompt, prompt_tokens, is_shortened = episode.asked
  text = tokenizer.decode(response.tokens.tolist(), skip_special=True)
  before, episode.state = episode.state, env.step(episode.state, text)
  episode.used_tokens += len(response.tokens)
  episode.steps.append(
    Step(
      prompt=prompt,
      prompt_tokens=prompt_tokens,
      response_tokens=response.tokens,
      logp_sampled=response.logp,
      observation=before.observation,
      response=text,
      action=episode.state.action,
      valid=episode.state.valid,
      reward=episode.state.reward,
      is_cut=response.is_cut,
      is_shortened=is_shortened,
    )
  )


def _finish(episode: _Episode) -> Trajectory:
  state = episode.state
  return Trajectory(
    task=episode.attempt.task,
    group=episode.attempt.group,
    attempt=episode.attempt.attempt,
    steps=tuple(episode.steps),
    success=state.is_done and state.success,
    score=state.score if state.is_done else 0.0,
    is_truncated=not state.is_done,
  )
