"""Downloads source distributions and takes documents out of them."""

import ast
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent import futures
import fnmatch
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import textwrap
import warnings

from glm5_jax.data.corpus_packages import STANDARD_LIBRARY
from glm5_jax.data.corpus_packages import Package
from glm5_jax.data.corpus_sources import LANGUAGES
from glm5_jax.data.corpus_sources import Extract
from glm5_jax.data.sources import RawDocument

# pip asks an archive's build system for its name and version, which would
# download that system and run code from the archive. This stand-in answers from
# the archive's own PKG-INFO instead, whatever the build system; nothing of the
# archive runs.
_STAND_IN = """
import email, pathlib, re

def _requires(config_settings=None):
  return []

def _metadata(metadata_directory, config_settings=None):
  info = email.message_from_bytes(pathlib.Path('PKG-INFO').read_bytes())
  name, version = info['Name'], info['Version']
  folder = re.sub('[-_.]+', '_', name) + '-' + version + '.dist-info'
  path = pathlib.Path(metadata_directory, folder)
  path.mkdir()
  (path / 'METADATA').write_text(
    f'Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n'
  )
  return folder

class _Hooks:
  get_requires_for_build_wheel = staticmethod(_requires)
  prepare_metadata_for_build_wheel = staticmethod(_metadata)
  build_wheel = None

get_requires_for_build_wheel = _requires
prepare_metadata_for_build_wheel = _metadata
build_wheel = None
__legacy__ = _Hooks
"""
_BUILD_SYSTEMS = (
  'flit_core.buildapi',
  'hatchling.build',
  'maturin',
  'mesonpy',
  'poetry.core.masonry.api',
  'setuptools.build_meta',
)
_DOWNLOAD_SECONDS = 600
# pip works on one package at a time, and waits as long as it works.
_PROCESSES = 2


def download(packages: Sequence[Package], folder: pathlib.Path) -> None:
  """Downloads the archives of packages, each checked against its hash.

  Raises:
    RuntimeError: pip is missing or could not download them all.
  """
  if importlib.util.find_spec('pip') is None:
    raise RuntimeError(
      'This Python has no pip, which downloads the corpus. Run '
      f'`{sys.executable} -m ensurepip` first.'
    )
  with tempfile.TemporaryDirectory() as work:
    _write_stand_ins(pathlib.Path(work))
    groups = [packages[i::_PROCESSES] for i in range(_PROCESSES)]
    with futures.ThreadPoolExecutor(_PROCESSES) as pool:
      running = [
        pool.submit(_pip_download, group, folder, pathlib.Path(work), index)
        for index, group in enumerate(groups)
        if group
      ]
    for run in running:
      run.result()


def _pip_download(
  packages: Sequence[Package],
  folder: pathlib.Path,
  work: pathlib.Path,
  index: int,
) -> None:
  wanted = work / f'requirements-{index}.txt'
  wanted.write_text(
    ''.join(
      f'{p.name}=={p.version} --hash=sha256:{p.sha256}\n' for p in packages
    )
  )
  result = subprocess.run(
    [
      sys.executable,
      *('-m', 'pip', 'download', '--no-deps', '--no-build-isolation'),
      *('--no-binary', ':all:', '--disable-pip-version-check'),
      *('--quiet', '--dest', str(folder), '--requirement', str(wanted)),
    ],
    env={**os.environ, 'PYTHONPATH': str(work)},
    capture_output=True,
    text=True,
    timeout=_DOWNLOAD_SECONDS,
    check=False,
  )
  if result.returncode:
    raise RuntimeError(
      'pip could not download the corpus; check that it reaches a package '
      f'index (`{sys.executable} -m pip download click`). It said:\n'
      f'{result.stderr[-2000:]}'
    )


def _write_stand_ins(folder: pathlib.Path) -> None:
  for name in _BUILD_SYSTEMS:
    path = folder.joinpath(*name.split('.'))
    # A package, so that neither it nor its parents hide each other.
    path.mkdir(parents=True)
    (path / '__init__.py').write_text(_STAND_IN)
    for parent in path.relative_to(folder).parents:
      if parent.parts:
        (folder / parent / '__init__.py').touch()


def archive(package: Package, folder: pathlib.Path) -> pathlib.Path:
  """Returns the path of a downloaded archive."""
  name = package.name.replace('-', '[-_]')
  found = [
    path
    for path in folder.iterdir()
    if re.fullmatch(
      f'{name}-{re.escape(package.version)}.tar.gz', path.name, re.IGNORECASE
    )
  ]
  if len(found) != 1:
    raise FileNotFoundError(
      f'{package.name} {package.version} is not in {folder}.'
    )
  return found[0]


def archive_files(
  path: pathlib.Path, include: tuple[str, ...]
) -> dict[str, bytes]:
  """Returns the files of an archive by their path below its one folder."""
  files = {}
  with tarfile.open(path) as archive_file:
    for member in archive_file:
      _, _, name = member.name.partition('/')
      if member.isfile() and _matches(name, include):
        content = archive_file.extractfile(member)
        assert content is not None
        files[name] = content.read()
  return dict(sorted(files.items()))


def standard_library_files() -> dict[str, bytes]:
  """Returns the modules of the running Python's standard library."""
  start = pathlib.Path(sysconfig.get_paths()['stdlib'])
  files = {}
  for path in sorted(start.rglob('*.py')):
    name = path.relative_to(start).as_posix()
    top = name.split('/')[0].removesuffix('.py')
    if top in sys.stdlib_module_names:
      files[name] = path.read_bytes()
  return files


def documents(
  extract: Extract, files: dict[str, bytes]
) -> Iterator[RawDocument]:
  """Yields the documents of an extract from its package's files."""
  for name, content in files.items():
    if not _matches(name, extract.include) or _matches(name, extract.exclude):
      continue
    text = _decoded(content)
    if text is None:
      continue
    full_name = f'{extract.package}/{name}'
    if extract.form == 'text':
      yield RawDocument(full_name, extract.part, text)
    elif extract.form == 'docstrings':
      if found := docstrings(text):
        yield RawDocument(full_name, extract.part, found)
    elif extract.form == 'translations':
      language = re.search(r'locales?/([^/]+)/', name)
      if language and language[1] in LANGUAGES:
        part = re.split('[_-]', language[1])[0]
        yield RawDocument(full_name, part, translations(text))
    else:
      for topic, body in topics(text):
        yield RawDocument(f'{full_name}#{topic}', extract.part, body)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
  return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _decoded(content: bytes) -> str | None:
  """Returns the text of a file; older ones are in Latin-1."""
  if b'\0' in content:
    return None
  try:
    return content.decode('utf-8-sig')
  except UnicodeDecodeError:
    return content.decode('latin-1')


def docstrings(code: str) -> str:
  """Returns the docstrings of a module of 200 characters or more, in order."""
  with warnings.catch_warnings():
    # Old code has escapes that newer Pythons warn of; it is only read here.
    warnings.simplefilter('ignore', SyntaxWarning)
    try:
      tree = ast.parse(code)
    except SyntaxError:
      return ''
  found = []
  for node in ast.walk(tree):
    if isinstance(
      node,
      ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
    ):
      docstring = ast.get_docstring(node)
      if docstring and len(docstring) >= 200:
        found.append(docstring)
  return '\n\n'.join(found)


def translations(catalogue: str) -> str:
  """Returns the translations of a gettext catalogue, one a line or more."""
  found = []
  for entry in re.split(r'\n\s*\n', catalogue):
    if 'msgid ""\nmsgstr' in entry or '#, fuzzy' in entry:
      continue  # The header, or a guess that no translator has looked at.
    for message in re.findall(
      r'^msgstr(?:\[\d+\])?((?:\s+"(?:[^"\\]|\\.)*")+)', entry, re.MULTILINE
    ):
      pieces = re.findall(r'"((?:[^"\\]|\\.)*)"', message)
      text = _unescaped(''.join(pieces)).strip()
      if text:
        found.append(text)
  return '\n'.join(found) + '\n'


def _unescaped(text: str) -> str:
  return re.sub(
    r'\\(.)',
    lambda match: {'n': '\n', 't': '\t'}.get(match[1], match[1]),
    text,
  )


def topics(code: str) -> list[tuple[str, str]]:
  """Returns the entries of the dictionary that `pydoc_data.topics` defines."""
  for node in ast.parse(code).body:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
      entries = ast.literal_eval(node.value)
      return sorted((k, textwrap.dedent(v)) for k, v in entries.items())
  return []


def package_files(
  extracts: Sequence[Extract],
  packages: Sequence[Package],
  folder: pathlib.Path,
) -> dict[str, bytes]:
  """Returns the files that extracts of one package may take."""
  name = extracts[0].package
  if name == STANDARD_LIBRARY:
    return standard_library_files()
  package = next(package for package in packages if package.name == name)
  include = tuple(
    pattern for extract in extracts for pattern in extract.include
  )
  return archive_files(archive(package, folder), include)
