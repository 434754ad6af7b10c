import pathlib
import shutil
import subprocess

import pytest

from glm5_jax.evaluation import compression

# Source code, long enough for the compressors to look back.
TEXT = pathlib.Path(compression.__file__).read_text() * 3


@pytest.mark.parametrize('text', ['', 'x', 'naïve ☃', TEXT])
@pytest.mark.parametrize('program', ['gzip', 'xz'])
def test_sizes_are_those_of_the_command(program, text):
  if shutil.which(program) is None:
    pytest.skip(f'{program} is not installed')
  size = getattr(compression, f'{program}_size')(text.encode())
  result = subprocess.run(
    [program, '-9', '--stdout'], input=text.encode(), capture_output=True
  )
  # gzip's compressors differ by a few bytes from version to version.
  assert size == pytest.approx(len(result.stdout), rel=0.01, abs=8)


def test_each_file_is_compressed_by_itself():
  texts = [('code', TEXT), ('code', TEXT), ('web', 'hello')]
  sums = compression.one_by_one(texts)
  once = compression.compress(TEXT)
  assert sums['code'] == once + once
  assert sums['web'] == compression.compress('hello')
  assert sums['web'].num_bytes == 5


def test_an_archive_shares_what_its_files_have_in_common():
  once = compression.compress(TEXT)
  archive = compression.as_archive([TEXT] * 4)
  assert archive.num_bytes == 4 * once.num_bytes
  assert archive.xz_bytes < 1.2 * once.xz_bytes


def test_bits_per_byte():
  size = compression.Compression(num_bytes=16, gzip_bytes=4, xz_bytes=2)
  assert size.gzip_bits_per_byte == 2.0
  assert size.xz_bits_per_byte == 1.0
