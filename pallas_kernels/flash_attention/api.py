"""The public function: shapes, errors, gradients and the choice of kernel."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels import dispatch
from pallas_kernels.flash_attention import gpu
from pallas_kernels.flash_attention import reference
from pallas_kernels.flash_attention import tpu
from pallas_kernels.flash_attention import xla
from pallas_kernels.varying import vary_together


def flash_attention(
  query: Float[Array, 'B T N H'],
  key: Float[Array, 'B T K H'],
  value: Float[Array, 'B T K U'],
  *,
  segment_ids: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  scale: float,
  window: int | None = None,
  implementation: dispatch.Implementation | None = None,
) -> Float[Array, 'B T N U']:
  """Attends from every token to the earlier ones of its segment and itself.

  Memory is linear in T: the backward pass keeps the output and the logarithm
  of the softmax's sum (FlashAttention-2, arXiv 2307.08691). Softmax and sums
  are in float32; the output has the dtype of the query.

  Args:
    query: N heads; N is a multiple of K.
    key: K heads of the query's width.
    value: K heads of any width.
    segment_ids: tokens see equal ids only; 0 is padding, whose rows give 0 and
      get no gradient, whatever they hold.
    positions: rise by at least one from a row to the next of its segment; with
      a window on TPU and GPU, by exactly one. Read with a window only.
    scale: factor on the scores, H^-1/2 most often.
    window: a query sees positions less than this far back; None for all.
    implementation: `xla` (for CPU), `tpu`, `gpu`, or `reference` (quadratic).

  Raises:
    ValueError: if shapes do not fit each other or the implementation.
  """
  _check(query, key, value, segment_ids, positions, window)
  chosen = dispatch.choose(implementation)
  query, key, value, segment_ids, positions = vary_together(
    query,
    key,
    value,
    segment_ids.astype(jnp.int32),
    positions.astype(jnp.int32),
  )
  with jax.named_scope(f'flash_attention_{chosen}'):
    match chosen:
      case 'reference':
        return reference.flash_attention(
          query, key, value, segment_ids, positions, scale=scale, window=window
        )
      case 'xla':
        return _tiled(scale, window, query, key, value, segment_ids, positions)
      case 'tpu':
        return tpu.flash_attention(
          query, key, value, segment_ids, scale=scale, window=window
        )
      case 'gpu':
        return gpu.flash_attention(
          query, key, value, segment_ids, scale=scale, window=window
        )


def _check(
  query: Array,
  key: Array,
  value: Array,
  segment_ids: Array,
  positions: Array,
  window: int | None,
) -> None:
  shapes = (
    f'flash_attention got query {query.shape}, key {key.shape}, value '
    f'{value.shape}, segment_ids {segment_ids.shape}, positions '
    f'{positions.shape}'
  )
  fits = (
    query.ndim == key.ndim == value.ndim == 4
    and query.shape[:2] == key.shape[:2] == value.shape[:2]
    and query.shape[3] == key.shape[3]
    and key.shape[2] == value.shape[2]
    and segment_ids.shape == positions.shape == query.shape[:2]
  )
  if not fits:
    raise ValueError(
      f'{shapes}; it takes [B, T, N, H], [B, T, K, H], [B, T, K, U], [B, T], '
      '[B, T].'
    )
  if query.shape[2] % key.shape[2]:
    raise ValueError(f'{shapes}; the query heads must divide by the key heads.')
  if not query.dtype == key.dtype == value.dtype:
    raise ValueError(
      f'flash_attention got dtypes {query.dtype}, {key.dtype}, {value.dtype}; '
      'query, key and value must have the same.'
    )
  if window is not None and window < 1:
    raise ValueError(
      f'window is {window}; it must be at least 1 (the token itself) or None.'
    )


# Saved for the backward pass: the inputs, the output and, `[B, T, N]`, the
# logarithm of the softmax's sum.
_Residuals = tuple[xla.Inputs, Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tiled(scale: float, window: int | None, *arrays: Array) -> Array:
  return _tiled_forward(scale, window, *arrays)[0]


def _tiled_forward(
  scale: float, window: int | None, *arrays: Array
) -> tuple[Array, _Residuals]:
  inputs = xla.Inputs(*arrays)
  out, lse = xla.forward(inputs, scale=scale, window=window)
  return out, (inputs, out, lse)


def _tiled_backward(
  scale: float, window: int | None, residuals: _Residuals, grad: Array
) -> tuple[Array | None, ...]:
  inputs, out, lse = residuals
  grads = xla.backward(inputs, out, lse, grad, scale=scale, window=window)
  return (*grads, None, None)


_tiled.defvjp(_tiled_forward, _tiled_backward)
