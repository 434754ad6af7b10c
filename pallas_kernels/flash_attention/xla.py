"""Flash attention as loops over tiles: what CPU users run.

FlashAttention-2 (arXiv 2307.08691), written for XLA:CPU. Scores live as
`[keys, queries]`, since XLA vectorises a reduction over the major axis and not
over the minor one. One batch row at a time, so that each row's own segments
decide which tiles it visits: neither those in the future, nor those before the
window, nor those before the tile's first segment.
"""

import dataclasses
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels.varying import vary_like


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


def _tiling(length: int, largest: int = 128) -> _Tiling:
  """Returns equal tiles of at most `largest` rows, a multiple of 8 each."""
  num_tiles = -(-length // largest)
  tile = -(-length // num_tiles)
  return _Tiling(length, -(-tile // 8) * 8, num_tiles)


class _Tokens(NamedTuple):
  """What decides who sees whom; `[tiles, tile]` each.

  Attributes:
    row: index in the row.
    segment: 0 for padding.
    position: rises within a segment.
  """

  row: Array
  segment: Array
  position: Array

  def at(self, i: Array) -> '_Tokens':
    return _Tokens(*(a[i] for a in self))


def _tokens(tiling: _Tiling, segment: Array, position: Array) -> _Tokens:
  row = jnp.arange(tiling.num_tiles * tiling.tile).reshape(-1, tiling.tile)
  return _Tokens(row, tiling.split(segment), tiling.split(position))


def _visible(keys: _Tokens, queries: _Tokens, window: int | None) -> Array:
  """Says which key (first axis) each query (second axis) sees."""
  seen = keys.segment[:, None] == queries.segment[None, :]
  seen &= (keys.segment != 0)[:, None]
  seen &= keys.row[:, None] <= queries.row[None, :]
  if window is not None:
    seen &= queries.position[None, :] - keys.position[:, None] < window
  return seen


def _first_tiles(tokens: _Tokens, window: int | None) -> Array:
  """Returns the first key tile that each query tile has to visit.

  Tiles up to the query's own are then visited; a tile of padding gets the tile
  after its own, hence none. Segments need not be contiguous: tiles are left out
  where the ranges of their ids do not meet.
  """
  real = tokens.segment != 0
  low = jnp.where(real, tokens.segment, jnp.iinfo(jnp.int32).max).min(1)
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


def _by_head(tiling: _Tiling, x: Array, num_keys: int) -> Array:
  """Turns `[T, K * G, H]` into `[tiles, K, G * tile, H]`, in float32."""
  width = x.shape[-1]
  split = tiling.split(x.astype(jnp.float32))
  split = split.reshape(tiling.num_tiles, tiling.tile, num_keys, -1, width)
  moved = split.transpose(0, 2, 3, 1, 4)
  return moved.reshape(tiling.num_tiles, num_keys, -1, width)


def _by_row(tiling: _Tiling, x: Array) -> Array:
  """Inverse of `_by_head`: `[tiles, K, G * tile, H]` to `[T, K * G, H]`."""
  num_tiles, num_keys, _, width = x.shape
  split = x.reshape(num_tiles, num_keys, -1, tiling.tile, width)
  split = split.transpose(0, 3, 1, 2, 4)
  return tiling.join(split.reshape(num_tiles, tiling.tile, -1, width))


def _grouped(tokens: _Tokens, group: int) -> _Tokens:
  """Repeats a tile's queries for each head of a group."""
  return _Tokens(*(jnp.tile(a, (1, group)) for a in tokens))


def _batched(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
  """Contracts one axis of each; the first axis is a batch axis."""
  return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((0,), (0,))))


def _forward_row(
  q: Array, k: Array, v: Array, segment: Array, position: Array, window: int | None
) -> tuple[Array, Array]:
  """Attention of one batch row; the query comes scaled."""
  T, N, _ = q.shape
  K, U = v.shape[1:]
  tiling = _tiling(T)
  keys = _tokens(tiling, segment, position)
  queries = _grouped(keys, N // K)
  first = _first_tiles(keys, window)
  q, k, v = (_by_head(tiling, a, K) for a in (q, k, v))
  width = q.shape[2]

  def query_tile(i: Array, outputs: tuple[Array, Array]):
    q_i, queries_i = q[i], queries.at(i)

    def key_tile(j: Array, carry: tuple[Array, Array, Array]):
      top_KQ, total_KQ, sum_KUQ = carry
      scores_KSQ = _batched(k[j], q_i, 2, 2)
      seen_SQ = _visible(keys.at(j), queries_i, window)
      scores_KSQ = jnp.where(seen_SQ[None], scores_KSQ, -jnp.inf)
      new_top_KQ = jnp.maximum(top_KQ, scores_KSQ.max(1))
      shift_KQ = jnp.where(new_top_KQ == -jnp.inf, 0, new_top_KQ)
      weights_KSQ = jnp.exp(scores_KSQ - shift_KQ[:, None])
      shrink_KQ = jnp.exp(top_KQ - shift_KQ)
      total_KQ = total_KQ * shrink_KQ + weights_KSQ.sum(1)
      sum_KUQ = sum_KUQ * shrink_KQ[:, None] + _batched(v[j], weights_KSQ, 1, 1)
      return new_top_KQ, total_KQ, sum_KUQ

    start = (
      jnp.full((K, width), -jnp.inf),
      jnp.zeros((K, width)),
      jnp.zeros((K, U, width)),
    )
    start = tuple(vary_like(a, q, segment) for a in start)
    top_KQ, total_KQ, sum_KUQ = lax.fori_loop(first[i], i + 1, key_tile, start)
    empty_KQ = total_KQ == 0
    out_KUQ = sum_KUQ / jnp.where(empty_KQ, 1, total_KQ)[:, None]
    # exp(score - inf) = 0: a query that sees nothing gets no gradient.
    lse_KQ = jnp.where(empty_KQ, jnp.inf, top_KQ + jnp.log(total_KQ))
    outs, lses = outputs
    return (
      lax.dynamic_update_index_in_dim(outs, out_KUQ.transpose(0, 2, 1), i, 0),
      lax.dynamic_update_index_in_dim(lses, lse_KQ, i, 0),
    )

  outs = jnp.zeros((tiling.num_tiles, K, width, U))
  lses = jnp.zeros((tiling.num_tiles, K, width))
  outputs = tuple(vary_like(a, q, segment) for a in (outs, lses))
  outs, lses = lax.fori_loop(0, tiling.num_tiles, query_tile, outputs)
  return _by_row(tiling, outs), _by_row(tiling, lses[..., None])[..., 0]


def _zero_padding(segment_ids: Array, *arrays: Array) -> tuple[Array, ...]:
  """Clears padding rows, which may hold anything: 0 times NaN is NaN."""
  real = (segment_ids != 0)[:, :, None, None]
  return tuple(jnp.where(real, a, 0) for a in arrays)


def forward(
  query: Float[Array, 'B T N H'],
  key: Float[Array, 'B T K H'],
  value: Float[Array, 'B T K U'],
  segment_ids: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  *,
  scale: float,
  window: int | None,
) -> tuple[Float[Array, 'B T N U'], Float[Array, 'B T N']]:
  """Returns the output and the log of the softmax's sum (float32)."""
  q, k, v = _zero_padding(segment_ids, query, key, value)

  def row(xs: tuple[Array, ...]) -> tuple[Array, Array]:
    q, k, v, segment, position = xs
    q = q.astype(jnp.float32) * scale
    out, lse = _forward_row(q, k, v, segment, position, window)
    return out.astype(query.dtype), lse

  return lax.map(row, (q, k, v, segment_ids, positions))


def _backward_row(
  q: Array,
  k: Array,
  v: Array,
  segment: Array,
  position: Array,
  lse: Array,
  delta: Array,
  grad: Array,
  window: int | None,
) -> tuple[Array, Array, Array]:
  """Gradients of one batch row: of the scaled query, the key, the value."""
  T, N, _ = q.shape
  K = v.shape[1]
  tiling = _tiling(T)
  keys = _tokens(tiling, segment, position)
  queries = _grouped(keys, N // K)
  first = _first_tiles(keys, window)
  q, k, v, grad = (_by_head(tiling, a, K) for a in (q, k, v, grad))
  lse, delta = (_by_head(tiling, a[..., None], K)[..., 0] for a in (lse, delta))

  def query_tile(i: Array, outputs: tuple[Array, Array, Array]):
    q_i, grad_i, queries_i = q[i], grad[i], queries.at(i)
    lse_i, delta_i = lse[i][:, None], delta[i][:, None]

    def key_tile(j: Array, carry: tuple[Array, Array, Array]):
      dq_i, dk, dv = carry
      seen_SQ = _visible(keys.at(j), queries_i, window)
      scores_KSQ = _batched(k[j], q_i, 2, 2)
      weights_KSQ = jnp.where(seen_SQ[None], jnp.exp(scores_KSQ - lse_i), 0)
      dweights_KSQ = _batched(v[j], grad_i, 2, 2)
      dscores_KSQ = weights_KSQ * (dweights_KSQ - delta_i)
      dv_j = dv[j] + _batched(weights_KSQ, grad_i, 2, 1)
      dk_j = dk[j] + _batched(dscores_KSQ, q_i, 2, 1)
      return (
        dq_i + _batched(dscores_KSQ, k[j], 1, 1),
        lax.dynamic_update_index_in_dim(dk, dk_j, j, 0),
        lax.dynamic_update_index_in_dim(dv, dv_j, j, 0),
      )

    dq, dk, dv = outputs
    zero = vary_like(jnp.zeros(q.shape[1:]), q, segment)
    dq_i, dk, dv = lax.fori_loop(first[i], i + 1, key_tile, (zero, dk, dv))
    return lax.dynamic_update_index_in_dim(dq, dq_i, i, 0), dk, dv

  zeros = tuple(vary_like(jnp.zeros(a.shape), q, segment) for a in (q, k, v))
  grads = lax.fori_loop(0, tiling.num_tiles, query_tile, zeros)
  return tuple(_by_row(tiling, a) for a in grads)


def backward(
  query: Float[Array, 'B T N H'],
  key: Float[Array, 'B T K H'],
  value: Float[Array, 'B T K U'],
  segment_ids: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  out: Float[Array, 'B T N U'],
  lse: Float[Array, 'B T N'],
  grad: Float[Array, 'B T N U'],
  *,
  scale: float,
  window: int | None,
) -> tuple[
  Float[Array, 'B T N H'], Float[Array, 'B T K H'], Float[Array, 'B T K U']
]:
  """Returns the gradients of query, key and value."""
  q, k, v, grad = _zero_padding(segment_ids, query, key, value, grad)

  def row(xs: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    q, k, v, segment, position, out, lse, grad = xs
    q = q.astype(jnp.float32) * scale
    delta = (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    dq, dk, dv = _backward_row(
      q, k, v, segment, position, lse, delta, grad, window
    )
    return (
      (dq * scale).astype(query.dtype),
      dk.astype(key.dtype),
      dv.astype(value.dtype),
    )

  return lax.map(row, (q, k, v, segment_ids, positions, out, lse, grad))
