"""What an experiment would do, in numbers, without doing any of it.

Shapes are traced and shardings laid out on an abstract mesh, so that a pod's
run is explained on a laptop.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jax.sharding import NamedSharding

from glm5_jax import experiment as experiment_lib
from glm5_jax.experiment import Experiment
from glm5_jax.models import counting
from glm5_jax.models import definition
from glm5_jax.parallelism import mesh as mesh_lib
from glm5_jax.parallelism.axis_rules import RULES
from glm5_jax.training import feeding
from glm5_jax.training import state as state_lib
from glm5_jax.training.optimizer import make_optimizer

_MIB = 2**20
# Leaves that are listed one by one; the rest is summed up.
_LISTED_LEAVES = 12


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One parameter array and how it is laid out.

  Attributes:
    path: where it is in the parameters.
    shape: its whole shape.
    num_bytes: of the whole array.
    spec: mesh axes of each dimension.
    bytes_per_device: what one device holds of it.
  """

  path: str
  shape: tuple[int, ...]
  num_bytes: int
  spec: str
  bytes_per_device: int


@dataclasses.dataclass(frozen=True)
class Layout:
  """Arrays of the training state, largest first.

  Attributes:
    parameters: master weights; gradients lie as they do.
    optimizer: moments and counts.
  """

  parameters: list[Leaf]
  optimizer: list[Leaf]


def num_devices(experiment: Experiment) -> int:
  """Returns how many devices the mesh takes; -1 stands for those at hand."""
  sizes = experiment.mesh.sizes.values()
  return jax.device_count() if -1 in sizes else math.prod(sizes)


def checked_sizes(experiment: Experiment, num_devices: int) -> dict[str, int]:
  """Returns the size of each mesh axis, none of them -1.

  Args:
    experiment: what runs.
    num_devices: devices of the mesh.

  Raises:
    ValueError: the mesh needs another number of devices, or a batch does not
      divide over it.
  """
  sizes = mesh_lib.axis_sizes(experiment.mesh, num_devices)
  feeding.check_stages(
    experiment.job.stages,
    experiment.model,
    num_shards=_batch_parts(experiment, sizes),
    microbatches=experiment.job.microbatches,
  )
  return sizes


def _batch_parts(experiment: Experiment, sizes: dict[str, int]) -> int:
  """Returns in how many pieces the rows of a batch divide."""
  axes = RULES[experiment.mesh.rules].mesh_axes('batch')
  return math.prod(sizes[axis] for axis in axes)


def layout(experiment: Experiment, sizes: dict[str, int]) -> Layout:
  """Lays the training state out on an abstract mesh.

  Args:
    experiment: what runs.
    sizes: of the mesh axes, none of them -1.

  Raises:
    ValueError: an array does not divide over the mesh.
  """
  rules = RULES[experiment.mesh.rules]
  model = definition.define(experiment.model, rules)
  mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
  job = experiment.job
  optimizer = make_optimizer(job.optimizer, model.axes.params, job.num_steps)
  shapes = state_lib.abstract(model, optimizer)
  shardings = state_lib.shardings(mesh, model, optimizer)
  return Layout(
    parameters=_leaves(shapes.variables.params, shardings.variables.params),
    optimizer=_leaves(shapes.opt_state, shardings.opt_state),
  )


def _leaves(shapes: Any, shardings: Any) -> list[Leaf]:
  """Returns the arrays of a tree, largest first."""
  found = []
  for (path, array), sharding in zip(
    jax.tree_util.tree_leaves_with_path(shapes),
    jax.tree.leaves(shardings),
    strict=True,
  ):
    piece = sharding.shard_shape(array.shape)
    found.append(
      Leaf(
        path=jax.tree_util.keystr(path, simple=True, separator='.'),
        shape=array.shape,
        num_bytes=array.size * array.dtype.itemsize,
        spec=_spelled(sharding),
        bytes_per_device=math.prod(piece) * array.dtype.itemsize,
      )
    )
  return sorted(found, key=lambda leaf: -leaf.num_bytes)


def explain(experiment: Experiment) -> str:
  """Returns the whole explanation as text.

  Raises:
    ValueError: the experiment does not fit its mesh.
  """
  sizes = checked_sizes(experiment, num_devices(experiment))
  return '\n\n'.join(
    [
      experiment_lib.to_text(experiment).rstrip(),
      _parameter_text(experiment),
      _cost_text(experiment),
      _run_text(experiment, sizes),
      _layout_text(experiment, sizes),
    ]
  )


def _parameter_text(experiment: Experiment) -> str:
  count = counting.parameters(experiment.model)
  parts = [
    (name, getattr(count, name))
    for name in (
      'embedding',
      'head',
      'attention',
      'dense_ffn',
      'router',
      'shared_experts',
      'routed_experts',
      'norms',
    )
  ]
  lines = [
    f'Parameters: {_billions(count.total)} in total, '
    f'{_billions(count.active)} active in a token'
  ]
  lines += [
    f'  {name:<16}{_billions(number):>12}{number / count.total:>9.1%}'
    for name, number in parts
    if number
  ]
  if count.mtp:
    lines.append(
      f'  apart: MTP layer {_billions(count.mtp)} '
      f'({_billions(count.mtp - count.mtp_inactive)} active)'
    )
  lines.append(f'  apart: {count.balance_biases} router biases')
  return '\n'.join(lines)


def _cost_text(experiment: Experiment) -> str:
  model = experiment.model
  lines = ['FLOPs per token, a multiply-add being two, by sequence length']
  header = ('length', 'forward', 'attention', 'MTP', 'training')
  lines.append('  ' + ''.join(f'{title:>14}' for title in header))
  for length in sorted({s.sequence_length for s in experiment.job.stages}):
    flops = counting.flops(model, length)
    share = f'{flops.attention / flops.forward:.1%}'
    cells = (
      f'{length:,}',
      _scaled(flops.forward),
      share,
      _scaled(flops.mtp),
      _scaled(flops.training),
    )
    lines.append('  ' + ''.join(f'{cell:>14}' for cell in cells))
  lines += [
    '  attention: share of forward in scores and values; training: three times',
    '  forward and MTP, without what is computed again',
    'Bytes per token',
    f'  cache           {_bytes(counting.cache_bytes(model))}',
    f'  weights read    {_bytes(counting.weight_bytes(model))}'
    '  (decoding, a batch of one)',
  ]
  return '\n'.join(lines)


def _run_text(experiment: Experiment, sizes: dict[str, int]) -> str:
  """Returns steps, tokens and FLOPs of the run by stage."""
  lines, all_tokens, all_flops = ['Run'], 0, 0.0
  for index, stage in enumerate(experiment.job.stages):
    tokens = stage.num_steps * stage.batch_size * stage.sequence_length
    per_token = counting.flops(experiment.model, stage.sequence_length)
    all_tokens += tokens
    all_flops += tokens * per_token.training
    lines.append(
      f'  stage {index}: {stage.num_steps:,} steps x {stage.batch_size:,} rows '
      f'x {stage.sequence_length:,} tokens = {_scaled(tokens)} tokens'
    )
  pieces = experiment.job.microbatches * _batch_parts(experiment, sizes)
  rows = [str(s.batch_size // pieces) for s in experiment.job.stages]
  lines.append(
    f'  {_scaled(all_tokens)} tokens, {all_flops:.3g} FLOPs; '
    f'{experiment.job.microbatches} microbatches of {", ".join(rows)} rows a '
    'piece of the batch'
  )
  return '\n'.join(lines)


def _layout_text(experiment: Experiment, sizes: dict[str, int]) -> str:
  """Returns the mesh, bytes per device, and the largest arrays."""
  state = layout(experiment, sizes)
  devices = math.prod(sizes.values())
  mesh = ' x '.join(f'{name} {size}' for name, size in sizes.items())
  lines = [
    f'Mesh: {mesh} = {devices} devices, rules {experiment.mesh.rules}',
    'State, float32       in all    a device   of an even division',
    _state_line('weights', state.parameters, devices),
    _state_line('gradients', state.parameters, devices),
    _state_line('optimizer', state.optimizer, devices),
  ]
  cells = [
    (
      leaf.path,
      ' x '.join(map(str, leaf.shape)),
      leaf.spec,
      _bytes(leaf.bytes_per_device),
    )
    for leaf in state.parameters[:_LISTED_LEAVES]
  ]
  titles = ('Largest weights', 'shape', 'divides over', 'a device')
  table = [titles, *cells]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  lines += ['  '.join(map(str.ljust, row, widths)).rstrip() for row in table]
  whole = [
    leaf.path
    for leaf in state.parameters
    if leaf.num_bytes == leaf.bytes_per_device >= _MIB
  ]
  if whole and devices > 1:
    lines.append(f'Whole on every device, 1 MiB or more: {", ".join(whole)}')
  return '\n'.join(lines)


def _state_line(name: str, leaves: list[Leaf], devices: int) -> str:
  total = sum(leaf.num_bytes for leaf in leaves)
  here = sum(leaf.bytes_per_device for leaf in leaves)
  even = f'{here * devices / total:.1%}'
  return f'  {name:<14}{_bytes(total):>12}{_bytes(here):>12}{even:>10}'


def _spelled(sharding: NamedSharding) -> str:
  """Returns a partition as `- fsdp+expert tensor`, a part a dimension."""
  parts = []
  for axes in sharding.spec:
    if axes is None:
      parts.append('-')
    else:
      parts.append('+'.join((axes,) if isinstance(axes, str) else axes))
  return ' '.join(parts)


def _billions(number: int) -> str:
  """Returns a count in billions, or in millions where it is small."""
  if number >= 1e9:
    return f'{number / 1e9:.1f} B'
  return f'{number / 1e6:.2f} M'


def _scaled(number: float) -> str:
  """Returns a number with a metric prefix and three digits."""
  prefixes = iter(('', ' k', ' M', ' G', ' T', ' P', ' E'))
  prefix = next(prefixes)
  while number >= 1000 and prefix != ' E':
    number, prefix = number / 1000, next(prefixes)
  return f'{number:#.3g}'.rstrip('.') + prefix


def _bytes(number: float) -> str:
  for unit in ('B', 'KiB', 'MiB', 'GiB'):
    if number < 1024:
      return f'{number:.1f} {unit}' if unit != 'B' else f'{number:.0f} B'
    number /= 1024
  return f'{number:.2f} TiB'
