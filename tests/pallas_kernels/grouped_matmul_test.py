import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import api
from tests.pallas_kernels import cases

xla = functools.partial(grouped_matmul, implementation='xla')
reference = functools.partial(grouped_matmul, implementation='reference')
UNEVEN = cases.GROUPED[2]
TAIL = cases.GROUPED[3]


def assert_matches_reference(function, case: cases.Grouped) -> None:
  x, weights, group_sizes = case.arrays()
  out, grads = cases.outcome(
    lambda x, w: function(x, w, group_sizes), x, weights
  )
  assert out.dtype == x.dtype
  exact = [a.astype(jnp.float32) for a in (x, weights)]
  expected, expected_grads = cases.outcome(
    lambda x, w: reference(x, w, group_sizes), *exact
  )
  assert cases.distance(out, expected) <= cases.TOLERANCE[case.dtype]
  for grad, like, wanted in zip(grads, (x, weights), expected_grads):
    assert grad.dtype == like.dtype
    tolerance = cases.GRADIENT_TOLERANCE[case.dtype]
    assert cases.distance(grad, wanted) <= tolerance


@pytest.mark.parametrize('case', cases.GROUPED, ids=cases.name)
def test_tiles_match_reference(case: cases.Grouped) -> None:
  assert_matches_reference(xla, case)


@pytest.mark.parametrize('implementation', ['tpu', 'gpu'])
def test_ragged_dot_matches_reference(implementation) -> None:
  function = functools.partial(grouped_matmul, implementation=implementation)
  assert_matches_reference(function, TAIL)


def test_reference_is_one_matmul_a_group() -> None:
  x, weights, group_sizes = TAIL.arrays()
  out = np.asarray(reference(x, weights, group_sizes))
  start = 0
  for size, matrix in zip(TAIL.group_sizes, weights):
    rows = slice(start, start + size)
    np.testing.assert_allclose(
      out[rows], np.asarray(x[rows] @ matrix), rtol=1e-5, atol=1e-5
    )
    start += size
  assert not out[start:].any()


def test_runs_are_bit_equal() -> None:
  x, weights, group_sizes = UNEVEN.arrays()
  run = functools.partial(
    cases.outcome, lambda x, w: xla(x, w, group_sizes), x, weights
  )
  for first, second in zip(jax.tree.leaves(run()), jax.tree.leaves(run())):
    assert np.array_equal(first, second)


def test_rows_past_the_groups_stay_out_whatever_they_hold() -> None:
  x, weights, group_sizes = TAIL.arrays()
  used = sum(TAIL.group_sizes)
  poisoned = x.at[used:].set(jnp.nan)

  def loss(x, weights, cotangent):
    # NaN cotangents as well: nothing of a tail row may be read.
    return (xla(x, weights, group_sizes) * cotangent).sum()

  cotangent = jnp.ones((TAIL.num_rows, TAIL.out_dim)).at[used:].set(jnp.nan)
  assert not xla(poisoned, weights, group_sizes)[used:].any()
  grad_x, grad_weights = jax.grad(loss, (0, 1))(poisoned, weights, cotangent)
  assert not grad_x[used:].any()
  assert np.isfinite(grad_x).all() and np.isfinite(grad_weights).all()
  # An empty group's matrix learns nothing.
  assert not grad_weights[1].any()


def test_permuting_groups_permutes_the_result() -> None:
  x, weights, _ = UNEVEN.arrays()
  parts = np.split(np.asarray(x), np.cumsum(UNEVEN.group_sizes)[:-1])
  order = [3, 1, 0, 2]
  sizes = np.asarray(UNEVEN.group_sizes, np.int32)
  plain = xla(x, weights, jnp.asarray(sizes))
  moved = xla(
    jnp.asarray(np.concatenate([parts[i] for i in order])),
    weights[jnp.asarray(order)],
    jnp.asarray(sizes[order]),
  )
  plain_parts = np.split(np.asarray(plain), np.cumsum(sizes)[:-1])
  expected = np.concatenate([plain_parts[i] for i in order])
  assert cases.distance(moved, expected) <= cases.TOLERANCE['float32']


def test_two_swapped_matrices_are_noticed() -> None:
  x, weights, group_sizes = UNEVEN.arrays()
  swapped = weights[jnp.asarray([0, 3, 2, 1])]
  got = xla(x, swapped, group_sizes)
  expected = reference(x, weights, group_sizes)
  assert cases.distance(got, expected) > 100 * cases.TOLERANCE['float32']


def test_rematerialised_scan_has_the_same_gradients() -> None:
  sizes = jnp.asarray((5, 0, 9, 10), jnp.int32)
  random = np.random.default_rng(1)
  x = jnp.asarray(random.normal(size=(30, 8)), jnp.float32)
  layers = jnp.asarray(random.normal(size=(2, 4, 8, 8)), jnp.float32)

  def loss(function, x, layers):
    @jax.checkpoint
    def layer(x, weights):
      return jnp.tanh(function(x, weights, sizes)), None

    return (jax.lax.scan(layer, x, layers)[0] ** 2).sum()

  grads, expected = (
    jax.jit(jax.grad(functools.partial(loss, function), (0, 1)))(x, layers)
    for function in (xla, reference)
  )
  for grad, wanted in zip(grads, expected):
    assert cases.distance(grad, wanted) <= cases.GRADIENT_TOLERANCE['float32']


def test_shards_sum_the_gradient_of_shared_matrices() -> None:
  mesh = jax.make_mesh(
    (4, 2), ('rows', 'width'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  random = np.random.default_rng(2)
  x = jnp.asarray(random.normal(size=(4 * 20, 8)), jnp.float32)
  weights = jnp.asarray(random.normal(size=(3, 8, 6)), jnp.float32)
  sizes = jnp.asarray([[5, 0, 9], [20, 0, 0], [0, 0, 0], [1, 2, 3]], jnp.int32)

  def local(x, weights, sizes):
    return xla(x, weights, sizes[0])

  sharded = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(P('rows'), P(None, None, 'width'), P('rows')),
    out_specs=P('rows', 'width'),
    check_vma=True,
  )

  def one_device(x, weights):
    parts = [reference(x[i * 20 :][:20], weights, sizes[i]) for i in range(4)]
    return jnp.concatenate(parts)

  got = cases.outcome(lambda x, w: sharded(x, w, sizes), x, weights)
  expected = cases.outcome(one_device, x, weights)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
    assert cases.distance(a, b) <= cases.GRADIENT_TOLERANCE['float32']


def test_misfitting_arguments_are_named() -> None:
  x, weights, group_sizes = UNEVEN.arrays()
  # Below the public function, whose annotations the test run checks first.
  with pytest.raises(ValueError, match=r'\(300, 23\).*takes \[M, K\]'):
    api._check(x[:, 1:], weights, group_sizes)
  with pytest.raises(ValueError, match=r'group_sizes \(3,\)'):
    api._check(x, weights, group_sizes[1:])
  with pytest.raises(ValueError, match='float32 and weights of bfloat16'):
    xla(x, weights.astype(jnp.bfloat16), group_sizes)
