"""Text environments, found by module name: `opid_jax.envs.<name>`; the file is the registration."""

import importlib
import pkgutil
from collections.abc import Mapping

from opid_jax.envs.base import TextEnv


def make(settings: Mapping, *, seed: int) -> TextEnv:
  """The environment that `settings['name']` names.

  Args:
    settings: the `env` group of the config.
    seed: of the run; decides the order of training tasks, never the held-out ones.

  Raises:
    ValueError: if there is no such environment, listing those there are.
  """
  name = settings['name']
  known = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in ('base', 'projection'))
  if name not in known:
    raise ValueError(f'Unknown environment {name!r}. Available: {", ".join(known)}.')
  return importlib.import_module(f'opid_jax.envs.{name}').make({**settings, 'seed': seed})
