"""The training loss: MTP targets, microbatches, balance."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.data.batch import Batch
from glm5_jax.models import definition
from glm5_jax.models import losses
from glm5_jax.models import presets
from glm5_jax.models.config import MtpConfig
from glm5_jax.parallelism.axis_rules import AxisRules
from tests.models import batches

CONFIG = dataclasses.replace(
  presets.tiny, init_scale=0.1, mtp=MtpConfig(depth=2)
)
# A loss of 6 nats and gradients of size 1, summed in another order.
TOLERANCE = 2e-5


@functools.cache
def _made():
  made = definition.define(CONFIG, AxisRules())
  return made, made.init(jax.random.key(0))


def _loss(params, batch, totals):
  made, variables = _made()
  model = made.bind(definition.Variables(params, variables.balance))
  return losses.pretraining_loss(model, batch, totals, z_loss=1e-3)


@functools.cache
def _value_and_grad():
  return jax.jit(jax.value_and_grad(_loss, has_aux=True))


def test_losses_and_gradients_of_microbatches_add_up():
  _, variables = _made()
  batch = batches.packed(4, 16, 512)
  totals = losses.loss_totals(batch, CONFIG)
  run = _value_and_grad()
  (whole, metrics), grads = run(variables.params, batch, totals)
  halves = [
    run(variables.params, Batch(*(x[i : i + 2] for x in batch)), totals)
    for i in (0, 2)
  ]
  added = jax.tree.map(lambda a, b: a + b, *halves)
  (loss, added_metrics), added_grads = added
  np.testing.assert_allclose(loss, whole, atol=TOLERANCE)
  for got, wanted in (
    (added_metrics, metrics),
    (added_grads, grads),
  ):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE),
      got,
      wanted,
    )


def test_mtp_depths_predict_what_lies_further_ahead():
  segments = jnp.array([[1, 1, 1, 1, 2, 2, 2, 0]])
  tokens = jnp.array([[10, 11, 12, 13, 20, 21, 22, 0]])
  shifted, same = losses.ahead(tokens, segments, 2)
  np.testing.assert_array_equal(
    jnp.where(same, shifted, -1), [[12, 13, -1, -1, 22, -1, -1, -1]]
  )
  batch = Batch(
    tokens=tokens,
    targets=jnp.array([[11, 12, 13, 0, 21, 22, 0, 0]]),
    weights=jnp.array([[1.0, 1, 1, 0, 1, 1, 0, 0]]),
    segment_ids=segments,
    positions=jnp.array([[0, 1, 2, 3, 0, 1, 2, 0]]),
    source_ids=jnp.zeros((1, 8), jnp.int32),
  )
  totals = losses.loss_totals(batch, CONFIG)
  assert totals.next_token == 5
  # Two ahead: 12, 13 and 22. Three ahead: 13.
  np.testing.assert_array_equal(totals.mtp, [3, 1])


def test_mtp_loss_is_real_and_trains_its_layer():
  _, variables = _made()
  batch = batches.packed(2, 16, 512)
  totals = losses.loss_totals(batch, CONFIG)
  (loss, metrics), grads = _value_and_grad()(variables.params, batch, totals)
  assert metrics.mtp_cross_entropy > 1.0
  np.testing.assert_allclose(
    loss,
    metrics.cross_entropy + metrics.z_loss + 0.3 * metrics.mtp_cross_entropy,
    rtol=1e-6,
  )
  for path, grad in jax.tree_util.tree_leaves_with_path(grads):
    assert jnp.isfinite(grad).all(), path
    assert abs(grad).max() > 0, path


def test_each_layer_learns_its_own_balance():
  made, variables = _made()
  batch = batches.packed(2, 16, 512)
  totals = losses.loss_totals(batch, CONFIG)
  (_, metrics), _ = _value_and_grad()(variables.params, batch, totals)
  tokens = float((batch.segment_ids > 0).sum())
  # The MTP layer runs where a token one, then two places ahead exists.
  ahead = sum(
    float(losses.ahead(batch.tokens, batch.segment_ids, k)[1].sum())
    for k in (1, 2)
  )
  np.testing.assert_allclose(
    metrics.expert_load.sum(-1), [2 * tokens, 2 * tokens, 2 * ahead]
  )
  balance = losses.updated_balance(
    variables.balance, metrics.expert_load, CONFIG
  )
  rate = CONFIG.moe.bias_update_rate
  load = np.asarray(metrics.expert_load)
  expected = rate * np.sign(load.mean(-1, keepdims=True) - load)
  np.testing.assert_allclose(
    balance['moe_layers']['ffn']['bias'], expected[:2], atol=1e-9
  )
  np.testing.assert_allclose(
    balance['mtp']['block']['ffn']['bias'], expected[2], atol=1e-9
  )


def test_padding_changes_nothing():
  """Tokens, targets and positions of padding may hold anything."""
  _, variables = _made()
  batch = batches.packed(2, 16, 512)
  padding = batch.segment_ids == 0
  other = batch._replace(
    tokens=jnp.where(padding, 99, batch.tokens),
    targets=jnp.where(padding, 98, batch.targets),
    positions=jnp.where(padding, 97, batch.positions),
  )
  totals = losses.loss_totals(batch, CONFIG)
  run = _value_and_grad()
  first = run(variables.params, batch, totals)
  second = run(variables.params, other, totals)
  jax.tree.map(np.testing.assert_array_equal, first, second)
