"""The pre-training loss: next token, further tokens, and what the rule needs.

All sums are divided by the totals of the *whole* batch, so the losses and
gradients of microbatches add up to the batch's.
"""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float

from glm5_jax.data.batch import Batch
from glm5_jax.models import router
from glm5_jax.models.config import ModelConfig
from glm5_jax.models.cross_entropy import chunked_cross_entropy
from glm5_jax.models.transformer import Transformer


class LossTotals(NamedTuple):
  """Weight sums of a whole batch, the divisors of its losses.

  Attributes:
    next_token: weights of next-token targets.
    mtp: weights of the targets of each MTP depth, `[depth]`.
  """

  next_token: Float[Array, '']
  mtp: Float[Array, ' depth']


class LossMetrics(NamedTuple):
  """Parts of the loss; each adds up over the microbatches of a step.

  Attributes:
    cross_entropy: mean next-token loss, nats a token.
    mtp_cross_entropy: mean over depths of the MTP loss, nats a token.
    z_loss: weighted squared log-partition.
    num_tokens: tokens that are not padding.
    expert_load: tokens each expert received, a row a layer, the MTP layer's
      last, `[layers, E]`.
  """

  cross_entropy: Float[Array, '']
  mtp_cross_entropy: Float[Array, '']
  z_loss: Float[Array, '']
  num_tokens: Float[Array, '']
  expert_load: Float[Array, 'layers E']


def ahead(x: Array, segment_ids: Array, distance: int) -> tuple[Array, Array]:
  """Returns `x` from `distance` places ahead, and where the segment goes on."""

  def shifted(a: Array) -> Array:
    return jnp.pad(a[:, distance:], ((0, 0), (0, min(distance, a.shape[1]))))

  same = (shifted(segment_ids) == segment_ids) & (segment_ids > 0)
  return shifted(x), same


def _mtp_weights(batch: Batch, distance: int) -> Array:
  weights, same = ahead(batch.weights, batch.segment_ids, distance)
  return jnp.where(same, weights, 0.0)


def loss_totals(batch: Batch, config: ModelConfig) -> LossTotals:
  """Returns the divisors of the losses of `batch`; at least 1 each."""
  depth = 0 if config.mtp is None else config.mtp.depth
  mtp = [_mtp_weights(batch, k).sum() for k in range(1, depth + 1)]
  return LossTotals(
    next_token=jnp.maximum(batch.weights.sum(), 1.0),
    mtp=jnp.maximum(jnp.stack(mtp), 1.0) if mtp else jnp.zeros((0,)),
  )


def pretraining_loss(
  model: Transformer, batch: Batch, totals: LossTotals, *, z_loss: float
) -> tuple[Float[Array, ''], LossMetrics]:
  """Returns the share that `batch` has in the loss of the whole batch.

  Args:
    model: the model.
    batch: a microbatch.
    totals: divisors from the whole batch.
    z_loss: weight of the squared log-partition of the next-token head.
  """
  config, rules = model.config, model.rules
  hidden, loads = model(batch.tokens, batch.segment_ids, batch.positions)
  head = model.head[...].astype(hidden.dtype)
  objective, cross_entropy, z = chunked_cross_entropy(
    hidden,
    head,
    batch.targets,
    batch.weights,
    config.loss_chunk,
    z_loss,
    rules,
  )
  loss = objective / totals.next_token
  mtp_loss = jnp.zeros((), jnp.float32)
  if model.mtp is not None and config.mtp is not None:
    mtp_loss, mtp_load = _mtp_loss(model, hidden, head, batch, totals)
    loss = loss + config.mtp.loss_weight * mtp_loss
    loads = jnp.concatenate([loads, mtp_load[None]])
  metrics = LossMetrics(
    cross_entropy=cross_entropy / totals.next_token,
    mtp_cross_entropy=mtp_loss,
    z_loss=z / totals.next_token,
    num_tokens=(batch.segment_ids > 0).sum(dtype=jnp.float32),
    expert_load=loads,
  )
  return loss, jax.lax.stop_gradient(metrics)


def _mtp_loss(
  model: Transformer,
  hidden: Float[Array, 'B T D'],
  head: Float[Array, 'D V'],
  batch: Batch,
  totals: LossTotals,
) -> tuple[Float[Array, ''], Float[Array, ' E']]:
  """Returns the mean loss over the MTP depths and the load of its experts."""
  config = model.config
  assert model.mtp is not None and config.mtp is not None
  loss = jnp.zeros((), jnp.float32)
  load_E = jnp.zeros((config.moe.num_experts,), jnp.float32)
  for k in range(1, config.mtp.depth + 1):
    tokens, goes_on = ahead(batch.tokens, batch.segment_ids, k)
    targets, _ = ahead(batch.targets, batch.segment_ids, k)
    # A place with no token k ahead is padding at this depth.
    segment_ids = jnp.where(goes_on, batch.segment_ids, 0)
    hidden, depth_load = model.mtp(
      hidden, model.embed(tokens), segment_ids, batch.positions
    )
    objective, _, _ = chunked_cross_entropy(
      hidden,
      head,
      targets,
      _mtp_weights(batch, k),
      config.loss_chunk,
      0.0,
      model.rules,
    )
    loss = loss + objective / totals.mtp[k - 1] / config.mtp.depth
    load_E = load_E + depth_load
  return loss, load_E


def updated_balance(
  balance: Any, expert_load: Float[Array, 'layers E'], config: ModelConfig
) -> Any:
  """Returns the balance biases after one step of their rule.

  Args:
    balance: the biases, as in `Variables.balance`.
    expert_load: load of the whole batch, from `LossMetrics`.
    config: the model; its `moe.bias_update_rate` is the step.
  """
  biases, structure = jax.tree.flatten(balance)
  # In order of name: `moe_layers` ([layers, E]) comes before `mtp` ([E]).
  updated, row = [], 0
  for bias in biases:
    rows = bias.size // bias.shape[-1]
    load_E = expert_load[row : row + rows].reshape(bias.shape)
    updated.append(
      router.balance_update(bias, load_E, config.moe.bias_update_rate)
    )
    row += rows
  return jax.tree.unflatten(structure, updated)
