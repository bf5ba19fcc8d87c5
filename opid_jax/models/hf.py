"""Hugging Face folders: `config.json` and safetensors in, parameters out, and back again. No torch.

A leaf of the parameter tree stacks the layers of one kind of tensor. Loading fills one leaf at a time and
hands it over (`place`) before it begins the next, so the host never holds more than one leaf beside what has
been placed. Saving fetches one tensor at a time.
"""

import errno
import itertools
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from opid_jax.models import tensorfile
from opid_jax.models.bpe import read_json
from opid_jax.models.hfconfig import config_json, load_config
from opid_jax.models.hfnames import NAMES, from_hf_name, leaves
from opid_jax.models.qwen import QwenConfig

_log = logging.getLogger(__name__)

__all__ = ['from_hf_name', 'leaves', 'load_config', 'load_params', 'save_folder']

# Everything that `transformers` may want beside the weights to read and write text as the source model does.
TOKENIZER_FILES = (
  'tokenizer.json', 'tokenizer_config.json', 'vocab.json', 'merges.txt', 'special_tokens_map.json',
  'added_tokens.json', 'chat_template.jinja', 'chat_template.json', 'qwen.tiktoken',
)  # fmt: skip

_EMBED, _HEAD = NAMES['embed', 'embedding'][0], NAMES['head', 'kernel'][0]


def load_params(
  folder: str | os.PathLike,
  config: QwenConfig,
  *,
  dtype: str = 'float32',
  place: Callable[[tuple[str, ...], np.ndarray], Any] | None = None,
) -> dict:
  """Parameters of a Hugging Face folder, as `qwen.init` lays them out.

  Args:
    folder: holds `model.safetensors`, or shards with or without `model.safetensors.index.json`.
    config: from `load_config` of the same folder.
    dtype: 'float32' or 'bfloat16', of the result; stored values of any float dtype are converted.
    place: gets (path, array) of one finished leaf and returns what stands in the tree, for example
      `lambda path, x: jax.device_put(x, shardings[path])`; the host array is let go afterwards.

  Raises:
    FileNotFoundError: no weights in the folder, or a shard of the index is absent.
    ValueError: a tensor is missing, unexpected, duplicate, misshapen or of a wrong dtype, or a file is
      damaged.
  """
  folder = Path(folder)
  place = place or (lambda path, array: jnp.asarray(array))
  wanted = leaves(config)
  tensors = _find_tensors(folder)
  _check_tensors(folder, config, wanted, tensors)
  params: dict = {}
  for leaf in wanted:
    array = np.empty(leaf.shape, jnp.dtype(dtype))
    stacked = array if leaf.path[0] == 'layers' else array[None]
    for layer, name in enumerate(leaf.names):
      target = stacked[layer].T if leaf.transposed else stacked[layer]
      for first, block in tensorfile.read_blocks(tensors[name]):
        target[first : first + len(block)] = block.astype(array.dtype, copy=False)
    node = params
    for key in leaf.path[:-1]:
      node = node.setdefault(key, {})
    node[leaf.path[-1]] = place(leaf.path, array)
    del array, stacked, target  # Or the next leaf would be allocated beside this one.
  return params


def _find_tensors(folder: Path) -> dict[str, tensorfile.Tensor]:
  """Headers of the model's files and of no other safetensors file that lies in the folder."""
  if not folder.is_dir():
    raise FileNotFoundError(f'{folder} is not a folder. Expected one with config.json and model.safetensors.')
  index = folder / 'model.safetensors.index.json'
  if (folder / 'model.safetensors').exists():
    files = [folder / 'model.safetensors']
  elif index.exists():
    files = [folder / name for name in sorted(set(read_json(index)['weight_map'].values()))]
    absent = [file.name for file in files if not file.exists()]
    if absent:
      raise FileNotFoundError(f'{index} names shards that are not there: {_some(absent)}. Download them.')
  else:
    files = sorted(folder.glob('model-?????-of-?????.safetensors'))
    count = int(files[0].stem[-5:]) if files else 0
    if len(files) != count:
      raise FileNotFoundError(f'{folder} holds {len(files)} of {count} shards. Download the rest.')
  if not files:
    suffixes = ('.safetensors', '.bin', '.pt', '.pth')
    found = sorted(path.name for path in folder.iterdir() if path.suffix in suffixes)
    raise FileNotFoundError(
      f'{folder} has neither model.safetensors nor shards of it (found: {_some(found) or "no weights"}). '
      f'Torch-only checkpoints have to be converted with `transformers` first.'
    )
  tensors: dict[str, tensorfile.Tensor] = {}
  for file in files:
    for name, tensor in tensorfile.read_header(file).items():
      if name in tensors:
        first = tensors[name].path.name
        raise ValueError(f'{folder}: duplicate tensor {name!r}, in {first} and in {file.name}.')
      tensors[name] = tensor
  return tensors


def _check_tensors(folder, config, wanted, tensors):
  """Tells apart missing, unexpected, misshapen and wrongly typed tensors; nothing stays unused."""
  shapes = {name: leaf.file_shape for leaf in wanted for name in leaf.names}
  missing = [name for name in shapes if name not in tensors]
  if missing:
    hint = f' {folder / "config.json"} says tie_word_embeddings=false.' if _HEAD in missing else ''
    raise ValueError(
      f'{folder}: missing tensors: {_some(missing)}.{hint} The download is incomplete, or config.json '
      f'describes another model.'
    )
  # Old checkpoints carry RoPE's frequencies, which follow from the config.
  extra = [name for name in tensors if name not in shapes and not name.endswith('.rotary_emb.inv_freq')]
  if config.tied and _HEAD in extra:
    extra.remove(_HEAD)
    _compare_tied_head(tensors)
  if extra:
    raise ValueError(
      f'{folder}: unexpected tensors: {_some(extra)}. {config.family} as config.json describes it has no '
      f'such parts; they would be ignored in silence.'
    )
  for name, shape in shapes.items():
    if tensors[name].shape != shape:
      raise ValueError(
        f'{tensors[name].path}: tensor {name!r} is misshapen: {list(tensors[name].shape)}, config.json asks '
        f'for {list(shape)}.'
      )
    if tensors[name].dtype not in tensorfile.FLOATS:
      raise ValueError(
        f'{tensors[name].path}: tensor {name!r} has the wrong dtype {tensors[name].dtype}; expected one of '
        f'{", ".join(tensorfile.FLOATS)}. Quantised weights have to be dequantised first.'
      )


def _compare_tied_head(tensors):
  """A tied model may ship its head nevertheless; it is dropped, loudly where it is not the embedding."""
  head, embed = tensors[_HEAD], tensors[_EMBED]
  same = head.shape == embed.shape and all(
    np.array_equal(a.astype(np.float32), b.astype(np.float32))
    for (_, a), (_, b) in zip(tensorfile.read_blocks(head), tensorfile.read_blocks(embed), strict=True)
  )
  if same:
    _log.info('%s: %s equals the tied embedding and is dropped.', head.path, _HEAD)
  else:
    _log.warning(
      '%s: %s DIFFERS FROM THE EMBEDDING although config.json says tie_word_embeddings=true. It is dropped, '
      'as `transformers` does; if the model was trained untied, set tie_word_embeddings=false.',
      head.path,
      _HEAD,
    )


def _some(names) -> str:
  """The first few of many names."""
  names = list(names)
  return ', '.join(names[:5]) + (f' and {len(names) - 5} more' if len(names) > 5 else '')


def save_folder(
  folder: str | os.PathLike,
  params: dict,
  config: QwenConfig,
  *,
  dtype: str = 'bfloat16',
  tokenizer_folder: str | os.PathLike | None = None,
  max_shard_bytes: float = 5e9,
  fetch: Callable[[Any], np.ndarray] = np.asarray,
) -> None:
  """Writes a folder that `transformers` 4 and 5 load: all of it, or nothing.

  Everything is written into a hidden folder beside the target, which gets its name at the very end.

  Args:
    folder: must not exist yet, or be empty.
    params: tree as of `load_params`.
    config: its shape.
    dtype: 'bfloat16' or 'float32', of the stored weights.
    tokenizer_folder: its tokenizer files, generation_config.json and end-of-text ids are carried over.
    max_shard_bytes: above this the weights are split, and an index is written.
    fetch: brings one array to the host: one layer of a stacked leaf, or a leaf that is not stacked.

  Raises:
    FileExistsError: the folder has something in it.
    ValueError: the tree does not fit the config, an unknown dtype, or no tokenizer where one was promised.
    OSError: the disk is full (errno ENOSPC); nothing is left behind.
  """
  folder = Path(folder).absolute()
  stored = {'bfloat16': 'BF16', 'float32': 'F32'}.get(dtype)
  if stored is None:
    raise ValueError(f'dtype {dtype!r} cannot be exported. Available: bfloat16, float32.')
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise FileExistsError(f'{folder} exists and is not an empty folder. Name a new one.')
  source = None if tokenizer_folder is None else Path(tokenizer_folder)
  if source is not None and not any((source / name).exists() for name in TOKENIZER_FILES):
    raise ValueError(f'{source} holds no tokenizer (looked for {", ".join(TOKENIZER_FILES)}).')
  wanted = leaves(config)
  _check_tree(params, wanted)
  needed = sum(math.prod(leaf.shape) for leaf in wanted) * tensorfile.FLOATS[stored].itemsize
  folder.parent.mkdir(parents=True, exist_ok=True)
  free = shutil.disk_usage(folder.parent).free
  if free < needed:
    raise OSError(errno.ENOSPC, f'{needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB are free', str(folder))
  partial = folder.parent / f'.{folder.name}.partial'
  shutil.rmtree(partial, ignore_errors=True)  # Of an earlier export that was killed.
  try:
    partial.mkdir()
    _write_weights(partial, params, wanted, stored, max_shard_bytes, fetch)
    _write_texts(partial, config, dtype, source)
    os.replace(partial, folder)
  except OSError as error:
    if error.errno == errno.ENOSPC:
      message = f'The disk became full while {needed / 1e9:.2f} GB were written; nothing is left behind'
      raise OSError(errno.ENOSPC, message, str(folder)) from error
    raise
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _check_tree(params, wanted):
  """The tree has exactly the leaves that the config describes."""
  found = dict(_walk(params, ()))
  expected = {leaf.path: leaf.shape for leaf in wanted}
  missing, unexpected = expected.keys() - found.keys(), found.keys() - expected.keys()
  for what, paths in (('missing', missing), ('unexpected', unexpected)):
    if paths:
      raise ValueError(f'{what} in the parameter tree: {_some(sorted("/".join(path) for path in paths))}.')
  for path, shape in expected.items():
    if tuple(found[path].shape) != shape:
      name = '/'.join(path)
      raise ValueError(f'{name} has shape {list(found[path].shape)}, the config asks for {list(shape)}.')


def _walk(node, path) -> Iterator[tuple[tuple[str, ...], Any]]:
  if not isinstance(node, dict):
    yield path, node
    return
  for key, child in node.items():
    yield from _walk(child, (*path, key))


def _write_weights(folder, params, wanted, stored, max_shard_bytes, fetch):
  """One file, or shards and their index; tensors in the order of the leaves."""
  specs = [(name, stored, leaf.file_shape) for leaf in wanted for name in leaf.names]
  shards, size, total = [[]], 0, 0
  for spec in specs:
    count = math.prod(spec[2]) * tensorfile.FLOATS[stored].itemsize
    if shards[-1] and size + count > max_shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(spec)
    size, total = size + count, total + count
  arrays = _tensors(params, wanted, fetch)
  if len(shards) == 1:
    tensorfile.write(folder / 'model.safetensors', specs, arrays)
    return
  weight_map = {}
  for number, shard in enumerate(shards, 1):
    file = f'model-{number:05d}-of-{len(shards):05d}.safetensors'
    tensorfile.write(folder / file, shard, itertools.islice(arrays, len(shard)))
    weight_map.update(dict.fromkeys((name for name, *_ in shard), file))
  index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
  _write_json(folder / 'model.safetensors.index.json', index)


def _tensors(params, wanted, fetch) -> Iterator[np.ndarray]:
  """The tensors of the file, one at a time."""
  for leaf in wanted:
    node = params
    for key in leaf.path:
      node = node[key]
    # Layer by layer: an array that was fetched whole keeps its host copy (JAX caches it) as long as it lives.
    for layer in range(leaf.shape[0]) if leaf.path[0] == 'layers' else (slice(None),):
      array = fetch(node[layer])
      yield array.T if leaf.transposed else array


def _write_texts(folder, config, dtype, source):
  """config.json, generation_config.json and the files of the tokenizer in the folder `source`, if any."""
  ids = {}
  if source is not None:
    for name in (*TOKENIZER_FILES, 'generation_config.json'):
      if (source / name).exists():
        shutil.copyfile(source / name, folder / name)
    raw = read_json(source / 'config.json') if (source / 'config.json').exists() else {}
    keys = ('bos_token_id', 'eos_token_id', 'pad_token_id')
    ids = {key: raw[key] for key in keys if raw.get(key) is not None}
  _write_json(folder / 'config.json', config_json(config, dtype) | ids)
  if not (folder / 'generation_config.json').exists():
    _write_json(folder / 'generation_config.json', {'_from_model_config': True} | ids)


def _write_json(path, value):
  path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')
