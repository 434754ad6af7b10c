"""No file and no function grows past what a reader holds in mind."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
FILE_LINES, FUNCTION_LINES = 400, 60
KERNEL_FILE_LINES, KERNEL_FUNCTION_LINES = 600, 120
EXPERIMENT_LINES = 100
KERNELS = ('tpu.py', 'gpu.py')

# What is larger for now: path, or path:function, to its lines on the date
# given. Entries may shrink and go; none is added, and none may grow.
ALLOWED: dict[str, int] = {}


def _sources() -> list[pathlib.Path]:
  folders = ('glm5_jax', 'pallas_kernels', 'experiments', 'tests')
  return sorted(
    path for folder in folders for path in (ROOT / folder).rglob('*.py')
  )


def _limits(path: pathlib.Path) -> tuple[int, int]:
  if path.parent == ROOT / 'experiments':
    return EXPERIMENT_LINES, FUNCTION_LINES
  if path.name in KERNELS and ROOT / 'pallas_kernels' in path.parents:
    return KERNEL_FILE_LINES, KERNEL_FUNCTION_LINES
  return FILE_LINES, FUNCTION_LINES


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
  """Lines of a docstring, which may take what it needs."""
  first = node.body[0]
  if ast.get_docstring(node) is None:
    return 0
  return (first.end_lineno or 0) - first.lineno + 1


def oversized(path: pathlib.Path, source: str) -> dict[str, int]:
  """Returns what of a file is too long, with its lines."""
  max_file, max_function = _limits(path)
  name = str(path.relative_to(ROOT))
  found = {}
  num_lines = len(source.splitlines())
  if num_lines > max_file:
    found[name] = num_lines
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      length = (node.end_lineno or 0) - node.lineno + 1
      length -= _docstring_lines(node)
      if length > max_function:
        found[f'{name}:{node.name}'] = length
  return found


def test_files_and_functions_stay_small():
  found: dict[str, int] = {}
  for path in _sources():
    found |= oversized(path, path.read_text())
  grown = {
    name: lines for name, lines in found.items() if lines > ALLOWED.get(name, 0)
  }
  assert grown == {}


def test_the_allow_list_only_shrinks():
  found: dict[str, int] = {}
  for path in _sources():
    found |= oversized(path, path.read_text())
  stale = {
    name: lines for name, lines in ALLOWED.items() if found.get(name) != lines
  }
  assert stale == {}, 'Lower these entries of ALLOWED, or take them out.'


def test_the_gate_sees_a_long_function_and_a_long_file():
  path = ROOT / 'glm5_jax' / 'x.py'
  body = '\n'.join(f'  x{i} = {i}' for i in range(FILE_LINES))
  found = oversized(path, f'def f():\n{body}\n')
  assert set(found) == {'glm5_jax/x.py', 'glm5_jax/x.py:f'}
  lines = '\n' * FUNCTION_LINES
  assert oversized(path, f"def f():\n  '''{lines}'''\n  return 1\n") == {}
