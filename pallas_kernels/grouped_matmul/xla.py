"""Grouped matmul as loops over row tiles: what CPU users run.

XLA:CPU expands `jax.lax.ragged_dot` into every row times every matrix, E times
the work. Here a loop over the groups takes one matrix out and inner loops run
over tiles of that group's rows, as many as there are, so that no tile serves
two groups and rows past the last group cost nothing. What a group leaves after
its full tiles is rounded up to a quarter of a tile. The loops carry the result
and write into it in place.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import functools

from jax import lax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels.varying import vary_like

# In quarters. Below 64 rows a matmul spends most of its time packing the
# matrix; above 256 nothing is gained.
_SMALLEST_TILE = 64
_LARGEST_TILE = 256


@dataclasses.dataclass(frozen=True)
class _Tiling:
  """Where the tiles of each group lie.

  Attributes:
    tile: rows of a full tile, a multiple of 4.
    begin: first row of each group, `[E]`.
    end: row after the last of each group, `[E]`.
    num_full: full tiles of each group, `[E]`; the last may be partly empty.
    num_quarters: quarters of a tile (0 to 3) that hold a group's other rows,
      `[E]`.
  """

  tile: int
  begin: Array
  end: Array
  num_full: Array
  num_quarters: Array

  def partial_rows(self) -> Iterator[tuple[int, int]]:
    """Yields the partial tiles: quarters, and the rows they hold."""
    for quarters in (1, 2, 3):
      yield quarters, quarters * self.tile // 4

  def partial_start(self, group: Array) -> Array:
    return self.begin[group] + self.num_full[group] * self.tile


def _tiling(num_rows: int, group_sizes: Array) -> _Tiling:
  """Chooses a tile of one to two mean groups, for even and uneven groups."""
  mean = max(1, num_rows // group_sizes.shape[0])
  tile = min(max(1 << mean.bit_length(), _SMALLEST_TILE), _LARGEST_TILE)
  quarters = -(-(group_sizes % tile) // (tile // 4))
  end = jnp.cumsum(group_sizes)
  return _Tiling(
    tile=tile,
    begin=end - group_sizes,
    end=end,
    num_full=group_sizes // tile + quarters // 4,
    num_quarters=quarters % 4,
  )


@dataclasses.dataclass(frozen=True)
class _Window:
  """Rows `[start, start + rows)`, of which those in `[first, end)` count."""

  start: Array
  rows: int
  first: Array
  end: Array

  def take(self, x: Array) -> Array:
    return lax.dynamic_slice(x, (self.start, 0), (self.rows, x.shape[1]))

  def take_or_zero(self, x: Array) -> Array:
    return jnp.where(self._counts(), self.take(x), 0)

  def put(self, rows: Array, x: Array) -> Array:
    """Returns `x` with the counting rows replaced."""
    merged = jnp.where(self._counts(), rows, self.take(x))
    return lax.dynamic_update_slice(x, merged, (self.start, 0))

  def _counts(self) -> Array:
    row = self.start + jnp.arange(self.rows)
    return ((row >= self.first) & (row < self.end))[:, None]


def _window(first: Array, end: Array, rows: int, num_rows: int) -> _Window:
  """Returns the window that begins at `first`, or earlier to fit the array."""
  rows = min(rows, num_rows)
  start = jnp.minimum(first, num_rows - rows)
  return _Window(start, rows, first, end)


def _by_matrix(rows: Array, matrix: Array) -> Array:
  return rows @ matrix


def _by_transposed_matrix(rows: Array, matrix: Array) -> Array:
  # XLA:CPU packs the right operand at every call. The matrix on the left needs
  # none, 1.1 to 1.5 times as fast; the barrier keeps XLA from swapping back.
  product = lax.dot_general(matrix, rows, (((1,), (1,)), ((), ())))
  return lax.optimization_barrier(product).T


def _multiply_tiles(
  x: Array,
  weights: Array,
  group_sizes: Array,
  *,
  multiply: Callable[[Array, Array], Array],
  width: int,
) -> Array:
  """Returns each row multiplied with the matrix of its group."""
  num_rows = x.shape[0]
  tiling = _tiling(num_rows, group_sizes)

  def group(e: Array, y: Array) -> Array:
    matrix = lax.dynamic_index_in_dim(weights, e, keepdims=False)
    matrix = matrix.astype(jnp.float32)

    def tile(rows: int, first: Array, j: Array, y: Array) -> Array:
      window = _window(first + j * rows, tiling.end[e], rows, num_rows)
      product = multiply(window.take(x).astype(jnp.float32), matrix)
      return window.put(product.astype(x.dtype), y)

    full = functools.partial(tile, tiling.tile, tiling.begin[e])
    y = lax.fori_loop(0, tiling.num_full[e], full, y)
    # Loops of at most one turn: a conditional would copy the result.
    for quarters, rows in tiling.partial_rows():
      times = (tiling.num_quarters[e] == quarters).astype(jnp.int32)
      partial = functools.partial(tile, rows, tiling.partial_start(e))
      y = lax.fori_loop(0, times, partial, y)
    return y

  y = vary_like(jnp.zeros((num_rows, width), x.dtype), x, weights, group_sizes)
  return lax.fori_loop(0, weights.shape[0], group, y)


def forward(
  x: Float[Array, 'M K'],
  weights: Float[Array, 'E K N'],
  group_sizes: Int[Array, ' E'],
) -> Float[Array, 'M N']:
  """Returns each row times the matrix of its group; zeros past the groups."""
  return _multiply_tiles(
    x, weights, group_sizes, multiply=_by_matrix, width=weights.shape[2]
  )


def rows_gradient(
  grad: Float[Array, 'M N'],
  weights: Float[Array, 'E K N'],
  group_sizes: Int[Array, ' E'],
) -> Float[Array, 'M K']:
  """Returns the gradient of the rows: `grad` times the transposed matrix."""
  return _multiply_tiles(
    grad,
    weights,
    group_sizes,
    multiply=_by_transposed_matrix,
    width=weights.shape[1],
  )


def weights_gradient(
  x: Float[Array, 'M K'],
  grad: Float[Array, 'M N'],
  group_sizes: Int[Array, ' E'],
) -> Float[Array, 'E K N']:
  """Returns, for each group, its rows transposed times their gradients."""
  num_rows, num_groups = x.shape[0], group_sizes.shape[0]
  shape = (x.shape[1], grad.shape[1])
  tiling = _tiling(num_rows, group_sizes)

  def group(e: Array, total: Array) -> Array:
    def product(rows: int, first: Array) -> Array:
      window = _window(first, tiling.end[e], rows, num_rows)
      # Both sides, since 0 times a NaN of another group's row is NaN.
      tile_x = window.take_or_zero(x).astype(jnp.float32)
      tile_grad = window.take_or_zero(grad).astype(jnp.float32)
      # Transposed by hand: twice as fast on XLA:CPU when rows are few.
      return lax.optimization_barrier(tile_x.T) @ tile_grad

    def nothing() -> Array:
      return vary_like(jnp.zeros(shape, jnp.float32), x, grad, group_sizes)

    partial = [nothing]
    for _, rows in tiling.partial_rows():
      partial.append(functools.partial(product, rows, tiling.partial_start(e)))

    def add_full(j: Array, total_KN: Array) -> Array:
      return total_KN + product(tiling.tile, tiling.begin[e] + j * tiling.tile)

    # The partial tile goes first: most small groups then add nothing up.
    total_KN = lax.switch(tiling.num_quarters[e], partial)
    total_KN = lax.fori_loop(0, tiling.num_full[e], add_full, total_KN)
    return lax.dynamic_update_slice(
      total, total_KN.astype(total.dtype)[None], (e, 0, 0)
    )

  total = jnp.zeros((num_groups, *shape), x.dtype)
  return lax.fori_loop(
    0, num_groups, group, vary_like(total, x, grad, group_sizes)
  )
