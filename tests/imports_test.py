import ast
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ('glm5_jax', 'pallas_kernels')
MODULES = sorted(
  '.'.join(path.relative_to(ROOT).with_suffix('').parts)
  for package in PACKAGES
  for path in (ROOT / package).rglob('*.py')
  if path.name != '__init__.py'
)
SCRIPTS = sorted(
  str(path.relative_to(ROOT)) for path in (ROOT / 'experiments').rglob('*.py')
)


@pytest.mark.parametrize('module', MODULES)
def test_module_imports(module):
  importlib.import_module(module)


@pytest.mark.parametrize('script', SCRIPTS)
def test_script_imports(script):
  importlib.import_module('.'.join(pathlib.Path(script).with_suffix('').parts))


def _imported(path: pathlib.Path) -> set[str]:
  """Names that a file imports, `from a import b` as `a` and `a.b`."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      found.add(node.module)
      found |= {f'{node.module}.{alias.name}' for alias in node.names}
  return found


def test_every_module_is_reached_by_a_test_of_its_behaviour():
  """A module that no test reaches, through any import, is dead or untested."""
  files = {
    module: ROOT / (module.replace('.', '/') + '.py') for module in MODULES
  }
  # A package stands for what its `__init__` imports.
  for package in PACKAGES:
    for path in (ROOT / package).rglob('__init__.py'):
      files['.'.join(path.parent.relative_to(ROOT).parts)] = path
  tests = [
    path
    for path in (ROOT / 'tests').rglob('*.py')
    if path.name != pathlib.Path(__file__).name
  ]
  tests += [ROOT / script for script in SCRIPTS]
  reached, waiting = set(), tests
  while waiting:
    for name in _imported(waiting.pop()) & files.keys() - reached:
      reached.add(name)
      waiting.append(files[name])
  assert sorted(set(MODULES) - reached) == []
