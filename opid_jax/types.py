"""The vocabulary: what flows between the environments, the analyzer and the learner.

Text side: frozen dataclasses. Array side: pytrees (`NamedTuple`s). Axis letters, used everywhere:

  C contexts (0 is the history the policy acted on)   N environment steps   T response tokens
  R packed rows   L tokens of a row   K scored slots of a row   G attempts at one task
  B batch   S cache slots   V vocabulary   D width   H query heads   h key/value heads

Log-probabilities are natural logarithms (nats) at the sampling temperature.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing to do in an environment.

    Attributes:
      id: name that is the same on every machine, for example `'train/0017'`.
      index: number of the task in its split; random numbers are derived from it.
      text: the task sentence that the policy reads.
      data: what the environment needs to start it; opaque to everybody else.
    """

    id: str
    index: int
    text: str
    data: Any = None


@dataclasses.dataclass(frozen=True)
class State:
    """An environment between two actions: a value, so an episode can be copied or replayed.

    Attributes:
      task: the task being attempted.
      observation: raw text of the current page; the analyzer and anchor grouping read it.
      actions: admissible actions as the policy would write them.
      history: (observation, action) of the turns so far, oldest first.
      turn: number of actions taken.
      action: what the last response was projected to ('' before the first).
      valid: whether the last response held an action that the environment can execute.
      reward: reward of the last action, environment units (10 = success in WebShop).
      is_done: the episode is over; it must not be stepped again.
      success: the task was solved. Meaningful when `is_done`.
      score: task score in [0, 1]. Meaningful when `is_done`.
      inner: the environment's own state; opaque to everybody else.
    """

    task: Task
    observation: str
    actions: tuple[str, ...]
    history: tuple[tuple[str, str], ...] = ()
    turn: int = 0
    action: str = ''
    valid: bool = True
    reward: float = 0.0
    is_done: bool = False
    success: bool = False
    score: float = 0.0
    inner: Any = None


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What the policy reads at one step, in slots: a skill goes in by structure, never by searching text.

    Rendered in this order (see `prompts.render`), the slots that are not empty separated by a line break:
    head, [episode skill], history, observation, actions, [step skill], turn.

    Attributes:
      head: role sentence and task line. Never shortened.
      history: introduction line followed by records, oldest first; dropped oldest first when too long.
      observation: the current page. Shortened when dropping the history does not suffice.
      actions: the admissible actions, one text.
      turn: the turn anchor and the instructions how to answer. Never shortened.
    """

    head: str
    history_intro: str
    history: tuple[str, ...]
    observation: str
    actions: str
    turn: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One turn of a trajectory: tokens in, tokens out; nothing is ever tokenised again.

    Attributes:
      prompt: the prompt in slots, as it was after fitting it to the token budget.
      prompt_tokens: [P] int32.
      response_tokens: [T] int32, the end-of-turn token included unless the response was cut.
      logp_sampled: [T] float32, nats, as the sampler saw them.
      observation: raw observation the policy acted on.
      response: decoded response.
      action: projected action.
      valid: the action could be executed.
      reward: environment reward of this action.
      is_cut: the response hit the length limit.
      is_shortened: the prompt had to be shortened.
    """

    prompt: Prompt
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    logp_sampled: np.ndarray
    observation: str
    response: str
    action: str
    valid: bool
    reward: float
    is_cut: bool = False
    is_shortened: bool = False


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One finished attempt at a task.

    Attributes:
      task: the task.
      group: id shared by the attempts at the same task in the same training step, unique across hosts.
      attempt: number of the attempt within the group, 0-based.
      steps: at least one.
      success: the task was solved.
      score: task score in [0, 1].
      is_truncated: ended by the turn limit, not by the environment.
    """

    task: Task
    group: str
    attempt: int
    steps: tuple[Step, ...]
    success: bool
    score: float
    is_truncated: bool = False

    @property
    def total_reward(self) -> float:
        """Undiscounted sum of the environment rewards."""
        return float(sum(step.reward for step in self.steps))


@dataclasses.dataclass(frozen=True)
class Skills:
    """Hindsight about one trajectory, or the reason there is none.

    Attributes:
      episode: one skill for the whole episode; '' when there is none.
      steps: skills of critical steps, by 0-based step index.
      summary: short summary of the episode.
      reason: '' when the skills are usable, else why there are none, one short word such as
        'timeout', 'truncated', 'invalid_json' (a metric is named after it).
    """

    episode: str = ''
    steps: Mapping[int, str] = dataclasses.field(default_factory=dict)
    summary: str = ''
    reason: str = ''

    @property
    def usable(self) -> bool:
        return not self.reason


class Packed(NamedTuple):
    """Rows of a fixed token budget: a depth-first walk of a prefix tree over the sequences.

    Query column q sees key column k iff `k <= q < visible_to[k]`. Padding is a node nobody sees.

    Attributes:
      tokens: [R, L] int32.
      positions: [R, L] int32, depth of the token in its own sequence (its RoPE position).
      visible_to: [R, L] int32, last column, exclusive, that may attend to this token.
      score_at: [R, K] int32, columns whose hidden state predicts a scored response token.
      target: [R, K] int32, that token.
      is_scored: [R, K] float32, 1 where the slot is used, 0 where it is padding.
    """

    tokens: Any
    positions: Any
    visible_to: Any
    score_at: Any
    target: Any
    is_scored: Any


class TrainState(NamedTuple):
    """Everything the jitted update reads and writes.

    Attributes:
      step: [] int32, finished training steps (not minibatches).
      params: float32 master weights.
      opt_state: optax state.
    """

    step: Any
    params: Any
    opt_state: Any
