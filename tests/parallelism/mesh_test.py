"""Sizes of a mesh."""

import jax
import pytest

from glm5_jax.parallelism import mesh
from glm5_jax.parallelism.config import MeshConfig


def test_left_over_devices_go_to_the_axis_of_minus_one():
  sizes = mesh.axis_sizes(MeshConfig(fsdp=-1, tensor=4), 32)
  assert sizes['fsdp'] == 8 and sizes['tensor'] == 4


def test_axes_are_of_type_auto():
  made = mesh.make_mesh(MeshConfig(fsdp=4, tensor=2))
  assert set(made.axis_types) == {jax.sharding.AxisType.Auto}
  assert made.shape['fsdp'] == 4 and made.shape['tensor'] == 2


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    (dict(fsdp=3), r'needs 3 devices; there are 8'),
    (dict(fsdp=-1, tensor=3), r'no multiple of that'),
  ],
)
def test_sizes_that_do_not_fit_the_devices_are_refused(config, message):
  with pytest.raises(ValueError, match=message):
    mesh.make_mesh(MeshConfig(**config))


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    (dict(tensor=0), r'MeshConfig.tensor is 0'),
    (dict(data=-1, fsdp=-1), r'more than one axis of size -1'),
    (dict(context=2), r'MeshConfig.context is 2'),
  ],
)
def test_senseless_sizes_are_refused(config, message):
  with pytest.raises(ValueError, match=message):
    MeshConfig(**config)
