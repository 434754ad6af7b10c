"""Grouped matmul on CPU beside one dense matmul of the same FLOPs.

  python experiments/benchmarks/grouped_matmul.py

Each repetition runs every side once, so that a busy machine slows all of them.
Times are medians; `x dense` divides by the dense side's. The gradient of 64
matrices is 128 MiB of fresh memory, whose page faults take as long as the
multiplication: GLIBC_TUNABLES=glibc.malloc.hugetlb=1 takes most of them away.
"""

import argparse
from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import statistics
import time
from typing import Literal

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_matmul

Split = Literal['even', 'uneven', 'half empty']
SHAPES = ((4096, 512, 1024), (8192, 256, 512))


@dataclasses.dataclass(frozen=True)
class Sizes:
  """One line of the table.

  Attributes:
    num_rows, in_dim, out_dim: of the product.
    num_groups: matrices.
    split: how rows divide among the groups.
  """

  num_rows: int
  in_dim: int
  out_dim: int
  num_groups: int
  split: Split

  def group_sizes(self) -> Array:
    """Returns the rows of each group, which sum to `num_rows`."""
    random = np.random.default_rng(0)
    match self.split:
      case 'even':
        shares = np.full(self.num_groups, 1 / self.num_groups)
      case 'uneven':
        shares = random.dirichlet(np.ones(self.num_groups))
      case 'half empty':
        shares = random.dirichlet(np.ones(self.num_groups))
        shares[::2] = 0
    borders = np.round(np.cumsum(shares / shares.sum()) * self.num_rows)
    return jnp.asarray(np.diff(borders, prepend=0), jnp.int32)


def dense(x: Array, weights: Array, group_sizes: Array) -> Array:
  """The other side: all rows by the first matrix."""
  del group_sizes
  return x @ weights[0]


def gradient(function: Callable[..., Array]) -> Callable[..., object]:
  """Returns a function of the gradients of rows and weights."""

  def run(x: Array, weights: Array, group_sizes: Array, grad: Array) -> object:
    if function is dense:
      weights = weights[:1]  # The gradient of one matrix, like one matmul's.
    _, pullback = jax.vjp(lambda *xs: function(*xs, group_sizes), x, weights)
    return pullback(grad)

  return jax.jit(run)


def seconds(function: Callable[..., object], arrays: Sequence[Array]) -> float:
  start = time.perf_counter()
  jax.block_until_ready(function(*arrays))
  return time.perf_counter() - start


def measure(sizes: Sizes, repetitions: int, ragged: bool) -> str:
  """Returns a line of the table: milliseconds, forward and gradient."""
  random = np.random.default_rng(1)

  def normal(*shape: int) -> Array:
    return jnp.asarray(random.normal(size=shape), jnp.float32)

  M, K, N = sizes.num_rows, sizes.in_dim, sizes.out_dim
  arrays = [normal(M, K), normal(sizes.num_groups, K, N), sizes.group_sizes()]
  sides: list[Callable[..., Array]] = [
    dense,
    functools.partial(grouped_matmul, implementation='xla'),
  ]
  if ragged:
    sides.append(jax.lax.ragged_dot)
  programs = [(jax.jit(side), arrays) for side in sides]
  programs += [(gradient(side), [*arrays, normal(M, N)]) for side in sides]
  taken: list[list[float]] = [[] for _ in programs]
  for repetition in range(repetitions + 1):
    for index, (program, inputs) in enumerate(programs):
      slow = ragged and index % len(sides) == 2
      if slow and repetition > 1:
        continue  # Seconds long, and not a close call.
      spent = seconds(program, inputs)
      if repetition:  # The first compiles.
        taken[index].append(1e3 * spent)
  times = [statistics.median(t) for t in taken]
  line = f'{M}x{K}x{N:<5} {sizes.num_groups:>6} {sizes.split:<11}'
  for part in (times[: len(sides)], times[len(sides) :]):
    line += f'{part[0]:>8.1f}{part[1]:>8.1f}{part[1] / part[0]:>8.2f}'
    line += f'{part[2] / part[0]:>8.0f}' if ragged else f'{"":8}'
  return line


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repetitions', type=int, default=11)
  parser.add_argument('--groups', type=int, nargs='+', default=[8, 16, 64])
  parser.add_argument(
    '--ragged', action='store_true', help='also lax.ragged_dot, on even groups'
  )
  flags = parser.parse_args()
  columns = f'{"dense":>8}{"ours":>8}{"x dense":>8}{"ragged x":>8}'
  print(f'{"":<14} {"":>6} {"":<11}{"forward, ms":>32}{"gradient, ms":>32}')
  print(f'{"M x K x N":<14} {"groups":>6} {"rows":<11}{columns}{columns}')
  splits: tuple[Split, ...] = ('even', 'uneven', 'half empty')
  for shape in SHAPES:
    for num_groups in flags.groups:
      for split in splits:
        sizes = Sizes(*shape, num_groups, split)
        ragged = flags.ragged and split == 'even'
        print(measure(sizes, flags.repetitions, ragged), flush=True)


if __name__ == '__main__':
  main()
