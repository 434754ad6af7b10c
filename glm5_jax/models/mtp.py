"""Multi-token prediction: one more block that looks further ahead.

DeepSeek-V3 (arXiv 2412.19437, section 2.2). At depth k the layer joins the
hidden state of position i with the embedding of token i + k and predicts token
i + k + 1. GLM-5 uses the same parameters at every depth (arXiv 2602.15763).
Depth 1 reads the main model's hidden state after its final norm, as the
published servers do.
"""

from flax import nnx
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from glm5_jax.models.block import Block
from glm5_jax.models.config import ModelConfig
from glm5_jax.models.layers import RmsNorm
from glm5_jax.models.layers import normal_weight
from glm5_jax.parallelism.axis_rules import AxisRules
from glm5_jax.parallelism.partitioning import constrain


class MtpLayer(nnx.Module):
  """The extra layer.

  Attributes:
    embed_norm: norm of the token embedding; hidden_norm: of the hidden state.
    projection: `[2, D, D]`: embedding first, then hidden state.
    block: a block with experts.
    final_norm: norm before the head, which is the main model's.
  """

  def __init__(self, config: ModelConfig, *, rules: AxisRules, rngs: nnx.Rngs):
    D, epsilon = config.hidden_dim, config.norm_epsilon
    self.rules = rules
    self.embed_norm = RmsNorm(D, epsilon)
    self.hidden_norm = RmsNorm(D, epsilon)
    self.projection = normal_weight(
      rngs, (2, D, D), ('pair', 'embed', 'latent'), config.init_scale
    )
    self.block = Block(config, has_experts=True, rules=rules, rngs=rngs)
    self.final_norm = RmsNorm(D, epsilon)

  def __call__(
    self,
    hidden: Float[Array, 'B T D'],
    embedded: Float[Array, 'B T D'],
    segment_ids: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
  ) -> tuple[Float[Array, 'B T D'], Float[Array, ' E']]:
    """Returns the next depth's hidden state, normed, and the experts' load.

    Args:
      hidden: normed hidden state of the depth before.
      embedded: embedding of the token k places ahead.
      segment_ids: as in the main model.
      positions: as in the main model.
    """
    projection = self.projection[...].astype(hidden.dtype)
    pair = jnp.stack([self.embed_norm(embedded), self.hidden_norm(hidden)])
    x = jnp.einsum('pBTD,pDE->BTE', pair, projection)
    x = constrain(x, ('batch', 'time', None), self.rules)
    x, load_E = self.block(x, segment_ids, positions)
    return self.final_norm(x), load_E
