import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import dispatch
from pallas_kernels import varying


def test_cpu_runs_the_loops() -> None:
  assert dispatch.choose(None) == 'xla'


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
def test_accelerators_run_their_kernels(platform: str, monkeypatch) -> None:
  monkeypatch.setattr(jax, 'default_backend', lambda: platform)
  assert dispatch.choose(None) == platform


def test_unknown_platform_is_an_error(monkeypatch) -> None:
  monkeypatch.setattr(jax, 'default_backend', lambda: 'abacus')
  with pytest.raises(
    ValueError, match="platform 'abacus'; pass implementation="
  ):
    dispatch.choose(None)


def test_unknown_implementation_is_an_error() -> None:
  choose = getattr(dispatch.choose, '__wrapped__', dispatch.choose)
  with pytest.raises(Exception, match='triton'):
    choose('triton')


def test_the_implementation_shows_in_profiles() -> None:
  text = (
    jax.jit(pallas_kernels.grouped_matmul)
    .lower(jnp.ones((4, 2)), jnp.ones((1, 2, 3)), jnp.ones((1,), jnp.int32))
    .as_text(debug_info=True)
  )
  assert 'grouped_matmul_xla' in text


def test_nothing_varies_outside_of_a_mesh() -> None:
  x = jnp.ones(3)
  assert varying.vary_together(x, x) == (x, x)
