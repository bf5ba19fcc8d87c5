"""Two models small enough to write by hand, as Hugging Face folders, and a decoder in plain NumPy to judge them.

The writer here is independent of the package: header and data by `struct` and `json` alone.
"""

import json
import math
import struct

import ml_dtypes
import numpy as np

_DTYPES = {'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16}


def write_safetensors(path, header, data, declared=None):
  """A safetensors file from its parts; `declared` forges the header's length."""
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)
  path.write_bytes(struct.pack('<Q', len(text) if declared is None else declared) + text + data)


def write_tensors(path, tensors, dtype='F32'):
  """A safetensors file of {name: array}."""
  header, data = {}, b''
  for name, array in tensors.items():
    raw = np.ascontiguousarray(array).astype(_DTYPES[dtype]).tobytes()
    header[name] = {
      'dtype': dtype,
      'shape': list(array.shape),
      'data_offsets': [len(data), len(data) + len(raw)],
    }
    data += raw
  write_safetensors(path, header, data)


def toy_config(family, **changes):
  """config.json of toy-q2 (no head_dim, so 8) or toy-q3 (head_dim 16)."""
  config = {
    'architectures': [{'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM'}[family]],
    'model_type': family,
    'hidden_size': 32,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'intermediate_size': 48,
    'vocab_size': 96,
    'rope_theta': 1000000.0,
    'rms_norm_eps': 1e-6,
    'tie_word_embeddings': True,
    'max_position_embeddings': 256,
  }
  if family == 'qwen3':
    config['head_dim'] = 16
  return {key: value for key, value in (config | changes).items() if value != 'absent'}


def toy_tensors(family, *, tied=True, seed=0):
  """Random tensors by their names in the file, values exact in bfloat16."""
  rng = np.random.default_rng(seed)

  def draw(*shape):
    return (0.2 * rng.normal(size=shape)).astype(ml_dtypes.bfloat16).astype(np.float32)

  q, kv = (64, 32) if family == 'qwen3' else (32, 16)
  tensors = {'model.embed_tokens.weight': draw(96, 32), 'model.norm.weight': 1 + draw(32)}
  for layer in range(2):
    p = f'model.layers.{layer}.'
    tensors |= {
      p + 'self_attn.q_proj.weight': draw(q, 32),
      p + 'self_attn.k_proj.weight': draw(kv, 32),
      p + 'self_attn.v_proj.weight': draw(kv, 32),
      p + 'self_attn.o_proj.weight': draw(32, q),
      p + 'mlp.gate_proj.weight': draw(48, 32),
      p + 'mlp.up_proj.weight': draw(48, 32),
      p + 'mlp.down_proj.weight': draw(32, 48),
      p + 'input_layernorm.weight': 1 + draw(32),
      p + 'post_attention_layernorm.weight': 1 + draw(32),
    }
    if family == 'qwen2':
      tensors |= {p + f'self_attn.{n}_proj.bias': draw(s) for n, s in (('q', q), ('k', kv), ('v', kv))}
    else:
      tensors |= {p + f'self_attn.{n}_norm.weight': 1 + draw(16) for n in 'qk'}
  if not tied:
    tensors['lm_head.weight'] = draw(96, 32)
  return {name: array.astype(ml_dtypes.bfloat16).astype(np.float32) for name, array in tensors.items()}


def write_toy(folder, family, *, tensors=None, dtype='F32', **changes):
  """A whole folder; returns its tensors."""
  folder.mkdir(parents=True, exist_ok=True)
  tensors = toy_tensors(family, tied=changes.get('tie_word_embeddings', True)) if tensors is None else tensors
  (folder / 'config.json').write_text(json.dumps(toy_config(family, **changes)))
  write_tensors(folder / 'model.safetensors', tensors, dtype)
  return tensors


def numpy_logits(tensors, tokens, *, head_dim, theta=1000000.0, heads=4, eps=1e-6):
  """Logits [L, 96] of one sequence in float64: what a Qwen decoder is, with loops over heads."""
  w = {name: array.astype(np.float64) for name, array in tensors.items()}

  def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale

  angles = np.arange(len(tokens))[:, None] * theta ** -(np.arange(0, head_dim, 2) / head_dim)

  def rotate(x):
    a, b = x[:, : head_dim // 2], x[:, head_dim // 2 :]
    return np.concatenate(
      [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
    )

  def head(x, p, kind, index):
    rows = slice(index * head_dim, (index + 1) * head_dim)
    out = x @ w[f'{p}self_attn.{kind}_proj.weight'][rows].T
    if f'{p}self_attn.{kind}_proj.bias' in w:
      out = out + w[f'{p}self_attn.{kind}_proj.bias'][rows]
    if f'{p}self_attn.{kind}_norm.weight' in w:
      out = norm(out, w[f'{p}self_attn.{kind}_norm.weight'])
    return out if kind == 'v' else rotate(out)

  x = w['model.embed_tokens.weight'][tokens]
  for layer in range(2):
    p = f'model.layers.{layer}.'
    y, out = norm(x, w[p + 'input_layernorm.weight']), []
    for i in range(heads):
      q, k, v = head(y, p, 'q', i), head(y, p, 'k', i // 2), head(y, p, 'v', i // 2)
      score = np.where(np.tri(len(tokens), dtype=bool), q @ k.T / math.sqrt(head_dim), -np.inf)
      weight = np.exp(score - score.max(-1, keepdims=True))
      out.append(weight / weight.sum(-1, keepdims=True) @ v)
    x = x + np.concatenate(out, -1) @ w[p + 'self_attn.o_proj.weight'].T
    y = norm(x, w[p + 'post_attention_layernorm.weight'])
    gate = y @ w[p + 'mlp.gate_proj.weight'].T
    x = x + gate / (1 + np.exp(-gate)) * (y @ w[p + 'mlp.up_proj.weight'].T) @ w[p + 'mlp.down_proj.weight'].T
  return norm(x, w['model.norm.weight']) @ w.get('lm_head.weight', w['model.embed_tokens.weight']).T
