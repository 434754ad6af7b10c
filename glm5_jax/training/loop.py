"""The one training loop. Everything beside the steps is a hook's."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import time
from typing import Any
from typing import Literal
from typing import Protocol

import jax
import numpy as np

from glm5_jax.training.hooks import Hook
from glm5_jax.training.hooks import Snapshot
from glm5_jax.training.metrics import StepReport
from glm5_jax.training.metrics import num_tokens
from glm5_jax.training.state import TrainState
from glm5_jax.training.step import StepFunction
from glm5_jax.training.step import StepMetrics


class Batches(Protocol):
  """Batches of this host's rows, with a position that can be kept."""

  def __iter__(self) -> Iterator[Any]:
    """Returns itself."""

  def __next__(self) -> Any:
    """Returns the next batch."""

  def get_state(self) -> dict[str, Any]:
    """Returns the position after the latest batch, fit for JSON."""


@dataclasses.dataclass(frozen=True)
class Position:
  """How far a run has come.

  Attributes:
    step: updates done.
    tokens: tokens trained on, padding excluded.
  """

  step: int = 0
  tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Ending:
  """Where a loop stopped.

  Attributes:
    reason: all steps are done, or the machine is about to be taken away.
    position: how far it came.
    state: the state there.
    report: the last step's report; None where no step was left to do.
  """

  reason: Literal['finished', 'preempted']
  position: Position
  state: TrainState
  report: StepReport | None


@dataclasses.dataclass(frozen=True)
class _Pending:
  """A step whose metrics are still on their way."""

  step: int
  metrics: StepMetrics
  batch: Any
  compiles: bool
  data_seconds: float


class _Reporter:
  """Fetches metrics, keeps time and tokens, and tells the hooks."""

  def __init__(self, hooks: Sequence[Hook], tokens: int) -> None:
    self._hooks = hooks
    self._mark = time.perf_counter()
    self.tokens = tokens
    self.last: StepReport | None = None

  def report(self, pending: _Pending) -> None:
    """Waits for a step and hands its report to every hook."""
    metrics = jax.device_get(pending.metrics)
    now = time.perf_counter()
    seconds = None if pending.compiles else now - self._mark
    self._mark = now
    self.last = StepReport(
      step=pending.step,
      tokens=self.tokens + num_tokens(metrics),
      metrics=metrics,
      batch=pending.batch,
      seconds=seconds,
      data_seconds=pending.data_seconds,
    )
    self.tokens = self.last.tokens
    for hook in self._hooks:
      hook.on_step(self.last)

  def show(self, snapshot: Snapshot) -> None:
    """Gives the state to the hooks that want it; their results to all."""
    for hook in self._hooks:
      if hook.wants_state(snapshot.step):
        results = hook.on_state(snapshot)
        if results:
          for listener in self._hooks:
            listener.on_results(snapshot.step, results)
    # What hooks do with the state is no part of a step's time.
    self._mark = time.perf_counter()

  def stop(self, snapshot: Snapshot) -> None:
    """Tells the hooks that the run ends before its time."""
    for hook in self._hooks:
      hook.on_preempted(snapshot)


@contextlib.contextmanager
def _opened(hooks: Sequence[Hook], step: int) -> Iterator[None]:
  """Starts the hooks and closes them at the end, after errors too."""
  with contextlib.ExitStack() as stack:
    for hook in hooks:
      stack.callback(hook.close)
    for hook in hooks:
      hook.on_start(step)
    yield


def _shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
  return tuple(np.shape(x) for x in jax.tree.leaves(batch))


def _next(batches: Batches, step: int, num_steps: int) -> Any:
  try:
    return next(batches)
  except StopIteration:
    raise ValueError(
      f'The data ended after {step - 1} of {num_steps} steps. Its length '
      'stages must add up to the steps of the run.'
    ) from None


def train(
  state: TrainState,
  batches: Batches,
  step_function: StepFunction,
  *,
  position: Position,
  num_steps: int,
  place: Callable[[Any], Any],
  hooks: Sequence[Hook] = (),
  should_stop: Callable[[int], bool] = lambda step: False,
) -> Ending:
  """Trains until all steps are done or `should_stop` says so.

  The device works on a step while the report of the one before is handed to
  the hooks, so a hook sees metrics one step late; before a hook sees the state,
  every report up to it has been handed out.

  Args:
    state: where to begin; consumed.
    batches: the data, positioned after `position`.
    step_function: consumes a state, returns the next and its metrics.
    position: steps and tokens done.
    num_steps: steps of the whole run.
    place: puts a host's rows onto the mesh.
    hooks: called in order; the first error ends the run.
    should_stop: asked after each step, with its number, in case the machine is
      about to be taken away.

  Raises:
    ValueError: the data ends before the steps do.
  """
  reporter = _Reporter(hooks, position.tokens)
  pending: _Pending | None = None
  seen: set[Any] = set()
  step = position.step
  with _opened(hooks, step):
    stopping = step < num_steps and should_stop(step)
    while step < num_steps and not stopping:
      step += 1
      for hook in hooks:
        hook.before_step(step)
      start = time.perf_counter()
      batch = _next(batches, step, num_steps)
      waited = time.perf_counter() - start
      compiles = _shapes(batch) not in seen
      seen.add(_shapes(batch))
      if compiles and pending is not None:
        # Else the step before would seem to last as long as the compiler.
        reporter.report(pending)
        pending = None
      state, metrics = step_function(state, place(batch))
      if pending is not None:
        reporter.report(pending)
      pending = _Pending(step, metrics, batch, compiles, waited)
      stopping = step < num_steps and should_stop(step)
      wanted = any(hook.wants_state(step) for hook in hooks)
      if stopping or wanted or step == num_steps:
        reporter.report(pending)
        pending = None
        # No batch has been taken since, so the data's position is this step's.
        snapshot = Snapshot(step, reporter.tokens, state, batches.get_state)
        if stopping:
          # First of all, since the machine may be gone any moment.
          reporter.stop(snapshot)
        reporter.show(snapshot)
  return Ending(
    reason='preempted' if stopping else 'finished',
    position=Position(step, reporter.tokens),
    state=state,
    report=reporter.last,
  )
