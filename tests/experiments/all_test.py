"""Every experiment builds, reads as its golden text says, and runs small."""

import ast
import json
import math
import pathlib

import jax
import pytest

from glm5_jax import experiment as experiment_lib
from glm5_jax import explain
from glm5_jax import launch
from glm5_jax import overrides

ROOT = pathlib.Path(__file__).parent.parent.parent
GOLDEN = pathlib.Path(__file__).parent / 'golden'
FILES = sorted((ROOT / 'experiments').glob('*.py'))
NAMES = [path.stem for path in FILES]


def _load(name: str) -> experiment_lib.Experiment:
  return launch.load(str(ROOT / 'experiments' / f'{name}.py'))


@pytest.mark.parametrize('name', NAMES)
def test_golden_text(name, request):
  text = experiment_lib.to_text(_load(name))
  path = GOLDEN / f'{name}.txt'
  if request.config.getoption('--update-golden'):
    path.write_text(text)
  assert text == path.read_text(), 'If this is meant: make golden'


def test_no_golden_text_is_left_over():
  assert sorted(path.stem for path in GOLDEN.glob('*.txt')) == NAMES


@pytest.mark.parametrize('name', NAMES)
def test_every_line_is_an_override_that_changes_nothing(name):
  experiment = _load(name)
  lines = experiment_lib.to_text(experiment).splitlines()
  assert lines == sorted(set(lines), key=lines.index)
  for line in lines:
    path, _, value = line.partition(' = ')
    if value.startswith(("'", '"')):
      value = ast.literal_eval(value)
    # Naming a class anew would reset its fields.
    if not value[:1].isupper() or value in ('None', 'True', 'False'):
      assert overrides.apply(experiment, [f'{path}={value}']) == experiment


@pytest.mark.parametrize('name', NAMES)
def test_name_is_the_file_s(name):
  assert _load(name).name == name


@pytest.mark.parametrize('name', NAMES)
def test_docstring_has_the_command(name):
  source = (ROOT / 'experiments' / f'{name}.py').read_text()
  docstring = ast.get_docstring(ast.parse(source))
  assert docstring is not None
  command = f'--config=experiments/{name}.py'
  assert command in docstring or f'make {name}' in docstring


@pytest.mark.parametrize('name', NAMES)
def test_the_state_divides_evenly_over_the_mesh(name):
  experiment = _load(name)
  axes = experiment.mesh.sizes.values()
  # -1 takes what there is, one device at least.
  sizes = explain.checked_sizes(experiment, math.prod(map(abs, axes)))
  layout = explain.layout(experiment, sizes)
  parts = math.prod(sizes.values())
  for leaves in (layout.parameters, layout.optimizer):
    total = sum(leaf.num_bytes for leaf in leaves)
    here = sum(leaf.bytes_per_device for leaf in leaves)
    # Norms and counts are whole everywhere; they are far less than this.
    assert here <= 1.1 * total / parts


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_two_small_steps_on_eight_devices(name, tmp_path):
  experiment = experiment_lib.shrink(_load(name), tmp_path)
  assert jax.device_count() == 8
  report = launch.run(experiment, tmp_path / 'run')
  assert report is not None
  assert report['steps'] == 2
  assert report['tokens'] > 0
  assert math.isfinite(report['heldout_bits_per_byte'])
  saved = json.loads((tmp_path / 'run' / 'report.json').read_text())
  assert saved['tokens'] == report['tokens']
  assert (tmp_path / 'run' / 'config.txt').read_text() == (
    experiment_lib.to_text(experiment)
  )
