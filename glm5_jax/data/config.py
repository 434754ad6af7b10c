"""Where text comes from and how it becomes batches, as plain data."""

import dataclasses
from typing import Literal

TextClass = Literal['code', 'web', 'papers', 'books', 'other']
# The order is the meaning of `Batch.source_ids`.
TEXT_CLASSES: tuple[TextClass, ...] = (
  'code',
  'web',
  'papers',
  'books',
  'other',
)


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ValueError(message)


def _require_share(config: object, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    _require(
      0 <= value <= 1,
      f'{type(config).__name__}.{name} is {value}; it must lie in 0..1.',
    )


@dataclasses.dataclass(frozen=True)
class LengthStage:
  """A stretch of training at one sequence length.

  Attributes:
    sequence_length: tokens a row.
    batch_size: rows a step over all hosts.
    num_steps: optimizer steps.
  """

  sequence_length: int
  batch_size: int
  num_steps: int

  def __post_init__(self) -> None:
    for name in ('sequence_length', 'batch_size', 'num_steps'):
      value = getattr(self, name)
      _require(
        value > 0, f'LengthStage.{name} is {value}; it must be positive.'
      )


@dataclasses.dataclass(frozen=True)
class FolderSource:
  """Every file at or under a path, each read by what its suffix says.

  `.jsonl`, `.parquet` and `.array_record` files hold records; every other file
  is one document.

  Attributes:
    path: a folder, a file or a glob; relative to `DataConfig.root`.
  """

  path: str


@dataclasses.dataclass(frozen=True)
class JsonlSource:
  """Files of one JSON object a line.

  Attributes:
    path: a folder, a file or a glob; relative to `DataConfig.root`.
    text_key: member that holds the text.
  """

  path: str
  text_key: str = 'text'


@dataclasses.dataclass(frozen=True)
class ParquetSource:
  """Parquet files.

  Attributes:
    path: a folder, a file or a glob; relative to `DataConfig.root`.
    text_key: column that holds the text.
  """

  path: str
  text_key: str = 'text'


@dataclasses.dataclass(frozen=True)
class ArrayRecordSource:
  """ArrayRecord files whose records are JSON objects, or UTF-8 text.

  Attributes:
    path: a folder, a file or a glob; relative to `DataConfig.root`.
    text_key: member that holds the text; None: the record is the text.
  """

  path: str
  text_key: str | None = 'text'


@dataclasses.dataclass(frozen=True)
class MemorySource:
  """Documents given in the config itself.

  Attributes:
    documents: their texts.
  """

  documents: tuple[str, ...]


Source = (
  FolderSource | JsonlSource | ParquetSource | ArrayRecordSource | MemorySource
)


@dataclasses.dataclass(frozen=True)
class ProseFilter:
  """What running text must look like (after Gopher, arXiv 2112.11446, A1.1).

  Attributes:
    languages: ISO 639-1 codes that are kept; empty: all.
    min_bytes: shorter documents are dropped.
    max_repeated_lines: largest share of bytes in lines seen before.
    max_boilerplate_lines: largest share of lines that are navigation, legal
      notices or the like.
    min_letters: smallest share of letters among what is not white space.
  """

  languages: tuple[str, ...] = ()
  min_bytes: int = 200
  max_repeated_lines: float = 0.3
  max_boilerplate_lines: float = 0.3
  min_letters: float = 0.6

  def __post_init__(self) -> None:
    _require_share(
      self, 'max_repeated_lines', 'max_boilerplate_lines', 'min_letters'
    )


@dataclasses.dataclass(frozen=True)
class CodeFilter:
  """What a source file must look like (after StarCoder, arXiv 2305.06161, 3.1).

  Files that say that they are generated are dropped too.

  Attributes:
    min_lines: shorter files are dropped.
    max_line_length: longest line, in characters.
    max_mean_line_length: largest mean over the lines, in characters.
    min_letters: smallest share of letters among what is not white space.
  """

  min_lines: int = 5
  max_line_length: int = 1000
  max_mean_line_length: float = 100.0
  min_letters: float = 0.4

  def __post_init__(self) -> None:
    _require_share(self, 'min_letters')


Filter = ProseFilter | CodeFilter


@dataclasses.dataclass(frozen=True)
class PartShare:
  """A named part of a class and its share of the class's tokens.

  A document's part is its record's `part` member, or, in a folder of plain
  files, the first folder of its path.

  Attributes:
    part: the part's name.
    share: share of the class's tokens; parts not listed divide what is left.
  """

  part: str
  share: float

  def __post_init__(self) -> None:
    _require_share(self, 'share')


@dataclasses.dataclass(frozen=True)
class ClassConfig:
  """One class of the mixture.

  Attributes:
    share: share of all tokens; the five add up to 1.
    source: where its documents are.
    filter: what its documents must look like; None: anything.
    parts: shares of named parts within the class.
  """

  share: float
  source: Source
  filter: Filter | None
  parts: tuple[PartShare, ...] = ()

  def __post_init__(self) -> None:
    _require_share(self, 'share')
    total = sum(part.share for part in self.parts)
    _require(
      total <= 1 + 1e-9,
      f'ClassConfig.parts take {total} of the class; they must leave >= 0.',
    )


@dataclasses.dataclass(frozen=True)
class TrainedTokenizer:
  """Byte-level BPE, trained on the training text in the mixture's shares.

  Attributes:
    vocab_size: ids, the reserved ones included.
    sample_bytes: text that it is trained on.
  """

  vocab_size: int = 8192
  sample_bytes: int = 16_000_000


@dataclasses.dataclass(frozen=True)
class TokenizerFile:
  """A `tokenizer.json` as Hugging Face's `tokenizers` writes it.

  Attributes:
    path: the file.
    begin_token: token put before each document.
    end_token: token put after each document.
  """

  path: str
  begin_token: str = '<|begin|>'
  end_token: str = '<|end|>'


@dataclasses.dataclass(frozen=True)
class ConcatAndSplit:
  """Rows are filled to the last token; documents are cut at row ends."""


@dataclasses.dataclass(frozen=True)
class FirstFit:
  """Documents go whole into the first open row with room.

  Documents longer than a row are cut into rows.

  Attributes:
    open_rows: rows that are open at a time.
  """

  open_rows: int = 16

  def __post_init__(self) -> None:
    _require(
      self.open_rows > 0,
      f'FirstFit.open_rows is {self.open_rows}; it must be positive.',
    )


def _prose(share: float, name: str, *parts: PartShare) -> ClassConfig:
  return ClassConfig(share, FolderSource(name), ProseFilter(), parts)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Text, its cleaning, its mixture and its packing.

  Attributes:
    root: folder that the sources' paths are relative to.
    code: source code.
    web: web pages.
    papers: scientific papers.
    books: books.
    other: everything else.
    tokenizer: how text becomes ids.
    packing: how documents become rows.
    near_duplicate: documents whose estimated Jaccard similarity (of five-word
      shingles) reaches this are one document; 1: only equal texts are.
    heldout_share: share of files that are kept from training.
    max_document_bytes: larger documents are refused.
    cache: folder for the cleaned text, one subfolder for each distinct config.
    prefetch: batches made ahead by a thread; 0: no thread.
  """

  root: str = 'runs/corpus'
  code: ClassConfig = ClassConfig(0.35, FolderSource('code'), CodeFilter())
  web: ClassConfig = ClassConfig(
    0.25, FolderSource('web'), ProseFilter(languages=('en', 'zh'))
  )
  papers: ClassConfig = _prose(0.15, 'papers')
  books: ClassConfig = _prose(0.10, 'books')
  other: ClassConfig = _prose(0.15, 'other')
  tokenizer: TrainedTokenizer | TokenizerFile = TrainedTokenizer()
  packing: ConcatAndSplit | FirstFit = ConcatAndSplit()
  near_duplicate: float = 0.7
  heldout_share: float = 0.02
  max_document_bytes: int = 16_000_000
  cache: str = 'runs/prepared'
  prefetch: int = 2

  def __post_init__(self) -> None:
    _require_share(self, 'near_duplicate', 'heldout_share')
    shares = {name: self.class_config(name).share for name in TEXT_CLASSES}
    _require(
      abs(sum(shares.values()) - 1) < 1e-6,
      f'The shares of DataConfig add up to {sum(shares.values())}: {shares}. '
      'Change them so that they add up to 1.',
    )

  def class_config(self, name: TextClass) -> ClassConfig:
    """Returns the part of the config that belongs to a class."""
    config = getattr(self, name)
    assert isinstance(config, ClassConfig)
    return config
