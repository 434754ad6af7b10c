import math

import jax
import numpy as np
import pytest

from glm5_jax.data.pipeline import Document
from glm5_jax.evaluation import likelihood
from glm5_jax.parallelism import mesh as mesh_lib
from glm5_jax.parallelism.config import MeshConfig

# float32 sums of at most a few hundred terms of size ten.
TOLERANCE = 1e-4
ROW_LENGTH = 16


def _document(seed: int, length: int, source: str = 'code') -> Document:
  tokens = np.random.RandomState(seed).randint(0, 512, length, np.int32)
  return Document(
    text='', tokens=tokens, source=source, name='', num_bytes=3 * length
  )


@pytest.fixture(scope='module')
def reference(model, variables):
  """Bits of tokens 1.. of a sequence, by one whole softmax."""

  @jax.jit
  def log_probabilities(tokens):
    bound = model.bind(variables)
    ones = tokens * 0 + 1
    positions = np.arange(tokens.shape[1])[None] * ones
    hidden, _ = bound(tokens, ones, positions)
    return jax.nn.log_softmax(bound.logits(hidden))

  def bits(tokens):
    # Padded, so that one program serves; causality hides what follows.
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    table = np.asarray(log_probabilities(padded))[0]
    picked = table[np.arange(len(tokens) - 1), tokens[1:]]
    return -picked / math.log(2)

  return bits


@pytest.fixture(scope='module')
def scorer(model):
  mesh = mesh_lib.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
  return likelihood.Scorer(model, mesh, num_rows=2, row_length=ROW_LENGTH)


def test_packed_documents_cost_what_each_costs_alone(
  scorer, variables, reference
):
  documents = [_document(seed, n) for seed, n in enumerate((9, 5, 17, 2, 8))]
  score = scorer(variables, documents)['code']
  expected = sum(reference(d.tokens).sum() for d in documents)
  assert score.bits == pytest.approx(expected, rel=TOLERANCE)
  assert score.num_documents == 5
  assert score.num_tokens == sum(len(d.tokens) - 1 for d in documents)
  assert score.bits_per_byte == score.bits / sum(d.num_bytes for d in documents)


def test_a_long_document_is_scored_with_half_a_row_of_context(
  scorer, variables, reference
):
  document = _document(3, 45)
  tokens = document.tokens
  expected = list(reference(tokens[: ROW_LENGTH + 1]))
  half = ROW_LENGTH // 2
  while len(expected) < len(tokens) - 1:
    start = len(expected) - half
    piece = tokens[start : start + ROW_LENGTH + 1]
    expected += list(reference(piece)[half:])
  score = scorer(variables, [document])['code']
  assert score.num_tokens == len(tokens) - 1
  assert score.bits == pytest.approx(sum(expected), rel=TOLERANCE)


@pytest.mark.parametrize('length', [0, 1, 2, 16, 17, 18, 25, 26, 100])
def test_pieces_score_every_token_but_the_first_once(length):
  tokens = np.arange(length)
  scored = []
  for piece in likelihood.cut(0, tokens, ROW_LENGTH):
    assert len(piece.tokens) <= ROW_LENGTH + 1
    assert piece.first_scored >= 1
    context_is_whole = piece.tokens[0] == 0
    assert context_is_whole or piece.first_scored > ROW_LENGTH // 2
    scored += piece.tokens[piece.first_scored :].tolist()
  assert scored == list(range(1, length))


def test_rows_hold_every_piece_whole():
  lengths = [3, 17, 9, 9, 2, 12]
  pieces = [
    likelihood.Piece(i, np.arange(n, dtype=np.int32) + 1, 1)
    for i, n in enumerate(lengths)
  ]
  counts = {}
  for rows in likelihood.pack(iter(pieces), 2, ROW_LENGTH):
    assert rows.tokens.shape == (2, ROW_LENGTH)
    inside = rows.segment_ids > 0
    assert (rows.targets[inside] == rows.tokens[inside] + 1).all()
    assert (rows.positions[inside] == rows.tokens[inside] - 1).all()
    assert (rows.documents[~inside] == -1).all()
    for document in rows.documents[inside]:
      counts[int(document)] = counts.get(int(document), 0) + 1
  assert counts == {i: n - 1 for i, n in enumerate(lengths)}


def test_classes_are_scored_apart_and_add_up(scorer, variables):
  documents = [_document(0, 9, 'code'), _document(1, 9, 'web')]
  scores = scorer(variables, documents)
  assert set(scores) == {'code', 'web'}
  both = likelihood.total(scores)
  assert both.bits == scores['code'].bits + scores['web'].bits
  assert both.num_documents == 2


def test_a_mesh_of_eight_gives_the_same_bits(model, variables, scorer):
  mesh = mesh_lib.make_mesh(MeshConfig(fsdp=-1, expert=2, tensor=2))
  sharded = likelihood.Scorer(model, mesh, num_rows=2, row_length=ROW_LENGTH)
  assert sharded.num_rows == 4
  documents = [_document(seed, n) for seed, n in enumerate((9, 30))]
  one = scorer(variables, documents)['code']
  eight = sharded(variables, documents)['code']
  assert eight.bits == pytest.approx(one.bits, rel=TOLERANCE)


def test_no_text_has_no_score():
  assert math.isnan(likelihood.Likelihood().bits_per_byte)
  assert math.isnan(likelihood.total({}).bits_per_byte)
