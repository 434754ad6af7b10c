"""Finds equal and nearly equal documents.

Near duplicates by MinHash over five-word shingles (Broder 1997) with banded
look-up (Leskovec et al., Mining of Massive Datasets, 3.4). Both passes are
vectorised and sort-based: 288 bytes a document on disk, and a few tens of
bytes in memory.
"""

import hashlib

import numpy as np

SHINGLE_WORDS = 5
NUM_HASHES = 64
# 16 bands of 4: a pair of Jaccard similarity 0.7 meets in some band with
# probability 0.988, one of 0.5 with 0.64, one of 0.3 with 0.12.
_NUM_BANDS = 16
_BAND_HASHES = NUM_HASHES // _NUM_BANDS

# An odd base has an inverse modulo 2**64, so the hash of a word is a difference
# of prefix sums times a power of the inverse. The mixers are splitmix64's.
_BASE = np.uint64(0x9E3779B97F4A7C15)
_BASE_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_CHUNK_SHINGLES = 4096


def digest(text: str) -> bytes:
  """Returns 16 bytes that are equal for texts equal but for white space."""
  content = ' '.join(text.split()).encode()
  return hashlib.blake2b(content, digest_size=16).digest()


def signature(text: str) -> np.ndarray:
  """Returns the uint32[NUM_HASHES] MinHash signature of a text.

  The share of equal entries of two signatures estimates the Jaccard similarity
  of the texts' shingles, with a standard error of at most 0.0625.
  """
  shingles = np.unique(_shingles(_word_hashes(text)))
  if not shingles.size:
    return np.zeros(NUM_HASHES, np.uint32)
  lowest = np.full(NUM_HASHES, np.uint64(0xFFFFFFFFFFFFFFFF))
  for start in range(0, shingles.size, _CHUNK_SHINGLES):
    chunk = shingles[start : start + _CHUNK_SHINGLES]
    hashes = chunk[:, None] * _FACTORS[None, :] + _OFFSETS[None, :]
    np.minimum(lowest, hashes.min(axis=0), out=lowest)
  high: np.ndarray = (lowest >> np.uint64(32)).astype(np.uint32)
  return high


def _mix(values: np.ndarray) -> np.ndarray:
  values = (values ^ (values >> np.uint64(30))) * _MIX_1
  values = (values ^ (values >> np.uint64(27))) * _MIX_2
  mixed: np.ndarray = values ^ (values >> np.uint64(31))
  return mixed


_FACTORS = _mix(np.arange(1, NUM_HASHES + 1, dtype=np.uint64)) | np.uint64(1)
_OFFSETS = _mix(np.arange(1001, NUM_HASHES + 1001, dtype=np.uint64))


def _powers(base: np.uint64, count: int) -> np.ndarray:
  powers = np.full(count, base)
  powers[:1] = 1
  return np.cumprod(powers, dtype=np.uint64)


def _word_hashes(text: str) -> np.ndarray:
  """Returns the uint64 hash of each word: letters and digits, lower case.

  Characters of three or four bytes in UTF-8 are words by themselves, as Chinese
  and Japanese leave no space between words.
  """
  content = np.frombuffer(text.lower().encode(), np.uint8)
  is_word = (
    ((content >= 48) & (content <= 57))
    | ((content >= 97) & (content <= 122))
    | (content >= 128)
  )
  begins = is_word & (content >= 0xE0)
  begins[:1] = is_word[:1]
  begins[1:] |= is_word[1:] & ~is_word[:-1]
  ends = is_word.copy()
  ends[:-1] &= ~is_word[1:] | begins[1:]
  starts, stops = np.flatnonzero(begins), np.flatnonzero(ends) + 1
  terms = (content.astype(np.uint64) + np.uint64(1)) * _powers(
    _BASE, content.size
  )
  sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms)])
  inverses = _powers(_BASE_INVERSE, content.size + 1)
  return _mix((sums[stops] - sums[starts]) * inverses[starts])


def _shingles(words: np.ndarray) -> np.ndarray:
  """Returns a hash for each run of SHINGLE_WORDS words, or of all."""
  size = min(SHINGLE_WORDS, words.size)
  if not size:
    return words
  count = words.size - size + 1
  total = np.zeros(count, np.uint64)
  for offset in range(size):
    total = total * _BASE + words[offset : offset + count]
  return _mix(total)


def originals(
  digests: np.ndarray, signatures: np.ndarray, threshold: float
) -> tuple[np.ndarray, np.ndarray]:
  """Finds for each document the first document that it repeats.

  Args:
    digests: uint64[documents, 2], from `digest`.
    signatures: uint32[documents, NUM_HASHES]; may be a memory map.
    threshold: estimated similarity from which two documents are one. At 1 only
      equal texts are.

  Returns:
    Two int64[documents] arrays: the first document with an equal text, and the
    first document of the chain of nearly equal ones. A document is to be kept
    where both are its own index.
  """
  equal = _first_equal(digests)
  near = equal.copy()
  if threshold < 1 and len(digests):
    for band in range(_NUM_BANDS):
      columns = slice(band * _BAND_HASHES, (band + 1) * _BAND_HASHES)
      _link_band(near, signatures, columns, threshold)
  return equal, _roots(near)


def _first_equal(digests: np.ndarray) -> np.ndarray:
  pairs = np.ascontiguousarray(digests).view([('a', 'u8'), ('b', 'u8')]).ravel()
  _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
  return np.asarray(first[inverse.ravel()], np.int64)


def _link_band(
  parents: np.ndarray, signatures: np.ndarray, columns: slice, threshold: float
) -> None:
  """Links documents that agree in a band and are similar as a whole."""
  keys = np.zeros(len(parents), np.uint64)
  for column in np.asarray(signatures[:, columns]).T:
    keys = _mix(keys * _BASE + column)
  order = np.argsort(keys, kind='stable')
  same = keys[order[1:]] == keys[order[:-1]]
  # Each document against the group's first, and against its neighbour: enough,
  # as a pair meets in many bands.
  starts = np.flatnonzero(np.concatenate([[True], ~same]))
  group = np.cumsum(np.concatenate([[True], ~same])) - 1
  for left, right in (
    (order[starts[group]][1:][same], order[1:][same]),
    (order[:-1][same], order[1:][same]),
  ):
    for start in range(0, left.size, 1 << 16):
      a, b = left[start : start + (1 << 16)], right[start : start + (1 << 16)]
      alike = np.mean(signatures[a] == signatures[b], axis=1) >= threshold
      for i, j in zip(a[alike], b[alike], strict=True):
        _unite(parents, int(i), int(j))


def _root(parents: np.ndarray, index: int) -> int:
  while parents[index] != index:
    parents[index] = parents[parents[index]]
    index = int(parents[index])
  return index


def _unite(parents: np.ndarray, i: int, j: int) -> None:
  first, second = sorted((_root(parents, i), _root(parents, j)))
  parents[second] = first


def _roots(parents: np.ndarray) -> np.ndarray:
  while True:
    above: np.ndarray = parents[parents]
    if np.array_equal(above, parents):
      return above
    parents = above
