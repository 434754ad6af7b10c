"""How token rows travel to the devices that hold their experts, and back.

Called inside `shard_map`. Every function takes the mesh axes that experts
divide over; without any (one device) they change nothing.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int
from jaxtyping import Shaped

from glm5_jax.parallelism.axis_rules import AxisRules
from pallas_kernels.varying import vary_like


def active_axes(name: str, rules: AxisRules) -> tuple[str, ...]:
  """Returns the mesh axes of a logical axis; none outside a mesh."""
  if jax.sharding.get_abstract_mesh().empty:
    return ()
  return rules.mesh_axes(name)


def num_shards(axes: tuple[str, ...]) -> int:
  """Returns into how many pieces `axes` divide an array."""
  return math.prod(jax.lax.axis_size(axis) for axis in axes)


def shard_index(axes: tuple[str, ...]) -> Int[Array, '']:
  """Returns which of the pieces is here."""
  if not axes:
    return jnp.zeros((), jnp.int32)
  return jnp.asarray(jax.lax.axis_index(axes), jnp.int32)


def all_gather(
  x: Shaped[Array, 'M *rest'], axes: tuple[str, ...]
) -> Shaped[Array, 'M_all *rest']:
  """Joins the pieces of the first dimension."""
  if not axes:
    return x
  return jax.lax.all_gather(x, axes, axis=0, tiled=True)


def reduce_scatter(
  x: Float[Array, 'M_all D'], axes: tuple[str, ...]
) -> Float[Array, 'M D']:
  """Adds up over `axes` and leaves each device its own rows."""
  if not axes:
    return x
  return jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)


def reduce_sum(x: Float[Array, 'M D'], axes: tuple[str, ...]) -> Array:
  """Adds up over `axes`."""
  return jax.lax.psum(x, axes) if axes else x


class Exchange(NamedTuple):
  """The bookkeeping of one all-to-all, needed again for the way back.

  Attributes:
    send_offsets: first row of each destination's rows here, `[shards]`.
    send_sizes: rows for each destination, `[shards]`.
    receive_sizes: rows from each source, `[shards]`.
  """

  send_offsets: Int[Array, ' shards']
  send_sizes: Int[Array, ' shards']
  receive_sizes: Int[Array, ' shards']


def plan_exchange(
  send_sizes: Int[Array, ' shards'], axes: tuple[str, ...]
) -> Exchange:
  """Tells every device how many rows it will receive from each."""
  offsets = jnp.cumsum(send_sizes) - send_sizes
  received = jax.lax.all_to_all(send_sizes, axes, 0, 0, tiled=True)
  return Exchange(offsets, send_sizes, received)


def _is_ragged() -> bool:
  # XLA:CPU has no ragged all-to-all; the padded one there is equal, row by row.
  return jax.default_backend() != 'cpu'


def send(
  rows: Shaped[Array, 'C *rest'],
  exchange: Exchange,
  slots: int,
  axes: tuple[str, ...],
) -> Shaped[Array, 'C_received *rest']:
  """Sends contiguous runs of rows; source s's arrive from row `s * slots` on.

  Args:
    rows: sorted by destination.
    exchange: sizes of the runs.
    slots: most rows that one device may send to another.
    axes: mesh axes to travel over.
  """
  shards = exchange.send_sizes.shape[0]
  if not _is_ragged():
    index = exchange.send_offsets[:, None] + jnp.arange(slots)[None]
    filled = jnp.arange(slots)[None] < exchange.send_sizes[:, None]
    padded = _masked_rows(rows, index, filled)
    padded = jax.lax.all_to_all(padded, axes, 0, 0, tiled=True)
    return padded.reshape(shards * slots, *rows.shape[1:])
  here = shard_index(axes)
  return jax.lax.ragged_all_to_all(
    rows,
    _like(rows, shards * slots),
    exchange.send_offsets,
    exchange.send_sizes,
    jnp.broadcast_to(here * slots, (shards,)),
    exchange.receive_sizes,
    axis_name=axes[0] if len(axes) == 1 else axes,
  )


def send_back(
  rows: Shaped[Array, 'C_received *rest'],
  exchange: Exchange,
  num_rows: int,
  slots: int,
  axes: tuple[str, ...],
) -> Shaped[Array, 'C *rest']:
  """Undoes `send`: every row returns to the place it was sent from."""
  shards = exchange.send_sizes.shape[0]
  if not _is_ragged():
    padded = rows.reshape(shards, slots, *rows.shape[1:])
    padded = jax.lax.all_to_all(padded, axes, 0, 0, tiled=True)
    ends = exchange.send_offsets + exchange.send_sizes
    row = jnp.arange(num_rows)
    source = jnp.searchsorted(ends, row, side='right')
    source = jnp.minimum(source, shards - 1)
    slot = row - exchange.send_offsets[source]
    filled = row < ends[-1]
    return _masked_rows(
      padded.reshape(shards * slots, *rows.shape[1:]),
      source * slots + slot,
      filled,
    )
  offsets_there = jax.lax.all_to_all(
    exchange.send_offsets, axes, 0, 0, tiled=True
  )
  return jax.lax.ragged_all_to_all(
    rows,
    _like(rows, num_rows),
    jnp.arange(shards, dtype=jnp.int32) * slots,
    exchange.receive_sizes,
    offsets_there,
    exchange.send_sizes,
    axis_name=axes[0] if len(axes) == 1 else axes,
  )


def _like(rows: Array, num_rows: int) -> Array:
  """Returns zeros that differ over the same mesh axes as `rows`."""
  return vary_like(jnp.zeros((num_rows, *rows.shape[1:]), rows.dtype), rows)


def _masked_rows(rows: Array, index: Array, filled: Array) -> Array:
  """Gathers rows; zeros where not `filled`."""
  index = jnp.where(filled, index, 0)
  mask = filled.reshape(filled.shape + (1,) * (rows.ndim - 1))
  return jnp.where(mask, rows[index], 0)
