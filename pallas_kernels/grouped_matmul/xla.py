"""Grouped matmul as loops over row tiles: what CPU users run.

XLA:CPU expands `jax.lax.ragged_dot` into every row times every matrix, E times
the work. Here a loop over experts slices out one matrix and an inner loop runs
over the tiles of that expert's rows, as many as there are: no tile holds rows
of two experts, and rows past the last group cost nothing. The loops carry the
output and write into it in place, so peak memory is the output and one tile.
"""

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels.varying import vary_like


def _tile_size(num_rows: int, num_groups: int) -> int:
  """Returns rows a tile: a power of two near half a mean group."""
  mean = max(1, num_rows // num_groups)
  tile = 1 << (mean.bit_length() - 1)
  return min(max(tile, 32), 256, num_rows)


def _rows(x: Array, start: Array, tile: int) -> Array:
  return lax.dynamic_slice(x, (start, 0), (tile, x.shape[1]))


def _multiply_tiles(
  x: Array, weights: Array, group_sizes: Array, contract: int
) -> Array:
  """Returns rows times their matrix, contracted over its axis `contract`."""
  num_rows, num_groups = x.shape[0], weights.shape[0]
  width = weights.shape[3 - contract]
  tile = _tile_size(num_rows, num_groups)
  end = jnp.cumsum(group_sizes)
  begin = end - group_sizes

  def group(e: Array, y: Array) -> Array:
    matrix = lax.dynamic_index_in_dim(weights, e, keepdims=False)
    matrix = matrix.astype(jnp.float32)

    def one_tile(j: Array, y: Array) -> Array:
      first = begin[e] + j * tile
      start = jnp.minimum(first, num_rows - tile)
      row = start + jnp.arange(tile)
      product = lax.dot_general(
        _rows(x, start, tile).astype(jnp.float32),
        matrix,
        (((1,), (contract - 1,)), ((), ())),
      ).astype(x.dtype)
      ours = (row >= first) & (row < end[e])
      merged = jnp.where(ours[:, None], product, _rows(y, start, tile))
      return lax.dynamic_update_slice(y, merged, (start, 0))

    return lax.fori_loop(0, -(-group_sizes[e] // tile), one_tile, y)

  y = vary_like(jnp.zeros((num_rows, width), x.dtype), x, weights, group_sizes)
  return lax.fori_loop(0, num_groups, group, y)


def forward(
  x: Float[Array, 'M K'],
  weights: Float[Array, 'E K N'],
  group_sizes: Int[Array, ' E'],
) -> Float[Array, 'M N']:
  """Returns each row times the matrix of its group; zeros past the groups."""
  return _multiply_tiles(x, weights, group_sizes, contract=1)


def rows_gradient(
  grad: Float[Array, 'M N'],
  weights: Float[Array, 'E K N'],
  group_sizes: Int[Array, ' E'],
) -> Float[Array, 'M K']:
  """Returns the gradient of the rows: `grad` times the transposed matrix."""
  return _multiply_tiles(grad, weights, group_sizes, contract=2)


def weights_gradient(
  x: Float[Array, 'M K'],
  grad: Float[Array, 'M N'],
  group_sizes: Int[Array, ' E'],
) -> Float[Array, 'E K N']:
  """Returns, for each group, its rows transposed times their gradients."""
  num_rows, num_groups = x.shape[0], group_sizes.shape[0]
  tile = _tile_size(num_rows, num_groups)
  end = jnp.cumsum(group_sizes)
  begin = end - group_sizes

  def group(e: Array, total: Array) -> Array:
    def one_tile(j: Array, total_KN: Array) -> Array:
      first = begin[e] + j * tile
      start = jnp.minimum(first, num_rows - tile)
      row = start + jnp.arange(tile)
      ours = ((row >= first) & (row < end[e]))[:, None]
      # Both sides, since 0 times a NaN of another group's row is NaN.
      ours_x = jnp.where(ours, _rows(x, start, tile), 0)
      ours_grad = jnp.where(ours, _rows(grad, start, tile), 0)
      return total_KN + lax.dot_general(
        ours_x.astype(jnp.float32),
        ours_grad.astype(jnp.float32),
        (((0,), (0,)), ((), ())),
      )

    zero = jnp.zeros((x.shape[1], grad.shape[1]), jnp.float32)
    zero = vary_like(zero, x, grad, group_sizes)
    total_KN = lax.fori_loop(0, -(-group_sizes[e] // tile), one_tile, zero)
    return lax.dynamic_update_slice(
      total, total_KN.astype(total.dtype)[None], (e, 0, 0)
    )

  shape = (num_groups, x.shape[1], grad.shape[1])
  total = vary_like(jnp.zeros(shape, x.dtype), x, grad, group_sizes)
  return lax.fori_loop(0, num_groups, group, total)
