"""What general compressors need for the same text: gzip -9 and xz -9."""

from collections.abc import Iterable
import concurrent.futures
import dataclasses
import gzip
import lzma
import os

# `xz -9` looks back 64 MiB. A dictionary no larger than the text finds the same
# matches and spares the compressor 700 MB of tables a file.
_XZ_DICTIONARY = 64 * 2**20
_XZ_SMALLEST_DICTIONARY = 4096


@dataclasses.dataclass(frozen=True)
class Compression:
  """Sizes in bytes of some texts, each compressed by itself.

  Attributes:
    num_bytes: of the texts.
    gzip_bytes: by `gzip -9`, headers included.
    xz_bytes: by `xz -9`, headers included.
  """

  num_bytes: int = 0
  gzip_bytes: int = 0
  xz_bytes: int = 0

  def __add__(self, other: 'Compression') -> 'Compression':
    return Compression(
      self.num_bytes + other.num_bytes,
      self.gzip_bytes + other.gzip_bytes,
      self.xz_bytes + other.xz_bytes,
    )

  @property
  def gzip_bits_per_byte(self) -> float:
    """Bits that `gzip -9` needs for a byte of text; NaN without text."""
    return _bits_per_byte(self.gzip_bytes, self.num_bytes)

  @property
  def xz_bits_per_byte(self) -> float:
    """Bits that `xz -9` needs for a byte of text; NaN without text."""
    return _bits_per_byte(self.xz_bytes, self.num_bytes)


def _bits_per_byte(compressed: int, num_bytes: int) -> float:
  return 8 * compressed / num_bytes if num_bytes else float('nan')


def gzip_size(data: bytes) -> int:
  """Returns the bytes of `gzip -9` of `data` (without a file name)."""
  return len(gzip.compress(data, compresslevel=9, mtime=0))


def xz_size(data: bytes) -> int:
  """Returns the bytes of `xz -9` of `data`."""
  dictionary = max(
    _XZ_SMALLEST_DICTIONARY, 1 << max(len(data) - 1, 0).bit_length()
  )
  filters = [
    {
      'id': lzma.FILTER_LZMA2,
      'preset': 9,
      'dict_size': min(_XZ_DICTIONARY, dictionary),
    }
  ]
  # The command's own choice of checksum.
  check = lzma.CHECK_CRC64
  return len(lzma.compress(data, lzma.FORMAT_XZ, check, filters=filters))


def compress(text: str) -> Compression:
  """Compresses one text."""
  data = text.encode()
  return Compression(len(data), gzip_size(data), xz_size(data))


def one_by_one(texts: Iterable[tuple[str, str]]) -> dict[str, Compression]:
  """Compresses every text by itself.

  Args:
    texts: pairs of class and text.

  Returns:
    The sums of each class.
  """
  pairs = list(texts)
  # Both compressors let other threads run.
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    sizes = pool.map(compress, (text for _, text in pairs))
    sums: dict[str, Compression] = {}
    for (name, _), size in zip(pairs, sizes, strict=True):
      sums[name] = sums.get(name, Compression()) + size
  return sums


def as_archive(texts: Iterable[str]) -> Compression:
  """Compresses texts as one file, as `tar` would hand them over."""
  data = b''.join(text.encode() for text in texts)
  return Compression(len(data), gzip_size(data), xz_size(data))
