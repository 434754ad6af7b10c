"""Flash attention of CPU users against the quadratic definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import flash_attention
from tests.pallas_kernels import cases

NAMES = list(cases.ATTENTION)


def _attend(case, arrays, implementation='xla'):
  query, key, value, segment_ids, positions = arrays
  return flash_attention(
    query,
    key,
    value,
    segment_ids=segment_ids,
    positions=jnp.asarray(positions),
    scale=case.head_dim**-0.5,
    window=case.window,
    implementation=implementation,
  )


def _value_and_gradients(case, implementation):
  query, key, value, *ids = case.arrays()
  shape = (*query.shape[:3], case.value_dim)
  cotangent = jax.random.normal(jax.random.key(5), shape, query.dtype)

  @jax.jit
  def run(*qkv):
    out, vjp = jax.vjp(
      lambda *qkv: _attend(case, (*qkv, *ids), implementation), *qkv
    )
    return out, vjp(cotangent)

  return run(query, key, value)


def _plain(case):
  """One query at a time in numpy, in float64."""
  query, key, value, ids, positions = (
    np.asarray(a, np.float64) for a in case.arrays()
  )
  out = np.zeros((*query.shape[:3], case.value_dim))
  group = case.heads // case.key_heads
  for b, t in np.ndindex(2, case.length):
    if ids[b, t] == 0:
      continue
    visible = [
      s
      for s in range(t + 1)
      if ids[b, s] == ids[b, t]
      and (
        case.window is None or positions[b, t] - positions[b, s] < case.window
      )
    ]
    for n in range(case.heads):
      scores = key[b, visible, n // group] @ query[b, t, n]
      weights = np.exp(scores * case.head_dim**-0.5)
      out[b, t, n] = weights @ value[b, visible, n // group] / weights.sum()
  return out


@pytest.mark.parametrize(
  'name', ['one token', 'padding on both sides', 'grouped heads', 'window']
)
def test_reference_is_softmax_over_what_a_query_may_see(name):
  case = cases.ATTENTION[name]
  got, _ = _value_and_gradients(case, 'reference')
  cases.close(got, _plain(case), case.dtype)


@pytest.mark.parametrize('name', NAMES)
def test_xla_equals_the_reference_forward_and_backward(name):
  case = cases.ATTENTION[name]
  got = _value_and_gradients(case, 'xla')
  cases.close(got, _value_and_gradients(case, 'reference'), case.dtype)
  again = _value_and_gradients(case, 'xla')
  jax.tree.map(np.testing.assert_array_equal, got, again)


def test_the_future_leaves_the_past_bit_identical():
  case = cases.Attention(300, segments=1)
  query, key, value, *ids = case.arrays()
  run = jax.jit(lambda q, k, v: _attend(case, (q, k, v, *ids)))
  before = run(query, key, value)
  later = slice(211, None)
  after = run(
    query, key.at[:, later].add(3.0), value.at[:, later].multiply(-2.0)
  )
  np.testing.assert_array_equal(before[:, :211], after[:, :211])
  assert abs(before - after)[:, later].max() > 0


def test_padding_gives_zero_and_may_hold_anything():
  case = cases.ATTENTION['padding on both sides']
  query, key, value, *ids = case.arrays()
  padding = (np.asarray(ids[0]) == 0)[:, :, None, None]

  def loss(q, k, v):
    out = _attend(case, (q, k, v, *ids))
    return (out**2).sum(), out

  run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
  clean = run(query, key, value)
  dirty = run(*(jnp.where(padding, jnp.nan, a) for a in (query, key, value)))
  jax.tree.map(np.testing.assert_array_equal, clean, dirty)
  (_, out), gradients = clean
  for array in (out, *gradients):
    assert (np.asarray(array)[padding[..., 0, 0]] == 0).all()


def test_memory_is_linear_in_length():
  """Four times the length takes about four times the temporaries."""

  def temporaries(length):
    case = cases.Attention(8)

    def loss(q, k, v, ids, positions):
      return _attend(case, (q, k, v, ids, positions)).sum()

    rows = (1, length)
    f32, i32 = jnp.float32, jnp.int32
    shapes = [
      jax.ShapeDtypeStruct((*rows, 2, width), f32) for width in (24, 24, 16)
    ] + [jax.ShapeDtypeStruct(rows, i32)] * 2
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries(8192) < 6 * temporaries(2048)


def test_shapes_that_do_not_fit_are_refused():
  case = cases.Attention(8, heads=3, key_heads=2)
  with pytest.raises(ValueError, match='must divide by the key heads'):
    _attend(case, case.arrays())
