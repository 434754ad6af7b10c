"""The only place that makes a mesh.

Axes are of type Auto: the compiler places what the constraints leave open, and
attention and experts take over by `shard_map`. `jax.make_mesh` would default to
Explicit axes, under which every sharded contraction must state its output.
"""

from collections.abc import Sequence
import math

import jax
from jax.sharding import AxisType
from jax.sharding import Mesh

from glm5_jax.parallelism.config import MeshConfig


def axis_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
  """Returns the size of each mesh axis with -1 resolved, outermost first.

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  sizes = dict(config.sizes)
  fixed = math.prod(size for size in sizes.values() if size != -1)
  for name, size in sizes.items():
    if size == -1:
      if num_devices % fixed:
        raise ValueError(
          f'MeshConfig.{name} is -1 (all devices left over), but the other '
          f'axes take {fixed} devices and {num_devices} is no multiple of '
          f'that. Sizes: {config.sizes}.'
        )
      sizes[name] = num_devices // fixed
  total = math.prod(sizes.values())
  if total != num_devices:
    raise ValueError(
      f'The mesh {sizes} needs {total} devices; there are {num_devices}. '
      'Change the sizes, or set one of them to -1.'
    )
  return sizes


def make_mesh(
  config: MeshConfig, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Returns the mesh of `config` over `devices` (default: all).

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = axis_sizes(config, len(devices))
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
    devices=devices,
  )
