"""Shardings of trees, and constraints inside a jitted function.

Everything that lives across steps is constrained: under Auto axes an
unconstrained gradient comes back replicated.
"""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from glm5_jax.parallelism.axis_rules import AxisRules

Axes = tuple[str | None, ...]


def is_axes(node: Any) -> bool:
  """Says whether `node` is one array's tuple of logical axes."""
  return isinstance(node, tuple) and all(
    item is None or isinstance(item, str) for item in node
  )


def _check_divides(
  path: tuple[Any, ...],
  axes: Axes,
  shape: tuple[int, ...],
  rules: AxisRules,
  sizes: dict[str, int],
) -> None:
  """Raises where a dimension does not divide over its mesh axes."""
  for name, dim in zip(axes, shape, strict=True):
    mesh_axes = rules.mesh_axes(name)
    parts = math.prod(sizes[axis] for axis in mesh_axes)
    if dim % parts:
      raise ValueError(
        f'{jax.tree_util.keystr(path)}: axis {name!r} of size {dim} does not '
        f'divide over mesh axes {mesh_axes} of sizes '
        f'{tuple(sizes[axis] for axis in mesh_axes)}. Change the mesh or the '
        'width.'
      )


def shardings(
  mesh: Mesh | jax.sharding.AbstractMesh,
  rules: AxisRules,
  axes_tree: Any,
  abstract_tree: Any,
) -> Any:
  """Returns the sharding of every array of a tree.

  Args:
    mesh: the devices, or their abstract shape.
    rules: what divides over which mesh axis.
    axes_tree: a tuple of logical axes for each array.
    abstract_tree: the arrays, or their shapes.

  Raises:
    ValueError: a dimension does not divide; the message names the array.
  """
  sizes = dict(mesh.shape)

  def one(path: tuple[Any, ...], axes: Axes, array: Any) -> NamedSharding:
    _check_divides(path, axes, array.shape, rules, sizes)
    return NamedSharding(mesh, rules.spec(axes))

  return jax.tree_util.tree_map_with_path(
    one, axes_tree, abstract_tree, is_leaf=is_axes
  )


def batch_sharding(mesh: Mesh, rules: AxisRules) -> NamedSharding:
  """Returns the sharding of `[B, T]` arrays."""
  return NamedSharding(mesh, rules.spec(('batch', 'time')))


def constrain(x: jax.Array, axes: Axes, rules: AxisRules) -> jax.Array:
  """Pins the layout of `x` in the current mesh; outside a mesh does nothing."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, rules.spec(axes))


def constrain_tree(tree: Any, axes_tree: Any, rules: AxisRules) -> Any:
  """Pins the layout of every array of `tree`."""
  return jax.tree.map(
    lambda axes, x: constrain(x, axes, rules),
    axes_tree,
    tree,
    is_leaf=is_axes,
  )


def shard_map[**P, T](
  function: Callable[P, T],
  *,
  in_axes: Any,
  out_axes: Any,
  rules: AxisRules,
) -> Callable[P, T]:
  """Runs `function` on the local pieces of its arguments.

  Args:
    function: takes and returns pieces.
    in_axes: logical axes of the arguments, a tree prefix of them.
    out_axes: logical axes of the results.
    rules: what divides over which mesh axis.

  Returns:
    The function on whole arrays; without a mesh, `function` itself.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return function

  def specs(tree: Any) -> Any:
    return jax.tree.map(rules.spec, tree, is_leaf=is_axes)

  mapped: Callable[P, T] = jax.shard_map(
    function, in_specs=specs(in_axes), out_specs=specs(out_axes)
  )
  return mapped


def replicated(mesh: Mesh | jax.sharding.AbstractMesh) -> NamedSharding:
  """Returns the sharding that keeps an array whole on every device."""
  return NamedSharding(mesh, PartitionSpec())
