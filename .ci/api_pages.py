"""A hook of mkdocs: makes the front page and a reference page a package."""

import pathlib

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File
from mkdocs.structure.files import Files

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ('glm5_jax', 'pallas_kernels')


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Adds pages that no file under docs/ holds."""
  pages = {f'reference/{name}.md': text for name, text in _references()}
  if files.get_file_from_path('index.md') is None:
    pages['index.md'] = _front()
  for path, content in pages.items():
    files.append(File.generated(config, path, content=content))
  return files


def _front() -> str:
  """Returns the README up to its first section, which links nowhere."""
  readme = ROOT / 'README.md'
  text = readme.read_text() if readme.exists() else '# GLM-5 in JAX\n'
  opening = text.split('\n## ')[0]
  lines = [line for line in opening.splitlines() if '](' not in line]
  return '\n'.join(lines)


def _references() -> list[tuple[str, str]]:
  """Returns (name, text) of a page for each folder with modules."""
  pages = []
  for package in PACKAGES:
    for folder in sorted((ROOT / package).rglob('.')):
      modules = sorted(
        path.stem for path in folder.glob('*.py') if path.name != '__init__.py'
      )
      if modules:
        name = '.'.join(folder.relative_to(ROOT).parts)
        entries = ''.join(f'\n::: {name}.{module}\n' for module in modules)
        pages.append((name, f'# {name}\n{entries}'))
  return pages
