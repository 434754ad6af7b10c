"""Chunked cross-entropy against the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.models.cross_entropy import chunked_cross_entropy
from glm5_jax.parallelism.axis_rules import AxisRules

# Sums of 60 float32 losses of about 4 nats.
TOLERANCE = 2e-4
RULES = AxisRules()


def _case(key):
  keys = jax.random.split(key, 4)
  hidden = jax.random.normal(keys[0], (3, 20, 8))
  head = jax.random.normal(keys[1], (8, 50))
  targets = jax.random.randint(keys[2], (3, 20), 0, 50)
  weights = jax.random.uniform(keys[3], (3, 20)).at[:, 5].set(0.0)
  return hidden, head, targets, weights


def _plain(hidden, head, targets, weights, z_loss):
  logits = hidden @ head
  log_z = jax.nn.logsumexp(logits, -1)
  picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
  return (weights * (log_z - picked + z_loss * log_z**2)).sum()


@pytest.mark.parametrize('chunk', [1, 7, 20, 64])
@pytest.mark.parametrize('z_loss', [0.0, 1e-2])
def test_value_and_gradients_equal_the_plain_formula(key, chunk, z_loss):
  hidden, head, targets, weights = _case(key)

  def chunked(hidden, head):
    return chunked_cross_entropy(
      hidden, head, targets, weights, chunk, z_loss, RULES
    )[0]

  def plain(hidden, head):
    return _plain(hidden, head, targets, weights, z_loss)

  with jax.default_matmul_precision('highest'):
    got = jax.value_and_grad(lambda *a: 3 * chunked(*a), (0, 1))(hidden, head)
    wanted = jax.value_and_grad(lambda *a: 3 * plain(*a), (0, 1))(hidden, head)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE, rtol=1e-5),
    got,
    wanted,
  )
  assert abs(chunked(hidden, head) - plain(hidden, head)) < TOLERANCE


def test_logits_of_the_whole_batch_never_exist():
  """At 4096 positions the temporaries stay below the logits' own size."""
  B, T, D, V = 1, 4096, 64, 4096

  def loss(hidden, head, targets, weights):
    return chunked_cross_entropy(
      hidden, head, targets, weights, 256, 0.0, RULES
    )[0]

  f32, i32 = jnp.float32, jnp.int32
  compiled = (
    jax.jit(jax.grad(loss, (0, 1)))
    .lower(
      jax.ShapeDtypeStruct((B, T, D), f32),
      jax.ShapeDtypeStruct((D, V), f32),
      jax.ShapeDtypeStruct((B, T), i32),
      jax.ShapeDtypeStruct((B, T), f32),
    )
    .compile()
  )
  logits_bytes = B * T * V * 4
  assert compiled.memory_analysis().temp_size_in_bytes < logits_bytes / 2
