"""The definition: every row with every matrix, then a choice."""

import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int


def grouped_matmul(
  x: Float[Array, 'M K'],
  weights: Float[Array, 'E K N'],
  group_sizes: Int[Array, ' E'],
) -> Float[Array, 'M N']:
  """Returns each row times the matrix of its group; zeros past the groups."""
  end_E = jnp.cumsum(group_sizes)
  row_M = jnp.arange(x.shape[0])
  member_ME = (row_M[:, None] < end_E[None]) & (
    row_M[:, None] >= (end_E - group_sizes)[None]
  )
  member_MEK = member_ME[:, :, None]
  x_MEK = jnp.where(member_MEK, x.astype(jnp.float32)[:, None], 0)
  y = jnp.einsum('MEK,EKN->MN', x_MEK, weights.astype(jnp.float32))
  return y.astype(x.dtype)
