"""Plays a fixed panel of tasks with the policy alone: no analyzer, no skills.

python -m opid_jax.evaluate --config=configs/webshop.py --checkpoint=runs/NAME/checkpoints/20
python -m opid_jax.evaluate --config=configs/webshop.py            (the policy before training)
"""

import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax

from opid_jax import checkpoint, envs, flags, metrics, policy, rollout, samples, sampling, settings, sharding
from opid_jax.types import Task, Trajectory

SPLITS = ('heldout', 'train')


class Result(NamedTuple):
  """One panel played once.

  Attributes:
    trajectories: one per task, in the panel's order.
    success_rate, score: means over the tasks.
    success_interval: Wilson interval, 95 %.
    score_interval: normal interval of the mean, 95 %.
  """

  trajectories: list[Trajectory]
  success_rate: float
  success_interval: tuple[float, float]
  score: float
  score_interval: tuple[float, float]

  def row(self, prefix: str) -> dict[str, float]:
    """Metrics with their counts, names prefixed."""
    steps = [step for trajectory in self.trajectories for step in trajectory.steps]
    n = len(self.trajectories)
    return {
      f'{prefix}/success_rate': self.success_rate,
      f'{prefix}/success_low': self.success_interval[0],
      f'{prefix}/success_high': self.success_interval[1],
      f'{prefix}/num_success': sum(t.success for t in self.trajectories),
      f'{prefix}/score': self.score,
      f'{prefix}/score_low': self.score_interval[0],
      f'{prefix}/score_high': self.score_interval[1],
      f'{prefix}/num_tasks': n,
      f'{prefix}/turns': len(steps) / n,
      f'{prefix}/valid_action_rate': sum(step.valid for step in steps) / len(steps),
      f'{prefix}/truncated_rate': sum(t.is_truncated for t in self.trajectories) / n,
    }


def play_panel(env, tasks: Sequence[Task], sampler, params, tokenizer, limits, *, temperature, seed, on_done) -> Result:
  """Plays each task once. The panel, the seeds and so the result do not depend on the number of slots."""
  attempts = [rollout.Attempt(task, task.id, 0) for task in tasks]
  # Step -1 cannot collide with a training step: every evaluation of a run uses the same random numbers, so two
  # policies are compared under common ones.
  trajectories = rollout.play(
    env,
    attempts,
    sampler.use(params, temperature),
    tokenizer,
    limits,
    seed=(seed, -1),
    make_request=sampling.Request,
    on_done=on_done,
  )
  successes, scores = [t.success for t in trajectories], [t.score for t in trajectories]
  return Result(
    trajectories,
    sum(successes) / len(tasks),
    metrics.wilson(sum(successes), len(tasks)),
    sum(scores) / len(tasks),
    metrics.mean_interval(scores),
  )


def temperature(config) -> float:
  return 0.0 if config.evaluate.greedy else config.evaluate.temperature


def limits(config) -> rollout.Limits:
  """Token limits of the config."""
  r = config.rollout
  return rollout.Limits(
    r.max_prompt_tokens,
    r.max_skill_tokens,
    r.max_response_tokens,
    r.max_episode_tokens,
    r.prompt_style,
    config.model.thinking,
  )


def main(argv: Sequence[str]) -> None:
  options = {
    'checkpoint': flags.Option('', 'checkpoint folder, RUN/checkpoints/STEP; empty: the policy before training'),
    'split': flags.Option('heldout', f'panel to play: {", ".join(SPLITS)}'),
    'output': flags.Option('', 'file for the result and every trajectory (JSON lines); empty: print only'),
  }
  config, option = flags.read_or_exit(argv, options, __doc__)
  mesh = sharding.make_mesh(jax.devices(), **config.mesh)
  settings.validate(config, num_devices=mesh.size)
  env = envs.make(config.env, seed=config.seed)
  tasks = env.panel(option['split'], config.evaluate.num_tasks)
  agent = policy.describe(config, mesh)
  if option['checkpoint']:
    params = checkpoint.restore_params(option['checkpoint'], policy.shapes(agent, mesh))
  else:
    params = policy.load_params(agent, mesh)
  r = config.rollout
  sampler = policy.make_sampler(
    agent, params, mesh, r, max_prompt=r.max_prompt_tokens, max_response=r.max_response_tokens
  )
  with metrics.Progress('evaluate', len(tasks)) as progress:
    result = play_panel(
      env,
      tasks,
      sampler,
      params,
      agent.tokenizer,
      limits(config),
      temperature=temperature(config),
      seed=config.seed,
      on_done=lambda trajectory: progress.episode(trajectory.success),
    )
  row = result.row('eval')
  print(metrics.table([('policy', option['checkpoint'] or agent.folder), *row.items()]))
  if option['output']:
    with open(option['output'], 'w', encoding='utf-8') as file:
      file.write(json.dumps({**row, 'env': env.describe()}) + '\n')
      file.writelines(json.dumps(samples.to_json(t, None), ensure_ascii=False) + '\n' for t in result.trajectories)


if __name__ == '__main__':
  main(sys.argv)
