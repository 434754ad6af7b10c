"""Memory of a training step at 4096 tokens a row, from the compiler's plan.

Nothing runs: `memory_analysis()` says what a step needs beside its arguments.
The first table puts our chunked cross-entropy beside a plain one, which keeps
the logits of all tokens; the second shows what recomputation and microbatches
save.

  python experiments/benchmarks/memory.py
"""

import argparse
from collections.abc import Sequence
import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from glm5_jax.data.batch import Batch
from glm5_jax.models import definition
from glm5_jax.models import losses
from glm5_jax.models import presets
from glm5_jax.models.config import ModelConfig
from glm5_jax.parallelism import mesh as meshes
from glm5_jax.parallelism import partitioning
from glm5_jax.parallelism.axis_rules import RULES
from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training import optimizer as optimizers
from glm5_jax.training import state as states
from glm5_jax.training import step as steps
from glm5_jax.training.config import OptimizerConfig
from glm5_jax.training.objective import Pretraining

MIB = 2**20
# Machine code is not looked at, and buffers are assigned before it is made.
FAST_COMPILE = {'xla_llvm_disable_expensive_passes': True}


class PlainPretraining(Pretraining):
  """The same loss from the logits of all tokens at once."""

  def loss(self, variables: Any, batch: Any, totals: Any) -> Any:
    model = self.definition.bind(variables)
    hidden, loads = model(batch.tokens, batch.segment_ids, batch.positions)
    nats_BT = optax.softmax_cross_entropy_with_integer_labels(
      model.logits(hidden), batch.targets
    )
    loss = (nats_BT * batch.weights).sum() / totals.next_token
    zero = jnp.zeros((), jnp.float32)
    num_tokens = (batch.segment_ids > 0).sum(dtype=jnp.float32)
    return loss, losses.LossMetrics(loss, zero, zero, num_tokens, loads)


@dataclasses.dataclass(frozen=True)
class Plan:
  """What the compiler reports of one step.

  Attributes:
    state_bytes: arguments, most of them weights and moments.
    temp_bytes: everything else that lives during the step.
    largest: largest float32 array in the program, elements.
  """

  state_bytes: int
  temp_bytes: int
  largest: int


def largest_array(program: str) -> int:
  """Returns the elements of the largest float32 array of a compiled program."""
  shapes = set(re.findall(r'\bf32\[([\d,]+)\]', program))
  return max(math.prod(map(int, shape.split(','))) for shape in shapes)


def plan(
  config: ModelConfig,
  *,
  rows: int,
  length: int,
  objective: type[Pretraining] = Pretraining,
  microbatches: int = 1,
) -> Plan:
  """Compiles one step for one device; runs nothing."""
  rules = RULES['emulated']
  mesh = meshes.make_mesh(MeshConfig(), jax.devices()[:1])
  model = definition.define(config, rules)
  optimizer = optimizers.make_optimizer(
    OptimizerConfig(), model.axes.params, 1000
  )
  train_step = steps.make_train_step(
    objective(model, z_loss=0.0),
    optimizer,
    axes=model.axes,
    rules=rules,
    microbatches=microbatches,
  )
  state_shardings = states.shardings(mesh, model, optimizer)
  batch_sharding = partitioning.batch_sharding(mesh, rules)
  ints = jax.ShapeDtypeStruct((rows, length), jnp.int32)
  floats = jax.ShapeDtypeStruct((rows, length), jnp.float32)
  with jax.set_mesh(mesh):
    compiled = (
      jax.jit(
        train_step,
        in_shardings=(state_shardings, batch_sharding),
        out_shardings=(state_shardings, partitioning.replicated(mesh)),
        donate_argnums=0,
      )
      .lower(
        states.abstract(model, optimizer),
        Batch(ints, ints, floats, ints, ints, ints),  # type: ignore[arg-type]  # shapes alone
      )
      .compile(FAST_COMPILE)
    )
  memory = compiled.memory_analysis()
  return Plan(
    memory.argument_size_in_bytes,
    memory.temp_size_in_bytes,
    largest_array(compiled.as_text()),
  )


def report_logits(config: ModelConfig, *, rows: int, length: int) -> None:
  """Prints the plans of both losses."""
  logits = rows * length * config.vocab_size
  print(
    f'\nA step of {rows} x {length} tokens, {config.vocab_size} entries; '
    f'logits [tokens, vocabulary] in float32: {4 * logits / MIB:.0f} MiB'
  )
  print(f'  {"cross-entropy":16}{"temporaries":>14}{"largest array":>16}')
  for name, objective in (
    (f'chunks of {config.loss_chunk}', Pretraining),
    ('all at once', PlainPretraining),
  ):
    found = plan(config, rows=rows, length=length, objective=objective)
    print(
      f'  {name:16}{found.temp_bytes / MIB:10.0f} MiB'
      f'{4 * found.largest / MIB:12.0f} MiB',
      flush=True,
    )


def report_remat(config: ModelConfig, *, rows: int, length: int) -> None:
  """Prints temporaries by what is recomputed and by microbatches."""
  print(f'\nTemporaries of a step of {rows} x {length} tokens, MiB')
  print(f'  {"remat":8}{"1 microbatch":>14}{"4 microbatches":>16}')
  for remat in ('none', 'dots', 'block'):
    changed = dataclasses.replace(config, remat=remat)
    print(f'  {remat:8}', end='')
    for microbatches, width in ((1, 14), (4, 16)):
      found = plan(changed, rows=rows, length=length, microbatches=microbatches)
      print(f'{found.temp_bytes / MIB:{width}.0f}', end='', flush=True)
    print()


def main(argv: Sequence[str] | None = None) -> None:
  """Prints both tables."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--length', type=int, default=4096)
  parser.add_argument('--vocab_size', type=int, default=65_536)
  parser.add_argument('--num_layers', type=int, default=5)
  parsed = parser.parse_args(argv)
  config = dataclasses.replace(
    presets.tiny,
    hidden_dim=128,
    num_layers=parsed.num_layers,
    mtp=None,
    max_length=parsed.length,
    loss_chunk=512,
  )
  report_logits(
    dataclasses.replace(config, vocab_size=parsed.vocab_size),
    rows=1,
    length=parsed.length,
  )
  report_remat(config, rows=4, length=parsed.length)


if __name__ == '__main__':
  main()
