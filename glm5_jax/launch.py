"""Runs an experiment.

  python -m glm5_jax.launch --config=experiments/x.py --workdir=runs/x \
      --set model.num_layers=8 --set job.stages.0.num_steps=10

In a notebook: `launch.run(experiment, workdir)`, no flags needed.
"""

from collections.abc import Mapping
import difflib
import errno
import importlib.util
import inspect
import os
import pathlib
import sys
import traceback
from typing import Any

from absl import app
from absl import flags
from absl import logging
import jax

from glm5_jax import experiment as experiment_lib
from glm5_jax import explain
from glm5_jax import overrides
from glm5_jax.experiment import Experiment
from glm5_jax.training.config import PretrainConfig

# What may differ when a run goes on: where and how numbers are computed and
# what is shown of them, but not which numbers.
FREE_ON_RESUME = (
  'mesh.',
  'job.checkpoint.',
  'job.hooks.',
  'job.microbatches ',
  'job.data.prefetch ',
  'model.loss_chunk ',
  'model.moe.transport ',
  'model.remat ',
)

# Set by launchers that start one process a host; see `jax.distributed`.
_MULTI_HOST_COUNTS = ('SLURM_NTASKS', 'OMPI_COMM_WORLD_SIZE')
_MULTI_HOST_NAMES = ('JAX_COORDINATOR_ADDRESS', 'MEGASCALE_COORDINATOR_ADDRESS')

# The operating system's word for what a user can mend.
_USER_ERRNOS = {
  errno.EACCES: 'Give yourself the right to it or choose another place.',
  errno.EDQUOT: 'Free some space or choose another disk.',
  errno.EEXIST: 'Choose another place.',
  errno.EISDIR: 'A file is needed there.',
  errno.ENOENT: 'Check the path.',
  errno.ENOSPC: 'Free some space or choose another disk.',
  errno.ENOTDIR: 'A folder is needed there.',
  errno.EPERM: 'Give yourself the right to it or choose another place.',
  errno.EROFS: 'Choose a place that can be written to.',
}
_GO_ON = 'The same command goes on from the last whole checkpoint.'


def load(config: str) -> Experiment:
  """Returns the experiment of a file that has a `get_config` function.

  Args:
    config: path of the file; what follows a colon is passed to `get_config`.

  Raises:
    FileNotFoundError: no such file.
    ValueError: the file has no `get_config`, or it returns something else.
  """
  name, colon, argument = config.partition(':')
  path = pathlib.Path(name)
  if not path.is_file():
    files = sorted(str(file) for file in path.parent.glob('*.py'))
    near = difflib.get_close_matches(str(path), files, n=1) or files
    hint = f' There is: {", ".join(near)}.' if near else ''
    raise FileNotFoundError(f'There is no config file {name}.{hint}')
  spec = importlib.util.spec_from_file_location(path.stem, path)
  if spec is None or spec.loader is None:
    raise ValueError(f'{name} is no Python file; its name must end in .py.')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  get_config = getattr(module, 'get_config', None)
  if get_config is None:
    raise ValueError(f'{name} has no function get_config().')
  arguments = (argument,) if colon else ()
  try:
    inspect.signature(get_config).bind(*arguments)
  except TypeError as error:
    raise ValueError(f'{name}: get_config: {error}.') from None
  experiment = get_config(*arguments)
  if not isinstance(experiment, Experiment):
    raise ValueError(
      f'{name}: get_config returned {type(experiment).__name__}; it must '
      'return an Experiment.'
    )
  return experiment


def is_multi_host(environment: Mapping[str, str]) -> bool:
  """Says whether the environment is that of one process among several."""
  if any(int(environment.get(name, 1)) > 1 for name in _MULTI_HOST_COUNTS):
    return True
  if any(name in environment for name in _MULTI_HOST_NAMES):
    return True
  return ',' in environment.get('TPU_WORKER_HOSTNAMES', '')


def differing_lines(old: str, new: str) -> list[str]:
  """Returns `path = value` lines that two configs do not share, old first."""
  before, after = old.splitlines(), new.splitlines()
  return [f'- {line}' for line in before if line not in after] + [
    f'+ {line}' for line in after if line not in before
  ]


def prepare_workdir(workdir: pathlib.Path, text: str) -> None:
  """Makes the workdir and writes the config's text to `config.txt` in it.

  Raises:
    ValueError: the workdir belongs to a run with another config.
    OSError: it cannot be written to.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / 'config.txt'
  # Without a checkpoint there is nothing to go on with.
  if path.exists() and any(workdir.glob('checkpoints/*')):
    changes = [
      line
      for line in differing_lines(path.read_text(), text)
      if not line[2:].startswith(FREE_ON_RESUME)
    ]
    if changes:
      listed = '\n'.join(f'  {line}' for line in changes)
      raise ValueError(
        f'{workdir} holds a run with another config (- there, + now):\n'
        f'{listed}\nGive this run another --workdir, or undo the changes to go '
        'on with that one.'
      )
  if jax.process_index() == 0:
    # Renaming is atomic: whoever reads sees the old text or the new.
    partial = path.with_suffix('.partial')
    partial.write_text(text)
    partial.replace(path)


def run(
  experiment: Experiment, workdir: str | os.PathLike[str]
) -> dict[str, Any] | None:
  """Runs the experiment's job, or goes on with it.

  Args:
    experiment: what to run.
    workdir: where everything that it makes goes.

  Returns:
    What the job reports; None if it was told to stop before its end.

  Raises:
    ValueError: the experiment does not fit the devices or the workdir.
    OSError: the workdir cannot be written to.
  """
  # Before the workdir is touched.
  explain.checked_sizes(experiment, jax.device_count())
  folder = pathlib.Path(workdir)
  text = experiment_lib.to_text(experiment)
  prepare_workdir(folder, text)
  match experiment.job:
    case PretrainConfig() as job:
      # Only this job's libraries are loaded, and none for `--explain`.
      from glm5_jax.evaluation import pretraining

      return pretraining.run(
        experiment.model,
        experiment.mesh,
        job,
        seed=experiment.seed,
        workdir=folder,
        config_text=text,
      )


def one_line(error: BaseException) -> str | None:
  """Returns what to tell the user of an error; None if it is a defect.

  What this project's own code raises on purpose, and what the operating system
  refuses, is the user's to mend and needs no traceback.
  """
  if isinstance(error, KeyboardInterrupt):
    return f'Interrupted. {_GO_ON}'
  if _is_ours(error):
    return str(error)
  chain: list[BaseException] = [error]
  while following := chain[-1].__cause__ or chain[-1].__context__:
    chain.append(following)
  if any('No space left on device' in str(link) for link in chain):
    return f'No space left on device. {_USER_ERRNOS[errno.ENOSPC]} {_GO_ON}'
  if isinstance(error, OSError) and error.errno in _USER_ERRNOS:
    place = '' if error.filename is None else f'{error.filename}: '
    reason = error.strerror or str(error)
    return f'{place}{reason}. {_USER_ERRNOS[error.errno]}'
  return None


def _is_ours(error: BaseException) -> bool:
  """Says whether a `raise` of this package made the error."""
  frames = traceback.extract_tb(error.__traceback__)
  if not frames:
    return False
  package = pathlib.Path(__file__).resolve().parent
  is_inside = package in pathlib.Path(frames[-1].filename).resolve().parents
  # Otherwise compiled code raised, called from this package.
  return is_inside and (frames[-1].line or '').startswith('raise')


def define_flags(values: flags.FlagValues) -> None:
  """Declares the command line."""
  flags.DEFINE_string(
    'config',
    None,
    'The experiment file; `file.py:x` calls get_config("x").',
    flag_values=values,
  )
  flags.DEFINE_string(
    'workdir', None, 'Folder for all that the run writes.', flag_values=values
  )
  flags.DEFINE_multi_string(
    'set', [], 'path=value of a config field; may repeat.', flag_values=values
  )
  flags.DEFINE_bool(
    'explain', False, 'Print sizes, costs, layout; run nothing.', values
  )
  flags.DEFINE_integer(
    'cpu_devices',
    None,
    'Emulate that many devices on the CPU.',
    1,
    flag_values=values,
  )
  flags.DEFINE_enum(
    'distributed',
    'auto',
    ['auto', 'on', 'off'],
    'Whether this is one process of several; auto: ask the environment.',
    flag_values=values,
  )
  flags.DEFINE_bool(
    'traceback', False, 'Show the traceback of every error.', values
  )


def command(values: flags.FlagValues) -> int:
  """Does what the parsed flags say; returns the exit code."""
  try:
    if values.cpu_devices:
      jax.config.update('jax_platforms', 'cpu')
      jax.config.update('jax_num_cpu_devices', values.cpu_devices)
    if not values.config:
      raise ValueError('Say what to run: --config=experiments/NAME.py.')
    experiment = overrides.apply(load(values.config), values.set)
    if values.explain:
      print(explain.explain(experiment))
      return 0
    if not values.workdir:
      raise ValueError('Say where results go: --workdir=runs/NAME.')
    if values.distributed == 'on' or (
      values.distributed == 'auto' and is_multi_host(os.environ)
    ):
      jax.distributed.initialize()
    run(experiment, values.workdir)
  except (Exception, KeyboardInterrupt) as error:
    message = one_line(error)
    if message is None or values.traceback:
      raise
    print(f'error: {message}', file=sys.stderr)
    return 130 if isinstance(error, KeyboardInterrupt) else 2
  return 0


def main(arguments: list[str]) -> None:
  """Runs the command line that absl has parsed."""
  if len(arguments) > 1:
    raise app.UsageError(f'Unexpected arguments: {" ".join(arguments[1:])}')
  if not flags.FLAGS['verbosity'].present:
    # Libraries report on themselves at INFO.
    logging.set_verbosity(logging.WARNING)
  sys.exit(command(flags.FLAGS))


if __name__ == '__main__':
  define_flags(flags.FLAGS)
  app.run(main)
