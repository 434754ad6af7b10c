"""Impossible configs are refused, with the field's name and the remedy."""

import pytest

from glm5_jax.data.config import DataConfig
from glm5_jax.data.config import LengthStage
from glm5_jax.training import config


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: config.ScheduleConfig(warmup_steps=-1), 'warmup_steps is -1'),
    (lambda: config.ScheduleConfig(decay_share=1.5), 'decay_share is 1.5'),
    (lambda: config.OptimizerConfig(learning_rate=0.0), 'must be positive'),
    (lambda: config.OptimizerConfig(beta2=2.0), 'beta2 is 2.0'),
    (lambda: config.OptimizerConfig(weight_decay=-0.1), 'at least 0'),
    (lambda: config.CheckpointConfig(every_steps=0), 'every_steps is 0'),
    (lambda: config.CheckpointConfig(keep_every_steps=0), 'at least 1'),
    (lambda: config.HooksConfig(log_every_steps=0), 'log_every_steps is 0'),
    (lambda: config.HooksConfig(profile_steps=(5, 3)), 'first and the last'),
  ],
)
def test_values_out_of_range_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_a_run_needs_stages():
  with pytest.raises(ValueError, match='stages is empty'):
    config.PretrainConfig(data=DataConfig(), stages=())


def test_microbatches_divide_every_stage():
  stages = (LengthStage(32, 8, 1), LengthStage(64, 6, 1))
  with pytest.raises(ValueError, match='6 is not a multiple'):
    config.PretrainConfig(data=DataConfig(), stages=stages, microbatches=4)


def test_the_steps_of_all_stages_add_up():
  stages = (LengthStage(32, 8, 3), LengthStage(64, 4, 2))
  assert config.PretrainConfig(data=DataConfig(), stages=stages).num_steps == 5
