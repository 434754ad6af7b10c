"""Every parameter has the rule that its axes call for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.models import definition
from glm5_jax.models import presets
from glm5_jax.parallelism.axis_rules import AxisRules
from glm5_jax.parallelism.partitioning import is_axes
from glm5_jax.training import optimizer
from glm5_jax.training.config import OptimizerConfig
from glm5_jax.training.config import ScheduleConfig
from tests.training import toy

FLAT = ScheduleConfig(kind='constant', warmup_steps=0)
MODEL_AXES = definition.define(presets.tiny, AxisRules()).axes.params


def _by_name(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_axes)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in leaves
  }


def test_muon_takes_the_hidden_matrices_and_nothing_else():
  rules = {
    name: optimizer.rule(axes, 'muon')
    for name, axes in _by_name(MODEL_AXES).items()
  }
  adamw = {name for name, rule in rules.items() if rule == 'adamw'}
  assert {'embedding', 'head', 'moe_layers/ffn/router'} <= adamw
  for name in adamw - {'embedding', 'head'}:
    assert name.endswith(('/scale', '/router')), name
  for name in ('attention/query_up', 'attention/out', 'ffn/gate_up'):
    assert rules[f'moe_layers/{name}'] == 'muon'


def test_under_adamw_everything_is_adamw():
  rules = {
    optimizer.rule(axes, 'adamw') for axes in _by_name(MODEL_AXES).values()
  }
  assert rules == {'adamw'}


@pytest.mark.parametrize('kind', ['adamw', 'muon'])
def test_weight_decay_shrinks_matrices_and_leaves_norms(kind):
  config = OptimizerConfig(
    kind=kind,
    learning_rate=0.1,
    embedding_learning_rate=0.1,
    muon_learning_rate=0.2,
    weight_decay=0.5,
    schedule=FLAT,
  )
  made = toy.Definition()
  update = optimizer.make_optimizer(config, made.axes.params, num_steps=10)
  params = made.init(None).params
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = jax.jit(update.update)(zeros, update.init(params), params)
  for name, change in _by_name(updates).items():
    weight = _by_name(params)[name]
    is_muon = kind == 'muon' and name in ('layers/up', 'layers/down')
    rate = 0.2 if is_muon else 0.1
    expected = 0.0 if name == 'layers/norm' else -rate * 0.5 * weight
    np.testing.assert_allclose(change, expected * np.ones_like(weight), 1e-6)


def test_the_gradient_is_clipped_by_its_global_norm():
  config = OptimizerConfig(max_grad_norm=1.0, weight_decay=0.0, schedule=FLAT)
  made = toy.Definition()
  update = optimizer.make_optimizer(config, made.axes.params, num_steps=10)
  params = made.init(None).params
  grads = jax.tree.map(lambda x: jnp.full_like(x, 3.0), params)
  size = sum(x.size for x in jax.tree.leaves(params))
  _, state = jax.jit(update.update)(grads, update.init(params), params)
  moment = state[1].inner_states['embedding'].inner_state[0].mu['embedding']
  clipped = 3.0 / np.sqrt(9.0 * size)
  # A first moment of one step: (1 - beta1) of the clipped gradient.
  np.testing.assert_allclose(moment, 0.1 * clipped, rtol=1e-5)


def test_no_optimizer_state_belongs_to_a_balance_bias():
  for config in (toy.OPTIMIZER, toy.MUON):
    parts = toy.build(optimizer=config)
    names = _by_name(parts.wanted.opt_state)
    assert not [name for name in names if 'balance' in name or 'bias' in name]
