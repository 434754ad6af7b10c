import errno
import os
import pathlib
import subprocess
import sys
import textwrap

from absl import flags
import jax.numpy as jnp
import pytest

from glm5_jax import experiment as experiment_lib
from glm5_jax import launch

ROOT = pathlib.Path(__file__).parent.parent
TINY = ROOT / 'experiments' / 'pretrain_tiny.py'


def _command(*arguments: str) -> int:
  """Runs the command line in this process; returns the exit code."""
  values = flags.FlagValues()
  launch.define_flags(values)
  values(['launch', *arguments])
  return launch.command(values)


@pytest.fixture
def config_file(tmp_path):
  """Returns a function that writes an experiment file."""

  def write(source: str) -> str:
    path = tmp_path / 'some_experiment.py'
    path.write_text(textwrap.dedent(source))
    return str(path)

  return write


def test_load_runs_get_config():
  assert launch.load(str(TINY)).name == 'pretrain_tiny'


def test_what_follows_a_colon_reaches_get_config(config_file):
  path = config_file(f"""
    import dataclasses
    from glm5_jax import launch
    def get_config(name='default'):
      tiny = launch.load({str(TINY)!r})
      return dataclasses.replace(tiny, name=name)
  """)
  assert launch.load(path).name == 'default'
  assert launch.load(f'{path}:other').name == 'other'


@pytest.mark.parametrize(
  ('source', 'message'),
  [
    ('x = 1', r'has no function get_config\(\)'),
    ('def get_config(): return 3', 'get_config returned int; it must return'),
    ('def get_config(a): return 3', "missing a required argument: 'a'"),
  ],
)
def test_load_refuses_what_is_no_experiment(config_file, source, message):
  with pytest.raises(ValueError, match=message):
    launch.load(config_file(source))


def test_a_missing_config_file_names_the_nearest():
  path = TINY.with_name('pretrain_tny.py')
  with pytest.raises(FileNotFoundError, match=r'There is: .*pretrain_tiny\.py'):
    launch.load(str(path))


@pytest.mark.parametrize(
  ('environment', 'expected'),
  [
    ({}, False),
    ({'SLURM_NTASKS': '1'}, False),
    ({'SLURM_NTASKS': '4'}, True),
    ({'OMPI_COMM_WORLD_SIZE': '2'}, True),
    ({'JAX_COORDINATOR_ADDRESS': 'host0:1234'}, True),
    ({'TPU_WORKER_HOSTNAMES': 'localhost'}, False),
    ({'TPU_WORKER_HOSTNAMES': 'host0,host1'}, True),
  ],
)
def test_the_environment_says_whether_there_are_other_hosts(
  environment, expected
):
  assert launch.is_multi_host(environment) == expected


def _with_checkpoint(workdir: pathlib.Path, text: str) -> None:
  launch.prepare_workdir(workdir, text)
  (workdir / 'checkpoints' / '10').mkdir(parents=True)


def test_a_workdir_keeps_its_config(tmp_path):
  _with_checkpoint(tmp_path / 'a' / 'b', 'seed = 0\n')
  assert (tmp_path / 'a' / 'b' / 'config.txt').read_text() == 'seed = 0\n'
  launch.prepare_workdir(tmp_path / 'a' / 'b', 'seed = 0\n')


def test_a_workdir_of_another_run_is_refused_by_its_lines(tmp_path):
  _with_checkpoint(tmp_path, 'model.hidden_dim = 8\nname = 1\nseed = 0\n')
  with pytest.raises(ValueError) as error:
    launch.prepare_workdir(
      tmp_path, 'model.hidden_dim = 9\nname = 1\nseed = 0\n'
    )
  assert '  - model.hidden_dim = 8\n  + model.hidden_dim = 9\n' in str(
    error.value
  )
  assert 'seed' not in str(error.value)
  assert 'name' not in str(error.value)


@pytest.mark.parametrize(
  'line', ['mesh.fsdp', 'job.hooks.plot', 'job.microbatches', 'model.remat']
)
def test_a_run_may_go_on_with_other_means(tmp_path, line):
  _with_checkpoint(tmp_path, f'{line} = 1\n')
  launch.prepare_workdir(tmp_path, f'{line} = 2\n')
  assert (tmp_path / 'config.txt').read_text() == f'{line} = 2\n'


def test_lines_that_may_change_are_of_fields_that_exist():
  text = experiment_lib.to_text(launch.load(str(TINY)))
  for prefix in launch.FREE_ON_RESUME:
    assert any(line.startswith(prefix) for line in text.splitlines()), prefix


def test_a_run_that_left_no_checkpoint_can_be_started_anew(tmp_path):
  launch.prepare_workdir(tmp_path, 'seed = 0\n')
  launch.prepare_workdir(tmp_path, 'seed = 1\n')
  assert (tmp_path / 'config.txt').read_text() == 'seed = 1\n'


# What users get wrong, and what each is told; all end with exit code 2.
@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ((), 'Say what to run: --config=experiments/NAME.py.'),
    (('--config=no.py',), 'There is no config file no.py.'),
    ((f'--config={TINY}',), 'Say where results go: --workdir=runs/NAME.'),
    (
      (f'--config={TINY}', '--set', 'model.num_layer=3'),
      'Did you mean model.num_layers (int)?',
    ),
    (
      (f'--config={TINY}', '--set', 'model.num_layers=three'),
      "model.num_layers: 'three' is not of type int.",
    ),
    (
      (f'--config={TINY}', '--set', 'model.num_layers'),
      'is not of the form path=value',
    ),
    (
      (f'--config={TINY}', '--set', 'model.moe.experts_per_token=9'),
      'only 8 experts are in reach',
    ),
    (
      (f'--config={TINY}', '--set', 'mesh.fsdp=3', '--explain'),
      'it must be a multiple of 3 devices',
    ),
    (
      (f'--config={TINY}', '--set', 'mesh.fsdp=16', '--workdir=/nowhere'),
      'needs 16 devices; there are 8',
    ),
    (
      (
        f'--config={TINY}',
        '--set=job.stages.0.sequence_length=8192',
        '--workdir=/nowhere',
      ),
      'LengthStage.sequence_length is 8192; the model takes at most',
    ),
    (
      (f'--config={TINY}', '--set=job.data.tokenizer.vocab_size=9999'),
      'job.data.tokenizer.vocab_size is 9999; the model has 512 rows',
    ),
    (
      (f'--config={TINY}', f'--workdir={TINY}/runs', '--set=mesh.fsdp=1'),
      'needs 1 devices; there are 8',
    ),
    ((f'--config={TINY}', f'--workdir={TINY}/x'), 'A folder is needed there.'),
    (
      (
        f'--config={TINY}',
        '--workdir={tmp}/run',
        '--set=job.data.root={tmp}/nowhere',
        '--set=job.data.cache={tmp}/cache',
      ),
      'nowhere',
    ),
    (
      (
        f'--config={TINY}',
        '--workdir={tmp}/run',
        f'--set=job.data.cache={TINY}/x',
      ),
      'A folder is needed there.',
    ),
  ],
)
def test_a_wrong_input_gets_one_message(arguments, message, tmp_path, capsys):
  code = _command(*(text.replace('{tmp}', str(tmp_path)) for text in arguments))
  output = capsys.readouterr().err
  assert message in output
  assert output.startswith('error: ') and 'Traceback' not in output
  assert code == 2


def test_a_defect_keeps_its_traceback(config_file):
  path = config_file('def get_config(): return [][1]')
  with pytest.raises(IndexError):
    _command(f'--config={path}')


def test_traceback_shows_where_a_refusal_comes_from():
  with pytest.raises(FileNotFoundError):
    _command('--config=no.py', '--traceback')


def _raised(function) -> BaseException:
  with pytest.raises(BaseException) as caught:
    function()
  return caught.value


def test_errors_of_libraries_are_no_refusals():
  error = _raised(lambda: jnp.ones((2, 3)) @ jnp.ones((2, 3)))
  assert launch.one_line(error) is None
  assert launch.one_line(_raised(lambda: int('x'))) is None


@pytest.mark.parametrize(
  ('code', 'message'),
  [
    (errno.EROFS, 'f: Read-only file system. Choose a place that can be'),
    (errno.EACCES, 'f: Permission denied. Give yourself the right'),
    (errno.ENOSPC, 'No space left on device. Free some space'),
  ],
)
def test_the_system_s_refusals_say_what_to_do(code, message):
  error = OSError(code, os.strerror(code), 'f')
  assert (launch.one_line(error) or '').startswith(message)


def test_a_full_disk_is_seen_behind_a_library_s_error():
  try:
    try:
      raise OSError(errno.ENOSPC, 'No space left on device')
    except OSError as error:
      raise RuntimeError('could not save') from error
  except RuntimeError as error:
    message = launch.one_line(error) or ''
  assert 'goes on from the last whole checkpoint' in message


def test_an_interrupt_says_how_to_go_on():
  assert 'Interrupted' in (launch.one_line(KeyboardInterrupt()) or '')


def test_the_744b_model_is_explained_by_the_command_in_little_memory():
  # Twice what is promised would be a defect of another kind than noise.
  limited = textwrap.dedent("""
    import resource, runpy, sys
    sys.argv = ['launch', *sys.argv[1:]]
    try:
      runpy.run_module('glm5_jax.launch', run_name='__main__')
    finally:
      peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
      print('peak KiB', peak)
  """)
  result = subprocess.run(
    [
      *(sys.executable, '-c', limited, '--explain'),
      f'--config={ROOT / "experiments" / "pretrain_glm5.py"}',
    ],
    capture_output=True,
    text=True,
    cwd=ROOT,
  )
  assert result.returncode == 0, result.stderr
  assert result.stderr == ''
  assert '743.9 B in total, 39.4 B active' in result.stdout
  peak = int(result.stdout.split('peak KiB')[1])
  assert peak * 1024 < 2e9


def test_a_mistyped_flag_names_the_nearest():
  values = flags.FlagValues()
  launch.define_flags(values)
  with pytest.raises(flags.UnrecognizedFlagError, match='Did you mean: config'):
    values(['launch', '--confg=x'])
