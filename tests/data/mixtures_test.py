import grain
import numpy as np
import pytest

from glm5_jax.data import mixtures
from glm5_jax.data.store import Lane

# Mission shares, the last class in two parts.
LANES = (
  Lane('code', '', 0.35),
  Lane('web', '', 0.25),
  Lane('papers', '', 0.15),
  Lane('books', '', 0.10),
  Lane('other', 'de', 0.05),
  Lane('other', '', 0.10),
)
# Typical tokens of a document, a thousand times apart.
LENGTHS = (2000, 300, 9000, 200_000, 40, 150)
# What the mission asks for: half a point over a million tokens.
SHARE_TOLERANCE = 0.005


def mixture(seed=0, lengths=LENGTHS):
  """A mixture whose ids tell lane and place: lane * 10^8 + running number."""
  rng = np.random.default_rng(seed)
  documents = []
  for lane, length in enumerate(lengths):
    sizes = rng.geometric(1 / length, 50)
    starts = np.cumsum(sizes) - sizes
    documents.append(
      grain.MapDataset.source(
        [
          np.arange(start, start + size, dtype=np.int32) + lane * 10**8
          for start, size in zip(starts, sizes, strict=True)
        ]
      ).repeat()
    )
  return mixtures.Mixture(LANES, documents)


@pytest.mark.parametrize('max_tokens', [16, 1024, 4096])
def test_shares_are_realised_whatever_the_lengths_of_documents(max_tokens):
  made = mixture()
  while made.counts.sum() < 1_000_000:
    made.draw(max_tokens)
  total = made.counts.sum()
  for lane, count in zip(LANES, made.counts, strict=True):
    assert abs(count / total - lane.share) < SHARE_TOLERANCE, lane
  # Much nearer in fact: by one piece each.
  worst = np.abs(made.counts - total * np.array([x.share for x in LANES])).max()
  assert worst <= max_tokens


def test_counts_by_class_add_up_the_parts():
  made = mixture()
  while made.counts.sum() < 100_000:
    made.draw(512)
  counts = made.class_counts()
  assert sum(counts.values()) == made.counts.sum()
  assert counts['other'] == made.counts[4] + made.counts[5]


def test_a_document_is_drawn_whole_and_in_order():
  made = mixture()
  drawn = {}
  for _ in range(3000):
    piece = made.draw(700)
    assert 1 <= len(piece.tokens) <= 700
    key = (piece.lane, piece.document)
    assert piece.start == len(drawn.get(key, ()))
    drawn[key] = np.concatenate([drawn.get(key, []), piece.tokens])
  for (lane, document), tokens in drawn.items():
    whole = made.read([lane, document, 0, 10**9]).tokens
    finished = (lane, document + 1) in drawn
    assert np.array_equal(tokens, whole[: len(tokens)])
    assert not finished or len(tokens) == len(whole)


@pytest.mark.parametrize('steps', [0, 1, 17, 400])
def test_a_restored_mixture_goes_on_the_same(steps):
  made = mixture()
  for _ in range(steps):
    made.draw(300)
  other = mixture()
  other.set_state(made.get_state())
  for _ in range(200):
    first, second = made.draw(300), other.draw(300)
    assert first.reference == second.reference
    assert np.array_equal(first.tokens, second.tokens)
  assert made.get_state() == other.get_state()


def test_a_piece_can_be_read_again():
  made = mixture()
  for _ in range(100):
    piece = made.draw(300)
    again = made.read(piece.reference)
    assert np.array_equal(piece.tokens, again.tokens)


def test_a_state_of_other_lanes_is_refused():
  state = mixture().get_state()
  state['lanes'] = ['code', 'web']
  with pytest.raises(ValueError, match=r"lanes \['code', 'web'\].*other/de"):
    mixture().set_state(state)
