"""The pre-training job: from configs and a workdir to a trained model.

The workdir holds `checkpoints/`, `metrics.jsonl`, `tensorboard/`, the plots,
`profile/` and `refused/`. The same call on the same workdir goes on from the
newest checkpoint.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import pathlib
import time
from typing import Any
from typing import Literal

from absl import logging
import jax

from glm5_jax.data import pipeline
from glm5_jax.data.config import TextClass
from glm5_jax.models import definition as definition_module
from glm5_jax.models.config import ModelConfig
from glm5_jax.models.definition import Definition
from glm5_jax.models.definition import Variables
from glm5_jax.parallelism import mesh as mesh_module
from glm5_jax.parallelism.axis_rules import RULES
from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training import checkpoints as checkpoints_module
from glm5_jax.training import feeding
from glm5_jax.training import hooks as hooks_module
from glm5_jax.training import loop
from glm5_jax.training import metrics
from glm5_jax.training import objective
from glm5_jax.training import optimizer as optimizer_module
from glm5_jax.training import preemption
from glm5_jax.training import progress
from glm5_jax.training import schedules
from glm5_jax.training import state as state_module
from glm5_jax.training import step as step_module
from glm5_jax.training import writers
from glm5_jax.training.config import PretrainConfig
from glm5_jax.training.state import TrainState

METRICS_FILE = 'metrics.jsonl'
CHECKPOINT_FOLDER = 'checkpoints'

# Scores of a model in training; called with the mesh as context.
Evaluate = Callable[[Definition, Variables], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a run left in memory.

  Attributes:
    reason: `finished`, or `preempted`: the same command goes on.
    step: updates done.
    tokens: tokens trained on, padding excluded.
    seconds: wall time of this call.
    definition: the model.
    mesh: the devices.
    state: the final state.
    report: the last step's report; None where no step was left to do.
    evaluation: the newest evaluation's results.
    token_counts: tokens drawn by class of text, on this host.
  """

  reason: Literal['finished', 'preempted']
  step: int
  tokens: int
  seconds: float
  definition: Definition
  mesh: jax.sharding.Mesh
  state: TrainState
  report: metrics.StepReport | None
  evaluation: Mapping[str, float]
  token_counts: Mapping[TextClass, int]


def _initial(
  definition: Definition,
  optimizer: Any,
  shardings: TrainState,
  seed: int,
) -> TrainState:
  """Returns the state before the first step, made where it is to lie."""
  # Drawing random weights takes milliseconds, and optimising the program that
  # draws them a minute on CPU.
  options = {'xla_backend_optimization_level': 0}
  is_cpu = jax.default_backend() == 'cpu'
  make = jax.jit(
    lambda key: state_module.init(definition, optimizer, key),
    out_shardings=shardings,
    compiler_options=options if is_cpu else None,
  )
  state: TrainState = make(jax.random.key(seed))
  return state


def _learning_rates(config: PretrainConfig) -> dict[str, schedules.Schedule]:
  """Returns the learning rates in use, by their metrics' names."""
  options, num_steps = config.optimizer, config.num_steps
  peaks = {
    'learning_rate': options.learning_rate,
    'embedding_learning_rate': options.embedding_learning_rate,
  }
  if options.kind == 'muon':
    peaks['muon_learning_rate'] = options.muon_learning_rate
  return {
    name: jax.jit(schedules.make_schedule(options.schedule, peak, num_steps))
    for name, peak in peaks.items()
  }


def _check_progress(
  saved: checkpoints_module.Progress, *, seed: int, config_text: str
) -> None:
  """Refuses another seed; names changed lines of the config."""
  if saved.seed != seed:
    raise checkpoints_module.CheckpointError(
      f'The workdir holds a run with seed {saved.seed}; this one has {seed}. '
      'Give another --workdir, or the same seed.'
    )
  before, after = saved.config.splitlines(), config_text.splitlines()
  for line in [x for x in after if x not in before]:
    logging.warning('Goes on with another config than before: %s', line)


def _recording_hooks(
  config: PretrainConfig, workdir: pathlib.Path, step: int
) -> list[hooks_module.Hook]:
  """Returns the hooks that show and record; on the first host only."""
  if jax.process_index():
    return []
  options = config.hooks
  rows = workdir / METRICS_FILE
  result: list[hooks_module.Hook] = []
  if options.plot:
    # Closed last, when every row is in the file.
    result.append(hooks_module.Plots(rows, workdir))
  result += [
    hooks_module.Recorder(
      [
        writers.JsonlWriter(rows, step),
        writers.TensorboardWriter(workdir / 'tensorboard', step),
      ],
      every_steps=options.log_every_steps,
      learning_rates=_learning_rates(config),
    ),
    progress.ProgressBar(config.num_steps, every_steps=options.log_every_steps),
  ]
  return result


def _latest_evaluation(path: pathlib.Path) -> dict[str, float]:
  """Returns the newest evaluation's results among the recorded rows."""
  prefix = metrics.EVALUATION_PREFIX
  results: dict[str, float] = {}
  for row in writers.read_rows(path):
    found = {
      name.removeprefix(prefix): value
      for name, value in row.items()
      if name.startswith(prefix) and not isinstance(value, list)
    }
    results = found or results
  return results


class _Job:
  """The parts of a run, made from its configs."""

  def __init__(
    self,
    model: ModelConfig,
    mesh: MeshConfig,
    config: PretrainConfig,
    devices: Sequence[jax.Device] | None,
  ) -> None:
    self.config = config
    rules = RULES[mesh.rules]
    self.mesh = mesh_module.make_mesh(mesh, devices)
    self.feed = feeding.make_feed(self.mesh, rules)
    feeding.check_stages(
      config.stages,
      model,
      num_shards=self.feed.num_shards,
      microbatches=config.microbatches,
    )
    self.definition = definition_module.define(model, rules)
    self.optimizer = optimizer_module.make_optimizer(
      config.optimizer, self.definition.axes.params, config.num_steps
    )
    self.shardings = state_module.shardings(
      self.mesh, self.definition, self.optimizer
    )

  def step_function(self) -> step_module.StepFunction:
    """Returns the compiled step."""
    return step_module.compiled_on(
      self.mesh,
      step_module.make_train_step(
        objective.Pretraining(self.definition, self.config.z_loss),
        self.optimizer,
        axes=self.definition.axes,
        rules=self.definition.rules,
        microbatches=self.config.microbatches,
      ),
      state_shardings=self.shardings,
      batch_sharding=self.feed.sharding,
    )

  def batches(self, seed: int, vocab_size: int) -> pipeline.BatchIterator:
    """Returns this host's batches."""
    tokenizer = pipeline.make_tokenizer(self.config.data)
    tokenizer.check_vocab_size(vocab_size)
    return pipeline.train_batches(
      self.config.data,
      self.config.stages,
      tokenizer,
      seed=seed,
      host_index=self.feed.host_index,
      num_hosts=self.feed.num_hosts,
    )

  def start(
    self,
    checkpoints: checkpoints_module.Checkpoints,
    batches: pipeline.BatchIterator,
    *,
    seed: int,
    config_text: str,
  ) -> tuple[TrainState, loop.Position]:
    """Returns a new state or the newest checkpoint's, the data put there."""
    if checkpoints.latest_step is None:
      state = _initial(self.definition, self.optimizer, self.shardings, seed)
      return state, loop.Position()
    wanted = state_module.placed(
      state_module.abstract(self.definition, self.optimizer), self.shardings
    )
    state, saved = checkpoints.restore(wanted)
    _check_progress(saved, seed=seed, config_text=config_text)
    batches.set_state(saved.data)
    logging.info('Goes on from step %d.', saved.step)
    return state, loop.Position(saved.step, saved.tokens)


def run(
  model: ModelConfig,
  mesh: MeshConfig,
  config: PretrainConfig,
  *,
  seed: int,
  workdir: pathlib.Path,
  config_text: str,
  evaluate: Evaluate | None = None,
  hooks: Sequence[hooks_module.Hook] = (),
  devices: Sequence[jax.Device] | None = None,
) -> Outcome:
  """Trains, or goes on training, until the steps are done or SIGTERM comes.

  Args:
    model: what is trained.
    mesh: how devices are arranged.
    config: data, optimizer, steps.
    seed: decides weights and the order of the data.
    workdir: where everything is written; shared by all hosts.
    config_text: the whole experiment as text, kept in the checkpoints.
    evaluate: scores the model now and then.
    hooks: further hooks.
    devices: what to run on; None: all devices.

  Raises:
    ValueError: model, data, mesh and steps do not fit together.
    CheckpointError: a checkpoint cannot be written, read or used.
    NonFiniteError: a step's loss or gradient was not finite.
  """
  start = time.perf_counter()
  with preemption.PreemptionNotice() as notice:
    job = _Job(model, mesh, config, devices)
    checkpoints = checkpoints_module.Checkpoints(
      workdir / CHECKPOINT_FOLDER, config.checkpoint
    )
    with job.batches(seed, model.vocab_size) as batches:
      state, position = job.start(
        checkpoints, batches, seed=seed, config_text=config_text
      )
      ending = loop.train(
        state,
        batches,
        job.step_function(),
        position=position,
        num_steps=config.num_steps,
        place=job.feed.place,
        hooks=_hooks(
          job,
          checkpoints,
          workdir,
          step=position.step,
          seed=seed,
          config_text=config_text,
          evaluate=evaluate,
          further=hooks,
        ),
        should_stop=notice,
      )
      token_counts = batches.token_counts
    checkpoints.close()
  return Outcome(
    reason=ending.reason,
    step=ending.position.step,
    tokens=ending.position.tokens,
    seconds=time.perf_counter() - start,
    definition=job.definition,
    mesh=job.mesh,
    state=ending.state,
    report=ending.report,
    evaluation=_latest_evaluation(workdir / METRICS_FILE),
    token_counts=token_counts,
  )


def _hooks(
  job: _Job,
  checkpoints: checkpoints_module.Checkpoints,
  workdir: pathlib.Path,
  *,
  step: int,
  seed: int,
  config_text: str,
  evaluate: Evaluate | None,
  further: Sequence[hooks_module.Hook],
) -> list[hooks_module.Hook]:
  """Returns a run's hooks in the order they are called in."""
  config, options = job.config, job.config.hooks
  # A refused step is recorded before it ends the run.
  result = _recording_hooks(config, workdir, step)
  result.append(hooks_module.StopOnNonFinite(workdir / 'refused'))
  if options.profile_steps is not None:
    result.append(
      hooks_module.Profiler(workdir / 'profile', options.profile_steps)
    )
  if evaluate is not None:

    def scores(state: TrainState) -> Mapping[str, float]:
      with jax.set_mesh(job.mesh):
        return evaluate(job.definition, state.variables)

    result.append(
      hooks_module.Evaluation(
        scores,
        every_steps=options.evaluate_every_steps,
        num_steps=config.num_steps,
      )
    )
  result += further
  # Last, so that a checkpoint's rows are all written before it is.
  result.append(
    hooks_module.Saver(
      checkpoints,
      num_steps=config.num_steps,
      seed=seed,
      config_text=config_text,
    )
  )
  return result
