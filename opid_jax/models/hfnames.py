"""Which tensors of a Hugging Face file make up which leaf of the parameter tree: one table both ways."""

import re
from typing import NamedTuple

from opid_jax.models.qwen import QwenConfig

# Path in the parameter tree -> (name in the file, stored as [out, in]). '{}' is the layer.
NAMES = {
  ('embed', 'embedding'): ('model.embed_tokens.weight', False),
  ('layers', 'attn_norm', 'scale'): ('model.layers.{}.input_layernorm.weight', False),
  ('layers', 'attn', 'q', 'kernel'): ('model.layers.{}.self_attn.q_proj.weight', True),
  ('layers', 'attn', 'q', 'bias'): ('model.layers.{}.self_attn.q_proj.bias', False),
  ('layers', 'attn', 'k', 'kernel'): ('model.layers.{}.self_attn.k_proj.weight', True),
  ('layers', 'attn', 'k', 'bias'): ('model.layers.{}.self_attn.k_proj.bias', False),
  ('layers', 'attn', 'v', 'kernel'): ('model.layers.{}.self_attn.v_proj.weight', True),
  ('layers', 'attn', 'v', 'bias'): ('model.layers.{}.self_attn.v_proj.bias', False),
  ('layers', 'attn', 'q_norm', 'scale'): ('model.layers.{}.self_attn.q_norm.weight', False),
  ('layers', 'attn', 'k_norm', 'scale'): ('model.layers.{}.self_attn.k_norm.weight', False),
  ('layers', 'attn', 'o', 'kernel'): ('model.layers.{}.self_attn.o_proj.weight', True),
  ('layers', 'mlp_norm', 'scale'): ('model.layers.{}.post_attention_layernorm.weight', False),
  ('layers', 'mlp', 'gate', 'kernel'): ('model.layers.{}.mlp.gate_proj.weight', True),
  ('layers', 'mlp', 'up', 'kernel'): ('model.layers.{}.mlp.up_proj.weight', True),
  ('layers', 'mlp', 'down', 'kernel'): ('model.layers.{}.mlp.down_proj.weight', True),
  ('final_norm', 'scale'): ('model.norm.weight', False),
  ('head', 'kernel'): ('lm_head.weight', True),
}


class Leaf(NamedTuple):
  """One leaf of the parameter tree and the tensors of the file that make it up.

  Attributes:
    path: keys from the root of the tree.
    shape: of the leaf; axis 0 is the layer where `path[0] == 'layers'`.
    names: names in the file, one per layer, or a single one.
    transposed: the file holds [out, in], the leaf [in, out].
  """

  path: tuple[str, ...]
  shape: tuple[int, ...]
  names: tuple[str, ...]
  transposed: bool

  @property
  def file_shape(self) -> tuple[int, ...]:
    """Shape of each tensor in the file."""
    shape = self.shape[1:] if self.path[0] == 'layers' else self.shape
    return shape[::-1] if self.transposed else shape


def leaves(config: QwenConfig) -> tuple[Leaf, ...]:
  """The leaves that a model of this configuration has, in the order of `NAMES`."""
  c = config
  q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  sizes = {
    'embedding': (c.vocab_size, c.width), 'head': (c.width, c.vocab_size),
    'q': (c.width, q), 'k': (c.width, kv), 'v': (c.width, kv), 'o': (q, c.width),
    'gate': (c.width, c.mlp_width), 'up': (c.width, c.mlp_width), 'down': (c.mlp_width, c.width),
    'attn_norm': (c.width,), 'mlp_norm': (c.width,), 'final_norm': (c.width,),
    'q_norm': (c.head_dim,), 'k_norm': (c.head_dim,),
  }  # fmt: skip
  result = []
  for path, (name, transposed) in NAMES.items():
    *_, module, kind = path
    absent = (
      (kind == 'bias' and not c.attention_bias)
      or (module in ('q_norm', 'k_norm') and not c.qk_norm)
      or (module == 'head' and c.tied)
    )
    if absent:
      continue
    shape = sizes['embedding' if module == 'embed' else module]
    shape = shape[1:] if kind == 'bias' else shape
    if path[0] == 'layers':
      names = tuple(name.format(layer) for layer in range(c.num_layers))
      result.append(Leaf(path, (c.num_layers, *shape), names, transposed))
    else:
      result.append(Leaf(path, shape, (name,), transposed))
  return tuple(result)


def from_hf_name(name: str) -> tuple[tuple[str, ...], int | None]:
  """Path in the parameter tree, and the layer, of a tensor's name in the file.

  Raises:
    KeyError: no Qwen model has such a tensor.
  """
  layer = re.match(r'model\.layers\.(\d+)\.', name)
  pattern = name if layer is None else f'model.layers.{{}}.{name[layer.end() :]}'
  for path, (known, _) in NAMES.items():
    if known == pattern:
      return path, None if layer is None else int(layer[1])
  raise KeyError(f'{name!r} is no tensor of a Qwen2 or Qwen3 model.')
