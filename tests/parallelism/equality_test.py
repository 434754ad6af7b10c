"""Eight devices compute what one device computes, and store an eighth each.

The reference run is one device. Inputs are chosen (and asserted) to keep every
routing choice at least `MARGIN` away from a tie, since rows of a CPU matmul
differ in the last digits with the number of rows. Run with `-m slow -s` to see
the table of all meshes.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from glm5_jax.models import definition
from glm5_jax.models import losses
from glm5_jax.models import presets
from glm5_jax.models import router
from glm5_jax.models.config import MtpConfig
from glm5_jax.parallelism import collectives
from glm5_jax.parallelism import mesh as mesh_module
from glm5_jax.parallelism import partitioning
from glm5_jax.parallelism.axis_rules import AxisRules
from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training import optimizer as optimizer_module
from glm5_jax.training import state as state_module
from glm5_jax.training import step as step_module
from glm5_jax.training.config import OptimizerConfig
from glm5_jax.training.config import ScheduleConfig
from tests.models import batches

MARGIN = 1e-4
# float32 sums of a few hundred terms, taken in another order.
LOSS_TOLERANCE = 1e-5
# Largest error of a gradient or parameter, as a share of the leaf's largest.
LEAF_TOLERANCE = 2e-5
# Norms and biases stay whole: at most this share of the bytes.
BYTES_TOLERANCE = 0.10

RULES = AxisRules()
CONFIG = dataclasses.replace(
  presets.tiny,
  num_layers=2,
  vocab_size=64,
  init_scale=0.15,
  mla=dataclasses.replace(presets.tiny.mla, num_heads=8),
  moe=dataclasses.replace(presets.tiny.moe, bias_update_rate=1e-2),
  mtp=MtpConfig(depth=1),
)
# A large epsilon: Adam divides by the gradient's size, which would blow up the
# rounding errors of entries whose gradient is zero but for rounding.
OPTIMIZER = OptimizerConfig(
  kind='adamw',
  learning_rate=1e-2,
  embedding_learning_rate=1e-2,
  epsilon=1e-3,
  schedule=ScheduleConfig(kind='constant', warmup_steps=0),
)
STEPS = 3

MESHES = {
  'data8': dict(data=8, fsdp=1),
  'fsdp8': dict(fsdp=8),
  'expert8': dict(fsdp=1, expert=8),
  'tensor8': dict(fsdp=1, tensor=8),
  'data2 fsdp4': dict(data=2, fsdp=4),
  'data4 tensor2': dict(data=4, fsdp=1, tensor=2),
  'data2 expert4': dict(data=2, fsdp=1, expert=4),
  'fsdp4 tensor2': dict(fsdp=4, tensor=2),
  'fsdp2 expert4': dict(fsdp=2, expert=4),
  'expert4 tensor2': dict(fsdp=1, expert=4, tensor=2),
  'data2 fsdp2 expert2': dict(data=2, fsdp=2, expert=2),
  'data2 expert2 tensor2': dict(data=2, fsdp=1, expert=2, tensor=2),
  'fsdp2 expert2 tensor2': dict(fsdp=2, expert=2, tensor=2),
}


def _with_transport(transport):
  moe = dataclasses.replace(CONFIG.moe, transport=transport)
  return dataclasses.replace(CONFIG, moe=moe)


class _Objective:
  """The pre-training loss, as the step wants it."""

  def __init__(self, made):
    self.made = made

  def totals(self, batch):
    return losses.loss_totals(batch, self.made.config)

  def loss(self, variables, batch, totals):
    model = self.made.bind(variables)
    return losses.pretraining_loss(model, batch, totals, z_loss=1e-4)

  def next_balance(self, balance, metrics):
    return losses.updated_balance(
      balance, metrics.expert_load, self.made.config
    )


def _recorder():
  """Keeps the last gradient in the optimizer state, so that a test sees it."""
  return optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (grads, grads),
  )


def _batches():
  return [
    batches.packed(8, 16, CONFIG.vocab_size, seed=seed) for seed in range(STEPS)
  ]


def _initial(made, optimizer):
  return state_module.init(made, optimizer, jax.random.key(9))


def _run(config, mesh, *, kind='adamw', tamper=lambda state: state):
  """Returns losses, first gradients and the last state (arrays on devices)."""
  made = definition.define(config, RULES)
  options = dataclasses.replace(OPTIMIZER, kind=kind)
  optimizer = optax.chain(
    _recorder(),
    optimizer_module.make_optimizer(options, made.axes.params, num_steps=STEPS),
  )
  shardings = state_module.shardings(mesh, made, optimizer)
  batch_sharding = partitioning.batch_sharding(mesh, RULES)
  train_step = step_module.compiled_on(
    mesh,
    step_module.make_train_step(
      _Objective(made), optimizer, axes=made.axes, rules=RULES
    ),
    state_shardings=shardings,
    batch_sharding=batch_sharding,
  )
  state = jax.device_put(tamper(_initial(made, optimizer)), shardings)
  values, first_grads = [], None
  for batch in _batches():
    state, metrics = train_step(state, jax.device_put(batch, batch_sharding))
    values.append(float(metrics.loss))
    if first_grads is None:
      first_grads = jax.tree.map(np.asarray, state.opt_state[0])
  return values, first_grads, state


@functools.cache
def _reference(kind='adamw'):
  """One device; also the smallest distance of any routing choice to a tie."""
  margins = []
  original = router.select

  def watched(scores_E, bias, config):
    biased = scores_E + bias.reshape((1,) * (scores_E.ndim - 1) + (-1,))
    best, _ = jax.lax.top_k(biased, config.experts_per_token + 1)
    jax.debug.callback(
      lambda x: margins.append(float(x)), (best[..., -2] - best[..., -1]).min()
    )
    return original(scores_E, bias, config)

  router.select = watched
  try:
    mesh = mesh_module.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    result = _run(CONFIG, mesh, kind=kind)
    jax.effects_barrier()
  finally:
    router.select = original
  values, grads, state = result
  return values, grads, jax.tree.map(np.asarray, state), min(margins)


def _worst(got, expected):
  """Largest error over leaves, as a share of the leaf's largest entry."""
  errors = jax.tree.map(
    lambda a, b: float(
      np.abs(np.asarray(a, np.float64) - b).max() / (np.abs(b).max() + 1e-12)
    ),
    got,
    expected,
  )
  return max(jax.tree.leaves(errors))


def _device_bytes(tree):
  """Bytes of a tree's arrays on the first device."""
  first = jax.devices()[0]
  return sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(tree)
    for shard in leaf.addressable_shards
    if shard.device == first
  )


def _errors(result, kind='adamw'):
  values, grads, state = result
  want_values, want_grads, want_state, _ = _reference(kind)
  return (
    float(np.abs(np.subtract(values, want_values)).max()),
    _worst(grads, want_grads),
    _worst(state.variables, want_state.variables),
    _worst(state.opt_state[1:], want_state.opt_state[1:]),
  )


def _is_equal(result, kind='adamw'):
  loss, *leaves = _errors(result, kind)
  return loss < LOSS_TOLERANCE and max(leaves) < LEAF_TOLERANCE


def _mesh(sizes):
  return mesh_module.make_mesh(MeshConfig(**sizes))


def _check(name, transport, kind='adamw'):
  sizes = MESHES[name]
  assert _reference(kind)[-1] >= MARGIN
  result = _run(_with_transport(transport), _mesh(sizes), kind=kind)
  errors = _errors(result, kind)
  print(
    f'\n{name:24s} {transport:10s} {kind:6s} loss {errors[0]:.1e}  gradients '
    f'{errors[1]:.1e}  parameters {errors[2]:.1e}  optimizer {errors[3]:.1e}',
    end='',
  )
  assert _is_equal(result, kind), errors
  pieces = math.prod(
    size for axis, size in sizes.items() if axis in ('fsdp', 'expert', 'tensor')
  )
  state = result[2]
  for part in (state.variables.params, state.opt_state):
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(part))
    share = _device_bytes(part) * pieces / total
    assert abs(share - 1) < BYTES_TOLERANCE, (name, share)


def test_a_mixed_mesh_equals_one_device():
  _check('fsdp2 expert2 tensor2', 'all_to_all')


@pytest.mark.slow
@pytest.mark.parametrize('name', list(MESHES))
def test_every_mesh_equals_one_device(name):
  _check(name, 'all_gather')


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name in MESHES if 'expert' in name])
def test_both_transports_equal_one_device(name):
  _check(name, 'all_to_all')


@pytest.mark.slow
def test_muon_equals_one_device():
  _check('fsdp2 expert2 tensor2', 'all_gather', kind='muon')


@pytest.mark.slow
def test_swapped_experts_are_caught():
  def swap(state):
    def one(path, x):
      keys = [getattr(k, 'key', None) for k in path]
      if 'moe_layers' in keys and keys[-1] == 'down' and 'shared' not in keys:
        return x[:, jnp.array([1, 0, *range(2, 8)])]
      return x

    params = jax.tree_util.tree_map_with_path(one, state.variables.params)
    variables = definition.Variables(params, state.variables.balance)
    return dataclasses.replace(state, variables=variables)

  result = _run(CONFIG, _mesh(MESHES['expert8']), tamper=swap)
  assert not _is_equal(result)


@pytest.mark.slow
def test_a_missing_sum_over_the_tensor_axis_is_caught(monkeypatch):
  def only_the_first(x, axes):
    return jax.lax.psum(jnp.where(jax.lax.axis_index(axes) == 0, x, 0), axes)

  monkeypatch.setattr(collectives, 'reduce_sum', only_the_first)
  result = _run(CONFIG, _mesh(MESHES['data4 tensor2']))
  assert not _is_equal(result)


def _gradient_shares(constrained):
  """Returns bytes of each gradient on a device, as a share of its part."""
  made = definition.define(dataclasses.replace(CONFIG, mtp=None), RULES)
  mesh = _mesh(MESHES['fsdp2 expert2 tensor2'])
  shardings = partitioning.shardings(mesh, RULES, made.axes, made.abstract)
  variables = jax.device_put(made.init(jax.random.key(0)), shardings)
  batch = jax.device_put(
    _batches()[0], partitioning.batch_sharding(mesh, RULES)
  )
  objective = _Objective(made)

  def gradients(params, batch):
    def loss(params):
      held = definition.Variables(params, variables.balance)
      return objective.loss(held, batch, objective.totals(batch))[0]

    return constrained(jax.grad(loss)(params), made.axes.params)

  with jax.set_mesh(mesh):
    grads = jax.jit(gradients)(variables.params, batch)
  return jax.tree_util.tree_map_with_path(
    lambda path, grad, param: (
      jax.tree_util.keystr(path),
      _device_bytes(grad) / _device_bytes(param),
    ),
    grads,
    variables.params,
  )


@pytest.mark.slow
def test_an_unconstrained_gradient_is_caught():
  """Constrained gradients lie like their parameters; one left open does not."""

  def all_of_them(grads, axes):
    return partitioning.constrain_tree(grads, axes, RULES)

  def all_but_one(grads, axes):
    kept = all_of_them(grads, axes)
    everywhere = jax.lax.with_sharding_constraint(
      grads['head'], jax.sharding.PartitionSpec(None, None)
    )
    return {**kept, 'head': everywhere}

  is_pair = lambda node: isinstance(node, tuple)
  good = jax.tree.leaves(_gradient_shares(all_of_them), is_leaf=is_pair)
  assert {share for _, share in good} == {1.0}
  bad = jax.tree.leaves(_gradient_shares(all_but_one), is_leaf=is_pair)
  assert [name for name, share in bad if share != 1.0] == ["['head']"]
