"""Sorting slots by expert, there and back."""

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.models import dispatch

# Sums of two float32 products.
TOLERANCE = 1e-5


def _case(key, tokens=13, choices=3, groups=4):
  ids = jax.random.randint(key, (tokens, choices), -1, groups + 1)
  x = jax.random.normal(key, (tokens, 5))
  weights = jax.random.uniform(key, (tokens, choices))
  return ids, x, weights, groups, tokens * choices


def test_rows_are_grouped_and_in_slot_order(key):
  ids, x, _, groups, rows = _case(key)
  plan = dispatch.plan(ids, groups, rows)
  sizes = np.asarray(plan.group_sizes)
  flat = np.asarray(ids).reshape(-1)
  np.testing.assert_array_equal(sizes, [(flat == g).sum() for g in range(4)])
  served = np.concatenate([np.flatnonzero(flat == g) for g in range(4)])
  got = np.asarray(plan.slot_of_row)[: sizes.sum()]
  np.testing.assert_array_equal(got, served)
  sorted_x = dispatch.to_rows(x, plan)
  np.testing.assert_array_equal(
    sorted_x[: sizes.sum()], np.asarray(x)[served // 3]
  )
  assert (np.asarray(sorted_x)[sizes.sum() :] == 0).all()


def test_gradients_equal_those_of_the_plain_formula(key):
  ids, x, weights, groups, rows = _case(key)
  scale = jnp.arange(1.0, groups + 1)

  def planned(x, weights):
    plan = dispatch.plan(ids, groups, rows)
    y = dispatch.to_rows(x, plan)
    group = jnp.repeat(
      jnp.append(scale, 0.0),
      jnp.append(plan.group_sizes, rows - plan.group_sizes.sum()),
      total_repeat_length=rows,
    )
    return dispatch.combine(jnp.sin(y * group[:, None]), weights, plan)

  def plain(x, weights):
    here = (ids >= 0) & (ids < groups)
    factor = jnp.where(here, scale[jnp.clip(ids, 0, groups - 1)], 0.0)
    y = jnp.sin(x[:, None] * factor[..., None])
    return (y * weights[..., None]).sum(1)

  np.testing.assert_allclose(
    planned(x, weights), plain(x, weights), atol=TOLERANCE
  )
  cotangent = jax.random.normal(key, x.shape)

  def gradients(f):
    return jax.grad(lambda *a: (f(*a) * cotangent).sum(), (0, 1))(x, weights)

  for got, expected in zip(gradients(planned), gradients(plain), strict=True):
    np.testing.assert_allclose(got, expected, atol=TOLERANCE)
