"""Notice that this machine will be taken away."""

import signal
import threading
from types import FrameType
from types import TracebackType

import jax
from jax.experimental import multihost_utils


class PreemptionNotice:
  """Remembers a SIGTERM while it is entered as a context.

  On several hosts the signal may reach them in different steps, so they agree
  on one through JAX's coordination service, which takes the signal itself.
  """

  def __init__(self) -> None:
    self._received = threading.Event()
    self._previous: signal._HANDLER = None
    self._installed = False

  def __enter__(self) -> 'PreemptionNotice':
    # Python lets only the main thread set handlers; a notebook's or a test's
    # other threads train without the notice.
    is_main = threading.current_thread() is threading.main_thread()
    if jax.process_count() == 1 and is_main:
      self._previous = signal.signal(signal.SIGTERM, self._remember)
      self._installed = True
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    if self._installed:
      signal.signal(signal.SIGTERM, self._previous)
      self._installed = False

  def _remember(self, number: int, frame: FrameType | None) -> None:
    self._received.set()

  def __call__(self, step: int) -> bool:
    """Says whether to save and stop after `step`; all hosts hear the same."""
    if jax.process_count() > 1:
      return bool(multihost_utils.reached_preemption_sync_point(step))
    return self._received.is_set()
