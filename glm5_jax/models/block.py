"""One decoder block: attention, then a dense feed-forward or experts."""

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from glm5_jax.models.config import ModelConfig
from glm5_jax.models.layers import FeedForward
from glm5_jax.models.layers import RmsNorm
from glm5_jax.models.mla import Mla
from glm5_jax.models.moe import Moe
from glm5_jax.parallelism.axis_rules import AxisRules


class Block(nnx.Module):
  """A pre-norm block: `x += attention(norm(x)); x += ffn(norm(x))`.

  Attributes:
    attention: latent attention.
    ffn: a dense feed-forward, or routed experts.
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    has_experts: bool,
    rules: AxisRules,
    rngs: nnx.Rngs,
  ):
    D, scale = config.hidden_dim, config.init_scale
    self.attention_norm = RmsNorm(D, config.norm_epsilon)
    self.attention = Mla(
      D,
      config.mla,
      config.attention,
      init_scale=scale,
      rules=rules,
      rngs=rngs,
    )
    self.ffn_norm = RmsNorm(D, config.norm_epsilon)
    self.ffn: Moe | FeedForward
    if has_experts:
      self.ffn = Moe(D, config.moe, init_scale=scale, rules=rules, rngs=rngs)
    else:
      self.ffn = FeedForward(
        D, config.dense_dim, init_scale=scale, rules=rules, rngs=rngs
      )

  def __call__(
    self,
    x: Float[Array, 'B T D'],
    segment_ids: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
  ) -> tuple[Float[Array, 'B T D'], Float[Array, ' E']]:
    """Returns the block's output and its experts' load (empty if dense)."""
    with jax.named_scope('attention'):
      x = x + self.attention(self.attention_norm(x), segment_ids, positions)
    with jax.named_scope('ffn'):
      normed = self.ffn_norm(x)
      if isinstance(self.ffn, Moe):
        counted = (segment_ids > 0).astype(jnp.float32)
        y, load_E = self.ffn(normed, counted)
      else:
        y, load_E = self.ffn(normed), jnp.zeros((0,), jnp.float32)
    return x + y, load_E
