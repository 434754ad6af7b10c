"""Notebooks run from top to bottom, and are kept without outputs."""

import json
import pathlib

import matplotlib
import pytest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))
# The settings that make a notebook's run as short as a test's.
SHORT = """
import dataclasses as _d
_job = experiment.job
_stage = _d.replace(_job.stages[0], num_steps=8, batch_size=8)
_hooks = _d.replace(_job.hooks, log_every_steps=2)
_schedule = _d.replace(_job.optimizer.schedule, warmup_steps=2)
_optimizer = _d.replace(_job.optimizer, schedule=_schedule)
_data = _d.replace(
  _job.data, root=ROOT, cache=str(FOLDER / 'prepared'), tokenizer=_d.replace(
    _job.data.tokenizer, sample_bytes=50_000))
experiment = _d.replace(experiment, mesh=_d.replace(
  experiment.mesh, fsdp=1, data=-1), job=_d.replace(
  _job, stages=(_stage,), hooks=_hooks, optimizer=_optimizer, data=_data))
"""


def _code_cells(path):
  notebook = json.loads(path.read_text())
  return [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
  for cell in _code_cells(path):
    assert cell['outputs'] == [] and cell['execution_count'] is None


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_from_top_to_bottom(path, tmp_path, monkeypatch):
  matplotlib.use('Agg')
  monkeypatch.chdir(tmp_path)
  names = {'ROOT': str(ROOT), 'FOLDER': tmp_path}
  for cell in _code_cells(path):
    if 'colab' in cell['metadata'].get('tags', ()):
      continue
    source = ''.join(cell['source'])
    exec(compile(source, path.name, 'exec'), names)
    if 'experiment = ' in source:
      exec(SHORT, names)
  report = json.loads((tmp_path / 'runs/notebook/report.json').read_text())
  assert 0 < report['heldout_bits_per_byte'] < 16
  assert (tmp_path / 'runs/notebook/loss.png').stat().st_size > 1000
