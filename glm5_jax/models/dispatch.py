"""From tokens to rows sorted by expert, and back.

A token has X slots, one for each expert it visits. The plan lists, for every
row of the sorted order, the slot it serves, and for every slot its row. With
both at hand, forward and backward are gathers: no scatter, no atomics, the same
result every time.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int


class Plan(NamedTuple):
  """Rows of `num_groups` consecutive groups, one group an expert.

  Attributes:
    slot_of_row: slot (token * X + choice) served by each row, `[C]`; rows
      beyond the groups hold some unused slot.
    row_of_slot: row of each slot, `[M, X]`; C where the slot has none here.
    group_sizes: rows of each group, `[E]`.
  """

  slot_of_row: Int[Array, ' C']
  row_of_slot: Int[Array, 'M X']
  group_sizes: Int[Array, ' E']


def plan(group_ids: Int[Array, 'M X'], num_groups: int, num_rows: int) -> Plan:
  """Sorts slots by group; slots of other groups get no row.

  Args:
    group_ids: group of each slot; anything outside `[0, num_groups)` is not
      served here.
    num_groups: groups.
    num_rows: C; at least as many as slots can be served.
  """
  flat = group_ids.reshape(-1)
  here = (flat >= 0) & (flat < num_groups)
  key = jnp.where(here, flat, num_groups)
  order = jnp.argsort(key, stable=True)
  rank = jnp.argsort(order)
  row = jnp.where(here, rank, num_rows)
  sizes = (key[:, None] == jnp.arange(num_groups)[None]).sum(0, dtype=jnp.int32)
  return Plan(
    slot_of_row=order[:num_rows].astype(jnp.int32),
    row_of_slot=row.reshape(group_ids.shape).astype(jnp.int32),
    group_sizes=sizes,
  )


def _rows_or_zero(rows: Array, index: Array) -> Array:
  """Gathers rows; an index past the end gives zeros."""
  return jnp.take(rows, index, axis=0, mode='fill', fill_value=0)


def _served(plan_: Plan) -> Array:
  """Says which rows belong to a group, `[C]`."""
  return jnp.arange(plan_.slot_of_row.shape[0]) < plan_.group_sizes.sum()


@jax.custom_vjp
def to_rows(x: Float[Array, 'M D'], plan_: Plan) -> Float[Array, 'C D']:
  """Returns each row's token; rows beyond the groups hold zeros."""
  return _to_rows_forward(x, plan_)[0]


def _to_rows_forward(x: Array, plan_: Plan) -> tuple[Array, Plan]:
  choices = plan_.row_of_slot.shape[1]
  token = jnp.where(_served(plan_), plan_.slot_of_row // choices, x.shape[0])
  return _rows_or_zero(x, token), plan_


def _to_rows_backward(plan_: Plan, grad: Array) -> tuple[Array, None]:
  return _rows_or_zero(grad, plan_.row_of_slot).sum(1), None


to_rows.defvjp(_to_rows_forward, _to_rows_backward)


@jax.custom_vjp
def combine(
  rows: Float[Array, 'C D'], weights: Float[Array, 'M X'], plan_: Plan
) -> Float[Array, 'M D']:
  """Returns every token's weighted sum over its rows, added in float32."""
  return _combine_forward(rows, weights, plan_)[0]


def _combine_forward(
  rows: Array, weights: Array, plan_: Plan
) -> tuple[Array, tuple[Array, Array, Plan]]:
  gathered_MXD = _rows_or_zero(rows, plan_.row_of_slot)
  y = jnp.einsum(
    'MXD,MX->MD',
    gathered_MXD.astype(jnp.float32),
    weights.astype(jnp.float32),
  )
  return y.astype(rows.dtype), (rows, weights, plan_)


def _combine_backward(
  residuals: tuple[Array, Array, Plan], grad: Array
) -> tuple[Array, Array, None]:
  rows, weights, plan_ = residuals
  choices = weights.shape[1]
  slot = jnp.where(_served(plan_), plan_.slot_of_row, weights.size)
  grad_token = _rows_or_zero(grad, slot // choices)
  weight = _rows_or_zero(weights.reshape(-1), slot).astype(jnp.float32)
  grad_rows = (grad_token.astype(jnp.float32) * weight[:, None]).astype(
    rows.dtype
  )
  gathered_MXD = _rows_or_zero(rows, plan_.row_of_slot)
  grad_weights = jnp.einsum(
    'MXD,MD->MX', gathered_MXD.astype(jnp.float32), grad.astype(jnp.float32)
  )
  return grad_rows, grad_weights.astype(weights.dtype), None


combine.defvjp(_combine_forward, _combine_backward)
