"""Batches of packed tokens, from sources to arrays, resumable at any batch."""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import json
from typing import Any

from jaxtyping import Int32
import numpy as np

from glm5_jax.data import mixtures
from glm5_jax.data import packing
from glm5_jax.data import preparation
from glm5_jax.data import store as store_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.batch import Batch
from glm5_jax.data.config import TEXT_CLASSES
from glm5_jax.data.config import DataConfig
from glm5_jax.data.config import LengthStage
from glm5_jax.data.config import TextClass
from glm5_jax.data.prefetch import Prefetch


@dataclasses.dataclass(frozen=True)
class Document:
  """A held-out document.

  Attributes:
    text: its exact text.
    tokens: its ids, begin and end ids included.
    source: its class.
    name: its file's name.
    num_bytes: bytes of the text in UTF-8.
  """

  text: str
  tokens: Int32[np.ndarray, 'T']
  source: TextClass
  name: str
  num_bytes: int


def make_tokenizer(config: DataConfig) -> tokenizer_lib.Tokenizer:
  """Returns the config's tokenizer, trained on its text if it says so."""
  return tokenizer_lib.for_store(config, preparation.prepare(config))


def heldout_documents(
  config: DataConfig, tokenizer: tokenizer_lib.Tokenizer
) -> Iterator[Document]:
  """Yields the documents that training never sees, class by class."""
  store = preparation.prepare(config)
  for text_class in TEXT_CLASSES:
    for document in store.heldout(text_class):
      yield Document(
        text=document.text,
        tokens=tokenizer.encode_document(document.text),
        source=text_class,
        name=document.name,
        num_bytes=len(document.text.encode()),
      )


def train_batches(
  config: DataConfig,
  stages: Sequence[LengthStage],
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  seed: int,
  host_index: int = 0,
  num_hosts: int = 1,
) -> 'BatchIterator':
  """Returns one host's batches of all stages.

  Args:
    config: what is trained on.
    stages: sequence lengths, batch sizes and steps, in order.
    tokenizer: gives the ids.
    seed: decides the order of documents.
    host_index: this host.
    num_hosts: hosts; each has `batch_size / num_hosts` rows of a batch.

  Raises:
    ValueError: a batch does not divide over the hosts.
  """
  if not 0 <= host_index < num_hosts:
    raise ValueError(
      f'host_index is {host_index}; it must be in 0..{num_hosts - 1}.'
    )
  for stage in stages:
    if stage.batch_size % num_hosts:
      raise ValueError(
        f'LengthStage.batch_size is {stage.batch_size}; it must be a multiple '
        f'of the number of hosts, {num_hosts}.'
      )
  store = preparation.prepare(config)
  mixture = mixtures.mixture(
    config,
    store,
    tokenizer,
    seed=seed,
    host_index=host_index,
    num_hosts=num_hosts,
  )
  identity = {
    'text': store.digest,
    'tokenizer': tokenizer.digest,
    'packing': repr(config.packing),
    'seed': seed,
    'host_index': host_index,
    'num_hosts': num_hosts,
  }
  rows = _Rows(
    mixture, packing.packer(config.packing, mixture), stages, num_hosts
  )
  return BatchIterator(rows, identity, config.prefetch)


class _Rows:
  """Batches without a thread; what `BatchIterator` wraps."""

  def __init__(
    self,
    mixture: mixtures.Mixture,
    packer: packing.Packer,
    stages: Sequence[LengthStage],
    num_hosts: int,
  ) -> None:
    self._mixture = mixture
    self._packer = packer
    self._stages = tuple(stages)
    self._num_hosts = num_hosts
    self._step = 0
    self._source_ids = [
      TEXT_CLASSES.index(lane.text_class) for lane in mixture.lanes
    ]

  def __next__(self) -> Batch:
    first_step = 0
    for stage in self._stages:
      if self._step < first_step + stage.num_steps:
        break
      first_step += stage.num_steps
    else:
      raise StopIteration
    self._step += 1
    length = stage.sequence_length
    rows = [
      self._packer.next_row(length)
      for _ in range(stage.batch_size // self._num_hosts)
    ]
    return packing.batch(rows, length, self._source_ids)

  def get_state(self) -> dict[str, Any]:
    return {
      'step': self._step,
      'mixture': self._mixture.get_state(),
      'packer': self._packer.get_state(),
      'tokens': self._mixture.class_counts(),
    }

  def set_state(self, state: dict[str, Any]) -> None:
    self._step = state['step']
    self._mixture.set_state(state['mixture'])
    self._packer.set_state(state['packer'])


class BatchIterator:
  """Batches of all stages, in order, that can go on from any of them.

  Use it in a `with` block, or call `close`, where it should end early.
  """

  def __init__(
    self, rows: _Rows, identity: dict[str, Any], prefetch: int
  ) -> None:
    """Takes the batches, what they depend on, and how many to make ahead."""
    self._identity = identity
    self._batches = Prefetch(rows, prefetch)

  def __iter__(self) -> 'BatchIterator':
    return self

  def __next__(self) -> Batch:
    return self._batches.next()

  def get_state(self) -> dict[str, Any]:
    """Returns the place after the last batch that was handed out, as JSON."""
    # A copy, since what is prefetched shares its parts.
    state = json.loads(json.dumps(self._batches.state()))
    return {'identity': dict(self._identity), **state}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from `get_state`'s: all later batches are bit for bit the same.

    Raises:
      ValueError: the state is of other text, another tokenizer, packing, seed
        or number of hosts.
    """
    for name, value in self._identity.items():
      given = state['identity'].get(name)
      if given != value:
        raise ValueError(
          f'The data state was written with {name} = {given!r}, this run has '
          f'{value!r}. Resume with the same text, tokenizer, packing, seed and '
          'number of hosts, or start anew.'
        )
    self._batches.restore({k: v for k, v in state.items() if k != 'identity'})

  @property
  def token_counts(self) -> dict[TextClass, int]:
    """Tokens drawn so far by class, on this host."""
    counts = self._batches.state()['tokens']
    return {text_class: counts[text_class] for text_class in TEXT_CLASSES}

  @property
  def shares(self) -> dict[TextClass, float]:
    """Realised share of each class in the tokens drawn so far."""
    counts = self.token_counts
    total = max(1, sum(counts.values()))
    return {name: count / total for name, count in counts.items()}

  def close(self) -> None:
    """Stops the thread; batches can still be had after it."""
    self._batches.close()

  def __enter__(self) -> 'BatchIterator':
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()


def cleaning_report(config: DataConfig) -> dict[str, Any]:
  """Returns what was kept, dropped and refused of each class, by rule."""
  store: store_lib.TextStore = preparation.prepare(config)
  report: dict[str, Any] = json.loads(json.dumps(store.manifest['classes']))
  return report
