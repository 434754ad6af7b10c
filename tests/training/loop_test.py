"""The loop: reports in order, and going on as if nothing had happened."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training import hooks as hooks_module
from glm5_jax.training import loop
from glm5_jax.training import preemption
from glm5_jax.training import state as state_module
from tests.training import toy

ROOT = pathlib.Path(__file__).parents[2]
NUM_STEPS = 8
# float32 sums over a few hundred terms, taken in another order.
LOSS_TOLERANCE = 1e-5
# Of these, the clock decides.
TIMED = {'step_seconds', 'data_seconds', 'tokens_per_second'}


@pytest.fixture(scope='module')
def parts():
  return toy.build()


@pytest.fixture(scope='module')
def uninterrupted(parts, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('uninterrupted')
  ending = toy.train(parts, workdir, NUM_STEPS)
  return state_module.digest(ending.state), _rows(workdir), ending.position


def _rows(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [
    {k: v for k, v in json.loads(line).items() if k not in TIMED}
    for line in lines
  ]


class _Log(hooks_module.Hook):
  """Notes every call."""

  def __init__(self, wanted=()):
    self.calls = []
    self._wanted = wanted

  def on_start(self, step):
    self.calls.append(('start', step))

  def before_step(self, step):
    self.calls.append(('before', step))

  def on_step(self, report):
    self.calls.append(('step', report.step))

  def wants_state(self, step):
    return step in self._wanted

  def on_state(self, snapshot):
    self.calls.append(('state', snapshot.step, int(snapshot.state.step)))
    return {'score': 1.0}

  def on_results(self, step, results):
    self.calls.append(('results', step, results['score']))

  def on_preempted(self, snapshot):
    self.calls.append(('preempted', snapshot.step))

  def close(self):
    self.calls.append(('close',))


class _Dies(hooks_module.Hook):
  """Ends the run at a step, as a crash would."""

  def __init__(self, step):
    self._step = step

  def on_step(self, report):
    if report.step == self._step:
      raise KeyboardInterrupt


def test_hooks_hear_of_a_step_while_the_next_one_runs(parts, tmp_path):
  log = _Log(wanted=(2,))
  toy.train(parts, tmp_path, 4, hooks=[log], every_steps=100)
  assert log.calls == [
    ('start', 0),
    ('before', 1),
    ('before', 2),
    ('step', 1),
    ('step', 2),
    ('state', 2, 2),
    ('results', 2, 1.0),
    ('before', 3),
    ('before', 4),
    ('step', 3),
    ('step', 4),
    ('close',),
  ]


@pytest.mark.parametrize('dies_at', [2, 4, 7])
def test_a_crashed_run_ends_as_an_uninterrupted_one(
  parts, uninterrupted, tmp_path, dies_at
):
  with pytest.raises(KeyboardInterrupt):
    toy.train(parts, tmp_path, NUM_STEPS, hooks=[_Dies(dies_at)])
  log = _Log()
  ending = toy.train(parts, tmp_path, NUM_STEPS, hooks=[log])
  # Checkpoints are written every three steps.
  assert log.calls[0] == ('start', (dies_at - 1) // 3 * 3)
  digest, rows, position = uninterrupted
  assert state_module.digest(ending.state) == digest
  assert ending.position == position
  assert _rows(tmp_path) == rows


def test_a_row_torn_by_a_kill_is_written_anew(parts, uninterrupted, tmp_path):
  with pytest.raises(KeyboardInterrupt):
    toy.train(parts, tmp_path, NUM_STEPS, hooks=[_Dies(5)])
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 6, "lo')
  toy.train(parts, tmp_path, NUM_STEPS)
  assert _rows(tmp_path) == uninterrupted[1]


def test_a_finished_run_has_nothing_left_to_do(parts, uninterrupted, tmp_path):
  toy.train(parts, tmp_path, NUM_STEPS)
  ending = toy.train(parts, tmp_path, NUM_STEPS)
  assert ending.reason == 'finished'
  assert ending.report is None
  assert state_module.digest(ending.state) == uninterrupted[0]


def test_stopping_saves_and_the_next_run_goes_on(
  parts, uninterrupted, tmp_path
):
  log = _Log()
  ending = toy.train(
    parts,
    tmp_path,
    NUM_STEPS,
    hooks=[log],
    every_steps=100,
    should_stop=lambda step: step >= 4,
  )
  assert ending.reason == 'preempted'
  assert log.calls[-3:] == [('step', 4), ('preempted', 4), ('close',)]
  ending = toy.train(parts, tmp_path, NUM_STEPS, every_steps=100)
  assert ending.reason == 'finished'
  assert state_module.digest(ending.state) == uninterrupted[0]
  assert _rows(tmp_path) == uninterrupted[1]


def test_a_step_that_is_not_finite_ends_the_run(parts, tmp_path):
  batches = toy.Batches()
  batches.poisoned = 5
  with pytest.raises(hooks_module.NonFiniteError) as error:
    toy.train(parts, tmp_path, NUM_STEPS, batches=batches)
  path = tmp_path / 'refused' / 'step_5_host_0.npz'
  assert 'Step 5 was refused: loss nan' in str(error.value)
  assert str(path) in str(error.value)
  saved = np.load(path)
  again = toy.Batches()
  again.poisoned = again.step = 5
  again.step = 4
  np.testing.assert_array_equal(saved['tokens'], next(again).tokens)
  assert np.isnan(saved['weights'][0, 0])
  # The refused step is on record, and no checkpoint holds it or a later one.
  assert [row['step'] for row in _rows(tmp_path)] == [1, 2, 3, 4, 5]
  assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['3']


def test_data_that_ends_early_is_an_error(parts, tmp_path):
  batches = toy.Batches(num_steps=3)
  with pytest.raises(ValueError, match='ended after 3 of 8 steps'):
    toy.train(parts, tmp_path, NUM_STEPS, batches=batches)


def test_hooks_are_closed_after_an_error_too(parts, tmp_path):
  log = _Log()
  with pytest.raises(KeyboardInterrupt):
    toy.train(parts, tmp_path, NUM_STEPS, hooks=[log, _Dies(2)])
  assert log.calls[-1] == ('close',)


def test_a_step_that_compiles_has_no_duration(parts, tmp_path):
  reports = []

  class Keep(hooks_module.Hook):
    def on_step(self, report):
      reports.append(report)

  toy.train(parts, tmp_path, 4, hooks=[Keep()])
  assert reports[0].seconds is None
  assert all(report.seconds > 0 for report in reports[1:])
  assert reports[-1].tokens == sum(report.step_tokens for report in reports)


def test_the_notice_remembers_sigterm_and_gives_the_handler_back():
  before = signal.getsignal(signal.SIGTERM)
  with preemption.PreemptionNotice() as notice:
    assert not notice(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice(1)
  assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_saves_and_exits_with_0_and_the_run_goes_on(
  parts, tmp_path, uninterrupted
):
  # The same devices and the same compiled step as this process has.
  environment = {
    **os.environ,
    'JAX_NUM_CPU_DEVICES': '8',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
  }
  run = subprocess.Popen(
    [sys.executable, '-m', 'tests.training.toy', tmp_path, '8', '0.3'],
    stdout=subprocess.PIPE,
    text=True,
    cwd=ROOT,
    env=environment,
  )
  for line in run.stdout:
    if line == 'step 4\n':
      run.send_signal(signal.SIGTERM)
      break
  output, _ = run.communicate(timeout=120)
  assert run.returncode == 0
  assert 'preempted' in output
  log = _Log()
  ending = toy.train(parts, tmp_path, NUM_STEPS, hooks=[log])
  assert log.calls[0] in (('start', 4), ('start', 5))
  assert state_module.digest(ending.state) == uninterrupted[0]


def test_a_run_goes_on_from_eight_devices_to_one(
  parts, uninterrupted, tmp_path
):
  eight = toy.build(MeshConfig(fsdp=2, expert=2, tensor=2), 8)
  toy.train(eight, tmp_path, 4, every_steps=4)
  toy.train(parts, tmp_path, NUM_STEPS)
  losses = [row['loss'] for row in _rows(tmp_path)]
  expected = [row['loss'] for row in uninterrupted[1]]
  np.testing.assert_allclose(losses, expected, atol=LOSS_TOLERANCE)


def test_nothing_is_done_when_all_steps_are_done(parts, tmp_path):
  state = parts.initial()
  ending = loop.train(
    state,
    toy.Batches(),
    parts.step,
    position=loop.Position(4, 99),
    num_steps=4,
    place=parts.place,
    should_stop=lambda step: True,
  )
  assert (ending.reason, ending.position) == ('finished', loop.Position(4, 99))
