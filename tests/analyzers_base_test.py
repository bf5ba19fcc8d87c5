import subprocess
import sys

import pytest
from attempts import attempt

from opid_jax.analyzers import contrast, policy
from opid_jax.analyzers.base import Answer, Pending, Usage, read_settings
from opid_jax.types import Skills

OK = Answer(Skills(episode='k'))
FAILED = Answer(Skills(reason='timeout'), detail='no answer within 60 s')
GOOD = '{"episode_skill": "k", "step_skills": {"0": "a", "7": "b"}}'


def test_counts_add_up():
  answers = [
    Answer(Skills(episode='k'), usage=Usage(2, 1, 10, 5)), Answer(Skills(steps={0: 'a'}), dropped=2), FAILED,
    Answer(Skills(reason='no_contrast')), Answer(Skills(reason='budget'), usage=Usage(1, 0, 3, 1)),
  ]
  pending = Pending(lambda: answers, 0.5)
  assert [skills.reason for skills in pending.result()] == ['', '', 'timeout', 'no_contrast', 'budget']
  assert {key: value for key, value in pending.counts.items() if value} == {
    'trajectories': 5, 'succeeded': 2, 'partial': 1, 'failed': 1, 'dropped_steps': 2, 'requests': 3, 'retries': 1,
    'tokens_in': 13, 'tokens_out': 6, 'timeout': 1, 'no_contrast': 1, 'budget': 1}
  assert pending.counts['truncated'] == 0


def test_result_is_computed_once():
  calls = []
  pending = Pending(lambda: calls.append(1) or [OK], 0.5)
  assert pending.result() == pending.result() and calls == [1]


def test_more_failures_than_the_share_stop_the_run_with_examples():
  pending = Pending(lambda: [FAILED] * 5 + [OK] * 4, 0.5)
  with pytest.raises(RuntimeError, match=r'5 of 9 .*max_failure_share = 0.5.*timeout 5.*no answer within 60 s'):
    pending.result()
  assert pending.counts['failed'] == 5


@pytest.mark.parametrize('answers, share', [
  ([FAILED] * 4 + [OK] * 4, 0.5),                          # exactly the share
  ([FAILED] * 7, 0.5),                                     # too few to say
  ([FAILED] * 20, 1.0),                                    # never stops
  ([Answer(Skills(reason='no_contrast'))] * 20, 0.0),      # nobody's fault
  ([Answer(Skills(reason='budget'))] * 20, 0.0),           # the user's own limit
])
def test_other_shares_do_not_stop_the_run(answers, share):
  assert len(Pending(lambda: answers, share).result()) == len(answers)


@pytest.mark.parametrize('settings, message', [
  ({'max_failure_share': 1.5}, 'max_failure_share is 1.5'), ({'timeout_s': float('nan')}, 'timeout_s is nan'),
  ({'concurrency': 0}, 'concurrency is 0'), ({'colour': 1}, 'Unknown analyzer settings colour'),
  ({'max_prompt_chars': 10}, 'max_prompt_chars is 10'),
])
def test_wrong_settings_are_refused_by_name(settings, message):
  with pytest.raises(ValueError, match=message):
    read_settings(settings)


def test_policy_writes_the_skills_on_the_callers_thread_when_asked():
  prompts = []

  def generate(texts):
    prompts.extend(texts)
    return [GOOD, 'hm']

  analyzer = policy.make({'max_step_skills': 2}, generate=generate)
  pending = analyzer.submit([attempt([('p', 'a')], task='buy tea'), attempt([('p', 'a')], number=1)])
  assert prompts == []
  assert pending.result() == [Skills(episode='k', steps={0: 'a'}), Skills(reason='no_json')]
  assert len(prompts) == 2 and '[[[buy tea]]]' in prompts[0]
  assert pending.counts['requests'] == 2 and pending.counts['dropped_steps'] == 1 and pending.counts['no_json'] == 1


def test_policy_without_generate_or_with_too_few_replies_is_refused():
  with pytest.raises(ValueError, match='generate'):
    policy.make({})
  with pytest.raises(ValueError, match='0 replies for 1 prompts'):
    policy.make({}, generate=lambda texts: []).submit([attempt([('p', 'a')])]).result()


def test_policy_that_cannot_write_json_stops_the_run():
  with pytest.raises(RuntimeError, match='no_json 8'):
    policy.make({}, generate=lambda texts: ['hm'] * len(texts)).submit([attempt([('p', 'a')])] * 8).result()


def test_policy_reads_prompts_shortened_to_its_tokens():
  seen = []

  def generate(texts):
    seen.extend(texts)
    return [GOOD] * len(texts)

  steps = [(f'page {n} ' + 'words ' * 400, 'click') for n in range(9)]
  limits = {'max_prompt_tokens': 3000}
  analyzer = policy.make(limits, generate=generate, count=lambda text: len(text) // 3)
  assert analyzer.submit([attempt(steps, task='buy tea')]).result()[0].usable
  assert 6000 < len(seen[0]) <= 9002 and '[[[buy tea]]]' in seen[0] and 'page 8' in seen[0]


def test_policy_that_cannot_read_the_shortest_prompt_is_counted_and_the_others_are_asked():
  analyzer = policy.make(
    {'max_prompt_tokens': 50}, generate=lambda texts: [GOOD] * len(texts), count=lambda text: 99 * ('buy tea' in text))
  pending = analyzer.submit([attempt([('p', 'a')], task='buy tea'), attempt([('p', 'a')], task='buy jam')])
  assert [skills.reason for skills in pending.result()] == ['too_long', '']
  assert pending.counts['requests'] == 1 and pending.counts['failed'] == 1


def test_nothing_to_analyse_is_no_error():
  assert contrast.make({}).submit([]).result() == []
  assert policy.make({}, generate=lambda texts: []).submit([]).result() == []


def test_analyzers_import_neither_jax_nor_the_http_client():
  code = ('import sys, opid_jax.analyzers.contrast, opid_jax.analyzers.openai, opid_jax.analyzers.policy;'
          'print([m for m in ("jax", "openai", "torch") if m in sys.modules])')
  assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout == '[]\n'
