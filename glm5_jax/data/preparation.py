"""Turns sources into a store: filters, removes duplicates, splits by file.

Two passes. The first reads every source once, filters, and writes what is left
to one file with a fixed-size row of facts for each document. The second decides
from the rows alone which documents repeat others and which names are held out,
and writes the store. Neither keeps text in memory.

Held out are the names with the smallest hashes, so that a corpus that grows
keeps most of its split. Documents of one name stay together, and repeats are
removed before the split, so nothing held out has a copy in training.
"""

from collections.abc import Iterator
import dataclasses
import hashlib
import json
import pathlib
import shutil
import tempfile
from typing import IO
from typing import Any

from array_record.python import array_record_module
import numpy as np
import rich
from rich import progress

from glm5_jax.data import dedup
from glm5_jax.data import filters
from glm5_jax.data import sources
from glm5_jax.data import store
from glm5_jax.data.config import TEXT_CLASSES
from glm5_jax.data.config import DataConfig
from glm5_jax.data.config import MemorySource
from glm5_jax.data.config import TextClass

# Raise it when a change here makes another store of the same sources.
_VERSION = 1
_FACTS = np.dtype(
  [
    ('digest', '<u8', (2,)),
    ('signature', '<u4', (dedup.NUM_HASHES,)),
    ('name', '<u8'),
    ('size', '<u8'),
    ('text_class', 'u1'),
    ('lane', 'u1'),  # Index into the class's `part_shares`.
  ]
)


def prepare(config: DataConfig) -> store.TextStore:
  """Returns the store of a config's sources, made now if it is not there yet.

  A store is made anew when a source file, or a field that decides what is kept,
  changes. Files are known by path, size and time of change.

  Raises:
    FileNotFoundError: a source is not there.
    ValueError: a class or part with a share has no document left.
  """
  folder = pathlib.Path(config.cache, _key(config))
  found = store.open_store(folder)
  if found is not None:
    return found
  pathlib.Path(config.cache).mkdir(parents=True, exist_ok=True)
  work = pathlib.Path(tempfile.mkdtemp(prefix='.making-', dir=config.cache))
  try:
    _make(config, work)
    try:
      work.rename(folder)
    except OSError:
      # Another process may have made the same store meanwhile.
      if store.open_store(folder) is None:
        raise
  finally:
    shutil.rmtree(work, ignore_errors=True)
  made = store.open_store(folder)
  assert made is not None
  return made


def _key(config: DataConfig) -> str:
  """Returns a name for the store that depends on all that decides it."""
  decides: list[Any] = [_VERSION, config.near_duplicate, config.heldout_share]
  decides.append(config.max_document_bytes)
  for text_class in TEXT_CLASSES:
    of_class = config.class_config(text_class)
    decides.append(repr(of_class))
    if of_class.share and not isinstance(of_class.source, MemorySource):
      for path, part in sources.files(of_class.source, config.root):
        decides.append((str(path.absolute()), part, *_change(path)))
  return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]


def _change(path: pathlib.Path) -> tuple[int, int]:
  """Returns what a change of a file changes: its size and time."""
  try:
    status = path.stat()
  except OSError:  # A broken link, which reading will name.
    return 0, 0
  return status.st_size, status.st_mtime_ns


@dataclasses.dataclass
class _Counts:
  """What became of a class's documents."""

  read: int = 0
  dropped: dict[str, int] = dataclasses.field(default_factory=dict)
  refusals: sources.Refusals = dataclasses.field(
    default_factory=sources.Refusals
  )

  def drop(self, rule: str, count: int = 1) -> None:
    if count:
      self.dropped[rule] = self.dropped.get(rule, 0) + count


def _make(config: DataConfig, folder: pathlib.Path) -> None:
  counts = {text_class: _Counts() for text_class in TEXT_CLASSES}
  texts, facts_path = folder / 'texts.jsonl', folder / 'facts'
  with texts.open('wb') as text_file, facts_path.open('wb') as fact_file:
    with progress.Progress(
      transient=True, disable=not rich.get_console().is_terminal
    ) as bar:
      for text_class in TEXT_CLASSES:
        if config.class_config(text_class).share:
          task = bar.add_task(f'Reading {text_class}', total=None)
          for _ in _filtered(
            config, text_class, counts[text_class], text_file, fact_file
          ):
            bar.advance(task)
  facts = np.fromfile(facts_path, _FACTS, count=0)
  if facts_path.stat().st_size:
    facts = np.memmap(facts_path, _FACTS, mode='r')
  keep = _without_repeats(config, facts, counts)
  heldout = _heldout(config, facts, keep)
  manifest = _write(config, folder, facts, keep, heldout)
  for text_class, of_class in manifest['classes'].items():
    tally = counts[text_class]
    of_class['read'] = tally.read
    of_class['dropped'] = dict(sorted(tally.dropped.items()))
    of_class['refused'] = dict(sorted(tally.refusals.counts.items()))
    of_class['refused_names'] = tally.refusals.names
  _check(config, manifest)
  del facts
  texts.unlink()
  facts_path.unlink()
  (folder / store.MANIFEST).write_text(
    json.dumps(manifest, indent=2, ensure_ascii=False), encoding='utf-8'
  )


def _filtered(
  config: DataConfig,
  text_class: TextClass,
  counts: _Counts,
  text_file: IO[bytes],
  fact_file: IO[bytes],
) -> Iterator[None]:
  """Writes a class's documents that pass its filter; yields once a document."""
  of_class = config.class_config(text_class)
  shares = store.part_shares(of_class)
  for document in sources.documents(
    of_class.source,
    root=config.root,
    max_bytes=config.max_document_bytes,
    refusals=counts.refusals,
  ):
    counts.read += 1
    yield
    rule = filters.failed_rule(document.text, of_class.filter)
    if rule is not None:
      counts.drop(rule)
      continue
    part = document.part if document.part in shares else ''
    if not shares.get(part):
      counts.drop('part_without_share')
      continue
    row = np.zeros((), _FACTS)
    row['digest'] = np.frombuffer(dedup.digest(document.text), '<u8')
    if config.near_duplicate < 1:
      row['signature'] = dedup.signature(document.text)
    row['name'] = int.from_bytes(
      hashlib.blake2b(document.name.encode(), digest_size=8).digest(), 'little'
    )
    row['size'] = len(document.text.encode())
    row['text_class'] = TEXT_CLASSES.index(text_class)
    row['lane'] = list(shares).index(part)
    fact_file.write(row.tobytes())
    text_file.write(store.encode(document) + b'\n')


def _without_repeats(
  config: DataConfig, facts: np.ndarray, counts: dict[TextClass, _Counts]
) -> np.ndarray:
  """Returns which documents repeat no earlier one, as bool[documents]."""
  index = np.arange(len(facts))
  equal, near = dedup.originals(
    np.array(facts['digest']), facts['signature'], config.near_duplicate
  )
  is_equal = equal != index
  is_near = (near != index) & ~is_equal
  for number, text_class in enumerate(TEXT_CLASSES):
    of_class = facts['text_class'] == number
    counts[text_class].drop('duplicate', int(np.sum(is_equal & of_class)))
    counts[text_class].drop('near_duplicate', int(np.sum(is_near & of_class)))
  keep: np.ndarray = ~(is_equal | is_near)
  return keep


def _heldout(
  config: DataConfig, facts: np.ndarray, keep: np.ndarray
) -> np.ndarray:
  """Returns which documents are held out, as bool[documents].

  Each lane gives its share of names, each class at least one if it has two.
  """
  chosen: list[np.ndarray] = []
  for number in range(len(TEXT_CLASSES)) if config.heldout_share else ():
    of_class = keep & (facts['text_class'] == number)
    lane_names = [
      np.unique(facts['name'][of_class & (facts['lane'] == lane)])
      for lane in np.unique(facts['lane'][of_class])
    ]
    takes = [round(config.heldout_share * names.size) for names in lane_names]
    takes = [min(k, n.size - 1) for k, n in zip(takes, lane_names, strict=True)]
    if lane_names and not sum(takes):
      largest = max(range(len(takes)), key=lambda lane: lane_names[lane].size)
      takes[largest] = min(1, lane_names[largest].size - 1)
    chosen += [n[:k] for k, n in zip(takes, lane_names, strict=True)]
  if not chosen:
    return np.zeros(len(facts), bool)
  return np.isin(facts['name'], np.concatenate(chosen))


def _write(
  config: DataConfig,
  folder: pathlib.Path,
  facts: np.ndarray,
  keep: np.ndarray,
  heldout: np.ndarray,
) -> dict[str, Any]:
  """Writes the store's files and returns the manifest so far."""
  writers: dict[str, Any] = {}
  manifest: dict[str, Any] = {
    text_class: {
      'train': {
        lane.part: _tally()
        for lane in store.lanes(config)
        if lane.text_class == text_class
      },
      'heldout': _tally(),
    }
    for text_class in TEXT_CLASSES
  }
  by_name = {lane.label: lane for lane in store.lanes(config)}
  content = hashlib.sha256()
  with (folder / 'texts.jsonl').open('rb') as texts:
    for line, row, kept, held in zip(texts, facts, keep, heldout, strict=True):
      if not kept:
        continue
      text_class = TEXT_CLASSES[row['text_class']]
      part = list(store.part_shares(config.class_config(text_class)))[
        row['lane']
      ]
      if held:
        file_name = store.heldout_file_name(text_class)
        tally = manifest[text_class]['heldout']
      else:
        label = f'{text_class}/{part}' if part else text_class
        file_name = by_name[label].file_name
        tally = manifest[text_class]['train'][part]
      tally['documents'] += 1
      tally['bytes'] += int(row['size'])
      if file_name not in writers:
        # Groups of one: training reads single records in any order.
        writers[file_name] = array_record_module.ArrayRecordWriter(
          str(folder / file_name), 'group_size:1'
        )
      record = line.removesuffix(b'\n')
      writers[file_name].write(record)
      content.update(file_name.encode() + b'\0' + record + b'\n')
  for writer in writers.values():
    writer.close()
  return {'digest': content.hexdigest(), 'classes': manifest}


def _tally() -> dict[str, int]:
  return {'documents': 0, 'bytes': 0}


def _check(config: DataConfig, manifest: dict[str, Any]) -> None:
  for lane in store.lanes(config):
    of_class = manifest['classes'][lane.text_class]
    if of_class['train'][lane.part]['documents']:
      continue
    source = config.class_config(lane.text_class).source
    what = f'of part {lane.part!r} ' if lane.part else ''
    raise ValueError(
      f'No training document {what}is left for DataConfig.{lane.text_class}, '
      f'which has {lane.share:.1%} of the tokens. Its source is {source}; '
      f'{of_class["read"]} documents were read, dropped: '
      f'{of_class["dropped"]}, refused: {of_class["refused"]} '
      f'({_first_names(of_class)}). Give it another source or filter, or take '
      'its share away.'
    )


def _first_names(of_class: dict[str, Any]) -> str:
  names = [f'{name}: {rule}' for name, rule in of_class['refused_names'][:5]]
  return '; '.join(names) or 'none'
