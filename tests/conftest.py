"""Eight CPU devices and strict array semantics for every test."""

from collections.abc import Iterator

import jax
import pytest

# Before any backend exists: meshes in tests are emulated on eight devices.
jax.config.update('jax_num_cpu_devices', 8)
# Tests compile far more than they compute: LLVM's optimizer takes most of the
# time of a suite of tiny shapes, and results agree to rounding without it.
jax.config.update('jax_disable_most_optimizations', True)
# `[B, T, D] + [D]` has to be written `[B, T, D] + [1, 1, D]`, so that a
# mistaken rank fails where it is made.
jax.config.update('jax_numpy_rank_promotion', 'raise')


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
    '--update-golden',
    action='store_true',
    help='write tests/experiments/golden/ anew; review the diff',
  )


@pytest.fixture
def strict_dtypes() -> Iterator[None]:
  """Mixing dtypes raises; a fixture since optax and flax mix them inside."""
  with jax.numpy_dtype_promotion('strict'):
    yield


@pytest.fixture
def key() -> jax.Array:
  return jax.random.key(0)
