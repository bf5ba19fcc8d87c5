"""`config.json` of Qwen2, Qwen2.5 and dense Qwen3, as `transformers` 4 and 5 write it, to `QwenConfig`.

What this code cannot run is refused by the name of its field: a model that loads and is quietly another one
costs more than an error.
"""

import math
import os
from pathlib import Path
from typing import Any

from opid_jax.models.bpe import read_json
from opid_jax.models.qwen import QwenConfig

ARCHITECTURES = {'Qwen2ForCausalLM': 'qwen2', 'Qwen3ForCausalLM': 'qwen3'}


def load_config(folder: str | os.PathLike) -> QwenConfig:
  """Shape of the model in a Hugging Face folder.

  Raises:
    FileNotFoundError: no config.json.
    ValueError: another architecture, a missing or unusable field, or a feature that is not supported (sliding
      windows, quantised weights, other activations, unknown RoPE scaling); names file and field.
  """
  path = Path(folder) / 'config.json'
  if not path.exists():
    raise FileNotFoundError(f'{path} does not exist. Expected a Hugging Face model folder.')
  raw = read_json(path)
  family = _family(path, raw)
  _refuse_unsupported(path, raw, family)
  num_heads = _number(path, raw, 'num_attention_heads', int)
  width = _number(path, raw, 'hidden_size', int)
  num_kv_heads = _number(path, raw, 'num_key_value_heads', int, num_heads)
  if raw.get('head_dim') is None and width % num_heads:
    raise ValueError(f'{path}: hidden_size ({width}) is no multiple of num_attention_heads ({num_heads}).')
  if num_heads % num_kv_heads:
    raise ValueError(
      f'{path}: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads}).'
    )
  head_dim = _number(path, raw, 'head_dim', int, width // num_heads)
  if head_dim % 2:
    raise ValueError(f'{path}: head_dim ({head_dim}) must be even, for RoPE turns pairs.')
  max_positions = _number(path, raw, 'max_position_embeddings', int, 32768)
  theta, scaling = _rope(path, raw, max_positions)
  return QwenConfig(
    family=family,
    vocab_size=_number(path, raw, 'vocab_size', int),
    width=width,
    num_layers=_number(path, raw, 'num_hidden_layers', int),
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    mlp_width=_number(path, raw, 'intermediate_size', int),
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=_number(path, raw, 'rms_norm_eps', float, 1e-6),
    # False is the default of both families in `transformers`, though every file says it explicitly.
    tied=bool(raw.get('tie_word_embeddings', False)),
    attention_bias=family == 'qwen2',
    qk_norm=family == 'qwen3',
    max_positions=max_positions,
  )


def _family(path, raw) -> str:
  names = raw.get('architectures') or []
  known = f'Supported: {", ".join(ARCHITECTURES)} (Qwen2, Qwen2.5, dense Qwen3).'
  if names:
    if len(names) != 1 or names[0] not in ARCHITECTURES:
      raise ValueError(f'{path}: wrong architecture {", ".join(map(str, names))}. {known}')
    family = ARCHITECTURES[names[0]]
  else:
    family = raw.get('model_type')
  if family not in ARCHITECTURES.values() or raw.get('model_type', family) != family:
    raise ValueError(f'{path}: model_type {raw.get("model_type")!r}, architectures {names}. {known}')
  return family


def _refuse_unsupported(path, raw, family):
  if raw.get('quantization_config'):
    method = raw['quantization_config'].get('quant_method', '?')
    raise ValueError(f'{path}: quantization_config ({method}) is not supported. Use the bfloat16 model.')
  if raw.get('hidden_act', 'silu') != 'silu':
    raise ValueError(f'{path}: hidden_act {raw["hidden_act"]!r} is not supported. Supported: silu.')
  if family == 'qwen3' and raw.get('attention_bias'):
    raise ValueError(f'{path}: attention_bias=true is not supported for Qwen3 (no published model has it).')
  layers = raw.get('num_hidden_layers') or 0
  slides = 'sliding_attention' in (raw.get('layer_types') or [])
  # Layers from max_window_layers on slide, but only where use_sliding_window says so and a window is given.
  slides |= 'layer_types' not in raw and raw.get('max_window_layers', 28) < layers
  if raw.get('use_sliding_window') and raw.get('sliding_window', 4096) is not None and slides:
    raise ValueError(
      f'{path}: use_sliding_window=true with sliding layers is not supported. Set it to false where full '
      f'attention is meant.'
    )


def _number(path, raw, key, kind, default=None):
  """A positive number; bools, texts and absent values without a default are refused by name."""
  value = raw.get(key)
  value = default if value is None else value
  if value is None:
    raise ValueError(f'{path}: {key} is missing.')
  numeric = isinstance(value, int | float) and not isinstance(value, bool)
  if not numeric or not math.isfinite(value) or value <= 0 or kind(value) != value:
    raise ValueError(f'{path}: {key} is {value!r}, expected a positive {kind.__name__}.')
  return kind(value)


def _rope(path, raw, max_positions) -> tuple[float, tuple]:
  """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
  new, old = raw.get('rope_parameters') or {}, raw.get('rope_scaling') or {}
  for name, value in (('rope_parameters', new), ('rope_scaling', old)):
    if not isinstance(value, dict) or any(isinstance(item, dict) for item in value.values()):
      raise ValueError(f'{path}: {name} is {value!r}, expected one flat JSON object for all layers.')
  thetas = {float(source['rope_theta']) for source in (raw, new, old) if source.get('rope_theta') is not None}
  if not thetas:
    raise ValueError(f'{path}: rope_theta is missing (Qwen2.5 and Qwen3 use 1000000.0). It is never guessed.')
  if len(thetas) > 1:
    raise ValueError(f'{path}: rope_theta is given twice and differs: {sorted(thetas)}.')
  theta = _number(path, {'rope_theta': thetas.pop()}, 'rope_theta', float)
  # As `transformers` 5 does where a file has both.
  field, scaling = ('rope_scaling', old) if old else ('rope_parameters', new)
  kind = scaling.get('rope_type', scaling.get('type', 'default'))
  if kind == 'default' and scaling.get('mrope_section') or scaling.get('partial_rotary_factor', 1.0) != 1.0:
    raise ValueError(f'{path}: {field} {scaling} is not supported: RoPE must turn whole heads.')
  if kind == 'default':
    return theta, ()
  original = _original_positions(path, raw, field, scaling, max_positions)
  named = {f'{field}.{key}': value for key, value in scaling.items()}
  if kind == 'linear':
    return theta, ('linear', _number(path, named, f'{field}.factor', float))
  if kind == 'llama3':
    keys = ('factor', 'low_freq_factor', 'high_freq_factor')
    return theta, ('llama3', *(_number(path, named, f'{field}.{key}', float) for key in keys), original)
  if kind != 'yarn':
    supported = 'default, linear, llama3, yarn'
    raise ValueError(f'{path}: {field} of type {kind!r} is not supported. Supported: {supported}.')
  if scaling.get('truncate', True) is not True:
    raise ValueError(f'{path}: {field}.truncate={scaling["truncate"]!r} is not supported. Supported: true.')
  factor = _number(path, named, f'{field}.factor', float, max_positions / original)
  beta_fast = _number(path, named, f'{field}.beta_fast', float, 32.0)
  beta_slow = _number(path, named, f'{field}.beta_slow', float, 1.0)
  attention_factor = _yarn_attention_factor(path, named, field, factor)
  return theta, ('yarn', factor, original, beta_fast, beta_slow, attention_factor)


def _original_positions(path, raw, field, scaling, max_positions) -> int:
  """Positions of pretraining; the key may stand at the top of the file, and defaults to all positions."""
  key = 'original_max_position_embeddings'
  value = raw.get(key) if raw.get(key) is not None else scaling.get(key)
  return _number(path, {f'{field}.{key}': value}, f'{field}.{key}', int, max_positions)


def _yarn_attention_factor(path, named, field, factor) -> float:
  """Factor on cos and sin: 0.1 ln(factor) + 1 unless the file says otherwise. See YaRN, section 3.4."""

  def mscale(weight):
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

  default = mscale(1.0)
  above, below = named.get(f'{field}.mscale'), named.get(f'{field}.mscale_all_dim')
  if above and below:
    default = mscale(above) / mscale(below)
  return _number(path, named, f'{field}.attention_factor', float, default)


def config_json(config: QwenConfig, dtype: str) -> dict[str, Any]:
  """The content of a `config.json` that `transformers` 4 and 5 read alike; inverse of `load_config`."""
  c = config
  scaling = None
  if c.rope_scaling:
    kind, factor, *rest = c.rope_scaling
    keys = {
      'linear': (),
      'llama3': ('low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'),
      'yarn': ('original_max_position_embeddings', 'beta_fast', 'beta_slow', 'attention_factor'),
    }[kind]
    scaling = {'rope_type': kind, 'factor': factor} | dict(zip(keys, rest, strict=True))
  result = {
    'architectures': [name for name, family in ARCHITECTURES.items() if family == c.family],
    'model_type': c.family,
    'vocab_size': c.vocab_size,
    'hidden_size': c.width,
    'num_hidden_layers': c.num_layers,
    'num_attention_heads': c.num_heads,
    'num_key_value_heads': c.num_kv_heads,
    'head_dim': c.head_dim,
    'intermediate_size': c.mlp_width,
    'hidden_act': 'silu',
    'rms_norm_eps': c.norm_eps,
    'max_position_embeddings': c.max_positions,
    'rope_theta': c.rope_theta,
    'rope_scaling': scaling,
    'rope_parameters': {'rope_type': 'default', 'rope_theta': c.rope_theta} | (scaling or {}),
    'tie_word_embeddings': c.tied,
    'attention_dropout': 0.0,
    'initializer_range': 0.02,
    'use_cache': True,
    'use_sliding_window': False,
    'sliding_window': None,
    'max_window_layers': c.num_layers,
    'torch_dtype': dtype,
  }
  if c.family == 'qwen3':
    result['attention_bias'] = False
  elif c.head_dim * c.num_heads == c.width:
    del result['head_dim']  # Qwen2 derives it.
  return result
