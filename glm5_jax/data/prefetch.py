"""Makes batches ahead in a thread, and still knows the exact place.

Grain's own `ThreadPrefetch.close` waits for a producer that may wait for it;
this one's waits are all bounded.
"""

import queue
import threading
from typing import Any
from typing import NamedTuple
from typing import Protocol

from glm5_jax.data.batch import Batch

_POLL_SECONDS = 0.05
_JOIN_SECONDS = 10.0


class Resumable(Protocol):
  """Batches whose place can be read and set."""

  def __next__(self) -> Batch:
    """Returns the next batch."""

  def get_state(self) -> dict[str, Any]:
    """Returns the place after the last batch."""

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to a place."""


class _Made(NamedTuple):
  """A batch, or why there is none, with the place after it."""

  batch: Batch | BaseException
  state: dict[str, Any]


class _Run(NamedTuple):
  """A thread that is making batches."""

  thread: threading.Thread
  made: 'queue.Queue[_Made]'
  stop: threading.Event


class Prefetch:
  """Batches made up to `size` ahead; by the caller itself if it is 0."""

  def __init__(self, batches: Resumable, size: int) -> None:
    """Takes the batches; nobody else may use them from now on."""
    self._batches = batches
    self._size = size
    self._state = batches.get_state()
    self._run: _Run | None = None

  def next(self) -> Batch:
    """Returns the next batch.

    Raises:
      StopIteration: there is none.
    """
    if self._size < 1:
      batch = next(self._batches)
      self._state = self._batches.get_state()
      return batch
    made = self._take()
    if isinstance(made.batch, BaseException):
      self.close()
      raise made.batch
    self._state = made.state
    return made.batch

  def state(self) -> dict[str, Any]:
    """Returns the place after the last batch handed out."""
    return self._state

  def restore(self, state: dict[str, Any]) -> None:
    """Goes to a place."""
    self._stop_thread()
    self._batches.set_state(state)
    self._state = state

  def close(self) -> None:
    """Stops the thread and forgets what it made ahead."""
    if self._stop_thread():
      self._batches.set_state(self._state)

  def _make(self) -> _Made:
    try:
      batch: Batch | BaseException = next(self._batches)
    except BaseException as e:  # Handed to the caller, whichever it is.
      batch = e
    return _Made(batch, self._batches.get_state())

  def _take(self) -> _Made:
    if self._run is None:
      self._run = self._start_thread()
    while True:
      try:
        return self._run.made.get(timeout=_POLL_SECONDS)
      except queue.Empty:
        if not self._run.thread.is_alive() and self._run.made.empty():
          raise RuntimeError('The thread that makes batches died.') from None

  def _start_thread(self) -> _Run:
    made: queue.Queue[_Made] = queue.Queue(self._size)
    stop = threading.Event()
    # A daemon, so that a program that ends does not wait for it.
    thread = threading.Thread(
      target=self._produce, args=(made, stop), name='prefetch', daemon=True
    )
    thread.start()
    return _Run(thread, made, stop)

  def _produce(self, made: 'queue.Queue[_Made]', stop: threading.Event) -> None:
    while not stop.is_set():
      item = self._make()
      while not stop.is_set():
        try:
          made.put(item, timeout=_POLL_SECONDS)
          break
        except queue.Full:
          continue
      if isinstance(item.batch, BaseException):
        return

  def _stop_thread(self) -> bool:
    """Returns whether there was a thread."""
    run, self._run = self._run, None
    if run is None:
      return False
    run.stop.set()
    run.thread.join(_JOIN_SECONDS)
    if run.thread.is_alive():
      raise RuntimeError(
        f'The thread that makes batches did not end in {_JOIN_SECONDS} s; a '
        'file system that hangs is the likely cause.'
      )
    return True
