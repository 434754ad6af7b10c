import dataclasses

import jax
import pytest

from glm5_jax.models import counting
from glm5_jax.models import definition
from glm5_jax.models import presets
from glm5_jax.models.config import Dense
from glm5_jax.parallelism.axis_rules import AxisRules

PRESETS = ['glm5_744b', 'glm5_hf', 'glm51_hf', 'glm52_hf', 'tiny', 'small']


def _size(tree: object) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize('name', PRESETS)
def test_formula_counts_what_the_model_has(name):
  config = getattr(presets, name)
  count = counting.parameters(config)
  variables = definition.define(config, AxisRules()).abstract
  params = variables.params
  assert _size(params['mtp']) == count.mtp
  assert _size(params) == count.trained == count.total + count.mtp
  assert _size(variables.balance) == count.balance_biases
  moe = params['moe_layers']['ffn']
  assert _size([moe['gate_up'], moe['down']]) == count.routed_experts
  assert _size(moe['shared']) == count.shared_experts
  assert _size(moe['router']) == count.router
  assert _size(params['dense_layers']['ffn']) == count.dense_ffn
  layers = [params['dense_layers'], params['moe_layers']]
  assert _size([layer['attention'] for layer in layers]) == count.attention


def test_a_model_without_mtp_or_dense_layers_is_counted_too():
  config = dataclasses.replace(presets.tiny, mtp=None, num_dense_layers=0)
  count = counting.parameters(config)
  variables = definition.define(config, AxisRules()).abstract
  assert _size(variables.params) == count.trained == count.total
  assert count.dense_ffn == count.mtp == 0


@pytest.mark.parametrize(
  ('name', 'total', 'active'),
  # Billions; the mission's model, and the published one without its MTP layer
  # (743.9 with its index, which has 0.7 of them).
  [('glm5_744b', 743.9, 39.4), ('glm5_hf', 743.2, None)],
)
def test_published_sizes(name, total, active):
  count = counting.parameters(getattr(presets, name))
  assert round(count.total / 1e9, 1) == total
  assert active is None or round(count.active / 1e9, 1) == active


def test_flops_are_two_per_active_weight_and_pair():
  config = dataclasses.replace(presets.tiny, mtp=None)
  count = counting.parameters(config)
  flops = counting.flops(config, sequence_length=1)
  vectors = count.norms + config.num_layers * (
    config.mla.query_latent_dim + config.mla.latent_dim
  )
  assert flops.weights == 2 * (count.active - count.embedding - vectors)
  # One token sees itself: a product of width H and one of width U per head.
  mla = config.mla
  pair = 2 * mla.num_heads * (mla.head_dim + mla.value_dim)
  assert flops.attention == config.num_layers * pair
  assert flops.training == 3 * flops.forward


def test_mtp_costs_a_layer_and_a_head_a_depth():
  one = counting.flops(presets.tiny, 64)
  mtp = dataclasses.replace(presets.tiny.mtp, depth=3)
  three = counting.flops(dataclasses.replace(presets.tiny, mtp=mtp), 64)
  assert three.mtp == 3 * one.mtp > 0
  assert three.forward == one.forward


@pytest.mark.parametrize('window', [None, 1, 3, 7, 100])
def test_mean_keys_is_the_mean_over_positions(window):
  length = 7
  reach = length if window is None else window
  expected = sum(min(t + 1, reach) for t in range(length)) / length
  assert counting.mean_keys(Dense(window), length) == pytest.approx(expected)


def test_compiled_forward_has_the_flops_of_the_formula():
  config = dataclasses.replace(
    presets.tiny, num_layers=1, num_dense_layers=1, mtp=None, hidden_dim=256
  )
  model = definition.define(config, AxisRules())
  T = 8

  def forward(variables, tokens):
    bound = model.bind(variables)
    hidden, _ = bound(tokens, tokens, tokens)
    return bound.logits(hidden)

  tokens = jax.ShapeDtypeStruct((1, T), 'int32')
  compiled = jax.jit(forward).lower(model.abstract, tokens).compile()
  measured = compiled.cost_analysis()['flops']
  expected = T * counting.flops(config, T).forward
  # Norms, rotations and softmax are not counted, and masked pairs are not
  # skipped at this length; both are small beside a width of 256.
  assert expected == pytest.approx(measured, rel=0.1)


def test_cache_and_weight_bytes_of_the_mission_model():
  # 88 layers of a latent of 512 and a rotary key of 64, two bytes each.
  assert counting.cache_bytes(presets.glm5_744b) == 88 * 576 * 2
  count = counting.parameters(presets.glm5_744b)
  read = counting.weight_bytes(presets.glm5_744b)
  assert 2 * (count.active - count.embedding) < read < 2 * count.active
