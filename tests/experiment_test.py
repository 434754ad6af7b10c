import dataclasses
import pathlib

import pytest

from glm5_jax import experiment as experiment_lib
from glm5_jax import launch
from glm5_jax.data.config import ArrayRecordSource
from glm5_jax.data.config import LengthStage
from glm5_jax.data.config import MemorySource
from glm5_jax.data.config import TrainedTokenizer
from glm5_jax.parallelism.config import MeshConfig

EXPERIMENTS = pathlib.Path(__file__).parent.parent / 'experiments'


@pytest.fixture(scope='module')
def glm5():
  return launch.load(str(EXPERIMENTS / 'pretrain_glm5.py'))


def _lines(experiment: experiment_lib.Experiment) -> dict[str, str]:
  text = experiment_lib.to_text(experiment)
  return dict(line.split(' = ', 1) for line in text.splitlines())


def test_text_has_a_line_for_each_value(glm5):
  lines = _lines(glm5)
  assert lines['model.moe.num_experts'] == '192'
  assert lines['name'] == "'pretrain_glm5'"
  assert lines['job.stages.1.sequence_length'] == '32768'
  assert lines['job.hooks.profile_steps'] == 'None'


def test_text_names_the_class_where_there_is_a_choice(glm5):
  lines = _lines(glm5)
  assert lines['job.data.tokenizer'] == 'TokenizerFile'
  assert lines['job.data.code.source'] == 'ParquetSource'
  assert lines['model.mtp'] == 'MtpConfig'
  # Without a choice the fields say all.
  assert 'model.mla' not in lines
  assert 'job.stages.0' not in lines


def test_text_is_sorted_with_numbers_as_numbers(glm5):
  stages = (LengthStage(8, 8, 1),) * 11
  job = dataclasses.replace(glm5.job, stages=stages, microbatches=1)
  text = experiment_lib.to_text(dataclasses.replace(glm5, job=job))
  order = [
    line.split('.')[2] for line in text.splitlines() if '.stages.' in line
  ]
  assert order == sorted(order, key=int)
  fields = [line for line in text.splitlines() if '.stages.' not in line]
  assert fields == sorted(
    fields, key=lambda line: line.split(' ')[0].split('.')
  )


def test_different_experiments_have_different_texts(glm5):
  other = dataclasses.replace(glm5, seed=1)
  assert experiment_lib.to_text(other) != experiment_lib.to_text(glm5)


def test_ids_must_have_rows(glm5):
  tokenizer = TrainedTokenizer(vocab_size=200_000)
  data = dataclasses.replace(glm5.job.data, tokenizer=tokenizer)
  job = dataclasses.replace(glm5.job, data=data)
  with pytest.raises(ValueError, match='is 200000; the model has 154880 rows'):
    dataclasses.replace(glm5, job=job)


def test_shrinking_keeps_kinds_and_loses_sizes(glm5, tmp_path):
  small = experiment_lib.shrink(glm5, tmp_path)
  assert small.model.mtp == glm5.model.mtp
  assert small.model.attention == glm5.model.attention
  assert small.model.num_dense_layers == 1
  assert small.model.num_moe_layers == 2
  assert small.model.hidden_dim < 100
  assert small.job.optimizer.kind == 'muon'
  assert len(small.job.stages) == 2
  assert small.job.num_steps == 2
  assert small.job.microbatches == 2
  assert small.job.data.code.share == 0.35
  assert isinstance(small.job.data.code.source, MemorySource)
  # Axes in use stay in use; eight devices divide over them.
  assert small.mesh == MeshConfig(expert=2, tensor=2, rules='tpu_pod')


def test_other_sources_can_take_a_class_s_place(glm5):
  code = dataclasses.replace(
    glm5.job.data.code, source=ArrayRecordSource('code')
  )
  data = dataclasses.replace(glm5.job.data, code=code)
  job = dataclasses.replace(glm5.job, data=data)
  lines = _lines(dataclasses.replace(glm5, job=job))
  assert lines['job.data.code.source'] == 'ArrayRecordSource'
