"""Shows a run's progress: a bar on a terminal, lines elsewhere."""

from collections.abc import Mapping
import datetime

from rich import console as rich_console
from rich import progress as rich_progress

from glm5_jax.training import metrics
from glm5_jax.training.hooks import Hook
from glm5_jax.training.hooks import Snapshot

# How strongly the newest step counts in the speed that is shown.
_SMOOTHING = 0.1


class ProgressBar(Hook):
  """Step, loss, tokens a second, time left."""

  def __init__(
    self,
    num_steps: int,
    *,
    every_steps: int,
    console: rich_console.Console | None = None,
  ) -> None:
    self._num_steps = num_steps
    self._every_steps = every_steps
    self._console = console or rich_console.Console(stderr=True)
    self._seconds: float | None = None
    self._tokens_per_second = 0.0
    self._bar: rich_progress.Progress | None = None
    self._task: rich_progress.TaskID | None = None

  def on_start(self, step: int) -> None:
    if not self._console.is_terminal:
      return
    self._bar = rich_progress.Progress(
      rich_progress.TextColumn('step'),
      rich_progress.MofNCompleteColumn(),
      rich_progress.BarColumn(),
      rich_progress.TextColumn('loss {task.fields[loss]}'),
      rich_progress.TextColumn('{task.fields[speed]} tokens/s'),
      rich_progress.TextColumn('{task.fields[left]} left'),
      console=self._console,
    )
    self._task = self._bar.add_task(
      'train',
      total=self._num_steps,
      completed=step,
      loss='-',
      speed='-',
      left='-',
    )
    self._bar.start()

  def on_step(self, report: metrics.StepReport) -> None:
    if report.seconds is not None:
      self._measure(report.seconds, report.step_tokens)
    loss = f'{float(report.metrics.loss):.4f}'
    speed, left = self._speed(), self._left(report.step)
    if self._bar is not None and self._task is not None:
      self._bar.update(
        self._task, completed=report.step, loss=loss, speed=speed, left=left
      )
    elif report.step % self._every_steps == 0 or report.step == self._num_steps:
      self._print(
        f'step {report.step}/{self._num_steps}  loss {loss}  '
        f'{speed} tokens/s  {left} left'
      )

  def on_results(self, step: int, results: Mapping[str, float]) -> None:
    shown = '  '.join(f'{name} {value:.4f}' for name, value in results.items())
    self._print(f'step {step}/{self._num_steps}  {shown}')

  def on_preempted(self, snapshot: Snapshot) -> None:
    self._print(
      f'Asked to stop: saving step {snapshot.step}. The same command goes on.'
    )

  def close(self) -> None:
    if self._bar is not None:
      self._bar.stop()
      self._bar = None

  def _print(self, text: str) -> None:
    self._console.print(text, highlight=False, soft_wrap=True)

  def _measure(self, seconds: float, tokens: int) -> None:
    if self._seconds is None:
      self._seconds = seconds
      self._tokens_per_second = tokens / max(seconds, 1e-9)
      return
    self._seconds += _SMOOTHING * (seconds - self._seconds)
    speed = tokens / max(seconds, 1e-9)
    self._tokens_per_second += _SMOOTHING * (speed - self._tokens_per_second)

  def _speed(self) -> str:
    return '-' if self._seconds is None else f'{self._tokens_per_second:,.0f}'

  def _left(self, step: int) -> str:
    if self._seconds is None:
      return '-'
    seconds = round((self._num_steps - step) * self._seconds)
    return str(datetime.timedelta(seconds=seconds))
