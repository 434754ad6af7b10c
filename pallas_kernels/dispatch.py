"""Which implementation of an op runs.

Every op has the same four names, and each op says which of them it has:

  reference  plain `jnp`; the definition, may be quadratic
  xla        fast without a kernel: what CPU users run
  tpu        kernels for TPU
  gpu        kernels for GPU

`None` picks by platform. An implementation that cannot take a shape raises and
names the constraint; another one never takes its place in silence.
"""

from typing import Literal
from typing import get_args

import jax

Implementation = Literal['reference', 'xla', 'tpu', 'gpu']

_BY_PLATFORM: dict[str, Implementation] = {
  'cpu': 'xla',
  'gpu': 'gpu',
  'tpu': 'tpu',
}


def choose(implementation: Implementation | None) -> Implementation:
  """Returns the implementation to run: the one asked for or the platform's.

  Raises:
    ValueError: if the name is unknown, or the default platform has none.
  """
  if implementation is None:
    platform = jax.default_backend()
    if platform not in _BY_PLATFORM:
      raise ValueError(
        f'No implementation is the default on platform {platform!r}; pass '
        f'implementation= one of {list(get_args(Implementation))}.'
      )
    return _BY_PLATFORM[platform]
  if implementation not in get_args(Implementation):
    raise ValueError(
      f'implementation is {implementation!r}; it can be one of '
      f'{list(get_args(Implementation))}, or None for the one of the platform.'
    )
  return implementation
