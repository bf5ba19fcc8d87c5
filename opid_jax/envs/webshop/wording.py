"""What the policy reads: two wordings of the same page, in slots."""

from collections.abc import Sequence

from opid_jax.envs.webshop.engine import SEPARATOR
from opid_jax.prompts import history_records
from opid_jax.types import Prompt, State


def anchor(texts: Sequence[str], instruction: str) -> str:
  """The page after the instruction, each text in single quotes; a page without it as it is."""
  if instruction not in texts:
    return SEPARATOR.join(texts)
  rest = texts[list(texts).index(instruction) + 1:]
  return SEPARATOR.join(f"'{text}'" for text in rest)


def full(state: State, *, history_length: int, skip_history_above: int) -> Prompt:
  """The wording for language models.

  Args:
    state: a state that is not done.
    history_length: turns shown.
    skip_history_above: characters; a longer prompt is shown without history.
  """
  listed = '\n'.join(f"'{action}'," for action in state.actions)
  prompt = Prompt(
    head='You are a careful shopper on the website of a web shop. It shows one page at a time as text.\n'
         f'Your task is to: {state.task.text}.',
    history_intro='',
    history=(),
    observation=f'The page now shows: {state.observation}.',
    actions=f'On this page you can do the following:\n[\n{listed}\n]',
    turn="Now it's your turn to act. Before you act, reason about the page step by step, within "
         '<think> </think> tags.\nThen choose one action from the list, with your own words in a search, and '
         'write it within <action> </action> tags.',
  )
  records = history_records(state.history, history_length)
  if not records:
    return prompt
  return _unless_too_long(skip_history_above, prompt, Prompt(
    head=prompt.head,
    history_intro=f'So far you took {state.turn} step(s). The last {len(records)}, each with the page you '
                  'saw and what you did:',
    history=records,
    observation=f'You are now at step {state.turn + 1}. {prompt.observation}',
    actions=prompt.actions,
    turn=prompt.turn,
  ))


def brief(state: State, *, history_length: int, skip_history_above: int) -> Prompt:
  """The wording for a tiny policy that knows the shop: no instructions, past actions without their pages.

  The arguments are those of `full`.
  """
  first = max(len(state.history) - max(history_length, 0), 0)
  records = tuple(f'{first + i + 1}: {action}' for i, (_, action) in enumerate(state.history[first:]))
  prompt = Prompt(
    head=f'Your task is to: {state.task.text}',
    history_intro='',
    history=(),
    observation=state.observation,
    actions='',
    turn="Now it's your turn to act.",
  )
  with_history = Prompt(prompt.head, '', records, prompt.observation, '', prompt.turn)
  return _unless_too_long(skip_history_above, prompt, with_history)


def _unless_too_long(limit, prompt, with_history):
  slots = (with_history.head, with_history.history_intro, *with_history.history, with_history.observation,
           with_history.actions, with_history.turn)
  return prompt if sum(map(len, slots)) + len(slots) > limit else with_history
