"""Resolves setup.cfg with all extras but hardware's; writes pins.

  python .ci/pin.py constraints.txt

Nothing is installed: pip resolves against the index and reports. CUDA wheels
are left out: torch's own metadata pins them.
"""

import json
import pathlib
import re
import subprocess
import sys

HEADER = """\
# Exact versions for `pip install -c constraints.txt -e '.[dev]'`, tested
# together. Written anew, from what setup.cfg allows, by: make constraints
"""
EXTRAS = ('dev', 'docs', 'torch')
ONE_PLATFORM = re.compile(r'^(nvidia-|cuda-|triton$)')


def resolve(extras: tuple[str, ...]) -> dict[str, str]:
  """Returns name to version of all that `.[extras]` needs."""
  command = [
    *(sys.executable, '-m', 'pip', 'install', '-qq', '--dry-run'),
    *('--ignore-installed', '--report', '-', 'setuptools>=77'),
    f'.[{",".join(extras)}]',
  ]
  output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
  packages = [item['metadata'] for item in json.loads(output)['install']]
  return {
    re.sub(r'[-_.]+', '-', package['name']).lower(): package['version']
    for package in packages
  }


def main(path: str) -> None:
  pins = resolve(EXTRAS)
  del pins['glm5-jax']
  lines = [
    # A local label (`+cpu`) names one build; other platforms have others.
    f'{name}=={version.partition("+")[0]}\n'
    for name, version in sorted(pins.items())
    if not ONE_PLATFORM.match(name)
  ]
  pathlib.Path(path).write_text(HEADER + ''.join(lines))
  print(f'{path}: {len(lines)} packages')


if __name__ == '__main__':
  main(*sys.argv[1:])
