"""Trajectories of a few words, for tests of whatever looks back at them."""

import numpy as np

from opid_jax.types import Prompt, Step, Task, Trajectory

_NOTHING = np.zeros(1, np.int32)
_PROMPT = Prompt(head='', history_intro='', history=(), observation='', actions='', turn='')


def step(observation: str, action: str, *, reward: float = 0.0, valid: bool = True, response: str = ''):
  return Step(
    prompt=_PROMPT, prompt_tokens=_NOTHING, response_tokens=_NOTHING, logp_sampled=np.zeros(1, np.float32),
    observation=observation, response=response or f'<action>{action}</action>', action=action, valid=valid,
    reward=reward)


def attempt(turns, *, number: int = 0, group: str = 'g', won: bool = False, score: float | None = None,
            task: str = 'buy a red shirt') -> Trajectory:
  """`turns`: (observation, action) pairs or steps; a win adds reward 10 to the last one."""
  steps = [turn if isinstance(turn, Step) else step(*turn) for turn in turns]
  if won:
    steps[-1] = step(steps[-1].observation, steps[-1].action, reward=10.0)
  return Trajectory(
    task=Task(id=group, index=0, text=task), group=group, attempt=number, steps=tuple(steps), success=won,
    score=float(won) if score is None else score)
