"""The whole decoder: causality, segments, permutations, precision."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.models import definition
from glm5_jax.models import presets
from glm5_jax.parallelism.axis_rules import AxisRules
from tests.models import batches

# Hidden states of size 1 after three layers in float32.
TOLERANCE = 3e-5
CONFIG = dataclasses.replace(presets.tiny, init_scale=0.1)


@functools.cache
def _model(config=CONFIG):
  made = definition.define(config, AxisRules())
  variables = made.init(jax.random.key(0))
  run = jax.jit(lambda v, *a: made.bind(v)(*a)[0])
  return made, variables, run


def test_changing_a_token_leaves_the_past_bit_identical():
  _, variables, run = _model()
  batch = batches.packed(2, 32, 512)
  ones = jnp.ones((2, 32), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(32)[None], (2, 32))
  before = run(variables, batch.tokens, ones, positions)
  tokens = batch.tokens.at[:, 20].set((batch.tokens[:, 20] + 1) % 512)
  after = run(variables, tokens, ones, positions)
  np.testing.assert_array_equal(before[:, :20], after[:, :20])
  assert (abs(before - after)[:, 20:].max(-1) > 0).all()


def test_packed_segments_never_see_each_other():
  _, variables, run = _model()
  batch = batches.packed(2, 32, 512)
  first = batch.segment_ids == 1
  tokens = jnp.where(first, (batch.tokens + 7) % 512, batch.tokens)
  before = run(variables, batch.tokens, batch.segment_ids, batch.positions)
  after = run(variables, tokens, batch.segment_ids, batch.positions)
  others = batch.segment_ids > 1
  assert others.any()
  np.testing.assert_array_equal(before[others], after[others])
  assert abs(before - after)[first].max() > 0


def test_a_document_packed_equals_the_document_alone():
  _, variables, run = _model()
  batch = batches.packed(1, 32, 512)
  packed = run(variables, batch.tokens, batch.segment_ids, batch.positions)
  places = np.flatnonzero(batch.segment_ids[0] == 2)
  length = len(places)
  alone = run(
    variables,
    jnp.zeros((1, 32), jnp.int32).at[0, :length].set(batch.tokens[0, places]),
    jnp.zeros((1, 32), jnp.int32).at[0, :length].set(1),
    jnp.zeros((1, 32), jnp.int32).at[0, :length].set(jnp.arange(length)),
  )
  np.testing.assert_allclose(
    packed[0, places], alone[0, :length], atol=TOLERANCE
  )


def test_permuting_experts_leaves_the_outputs():
  made, variables, run = _model()
  batch = batches.packed(2, 32, 512)
  inputs = (batch.tokens, batch.segment_ids, batch.positions)
  balance = jax.tree.map(
    lambda b: 0.1 * jax.random.normal(jax.random.key(1), b.shape),
    variables.balance,
  )
  order = np.random.RandomState(0).permutation(8)
  params = jax.tree.map(lambda x: x, variables.params)
  ffn = params['moe_layers']['ffn']
  ffn['router'] = ffn['router'][..., order]
  ffn['gate_up'] = ffn['gate_up'][:, order]
  ffn['down'] = ffn['down'][:, order]
  permuted_balance = jax.tree.map(lambda b: b[..., order], balance)
  plain = run(definition.Variables(variables.params, balance), *inputs)
  permuted = run(definition.Variables(params, permuted_balance), *inputs)
  np.testing.assert_allclose(plain, permuted, atol=TOLERANCE)
  ffn['down'] = ffn['down'][:, [1, 0, *range(2, 8)]]
  swapped = run(definition.Variables(params, permuted_balance), *inputs)
  assert abs(plain - swapped).max() > 1e-3


@pytest.mark.parametrize('remat', ['none', 'dots', 'block'])
def test_rematerialisation_leaves_value_and_gradient(remat):
  config = dataclasses.replace(CONFIG, remat=remat, mtp=None)
  made = definition.define(config, AxisRules())
  variables = made.init(jax.random.key(0))
  batch = batches.packed(1, 16, 512)

  def loss(params):
    model = made.bind(definition.Variables(params, variables.balance))
    hidden, _ = model(batch.tokens, batch.segment_ids, batch.positions)
    return (hidden**2).mean()

  grads = jax.jit(jax.grad(loss))(variables.params)
  norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
  reference = _gradient_norm()
  np.testing.assert_allclose(norm, reference, rtol=1e-5)


@functools.cache
def _gradient_norm():
  config = dataclasses.replace(CONFIG, remat='none', mtp=None)
  made = definition.define(config, AxisRules())
  variables = made.init(jax.random.key(0))
  batch = batches.packed(1, 16, 512)

  def loss(params):
    model = made.bind(definition.Variables(params, variables.balance))
    hidden, _ = model(batch.tokens, batch.segment_ids, batch.positions)
    return (hidden**2).mean()

  grads = jax.grad(loss)(variables.params)
  return float(jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads))))


def test_compute_in_bfloat16_keeps_norms_and_router_in_float32():
  config = dataclasses.replace(CONFIG, compute_dtype='bfloat16')
  made, variables, run = _model(config)
  batch = batches.packed(2, 32, 512)
  inputs = (batch.tokens, batch.segment_ids, batch.positions)
  with jax.numpy_dtype_promotion('strict'):
    low = run(variables, *inputs)
  assert low.dtype == jnp.bfloat16
  high = _model()[2](variables, *inputs)
  # Two decimal digits of bfloat16 over three layers.
  assert abs(low.astype(jnp.float32) - high).mean() < 0.05


def test_longer_rows_than_the_preset_are_refused():
  config = dataclasses.replace(CONFIG, max_length=16)
  made, variables, run = _model(config)
  batch = batches.packed(1, 32, 512)
  with pytest.raises(ValueError, match='32 tokens.*max_length is 16'):
    run(variables, batch.tokens, batch.segment_ids, batch.positions)
