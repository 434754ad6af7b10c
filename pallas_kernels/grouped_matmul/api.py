"""The public function: shapes, errors, gradients and the choice of kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import ragged
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul import xla
from pallas_kernels.varying import vary_together


def grouped_matmul(
  x: Float[Array, 'M K'],
  weights: Float[Array, 'E K N'],
  group_sizes: Int[Array, ' E'],
  *,
  implementation: dispatch.Implementation | None = None,
) -> Float[Array, 'M N']:
  """Multiplies consecutive groups of rows, each group by a matrix of its own.

  Products add up in float32 and are returned in the dtype of `x`.
  Differentiable in `x` and `weights`; saves both for the backward pass.

  Args:
    x: rows, sorted by group.
    weights: one matrix a group, of the dtype of `x`.
    group_sizes: rows of each group, in order; some may be 0. Rows past their
      sum belong to no group: they give zeros, get zero gradients, and on CPU
      cost nothing.
    implementation: `xla` loops over row tiles (for CPU); `tpu` and `gpu` are
      `jax.lax.ragged_dot`; `reference` multiplies every row with every matrix.

  Raises:
    ValueError: if shapes or dtypes do not fit each other.
  """
  _check(x, weights, group_sizes)
  chosen = dispatch.choose(implementation)
  x, weights, group_sizes = vary_together(
    x, weights, group_sizes.astype(jnp.int32)
  )
  with jax.named_scope(f'grouped_matmul_{chosen}'):
    match chosen:
      case 'reference':
        return reference.grouped_matmul(x, weights, group_sizes)
      case 'xla':
        return _tiled(x, weights, group_sizes)
      case 'tpu' | 'gpu':
        return ragged.grouped_matmul(x, weights, group_sizes)


def _check(x: Array, weights: Array, group_sizes: Array) -> None:
  fits = (
    x.ndim == 2
    and weights.ndim == 3
    and group_sizes.shape == weights.shape[:1]
    and x.shape[1] == weights.shape[1]
  )
  if not fits:
    raise ValueError(
      f'grouped_matmul got x {x.shape}, weights {weights.shape}, group_sizes '
      f'{group_sizes.shape}; it takes [M, K], [E, K, N], [E].'
    )
  if x.dtype != weights.dtype:
    raise ValueError(
      f'grouped_matmul got x of {x.dtype} and weights of {weights.dtype}; '
      'cast one to the dtype of the other.'
    )


@jax.custom_vjp
def _tiled(x: Array, weights: Array, group_sizes: Array) -> Array:
  return xla.forward(x, weights, group_sizes)


def _tiled_forward(
  x: Array, weights: Array, group_sizes: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
  return xla.forward(x, weights, group_sizes), (x, weights, group_sizes)


def _tiled_backward(
  residuals: tuple[Array, Array, Array], grad: Array
) -> tuple[Array, Array, None]:
  x, weights, group_sizes = residuals
  return (
    xla.rows_gradient(grad, weights, group_sizes),
    xla.weights_gradient(x, grad, group_sizes),
    None,
  )


_tiled.defvjp(_tiled_forward, _tiled_backward)
