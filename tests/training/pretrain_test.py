"""The pre-training job on a tiny GLM-5 and real batches."""

import dataclasses
import json
import os
import signal

import numpy as np
import pytest

from experiments.benchmarks import kill_and_resume
from glm5_jax.data.config import LengthStage
from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training import hooks as hooks_module
from glm5_jax.training import pretrain
from glm5_jax.training import state as state_module
from glm5_jax.training.checkpoints import CheckpointError
from glm5_jax.training.config import HooksConfig
from glm5_jax.training.config import OptimizerConfig
from glm5_jax.training.config import ScheduleConfig

# float32 sums in another order, through six steps.
LOSS_TOLERANCE = 1e-4


def _configs(num_steps, workdir):
  model, job = kill_and_resume.configs(num_steps, workdir)
  # One layer and AdamW: most of these tests' time is the compiler's.
  model = dataclasses.replace(model, mtp=None)
  return model, dataclasses.replace(
    job,
    stages=(LengthStage(32, 8, num_steps),),
    optimizer=OptimizerConfig(
      schedule=ScheduleConfig(kind='constant', warmup_steps=2)
    ),
    microbatches=1,
    hooks=HooksConfig(log_every_steps=1, evaluate_every_steps=2),
  )


def _run(workdir, num_steps=4, mesh=None, **options):
  model, job = _configs(num_steps, workdir)
  arguments = {'seed': 3, 'config_text': 'text', **options}
  mesh = mesh or MeshConfig(fsdp=1)
  return pretrain.run(model, mesh, job, workdir=workdir, **arguments)


def _rows(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A run of four steps on one device, and what it returned."""
  workdir = tmp_path_factory.mktemp('runs') / 'finished'

  def evaluate(definition, variables):
    return {'head_norm': float(np.linalg.norm(variables.params['head']))}

  devices = pretrain.jax.devices()[:1]
  outcome = _run(workdir, evaluate=evaluate, devices=devices)
  return workdir, outcome, devices


def test_a_run_trains_evaluates_and_leaves_everything_in_its_workdir(finished):
  workdir, outcome, _ = finished
  assert (outcome.reason, outcome.step) == ('finished', 4)
  assert outcome.tokens == 4 * 8 * 32
  names = {path.name for path in workdir.iterdir()}
  assert {
    'checkpoints',
    'expert_load.png',
    'loss.png',
    'metrics.jsonl',
    'tensorboard',
  } <= names
  rows = _rows(workdir)
  losses = [row['loss'] for row in rows if 'loss' in row]
  assert len(losses) == 4
  assert losses[-1] < losses[0]
  scores = [row for row in rows if 'evaluation/head_norm' in row]
  assert [row['step'] for row in scores] == [2, 4]
  assert outcome.evaluation['head_norm'] == scores[-1]['evaluation/head_norm']


def test_the_report_of_the_last_step_has_the_load_of_every_expert(finished):
  _, outcome, _ = finished
  load = outcome.report.metrics.parts.expert_load
  assert load.shape == (1, 4)
  # Every token visits two experts.
  assert load.sum() == 2 * outcome.report.step_tokens


def test_a_finished_run_is_only_read_again(finished):
  workdir, outcome, devices = finished
  again = _run(workdir, devices=devices)
  assert again.reason == 'finished'
  assert again.report is None
  assert again.evaluation == outcome.evaluation
  assert again.token_counts == outcome.token_counts
  assert state_module.digest(again.state) == state_module.digest(outcome.state)


def test_another_seed_in_the_same_workdir_is_refused(finished):
  workdir, _, devices = finished
  with pytest.raises(CheckpointError, match='seed 3; this one has 4'):
    _run(workdir, seed=4, devices=devices)


def test_changed_lines_of_the_config_are_named(finished, caplog):
  workdir, _, devices = finished
  with caplog.at_level('WARNING', logger='absl'):
    _run(workdir, config_text='text\nmore', devices=devices)
  assert 'another config than before: more' in caplog.text


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path):
  model, job = _configs(4, tmp_path / 'run')
  model = dataclasses.replace(model, vocab_size=256)
  with pytest.raises(ValueError, match='vocab_size'):
    pretrain.run(
      model,
      MeshConfig(fsdp=1),
      job,
      seed=0,
      workdir=tmp_path / 'run',
      config_text='',
      devices=pretrain.jax.devices()[:1],
    )


class _Preempt(hooks_module.Hook):
  """Sends this process SIGTERM at a step."""

  def on_step(self, report):
    if report.step == 3:
      os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_preempted_run_goes_on_with_fewer_devices(tmp_path):
  eight = MeshConfig(fsdp=2, expert=2, tensor=2)
  whole = _run(tmp_path / 'whole', 6, eight)
  first = _run(tmp_path / 'parts', 6, eight, hooks=[_Preempt()])
  assert first.reason == 'preempted'
  assert 3 <= first.step < 6
  devices = pretrain.jax.devices()[:2]
  second = _run(tmp_path / 'parts', 6, MeshConfig(fsdp=2), devices=devices)
  assert second.reason == 'finished'
  assert second.token_counts == whole.token_counts
  losses = [
    [row['loss'] for row in _rows(tmp_path / n)] for n in ('whole', 'parts')
  ]
  np.testing.assert_allclose(*losses, atol=LOSS_TOLERANCE)
