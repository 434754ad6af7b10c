import json
import os

from array_record.python import array_record_module
import pyarrow
from pyarrow import parquet
import pytest

from glm5_jax.data import sources
from glm5_jax.data.config import ArrayRecordSource
from glm5_jax.data.config import FolderSource
from glm5_jax.data.config import JsonlSource
from glm5_jax.data.config import MemorySource
from glm5_jax.data.config import ParquetSource
from tests.data import corpora

TEXTS = tuple(corpora.prose(i, 30) for i in range(70)) + ('Grüße, 世界',)


def read(source, root, max_bytes=100_000):
  refusals = sources.Refusals()
  found = list(
    sources.documents(
      source, root=str(root), max_bytes=max_bytes, refusals=refusals
    )
  )
  return found, refusals


def write_array_record(path, records):
  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for record in records:
    writer.write(record)
  writer.close()


@pytest.fixture
def everything(tmp_path):
  """The same texts in every kind of file."""
  records = [{'text': text, 'body': text} for text in TEXTS]
  corpora.write_jsonl(tmp_path / 'a.jsonl', records)
  parquet.write_table(
    pyarrow.Table.from_pylist(records), tmp_path / 'a.parquet'
  )
  write_array_record(
    tmp_path / 'a.array_record', [json.dumps(r).encode() for r in records]
  )
  write_array_record(
    tmp_path / 'plain.array_record', [text.encode() for text in TEXTS]
  )
  return tmp_path


@pytest.mark.parametrize(
  'source',
  [
    MemorySource(TEXTS),
    JsonlSource('a.jsonl', text_key='body'),
    ParquetSource('a.parquet', text_key='body'),
    ArrayRecordSource('a.array_record', text_key='body'),
    ArrayRecordSource('plain.array_record', text_key=None),
    FolderSource('a.jsonl'),
    FolderSource('a.parquet'),
    FolderSource('a.array_record'),
    FolderSource('a.*l'),
  ],
)
def test_every_kind_of_source_yields_the_same_texts(everything, source):
  found, refusals = read(source, everything)
  assert [document.text for document in found] == list(TEXTS)
  assert not refusals.counts
  assert len({document.name for document in found}) == len(TEXTS)


def test_a_folder_is_read_by_suffix_and_names_parts_by_folder(tmp_path):
  (tmp_path / 'de').mkdir()
  (tmp_path / '.git').mkdir()
  (tmp_path / 'de' / 'brief.txt').write_text('Guten Tag')
  (tmp_path / 'top.md').write_text('Good day')
  (tmp_path / '.git' / 'config').write_text('hidden')
  corpora.write_jsonl(
    tmp_path / 'de' / 'more.jsonl',
    [{'text': 'Hallo'}, {'text': 'Salut', 'part': 'fr', 'name': 'letter'}],
  )
  found, refusals = read(FolderSource('.'), tmp_path)
  assert sorted(found) == [
    ('de/brief.txt', 'de', 'Guten Tag'),
    ('de/more.jsonl:1', 'de', 'Hallo'),
    ('letter', 'fr', 'Salut'),
    ('top.md', '', 'Good day'),
  ]
  assert not refusals.counts


def test_bad_files_are_named_with_the_rule(tmp_path):
  (tmp_path / 'binary.txt').write_bytes(b'abc\0def')
  (tmp_path / 'latin.txt').write_bytes('Grüße'.encode('latin-1'))
  (tmp_path / 'empty.txt').touch()
  (tmp_path / 'blank.txt').write_text(' \n\n')
  (tmp_path / 'large.txt').write_text('x' * 5000)
  (tmp_path / 'good.txt').write_text('\ufeffGood', encoding='utf-8')
  (tmp_path / 'empty.jsonl').touch()
  (tmp_path / 'empty.array_record').touch()
  found, refusals = read(FolderSource('.'), tmp_path, max_bytes=1000)
  assert [(d.name, d.text) for d in found] == [('good.txt', 'Good')]
  assert dict(refusals.names) == {
    'binary.txt': 'binary',
    'latin.txt': 'encoding',
    'empty.txt': 'empty',
    'blank.txt': 'empty',
    'large.txt': 'too_large',
    'empty.jsonl': 'empty',
    'empty.array_record': 'empty',
  }
  assert refusals.counts['empty'] == 4


def test_links_are_followed_once_and_what_is_no_file_is_named(tmp_path):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'b').mkdir()
  (tmp_path / 'b' / 'real.txt').write_text('Real')
  (tmp_path / 'a' / 'up').symlink_to(tmp_path / 'a')
  (tmp_path / 'a' / 'over').symlink_to(tmp_path / 'b')
  (tmp_path / 'a' / 'broken.txt').symlink_to(tmp_path / 'nowhere')
  os.mkfifo(tmp_path / 'a' / 'pipe')
  found, refusals = read(FolderSource('a'), tmp_path)
  assert [d.name for d in found] == ['a/over/real.txt']
  assert refusals.names == [
    ('a/broken.txt', 'unreadable'),
    ('a/pipe', 'unreadable'),
  ]


def test_bad_records_are_named_by_line_and_the_rest_is_read(tmp_path):
  lines = [
    b'{"text": "first"}',
    b'{"text": ',
    b'["text"]',
    b'{"words": "no text"}',
    b'{"text": 7}',
    b'{"text": "\xff"}',
    b'{"text": "\\ud800"}',
    b'{"text": "a\0b"}',
    b'',
    b'{"text": "' + b'y' * 9000 + b'"}',
    b'{"text": "last"}',
  ]
  (tmp_path / 'a.jsonl').write_bytes(b'\n'.join(lines))
  found, refusals = read(JsonlSource('a.jsonl'), tmp_path, max_bytes=1000)
  assert [d.text for d in found] == ['first', 'last']
  assert refusals.names == [
    ('a.jsonl:2', 'not_json'),
    ('a.jsonl:3', 'not_json'),
    ('a.jsonl:4', 'no_text'),
    ('a.jsonl:5', 'no_text'),
    ('a.jsonl:6', 'encoding'),
    ('a.jsonl:7', 'encoding'),
    ('a.jsonl:8', 'binary'),
    ('a.jsonl:10', 'too_large'),
  ]


def test_a_huge_line_is_refused_without_being_held(tmp_path):
  psutil = pytest.importorskip('psutil')
  path = tmp_path / 'a.jsonl'
  with path.open('wb') as file:
    file.write(b'{"text": "')
    for _ in range(300):
      file.write(b'z' * 1_000_000)
    file.write(b'"}\n{"text": "after"}\n')
  process = psutil.Process()
  before = process.memory_info().rss
  found, refusals = read(JsonlSource('a.jsonl'), tmp_path)
  assert [d.text for d in found] == ['after']
  assert refusals.names == [('a.jsonl:1', 'too_large')]
  # The line has 300 MB.
  assert process.memory_info().rss - before < 100_000_000


@pytest.mark.parametrize('name', ['a.parquet', 'a.array_record'])
@pytest.mark.parametrize('kept', [10, 0.5, 0.99])
def test_torn_files_are_named(everything, name, kept):
  path = everything / name
  size = path.stat().st_size
  os.truncate(path, int(kept if kept > 1 else kept * size))
  found, refusals = read(FolderSource(name), everything)
  assert found == []
  assert refusals.counts == {'torn': 1}
  assert refusals.names[0][0].startswith(name)


def test_a_column_or_member_that_is_not_there_is_named(everything):
  _, refusals = read(ParquetSource('a.parquet', 'content'), everything)
  assert refusals.names == [('a.parquet', 'no_text')]


def test_names_of_refusals_are_bounded_but_counts_are_not():
  refusals = sources.Refusals()
  for i in range(5000):
    refusals.add(str(i), 'empty')
  assert refusals.counts == {'empty': 5000}
  assert len(refusals.names) == 1000


def test_a_missing_path_says_what_to_give(tmp_path):
  with pytest.raises(FileNotFoundError, match=r'DataConfig\.root.*corpus'):
    read(FolderSource('nowhere'), tmp_path)
