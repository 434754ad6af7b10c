"""A model as pure data: what a training step or a checkpoint sees of it.

Modules exist only inside `bind`. Everywhere else a model is `Variables`, two
nested dicts of arrays, together with the logical axes of every array.
"""

import dataclasses
from typing import Any
from typing import NamedTuple

from flax import nnx
import jax
from jaxtyping import Array
from jaxtyping import Key

from glm5_jax.models.config import ModelConfig
from glm5_jax.models.layers import BalanceBias
from glm5_jax.models.transformer import Transformer
from glm5_jax.parallelism.axis_rules import AxisRules

_STACKED = ('dense_layers', 'moe_layers')


class Variables(NamedTuple):
  """The arrays of a model (or their shapes, or their axes).

  Attributes:
    params: trained weights, nested by module name, float32.
    balance: balance biases of the routers, float32; moved by rule only.
  """

  params: Any
  balance: Any


@dataclasses.dataclass(frozen=True)
class Definition:
  """How to make, describe and run one model.

  Attributes:
    config: what the model is.
    rules: where its arrays live.
    abstract: shapes and dtypes of its arrays.
    axes: logical axes of its arrays, a tuple each.
  """

  config: ModelConfig
  rules: AxisRules
  abstract: Variables
  axes: Variables
  _graph: nnx.GraphDef[Transformer]
  _states: tuple[Any, Any]

  def init(self, key: Key[Array, '']) -> Variables:
    """Returns freshly drawn variables."""
    model = Transformer(
      self.config, rules=self.rules, rngs=nnx.Rngs(params=key)
    )
    _, *states = nnx.split(model, nnx.Param, BalanceBias)
    params, balance = states
    return Variables(nnx.to_pure_dict(params), nnx.to_pure_dict(balance))

  def bind(self, variables: Variables) -> Transformer:
    """Returns the model that computes with `variables`."""
    states = []
    for template, values in zip(
      self._states, (variables.params, variables.balance), strict=True
    ):
      state = jax.tree.map(lambda x: x, template)
      nnx.replace_by_pure_dict(state, values)
      states.append(state)
    return nnx.merge(self._graph, *states)


def _axes(state: Any) -> Any:
  """Returns the axes of each variable, layers first where they are stacked."""
  flat = {}
  for path, variable in nnx.to_flat_state(state):
    axes = variable.get_metadata('axes')
    flat[path] = ('layers', *axes) if path[0] in _STACKED else tuple(axes)
  return nnx.traversals.unflatten_mapping(flat)


def define(config: ModelConfig, rules: AxisRules) -> Definition:
  """Returns the definition of a model; allocates nothing."""
  model = nnx.eval_shape(
    lambda: Transformer(config, rules=rules, rngs=nnx.Rngs(params=0))
  )
  graph, *states = nnx.split(model, nnx.Param, BalanceBias)
  params, balance = states
  return Definition(
    config=config,
    rules=rules,
    abstract=Variables(nnx.to_pure_dict(params), nnx.to_pure_dict(balance)),
    axes=Variables(_axes(params), _axes(balance)),
    _graph=graph,
    _states=(params, balance),
  )
