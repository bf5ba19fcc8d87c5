"""The trajectories of one training step as arrays, and what they say about the rollouts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from opid_jax import layout, losses
from opid_jax.types import Trajectory


class Batch(NamedTuple):
  """The environment steps of a training step as arrays; N steps, T the longest response.

  Attributes:
    sequences: (prompt, response) token ids per step.
    prompts: fitted prompts, for the skill contexts.
    width: T.
    mask: [N, T] float32, 1 on response tokens.
    score: [N] float32, total reward of the step's trajectory.
    valid: [N] bool.
    group, trajectory: [N] int32.
  """

  sequences: list
  prompts: list
  width: int
  mask: np.ndarray
  score: np.ndarray
  valid: np.ndarray
  group: np.ndarray
  trajectory: np.ndarray

  @classmethod
  def of(cls, trajectories: Sequence[Trajectory]) -> 'Batch':
    groups = {name: i for i, name in enumerate(dict.fromkeys(t.group for t in trajectories))}
    rows = [(i, t, step) for i, t in enumerate(trajectories) for step in t.steps]
    responses = [step.response_tokens for _, _, step in rows]
    width = max(len(x) for x in responses)
    return cls(
      sequences=[(step.prompt_tokens, step.response_tokens) for _, _, step in rows],
      prompts=[step.prompt for _, _, step in rows],
      width=width,
      mask=layout.stack_responses([np.ones(len(x)) for x in responses], width, np.float32),
      score=np.asarray([t.total_reward for _, t, _ in rows], np.float32),
      valid=np.asarray([step.valid for _, _, step in rows]),
      group=np.asarray([groups[t.group] for _, t, _ in rows], np.int32),
      trajectory=np.asarray([i for i, _, _ in rows], np.int32),
    )


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  steps = [step for trajectory in trajectories for step in trajectory.steps]
  n = len(trajectories)
  return {
    'train/success_rate': sum(t.success for t in trajectories) / n,
    'train/score': sum(t.score for t in trajectories) / n,
    'train/reward': sum(t.total_reward for t in trajectories) / n,
    'train/episodes': n,
    'train/turns': len(steps) / n,
    'train/truncated_episodes': sum(t.is_truncated for t in trajectories),
    'train/invalid_action_rate': sum(not step.valid for step in steps) / len(steps),
    'train/cut_responses': sum(step.is_cut for step in steps),
    'train/shortened_prompts': sum(step.is_shortened for step in steps),
    'train/prompt_tokens': sum(len(step.prompt_tokens) for step in steps) / len(steps),
    'train/response_tokens': sum(len(step.response_tokens) for step in steps) / len(steps),
  }


def gap_metrics(trajectories, batch: Batch, logp_old, clip_low: float, clip_high: float) -> dict[str, float]:
  """How far the sampler's log-probabilities are from the trainer's (`losses.score_gap`)."""
  sampled = layout.stack_responses(
    [step.logp_sampled for t in trajectories for step in t.steps], batch.width, np.float32
  )
  gap = losses.score_gap(logp_old, sampled, batch.mask, clip_low=clip_low, clip_high=clip_high)
  return {f'gap/{name}': value for name, value in gap.items()}
