"""Recorded reference data that lies beside the checkout; tests that need it are skipped without it."""

import json
import os
from pathlib import Path

import pytest


def shared_path(*parts: str) -> Path:
  """Path below the shared folder (`OPID_SHARED`, or `shared` beside the project root); skips if absent."""
  root = Path(os.environ.get('OPID_SHARED', Path(__file__).resolve().parents[2] / 'shared'))
  path = root.joinpath(*parts)
  if not path.exists():
    pytest.skip(f'{path} is absent: set OPID_SHARED to the folder of recorded data', allow_module_level=True)
  return path


def golden(name: str) -> dict:
  """`shared/golden/<name>.json`; non-finite numbers stay the strings 'NaN', 'Infinity', '-Infinity'."""
  return json.loads(shared_path('golden', f'{name}.json').read_text(encoding='utf-8'))


def golden_cases(name: str, keep=lambda case: True) -> list:
  """Parameters for `pytest.mark.parametrize`: the cases of a file, or one skipped case without it."""
  try:
    found = golden(name)['cases']
  except pytest.skip.Exception as absent:
    return [pytest.param(None, marks=pytest.mark.skip(reason=str(absent)))]
  return [pytest.param(case, id=str(i)) for i, case in enumerate(found) if keep(case)]
