"""BUILD.md, `.ci/run` and the workflow name the same commands."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def _commands(path: str) -> list[str]:
  text = (ROOT / path).read_text()
  return re.findall(r'^make [a-z-]+', text, flags=re.MULTILINE)


def test_build_md_lists_what_ci_runs():
  block = (ROOT / 'BUILD.md').read_text().split('```bash\n')[1]
  block = block.split('```')[0]
  assert re.findall(r'^make [a-z-]+', block, re.MULTILINE) == _commands(
    '.ci/run'
  )
  assert _commands('.ci/run') == [
    'make check',
    'make test',
    'make test-slow',
    'make docs',
  ]


def test_the_workflow_runs_ci_run_and_nothing_else():
  text = (ROOT / '.github' / 'workflows' / 'ci.yml').read_text()
  assert re.findall(r'- run: (.*)', text) == ['bash .ci/run']


def test_every_command_is_a_target():
  targets = re.findall(
    r'^([a-z-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE
  )
  mentioned = set()
  for path in ('BUILD.md', '.ci/run', 'experiments/README.md', 'Makefile'):
    text = (ROOT / path).read_text()
    mentioned |= set(re.findall(r'(?:`|^)make ([a-z-]+)', text, re.MULTILINE))
  assert mentioned <= set(targets)


def test_pins_meet_what_setup_cfg_asks_for():
  pins = (ROOT / 'constraints.txt').read_text().splitlines()
  names = [line.split('==')[0] for line in pins if not line.startswith('#')]
  assert all(re.fullmatch(r'[a-z0-9-]+==[\w.]+', p) for p in pins[2:])
  section = (ROOT / 'setup.cfg').read_text().split('[options.packages')[0]
  asked = re.findall(r'^(?:\w+ = )?\s*([\w-]+)[>=\[]', section, re.MULTILINE)
  wanted = {name.lower().replace('_', '-') for name in asked}
  known = {'jax', 'grain', 'optax', 'flax', 'ruff', 'mkdocs'}
  assert known <= wanted
  assert known <= set(names)


@pytest.fixture
def checkout(tmp_path):
  """A folder with what set-up reads, and no Python to be found."""
  (tmp_path / '.ci').mkdir()
  for name in ('find-python', 'setup'):
    shutil.copy(ROOT / '.ci' / name, tmp_path / '.ci' / name)
  for name in ('setup.cfg', 'pyproject.toml', 'constraints.txt'):
    shutil.copy(ROOT / name, tmp_path / name)
  return tmp_path


def _run(checkout: pathlib.Path, *command: str, **environment: str):
  tools = checkout / 'bin'
  tools.mkdir(exist_ok=True)
  for tool in ('bash', 'dirname', 'touch', 'rm', 'cat', 'env'):
    link = tools / tool
    if not link.exists():
      link.symlink_to(shutil.which(tool) or tool)
  return subprocess.run(
    command,
    cwd=checkout,
    env={'PATH': str(tools), 'HOME': str(checkout), **environment},
    capture_output=True,
    text=True,
  )


def test_without_a_python_the_message_says_what_to_install(checkout):
  # An interpreter that is there but does not run, as pyenv leaves them.
  shim = checkout / 'bin' / 'python3.12'
  shim.parent.mkdir()
  shim.write_text('#!/bin/sh\nexit 127\n')
  shim.chmod(0o755)
  # A place to look in that a machine may have: none of it may serve here.
  result = _run(checkout, 'bash', '.ci/setup', 'run', PYTHON='python3.12')
  assert result.returncode == 1
  assert 'python3.12 (does not run)' in result.stderr
  assert 'apt install python3.12' in result.stderr
  assert not (checkout / '.venv').exists()


def test_a_python_in_pyenv_s_folder_is_found(checkout):
  folder = checkout / 'pyenv' / 'versions' / '3.12.9' / 'bin'
  folder.mkdir(parents=True)
  (folder / 'python3').symlink_to(os.path.realpath(sys.executable))
  result = _run(
    checkout, 'bash', '.ci/find-python', PYENV_ROOT=str(checkout / 'pyenv')
  )
  assert result.returncode == 0, result.stderr


def test_a_finished_set_up_is_not_repeated(checkout):
  venv = checkout / '.venv'
  (venv / 'bin').mkdir(parents=True)
  (venv / 'bin' / 'python').symlink_to(os.path.realpath(sys.executable))
  for name in ('setup.cfg', 'pyproject.toml', 'constraints.txt'):
    os.utime(checkout / name, (1, 1))
  (venv / 'installed-dev').touch()
  result = _run(checkout, 'bash', '.ci/setup', 'dev')
  assert (result.returncode, result.stdout, result.stderr) == (0, '', '')
