"""Qwen2 / Qwen2.5 and dense Qwen3 decoders in Flax linen, layers under one scan.

Three entry points share the parameters: `hidden` (packed rows under the tree mask), `prefill` (prompts, returns
their keys and values) and `decode` (one token per cache slot). The head is separate, because only scored
positions reach it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from opid_jax import attention


@dataclasses.dataclass(frozen=True)
class QwenConfig:
  """Shape of a model, as `config.json` gives it.

  Attributes:
    family: 'qwen2' (also Qwen2.5) or 'qwen3'.
    vocab_size: rows of the embedding; may exceed the tokenizer's size.
    width: hidden size D.
    head_dim: size of one head; not width / num_heads in Qwen3.
    rope_scaling: () for plain RoPE, ('linear', factor), ('llama3', factor, low_freq_factor,
      high_freq_factor, original_max_positions) or ('yarn', factor, original_max_positions, beta_fast,
      beta_slow, attention_factor).
    tied: the head is the transposed embedding.
    attention_bias: biases on q, k, v (never on o).
    qk_norm: RMS norm over head_dim on q and k before RoPE.
  """

  family: str
  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_width: int
  rope_theta: float
  rope_scaling: tuple = ()
  norm_eps: float = 1e-6
  tied: bool = True
  attention_bias: bool = False
  qk_norm: bool = True
  max_positions: int = 32768


@dataclasses.dataclass(frozen=True)
class Options:
  """How to run a model; changes no result beyond rounding.

  Attributes:
    dtype: 'float32' or 'bfloat16', the dtype of activations and matmuls; norms, RoPE, softmax and the head's
      output are float32 always.
    remat: what the backward pass keeps of a layer, a key of `REMAT`.
    attention_block: queries per attention block, 0 for all at once.
    constrain: pins the sharding of activations [B, L, D]; identity on one device.
    constrain_head: the same for what makes logits, hidden states [B, .., D] and the head's weight [V, D].
  """

  dtype: str = 'float32'
  remat: str = 'none'
  attention_block: int = 0
  constrain: Callable[[Any], Any] = lambda x: x
  constrain_head: Callable[[Any, Any], Any] = lambda x, weight: (x, weight)


class Cache(NamedTuple):
  """Keys and values of S slots: k, v [num_layers, S, M, h, d], M the longest sequence."""

  k: Any
  v: Any


# By name, so that a config can say it. 'none' keeps everything, 'layer' nothing but the layer's input.
REMAT = {
  'none': None,
  'layer': jax.checkpoint_policies.nothing_saveable,
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'attention': jax.checkpoint_policies.save_only_these_names('attention_out'),
}


def rope_frequencies(config: QwenConfig) -> tuple[np.ndarray, float]:
  """Inverse frequencies [head_dim / 2] float32 and the factor on cos and sin (1 but for YaRN).

  See "YaRN" by Peng et al. (https://arxiv.org/abs/2309.00071), Eqs. 22-23, for the last variant.

  Raises:
    ValueError: on an unknown scaling.
  """
  half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
  plain = config.rope_theta ** -half
  if not config.rope_scaling:
    return plain.astype(np.float32), 1.0
  kind, factor, *rest = config.rope_scaling
  if kind == 'linear':
    return (plain / factor).astype(np.float32), 1.0
  if kind == 'llama3':
    low, high, original = rest
    turns = original * plain / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return (plain * (blend + (1 - blend) / factor)).astype(np.float32), 1.0
  if kind == 'yarn':
    original, beta_fast, beta_slow, attention_factor = rest

    def dimension(rotations):
      return config.head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(beta_fast)), 0)
    high = min(math.ceil(dimension(beta_slow)), config.head_dim - 1)
    ramp = np.clip((np.arange(config.head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return (plain / factor * ramp + plain * (1 - ramp)).astype(np.float32), float(attention_factor)
  raise ValueError(f'rope_scaling {kind!r} is not supported. Supported: linear, llama3, yarn.')


def _rotate(x, angles, factor):
  """RoPE on x [B, L, heads, d]; angles [B, L, d / 2] float32, for bfloat16 rounds positions above 256."""
  cos, sin = jnp.cos(angles)[:, :, None] * factor, jnp.sin(angles)[:, :, None] * factor
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class RMSNorm(nn.Module):
  """Root-mean-square norm over the last axis, in float32."""

  eps: float

  @nn.compact
  def __call__(self, x):
    scale = self.param('scale', nn.initializers.ones, (x.shape[-1],), jnp.float32)
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
    return wide.astype(x.dtype) * jnp.broadcast_to(scale.astype(x.dtype), x.shape)


class Attention(nn.Module):
  """Grouped-query self-attention with RoPE; returns its output and what the cache is to hold."""

  config: QwenConfig
  options: Options

  @nn.compact
  def __call__(self, x, positions, column, visible_to, cache, layer):
    c = self.config
    dtype = jnp.dtype(self.options.dtype)

    def project(name, heads):
      dense = nn.Dense(heads * c.head_dim, use_bias=c.attention_bias, dtype=dtype, name=name)
      return dense(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:2], heads, c.head_dim)

    q, k, v = project('q', c.num_heads), project('k', c.num_kv_heads), project('v', c.num_kv_heads)
    if c.qk_norm:
      q, k = RMSNorm(c.norm_eps, name='q_norm')(q), RMSNorm(c.norm_eps, name='k_norm')(k)
    frequencies, factor = rope_frequencies(c)
    angles = positions[:, :, None].astype(jnp.float32) * jnp.asarray(frequencies)[None, None]
    q, k = _rotate(q, angles, factor), _rotate(k, angles, factor)
    if cache is None:
      keys, values = k, v
    else:
      # One token per slot, written in place: the cache is a loop carry, never stacked anew.
      slot = jnp.arange(x.shape[0])
      cache = Cache(
        cache.k.at[layer, slot, column[:, 0]].set(k[:, 0].astype(cache.k.dtype)),
        cache.v.at[layer, slot, column[:, 0]].set(v[:, 0].astype(cache.v.dtype)),
      )
      keys, values = cache.k[layer].astype(dtype), cache.v[layer].astype(dtype)
    out = attention.attend(q, keys, values, column, visible_to, block=self.options.attention_block)
    out = checkpoint_name(out.reshape(-1, c.num_heads * c.head_dim), 'attention_out')
    return nn.Dense(c.width, use_bias=False, dtype=dtype, name='o')(out).reshape(x.shape), cache, Cache(k, v)


class Mlp(nn.Module):
  """SwiGLU."""

  config: QwenConfig
  options: Options

  @nn.compact
  def __call__(self, x):
    def dense(name, size):
      return nn.Dense(size, use_bias=False, dtype=jnp.dtype(self.options.dtype), name=name)

    flat = x.reshape(-1, x.shape[-1])
    hidden = nn.silu(dense('gate', self.config.mlp_width)(flat)) * dense('up', self.config.mlp_width)(flat)
    return dense('down', self.config.width)(hidden).reshape(x.shape)


class Block(nn.Module):
  """Pre-norm decoder layer, in the form `nn.scan` wants: carry in, (carry, kept) out."""

  config: QwenConfig
  options: Options
  keep: bool  # Return keys and values (prefill).

  @nn.compact
  def __call__(self, carry, positions, column, visible_to):
    x, cache, layer = carry
    norm = RMSNorm(self.config.norm_eps, name='attn_norm')
    out, cache, new = Attention(self.config, self.options, name='attn')(
      norm(x), positions, column, visible_to, cache, layer
    )
    x = self.options.constrain(x + out)
    x = x + Mlp(self.config, self.options, name='mlp')(RMSNorm(self.config.norm_eps, name='mlp_norm')(x))
    return (self.options.constrain(x), cache, layer + 1), new if self.keep else None


class Qwen(nn.Module):
  """Decoder without its head: tokens [B, L] to hidden states [B, L, D] after the final norm."""

  config: QwenConfig
  options: Options = Options()
  keep: bool = False

  @nn.compact
  def __call__(self, tokens, positions, column, visible_to, cache=None):
    c = self.config
    dtype = jnp.dtype(self.options.dtype)
    embed = nn.Embed(c.vocab_size, c.width, dtype=dtype, name='embed', embedding_init=nn.initializers.normal(0.02))
    x = self.options.constrain(embed(tokens))
    block = Block
    policy = REMAT[self.options.remat]
    if policy is not None:
      block = nn.remat(Block, policy=policy, prevent_cse=False)
    layers = nn.scan(
      block,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=nn.broadcast,
      length=c.num_layers,
    )(c, self.options, self.keep, name='layers')
    (x, cache, _), kept = layers((x, cache, jnp.zeros((), jnp.int32)), positions, column, visible_to)
    x = RMSNorm(c.norm_eps, name='final_norm')(x)
    if not c.tied:
      # Declared here, used by `head`: the decoder itself never makes logits.
      normal = nn.initializers.normal(0.02)
      self.param('head', lambda key: {'kernel': normal(key, (c.width, c.vocab_size))})
    return x, cache, kept


def init(key, config: QwenConfig):
  """Random float32 parameters. `key`: consumed."""
  zeros = jnp.zeros((1, 1), jnp.int32)
  return Qwen(config).init(key, zeros, zeros, zeros, zeros + 1)['params']


def hidden(params, config: QwenConfig, options: Options, tokens, positions, visible_to):
  """Hidden states [B, L, D] of packed rows; `tokens`, `positions`, `visible_to`: [B, L] int32."""
  column = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  return Qwen(config, options).apply({'params': params}, tokens, positions, column, visible_to)[0]


def prefill(params, config: QwenConfig, options: Options, tokens, length):
  """Keys and values of prompts padded on the right.

  Args:
    tokens: [B, P] int32.
    length: [B] int32, tokens that count.

  Returns:
    `Cache` of [num_layers, B, P, h, d]; entries past `length` are garbage that nobody may see.
  """
  column = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  visible_to = jnp.broadcast_to(length[:, None], tokens.shape)
  return Qwen(config, options, keep=True).apply({'params': params}, tokens, column, column, visible_to)[2]


def decode(params, config: QwenConfig, options: Options, tokens, position, cache: Cache):
  """One token per slot.

  Args:
    tokens: [S] int32, the tokens to read.
    position: [S] int32, where they stand; earlier positions of the slot are in the cache.
    cache: updated in place when donated.

  Returns:
    Hidden states [S, D] and the cache.
  """
  column = position[:, None]
  visible_to = jnp.full(cache.k.shape[1:3], cache.k.shape[2], jnp.int32)
  x, cache, _ = Qwen(config, options).apply({'params': params}, tokens[:, None], column, column, visible_to, cache)
  return x[:, 0], cache


def head(params, config: QwenConfig, x, options: Options = Options()):
  """Logits [.., V] float32 of hidden states [.., D]."""
  weight = params['embed']['embedding'] if config.tied else params['head']['kernel'].T
  x, weight = options.constrain_head(x, weight.astype(x.dtype))
  return jnp.einsum('...d,vd->...v', x, weight, preferred_element_type=jnp.float32)


def logits(params, config: QwenConfig, tokens, options: Options = Options()):
  """All logits [B, L, V] float32 of plain causal sequences [B, L]: for tests and small models only."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  visible_to = jnp.full(tokens.shape, tokens.shape[1], jnp.int32)
  return head(params, config, hidden(params, config, options, tokens, positions, visible_to), options)


def count_parameters(params) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
