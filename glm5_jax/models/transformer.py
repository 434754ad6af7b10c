"""The decoder: embedding, stacked blocks, final norm, head.

Blocks of a kind are stacked along a leading layer axis and scanned, so that the
program's size does not grow with depth.
"""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from glm5_jax.models.block import Block
from glm5_jax.models.config import ModelConfig
from glm5_jax.models.layers import BalanceBias
from glm5_jax.models.layers import RmsNorm
from glm5_jax.models.layers import normal_weight
from glm5_jax.models.mtp import MtpLayer
from glm5_jax.parallelism.axis_rules import AxisRules
from glm5_jax.parallelism.partitioning import constrain
from glm5_jax.parallelism.remat import rematerialised


def _stack(
  config: ModelConfig,
  num_layers: int,
  *,
  has_experts: bool,
  rules: AxisRules,
  rngs: nnx.Rngs,
) -> Block | None:
  """Returns blocks whose arrays have a leading layer axis; None for none."""
  if not num_layers:
    return None

  @nnx.split_rngs(splits=num_layers)
  @nnx.vmap(in_axes=0, out_axes=0)
  def build(rngs: nnx.Rngs) -> Block:
    return Block(config, has_experts=has_experts, rules=rules, rngs=rngs)

  stacked: Block = build(rngs)
  return stacked


class Transformer(nnx.Module):
  """A GLM-5 decoder.

  Attributes:
    embedding: `[V, D]`; head: `[D, V]`, untied.
    dense_layers: leading blocks with a dense feed-forward, stacked, or None.
    moe_layers: blocks with experts, stacked, or None.
    final_norm: norm before the head.
    mtp: the multi-token prediction layer, or None.
  """

  def __init__(self, config: ModelConfig, *, rules: AxisRules, rngs: nnx.Rngs):
    self.config, self.rules = config, rules
    V, D, scale = config.vocab_size, config.hidden_dim, config.init_scale
    self.embedding = normal_weight(rngs, (V, D), ('vocab', 'embed'), scale)
    self.dense_layers = _stack(
      config,
      config.num_dense_layers,
      has_experts=False,
      rules=rules,
      rngs=rngs,
    )
    self.moe_layers = _stack(
      config, config.num_moe_layers, has_experts=True, rules=rules, rngs=rngs
    )
    self.final_norm = RmsNorm(D, config.norm_epsilon)
    self.head = normal_weight(rngs, (D, V), ('embed', 'vocab'), scale)
    self.mtp = MtpLayer(config, rules=rules, rngs=rngs) if config.mtp else None

  def embed(self, tokens: Int[Array, 'B T']) -> Float[Array, 'B T D']:
    """Returns token embeddings in the compute dtype."""
    # Storage in pieces of the width is joined first: rows are then looked up
    # where the batch lives. In float32, as gradients of one token add up here.
    table = constrain(self.embedding[...], ('vocab', None), self.rules)
    x = jnp.take(table, tokens, axis=0)
    x = x.astype(self.config.compute_dtype)
    return constrain(x, ('batch', 'time', None), self.rules)

  def __call__(
    self,
    tokens: Int[Array, 'B T'],
    segment_ids: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
  ) -> tuple[Float[Array, 'B T D'], Float[Array, 'layers E']]:
    """Returns normed hidden states and the load of each layer's experts.

    Args:
      tokens: token ids.
      segment_ids: 0 for padding, else the document within the row.
      positions: places within the document.

    Raises:
      ValueError: the rows are longer than the model's `max_length`.
    """
    if tokens.shape[1] > self.config.max_length:
      raise ValueError(
        f'The rows have {tokens.shape[1]} tokens; ModelConfig.max_length is '
        f'{self.config.max_length}. Shorten the rows or raise max_length.'
      )
    x = self.embed(tokens)
    loads = jnp.zeros((0, self.config.moe.num_experts), jnp.float32)
    for layers in (self.dense_layers, self.moe_layers):
      if layers is not None:
        x, layer_loads = self._scan(layers, x, segment_ids, positions)
        if layer_loads.shape[1]:
          loads = layer_loads
    return self.final_norm(x), loads

  def _scan(
    self,
    layers: Block,
    x: Float[Array, 'B T D'],
    segment_ids: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
  ) -> tuple[Float[Array, 'B T D'], Float[Array, 'layers width']]:
    """Runs stacked blocks one after the other."""
    definition, *states = nnx.split(layers, nnx.Param, BalanceBias)

    def run(x: Array, layer: list[Any]) -> tuple[Array, Array]:
      block = nnx.merge(definition, *layer)
      y, load_E = block(x, segment_ids, positions)
      return y, load_E

    body = rematerialised(run, self.config.remat)
    x, loads = jax.lax.scan(body, x, states)
    return x, loads

  def logits(self, hidden: Float[Array, 'B T D']) -> Float[Array, 'B T V']:
    """Returns next-token logits in float32 of normed hidden states."""
    logits_BTV = jnp.einsum(
      'BTD,DV->BTV',
      hidden,
      self.head[...].astype(hidden.dtype),
      preferred_element_type=jnp.float32,
    )
    return constrain(logits_BTV, ('batch', 'time', 'vocab'), self.rules)
