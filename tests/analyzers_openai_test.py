import email.utils
import json
import re
import socket
import sys
import threading
import time

import fake_endpoint as fake
import pytest
from attempts import attempt
from shared import golden_cases

from opid_jax.analyzers import openai as analyzer_module
from opid_jax.types import Skills

SKILLS = Skills(episode='check the price', steps={0: 'search first'}, summary='s')


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(analyzer_module, 'FIRST_PAUSE_S', 0.01)
  monkeypatch.setenv('NO_PROXY', '127.0.0.1')
  monkeypatch.setenv('TEST_KEY', 'sesame')


def attempts(number):
  return [attempt([('page', 'act')], number=i, task=f'task {i};') for i in range(number)]


def number_of(prompt):
  return int(re.search(r'task (\d+);', prompt).group(1))


def look_back(url, trajectories, **settings):
  """(skills, counts without zeros) of one training step."""
  defaults = {'model': 'fake', 'base_url': url, 'api_key_env': 'TEST_KEY', 'max_failure_share': 1.0}
  analyzer = analyzer_module.make(defaults | settings)
  try:
    pending = analyzer.submit(trajectories)
    return pending.result(), {key: value for key, value in pending.counts.items() if value}
  finally:
    analyzer.close()


def run(script, number=1, **settings):
  """As `look_back`, with an endpoint that follows the script; its requests come third."""
  with fake.FakeEndpoint(script) as endpoint:
    return *look_back(endpoint.url, attempts(number), **settings), endpoint.requests


def failed(reason, **counts):
  return {'trajectories': 1, 'failed': 1, reason: 1} | counts


def test_good_replies_come_back_in_order_with_exact_counts():
  def script(prompt, nth):
    number = number_of(prompt)
    return fake.answer(json.dumps({'episode_skill': f'skill {number}'}), delay_s=0.02 * (5 - number))

  skills, counts, requests = run(script, 6)
  assert [one.episode for one in skills] == [f'skill {i}' for i in range(6)]
  assert counts == {'trajectories': 6, 'succeeded': 6, 'requests': 6, 'tokens_in': 60, 'tokens_out': 30}
  body = requests[0].body
  assert (body['model'], body['temperature'], body['max_tokens']) == ('fake', 0.4, 4096)
  assert (requests[0].key, requests[0].path) == ('Bearer sesame', '/v1/chat/completions')


def test_work_starts_at_once_and_beside_the_caller():
  arrived, gate = threading.Semaphore(0), threading.Event()

  def script(prompt, nth):
    arrived.release()
    gate.wait(fake.MAX_HANG_S)
    return fake.answer(fake.SKILLS)

  with fake.FakeEndpoint(script) as endpoint:
    analyzer = analyzer_module.make({'model': 'm', 'base_url': endpoint.url})
    pending = analyzer.submit(attempts(8))
    # All eight are under way although nobody has asked for the result, and none is answered.
    assert all(arrived.acquire(timeout=fake.MAX_HANG_S / 2) for _ in range(8))
    gate.set()
    assert pending.result() == [SKILLS] * 8
    analyzer.close()


def test_requests_in_flight_are_bounded():
  with fake.FakeEndpoint(lambda prompt, nth: fake.answer(fake.SKILLS, delay_s=0.05)) as endpoint:
    skills, counts = look_back(endpoint.url, attempts(12), concurrency=3)
    assert skills == [SKILLS] * 12 and endpoint.most_at_once == 3


# E04
@pytest.mark.parametrize('reply, reason, requests', [
  (fake.completion({'choices': []}), 'empty', 1),
  (fake.completion({'choices': None}), 'empty', 1),
  (fake.completion({'choices': [{'index': 0, 'finish_reason': 'stop', 'message': None}]}), 'empty', 1),
  (fake.completion({'choices': 'x'}), 'empty', 1),
  (fake.answer(None), 'empty', 1),
  (fake.answer(7), 'empty', 1),
  (fake.answer('', reasoning_content='{"episode_skill": "draft"}'), 'empty', 1),
  (fake.answer('', refusal='I cannot help with that.'), 'refused', 2),
  (fake.answer(None, finish='content_filter'), 'refused', 2),
])
def test_reply_with_nothing_in_it_means_no_skill(reply, reason, requests):
  skills, counts, _ = run(lambda prompt, nth: reply)
  assert skills == [Skills(reason=reason)]
  assert counts['requests'] == requests and counts[reason] == 1 and counts['failed'] == 1


def test_text_in_parts_is_read():
  parts = [{'type': 'text', 'text': fake.SKILLS[:30]}, {'type': 'text', 'text': fake.SKILLS[30:]}]
  assert run(lambda prompt, nth: fake.answer(parts))[0] == [SKILLS]


# E05
@pytest.mark.parametrize('message', [
  {'content': '<think>so long'}, {'content': '', 'reasoning_content': 'so long'}, {'content': fake.SKILLS}])
def test_reply_cut_by_the_limit_is_asked_once_more_with_twice_the_limit(message):
  skills, counts, requests = run(lambda prompt, nth: fake.answer(finish='length', **message), max_reply_tokens=100)
  assert skills == [Skills(reason='truncated')]
  assert counts == failed('truncated', requests=2, retries=1, tokens_in=20, tokens_out=10)
  assert [request.body['max_tokens'] for request in requests] == [100, 200]


# E09
def test_retry_after_is_waited_for():
  def script(prompt, nth):
    return fake.answer(fake.SKILLS) if nth else fake.status(429, retry_after='1')

  skills, counts, requests = run(script)
  assert skills == [SKILLS]
  assert counts == {'trajectories': 1, 'succeeded': 1, 'requests': 2, 'retries': 1, 'tokens_in': 10, 'tokens_out': 5}
  assert 1.0 <= requests[1].at - requests[0].at < fake.MAX_HANG_S


def test_retry_after_pauses_every_request():
  first = []

  def script(prompt, nth):
    first.append(prompt)
    return fake.status(429, retry_after='0.5') if len(first) == 1 else fake.answer(fake.SKILLS)

  skills, counts, requests = run(script, 4, concurrency=1)
  assert skills == [SKILLS] * 4 and counts['retries'] == 1
  assert all(request.at - requests[0].at >= 0.5 for request in requests[1:])


def test_retry_after_beyond_the_time_of_the_step_is_not_waited_for():
  start = time.monotonic()
  skills, counts, _ = run(lambda prompt, nth: fake.status(429, retry_after='600'), 3, step_timeout_s=60.0)
  assert skills == [Skills(reason='rate_limited')] * 3 and counts['rate_limited'] == 3
  assert time.monotonic() - start < fake.MAX_HANG_S


def test_retry_after_may_be_a_date_or_nonsense():
  read = analyzer_module._retry_after
  assert 55 < read({'retry-after': email.utils.formatdate(time.time() + 60, usegmt=True)}) <= 60
  assert 55 < read({'retry-after': email.utils.formatdate(time.time() + 60)}) <= 60
  assert read({'retry-after-ms': '250'}) == 0.25
  assert [read({'retry-after': value}) for value in ('soon', '-3', 'nan', '')] == [0, 0, 0, 0]
  assert read({}) == 0 and read({'retry-after': 'inf'}) == 86400


@pytest.mark.parametrize('trouble, reason', [
  (fake.status(500), 'server_error'), (fake.status(503), 'server_error'), (fake.status(408), 'server_error'),
  (fake.status(429), 'rate_limited'), (fake.broken(), 'connection'), (fake.garbage(), 'invalid_response'),
  (fake.garbage(b''), 'invalid_response'), (fake.garbage(b'[1, 2]'), 'invalid_response'),
  (fake.garbage(b'null'), 'invalid_response'), (fake.garbage(content_type='text/html'), 'invalid_response'),
  (fake.garbage(b'\xff\xfe'), 'invalid_response'),
])
def test_passing_trouble_is_repeated_and_lasting_trouble_is_counted(trouble, reason):
  skills, counts, _ = run(lambda prompt, nth: trouble if nth < 2 else fake.answer(fake.SKILLS))
  assert skills == [SKILLS] and (counts['requests'], counts['retries']) == (3, 2)
  skills, counts, _ = run(lambda prompt, nth: trouble)
  assert skills == [Skills(reason=reason)]
  assert counts == failed(reason, requests=3, retries=2)


def test_refused_connection_is_counted():
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    url = f'http://127.0.0.1:{free.getsockname()[1]}/v1'
  skills, counts = look_back(url, attempts(2))
  assert skills == [Skills(reason='connection')] * 2
  assert counts == {'trajectories': 2, 'failed': 2, 'connection': 2, 'requests': 6, 'retries': 4}


def test_silent_endpoint_costs_one_time_limit_per_request():
  start = time.monotonic()
  skills, counts, _ = run(lambda prompt, nth: fake.hang(), 2, timeout_s=0.2, max_attempts=2)
  assert skills == [Skills(reason='timeout')] * 2
  assert counts == {'trajectories': 2, 'failed': 2, 'timeout': 2, 'requests': 4, 'retries': 2}
  assert time.monotonic() - start < fake.MAX_HANG_S / 2


def test_all_requests_hanging_end_with_the_time_of_the_step():
  start = time.monotonic()
  skills, counts, _ = run(lambda prompt, nth: fake.hang(), 20, concurrency=4, step_timeout_s=0.5)
  assert skills == [Skills(reason='timeout')] * 20
  assert counts == {'trajectories': 20, 'failed': 20, 'timeout': 20, 'requests': 4}
  assert time.monotonic() - start < fake.MAX_HANG_S / 2


def test_finished_answers_survive_the_end_of_the_step():
  skills, counts, _ = run(
    lambda prompt, nth: fake.hang() if 'task 1;' in prompt else fake.answer(fake.SKILLS), 3, step_timeout_s=2.0)
  assert skills == [SKILLS, Skills(reason='timeout'), SKILLS] and counts['succeeded'] == 2


@pytest.mark.parametrize('case', golden_cases('analysis_flow', keep=lambda case: case['calls_made'] == 2))
def test_golden_unusable_reply_is_asked_once_more_with_its_end(case):
  replies = iter(case['responses'])
  skills, counts, requests = run(lambda prompt, nth: fake.answer(next(replies)), max_attempts=9)
  assert skills[0].usable == (not case['out']['has_error'])
  assert counts['requests'] == case['calls_made']
  # The first answer was asked by the plain prompt; the second question carries the end of the bad answer.
  first, second = (request.body['messages'][0]['content'] for request in requests)
  assert second.startswith(first) and case['responses'][0].strip() in second


def test_cut_json_without_the_flag_counts_as_truncated():
  skills, counts, _ = run(lambda prompt, nth: fake.answer('{"episode_skill": "open the dr'))
  assert skills == [Skills(reason='truncated')] and counts['requests'] == 2


@pytest.mark.parametrize('code, error_code', [(401, ''), (402, ''), (403, ''), (404, ''), (429, 'insufficient_quota')])
def test_refused_key_or_model_stops_the_run_at_once(code, error_code):
  start = time.monotonic()

  def script(prompt, nth):
    return fake.status(code, error='no such thing', error_code=error_code) if 'task 0;' in prompt else fake.hang()

  with pytest.raises(RuntimeError, match=f"refuses model 'fake' .HTTP {code}: .*no such thing.*TEST_KEY"):
    run(script, 4)
  assert time.monotonic() - start < fake.MAX_HANG_S


def test_other_client_errors_are_final_for_the_trajectory():
  skills, counts, _ = run(lambda prompt, nth: fake.status(400, error='context too long'))
  assert skills == [Skills(reason='bad_request')] and counts == failed('bad_request', requests=1)


def test_budget_of_tokens_ends_the_asking_for_good():
  with fake.FakeEndpoint(lambda prompt, nth: fake.answer(fake.SKILLS)) as endpoint:
    analyzer = analyzer_module.make({
      'model': 'm', 'base_url': endpoint.url, 'token_budget': 30, 'concurrency': 1, 'max_failure_share': 0.0})
    # 15 tokens each: the third is not asked, and that is no failure.
    pending = analyzer.submit(attempts(10))
    assert [one.reason for one in pending.result()].count('budget') == pending.counts['budget'] == 8
    assert pending.counts['failed'] == 0 and pending.counts['tokens_in'] + pending.counts['tokens_out'] == 30
    assert analyzer.submit(attempts(1)).result() == [Skills(reason='budget')]
    assert len(endpoint.requests) == 2
    analyzer.close()


def test_mixed_trouble_is_counted_exactly():
  replies = [
    lambda nth: fake.answer(fake.SKILLS, delay_s=0.1),
    lambda nth: fake.answer(fake.SKILLS) if nth else fake.status(429, retry_after='0.2'),
    lambda nth: fake.answer(fake.SKILLS) if nth else fake.status(500),
    lambda nth: fake.garbage(),
    lambda nth: fake.hang(),
    lambda nth: fake.answer('I cannot do that.'),
    lambda nth: fake.answer('{"step_skills": {"0": "a", "9": "b"}}'),
    lambda nth: fake.answer(None),
  ]
  skills, counts, requests = run(lambda prompt, nth: replies[number_of(prompt)](nth), 8, timeout_s=2.0, max_attempts=2)
  assert [one.reason for one in skills] == [
    '', '', '', 'invalid_response', 'timeout', 'no_json', '', 'empty']
  assert counts == {
    'trajectories': 8, 'succeeded': 4, 'partial': 1, 'failed': 4, 'dropped_steps': 1, 'invalid_response': 1,
    'timeout': 1, 'no_json': 1, 'empty': 1,
    # 1 + 2 + 2 for the good ones, 2 garbage, 2 hanging, 2 without JSON, 1 partial, 1 empty; 7 completions.
    'requests': 13, 'retries': 5, 'tokens_in': 70, 'tokens_out': 35}
  assert len(requests) == 13


def test_too_many_failures_stop_the_run_with_the_servers_words():
  with pytest.raises(RuntimeError, match=r'8 of 8 .*bad_request 8.*context too long'):
    run(lambda prompt, nth: fake.status(400, error='context too long'), 8, max_failure_share=0.5)


def test_no_trajectories_need_no_request():
  assert look_back('http://127.0.0.1:9/v1', []) == ([], {})


@pytest.mark.parametrize('settings, message', [
  ({'model': ''}, 'analyzer.model is empty'), ({'base_url': 'localhost:8000'}, 'must begin with http'),
  ({'base_url': '', 'api_key_env': 'UNSET_KEY'}, 'UNSET_KEY .* holds no key'),
])
def test_missing_settings_are_refused_by_name(settings, message):
  with pytest.raises(ValueError, match=message):
    analyzer_module.make({'model': 'm', 'base_url': 'http://127.0.0.1:9/v1'} | settings)


def test_missing_package_names_the_way_out(monkeypatch):
  monkeypatch.setitem(sys.modules, 'openai', None)
  with pytest.raises(ImportError, match='pip install openai'):
    analyzer_module.make({'model': 'm'})
