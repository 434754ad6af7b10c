"""The mixture of experts of one layer: dropless, with a shared expert.

Experts divide over the mesh. Two transports bring tokens to them and give the
same result: `all_gather` shows every device all tokens of its expert group and
adds up the partial outputs; `all_to_all` sends each token to its experts alone.
"""

from typing import Any
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from glm5_jax.models import dispatch
from glm5_jax.models import router
from glm5_jax.models.config import MoeConfig
from glm5_jax.models.layers import BalanceBias
from glm5_jax.models.layers import FeedForward
from glm5_jax.models.layers import normal_weight
from glm5_jax.parallelism import collectives
from glm5_jax.parallelism.axis_rules import AxisRules
from glm5_jax.parallelism.partitioning import constrain
from glm5_jax.parallelism.partitioning import shard_map
from glm5_jax.parallelism.remat import keep
from pallas_kernels import grouped_matmul
from pallas_kernels.varying import vary_together


class ExpertWeights(NamedTuple):
  """Weights of the experts that live here.

  Attributes:
    gate_up: `[E, D, 2, F]`.
    down: `[E, F, D]`.
  """

  gate_up: Float[Array, 'E D 2 F']
  down: Float[Array, 'E F D']


def apply_experts(
  rows_CD: Float[Array, 'C D'],
  group_sizes: Int[Array, ' E'],
  weights: ExpertWeights,
) -> Float[Array, 'C D']:
  """Runs each group of rows through its expert's gated feed-forward."""
  E, D, _, F = weights.gate_up.shape
  gate_up_ED = weights.gate_up.reshape(E, D, 2 * F)
  hidden = grouped_matmul(rows_CD, gate_up_ED, group_sizes)
  hidden_CF = jax.nn.silu(hidden[:, :F]) * hidden[:, F:]
  return grouped_matmul(hidden_CF, weights.down, group_sizes)


def gathered_experts(
  x_MD: Float[Array, 'M D'],
  ids_MX: Int[Array, 'M X'],
  weights_MX: Float[Array, 'M X'],
  experts: ExpertWeights,
  axes: tuple[str, ...],
) -> Float[Array, 'M D']:
  """The all-gather transport, on local pieces."""
  here = experts.down.shape[0]
  x, ids, weights = (
    collectives.all_gather(a, axes) for a in (x_MD, ids_MX, weights_MX)
  )
  first = collectives.shard_index(axes) * here
  # A token visits an expert once, so at most `here` of its slots are served.
  num_rows = ids.shape[0] * min(ids.shape[1], here)
  plan = dispatch.plan(ids - first, here, num_rows)
  rows = apply_experts(dispatch.to_rows(x, plan), plan.group_sizes, experts)
  rows, weights = vary_together(rows, weights)
  partial_sums = dispatch.combine(rows, weights, plan)
  return collectives.reduce_scatter(partial_sums, axes)


def exchanged_experts(
  x_MD: Float[Array, 'M D'],
  ids_MX: Int[Array, 'M X'],
  weights_MX: Float[Array, 'M X'],
  experts: ExpertWeights,
  axes: tuple[str, ...],
) -> Float[Array, 'M D']:
  """The all-to-all transport, on local pieces."""
  if not axes:
    return gathered_experts(x_MD, ids_MX, weights_MX, experts, axes)
  here, shards = experts.down.shape[0], collectives.num_shards(axes)
  M, X = ids_MX.shape
  slots = M * min(X, here)
  # Sorted by expert, rows are sorted by destination too.
  outgoing = dispatch.plan(ids_MX, here * shards, M * X)
  sizes = outgoing.group_sizes.reshape(shards, here).sum(1)
  exchange = collectives.plan_exchange(sizes, axes)
  expert_of_row = ids_MX.reshape(-1)[outgoing.slot_of_row] % here
  rows = collectives.send(
    dispatch.to_rows(x_MD, outgoing), exchange, slots, axes
  )
  # One is added so that a row that nobody sent reads as group -1.
  group = collectives.send(expert_of_row + 1, exchange, slots, axes) - 1
  arrived = dispatch.plan(group[:, None], here, rows.shape[0])
  done = apply_experts(
    dispatch.to_rows(rows, arrived), arrived.group_sizes, experts
  )
  ones = jnp.ones((rows.shape[0], 1), jnp.float32)
  done, ones = vary_together(done, ones)
  in_order = dispatch.combine(done, ones, arrived)
  returned = collectives.send_back(in_order, exchange, M * X, slots, axes)
  returned, weights_MX = vary_together(returned, weights_MX)
  return dispatch.combine(returned, weights_MX, outgoing)


# Logical axes of the weights as a transport wants them: whole in the model
# width, so pieces of it are joined on the way in.
EXPERT_AXES: Any = ExpertWeights(
  gate_up=('experts', None, 'pair', 'expert_ffn'),  # type: ignore[arg-type]  # axes stand for arrays
  down=('experts', 'expert_ffn', None),  # type: ignore[arg-type]  # likewise
)

TRANSPORTS = {
  'all_gather': gathered_experts,
  'all_to_all': exchanged_experts,
}


class Moe(nnx.Module):
  """Routed experts and a shared one.

  Attributes:
    router: `[D, E]`.
    bias: balance bias `[E]`, float32; no parameter.
    gate_up: `[E, D, 2, F]`; down: `[E, F, D]`.
    shared: the expert that every token visits, or None.
  """

  def __init__(
    self,
    embed_dim: int,
    config: MoeConfig,
    *,
    init_scale: float,
    rules: AxisRules,
    rngs: nnx.Rngs,
  ):
    self.config, self.rules = config, rules
    E, D, F = config.num_experts, embed_dim, config.expert_dim
    self.router = normal_weight(
      rngs, (D, E), ('embed', 'router_experts'), init_scale
    )
    self.bias = BalanceBias(jnp.zeros((E,), jnp.float32), axes=(None,))
    self.gate_up = normal_weight(
      rngs,
      (E, D, 2, F),
      ('experts', 'expert_embed', 'pair', 'expert_ffn'),
      init_scale,
    )
    self.down = normal_weight(
      rngs,
      (E, F, D),
      ('experts', 'expert_ffn', 'expert_embed'),
      init_scale,
    )
    self.shared = (
      FeedForward(
        D,
        F * config.num_shared_experts,
        init_scale=init_scale,
        rules=rules,
        rngs=rngs,
      )
      if config.num_shared_experts
      else None
    )

  def __call__(
    self, x: Float[Array, 'B T D'], counted: Float[Array, 'B T']
  ) -> tuple[Float[Array, 'B T D'], Float[Array, ' E']]:
    """Returns the layer's output and the tokens each expert received.

    Args:
      x: normed block input.
      counted: 1 for tokens that count for the load, 0 for padding.
    """
    with jax.named_scope('router'):
      affinity_BTE = router.scores(x, self.router[...])
      ids, weights = router.select(affinity_BTE, self.bias[...], self.config)
      load_E = router.load(ids, counted, self.config.num_experts)
    # Padding is sent nowhere: it would crowd one expert and cost its time.
    ids = jnp.where(counted[..., None] > 0, ids, -1)
    with jax.named_scope('experts'):
      y = self._routed(x, ids, weights)
    y = constrain(y, ('batch', 'time', None), self.rules)
    if self.shared is not None:
      y = y + self.shared(x)
    return y, load_E

  def _routed(
    self,
    x: Float[Array, 'B T D'],
    ids: Int[Array, 'B T X'],
    weights: Float[Array, 'B T X'],
  ) -> Float[Array, 'B T D']:
    """Runs the transport on local tokens and local experts."""
    expert_axes = collectives.active_axes('experts', self.rules)
    width_axes = collectives.active_axes('expert_ffn', self.rules)
    transport = TRANSPORTS[self.config.transport]

    def local(
      x: Array, ids: Array, weights: Array, experts: ExpertWeights
    ) -> Array:
      B, T, D = x.shape
      x, ids, weights = (a.reshape(B * T, -1) for a in (x, ids, weights))
      y = transport(x, ids, weights, experts, expert_axes)
      y = collectives.reduce_sum(y, width_axes)
      return y.reshape(B, T, D)

    tokens = ('batch', 'time', None)
    mapped = shard_map(
      local,
      in_axes=(
        tokens,
        tokens,
        tokens,
        EXPERT_AXES,
      ),
      out_axes=tokens,
      rules=self.rules,
    )
    experts = ExpertWeights(
      gate_up=self.gate_up[...].astype(x.dtype),
      down=self.down[...].astype(x.dtype),
    )
    return keep(mapped(x, ids, weights, experts))
