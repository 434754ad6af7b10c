"""What a model is made of, as plain data.

Widths follow the field's names; dtypes are strings so that this module, like
every config module, imports the standard library only.
"""

import dataclasses
from typing import Literal

DType = Literal['float32', 'bfloat16']
RematPolicy = Literal['none', 'dots', 'block']


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ValueError(message)


def _require_positive(config: object, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    _require(
      value > 0,
      f'{type(config).__name__}.{name} is {value}; it must be positive.',
    )


@dataclasses.dataclass(frozen=True)
class MlaConfig:
  """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

  Attributes:
    num_heads: query heads; keys and values have as many.
    query_latent_dim: width of the query latent.
    latent_dim: width of the latent that keys and values share.
    plain_dim: part of a query/key head that is not rotated.
    rope_dim: part of a query/key head that is rotated; even.
    value_dim: width of a value head.
    rope_theta: base of the rotary frequencies.
    rope_layout: which entries form a rotated pair: neighbours
      (`interleaved`, GLM) or entries half a width apart (`half_split`).
    latent_norm_epsilon: epsilon of the two latent norms. Hugging Face uses
      1e-6 there whatever the model's own epsilon is; trainers use 1e-5.
  """

  num_heads: int
  query_latent_dim: int
  latent_dim: int
  plain_dim: int
  rope_dim: int
  value_dim: int
  rope_theta: float = 1e6
  rope_layout: Literal['interleaved', 'half_split'] = 'interleaved'
  latent_norm_epsilon: float = 1e-5

  def __post_init__(self) -> None:
    _require_positive(
      self,
      'num_heads',
      'query_latent_dim',
      'latent_dim',
      'plain_dim',
      'rope_dim',
      'value_dim',
    )
    _require(
      self.rope_dim % 2 == 0,
      f'MlaConfig.rope_dim is {self.rope_dim}; it must be even.',
    )

  @property
  def head_dim(self) -> int:
    """Width of a query or key head."""
    return self.plain_dim + self.rope_dim


@dataclasses.dataclass(frozen=True)
class Dense:
  """Attention to every earlier token of the segment.

  Attributes:
    window: attend to at most this many latest positions, the token's own
      included; None for all.
  """

  window: int | None = None

  def __post_init__(self) -> None:
    if self.window is not None:
      _require_positive(self, 'window')


# The ways to choose what a query attends to. A new way is a new dataclass here
# and a new case where `models/mla.py` matches on it.
AttentionForm = Dense


@dataclasses.dataclass(frozen=True)
class MoeConfig:
  """Mixture of experts with a sigmoid router (DeepSeek-V3, arXiv 2412.19437).

  Attributes:
    num_experts: routed experts of a layer.
    experts_per_token: routed experts that each token visits.
    expert_dim: feed-forward width of one expert.
    num_shared_experts: experts that every token visits.
    num_groups: groups that the experts divide into; 1 switches groups off.
    groups_per_token: groups among which a token may choose.
    routed_scale: factor on the normalised routing weights.
    bias_update_rate: step of the balance bias, in units of router score.
    transport: how tokens reach experts on other devices.
  """

  num_experts: int
  experts_per_token: int
  expert_dim: int
  num_shared_experts: int = 1
  num_groups: int = 1
  groups_per_token: int = 1
  routed_scale: float = 2.5
  bias_update_rate: float = 1e-3
  transport: Literal['all_gather', 'all_to_all'] = 'all_gather'

  def __post_init__(self) -> None:
    _require_positive(
      self,
      'num_experts',
      'experts_per_token',
      'expert_dim',
      'num_groups',
      'groups_per_token',
    )
    _require(
      self.num_experts % self.num_groups == 0,
      f'MoeConfig.num_groups is {self.num_groups}; it must divide num_experts '
      f'({self.num_experts}).',
    )
    _require(
      self.groups_per_token <= self.num_groups,
      f'MoeConfig.groups_per_token is {self.groups_per_token}; it can be at '
      f'most num_groups ({self.num_groups}).',
    )
    reachable = self.num_experts // self.num_groups * self.groups_per_token
    _require(
      self.experts_per_token <= reachable,
      f'MoeConfig.experts_per_token is {self.experts_per_token}; only '
      f'{reachable} experts are in reach of a token.',
    )


@dataclasses.dataclass(frozen=True)
class MtpConfig:
  """Multi-token prediction by one extra layer used `depth` times.

  DeepSeek-V3 (arXiv 2412.19437, section 2.2); GLM-5 shares the parameters of
  its three depths (arXiv 2602.15763).

  Attributes:
    depth: tokens predicted beyond the next one.
    loss_weight: weight of the mean MTP loss in the training loss.
  """

  depth: int = 1
  loss_weight: float = 0.3

  def __post_init__(self) -> None:
    _require_positive(self, 'depth')
    _require(
      self.loss_weight >= 0,
      f'MtpConfig.loss_weight is {self.loss_weight}; it must be >= 0.',
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder of dense layers followed by mixture-of-experts layers.

  Attributes:
    vocab_size: rows of the embedding and columns of the output head.
    hidden_dim: model width.
    num_layers: all decoder layers, the dense ones included, MTP excluded.
    num_dense_layers: leading layers with a dense feed-forward.
    dense_dim: feed-forward width of the dense layers.
    mla: the attention's geometry.
    moe: the experts.
    attention: what a query attends to.
    mtp: the multi-token prediction layer, or None.
    max_length: longest sequence the model may be given, in tokens.
    norm_epsilon: epsilon of every norm but the two latent ones.
    init_scale: standard deviation of the initial weights.
    compute_dtype: dtype of activations; master weights are float32.
    remat: what the backward pass computes again: nothing, everything but the
      outputs of weight matmuls, or whole blocks.
    loss_chunk: tokens per row whose logits exist at a time.
  """

  vocab_size: int
  hidden_dim: int
  num_layers: int
  num_dense_layers: int
  dense_dim: int
  mla: MlaConfig
  moe: MoeConfig
  attention: AttentionForm = Dense()
  mtp: MtpConfig | None = None
  max_length: int = 4096
  norm_epsilon: float = 1e-5
  init_scale: float = 0.02
  compute_dtype: DType = 'bfloat16'
  remat: RematPolicy = 'block'
  loss_chunk: int = 512

  def __post_init__(self) -> None:
    _require_positive(
      self,
      'vocab_size',
      'hidden_dim',
      'num_layers',
      'dense_dim',
      'max_length',
      'init_scale',
      'loss_chunk',
    )
    _require(
      0 <= self.num_dense_layers <= self.num_layers,
      f'ModelConfig.num_dense_layers is {self.num_dense_layers}; it must lie '
      f'between 0 and num_layers ({self.num_layers}).',
    )

  @property
  def num_moe_layers(self) -> int:
    """Layers with routed experts, MTP excluded."""
    return self.num_layers - self.num_dense_layers
