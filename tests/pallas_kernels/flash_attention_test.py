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

PLAIN, WINDOWED = cases.FLASH[1], cases.FLASH[3]


@functools.cache
def outcome(implementation: str, scale: float, window: int | None):
  """One compiled function serves all inputs of a shape."""

  def attend(query, key, value, segment_ids, positions):
    return flash_attention(
      query,
      key,
      value,
      segment_ids=segment_ids,
      positions=positions,
      scale=scale,
      window=window,
      implementation=implementation,
    )

  return cases.outcome(attend, num_inputs=3)


def run(case: cases.Flash, implementation: str, *arrays):
  """Returns the output and the gradients of query, key and value."""
  function = outcome(implementation, case.scale, case.window)
  return function(*(arrays or case.arrays()), *case.layout())


def expected_outcome(case: cases.Flash):
  exact = [a.astype(jnp.float32) for a in case.arrays()]
  return run(case, 'reference', *exact)


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


@pytest.mark.parametrize('case', cases.FLASH[:5], ids=cases.name)
def test_reference_is_softmax_over_what_a_query_may_see(
  case: cases.Flash,
) -> None:
  got = run(case, 'reference')[0]
  assert cases.distance(got, oracle(case)) <= cases.TOLERANCE['float32']


@pytest.mark.parametrize('case', cases.FLASH, ids=cases.name)
def test_tiles_match_reference(case: cases.Flash) -> None:
  cases.assert_close(run(case, 'xla'), expected_outcome(case), case.dtype)


def test_runs_are_bit_equal() -> None:
  once, twice = (run(PLAIN, 'xla') for _ in range(2))
  jax.tree.map(np.testing.assert_array_equal, once, twice)


def test_comparison_notices_a_window_off_by_one() -> None:
  wider = dataclasses.replace(WINDOWED, window=WINDOWED.window + 1)
  out, expected = run(wider, 'xla')[0], oracle(WINDOWED)
  assert cases.distance(out, expected) > 100 * cases.TOLERANCE['float32']


def test_future_leaves_the_past_bit_identical() -> None:
  moved = [a.at[:, 150:].add(3.0) for a in PLAIN.arrays()]
  before, after = run(PLAIN, 'xla')[0], run(PLAIN, 'xla', *moved)[0]
  np.testing.assert_array_equal(before[:, :150], after[:, :150])
  assert not np.array_equal(before[:, 150:], after[:, 150:])


def test_segments_leave_each_other_bit_identical() -> None:
  other = np.asarray(PLAIN.layout()[0]) != np.array([[2], [7]])
  moved = [a.at[other].add(3.0) for a in PLAIN.arrays()]
  before, after = run(PLAIN, 'xla')[0], run(PLAIN, 'xla', *moved)[0]
  np.testing.assert_array_equal(before[~other], after[~other])


def test_packed_segment_equals_the_segment_alone() -> None:
  start = PLAIN.length * 2 // 5
  length = PLAIN.length - start
  alone = flash_attention(
    *(a[:1, start:] for a in PLAIN.arrays()),
    segment_ids=jnp.ones((1, length), jnp.int32),
    positions=jnp.arange(length, dtype=jnp.int32)[None],
    scale=PLAIN.scale,
    implementation='reference',
  )
  packed = run(PLAIN, 'xla')[0][:1, start:]
  assert cases.distance(packed, alone) <= cases.TOLERANCE['float32']


def test_window_leaves_older_keys_out() -> None:
  query, key, value = WINDOWED.arrays()
  old = slice(0, 150 - WINDOWED.window)
  moved = query, key.at[:, old].add(3.0), value.at[:, old].add(3.0)
  before, after = run(WINDOWED, 'xla')[0], run(WINDOWED, 'xla', *moved)[0]
  np.testing.assert_array_equal(before[:, 149:], after[:, 149:])


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
def test_padding_gives_zero_and_may_hold_anything(implementation) -> None:
  padding = np.asarray(PLAIN.layout()[0]) == 0
  assert padding[:, 0].any() and padding[:, -1].any()
  poisoned = [a.at[padding].set(jnp.nan) for a in PLAIN.arrays()]
  results = run(PLAIN, implementation, *poisoned)
  for result in results:
    assert not np.asarray(result)[padding].any()
  clean = run(PLAIN, implementation)
  jax.tree.map(np.testing.assert_array_equal, results, clean)


def test_memory_is_linear_in_length() -> None:
  step = outcome('xla', 1.0, None)

  def temporary_bytes(length: int) -> int:
    rows = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    compiled = step.lower(rows, rows, rows, ids, ids).compile()
    return compiled.memory_analysis().temp_size_in_bytes

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
  got = cases.outcome(sharded, 3)(*case.arrays(), *case.layout())
  cases.assert_close(got, expected_outcome(case), case.dtype)


def interpreted_outcome(kernel, case: cases.Flash):
  def attend(query, key, value, segment_ids):
    return kernel.flash_attention(
      query,
      key,
      value,
      segment_ids,
      scale=case.scale,
      window=case.window,
      interpret=True,
    )

  return cases.outcome(attend, 3)(*case.arrays(), case.layout()[0])


@pytest.mark.parametrize('window', [None, 20])
def test_tpu_kernel_matches_reference_in_interpret_mode(window) -> None:
  case = cases.Flash('', 130, num_key_heads=1, head_dim=40, window=window)
  got = interpreted_outcome(tpu, case)
  cases.assert_close(got, expected_outcome(case), case.dtype)


def test_gpu_kernel_matches_reference_in_interpret_mode() -> None:
  case = cases.Flash('', 70, num_key_heads=1, head_dim=40)
  got = interpreted_outcome(gpu, case)
  cases.assert_close(got, expected_outcome(case), case.dtype)


def test_misfitting_arguments_are_named() -> None:
  query, key, value = PLAIN.arrays()
  ids, positions = PLAIN.layout()
  # Below the public function, whose annotations the test run checks first.
  with pytest.raises(ValueError, match=r'query \(2, 257, 2, 23\).*it takes'):
    api._check(query[..., 1:], key, value, ids, positions, None)
  with pytest.raises(ValueError, match=r'segment_ids \(2, 256\)'):
    api._check(query, key, value, ids[:, 1:], positions, None)
  with pytest.raises(ValueError, match='must divide by the key heads'):
    run(dataclasses.replace(PLAIN, num_heads=3), 'xla')
  with pytest.raises(ValueError, match='float32, float32, bfloat16'):
    run(PLAIN, 'xla', query, key, value.astype(jnp.bfloat16))
  with pytest.raises(ValueError, match='window is 0; it must be at least 1'):
    run(dataclasses.replace(PLAIN, window=0), 'xla')


def test_gpu_kernel_names_what_it_cannot_take() -> None:
  with pytest.raises(ValueError, match='window 20; the GPU kernel has none'):
    run(WINDOWED, 'gpu')
  with pytest.raises(ValueError, match='width 264; .*at most 256'):
    run(dataclasses.replace(PLAIN, head_dim=264), 'gpu')
