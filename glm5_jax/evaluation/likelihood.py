"""How many bits a model needs for text: bits per byte of held-out documents.

The score of a document is the negative log2-likelihood of all its tokens but
the first (the begin token, which is given) over the bytes of its text; it does
not depend on the tokenizer, and is what a compressor driven by the model would
need.

Documents longer than a row are scored in pieces. From piece to piece a document
moves on by half a row, and only tokens not scored before count, so that each
token is predicted from all tokens before it, or from half a row of them at
least.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int
from jaxtyping import Int32
import numpy as np

from glm5_jax.data.pipeline import Document
from glm5_jax.models.definition import Definition
from glm5_jax.models.definition import Variables
from glm5_jax.models.transformer import Transformer
from glm5_jax.parallelism import partitioning


@dataclasses.dataclass(frozen=True)
class Likelihood:
  """What some documents cost.

  Attributes:
    bits: negative log2-likelihood of their tokens.
    num_bytes: bytes of their texts.
    num_tokens: tokens that were scored.
    num_documents: how many they are.
  """

  bits: float = 0.0
  num_bytes: int = 0
  num_tokens: int = 0
  num_documents: int = 0

  @property
  def bits_per_byte(self) -> float:
    """Bits that a byte of text costs; NaN without text."""
    return self.bits / self.num_bytes if self.num_bytes else math.nan

  def __add__(self, other: 'Likelihood') -> 'Likelihood':
    return Likelihood(
      self.bits + other.bits,
      self.num_bytes + other.num_bytes,
      self.num_tokens + other.num_tokens,
      self.num_documents + other.num_documents,
    )


class Piece(NamedTuple):
  """A stretch of a document that fits into a row.

  Attributes:
    document: which document.
    tokens: its tokens.
    first_scored: index of the first token whose probability counts.
  """

  document: int
  tokens: Int32[np.ndarray, ' n']
  first_scored: int


class Rows(NamedTuple):
  """Packed pieces, all arrays of one fixed shape.

  Attributes:
    tokens: inputs; targets: what follows each of them.
    segment_ids: 0 is padding; positions: from 0 in each piece.
    documents: the document whose score a target counts for; -1 for none.
  """

  tokens: Int32[np.ndarray, 'B T']
  targets: Int32[np.ndarray, 'B T']
  segment_ids: Int32[np.ndarray, 'B T']
  positions: Int32[np.ndarray, 'B T']
  documents: Int32[np.ndarray, 'B T']


def cut(
  document: int, tokens: Sequence[int] | np.ndarray, row_length: int
) -> Iterator[Piece]:
  """Yields the pieces in which a document is scored.

  A piece has at most `row_length + 1` tokens: its last is only a target.
  """
  ids = np.asarray(tokens, np.int32)
  scored_to, start = 1, 0
  while scored_to < len(ids):
    end = min(start + row_length + 1, len(ids))
    yield Piece(document, ids[start:end], scored_to - start)
    scored_to = end
    # Half a row of the next piece's inputs is there as context only.
    start = end - 1 - row_length // 2


def pack(
  pieces: Iterable[Piece], num_rows: int, row_length: int
) -> Iterator[Rows]:
  """Yields batches of pieces, each put into the first row with room for it."""
  rows, used = _empty(num_rows, row_length), [0] * num_rows
  segments = [0] * num_rows
  for piece in pieces:
    length = len(piece.tokens) - 1
    row = next(
      (r for r in range(num_rows) if used[r] + length <= row_length), -1
    )
    if row < 0:
      yield rows
      rows, used = _empty(num_rows, row_length), [0] * num_rows
      segments, row = [0] * num_rows, 0
    segments[row] += 1
    place = slice(used[row], used[row] + length)
    rows.tokens[row, place] = piece.tokens[:-1]
    rows.targets[row, place] = piece.tokens[1:]
    rows.segment_ids[row, place] = segments[row]
    rows.positions[row, place] = np.arange(length)
    scored = slice(used[row] + piece.first_scored - 1, used[row] + length)
    rows.documents[row, scored] = piece.document
    used[row] += length
  if any(used):
    yield rows


def _empty(num_rows: int, row_length: int) -> Rows:
  def zeros() -> np.ndarray:
    return np.zeros((num_rows, row_length), np.int32)

  return Rows(zeros(), zeros(), zeros(), zeros(), zeros() - 1)


def token_bits(
  model: Transformer,
  tokens: Int[Array, 'B T'],
  targets: Int[Array, 'B T'],
  segment_ids: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
) -> Float[Array, 'B T']:
  """Returns -log2 of the probability of each target.

  Logits exist for `loss_chunk` positions of a row at a time.
  """
  hidden, _ = model(tokens, segment_ids, positions)
  B, T, D = hidden.shape
  chunk = min(model.config.loss_chunk, T)
  padding = ((0, 0), (0, -T % chunk))
  hidden = jnp.pad(hidden, (*padding, (0, 0))).reshape(B, -1, chunk, D)
  targets = jnp.pad(targets, padding).reshape(B, -1, chunk)

  def in_nats(piece: tuple[Array, Array]) -> Array:
    logits_BTV = model.logits(piece[0])
    target_BT1 = jnp.take_along_axis(logits_BTV, piece[1][..., None], -1)
    return jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT1[..., 0]

  nats = jax.lax.map(in_nats, (hidden.swapaxes(0, 1), targets.swapaxes(0, 1)))
  bits_BT: Array = nats.swapaxes(0, 1).reshape(B, -1)[:, :T] / math.log(2)
  return bits_BT


class Scorer:
  """Scores documents with one compiled program.

  Every host passes the same documents and gets the same result.
  """

  def __init__(
    self,
    definition: Definition,
    mesh: jax.sharding.Mesh,
    *,
    num_rows: int,
    row_length: int,
  ):
    """Sets the shape of a batch.

    Args:
      definition: the model.
      mesh: its devices.
      num_rows: rows of a batch, rounded up to what divides over the mesh.
      row_length: tokens of a row.
    """
    axes = definition.rules.mesh_axes('batch')
    parts = math.prod(mesh.shape[axis] for axis in axes)
    self.num_rows = -(-num_rows // parts) * parts
    self.row_length = row_length
    self._mesh = mesh
    self._sharding = partitioning.batch_sharding(mesh, definition.rules)

    def score(variables: Variables, *arrays: Array) -> Array:
      return token_bits(definition.bind(variables), *arrays)

    self._score: Callable[..., Array] = jax.jit(
      score, out_shardings=partitioning.replicated(mesh)
    )

  def bits(self, variables: Variables, rows: Rows) -> Float[np.ndarray, 'B T']:
    """Returns the cost of every target of a batch."""
    arrays = [jax.device_put(x, self._sharding) for x in rows[:4]]
    with jax.set_mesh(self._mesh):
      result: np.ndarray = jax.device_get(self._score(variables, *arrays))
    return result

  def __call__(
    self, variables: Variables, documents: Iterable[Document]
  ) -> dict[str, Likelihood]:
    """Returns what the documents cost by class."""
    known: list[Document] = []
    # float64: sums over millions of tokens.
    totals: dict[int, np.ndarray] = {}

    def pieces() -> Iterator[Piece]:
      for index, document in enumerate(documents):
        known.append(document)
        yield from cut(index, document.tokens, self.row_length)

    for rows in pack(pieces(), self.num_rows, self.row_length):
      bits = self.bits(variables, rows).astype(np.float64)
      for index in np.unique(rows.documents[rows.documents >= 0]):
        mask = rows.documents == index
        sums = np.array([bits[mask].sum(), mask.sum()])
        totals[int(index)] = totals.get(int(index), 0.0) + sums
    scores: dict[str, Likelihood] = {}
    for index, document in enumerate(known):
      total, num_tokens = totals.get(index, np.zeros(2))
      one = Likelihood(float(total), document.num_bytes, int(num_tokens), 1)
      before = scores.get(document.source, Likelihood())
      scores[document.source] = before + one
    return scores


def total(scores: dict[str, Likelihood]) -> Likelihood:
  """Returns the cost of all classes together."""
  return functools.reduce(Likelihood.__add__, scores.values(), Likelihood())
