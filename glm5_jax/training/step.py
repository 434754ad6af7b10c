"""One optimizer step: microbatches, clipping, update, and refusal.

The step knows no model and no loss: it is given an `Objective`.
"""

from collections.abc import Callable
import dataclasses
from typing import Any
from typing import Protocol
from typing import runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array
import optax

from glm5_jax.models.definition import Variables
from glm5_jax.parallelism import partitioning
from glm5_jax.parallelism.axis_rules import AxisRules
from glm5_jax.training.state import TrainState


@runtime_checkable
class Objective(Protocol):
  """What a step minimises, and the rule that moves balance biases."""

  def totals(self, batch: Any) -> Any:
    """Returns divisors that depend on the whole batch."""

  def loss(
    self, variables: Variables, batch: Any, totals: Any
  ) -> tuple[Array, Any]:
    """Returns a (micro)batch's share of the loss, and metrics that add up."""

  def next_balance(self, balance: Any, metrics: Any) -> Any:
    """Returns the balance biases after a step with these metrics."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
  """What a step reports; the same on every host.

  Attributes:
    loss: what was minimised.
    grad_norm: global norm of the gradient before clipping.
    is_finite: whether the step was taken; False: the state is as before.
    parts: metrics of the objective, a NamedTuple with `num_tokens` (tokens that
      are not padding) and `expert_load` (`[layers, E]`) among its fields.
  """

  loss: Any
  grad_norm: Any
  is_finite: Any
  parts: Any


StepFunction = Callable[[TrainState, Any], tuple[TrainState, StepMetrics]]


def split(batch: Any, microbatches: int, rules: AxisRules) -> Any:
  """Returns `[microbatches, rows, ...]` arrays of `[batch, ...]` arrays.

  Microbatch j takes rows j, j + n, j + 2 n, ...: each device keeps the rows it
  has.
  """

  def one(x: Array) -> Array:
    pieces = x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1)
    return partitioning.constrain(pieces, (None, 'batch', 'time'), rules)

  return jax.tree.map(one, batch)


def _zeros(function: Callable[..., Any], *arguments: Any) -> Any:
  """Returns zeros like the function's result."""
  shapes = jax.eval_shape(function, *arguments)
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def make_train_step(
  objective: Objective,
  optimizer: optax.GradientTransformation,
  *,
  axes: Variables,
  rules: AxisRules,
  microbatches: int = 1,
) -> StepFunction:
  """Returns the pure function from state and batch to state and metrics.

  Args:
    objective: the loss.
    optimizer: clipping and update rules.
    axes: logical axes of the variables.
    rules: where they live.
    microbatches: pieces the batch is computed in, one after the other.
  """

  def gradients(variables: Variables, batch: Any, totals: Any) -> Any:
    def loss(params: Any) -> tuple[Array, Any]:
      return objective.loss(Variables(params, variables.balance), batch, totals)

    (value, parts), grads = jax.value_and_grad(loss, has_aux=True)(
      variables.params
    )
    # Without this the compiler may leave every device the whole gradient.
    grads = partitioning.constrain_tree(grads, axes.params, rules)
    return value, parts, grads

  def accumulated(variables: Variables, batch: Any, totals: Any) -> Any:
    if microbatches == 1:
      return gradients(variables, batch, totals)
    pieces = split(batch, microbatches, rules)
    first = jax.tree.map(lambda x: x[0], pieces)
    zeros = _zeros(gradients, variables, first, totals)

    def add(sums: Any, piece: Any) -> tuple[Any, None]:
      new = gradients(variables, piece, totals)
      value, parts, grads = jax.tree.map(jnp.add, sums, new)
      grads = partitioning.constrain_tree(grads, axes.params, rules)
      return (value, parts, grads), None

    return jax.lax.scan(add, zeros, pieces)[0]

  def train_step(
    state: TrainState, batch: Any
  ) -> tuple[TrainState, StepMetrics]:
    totals = objective.totals(batch)
    loss, parts, grads = accumulated(state.variables, batch, totals)
    grad_norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    with jax.named_scope('update'):
      params = state.variables.params
      updates, opt_state = optimizer.update(grads, state.opt_state, params)
      new = TrainState(
        step=state.step + 1,
        variables=Variables(
          optax.apply_updates(params, updates),
          objective.next_balance(state.variables.balance, parts),
        ),
        opt_state=opt_state,
      )
    # Every host sees the same loss and norm, so all refuse or none does.
    kept = jax.tree.map(
      lambda after, before: jnp.where(is_finite, after, before), new, state
    )
    return kept, StepMetrics(loss, grad_norm, is_finite, parts)

  return train_step


def compiled_on(
  mesh: jax.sharding.Mesh,
  train_step: StepFunction,
  *,
  state_shardings: TrainState,
  batch_sharding: jax.sharding.Sharding,
) -> StepFunction:
  """Returns the jitted step; it consumes (donates) the state it is given.

  Args:
    mesh: the devices; the context in which the step is traced.
    train_step: from `make_train_step`.
    state_shardings: of the state, before and after.
    batch_sharding: of every array of a batch.
  """
  jitted = jax.jit(
    train_step,
    in_shardings=(state_shardings, batch_sharding),
    out_shardings=(state_shardings, partitioning.replicated(mesh)),
    donate_argnums=0,
  )

  def run(state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
    with jax.set_mesh(mesh):
      result: tuple[TrainState, StepMetrics] = jitted(state, batch)
      return result

  return run
