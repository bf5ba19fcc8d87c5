import itertools
import json
import random

import pytest
from shared import golden_cases

from opid_jax.analyzers import loose_json
from opid_jax.analyzers.reply import parse, parse_counted

GOOD = {'episode_summary': 's', 'episode_skill': 'check price first', 'step_skills': {'1': 'filter by size'}}
QUOTED = ('{"episode_summary":"bought 32" monitor","episode_skill":"check size",'
          '"step_skills":{"2":"Compare 32" and 27" before click"}}')


def read(text, num_steps=5, max_step_skills=5):
  return parse(text, num_steps=num_steps, max_step_skills=max_step_skills)


# What we do better than the recorded reference, by the name of the case: (episode, steps, reason).
BETTER = {
  'draft then final: first object with episode_skill wins': ('final', {0: 'f'}, ''),
  'array of objects': ('second', {}, ''),
  'episode_skill null': ('', {}, 'no_skill'),
  'episode_skill list': ('a b', {}, ''),
  'non string skill values': ('k', {0: '5', 2: 'x'}, ''),
  'step_skills bad keys dropped': ('k', {1: 'b', 3: 'd'}, ''),
  'truncated outer, complete inner dict': ('', {}, 'truncated'),
  'truncated, nothing complete': ('', {}, 'truncated'),
}


@pytest.mark.parametrize('case', golden_cases('analysis_parse'))
def test_golden_reply_is_read_as_recorded_or_better(case):
  skills = read(case['response'], num_steps=100)
  if case['name'] in BETTER:
    assert (skills.episode, skills.steps, skills.reason) == BETTER[case['name']]
  elif not case['usable']:
    assert not skills.usable and not skills.episode and not skills.steps
  else:
    # Skills are one line each; the reference keeps line breaks and tabs.
    def squeeze(text):
      return ' '.join(text.split())
    assert skills.episode == squeeze(case['out']['episode_skill'])
    assert skills.steps == {int(key): squeeze(text) for key, text in case['out']['step_skills'].items()}
    assert skills.summary == squeeze(case['out']['episode_summary'])


@pytest.mark.parametrize('case', golden_cases(
  'analysis_flow', keep=lambda case: not case['out'].get('has_error') and 'raises' not in case['out']))
def test_golden_flow_keeps_existing_steps_in_their_own_order(case):
  most = case['max_step_skills_per_traj']
  candidates = case['candidate_step_indices']
  skills = read(case['responses'][case['calls_made'] - 1], num_steps=len(candidates), max_step_skills=most)
  words = ['zero', 'one', 'two', None, None, 'five', None, None, None, 'nine']
  named = [(index, words[index]) for index in candidates if words[index]]
  assert list(skills.steps.items()) == named[:most]
  if len(named) <= most:
    assert skills.steps == {int(key): text for key, text in case['out']['step_skills'].items()}
  assert (skills.episode, skills.summary) == ('k', 's')


# E01
@pytest.mark.parametrize('fence', ['```json', '```', '```JSON'])
def test_fences_and_chatter_change_nothing(fence):
  assert read(f'Sure:\n{fence}\n{json.dumps(GOOD)}\n```\nHope it helps') == read(json.dumps(GOOD))


# E02
def test_trailing_commas_and_braces_in_prose_are_forgiven():
  text = 'Plan for {agent}: {"episode_summary":"s","episode_skill":"k","step_skills":{"0":"a",},}'
  assert read(text) == read('{"episode_summary":"s","episode_skill":"k","step_skills":{"0":"a"}}')


# E03
FINAL = '{"episode_summary":"s","episode_skill":"final","step_skills":{"1":"x"}}'


@pytest.mark.parametrize('thought', [
  '<think>maybe {"episode_skill":"draft","step_skills":{}}</think>',
  '<THINK>maybe {"episode_skill":"draft","step_skills":{}}</THINK>',
  '<think>{"episode_skill":"a"}</think> then <think>{"episode_skill":"b"}</think>',
  'the template opened the thought {"episode_skill":"draft"} </think>',
  '<think>{"episode_skill":"never clo</think>',
  'no opening tag {"episode_skill":"never clo </think>',
  '<think>{"episode_skill":"say "hi" ok","x":}</think>',
  'draft: {"episode_skill":"draft"}\n',
])
def test_last_object_outside_thoughts_wins(thought):
  assert read(thought + FINAL).episode == 'final'


def test_draft_is_not_used_where_the_final_answer_is_missing():
  assert read('<think>{"episode_skill":"draft"}</think>') .reason == 'no_json'
  assert read('<think>I could say {"episode_skill":"draft"} but').reason == 'truncated'
  assert read('{"episode_skill":"draft"} better: {"episode_skill":"open the dr').reason == 'truncated'
  assert read('{"episode_skill":"draft"} better: {"episode_skill":[oops]}').reason == 'invalid_json'


def test_tags_inside_a_skill_are_text():
  skills = read('{"episode_skill": "write <think> first, then </think> and the action", }')
  assert skills.episode == 'write <think> first, then </think> and the action'


# E06
@pytest.mark.parametrize('text, outcome', [
  ('{}', ('', {}, 'no_skill')),
  ('{"episode_skill":""}', ('', {}, 'no_skill')),
  ('{"step_skills":{"0":"a"}}', ('', {0: 'a'}, '')),
  ('{"episode_skill":"k"}', ('k', {}, '')),
])
def test_missing_fields_have_a_stated_outcome(text, outcome):
  skills = read(text)
  assert (skills.episode, skills.steps, skills.reason) == outcome


# E07
def test_steps_that_do_not_exist_are_dropped_and_counted():
  text = '{"episode_skill":"k","step_skills":{"99":"d","2":"c","-1":"e","3":"b","0":"a"}}'
  skills, dropped = parse_counted(text, num_steps=3, max_step_skills=5)
  assert list(skills.steps.items()) == [(0, 'a'), (2, 'c')]
  assert dropped == 3
  assert read(text, num_steps=3, max_step_skills=1).steps == {0: 'a'}


# E08
@pytest.mark.parametrize('text, steps', [
  ('[{"episode_skill":"k"}]', {}),
  ('{"episode_skill":"k","step_skills":[{"step":2,"skill":"a"}]}', {2: 'a'}),
  ('{"episode_skill":"k","step_skills":[{"step":true,"skill":"b"},{"step":1},3]}', {}),
  ('{"episode_skill":"k","step_skills":null}', {}),
  ('{"episode_skill":"k","step_skills":"none"}', {}),
])
def test_wrong_containers_are_unwrapped_or_mean_no_step_skills(text, steps):
  skills = read(text)
  assert (skills.episode, skills.steps) == ('k', steps)


@pytest.mark.parametrize('value', [
  'null', 'None', '"None"', '"null"', '"N/A"', '"..."', '" "', 'true', '{}', '[]', '[1]'])
def test_nothing_never_becomes_a_skill(value):
  skills = read(f'{{"episode_skill": {value}, "step_skills": {{"0": {value}, "1": "a"}}}}')
  assert (skills.episode, skills.steps) == ('', {1: 'a'})


# E11
def test_unescaped_quotes_are_recovered_whole():
  skills = read(QUOTED)
  assert skills.steps == {2: 'Compare 32" and 27" before click'}
  assert (skills.summary, skills.episode) == ('bought 32" monitor', 'check size')


@pytest.mark.parametrize('text, episode, steps', [
  ('{"episode_skill":"compare 32", 27" sizes","step_skills":{}}', 'compare 32", 27" sizes', {}),
  ('{"episode_skill":"do "a", "b"","step_skills":{"0":"a "b"", "1":"c"},}', 'do "a", "b"', {0: 'a "b"', 1: 'c'}),
  ("{'episode_skill':'don't open','step_skills':{'0':'it's'}}", "don't open", {0: "it's"}),
  ('{"step_skills": {"0": "a "b" ",}, "episode_skill": "\\"a\\" or "b"" , }', '"a" or "b"', {0: 'a "b"'}),
  ('{"episode_skill":"a "b","c": "d"","step_skills":{"0":"x"}}', '', {}),
  ('{"episode_skill":"pick "A"","reason":"it "is" so","step_skills":{}}', '', {}),
  ('{"episode_skill":"pick "A"","step_skills":{"zero":"x"}}', '', {}),
  ('{"episode_skill":"pick "A"","episode_skill":"pick "B""}', '', {}),
  ('{"episode_skill":"pick "A"","step_skills":{"0":say "x""}}', '', {}),
])
def test_unescaped_quotes_never_give_half_a_skill(text, episode, steps):
  skills = read(text)
  assert (skills.episode, skills.steps) == (episode, steps)


def test_quoting_single_words_anywhere_is_recovered_whole_or_refused():
  words = 'open the old page then compare size and price before you click buy'.split()
  forms = ['{}', '{}', '"{}"', '{}"', '"{}", "x"', "'{}'", '{},']
  rng = random.Random(0)
  recovered = 0
  for _ in range(300):
    chosen = [rng.sample(words, rng.randint(2, 8)) for _ in range(3)]
    summary, episode, first = (' '.join(rng.choice(forms).format(word) for word in some) for some in chosen)
    steps = f'"step_skills":{{"0":"{first}"}}'
    skills = read(f'{{"episode_summary":"{summary}","episode_skill":"{episode}",{steps}}}')
    if skills.usable:
      recovered += 1
      assert (skills.summary, skills.episode, skills.steps) == (summary, episode, {0: first})
  assert recovered > 200


# E12
def test_cut_json_is_refused_at_every_length():
  text = json.dumps({'episode_summary': 's', 'episode_skill': 'check the box, then',
                     'step_skills': {'0': 'open the drawer', '1': 'say "hi"'}})
  for end in range(2, len(text)):
    skills = read(text[:end])
    assert skills.reason == 'truncated' and not skills.episode and not skills.steps
  for end in range(len(QUOTED)):
    assert not read(QUOTED[:end]).usable


@pytest.mark.parametrize('text, reason', [
  ('', 'empty'), (' \n', 'empty'), ('I cannot do that.', 'no_json'), ('[]', 'no_json'),
  ('{“episode_skill”: “k”}', 'no_json'), ('{"episode_skill": k}', 'invalid_json'),
  ('{"data": {}}', 'no_skill'), ('{' * 5000, 'no_json'), ('{"a":' * 5000, 'truncated'),
  ('[' * 5000 + '{"episode_skill": [' + '[' * 5000, 'truncated'),
  ('{"episode_skill": ' + '[' * 99 + '}', 'invalid_json'),
  ('{"episode_skill": ' + '1' * 5000, 'truncated'),
])
def test_every_failure_has_its_reason(text, reason):
  skills = read(text)
  assert (skills.reason, skills.episode, skills.steps) == (reason, '', {})


def test_skills_are_one_storable_line_of_bounded_length():
  skills = read(json.dumps({'episode_skill': 'a\n\tb\x00c \ud800d', 'step_skills': {'0': 'word ' * 300}}))
  assert skills.episode == 'a b c \ufffdd'
  assert len(skills.steps[0]) <= 400 and skills.steps[0].endswith('word')
  assert read(json.dumps({'episode_skill': 'A first rule. ' * 20 + 'x' * 300})).episode.endswith('rule.')


def test_number_too_long_for_python_is_no_step():
  assert read('{"episode_skill":"k","step_skills":{"%s":"a"}}' % ('9' * 5000)).steps == {}


def test_random_text_never_raises():
  rng = random.Random(1)
  pieces = [*'{}[]"\':,\\ a1', 'null', 'None', '<think>', '</think>', '"episode_skill"', '"step_skills"', '"0"',
            '\\u12', '\ud800', '```']
  for _ in range(3000):
    skills = read(''.join(rng.choices(pieces, k=rng.randint(1, 25))))
    assert skills.usable == bool(skills.episode or skills.steps)


def test_loose_reader_agrees_with_json_on_json():
  rng = random.Random(2)

  def value(depth):
    kind = rng.randrange(8 if depth else 6)
    text = ''.join(rng.choices('a"\\\n\'é{}[],:😀', k=5))
    simple = [None, True, False, rng.randint(-9, 9), rng.random() * 1e9, text]
    if kind < 6:
      return simple[kind]
    size = range(rng.randrange(4))
    return [value(depth - 1) for _ in size] if kind == 6 else {f'k"{i}': value(depth - 1) for i in size}

  for _, ascii_only in itertools.product(range(200), (False, True)):
    expected = {'x': value(3)}
    text = json.dumps(expected, ensure_ascii=ascii_only)
    found, end = loose_json.read(text, 0)
    # Escaped surrogates stay in pairs here; the reader of replies joins them.
    assert json.loads(json.dumps(found)) == expected and end == len(text)
