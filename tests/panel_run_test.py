"""Evaluation and export as programs: the panel does not depend on the machine's room, an export is the policy."""

import json

import jax
import numpy as np
import pytest
import tinyrun
from tinyrun import compiled, one_device  # noqa: F401 (fixtures)

from opid_jax import evaluate, export, policy, sharding
from opid_jax.models import hf

pytestmark = pytest.mark.usefixtures('compiled', 'one_device')

CHANGES = {'num_steps': 1, 'evaluate.before': False, 'evaluate.num_tasks': 10, 'optimizer.learning_rate': 0.003}


@pytest.fixture(scope='module')
def trained(tmp_path_factory, compiled):  # noqa: F811
  """A run of one step, which moved every parameter."""
  folder = tmp_path_factory.mktemp('trained') / 'run'
  flags = tinyrun.flags(CHANGES | {'compile_cache': compiled})
  code, text = tinyrun.finish(tinyrun.start('train', *flags, f'--workdir={folder}', folder=folder.parent))
  assert code == 0, text
  return folder


@pytest.fixture(scope='module')
def exported(trained):
  """Its Hugging Face folder in float32."""
  out = trained.parent / 'hf'
  export.main([
    'export', *tinyrun.flags(CHANGES), f'--checkpoint={trained / "checkpoints"}', f'--out={out}', '--dtype=float32',
  ])  # fmt: skip
  return out


def play(tmp_path, *options, **changes):
  """Result and trajectories of `python -m opid_jax.evaluate`."""
  fields = CHANGES | {name.replace('__', '.'): value for name, value in changes.items()}
  evaluate.main(['evaluate', *tinyrun.flags(fields), f'--output={tmp_path / "out.jsonl"}', *options])
  first, *rest = (json.loads(line) for line in (tmp_path / 'out.jsonl').read_text().splitlines())
  return first, rest


@pytest.mark.parametrize('slots, rows', [(3, 2), (4, 4), (10, 1)])
def test_panel_does_not_depend_on_the_number_of_slots(tmp_path, slots, rows):
  expected = play(tmp_path, rollout__slots=8)
  found = play(tmp_path, rollout__slots=slots, rollout__prefill_rows=rows)
  assert found == expected
  assert [entry['task'] for entry in found[1]] == [f'heldout/{i:05d}' for i in range(10)]
  assert found[0]['eval/num_tasks'] == 10


def test_training_panel_shares_no_task_with_the_held_out_one(tmp_path):
  held_out, training = play(tmp_path)[1], play(tmp_path, '--split=train')[1]
  assert not {entry['text'] for entry in held_out} & {entry['text'] for entry in training}


def test_checkpoint_plays_as_the_run_reported(tmp_path, trained):
  result, _ = play(tmp_path, f'--checkpoint={trained / "checkpoints" / "1"}')
  reported = tinyrun.rows(trained)[-1]
  assert {name: value for name, value in result.items() if name != 'env'} == {
    name: value for name, value in reported.items() if name != 'step'
  }


def test_export_plays_as_its_checkpoint(tmp_path, trained, exported):
  expected = play(tmp_path, f'--checkpoint={trained / "checkpoints" / "1"}')
  assert play(tmp_path, **{'model__path': str(exported)}) == expected
  assert play(tmp_path)[1] != expected[1]  # The policy before training acts otherwise.


def test_export_holds_the_checkpoint_bit_for_bit(trained, exported):
  config = hf.load_config(exported)
  tree = hf.load_params(exported, config, dtype='float32')
  found = {sharding.path_of(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
  tinyrun.assert_equal_params(found, tinyrun.params(trained, 1))


def test_export_gives_the_same_logits_in_transformers(trained, exported):
  torch = pytest.importorskip('torch', reason='torch is not installed')
  import transformers

  from opid_jax.models import qwen

  model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
  tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
  ids = tokenizer('find me a sofa <think>look for it</think>')['input_ids']
  with torch.no_grad():
    expected = model(torch.tensor([ids])).logits[0].numpy()
  params = policy.load_params(policy.describe(tinyrun.make_config(model__path=str(exported)), None), _mesh())
  found = qwen.logits(params, hf.load_config(exported), np.asarray([ids], np.int32))[0]
  np.testing.assert_allclose(np.asarray(found), expected, atol=1e-4)


def _mesh():
  return sharding.make_mesh(jax.devices()[:1])


def test_another_export_is_not_overwritten(trained, exported):
  with pytest.raises(FileExistsError, match='hf exists and is not an empty folder'):
    export.main(['export', *tinyrun.flags(CHANGES), f'--checkpoint={trained / "checkpoints"}', f'--out={exported}'])


def test_missing_checkpoint_is_named(tmp_path):
  with pytest.raises(ValueError, match='No complete checkpoint at .*nowhere'):
    evaluate.main(['evaluate', *tinyrun.flags(CHANGES), f'--checkpoint={tmp_path / "nowhere"}'])
  with pytest.raises(SystemExit, match='--out is missing'):
    export.main(['export', *tinyrun.flags(CHANGES), f'--checkpoint={tmp_path}'])
