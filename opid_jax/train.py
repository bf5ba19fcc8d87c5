"""Trains a policy in a text environment: OPID, or an algorithm it is compared with.

python -m opid_jax.train --config=configs/webshop.py [--workdir=runs/NAME] [--config.FIELD=VALUE ...]

The same command continues an interrupted run from its last checkpoint.
"""

import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opid_jax import (
  checkpoint,
  envs,
  evaluate,
  flags,
  hindsight,
  learner,
  metrics,
  optimizer,
  passes,
  rollout,
  runfolder,
  sampling,
  settings,
  sharding,
  skills,
)
from opid_jax import policy as policies
from opid_jax.algorithms import ALGORITHMS, AdvantageSettings, Evidence
from opid_jax.batch import Batch, gap_metrics, rollout_metrics
from opid_jax.interrupt import Interrupted, StopSignal
from opid_jax.passes import Programs
from opid_jax.types import Skills, TrainState, Trajectory

OPTIONS = {'workdir': flags.Option('', 'run folder; empty: runs/<config>-<algorithm>-seed<seed>')}


def make_programs(config, policy: policies.Policy, shapes: TrainState, mesh) -> Programs:
  """Jits everything that a training step runs, with donation and shardings in view.

  Args:
    shapes: from `state_shapes`; nothing is allocated, so a mesh of absent devices will do.
  """
  state = jax.tree.map(lambda leaf: leaf.sharding, shapes)
  params = state.params
  rows, scalar = sharding.rows(mesh), sharding.replicated(mesh)
  model: dict[str, Any] = {'config': policy.config, 'options': policy.options}
  rate = functools.partial(learning_rate, config)
  loss_fn = functools.partial(learner.loss, **model, settings=loss_settings(config))
  score = jax.jit(
    functools.partial(
      learner.score, **model, temperature=config.rollout.temperature, head_chunk=config.learner.head_chunk
    ),
    in_shardings=(params, rows),
    out_shardings=rows,
  )
  zero = jax.jit(
    lambda params: (jax.tree.map(jnp.zeros_like, params), learner.Sums.zeros()),
    in_shardings=(params,),
    out_shardings=(params, scalar),
  )
  accumulate = jax.jit(
    functools.partial(learner.accumulate, loss_fn=loss_fn),
    in_shardings=(params, params, scalar, rows, rows),
    out_shardings=(params, scalar),
    donate_argnums=(1, 2),
  )
  apply = jax.jit(
    functools.partial(learner.apply, transform=make_transform(config), learning_rate=rate),
    in_shardings=(state, params, scalar),
    out_shardings=(state, scalar),
    donate_argnums=(0,),  # The new state takes the old one's memory; there is nothing left to give the gradient's to.
  )
  return Programs(score, zero, accumulate, apply)


def loss_settings(config) -> learner.LossSettings:
  c = config.loss
  return learner.LossSettings(
    c.clip_low,
    c.clip_high,
    c.dual_clip,
    c.kl,
    c.kl_coef,
    c.entropy_coef,
    config.rollout.temperature,
    config.learner.head_chunk,
  )


def make_transform(config):
  o = config.optimizer
  return optimizer.make(b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, clip_norm=o.clip_norm)


def state_shapes(config, params, mesh) -> TrainState:
  """The train state as `ShapeDtypeStruct`s with their shardings, from parameters or their shapes."""

  def place(tree):
    return jax.tree.map(
      lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
      tree,
      sharding.shard_tree(tree, mesh),
    )

  step = jax.ShapeDtypeStruct((), jnp.int32)
  return place(TrainState(step, params, jax.eval_shape(make_transform(config).init, params)))


def init_state(config, params, mesh) -> TrainState:
  """A fresh optimizer beside `params`, sharded like them."""
  where = jax.tree.map(lambda leaf: leaf.sharding, state_shapes(config, params, mesh))
  opt_state = jax.jit(make_transform(config).init, out_shardings=where.opt_state)(params)
  return TrainState(jax.device_put(jnp.zeros((), jnp.int32), where.step), params, opt_state)


def copy_reference(config, params, mesh):
  """The frozen reference policy: a copy, because donating the train state would delete an alias."""
  dtype = jnp.dtype(config.model.reference_dtype)
  where = sharding.shard_tree(params, mesh)
  return jax.jit(
    lambda tree: jax.tree.map(lambda x: jnp.copy(x).astype(dtype), tree), out_shardings=where
  )(params)


def train(config, workdir: str) -> dict[str, float]:
  """OPID, Algorithm 1 (https://arxiv.org/abs/2606.26790); the last evaluation's metrics.

  Raises:
    ValueError: if the config contradicts itself or the devices.
    OSError: when the run folder cannot be written, or the disk is full.
    FloatingPointError: when a gradient is not finite, with the step and the last good checkpoint.
    RuntimeError: when the analyzer fails for more than the configured share of trajectories; the finished steps
      are saved.
    Interrupted: after SIGTERM, once the last finished step is saved.
  """
  mesh = sharding.make_mesh(jax.devices(), **config.mesh)
  settings.validate(config, num_devices=mesh.size)
  folder = runfolder.make(workdir)
  algorithm = ALGORITHMS[config.algorithm.name]
  r = config.rollout
  env = envs.make(config.env, seed=config.seed)
  panel = env.panel('heldout', config.evaluate.num_tasks)
  limits = evaluate.limits(config)

  policy = policies.describe(config, mesh)
  shapes = state_shapes(config, policies.shapes(policy, mesh), mesh)
  c = config.checkpoint
  checkpoints = checkpoint.open(
    folder / 'checkpoints', keep=c.keep, every=c.every, on_full_disk=c.on_full_disk, like=shapes
  )
  last = checkpoints.latest()
  if last is not None:
    # Before anything of the folder is touched: it may be another run's.
    runfolder.check_same_run(checkpoint.read_host(folder / 'checkpoints' / str(last)), config, env.describe())
  runfolder.write_config(folder, config, env.describe())
  # The reference is always the policy before training, also when a run goes on.
  params = policies.load_params(policy, mesh) if last is None or config.loss.kl_coef else None
  reference = copy_reference(config, params, mesh) if config.loss.kl_coef else None
  state = init_state(config, params, mesh) if last is None else checkpoints.restore(last, shapes)[0]
  del params  # The update donates the state: the name must not outlive it.
  programs = make_programs(config, policy, shapes, mesh)
  sampler = policies.make_sampler(
    policy, shapes.params, mesh, r, max_prompt=r.max_prompt_tokens, max_response=r.max_response_tokens
  )
  analyzer = hindsight.make_analyzer(config, policy, lambda: state, mesh)
  writer = metrics.Writer(
    folder,
    resume_step=-1 if last is None else last,
    tensorboard=config.log.tensorboard,
    wandb_project=config.log.wandb_project if config.log.wandb else '',
    config=settings.flatten(config),
  )
  progress = metrics.Progress(
    'train', r.tasks_per_step * r.group_size, num_steps=config.num_steps, done=int(state.step)
  )
  progress.say(runfolder.headline(config, policy, env.describe(), folder, last))

  evaluated = {row['step'] for row in metrics.read(writer.path) if 'eval/success_rate' in row}

  def play_panel(step: int) -> None:
    # A row of its own: a run that was stopped between an update and its evaluation makes it up when it goes on.
    if step in evaluated or not evaluation_is_due(config, step):
      return
    progress.doing('evaluating')
    begin = time.monotonic()
    result = evaluate.play_panel(
      env,
      panel,
      sampler,
      state.params,
      policy.tokenizer,
      limits,
      temperature=evaluate.temperature(config),
      seed=config.seed,
      on_done=lambda trajectory: stop.check(),
    )
    progress.say(f'step {step}: held-out success {100 * result.success_rate:.1f}%, score {100 * result.score:.1f}')
    writer.write(step, {**result.row('eval'), 'time/evaluate_s': time.monotonic() - begin})

  def save(step: int) -> None:
    writer.flush()
    checkpoints.save(step, state, runfolder.host_state(config, env.describe(), step))

  def save_finished() -> None:
    # Acting, scoring and waiting leave the state alone, so it is whole there, and its row is written.
    if int(state.step):
      save(int(state.step))

  stop = StopSignal()
  try:
    play_panel(int(state.step))
    for step in range(int(state.step), config.num_steps):
      begin = time.monotonic()
      # Act: G attempts at every task under pi_old.
      progress.doing('acting')
      trajectories = act(config, env, sampler.use(state.params, r.temperature), policy, limits, step, progress, stop)
      acted = time.monotonic()
      # Look back: the analyzer turns each finished trajectory into skills (host, while the device scores below).
      progress.doing('looking back')
      pending = analyzer.submit(trajectories) if hindsight.uses_skills(config, algorithm, step) else None
      batch = Batch.of(trajectories)
      logp_old, entropy = passes.score(programs, state.params, batch.sequences, batch.width, config, mesh)
      logp_ref = np.zeros_like(logp_old)
      if reference is not None:
        logp_ref, _ = passes.score(programs, reference, batch.sequences, batch.width, config, mesh)
      # Route: a critical step gets its own skill, any other step the episode's.
      try:
        with stop.at_once():
          found = pending.result() if pending else [Skills(reason='not_asked')] * len(trajectories)
      except RuntimeError:
        # The analyzer gave up. Its trouble must not cost the steps since the last checkpoint.
        save_finished()
        raise
      hints = hindsight.route(config, trajectories, found)
      contexts = skills.contexts(hints, routing=config.algorithm.routing)
      # Re-score: pi_old reads the same response with the skill.
      logp_skill = passes.score_contexts(programs, state.params, batch, contexts, policy, limits, config, mesh)
      stop.check()
      # Credit: outcome advantage plus what the skill would have said, token by token.
      evidence = Evidence(
        logp=np.stack([logp_old, *logp_skill]),
        mask=batch.mask,
        score=batch.score,
        valid=batch.valid,
        group=batch.group,
        trajectory=batch.trajectory,
        weight=skills.weights(contexts),
      )
      advantage, credit = algorithm.advantage(evidence, advantage_settings(config))
      scored = time.monotonic()
      # Improve: clipped policy gradient, kept near the reference by a KL term.
      progress.doing('learning')
      state, learned = passes.improve(programs, state, batch, logp_old, logp_ref, advantage, config, mesh)
      if not np.isfinite(learned['update/grad_norm']):
        good = checkpoints.latest()
        raise FloatingPointError(
          f'The gradient is not finite in training step {step + 1} (norm {learned["update/grad_norm"]}); '
          f'last good checkpoint: {"none yet" if good is None else folder / "checkpoints" / str(good)}.'
        )
      state = state._replace(step=state.step + 1)
      done = step + 1
      row = {
        **rollout_metrics(trajectories),
        **gap_metrics(trajectories, batch, logp_old, config.loss.clip_low, config.loss.clip_high),
        **credit,
        **learned,
        'policy/entropy': float((entropy * batch.mask).sum() / batch.mask.sum()),
        'optimizer/learning_rate': float(learning_rate(config, step)),
        **hindsight.skill_metrics(pending, hints),
        'time/act_s': acted - begin,
        'time/score_s': scored - acted,
        'time/learn_s': time.monotonic() - scored,
      }
      runfolder.write_samples(folder, done, trajectories, found, hints, config.log.samples)
      writer.write(done, row)
      progress.step(f'reward {row["train/reward"]:.2f}')
      if done == config.num_steps or checkpoints.is_due(done):
        save(done)
      play_panel(done)
      stop.check()
  except Interrupted:
    save_finished()
    raise
  finally:
    stop.restore()
    progress.close()
    writer.close()
    checkpoints.close()  # Last: it waits for the disk, and may find it full.
  return runfolder.finish(folder, config)


def act(config, env, sampler, policy, limits, step, progress, stop) -> list[Trajectory]:
  """G attempts at each task of the step."""
  r = config.rollout
  attempts = [
    rollout.Attempt(task, f'{step}/{number}', attempt)
    for number, task in enumerate(env.tasks(step, r.tasks_per_step))
    for attempt in range(r.group_size)
  ]

  def on_done(trajectory):
    progress.episode(trajectory.success)
    stop.check()

  return rollout.play(
    env,
    attempts,
    sampler,
    policy.tokenizer,
    limits,
    seed=(config.seed, step),
    make_request=sampling.Request,
    on_done=on_done,
  )


def advantage_settings(config) -> AdvantageSettings:
  a = config.algorithm
  return AdvantageSettings(a.norm, a.stats, a.invalid_penalty, a.penalty, a.center, a.rms, a.shift_clip)


def learning_rate(config, step):
  """[] float32 rate of a training step, which may be traced."""
  o = config.optimizer
  return optimizer.learning_rate(
    step,
    peak=o.learning_rate,
    warmup_steps=o.warmup_steps,
    schedule=o.schedule,
    total_steps=config.num_steps,
  )


def evaluation_is_due(config, step: int) -> bool:
  """Whether the held-out panel is played after `step` finished training steps."""
  e = config.evaluate
  if step in (0, config.num_steps):
    return step > 0 or e.before
  return e.every > 0 and step % e.every == 0


def main(argv: Sequence[str]) -> None:
  config, option = flags.read_or_exit(argv, OPTIONS, __doc__)
  runfolder.set_compile_cache(config.compile_cache)
  workdir = option['workdir'] or runfolder.default_name(argv, config)
  try:
    train(config, workdir)
  except Interrupted as reason:
    sys.exit(f'{reason}: finished steps are saved; the same command continues the run in {Path(workdir)}.')
  except (OSError, FloatingPointError) as error:
    sys.exit(f'train: {error}')


if __name__ == '__main__':
  main(sys.argv)
