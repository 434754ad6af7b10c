"""The definition of the op; quadratic in time and memory."""

import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Bool
from jaxtyping import Float
from jaxtyping import Int


def visible(
  segment_ids: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  window: int | None,
) -> Bool[Array, 'B T T']:
  """Says which keys (last axis) a query sees."""
  row_T = jnp.arange(segment_ids.shape[1])
  seen = segment_ids[:, :, None] == segment_ids[:, None, :]
  seen &= segment_ids[:, None, :] != 0
  seen &= (row_T[:, None] >= row_T[None, :])[None]
  if window is not None:
    seen &= positions[:, :, None] - positions[:, None, :] < window
  return seen


def flash_attention(
  query: Float[Array, 'B T N H'],
  key: Float[Array, 'B T K H'],
  value: Float[Array, 'B T K U'],
  segment_ids: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  *,
  scale: float,
  window: int | None,
) -> Float[Array, 'B T N U']:
  """Returns softmax(scale * query . key) . value over the visible keys."""
  B, T, N, H = query.shape
  K, dtype = key.shape[2], query.dtype
  # Padding may hold anything, and 0 times NaN is NaN.
  real_BT11 = (segment_ids != 0)[:, :, None, None]
  query, key, value = (
    jnp.where(real_BT11, a.astype(jnp.float32), 0) for a in (query, key, value)
  )
  query_BTKGH = query.reshape(B, T, K, N // K, H)
  scores_BKGTS = jnp.einsum('BTKGH,BSKH->BKGTS', query_BTKGH, key) * scale
  seen_B11TS = visible(segment_ids, positions, window)[:, None, None]
  scores_BKGTS = jnp.where(seen_B11TS, scores_BKGTS, -jnp.inf)
  top = jnp.max(scores_BKGTS, -1, keepdims=True)
  # A row that sees nothing has no maximum; it gives 0 and no gradient.
  weights = jnp.exp(scores_BKGTS - jnp.where(jnp.isfinite(top), top, 0))
  total = weights.sum(-1, keepdims=True)
  weights = weights / jnp.where(total == 0, 1, total)
  out = jnp.einsum('BKGTS,BSKU->BTKGU', weights, value)
  return out.reshape(B, T, N, -1).astype(dtype)
