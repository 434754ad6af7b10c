"""What the backward pass keeps, and what it computes again."""

from collections.abc import Callable
from typing import Any
from typing import Literal

import jax
from jax.ad_checkpoint import checkpoint_name

KEPT = 'kept'


def keep(x: jax.Array) -> jax.Array:
  """Marks a result too costly to compute twice (attention, experts)."""
  return checkpoint_name(x, KEPT)


def rematerialised[**P, T](
  function: Callable[P, T], policy: Literal['none', 'dots', 'block']
) -> Callable[P, T]:
  """Returns `function` under a policy.

  Args:
    function: one block of the model.
    policy: `none` keeps everything; `dots` keeps the outputs of weight
      matmuls and what `keep` marks; `block` keeps the inputs alone.
  """
  if policy == 'none':
    return function
  policies = jax.checkpoint_policies
  saveable: Any = {
    'dots': policies.save_from_both_policies(
      policies.dots_with_no_batch_dims_saveable,
      policies.save_only_these_names(KEPT),
    ),
    'block': policies.nothing_saveable,
  }[policy]
  wrapped: Callable[P, T] = jax.checkpoint(function, policy=saveable)
  return wrapped
