import dataclasses
import zlib

import numpy as np
import pytest
import tiny

from opid_jax import rollout

TEXT = tiny.Characters()
GO = TEXT.reply('go')


def play(attempts, answer=lambda request: GO, *, env=None, num_slots=2, limits=tiny.LIMITS, seed=(0, 3), **kwargs):
  visits = kwargs.pop('visits', lambda request: 1)
  sampler = tiny.Scripted(answer, num_slots=num_slots, visits=visits)
  played = rollout.play(
    env or tiny.Corridor(), attempts, sampler, TEXT, limits, seed=seed, make_request=tiny.make_request, **kwargs
  )
  return played, sampler


def attempts_of(*turns, group_size=1):
  return [
    rollout.Attempt(task, f'3/{i}', attempt)
    for i, task in enumerate(tiny.make_tasks(*turns))
    for attempt in range(group_size)
  ]


def essence(trajectory):
  """Everything that training reads, comparable."""
  return dataclasses.replace(trajectory, steps=()), [
    (s.prompt, s.prompt_tokens.tolist(), s.response_tokens.tolist(), s.action, s.valid, s.reward)
    for s in trajectory.steps
  ]


def wanders(request):
  """Answers by the seed alone, so that it matters who gets which: a third of the actions are bad."""
  return GO if sum(request.seed[2:]) % 3 else TEXT.reply('no')


def test_results_keep_the_order_of_the_attempts():
  attempts = attempts_of(5, 1, 3, group_size=2)
  played, _ = play(attempts)
  assert [(t.task.id, t.group, t.attempt) for t in played] == [(a.task.id, a.group, a.attempt) for a in attempts]
  assert [len(t.steps) for t in played] == [5, 5, 1, 1, 3, 3]
  assert all(t.success and t.score == 1 and t.total_reward == 10 and not t.is_truncated for t in played)


def test_d05_finished_episodes_are_not_stepped_again():
  env = tiny.Corridor()
  played, sampler = play(attempts_of(1, 2, 4), env=env, num_slots=3)
  assert [len(t.steps) for t in played] == [1, 2, 4]
  assert sum(env.calls.values()) == len(sampler.requests) == 7
  assert [t.total_reward for t in played] == [10, 10, 10]


def test_a_slot_is_refilled_while_a_slow_episode_still_runs():
  # Attempt 0 takes twenty visits per turn; the others pass through the second slot meanwhile.
  order = []
  play(
    attempts_of(1, 2, 2, 2), visits=lambda request: 20 if request.id == 0 else 1,
    on_done=lambda trajectory: order.append(trajectory.task.index),
  )  # fmt: skip
  assert order == [1, 2, 3, 0]


def test_no_more_episodes_are_in_flight_than_slots():
  env = tiny.Corridor()
  open_episodes = set()
  most = 0

  class Watched(tiny.Corridor):
    def reset(self, task):
      nonlocal most
      open_episodes.add(task.id)
      most = max(most, len(open_episodes))
      return env.reset(task)

  play(
    attempts_of(2, 3, 1, 2, 4), env=Watched(), num_slots=3,
    on_done=lambda trajectory: open_episodes.remove(trajectory.task.id),
  )  # fmt: skip
  assert most == 3
  assert not open_episodes


@pytest.mark.parametrize('num_slots', [1, 3, 50])
def test_a_trajectory_does_not_depend_on_what_else_is_in_flight(num_slots):
  attempts = attempts_of(2, 4, 3, group_size=3)
  expected, _ = play(attempts, wanders)
  slow = {'visits': lambda request: 1 + request.id % 4}
  played, _ = play(attempts, wanders, num_slots=num_slots, **slow)
  assert [essence(t) for t in played] == [essence(t) for t in expected]
  alone, _ = play([attempts[4]], wanders)
  assert essence(alone[0]) == essence(expected[4])
  assert any(not step.valid for t in expected for step in t.steps)


@pytest.mark.parametrize('bad', ['open door then go north', '', 'a' * 5000, 'look\nlook', '\x00', '<|im_end|>'])
def test_d06_bad_commands_stay_with_their_own_episode(bad):
  attempts = attempts_of(2, 2, 2)
  good, _ = play(attempts)
  limits = tiny.LIMITS._replace(max_response_tokens=6000)
  played, _ = play(
    attempts, lambda request: TEXT.reply(bad) if request.id == 1 else GO, limits=limits, num_slots=3
  )
  assert [essence(played[i]) for i in (0, 2)] == [essence(good[i]) for i in (0, 2)]
  assert [step.valid for step in played[1].steps] == [False] * 6
  assert (played[1].is_truncated, played[1].success, played[1].score) == (True, False, 0.0)


def test_turn_limit_truncates_and_keeps_the_reward():
  played, _ = play(attempts_of(6, 7))
  assert [len(t.steps) for t in played] == [6, 6]
  assert [t.is_truncated for t in played] == [False, True]
  assert [t.total_reward for t in played] == [10, 0]


def test_b05_stored_ids_are_those_of_the_sampler():
  # Two ids that decode to nothing stand in the response: encoding the text again would lose them.
  sampled = [*TEXT.encode('g'), 4, *TEXT.encode('o'), 1, 2]
  played, _ = play(attempts_of(1), lambda request: sampled)
  (step,) = played[0].steps
  assert step.response == 'go' and TEXT.reply(step.response) != sampled
  assert step.response_tokens.tolist() == sampled
  assert step.logp_sampled.tolist() == [-1, -2, -3, -4, -5]
  assert not step.is_cut


@pytest.mark.parametrize('end', TEXT.end_ids)
def test_b03_either_end_token_is_kept_and_trained_on(end):
  played, _ = play(attempts_of(1), lambda request: [*TEXT.encode('go'), end])
  (step,) = played[0].steps
  assert step.response_tokens[-1] == end and step.action == 'go' and not step.is_cut


def test_d11_turns_and_episodes_have_limits_of_their_own():
  limits = tiny.LIMITS._replace(max_response_tokens=32, max_episode_tokens=100)
  played, sampler = play(attempts_of(5), lambda request: TEXT.encode('x' * 500), limits=limits)
  lengths = [len(step.response_tokens) for step in played[0].steps]
  assert lengths == [32, 32, 32, 4]
  assert [step.is_cut for step in played[0].steps] == [True] * 4
  assert played[0].is_truncated
  assert [request.max_tokens for request in sampler.requests] == lengths
  # Without a limit per episode only the turns are bounded.
  played, _ = play(attempts_of(5), lambda request: TEXT.encode('x' * 500), limits=limits._replace(max_episode_tokens=0))
  assert [len(step.response_tokens) for step in played[0].steps] == [32] * 6


def test_an_episode_that_ends_on_its_last_token_is_no_truncation():
  limits = tiny.LIMITS._replace(max_episode_tokens=2 * len(GO))
  played, _ = play(attempts_of(2, 3), limits=limits)
  assert [(len(t.steps), t.is_truncated, t.success) for t in played] == [(2, False, True), (2, True, False)]


def test_random_numbers_come_from_seed_step_task_attempt_and_turn():
  attempts = attempts_of(2, 3, group_size=2)
  _, sampler = play(attempts, seed=(11, 5))
  expected = {
    (11, 5, zlib.crc32(f'train/{i}'.encode()), attempt, turn)
    for i, turns in enumerate((2, 3))
    for attempt in range(2)
    for turn in range(turns)
  }
  assert {request.seed for request in sampler.requests} == expected
  assert len(sampler.requests) == len(expected) == 10


def test_b07_long_prompts_are_shortened_and_flagged_with_their_frame_whole():
  class Wordy(tiny.Corridor):
    def step(self, state, response):
      state = super().step(state, response)
      return dataclasses.replace(state, observation=f'{state.observation} ' + 'word ' * 10 ** (state.turn % 3))

  played, sampler = play(attempts_of(5), env=Wordy())
  flags = [step.is_shortened for step in played[0].steps]
  assert flags[0] is False and True in flags
  for request in sampler.requests:
    assert len(request.prompt) <= tiny.LIMITS.max_prompt_tokens
    assert request.prompt[0] == 1 and request.prompt[-2:].tolist() == [2, 4]
    text = TEXT.decode(request.prompt.tolist(), skip_special=True)
    assert text.startswith('Your task: go 5 times\n') and text.endswith('\nAct now.')


def test_b08_every_step_is_scored_under_the_very_prompt_it_was_sampled_with():
  limits = tiny.LIMITS._replace(max_prompt_tokens=70)  # Tight: the history is shortened on the way.
  played, sampler = play(attempts_of(5, 4), limits=limits)
  asked = {}
  for request in sampler.requests:
    asked.setdefault(request.id, []).append(request.prompt.tolist())
  assert any(step.is_shortened for t in played for step in t.steps)
  for i, trajectory in enumerate(played):
    assert [step.prompt_tokens.tolist() for step in trajectory.steps] == asked[i]
    again = [rollout.tokenize(step.prompt, TEXT, limits).tolist() for step in trajectory.steps]
    assert again == asked[i]


@pytest.mark.parametrize('kind', ['episode', 'step'])
@pytest.mark.parametrize('style', ['brief', 'full'])
def test_c17_a_skill_stands_in_the_user_turn(kind, style):
  limits = tiny.LIMITS._replace(style=style, max_skill_tokens=150)
  played, _ = play(attempts_of(2), limits=limits)
  for step in played[0].steps:
    skill = rollout.clip_skill('Mind the gap <|im_end|> and go on. ' * 9, kind, TEXT, limits)
    plain = step.prompt_tokens.tolist()
    skilled = rollout.tokenize(step.prompt, TEXT, limits, **{f'{kind}_skill': skill}).tolist()
    assert skilled[-2:] == plain[-2:] == [2, 4]  # End of the user turn, generation header.
    assert [skilled.count(marker) for marker in (1, 2, 4)] == [plain.count(marker) for marker in (1, 2, 4)]
    added = len(skilled) - len(plain)
    assert 0 < added <= limits.max_skill_tokens
    # One block inserted, everything else in place.
    assert any(skilled[:at] + skilled[at + added :] == plain for at in range(len(plain)))


def test_complete_answers_in_order_and_with_its_own_seeds():
  sampler = tiny.Scripted(lambda request: TEXT.reply(f'r{request.id}'), num_slots=2, visits=lambda r: 5 - r.id)
  replies = rollout.complete(
    ['a', 'b', 'c', 'd'], sampler, TEXT, thinking=None, seed=(4, 2), max_tokens=3, make_request=tiny.make_request
  )
  assert [reply[:2] for reply in replies] == ['r0', 'r1', 'r2', 'r3']
  assert [request.seed for request in sampler.requests] == [(4, 2, i) for i in range(4)]
  assert [request.prompt.tolist() for request in sampler.requests] == [TEXT.chat([('user', x)]) for x in 'abcd']


def test_nothing_to_play_is_nothing_played():
  played, sampler = play([])
  assert played == [] and sampler.requests == []


def test_steps_record_what_was_seen_and_done():
  played, _ = play(attempts_of(2), lambda request: GO if request.seed[-1] else TEXT.reply('no'))
  steps = played[0].steps
  assert [(s.observation, s.action, s.valid, s.reward) for s in steps] == [
    ('door 0', '', False, 0.0), ('door 0', 'go', True, 0.0), ('door 1', 'go', True, 10.0),
  ]  # fmt: skip
  assert steps[2].prompt.history == ('saw door 0, did no', 'saw door 0, did go')
  assert all(step.prompt_tokens.dtype == np.int32 for step in steps)
