"""Reads raw documents, and names every file and record that it can't read.

Nothing bad is passed over in silence. What is refused, and by which rule:

  empty        a file without a byte, or text without a letter or digit
  binary       a file with a NUL byte
  encoding     a file that is not UTF-8
  too_large    text over the size limit; a file or line is then not read whole
  torn         a Parquet or ArrayRecord file that does not open or breaks off
  no_text      a record without the text member, or one that is not a string
  not_json     a line or record that is not a JSON object
  unreadable   a file that the system does not let us read, or no plain file
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import glob
import json
import os
import pathlib
from typing import IO
from typing import Any
from typing import NamedTuple

from array_record.python import array_record_module
import pyarrow
from pyarrow import parquet

from glm5_jax.data.config import ArrayRecordSource
from glm5_jax.data.config import FolderSource
from glm5_jax.data.config import JsonlSource
from glm5_jax.data.config import MemorySource
from glm5_jax.data.config import ParquetSource
from glm5_jax.data.config import Source

_RECORDS_PER_READ = 64
# Names kept for a report; the rest are counted.
_MAX_NAMES = 1000


class RawDocument(NamedTuple):
  """A document as it was found.

  Attributes:
    name: its file's path relative to the root, or its record's `name`. All
      documents of one name fall on the same side of the held-out split.
    part: its part of the class; '' where it names none.
    text: its text.
  """

  name: str
  part: str
  text: str


@dataclasses.dataclass
class Refusals:
  """What was not read.

  Attributes:
    counts: refusals by rule.
    names: pairs of name and rule, the first thousand.
  """

  counts: dict[str, int] = dataclasses.field(default_factory=dict)
  names: list[tuple[str, str]] = dataclasses.field(default_factory=list)

  def add(self, name: str, rule: str) -> None:
    """Notes that `name` was refused by `rule`."""
    self.counts[rule] = self.counts.get(rule, 0) + 1
    if len(self.names) < _MAX_NAMES:
      self.names.append((name, rule))


@dataclasses.dataclass(frozen=True)
class _Reading:
  """What every reader needs to know."""

  root: pathlib.Path
  max_bytes: int
  refusals: Refusals

  def name(self, path: pathlib.Path) -> str:
    """Returns the path as reports and splits call it."""
    try:
      return path.relative_to(self.root).as_posix()
    except ValueError:
      return path.as_posix()


def documents(
  source: Source,
  *,
  root: str,
  max_bytes: int,
  refusals: Refusals,
) -> Iterator[RawDocument]:
  """Yields the documents of a source, always in the same order.

  Args:
    source: what to read.
    root: folder that relative paths start from.
    max_bytes: larger files and records are refused.
    refusals: takes up what could not be read.

  Raises:
    FileNotFoundError: nothing lies at the source's path.
  """
  reading = _Reading(pathlib.Path(root), max_bytes, refusals)
  if isinstance(source, MemorySource):
    for index, text in enumerate(source.documents):
      yield from _checked(reading, f'memory:{index}', '', text)
    return
  for path, part in files(source, root):
    if not path.is_file():  # A broken link, a pipe or a device.
      refusals.add(reading.name(path), 'unreadable')
    elif isinstance(source, JsonlSource):
      yield from _jsonl(reading, path, part, source.text_key)
    elif isinstance(source, ParquetSource):
      yield from _parquet(reading, path, part, source.text_key)
    elif isinstance(source, ArrayRecordSource):
      yield from _array_record(reading, path, part, source.text_key)
    else:
      yield from _READERS.get(path.suffix, _plain)(reading, path, part, 'text')


def files(
  source: FolderSource | JsonlSource | ParquetSource | ArrayRecordSource,
  root: str,
) -> list[tuple[pathlib.Path, str]]:
  """Returns the files of a source with the part that their folder names.

  Hidden files, and files in hidden folders, are left out.

  Raises:
    FileNotFoundError: nothing lies at the source's path.
  """
  start = pathlib.Path(root, source.path)
  if start.is_dir():
    found = _walk(start)
  else:
    found = [
      pathlib.Path(match) for match in glob.glob(str(start), recursive=True)
    ]
    start = start.parent
  if not found:
    what = 'is an empty folder' if start.is_dir() else 'does not exist'
    raise FileNotFoundError(
      f'{pathlib.Path(root, source.path)} {what}. Give DataConfig.root and the '
      'path of the source a folder, a file or a glob; '
      '`python -m glm5_jax.data.corpus --output=DIR` makes a corpus.'
    )
  return [(path, _folder_part(start, path)) for path in sorted(found)]


def _walk(start: pathlib.Path) -> list[pathlib.Path]:
  found = []
  seen = set()
  for folder, folders, names in os.walk(start, followlinks=True):
    real = os.path.realpath(folder)
    if real in seen:  # A link back up must not be followed for ever.
      folders.clear()
      continue
    seen.add(real)
    folders[:] = sorted(name for name in folders if not name.startswith('.'))
    found += [
      pathlib.Path(folder, name) for name in names if not name.startswith('.')
    ]
  return found


def _folder_part(start: pathlib.Path, path: pathlib.Path) -> str:
  try:
    parents = path.relative_to(start).parts[:-1]
  except ValueError:  # A glob with folders in it has no one start.
    return ''
  return parents[0] if parents else ''


def _checked(
  reading: _Reading, name: str, part: str, text: object
) -> Iterator[RawDocument]:
  """Yields the document, or notes why it is none."""
  if not isinstance(text, str):
    reading.refusals.add(name, 'no_text')
  elif (size := _num_bytes(text)) is None:
    reading.refusals.add(name, 'encoding')
  elif size > reading.max_bytes:
    reading.refusals.add(name, 'too_large')
  elif not any(map(str.isalnum, text)):
    reading.refusals.add(name, 'empty')
  else:
    yield RawDocument(name, part, text)


def _num_bytes(text: str) -> int | None:
  """Returns bytes in UTF-8; None if a surrogate, as JSON can spell, is in."""
  try:
    return len(text.encode())
  except UnicodeEncodeError:
    return None


def _checked_record(
  reading: _Reading, name: str, part: str, record: Any, text_key: str
) -> Iterator[RawDocument]:
  """Yields the document that a JSON object or a Parquet row holds."""
  if not isinstance(record, dict):
    reading.refusals.add(name, 'not_json')
    return
  given_name, given_part = record.get('name'), record.get('part')
  yield from _checked(
    reading,
    given_name if isinstance(given_name, str) else name,
    given_part if isinstance(given_part, str) else part,
    record.get(text_key),
  )


def _plain(
  reading: _Reading, path: pathlib.Path, part: str, text_key: str
) -> Iterator[RawDocument]:
  """Yields a file as one document."""
  del text_key  # The file is the text.
  name = reading.name(path)
  try:
    if path.stat().st_size > reading.max_bytes:
      reading.refusals.add(name, 'too_large')
      return
    content = path.read_bytes()
  except OSError:
    reading.refusals.add(name, 'unreadable')
    return
  if not content:
    reading.refusals.add(name, 'empty')
  elif b'\0' in content:
    reading.refusals.add(name, 'binary')
  else:
    try:
      text = content.decode('utf-8-sig')
    except UnicodeDecodeError:
      reading.refusals.add(name, 'encoding')
      return
    yield from _checked(reading, name, part, text)


def _jsonl(
  reading: _Reading, path: pathlib.Path, part: str, text_key: str
) -> Iterator[RawDocument]:
  """Yields the documents of a file of JSON lines."""
  name = reading.name(path)
  try:
    with path.open('rb') as file:
      if not file.peek(1):
        reading.refusals.add(name, 'empty')
      for number, line in _bounded_lines(file, 2 * reading.max_bytes + 1024):
        line_name = f'{name}:{number}'
        if line is None:
          reading.refusals.add(line_name, 'too_large')
        elif b'\0' in line:
          reading.refusals.add(line_name, 'binary')
        elif line.strip():
          yield from _json(reading, line_name, part, line, text_key)
  except OSError:
    reading.refusals.add(name, 'unreadable')


def _bounded_lines(
  file: IO[bytes], limit: int
) -> Iterator[tuple[int, bytes | None]]:
  """Yields line numbers with lines; None for a line longer than `limit`."""
  number = 0
  while line := file.readline(limit):
    number += 1
    if len(line) < limit or line.endswith(b'\n'):
      yield number, line
      continue
    # Read to the line's end in pieces, so that no line is ever held whole.
    while line and not line.endswith(b'\n'):
      line = file.readline(1 << 20)
    yield number, None


def _json(
  reading: _Reading, name: str, part: str, content: bytes, text_key: str
) -> Iterator[RawDocument]:
  try:
    record = json.loads(content)
  except UnicodeDecodeError:
    reading.refusals.add(name, 'encoding')
  except (ValueError, RecursionError):
    reading.refusals.add(name, 'not_json')
  else:
    yield from _checked_record(reading, name, part, record, text_key)


def _parquet(
  reading: _Reading, path: pathlib.Path, part: str, text_key: str
) -> Iterator[RawDocument]:
  """Yields the documents of a Parquet file, a few rows at a time."""
  name = reading.name(path)
  row = 0
  try:
    with parquet.ParquetFile(path) as file:
      names = set(file.schema_arrow.names)
      if text_key not in names:
        reading.refusals.add(name, 'no_text')
        return
      columns = sorted(names & {text_key, 'name', 'part'})
      for batch in file.iter_batches(_RECORDS_PER_READ, columns=columns):
        for record in batch.to_pylist():
          yield from _checked_record(
            reading, f'{name}:{row}', part, record, text_key
          )
          row += 1
  except UnicodeDecodeError:
    reading.refusals.add(f'{name} from row {row}', 'encoding')
  except (pyarrow.ArrowException, OSError):
    reading.refusals.add(f'{name} from row {row}' if row else name, 'torn')


def _array_record(
  reading: _Reading, path: pathlib.Path, part: str, text_key: str | None
) -> Iterator[RawDocument]:
  """Yields the documents of an ArrayRecord file, a few records at a time."""
  name = reading.name(path)
  start = 0
  try:
    if not path.stat().st_size:
      reading.refusals.add(name, 'empty')
      return
    reader = array_record_module.ArrayRecordReader(str(path))
    try:
      count = reader.num_records()
      while start < count:
        stop = min(start + _RECORDS_PER_READ, count)
        for index, record in enumerate(reader.read(start, stop), start):
          yield from _record(reading, f'{name}:{index}', part, record, text_key)
        start = stop
    finally:
      reader.close()
  # The reader raises what its C++ side happens to: any of these means that
  # the file is not whole.
  except (OSError, ValueError, IndexError, RuntimeError):
    reading.refusals.add(f'{name} from record {start}', 'torn')


def _record(
  reading: _Reading,
  name: str,
  part: str,
  record: bytes,
  text_key: str | None,
) -> Iterator[RawDocument]:
  if text_key is not None:
    yield from _json(reading, name, part, record, text_key)
    return
  try:
    text = record.decode()
  except UnicodeDecodeError:
    reading.refusals.add(name, 'encoding')
    return
  yield from _checked(reading, name, part, text)


_Reader = Callable[[_Reading, pathlib.Path, str, str], Iterator[RawDocument]]
_READERS: dict[str, _Reader] = {
  '.jsonl': _jsonl,
  '.parquet': _parquet,
  '.array_record': _array_record,
  '.arrayrecord': _array_record,
}
