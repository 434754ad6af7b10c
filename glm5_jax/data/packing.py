"""Packs pieces of documents into rows.

Two ways. `ConcatAndSplit` fills each row to the last token and cuts documents
where rows end. `FirstFit` keeps documents whole as long as a row can hold them,
and pads. Neither loses or repeats a token, and a segment is always a run of one
document.
"""

from collections.abc import Sequence
from typing import Any
from typing import Protocol

from jaxtyping import Int32
import numpy as np

from glm5_jax.data import config as config_lib
from glm5_jax.data.batch import Batch
from glm5_jax.data.mixtures import Mixture
from glm5_jax.data.mixtures import Piece

Row = list[Piece]


class Packer(Protocol):
  """Makes rows of a mixture's pieces."""

  def next_row(self, length: int) -> Row:
    """Returns the next row, of at most `length` tokens."""

  def get_state(self) -> list[list[list[int]]]:
    """Returns references to the pieces that are drawn but not in a row yet."""

  def set_state(self, state: list[list[list[int]]]) -> None:
    """Goes on from `get_state`'s; the mixture's state is set apart."""


def packer(
  config: config_lib.ConcatAndSplit | config_lib.FirstFit, mixture: Mixture
) -> Packer:
  """Returns the packer that a config names."""
  if isinstance(config, config_lib.FirstFit):
    return FirstFit(mixture, config.open_rows)
  return ConcatAndSplit(mixture)


class ConcatAndSplit:
  """Full rows; documents go on in a later row where one ends."""

  def __init__(self, mixture: Mixture) -> None:
    """Takes the mixture to draw from."""
    self._mixture = mixture

  def next_row(self, length: int) -> Row:
    """Returns the next row, of exactly `length` tokens."""
    row: Row = []
    room = length
    while room:
      row.append(self._mixture.draw(room))
      room -= len(row[-1].tokens)
    return row

  def get_state(self) -> list[list[list[int]]]:
    """Returns an empty list: what is drawn is in a row at once."""
    return []

  def set_state(self, state: list[list[list[int]]]) -> None:
    """Takes an empty list."""
    del state


class FirstFit:
  """Whole documents; a row is done when it is full or one must make place."""

  def __init__(self, mixture: Mixture, open_rows: int) -> None:
    """Takes the mixture to draw from and how many rows are open at a time."""
    self._mixture = mixture
    self._max_open = open_rows
    self._open: list[Row] = []

  def next_row(self, length: int) -> Row:
    """Returns the next row, of at most `length` tokens."""
    self._cut(length)
    while True:
      done = self._done(length)
      if done is not None:
        return done
      piece = self._mixture.draw(length)
      for row in self._open:
        if _used(row) + len(piece.tokens) <= length:
          row.append(piece)
          break
      else:
        self._open.append([piece])

  def _done(self, length: int) -> Row | None:
    """Takes out a full row, or the fullest if there are too many."""
    if not self._open:
      return None
    used = [_used(row) for row in self._open]
    fullest = used.index(max(used))
    if used[fullest] == length or len(self._open) > self._max_open:
      return self._open.pop(fullest)
    return None

  def _cut(self, length: int) -> None:
    """Opens rows anew where those of a longer stage are left."""
    if all(_used(row) <= length for row in self._open):
      return
    rows: list[Row] = []
    for piece in (piece for row in self._open for piece in row):
      for start in range(0, len(piece.tokens), length):
        tokens = piece.tokens[start : start + length]
        rows.append([piece._replace(start=piece.start + start, tokens=tokens)])
    self._open = rows

  def get_state(self) -> list[list[list[int]]]:
    """Returns references to the pieces of the open rows."""
    return [[piece.reference for piece in row] for row in self._open]

  def set_state(self, state: list[list[list[int]]]) -> None:
    """Reads the open rows again."""
    self._open = [[self._mixture.read(item) for item in row] for row in state]


def _used(row: Row) -> int:
  return sum(len(piece.tokens) for piece in row)


def batch(rows: Sequence[Row], length: int, source_ids: Sequence[int]) -> Batch:
  """Lays rows out as arrays.

  Args:
    rows: rows of at most `length` tokens each.
    length: tokens a row, padding included.
    source_ids: class index of each lane.
  """
  made = Batch(*(_filled(rows, length, fill) for fill in (0, 0, 0, 0, 0, -1)))
  made = made._replace(weights=made.weights.astype(np.float32))
  for b, row in enumerate(rows):
    start = 0
    for number, piece in enumerate(row, 1):
      stop = start + len(piece.tokens)
      made.tokens[b, start:stop] = piece.tokens
      made.targets[b, start : stop - 1] = piece.tokens[1:]
      made.weights[b, start : stop - 1] = 1
      made.segment_ids[b, start:stop] = number
      made.positions[b, start:stop] = np.arange(stop - start)
      made.source_ids[b, start:stop] = source_ids[piece.lane]
      start = stop
  return made


def _filled(
  rows: Sequence[Any], length: int, value: int
) -> Int32[np.ndarray, 'B T']:
  return np.full((len(rows), length), value, np.int32)
