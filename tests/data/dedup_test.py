import numpy as np
import pytest

from glm5_jax.data import dedup
from tests.data import corpora


def _facts(texts):
  digests = np.array([np.frombuffer(dedup.digest(t), '<u8') for t in texts])
  return digests, np.array([dedup.signature(t) for t in texts])


def _jaccard(a, b):
  def shingles(text):
    words = text.split()
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}

  return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))


def _edited(text, every):
  words = text.split(' ')
  words[::every] = ['changed'] * len(words[::every])
  return ' '.join(words)


@pytest.mark.parametrize('every', [10, 30, 100, 1000])
def test_signatures_estimate_the_jaccard_similarity(every):
  text = corpora.prose(3, 2000).replace('\n', ' ')
  other = _edited(text, every)
  estimate = np.mean(dedup.signature(text) == dedup.signature(other))
  # Three standard errors of 64 draws.
  assert abs(estimate - _jaccard(text, other)) < 3 * 0.5 / np.sqrt(64)


def test_signatures_are_the_same_in_every_process():
  # Python's own hash of a string is not.
  expected = [1668213173, 208873872, 917889465]
  assert dedup.signature('To be, or not to be?')[:3].tolist() == expected


def test_equal_texts_are_found_whatever_their_white_space():
  texts = ['a b c', 'x y z', 'a  b\nc ']
  equal, near = dedup.originals(*_facts(texts), 1.0)
  assert equal.tolist() == [0, 1, 0]
  assert near.tolist() == [0, 1, 0]


def test_near_copies_lead_to_the_first_and_others_stay():
  base = corpora.prose(5, 2000)
  texts = [corpora.prose(i, 300) for i in range(40)]
  texts[11], texts[23] = base, _edited(base, 500)
  texts[35] = base + 'one more sentence'
  equal, near = dedup.originals(*_facts(texts), 0.7)
  assert equal.tolist() == list(range(40))
  expected = list(range(40))
  expected[23] = expected[35] = 11
  assert near.tolist() == expected


def test_near_copies_are_found_in_text_without_spaces():
  rng = np.random.default_rng(0)
  text = ''.join(map(chr, rng.integers(0x4E00, 0x5000, 500)))
  other = text[:100] + '变' + text[101:]
  _, near = dedup.originals(*_facts([text, text[::-1], other]), 0.7)
  assert near.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
  'text', ['', '...', 'one', 'one two', 'Ünïcödé ünd 语']
)
def test_any_text_has_a_signature(text):
  assert dedup.signature(text).shape == (dedup.NUM_HASHES,)


def test_no_documents_have_no_copies():
  equal, near = dedup.originals(
    np.zeros((0, 2), np.uint64), np.zeros((0, dedup.NUM_HASHES), np.uint32), 0.7
  )
  assert equal.size == near.size == 0
