import dataclasses
import itertools
import json
import random

import numpy as np
import pytest

from glm5_jax.data import config as data_config
from glm5_jax.data import pipeline
from glm5_jax.data import preparation
from glm5_jax.data.config import ConcatAndSplit
from glm5_jax.data.config import FirstFit
from glm5_jax.data.config import LengthStage
from tests.data import corpora

STAGES = (
  LengthStage(sequence_length=64, batch_size=4, num_steps=7),
  LengthStage(sequence_length=160, batch_size=2, num_steps=6),
  LengthStage(sequence_length=32, batch_size=6, num_steps=7),
)
PACKINGS = [ConcatAndSplit(), FirstFit(4)]


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  folder = tmp_path_factory.mktemp('pipeline')
  return corpora.five_classes(folder / 'corpus', documents=30)


@pytest.fixture(scope='module')
def tokenizer(config):
  return pipeline.make_tokenizer(config)


def equal(first, second):
  return all(
    a.dtype == b.dtype and np.array_equal(a, b)
    for a, b in zip(first, second, strict=True)
  )


def test_batches_have_the_shapes_of_their_stages(config, tokenizer):
  batches = list(pipeline.train_batches(config, STAGES, tokenizer, seed=1))
  expected = [(4, 64)] * 7 + [(2, 160)] * 6 + [(6, 32)] * 7
  assert [batch.tokens.shape for batch in batches] == expected
  assert all(array.shape == b.tokens.shape for b in batches for array in b)


@pytest.mark.parametrize('packing', PACKINGS)
@pytest.mark.parametrize('prefetch', [0, 3])
def test_resuming_anywhere_is_the_uninterrupted_run(
  config, tokenizer, packing, prefetch
):
  config = dataclasses.replace(config, packing=packing, prefetch=prefetch)

  def start():
    return pipeline.train_batches(config, STAGES, tokenizer, seed=5)

  with start() as iterator:
    states, batches = [iterator.get_state()], []
    for batch in iterator:
      batches.append(batch)
      states.append(iterator.get_state())
  assert len(batches) == 20
  for place in [0, 7, 13, 20, *random.Random(0).sample(range(1, 20), 6)]:
    # As a checkpoint has it.
    state = json.loads(json.dumps(states[place]))
    with start() as resumed:
      for _ in range(random.Random(place).randrange(4)):
        next(resumed)
      resumed.set_state(state)
      assert resumed.get_state() == states[place]
      rest = list(resumed)
      assert len(rest) == 20 - place
      assert all(map(equal, rest, batches[place:]))
      assert resumed.get_state() == states[20]


def test_going_back_gives_the_same_batches(config, tokenizer):
  with pipeline.train_batches(config, STAGES, tokenizer, seed=2) as iterator:
    next(iterator)
    state = iterator.get_state()
    first = [next(iterator) for _ in range(10)]
    iterator.set_state(state)
    assert all(map(equal, first, [next(iterator) for _ in range(10)]))


def test_seeds_differ_and_a_seed_repeats(config, tokenizer):
  def first(seed):
    return next(pipeline.train_batches(config, STAGES, tokenizer, seed=seed))

  assert equal(first(3), first(3))
  assert not equal(first(3), first(4))


def documents(batches, tokenizer):
  """The whole documents in batches, as text."""
  found = []
  for batch in batches:
    for b, row in enumerate(batch.segment_ids):
      for segment in range(1, row.max() + 1):
        ids = batch.tokens[b, row == segment]
        if ids[0] == tokenizer.begin_id and ids[-1] == tokenizer.end_id:
          found.append(tokenizer.decode(ids[1:-1]))
  return found


@pytest.mark.parametrize('packing', PACKINGS)
def test_hosts_see_different_documents_and_together_all(
  config, tokenizer, packing
):
  config = dataclasses.replace(config, packing=packing)
  # Long rows, so that documents are whole, and less than an epoch of each lane.
  stages = (LengthStage(2048, 4, 2),)
  seen = []
  for host in range(4):
    iterator = pipeline.train_batches(
      config, stages, tokenizer, seed=1, host_index=host, num_hosts=4
    )
    batches = list(iterator)
    assert batches[0].tokens.shape == (1, 2048)
    seen.append(set(documents(batches, tokenizer)))
  assert all(seen)
  for first, second in itertools.combinations(seen, 2):
    assert not first & second


def test_a_lane_s_epoch_shows_each_document_once(config, tokenizer):
  alone = corpora.only(config, 'books')
  stages = (LengthStage(4096, 1, 12),)
  whole = dataclasses.replace(alone, packing=FirstFit(1))
  seen = documents(
    pipeline.train_batches(whole, stages, tokenizer, seed=1), tokenizer
  )
  report = pipeline.cleaning_report(whole)['books']
  count = report['train']['']['documents']
  assert len(seen) > 2 * count
  assert len(set(seen)) == count
  times = [seen.count(text) for text in set(seen)]
  # First fit shuffles a little over the seam between two epochs.
  assert max(times) - min(times) <= 2


def test_shares_are_reported_and_near_the_config_s(config, tokenizer):
  stages = (LengthStage(256, 8, 60),)
  iterator = pipeline.train_batches(config, stages, tokenizer, seed=1)
  seen = np.zeros(len(data_config.TEXT_CLASSES), np.int64)
  for batch in iterator:
    seen += np.bincount(batch.source_ids[batch.source_ids >= 0], minlength=5)
  counts = iterator.token_counts
  assert list(counts) == list(data_config.TEXT_CLASSES)
  assert list(counts.values()) == seen.tolist()
  assert sum(counts.values()) == 256 * 8 * 60
  for name, share in iterator.shares.items():
    assert abs(share - config.class_config(name).share) < 0.005


def test_counts_are_the_same_after_resuming(config, tokenizer):
  with pipeline.train_batches(config, STAGES, tokenizer, seed=2) as iterator:
    for _ in range(9):
      next(iterator)
    state, counts = iterator.get_state(), iterator.token_counts
  other = pipeline.train_batches(config, STAGES, tokenizer, seed=2)
  other.set_state(state)
  assert other.token_counts == counts
  assert state['tokens'] == counts


def test_held_out_documents_are_exact_and_never_trained_on(config, tokenizer):
  heldout = list(pipeline.heldout_documents(config, tokenizer))
  assert len(heldout) == 15
  for document in heldout:
    assert document.num_bytes == len(document.text.encode())
    assert tokenizer.decode(document.tokens[1:-1]) == document.text
    assert document.name.startswith(document.source)
  whole = dataclasses.replace(config, packing=FirstFit(1))
  stages = (LengthStage(4096, 4, 12),)
  batches = pipeline.train_batches(whole, stages, tokenizer, seed=1)
  trained = set(documents(batches, tokenizer))
  assert len(trained) == 150 - 15
  assert not trained & {document.text for document in heldout}


def test_documents_in_the_config_are_a_source_too(config, tokenizer):
  texts = tuple(corpora.prose(600 + i) for i in range(5))
  alone = corpora.only(
    config, 'web', source=data_config.MemorySource(texts), filter=None
  )
  stages = (LengthStage(64, 2, 3),)
  batches = list(pipeline.train_batches(alone, stages, tokenizer, seed=1))
  assert all((batch.source_ids == 1).all() for batch in batches)


@pytest.mark.parametrize(
  ('change', 'name'),
  [
    (dict(seed=9), 'seed = 1'),
    (dict(num_hosts=2), 'num_hosts = 1'),
    (dict(packing=FirstFit(2)), 'packing = '),
    (dict(heldout_share=0.2), 'text = '),
  ],
)
def test_a_state_of_another_run_is_refused(config, tokenizer, change, name):
  stages = (LengthStage(64, 2, 3),)
  state = pipeline.train_batches(config, stages, tokenizer, seed=1).get_state()
  fields = {f.name for f in dataclasses.fields(config)}
  other = dataclasses.replace(
    config, **{k: v for k, v in change.items() if k in fields}
  )
  arguments = {k: v for k, v in change.items() if k not in fields}
  iterator = pipeline.train_batches(
    other, stages, tokenizer, **{'seed': 1, **arguments}
  )
  with pytest.raises(ValueError, match=f'written with {name}.*start anew'):
    iterator.set_state(state)


def test_hosts_that_do_not_divide_a_batch_are_refused(config, tokenizer):
  with pytest.raises(ValueError, match='batch_size is 2.*hosts, 4'):
    pipeline.train_batches(
      config, STAGES, tokenizer, seed=1, host_index=0, num_hosts=4
    )
  with pytest.raises(ValueError, match='host_index is 2.*0..1'):
    pipeline.train_batches(
      config, STAGES, tokenizer, seed=1, host_index=2, num_hosts=2
    )


def test_a_missing_corpus_says_how_to_make_one(config, tokenizer):
  missing = dataclasses.replace(config, root=config.root + '/nowhere')
  with pytest.raises(FileNotFoundError, match='data.corpus --output'):
    pipeline.train_batches(missing, STAGES, tokenizer, seed=1)
  assert preparation.prepare(config).folder.exists()
