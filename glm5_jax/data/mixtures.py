"""Draws tokens from lanes so that each has its share of the tokens.

The next tokens come from the lane that lags most behind its share. A lane's
count is then never further from its share than the longest piece drawn, however
long its documents are, and the order follows from the counts alone.
"""

from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple

import grain
from jaxtyping import Int32
import numpy as np

from glm5_jax.data import store as store_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.config import TEXT_CLASSES
from glm5_jax.data.config import DataConfig
from glm5_jax.data.config import TextClass
from glm5_jax.data.sources import RawDocument

Ids = Int32[np.ndarray, 'T']


class Piece(NamedTuple):
  """A run of tokens of one document.

  Attributes:
    lane: index of its lane.
    document: index of its document in the lane's endless order.
    start: index of its first token in the document.
    tokens: its ids.
  """

  lane: int
  document: int
  start: int
  tokens: Ids

  @property
  def reference(self) -> list[int]:
    """All but the tokens, with their number: enough to read them again."""
    return [self.lane, self.document, self.start, len(self.tokens)]


class Mixture:
  """Endless pieces of documents from several lanes.

  Attributes:
    lanes: what is drawn from.
    counts: tokens drawn so far from each lane.
  """

  def __init__(
    self,
    lanes: Sequence[store_lib.Lane],
    documents: Sequence[grain.MapDataset[Ids]],
  ) -> None:
    """Takes lanes with the endless ids of their documents."""
    self.lanes = tuple(lanes)
    self._documents = tuple(documents)
    total = sum(lane.share for lane in lanes)
    self._shares = np.array([lane.share / total for lane in lanes])
    self.counts = np.zeros(len(lanes), np.int64)
    # The next token of each lane: its document and the index in there.
    self._document = [0] * len(lanes)
    self._start = [0] * len(lanes)
    self._tokens: list[Ids | None] = [None] * len(lanes)

  def draw(self, max_tokens: int) -> Piece:
    """Returns the next piece: a document's rest, or its next `max_tokens`."""
    # What each lane will have to have once one more token is drawn.
    due = self._shares * (self.counts.sum() + 1)
    lane = int(np.argmax(due - self.counts))
    start, document = self._start[lane], self._document[lane]
    ids = self._tokens[lane]
    if ids is None:
      ids = self._tokens[lane] = self._read(lane, document)
    tokens = ids[start : start + max_tokens]
    self._start[lane] += len(tokens)
    if self._start[lane] >= len(ids):
      self._document[lane] += 1
      self._start[lane] = 0
      self._tokens[lane] = None
    self.counts[lane] += len(tokens)
    return Piece(lane, document, start, tokens)

  def read(self, reference: Sequence[int]) -> Piece:
    """Returns a piece again that was drawn before."""
    lane, document, start, length = reference
    tokens = self._read(lane, document)[start : start + length]
    return Piece(lane, document, start, tokens)

  def _read(self, lane: int, document: int) -> Ids:
    ids: Ids | None = self._documents[lane][document]
    assert ids is not None
    return ids

  def class_counts(self) -> dict[TextClass, int]:
    """Returns the tokens drawn so far from each class."""
    counts = dict.fromkeys(TEXT_CLASSES, 0)
    for lane, count in zip(self.lanes, self.counts, strict=True):
      counts[lane.text_class] += int(count)
    return counts

  def get_state(self) -> dict[str, Any]:
    """Returns where each lane stands, as JSON."""
    return {
      'lanes': [lane.label for lane in self.lanes],
      'counts': self.counts.tolist(),
      'documents': list(self._document),
      'starts': list(self._start),
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from `get_state`'s.

    Raises:
      ValueError: the state is of other lanes.
    """
    labels = [lane.label for lane in self.lanes]
    if state['lanes'] != labels:
      raise ValueError(
        f'The data state is of the lanes {state["lanes"]}, the config has '
        f'{labels}. Resume with the mixture that the state was written with.'
      )
    self.counts = np.array(state['counts'], np.int64)
    self._document = list(state['documents'])
    self._start = list(state['starts'])
    self._tokens = [None] * len(self.lanes)


def mixture(
  config: DataConfig,
  store: store_lib.TextStore,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  seed: int,
  host_index: int,
  num_hosts: int,
) -> Mixture:
  """Returns one host's mixture of the store's training documents.

  Each lane is shuffled anew for each of its epochs. Hosts take turns in that
  order, so that no two of them see a document in the same epoch.
  """
  lanes = store_lib.lanes(config)
  documents = [
    store.train(lane)
    .seed(seed + index)
    .shuffle()
    .repeat()[host_index::num_hosts]
    .map(functools.partial(_ids, tokenizer))
    for index, lane in enumerate(lanes)
  ]
  return Mixture(lanes, documents)


def _ids(tokenizer: tokenizer_lib.Tokenizer, document: RawDocument) -> Ids:
  return tokenizer.encode_document(document.text)
