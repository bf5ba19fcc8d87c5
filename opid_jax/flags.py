"""The command line: a config file, overrides of its fields, a few options of the command itself."""

import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_collections
from absl import flags as absl_flags
from ml_collections import config_flags

from opid_jax import settings
from opid_jax.fields import FIELDS


class Option(NamedTuple):
  """An option of a command, beside the config: its default (str, int, float or bool) and one line of help."""

  default: str | int | float | bool
  help: str


def read(
  argv: Sequence[str], options: Mapping[str, Option]
) -> tuple[ml_collections.ConfigDict, dict[str, Any]]:
  """Reads a command line: `train.py --config=configs/webshop.py:grpo --config.num_steps=5 --workdir=a`.

  Overrides may stand in a file given by `--flagfile=`, but always after `--config`.

  Args:
    argv: the whole command line, the program's name first.
    options: what the command understands beside the config, by name.

  Returns:
    The checked and locked config, and the value of every option.

  Raises:
    ValueError: names the flag that is wrong, what was expected, and near matches of an unknown field.
  """
  values = absl_flags.FlagValues()
  absl_flags.DEFINE_multi_string('flagfile', [], 'file with flags, one per line', flag_values=values)
  try:
    argv = [argv[0], *values.read_flags_from_files(list(argv[1:]), force_gnu=False)]
  except absl_flags.Error as error:
    raise ValueError(str(error)) from error
  where = _config_position(argv)
  _, equals, path = argv[where].partition('=')
  if not equals:
    path = ''.join(argv[where + 1 : where + 2])
  overrides = [*argv[:where], *argv[where + (1 if equals else 2) :]]
  _check_names(overrides)
  config_flags.DEFINE_config_dict('config', load(path), flag_values=values, sys_argv=overrides)
  for name, option in options.items():
    _define(name, option, values)
  try:
    rest = values(overrides)
  except absl_flags.Error as error:
    raise ValueError(_explain(error)) from error
  if len(rest) > 1:
    raise ValueError(f'Unexpected argument {rest[1]!r}: every setting is written as --name=value.')
  config = values['config'].value
  settings.validate(config)
  return config, {name: values[name].value for name in options}


def read_or_exit(argv: Sequence[str], options: Mapping[str, Option], about: str):
  """`read` for a program's first line: an error or `--help` ends the process with a message, not a traceback.

  Args:
    argv: the whole command line.
    options: as in `read`.
    about: what the command does; printed by `--help`.

  Returns:
    What `read` returns.
  """
  if any(argument in ('-h', '--help', '-help') for argument in argv[1:]):
    print(help_text(options, about))
    sys.exit(0)
  try:
    return read(argv, options)
  except ValueError as error:
    sys.exit(f'{Path(argv[0]).name}: {error}')


def load(path: str) -> ml_collections.ConfigDict:
  """The config of a file and the words after its colon, `configs/webshop.py:grpo`, not yet checked.

  Raises:
    ValueError: if there is no such file, or it is no config file, or a word is unknown.
  """
  name, colon, words = path.partition(':')
  file = Path(name)
  if not file.is_file():
    raise ValueError(f'--config={path}: there is no file {name!r}. Give one such as configs/webshop.py.')
  names = runpy.run_path(str(file))
  if 'get_config' not in names:
    raise ValueError(f'--config={path}: {name} has no function get_config(), so it is no config file.')
  return names['get_config'](words) if colon else names['get_config']()


def help_text(options: Mapping[str, Option], about: str) -> str:
  """Text of `--help`: the options, and every config field with its default and what it may be."""
  lines = [about.strip(), '', '--config=FILE[:WORDS]  config file, before any --config.FIELD=VALUE']
  lines += [f'--{name}={option.default!r}  {option.help}' for name, option in options.items()]
  lines += ['', 'Fields of a config (defaults; the file may set others):']
  lines += [f'--config.{name}={field.default!r}  {settings.expected(name)}' for name, field in FIELDS.items()]
  return '\n'.join(lines)


def _config_position(argv: Sequence[str]) -> int:
  """Index of `--config`, which must be there once and before every override."""
  where = [i for i, argument in enumerate(argv) if re.match(r'--?config(=|$)', argument)]
  if not where:
    raise ValueError('No config was given: put --config=configs/webshop.py first.')
  if len(where) > 1:
    raise ValueError(f'--config is given {len(where)} times; give it once, with words after a colon.')
  early = [argument for argument in argv[: where[0]] if re.match(r'--?(no)?config\.', argument)]
  if early:
    raise ValueError(f'{early[0]} comes before the config that it changes: put --config first.')
  return where[0]


def _check_names(argv: Sequence[str]) -> None:
  for argument in argv:
    match = re.match(r'--?(?:no)?config\.([^=]*)', argument)
    if match and match[1] not in FIELDS:
      raise ValueError(f'{argument}: {settings.unknown_field(match[1])}')


def _define(name: str, option: Option, values: absl_flags.FlagValues) -> None:
  kind = type(option.default)
  define = {
    str: absl_flags.DEFINE_string,
    int: absl_flags.DEFINE_integer,
    float: absl_flags.DEFINE_float,
    bool: absl_flags.DEFINE_bool,
  }[kind]
  define(name, option.default, option.help, flag_values=values)


def _explain(error: absl_flags.Error) -> str:
  """Adds what a config field expects to absl's message about its value."""
  match = re.search(r'--?(?:no)?config\.([\w.]+)', str(error))
  if match and match[1] in FIELDS:
    return f'{error} Expected for {match[1]}: {settings.expected(match[1])}.'
  return str(error)
