"""Builds a config from the declared fields, and checks it: the one door for types, ranges and contradictions.

Everything here runs before a model is loaded, so a wrong setting costs a second and not an hour.
"""

import difflib
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import ml_collections

from opid_jax.fields import FIELDS, Field


def make(changes: Mapping[str, Any]) -> ml_collections.ConfigDict:
  """The default config with some fields changed, locked.

  Args:
    changes: value by full name, for example `{'rollout.group_size': 4}`.

  Returns:
    A locked `ConfigDict` with one group per prefix; values are checked by `validate`, later.

  Raises:
    ValueError: if a name is unknown.
    TypeError: if a value has not the type of the field.
  """
  config = ml_collections.ConfigDict()
  for name, field in FIELDS.items():
    _group(config, name)[_leaf(name)] = field.default
  config.lock()
  for name, value in changes.items():
    if name not in FIELDS:
      raise ValueError(unknown_field(name))
    _group(config, name)[_leaf(name)] = value
  return config


def choose(words: str, axes: Mapping[str, Iterable[str]]) -> dict[str, str | None]:
  """Reads the words after a config file's colon, in any order, at most one per axis.

  Args:
    words: comma-separated, for example `'qwen2.5-7b,grpo'`; '' chooses nothing.
    axes: known words by what they choose, for example `{'algorithm': ('opid', 'grpo')}`.

  Returns:
    The chosen word per axis, None where none was given.

  Raises:
    ValueError: if a word is unknown, repeated or contradicts another one; lists the known ones.
  """
  axes = {axis: tuple(known) for axis, known in axes.items()}
  known = '; '.join(f'{axis}: {", ".join(options)}' for axis, options in axes.items())
  chosen: dict[str, str | None] = dict.fromkeys(axes)
  for word in filter(None, (part.strip() for part in words.split(','))):
    axis = next((axis for axis, options in axes.items() if word in options), None)
    if axis is None:
      near = difflib.get_close_matches(word, [w for options in axes.values() for w in options], n=1)
      hint = f' Did you mean {near[0]!r}?' if near else ''
      raise ValueError(f'Unknown word {word!r} after the config file.{hint} Known words: {known}.')
    if chosen[axis] is not None:
      twice = chosen[axis] == word
      what = f'is given twice ({word!r})' if twice else f'is both {chosen[axis]!r} and {word!r}'
      raise ValueError(f'The {axis} {what} after the config file; give one. Known words: {known}.')
    chosen[axis] = word
  return chosen


def unknown_field(name: str) -> str:
  """The message about a field that does not exist, with the full path and the nearest known ones."""
  near = difflib.get_close_matches(name, FIELDS, n=3, cutoff=0.6)
  siblings = [known for known in FIELDS if known.rpartition('.')[0] == name.rpartition('.')[0]]
  if near:
    hint = f'Did you mean {" or ".join(near)}?'
  elif siblings:
    hint = f'Known there: {", ".join(siblings)}.'
  else:
    hint = f'Known groups: {", ".join(sorted({known.split(".")[0] for known in FIELDS}))}.'
  return f'Unknown config field {name!r}. {hint}'


def expected(name: str) -> str:
  """What may stand in a field, in words, for error messages."""
  field = FIELDS[name]
  kind = {int: 'an integer', float: 'a number', bool: 'true or false', str: 'text'}[type(field.default)]
  if field.choices:
    return f'one of {", ".join(field.choices)}'
  bounds = [
    f'{word} {bound:g}'
    for word, bound in (('at least', field.low), ('above', field.above), ('at most', field.high))
    if math.isfinite(bound)
  ]
  return ' '.join([kind, ' and '.join(bounds)]).strip()


def validate(config: ml_collections.ConfigDict, *, num_devices: int = 0) -> None:
  """Checks every field again (a launcher may have changed them) and the fields that need each other.

  Args:
    config: what `make` returned, with any changes.
    num_devices: devices of the run over all hosts; 0 = not known, the mesh is then only checked by itself.

  Raises:
    ValueError: names every field that is wrong, what was found and what was expected.
  """
  problems = _field_problems(config)
  # Contradictions are looked for among values of the right type only.
  if not problems:
    pairs = [*_acting(config), *_looking_back(config), *_learning(config)]
    problems = [message for is_bad, message in pairs if is_bad] + _mesh_problems(config, num_devices)
  if problems:
    raise ValueError('The config cannot be used:\n' + '\n'.join(f'  {problem}' for problem in problems))
  a = config.algorithm
  if a.name == 'opid' and 0 < a.stop_step <= a.start_step:
    warnings.warn(
      f'algorithm.stop_step ({a.stop_step}) is not after algorithm.start_step ({a.start_step}): '
      'the skill term is never used.',
      stacklevel=2,
    )


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
  """Value by full name, in the order of the config; the inverse of what `make` does with its argument."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, Mapping | ml_collections.ConfigDict):
      flat.update({f'{key}.{rest}': inner for rest, inner in flatten(value).items()})
    else:
      flat[str(key)] = value
  return flat


def _group(config: ml_collections.ConfigDict, name: str) -> ml_collections.ConfigDict:
  head, dot, _ = name.partition('.')
  if not dot:
    return config
  if head not in config:
    config[head] = ml_collections.ConfigDict()
  return config[head]


def _leaf(name: str) -> str:
  return name.rpartition('.')[2]


def _field_problems(config: ml_collections.ConfigDict) -> list[str]:
  flat = flatten(config)
  unknown = [unknown_field(name) for name in flat if name not in FIELDS]
  missing = [f'{name} is missing; expected {expected(name)}.' for name in FIELDS if name not in flat]
  wrong = [
    f'{name} is {flat[name]!r}; expected {expected(name)}.'
    for name, field in FIELDS.items()
    if name in flat and not _fits(flat[name], field)
  ]
  return unknown + missing + wrong


def _fits(value: Any, field: Field) -> bool:
  # Exact types: True is an int to Python, and an int in place of a float compiles other programs.
  if type(value) is not type(field.default):
    return False
  if isinstance(value, bool):
    return True
  if isinstance(value, str):
    return not field.choices or value in field.choices
  return math.isfinite(value) and field.low <= value <= field.high and value > field.above


def _acting(c: ml_collections.ConfigDict) -> list[tuple[bool, str]]:
  r = c.rollout
  return [
    (
      r.temperature == 0,
      'rollout.temperature is 0, which leaves nothing to explore: training needs it above 0 '
      '(evaluate.greedy=true evaluates without sampling).',
    ),
    (
      r.top_p < 1 or r.top_k > 0,
      f'rollout.top_p ({r.top_p:g}) and rollout.top_k ({r.top_k}) truncate the sampled distribution, which '
      'the probability ratio of the loss does not know: training needs top_p=1.0 and top_k=0.',
    ),
    (
      r.group_size < 2,
      f'rollout.group_size is {r.group_size}: a group of one attempt has advantage 0; use at least 2.',
    ),
    (
      0 < r.max_episode_tokens < r.max_response_tokens,
      f'rollout.max_episode_tokens ({r.max_episode_tokens}) is below rollout.max_response_tokens '
      f'({r.max_response_tokens}): not even the first response would fit; use 0 for no limit.',
    ),
    (
      r.prefill_rows > r.slots,
      f'rollout.prefill_rows ({r.prefill_rows}) exceeds rollout.slots ({r.slots}).',
    ),
    (
      r.bucket > r.max_prompt_tokens,
      f'rollout.bucket ({r.bucket}) exceeds rollout.max_prompt_tokens ({r.max_prompt_tokens}).',
    ),
    (
      c.evaluate.temperature == 0 and not c.evaluate.greedy,
      'evaluate.temperature is 0: set evaluate.greedy=true for the most likely token, or a value above 0.',
    ),
    (
      c.evaluate.num_tasks > c.env.num_heldout,
      f'evaluate.num_tasks ({c.evaluate.num_tasks}) exceeds the held-out goals, env.num_heldout '
      f'({c.env.num_heldout}).',
    ),
    (
      c.env.results_per_page > c.env.max_results,
      f'env.results_per_page ({c.env.results_per_page}) exceeds env.max_results ({c.env.max_results}).',
    ),
  ]


def _looking_back(c: ml_collections.ConfigDict) -> list[tuple[bool, str]]:
  a, analyzer = c.algorithm, c.analyzer
  if a.name != 'opid':
    return []
  return [
    (
      analyzer.name == 'none',
      'algorithm.name is opid, which needs skills, but analyzer.name is none: choose an analyzer, '
      'or algorithm.name=grpo.',
    ),
    (
      a.step_weight > 0 and a.routing != 'episode' and analyzer.max_step_skills == 0,
      f'algorithm.step_weight is {a.step_weight:g} but analyzer.max_step_skills is 0: no step would have '
      'a skill; ask for some, or set algorithm.step_weight=0.0.',
    ),
    (
      a.routing == 'step' and a.step_weight == 0 < a.episode_weight,
      'algorithm.routing is step but algorithm.step_weight is 0: no skill would count.',
    ),
    (
      a.routing == 'episode' and a.episode_weight == 0 < a.step_weight,
      'algorithm.routing is episode but algorithm.episode_weight is 0: no skill would count.',
    ),
    (
      analyzer.name == 'openai' and not analyzer.model,
      'analyzer.name is openai but analyzer.model is empty: name the model that the endpoint serves.',
    ),
    (
      analyzer.name == 'openai' and not analyzer.api_key_env,
      'analyzer.name is openai but analyzer.api_key_env is empty: name the variable that holds the key.',
    ),
    (
      analyzer.timeout_s > analyzer.step_timeout_s,
      f'analyzer.timeout_s ({analyzer.timeout_s:g}) exceeds analyzer.step_timeout_s '
      f'({analyzer.step_timeout_s:g}).',
    ),
  ]


def _learning(c: ml_collections.ConfigDict) -> list[tuple[bool, str]]:
  r, row, block = c.rollout, c.learner.row_length, c.model.attention_block
  longest = r.max_prompt_tokens + r.max_skill_tokens + r.max_response_tokens
  return [
    (
      longest > row,
      f'learner.row_length ({row}) is shorter than the longest sequence: {longest} = '
      f'rollout.max_prompt_tokens ({r.max_prompt_tokens}) + max_skill_tokens ({r.max_skill_tokens}) + '
      f'max_response_tokens ({r.max_response_tokens}).',
    ),
    (
      c.learner.slots_per_row < r.max_response_tokens,
      f'learner.slots_per_row ({c.learner.slots_per_row}) is below rollout.max_response_tokens '
      f'({r.max_response_tokens}): the longest response would not find room in a row.',
    ),
    (
      c.learner.slots_per_row > row,
      f'learner.slots_per_row ({c.learner.slots_per_row}) exceeds learner.row_length ({row}).',
    ),
    (
      block > 0 and row % max(block, 1) > 0,
      f'learner.row_length ({row}) is not a multiple of model.attention_block ({block}).',
    ),
    (
      0 < c.loss.dual_clip <= 1,
      f'loss.dual_clip is {c.loss.dual_clip:g}: it must be above 1, or 0 for off.',
    ),
    (
      c.optimizer.warmup_steps >= c.num_steps > 1,
      f'optimizer.warmup_steps ({c.optimizer.warmup_steps}) leaves nothing of num_steps ({c.num_steps}).',
    ),
    (
      c.log.wandb and not c.log.wandb_project,
      'log.wandb is on but log.wandb_project is empty: name the project.',
    ),
  ]


def _mesh_problems(c: ml_collections.ConfigDict, num_devices: int) -> list[str]:
  sizes = (c.mesh.data, c.mesh.fsdp, c.mesh.tensor)
  if 0 in sizes:
    return [f'mesh is {sizes}: an axis has at least one device, or -1 for what is left.']
  if sizes.count(-1) > 1:
    return [f'mesh is {sizes}: at most one axis can be -1, what is left.']
  if not num_devices:
    return []
  fixed = math.prod(size for size in sizes if size != -1)
  left = num_devices // fixed
  if num_devices % fixed or (-1 not in sizes and left != 1):
    return [
      f'mesh.data x mesh.fsdp x mesh.tensor = {" x ".join(map(str, sizes))} does not use exactly the '
      f'{num_devices} devices: set one axis to -1 (what is left) or change the sizes.'
    ]
  shards = math.prod(left if size == -1 else size for size in sizes[:2])
  return [
    f'{name} ({count}) is not a multiple of the {shards} devices that share it (mesh.data x mesh.fsdp).'
    for name, count in (
      ('learner.rows_per_call', c.learner.rows_per_call),
      ('rollout.slots', c.rollout.slots),
      ('rollout.prefill_rows', c.rollout.prefill_rows),
    )
    if count % shards
  ]
