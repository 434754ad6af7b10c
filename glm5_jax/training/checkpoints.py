"""Checkpoints: atomic, written beside training, readable on any mesh.

The only module that touches Orbax. A checkpoint of step n is the folder `n`:

  variables/  weights and balance biases, by name
  optimizer/  the step and the optimizer's state, by name
  progress/   JSON: step, tokens, seed, config text, and each host's position
              in the data, which counts the tokens of each class

Orbax writes into `n.orbax-checkpoint-tmp` and renames it when all is on disk.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import dataclasses
import json
import pathlib
import shutil
from typing import Any

from absl import logging
import jax
from jax.experimental import multihost_utils
import numpy as np
from orbax.checkpoint import v1 as ocp

from glm5_jax.training.config import CheckpointConfig
from glm5_jax.training.state import TrainState

_UNFINISHED = '.orbax-checkpoint-tmp'
_SET_ASIDE = '.incomplete'
_ARRAYS = ('variables', 'optimizer')
# Without one of these a folder is no checkpoint, whatever its name says.
_REQUIRED = (
  'variables/_METADATA',
  'optimizer/_METADATA',
  'progress/data.json',
)


class CheckpointError(RuntimeError):
  """A checkpoint could not be written, read or used."""


@dataclasses.dataclass(frozen=True)
class Progress:
  """What a checkpoint knows beside arrays.

  Attributes:
    step: updates done.
    tokens: tokens trained on, padding excluded.
    seed: the run's seed; with `step` it determines every random choice.
    config: the run's config as text.
    data: this host's position in the data.
  """

  step: int
  tokens: int
  seed: int
  config: str
  data: dict[str, Any]


Named = dict[str, Any]


def _nested(tree: Any) -> Named:
  """Returns the leaves of a tree in nested dicts, by the names on their paths.

  On disk there are names only, so a checkpoint does not depend on the classes
  that hold the arrays in memory.
  """
  result: Named = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    *folders, name = (jax.tree_util.keystr((key,), simple=True) for key in path)
    inner = result
    for folder in folders:
      inner = inner.setdefault(folder, {})
    inner[name] = leaf
  return result


def _flat(nested: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns leaves by `/`-joined names."""
  result = {}
  for name, value in nested.items():
    if isinstance(value, Mapping):
      result.update(_flat(value, f'{prefix}{name}/'))
    else:
      result[prefix + name] = value
  return result


def _parts(state: TrainState) -> dict[str, Named]:
  """Returns the state as the two folders of arrays."""
  return {
    'variables': _nested(state.variables),
    'optimizer': _nested({'step': state.step, 'state': state.opt_state}),
  }


def _joined(state: TrainState, parts: dict[str, Named]) -> TrainState:
  """Undoes `_parts`; `state` gives the structure."""
  return TrainState(
    step=parts['optimizer']['step'],
    variables=_fill(state.variables, parts['variables']),
    opt_state=_fill(state.opt_state, parts['optimizer'].get('state', {})),
  )


def _fill(tree: Any, nested: Named) -> Any:
  """Returns `tree` with the leaves of `nested` in their places."""
  leaves = _flat(nested)

  def leaf(path: tuple[Any, ...], _: Any) -> Any:
    return leaves[jax.tree_util.keystr(path, simple=True, separator='/')]

  return jax.tree_util.tree_map_with_path(leaf, tree)


def _described(leaf: Any) -> str:
  if leaf is None:
    return 'nothing'
  return f'{np.dtype(leaf.dtype)}{list(leaf.shape)}'


def _context() -> ocp.Context:
  registry = ocp.handlers.local_registry()
  registry.add(ocp.handlers.JsonHandler, checkpointable_name='progress')
  context = ocp.Context()
  context.checkpointables_options.registry = registry
  return context


def _from_all_hosts(data: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns each host's value, in order of hosts, on all of them."""
  if jax.process_count() == 1:
    return [data]
  text = np.frombuffer(json.dumps(data).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.int32(len(text)))
  padded = np.zeros(int(sizes.max()), np.uint8)
  padded[: len(text)] = text
  rows = multihost_utils.process_allgather(padded)
  return [
    json.loads(row[:size].tobytes())
    for row, size in zip(rows, sizes, strict=True)
  ]


class Checkpoints:
  """The checkpoints of one run.

  Attributes:
    directory: their folder.
    config: when they are written and which are kept.
  """

  def __init__(self, directory: pathlib.Path, config: CheckpointConfig) -> None:
    """Opens or makes the folder; sets half-written checkpoints aside.

    Raises:
      CheckpointError: the folder cannot be made or written to.
    """
    # Orbax wants absolute paths.
    self.directory = directory.absolute()
    self.config = config
    policies = ocp.training.preservation_policies
    kept = [policies.LatestN(config.keep_latest)]
    if config.keep_every_steps is not None:
      kept.append(policies.EveryNSteps(config.keep_every_steps))
    with self._errors('opened'):
      self.directory.mkdir(parents=True, exist_ok=True)
      if jax.process_index() == 0:
        set_aside(self.directory)
      if jax.process_count() > 1:
        # Nobody looks for checkpoints before the folder is in order.
        multihost_utils.sync_global_devices('checkpoints set aside')
      self._checkpointer = ocp.training.Checkpointer(
        self.directory,
        context=_context(),
        preservation_policy=policies.AnyPreservationPolicy(kept),
        cleanup_tmp_directories=True,
      )

  @contextlib.contextmanager
  def _errors(self, done: str) -> Iterator[None]:
    """Turns whatever storage raises into one clear error."""
    try:
      yield
    except (OSError, ValueError, RuntimeError) as error:
      if isinstance(error, CheckpointError):
        raise
      raise CheckpointError(
        f'A checkpoint in {self.directory} could not be {done}: '
        f'{_reason(error)}. Free space or mend its permissions, or give '
        'another --workdir; checkpoints that are complete stay usable.'
      ) from error

  @property
  def latest_step(self) -> int | None:
    """The newest complete checkpoint's step, or None."""
    latest = self._checkpointer.latest
    return None if latest is None else latest.step

  def save(self, state: TrainState, progress: Progress) -> None:
    """Starts writing a checkpoint; returns once the state may be consumed.

    Raises:
      CheckpointError: this or the checkpoint before could not be written.
    """
    record = dataclasses.asdict(progress)
    record['data'] = _from_all_hosts(progress.data)
    with self._errors('written'):
      self._checkpointer.save_checkpointables_async(
        progress.step,
        {**_parts(state), 'progress': record},
        # When to save is the hook's decision.
        force=True,
      )

  def wait(self) -> None:
    """Waits until what was started is on disk.

    Raises:
      CheckpointError: it could not be written.
    """
    with self._errors('written'):
      self._checkpointer.wait()

  def close(self) -> None:
    """Waits and releases resources."""
    with self._errors('written'):
      self._checkpointer.close()

  def restore(
    self, wanted: TrainState, step: int | None = None
  ) -> tuple[TrainState, Progress]:
    """Returns a checkpoint's state, placed as `wanted` says, and its progress.

    Args:
      wanted: shapes, dtypes and shardings; the mesh may be another than the
        one it was saved from.
      step: which checkpoint; None: the newest.

    Raises:
      CheckpointError: there is none, it cannot be read, it holds another
        architecture, or it was written by another number of hosts.
    """
    step = self.latest_step if step is None else step
    if step is None:
      raise CheckpointError(f'There is no checkpoint in {self.directory}.')
    path = self.directory / str(step)
    with self._unreadable(path):
      metadata = self._checkpointer.checkpointables_metadata(step).metadata
      saved = {name: metadata[name] for name in _ARRAYS}
      for name, found in saved.items():
        if found is None:
          raise ValueError(f'the list of arrays in {name}/ cannot be read')
    abstract = _parts(wanted)
    _check_same(path, saved, abstract)
    with self._unreadable(path):
      loaded = self._checkpointer.load_checkpointables(
        step, {**abstract, 'progress': None}
      )
    record = loaded.pop('progress')
    hosts = record.pop('data')
    if len(hosts) != jax.process_count():
      raise CheckpointError(
        f'{path} was written by {len(hosts)} hosts; now there are '
        f'{jax.process_count()}, and positions in the data do not divide anew. '
        'Run on as many hosts as before; devices may differ.'
      )
    progress = Progress(data=hosts[jax.process_index()], **record)
    return _joined(wanted, loaded), progress

  @contextlib.contextmanager
  def _unreadable(self, path: pathlib.Path) -> Iterator[None]:
    try:
      yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
      raise CheckpointError(
        f'Checkpoint {path} is damaged: {_reason(error)}. Move it away to go '
        'on from the one before.'
      ) from error


def set_aside(directory: pathlib.Path) -> list[pathlib.Path]:
  """Removes what a killed run left half-written, and says so by name.

  Folders that Orbax never finished are deleted; folders that lack a part of a
  checkpoint are renamed to end in `.incomplete`.

  Returns:
    What was removed or renamed.
  """
  found = []
  for path in sorted(directory.iterdir()):
    if path.name.endswith(_UNFINISHED):
      logging.warning('Ignoring and deleting half-written checkpoint %s.', path)
      shutil.rmtree(path)
    elif path.name.isdigit() and not _is_complete(path):
      aside = path.with_name(path.name + _SET_ASIDE)
      if aside.exists():
        shutil.rmtree(aside)
      logging.warning(
        'Ignoring incomplete checkpoint %s; it is now %s.', path, aside.name
      )
      path.rename(aside)
    else:
      continue
    found.append(path)
  return found


def _is_complete(path: pathlib.Path) -> bool:
  return all((path / name).is_file() for name in _REQUIRED)


def _reason(error: BaseException) -> str:
  """Returns the first line of an error that says something."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return lines[0].rstrip('.') if lines else type(error).__name__


def _check_same(
  path: pathlib.Path, saved: Named, wanted: dict[str, Named]
) -> None:
  """Raises where a checkpoint and a model differ, naming the first leaf."""
  saved_leaves, wanted_leaves = _flat(saved), _flat(wanted)
  for name in [*wanted_leaves, *saved_leaves]:
    got, want = saved_leaves.get(name), wanted_leaves.get(name)
    if _described(got) != _described(want):
      raise CheckpointError(
        f'Checkpoint {path} holds another architecture than the config '
        f'describes. The first difference is {name}: saved '
        f'{_described(got)}, wanted {_described(want)}. Use the config that '
        'it was trained with (its text is in progress/data.json), or give '
        'another --workdir.'
      )
