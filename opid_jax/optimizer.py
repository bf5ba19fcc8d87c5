"""AdamW and its learning rate, as two pure pieces that meet in the update: params - rate * direction."""

import jax.numpy as jnp
import optax

SCHEDULES = {'constant': 0.0, 'cosine': 0.1}  # Name -> share of the peak that the rate never falls below.


def make(*, b1: float, b2: float, eps: float, weight_decay: float, clip_norm: float):
  """The direction of an AdamW update, without the learning rate.

  Gradients are scaled to a global norm of at most `clip_norm`, then m / (sqrt(v) + eps) + decay * params,
  bias-corrected. See "Decoupled Weight Decay Regularization" (https://arxiv.org/abs/1711.05101), Alg. 2; the
  decay applies to every parameter, as in the reference.

  The rate stays outside because it belongs to training steps while the moments count updates: several
  minibatches of one training step share a rate, and a resumed run reads it off `TrainState.step`.

  Args:
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled, multiplied by the learning rate like the rest.
    clip_norm: bound on the global gradient norm, 0 for none.

  Returns:
    An `optax.GradientTransformation`; the caller steps by -learning_rate times its updates.
  """
  parts = [optax.clip_by_global_norm(clip_norm)] if clip_norm > 0 else []
  parts += [optax.scale_by_adam(b1=b1, b2=b2, eps=eps), optax.add_decayed_weights(weight_decay)]
  return optax.chain(*parts)


def learning_rate(step, *, peak: float, warmup_steps: int, schedule: str, total_steps: int):
  """The learning rate of a training step: linear warm-up, then constant or half a cosine down to a tenth.

  The rate is peak * (f + (1 - f) x) with f = 0 (constant) or 0.1 (cosine). During warm-up
  x = step / warmup_steps, so the first update of a warm-up is made with rate f * peak; afterwards
  x = 1 (constant) or (1 + cos(pi (step - warmup_steps) / (total_steps - warmup_steps))) / 2.

  Args:
    step: [] int, 0-based training step (not the number of optimizer updates); may be traced.
    peak: rate after the warm-up.
    warmup_steps: training steps, 0 for none.
    schedule: 'constant' or 'cosine'.
    total_steps: training steps of the run.

  Returns:
    [] float32.

  Raises:
    ValueError: for an unknown schedule.
  """
  if schedule not in SCHEDULES:
    raise ValueError(f'Unknown schedule {schedule!r}. Available: {", ".join(SCHEDULES)}.')
  floor = SCHEDULES[schedule]
  step = jnp.asarray(step, jnp.float32)
  x = jnp.ones((), jnp.float32)
  if schedule == 'cosine':
    done = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    x = 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(done, 0.0, 1.0)))
  x = jnp.where(step < warmup_steps, step / max(warmup_steps, 1), x)
  return peak * (floor + (1.0 - floor) * x)
