"""Cross-entropy of a whole batch without its logits.

Logits exist for a few positions of each row at a time. The forward pass already
computes the gradients of the hidden states and of the head, chunk by chunk, so
the backward pass has nothing to compute again: three matmuls in all, as if the
logits had been kept.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from glm5_jax.parallelism.axis_rules import AxisRules
from glm5_jax.parallelism.partitioning import constrain

Sums = tuple[Float[Array, ''], Float[Array, ''], Float[Array, '']]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def chunked_cross_entropy(
  hidden_BTD: Float[Array, 'B T D'],
  head_DV: Float[Array, 'D V'],
  targets_BT: Int[Array, 'B T'],
  weights_BT: Float[Array, 'B T'],
  chunk: int,
  z_loss: float,
  rules: AxisRules,
) -> Sums:
  """Returns sums over all tokens: objective, cross-entropy and z-loss.

  The objective is `Σ w (-log p(target)) + z_loss Σ w log²Z` in nats; only its
  cotangent is used, the other two are for display.

  Args:
    hidden_BTD: normed hidden states.
    head_DV: output head in the dtype of the matmul.
    targets_BT: token ids.
    weights_BT: weight of each token; 0 drops it.
    chunk: positions of a row whose logits exist at a time.
    z_loss: weight of the squared log-partition (arXiv 2204.02311).
    rules: layout of the logits.
  """
  return _forward(
    hidden_BTD, head_DV, targets_BT, weights_BT, chunk, z_loss, rules, False
  )[0]


def _chunks(x: Array, chunk: int) -> Array:
  """Cuts the time axis: `[B, T, ...]` to `[chunks, B, chunk, ...]`."""
  padding = -x.shape[1] % chunk
  x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
  x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)


def _forward(
  hidden_BTD: Array,
  head_DV: Array,
  targets_BT: Array,
  weights_BT: Array,
  chunk: int,
  z_loss: float,
  rules: AxisRules,
  with_gradients: bool,
) -> tuple[Sums, tuple[Array, Array] | None]:
  """Returns the sums, and the gradients of the objective if asked for."""
  B, T, D = hidden_BTD.shape
  V = head_DV.shape[1]
  chunk = min(chunk, T)
  zero = jnp.zeros((), jnp.float32)

  def one(
    carry: tuple[Array, Array, Array], piece: tuple[Array, ...]
  ) -> tuple[tuple[Array, Array, Array], Any]:
    cross_entropy, squares, head_grad = carry
    x, targets, weights = piece
    logits_BTV = jnp.einsum(
      'BTD,DV->BTV', x, head_DV, preferred_element_type=jnp.float32
    )
    logits_BTV = constrain(logits_BTV, ('batch', None, 'vocab'), rules)
    log_z = jax.nn.logsumexp(logits_BTV, axis=-1)
    is_target = targets[..., None] == jnp.arange(V)[None, None]
    picked = jnp.where(is_target, logits_BTV, 0.0).sum(-1)
    cross_entropy += (weights * (log_z - picked)).sum()
    squares += (weights * log_z**2).sum()
    if not with_gradients:
      return (cross_entropy, squares, head_grad), None
    # d/dlogits of w (log Z - logit_target) + z w log²Z.
    slope = weights * (1.0 + 2.0 * z_loss * log_z)
    grad_BTV = jnp.exp(logits_BTV - log_z[..., None]) * slope[..., None]
    grad_BTV = grad_BTV - jnp.where(is_target, weights[..., None], 0.0)
    grad_BTV = grad_BTV.astype(head_DV.dtype)
    x_grad = jnp.einsum('BTV,DV->BTD', grad_BTV, head_DV)
    head_grad += jnp.einsum(
      'BTD,BTV->DV', x, grad_BTV, preferred_element_type=jnp.float32
    )
    head_grad = constrain(head_grad, ('embed', 'vocab'), rules)
    return (cross_entropy, squares, head_grad), x_grad

  head_grad = jnp.zeros((D, V) if with_gradients else (), jnp.float32)
  pieces = tuple(
    _chunks(a, chunk) for a in (hidden_BTD, targets_BT, weights_BT)
  )
  (cross_entropy, squares, head_grad), x_grad = jax.lax.scan(
    one, (zero, zero, head_grad), pieces
  )
  sums = (cross_entropy + z_loss * squares, cross_entropy, z_loss * squares)
  if not with_gradients:
    return sums, None
  x_grad = jnp.moveaxis(x_grad, 0, 1).reshape(B, -1, D)[:, :T]
  return sums, (x_grad, head_grad.astype(head_DV.dtype))


def _vjp_forward(
  hidden_BTD: Array,
  head_DV: Array,
  targets_BT: Array,
  weights_BT: Array,
  chunk: int,
  z_loss: float,
  rules: AxisRules,
) -> tuple[Sums, tuple[Array, Array] | None]:
  return _forward(
    hidden_BTD, head_DV, targets_BT, weights_BT, chunk, z_loss, rules, True
  )


def _vjp_backward(
  chunk: int,
  z_loss: float,
  rules: AxisRules,
  gradients: tuple[Array, Array],
  cotangents: Sums,
) -> tuple[Array, Array, None, None]:
  del chunk, z_loss, rules
  x_grad, head_grad = gradients
  scale = cotangents[0]
  return (
    x_grad * scale.astype(x_grad.dtype),
    head_grad * scale.astype(head_grad.dtype),
    None,
    None,
  )


chunked_cross_entropy.defvjp(_vjp_forward, _vjp_backward)
