import collections

import numpy as np
import pytest

from glm5_jax.data import packing
from glm5_jax.data.config import ConcatAndSplit
from glm5_jax.data.config import FirstFit
from tests.data import mixtures_test

SHORT = (300, 60, 100, 1000, 20, 50)
PACKINGS = [ConcatAndSplit(), FirstFit(1), FirstFit(16)]


def packer(config):
  return packing.packer(config, mixtures_test.mixture(lengths=SHORT))


def tokens_of(rows):
  return collections.Counter(
    token for row in rows for piece in row for token in piece.tokens.tolist()
  )


@pytest.mark.parametrize('config', PACKINGS)
def test_no_token_is_lost_or_repeated(config):
  mixture = mixtures_test.mixture(lengths=SHORT)
  made = packing.packer(config, mixture)
  rows = [made.next_row(256) for _ in range(300)]
  open_rows = [[mixture.read(r) for r in row] for row in made.get_state()]
  drawn = tokens_of(rows + open_rows)
  assert sum(drawn.values()) == mixture.counts.sum()


@pytest.mark.parametrize('config', PACKINGS)
def test_each_document_is_seen_once_from_start_to_end(config):
  mixture = mixtures_test.mixture(lengths=SHORT)
  made = packing.packer(config, mixture)
  seen = collections.defaultdict(list)
  for _ in range(300):
    for piece in made.next_row(256):
      seen[piece.lane, piece.document].append(piece)
  for row in made.get_state():
    for reference in row:
      piece = mixture.read(reference)
      seen[piece.lane, piece.document].append(piece)
  for (lane, document), pieces in seen.items():
    pieces.sort(key=lambda piece: piece.start)
    tokens = np.concatenate([piece.tokens for piece in pieces])
    whole = mixture.read([lane, document, 0, 10**9]).tokens
    assert np.array_equal(tokens, whole[: len(tokens)])
    if (lane, document + 1) in seen:
      assert len(tokens) == len(whole)


def test_concat_and_split_fills_every_row():
  made = packer(ConcatAndSplit())
  for length in (1, 7, 256):
    row = made.next_row(length)
    assert sum(len(piece.tokens) for piece in row) == length


def test_first_fit_never_splits_a_document_that_fits():
  mixture = mixtures_test.mixture(lengths=SHORT)
  made = packing.packer(FirstFit(8), mixture)
  for _ in range(300):
    for piece in made.next_row(256):
      whole = mixture.read([piece.lane, piece.document, 0, 10**9]).tokens
      if len(whole) <= 256:
        assert len(piece.tokens) == len(whole)
      else:
        rest = len(whole) - piece.start
        assert piece.start % 256 == 0
        assert len(piece.tokens) == min(256, rest)


def test_more_open_rows_waste_less():
  def padding(open_rows):
    made = packer(FirstFit(open_rows))
    rows = [made.next_row(256) for _ in range(400)]
    return 1 - sum(tokens_of(rows).values()) / (256 * len(rows))

  one, sixteen = padding(1), padding(16)
  assert sixteen < one / 2
  assert sixteen < 0.05


@pytest.mark.parametrize('config', PACKINGS)
@pytest.mark.parametrize('lengths', [(256, 512), (256, 100)])
def test_rows_of_one_stage_go_over_into_the_next(config, lengths):
  mixture = mixtures_test.mixture(lengths=SHORT)
  made = packing.packer(config, mixture)
  rows = [made.next_row(lengths[0]) for _ in range(50)]
  later = [made.next_row(lengths[1]) for _ in range(50)]
  for row in later:
    assert sum(len(piece.tokens) for piece in row) <= lengths[1]
  rest = [[mixture.read(r) for r in row] for row in made.get_state()]
  assert sum(tokens_of(rows + later + rest).values()) == mixture.counts.sum()


def test_a_batch_lays_rows_out():
  row = [
    packing.Piece(4, 0, 0, np.array([11, 12, 13], np.int32)),
    packing.Piece(0, 3, 8, np.array([21, 22], np.int32)),
    packing.Piece(1, 3, 8, np.array([31], np.int32)),
  ]
  made = packing.batch([row, []], 8, source_ids=[0, 1, 2, 3, 4, 4])
  assert made.tokens[0].tolist() == [11, 12, 13, 21, 22, 31, 0, 0]
  assert made.targets[0].tolist() == [12, 13, 0, 22, 0, 0, 0, 0]
  assert made.weights[0].tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
  assert made.segment_ids[0].tolist() == [1, 1, 1, 2, 2, 3, 0, 0]
  assert made.positions[0].tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
  assert made.source_ids[0].tolist() == [4, 4, 4, 0, 0, 1, -1, -1]
  assert [a.dtype for a in made] == [np.int32] * 2 + [np.float32] + [
    np.int32
  ] * 3
  assert not made.tokens[1].any() and (made.source_ids[1] == -1).all()


@pytest.mark.parametrize('config', PACKINGS)
def test_a_batch_never_mixes_documents_in_a_segment(config):
  made = packer(config)
  ids = [0, 1, 2, 3, 4, 4]
  made_batch = packing.batch([made.next_row(256) for _ in range(50)], 256, ids)
  real = made_batch.segment_ids > 0
  # Ids of one document follow each other, as `mixture` makes them.
  same = made_batch.segment_ids[:, 1:] == made_batch.segment_ids[:, :-1]
  same &= real[:, 1:]
  steps = np.diff(made_batch.tokens, axis=1)
  assert (steps[same] == 1).all()
  assert (np.diff(made_batch.positions, axis=1)[same] == 1).all()
  starts = real[:, 1:] & ~same
  assert (made_batch.positions[:, 1:][starts] == 0).all()
  counted = made_batch.weights > 0
  assert (made_batch.targets - made_batch.tokens)[counted].tolist() == [
    1
  ] * int(counted.sum())
  assert np.array_equal(counted[:, :-1], same)
  lanes = made_batch.tokens // 10**8
  assert np.array_equal(
    made_batch.source_ids[real], np.array(ids, np.int32)[lanes[real]]
  )
