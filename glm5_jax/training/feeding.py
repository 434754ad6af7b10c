"""How each host's rows become the batch of the whole mesh."""

from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
import dataclasses
import math
from typing import Any

import jax
from jaxtyping import Array
import numpy as np

from glm5_jax.data.config import LengthStage
from glm5_jax.models.config import ModelConfig
from glm5_jax.parallelism import partitioning
from glm5_jax.parallelism.axis_rules import AxisRules


@dataclasses.dataclass(frozen=True)
class Feed:
  """Where batches lie on a mesh, and which rows this host supplies.

  Hosts that hold the same rows (a model divided over hosts) supply the same.

  Attributes:
    sharding: of `[B, T]` arrays.
    num_shards: pieces that rows divide into over the devices.
    host_index: which part of a batch this host supplies.
    num_hosts: number of such parts.
  """

  sharding: jax.sharding.NamedSharding
  num_shards: int
  host_index: int
  num_hosts: int

  def place(self, batch: Any) -> Any:
    """Returns the mesh's batch, given this host's rows of it."""

    def one(x: np.ndarray) -> Array:
      shape = (x.shape[0] * self.num_hosts, *x.shape[1:])
      return jax.make_array_from_process_local_data(self.sharding, x, shape)

    return jax.tree.map(one, batch)


def make_feed(mesh: jax.sharding.Mesh, rules: AxisRules) -> Feed:
  """Returns how batches reach a mesh."""
  sharding = partitioning.batch_sharding(mesh, rules)
  num_shards = math.prod(mesh.shape[axis] for axis in rules.mesh_axes('batch'))
  rows: dict[int, set[int]] = {}
  # As long as the mesh is large, rows divide over any axis.
  indices: Mapping[Any, Any] = sharding.devices_indices_map(
    (num_shards, mesh.size)
  )
  for device, index in indices.items():
    first, _, _ = index[0].indices(num_shards)
    rows.setdefault(device.process_index, set()).add(first)
  host_index, num_hosts = supplied_part(rows, jax.process_index())
  return Feed(sharding, num_shards, host_index, num_hosts)


def supplied_part(
  rows: Mapping[int, AbstractSet[int]], host: int
) -> tuple[int, int]:
  """Returns which part of a batch a host supplies, and the number of parts.

  Args:
    rows: pieces of the batch that each host's devices hold.
    host: the host in question.
  """
  parts = sorted({tuple(sorted(held)) for held in rows.values()})
  return parts.index(tuple(sorted(rows[host]))), len(parts)


def check_stages(
  stages: Sequence[LengthStage],
  model: ModelConfig,
  *,
  num_shards: int,
  microbatches: int,
) -> None:
  """Checks that every batch fits model and mesh.

  Raises:
    ValueError: rows are too long, or do not divide over the devices.
  """
  for stage in stages:
    if stage.sequence_length > model.max_length:
      raise ValueError(
        f'LengthStage.sequence_length is {stage.sequence_length}; the model '
        f'takes at most ModelConfig.max_length = {model.max_length}. Shorten '
        'the stage or raise max_length.'
      )
    if stage.batch_size % (num_shards * microbatches):
      raise ValueError(
        f'LengthStage.batch_size is {stage.batch_size}; it must be a multiple '
        f'of {num_shards} devices that batches divide over x {microbatches} '
        'microbatches.'
      )
