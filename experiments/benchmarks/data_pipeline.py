"""Speed and memory of the data pipeline over a million documents.

  python experiments/benchmarks/data_pipeline.py

Makes short documents of random words, cleans them, and packs an epoch of them;
then a few million tokens in other ways. The model's side of the comparison is measured by
the training benchmark and given as --model_tokens_per_second.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import json
import pathlib
import random
import tempfile
import time

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

_DOCUMENTS = flags.DEFINE_integer('documents', 1_000_000, 'Documents.')
_MODEL = flags.DEFINE_float(
  'model_tokens_per_second', 4000.0, 'What the model eats on this machine.'
)

_WORDS = 5_000
_LENGTH = 2048
_ROWS = 4
_STEPS = 400
# Measurements of memory over a run.
_POINTS = 8


def _write(folder: pathlib.Path, documents: int) -> None:
  """Writes documents of all classes, 10 to 60 words each."""
  rng = random.Random(0)
  letters = 'etaoinshrdlu'
  words = [
    ''.join(rng.choices(letters, k=rng.randrange(2, 10))) for _ in range(_WORDS)
  ]
  for text_class in data_config.TEXT_CLASSES:
    path = folder / text_class / 'documents.jsonl'
    path.parent.mkdir(parents=True)
    with path.open('w') as file:
      for _ in range(documents // len(data_config.TEXT_CLASSES)):
        chosen = rng.choices(words, k=rng.randrange(10, 60))
        file.write(json.dumps({'text': ' '.join(chosen)}) + '\n')


def _config(folder: pathlib.Path) -> DataConfig:
  config = DataConfig(
    root=str(folder / 'corpus'), cache=str(folder / 'prepared')
  )
  # Random words are of no language and of no programming language.
  rules = data_config.ProseFilter(min_bytes=20)
  classes = {
    name: dataclasses.replace(config.class_config(name), filter=rules)
    for name in data_config.TEXT_CLASSES
  }
  return dataclasses.replace(config, **classes)


def _megabytes() -> float:
  return float(psutil.Process().memory_info().rss / 1e6)


def _runs(config: DataConfig) -> Iterator[tuple[str, float, list[float]]]:
  """Yields name, tokens a second and megabytes over each run."""
  store = preparation.prepare(config)
  tokenizer = pipeline.make_tokenizer(config)
  of_classes = store.manifest['classes'].values()
  size = sum(c['train']['']['bytes'] for c in of_classes)
  document = next(iter(store.heldout('web')))
  per_token = len(document.text.encode()) / len(tokenizer.encode(document.text))
  epoch = max(_POINTS, int(size / per_token / (_LENGTH * _ROWS)))
  for name, packing, prefetch, steps in (
    ('concat and split, an epoch', data_config.ConcatAndSplit(), 0, epoch),
    ('concat and split, thread', data_config.ConcatAndSplit(), 2, _STEPS),
    ('first fit', data_config.FirstFit(), 0, _STEPS),
  ):
    chosen = dataclasses.replace(config, packing=packing, prefetch=prefetch)
    stages = (LengthStage(_LENGTH, _ROWS, steps),)
    memory = []
    start = time.perf_counter()
    with pipeline.train_batches(chosen, stages, tokenizer, seed=0) as batches:
      for step, _ in enumerate(batches):
        if step % (steps // _POINTS) == 0:
          memory.append(_megabytes())
    seconds = time.perf_counter() - start
    yield name, steps * _LENGTH * _ROWS / seconds, memory


def main(argv: Sequence[str]) -> None:
  """Prints the table."""
  del argv
  with tempfile.TemporaryDirectory() as folder:
    _write(pathlib.Path(folder, 'corpus'), _DOCUMENTS.value)
    config = _config(pathlib.Path(folder))
    before = _megabytes()
    start = time.perf_counter()
    preparation.prepare(config)
    seconds = time.perf_counter() - start
    rich.print(
      f'Cleaning {_DOCUMENTS.value:,} documents: {seconds:.0f} s, '
      f'{_DOCUMENTS.value / seconds:,.0f} documents/s, memory '
      f'{before:.0f} MB before and {_megabytes():.0f} MB after.'
    )
    shown = table.Table(
      'packing', 'tokens/s', 'times the model', 'memory over the run, MB'
    )
    for name, speed, memory in _runs(config):
      shown.add_row(
        name,
        f'{speed:,.0f}',
        f'{speed / _MODEL.value:.0f}',
        ' '.join(f'{megabytes:.0f}' for megabytes in memory),
      )
    rich.print(shown)


if __name__ == '__main__':
  app.run(main)
