import dataclasses
import random
import re

import pytest
from shared import golden_cases

from opid_jax import prompts
from opid_jax.types import Prompt

PROMPT = Prompt(
  head='You shop.\nYour task is to: find me a red mug',
  history_intro='So far you have taken these steps:',
  history=(
    "[Observation 1: 'a', Action 1: 'search[mug]']",
    "[Observation 2: 'b', Action 2: 'click[next >]']",
  ),
  observation='Page 2 of results',
  actions='You can: click[red mug], click[back]',
  turn="Now it's your turn to act.\nWrite <think> </think>, then <action> </action>.",
)


def chat(text):
  """A fake chat template over words: [user header] text [end] [assistant header]."""
  words = re.findall(r'\w+|[^\w\s]|\n', text)
  return ['<|im_start|>', 'user', *words, '<|im_end|>', '<|im_start|>', 'assistant']


def count(text):
  return len(chat(text))


def test_slots_stand_in_their_order():
  text = prompts.render(PROMPT, episode_skill='plan', step_skill='now', style='brief')
  p = PROMPT
  middle = [p.history_intro, *p.history, p.observation, p.actions]
  assert text == '\n'.join([p.head, 'Hint: plan', *middle, 'Hint: now', p.turn])


def test_empty_slots_leave_no_empty_line():
  assert prompts.render(Prompt('head', 'intro', (), 'obs', '', 'turn')) == 'head\nobs\nturn'


@pytest.mark.parametrize('style', list(prompts.STYLES))
@pytest.mark.parametrize('kind', ['episode', 'step'])
def test_a_skill_is_one_inserted_block_and_nothing_else_changes(style, kind):
  plain = prompts.render(PROMPT, style=style)
  skilled = prompts.render(PROMPT, **{f'{kind}_skill': 'open the drawer'}, style=style)
  inserted = prompts.block('open the drawer', kind=kind, style=style) + '\n'
  assert skilled.count(inserted) == 1
  assert skilled.replace(inserted, '') == plain
  before = PROMPT.head if kind == 'episode' else PROMPT.actions
  assert skilled.index(inserted) == plain.index(before) + len(before) + 1


@pytest.mark.parametrize('style', list(prompts.STYLES))
def test_a_blank_skill_is_no_skill(style):
  assert prompts.render(PROMPT, episode_skill=' \n', step_skill='', style=style) == prompts.render(PROMPT)


def test_braces_in_a_skill_are_text():
  assert '[{0} {y} {}]' in prompts.render(PROMPT, step_skill='{0} {y} {}')


def test_an_unknown_style_is_refused():
  with pytest.raises(ValueError, match='Available: full, brief'):
    prompts.render(PROMPT, style='long')


@pytest.mark.parametrize('style', list(prompts.STYLES))
def test_the_skill_stands_in_the_user_turn(style):
  plain = chat(prompts.render(PROMPT, style=style))
  skilled = chat(prompts.render(PROMPT, episode_skill='use the map', step_skill='turn left', style=style))
  assert plain[-3:] == skilled[-3:] == ['<|im_end|>', '<|im_start|>', 'assistant']
  assert plain.count('<|im_start|>') == skilled.count('<|im_start|>') == 2
  assert skilled.index('map') < skilled.index('<|im_end|>')
  assert skilled[:2] == ['<|im_start|>', 'user']


@pytest.mark.parametrize('case', golden_cases('memory_history', lambda c: c['kind'] == 'simple'))
def test_history_records_equal_the_reference(case):
  for records, context, n in zip(case['records'], case['context'], case['valid_lengths'], strict=True):
    history = [(r['obs'], r['action']) for r in records]
    got = prompts.history_records(history, case['history_length'])
    assert (len(got), '\n'.join(got)) == (n, context)


def test_no_history_is_kept_at_length_zero():
  assert prompts.history_records([('a', 'b')], 0) == ()


@pytest.mark.parametrize('case', golden_cases('prompt_injection'))
def test_text_insertion_equals_the_reference(case):
  assert case['out'] == prompts.insert_reference(
    case['observation'],
    episode_skill=case['episode_skill'],
    step_skill=case['step_skill'],
    episode_header='{{EPISODE_HEADER}}',
    step_header='{{STEP_HEADER}}',
  )


@pytest.mark.parametrize('case', golden_cases('teacher_signals', lambda c: c['augmented']))
def test_augmented_prompts_equal_the_reference(case):
  steps = [(name, index) for name, num_steps in case['trajectories'] for index in range(num_steps)]
  for row in case['augmented']:
    name, index = steps[row['row']]
    text = f"Your task is to: do {name}\nobs {index}\n\nNow it's your turn to act"
    plan = case['analyzer_plan'][name]
    for kind, skill in (('episode', plan['ep']), ('step', plan['st'].get(str(index), ''))):
      if row[kind]:
        chosen = {'episode_skill': '', 'step_skill': ''} | {f'{kind}_skill': skill}
        headers = {'episode_header': '{{EPISODE_HEADER}}', 'step_header': '{{STEP_HEADER}}'}
        assert prompts.insert_reference(text, **chosen, **headers) == row[kind]


def test_a_prompt_that_fits_is_left_alone():
  assert prompts.fit(PROMPT, count, max_tokens=count(prompts.render(PROMPT))) == (PROMPT, False)


def test_the_oldest_record_goes_first():
  budget = count(prompts.render(PROMPT)) - 1
  fitted, shortened = prompts.fit(PROMPT, count, max_tokens=budget)
  assert shortened
  assert fitted == dataclasses.replace(PROMPT, history=PROMPT.history[1:])


def test_the_observation_is_cut_in_the_middle_when_the_history_is_gone():
  words = [f'w{i}' for i in range(100)]
  long = dataclasses.replace(PROMPT, observation=' '.join(words))
  fitted, shortened = prompts.fit(long, count, max_tokens=100)
  assert shortened
  assert fitted.history == ()
  front, back = (part.split() for part in fitted.observation.split('[... cut ...]'))
  assert front == words[: len(front)]
  assert back == words[-len(back) :]
  assert len(front) > len(back) > 0
  assert (fitted.head, fitted.actions, fitted.turn) == (PROMPT.head, PROMPT.actions, PROMPT.turn)
  # One more word would not fit.
  assert count(prompts.render(fitted)) in (99, 100)


def test_actions_are_cut_last():
  crowded = dataclasses.replace(PROMPT, actions=' '.join(f'click[item{i}]' for i in range(200)))
  fitted, _ = prompts.fit(crowded, count, max_tokens=110)
  assert fitted.observation == '[... cut ...]'
  assert fitted.actions.startswith('click[item0]')
  assert fitted.actions.endswith('click[item199]')
  assert count(prompts.render(fitted)) <= 110


def test_any_observation_fits_any_budget_that_holds_task_and_instructions():
  rng = random.Random(0)
  least = count(prompts.render(Prompt(PROMPT.head, '', (), '', '', PROMPT.turn)))
  alphabet = 'ab \n.,鞋👟é'
  for _ in range(60):
    text = ''.join(rng.choice(alphabet) for _ in range(rng.randrange(400)))
    prompt = dataclasses.replace(PROMPT, observation=text, actions=text[:50])
    budget = rng.randrange(least, least + 150)
    fitted, shortened = prompts.fit(prompt, count, max_tokens=budget)
    tokens = chat(prompts.render(fitted))
    assert len(tokens) <= budget
    assert tokens[:2] == ['<|im_start|>', 'user']
    assert tokens[-2:] == ['<|im_start|>', 'assistant']
    assert shortened == (fitted != prompt)
    rendered = prompts.render(fitted)
    assert rendered.startswith(PROMPT.head)
    assert rendered.endswith(PROMPT.turn)


def test_both_contexts_of_a_shortened_prompt_differ_by_the_skill_only():
  long = dataclasses.replace(PROMPT, observation='word ' * 500)
  fitted, _ = prompts.fit(long, count, max_tokens=120)
  skilled = prompts.render(fitted, episode_skill='use the map')
  inserted = prompts.block('use the map', kind='episode') + '\n'
  assert skilled.replace(inserted, '') == prompts.render(fitted)
  assert PROMPT.head in skilled and PROMPT.turn in skilled


def test_a_budget_below_task_and_instructions_is_refused():
  with pytest.raises(ValueError, match=r'rollout\.max_prompt_tokens is 10'):
    prompts.fit(PROMPT, count, max_tokens=10)


def words(text):
  return len(text.split())


@pytest.mark.parametrize('style', list(prompts.STYLES))
@pytest.mark.parametrize('kind', ['episode', 'step'])
def test_a_clipped_skill_fits_with_its_heading(style, kind):
  skill = ' '.join(f'word{i}' for i in range(100))
  clipped = prompts.clip_skill(skill, words, max_tokens=40, kind=kind, style=style)
  assert skill.startswith(clipped)
  assert words(prompts.block(clipped, kind=kind, style=style)) == 40


def test_a_short_skill_is_only_stripped():
  assert prompts.clip_skill('  do it ', words, max_tokens=40) == 'do it'
  assert prompts.clip_skill(' ', words, max_tokens=1) == ''


def test_a_clipped_skill_ends_with_a_whole_clause_where_it_can():
  skill = 'Search first. Then open the item, then choose the red colour and never press buy before that'
  assert prompts.clip_skill(skill, words, max_tokens=11, style='brief') == (
    'Search first. Then open the item'
  )


def test_a_budget_below_the_heading_is_refused():
  with pytest.raises(ValueError, match=r'rollout\.max_skill_tokens is 3'):
    prompts.clip_skill('do it', words, max_tokens=3)
