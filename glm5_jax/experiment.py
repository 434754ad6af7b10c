"""An experiment: everything that decides what a run computes, in one value.

`experiments/<name>.py` has one `get_config()` each that returns one. No part of
the package takes the whole: a job gets the parts that it uses.
"""

import dataclasses
import pathlib
import typing
from typing import Any

from glm5_jax.data import config as data_config
from glm5_jax.models.config import ModelConfig
from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training.config import PretrainConfig

# The kinds of job; `launch` matches on the class. A new one joins by `|`.
Job = PretrainConfig


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ValueError(message)


@dataclasses.dataclass(frozen=True)
class Experiment:
  """What runs, on what.

  Attributes:
    name: the experiment's name, as in its file.
    model: what is trained.
    mesh: how devices are arranged.
    job: what is done.
    seed: of initial weights and of the order of the data.
  """

  name: str
  model: ModelConfig
  mesh: MeshConfig
  job: Job
  seed: int = 0

  def __post_init__(self) -> None:
    """Checks what the parts cannot see of each other."""
    tokenizer = self.job.data.tokenizer
    if isinstance(tokenizer, data_config.TrainedTokenizer):
      _require(
        tokenizer.vocab_size <= self.model.vocab_size,
        f'job.data.tokenizer.vocab_size is {tokenizer.vocab_size}; the model '
        f'has {self.model.vocab_size} rows (model.vocab_size) for token ids. '
        'Lower the one or raise the other.',
      )


def to_text(experiment: Experiment) -> str:
  """Returns one `path = value` a line, sorted by path.

  Paths are those that `overrides.apply` takes. Values are written as Python
  does; where a field may hold one of several classes, a line names the class.
  """
  lines = sorted(_lines('', type(experiment), experiment))
  return ''.join(f'{path} = {value}\n' for _, path, value in lines)


def _lines(
  path: str, annotation: Any, value: Any
) -> list[tuple[list[str], str, str]]:
  """Returns (sort key, path, value) of every line at or below `path`."""
  is_config = dataclasses.is_dataclass(value)
  parts: list[tuple[str, Any, Any]] = []
  if is_config:
    hints = typing.get_type_hints(type(value))
    parts = [(key, hint, getattr(value, key)) for key, hint in hints.items()]
  elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
    (item, *_) = typing.get_args(annotation)
    parts = [(str(index), item, part) for index, part in enumerate(value)]
  lines = []
  if not parts or (is_config and typing.get_args(annotation)):
    # Numbers count as such, so that item 10 follows item 9.
    order = [key.zfill(8) if key.isdigit() else key for key in path.split('.')]
    shown = type(value).__name__ if is_config else repr(value)
    lines.append((order, path, shown))
  for key, hint, part in parts:
    lines += _lines(f'{path}.{key}' if path else key, hint, part)
  return lines


def shrink(experiment: Experiment, folder: str | pathlib.Path) -> Experiment:
  """Returns the experiment in miniature: the same parts, each tiny.

  It takes two steps on eight devices in seconds. Kinds stay (experts, MTP,
  attention, optimizer, tokenizer, packing, mesh axes in use); sizes go.

  Args:
    experiment: any experiment.
    folder: where its data and caches may be written.
  """
  model, job = experiment.model, experiment.job
  microbatches = min(2, job.microbatches)
  num_stages = min(2, len(job.stages))
  return dataclasses.replace(
    experiment,
    model=_shrink_model(model),
    mesh=_shrink_mesh(experiment.mesh),
    job=dataclasses.replace(
      job,
      data=_shrink_data(job.data, folder),
      # Stages of one shape, so that one program serves both.
      stages=(
        data_config.LengthStage(
          sequence_length=32,
          batch_size=8 * microbatches,
          num_steps=2 // num_stages,
        ),
      )
      * num_stages,
      microbatches=microbatches,
      optimizer=dataclasses.replace(
        job.optimizer,
        schedule=dataclasses.replace(job.optimizer.schedule, warmup_steps=1),
      ),
      checkpoint=dataclasses.replace(job.checkpoint, every_steps=2),
      hooks=dataclasses.replace(
        job.hooks,
        log_every_steps=1,
        evaluate_every_steps=2,
        profile_steps=None,
      ),
    ),
  )


# Byte-level BPE with few merges.
_SMALL_VOCABULARY = 512


def _shrink_model(model: ModelConfig) -> ModelConfig:
  num_dense = min(1, model.num_dense_layers)
  num_groups = min(2, model.moe.num_groups)
  return dataclasses.replace(
    model,
    vocab_size=_SMALL_VOCABULARY,
    hidden_dim=32,
    num_layers=num_dense + min(2, model.num_moe_layers),
    num_dense_layers=num_dense,
    dense_dim=64,
    mla=dataclasses.replace(
      model.mla,
      num_heads=4,
      query_latent_dim=16,
      latent_dim=16,
      plain_dim=8,
      rope_dim=4,
      value_dim=8,
    ),
    moe=dataclasses.replace(
      model.moe,
      num_experts=8,
      experts_per_token=2,
      expert_dim=32,
      num_groups=num_groups,
      groups_per_token=min(num_groups, model.moe.groups_per_token),
    ),
    max_length=64,
    loss_chunk=16,
  )


def _shrink_mesh(mesh: MeshConfig) -> MeshConfig:
  """Halves eight devices once for each axis in use; fsdp takes the rest."""

  def two(size: int) -> int:
    return 1 if size == 1 else 2

  return MeshConfig(
    data=two(mesh.data),
    expert=two(mesh.expert),
    tensor=two(mesh.tensor),
    rules=mesh.rules,
  )


def _shrink_data(
  data: data_config.DataConfig, folder: str | pathlib.Path
) -> data_config.DataConfig:
  """Returns the five classes in their shares, with documents of their own."""

  def shrunk(name: data_config.TextClass) -> data_config.ClassConfig:
    documents = tuple(
      ' '.join(f'{name} {first * second}' for second in range(first, 50))
      for first in range(10, 40)
    )
    source = data_config.MemorySource(documents)
    share = data.class_config(name).share
    return data_config.ClassConfig(share, source, filter=None)

  return dataclasses.replace(
    data,
    root=str(folder),
    cache=str(pathlib.Path(folder) / 'prepared'),
    code=shrunk('code'),
    web=shrunk('web'),
    papers=shrunk('papers'),
    books=shrunk('books'),
    other=shrunk('other'),
    tokenizer=data_config.TrainedTokenizer(_SMALL_VOCABULARY, 100_000),
    near_duplicate=1.0,
    heldout_share=0.1,
  )
