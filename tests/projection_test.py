"""From replies to actions."""

import pytest
from shared import golden

from opid_jax.envs.projection import MAX_ACTION_CHARS, project_reference, project_strict


@pytest.mark.parametrize(('name', 'tail_chars'), [('webshop', 20), ('alfworld', 30), ('sciworld', 30)])
def test_reference_projection_equals_the_recorded_one(name, tail_chars):
  for case in golden(f'projection_{name}')['cases']:
    expected = (case['action'], bool(case['valid']))
    assert project_reference(case['text'], tail_chars=tail_chars) == expected, case['text']


def test_strict_projection_accepts_a_well_formed_reply():
  assert project_strict('<think>a</think>\n<action> Click[X] </action>', tail_chars=20) == ('click[x]', True)


@pytest.mark.parametrize('reply', [
  '</action><think>x</think><action>go</action>',
  '</think><think><action>go</action>',
  '<think>x</think><action></action>',
  '<think>x</think><action>look\nlook</action>',
  f'<think>x</think><action>{"a" * 5000}</action>',
  '<action>go</action>',
  '<think>x</think><action>看</action>',
])
def test_strict_projection_closes_the_loopholes(reply):
  action, valid = project_strict(reply, tail_chars=20)
  assert not valid
  assert len(action) <= MAX_ACTION_CHARS and '\n' not in action


@pytest.mark.parametrize('reply', ['I go to the desk.', '<action>go to desk 1', 'go to desk 1</action>', ''])
def test_reply_without_an_action_yields_its_end_and_is_invalid(reply):
  for project in (project_reference, project_strict):
    assert project(reply, tail_chars=20) == (reply.lower()[-20:], False)


def test_end_of_a_reply_over_several_lines_becomes_one_line():
  assert project_strict('no tags\nat\n\nall', tail_chars=20) == ('no tags at all', False)
