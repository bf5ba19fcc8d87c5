import pytest
import tiny

from opid_jax import evaluate, metrics, settings

TEXT = tiny.Characters()
TASKS = tiny.make_tasks(1, 2, 3, 4, 5, 6, 7, 8, 2, 3)


def answer(request):
  """Depends on the prompt alone, as a greedy policy does: at door 2 it loses its way for good."""
  seen = TEXT.decode(request.prompt.tolist(), skip_special=True)
  return TEXT.reply('no' if 'door 2' in seen.split('\n')[-3] else 'go')


def play(num_slots, tasks=TASKS, **kwargs):
  sampler = tiny.Scripted(answer, num_slots=num_slots, visits=lambda request: 1 + request.id % 3)
  arguments = {'temperature': 0.0, 'seed': 7, 'on_done': lambda trajectory: None} | kwargs
  return evaluate.play_panel(tiny.Corridor(), tasks, sampler, None, TEXT, tiny.LIMITS, **arguments), sampler


def test_d03_scores_do_not_depend_on_the_number_of_slots():
  (first, _), *others = (play(num_slots) for num_slots in (3, 4, 10, 64))
  assert [t.task.id for t in first.trajectories] == [task.id for task in TASKS]
  for other, _ in others:
    assert other[1:] == first[1:]
    assert [(t.task.id, t.score, len(t.steps)) for t in other.trajectories] == [
      (t.task.id, t.score, len(t.steps)) for t in first.trajectories
    ]


def test_rates_come_with_their_counts_and_intervals():
  result, _ = play(4)
  row = result.row('eval')
  assert row['eval/num_tasks'] == 10  # Tasks, not slots.
  assert row['eval/num_success'] == 3  # Tasks of one or two doors.
  assert row['eval/success_rate'] == row['eval/score'] == pytest.approx(0.3)
  assert (row['eval/success_low'], row['eval/success_high']) == pytest.approx(metrics.wilson(3, 10))
  assert row['eval/success_low'] < 0.3 < row['eval/success_high']
  assert row['eval/turns'] == pytest.approx((1 + 2 + 2 + 7 * 6) / 10)
  assert row['eval/truncated_rate'] == pytest.approx(0.7)


def test_every_evaluation_of_a_run_uses_the_same_random_numbers():
  seeds = [{request.seed for request in play(3)[1].requests} for _ in range(2)]
  assert seeds[0] == seeds[1]
  # Step -1: no training step has these.
  assert {seed[:2] for seed in seeds[0]} == {(7, -1)}
  assert not seeds[0] & {request.seed for request in play(3, seed=8)[1].requests}


def test_progress_hears_of_every_episode():
  done = []
  play(3, on_done=done.append)
  assert sorted(t.task.index for t in done) == list(range(10))


def test_config_gives_limits_and_temperature():
  config = settings.make({
    'rollout.max_prompt_tokens': 9, 'rollout.max_skill_tokens': 8, 'rollout.max_response_tokens': 7,
    'rollout.max_episode_tokens': 70, 'rollout.prompt_style': 'brief', 'evaluate.temperature': 0.4,
  })  # fmt: skip
  assert evaluate.limits(config) == (9, 8, 7, 70, 'brief', False)
  assert evaluate.temperature(config) == 0.4
  config.evaluate.greedy = True
  assert evaluate.temperature(config) == 0.0
