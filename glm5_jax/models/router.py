"""Which experts a token visits; pure functions, all in float32.

DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). The balance bias decides *who* is
chosen and never *how much* the chosen count: weights are taken from the scores
again, since `biased - bias` would lose them to rounding under a large bias.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from glm5_jax.models.config import MoeConfig

# Added to the sum of chosen scores, which is zero when all of them underflow.
_TINY = 1e-20
# Below this sum the square of it, which the gradient divides by, underflows.
_SMALLEST_SUM = 1e-18


def scores(
  x: Float[Array, '*batch D'], router: Float[Array, 'D E']
) -> Float[Array, '*batch E']:
  """Returns the sigmoid affinity of every token to every expert."""
  logits = jnp.einsum(
    '...D,DE->...E',
    x.astype(jnp.float32),
    router.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )
  return jax.nn.sigmoid(logits)


def group_limited(
  biased: Float[Array, '*batch E'], num_groups: int, groups_per_token: int
) -> Float[Array, '*batch E']:
  """Returns `biased` with the experts of all but the best groups at -inf.

  A group is worth the sum of its two best experts; ties go to the lower group.
  """
  if num_groups == groups_per_token:
    return biased
  grouped = biased.reshape(*biased.shape[:-1], num_groups, -1)
  best_two = min(2, grouped.shape[-1])
  worth = jax.lax.top_k(grouped, best_two)[0].sum(-1)
  _, chosen = jax.lax.top_k(worth, groups_per_token)
  allowed = jax.nn.one_hot(chosen, num_groups, dtype=bool).any(-2)
  return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(biased.shape)


def select(
  scores_E: Float[Array, '*batch E'],
  bias: Float[Array, ' E'],
  config: MoeConfig,
) -> tuple[Int[Array, '*batch X'], Float[Array, '*batch X']]:
  """Returns each token's experts and their weights.

  Args:
    scores_E: affinities from `scores`.
    bias: balance bias, float32.
    config: numbers of experts and groups, and the scale.

  Returns:
    Expert ids by falling biased score (ties to the lower id), and weights that
    sum to `routed_scale`.
  """
  biased = scores_E + bias.reshape((1,) * (scores_E.ndim - 1) + (-1,))
  # The choice has no gradient; without this XLA would carry a useless one.
  biased = jax.lax.stop_gradient(biased)
  limited = group_limited(biased, config.num_groups, config.groups_per_token)
  _, ids = jax.lax.top_k(limited, config.experts_per_token)
  chosen = jnp.take_along_axis(scores_E, ids, axis=-1)
  return ids, normalised(chosen) * config.routed_scale


def normalised(chosen: Float[Array, '*batch X']) -> Float[Array, '*batch X']:
  """Returns `chosen / (sum + 1e-20)`; no gradient where the sum underflows."""
  total = chosen.sum(-1, keepdims=True)
  has_gradient = total > _SMALLEST_SUM
  divisor = jnp.where(has_gradient, total, 1.0) + _TINY
  tiny = jax.lax.stop_gradient(chosen / (total + _TINY))
  return jnp.where(has_gradient, chosen / divisor, tiny)


def load(
  ids: Int[Array, '*batch X'], counted: Float[Array, '*batch'], num_experts: int
) -> Float[Array, ' E']:
  """Returns how many counted tokens each expert receives."""
  experts = jnp.arange(num_experts).reshape((1,) * ids.ndim + (-1,))
  hits = ids[..., None] == experts
  weighted = jnp.where(hits, counted[..., None, None], 0.0)
  return weighted.sum(tuple(range(ids.ndim)))


def balance_update(
  bias: Float[Array, '*layers E'],
  load_E: Float[Array, '*layers E'],
  rate: float,
) -> Float[Array, '*layers E']:
  """Returns the bias after one step of loss-free balancing.

  `bias_i += rate * sign(mean(load) - load_i)` (arXiv 2408.15664, algorithm 1).
  """
  error = load_E.mean(-1, keepdims=True) - load_E
  return bias + rate * jnp.sign(error)
