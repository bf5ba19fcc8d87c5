"""The border between text side and array side: token sequences into packed rows and back.

In this version every sequence is a branch of its own (plain packing); the arrays are those of a prefix tree
(see `types.Packed`), so sharing prefixes changes this module only.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from opid_jax.types import Packed


class Place(NamedTuple):
  """Where the scored tokens of M sequences went.

  Attributes:
    row: [M] int32, packed row.
    slot: [M] int32, first slot; a sequence's slots are contiguous.
    length: [M] int32, scored tokens.
  """

  row: np.ndarray
  slot: np.ndarray
  length: np.ndarray


def pack(sequences: Sequence[tuple[np.ndarray, np.ndarray]], *, row_length: int, slots: int, rows_multiple: int = 1):
  """Packs (prompt, response) pairs into rows of `row_length` tokens and `slots` scored slots.

  Rows are filled first-fit in order of decreasing length (ties: given order), which is deterministic. The last
  response token is a target only: nobody reads its hidden state, so it takes no column.

  Args:
    sequences: (prompt [P], response [T]) int32 pairs, P >= 1; T = 0 is allowed and takes no room.
    rows_multiple: the number of rows is padded with empty rows to a multiple of this.

  Returns:
    (`Packed` of NumPy arrays, `Place`).

  Raises:
    ValueError: if a sequence does not fit into a row, naming the config fields.
  """
  place = Place(*(np.zeros(len(sequences), np.int32) for _ in range(3)))
  room: list[list[int]] = []  # Per row: columns and slots still free.
  start = np.zeros(len(sequences), np.int32)
  order = sorted(range(len(sequences)), key=lambda m: (-len(sequences[m][0]) - len(sequences[m][1]), m))
  for m in order:
    prompt, response = sequences[m]
    if not len(response):
      continue
    if not len(prompt):
      raise ValueError(f'Sequence {m} has no prompt; at least one token must come before a scored one.')
    columns = len(prompt) + len(response) - 1
    if columns > row_length or len(response) > slots:
      raise ValueError(
        f'A sequence of {columns} tokens with {len(response)} scored does not fit into a row: learner.row_length '
        f'is {row_length}, learner.slots_per_row is {slots}. Raise them or lower the rollout.max_* limits.'
      )
    row = next((r for r, (c, k) in enumerate(room) if c >= columns and k >= len(response)), len(room))
    if row == len(room):
      room.append([row_length, slots])
    start[m] = row_length - room[row][0]
    place.row[m], place.slot[m], place.length[m] = row, slots - room[row][1], len(response)
    room[row][0] -= columns
    room[row][1] -= len(response)

  rows = max(rows_multiple, -(-len(room) // rows_multiple) * rows_multiple)
  packed = Packed(
    tokens=np.zeros((rows, row_length), np.int32),
    positions=np.zeros((rows, row_length), np.int32),
    visible_to=np.zeros((rows, row_length), np.int32),  # Zero: padding, nobody sees it.
    score_at=np.zeros((rows, slots), np.int32),
    target=np.zeros((rows, slots), np.int32),
    is_scored=np.zeros((rows, slots), np.float32),
  )
  for m, (prompt, response) in enumerate(sequences):
    if not len(response):
      continue
    row, columns = place.row[m], len(prompt) + len(response) - 1
    span = slice(start[m], start[m] + columns)
    packed.tokens[row, span] = np.concatenate([prompt, response[:-1]])
    packed.positions[row, span] = np.arange(columns)
    packed.visible_to[row, span] = start[m] + columns
    scored = slice(place.slot[m], place.slot[m] + len(response))
    packed.score_at[row, scored] = start[m] + len(prompt) - 1 + np.arange(len(response))
    packed.target[row, scored] = response
    packed.is_scored[row, scored] = 1
  return packed, place


def unpack(values: np.ndarray, place: Place, width: int) -> np.ndarray:
  """Per-slot values [R, K] back to [M, T] with T = `width`, zero past each length."""
  out = np.zeros((len(place.row), width), values.dtype)
  for m, (row, slot, length) in enumerate(zip(*place, strict=True)):
    out[m, :length] = values[row, slot : slot + length]
  return out


def spread(values: np.ndarray, place: Place, packed: Packed) -> np.ndarray:
  """Values [M, T] of sequences to per-slot values [R, K], zero in unused slots; the inverse of `unpack`."""
  out = np.zeros(packed.target.shape, np.float32)
  for m, (row, slot, length) in enumerate(zip(*place, strict=True)):
    out[row, slot : slot + length] = values[m, :length]
  return out


def calls(arrays, rows: int) -> Iterator:
  """Cuts a tree of [R, ..] arrays into device calls of `rows` rows; R is a multiple of it."""
  fields = arrays._fields
  for begin in range(0, arrays[0].shape[0], rows):
    yield type(arrays)(*(getattr(arrays, name)[begin : begin + rows] for name in fields))


def stack_responses(responses: Sequence[np.ndarray], width: int, dtype) -> np.ndarray:
  """Ragged [T_n] arrays to [N, T], zero past each length."""
  out = np.zeros((len(responses), width), dtype)
  for n, response in enumerate(responses):
    out[n, : len(response)] = response
  return out
