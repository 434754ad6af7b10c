import threading
import time

import numpy as np
import pytest

from glm5_jax.data import prefetch
from glm5_jax.data.batch import Batch


class Counting:
  """Batches that hold their number."""

  def __init__(self, stop=10**9, fails_at=None):
    self.number = 0
    self.stop = stop
    self.fails_at = fails_at

  def __next__(self) -> Batch:
    if self.number >= self.stop:
      raise StopIteration
    if self.number == self.fails_at:
      raise OSError('the disk is gone')
    self.number += 1
    numbers = np.full((1, 1), self.number, np.int32)
    weights = np.ones((1, 1), np.float32)
    return Batch(numbers, numbers, weights, numbers, numbers, numbers)

  def get_state(self):
    return {'number': self.number}

  def set_state(self, state):
    self.number = state['number']


def number(batch):
  return int(batch.tokens[0, 0])


def threads():
  return [t for t in threading.enumerate() if t.name == 'prefetch']


@pytest.mark.parametrize('size', [0, 1, 5])
def test_the_state_is_that_of_the_last_batch_handed_out(size):
  made = prefetch.Prefetch(Counting(), size)
  assert made.state() == {'number': 0}
  for expected in range(1, 20):
    assert number(made.next()) == expected
    assert made.state() == {'number': expected}
  made.close()


@pytest.mark.parametrize('size', [0, 3])
def test_it_goes_anywhere_and_on_after_closing(size):
  made = prefetch.Prefetch(Counting(), size)
  for _ in range(5):
    made.next()
  made.restore({'number': 100})
  assert number(made.next()) == 101
  made.close()
  assert number(made.next()) == 102
  made.close()
  made.close()
  assert not threads()


@pytest.mark.parametrize('size', [0, 3])
def test_the_end_stays_the_end(size):
  made = prefetch.Prefetch(Counting(stop=4), size)
  for _ in range(4):
    made.next()
  for _ in range(2):
    with pytest.raises(StopIteration):
      made.next()
  assert made.state() == {'number': 4}
  assert not threads()


@pytest.mark.parametrize('size', [0, 3])
def test_an_error_reaches_the_caller_in_its_place(size):
  made = prefetch.Prefetch(Counting(fails_at=2), size)
  assert [number(made.next()) for _ in range(2)] == [1, 2]
  with pytest.raises(OSError, match='the disk is gone'):
    made.next()


def test_closing_never_waits_for_a_full_queue():
  # Grain's thread deadlocks here: its producer waits to put, and close for it.
  made = prefetch.Prefetch(Counting(), 1)
  made.next()
  time.sleep(0.2)
  start = time.monotonic()
  made.close()
  assert time.monotonic() - start < 2
  assert not threads()
