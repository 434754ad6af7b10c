"""What training carries from step to step."""

import dataclasses
import hashlib
from typing import Any
from typing import Protocol
from typing import runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Key
import numpy as np
import optax

from glm5_jax.models.definition import Variables
from glm5_jax.parallelism import partitioning
from glm5_jax.parallelism.axis_rules import AxisRules


@runtime_checkable
class Trainable(Protocol):
  """What training needs of a model's definition."""

  @property
  def rules(self) -> AxisRules:
    """Where arrays live."""

  @property
  def abstract(self) -> Variables:
    """Shapes and dtypes of the variables."""

  @property
  def axes(self) -> Variables:
    """Logical axes of the variables."""

  def init(self, key: Key[Array, '']) -> Variables:
    """Returns freshly drawn variables."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Arrays of a run (or their shapes, or their shardings).

  Attributes:
    step: updates done, int32.
    variables: weights and balance biases.
    opt_state: the optimizer's moments and counts.
  """

  step: Any
  variables: Variables
  opt_state: Any


def init(
  definition: Trainable,
  optimizer: optax.GradientTransformation,
  key: Key[Array, ''],
) -> TrainState:
  """Returns the state before the first step."""
  variables = definition.init(key)
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    variables=variables,
    opt_state=optimizer.init(variables.params),
  )


def abstract(
  definition: Trainable, optimizer: optax.GradientTransformation
) -> TrainState:
  """Returns the shapes and dtypes of the state; allocates nothing."""
  state: TrainState = jax.eval_shape(
    lambda variables: TrainState(
      step=jnp.zeros((), jnp.int32),
      variables=variables,
      opt_state=optimizer.init(variables.params),
    ),
    definition.abstract,
  )
  return state


def shardings(
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
  definition: Trainable,
  optimizer: optax.GradientTransformation,
) -> TrainState:
  """Returns the sharding of every array of the state.

  A moment lies as its parameter does; counts are whole everywhere.

  Raises:
    ValueError: a dimension does not divide; the message names the array.
  """
  variables: Variables = partitioning.shardings(
    mesh, definition.rules, definition.axes, definition.abstract
  )
  whole = partitioning.replicated(mesh)
  of_param = dict(jax.tree_util.tree_leaves_with_path(variables.params))

  def of_moment(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
    # Optimizers nest trees like the parameters' somewhere inside their state,
    # so a moment's path ends with its parameter's.
    for start in range(len(path)):
      if path[start:] in of_param:
        return of_param[path[start:]]
    if leaf.size > 1024:
      raise ValueError(
        f'The optimizer keeps {jax.tree_util.keystr(path)} of shape '
        f'{leaf.shape}, which belongs to no parameter: it would lie whole on '
        'every device. Name it after its parameter.'
      )
    return whole

  opt_state = jax.tree_util.tree_map_with_path(
    of_moment, abstract(definition, optimizer).opt_state
  )
  return TrainState(step=whole, variables=variables, opt_state=opt_state)


def placed(abstract_tree: Any, shardings_tree: Any) -> Any:
  """Returns shapes and dtypes that also say where each array lies."""
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    abstract_tree,
    shardings_tree,
  )


def digest(state: TrainState) -> str:
  """Returns a hash of every bit of the state; equal states, equal hashes."""
  result = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    array = np.asarray(leaf)
    name = jax.tree_util.keystr(path)
    result.update(f'{name} {array.dtype} {array.shape}'.encode())
    result.update(array.tobytes())
  return result.hexdigest()
