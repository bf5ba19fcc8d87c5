"""safetensors files with NumPy alone: bfloat16 without torch, errors that name the file and the likely cause.

Format: 8 bytes little-endian length N, N bytes of JSON (name -> dtype, shape, data_offsets), then the data.
See https://github.com/huggingface/safetensors, section "Format".

Tensors are read in blocks with plain file reads. A memory map would do as well, but its pages count as
resident memory, and a file that shrinks under it ends the process with SIGBUS instead of an error.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

# What a model may be stored in; anything else in a header is refused where it is used.
FLOATS = {'F32': np.dtype(np.float32), 'F16': np.dtype(np.float16), 'BF16': np.dtype(ml_dtypes.bfloat16)}
_ITEM_BYTES = {
  'F64': 8, 'I64': 8, 'U64': 8, 'F32': 4, 'I32': 4, 'U32': 4, 'F16': 2, 'BF16': 2, 'I16': 2, 'U16': 2,
  'I8': 1, 'U8': 1, 'BOOL': 1, 'F8_E4M3': 1, 'F8_E5M2': 1,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # The limit of the reference implementation.
# Small enough for the processor's cache: a block is converted and then written transposed.
_BLOCK_BYTES = 1 << 20


class Tensor(NamedTuple):
  """Where one tensor lies.

  Attributes:
    path: its file.
    dtype: as the header spells it, for example 'BF16'.
    shape: row-major.
    start: byte of the file at which it begins.
  """

  path: Path
  dtype: str
  shape: tuple[int, ...]
  start: int


def read_header(path: Path) -> dict[str, Tensor]:
  """All tensors of a file by name; reads nothing but the header.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is empty, cut off, or something else than safetensors; says what it looks like.
  """
  size = os.path.getsize(path)
  with open(path, 'rb') as file:
    start = file.read(512)
    _refuse_other_formats(path, size, start)
    (length,) = struct.unpack('<Q', start[:8])
    # Compared before anything is read: a damaged length must not become an allocation.
    if length > min(_MAX_HEADER, size - 8):
      raise ValueError(
        f'{path}: the header claims {length} bytes, but the file has {size} in all. It is cut off or not a '
        f'safetensors file; download it again.'
      )
    file.seek(8)
    text = file.read(length)
  try:
    header = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    header.pop('__metadata__', None)
    items = []
    for name, entry in header.items():
      begin, end = entry['data_offsets']
      items.append((name, entry['dtype'], tuple(map(int, entry['shape'])), int(begin), int(end)))
  except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
    raise ValueError(f'{path}: {length} bytes of header that are not safetensors ({error!r}).') from error
  _check_extents(path, size - 8 - length, items)
  data = 8 + length
  return {name: Tensor(Path(path), dtype, shape, data + begin) for name, dtype, shape, begin, _ in items}


def _refuse_other_formats(path, size, start):
  """Names the usual impostors before the length field turns them into nonsense."""
  text = start.lstrip().lower()
  if size == 0:
    raise ValueError(f'{path}: the file is empty (0 bytes). The download was interrupted; fetch it again.')
  if text.startswith(b'version https://git-lfs'):
    raise ValueError(
      f'{path}: {size} bytes that look like a Git LFS pointer, not weights. Run `git lfs pull` in its folder.'
    )
  if text.startswith((b'<!doctype', b'<html', b'<?xml', b'<head')):
    raise ValueError(f'{path}: {size} bytes that look like a web page (HTML), not weights. Fetch it again.')
  if start.startswith((b'PK\x03\x04', b'\x80\x02', b'\x80\x04')):
    raise ValueError(f'{path}: looks like a torch pickle, not safetensors. Convert it with `transformers`.')
  if size < 10:
    raise ValueError(f'{path}: {size} bytes are too few for a safetensors file. Fetch it again.')


def _unique(path, pairs):
  """A JSON object, refusing a key that stands twice (the later one would win in silence)."""
  names = [name for name, _ in pairs]
  if len(set(names)) != len(names):
    twice = sorted({name for name in names if names.count(name) > 1})
    raise ValueError(f'{path}: duplicate in the header: {", ".join(twice)}.')
  return dict(pairs)


def _check_extents(path, available, items):
  """Every tensor has the bytes its shape asks for, none overlaps another, and the file ends with the last."""
  end_before, name_before = 0, 'the header'
  for name, dtype, shape, begin, end in sorted(items, key=lambda item: item[3:]):
    item_bytes = _ITEM_BYTES.get(dtype)
    wanted = math.prod(shape) * item_bytes if item_bytes else end - begin
    if min((*shape, begin), default=0) < 0 or end - begin != wanted:
      raise ValueError(
        f'{path}: tensor {name!r} of shape {list(shape)} and dtype {dtype} needs {wanted} bytes, '
        f'but the header gives it bytes {begin} to {end}. The header is damaged.'
      )
    if begin != end_before:
      raise ValueError(f'{path}: {name!r} does not begin where {name_before!r} ends. The header is damaged.')
    end_before, name_before = end, name
  if end_before != available:
    what = 'is truncated; fetch it again' if end_before > available else 'has bytes that belong to no tensor'
    raise ValueError(f'{path}: {end_before} bytes of data expected, {available} present. The file {what}.')


def read_blocks(tensor: Tensor) -> Iterator[tuple[int, np.ndarray]]:
  """The tensor in row blocks of about 1 MB: pairs of (first row, [rows, ...]) in the stored dtype.

  Raises:
    ValueError: the stored dtype is none of F32, F16, BF16, or the file became shorter meanwhile.
  """
  if tensor.dtype not in FLOATS:
    raise ValueError(f'{tensor.path}: dtype {tensor.dtype}; expected one of {", ".join(FLOATS)}.')
  dtype = FLOATS[tensor.dtype]
  row_shape = tensor.shape[1:]
  row_items = math.prod(row_shape)
  # Of 4-byte items whatever the dtype, so that the blocks of two tensors of one shape line up.
  step = max(1, _BLOCK_BYTES // max(1, row_items * 4))
  with open(tensor.path, 'rb') as file:
    file.seek(tensor.start)
    for first in range(0, tensor.shape[0], step):
      rows = min(step, tensor.shape[0] - first)
      raw = file.read(rows * row_items * dtype.itemsize)
      if len(raw) != rows * row_items * dtype.itemsize:
        raise ValueError(f'{tensor.path}: the file became shorter while it was read.')
      yield first, np.frombuffer(raw, dtype).reshape(rows, *row_shape)


def write(path: Path, specs: Sequence[tuple[str, str, tuple[int, ...]]], arrays: Iterable[np.ndarray]) -> None:
  """Writes one safetensors file and flushes it to the disk.

  Args:
    path: the file to create.
    specs: (name, dtype as in `FLOATS`, shape) in the order of the data.
    arrays: the values in that order, drawn one at a time; converted to the dtype.
  """
  header, begin = {'__metadata__': {'format': 'pt'}}, 0
  for name, dtype, shape in specs:
    end = begin + math.prod(shape) * FLOATS[dtype].itemsize
    header[name] = {'dtype': dtype, 'shape': list(shape), 'data_offsets': [begin, end]}
    begin = end
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  with open(path, 'wb') as file:
    file.write(struct.pack('<Q', len(text)) + text)
    for (name, dtype, shape), array in zip(specs, arrays, strict=True):
      if array.shape != tuple(shape):
        raise ValueError(f'{name}: shape {list(array.shape)}, expected {list(shape)}.')
      # As bytes: ml_dtypes arrays do not offer the buffer protocol.
      file.write(memoryview(np.ascontiguousarray(array, FLOATS[dtype]).reshape(-1).view(np.uint8)))
    file.flush()
    os.fsync(file.fileno())
