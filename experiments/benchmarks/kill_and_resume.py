"""Kills a tiny pre-training run again and again; it must end as if unharmed.

A reference run trains without interruption. Then the same run is killed with
SIGKILL at random moments, some of them chosen to fall inside the writing of a
checkpoint, and started again each time. At the end weights, balance biases,
optimizer state, the position in the data, the order of all batches and every
row of metrics must equal the reference's, bit for bit.

  python -m experiments.benchmarks.kill_and_resume --kills=20

About five seconds a kill on two idle cores.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags

_KILLS = flags.DEFINE_integer('kills', 20, 'how many times the run is killed')
_INSIDE_WRITES = flags.DEFINE_integer(
  'inside_writes', 5, 'how many of these while a checkpoint is being written'
)
_STEPS = flags.DEFINE_integer('steps', 400, 'steps of the run')
_DEVICES = flags.DEFINE_integer('devices', 2, 'emulated devices')
_WORKDIR = flags.DEFINE_string('workdir', None, 'default: a temporary folder')
_SEED = flags.DEFINE_integer('seed', 0, 'decides the moments of the kills')
_CHILD = flags.DEFINE_bool('child', False, 'be the run itself (internal)')

_REPORT = 'final.json'
_ORDER = 'order.jsonl'
# What the clock decides is not compared.
_TIMED = ('step_seconds', 'data_seconds', 'tokens_per_second')


def _documents(seed: int, count: int) -> tuple[str, ...]:
  """Returns texts of made-up words."""
  source = random.Random(seed)
  words = ['stone', 'river', 'light', 'under', 'seven', 'walks', 'quiet']
  return tuple(
    ' '.join(
      source.choice(words) + str(source.randrange(50)) for _ in range(120)
    )
    for _ in range(count)
  )


def configs(num_steps: int, workdir: pathlib.Path) -> tuple[Any, Any]:
  """Returns the model's and the job's config."""
  from glm5_jax.data import config as data_config
  from glm5_jax.models import config as model_config
  from glm5_jax.models import presets
  from glm5_jax.training import config as training_config

  def text_class(share: float, seed: int) -> data_config.ClassConfig:
    source = data_config.MemorySource(_documents(seed, 60))
    return data_config.ClassConfig(share, source, None)

  data = data_config.DataConfig(
    code=text_class(0.35, 1),
    web=text_class(0.25, 2),
    papers=text_class(0.15, 3),
    books=text_class(0.10, 4),
    other=text_class(0.15, 5),
    tokenizer=data_config.TrainedTokenizer(
      vocab_size=320, sample_bytes=100_000
    ),
    packing=data_config.FirstFit(),
    near_duplicate=1.0,
    heldout_share=0.05,
    cache=str(workdir.parent / 'prepared'),
  )
  model = dataclasses.replace(
    presets.tiny,
    vocab_size=320,
    num_layers=1,
    num_dense_layers=0,
    hidden_dim=32,
    moe=model_config.MoeConfig(
      num_experts=4, experts_per_token=2, expert_dim=32
    ),
  )
  first = num_steps // 2
  job = training_config.PretrainConfig(
    data=data,
    # Two lengths, so that some kills fall at the change.
    stages=(
      data_config.LengthStage(64, 8, first),
      data_config.LengthStage(128, 4, num_steps - first),
    ),
    optimizer=training_config.OptimizerConfig(
      kind='muon',
      schedule=training_config.ScheduleConfig(kind='wsd', warmup_steps=10),
    ),
    microbatches=2,
    checkpoint=training_config.CheckpointConfig(every_steps=5),
    hooks=training_config.HooksConfig(log_every_steps=3, plot=False),
  )
  return model, job


def _digest(batch: Any) -> str:
  result = hashlib.sha256()
  for array in batch:
    result.update(array.tobytes())
  return result.hexdigest()


def _train(workdir: pathlib.Path, num_steps: int) -> None:
  """Is the run: trains in `workdir` and writes what it ended with."""
  from glm5_jax.parallelism.config import MeshConfig
  from glm5_jax.training import hooks
  from glm5_jax.training import pretrain
  from glm5_jax.training import state as state_module

  class Order(hooks.Hook):
    """Notes which batch each step had."""

    def on_step(self, report: Any) -> None:
      line = {'step': report.step, 'batch': _digest(report.batch)}
      with (workdir / _ORDER).open('a') as file:
        file.write(json.dumps(line) + '\n')

  model, job = configs(num_steps, workdir)
  outcome = pretrain.run(
    model,
    MeshConfig(),
    job,
    seed=11,
    workdir=workdir,
    config_text='kill_and_resume',
    hooks=[Order()],
  )
  final = {
    'step': outcome.step,
    'tokens': outcome.tokens,
    'state': state_module.digest(outcome.state),
    'mixture': dict(outcome.token_counts),
  }
  (workdir / _REPORT).write_text(json.dumps(final))


def _start(workdir: pathlib.Path) -> subprocess.Popen[bytes]:
  """Starts the run as a program of its own."""
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': str(_DEVICES.value),
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    # Only the first start compiles.
    'JAX_COMPILATION_CACHE_DIR': str(workdir.parent / 'compiled'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }
  workdir.mkdir(parents=True, exist_ok=True)
  log = (workdir / 'log.txt').open('ab')
  return subprocess.Popen(
    [
      sys.executable,
      '-m',
      'experiments.benchmarks.kill_and_resume',
      '--child',
      '--verbosity=-1',
      f'--workdir={workdir}',
      f'--steps={_STEPS.value}',
    ],
    env=environment,
    stdout=log,
    stderr=log,
  )


def _num_rows(workdir: pathlib.Path) -> int:
  path = workdir / _ORDER
  return path.read_bytes().count(b'\n') if path.exists() else 0


def _writing(workdir: pathlib.Path) -> bool:
  """Says whether a checkpoint is half-written now."""
  folder = workdir / 'checkpoints'
  try:
    return any('tmp' in path.name for path in folder.iterdir())
  except OSError:
    return False


def _await_training(
  run: subprocess.Popen[bytes], workdir: pathlib.Path
) -> bool:
  """Waits until the run takes steps; returns whether it still does."""
  before = _num_rows(workdir)
  while run.poll() is None and _num_rows(workdir) == before:
    time.sleep(0.002)
  return run.poll() is None


def _await_write(
  run: subprocess.Popen[bytes], workdir: pathlib.Path, *, skip: int
) -> None:
  """Waits until the run begins to write a checkpoint, after `skip` others."""
  was_writing = True
  while run.poll() is None:
    is_writing = _writing(workdir)
    if is_writing and not was_writing:
      if not skip:
        return
      skip -= 1
    was_writing = is_writing
    time.sleep(0.001)


def _kill(
  run: subprocess.Popen[bytes],
  workdir: pathlib.Path,
  source: random.Random,
  *,
  inside_write: bool,
) -> str | None:
  """Kills the run; returns when it happened, or None if it had ended."""
  if not inside_write and source.random() < 0.2:
    # Anywhere from the start of Python to the first steps.
    time.sleep(source.uniform(0, 10))
  elif not _await_training(run, workdir):
    return None
  elif inside_write:
    _await_write(run, workdir, skip=source.randrange(3))
    time.sleep(source.uniform(0, 0.02))
  else:
    time.sleep(source.uniform(0, 3))
  if run.poll() is not None:
    return None
  run.kill()
  run.wait()
  where = 'inside a write' if _writing(workdir) else 'between writes'
  return f'after {_num_rows(workdir)} batches, {where}'


def _finish(workdir: pathlib.Path) -> None:
  """Lets the run come to its end."""
  run = _start(workdir)
  try:
    code = run.wait()
  finally:
    run.kill()
  if code:
    raise RuntimeError(
      f'The run failed:\n{(workdir / "log.txt").read_text()[-3000:]}'
    )


def _order(workdir: pathlib.Path) -> tuple[dict[int, str], list[str]]:
  """Returns each step's batch, and steps that saw more than one."""
  batches: dict[int, str] = {}
  faults = []
  for line in (workdir / _ORDER).read_text().splitlines():
    try:
      row = json.loads(line)
    except json.JSONDecodeError:
      # A line that a kill tore; the step was done once more.
      continue
    if batches.setdefault(row['step'], row['batch']) != row['batch']:
      faults.append(f'step {row["step"]} saw two batches')
  return batches, faults


def _rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [
    {k: v for k, v in json.loads(line).items() if k not in _TIMED}
    for line in lines
  ]


def _differences(reference: pathlib.Path, killed: pathlib.Path) -> list[str]:
  """Returns in what the two runs differ."""
  expected = json.loads((reference / _REPORT).read_text())
  found = json.loads((killed / _REPORT).read_text())
  faults = [
    f'{name}: {found[name]} is not {value}'
    for name, value in expected.items()
    if found[name] != value
  ]
  batches, doubles = _order(killed)
  faults += doubles
  if batches != _order(reference)[0]:
    faults.append('the order of batches differs')
  if _rows(killed) != _rows(reference):
    faults.append('metrics.jsonl differs')
  return faults


def _kill_until_done(
  killed: pathlib.Path, num_kills: int, num_inside: int
) -> list[str]:
  """Kills and starts the run `num_kills` times; returns the moments."""
  source = random.Random(_SEED.value)
  inside = [True] * num_inside + [False] * (num_kills - num_inside)
  source.shuffle(inside)
  moments: list[str] = []
  for inside_write in inside:
    run = _start(killed)
    try:
      moment = _kill(run, killed, source, inside_write=inside_write)
    finally:
      run.kill()
    if moment is None:
      print(f'The run ended after {len(moments)} kills: give more --steps.')
      break
    moments.append(moment)
    print(f'kill {len(moments):2d}: {moment}', flush=True)
  return moments


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {argv[1:]}.')
  folder = pathlib.Path(_WORKDIR.value or tempfile.mkdtemp()).absolute()
  if _CHILD.value:
    _train(folder, _STEPS.value)
    return
  reference, killed = folder / 'reference', folder / 'killed'
  start = time.perf_counter()
  _finish(reference)
  print(f'reference run: {time.perf_counter() - start:.1f} s', flush=True)
  moments = _kill_until_done(killed, _KILLS.value, _INSIDE_WRITES.value)
  _finish(killed)
  faults = _differences(reference, killed)
  inside = sum('inside' in moment for moment in moments)
  print(
    f'{len(moments)} kills, {inside} of them inside a write; '
    f'{time.perf_counter() - start:.0f} s in {folder}'
  )
  final = json.loads((killed / _REPORT).read_text())
  print(f'final state: {final["state"]}, {final["tokens"]} tokens')
  if faults:
    raise SystemExit('DIFFERENT from the reference:\n' + '\n'.join(faults))
  print('EQUAL to the reference, bit for bit.')


if __name__ == '__main__':
  app.run(main)
