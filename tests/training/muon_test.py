"""Muon sees the matrices that stacked arrays hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from glm5_jax.training import muon

# float32; the five iterations multiply rounding errors by a few.
TOLERANCE = 1e-5

UP = ('layers', 'kv_latent', 'heads', 'head_dim')
OUT = ('layers', 'heads', 'head_dim', 'embed')
EXPERTS = ('layers', 'experts', 'expert_embed', 'pair', 'expert_ffn')


@pytest.mark.parametrize(
  ('axes', 'rows', 'columns'),
  [
    (UP, (1,), (3,)),
    (('query_latent', 'heads', 'head_dim'), (0,), (2,)),
    (OUT, (1, 2), (3,)),
    (EXPERTS, (2,), (4,)),
    (('layers', 'experts', 'expert_ffn', 'expert_embed'), (2,), (3,)),
    (('pair', 'embed', 'latent'), (1,), (2,)),
    (('embed', 'head_dim'), (0,), (1,)),
  ],
)
def test_rows_and_columns_are_read_from_the_axes(axes, rows, columns):
  numbers = muon.dimension_numbers(axes)
  assert (numbers.reduction_axis, numbers.output_axis) == (rows, columns)


@pytest.mark.parametrize('axes', [(None,), ('layers', None), ('layers',)])
def test_arrays_without_matrices_are_refused(axes):
  with pytest.raises(ValueError, match='holds none'):
    muon.dimension_numbers(axes)


def _update(gradient, numbers):
  """Returns one step's update of Muon at a learning rate of one."""
  transform = muon.muon(
    lambda step: jnp.float32(1.0),
    {'w': numbers},
    momentum=0.95,
    weight_decay=0.0,
  )

  @jax.jit
  def update(grads):
    params = jax.tree.map(jnp.zeros_like, grads)
    return transform.update(grads, transform.init(params), params)[0]

  return np.asarray(update({'w': gradient})['w'])


def test_up_projections_are_orthogonalised_head_by_head():
  gradient = jax.random.normal(jax.random.key(1), (2, 12, 3, 4))
  update = _update(gradient, muon.dimension_numbers(UP))
  matrix = optax.contrib.MuonDimensionNumbers(0, 1)
  for layer, head in ((0, 0), (1, 2)):
    alone = _update(gradient[layer, :, head], matrix)
    np.testing.assert_allclose(update[layer, :, head], alone, atol=TOLERANCE)


def test_an_update_of_one_head_does_not_depend_on_the_others():
  gradient = jax.random.normal(jax.random.key(1), (1, 12, 3, 4))
  update = _update(gradient, muon.dimension_numbers(UP))
  louder = _update(
    gradient.at[:, :, 1].multiply(100.0), muon.dimension_numbers(UP)
  )
  np.testing.assert_allclose(update[:, :, 0], louder[:, :, 0], atol=TOLERANCE)
  whole = _update(gradient, muon.dimension_numbers(OUT))
  louder = _update(
    gradient.at[:, :, 1].multiply(100.0), muon.dimension_numbers(OUT)
  )
  assert np.abs(whole - louder).max() > 100 * TOLERANCE


def test_the_output_projection_is_one_matrix_over_heads():
  gradient = jax.random.normal(jax.random.key(2), (1, 3, 4, 10))
  update = _update(gradient, muon.dimension_numbers(OUT))
  flat = _update(
    gradient[0].reshape(12, 10), optax.contrib.MuonDimensionNumbers(0, 1)
  )
  np.testing.assert_allclose(update[0].reshape(12, 10), flat, atol=TOLERANCE)


def test_singular_values_come_near_one():
  gradient = jax.random.normal(jax.random.key(3), (1, 2, 8, 2, 8))
  update = _update(gradient, muon.dimension_numbers(EXPERTS))
  for expert in range(2):
    for half in range(2):
      values = np.linalg.svd(update[0, expert, :, half], compute_uv=False)
      # Five quintic iterations end within about 0.7 to 1.2; the smallest
      # values of a square matrix may still lag.
      assert values.max() < 1.3
      assert np.median(values) > 0.6
