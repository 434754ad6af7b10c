import hashlib
import io
import json
import pathlib
import re
import tarfile

from absl import app
from absl import flags
from absl.testing import flagsaver
import pytest

from glm5_jax.data import config as data_config
from glm5_jax.data import corpus
from glm5_jax.data import corpus_files
from glm5_jax.data.corpus_packages import PACKAGES
from glm5_jax.data.corpus_packages import Package
from glm5_jax.data.corpus_sources import EXTRACTS
from glm5_jax.data.corpus_sources import Extract
from tests.data import corpora

ROOT = pathlib.Path(__file__).parent.parent.parent
LIBRARY = (
  Extract('python', 'code', 'python', ('json/*.py',), 'small'),
  Extract(
    'python', 'books', 'technical', ('pydoc_data/topics.py',), '', form='topics'
  ),
)
CATALOGUE = """# A header.
msgid ""
msgstr ""
"Language: de\\n"

#: file.py:1
msgid "Yes"
msgstr "Ja"

#, fuzzy
msgid "No"
msgstr "Vielleicht"

msgid ""
"Two "
"lines"
msgstr ""
"Zwei \\"gute\\"\\n"
"Zeilen"

msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d Datei"
msgstr[1] "%d Dateien"

msgid "Untranslated"
msgstr ""
"""


def archive(folder, build_system='a_build_system_that_is_not_there'):
  """Writes a source archive and returns its package."""
  files = {
    'PKG-INFO': 'Metadata-Version: 2.1\nName: Toy.Package\nVersion: 1.0\n',
    'pyproject.toml': (
      f'[build-system]\nrequires = ["{build_system}"]\n'
      f'build-backend = "{build_system}"\n'
    ),
    'setup.py': 'raise SystemExit("The code of an archive was run.")\n',
    'src/module.py': corpora.code(1),
    'docs/page.md': corpora.prose(1),
    'locale/de/LC_MESSAGES/toy.po': CATALOGUE,
    'locale/xx/LC_MESSAGES/toy.po': CATALOGUE,
  }
  path = folder / 'toy_package-1.0.tar.gz'
  with tarfile.open(path, 'w:gz') as file:
    for name, text in files.items():
      info = tarfile.TarInfo(f'toy_package-1.0/{name}')
      info.size = len(text.encode())
      file.addfile(info, io.BytesIO(text.encode()))
  digest = hashlib.sha256(path.read_bytes()).hexdigest()
  return Package('toy-package', '1.0', digest, 'MIT')


@pytest.fixture
def index(tmp_path, monkeypatch):
  """A folder that pip takes for the only package index."""
  folder = tmp_path / 'index'
  folder.mkdir()
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  monkeypatch.setenv('PIP_FIND_LINKS', str(folder))
  return folder


@pytest.mark.parametrize('build_system', ['mesonpy', 'hatchling.build'])
def test_downloading_runs_no_code_and_needs_no_build_system(
  index, tmp_path, build_system
):
  package = archive(index, build_system)
  corpus_files.download([package], tmp_path)
  path = corpus_files.archive(package, tmp_path)
  assert hashlib.sha256(path.read_bytes()).hexdigest() == package.sha256


def test_an_archive_with_another_hash_is_refused(index, tmp_path):
  package = archive(index, 'setuptools.build_meta')
  wrong = Package('toy-package', '1.0', '0' * 64, 'MIT')
  with pytest.raises(RuntimeError, match='pip could not download'):
    corpus_files.download([wrong], tmp_path)
  assert package.name == wrong.name


def test_a_corpus_is_built_once_and_the_same_each_time(index, tmp_path):
  package = archive(index, 'setuptools.build_meta')
  extracts = (
    Extract('toy-package', 'code', 'python', ('src/*.py',), ''),
    Extract('toy-package', 'web', '', ('docs/*',), ''),
    Extract(
      'toy-package', 'other', '{language}', ('*.po',), '', form='translations'
    ),
  )
  contents = []
  for name in ('first', 'second'):
    output = tmp_path / name
    made = corpus.build(output, packages=(package,), extracts=extracts)
    assert made['packages']['toy-package']['licence'] == 'MIT'
    contents.append(
      {
        str(path.relative_to(output)): path.read_bytes()
        for path in sorted(output.rglob('*'))
        if path.is_file()
      }
    )
  assert contents[0] == contents[1]
  assert sorted(contents[0]) == [
    'code/toy-package.jsonl',
    'manifest.json',
    'other/toy-package.jsonl',
    'web/toy-package.jsonl',
  ]
  record = json.loads(contents[0]['other/toy-package.jsonl'])
  assert record['part'] == 'de'
  assert record['name'] == 'toy-package/locale/de/LC_MESSAGES/toy.po'
  # There already: not even pip is asked.
  index.joinpath('toy_package-1.0.tar.gz').unlink()
  corpus.build(tmp_path / 'first', packages=(package,), extracts=extracts)
  assert list(tmp_path.glob('.making-*')) == []


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
  (tmp_path / 'mine.txt').write_text('precious')
  with pytest.raises(FileExistsError, match='new or empty'):
    corpus.build(tmp_path, packages=(), extracts=LIBRARY)
  assert (tmp_path / 'mine.txt').read_text() == 'precious'


def test_the_command_prints_what_it_made(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(corpus.corpus_packages, 'PACKAGES', ())
  monkeypatch.setattr(corpus.corpus_sources, 'EXTRACTS', LIBRARY)
  flags.FLAGS.mark_as_parsed()
  try:
    with flagsaver.flagsaver(output=str(tmp_path / 'made')):
      corpus.main(['corpus'])
      with pytest.raises(app.UsageError, match='oops'):
        corpus.main(['corpus', 'oops'])
  finally:
    flags.FLAGS.unparse_flags()
  printed = capsys.readouterr().out
  assert re.search(r'books\s+│\s+\d\d', printed)
  assert str(tmp_path / 'made') in printed.replace('\n', '')


def test_translations_are_one_language_without_guesses():
  assert corpus_files.translations(CATALOGUE) == (
    'Ja\nZwei "gute"\nZeilen\n%d Datei\n%d Dateien\n'
  )


def test_docstrings_of_some_length_are_taken_in_order():
  long = 'Says much. ' * 20
  code = (
    f'"""{long}"""\nclass A:\n  """Brief."""\n'
    f'  def f(self):\n    r"""{long}\\d"""\n'
  )
  found = corpus_files.docstrings(code)
  assert found.count('Says much.') == 40 and 'Brief' not in found
  assert corpus_files.docstrings('def broken(') == ''


def test_the_standard_library_has_no_installed_packages():
  files = corpus_files.standard_library_files()
  assert 'argparse.py' in files and len(files) > 200
  assert not any('site-packages' in name for name in files)


def test_every_class_has_a_stand_in_with_a_permissive_licence():
  assert {e.text_class for e in EXTRACTS} == set(data_config.TEXT_CLASSES)
  names = {package.name for package in PACKAGES}
  assert {e.package for e in EXTRACTS} == names | {'python'}
  for package in PACKAGES:
    assert re.fullmatch('[0-9a-f]{64}', package.sha256)
    assert 'GPL' not in package.licence and package.licence


def test_the_documentation_names_every_package_with_its_licence():
  text = (ROOT / 'docs' / 'data.md').read_text()
  for package in PACKAGES:
    row = f'| {package.name} | {package.version} | {package.licence} |'
    assert row in text
