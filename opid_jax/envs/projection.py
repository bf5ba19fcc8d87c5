"""From the reply of a policy to an action: the text between the action tags, and whether it counts.

Shared by the environments whose replies look like `<think>...</think><action>...</action>`.
"""

MAX_ACTION_CHARS = 200
"""Longer actions are cut and invalid under the strict rule; no executable action comes close."""

_FIRST_CJK, _LAST_CJK = '\u4e00', '\u9fff'


def project_reference(response: str, *, tail_chars: int) -> tuple[str, bool]:
  """Projects a reply as the authors' code does (golden vectors `projection_*`).

  The reply is lower-cased; the action is what stands between the first opening and the first closing
  action tag, stripped. Without one of the tags it is the end of the reply, and invalid. Validity also needs
  both think tags, in lower case and anywhere, and no CJK ideograph. Whether the action can be executed plays
  no part, and reversed action tags yield an empty action that counts as valid.

  Args:
    response: the decoded reply.
    tail_chars: characters kept of a reply without action tags (20 in WebShop, 30 elsewhere).

  Returns:
    The action and whether it is valid.
  """
  lowered = response.lower()
  start, end = lowered.find('<action>'), lowered.find('</action>')
  if start < 0 or end < 0:
    return lowered[-tail_chars:], False
  has_thought = '<think>' in response and '</think>' in response
  has_cjk = any(_FIRST_CJK <= c <= _LAST_CJK for c in response)
  return lowered[start + len('<action>'):end].strip(), has_thought and not has_cjk


def project_strict(response: str, *, tail_chars: int) -> tuple[str, bool]:
  """The reference rule without its loopholes: tags in order, and an action that is one short line.

  Whether the page can execute the action is for the environment to add.

  Args:
    response: the decoded reply.
    tail_chars: characters kept of a reply without action tags.

  Returns:
    The action, a single line of at most `MAX_ACTION_CHARS` characters, and whether it is valid.
  """
  action, valid = project_reference(response, tail_chars=tail_chars)
  lowered = response.lower()
  in_order = all(lowered.find(f'<{tag}>') < lowered.find(f'</{tag}>') for tag in ('think', 'action'))
  fits = len(action) <= MAX_ACTION_CHARS and len(action.splitlines()) == 1
  return ' '.join(action.split())[:MAX_ACTION_CHARS] if not fits else action, valid and in_order and fits
