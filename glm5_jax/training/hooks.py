"""What happens beside the steps: records, evaluation, checkpoints, refusals."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any
from typing import Protocol

import jax
import numpy as np

from glm5_jax.training import metrics
from glm5_jax.training import plots
from glm5_jax.training.checkpoints import Checkpoints
from glm5_jax.training.checkpoints import Progress
from glm5_jax.training.schedules import Schedule
from glm5_jax.training.state import TrainState
from glm5_jax.training.writers import Writer


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """The run between two steps.

  Attributes:
    step: updates done.
    tokens: tokens trained on, padding excluded.
    state: the state; the next step consumes it.
    data_state: returns the data's position after this step's batch.
  """

  step: int
  tokens: int
  state: TrainState
  data_state: Callable[[], dict[str, Any]]


class Hook(Protocol):
  """Called by the loop; a hook overrides what it needs."""

  def on_start(self, step: int) -> None:
    """Called once, with the steps done before."""
    return

  def before_step(self, step: int) -> None:
    """Called before a step's batch is taken."""
    return

  def on_step(self, report: metrics.StepReport) -> None:
    """Called with the report of every step, in order."""
    return

  def wants_state(self, step: int) -> bool:
    """Says whether `on_state` is to be called after a step."""
    return False

  def on_state(self, snapshot: Snapshot) -> Mapping[str, float] | None:
    """Called after all reports up to it; may return results for all hooks."""
    return None

  def on_results(self, step: int, results: Mapping[str, float]) -> None:
    """Called with what a hook's `on_state` returned."""
    return

  def on_preempted(self, snapshot: Snapshot) -> None:
    """Called when the run stops early; the machine is soon gone."""
    return

  def close(self) -> None:
    """Called once at the end, after errors too."""
    return


class NonFiniteError(RuntimeError):
  """A step's loss or gradient was not finite."""


class StopOnNonFinite(Hook):
  """Ends the run at a refused step and saves its batch."""

  def __init__(self, folder: pathlib.Path) -> None:
    self._folder = folder

  def on_step(self, report: metrics.StepReport) -> None:
    if report.metrics.is_finite:
      return
    host = jax.process_index()
    path = self._folder / f'step_{report.step}_host_{host}.npz'
    self._folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = _named_arrays(report.batch)
    np.savez(path, **arrays)
    raise NonFiniteError(
      f'Step {report.step} was refused: loss {float(report.metrics.loss)}, '
      f'gradient norm {float(report.metrics.grad_norm)}. Weights, optimizer '
      f'state and balance biases stayed as after step {report.step - 1}. The '
      f"batch's rows of host {host} are in {path}. The same command goes on "
      'from the newest checkpoint and meets the same batch: lower the learning '
      'rate, or take the text in question out of the data.'
    )


def _named_arrays(batch: Any) -> dict[str, np.ndarray]:
  leaves = jax.tree_util.tree_leaves_with_path(batch)
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): np.asarray(leaf)
    for path, leaf in leaves
  }


class Recorder(Hook):
  """Writes a row of metrics every so many steps, and evaluations' results."""

  def __init__(
    self,
    writers: Sequence[Writer],
    *,
    every_steps: int,
    learning_rates: Mapping[str, Schedule],
  ) -> None:
    self._writers = writers
    self._every_steps = every_steps
    self._learning_rates = learning_rates
    self._window = metrics.Window()

  def on_start(self, step: int) -> None:
    for schedule in self._learning_rates.values():
      # Compiles it now rather than between two steps.
      schedule(step)

  def on_step(self, report: metrics.StepReport) -> None:
    self._window.add(report)
    # A refused step is recorded whatever its number, so that it can be seen.
    if report.step % self._every_steps and report.metrics.is_finite:
      return
    row = metrics.step_row(report)
    for name, schedule in self._learning_rates.items():
      row[name] = float(schedule(report.step - 1))
    row.update(self._window.rates())
    self._window = metrics.Window()
    self._write(row)

  def on_results(self, step: int, results: Mapping[str, float]) -> None:
    self._write(metrics.evaluation_row(step, results))

  def _write(self, row: metrics.Row) -> None:
    for writer in self._writers:
      writer.write(row)

  def close(self) -> None:
    for writer in self._writers:
      writer.close()


class Evaluation(Hook):
  """Evaluates every so many steps and after the last."""

  def __init__(
    self,
    evaluate: Callable[[TrainState], Mapping[str, float]],
    *,
    every_steps: int,
    num_steps: int,
  ) -> None:
    self._evaluate = evaluate
    self._every_steps = every_steps
    self._num_steps = num_steps

  def wants_state(self, step: int) -> bool:
    return step % self._every_steps == 0 or step == self._num_steps

  def on_state(self, snapshot: Snapshot) -> Mapping[str, float]:
    return self._evaluate(snapshot.state)


class Profiler(Hook):
  """Traces a stretch of steps for TensorBoard or Perfetto."""

  def __init__(self, folder: pathlib.Path, steps: tuple[int, int]) -> None:
    self._folder = folder
    self._first, self._last = steps
    self._is_tracing = False

  def before_step(self, step: int) -> None:
    if step == self._first:
      jax.profiler.start_trace(self._folder)
      self._is_tracing = True

  def wants_state(self, step: int) -> bool:
    # Once the state is at hand, the step's work is done.
    return step == self._last

  def on_state(self, snapshot: Snapshot) -> None:
    self.close()

  def close(self) -> None:
    if self._is_tracing:
      self._is_tracing = False
      jax.profiler.stop_trace()


class Saver(Hook):
  """Writes checkpoints while training goes on."""

  def __init__(
    self,
    checkpoints: Checkpoints,
    *,
    num_steps: int,
    seed: int,
    config_text: str,
  ) -> None:
    self._checkpoints = checkpoints
    self._num_steps = num_steps
    self._seed = seed
    self._config_text = config_text
    self._saved: int | None = None

  def on_start(self, step: int) -> None:
    self._saved = step

  def wants_state(self, step: int) -> bool:
    every = self._checkpoints.config.every_steps
    return step % every == 0 or step == self._num_steps

  def on_state(self, snapshot: Snapshot) -> None:
    self._save(snapshot)

  def on_preempted(self, snapshot: Snapshot) -> None:
    self._save(snapshot)
    self._checkpoints.wait()

  def _save(self, snapshot: Snapshot) -> None:
    if self._saved == snapshot.step:
      return
    progress = Progress(
      step=snapshot.step,
      tokens=snapshot.tokens,
      seed=self._seed,
      config=self._config_text,
      data=snapshot.data_state(),
    )
    self._checkpoints.save(snapshot.state, progress)
    self._saved = snapshot.step

  def close(self) -> None:
    self._checkpoints.wait()


class Plots(Hook):
  """Draws the curves at evaluations and at the end."""

  def __init__(self, rows: pathlib.Path, folder: pathlib.Path) -> None:
    self._rows = rows
    self._folder = folder
    self._load: np.ndarray | None = None

  def on_step(self, report: metrics.StepReport) -> None:
    load = np.asarray(report.metrics.parts.expert_load, np.float64)
    # Single steps are noisy: show a mean over some ten.
    self._load = load if self._load is None else 0.9 * self._load + load

  def on_results(self, step: int, results: Mapping[str, float]) -> None:
    self._draw()

  def close(self) -> None:
    self._draw()

  def _draw(self) -> None:
    plots.draw(self._rows, self._folder, self._load)
