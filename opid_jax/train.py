"""Trains a policy in a text environment: OPID, or an algorithm it is compared with.

python -m opid_jax.train --config=configs/webshop.py [--workdir=runs/NAME] [--config.FIELD=VALUE ...]

The same command continues an interrupted run from its last checkpoint.
"""

import functools
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opid_jax import (
  checkpoint,
  envs,
  evaluate,
  flags,
  layout,
  learner,
  losses,
  metrics,
  optimizer,
  rollout,
  runfolder,
  sampling,
  settings,
  sharding,
  skills,
)
from opid_jax import (
  policy as policies,
)
from opid_jax.algorithms import ALGORITHMS, AdvantageSettings, Evidence
from opid_jax.batch import Batch, gap_metrics, rollout_metrics
from opid_jax.interrupt import Interrupted, StopSignal
from opid_jax.types import Packed, Skills, TrainState, Trajectory

OPTIONS = {'workdir': flags.Option('', 'run folder; empty: runs/<config>-<algorithm>-seed<seed>')}


class Programs(NamedTuple):
  """The compiled side of a training step; see `learner` for what each does."""

  score: Callable
  zero: Callable
  accumulate: Callable
  apply: Callable


def make_programs(config, policy: policies.Policy, state_shapes: TrainState, mesh) -> Programs:
  """Jits everything that a training step runs, with donation and shardings in view.

  Args:
    state_shapes: arrays or `ShapeDtypeStruct`s; only shapes are read, so a mesh of absent devices will do.
  """
  params = sharding.shard_tree(state_shapes.params, mesh)
  state = TrainState(sharding.replicated(mesh), params, sharding.shard_tree(state_shapes.opt_state, mesh))
  rows, scalar = sharding.rows(mesh), sharding.replicated(mesh)
  model: dict[str, Any] = {'config': policy.config, 'options': policy.options}
  o = config.optimizer
  transform = optimizer.make(
    b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, clip_norm=o.clip_norm
  )
  rate = functools.partial(
    optimizer.learning_rate,
    peak=o.learning_rate,
    warmup_steps=o.warmup_steps,
    schedule=o.schedule,
    total_steps=config.num_steps,
  )
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
    functools.partial(learner.apply, transform=transform, learning_rate=rate),
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


def init_state(config, params, mesh) -> TrainState:
  """A fresh optimizer beside `params`, sharded like them."""
  o = config.optimizer
  transform = optimizer.make(
    b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, clip_norm=o.clip_norm
  )
  where = sharding.shard_tree(jax.eval_shape(transform.init, params), mesh)
  opt_state = jax.jit(transform.init, out_shardings=where)(params)
  return TrainState(jax.device_put(jnp.zeros((), jnp.int32), sharding.replicated(mesh)), params, opt_state)


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
    FloatingPointError: when a gradient is not finite, with the step and the last good checkpoint.
    RuntimeError: when the analyzer fails for more than the configured share of trajectories.
    Interrupted: after SIGTERM, once the last finished step is saved.
  """
  stop = StopSignal()
  mesh = sharding.make_mesh(jax.devices(), **config.mesh)
  settings.validate(config, num_devices=mesh.size)
  algorithm = ALGORITHMS[config.algorithm.name]
  r = config.rollout
  env = envs.make(config.env, seed=config.seed)
  panel = env.panel('heldout', config.evaluate.num_tasks)
  limits = evaluate.limits(config)

  policy = policies.describe(config, mesh)
  params = policies.load_params(policy, mesh)
  reference = copy_reference(config, params, mesh) if config.loss.kl_coef else None
  state = init_state(config, params, mesh)
  del params  # The update donates the state: the name must not outlive it.
  programs = make_programs(config, policy, state, mesh)
  sampler = policies.make_sampler(
    policy, state.params, mesh, r, max_prompt=r.max_prompt_tokens, max_response=r.max_response_tokens
  )
  analyzer = make_analyzer(config, policy, lambda: state, mesh)

  folder = runfolder.open_run(workdir, config, env.describe())
  c = config.checkpoint
  checkpoints = checkpoint.open(
    folder / 'checkpoints', keep=c.keep, every=c.every, on_full_disk=c.on_full_disk, like=state
  )
  last = checkpoints.latest()
  if last is not None:
    state, host = checkpoints.restore(last, state)
    runfolder.check_same_run(host, config, env.describe())
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

  def play_panel(step: int) -> dict[str, float]:
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
    return {**result.row('eval'), 'time/evaluate_s': time.monotonic() - begin}

  def save(step: int) -> None:
    writer.flush()
    checkpoints.save(step, state, runfolder.host_state(config, env.describe(), step))

  try:
    if last is None and config.evaluate.before:
      progress.doing('evaluating')
      writer.write(0, play_panel(0))
    for step in range(int(state.step), config.num_steps):
      begin = time.monotonic()
      # Act: G attempts at every task under pi_old.
      progress.doing('acting')
      trajectories = act(config, env, sampler.use(state.params, r.temperature), policy, limits, step, progress, stop)
      acted = time.monotonic()
      # Look back: the analyzer turns each finished trajectory into skills (host, while the device scores below).
      progress.doing('looking back')
      pending = analyzer.submit(trajectories) if uses_skills(config, algorithm, step) else None
      batch = Batch.of(trajectories)
      logp_old, entropy = score(programs, state.params, batch.sequences, batch.width, config, mesh)
      logp_ref = np.zeros_like(logp_old)
      if reference is not None:
        logp_ref, _ = score(programs, reference, batch.sequences, batch.width, config, mesh)
      # Route: a critical step gets its own skill, any other step the episode's.
      found = pending.result() if pending else [Skills(reason='not_asked')] * len(trajectories)
      hints = route(config, trajectories, found)
      contexts = skills.contexts(hints, routing=config.algorithm.routing)
      # Re-score: pi_old reads the same response with the skill.
      logp_skill = score_contexts(programs, state.params, batch, contexts, policy, limits, config, mesh)
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
      state, learned = improve(programs, state, batch, logp_old, logp_ref, advantage, config, mesh)
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
        **skill_metrics(pending, hints),
        'time/act_s': acted - begin,
        'time/score_s': scored - acted,
        'time/learn_s': time.monotonic() - scored,
      }
      runfolder.write_samples(folder, done, trajectories, found, hints, config.log.samples)
      if done == config.num_steps or (config.evaluate.every and done % config.evaluate.every == 0):
        progress.doing('evaluating')
        row |= play_panel(done)
      writer.write(done, row)
      progress.step(f'reward {row["train/reward"]:.2f}')
      if done == config.num_steps or checkpoints.is_due(done):
        save(done)
      stop.check()
  except Interrupted:
    # Rollouts and scoring leave the state alone, so it is whole whenever `check` raises.
    save(int(state.step))
    raise
  finally:
    checkpoints.close()
    writer.close()
    progress.close()
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


def pack(sequences, config) -> tuple[Packed, layout.Place]:
  """Rows for device calls of the configured size."""
  c = config.learner
  return layout.pack(
    sequences, row_length=c.row_length, slots=c.slots_per_row, rows_multiple=c.rows_per_call
  )


def score(programs: Programs, params, sequences, width, config, mesh) -> tuple[np.ndarray, np.ndarray]:
  """Log-probabilities and entropies [M, T] float32 of the responses; every call is dispatched before one is read."""
  packed, place = pack(sequences, config)
  calls = [
    programs.score(params, sharding.put_rows(call, mesh))
    for call in layout.calls(packed, config.learner.rows_per_call)
  ]
  logp, entropy = (np.concatenate([np.asarray(call[i]) for call in calls]) for i in range(2))
  return layout.unpack(logp, place, width), layout.unpack(entropy, place, width)


def score_contexts(programs, params, batch: Batch, contexts, policy, limits, config, mesh) -> list[np.ndarray]:
  """[N, T] log-probabilities per skill context; zero for steps without a skill there, which weigh nothing."""
  where, sequences = [], []
  for c, context in enumerate(contexts):
    for n, hint in enumerate(context):
      if hint is None:
        continue
      skill = rollout.clip_skill(hint.text, hint.kind, policy.tokenizer, limits)
      prompt = rollout.tokenize(batch.prompts[n], policy.tokenizer, limits, **{f'{hint.kind}_skill': skill})
      where.append((c, n))
      sequences.append((prompt, batch.sequences[n][1]))
  out = [np.zeros(batch.mask.shape, np.float32) for _ in contexts]
  if sequences:
    logp, _ = score(programs, params, sequences, batch.width, config, mesh)
    for (c, n), row in zip(where, logp, strict=True):
      out[c][n] = row
  return out


def improve(programs: Programs, state: TrainState, batch: Batch, logp_old, logp_ref, advantage, config, mesh):
  """One pass over the batch in minibatches, one optimizer update each.

  Returns:
    (state with the same `step`, metrics). The metrics are read once, after the last update was dispatched.
  """
  c = config.learner
  history = []
  for _ in range(c.epochs):
    for begin in range(0, len(batch.sequences), c.minibatch_steps):
      part = slice(begin, begin + c.minibatch_steps)
      packed, place = pack(batch.sequences[part], config)
      weight = losses.token_weights(
        batch.mask[part], aggregation=config.loss.aggregation, norm_length=config.rollout.max_response_tokens
      )
      targets = learner.Targets(
        *(layout.spread(x[part], place, packed) for x in (logp_old, logp_ref, advantage)),
        layout.spread(weight, place, packed),
      )
      gradient, sums = programs.zero(state.params)
      for rows, wanted in zip(
        layout.calls(packed, c.rows_per_call), layout.calls(targets, c.rows_per_call), strict=True
      ):
        gradient, sums = programs.accumulate(
          state.params, gradient, sums, sharding.put_rows(rows, mesh), sharding.put_rows(wanted, mesh)
        )
      state, norm = programs.apply(state, gradient, sums)
      history.append((sums, norm))
  history = jax.device_get(history)
  total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), [sums for sums, _ in history])
  n = len(history)
  return state, {
    'update/loss': float(total.policy + total.kl + total.entropy) / n,
    'update/policy_loss': float(total.policy) / n,
    'update/kl_loss': float(total.kl) / n,
    'update/kl': float(total.kl_total / total.tokens),
    'update/log_ratio': float(total.log_ratio_total / total.tokens),
    'update/clip_fraction': float(total.clipped_tokens / total.tokens),
    'update/dual_clip_fraction': float(total.dual_clipped_tokens / total.tokens),
    'update/first_ratio_gap': float(history[0][0].ratio_gap),
    # The largest: a single bad update must not hide behind good ones. NaN stays NaN.
    'update/grad_norm': float(np.max([norm for _, norm in history])),
    'update/count': n,
    'update/tokens': float(total.tokens) / c.epochs,
  }


def advantage_settings(config) -> AdvantageSettings:
  a = config.algorithm
  return AdvantageSettings(a.norm, a.stats, a.invalid_penalty, a.penalty, a.center, a.rms, a.shift_clip)


def learning_rate(config, step: int) -> float:
  o = config.optimizer
  return optimizer.learning_rate(
    step,
    peak=o.learning_rate,
    warmup_steps=o.warmup_steps,
    schedule=o.schedule,
    total_steps=config.num_steps,
  )


def uses_skills(config, algorithm, step: int) -> bool:
  """Whether hindsight can change this step's update; nobody is asked (or paid) otherwise."""
  a = config.algorithm
  in_time = skills.is_on(step, start_step=a.start_step, stop_step=a.stop_step)
  return algorithm.teacher == 'hindsight' and in_time and (a.episode_weight > 0 or a.step_weight > 0)


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

  return module.make(c, generate=generate)


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


def main(argv: Sequence[str]) -> None:
  config, option = flags.read_or_exit(argv, OPTIONS, __doc__)
  runfolder.set_compile_cache(config.compile_cache)
  workdir = option['workdir'] or runfolder.default_name(argv, config)
  try:
    train(config, workdir)
  except Interrupted as reason:
    sys.exit(f'{reason}: saved; the same command continues the run in {Path(workdir)}.')


if __name__ == '__main__':
  main(sys.argv)
