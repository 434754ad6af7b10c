"""A model of a few hundred weights, for tests of what trains models.

Run as a program it trains in a workdir, so that tests can send it signals:

  python -m tests.training.toy WORKDIR NUM_STEPS SECONDS_PER_STEP
"""

import dataclasses
import functools
import pathlib
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.models.definition import Variables
from glm5_jax.parallelism import mesh as mesh_module
from glm5_jax.parallelism import partitioning
from glm5_jax.parallelism.axis_rules import AxisRules
from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training import checkpoints as checkpoints_module
from glm5_jax.training import hooks as hooks_module
from glm5_jax.training import loop
from glm5_jax.training import optimizer as optimizer_module
from glm5_jax.training import preemption
from glm5_jax.training import state as state_module
from glm5_jax.training import step as step_module
from glm5_jax.training import writers
from glm5_jax.training.config import CheckpointConfig
from glm5_jax.training.config import OptimizerConfig
from glm5_jax.training.config import ScheduleConfig

# Adam divides by the gradient's size: a small epsilon would blow up the
# rounding of entries whose gradient is zero but for rounding.
OPTIMIZER = OptimizerConfig(
  kind='adamw',
  epsilon=1e-3,
  schedule=ScheduleConfig(kind='constant', warmup_steps=2),
)
MUON = dataclasses.replace(OPTIMIZER, kind='muon')
NUM_EXPERTS = 4
SEED = 5


class Batch(NamedTuple):
  """Rows of numbers, and which numbers count."""

  tokens: np.ndarray
  weights: np.ndarray


class Metrics(NamedTuple):
  """What the toy loss reports."""

  cross_entropy: jax.Array
  num_tokens: jax.Array
  expert_load: jax.Array


@dataclasses.dataclass(frozen=True)
class Definition:
  """A definition as training sees one."""

  width: int = 16
  num_layers: int = 2
  rules: AxisRules = AxisRules()

  def init(self, key):
    # NumPy, since compiling random draws takes longer than all tests.
    random = np.random.RandomState(SEED)
    return jax.tree.map(
      lambda leaf: jnp.asarray(0.3 * random.randn(*leaf.shape), leaf.dtype),
      self.abstract,
    )

  @property
  def abstract(self):
    D, L = self.width, self.num_layers

    def leaf(*shape):
      return jax.ShapeDtypeStruct(shape, jnp.float32)

    return Variables(
      params={
        'embedding': leaf(16, D),
        'head': leaf(D, 16),
        'layers': {
          'norm': leaf(L, D),
          'router': leaf(L, D, NUM_EXPERTS),
          'up': leaf(L, D, 2, 8),
          'down': leaf(L, 2, 8, D),
        },
      },
      balance={'router': leaf(L, NUM_EXPERTS)},
    )

  @property
  def axes(self):
    return Variables(
      params={
        'embedding': ('vocab', 'embed'),
        'head': ('embed', 'vocab'),
        'layers': {
          'norm': ('layers', None),
          'router': ('layers', 'embed', 'router_experts'),
          'up': ('layers', 'query_latent', 'heads', 'head_dim'),
          'down': ('layers', 'heads', 'head_dim', 'embed'),
        },
      },
      balance={'router': ('layers', None)},
    )


DEFAULT = Definition()
ONE_DEVICE = MeshConfig(fsdp=1)


@dataclasses.dataclass(frozen=True)
class Objective:
  """Cross-entropy of each number given itself, through residual layers."""

  definition: Definition

  def totals(self, batch):
    return jnp.maximum(batch.weights.sum(), 1.0)

  def loss(self, variables, batch, totals):
    params, load = variables.params, []
    x = params['embedding'][batch.tokens]
    for layer in range(self.definition.num_layers):
      own = {name: stack[layer] for name, stack in params['layers'].items()}
      normed = x * own['norm'][None, None]
      scores = jnp.einsum('btd,de->bte', normed, own['router'])
      biased = scores + variables.balance['router'][layer][None, None]
      chosen = jax.nn.one_hot(jnp.argmax(biased, -1), NUM_EXPERTS)
      load.append((chosen * batch.weights[..., None]).sum((0, 1)))
      gate = (jax.nn.sigmoid(scores) * chosen).sum(-1)
      y = jnp.tanh(jnp.einsum('btd,dnh->btnh', x, own['up']))
      y = jnp.einsum('btnh,nhd->btd', y, own['down'])
      x = x + gate[..., None] * y
    logits = jnp.einsum('btd,dv->btv', x, params['head'])
    picked = jnp.take_along_axis(
      jax.nn.log_softmax(logits), batch.tokens[..., None], -1
    )
    value = -(picked[..., 0] * batch.weights).sum() / totals
    return value, Metrics(
      cross_entropy=value,
      num_tokens=batch.weights.sum(),
      expert_load=jnp.stack(load),
    )

  def next_balance(self, balance, metrics):
    load = metrics.expert_load
    error = jnp.sign(load.mean(-1, keepdims=True) - load)
    return {'router': balance['router'] + 0.01 * error}


class Batches:
  """Random batches that depend on their number alone."""

  def __init__(self, num_steps=1000, rows=8, length=6):
    self.step = 0
    self._num_steps = num_steps
    self._shape = (rows, length)
    self.poisoned: int | None = None

  def __iter__(self):
    return self

  def __next__(self):
    if self.step >= self._num_steps:
      raise StopIteration
    self.step += 1
    random = np.random.RandomState(self.step)
    weights = (random.rand(*self._shape) < 0.8).astype(np.float32)
    if self.step == self.poisoned:
      weights[0, 0] = np.nan
    return Batch(random.randint(0, 16, self._shape, np.int32), weights)

  def get_state(self):
    return {'step': self.step}

  def set_state(self, state):
    self.step = state['step']


class Parts(NamedTuple):
  """A toy run, put together."""

  mesh: jax.sharding.Mesh
  definition: Definition
  optimizer: object
  shardings: state_module.TrainState
  wanted: state_module.TrainState
  step: step_module.StepFunction
  place: object

  def initial(self):
    state = state_module.init(
      self.definition, self.optimizer, jax.random.key(0)
    )
    return jax.device_put(state, self.shardings)


@functools.cache
def build(
  mesh_config=ONE_DEVICE,
  num_devices=1,
  *,
  definition=DEFAULT,
  optimizer=OPTIMIZER,
  microbatches=1,
):
  mesh = mesh_module.make_mesh(mesh_config, jax.devices()[:num_devices])
  update = optimizer_module.make_optimizer(
    optimizer, definition.axes.params, num_steps=1000
  )
  shardings = state_module.shardings(mesh, definition, update)
  batch_sharding = partitioning.batch_sharding(mesh, definition.rules)
  step = step_module.compiled_on(
    mesh,
    step_module.make_train_step(
      Objective(definition),
      update,
      axes=definition.axes,
      rules=definition.rules,
      microbatches=microbatches,
    ),
    state_shardings=shardings,
    batch_sharding=batch_sharding,
  )
  return Parts(
    mesh=mesh,
    definition=definition,
    optimizer=update,
    shardings=shardings,
    wanted=state_module.placed(
      state_module.abstract(definition, update), shardings
    ),
    step=step,
    place=lambda batch: jax.device_put(batch, batch_sharding),
  )


def train(
  parts,
  workdir: pathlib.Path,
  num_steps,
  *,
  batches=None,
  hooks=(),
  every_steps=3,
  should_stop=lambda step: False,
):
  """Trains in `workdir`, from its newest checkpoint if it has one."""
  checkpoints = checkpoints_module.Checkpoints(
    workdir / 'checkpoints', CheckpointConfig(every_steps=every_steps)
  )
  batches = batches or Batches()
  if checkpoints.latest_step is None:
    state, position = parts.initial(), loop.Position()
  else:
    state, saved = checkpoints.restore(parts.wanted)
    batches.set_state(saved.data)
    position = loop.Position(saved.step, saved.tokens)
  rows = writers.JsonlWriter(workdir / 'metrics.jsonl', position.step)
  ending = loop.train(
    state,
    batches,
    parts.step,
    position=position,
    num_steps=num_steps,
    place=parts.place,
    hooks=[
      hooks_module.Recorder([rows], every_steps=1, learning_rates={}),
      hooks_module.StopOnNonFinite(workdir / 'refused'),
      *hooks,
      hooks_module.Saver(
        checkpoints, num_steps=num_steps, seed=SEED, config_text='toy'
      ),
    ],
    should_stop=should_stop,
  )
  checkpoints.close()
  return ending


class _Slow(hooks_module.Hook):
  """Says which step begins, and gives a test time to act."""

  def __init__(self, seconds):
    self._seconds = seconds

  def before_step(self, step):
    print('step', step, flush=True)
    time.sleep(self._seconds)


def _main(workdir, num_steps, seconds):
  with preemption.PreemptionNotice() as notice:
    ending = train(
      build(),
      pathlib.Path(workdir),
      int(num_steps),
      hooks=[_Slow(float(seconds))],
      every_steps=1000,
      should_stop=notice,
    )
  print(ending.reason, state_module.digest(ending.state), flush=True)


if __name__ == '__main__':
  _main(*sys.argv[1:])
