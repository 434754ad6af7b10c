"""Flash attention as loops over tiles: what CPU users run.

FlashAttention-2 (arXiv 2307.08691), written for XLA:CPU. Scores are laid out
`[keys, queries]`, since XLA vectorises a reduction over the major axis and not
over the minor one. Batch rows go one at a time, so that each row's own segments
decide which tiles are visited: neither those in the future, nor those before
the window, nor those before the tile's first segment.

In local names S is a key and Q a query of a tile; the query heads of a key head
stand one after another in Q.
"""

import dataclasses
from typing import NamedTuple

from jax import lax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int
import numpy as np

from pallas_kernels.varying import vary_like


class Inputs(NamedTuple):
  """The arrays that attention reads.

  Attributes:
    query: `[B, T, N, H]`; key: `[B, T, K, H]`; value: `[B, T, K, U]`.
    segment_ids: `[B, T]`, 0 for padding.
    positions: `[B, T]`, rising within a segment.
  """

  query: Float[Array, '... T N H']
  key: Float[Array, '... T K H']
  value: Float[Array, '... T K U']
  segment_ids: Int[Array, '... T']
  positions: Int[Array, '... T']


@dataclasses.dataclass(frozen=True)
class _Tiling:
  """How a row of `length` tokens is cut.

  Attributes:
    tile: rows of queries, and of keys, a tile.
    num_tiles: tiles a row; the last one may reach past the end.
  """

  length: int
  tile: int
  num_tiles: int

  def split(self, x: Array) -> Array:
    """Cuts `[T, ...]` into `[tiles, tile, ...]`, zeros past the end."""
    missing = self.num_tiles * self.tile - self.length
    padded = jnp.pad(x, ((0, missing), *((0, 0) for _ in x.shape[1:])))
    return padded.reshape(self.num_tiles, self.tile, *x.shape[1:])

  def join(self, x: Array) -> Array:
    """Inverse of `split`."""
    return x.reshape(-1, *x.shape[2:])[: self.length]

  def by_head(self, x: Array, num_heads: int) -> Array:
    """Turns `[T, K * G, H]` into `[tiles, K, G * tile, H]`, in float32."""
    split = self.split(x.astype(jnp.float32))
    split = split.reshape(*split.shape[:2], num_heads, -1, x.shape[-1])
    moved = split.transpose(0, 2, 3, 1, 4)
    return moved.reshape(self.num_tiles, num_heads, -1, x.shape[-1])

  def by_row(self, x: Array) -> Array:
    """Inverse of `by_head`."""
    num_tiles, num_heads, _, width = x.shape
    split = x.reshape(num_tiles, num_heads, -1, self.tile, width)
    moved = split.transpose(0, 3, 1, 2, 4)
    return self.join(moved.reshape(num_tiles, self.tile, -1, width))


def _tiling(length: int) -> _Tiling:
  """Returns equal tiles of a multiple of 8 rows each.

  Small tiles skip more of the future; large ones lose less time between tiles.
  Measured on two cores: 128 rows win at 512 tokens, 256 at 4096.
  """
  largest = 128 if length < 4096 else 256
  num_tiles = -(-length // largest)
  tile = -(-length // num_tiles)
  return _Tiling(length, -(-tile // 8) * 8, num_tiles)


class _Tokens(NamedTuple):
  """What decides who sees whom; `[tiles, tile]` each, or `[tile]` of a tile.

  Attributes:
    row: index in the row.
    segment: 0 for padding.
    position: rises within a segment.
  """

  row: Array
  segment: Array
  position: Array

  def at(self, i: Array) -> '_Tokens':
    return _Tokens(self.row[i], self.segment[i], self.position[i])

  def repeated(self, times: int) -> '_Tokens':
    """Repeats each tile's tokens, once for each head of a group."""
    return _Tokens(*(jnp.tile(a, (1, times)) for a in self))


def _visible(keys: _Tokens, queries: _Tokens, window: int | None) -> Array:
  """Says which key (first axis) each query (second axis) sees."""
  seen_SQ = keys.segment[:, None] == queries.segment[None, :]
  seen_SQ &= (keys.segment != 0)[:, None]
  seen_SQ &= keys.row[:, None] <= queries.row[None, :]
  if window is not None:
    distance_SQ = queries.position[None, :] - keys.position[:, None]
    seen_SQ &= distance_SQ < window
  return seen_SQ


def _first_tiles(tokens: _Tokens, window: int | None) -> Array:
  """Returns the first key tile that each query tile has to visit.

  From there on tiles up to the query's own are visited; a tile of padding gets
  the tile after its own, hence none. Segments need not be contiguous: tiles are
  left out where the ranges of their ids do not meet.
  """
  real = tokens.segment != 0
  low = jnp.where(real, tokens.segment, np.iinfo(np.int32).max).min(1)
  high = tokens.segment.max(1)
  num_tiles, tile = tokens.row.shape
  index = jnp.arange(num_tiles)
  meets = (low[None, :] <= high[:, None]) & (high[None, :] >= low[:, None])
  meets &= index[None, :] <= index[:, None]
  if window is not None:
    # Positions rise by at least one a row, so a key `window` rows back is out.
    last_row = (index + 1) * tile - 1
    meets &= last_row[None, :] > (index * tile - window)[:, None]
  return jnp.where(meets.any(1), jnp.argmax(meets, 1), index + 1)


@dataclasses.dataclass(frozen=True)
class _Row:
  """One batch row, cut into tiles.

  Attributes:
    query: `[tiles, K, G * tile, H]`, scaled, float32.
    key: `[tiles, K, tile, H]`; value: `[tiles, K, tile, U]`, float32.
    keys: tokens as keys; queries: tokens as queries, repeated G times.
    first: first key tile for each query tile, `[tiles]`.
  """

  tiling: _Tiling
  query: Array
  key: Array
  value: Array
  keys: _Tokens
  queries: _Tokens
  first: Array
  window: int | None

  def seen(self, i: Array, j: Array) -> Array:
    """Says which keys of tile `j` the queries of tile `i` see, `[1, S, Q]`."""
    return _visible(self.keys.at(j), self.queries.at(i), self.window)[None]

  def full(self, value: float, shape: tuple[int, ...]) -> Array:
    """Returns the start of a loop's carry."""
    start = jnp.full(shape, value, jnp.float32)
    return vary_like(start, self.query, self.first)


def _row(inputs: Inputs, scale: float, window: int | None) -> _Row:
  T, N, _ = inputs.query.shape
  K = inputs.key.shape[1]
  tiling = _tiling(T)
  keys = _Tokens(
    row=jnp.arange(tiling.num_tiles * tiling.tile).reshape(-1, tiling.tile),
    segment=tiling.split(inputs.segment_ids),
    position=tiling.split(inputs.positions),
  )
  return _Row(
    tiling=tiling,
    query=tiling.by_head(inputs.query, K) * scale,
    key=tiling.by_head(inputs.key, K),
    value=tiling.by_head(inputs.value, K),
    keys=keys,
    queries=keys.repeated(N // K),
    first=_first_tiles(keys, window),
    window=window,
  )


def _batched(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
  """Contracts one axis of each; the first axis is a batch axis."""
  return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((0,), (0,))))


def _clear_padding(inputs: Inputs) -> Inputs:
  """Zeroes padding rows, which may hold anything: 0 times NaN is NaN."""
  real = (inputs.segment_ids != 0)[:, :, None, None]
  return inputs._replace(
    query=jnp.where(real, inputs.query, 0),
    key=jnp.where(real, inputs.key, 0),
    value=jnp.where(real, inputs.value, 0),
  )


def _forward_row(row: _Row) -> tuple[Array, Array]:
  """Returns output `[tiles, K, Q, U]` and log-sum-exp `[tiles, K, Q]`."""
  num_tiles, K, width, _ = row.query.shape
  U = row.value.shape[-1]

  def query_tile(i: Array, outputs: tuple[Array, Array]) -> tuple[Array, Array]:
    q_KQH = row.query[i]

    def key_tile(
      j: Array, carry: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
      top_KQ, total_KQ, sum_KUQ = carry
      scores_KSQ = _batched(row.key[j], q_KQH, 2, 2)
      scores_KSQ = jnp.where(row.seen(i, j), scores_KSQ, -jnp.inf)
      new_top_KQ = jnp.maximum(top_KQ, scores_KSQ.max(1))
      shift_KQ = jnp.where(new_top_KQ == -jnp.inf, 0, new_top_KQ)
      weights_KSQ = jnp.exp(scores_KSQ - shift_KQ[:, None])
      shrink_KQ = jnp.exp(top_KQ - shift_KQ)
      total_KQ = total_KQ * shrink_KQ + weights_KSQ.sum(1)
      sum_KUQ = sum_KUQ * shrink_KQ[:, None]
      sum_KUQ += _batched(row.value[j], weights_KSQ, 1, 1)
      return new_top_KQ, total_KQ, sum_KUQ

    start = (
      row.full(-jnp.inf, (K, width)),
      row.full(0, (K, width)),
      row.full(0, (K, U, width)),
    )
    top_KQ, total_KQ, sum_KUQ = lax.fori_loop(
      row.first[i], i + 1, key_tile, start
    )
    empty_KQ = total_KQ == 0
    out_KUQ = sum_KUQ / jnp.where(empty_KQ, 1, total_KQ)[:, None]
    # exp(score - inf) = 0: a query that sees nothing gets no gradient.
    lse_KQ = jnp.where(empty_KQ, jnp.inf, top_KQ + jnp.log(total_KQ))
    outs, lses = outputs
    return (
      lax.dynamic_update_index_in_dim(outs, out_KUQ.transpose(0, 2, 1), i, 0),
      lax.dynamic_update_index_in_dim(lses, lse_KQ, i, 0),
    )

  outs = row.full(0, (num_tiles, K, width, U))
  lses = row.full(0, (num_tiles, K, width))
  return lax.fori_loop(0, num_tiles, query_tile, (outs, lses))


def forward(
  inputs: Inputs, *, scale: float, window: int | None
) -> tuple[Float[Array, 'B T N U'], Float[Array, 'B T N']]:
  """Returns the output and the log of the softmax's sum (float32)."""

  def one_row(inputs_T: Inputs) -> tuple[Array, Array]:
    row = _row(inputs_T, scale, window)
    out, lse = _forward_row(row)
    return (
      row.tiling.by_row(out).astype(inputs_T.query.dtype),
      row.tiling.by_row(lse[..., None])[..., 0],
    )

  return lax.map(one_row, _clear_padding(inputs))


def _backward_row(
  row: _Row, lse: Array, delta: Array, grad: Array
) -> tuple[Array, Array, Array]:
  """Returns the gradients of the row's query, key and value, tiled like them.

  Args:
    row: the inputs.
    lse: log of the softmax's sum, `[tiles, K, Q]`.
    delta: sum of output times its gradient, `[tiles, K, Q]`.
    grad: gradient of the output, `[tiles, K, Q, U]`.
  """

  def query_tile(
    i: Array, grads: tuple[Array, Array, Array]
  ) -> tuple[Array, Array, Array]:
    q_KQH, grad_KQU = row.query[i], grad[i]
    lse_K1Q, delta_K1Q = lse[i][:, None], delta[i][:, None]

    def key_tile(
      j: Array, carry: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
      dq_KQH, dk, dv = carry
      k_KSH = row.key[j]
      scores_KSQ = _batched(k_KSH, q_KQH, 2, 2)
      weights_KSQ = jnp.exp(scores_KSQ - lse_K1Q)
      weights_KSQ = jnp.where(row.seen(i, j), weights_KSQ, 0)
      dweights_KSQ = _batched(row.value[j], grad_KQU, 2, 2)
      dscores_KSQ = weights_KSQ * (dweights_KSQ - delta_K1Q)
      dv_KSU = dv[j] + _batched(weights_KSQ, grad_KQU, 2, 1)
      dk_KSH = dk[j] + _batched(dscores_KSQ, q_KQH, 2, 1)
      return (
        dq_KQH + _batched(dscores_KSQ, k_KSH, 1, 1),
        lax.dynamic_update_index_in_dim(dk, dk_KSH, j, 0),
        lax.dynamic_update_index_in_dim(dv, dv_KSU, j, 0),
      )

    dq, dk, dv = grads
    start = (row.full(0, q_KQH.shape), dk, dv)
    dq_KQH, dk, dv = lax.fori_loop(row.first[i], i + 1, key_tile, start)
    return lax.dynamic_update_index_in_dim(dq, dq_KQH, i, 0), dk, dv

  zeros = (
    row.full(0, row.query.shape),
    row.full(0, row.key.shape),
    row.full(0, row.value.shape),
  )
  return lax.fori_loop(0, row.tiling.num_tiles, query_tile, zeros)


def backward(
  inputs: Inputs,
  out: Float[Array, 'B T N U'],
  lse: Float[Array, 'B T N'],
  grad: Float[Array, 'B T N U'],
  *,
  scale: float,
  window: int | None,
) -> tuple[
  Float[Array, 'B T N H'], Float[Array, 'B T K H'], Float[Array, 'B T K U']
]:
  """Returns the gradients of query, key and value.

  Args:
    inputs: as given to `forward`.
    out: its output.
    lse: its log of the softmax's sum.
    grad: gradient of the output.
    scale: as given to `forward`.
    window: as given to `forward`.
  """
  num_heads = inputs.key.shape[2]

  def one_row(
    xs: tuple[Inputs, Array, Array, Array],
  ) -> tuple[Array, Array, Array]:
    inputs_T, out_TNU, lse_TN, grad_TNU = xs
    row = _row(inputs_T, scale, window)
    grad_TNU = grad_TNU.astype(jnp.float32)
    delta_TN = (grad_TNU * out_TNU.astype(jnp.float32)).sum(-1)
    dq, dk, dv = _backward_row(
      row,
      row.tiling.by_head(lse_TN[..., None], num_heads)[..., 0],
      row.tiling.by_head(delta_TN[..., None], num_heads)[..., 0],
      row.tiling.by_head(grad_TNU, num_heads),
    )
    return (
      (row.tiling.by_row(dq) * scale).astype(inputs_T.query.dtype),
      row.tiling.by_row(dk).astype(inputs_T.key.dtype),
      row.tiling.by_row(dv).astype(inputs_T.value.dtype),
    )

  real = (inputs.segment_ids != 0)[:, :, None, None]
  grad = jnp.where(real, grad, 0)
  return lax.map(one_row, (_clear_padding(inputs), out, lse, grad))
