"""Weights in and out. The oracle is `toymodels`: an own writer and a decoder in NumPy."""

import errno
import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toymodels

from opid_jax.models import hf, qwen, tensorfile

TOKENS = np.array([5, 90, 17, 3, 3, 60, 41, 8])
FAMILIES = ['qwen2', 'qwen3']


def load(folder, **options):
  config = hf.load_config(folder)
  return config, hf.load_params(folder, config, **options)


# Compiled once per configuration.
_LOGITS = jax.jit(qwen.logits, static_argnums=1)


def logits(folder):
  config, params = load(folder)
  return np.asarray(_LOGITS(params, config, TOKENS[None]))[0]


def equal_trees(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('tied', [True, False])
def test_logits_are_those_of_a_decoder_written_in_numpy(tmp_path, family, tied):
  tensors = toymodels.write_toy(tmp_path, family, tie_word_embeddings=tied)
  expected = toymodels.numpy_logits(tensors, TOKENS, head_dim={'qwen2': 8, 'qwen3': 16}[family])
  np.testing.assert_allclose(logits(tmp_path), expected, atol=1e-4)


@pytest.mark.parametrize('family', FAMILIES)
def test_a01_tied_model_has_one_vocabulary_matrix_and_one_gradient(tmp_path, family):
  toymodels.write_toy(tmp_path, family)
  config, params = load(tmp_path)
  assert [leaf.shape for leaf in jax.tree.leaves(params)].count((96, 32)) == 1 and 'head' not in params
  x = np.linspace(-1, 1, 32, dtype=np.float32)
  np.testing.assert_allclose(qwen.head(params, config, x), params['embed']['embedding'] @ x, atol=1e-5)
  # Token 0 is not in the input: its row learns through the head alone.
  gradient = jax.jit(jax.grad(lambda p: qwen.logits(p, config, TOKENS[None])[0, -1, 0]))(params)
  assert jnp.abs(gradient['embed']['embedding'][0]).max() > 0


def test_a02_equal_head_of_a_tied_model_is_dropped_with_a_line(tmp_path, caplog):
  tensors = toymodels.write_toy(tmp_path / 'without', 'qwen3')
  head = {'lm_head.weight': tensors['model.embed_tokens.weight']}
  toymodels.write_toy(tmp_path / 'with', 'qwen3', tensors=tensors | head)
  with caplog.at_level(logging.INFO):
    assert equal_trees(load(tmp_path / 'with')[1], load(tmp_path / 'without')[1])
  assert [record.levelname for record in caplog.records if 'lm_head' in record.message] == ['INFO']


def test_a02_different_head_of_a_tied_model_is_dropped_loudly(tmp_path, caplog):
  tensors = toymodels.toy_tensors('qwen3', tied=False)
  toymodels.write_toy(tmp_path, 'qwen3', tensors=tensors)
  load(tmp_path)
  assert [record.levelname for record in caplog.records if 'DIFFERS' in record.message] == ['WARNING']


def test_a03_head_dim_comes_from_the_config_and_else_from_the_width(tmp_path):
  toymodels.write_toy(tmp_path / 'q2', 'qwen2')
  toymodels.write_toy(tmp_path / 'q3', 'qwen3')
  assert (hf.load_config(tmp_path / 'q2').head_dim, hf.load_config(tmp_path / 'q3').head_dim) == (8, 16)


def test_a04_norm_of_q_and_k_undoes_a_scaled_projection(tmp_path):
  tensors = toymodels.toy_tensors('qwen3')
  tensors |= {name: np.full(16, 2.0, np.float32) for name in tensors if '_norm.weight' in name}
  toymodels.write_toy(tmp_path / 'a', 'qwen3', tensors=tensors)
  scaled = {name: 10 * array if 'q_proj' in name else array for name, array in tensors.items()}
  toymodels.write_toy(tmp_path / 'b', 'qwen3', tensors=scaled)
  np.testing.assert_allclose(logits(tmp_path / 'a'), toymodels.numpy_logits(tensors, TOKENS, head_dim=16), atol=1e-4)
  np.testing.assert_allclose(logits(tmp_path / 'a'), logits(tmp_path / 'b'), atol=2e-3)


@pytest.mark.parametrize('part', 'qkv')
def test_a05_every_bias_of_qwen2_counts(tmp_path, part):
  tensors = toymodels.write_toy(tmp_path / 'a', 'qwen2')
  # Not one number for all: a bias that every key shares would cancel in the softmax but for RoPE.
  bias = np.linspace(-0.5, 0.5, len(tensors[f'model.layers.0.self_attn.{part}_proj.bias']), dtype=np.float32)
  changed = tensors | {f'model.layers.{layer}.self_attn.{part}_proj.bias': bias for layer in range(2)}
  toymodels.write_toy(tmp_path / 'b', 'qwen2', tensors=changed)
  assert np.abs(logits(tmp_path / 'a') - logits(tmp_path / 'b')).max() > 1e-3
  np.testing.assert_allclose(logits(tmp_path / 'b'), toymodels.numpy_logits(changed, TOKENS, head_dim=8), atol=1e-4)


def shard(folder, tensors, index=True):
  """Two files instead of one."""
  (folder / 'model.safetensors').unlink(missing_ok=True)
  names = sorted(tensors)
  weight_map = {}
  for i, part in enumerate((names[::2], names[1::2]), 1):
    file = f'model-0000{i}-of-00002.safetensors'
    toymodels.write_tensors(folder / file, {name: tensors[name] for name in part})
    weight_map |= dict.fromkeys(part, file)
  if index:
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': weight_map}))


@pytest.mark.parametrize('index', [True, False])
def test_a06_shards_load_as_one_file_and_strangers_are_left_alone(tmp_path, index):
  tensors = toymodels.write_toy(tmp_path / 'one', 'qwen3')
  toymodels.write_toy(tmp_path / 'two', 'qwen3')
  shard(tmp_path / 'two', tensors, index)
  toymodels.write_tensors(tmp_path / 'two' / 'adapter_model.safetensors', {'lora': np.zeros(3)})
  assert equal_trees(load(tmp_path / 'one')[1], load(tmp_path / 'two')[1])


def test_a06_absent_shard_is_named(tmp_path):
  shard(tmp_path, toymodels.write_toy(tmp_path, 'qwen3'))
  (tmp_path / 'model-00002-of-00002.safetensors').unlink()
  with pytest.raises(FileNotFoundError, match='model-00002-of-00002'):
    load(tmp_path)
  (tmp_path / 'model.safetensors.index.json').unlink()
  with pytest.raises(FileNotFoundError, match='1 of 2 shards'):
    load(tmp_path)


def test_a07_bfloat16_is_read_without_torch(tmp_path):
  header = {'a': {'dtype': 'BF16', 'shape': [2], 'data_offsets': [0, 4]}}
  toymodels.write_safetensors(tmp_path / 'x', header, bytes([0x80, 0x3F, 0x40, 0x40]))
  ((first, block),) = tensorfile.read_blocks(tensorfile.read_header(tmp_path / 'x')['a'])
  assert (first, block.dtype, block.tolist()) == (0, ml_dtypes.bfloat16, [1.0, 3.0])


def test_a07_loading_imports_no_torch(tmp_path):
  toymodels.write_toy(tmp_path, 'qwen2', dtype='BF16')
  code = (
    f'import sys; sys.modules["torch"] = None; from opid_jax.models import hf; '
    f'print(hf.load_params({str(tmp_path)!r}, hf.load_config({str(tmp_path)!r}), dtype="bfloat16")'
    f'["embed"]["embedding"].dtype)'
  )
  root = Path(__file__).resolve().parents[1]
  run = subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True, check=True)
  assert run.stdout.strip() == 'bfloat16'


TENSOR = {'a': {'dtype': 'F32', 'shape': [4], 'data_offsets': [0, 16]}}


@pytest.mark.parametrize(
  'content, message',
  [
    (b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n', 'Git LFS pointer'),
    (b'<!DOCTYPE html>\n<html><body>404</body></html>', 'web page'),
    (b'\n <html>', 'web page'),
    (b'', 'empty'),
    (b'PK\x03\x04aaaaaaaaaaaa', 'torch pickle'),
    (b'\x05\x00', '2 bytes'),
    (b'\xff' * 8 + b'{}', r'claims 18446744073709551615 bytes, but the file has 10'),
    ((10).to_bytes(8, 'little') + b'not a json', 'not safetensors'),
    ((2).to_bytes(8, 'little') + b'[]', 'not safetensors'),
    ((8).to_bytes(8, 'little') + b'{"a": 1}', 'not safetensors'),
    ((20).to_bytes(8, 'little') + b'{"a": null,"a": null', 'not safetensors'),
    ((18).to_bytes(8, 'little') + b'{"a": {}, "a": {}}', 'duplicate in the header: a'),
  ],
)
def test_a08_broken_files_are_told_apart(tmp_path, content, message):
  path = tmp_path / 'model.safetensors'
  path.write_bytes(content)
  with pytest.raises(ValueError, match=message) as error:
    tensorfile.read_header(path)
  assert str(path) in str(error.value)


@pytest.mark.parametrize(
  'header, data, message',
  [
    (TENSOR, bytes(12), '16 bytes of data expected, 12 present. The file is truncated'),
    (TENSOR, bytes(20), 'belong to no tensor'),
    ({'a': TENSOR['a'] | {'shape': [5]}}, bytes(16), r"'a' of shape \[5\].* needs 20 bytes"),
    ({'a': TENSOR['a'] | {'shape': [-4]}}, bytes(16), 'damaged'),
    (TENSOR | {'b': TENSOR['a']}, bytes(16), "'b' does not begin where 'a' ends"),
  ],
)
def test_a08_damaged_extents_are_refused(tmp_path, header, data, message):
  toymodels.write_safetensors(tmp_path / 'x', header, data)
  with pytest.raises(ValueError, match=message):
    tensorfile.read_header(tmp_path / 'x')


def test_a09_rope_theta_of_the_config_is_used(tmp_path):
  tensors = toymodels.toy_tensors('qwen3')
  for theta in (1000000.0, 10000.0):
    toymodels.write_toy(tmp_path / str(theta), 'qwen3', tensors=tensors, rope_theta=theta)
    expected = toymodels.numpy_logits(tensors, TOKENS, head_dim=16, theta=theta)
    np.testing.assert_allclose(logits(tmp_path / str(theta)), expected, atol=1e-4)
    table, _ = qwen.rope_frequencies(hf.load_config(tmp_path / str(theta)))
    np.testing.assert_allclose(table, [theta ** (-2 * i / 16) for i in range(8)], rtol=1e-6)


def test_a09_transformers_5_keeps_theta_in_rope_parameters(tmp_path):
  rope = {'rope_type': 'default', 'rope_theta': 5e5}
  toymodels.write_toy(tmp_path, 'qwen3', rope_theta='absent', rope_parameters=rope)
  assert hf.load_config(tmp_path).rope_theta == 5e5


YARN = {'factor': 4.0, 'original_max_position_embeddings': 32768}


@pytest.mark.parametrize('key', ['type', 'rope_type'])
def test_a10_yarn_is_read_under_both_names(tmp_path, key):
  toymodels.write_toy(tmp_path, 'qwen2', rope_scaling={key: 'yarn'} | YARN)
  kind, factor, original, fast, slow, attention = hf.load_config(tmp_path).rope_scaling
  assert (kind, factor, original, fast, slow) == ('yarn', 4.0, 32768, 32.0, 1.0)
  assert attention == pytest.approx(1.1386294)  # 0.1 ln 4 + 1


def test_a10_null_scaling_is_plain_rope(tmp_path):
  toymodels.write_toy(tmp_path, 'qwen2', rope_scaling=None)
  assert hf.load_config(tmp_path).rope_scaling == ()


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'rope_theta': 'absent'}, 'rope_theta is missing'),
    ({'rope_parameters': {'rope_theta': 1e4}}, 'rope_theta is given twice and differs'),
    ({'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}, "rope_scaling of type 'dynamic' is not supported"),
    ({'rope_scaling': {'type': 'longrope', 'factor': 2.0}}, "'longrope'"),
    ({'rope_scaling': {'type': 'linear'}}, 'rope_scaling.factor is missing'),
    ({'rope_scaling': {'type': 'yarn', 'truncate': False} | YARN}, 'truncate'),
    ({'rope_scaling': {'type': 'default', 'mrope_section': [1, 1, 2]}}, 'mrope_section'),
    ({'rope_scaling': {'full_attention': {'factor': 2}}}, 'expected one flat JSON object'),
    ({'rope_parameters': {'partial_rotary_factor': 0.5}}, 'partial_rotary_factor'),
    ({'architectures': ['LlamaForCausalLM']}, 'wrong architecture LlamaForCausalLM'),
    ({'architectures': ['Qwen3MoeForCausalLM'], 'model_type': 'qwen3_moe'}, 'wrong architecture Qwen3Moe'),
    ({'architectures': 'absent', 'model_type': 'gpt2'}, "model_type 'gpt2'"),
    ({'model_type': 'qwen2'}, "model_type 'qwen2'"),
    ({'vocab_size': 'absent'}, 'vocab_size is missing'),
    ({'vocab_size': '96'}, "vocab_size is '96', expected a positive int"),
    ({'num_hidden_layers': True}, 'num_hidden_layers is True'),
    ({'num_attention_heads': 3}, r'num_attention_heads \(3\) must be a multiple'),
    ({'head_dim': None, 'num_attention_heads': 6}, r'hidden_size \(32\) is no multiple'),
    ({'head_dim': 15}, 'must be even'),
    ({'hidden_act': 'gelu'}, 'hidden_act'),
    ({'attention_bias': True}, 'attention_bias'),
    ({'quantization_config': {'quant_method': 'fp8'}}, r'quantization_config \(fp8\)'),
    ({'use_sliding_window': True, 'sliding_window': 64, 'max_window_layers': 1}, 'use_sliding_window'),
  ],
)
def test_what_cannot_be_run_is_refused_by_its_field(tmp_path, changes, message):
  (tmp_path / 'config.json').write_text(json.dumps(toymodels.toy_config('qwen3', **changes)))
  with pytest.raises(ValueError, match=message) as error:
    hf.load_config(tmp_path)
  assert str(tmp_path / 'config.json') in str(error.value)


@pytest.mark.parametrize(
  'changes',
  [
    {'use_sliding_window': False, 'sliding_window': 64, 'max_window_layers': 1},
    {'use_sliding_window': True, 'sliding_window': 64, 'max_window_layers': 2},
    {'use_sliding_window': True, 'sliding_window': None, 'max_window_layers': 0},
    {'use_sliding_window': True, 'layer_types': ['full_attention'] * 2},
  ],
)
def test_a_window_that_no_layer_uses_is_no_obstacle(tmp_path, changes):
  toymodels.write_toy(tmp_path, 'qwen2', **changes)
  assert hf.load_config(tmp_path).num_layers == 2


def test_config_that_is_absent_or_no_json_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='config.json'):
    hf.load_config(tmp_path)
  (tmp_path / 'config.json').write_text('<html>')
  with pytest.raises(ValueError, match='config.json is not JSON'):
    hf.load_config(tmp_path)


K0 = 'model.layers.0.self_attn.k_proj.weight'


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda t: t.pop(K0), f'missing tensors: {K0}'),
    (
      lambda t: t.update({'model.layers.2.mlp.up_proj.weight': np.zeros((48, 32))}),
      'unexpected tensors: model.layers.2',
    ),
    (lambda t: t.update({K0: t[K0].T[:, :8]}), r'misshapen: \[32, 8\], config.json asks for \[32, 32\]'),
    (
      lambda t: t.update({'model.layers.0.self_attn.k_proj.bias': np.zeros(32)}),
      'unexpected tensors: .*k_proj.bias',
    ),
  ],
)
def test_missing_unexpected_and_misshapen_are_told_apart(tmp_path, change, message):
  tensors = toymodels.toy_tensors('qwen3')
  change(tensors)
  toymodels.write_toy(tmp_path, 'qwen3', tensors=tensors)
  with pytest.raises(ValueError, match=message) as error:
    load(tmp_path)
  assert str(tmp_path) in str(error.value)


def test_missing_head_of_an_untied_model_points_at_the_config(tmp_path):
  toymodels.write_toy(tmp_path, 'qwen3', tensors=toymodels.toy_tensors('qwen3'), tie_word_embeddings=False)
  with pytest.raises(ValueError, match='lm_head.weight.*tie_word_embeddings=false'):
    load(tmp_path)


def test_duplicate_tensor_is_refused(tmp_path):
  tensors = toymodels.write_toy(tmp_path, 'qwen3')
  shard(tmp_path, tensors)
  second = {name: tensors[name] for name in sorted(tensors)[1::2]} | {sorted(tensors)[0]: np.zeros(3)}
  toymodels.write_tensors(tmp_path / 'model-00002-of-00002.safetensors', second)
  with pytest.raises(ValueError, match='duplicate tensor .* in model-00001-of-00002.* and in model-00002'):
    load(tmp_path)


def test_wrong_dtype_is_refused(tmp_path):
  toymodels.write_toy(tmp_path, 'qwen3')
  raw = (
    (tmp_path / 'model.safetensors')
    .read_bytes()
    .replace(b'"dtype": "F32", "shape": [96', b'"dtype": "I32", "shape": [96')
  )
  (tmp_path / 'model.safetensors').write_bytes(raw)
  with pytest.raises(ValueError, match="'model.embed_tokens.weight' has the wrong dtype I32"):
    load(tmp_path)


def test_frequencies_of_old_checkpoints_are_ignored(tmp_path):
  tensors = toymodels.toy_tensors('qwen2') | {'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4)}
  toymodels.write_toy(tmp_path, 'qwen2', tensors=tensors)
  load(tmp_path)


def test_folder_with_torch_weights_only_says_so(tmp_path):
  toymodels.write_toy(tmp_path, 'qwen2')
  (tmp_path / 'model.safetensors').rename(tmp_path / 'pytorch_model.bin')
  with pytest.raises(FileNotFoundError, match='found: pytorch_model.bin'):
    load(tmp_path)


@pytest.mark.parametrize('stored', ['F32', 'F16', 'BF16'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_any_stored_float_becomes_the_dtype_asked_for(tmp_path, stored, dtype):
  tensors = {name: np.round(array * 64) / 64 for name, array in toymodels.toy_tensors('qwen2').items()}
  toymodels.write_toy(tmp_path, 'qwen2', tensors=tensors, dtype=stored)
  _, params = load(tmp_path, dtype=dtype)
  kernel = params['layers']['attn']['q']['kernel']
  assert kernel.dtype == jnp.dtype(dtype)
  expected = tensors['model.layers.1.self_attn.q_proj.weight'].T
  np.testing.assert_array_equal(np.asarray(kernel[1], np.float32), expected.astype(dtype).astype(np.float32))


def test_blocks_put_a_tensor_together_again(tmp_path, monkeypatch):
  monkeypatch.setattr(tensorfile, '_BLOCK_BYTES', 4 * 32 * 5)  # Five rows of the embedding.
  tensors = toymodels.write_toy(tmp_path, 'qwen3', dtype='BF16')
  _, params = load(tmp_path)
  np.testing.assert_array_equal(params['embed']['embedding'], tensors['model.embed_tokens.weight'])
  down = np.stack([tensors[f'model.layers.{i}.mlp.down_proj.weight'].T for i in range(2)])
  np.testing.assert_array_equal(params['layers']['mlp']['down']['kernel'], down)


def test_leaves_are_placed_one_by_one_and_let_go(tmp_path):
  toymodels.write_toy(tmp_path, 'qwen3')
  alive, most, paths = set(), 0, []

  class Tracked(np.ndarray):
    def __del__(self):
      alive.discard(id(self))

  empty = np.empty

  def counted(*args):
    nonlocal most
    array = empty(*args).view(Tracked)
    alive.add(id(array))
    most = max(most, len(alive))
    return array

  def place(path, array):
    paths.append('/'.join(path))
    return array.shape

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(hf.np, 'empty', counted)
    _, params = load(tmp_path, place=place)
  assert most == 1 and len(paths) == len(set(paths)) == len(
    jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, tuple))
  )
  assert params['layers']['attn']['q_norm']['scale'] == (2, 16)


def test_tree_is_the_one_that_init_makes(tmp_path):
  for family in FAMILIES:
    toymodels.write_toy(tmp_path / family, family, tie_word_embeddings=False)
    config, params = load(tmp_path / family)
    fresh = jax.eval_shape(lambda c=config: qwen.init(jax.random.key(0), c))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, fresh)


def test_names_go_both_ways():
  assert hf.from_hf_name(K0) == (('layers', 'attn', 'k', 'kernel'), 0)
  assert hf.from_hf_name('model.norm.weight') == (('final_norm', 'scale'), None)
  with pytest.raises(KeyError, match='no tensor of a Qwen'):
    hf.from_hf_name('model.layers.0.self_attn.o_proj.bias')


@pytest.mark.parametrize('family, tied', [('qwen2', True), ('qwen2', False), ('qwen3', True)])
@pytest.mark.parametrize('shard_bytes', [5e9, 20000])
def test_a12_round_trip_keeps_every_bit(tmp_path, family, tied, shard_bytes):
  safetensors = pytest.importorskip('safetensors.numpy')
  tensors = toymodels.write_toy(tmp_path / 'in', family, tie_word_embeddings=tied)
  config, params = load(tmp_path / 'in')
  hf.save_folder(tmp_path / 'out', params, config, dtype='float32', max_shard_bytes=shard_bytes)
  files = sorted((tmp_path / 'out').glob('*.safetensors'))
  assert (len(files) == 1) == (shard_bytes == 5e9)
  back = {}
  for file in files:
    back |= safetensors.load_file(file)
    assert file.stat().st_size < shard_bytes + 5000
  assert back.keys() == tensors.keys()
  assert all(back[n].dtype == np.float32 and np.array_equal(back[n], tensors[n]) for n in tensors)
  if len(files) > 1:
    index = json.loads((tmp_path / 'out' / 'model.safetensors.index.json').read_text())
    assert index['metadata']['total_size'] == sum(array.nbytes for array in tensors.values())
    assert index['weight_map'].keys() == tensors.keys()
  again = load(tmp_path / 'out')
  assert again[0] == config and equal_trees(again[1], params)


def test_a12_bfloat16_export_of_bfloat16_weights_keeps_every_bit(tmp_path):
  toymodels.write_toy(tmp_path / 'in', 'qwen3', dtype='BF16')
  config, params = load(tmp_path / 'in')
  hf.save_folder(tmp_path / 'out', params, config)
  first, second = (tensorfile.read_header(tmp_path / name / 'model.safetensors') for name in ('in', 'out'))
  assert first.keys() == second.keys()
  for name in first:
    assert second[name].dtype == 'BF16'
    (_, a), (_, b) = next(tensorfile.read_blocks(first[name])), next(tensorfile.read_blocks(second[name]))
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize('scaling', [{'type': 'yarn'} | YARN, {'type': 'linear', 'factor': 2.0}, None])
def test_a12_config_survives_the_round_trip(tmp_path, scaling):
  toymodels.write_toy(tmp_path / 'in', 'qwen2', rope_scaling=scaling, num_attention_heads=4)
  config, params = load(tmp_path / 'in')
  hf.save_folder(tmp_path / 'out', params, config)
  assert hf.load_config(tmp_path / 'out') == config


def test_a12_tokenizer_and_end_ids_come_along(tmp_path):
  toymodels.write_toy(tmp_path / 'in', 'qwen2', eos_token_id=7)
  for name in ('tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'):
    (tmp_path / 'in' / name).write_text(name)
  (tmp_path / 'in' / 'generation_config.json').write_text('{"eos_token_id": [7, 8]}')
  config, params = load(tmp_path / 'in')
  hf.save_folder(tmp_path / 'out', params, config, tokenizer_folder=tmp_path / 'in')
  assert (tmp_path / 'out' / 'tokenizer.json').read_text() == 'tokenizer.json'
  assert json.loads((tmp_path / 'out' / 'generation_config.json').read_text()) == {'eos_token_id': [7, 8]}
  assert json.loads((tmp_path / 'out' / 'config.json').read_text())['eos_token_id'] == 7
  with pytest.raises(ValueError, match='holds no tokenizer'):
    hf.save_folder(tmp_path / 'other', params, config, tokenizer_folder=tmp_path)


def test_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
  toymodels.write_toy(tmp_path / 'in', 'qwen2')
  config, params = load(tmp_path / 'in')

  def full(*args):
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(OSError, match='The disk became full') as error:
    hf.save_folder(tmp_path / 'out', params, config)
  assert error.value.errno == errno.ENOSPC and os.listdir(tmp_path) == ['in']
  monkeypatch.setattr(hf.shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=10))
  with pytest.raises(OSError, match='0.00 GB needed, 0.00 GB are free'):
    hf.save_folder(tmp_path / 'out', params, config)


def test_export_replaces_nothing_and_checks_the_tree(tmp_path):
  toymodels.write_toy(tmp_path / 'in', 'qwen2')
  config, params = load(tmp_path / 'in')
  with pytest.raises(FileExistsError, match='not an empty folder'):
    hf.save_folder(tmp_path / 'in', params, config)
  with pytest.raises(ValueError, match='missing in the parameter tree: embed/embedding'):
    hf.save_folder(tmp_path / 'out', {**params, 'embed': {}}, config)
  with pytest.raises(ValueError, match='unexpected in the parameter tree: head/kernel'):
    hf.save_folder(tmp_path / 'out', {**params, 'head': {'kernel': np.zeros((32, 96))}}, config)
  with pytest.raises(ValueError, match='final_norm/scale has shape'):
    hf.save_folder(tmp_path / 'out', {**params, 'final_norm': {'scale': np.zeros(3)}}, config)
  with pytest.raises(ValueError, match="'float16' cannot be exported"):
    hf.save_folder(tmp_path / 'out', params, config, dtype='float16')
  assert os.listdir(tmp_path) == ['in']
