"""Pictures show the curves that the rows hold."""

import json

import numpy as np

from glm5_jax.training import plots


def _rows(num_steps=60):
  rows = []
  for step in range(1, num_steps + 1):
    rows.append(
      {
        'step': step,
        'loss': 5.0 / step,
        'cross_entropy': 4.0 / step,
        'mtp_cross_entropy': 0.0,
        'expert_load': [2.0, 1.5],
      }
    )
    if step % 20 == 0:
      rows.append({'step': step, 'evaluation/bits_per_byte': 2.0 / step})
  return rows


def test_pictures_are_drawn_from_the_rows(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in _rows()))
  plots.draw(path, tmp_path, np.ones((2, 4)))
  for name in (plots.LOSS_FILE, plots.LOAD_FILE):
    assert (tmp_path / name).read_bytes().startswith(b'\x89PNG')


def test_nothing_is_drawn_without_rows(tmp_path):
  plots.draw(tmp_path / 'metrics.jsonl', tmp_path, None)
  assert list(tmp_path.iterdir()) == []


def test_the_loss_picture_has_evaluations_as_points_and_no_empty_curve():
  losses, evaluations = plots.loss_figure(_rows()).axes
  # The curve itself and its running mean; MTP is off, so it has none.
  assert len(losses.lines) == 2
  np.testing.assert_allclose(losses.lines[0].get_ydata()[:2], [4.0, 2.0])
  (points,) = evaluations.lines
  np.testing.assert_array_equal(points.get_xdata(), [20, 40, 60])


def test_the_load_picture_has_a_curve_for_each_layer():
  load = np.array([[1.0, 3.0], [2.0, 2.0]])
  left, right, _ = plots.load_figure(_rows(), load).axes
  labels = [line.get_label() for line in left.lines[:-1]]
  assert labels == ['layer 0', 'layer 1']
  np.testing.assert_allclose(
    right.images[0].get_array(), [[0.5, 1.5], [1.0, 1.0]]
  )


def test_a_running_mean_of_a_line_stays_between_its_ends():
  values = np.linspace(0, 1, 200)
  smooth = plots._smooth(values)
  assert len(smooth) == 200
  assert np.all(np.diff(smooth) >= 0)
  assert smooth[0] == 0
