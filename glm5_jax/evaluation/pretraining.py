"""Pre-training, followed by scores, samples and a report."""

import pathlib
import time
from typing import Any

import jax

from glm5_jax.data.config import TEXT_CLASSES
from glm5_jax.evaluation import report
from glm5_jax.evaluation.heldout import Heldout
from glm5_jax.models.config import ModelConfig
from glm5_jax.parallelism import mesh as mesh_lib
from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training import pretrain
from glm5_jax.training import writers
from glm5_jax.training.config import PretrainConfig
from glm5_jax.training.pretrain import Outcome


def run(
  model: ModelConfig,
  mesh: MeshConfig,
  config: PretrainConfig,
  *,
  seed: int,
  workdir: pathlib.Path,
  config_text: str,
) -> dict[str, Any] | None:
  """Trains, or goes on training; writes `report.json` and prints it.

  Args:
    model: what is trained.
    mesh: how devices are arranged.
    config: data, optimizer, steps.
    seed: decides weights, the order of the data, and samples.
    workdir: where everything is written.
    config_text: the whole experiment as text.

  Returns:
    The report; None if the run was told to stop before its end.

  Raises:
    ValueError: model, data, mesh and steps do not fit together.
    OSError: the data cannot be read or the workdir cannot be written to.
  """
  start = time.perf_counter()
  heldout = Heldout(
    config.data,
    mesh_lib.make_mesh(mesh),
    row_length=max(stage.sequence_length for stage in config.stages),
  )
  outcome = pretrain.run(
    model,
    mesh,
    config,
    seed=seed,
    workdir=workdir,
    config_text=config_text,
    evaluate=heldout.during_training,
  )
  if outcome.reason == 'preempted':
    return None
  findings = _findings(outcome, heldout, config, workdir, seed)
  seconds = time.perf_counter() - start
  result = report.make(findings, model, config.stages, seconds=seconds)
  if jax.process_index() == 0:
    report.write(workdir / 'report.json', result)
    report.show(result)
  return result


def _findings(
  outcome: Outcome,
  heldout: Heldout,
  config: PretrainConfig,
  workdir: pathlib.Path,
  seed: int,
) -> report.Findings:
  """Scores and samples the trained model."""
  definition, variables = outcome.definition, outcome.state.variables
  return report.Findings(
    likelihoods=heldout.scores(definition, variables, heldout.documents),
    compressed=heldout.compressed(),
    archive=heldout.archive(),
    token_counts={str(k): n for k, n in outcome.token_counts.items()},
    target_shares={
      name: config.data.class_config(name).share for name in TEXT_CLASSES
    },
    tokens=outcome.tokens,
    steps=outcome.step,
    samples=heldout.sampled(definition, variables, seed),
    rows=list(writers.read_rows(workdir / pretrain.METRICS_FILE)),
  )
