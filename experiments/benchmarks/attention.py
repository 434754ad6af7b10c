"""Attention on CPU in tiles beside plain attention with all scores at once.

  python experiments/benchmarks/attention.py

Each repetition runs both sides once; times are medians. Memory is the
compiler's plan of temporaries for the gradient.
"""

import argparse
from collections.abc import Callable
import dataclasses
import functools
import statistics
import time

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from pallas_kernels import flash_attention

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Sizes:
  """One line of the table.

  Attributes:
    batch_size, length, num_heads, head_dim, value_dim: of the inputs.
    num_segments: documents of equal length packed in a row.
    window: positions that a query sees, or None.
  """

  batch_size: int
  length: int
  num_heads: int
  head_dim: int
  value_dim: int
  num_segments: int = 1
  window: int | None = None

  def __str__(self) -> str:
    size = f'{self.batch_size} x {self.length}, {self.num_heads} heads '
    size += f'{self.head_dim}/{self.value_dim}'
    if self.num_segments > 1:
      size += f', {self.num_segments} packed'
    return size if self.window is None else f'{size}, window {self.window}'

  def arrays(self) -> list[Array]:
    random = np.random.default_rng(0)
    widths = (self.head_dim, self.head_dim, self.value_dim)
    rows = (self.batch_size, self.length, self.num_heads)
    row = np.arange(self.length)
    size = -(-self.length // self.num_segments)
    ids = np.tile(row // size + 1, (self.batch_size, 1))
    positions = np.tile(row % size, (self.batch_size, 1))
    return [
      *(
        jnp.asarray(random.normal(size=(*rows, w)), jnp.float32) for w in widths
      ),
      jnp.asarray(ids, jnp.int32),
      jnp.asarray(positions, jnp.int32),
    ]


SIZES = (
  Sizes(16, 512, 8, 48, 32),
  Sizes(4, 1024, 8, 96, 64),
  Sizes(4, 1024, 8, 96, 64, num_segments=4),
  Sizes(1, 4096, 8, 96, 64),
  Sizes(1, 4096, 8, 96, 64, window=512),
  Sizes(1, 4096, 4, 192, 128),
  Sizes(1, 2048, 4, 256, 256),
  Sizes(1, 3000, 16, 24, 24),
)


def plain(
  sizes: Sizes, query: Array, key: Array, value: Array, ids: Array, pos: Array
) -> Array:
  """The other side: what one writes without a kernel."""
  scores_BNTS = jnp.einsum('BTNH,BSNH->BNTS', query, key)
  scores_BNTS *= sizes.head_dim**-0.5
  row = jnp.arange(sizes.length)
  seen_BTS = (ids[:, :, None] == ids[:, None]) & (row[:, None] >= row[None])
  if sizes.window is not None:
    seen_BTS &= pos[:, :, None] - pos[:, None] < sizes.window
  scores_BNTS = jnp.where(seen_BTS[:, None], scores_BNTS, -jnp.inf)
  weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1)
  return jnp.einsum('BNTS,BSNU->BTNU', weights_BNTS, value)


def tiled(
  sizes: Sizes, query: Array, key: Array, value: Array, ids: Array, pos: Array
) -> Array:
  return flash_attention(
    query,
    key,
    value,
    segment_ids=ids,
    positions=pos,
    scale=sizes.head_dim**-0.5,
    window=sizes.window,
    implementation='xla',
  )


def gradient(function: Callable[..., Array]) -> Callable[..., object]:
  """Returns a function of the gradients of query, key and value."""
  return jax.grad(lambda *xs: (function(*xs) ** 2).sum(), (0, 1, 2))


def measure(sizes: Sizes, repetitions: int) -> str:
  """Returns a line of the table."""
  arrays = sizes.arrays()
  sides = [functools.partial(side, sizes) for side in (plain, tiled)]
  functions = [*sides, *(gradient(side) for side in sides)]
  programs = [jax.jit(f).lower(*arrays).compile() for f in functions]
  taken: list[list[float]] = [[] for _ in programs]
  for repetition in range(repetitions + 1):
    for program, times in zip(programs, taken, strict=True):
      start = time.perf_counter()
      jax.block_until_ready(program(*arrays))
      if repetition:  # The first touches its memory for the first time.
        times.append(1e3 * (time.perf_counter() - start))
  line = f'{sizes!s:<36}'
  medians = [statistics.median(times) for times in taken]
  for theirs, ours in (medians[:2], medians[2:]):
    line += f'{theirs:>9.1f}{ours:>9.1f}{theirs / ours:>7.1f}x'
  theirs, ours = (
    p.memory_analysis().temp_size_in_bytes / MIB for p in programs[2:]
  )
  return f'{line}{theirs:>9.0f}{ours:>9.0f}{theirs / ours:>7.1f}x'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repetitions', type=int, default=7)
  flags = parser.parse_args()
  titles = ('forward, ms', 'gradient, ms', 'temporaries, MiB')
  print(f'{"":36}' + ''.join(f'{title:>26}' for title in titles))
  print(f'{"":36}' + f'{"plain":>9}{"tiles":>9}{"":8}' * 3)
  for sizes in SIZES:
    print(measure(sizes, flags.repetitions), flush=True)


if __name__ == '__main__':
  main()
