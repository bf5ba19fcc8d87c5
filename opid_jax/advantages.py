"""Credit assignment: pure functions of arrays.

NumPy on the host, not JAX: the number of environment steps N differs in every training step, and a jitted
version would be compiled anew each time for work that takes milliseconds. Sums run in float64, results are
float32.
Axis letters: C contexts (0 is the history the policy acted on), N environment steps, T response tokens.
"""

import numpy as np

NORMS = ('mean', 'mean_std')
STATS = ('trajectory', 'row')


def _check_one_axis(**arrays: np.ndarray) -> None:
  shapes = {name: np.shape(a) for name, a in arrays.items()}
  if len(set(shapes.values())) != 1 or any(len(s) != 1 for s in shapes.values()):
    found = ', '.join(f'{name} {list(shape)}' for name, shape in shapes.items())
    raise ValueError(f'Expected arrays of one common shape [N], found {found}.')


def _statistic_rows(group: np.ndarray, trajectory: np.ndarray, stats: str) -> np.ndarray:
  """[M] row numbers that enter a group's mean: every row, or the first row of each trajectory."""
  if stats == 'row':
    return np.arange(len(group))
  _, first = np.unique(np.stack([group, trajectory], axis=1), axis=0, return_index=True)
  return np.sort(first)


def tied(score, group, trajectory, *, stats: str = 'trajectory') -> np.ndarray:
  """Which groups carry no outcome signal: all scores equal, or a single attempt.

  Args:
    score: [N] score of each step's trajectory, environment units.
    group: [N] int, equal for the attempts at one task.
    trajectory: [N] int, equal for the steps of one attempt.
    stats: what is compared, see `group_relative`.

  Returns:
    [number of groups] bool, ordered by group id.
  """
  score, group = np.asarray(score, np.float64), np.asarray(group)
  rows = _statistic_rows(group, np.asarray(trajectory), stats)
  ids, g = np.unique(group[rows], return_inverse=True)
  low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
  np.minimum.at(low, g, score[rows])
  np.maximum.at(high, g, score[rows])
  return low == high


def group_relative(
  score, group, trajectory, *, norm: str = 'mean', stats: str = 'trajectory', epsilon: float = 1e-6
) -> np.ndarray:
  """Outcome advantage: how much better an attempt went than the other attempts at the same task.

  A = S - mean_group(S), with `norm='mean_std'` divided by (std_group(S) + epsilon); std is the sample
  standard deviation (n - 1). See "DeepSeekMath" (https://arxiv.org/abs/2402.03300), section 4.1, and OPID
  (https://arxiv.org/abs/2606.26790).

  Deviations from the reference code, each on purpose:
    * Statistics run over trajectories. The reference counts every environment step (`stats='row'`), so that
      long attempts weigh more in the baseline.
    * Equal scores give exactly 0 in every precision: the reference divides a rounding error by about 1e-6.
    * A group without spread is centred, never divided: a penalty of 0.1 would become an advantage of 1e5.
    * A lone attempt has nothing to be compared with and gets 0; the reference passes its raw score through.

  Args:
    score: [N] score of each step; with trajectory statistics the first step speaks for its trajectory.
    group: [N] int, equal for the attempts at one task. Order and values mean nothing.
    trajectory: [N] int, equal for the steps of one attempt.
    norm: 'mean' or 'mean_std'.
    stats: 'trajectory' or 'row'.
    epsilon: added to the standard deviation, in units of the score.

  Returns:
    [N] float32.

  Raises:
    ValueError: if the shapes differ or a word is unknown.
  """
  if norm not in NORMS:
    raise ValueError(f'Unknown norm {norm!r}. Available: {", ".join(NORMS)}.')
  if stats not in STATS:
    raise ValueError(f'Unknown stats {stats!r}. Available: {", ".join(STATS)}.')
  score, group, trajectory = np.asarray(score, np.float64), np.asarray(group), np.asarray(trajectory)
  _check_one_axis(score=score, group=group, trajectory=trajectory)
  if not len(score):
    return np.zeros(0, np.float32)

  _, g = np.unique(group, return_inverse=True)
  rows = _statistic_rows(group, trajectory, stats)
  member, value = g[rows], score[rows]
  count = np.bincount(member)
  is_tied = tied(score, group, trajectory, stats=stats)
  # The mean of equal numbers is that number; their floating point sum divided by n need not be.
  some = np.zeros(len(count))
  some[member] = value
  mean = np.where(is_tied, some, np.bincount(member, value) / count)
  advantage = score - mean[g]
  if norm == 'mean_std':
    variance = np.bincount(member, np.square(value - mean[member])) / np.maximum(count - 1, 1)
    scale = np.where(is_tied, 1.0, np.sqrt(variance) + epsilon)
    advantage = advantage / scale[g]
  return np.where(count[g] > 1, advantage, 0.0).astype(np.float32)


def penalise(value, valid, coef: float) -> np.ndarray:
  """Takes `coef` from the steps whose action could not be executed: value - coef * (1 - valid).

  Applied to scores before normalisation, as the reference does, the penalty becomes the whole signal of a
  group that failed throughout and is blown up by a small standard deviation; applied to advantages it keeps
  its size.

  Args:
    value: [N] scores or advantages.
    valid: [N] bool or 0/1.
    coef: the penalty, in units of `value`.

  Returns:
    [N] float32.
  """
  value, valid = np.asarray(value, np.float64), np.asarray(valid, np.float64)
  _check_one_axis(value=value, valid=valid)
  return (value - coef * (1.0 - valid)).astype(np.float32)


def step_returns(reward, trajectory, *, gamma: float) -> np.ndarray:
  """Discounted return from each step to the end of its trajectory: G_t = r_t + gamma * G_{t+1}.

  Args:
    reward: [N] environment reward of each step; the order within a trajectory is the order of the rows.
    trajectory: [N] int; trajectories may be interleaved.
    gamma: discount per environment step.

  Returns:
    [N] float32.
  """
  reward, trajectory = np.asarray(reward, np.float64), np.asarray(trajectory)
  _check_one_axis(reward=reward, trajectory=trajectory)
  returns, following = np.zeros(len(reward)), {}
  for row in range(len(reward) - 1, -1, -1):
    key = trajectory[row].item()
    returns[row] = following[key] = reward[row] + gamma * following.get(key, 0.0)
  return returns.astype(np.float32)


def skill_shift(logp, mask) -> np.ndarray:
  """What hindsight would have said: log pi_old(y | h, s) - log pi_old(y | h), token by token.

  Args:
    logp: [C, N, T] log-probabilities under the old policy, nats; context 0 is the plain history. Cells of
      contexts that were not scored may hold anything, their weight is 0.
    mask: [N, T] 1 on response tokens.

  Returns:
    [C - 1, N, T] float32, zero on padding.

  Raises:
    ValueError: if the shapes disagree.
  """
  logp, mask = np.asarray(logp, np.float32), np.asarray(mask)
  if logp.ndim != 3 or logp.shape[1:] != mask.shape:
    raise ValueError(
      f'Expected logp [C, N, T] and mask [N, T], found {list(logp.shape)} and {list(mask.shape)}.'
    )
  return np.where(mask > 0, logp[1:] - logp[:1], np.float32(0))


def skill_advantage(
  shift, weight, mask, *, center: bool = False, rms: bool = False, clip: float = 0.0, epsilon: float = 1e-6
) -> np.ndarray:
  """Token-level credit from hindsight: A_skill = sum_s w_s shape(log pi_old(y | h, s) - log pi_old(y | h)).

  A token is active in a context when it is a response token and its step has a weight there; all statistics
  run over the active tokens of the batch, in each skill context for itself. In this order, each optional:
  subtract the mean, divide by the root mean square, clip. `center` and `rms` together are the reference's
  normalisation: (D - mean) / (population std + epsilon), only centred where the std is at most epsilon.
  See OPID (https://arxiv.org/abs/2606.26790); its launch scripts use none of the three.

  Args:
    shift: [C - 1, N, T] from `skill_shift`, nats.
    weight: [C - 1, N] weight of the skill (lambda) per step, 0 where the step was given no skill.
    mask: [N, T] 1 on response tokens.
    center: subtract the mean of the active tokens.
    rms: divide by their root mean square.
    clip: bound on the absolute value after scaling and before weighting; 0 means none.
    epsilon: added to the root mean square.

  Returns:
    [N, T] float32, exactly zero where no context is active; with no skill context the empty sum.

  Raises:
    ValueError: if the shapes disagree.
  """
  shift, weight, mask = np.asarray(shift, np.float64), np.asarray(weight, np.float64), np.asarray(mask)
  if shift.ndim != 3 or shift.shape[1:] != mask.shape or shift.shape[:2] != weight.shape:
    raise ValueError(
      'Expected shift [C-1, N, T], weight [C-1, N] and mask [N, T], found '
      f'{list(shift.shape)}, {list(weight.shape)} and {list(mask.shape)}.'
    )
  total = np.zeros(mask.shape)
  for context_shift, context_weight in zip(shift, weight, strict=True):
    active = (mask > 0) & (context_weight != 0)[:, None]
    values = context_shift[active]
    if not values.size:
      continue
    if center:
      values = values - values.mean()
    if rms:
      scale = np.sqrt(np.mean(np.square(values)))
      values = values / (scale + epsilon) if scale > epsilon else values
    if clip > 0:
      values = np.clip(values, -clip, clip)
    total[active] += values * np.broadcast_to(context_weight[:, None], mask.shape)[active]
  return total.astype(np.float32)


def opid_total(outcome, skill, mask) -> np.ndarray:
  """A = A_outcome + A_skill on response tokens, 0 elsewhere.

  Args:
    outcome: [N] one advantage per environment step.
    skill: [N, T] token-level advantage.
    mask: [N, T] 1 on response tokens.

  Returns:
    [N, T] float32.
  """
  outcome, skill, mask = np.asarray(outcome, np.float32), np.asarray(skill, np.float32), np.asarray(mask)
  if skill.shape != mask.shape or outcome.shape != mask.shape[:1]:
    raise ValueError(
      'Expected outcome [N], skill [N, T] and mask [N, T], found '
      f'{list(outcome.shape)}, {list(skill.shape)} and {list(mask.shape)}.'
    )
  return np.where(mask > 0, outcome[:, None] + skill, np.float32(0))
