"""Shapes on which every implementation of an op is held against its reference.

Tolerances are relative to the largest value of the result compared. float32:
sums of a few hundred products in another order differ by 1e-6. bfloat16 has 8
bits, so a rounded result is off by up to 4e-3; gradients are sums of them.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {'float32': 1e-5, 'bfloat16': 1e-2}
GRADIENT_TOLERANCE = {'float32': 1e-5, 'bfloat16': 2e-2}


@dataclasses.dataclass(frozen=True)
class Grouped:
  """Sizes of a grouped matmul; rows past the groups are a tail."""

  name: str
  num_rows: int
  group_sizes: tuple[int, ...]
  in_dim: int = 24
  out_dim: int = 40
  dtype: str = 'float32'

  def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rows, weights and group sizes."""
    random = np.random.default_rng(0)
    num_groups = len(self.group_sizes)
    x = random.normal(size=(self.num_rows, self.in_dim))
    weights = random.normal(size=(num_groups, self.in_dim, self.out_dim))
    return (
      jnp.asarray(x, self.dtype),
      jnp.asarray(weights, self.dtype),
      jnp.asarray(self.group_sizes, jnp.int32),
    )


# A tile is 128 rows but for the one row: groups end inside a quarter of it, on
# its border, in its last quarter and after full tiles.
GROUPED = (
  Grouped('one_row', 1, (1,)),
  Grouped('even', 300, (75, 75, 75, 75)),
  Grouped('uneven', 300, (0, 160, 3, 137)),
  Grouped('tail', 300, (128, 0, 32, 99)),
  Grouped('all_to_one', 300, (0, 0, 300, 0)),
  Grouped('no_rows', 300, (0, 0, 0, 0)),
  Grouped('bfloat16', 300, (0, 160, 3, 100), dtype='bfloat16'),
)


@dataclasses.dataclass(frozen=True)
class Flash:
  """Sizes of an attention over two rows packed differently."""

  name: str
  length: int
  num_heads: int = 2
  num_key_heads: int = 2
  head_dim: int = 24
  value_dim: int = 16
  window: int | None = None
  dtype: str = 'float32'

  @property
  def scale(self) -> float:
    return self.head_dim**-0.5

  def layout(self) -> tuple[jax.Array, jax.Array]:
    """Returns segment ids and positions, like `aabbbb` and `0acc00`."""
    segment_ids = np.ones((2, self.length), np.int32)
    segment_ids[0, self.length * 2 // 5 :] = 2
    segment_ids[1, self.length * 2 // 5 :] = 7
    segment_ids[1, self.length * 5 // 6 + 1 :] = 0
    segment_ids[1, : self.length // 9] = 0
    positions = np.zeros_like(segment_ids)
    for t in range(1, self.length):
      same = segment_ids[:, t] == segment_ids[:, t - 1]
      positions[:, t] = np.where(same, positions[:, t - 1] + 1, 0)
    return jnp.asarray(segment_ids), jnp.asarray(positions)

  def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns query, key and value."""
    random = np.random.default_rng(0)
    shapes = (
      (2, self.length, self.num_heads, self.head_dim),
      (2, self.length, self.num_key_heads, self.head_dim),
      (2, self.length, self.num_key_heads, self.value_dim),
    )
    query, key, value = (
      jnp.asarray(random.normal(size=shape), self.dtype) for shape in shapes
    )
    return query, key, value


# A row of 257 is three tiles of 88, the last one past the end of the row.
FLASH = (
  Flash('one_token', 1),
  Flash('length_257', 257),
  Flash('shared_key_head', 255, num_heads=4, num_key_heads=1),
  Flash('grouped_heads_in_window', 257, num_heads=4, window=20),
  Flash('window_of_one', 40, window=1, value_dim=32),
  Flash('bfloat16', 255, dtype='bfloat16'),
)


def name(case: Grouped | Flash) -> str:
  return case.name


def outcome(
  function: Callable[..., jax.Array], num_inputs: int
) -> Callable[..., tuple[jax.Array, ...]]:
  """Returns a jitted function of the output and the gradients.

  Args:
    function: what to run.
    num_inputs: leading arguments to differentiate in.
  """

  @jax.jit
  def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    inputs, rest = arrays[:num_inputs], arrays[num_inputs:]
    out, pullback = jax.vjp(lambda *inputs: function(*inputs, *rest), *inputs)
    cotangent = jnp.cos(jnp.arange(out.size, dtype=jnp.float32))
    return out, *pullback(cotangent.reshape(out.shape).astype(out.dtype))

  return run


def distance(got: Any, expected: Any) -> float:
  """Returns the largest difference over the largest expected value.

  Where those are below 1, the difference itself: inputs and cotangents are of
  size 1, so the terms of every sum are, and where they cancel (the gradient of
  a query that sees one key is exactly zero) their rounding is what is left.
  """
  a, b = np.asarray(got, np.float64), np.asarray(expected, np.float64)
  assert a.shape == b.shape
  if not np.isfinite(a).all():
    return float('inf')
  return float(np.abs(a - b).max() / max(np.abs(b).max(), 1.0))


def assert_close(
  got: tuple[jax.Array, ...], expected: tuple[jax.Array, ...], dtype: str
) -> None:
  """Asserts that output and gradients have the dtype and are close."""
  tolerances = [TOLERANCE[dtype]] + [GRADIENT_TOLERANCE[dtype]] * 8
  pairs = zip(got, expected, strict=True)
  for (a, b), tolerance in zip(pairs, tolerances, strict=False):
    assert a.dtype == dtype
    assert distance(a, b) <= tolerance
