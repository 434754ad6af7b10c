"""The small parts: weights with named axes, norms, gated feed-forward.

Master weights are float32; a module casts them to the compute dtype where it
uses them. Norms and everything that decides (softmax, router, loss) run in
float32.
"""

from collections.abc import Sequence

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float

from glm5_jax.parallelism.axis_rules import AxisRules
from glm5_jax.parallelism.partitioning import constrain


class Weight(nnx.Param[jax.Array]):
  """A trained array; its metadata `axes` names the logical axes."""


class BalanceBias(nnx.Variable[jax.Array]):
  """A router's balance bias: float32, moved by rule, not by gradients."""


def normal_weight(
  rngs: nnx.Rngs,
  shape: Sequence[int],
  axes: tuple[str | None, ...],
  scale: float,
) -> Weight:
  """Returns a float32 weight drawn from a normal of deviation `scale`."""
  value = scale * jax.random.normal(rngs.params(), tuple(shape), jnp.float32)
  return Weight(value, axes=axes)


def rms_norm(
  x: Float[Array, '*batch D'], scale: Float[Array, ' D'], epsilon: float
) -> Float[Array, '*batch D']:
  """Returns `x / rms(x) * scale`; statistics in float32, result as `x`."""
  x32 = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
  normed = (x32 * jax.lax.rsqrt(mean_square + epsilon)).astype(x.dtype)
  return normed * scale.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class RmsNorm(nnx.Module):
  """Root-mean-square norm over the last axis (arXiv 1910.07467).

  Attributes:
    scale: `[D]`.
  """

  def __init__(self, dim: int, epsilon: float):
    self.scale = Weight(jnp.ones((dim,), jnp.float32), axes=(None,))
    self.epsilon = epsilon

  def __call__(self, x: Float[Array, '*batch D']) -> Float[Array, '*batch D']:
    return rms_norm(x, self.scale[...], self.epsilon)


def swiglu(
  x: Float[Array, '*batch D'],
  gate_up: Float[Array, 'D 2 F'],
  down: Float[Array, 'F D'],
) -> Float[Array, '*batch D']:
  """Returns `down(silu(gate(x)) * up(x))` (arXiv 2002.05202)."""
  gate_up_F = jnp.einsum('...D,DpF->...pF', x, gate_up)
  hidden_F = jax.nn.silu(gate_up_F[..., 0, :]) * gate_up_F[..., 1, :]
  return jnp.einsum('...F,FD->...D', hidden_F, down)


class FeedForward(nnx.Module):
  """A gated feed-forward that every token visits.

  Attributes:
    gate_up: `[D, 2, F]`.
    down: `[F, D]`.
  """

  def __init__(
    self,
    embed_dim: int,
    ffn_dim: int,
    *,
    init_scale: float,
    rules: AxisRules,
    rngs: nnx.Rngs,
  ):
    self.rules = rules
    self.gate_up = normal_weight(
      rngs, (embed_dim, 2, ffn_dim), ('embed', 'pair', 'ffn'), init_scale
    )
    self.down = normal_weight(
      rngs, (ffn_dim, embed_dim), ('ffn', 'embed'), init_scale
    )

  def __call__(self, x: Float[Array, 'B T D']) -> Float[Array, 'B T D']:
    y = swiglu(
      x, self.gate_up[...].astype(x.dtype), self.down[...].astype(x.dtype)
    )
    return constrain(y, ('batch', 'time', None), self.rules)
