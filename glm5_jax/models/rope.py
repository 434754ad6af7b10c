"""Rotary positions (arXiv 2104.09864) in the two layouts in use.

GLM rotates neighbouring entries (`interleaved`); many others rotate entries
half a width apart (`half_split`). The two differ by a fixed permutation of the
entries, so weights trained under one are wrong under the other.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int


def angles(
  positions: Int[Array, 'B T'], rope_dim: int, theta: float
) -> Float[Array, 'B T half']:
  """Returns `position * theta^(-2i / P)` in float32, radians."""
  exponents = jnp.arange(0, rope_dim, 2, dtype=jnp.float32) / rope_dim
  frequencies = jnp.asarray(theta, jnp.float32) ** -exponents
  return positions[..., None].astype(jnp.float32) * frequencies[None, None]


def rotate(
  x: Float[Array, 'B T N P'],
  angles_BTh: Float[Array, 'B T half'],
  layout: Literal['interleaved', 'half_split'],
) -> Float[Array, 'B T N P']:
  """Returns `x` with each pair of entries turned by its angle.

  The products are taken in float32, whatever the dtype of `x`: at a position of
  10^5 a bfloat16 sine is noise.
  """
  cos, sin = jnp.cos(angles_BTh)[:, :, None], jnp.sin(angles_BTh)[:, :, None]
  x32 = x.astype(jnp.float32)
  if layout == 'interleaved':
    first, second = x32[..., 0::2], x32[..., 1::2]
  else:
    first, second = jnp.split(x32, 2, axis=-1)
  turned = (first * cos - second * sin, second * cos + first * sin)
  if layout == 'interleaved':
    y = jnp.stack(turned, axis=-1).reshape(x.shape)
  else:
    y = jnp.concatenate(turned, axis=-1)
  return y.astype(x.dtype)
