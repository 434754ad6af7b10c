"""A training step of ours and of an equal PyTorch model, in turns, on CPU.

Forward, backward, clipping and AdamW in float32, at equal sizes, tokens and
threads. Ours is the product's own step; the other side is `torch_side.py`,
which needs torch and transformers (`pip install glm5-jax[torch]`, or any other
Python that has them):

  python experiments/benchmarks/training_step.py --torch_python=PYTHON
"""

import argparse
from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np

from glm5_jax.data.batch import Batch
from glm5_jax.models import definition
from glm5_jax.models.config import MlaConfig
from glm5_jax.models.config import ModelConfig
from glm5_jax.models.config import MoeConfig
from glm5_jax.parallelism import mesh as meshes
from glm5_jax.parallelism import partitioning
from glm5_jax.parallelism.axis_rules import RULES
from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training import optimizer as optimizers
from glm5_jax.training import state as states
from glm5_jax.training import step as steps
from glm5_jax.training.config import OptimizerConfig
from glm5_jax.training.objective import Pretraining

TORCH_SIDE = pathlib.Path(__file__).with_name('torch_side.py')
# The two sides may differ in how they count norms, and in nothing else.
PARAMETER_TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What both sides are built from; names as in `ModelConfig`."""

  rows: int = 8
  length: int = 1024
  vocab_size: int = 8192
  hidden_dim: int = 256
  num_layers: int = 6
  num_dense_layers: int = 1
  dense_dim: int = 768
  num_heads: int = 4
  query_latent_dim: int = 128
  latent_dim: int = 64
  plain_dim: int = 48
  rope_dim: int = 16
  value_dim: int = 64
  num_experts: int = 16
  experts_per_token: int = 4
  expert_dim: int = 192

  @property
  def num_tokens(self) -> int:
    return self.rows * self.length


def model_config(sizes: Sizes) -> ModelConfig:
  """Returns our model of these sizes: float32, no MTP, nothing recomputed."""
  return ModelConfig(
    vocab_size=sizes.vocab_size,
    hidden_dim=sizes.hidden_dim,
    num_layers=sizes.num_layers,
    num_dense_layers=sizes.num_dense_layers,
    dense_dim=sizes.dense_dim,
    mla=MlaConfig(
      num_heads=sizes.num_heads,
      query_latent_dim=sizes.query_latent_dim,
      latent_dim=sizes.latent_dim,
      plain_dim=sizes.plain_dim,
      rope_dim=sizes.rope_dim,
      value_dim=sizes.value_dim,
    ),
    moe=MoeConfig(
      num_experts=sizes.num_experts,
      experts_per_token=sizes.experts_per_token,
      expert_dim=sizes.expert_dim,
    ),
    max_length=sizes.length,
    compute_dtype='float32',
    remat='none',
  )


def random_batch(sizes: Sizes) -> Batch:
  """Returns rows of one full document each; the last token has no target."""
  shape = (sizes.rows, sizes.length)
  tokens = np.random.default_rng(0).integers(0, sizes.vocab_size, shape)
  weights = np.ones(shape, np.float32)
  weights[:, -1] = 0
  return Batch(
    tokens=tokens.astype(np.int32),
    targets=np.roll(tokens, -1, axis=1).astype(np.int32),
    weights=weights,
    segment_ids=np.ones(shape, np.int32),
    positions=np.tile(np.arange(sizes.length, dtype=np.int32), (shape[0], 1)),
    source_ids=np.zeros(shape, np.int32),
  )


class Ours:
  """The product's step, compiled.

  Attributes:
    parameters: trained numbers.
  """

  def __init__(self, sizes: Sizes):
    rules = RULES['emulated']
    mesh = meshes.make_mesh(MeshConfig(), jax.devices()[:1])
    model = definition.define(model_config(sizes), rules)
    optimizer = optimizers.make_optimizer(
      OptimizerConfig(), model.axes.params, num_steps=1000
    )
    shardings = states.shardings(mesh, model, optimizer)
    with jax.set_mesh(mesh):
      init = jax.jit(
        lambda key: states.init(model, optimizer, key), out_shardings=shardings
      )
      self._state = init(jax.random.key(0))
    train_step = steps.make_train_step(
      Pretraining(model, z_loss=0.0), optimizer, axes=model.axes, rules=rules
    )
    self._step = steps.compiled_on(
      mesh,
      train_step,
      state_shardings=shardings,
      batch_sharding=partitioning.batch_sharding(mesh, rules),
    )
    self._batch = random_batch(sizes)
    params = self._state.variables.params
    self.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))

  def seconds(self) -> float:
    """Takes one step."""
    begin = time.perf_counter()
    self._state, metrics = self._step(self._state, self._batch)
    jax.block_until_ready((self._state, metrics))
    return time.perf_counter() - begin


class Theirs:
  """`torch_side.py` in a process of its own.

  Attributes:
    report: what it says of itself.
  """

  def __init__(self, python: str, sizes: Sizes, threads: int, compile: bool):
    self._process = subprocess.Popen(
      [python, str(TORCH_SIDE)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    request = dataclasses.asdict(sizes)
    self.report = self._ask(request | {'threads': threads, 'compile': compile})

  def _ask(self, request: Any) -> dict[str, Any]:
    pipe_in, pipe_out = self._process.stdin, self._process.stdout
    assert pipe_in is not None and pipe_out is not None
    print(json.dumps(request), file=pipe_in, flush=True)
    answer = pipe_out.readline()
    if not answer:
      raise RuntimeError(
        f'{TORCH_SIDE.name} ended without an answer; its error is above. '
        '--torch_python must name a Python with torch and transformers.'
      )
    result: dict[str, Any] = json.loads(answer)
    return result

  def seconds(self) -> float:
    """Takes one step."""
    return float(self._ask('step')['seconds'])

  def close(self) -> None:
    """Ends the process."""
    self._process.communicate()


def check_parameters(ours: int, theirs: int) -> None:
  """Raises ValueError if the two models are not of one size."""
  if abs(ours - theirs) > PARAMETER_TOLERANCE * theirs:
    raise ValueError(
      f'Ours has {ours} parameters, theirs {theirs}: the sizes do not match.'
    )


def interleaved(
  first: Callable[[], float], second: Callable[[], float], num_steps: int
) -> tuple[list[float], list[float]]:
  """Returns the seconds of both, taken in turns."""
  pairs = [(first(), second()) for _ in range(num_steps)]
  return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def table(
  num_tokens: int, seconds: dict[str, list[float]], parameters: dict[str, int]
) -> str:
  """Returns a line a side, and the ratio of the first to the second."""
  lines = [
    f'{"":8}{"parameters":>12}{"median s":>10}{"best s":>8}{"tokens/s":>10}'
  ]
  for name, taken in seconds.items():
    median = statistics.median(taken)
    lines.append(
      f'{name:8}{parameters[name]:12,}{median:10.2f}{min(taken):8.2f}'
      f'{num_tokens / median:10.0f}'
    )
  ours, theirs = seconds.values()
  ratio = statistics.median(theirs) / statistics.median(ours)
  best = min(theirs) / min(ours)
  lines.append(f'ours / theirs: {ratio:.2f} x (best steps: {best:.2f} x)')
  return '\n'.join(lines)


def parser() -> argparse.ArgumentParser:
  """Returns the command line: a flag for each size, and how to run."""
  result = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  result.add_argument('--torch_python', default=sys.executable)
  result.add_argument('--threads', type=int, default=2)
  result.add_argument('--num_steps', type=int, default=5)
  result.add_argument('--compile', action='store_true')
  for field in dataclasses.fields(Sizes):
    result.add_argument(f'--{field.name}', type=int, default=field.default)
  return result


def main(argv: Sequence[str] | None = None) -> None:
  """Measures both sides and prints the table."""
  flags = vars(parser().parse_args(argv))
  sizes = Sizes(**{f.name: flags[f.name] for f in dataclasses.fields(Sizes)})
  threads = flags['threads']
  # XLA takes a thread for each core it may run on; the child inherits them.
  if hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, cores)
  theirs = Theirs(flags['torch_python'], sizes, threads, flags['compile'])
  ours = Ours(sizes)
  parameters = {'ours': ours.parameters, 'theirs': theirs.report['parameters']}
  check_parameters(*parameters.values())
  for _ in range(2):
    ours.seconds()
  seconds = interleaved(ours.seconds, theirs.seconds, flags['num_steps'])
  theirs.close()
  print(f'{sizes.num_tokens} tokens a step, {threads} threads, {sizes}')
  print(f'jax {jax.__version__}; {theirs.report["versions"]}')
  tried = ', '.join(f'{k} {v:.2f} s' for k, v in theirs.report['tried'].items())
  print(f'theirs runs {theirs.report["experts"]} (tried: {tried})')
  named = dict(zip(parameters, seconds, strict=True))
  print(table(sizes.num_tokens, named, parameters))


if __name__ == '__main__':
  main()
