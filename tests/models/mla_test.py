"""Latent attention: the two forms, segments, causality."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.models import presets
from glm5_jax.models.config import Dense
from glm5_jax.models.mla import Mla
from glm5_jax.parallelism.axis_rules import AxisRules
from tests.models import batches

# Outputs of size 1 after five float32 contractions.
TOLERANCE = 2e-5


def _layer(window=None, layout='interleaved'):
  config = dataclasses.replace(presets.tiny.mla, rope_layout=layout)
  return Mla(
    64,
    config,
    Dense(window=window),
    init_scale=0.3,
    rules=AxisRules(),
    rngs=nnx.Rngs(params=0),
  )


def _inputs(key, length=24):
  batch = batches.packed(2, length, 16)
  x = jax.random.normal(key, (2, length, 64))
  return x, batch.segment_ids, batch.positions


@pytest.mark.parametrize('layout', ['interleaved', 'half_split'])
def test_absorbed_form_equals_the_expanded_one(key, layout):
  layer, inputs = _layer(layout=layout), _inputs(key)
  with jax.default_matmul_precision('highest'):
    expanded = layer(*inputs, form='expanded')
    absorbed = layer(*inputs, form='absorbed')
  assert abs(expanded).max() > 0.1
  scale = abs(expanded).max()
  np.testing.assert_allclose(absorbed / scale, expanded / scale, atol=TOLERANCE)


def test_a_window_drops_far_tokens_and_keeps_near_ones(key):
  x, _, _ = _inputs(key)
  ones = jnp.ones(x.shape[:2], jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(24)[None], (2, 24))
  layer = _layer(window=4)
  before = layer(x, ones, positions)
  after = layer(x.at[:, 10].add(1.0), ones, positions)
  changed = np.flatnonzero(abs(after - before).max((0, 2)) > 0)
  np.testing.assert_array_equal(changed, [10, 11, 12, 13])


def test_compute_dtype_follows_the_input(key):
  x, segments, positions = _inputs(key)
  y = _layer()(x.astype(jnp.bfloat16), segments, positions)
  assert y.dtype == jnp.bfloat16
