"""Flash attention against the quadratic definition, and that against numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from pallas_kernels import flash_attention
from pallas_kernels.flash_attention import api
from pallas_kernels.flash_attention import gpu
from pallas_kernels.flash_attention import tpu
from tests.pallas_kernels import cases

# Kernels of other platforms in interpret mode: their other order of sums is off
# by up to 3e-6 of the largest value.
INTERPRETED_TOLERANCE = 1e-5


def attend(case: cases.Flash, implementation: str, *arrays):
  segment_ids, positions = case.layout()
  return flash_attention(
    *arrays,
    segment_ids=segment_ids,
    positions=positions,
    scale=case.scale,
    window=case.window,
    implementation=implementation,
  )


def expected_outcome(case: cases.Flash):
  exact = [a.astype(jnp.float32) for a in case.arrays()]
  return cases.outcome(functools.partial(attend, case, 'reference'), *exact)


@functools.cache
def xla_outcome(case: cases.Flash):
  run = functools.partial(attend, case, 'xla')
  return cases.outcome(run, *case.arrays())


def oracle(case: cases.Flash) -> np.ndarray:
  """One query at a time, in float64."""
  query, key, value = (np.asarray(a, np.float64) for a in case.arrays())
  ids, positions = (np.asarray(a) for a in case.layout())
  out = np.zeros((*query.shape[:3], case.value_dim))
  group = case.num_heads // case.num_key_heads
  for b, t in np.ndindex(2, case.length):
    if ids[b, t] == 0:
      continue
    distance = positions[b, t] - positions[b, : t + 1]
    seen = ids[b, : t + 1] == ids[b, t]
    if case.window is not None:
      seen &= distance < case.window
    for n in range(case.num_heads):
      scores = key[b, : t + 1, n // group] @ query[b, t, n] * case.scale
      weights = np.where(seen, np.exp(scores), 0)
      values = value[b, : t + 1, n // group]
      out[b, t, n] = weights @ values / weights.sum()
  return out


@pytest.mark.parametrize('case', cases.FLASH[:6], ids=cases.name)
def test_reference_is_softmax_over_what_a_query_may_see(
  case: cases.Flash,
) -> None:
  got = attend(case, 'reference', *case.arrays())
  assert cases.distance(got, oracle(case)) <= cases.TOLERANCE['float32']


@pytest.mark.parametrize('case', cases.FLASH, ids=cases.name)
def test_tiles_match_reference(case: cases.Flash) -> None:
  out, grads = xla_outcome(case)
  expected, expected_grads = expected_outcome(case)
  assert out.dtype == case.dtype
  assert cases.distance(out, expected) <= cases.TOLERANCE[case.dtype]
  for grad, wanted in zip(grads, expected_grads):
    assert grad.dtype == case.dtype
    tolerance = cases.GRADIENT_TOLERANCE[case.dtype]
    assert cases.distance(grad, wanted) <= tolerance


@pytest.mark.parametrize('case', [cases.FLASH[2]], ids=cases.name)
def test_runs_are_bit_equal(case: cases.Flash) -> None:
  run = functools.partial(attend, case, 'xla')
  again = cases.outcome(run, *case.arrays())
  for a, b in zip(jax.tree.leaves(xla_outcome(case)), jax.tree.leaves(again)):
    assert np.array_equal(a, b)


def test_comparison_notices_a_window_off_by_one() -> None:
  case = cases.FLASH[4]
  wider = dataclasses.replace(case, window=case.window + 1)
  out = attend(wider, 'reference', *case.arrays())
  assert cases.distance(out, oracle(case)) > 100 * cases.TOLERANCE['float32']


def test_future_leaves_the_past_bit_identical() -> None:
  case = cases.FLASH[2]
  changed = slice(150, None)
  query, key, value = case.arrays()
  moved = [a.at[:, changed].add(3.0) for a in (query, key, value)]
  before = xla_outcome(case)[0]
  after = attend(case, 'xla', *moved)
  assert np.array_equal(before[:, :150], after[:, :150])
  assert not np.array_equal(before[:, 150:], after[:, 150:])


def test_segments_leave_each_other_bit_identical() -> None:
  case = cases.FLASH[2]
  ids = np.asarray(case.layout()[0])
  other = ids != np.array([[2], [7]])
  moved = [a + 3.0 * other[:, :, None, None] for a in case.arrays()]
  before, after = xla_outcome(case)[0], attend(case, 'xla', *moved)
  assert np.array_equal(before[~other], after[~other])


def test_packed_segment_equals_the_segment_alone() -> None:
  case = cases.FLASH[2]
  start = case.length * 2 // 5
  arrays = [a[:1, start:] for a in case.arrays()]
  length = case.length - start
  alone = flash_attention(
    *arrays,
    segment_ids=jnp.ones((1, length), jnp.int32),
    positions=jnp.arange(length, dtype=jnp.int32)[None],
    scale=case.scale,
    implementation='xla',
  )
  packed = xla_outcome(case)[0][:1, start:]
  assert cases.distance(packed, alone) <= cases.TOLERANCE['float32']


def test_window_leaves_older_keys_out() -> None:
  case = cases.FLASH[4]
  query, key, value = case.arrays()
  old = slice(0, 150 - case.window)
  key, value = (a.at[:, old].add(3.0) for a in (key, value))
  before, after = xla_outcome(case)[0], attend(case, 'xla', query, key, value)
  assert np.array_equal(before[:, 149:], after[:, 149:])


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
def test_padding_gives_zero_and_may_hold_anything(implementation) -> None:
  case = cases.FLASH[2]
  padding = np.asarray(case.layout()[0]) == 0
  assert padding[:, 0].any() and padding[:, -1].any()
  poisoned = [
    jnp.where(padding[:, :, None, None], jnp.nan, a) for a in case.arrays()
  ]
  run = functools.partial(attend, case, implementation)
  out, grads = cases.outcome(run, *poisoned)
  expected, expected_grads = cases.outcome(run, *case.arrays())
  for got, wanted in zip((out, *grads), (expected, *expected_grads)):
    assert not np.asarray(got)[padding].any()
    assert np.array_equal(got, wanted)


def test_memory_is_linear_in_length() -> None:
  def temporary_bytes(length: int) -> int:
    def loss(q, k, v, ids):
      out = flash_attention(
        q, k, v, segment_ids=ids, positions=ids, scale=1.0, implementation='xla'
      )
      return out.sum()

    rows = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    step = jax.jit(jax.grad(loss, (0, 1, 2))).lower(rows, rows, rows, ids)
    return step.compile().memory_analysis().temp_size_in_bytes

  # Four times the length: sixteen times the memory if scores were kept.
  assert temporary_bytes(8192) < 5 * temporary_bytes(2048)


def test_shards_sum_the_gradient_of_shared_key_heads() -> None:
  case = cases.Flash('sharded', 24, num_heads=4, num_key_heads=1, window=9)
  mesh = jax.make_mesh(
    (2, 4), ('rows', 'heads'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  rows, heads = P('rows'), P('rows', None, 'heads')

  def local(query, key, value, segment_ids, positions):
    return flash_attention(
      query,
      key,
      value,
      segment_ids=segment_ids,
      positions=positions,
      scale=case.scale,
      window=case.window,
      implementation='xla',
    )

  sharded = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(heads, rows, rows, rows, rows),
    out_specs=heads,
    check_vma=True,
  )
  got = cases.outcome(lambda *a: sharded(*a, *case.layout()), *case.arrays())
  expected = expected_outcome(case)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
    assert cases.distance(a, b) <= cases.GRADIENT_TOLERANCE['float32']


@pytest.mark.slow
@pytest.mark.parametrize('window', [None, 20])
def test_tpu_kernel_matches_reference_in_interpret_mode(window) -> None:
  case = cases.Flash(
    'splash', 130, num_heads=2, num_key_heads=1, head_dim=40, window=window
  )
  segment_ids, _ = case.layout()
  kernel = functools.partial(
    tpu.flash_attention,
    segment_ids=segment_ids,
    scale=case.scale,
    window=window,
    interpret=True,
  )
  got = cases.outcome(kernel, *case.arrays())
  expected = expected_outcome(case)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
    assert cases.distance(a, b) <= INTERPRETED_TOLERANCE


@pytest.mark.slow
def test_gpu_kernel_matches_reference_in_interpret_mode() -> None:
  case = cases.Flash('triton', 70, num_heads=2, num_key_heads=1, head_dim=40)
  segment_ids, _ = case.layout()
  kernel = functools.partial(
    gpu.flash_attention,
    segment_ids=segment_ids,
    scale=case.scale,
    window=None,
    interpret=True,
  )
  got = cases.outcome(kernel, *case.arrays())
  expected = expected_outcome(case)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
    assert cases.distance(a, b) <= INTERPRETED_TOLERANCE


def test_misfitting_arguments_are_named() -> None:
  case = cases.FLASH[2]
  query, key, value = case.arrays()
  ids, positions = case.layout()
  # Below the public function, whose annotations the test run checks first.
  with pytest.raises(ValueError, match=r'query \(2, 257, 2, 23\).*it takes'):
    api._check(query[..., 1:], key, value, ids, positions, None)
  with pytest.raises(ValueError, match=r'segment_ids \(2, 256\)'):
    api._check(query, key, value, ids[:, 1:], positions, None)
  odd = dataclasses.replace(case, num_heads=3)
  with pytest.raises(ValueError, match='must divide by the key heads'):
    attend(odd, 'xla', *odd.arrays())
  with pytest.raises(ValueError, match='float32, float32, bfloat16'):
    attend(case, 'xla', query, key, value.astype(jnp.bfloat16))
  with pytest.raises(ValueError, match='window is 0; it must be at least 1'):
    attend(dataclasses.replace(case, window=0), 'xla', query, key, value)


def test_gpu_kernel_names_what_it_cannot_take() -> None:
  case = cases.FLASH[4]
  with pytest.raises(ValueError, match='window 20; the GPU kernel has none'):
    attend(case, 'gpu', *case.arrays())
  wide = dataclasses.replace(case, window=None, head_dim=264)
  with pytest.raises(ValueError, match='width 264; .*at most 256'):
    attend(wide, 'gpu', *wide.arrays())
