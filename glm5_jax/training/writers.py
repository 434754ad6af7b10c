"""Where rows of metrics go."""

from collections.abc import Iterator
import json
import os
import pathlib
from typing import Protocol

import tensorboardX

from glm5_jax.training.metrics import Row


class Writer(Protocol):
  """Takes rows as they come."""

  def write(self, row: Row) -> None:
    """Writes a row."""

  def close(self) -> None:
    """Finishes what is open."""


def read_rows(path: pathlib.Path) -> Iterator[Row]:
  """Yields the rows of a `metrics.jsonl`; skips a torn last line."""
  if not path.exists():
    return
  with path.open(encoding='utf-8') as file:
    for line in file:
      # A killed run leaves at most its last line unfinished.
      if line.endswith('\n'):
        yield json.loads(line)


class JsonlWriter:
  """One JSON object a line; rows past `step` are dropped on opening.

  A run that goes on from a checkpoint does the steps after it once more, so the
  rows that a killed run wrote for them must not stay.
  """

  def __init__(self, path: pathlib.Path, step: int) -> None:
    rows = [row for row in read_rows(path) if _step(row) <= step]
    part = path.with_suffix('.part')
    with part.open('w', encoding='utf-8') as file:
      for row in rows:
        file.write(json.dumps(row) + '\n')
    # At no moment is there a file with fewer rows than are to be kept.
    os.replace(part, path)
    self._file = path.open('a', encoding='utf-8')

  def write(self, row: Row) -> None:
    self._file.write(json.dumps(row) + '\n')
    # A checkpoint of this step must not be on disk before its row is.
    self._file.flush()

  def close(self) -> None:
    self._file.close()


class TensorboardWriter:
  """Scalars for TensorBoard; a list becomes one curve a layer."""

  def __init__(self, folder: pathlib.Path, step: int) -> None:
    # purge_step hides what a killed run wrote past the checkpoint. The suffix
    # keeps two runs that begin within a second from sharing a file.
    self._writer = tensorboardX.SummaryWriter(
      str(folder),
      purge_step=step + 1,
      flush_secs=10,
      filename_suffix=f'.after_{step:09d}',
    )

  def write(self, row: Row) -> None:
    step = _step(row)
    for name, value in row.items():
      if isinstance(value, list):
        for index, entry in enumerate(value):
          self._writer.add_scalar(f'{name}/layer_{index:02d}', entry, step)
      elif name != 'step':
        self._writer.add_scalar(name, value, step)

  def close(self) -> None:
    self._writer.close()


def _step(row: Row) -> int:
  step = row['step']
  assert not isinstance(step, list)
  return int(step)
