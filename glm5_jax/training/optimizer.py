"""The update rule of every parameter, chosen by its logical axes.

Balance biases are no parameters: their rule is `losses.updated_balance`.
"""

from collections.abc import Callable
from typing import Any
from typing import Literal

import jax
import optax

from glm5_jax.parallelism.partitioning import Axes
from glm5_jax.parallelism.partitioning import is_axes
from glm5_jax.training import muon
from glm5_jax.training import schedules
from glm5_jax.training.config import OptimizerConfig

Rule = Literal['adamw', 'muon']

# Rows of the embedding are looked up and columns of head and router compete:
# neither is a map between hidden spaces, which is what Muon's norm is about.
_TABLES = frozenset({'vocab', 'router_experts'})


def rule(axes: Axes, kind: Rule) -> Rule:
  """Returns the rule of an array under `OptimizerConfig.kind`."""
  if len(muon.matrix_dims(axes)) < 2 or _TABLES & set(axes):
    return 'adamw'
  return kind


def _label(axes: Axes, kind: Rule) -> str:
  """Returns the name of the transformation that updates an array."""
  return 'embedding' if 'vocab' in axes else rule(axes, kind)


def decays(axes: Axes) -> bool:
  """Says whether weight decay applies: to matrices, not to norms."""
  return len(muon.matrix_dims(axes)) >= 2


def make_optimizer(
  config: OptimizerConfig, axes_tree: Any, num_steps: int
) -> optax.GradientTransformation:
  """Returns clipping by global norm, then each parameter's rule.

  Args:
    config: the rules' constants.
    axes_tree: logical axes of each parameter.
    num_steps: updates of the whole run.

  Raises:
    ValueError: the schedule needs more steps than there are.
  """

  def schedule(peak: float) -> schedules.Schedule:
    return schedules.make_schedule(config.schedule, peak, num_steps)

  def map_axes(function: Callable[[Axes], Any]) -> Any:
    return jax.tree.map(function, axes_tree, is_leaf=is_axes)

  masked = optax.MaskedNode()
  labels = map_axes(lambda axes: _label(axes, config.kind))

  def adamw(name: str, peak: float) -> optax.GradientTransformation:
    decay_mask = map_axes(
      lambda axes: decays(axes) if _label(axes, config.kind) == name else masked
    )
    return optax.adamw(
      schedule(peak),
      b1=config.beta1,
      b2=config.beta2,
      eps=config.epsilon,
      weight_decay=config.weight_decay,
      mask=decay_mask,
    )

  dimension_numbers = map_axes(
    lambda axes: (
      muon.dimension_numbers(axes)
      if rule(axes, config.kind) == 'muon'
      else masked
    )
  )
  rules = {
    'adamw': adamw('adamw', config.learning_rate),
    'embedding': adamw('embedding', config.embedding_learning_rate),
    'muon': muon.muon(
      schedule(config.muon_learning_rate),
      dimension_numbers,
      momentum=config.momentum,
      weight_decay=config.weight_decay,
    ),
  }
  used = set(jax.tree.leaves(labels))
  return optax.chain(
    optax.clip_by_global_norm(config.max_grad_norm),
    optax.partition({name: rules[name] for name in sorted(used)}, labels),
  )
