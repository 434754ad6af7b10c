"""What a run reports: the names of its numbers, and rows of them."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np

from glm5_jax.training.step import StepMetrics

Value = float | list[float]
Row = dict[str, Value]


@dataclasses.dataclass(frozen=True)
class Metric:
  """A number in a row.

  Attributes:
    unit: what it counts or measures in.
    meaning: what it is.
  """

  unit: str
  meaning: str


# Every name that occurs in a row of `metrics.jsonl`. Values are those of the
# row's step alone unless the meaning says otherwise.
METRICS = {
  'step': Metric('steps', 'updates done, this one included'),
  'tokens': Metric('tokens', 'tokens trained on so far, padding excluded'),
  'loss': Metric('nats', 'what is minimised: all losses with their weights'),
  'cross_entropy': Metric('nats/token', 'mean next-token loss'),
  'mtp_cross_entropy': Metric(
    'nats/token', 'mean loss of the further tokens, over the MTP depths'
  ),
  'z_loss': Metric('nats', 'weighted squared log-partition'),
  'grad_norm': Metric('', 'global norm of the gradient before clipping'),
  'learning_rate': Metric('', 'learning rate of AdamW'),
  'embedding_learning_rate': Metric('', 'learning rate of embedding and head'),
  'muon_learning_rate': Metric('', 'learning rate of Muon'),
  'expert_load': Metric(
    '',
    'load of the busiest expert over the mean load, for each layer with '
    'experts, the MTP layer last; 1 is even',
  ),
  'max_expert_load': Metric('', 'largest of expert_load'),
  'step_seconds': Metric(
    's', 'mean wall time of a step since the last row, without compilation'
  ),
  'data_seconds': Metric(
    's', 'mean wait for a batch in a step since the last row'
  ),
  'tokens_per_second': Metric(
    'tokens/s', 'tokens trained on since the last row over their wall time'
  ),
}

# Results of an evaluation carry this prefix; their meaning is the evaluation's.
EVALUATION_PREFIX = 'evaluation/'


def num_tokens(step: StepMetrics) -> int:
  """Returns tokens trained on, padding excluded; none if it was refused."""
  return int(step.parts.num_tokens) if step.is_finite else 0


@dataclasses.dataclass(frozen=True)
class StepReport:
  """A finished step as hooks see it.

  Attributes:
    step: updates done, this one included.
    tokens: tokens trained on so far, this step included.
    metrics: the step's own report, as numpy arrays.
    batch: this host's rows of the batch.
    seconds: wall time of the step; None where it included compilation.
    data_seconds: wait for the batch.
  """

  step: int
  tokens: int
  metrics: StepMetrics
  batch: Any
  seconds: float | None
  data_seconds: float

  @property
  def step_tokens(self) -> int:
    """Tokens trained on in this step."""
    return num_tokens(self.metrics)


def relative_load(expert_load: np.ndarray) -> np.ndarray:
  """Returns each expert's load over its layer's mean, `[layers, E]`."""
  mean = expert_load.mean(-1, keepdims=True)
  return expert_load / np.maximum(mean, 1e-9)


def step_row(report: StepReport) -> Row:
  """Returns the numbers of a step that do not depend on the clock."""
  parts = report.metrics.parts
  row: Row = {
    'step': report.step,
    'tokens': report.tokens,
    'loss': float(report.metrics.loss),
    'grad_norm': float(report.metrics.grad_norm),
  }
  for name, value in parts._asdict().items():
    if np.ndim(value) == 0 and name != 'num_tokens':
      row[name] = float(value)
  load = relative_load(np.asarray(parts.expert_load))
  if load.size:
    row['expert_load'] = [float(x) for x in load.max(-1)]
    row['max_expert_load'] = float(load.max())
  return row


class Window:
  """Means over the steps since the last row."""

  def __init__(self) -> None:
    self._steps = self._timed_steps = self._tokens = 0
    self._seconds = self._waited = 0.0

  def add(self, report: StepReport) -> None:
    """Counts a step."""
    self._steps += 1
    self._waited += report.data_seconds
    # A step that compiled says nothing about speed.
    if report.seconds is not None:
      self._timed_steps += 1
      self._seconds += report.seconds
      self._tokens += report.step_tokens

  def rates(self) -> Row:
    """Returns rates and times; those of speed only where there is any."""
    row: Row = {}
    if self._steps:
      row['data_seconds'] = self._waited / self._steps
    if self._timed_steps:
      row['step_seconds'] = self._seconds / self._timed_steps
      row['tokens_per_second'] = self._tokens / max(self._seconds, 1e-9)
    return row


def evaluation_row(step: int, results: Mapping[str, float]) -> Row:
  """Returns an evaluation's results as a row."""
  row: Row = {'step': step}
  for name, value in results.items():
    row[EVALUATION_PREFIX + name] = float(value)
  return row
