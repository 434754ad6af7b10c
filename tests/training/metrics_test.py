"""Rows hold the numbers that the table names."""

import numpy as np
import pytest

from glm5_jax.models.losses import LossMetrics
from glm5_jax.training import metrics
from tests.training.hooks_test import report


def test_a_row_names_the_busiest_expert_of_each_layer():
  row = metrics.step_row(report(3))
  assert row['step'] == 3
  assert row['tokens'] == 240
  assert row['loss'] == pytest.approx(5.5)
  assert row['cross_entropy'] == pytest.approx(5.0)
  assert row['expert_load'] == pytest.approx([1.5, 1.0])
  assert row['max_expert_load'] == pytest.approx(1.5)


def test_every_name_in_a_row_is_explained():
  window = metrics.Window()
  window.add(report(1))
  names = {*metrics.step_row(report(1)), *window.rates()}
  assert names <= set(metrics.METRICS)
  # The model's own metrics, but for the two that a row shows otherwise.
  own = set(LossMetrics._fields) - {'num_tokens'}
  assert own <= set(metrics.METRICS)


def test_an_idle_layer_has_no_load():
  load = metrics.relative_load(np.zeros((1, 4)))
  np.testing.assert_array_equal(load, np.zeros((1, 4)))


def test_a_window_without_timed_steps_gives_no_speed():
  window = metrics.Window()
  window.add(report(1, seconds=None))
  assert set(window.rates()) == {'data_seconds'}
