"""The step: microbatches add up, faults are refused, layouts hold."""

import jax
import numpy as np
import pytest

from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training import state as state_module
from tests.training import toy

# float32 sums over rows taken in another order, through one Adam update whose
# epsilon is large.
TOLERANCE = 1e-5


def _close(one, other):
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_allclose(a, b, atol=TOLERANCE)


def _take(parts, state, batch):
  """Returns state and metrics as numpy arrays."""
  return jax.device_get(parts.step(state, parts.place(batch)))


def test_microbatches_do_what_the_whole_batch_does():
  batch = next(toy.Batches())
  whole = toy.build()
  pieces = toy.build(microbatches=4)
  one, one_metrics = _take(whole, whole.initial(), batch)
  four, four_metrics = _take(pieces, pieces.initial(), batch)
  _close(one, four)
  _close(one_metrics, four_metrics)
  assert one.step == four.step == 1


def test_microbatches_weigh_rows_by_their_tokens():
  # Rows of unequal weight: a mean of means over pieces would differ.
  batch = next(toy.Batches())
  weights = batch.weights.copy()
  weights[1:] = 0
  batch = batch._replace(weights=weights)
  whole = toy.build()
  pieces = toy.build(microbatches=4)
  _, one = _take(whole, whole.initial(), batch)
  _, four = _take(pieces, pieces.initial(), batch)
  assert four.loss == pytest.approx(one.loss, abs=TOLERANCE)
  assert four.grad_norm == pytest.approx(one.grad_norm, abs=TOLERANCE)


def test_a_refused_step_leaves_every_bit_of_the_state():
  parts = toy.build()
  batches = toy.Batches()
  state, _ = parts.step(parts.initial(), parts.place(next(batches)))
  before = state_module.digest(state)
  good = next(batches)
  bad = good._replace(weights=np.full_like(good.weights, np.nan))
  state, metrics = parts.step(state, parts.place(bad))
  assert not metrics.is_finite
  assert state_module.digest(state) == before
  state, metrics = parts.step(state, parts.place(good))
  assert metrics.is_finite
  assert state_module.digest(state) != before
  assert state.step == 2


def test_the_balance_bias_moves_by_its_rule_alone():
  parts = toy.build()
  before = parts.initial()
  old = np.asarray(before.variables.balance['router'])
  after, metrics = _take(parts, before, next(toy.Batches()))
  load = metrics.parts.expert_load
  expected = old + 0.01 * np.sign(load.mean(-1, keepdims=True) - load)
  np.testing.assert_array_equal(after.variables.balance['router'], expected)


@pytest.fixture(scope='module')
def sharded():
  return toy.build(MeshConfig(fsdp=2, expert=2, tensor=2), 8)


def test_eight_devices_step_as_one_does(sharded):
  alone = toy.build()
  batch = next(toy.Batches())
  one, one_metrics = _take(alone, alone.initial(), batch)
  eight, eight_metrics = _take(sharded, sharded.initial(), batch)
  _close(one, eight)
  _close(one_metrics, eight_metrics)


def test_moments_lie_as_their_parameters_do(sharded):
  state = sharded.initial()
  weights = dict(jax.tree_util.tree_leaves_with_path(state.variables.params))
  seen = []
  for rule in state.opt_state[1].inner_states.values():
    adam = rule.inner_state[0]
    for moments in (adam.mu, adam.nu):
      for path, moment in jax.tree_util.tree_leaves_with_path(moments):
        assert moment.sharding == weights[path].sharding
        seen.append(path)
  assert sorted(map(str, seen)) == sorted(2 * list(map(str, weights)))
  up = state.variables.params['layers']['up']
  assert up.addressable_shards[0].data.size == up.size // 8


def test_an_optimizer_state_of_unknown_owner_is_refused():
  parts = toy.build()

  def init(params):
    return {'sketch': np.zeros((64, 64), np.float32)}

  stray = parts.optimizer._replace(init=init)
  with pytest.raises(ValueError, match='sketch.*belongs to no parameter'):
    state_module.shardings(parts.mesh, parts.definition, stray)
