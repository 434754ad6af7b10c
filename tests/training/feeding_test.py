"""Rows reach the devices that hold them."""

import numpy as np
import pytest

from glm5_jax.data.config import LengthStage
from glm5_jax.models import presets
from glm5_jax.parallelism import mesh as mesh_module
from glm5_jax.parallelism.axis_rules import AxisRules
from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training import feeding


@pytest.mark.parametrize(
  ('config', 'num_shards'),
  [
    (MeshConfig(fsdp=8), 8),
    (MeshConfig(data=2, fsdp=2, expert=2), 8),
    (MeshConfig(fsdp=2, tensor=4), 2),
    (MeshConfig(fsdp=1, tensor=8), 1),
  ],
)
def test_rows_divide_over_all_axes_but_tensor(config, num_shards):
  feed = feeding.make_feed(mesh_module.make_mesh(config), AxisRules())
  assert feed.num_shards == num_shards
  assert (feed.host_index, feed.num_hosts) == (0, 1)
  batch = np.arange(16 * 4, dtype=np.int32).reshape(16, 4)
  placed = feed.place({'tokens': batch})['tokens']
  np.testing.assert_array_equal(placed, batch)
  assert placed.addressable_shards[0].data.shape == (16 // num_shards, 4)


@pytest.mark.parametrize(
  ('rows', 'host', 'expected'),
  [
    # Each host holds half of the rows.
    ({0: {0, 1}, 1: {2, 3}}, 0, (0, 2)),
    ({0: {0, 1}, 1: {2, 3}}, 1, (1, 2)),
    # The model divides over hosts: both hold every row.
    ({0: {0, 1}, 1: {0, 1}}, 1, (0, 1)),
    # Both: two hosts a model, two models.
    ({0: {0}, 1: {0}, 2: {1}, 3: {1}}, 3, (1, 2)),
  ],
)
def test_hosts_with_the_same_rows_supply_the_same(rows, host, expected):
  assert feeding.supplied_part(rows, host) == expected


def test_rows_longer_than_the_model_are_refused_before_anything_runs():
  stages = (LengthStage(8192, 8, 1),)
  with pytest.raises(ValueError, match=r'8192.*max_length = 4096'):
    feeding.check_stages(stages, presets.tiny, num_shards=1, microbatches=1)


def test_batches_that_do_not_divide_are_refused_before_anything_runs():
  stages = (LengthStage(32, 12, 1),)
  with pytest.raises(ValueError, match='multiple of 8 devices'):
    feeding.check_stages(stages, presets.tiny, num_shards=8, microbatches=1)
  feeding.check_stages(stages, presets.tiny, num_shards=4, microbatches=3)
