"""The direction of imports, read from the source: lower layers know nothing of higher ones."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = 'opid_jax'

# A module imports only from the lines above its own; a folder is one entry, inside which only cycles are forbidden.
LAYERS = (
  ('types', 'fields'),
  ('advantages', 'losses', 'logprobs', 'attention', 'prompts', 'skills', 'settings', 'progress', 'interrupt'),
  ('algorithms', 'optimizer', 'sharding', 'checkpoint', 'metrics', 'flags', 'samples', 'library', 'models', 'envs'),
  ('sampling', 'rollout', 'layout', 'analyzers', 'runfolder'),
  ('learner', 'batch', 'policy', 'skill1'),
  ('passes', 'hindsight'),
  ('evaluate',),
  ('train', 'warmstart', 'export', 'report'),
  ('aot',),
)
TEXT_SIDE = ('prompts', 'skills', 'analyzers', 'library', 'envs', 'rollout', 'types', 'fields', 'settings')
ARRAY_SIDE = ('advantages', 'losses', 'logprobs', 'attention', 'algorithms')
ARRAYS = ('jax', 'jaxlib', 'flax', 'optax', 'chex', 'orbax')
INPUT_OUTPUT = ('os', 'io', 'sys', 'json', 'pathlib', 'shutil', 'subprocess', 'socket', 'tempfile', 'logging', 'absl')
CONFIG = ('ml_collections', f'{PACKAGE}.fields', f'{PACKAGE}.settings', f'{PACKAGE}.flags')
# Imported where they are used: they are slow to load, or not needed by everybody.
LAZY = (
  'torch', 'openai', 'transformers', 'matplotlib', 'orbax', 'tensorboardX', 'wandb', 'tqdm', 'tokenizers',
  'tiktoken', 'bm25s', 'alfworld', 'textworld',
)  # fmt: skip


def name_of(path):
  parts = path.relative_to(ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


MODULES = {name_of(path): ast.parse(path.read_text()) for path in sorted((ROOT / PACKAGE).rglob('*.py'))}


def imported(tree, *, top_level_only=False):
  """Full names of what a module imports, modules of this package resolved as far as they exist."""
  found = set()
  for node in tree.body if top_level_only else ast.walk(tree):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, 'imports are absolute'
      inner = {f'{node.module}.{alias.name}' for alias in node.names}
      found |= {name if name in MODULES else node.module for name in inner}
  return found


IMPORTS = {name: imported(tree) for name, tree in MODULES.items()}


def entry(name):
  """`opid_jax.envs.webshop.engine` -> `envs`; the package itself is ''."""
  return (name.split('.') + [''])[1]


def layer(name):
  return next((i for i, names in enumerate(LAYERS) if entry(name) in names), None)


def ours(names):
  return {name for name in names if name.split('.')[0] == PACKAGE}


def reachable(name):
  """Everything that importing a module may load, over all modules of this package in between."""
  seen, todo = set(), [name]
  while todo:
    for found in IMPORTS.get(todo.pop(), ()):
      if found not in seen:
        seen.add(found)
        todo.append(found)
  return seen


def belongs(name, groups):
  return name.split('.')[0] in groups or any(name == group or name.startswith(f'{group}.') for group in groups)


def side(entries):
  return [name for name in MODULES if entry(name) in entries]


@pytest.mark.parametrize('name', [name for name in MODULES if name != PACKAGE])
def test_imports_point_down(name):
  assert layer(name) is not None, f'{name} has no layer: add it to LAYERS'
  for found in ours(IMPORTS[name]) - {PACKAGE}:
    same_folder = entry(found) == entry(name)
    assert same_folder or layer(found) < layer(name), f'{name} imports {found}, which is not below it'


def test_no_import_cycles():
  TopologicalSorter({name: ours(found) - {name} for name, found in IMPORTS.items()}).prepare()


@pytest.mark.parametrize('name', side(TEXT_SIDE))
def test_text_side_never_loads_jax(name):
  assert not [found for found in reachable(name) if belongs(found, ARRAYS)]


@pytest.mark.parametrize('name', side(ARRAY_SIDE))
def test_array_side_sees_no_files_and_no_config(name):
  assert not [found for found in reachable(name) if belongs(found, INPUT_OUTPUT) or belongs(found, CONFIG)]
  calls = {node.func.id for node in ast.walk(MODULES[name]) if isinstance(node, ast.Call)
           and isinstance(node.func, ast.Name)}  # fmt: skip
  assert not calls & {'open', 'print', 'input'}


def test_environments_and_algorithms_meet_in_train_only():
  learning = [f'{PACKAGE}.{name}' for name in ('algorithms', 'advantages', 'losses', 'learner', 'skills')]
  for name in side(('envs',)):
    assert not [found for found in reachable(name) if belongs(found, learning)], name
  for name in side(('algorithms', 'advantages', 'losses', 'learner')):
    assert not [found for found in reachable(name) if belongs(found, [f'{PACKAGE}.envs'])], name
  for name in MODULES:
    direct = IMPORTS[name]
    meets = f'{PACKAGE}.algorithms' in direct and any(entry(found) == 'envs' for found in direct)
    assert not meets or entry(name) == 'train', name


@pytest.mark.parametrize('name', MODULES)
def test_slow_packages_are_imported_where_used(name):
  assert not [found for found in imported(MODULES[name], top_level_only=True) if belongs(found, LAZY)]


def test_no_torch_anywhere():
  assert not [name for name, found in IMPORTS.items() if any(belongs(other, ['torch']) for other in found)]
