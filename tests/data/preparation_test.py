import dataclasses
import json
import pathlib
import re

import pytest

from glm5_jax.data import config as data_config
from glm5_jax.data import pipeline
from glm5_jax.data import preparation
from glm5_jax.data import store as store_lib
from glm5_jax.data.config import MemorySource
from glm5_jax.data.config import PartShare
from tests.data import corpora


@pytest.fixture
def config(tmp_path):
  return corpora.five_classes(tmp_path / 'corpus')


def train_documents(config):
  store = preparation.prepare(config)
  found = []
  for lane in store_lib.lanes(config):
    documents = store.train(lane)
    found += [(lane, documents[i]) for i in range(len(documents))]
  return found


def heldout_documents(config):
  store = preparation.prepare(config)
  return [
    document
    for text_class in data_config.TEXT_CLASSES
    for document in store.heldout(text_class)
  ]


def test_every_document_is_in_training_or_held_out(config):
  train = {document.name for _, document in train_documents(config)}
  heldout = {document.name for document in heldout_documents(config)}
  assert not train & heldout
  assert len(train) + len(heldout) == 100
  # A tenth of each class.
  assert len(heldout) == 10
  assert {name.split('/')[0] for name in heldout} == set(
    data_config.TEXT_CLASSES
  )


def test_documents_of_one_file_stay_on_one_side(config):
  records = [
    {'name': f'book {i % 10}', 'text': corpora.prose(5000 + i)}
    for i in range(100)
  ]
  path = pathlib.Path(config.root, 'books', 'documents.jsonl')
  corpora.write_jsonl(path, records)
  heldout = [d for d in heldout_documents(config) if 'book ' in d.name]
  assert len(heldout) == 10
  assert len({document.name for document in heldout}) == 1


def test_no_near_copy_of_a_held_out_document_is_in_training(config):
  before = heldout_documents(config)
  # Copies under other names, some in another class, each a little different.
  copies = [
    {'name': f'copy {i}', 'text': d.text + f'and number {i}'}
    for i, d in enumerate(before)
  ]
  for name in data_config.TEXT_CLASSES:
    corpora.write_jsonl(pathlib.Path(config.root, name, 'zz.jsonl'), copies)
  train = {document.text for _, document in train_documents(config)}
  for document in heldout_documents(config):
    stem = document.text.split('and number')[0]
    assert not any(text.startswith(stem) for text in train)
  report = pipeline.cleaning_report(config)
  dropped = [report[name]['dropped'] for name in data_config.TEXT_CLASSES]
  # The first copy is near its original, the other four equal the first.
  assert sum(of_class.get('near_duplicate', 0) for of_class in dropped) == 10
  assert sum(of_class.get('duplicate', 0) for of_class in dropped) == 40


def test_what_is_dropped_and_refused_is_counted_by_rule(config):
  records = [
    {'text': 'Too brief.'},
    {'text': '0123456789 ' * 60},
    {'name': 'first', 'text': corpora.prose(9001)},
    {'name': 'again', 'text': corpora.prose(9001)},
    {'words': 'none'},
  ]
  folder = pathlib.Path(config.root, 'web')
  corpora.write_jsonl(folder / 'more.jsonl', records)
  (folder / 'picture.png').write_bytes(b'\x89PNG\0')
  report = pipeline.cleaning_report(config)['web']
  assert report['read'] == 24
  assert report['dropped'] == {'duplicate': 1, 'letters': 1, 'short': 1}
  assert report['refused'] == {'binary': 1, 'no_text': 1}
  assert ['web/picture.png', 'binary'] in report['refused_names']
  kept = report['train']['']['documents'] + report['heldout']['documents']
  assert kept == 21


def test_a_store_is_made_once_and_anew_when_a_file_changes(config):
  first = preparation.prepare(config)
  made = (first.folder / store_lib.MANIFEST).stat().st_mtime_ns
  again = preparation.prepare(config)
  assert again.folder == first.folder
  assert (again.folder / store_lib.MANIFEST).stat().st_mtime_ns == made
  path = pathlib.Path(config.root, 'web', 'documents.jsonl')
  path.write_text(path.read_text() + path.read_text().replace('0', '1'))
  assert preparation.prepare(config).folder != first.folder


def test_equal_text_gives_an_equal_digest_elsewhere(config, tmp_path):
  corpora.five_classes(tmp_path / 'other' / 'corpus')
  other = dataclasses.replace(
    config,
    root=str(tmp_path / 'other' / 'corpus'),
    cache=str(tmp_path / 'other' / 'prepared'),
  )
  first, second = preparation.prepare(config), preparation.prepare(other)
  assert first.folder != second.folder
  assert first.digest == second.digest


def test_a_store_that_was_broken_off_is_not_used(config):
  found = preparation.prepare(config)
  (found.folder / store_lib.MANIFEST).unlink()
  assert store_lib.open_store(found.folder) is None
  with pytest.raises(OSError, match='not empty'):
    preparation.prepare(config)


def test_nothing_is_left_behind_when_making_fails(config):
  broken = corpora.only(config, 'web', source=MemorySource(('Brief.',)))
  with pytest.raises(ValueError):
    preparation.prepare(broken)
  assert list(pathlib.Path(config.cache).iterdir()) == []


def test_a_class_without_documents_says_what_became_of_them(config):
  folder = pathlib.Path(config.root, 'papers')
  (folder / 'documents.jsonl').write_text('{"text": "Brief."}\n{"body": 1}\n')
  with pytest.raises(ValueError) as error:
    preparation.prepare(config)
  message = str(error.value)
  assert 'DataConfig.papers, which has 15.0% of the tokens' in message
  assert "'short': 1" in message and "'no_text': 1" in message
  assert 'papers/documents.jsonl:2: no_text' in message


def test_a_class_without_a_share_is_not_read(config):
  alone = corpora.only(config, 'web')
  missing = dataclasses.replace(
    alone,
    code=dataclasses.replace(
      alone.code, source=data_config.FolderSource('nowhere')
    ),
  )
  lanes = {lane.text_class for lane, _ in train_documents(missing)}
  assert lanes == {'web'}


def test_parts_have_lanes_of_their_own_and_the_rest_has_one(config):
  records = [
    {'text': corpora.prose(7000 + i), 'part': part, 'name': f'{part} {i}'}
    for i in range(12)
    for part in ('de', 'fr', 'it')
  ]
  for i, record in enumerate(records):
    record['text'] = corpora.prose(7000 + i)
  path = pathlib.Path(config.root, 'other', 'documents.jsonl')
  corpora.write_jsonl(path, records)
  other = dataclasses.replace(
    config.other, parts=(PartShare('de', 0.5), PartShare('fr', 0.25))
  )
  documents = train_documents(dataclasses.replace(config, other=other))
  lanes = {lane for lane, _ in documents if lane.text_class == 'other'}
  assert {(lane.part, round(lane.share, 6)) for lane in lanes} == {
    ('de', 0.075),
    ('fr', 0.0375),
    ('', 0.0375),
  }
  for lane, document in documents:
    if lane.text_class == 'other':
      assert document.part == (lane.part or 'it')


def test_a_part_that_is_not_there_is_an_error_and_one_without_share_counts(
  config,
):
  books = dataclasses.replace(config.books, parts=(PartShare('x', 1.0),))
  with pytest.raises(ValueError, match="part 'x'.*'part_without_share': 20"):
    preparation.prepare(dataclasses.replace(config, books=books))


def test_nothing_is_held_out_at_a_share_of_zero(config):
  config = dataclasses.replace(config, heldout_share=0.0)
  assert heldout_documents(config) == []
  assert len(train_documents(config)) == 100


def test_a_lane_never_gives_its_last_document_away(tmp_path):
  config = corpora.five_classes(tmp_path / 'corpus', documents=2)
  assert len(heldout_documents(config)) == 5
  config = corpora.five_classes(tmp_path / 'one', documents=1)
  assert heldout_documents(config) == []
  assert len(train_documents(config)) == 5


def test_the_manifest_counts_the_bytes_of_the_text(config):
  store = preparation.prepare(config)
  manifest = json.loads((store.folder / store_lib.MANIFEST).read_text())
  for text_class, of_class in manifest['classes'].items():
    size = sum(len(d.text.encode()) for d in store.heldout(text_class))
    assert of_class['heldout']['bytes'] == size
  assert re.fullmatch('[0-9a-f]{64}', store.digest)
