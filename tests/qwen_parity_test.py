"""Logits against `transformers`: recorded ones everywhere, live ones and the way back where torch is installed."""

import json

import jax
import numpy as np
import pytest
import record_qwen
import toymodels

from opid_jax.models import hf, qwen

RECORDED = json.loads((record_qwen.DATA / 'qwen_logits.json').read_text())


def our_logits(folder, tokens=record_qwen.TOKENS):
  config = hf.load_config(folder)
  params = hf.load_params(folder, config)
  return np.asarray(jax.jit(qwen.logits, static_argnums=1)(params, config, np.array(tokens)[None]))[0]


@pytest.mark.parametrize('name, family, changes', record_qwen.SETTINGS, ids=lambda x: x if isinstance(x, str) else '')
def test_recorded_logits_of_transformers(tmp_path, name, family, changes):
  toymodels.write_toy(tmp_path, family, **changes)
  np.testing.assert_allclose(our_logits(tmp_path)[-1], RECORDED[name], atol=1e-4)


def test_recorded_settings_differ_from_each_other():
  # Or a setting that is ignored on both sides would pass.
  rows = np.array([RECORDED[name] for name in ('qwen2-tied', 'qwen2-yarn', 'qwen2-linear')])
  assert np.abs(rows[0] - rows[1]).max() > 1e-2 and np.abs(rows[0] - rows[2]).max() > 1e-2


@pytest.mark.parametrize('name, family, changes', record_qwen.SETTINGS, ids=lambda x: x if isinstance(x, str) else '')
def test_logits_of_transformers_with_torch(tmp_path, name, family, changes):
  pytest.importorskip('torch')
  toymodels.write_toy(tmp_path, family, **changes)
  np.testing.assert_allclose(our_logits(tmp_path), record_qwen.torch_logits(tmp_path), atol=1e-4)


@pytest.mark.parametrize('family', ['qwen2', 'qwen3'])
@pytest.mark.parametrize('tied', [True, False])
def test_transformers_writes_and_we_read(tmp_path, family, tied):
  torch = pytest.importorskip('torch')
  import transformers

  kind = {'qwen2': transformers.Qwen2Config, 'qwen3': transformers.Qwen3Config}[family]
  sizes = dict(vocab_size=70, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6)
  sizes |= {'head_dim': 10} if family == 'qwen3' else {}
  config = kind(
    **sizes,
    num_key_value_heads=3,
    tie_word_embeddings=tied,
    rope_parameters={'rope_type': 'default', 'rope_theta': 777.0},
  )
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(config).eval()
  for parameter in model.parameters():  # Fresh biases are zero and fresh norms one: they would hide mistakes.
    torch.nn.init.normal_(parameter, std=0.3)
  model.save_pretrained(tmp_path, max_shard_size='20KB')
  assert len(list(tmp_path.glob('*.safetensors'))) > 1
  tokens = record_qwen.TOKENS % 70
  with torch.no_grad():
    expected = model(torch.tensor(tokens[None])).logits[0].numpy()
  np.testing.assert_allclose(our_logits(tmp_path, tokens), expected, atol=1e-4 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize('name, family, changes', record_qwen.SETTINGS, ids=lambda x: x if isinstance(x, str) else '')
def test_transformers_loads_what_we_export(tmp_path, name, family, changes):
  torch = pytest.importorskip('torch')
  import transformers

  tensors = toymodels.write_toy(tmp_path / 'in', family, **changes)
  config = hf.load_config(tmp_path / 'in')
  params = hf.load_params(tmp_path / 'in', config)
  hf.save_folder(tmp_path / 'out', params, config, dtype='float32', max_shard_bytes=30000)
  model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out', output_loading_info=True)
  assert not any(report[key] for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
  state = model.state_dict()
  assert all(torch.equal(state[key], torch.tensor(tensors[key])) for key in tensors)
  np.testing.assert_array_equal(record_qwen.torch_logits(tmp_path / 'out'), record_qwen.torch_logits(tmp_path / 'in'))


def test_exported_dtype_is_the_one_transformers_sees(tmp_path):
  torch = pytest.importorskip('torch')
  import transformers

  toymodels.write_toy(tmp_path / 'in', 'qwen3')
  config = hf.load_config(tmp_path / 'in')
  hf.save_folder(tmp_path / 'out', hf.load_params(tmp_path / 'in', config), config)
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out')
  assert model.dtype == torch.bfloat16 and {p.dtype for p in model.parameters()} == {torch.bfloat16}
