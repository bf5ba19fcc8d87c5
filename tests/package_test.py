"""What is installed and what an import loads."""

import importlib.metadata
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
# I05: environments of other projects, log services, clients, and whatever else takes seconds to load.
UNWANTED = (
  'torch', 'alfworld', 'textworld', 'openai', 'wandb', 'matplotlib', 'transformers', 'orbax', 'tensorboardX',
)  # fmt: skip
NAMED = ('jax', 'flax', 'optax', 'orbax-checkpoint', 'transformers', 'tiktoken', 'chex', 'ml-collections')


@pytest.fixture
def metadata(monkeypatch):
  """The arguments of `setup.py`."""
  arguments = {}
  monkeypatch.setattr(setuptools, 'setup', lambda **given: arguments.update(given))
  monkeypatch.chdir(ROOT)
  runpy.run_path(str(ROOT / 'setup.py'))
  return arguments


def test_importing_everything_loads_nothing_slow():
  """I05: in a bare process."""
  names = [
    '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')
    for path in (ROOT / 'opid_jax').rglob('*.py')
  ]
  code = f'import importlib, sys\nfor name in {names}: importlib.import_module(name)\nprint(*sys.modules)'
  loaded = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT, timeout=120)
  assert loaded.returncode == 0, loaded.stderr
  packages = {name.split('.')[0] for name in loaded.stdout.split()}
  assert 'opid_jax' in packages and not packages & set(UNWANTED)


def test_the_right_orbax_with_bounds(metadata):
  """I04: `orbax` on its own is another package; what moves together is bounded on both sides."""
  requirements = {r.name: r.specifier for r in map(Requirement, metadata['install_requires'])}
  assert 'orbax' not in requirements
  assert not set(NAMED) - set(requirements)
  for name in ('jax', 'flax', 'optax', 'orbax-checkpoint', 'chex', 'transformers', 'ml-collections'):
    operators = {specifier.operator for specifier in requirements[name]}
    assert operators == {'>=', '<'}, name
  assert '0.10.2' in requirements['jax'] and '0.12.0.1' in requirements['jax']


def test_supported_pythons(metadata):
  supported = SpecifierSet(metadata['python_requires'])
  assert [minor for minor in range(9, 16) if f'3.{minor}.0' in supported] == [11, 12, 13]


def test_extras_for_accelerators(metadata):
  extras = metadata['extras_require']
  assert any(requirement.startswith('jax[tpu]') for requirement in extras['tpu'])
  assert any(requirement.startswith('jax[cuda13]') for requirement in extras['cuda13'])
  # An accelerator's jax must allow the same versions as the plain one.
  plain = next(Requirement(r).specifier for r in metadata['install_requires'] if r.startswith('jax>'))
  assert all(Requirement(extras[name][0]).specifier == plain for name in ('tpu', 'cuda13'))


def test_what_is_installed_lies_within_the_bounds(metadata):
  for requirement in map(Requirement, metadata['install_requires']):
    assert importlib.metadata.version(requirement.name) in requirement.specifier, requirement


def test_license_and_policies_are_shipped(metadata):
  assert metadata['license'] == 'Apache-2.0'
  assert 'Apache License' in (ROOT / 'LICENSE').read_text()
  assert metadata['package_data'] == {'opid_jax': ['policies/**/*']}
  assert 'opid_jax.envs.webshop' in metadata['packages'] and 'tests' not in metadata['packages']
