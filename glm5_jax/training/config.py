"""How a model is trained, as plain data."""

import dataclasses
from typing import Literal

from glm5_jax.data.config import DataConfig
from glm5_jax.data.config import LengthStage


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ValueError(message)


def _require_at_least(config: object, low: float, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    _require(
      value >= low,
      f'{type(config).__name__}.{name} is {value}; it must be at least {low}.',
    )


def _require_within(
  config: object, low: float, high: float, *names: str
) -> None:
  for name in names:
    value = getattr(config, name)
    _require(
      low <= value <= high,
      f'{type(config).__name__}.{name} is {value}; it must lie in '
      f'{low}..{high}.',
    )


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
  """Learning rate over steps, as a share of its peak.

  Attributes:
    kind: what follows warm-up: `cosine` falls to `final_share`; `wsd` stays,
      then falls linearly over the last `decay_share` of the steps; `constant`.
    warmup_steps: steps of linear warm-up; the last of them has the peak.
    decay_share: share of all steps in which `wsd` decays.
    final_share: learning rate at the end, as a share of the peak.
  """

  kind: Literal['cosine', 'wsd', 'constant'] = 'cosine'
  warmup_steps: int = 100
  decay_share: float = 0.2
  final_share: float = 0.1

  def __post_init__(self) -> None:
    _require_at_least(self, 0, 'warmup_steps')
    _require_within(self, 0.0, 1.0, 'decay_share', 'final_share')


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW, or Muon for matrices with AdamW for the rest.

  Attributes:
    kind: the rule for hidden weight matrices. Embeddings, the output head,
      norms and router weights take AdamW under either.
    learning_rate: peak learning rate of AdamW.
    embedding_learning_rate: the same for the embedding and the output head. A
      row moves only when its token occurs, so a short run needs it higher; a
      router that moves as fast sends all tokens one way.
    muon_learning_rate: peak learning rate of Muon.
    schedule: shape of both learning rates.
    beta1: AdamW's decay of the first moment.
    beta2: AdamW's decay of the second moment.
    epsilon: AdamW's epsilon.
    momentum: Muon's momentum.
    weight_decay: decoupled decay of matrices, times the learning rate.
    max_grad_norm: gradients of larger global norm are scaled down to it.
  """

  kind: Literal['adamw', 'muon'] = 'adamw'
  learning_rate: float = 3e-4
  embedding_learning_rate: float = 3e-4
  muon_learning_rate: float = 0.02
  schedule: ScheduleConfig = ScheduleConfig()
  beta1: float = 0.9
  beta2: float = 0.95
  epsilon: float = 1e-8
  momentum: float = 0.95
  weight_decay: float = 0.1
  max_grad_norm: float = 1.0

  def __post_init__(self) -> None:
    for name in (
      'learning_rate',
      'embedding_learning_rate',
      'muon_learning_rate',
      'max_grad_norm',
    ):
      value = getattr(self, name)
      _require(
        value > 0, f'OptimizerConfig.{name} is {value}; it must be positive.'
      )
    _require_within(self, 0.0, 1.0, 'beta1', 'beta2', 'momentum')
    _require_at_least(self, 0.0, 'epsilon', 'weight_decay')


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When the state is written and what is kept.

  Attributes:
    every_steps: steps between checkpoints.
    keep_latest: newest checkpoints kept.
    keep_every_steps: also keep those at multiples of it for good; None: none.
  """

  every_steps: int = 1000
  keep_latest: int = 2
  keep_every_steps: int | None = None

  def __post_init__(self) -> None:
    _require_at_least(self, 1, 'every_steps', 'keep_latest')
    if self.keep_every_steps is not None:
      _require_at_least(self, 1, 'keep_every_steps')


@dataclasses.dataclass(frozen=True)
class HooksConfig:
  """What happens beside the steps.

  Attributes:
    log_every_steps: steps between rows of metrics.
    evaluate_every_steps: steps between evaluations; the last always has one.
    profile_steps: first and last step of a profiler trace; None: no trace.
    plot: whether loss and router load are drawn to the workdir.
  """

  log_every_steps: int = 10
  evaluate_every_steps: int = 500
  profile_steps: tuple[int, int] | None = None
  plot: bool = True

  def __post_init__(self) -> None:
    _require_at_least(self, 1, 'log_every_steps', 'evaluate_every_steps')
    if self.profile_steps is not None:
      first, last = self.profile_steps
      _require(
        1 <= first <= last,
        f'HooksConfig.profile_steps is {self.profile_steps}; it must be the '
        'first and the last step of the trace, counted from 1.',
      )


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
  """Pre-training on a mixture of text.

  Attributes:
    data: text, tokenizer and packing.
    stages: sequence lengths in order; their steps add up to the run.
    optimizer: the update rule.
    microbatches: pieces a step's batch is computed in; their gradients add up
      to the whole batch's.
    z_loss: weight of the squared log-partition (arXiv 2204.02311); 0 is off.
    checkpoint: when the state is written.
    hooks: logging, evaluation, profiling.
  """

  data: DataConfig
  stages: tuple[LengthStage, ...]
  optimizer: OptimizerConfig = OptimizerConfig()
  microbatches: int = 1
  z_loss: float = 0.0
  checkpoint: CheckpointConfig = CheckpointConfig()
  hooks: HooksConfig = HooksConfig()

  def __post_init__(self) -> None:
    _require(
      len(self.stages) > 0,
      'PretrainConfig.stages is empty; give it at least one LengthStage.',
    )
    _require_at_least(self, 1, 'microbatches')
    _require_at_least(self, 0.0, 'z_loss')
    for stage in self.stages:
      _require(
        stage.batch_size % self.microbatches == 0,
        f'PretrainConfig.microbatches is {self.microbatches}; it must divide '
        f'the batch_size of every stage, and {stage.batch_size} is not a '
        'multiple of it.',
      )

  @property
  def num_steps(self) -> int:
    """Optimizer steps of all stages."""
    return sum(stage.num_steps for stage in self.stages)
