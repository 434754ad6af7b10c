"""Types of arrays inside `jax.shard_map`.

There an array's type lists the mesh axes over which its value may differ from
device to device. A loop's carry keeps its type, so it must start with that of
the values added to it; and an operand which is the same everywhere gets, by the
transpose of its cast, a gradient summed over the devices that share it.
"""

import jax
from jax import Array


def _axes(x: Array) -> frozenset[str]:
  kind = jax.typeof(x)
  # jax 0.12 keeps the axes in `manual_axis_type`, 0.11 in `vma`.
  manual = getattr(kind, 'manual_axis_type', None)
  axes: frozenset[str] = kind.vma if manual is None else manual.varying
  return axes


def vary_like(x: Array, *others: Array) -> Array:
  """Returns `x`, typed as varying wherever one of `others` varies."""
  missing = frozenset[str]().union(*map(_axes, others)) - _axes(x)
  if not missing:
    return x
  return jax.lax.pcast(x, tuple(sorted(missing)), to='varying')


def vary_together(*arrays: Array) -> tuple[Array, ...]:
  """Returns the arrays, each varying wherever one of them does."""
  return tuple(vary_like(x, *arrays) for x in arrays)
