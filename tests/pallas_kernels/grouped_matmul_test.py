import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import api
from tests.pallas_kernels import cases

EVEN, UNEVEN, TAIL = cases.GROUPED[1:4]


@functools.cache
def outcome(implementation: str):
  """One compiled function serves all cases of a shape."""
  function = functools.partial(grouped_matmul, implementation=implementation)
  return cases.outcome(function, num_inputs=2)


def expected_outcome(case: cases.Grouped):
  x, weights, group_sizes = case.arrays()
  exact = x.astype(jnp.float32), weights.astype(jnp.float32)
  return outcome('reference')(*exact, group_sizes)


@pytest.mark.parametrize('case', cases.GROUPED, ids=cases.name)
def test_tiles_match_reference(case: cases.Grouped) -> None:
  got = outcome('xla')(*case.arrays())
  cases.assert_close(got, expected_outcome(case), case.dtype)


@pytest.mark.parametrize('implementation', ['tpu', 'gpu'])
def test_ragged_dot_matches_reference(implementation) -> None:
  got = outcome(implementation)(*TAIL.arrays())
  cases.assert_close(got, expected_outcome(TAIL), TAIL.dtype)


def test_reference_is_one_matmul_a_group() -> None:
  x, weights, _ = (np.asarray(a, np.float64) for a in TAIL.arrays())
  out = np.asarray(expected_outcome(TAIL)[0])
  start = 0
  for size, matrix in zip(TAIL.group_sizes, weights, strict=True):
    rows = slice(start, start + size)
    np.testing.assert_allclose(out[rows], x[rows] @ matrix, 1e-5, 1e-5)
    start += size
  assert not out[start:].any()


def test_runs_are_bit_equal() -> None:
  once, twice = (outcome('xla')(*UNEVEN.arrays()) for _ in range(2))
  jax.tree.map(np.testing.assert_array_equal, once, twice)


@pytest.mark.parametrize('implementation', ['xla', 'gpu'])
def test_tail_rows_stay_out_whatever_they_hold(implementation) -> None:
  x, weights, group_sizes = TAIL.arrays()
  used = sum(TAIL.group_sizes)
  out, grad_x, grad_weights = outcome(implementation)(
    x.at[used:].set(jnp.nan), weights, group_sizes
  )
  assert not out[used:].any()
  assert not grad_x[used:].any()
  assert np.isfinite(grad_x).all() and np.isfinite(grad_weights).all()
  # The matrix of the empty group learns nothing.
  assert not grad_weights[1].any()


def test_permuting_groups_permutes_the_result() -> None:
  x, weights, _ = UNEVEN.arrays()
  sizes = np.asarray(UNEVEN.group_sizes, np.int32)
  order = np.array([3, 1, 0, 2])
  borders = np.cumsum(sizes)[:-1]

  def permuted(rows):
    parts = np.split(np.asarray(rows), borders)
    return np.concatenate([parts[i] for i in order])

  plain = outcome('xla')(x, weights, jnp.asarray(sizes))[0]
  moved = outcome('xla')(
    jnp.asarray(permuted(x)), weights[order], jnp.asarray(sizes[order])
  )[0]
  assert cases.distance(moved, permuted(plain)) <= cases.TOLERANCE['float32']


def test_comparison_notices_two_swapped_matrices() -> None:
  x, weights, group_sizes = UNEVEN.arrays()
  swapped = weights[jnp.asarray([0, 3, 2, 1])]
  got = outcome('xla')(x, swapped, group_sizes)[0]
  expected = expected_outcome(UNEVEN)[0]
  assert cases.distance(got, expected) > 100 * cases.TOLERANCE['float32']


def test_rematerialised_scan_has_the_same_gradients() -> None:
  random = np.random.default_rng(1)
  x = jnp.asarray(random.normal(size=(30, 8)), jnp.float32)
  layers = jnp.asarray(random.normal(size=(2, 4, 8, 8)), jnp.float32)
  sizes = jnp.asarray((5, 0, 9, 10), jnp.int32)

  def network(implementation, x, layers, sizes):
    @jax.checkpoint
    def layer(x, weights):
      y = grouped_matmul(x, weights, sizes, implementation=implementation)
      return jnp.tanh(y), None

    return jax.lax.scan(layer, x, layers)[0]

  got, expected = (
    cases.outcome(functools.partial(network, name), 2)(x, layers, sizes)
    for name in ('xla', 'reference')
  )
  cases.assert_close(got, expected, 'float32')


def test_shards_sum_the_gradient_of_shared_matrices() -> None:
  mesh = jax.make_mesh(
    (4, 2), ('rows', 'width'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  random = np.random.default_rng(2)
  x = jnp.asarray(random.normal(size=(4 * 20, 8)), jnp.float32)
  weights = jnp.asarray(random.normal(size=(3, 8, 6)), jnp.float32)
  sizes = jnp.asarray([[5, 0, 9], [20, 0, 0], [0, 0, 0], [1, 2, 3]], jnp.int32)

  def local(x, weights, sizes):
    return grouped_matmul(x, weights, sizes[0], implementation='xla')

  sharded = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(P('rows'), P(None, None, 'width'), P('rows')),
    out_specs=P('rows', 'width'),
    check_vma=True,
  )

  def one_device(x, weights, sizes):
    parts = [
      grouped_matmul(x[i * 20 :][:20], weights, sizes[i]) for i in range(4)
    ]
    return jnp.concatenate(parts)

  got = cases.outcome(sharded, 2)(x, weights, sizes)
  expected = cases.outcome(one_device, 2)(x, weights, sizes)
  cases.assert_close(got, expected, 'float32')


def test_misfitting_arguments_are_named() -> None:
  x, weights, group_sizes = UNEVEN.arrays()
  # Below the public function, whose annotations the test run checks first.
  with pytest.raises(ValueError, match=r'\(300, 23\).*takes \[M, K\]'):
    api._check(x[:, 1:], weights, group_sizes)
  with pytest.raises(ValueError, match=r'group_sizes \(3,\)'):
    api._check(x, weights, group_sizes[1:])
  with pytest.raises(ValueError, match='float32 and weights of bfloat16'):
    grouped_matmul(x, weights.astype(jnp.bfloat16), group_sizes)
