"""Looking back: which analyzer writes the skills, when it is asked, and which step is given which skill."""

import importlib
from collections.abc import Callable, Sequence

from opid_jax import policy as policies
from opid_jax import rollout, sampling, skills
from opid_jax.types import Skills, TrainState


def make_analyzer(config, policy, state: Callable[[], TrainState], mesh):
  """The analyzer that the config names; None when there is none.

  Args:
    state: returns the present train state; read only by the analyzer that lets the policy write the skills.
  """
  c = config.analyzer
  if c.name == 'none':
    return None
  module = importlib.import_module(f'opid_jax.analyzers.{c.name}')
  if c.name != 'policy':
    return module.make(c)
  sampler = policies.make_sampler(
    policy, state().params, mesh, config.rollout, max_prompt=c.max_prompt_tokens, max_response=c.max_reply_tokens
  )

  def generate(prompts: list[str]) -> list[str]:
    return rollout.complete(
      prompts,
      sampler.use(state().params, c.temperature),
      policy.tokenizer,
      thinking=config.model.thinking,
      seed=(config.seed, int(state().step)),
      max_tokens=c.max_reply_tokens,
      make_request=sampling.Request,
    )

  def count(prompt: str) -> int:
    return len(policy.tokenizer.chat([('user', prompt)], thinking=config.model.thinking))

  return module.make(c, generate=generate, count=count)


def uses_skills(config, algorithm, step: int) -> bool:
  """Whether hindsight can change this step's update; nobody is asked (or paid) otherwise."""
  a = config.algorithm
  in_time = skills.is_on(step, start_step=a.start_step, stop_step=a.stop_step)
  return algorithm.teacher == 'hindsight' and in_time and (a.episode_weight > 0 or a.step_weight > 0)


def route(config, trajectories, found: Sequence[Skills]) -> list[tuple]:
  """Per environment step its hints, in the order of the batch."""
  a = config.algorithm
  return [
    hint
    for trajectory, own in zip(trajectories, found, strict=True)
    for hint in skills.route(
      trajectory, own, routing=a.routing, episode_weight=a.episode_weight, step_weight=a.step_weight
    )
  ]


def skill_metrics(pending, hints) -> dict[str, float]:
  """How many steps were scored with which skill, and what the analyzer counted."""
  if pending is None:
    return {}
  return {
    **{f'skills/{kind}_steps': count for kind, count in skills.counts(hints).items()},
    **{f'analyzer/{name}': count for name, count in sorted(pending.counts.items())},
  }
