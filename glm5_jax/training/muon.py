"""Which matrices Muon orthogonalises, read from the logical axes.

Muon (https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum
by the nearest orthogonal matrix. A stacked array holds many matrices: one for
each layer, each expert, and each of gate and up. Attention's up-projections
from the latents hold one for each head: GLM-5 orthogonalises heads apart ("Muon
Split", arXiv 2602.15763), which keeps attention logits bounded without
clipping. The output projection sums over heads, so it stays one matrix with
heads and head width as its rows.
"""

from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers

from glm5_jax.parallelism.partitioning import Axes
from glm5_jax.training.schedules import Schedule

# Each index along these axes is a matrix of its own.
_STACKED = frozenset({'layers', 'experts', 'pair'})
# Up-projections read one of these and write heads.
_LATENTS = frozenset({'query_latent', 'kv_latent'})


def matrix_dims(axes: Axes) -> tuple[int, ...]:
  """Returns the dimensions that belong to one matrix; fewer than two: none."""
  per_head = bool(_LATENTS & set(axes))
  return tuple(
    dim
    for dim, name in enumerate(axes)
    if name not in _STACKED and not (per_head and name == 'heads')
  )


def dimension_numbers(axes: Axes) -> MuonDimensionNumbers:
  """Returns rows and columns of the matrices in an array with these axes.

  The last dimension is the output; all else that is not stacked is the input.

  Raises:
    ValueError: the array holds no matrices.
  """
  dims = matrix_dims(axes)
  if len(dims) < 2:
    raise ValueError(
      f'Muon needs matrices; an array with axes {axes} holds none. Let AdamW '
      'update it.'
    )
  return MuonDimensionNumbers(reduction_axis=dims[:-1], output_axis=dims[-1:])


def muon(
  learning_rate: Schedule,
  dimension_numbers_tree: Any,
  *,
  momentum: float,
  weight_decay: float,
) -> optax.GradientTransformation:
  """Returns Muon with decoupled weight decay.

  Args:
    learning_rate: of the orthogonalised update, which is scaled by
      `sqrt(max(1, columns / rows))`.
    dimension_numbers_tree: rows and columns of each array; `optax.MaskedNode`
      where another rule is at work.
    momentum: decay of the momentum.
    weight_decay: times the learning rate.
  """
  return optax.contrib.muon(
    learning_rate,
    beta=momentum,
    weight_decay=weight_decay,
    muon_weight_dimension_numbers=dimension_numbers_tree,
  )
