"""The flash kernel of jax's Pallas library for GPU.

Not measured: no GPU ran this. cuDNN's kernel, the faster one, takes segments in
jax's public interface only as a quadratic mask, so it does not fit. This one
takes segment ids in linear memory; it knows no window, no groups of query heads
and one width for all, so keys and values are repeated and padded. jax calls it
deprecated, without a successor that has a backward pass under a causal mask.
"""

import types
import warnings

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

_LARGEST_WIDTH = 256  # A tile of wider heads leaves no shared memory.


def _library() -> types.ModuleType:
  """Imports the kernel without its warning, which says nothing about use."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention
  return attention


def flash_attention(
  query: Float[Array, 'B T N H'],
  key: Float[Array, 'B T K H'],
  value: Float[Array, 'B T K U'],
  segment_ids: Int[Array, 'B T'],
  *,
  scale: float,
  window: int | None,
  interpret: bool = False,
) -> Float[Array, 'B T N U']:
  """Returns the attention output.

  Raises:
    ValueError: with a window, or with heads wider than 256.
  """
  T, N, H = query.shape[1:]
  K, U = value.shape[2:]
  width = max(H, U)
  if window is not None:
    raise ValueError(
      f'flash_attention got window {window}; the GPU kernel has none. Pass '
      "window=None or implementation='xla'."
    )
  if width > _LARGEST_WIDTH:
    raise ValueError(
      f'flash_attention got heads of width {width}; the GPU kernel takes at '
      f"most {_LARGEST_WIDTH}. Use narrower heads or implementation='xla'."
    )
  library = _library()
  # Blocks halve as heads widen, to keep the tiles in shared memory.
  block = 128 if width <= 64 else 64
  length = -(-T // block) * block
  real = (segment_ids != 0)[:, :, None, None]

  def prepared(x: jax.Array) -> jax.Array:
    heads, size = x.shape[2:]
    x = jnp.where(real, x, 0)
    x = jnp.pad(x, ((0, 0), (0, length - T), (0, 0), (0, width - size)))
    return jnp.repeat(x, N // heads, axis=2)

  out = library.mha(
    prepared(query),
    prepared(key),
    prepared(value),
    jnp.pad(segment_ids, ((0, 0), (0, length - T))),
    sm_scale=scale,
    causal=True,
    block_sizes=library.BlockSizes(
      block_q=block,
      block_k=block,
      block_q_dkv=32,
      block_kv_dkv=32,
      block_q_dq=32,
      block_kv_dq=32,
    ),
    interpret=interpret,
  )
  return jnp.where(real, out[:, :T, :, :U], 0)
