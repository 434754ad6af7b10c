"""Hooks do what they are for, when they are asked to."""

from unittest import mock

import numpy as np
import pytest

from glm5_jax.training import hooks
from glm5_jax.training import metrics
from glm5_jax.training.checkpoints import Checkpoints
from glm5_jax.training.config import CheckpointConfig
from glm5_jax.training.step import StepMetrics
from tests.training import toy


def report(step, *, is_finite=True, seconds=0.5):
  """A step's report with loads of 10, 30, 20, 20 and 20, 20, 20, 20."""
  parts = toy.Metrics(
    cross_entropy=np.float32(2.0 + step),
    num_tokens=np.float32(80),
    expert_load=np.array([[10, 30, 20, 20], [20, 20, 20, 20]], np.float32),
  )
  return metrics.StepReport(
    step=step,
    tokens=80 * step,
    metrics=StepMetrics(
      loss=np.float32(2.5 + step),
      grad_norm=np.float32(0.5),
      is_finite=np.bool_(is_finite),
      parts=parts,
    ),
    batch=toy.Batch(np.arange(4), np.ones(4)),
    seconds=seconds,
    data_seconds=0.25,
  )


class Memory:
  """A writer that keeps rows."""

  def __init__(self):
    self.rows = []
    self.is_closed = False

  def write(self, row):
    self.rows.append(row)

  def close(self):
    self.is_closed = True


def _snapshot(step):
  return hooks.Snapshot(step, 0, toy.build().initial(), lambda: {'step': step})


def test_rows_come_every_so_many_steps_with_the_rates_between_them():
  memory = Memory()
  recorder = hooks.Recorder(
    [memory], every_steps=2, learning_rates={'learning_rate': lambda s: s / 10}
  )
  recorder.on_start(0)
  recorder.on_step(report(1, seconds=None))
  for step in (2, 3, 4):
    recorder.on_step(report(step))
  recorder.on_results(4, {'bits_per_byte': 1.5})
  recorder.close()
  assert [row['step'] for row in memory.rows] == [2, 4, 4]
  first, second, results = memory.rows
  # The rate of the update that led to step 2 is that of one update done.
  assert first['learning_rate'] == pytest.approx(0.1)
  # Step 1 compiled: it counts for no speed.
  assert first['tokens_per_second'] == pytest.approx(160)
  assert second['step_seconds'] == pytest.approx(0.5)
  assert results == {'step': 4, 'evaluation/bits_per_byte': 1.5}
  assert memory.is_closed


def test_a_refused_step_is_recorded_whatever_its_number():
  memory = Memory()
  recorder = hooks.Recorder([memory], every_steps=10, learning_rates={})
  recorder.on_step(report(3, is_finite=False))
  assert [row['step'] for row in memory.rows] == [3]


def test_evaluation_comes_on_time_and_after_the_last_step():
  evaluation = hooks.Evaluation(
    lambda state: {'steps': float(state.step)}, every_steps=4, num_steps=10
  )
  wanted = [step for step in range(1, 11) if evaluation.wants_state(step)]
  assert wanted == [4, 8, 10]
  assert evaluation.on_state(_snapshot(4)) == {'steps': 0.0}


def test_the_profiler_traces_its_steps(tmp_path):
  profiler = hooks.Profiler(tmp_path, (2, 3))
  for step in (1, 2, 3):
    profiler.before_step(step)
    if profiler.wants_state(step):
      profiler.on_state(_snapshot(step))
  profiler.close()
  assert list(tmp_path.rglob('*.xplane.pb'))


def _keeper():
  """Checkpoints that only note what is saved."""
  keeper = mock.create_autospec(Checkpoints, instance=True)
  keeper.config = CheckpointConfig(every_steps=3)
  return keeper


def _saved(keeper):
  return [call.args[1] for call in keeper.save.call_args_list]


def test_checkpoints_are_due_on_time_and_after_the_last_step():
  saver = hooks.Saver(_keeper(), num_steps=7, seed=1, config_text='')
  assert [s for s in range(1, 8) if saver.wants_state(s)] == [3, 6, 7]


def test_a_preempted_run_is_saved_once_and_waited_for():
  keeper = _keeper()
  saver = hooks.Saver(keeper, num_steps=7, seed=1, config_text='text')
  saver.on_start(0)
  saver.on_state(_snapshot(3))
  saver.on_preempted(_snapshot(3))
  assert [progress.step for progress in _saved(keeper)] == [3]
  saver.on_preempted(_snapshot(4))
  assert [progress.step for progress in _saved(keeper)] == [3, 4]
  assert keeper.wait.call_count == 2
  latest = _saved(keeper)[-1]
  assert (latest.seed, latest.config, latest.data) == (1, 'text', {'step': 4})


def test_a_run_stopped_before_its_first_step_writes_nothing_anew():
  keeper = _keeper()
  saver = hooks.Saver(keeper, num_steps=7, seed=1, config_text='')
  saver.on_start(3)
  saver.on_preempted(_snapshot(3))
  assert _saved(keeper) == []
