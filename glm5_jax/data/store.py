"""The cleaned text of a mixture on disk, split into training and held out.

A store is a folder: one ArrayRecord file for the training documents of each
lane (a class's named part, or its unnamed rest), one for the held-out documents
of each class, and `manifest.json`, which counts what is there and what was
dropped by which rule.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any

from array_record.python import array_record_module
import grain

from glm5_jax.data.config import TEXT_CLASSES
from glm5_jax.data.config import ClassConfig
from glm5_jax.data.config import DataConfig
from glm5_jax.data.config import TextClass
from glm5_jax.data.sources import RawDocument

MANIFEST = 'manifest.json'
_RECORDS_PER_READ = 64


@dataclasses.dataclass(frozen=True)
class Lane:
  """Documents that are drawn together.

  Attributes:
    text_class: their class.
    part: their part of the class; '' for all parts without a share of their
      own.
    share: their share of all tokens.
  """

  text_class: TextClass
  part: str
  share: float

  @property
  def file_name(self) -> str:
    """Name of the file of the lane's training documents."""
    part = ''.join(c if c.isalnum() else '_' for c in self.part) or 'rest'
    return f'{self.text_class}.{part}.train.array_record'

  @property
  def label(self) -> str:
    """The lane as reports call it."""
    return f'{self.text_class}/{self.part}' if self.part else self.text_class


def lanes(config: DataConfig) -> tuple[Lane, ...]:
  """Returns the lanes of a mixture, those without a share left out."""
  found = []
  for text_class in TEXT_CLASSES:
    of_class = config.class_config(text_class)
    for part, share in part_shares(of_class).items():
      if of_class.share * share > 0:
        found.append(Lane(text_class, part, of_class.share * share))
  return tuple(found)


def part_shares(config: ClassConfig) -> dict[str, float]:
  """Returns the share of each part within its class; '' is the rest."""
  shares = {part.part: part.share for part in config.parts}
  # Rounding must not make a lane of what is left.
  rest = max(0.0, 1 - sum(shares.values()))
  if rest > 1e-9:
    shares[''] = rest
  return shares


def heldout_file_name(text_class: TextClass) -> str:
  """Returns the name of the file of a class's held-out documents."""
  return f'{text_class}.heldout.array_record'


def encode(document: RawDocument) -> bytes:
  """Returns a document as a record."""
  return json.dumps(document._asdict(), ensure_ascii=False).encode()


def decode(record: bytes) -> RawDocument:
  """Returns the document of a record."""
  return RawDocument(**json.loads(record))


@dataclasses.dataclass(frozen=True)
class TextStore:
  """A store that is complete.

  Attributes:
    folder: where it lies.
    manifest: what it holds; see `preparation`.
  """

  folder: pathlib.Path
  manifest: Mapping[str, Any]

  @property
  def digest(self) -> str:
    """Hash of every document in its order and of the split."""
    return str(self.manifest['digest'])

  def train(self, lane: Lane) -> grain.MapDataset[RawDocument]:
    """Returns the training documents of a lane, in their stored order."""
    path = str(self.folder / lane.file_name)
    records = grain.sources.ArrayRecordDataSource([path])
    return grain.MapDataset.source(records).map(decode)

  def heldout(self, text_class: TextClass) -> Iterator[RawDocument]:
    """Yields the held-out documents of a class."""
    path = self.folder / heldout_file_name(text_class)
    if not path.exists():
      return
    reader = array_record_module.ArrayRecordReader(str(path))
    try:
      count = reader.num_records()
      for start in range(0, count, _RECORDS_PER_READ):
        stop = min(start + _RECORDS_PER_READ, count)
        yield from map(decode, reader.read(start, stop))
    finally:
      reader.close()


def open_store(folder: pathlib.Path) -> TextStore | None:
  """Returns the store in a folder; None if there is no complete one."""
  try:
    manifest = json.loads((folder / MANIFEST).read_text(encoding='utf-8'))
  except FileNotFoundError:
    return None
  return TextStore(folder, manifest)
