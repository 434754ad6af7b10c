"""Held-out documents, and what the model and the compressors make of them."""

from collections.abc import Iterable
from collections.abc import Iterator

import jax

from glm5_jax.data import pipeline
from glm5_jax.data import preparation
from glm5_jax.data import store as store_lib
from glm5_jax.data.config import DataConfig
from glm5_jax.data.config import TextClass
from glm5_jax.data.pipeline import Document
from glm5_jax.evaluation import compression
from glm5_jax.evaluation import likelihood
from glm5_jax.evaluation import samples
from glm5_jax.evaluation.compression import Compression
from glm5_jax.evaluation.likelihood import Likelihood
from glm5_jax.models.definition import Definition
from glm5_jax.models.definition import Variables

# Text of each class that is scored, in bytes: the first documents that fit.
DURING_TRAINING_BYTES = 64 * 2**10
AFTER_TRAINING_BYTES = 2**20
# Training text that is compressed as one archive, for comparison. xz takes a
# second for each megabyte.
ARCHIVE_BYTES = 16 * 2**20
# Tokens that are scored at a time.
_BATCH_TOKENS = 8192

_PROMPT_TOKENS = 24
_CONTINUATION_TOKENS = 64
_TEMPERATURE = 0.8
_NUM_SAMPLES = 3


def limited(documents: Iterable[Document], max_bytes: int) -> list[Document]:
  """Returns the first documents of each class that fit into `max_bytes`.

  The same documents in the same order give the same choice, so that
  evaluations during a run compare.
  """
  room: dict[str, int] = {}
  chosen = []
  for document in documents:
    left = room.setdefault(document.source, max_bytes)
    if document.num_bytes <= left:
      room[document.source] = left - document.num_bytes
      chosen.append(document)
  return chosen


class Heldout:
  """The held-out documents of a run.

  Attributes:
    documents: what is scored after training.
    few: what is scored during training.
    row_length: tokens of a row in which they are scored.
  """

  def __init__(
    self, config: DataConfig, mesh: jax.sharding.Mesh, *, row_length: int
  ):
    """Reads the documents.

    Args:
      config: the data.
      mesh: devices of the model.
      row_length: longest context in which a token is scored.
    """
    self.row_length = row_length
    self._config = config
    self._mesh = mesh
    self._tokenizer = pipeline.make_tokenizer(config)
    every = pipeline.heldout_documents(config, self._tokenizer)
    self.documents = limited(every, AFTER_TRAINING_BYTES)
    self.few = limited(self.documents, DURING_TRAINING_BYTES)
    self._scorer: likelihood.Scorer | None = None

  def scores(
    self,
    definition: Definition,
    variables: Variables,
    documents: Iterable[Document],
  ) -> dict[str, Likelihood]:
    """Returns what documents cost by class; the same on every host."""
    if self._scorer is None:
      self._scorer = likelihood.Scorer(
        definition,
        self._mesh,
        num_rows=max(1, _BATCH_TOKENS // self.row_length),
        row_length=self.row_length,
      )
    return self._scorer(variables, documents)

  def during_training(
    self, definition: Definition, variables: Variables
  ) -> dict[str, float]:
    """Returns bits per byte of a few documents, in all and by class."""
    scores = self.scores(definition, variables, self.few)
    result = {'bits_per_byte': likelihood.total(scores).bits_per_byte}
    for name, score in scores.items():
      result[f'bits_per_byte_{name}'] = score.bits_per_byte
    return result

  def compressed(self) -> dict[str, Compression]:
    """Returns sizes of the documents compressed one by one, by class."""
    return compression.one_by_one((d.source, d.text) for d in self.documents)

  def archive(self) -> Compression:
    """Returns sizes of training text in the mixture's shares as one archive."""
    store = preparation.prepare(self._config)
    return compression.as_archive(_mixed(self._config, store))

  def sampled(
    self,
    definition: Definition,
    variables: Variables,
    seed: int,
  ) -> list[samples.Sample]:
    """Returns the beginnings of documents of three classes, continued."""
    prompt_length = min(_PROMPT_TOKENS, self.row_length // 2)
    num_tokens = min(_CONTINUATION_TOKENS, self.row_length - prompt_length)
    prompts = [
      document.tokens[:prompt_length].tolist()
      for document in _first_of_each(self.documents)
    ]
    if not prompts:
      return []
    sampler = samples.Sampler(
      definition,
      self._mesh,
      row_length=prompt_length + num_tokens,
      temperature=_TEMPERATURE,
    )
    return sampler(
      variables,
      prompts[:_NUM_SAMPLES],
      self._tokenizer,
      key=jax.random.key(seed),
      num_tokens=num_tokens,
    )


def _first_of_each(documents: Iterable[Document]) -> list[Document]:
  """Returns the first document of each class."""
  first: dict[TextClass, Document] = {}
  for document in documents:
    first.setdefault(document.source, document)
  return list(first.values())


def _mixed(config: DataConfig, store: store_lib.TextStore) -> Iterator[str]:
  """Yields training texts of every lane up to its share of an archive."""
  for lane in store_lib.lanes(config):
    room = lane.share * ARCHIVE_BYTES
    for document in store.train(lane):
      room -= len(document.text.encode())
      if room < 0:
        break
      yield document.text
