"""Which files of which package stand in for which class, and why.

No class is what a laboratory trains on; `docs/data.md` says what serves each
and what it lacks.
"""

import dataclasses
from typing import Literal

from glm5_jax.data.config import TextClass

# How a file becomes documents: as it is, its docstrings, its translations, or
# the topics of `pydoc_data`.
Form = Literal['text', 'docstrings', 'translations', 'topics']


@dataclasses.dataclass(frozen=True)
class Extract:
  """Files of one package that go to one part of one class.

  Attributes:
    package: name of a package; `python` is the running standard library.
    text_class: class that the files stand in for.
    part: part of the class; '{language}' for that of a message catalogue.
    include: patterns of paths in the package; `*` crosses folders.
    why: why these files serve the class.
    exclude: patterns of paths that are left out.
    form: how a file becomes documents.
  """

  package: str
  text_class: TextClass
  part: str
  include: tuple[str, ...]
  why: str
  exclude: tuple[str, ...] = ()
  form: Form = 'text'


# Languages of the catalogues, as their folders call them.
LANGUAGES: tuple[str, ...] = (
  'ar',
  'bg',
  'bn',
  'ca',
  'cs',
  'da',
  'de',
  'el',
  'es',
  'fa',
  'fi',
  'fr',
  'he',
  'hi',
  'hu',
  'id',
  'it',
  'ja',
  'ka',
  'ko',
  'nl',
  'pl',
  'pt_BR',
  'ro',
  'ru',
  'sv',
  'tr',
  'uk',
  'vi',
  'zh_CN',
  'zh_Hans',
)

_TESTS = ('*/test/*', '*/tests/*', 'test/*', 'tests/*', '*/idle_test/*')
_CHANGES = ('*change*', '*release*', '*whats_new*', '*whatsnew*', '*announce*')

EXTRACTS: tuple[Extract, ...] = (
  Extract(
    'python',
    'code',
    'python',
    ('*.py',),
    'the standard library',
    # Tables, and a copy of the reference manual that books take.
    exclude=(*_TESTS, 'encodings/*', 'pydoc_data/*', '*/unicodedata*'),
  ),
  Extract(
    'django',
    'code',
    'python',
    ('django/*.py',),
    'a large application framework',
    exclude=(*_TESTS, '*/locale/*', '*/migrations/*'),
  ),
  Extract(
    'tokenizers',
    'code',
    'rust',
    ('*.rs',),
    'a Rust library',
    exclude=_TESTS,
  ),
  Extract('cryptography', 'code', 'rust', ('src/rust/*.rs',), 'a Rust library'),
  Extract(
    'django',
    'code',
    'javascript',
    ('django/contrib/*.js',),
    'hand-written scripts of a site',
    exclude=('*.min.js', '*/vendor/*'),
  ),
  Extract(
    'sphinx',
    'code',
    'javascript',
    ('sphinx/themes/*.js', 'tests/js/*.js', 'sphinx/search/*.js'),
    'hand-written scripts of a site',
    exclude=('*/minified-js/*', '*searchindex*'),
  ),
  Extract(
    'scikit-learn',
    'code',
    'c',
    ('sklearn/*.pyx', 'sklearn/*.pxd', 'sklearn/*.cpp', 'sklearn/*.h'),
    'numerical kernels',
    exclude=('*/externals/*', '*/newrand/*'),
  ),
  Extract(
    'pytest',
    'web',
    '',
    ('doc/en/*.rst', 'doc/en/*.md'),
    'pages of a site, as their authors wrote them',
    exclude=('doc/en/changelog.rst', 'doc/en/announce/*'),
  ),
  Extract(
    'docutils',
    'web',
    '',
    ('docs/*.rst', '*.rst', 'FAQ*'),
    'pages of a site',
    exclude=('HISTORY.rst', 'RELEASE-NOTES.rst', *_TESTS),
  ),
  Extract(
    'flask',
    'web',
    '',
    ('docs/*.rst', '*.md'),
    'pages of a site',
  ),
  Extract('click', 'web', '', ('docs/*.md', '*.md'), 'pages of a site'),
  Extract(
    'sphinx',
    'web',
    '',
    ('doc/*.rst', '*.rst'),
    'pages of a site',
    exclude=('doc/changes/*', 'CHANGES*', *_TESTS),
  ),
  Extract(
    'xarray',
    'web',
    '',
    ('doc/*.rst', 'doc/*.md', '*.md'),
    'pages of a site',
    exclude=('doc/whats-new*',),
  ),
  Extract(
    'django',
    'web',
    '',
    ('docs/internals/*.txt', 'docs/faq/*.txt', 'docs/misc/*.txt', '*.rst'),
    'pages of a site: questions and answers, how a community works',
  ),
  Extract(
    'cryptography',
    'web',
    '',
    ('docs/*.rst', '*.rst'),
    'pages of a site',
    exclude=('CHANGELOG.rst',),
  ),
  Extract(
    'scikit-learn',
    'web',
    '',
    ('doc/developers/*.rst', 'doc/computing/*.rst', 'doc/faq.rst'),
    'pages of a site',
  ),
  Extract('sympy', 'web', '', ('doc/src/contributing/*',), 'pages of a site'),
  Extract(
    'scikit-learn',
    'papers',
    'stem',
    ('doc/modules/*.rst', 'doc/glossary.rst', 'doc/common_pitfalls.rst'),
    'statistics, with formulas and references',
  ),
  Extract(
    'sympy',
    'papers',
    'stem',
    ('doc/src/*.rst', 'doc/src/*.md'),
    'mathematics and physics, with formulas',
    exclude=(*_CHANGES, 'doc/src/contributing/*'),
  ),
  Extract(
    'networkx',
    'papers',
    'stem',
    ('networkx/*.py',),
    'graph theory as docstrings, with references',
    exclude=_TESTS,
    form='docstrings',
  ),
  Extract(
    'mpmath',
    'papers',
    'stem',
    ('mpmath/*.py',),
    'special functions as docstrings, with formulas',
    exclude=_TESTS,
    form='docstrings',
  ),
  Extract('mpmath', 'papers', 'stem', ('docs/*.rst',), 'numerical mathematics'),
  Extract(
    'emcee',
    'papers',
    'stem',
    ('document/ms.tex', 'joss/paper.md'),
    'two published papers, the only ones here',
  ),
  Extract(
    'nltk',
    'papers',
    'language',
    ('nltk/test/*.doctest', 'web/*.rst'),
    'linguistics, by worked examples',
  ),
  Extract(
    'nltk',
    'papers',
    'language',
    ('nltk/*.py',),
    'linguistics as docstrings, with references',
    exclude=_TESTS,
    form='docstrings',
  ),
  Extract(
    'shakespeare',
    'books',
    'literature',
    ('shksprdata/texts/*_gut.txt',),
    'the plays and poems, in modern spelling',
  ),
  Extract(
    'shakespeare',
    'books',
    'literature',
    (
      'miltondata/texts/poetical_works_gut.txt',
      'miltondata/texts/areopagitica_gut.txt',
      'miltondata/texts/paradise_regained_gut.txt',
      'miltondata/texts/paradise_lost*_gut.txt',
    ),
    'Milton',
  ),
  Extract(
    'django',
    'books',
    'technical',
    (
      'docs/intro/*.txt',
      'docs/topics/*.txt',
      'docs/ref/*.txt',
      'docs/howto/*.txt',
    ),
    'a manual of book length, chapter by chapter',
  ),
  Extract(
    'python',
    'books',
    'technical',
    ('pydoc_data/topics.py',),
    'the language reference',
    form='topics',
  ),
  *(
    Extract(
      package,
      'other',
      '{language}',
      ('*.po',),
      'messages in many languages, each by itself',
      exclude=_TESTS,
      form='translations',
    )
    for package in ('django', 'sphinx')
  ),
  Extract(
    'django',
    'other',
    'notes',
    ('docs/releases/*.txt',),
    'release notes',
  ),
  *(
    Extract(package, 'other', 'notes', include, 'release notes')
    for package, include in (
      ('docutils', ('HISTORY.rst', 'RELEASE-NOTES.rst')),
      ('pytest', ('doc/en/changelog.rst', 'doc/en/announce/*.rst')),
      ('scikit-learn', ('doc/whats_new/*.rst',)),
      ('sphinx', ('doc/changes/*.rst', 'CHANGES.rst')),
      ('xarray', ('doc/whats-new.rst',)),
      ('cryptography', ('CHANGELOG.rst',)),
    )
  ),
)
