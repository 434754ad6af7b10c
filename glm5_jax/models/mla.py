"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values are read from one latent of width R; rotary positions live in a
key part that all heads share. Two forms give the same result: the *expanded*
one makes full keys and values (cheaper when every token is a query), the
*absorbed* one keeps the latent as the only key and value and moves the
up-projections to the query and the output (cheaper when few queries meet a long
cache).
"""

from typing import Literal

from flax import nnx
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from glm5_jax.models import rope
from glm5_jax.models.config import AttentionForm
from glm5_jax.models.config import Dense
from glm5_jax.models.config import MlaConfig
from glm5_jax.models.layers import RmsNorm
from glm5_jax.models.layers import Weight
from glm5_jax.models.layers import normal_weight
from glm5_jax.parallelism.axis_rules import AxisRules
from glm5_jax.parallelism.partitioning import constrain
from glm5_jax.parallelism.partitioning import shard_map
from glm5_jax.parallelism.remat import keep
from pallas_kernels import flash_attention

MlaForm = Literal['expanded', 'absorbed']


def attend(
  query_BTNH: Float[Array, 'B T N H'],
  key_BTKH: Float[Array, 'B T K H'],
  value_BTKU: Float[Array, 'B T K U'],
  segment_ids: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  *,
  scale: float,
  form: AttentionForm,
  rules: AxisRules,
) -> Float[Array, 'B T N U']:
  """Returns the attention output in the form that the config names.

  Batch rows and heads are independent, so the kernel runs on the local ones; a
  single key head (the absorbed form) is there on every device.
  """
  match form:
    case Dense(window=window):

      def local(q: Array, k: Array, v: Array, s: Array, p: Array) -> Array:
        return flash_attention(
          q, k, v, segment_ids=s, positions=p, scale=scale, window=window
        )

  heads = ('batch', None, 'heads', None)
  keys = heads if key_BTKH.shape[2] > 1 else ('batch', None, None, None)
  rows = ('batch', None)
  mapped = shard_map(
    local,
    in_axes=(heads, keys, keys, rows, rows),
    out_axes=heads,
    rules=rules,
  )
  return mapped(query_BTNH, key_BTKH, value_BTKU, segment_ids, positions)


class Mla(nnx.Module):
  """Latent attention of one layer.

  Attributes:
    query_down: `[D, Q]`; query_norm over Q; query_up: `[Q, N, H]`, each head
      its plain part, then its rotary part.
    kv_down: `[D, R]`; kv_norm over R.
    key_up: `[R, N, O]`; value_up: `[R, N, U]`.
    key_rope: `[D, P]`, the rotary key of all heads.
    out: `[N, U, D]`.
  """

  def __init__(
    self,
    embed_dim: int,
    config: MlaConfig,
    form: AttentionForm,
    *,
    init_scale: float,
    rules: AxisRules,
    rngs: nnx.Rngs,
  ):
    self.config, self.form, self.rules = config, form, rules
    D, N = embed_dim, config.num_heads
    Q, R = config.query_latent_dim, config.latent_dim

    def weight(shape: tuple[int, ...], axes: tuple[str, ...]) -> Weight:
      return normal_weight(rngs, shape, axes, init_scale)

    up = ('kv_latent', 'heads', 'head_dim')
    self.query_down = weight((D, Q), ('embed', 'latent'))
    self.query_norm = RmsNorm(Q, config.latent_norm_epsilon)
    self.query_up = weight(
      (Q, N, config.head_dim), ('query_latent', 'heads', 'head_dim')
    )
    self.kv_down = weight((D, R), ('embed', 'latent'))
    self.kv_norm = RmsNorm(R, config.latent_norm_epsilon)
    self.key_up = weight((R, N, config.plain_dim), up)
    self.value_up = weight((R, N, config.value_dim), up)
    self.key_rope = weight((D, config.rope_dim), ('embed', 'head_dim'))
    self.out = weight((N, config.value_dim, D), ('heads', 'head_dim', 'embed'))

  def __call__(
    self,
    x: Float[Array, 'B T D'],
    segment_ids: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
    *,
    form: MlaForm = 'expanded',
  ) -> Float[Array, 'B T D']:
    """Returns the attention output.

    Args:
      x: normed block input.
      segment_ids: 0 for padding; tokens see their own segment only.
      positions: rotary positions.
      form: `expanded` for training, `absorbed` for few queries.
    """
    dtype, layout = x.dtype, self.config.rope_layout
    theta = self.config.rope_theta
    angles_BTh = rope.angles(positions, self.config.rope_dim, theta)
    plain_BTNO, rotary_BTNP = self._queries(x)
    rotary_BTNP = rope.rotate(rotary_BTNP, angles_BTh, layout)
    latent_BTR = self.kv_norm(
      jnp.einsum('BTD,DR->BTR', x, self.kv_down[...].astype(dtype))
    )
    latent_BTR = constrain(latent_BTR, ('batch', 'time', None), self.rules)
    key_BT1P = jnp.einsum('BTD,DP->BTP', x, self.key_rope[...].astype(dtype))
    key_BT1P = rope.rotate(key_BT1P[:, :, None], angles_BTh, layout)
    key_up = self.key_up[...].astype(dtype)
    value_up = self.value_up[...].astype(dtype)

    if form == 'expanded':
      N, P = self.config.num_heads, self.config.rope_dim
      plain_key_BTNO = jnp.einsum('BTR,RNO->BTNO', latent_BTR, key_up)
      shared_BTNP = jnp.broadcast_to(key_BT1P, (*x.shape[:2], N, P))
      query = jnp.concatenate([plain_BTNO, rotary_BTNP], -1)
      key = jnp.concatenate([plain_key_BTNO, shared_BTNP], -1)
      value = jnp.einsum('BTR,RNU->BTNU', latent_BTR, value_up)
    else:
      latent_query_BTNR = jnp.einsum('BTNO,RNO->BTNR', plain_BTNO, key_up)
      query = jnp.concatenate([latent_query_BTNR, rotary_BTNP], -1)
      key = jnp.concatenate([latent_BTR[:, :, None], key_BT1P], -1)
      value = latent_BTR[:, :, None]
    attended = attend(
      query,
      key,
      value,
      segment_ids,
      positions,
      scale=self.config.head_dim**-0.5,
      form=self.form,
      rules=self.rules,
    )
    attended = keep(attended)
    if form == 'absorbed':
      attended = jnp.einsum('BTNR,RNU->BTNU', attended, value_up)
    y = jnp.einsum('BTNU,NUD->BTD', attended, self.out[...].astype(dtype))
    return constrain(y, ('batch', 'time', None), self.rules)

  def _queries(
    self, x: Float[Array, 'B T D']
  ) -> tuple[Float[Array, 'B T N O'], Float[Array, 'B T N P']]:
    """Returns the plain and the (not yet rotated) rotary part of queries."""
    latent_BTQ = self.query_norm(
      jnp.einsum('BTD,DQ->BTQ', x, self.query_down[...].astype(x.dtype))
    )
    latent_BTQ = constrain(latent_BTQ, ('batch', 'time', None), self.rules)
    query_BTNH = jnp.einsum(
      'BTQ,QNH->BTNH', latent_BTQ, self.query_up[...].astype(x.dtype)
    )
    query_BTNH = constrain(
      query_BTNH, ('batch', 'time', 'heads', None), self.rules
    )
    O = self.config.plain_dim
    return query_BTNH[..., :O], query_BTNH[..., O:]
