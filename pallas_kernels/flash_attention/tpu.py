"""Splash attention, the library's flash kernel for TPU.

Compiled ahead of time for TPU and run in interpret mode on CPU; not measured on
hardware. The kernel takes segment ids and any widths. It wants whole blocks of
rows, so a row is padded to a multiple of the block and cut again. A row that
sees nothing gets from it the mean of the values, so padding rows, which see
each other there, are cleared on both sides.
"""

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

# Rows of a block. Wider blocks run faster until VMEM is full; not measured.
_BLOCK = 512
_LANES = 128


def _block_sizes(length: int) -> splash.BlockSizes:
  block = min(_BLOCK, length)
  return splash.BlockSizes(
    block_q=block,
    block_kv=block,
    block_kv_compute=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_kv_dkv_compute=block,
    block_q_dq=block,
    block_kv_dq=block,
  )


def _padded(length: int) -> int:
  """Returns the next length that whole blocks of whole lanes make up."""
  block = _BLOCK if length > _BLOCK else _LANES
  return -(-length // block) * block


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
  """Returns the attention output; a window counts rows of the segment."""
  T, N = query.shape[1:3]
  length = _padded(T)
  shape = (length, length)
  mask = (
    splash.CausalMask(shape)
    if window is None
    else splash.LocalMask(shape, window_size=(window - 1, 0), offset=0)
  )
  kernel = splash.make_splash_mha(
    splash.MultiHeadMask([mask] * N),
    block_sizes=_block_sizes(length),
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )
  real = (segment_ids != 0)[:, :, None, None]

  def heads_first(x: Array) -> Array:
    x = jnp.pad(
      jnp.where(real, x, 0), ((0, 0), (0, length - T), (0, 0), (0, 0))
    )
    return x.transpose(0, 2, 1, 3)

  ids = jnp.pad(segment_ids, ((0, 0), (0, length - T)))
  # The kernel does not scale. In float32, not to round the query once more.
  scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
  out = jax.vmap(kernel)(
    heads_first(scaled),
    heads_first(key),
    heads_first(value),
    splash.SegmentIds(ids, ids),
  )
  return jnp.where(real, out.transpose(0, 2, 1, 3)[:, :T], 0)
