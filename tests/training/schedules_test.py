"""Learning rates follow their closed forms."""

import math

import pytest

from glm5_jax.training import schedules
from glm5_jax.training.config import ScheduleConfig

PEAK = 2.0
# float32 of numbers near one.
TOLERANCE = 1e-6


def _rates(config, num_steps):
  schedule = schedules.make_schedule(config, PEAK, num_steps)
  return [float(schedule(step)) for step in range(num_steps)]


def test_warmup_rises_in_a_line_and_wastes_no_step_on_zero():
  config = ScheduleConfig(kind='constant', warmup_steps=4)
  expected = [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
  assert _rates(config, 6) == pytest.approx(expected, abs=TOLERANCE)


def test_without_warmup_the_first_step_has_the_peak():
  for kind in ('constant', 'wsd'):
    config = ScheduleConfig(kind=kind, warmup_steps=0)
    assert _rates(config, 10)[0] == pytest.approx(PEAK, abs=TOLERANCE)


def test_cosine_falls_from_the_peak_to_the_final_share():
  config = ScheduleConfig(kind='cosine', warmup_steps=2, final_share=0.1)
  rates = _rates(config, 10)
  for n in range(3, 11):
    share = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (n - 2) / 8))
    assert rates[n - 1] == pytest.approx(PEAK * share, abs=TOLERANCE)
  assert rates[1] == pytest.approx(PEAK, abs=TOLERANCE)
  assert rates[-1] == pytest.approx(0.1 * PEAK, abs=TOLERANCE)


def test_wsd_stays_at_the_peak_and_falls_over_its_last_part():
  config = ScheduleConfig(
    kind='wsd', warmup_steps=2, decay_share=0.4, final_share=0.0
  )
  expected = [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0]
  assert _rates(config, 10) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize('kind', ['cosine', 'wsd', 'constant'])
def test_the_rate_holds_still_after_the_last_step(kind):
  config = ScheduleConfig(kind=kind, warmup_steps=1)
  schedule = schedules.make_schedule(config, PEAK, 10)
  assert float(schedule(30)) == pytest.approx(float(schedule(9)), abs=TOLERANCE)


def test_a_warmup_longer_than_the_run_is_refused():
  config = ScheduleConfig(kind='wsd', warmup_steps=9, decay_share=0.2)
  with pytest.raises(ValueError, match=r'warmup_steps is 9.*run has 10'):
    schedules.make_schedule(config, PEAK, 10)
