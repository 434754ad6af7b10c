"""Checkpoints come back bit for bit, on any mesh, or say why not."""

import dataclasses
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training import checkpoints as checkpoints_module
from glm5_jax.training import state as state_module
from glm5_jax.training.checkpoints import CheckpointError
from glm5_jax.training.checkpoints import Checkpoints
from glm5_jax.training.checkpoints import Progress
from glm5_jax.training.config import CheckpointConfig
from tests.training import toy

PROGRESS = Progress(
  step=7,
  tokens=12345678901,
  seed=5,
  config='a = 1\nb = 2',
  data={'step': 7, 'tokens': {'code': 3}, 'open': [[1, 2], []], 'last': None},
)
DEFAULT = CheckpointConfig()
ON_EIGHT = MeshConfig(fsdp=2, expert=2, tensor=2)


def _saved(folder, parts, steps=(7,), config=DEFAULT):
  """Returns the state that was saved, and its checkpoints."""
  checkpoints = Checkpoints(folder, config)
  state = parts.initial()
  for step in steps:
    checkpoints.save(state, dataclasses.replace(PROGRESS, step=step))
  checkpoints.wait()
  return state, checkpoints


def test_state_and_progress_come_back_bit_for_bit(tmp_path):
  parts = toy.build()
  state, checkpoints = _saved(tmp_path, parts)
  restored, progress = checkpoints.restore(parts.wanted)
  assert state_module.digest(restored) == state_module.digest(state)
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  assert progress == PROGRESS


@pytest.mark.parametrize(
  ('config', 'num_devices'), [(MeshConfig(fsdp=4), 4), (MeshConfig(), 1)]
)
def test_eight_devices_state_comes_back_on_fewer(tmp_path, config, num_devices):
  state, checkpoints = _saved(
    tmp_path, toy.build(ON_EIGHT, 8, optimizer=toy.MUON)
  )
  fewer = toy.build(config, num_devices, optimizer=toy.MUON)
  restored, _ = checkpoints.restore(fewer.wanted)
  assert state_module.digest(restored) == state_module.digest(state)
  for leaf, wanted in zip(
    jax.tree.leaves(restored), jax.tree.leaves(fewer.wanted), strict=True
  ):
    assert leaf.sharding == wanted.sharding
    assert len(leaf.sharding.device_set) == num_devices


@pytest.mark.parametrize(
  ('definition', 'message'),
  [
    (
      toy.Definition(width=32),
      r'variables/params/embedding: saved float32\[16, 16\], wanted '
      r'float32\[16, 32\]',
    ),
    (
      toy.Definition(num_layers=3),
      r'variables/params/layers/down: saved float32\[2, 2, 8, 16\], wanted '
      r'float32\[3, 2, 8, 16\]',
    ),
  ],
)
def test_another_architecture_is_refused_by_its_first_leaf(
  tmp_path, definition, message
):
  _, checkpoints = _saved(tmp_path, toy.build())
  other = toy.build(definition=definition)
  with pytest.raises(CheckpointError, match=message):
    checkpoints.restore(other.wanted)


def test_another_optimizer_is_refused_by_its_first_leaf(tmp_path):
  _, checkpoints = _saved(tmp_path, toy.build())
  other = toy.build(optimizer=toy.MUON)
  with pytest.raises(CheckpointError, match='muon.*saved nothing, wanted'):
    checkpoints.restore(other.wanted)


def test_half_written_checkpoints_are_ignored_and_named(tmp_path, caplog):
  parts = toy.build()
  _, checkpoints = _saved(tmp_path, parts)
  checkpoints.close()
  # Killed while writing 8; a copy of 9 that lacks files.
  (tmp_path / '8.orbax-checkpoint-tmp' / 'variables').mkdir(parents=True)
  shutil.copytree(tmp_path / '7', tmp_path / '9')
  shutil.rmtree(tmp_path / '9' / 'optimizer')
  with caplog.at_level('WARNING', logger='absl'):
    again = Checkpoints(tmp_path, CheckpointConfig())
  assert '8.orbax-checkpoint-tmp' in caplog.text
  assert f'{tmp_path}/9' in caplog.text
  assert again.latest_step == 7
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    '7',
    '9.incomplete',
  ]
  state, progress = again.restore(parts.wanted)
  # The steps are done and saved again.
  again.save(state, dataclasses.replace(progress, step=9))
  again.wait()
  assert again.latest_step == 9


# Orbax's reading threads outlive the event loop that they report to.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_damaged_checkpoint_is_named(tmp_path):
  parts = toy.build()
  _, checkpoints = _saved(tmp_path, parts)
  for path in (tmp_path / '7' / 'optimizer').rglob('d/*'):
    path.write_bytes(b'')
  with pytest.raises(CheckpointError, match=f'{tmp_path}/7 is damaged'):
    checkpoints.restore(parts.wanted)


def test_the_newest_and_every_so_many_are_kept(tmp_path):
  config = CheckpointConfig(keep_latest=2, keep_every_steps=4)
  _saved(tmp_path, toy.build(), steps=range(1, 8), config=config)
  kept = sorted(int(path.name) for path in tmp_path.iterdir())
  assert kept == [4, 6, 7]


def test_saving_does_not_wait_for_the_disk_nor_see_later_steps(tmp_path):
  parts = toy.build()
  checkpoints = Checkpoints(tmp_path, CheckpointConfig())
  state, batches = parts.initial(), toy.Batches()
  digest = state_module.digest(state)
  checkpoints.save(state, PROGRESS)
  # The steps consume the buffers that are being written.
  for _ in range(5):
    state, _ = parts.step(state, parts.place(next(batches)))
  checkpoints.wait()
  restored, _ = checkpoints.restore(parts.wanted)
  assert state_module.digest(restored) == digest
  assert state_module.digest(state) != digest


def test_an_empty_folder_has_no_checkpoint(tmp_path):
  parts = toy.build()
  checkpoints = Checkpoints(tmp_path / 'new', CheckpointConfig())
  assert checkpoints.latest_step is None
  with pytest.raises(CheckpointError, match='There is no checkpoint'):
    checkpoints.restore(parts.wanted)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
  (tmp_path / 'file').write_text('not a folder')
  with pytest.raises(CheckpointError, match='could not be opened.*--workdir'):
    Checkpoints(tmp_path / 'file' / 'checkpoints', CheckpointConfig())


def test_other_hosts_positions_are_refused(tmp_path, monkeypatch):
  parts = toy.build()
  two = lambda data: [data, data]
  monkeypatch.setattr(checkpoints_module, '_from_all_hosts', two)
  _, checkpoints = _saved(tmp_path, parts)
  with pytest.raises(CheckpointError, match='written by 2 hosts'):
    checkpoints.restore(parts.wanted)


# No file may grow past 10 kB, as on a disk with no more room than that.
_FULL_DISK = """
import pathlib, resource, sys
import numpy as np
from glm5_jax.training import checkpoints, config, state
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
big = np.random.randn(100_000)
folder = pathlib.Path(sys.argv[1])
made = checkpoints.Checkpoints(folder, config.CheckpointConfig())
try:
  made.save(state.TrainState(0, state.Variables({'w': big}, {}), {}),
            checkpoints.Progress(1, 1, 1, '', {}))
  made.wait()
except checkpoints.CheckpointError as error:
  print(error)
"""


def test_a_full_disk_is_one_clear_error(tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', _FULL_DISK, str(tmp_path)],
    capture_output=True,
    text=True,
    check=False,
    cwd=pathlib.Path(__file__).parents[2],
    timeout=120,
  )
  assert 'could not be written: ' in done.stdout, done.stderr
  assert 'File too large' in done.stdout
  assert '--workdir' in done.stdout
  # What is there is named as half-written, not as a checkpoint.
  assert not [path for path in tmp_path.iterdir() if path.name.isdigit()]
