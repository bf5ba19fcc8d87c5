"""Training with skills from an endpoint that is slow, fails, rate-limits, answers garbage, or nothing at all."""

import collections
import json
import os
import signal
import threading
import time

import fake_endpoint
import pytest
import tinyrun
from tinyrun import compiled, one_device  # noqa: F401 (fixtures)

from opid_jax import interrupt, passes, rollout, train
from opid_jax.analyzers import base, openai

pytestmark = pytest.mark.usefixtures('compiled', 'one_device')

SHORT = {'num_steps': 2, 'evaluate__before': False, 'evaluate__num_tasks': 1}
SKILLS = {
  'episode_summary': 's',
  'episode_skill': 'search for the product type',
  'step_skills': {'1': 'open a product'},
}


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch):
  monkeypatch.setattr(openai, 'FIRST_PAUSE_S', 0.01)


def make_config(endpoint, **changes):
  return tinyrun.make_config(
    **SHORT | {'analyzer__name': 'openai', 'analyzer__model': 'fake', 'analyzer__base_url': endpoint.url} | changes
  )


class Script:
  """Gives the n-th new prompt the n-th of a list of behaviours: replies to its first, second, .. request."""

  def __init__(self, *behaviours):
    self.behaviours = behaviours
    self.order = {}

  def __call__(self, prompt, nth):
    original = prompt.partition('\n\nYour last answer could not be used')[0]
    number = self.order.setdefault(original, len(self.order))
    replies = self.behaviours[number % len(self.behaviours)]
    # A repair request has another text, so its own count starts anew.
    return replies[min(nth + (original != prompt), len(replies) - 1)]


good = fake_endpoint.answer(json.dumps(SKILLS))
# What each of the eight attempts of a step meets, and what must be counted for it:
# requests, retries, succeeded, reason.
TROUBLES = [
  ([good], 1, 0, True, ''),
  ([good._replace(delay_s=1.0)], 1, 0, True, ''),
  ([fake_endpoint.status(500), good], 2, 1, True, ''),
  ([fake_endpoint.status(429, retry_after='1'), good], 2, 1, True, ''),
  ([fake_endpoint.answer('I would rather not say'), good], 2, 1, True, ''),
  ([fake_endpoint.garbage()], 3, 2, False, 'invalid_response'),
  ([fake_endpoint.answer('')], 1, 0, False, 'empty'),
  ([fake_endpoint.status(503)], 3, 2, False, 'server_error'),
]


def test_run_ends_in_spite_of_every_trouble_with_exact_counts(tmp_path):
  with fake_endpoint.FakeEndpoint(Script(*[trouble[0] for trouble in TROUBLES])) as endpoint:
    train.train(make_config(endpoint), str(tmp_path))
  rows = [row for row in tinyrun.rows(tmp_path) if 'update/loss' in row]
  assert len(rows) == 2
  total = collections.Counter()
  for row in rows:
    total.update({name: value for name, value in row.items() if name.startswith('analyzer/')})
  expected = collections.Counter(
    {'analyzer/trajectories': 16, 'analyzer/tokens_in': 0, 'analyzer/tokens_out': 0}
  )
  for replies, requests, retries, succeeded, reason in TROUBLES:
    expected['analyzer/requests'] += 2 * requests
    expected['analyzer/retries'] += 2 * retries
    expected['analyzer/succeeded' if succeeded else 'analyzer/failed'] += 2
    if reason:
      expected[f'analyzer/{reason}'] += 2
    completions = sum(reply.code == 200 and b'choices' in reply.body for reply in replies)
    expected['analyzer/tokens_in'] += 2 * 10 * completions
    expected['analyzer/tokens_out'] += 2 * 5 * completions
  assert {name: value for name, value in total.items() if value} == expected
  assert len(endpoint.requests) == expected['analyzer/requests']


def test_every_skill_stands_in_the_prompt_it_is_scored_with_and_is_counted(tmp_path, monkeypatch):
  scored = []

  def watched(programs, params, batch, contexts, *rest):
    found = original(programs, params, batch, contexts, *rest)
    scored.extend((n, hint) for context in contexts for n, hint in enumerate(context) if hint is not None)
    return found

  texts = []

  def tokenize(prompt, tokenizer, limits, **skill):
    ids = write(prompt, tokenizer, limits, **skill)
    if skill:
      texts.append((next(iter(skill.values())), tokenizer.decode(ids.tolist())))
    return ids

  original, write = passes.score_contexts, rollout.tokenize
  monkeypatch.setattr(passes, 'score_contexts', watched)
  monkeypatch.setattr(rollout, 'tokenize', tokenize)
  with fake_endpoint.FakeEndpoint(Script([good], [fake_endpoint.answer('')])) as endpoint:
    train.train(make_config(endpoint, num_steps=1, log__samples=8), str(tmp_path))
  row = tinyrun.rows(tmp_path)[0]
  samples = [json.loads(line) for line in (tmp_path / 'samples' / 'step_000001.jsonl').read_text().splitlines()]
  assert (row['analyzer/succeeded'], row['analyzer/empty']) == (4, 4)
  kinds = collections.Counter(hint.kind for _, hint in scored)
  assert (row['skills/episode_steps'], row['skills/step_steps']) == (kinds['episode'], kinds['step'])
  assert row['skills/step_steps'] == 4  # step 1 of each trajectory that has skills
  steps = round(row['train/turns'] * row['train/episodes'])
  assert row['skills/none_steps'] == steps - sum(kinds.values()) > 0
  assert len(texts) == sum(kinds.values())
  assert all(skill and skill in text for skill, text in texts)
  assert {skill for skill, _ in texts} == {SKILLS['episode_skill'], SKILLS['step_skills']['1']}
  assert any(sample['skills']['episode'] == SKILLS['episode_skill'] for sample in samples)
  assert row['advantage/skill_share'] > 0


def test_all_calls_hanging_end_within_the_budget_and_train_as_grpo(tmp_path, monkeypatch):
  waited = []

  def result(pending):
    begin = time.monotonic()
    found = wait(pending)
    waited.append(time.monotonic() - begin)
    return found

  wait = base.Pending.result
  monkeypatch.setattr(base.Pending, 'result', result)
  with fake_endpoint.FakeEndpoint(lambda prompt, nth: fake_endpoint.hang()) as endpoint:
    limits = {'analyzer__timeout_s': 0.5, 'analyzer__step_timeout_s': 1.0, 'analyzer__max_failure_share': 1.0}
    train.train(make_config(endpoint, num_steps=1, **limits), str(tmp_path / 'opid'))
  assert len(waited) == 1 and waited[0] < fake_endpoint.MAX_HANG_S / 2
  row = tinyrun.rows(tmp_path / 'opid')[0]
  assert (row['analyzer/timeout'], row['analyzer/succeeded'], row['advantage/skill_share']) == (8, 0, 0)
  grpo = {'algorithm__name': 'grpo', 'analyzer__name': 'none', 'num_steps': 1}
  train.train(tinyrun.make_config(**SHORT | grpo), str(tmp_path / 'grpo'))
  tinyrun.assert_equal_params(tinyrun.params(tmp_path / 'opid', 1), tinyrun.params(tmp_path / 'grpo', 1))


def test_termination_does_not_wait_for_a_hanging_endpoint(tmp_path, monkeypatch):
  before = signal.getsignal(signal.SIGTERM)

  def result(pending):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return wait(pending)

  wait = base.Pending.result
  monkeypatch.setattr(base.Pending, 'result', result)
  with fake_endpoint.FakeEndpoint(lambda prompt, nth: fake_endpoint.hang()) as endpoint:
    with pytest.raises(interrupt.Interrupted, match='SIGTERM'):
      train.train(make_config(endpoint), str(tmp_path))
  assert signal.getsignal(signal.SIGTERM) is before


def test_too_many_failures_stop_the_run_and_lose_nothing(tmp_path):
  state = {'works': True}

  def script(prompt, nth):
    return good if state['works'] else fake_endpoint.status(400, error='context too long')

  def breaks_after_the_first_step(folder, step, *rest):
    state['works'] = False
    write(folder, step, *rest)

  write = train.runfolder.write_samples
  with fake_endpoint.FakeEndpoint(script) as endpoint, pytest.MonkeyPatch.context() as patch:
    patch.setattr(train.runfolder, 'write_samples', breaks_after_the_first_step)
    config = make_config(endpoint, checkpoint__every=10)
    with pytest.raises(RuntimeError, match='8 of 8 trajectories.*max_failure_share.*context too long'):
      train.train(config, str(tmp_path))
    assert tinyrun.steps(tmp_path) == [1] and [row['step'] for row in tinyrun.rows(tmp_path)] == [1]
    state['works'] = True
    patch.undo()
    train.train(config, str(tmp_path))
  assert [row['step'] for row in tinyrun.rows(tmp_path) if 'update/loss' in row] == [1, 2]
