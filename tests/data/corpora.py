"""Small corpora with nothing but the standard library in them."""

import dataclasses
import json
import pathlib
import random

from glm5_jax.data import config as data_config
from glm5_jax.data.config import DataConfig

_WORDS = tuple(
  'the of and to in is that for it as was with be by on not he his but at '
  'are '
  'this have from or had an they which one you were all her she there '
  'would their we him been has when who will no more if out so said what up '
  'its about into than them can only other new some could time these two may '
  'then do '
  'first any my now such like our over man me even most made after also did '
  'many before must through years where much your way well down should because '
  'each just those people how too little state good very make world still own '
  'see men work long here get both between life being under never day same '
  'another know while last might us great old year off come since against go '
  'came right used take three'.split()
)


def prose(seed: int, num_words: int = 200) -> str:
  """Returns English-looking text, of its own for each seed."""
  rng = random.Random(seed)
  words = rng.choices(_WORDS, k=num_words)
  lines = [' '.join(words[i : i + 12]) for i in range(0, num_words, 12)]
  return '\n'.join(lines) + '\n'


def code(seed: int, num_functions: int = 10) -> str:
  """Returns a Python module, of its own for each seed."""
  rng = random.Random(seed)
  functions = []
  for _ in range(num_functions):
    names = rng.sample(_WORDS, 4)
    functions.append(
      f'def {"_".join(names)}_of_things({names[0]}_x, {names[1]}_y):\n'
      f'  """Returns {names[2]} {names[3]}."""\n'
      f'  return {names[0]}_x + {rng.randrange(1000)} * {names[1]}_y\n'
    )
  return '\n\n'.join(functions)


def write_jsonl(path: pathlib.Path, records: list[dict[str, object]]) -> None:
  """Writes records as JSON lines."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))


def five_classes(
  folder: pathlib.Path, documents: int = 20, longest: int = 400
) -> DataConfig:
  """Writes a corpus of all classes and returns a config for it.

  Document lengths run from tens to `longest` words.
  """
  rng = random.Random(1)
  for number, name in enumerate(data_config.TEXT_CLASSES):
    records: list[dict[str, object]] = []
    for index in range(documents):
      seed = 1000 * number + index
      size = rng.randrange(60, longest)
      text = code(seed, size // 10) if name == 'code' else prose(seed, size)
      records.append({'name': f'{name}/{index}', 'text': text})
    write_jsonl(folder / name / 'documents.jsonl', records)
  return DataConfig(
    root=str(folder),
    cache=str(folder.parent / 'prepared'),
    tokenizer=data_config.TrainedTokenizer(512, 100_000),
    heldout_share=0.1,
    prefetch=0,
  )


def only(config: DataConfig, name: str, **changes: object) -> DataConfig:
  """Returns the config with one class alone, that class changed."""
  shares = {
    other: dataclasses.replace(getattr(config, other), share=0.0)
    for other in data_config.TEXT_CLASSES
    if other != name
  }
  shares[name] = dataclasses.replace(
    getattr(config, name), share=1.0, **changes
  )
  return dataclasses.replace(config, **shares)
