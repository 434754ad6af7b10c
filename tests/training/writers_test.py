"""Rows reach their files, and only rows of steps that count stay there."""

from tensorboard.backend.event_processing import event_accumulator

from glm5_jax.training import writers


def _steps(path):
  return [row['step'] for row in writers.read_rows(path)]


def test_rows_past_the_restored_step_are_dropped(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  writer = writers.JsonlWriter(path, 0)
  for step in range(1, 6):
    writer.write({'step': step, 'loss': 1.0 / step})
  writer.close()
  writer = writers.JsonlWriter(path, 3)
  assert _steps(path) == [1, 2, 3]
  writer.write({'step': 4, 'loss': 0.0})
  assert _steps(path) == [1, 2, 3, 4]
  writer.close()


def test_a_torn_last_line_is_no_row(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"step": 2, "lo')
  assert _steps(path) == [1]
  writers.JsonlWriter(path, 1).close()
  assert path.read_text() == '{"step": 1}\n'


def test_rows_are_on_disk_as_soon_as_they_are_written(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  writer = writers.JsonlWriter(path, 0)
  writer.write({'step': 1})
  assert _steps(path) == [1]
  writer.close()


def test_a_missing_file_has_no_rows(tmp_path):
  assert _steps(tmp_path / 'none.jsonl') == []


def test_tensorboard_shows_no_step_of_a_killed_run_twice(tmp_path):
  first = writers.TensorboardWriter(tmp_path, 0)
  for step in range(1, 6):
    first.write({'step': step, 'loss': 1.0, 'expert_load': [1.5, 1.25]})
  first.close()
  second = writers.TensorboardWriter(tmp_path, 3)
  second.write({'step': 4, 'loss': 2.0})
  second.close()
  events = event_accumulator.EventAccumulator(str(tmp_path))
  events.Reload()
  losses = {e.step: e.value for e in events.Scalars('loss')}
  assert losses == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}
  assert [e.value for e in events.Scalars('expert_load/layer_01')] == [1.25] * 3
