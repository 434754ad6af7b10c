"""Rotary positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.models import rope

LAYOUTS = ('interleaved', 'half_split')
# Sines of positions below 100 in float32, once rotated and once multiplied.
TOLERANCE = 1e-5


def _rotated(x, position, layout):
  positions = jnp.full((1, 1), position, jnp.int32)
  angles = rope.angles(positions, x.shape[-1], 1e4)
  return rope.rotate(x[None, None, None], angles, layout)[0, 0, 0]


@pytest.mark.parametrize('layout', LAYOUTS)
def test_products_depend_on_the_distance_alone(layout, key):
  query, key_ = jax.random.normal(key, (2, 16))
  near = _rotated(query, 7, layout) @ _rotated(key_, 3, layout)
  far = _rotated(query, 67, layout) @ _rotated(key_, 63, layout)
  other = _rotated(query, 8, layout) @ _rotated(key_, 3, layout)
  assert abs(near - far) < TOLERANCE
  assert abs(near - other) > 1e-2


def test_interleaved_turns_neighbours_like_complex_numbers(key):
  x = np.asarray(jax.random.normal(key, (8,)), np.float64)
  turn = np.exp(1j * 5 * 1e4 ** (-np.arange(0, 8, 2) / 8))
  expected = (x[0::2] + 1j * x[1::2]) * turn
  got = np.asarray(_rotated(jnp.asarray(x, jnp.float32), 5, 'interleaved'))
  np.testing.assert_allclose(got[0::2], expected.real, atol=TOLERANCE)
  np.testing.assert_allclose(got[1::2], expected.imag, atol=TOLERANCE)


def test_layouts_differ_by_a_permutation_of_entries(key):
  x = jax.random.normal(key, (8,))
  order = np.concatenate([np.arange(0, 8, 2), np.arange(1, 8, 2)])
  interleaved = _rotated(x, 5, 'interleaved')[order]
  half_split = _rotated(x[order], 5, 'half_split')
  np.testing.assert_allclose(interleaved, half_split, atol=TOLERANCE)
  assert abs(interleaved - _rotated(x, 5, 'half_split')).max() > 1e-2


def test_large_positions_keep_their_angle_in_bfloat16(key):
  x = jax.random.normal(key, (8,)).astype(jnp.bfloat16)
  first, second = (_rotated(x, p, 'interleaved') for p in (100_000, 100_001))
  assert first.dtype == jnp.bfloat16
  assert abs((first - second).astype(jnp.float32)).max() > 0.1
