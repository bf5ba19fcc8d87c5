"""Tasks, episodes and prompts."""

import json
import subprocess
import sys

import pytest
from shared import golden, shared_path

from opid_jax.envs import webshop
from opid_jax.envs.webshop import wording
from opid_jax.types import State, Task

BAD = ['open door then go north', '', 'a' * 5000, 'look\nlook', '<think>x</think><action>click[x]</action>',
       '<think>x</think><action>search[ ]</action>', '<think>x</think><action>click[search]</action>']


def _env(**settings):
  return webshop.make({'num_products': 200, 'num_heldout': 50, **settings})


@pytest.fixture(scope='module')
def env():
  return _env()


def _reply(action):
  return f'<think>so</think><action>{action}</action>'


def _play(env, task, *actions):
  states = [env.reset(task)]
  for action in actions:
    states.append(env.step(states[-1], _reply(action)))
  return states


def _shopping(task):
  goal = task.data
  return [f'search[{goal.instruction}]', f'click[{goal.asin}]', *(f'click[{v}]' for _, v in goal.options),
          'click[buy now]']


def test_solved_episode_pays_ten_once(env):
  task = env.panel('heldout', 1)[0]
  states = _play(env, task, *_shopping(task))
  assert [state.reward for state in states] == [0.0] * (len(states) - 1) + [10.0]
  assert (states[-1].is_done, states[-1].success, states[-1].score) == (True, True, 1.0)
  assert states[-1].inner.purchase['r_type'] == 1.0
  assert states[-1].turn == len(states[-1].history) == len(states) - 1


def test_partly_right_purchase_scores_but_pays_nothing(env):
  task = next(task for task in env.panel('heldout', 50) if len(task.data.options) == 1)
  last = _play(env, task, *_shopping(task)[:2], 'click[buy now]')[-1]
  count = len(task.data.attributes)
  assert (last.is_done, last.success, last.reward) == (True, False, 0.0)
  assert last.score == pytest.approx((count + 1) / (count + 2))


def test_finished_episode_must_not_be_stepped(env):
  task = env.panel('heldout', 1)[0]
  last = _play(env, task, *_shopping(task))[-1]
  with pytest.raises(ValueError, match="heldout/00000' ended after"):
    env.step(last, _reply('search[x]'))


@pytest.mark.parametrize('bad', BAD)
def test_bad_reply_is_an_invalid_turn_that_changes_no_page(env, bad):
  before = env.reset(env.panel('heldout', 1)[0])
  after = env.step(before, bad)
  assert not after.valid and not after.is_done and after.turn == 1
  assert (after.observation, after.actions, after.inner) == (before.observation, before.actions, before.inner)
  assert len(after.action) <= 200 and '\n' not in after.action


def test_states_are_values(env):
  task = env.panel('heldout', 1)[0]
  start = env.reset(task)
  once = env.step(start, _reply('search[soap]'))
  env.step(start, 'rubbish')
  assert start == env.reset(task)
  assert env.step(start, _reply('search[soap]')) == once


def test_first_observation_is_the_same_within_a_group_and_panel_order_is_fixed(env):
  task, other = env.panel('heldout', 2)
  assert env.reset(task) == env.reset(task)
  assert task.id != other.id and task.text != other.text
  assert list(env.panel('heldout', 50))[:7] == list(env.panel('heldout', 7))
  assert len({task.id for task in env.panel('heldout', 50)}) == 50


def test_goals_and_split_do_not_depend_on_the_seed_of_the_run():
  envs = [_env(seed=seed) for seed in range(3)]
  assert len({tuple(task.text for task in env.panel('heldout', 50)) for env in envs}) == 1
  assert len({tuple(task.id for task in env.panel('train', 50)) for env in envs}) == 1
  assert len({env.describe()['data_hash'] for env in envs}) == 1
  assert len({tuple(task.id for task in env.tasks(0, 16)) for env in envs}) == 3


def test_training_walks_through_every_goal_before_repeating_one(env):
  count = env.describe()['train_goals']
  drawn = [task.id for step in range(count // 10) for task in env.tasks(step, 10)]
  assert len(set(drawn)) == len(drawn)
  assert env.tasks(3, 10) == _env().tasks(3, 10) != env.tasks(4, 10)
  assert len(env.tasks(1, count)) == count and env.tasks(0, count) != env.tasks(1, count)


def test_panel_refuses_what_it_does_not_hold(env):
  with pytest.raises(ValueError, match="Unknown split 'test'. Available: train, heldout"):
    env.panel('test', 1)
  with pytest.raises(ValueError, match='holds 50 tasks, 51 were asked for'):
    env.panel('heldout', 51)


@pytest.mark.parametrize(('settings', 'message'), [
  ({'projection': 'loose'}, "env.projection is 'loose'; expected one of: strict, reference"),
  ({'goals': 'x'}, 'env.goals'),
  ({'instructions': 'x'}, 'env.instructions'),
  ({'max_turns': 0}, r'env.max_turns \(0\)'),
  ({'history_length': -1}, r'env.history_length \(-1\)'),
  ({'page_size': 3}, 'page_size'),
  ({'goals': 'human'}, 'No human goals can be made from the embedded catalogue'),
  ({'data_dir': '/nowhere/at/all'}, 'does not exist'),
])
def test_wrong_settings_are_refused_by_name(settings, message):
  with pytest.raises(ValueError, match=message):
    _env(**settings)


def test_description_tells_small_from_full_catalogues(env):
  described = env.describe()
  assert (described['data_dir'], described['products'], described['heldout_goals']) == ('', 200, 50)
  assert described['train_goals'] > 200 and described['results_per_page'] == 10
  assert _env(num_products=100).describe()['data_hash'] != described['data_hash']


def test_strict_projection_never_offers_the_search_button_and_reference_never_runs_it():
  strict, reference = _env(), _env(projection='reference')
  task = strict.panel('heldout', 1)[0]
  assert strict.reset(task).actions == ('search[<your query>]',)
  start = reference.reset(task)
  assert start.actions == ('search[<your query>]', 'click[search]')
  after = reference.step(start, _reply('click[search]'))
  assert after.valid and after.inner == start.inner


def test_reference_projection_performs_what_it_calls_invalid():
  env = _env(projection='reference')
  after = env.step(env.reset(env.panel('heldout', 1)[0]), '<action>search[soap]</action>')
  assert not after.valid and after.inner.page == 'results'


def test_every_offered_action_is_executable(env):
  task = env.panel('heldout', 1)[0]
  for state in _play(env, task, *_shopping(task)[:2]):
    for action in state.actions:
      assert env.step(state, _reply(action.replace('<your query>', 'soap'))).valid, action


def test_value_that_breaks_the_action_grammar_is_not_offered(tmp_path):
  item = {'asin': 'B1', 'name': 'shirt', 'customization_options': {'color': [{'value': 'a [b]'}, {'value': 'c'}]}}
  wish = {'B1': {'attributes': ['soft'], 'instruction': 'find shirts', 'instruction_attributes': ['soft']}}
  (tmp_path / 'items_shuffle.json').write_text(json.dumps([item]), encoding='utf-8')
  (tmp_path / 'items_ins_v2.json').write_text(json.dumps(wish), encoding='utf-8')
  env = webshop.make({'data_dir': str(tmp_path), 'num_heldout': 0})
  state = _play(env, env.panel('train', 1)[0], 'search[shirt]', 'click[b1]')[-1]
  assert state.actions[-2:] == ('click[buy now]', 'click[c]')


def test_environment_loads_no_jax():
  code = '''
import sys
from opid_jax.envs import webshop
webshop.make({'num_products': 100, 'num_heldout': 9})
sys.exit('jax' in sys.modules)
'''
  subprocess.run([sys.executable, '-c', code], check=True)


def test_real_catalogue_plays():
  env = webshop.make({'data_dir': str(shared_path('data', 'webshop'))})
  described = env.describe()
  assert (described['products'], described['heldout_goals']) == (1000, 500)
  assert 5000 < described['train_goals'] <= 6410
  task = env.panel('heldout', 1)[0]
  state = env.step(env.reset(task), _reply(f'search[{task.data.instruction.lower()}]'))
  assert state.valid and state.observation.startswith("'Back to Search' [SEP] 'Page 1 (Total results: 50)'")
  human = webshop.make({'data_dir': str(shared_path('data', 'webshop')), 'goals': 'human', 'num_heldout': 5})
  assert (human.describe()['train_goals'], human.describe()['heldout_goals']) == (8, 5)


def test_history_records_equal_the_recorded_ones():
  for case in golden('memory_history')['cases']:
    if case['kind'] == 'simple':
      for records, context in zip(case['records'], case['context'], strict=True):
        turns = [(record['obs'], record['action']) for record in records]
        assert '\n'.join(wording.history_records(turns, case['history_length'])) == context


def _long(text):
  return 'x' * 21000 if text == '<long:21000 chars>' else text


def _state(task, fields, anchor, history):
  actions = tuple(line.strip("',") for line in fields['available_actions'].split('\n'))
  return State(Task('t', 0, task), anchor, actions, tuple(history), len(history))


@pytest.mark.parametrize('case', range(3))
def test_prompt_slots_hold_the_recorded_fields(case):
  """The recorded manager's fields, from its raw pages and projected actions; the wording around is ours."""
  case = golden('env_webshop_fields')['cases'][case]
  histories, previous = [[], []], []
  for entry in case['log']:
    for i, fields in enumerate(entry['prompt_fields']):
      task, anchor = fields['task_description'], _long(entry['anchor'][i])
      quoted = anchor.startswith("'")
      texts = [anchor[1:-1].replace("' [SEP] '", ' [SEP] ')] if quoted else [anchor]
      page = ['WebShop', 'Instruction:', task, *texts[0].split(' [SEP] ')] if quoted else texts
      assert wording.anchor(page, task) == anchor
      if 'env_actions' in entry:
        histories[i].append((previous[i], entry['env_actions'][i]))
      prompt = wording.full(_state(task, fields, anchor, histories[i]), history_length=case['history_length'],
                            skip_history_above=20000)
      assert f'Your task is to: {task}' in prompt.head
      assert _long(fields['current_observation']) in prompt.observation
      assert f'[\n{fields["available_actions"]}\n]' in prompt.actions
      assert '\n'.join(prompt.history) == fields.get('action_history', '')
      assert ('step_count' in fields) == bool(prompt.history_intro)
      if 'step_count' in fields:
        assert f'you took {fields["step_count"]} step' in prompt.history_intro
        assert f'last {fields["history_length"]},' in prompt.history_intro
        assert f'now at step {fields["current_step"]}.' in prompt.observation
      assert prompt.turn.startswith("Now it's your turn")
      assert all(tag in prompt.turn for tag in ('<think> </think>', '<action> </action>'))
    previous = [_long(text) for text in entry['anchor']]


def test_brief_prompt_shows_past_actions_only(env):
  brief = _env(instructions='brief')
  task = brief.panel('heldout', 1)[0]
  state = _play(brief, task, 'search[a]', 'search[b]', 'search[c]')[-1]
  prompt = brief.prompt(state)
  assert prompt.head == f'Your task is to: {task.text}'
  assert (prompt.history_intro, prompt.history, prompt.actions) == ('', ('2: search[b]', '3: search[c]'), '')
  assert prompt.observation == state.observation
  assert prompt.turn == "Now it's your turn to act."
  assert len(env.prompt(state).head) > len(prompt.head)
