"""Collects real text of all five classes from the package registry.

  python -m glm5_jax.data.corpus --output=runs/corpus

The output is a folder for each class with JSON lines, and `manifest.json` with
the licence, hash and yield of every package. Nothing is filtered here:
`preparation` does that to it as to any other text.
"""

from collections.abc import Sequence
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

from absl import app
from absl import flags
import rich
from rich import progress
from rich import table

from glm5_jax.data import corpus_files
from glm5_jax.data import corpus_packages
from glm5_jax.data import corpus_sources
from glm5_jax.data.config import TEXT_CLASSES

_OUTPUT = flags.DEFINE_string('output', None, 'Folder for the corpus.')

_MANIFEST = 'manifest.json'
# Raise it when a change here makes another corpus of the same packages.
_VERSION = 1


def build(
  output: pathlib.Path,
  *,
  packages: Sequence[corpus_packages.Package],
  extracts: Sequence[corpus_sources.Extract],
) -> dict[str, Any]:
  """Makes the corpus, unless it is there already, and returns its manifest.

  Raises:
    FileExistsError: the folder holds something else.
    RuntimeError: the packages could not be downloaded.
  """
  recipe = _recipe(packages, extracts)
  found = _existing(output)
  if found is not None and found['recipe'] == recipe:
    return found
  output.parent.mkdir(parents=True, exist_ok=True)
  # Beside the output, so that the last step is a rename.
  work = pathlib.Path(tempfile.mkdtemp(prefix='.making-', dir=output.parent))
  try:
    manifest = _collect(work / 'corpus', work / 'archives', packages, extracts)
    manifest['recipe'] = recipe
    (work / 'corpus' / _MANIFEST).write_text(
      json.dumps(manifest, indent=2), encoding='utf-8'
    )
    if output.exists():
      shutil.rmtree(output)
    (work / 'corpus').rename(output)
  finally:
    shutil.rmtree(work, ignore_errors=True)
  return manifest


def _recipe(
  packages: Sequence[corpus_packages.Package],
  extracts: Sequence[corpus_sources.Extract],
) -> str:
  """Returns all that decides the corpus but the standard library's version."""
  return repr((_VERSION, tuple(packages), tuple(extracts)))


def _existing(output: pathlib.Path) -> dict[str, Any] | None:
  """Returns the manifest of a corpus; None where there is nothing."""
  if not output.exists() or (output.is_dir() and not os.listdir(output)):
    return None
  try:
    content = (output / _MANIFEST).read_text(encoding='utf-8')
    manifest: dict[str, Any] = json.loads(content)
    manifest['recipe']
  except (OSError, ValueError, KeyError):
    raise FileExistsError(
      f'{output} exists and is no corpus of this builder. Give --output a new '
      'or empty folder.'
    ) from None
  return manifest


def _collect(
  corpus: pathlib.Path,
  archives: pathlib.Path,
  packages: Sequence[corpus_packages.Package],
  extracts: Sequence[corpus_sources.Extract],
) -> dict[str, Any]:
  """Downloads, extracts and writes; returns the manifest."""
  corpus.mkdir()
  archives.mkdir()
  sums: dict[str, dict[str, int]] = {}
  with progress.Progress(
    transient=True, disable=not rich.get_console().is_terminal
  ) as bar:
    task = bar.add_task('Downloading packages', total=None)
    if packages:
      corpus_files.download(packages, archives)
    names = list(dict.fromkeys(extract.package for extract in extracts))
    bar.update(task, total=len(names))
    for name in names:
      bar.update(task, description=f'Collecting {name}')
      of_name = [extract for extract in extracts if extract.package == name]
      files = corpus_files.package_files(of_name, packages, archives)
      for extract in of_name:
        _add(corpus, extract, files, sums)
      bar.advance(task)
  return {
    'packages': {
      package.name: {
        'version': package.version,
        'sha256': package.sha256,
        'licence': package.licence,
      }
      for package in packages
    },
    'standard_library_licence': corpus_packages.STANDARD_LIBRARY_LICENCE,
    'files': dict(sorted(sums.items())),
  }


def _add(
  corpus: pathlib.Path,
  extract: corpus_sources.Extract,
  files: dict[str, bytes],
  sums: dict[str, dict[str, int]],
) -> None:
  """Appends an extract's documents to its file."""
  file_name = f'{extract.text_class}/{extract.package}.jsonl'
  path = corpus / file_name
  path.parent.mkdir(exist_ok=True)
  tally = sums.setdefault(file_name, {'documents': 0, 'bytes': 0})
  with path.open('a', encoding='utf-8') as file:
    for document in corpus_files.documents(extract, files):
      file.write(json.dumps(document._asdict(), ensure_ascii=False) + '\n')
      tally['documents'] += 1
      tally['bytes'] += len(document.text.encode())


def _print(manifest: dict[str, Any]) -> None:
  shown = table.Table('class', 'documents', 'MB', 'packages')
  for text_class in TEXT_CLASSES:
    files = {
      pathlib.PurePosixPath(name).stem: tally
      for name, tally in manifest['files'].items()
      if name.startswith(f'{text_class}/')
    }
    shown.add_row(
      text_class,
      f'{sum(tally["documents"] for tally in files.values()):,}',
      f'{sum(tally["bytes"] for tally in files.values()) / 1e6:.1f}',
      ', '.join(files),
    )
  rich.print(shown)


def main(argv: Sequence[str]) -> None:
  """Makes the corpus and prints what it holds."""
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {argv[1:]}.')
  assert _OUTPUT.value is not None
  output = pathlib.Path(_OUTPUT.value)
  manifest = build(
    output,
    packages=corpus_packages.PACKAGES,
    extracts=corpus_sources.EXTRACTS,
  )
  _print(manifest)
  print(f'The corpus is at {output}.')


if __name__ == '__main__':
  flags.mark_flag_as_required('output')
  app.run(main)
