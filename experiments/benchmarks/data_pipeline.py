"""Speed and memory of the data pipeline.

  python experiments/benchmarks/data_pipeline.py

Packs documents of usual length in several ways, to see the speed; then cleans
a million short documents and packs as many, to see that memory stays flat. The
model's side of the comparison is measured by the training benchmark and given
as --model_tokens_per_second.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import json
import pathlib
import random
import tempfile
import time
from typing import Any

from absl import app
from absl import flags
import psutil
import rich
from rich import table

from glm5_jax.data import config as data_config
from glm5_jax.data import pipeline
from glm5_jax.data import preparation
from glm5_jax.data.config import DataConfig
from glm5_jax.data.config import LengthStage

_DOCUMENTS = flags.DEFINE_integer('documents', 1_000_000, 'Short documents.')
_MODEL = flags.DEFINE_float(
  'model_tokens_per_second', 4000.0, 'What the model eats on this machine.'
)

_VOCABULARY = 5_000
_SHORT = (10, 60)  # Words of a document.
_USUAL = (100, 2000)
_USUAL_DOCUMENTS = 3_000
_LENGTH = 2048
_ROWS = 4
_STEPS = 200
# Measurements of memory while packing.
_POINTS = 8


def _write(
  folder: pathlib.Path, documents: int, num_words: tuple[int, int]
) -> DataConfig:
  """Writes documents of all classes and returns a config for them."""
  rng = random.Random(0)
  words = [
    ''.join(rng.choices('etaoinshrdlu', k=rng.randrange(2, 10)))
    for _ in range(_VOCABULARY)
  ]
  # Random words are of no language and of no programming language.
  rules = data_config.ProseFilter(min_bytes=20)
  config = DataConfig(
    root=str(folder / 'corpus'), cache=str(folder / 'prepared'), prefetch=0
  )
  for text_class in data_config.TEXT_CLASSES:
    path = folder / 'corpus' / text_class / 'documents.jsonl'
    path.parent.mkdir(parents=True)
    with path.open('w') as file:
      for _ in range(documents // len(data_config.TEXT_CLASSES)):
        chosen = rng.choices(words, k=rng.randrange(*num_words))
        file.write(json.dumps({'text': ' '.join(chosen)}) + '\n')
    of_class = dataclasses.replace(
      config.class_config(text_class), filter=rules
    )
    change: dict[str, Any] = {text_class: of_class}
    config = dataclasses.replace(config, **change)
  return config


def _megabytes() -> float:
  return float(psutil.Process().memory_info().rss / 1e6)


def _memory(folder: pathlib.Path, documents: int) -> None:
  """Prints memory while short documents are cleaned and packed."""
  config = _write(folder, documents, _SHORT)
  shown = table.Table('documents', 'done', 'seconds', 'memory, MB')
  shown.add_row(f'{documents:,}', 'nothing', '', f'{_megabytes():.0f}')
  start = time.perf_counter()
  preparation.prepare(config)
  seconds = time.perf_counter() - start
  shown.add_row('', 'cleaning', f'{seconds:.0f}', f'{_megabytes():.0f}')
  tokenizer = pipeline.make_tokenizer(config)
  shown.add_row('', 'tokenizer', '', f'{_megabytes():.0f}')
  stages = (LengthStage(_LENGTH, _ROWS, 10**9),)
  start = time.perf_counter()
  batches = pipeline.train_batches(config, stages, tokenizer, seed=0)
  for point in range(1, _POINTS + 1):
    for _ in batches:
      drawn = sum(batches.get_state()['mixture']['documents'])
      if drawn >= documents * point / _POINTS:
        break
    seconds = time.perf_counter() - start
    shown.add_row(
      f'{drawn:,}', 'packing', f'{seconds:.0f}', f'{_megabytes():.0f}'
    )
  rich.print(shown)


def _speed(folder: pathlib.Path) -> None:
  """Prints tokens a second over documents of usual length."""
  config = _write(folder, _USUAL_DOCUMENTS, _USUAL)
  tokenizer = pipeline.make_tokenizer(config)
  stages = (LengthStage(_LENGTH, _ROWS, _STEPS),)
  shown = table.Table(
    'packing', 'thread', 'tokens/s', 'tokens/s of a core', 'times the model'
  )
  ways = (
    config,
    dataclasses.replace(config, packing=data_config.FirstFit()),
  )
  for way, prefetch in itertools.product(ways, (0, 2)):
    chosen = dataclasses.replace(way, prefetch=prefetch)
    with pipeline.train_batches(chosen, stages, tokenizer, seed=0) as batches:
      start, start_cpu = time.perf_counter(), time.process_time()
      tokens = sum(batch.tokens.size for batch in batches)
      speed = tokens / (time.perf_counter() - start)
      # What the wall shows too where nothing else runs.
      core_speed = tokens / (time.process_time() - start_cpu)
    shown.add_row(
      type(way.packing).__name__,
      'yes' if prefetch else 'no',
      f'{speed:,.0f}',
      f'{core_speed:,.0f}',
      f'{speed / _MODEL.value:.0f}',
    )
  rich.print(shown)


def main(argv: Sequence[str]) -> None:
  """Prints both tables."""
  del argv
  with tempfile.TemporaryDirectory() as folder:
    _speed(pathlib.Path(folder, 'usual'))
    _memory(pathlib.Path(folder, 'short'), _DOCUMENTS.value)


if __name__ == '__main__':
  app.run(main)
