"""Parameters, FLOPs and bytes of a model, by formula from its config.

Nothing is built or traced, so the largest preset is counted in microseconds.
The letters are those of `glm5_jax/__init__.py`.
"""

import dataclasses

from glm5_jax.models.config import AttentionForm
from glm5_jax.models.config import Dense
from glm5_jax.models.config import MlaConfig
from glm5_jax.models.config import ModelConfig

_DTYPE_BYTES = {'float32': 4, 'bfloat16': 2}


@dataclasses.dataclass(frozen=True)
class ParameterCount:
  """Trained parameters by part; the MTP layer and the biases stand apart.

  Attributes:
    embedding: token embedding.
    head: output head, untied.
    attention: projections and latent norms of all layers.
    dense_ffn: feed-forward of the leading layers.
    router: routing weights.
    shared_experts: experts that every token visits.
    routed_experts: experts that some tokens visit.
    norms: block norms and the final norm.
    inactive: part of `routed_experts` that a token does not visit.
    mtp: the whole MTP layer, its experts included; in no total.
    mtp_inactive: part of `mtp` that a token does not visit.
    balance_biases: router biases, MTP's included; moved by rule, in no total.
  """

  embedding: int
  head: int
  attention: int
  dense_ffn: int
  router: int
  shared_experts: int
  routed_experts: int
  norms: int
  inactive: int
  mtp: int
  mtp_inactive: int
  balance_biases: int

  @property
  def total(self) -> int:
    """All parameters of the decoder, both embeddings included, without MTP."""
    return (
      self.embedding
      + self.head
      + self.attention
      + self.dense_ffn
      + self.router
      + self.shared_experts
      + self.routed_experts
      + self.norms
    )

  @property
  def active(self) -> int:
    """Parameters of `total` that take part in one token."""
    return self.total - self.inactive

  @property
  def trained(self) -> int:
    """All that the optimizer sees: `total` and the MTP layer."""
    return self.total + self.mtp


@dataclasses.dataclass(frozen=True)
class FlopCount:
  """FLOPs of one token's forward pass; a multiply-add is two.

  Attributes:
    weights: matmuls with weights, head included; the embedding is a look-up.
    attention: products of queries with keys and of scores with values, averaged
      over the positions of a sequence.
    mtp: both kinds in all depths of the MTP layer, its heads included.
  """

  weights: float
  attention: float
  mtp: float

  @property
  def forward(self) -> float:
    """The decoder without MTP, as in evaluation."""
    return self.weights + self.attention

  @property
  def training(self) -> float:
    """Forward and backward with MTP; what is computed again is not counted."""
    return 3 * (self.forward + self.mtp)


def _attention_parameters(D: int, mla: MlaConfig) -> tuple[int, int]:
  """Returns (projections, latent norms) of one layer."""
  N, Q, R = mla.num_heads, mla.query_latent_dim, mla.latent_dim
  query = D * Q + Q * N * mla.head_dim
  key_value = D * (R + mla.rope_dim) + R * N * (mla.plain_dim + mla.value_dim)
  return query + key_value + N * mla.value_dim * D, Q + R


def parameters(config: ModelConfig) -> ParameterCount:
  """Counts the parameters of a model by part."""
  D, V, moe = config.hidden_dim, config.vocab_size, config.moe
  projections, latent_norms = _attention_parameters(D, config.mla)
  attention = projections + latent_norms
  router = D * moe.num_experts
  expert = 3 * D * moe.expert_dim
  shared = moe.num_shared_experts * expert
  idle = (moe.num_experts - moe.experts_per_token) * expert
  routed = moe.num_experts * expert
  # Two norms of the inputs, the projection of both, a block with experts with
  # its two norms, a final norm.
  mtp = 5 * D + 2 * D * D + attention + router + shared + routed
  has_mtp = config.mtp is not None
  return ParameterCount(
    embedding=V * D,
    head=V * D,
    attention=config.num_layers * attention,
    dense_ffn=config.num_dense_layers * 3 * D * config.dense_dim,
    router=config.num_moe_layers * router,
    shared_experts=config.num_moe_layers * shared,
    routed_experts=config.num_moe_layers * routed,
    norms=(2 * config.num_layers + 1) * D,
    inactive=config.num_moe_layers * idle,
    mtp=mtp if has_mtp else 0,
    mtp_inactive=idle if has_mtp else 0,
    balance_biases=(config.num_moe_layers + has_mtp) * moe.num_experts,
  )


def mean_keys(form: AttentionForm, sequence_length: int) -> float:
  """Returns how many keys a query attends to, averaged over a sequence."""
  match form:
    case Dense(window=window):
      reach = min(window or sequence_length, sequence_length)
  # The first `reach` queries attend to 1, 2, ..., the others to `reach` each.
  ramp = reach * (reach + 1) / 2
  return (ramp + (sequence_length - reach) * reach) / sequence_length


def flops(config: ModelConfig, sequence_length: int) -> FlopCount:
  """Counts the FLOPs of one token in a sequence that is one document.

  Args:
    config: the model.
    sequence_length: tokens of the sequence.
  """
  D, mla, moe = config.hidden_dim, config.mla, config.moe
  projections, _ = _attention_parameters(D, mla)
  visited = moe.experts_per_token + moe.num_shared_experts
  ffn = D * moe.num_experts + visited * 3 * D * moe.expert_dim
  head = D * config.vocab_size
  pair = 2 * mla.num_heads * (mla.head_dim + mla.value_dim)
  scores = pair * mean_keys(config.attention, sequence_length)
  weights = (
    config.num_layers * projections
    + config.num_dense_layers * 3 * D * config.dense_dim
    + config.num_moe_layers * ffn
    + head
  )
  depth = 0 if config.mtp is None else config.mtp.depth
  mtp_layer = 2 * (2 * D * D + projections + ffn + head) + scores
  return FlopCount(
    weights=2 * weights,
    attention=config.num_layers * scores,
    mtp=depth * mtp_layer,
  )


def cache_bytes(config: ModelConfig) -> int:
  """Returns the bytes that one cached token takes over all layers.

  The absorbed form of MLA keeps the latent and the shared rotary key alone.
  """
  width = config.mla.latent_dim + config.mla.rope_dim
  return config.num_layers * width * _DTYPE_BYTES[config.compute_dtype]


def weight_bytes(config: ModelConfig) -> int:
  """Returns the bytes of weights that one decoded token reads.

  That is a batch of one, in the compute dtype; of the embedding one row.
  """
  count = parameters(config)
  read = count.active - count.embedding + config.hidden_dim
  return read * _DTYPE_BYTES[config.compute_dtype]
