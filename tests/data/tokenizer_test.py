import json
import pathlib

import numpy as np
import pytest

from glm5_jax.data import pipeline
from glm5_jax.data import preparation
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.config import TokenizerFile
from glm5_jax.data.config import TrainedTokenizer
from tests.data import corpora

TEXTS = [corpora.prose(i) for i in range(20)] + [
  corpora.code(i) for i in (1, 2)
]


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.train(TEXTS, TrainedTokenizer(600))


@pytest.mark.parametrize(
  'text',
  [
    '',
    'Plain words.',
    '  leading,\ttabs\r\n\r\n and   runs of  space \n',
    'Grüße 世界 🙂 ‏עברית',
    '\x00\x01 odd \ufffd bytes',
    'x' * 3000,
    corpora.code(7),
  ],
)
def test_any_text_comes_back_exactly(tokenizer, text):
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_reserved_ids_are_fixed(tokenizer):
  # Checkpoints hold these: the numbers must never change.
  expected = {
    '<|pad|>': 0,
    '<|begin|>': 1,
    '<|end|>': 2,
    '<|system|>': 3,
    '<|user|>': 4,
    '<|assistant|>': 5,
    '<|observation|>': 6,
    '<|think|>': 7,
    '<|/think|>': 8,
    '<|tool|>': 9,
    '<|/tool|>': 10,
    '<|end_of_turn|>': 11,
    '<|reserved_12|>': 12,
    '<|reserved_63|>': 63,
  }
  assert {t: tokenizer.token_id(t) for t in expected} == expected
  assert tokenizer.begin_id == 1 and tokenizer.end_id == 2


def test_text_that_spells_a_reserved_token_is_plain_text(tokenizer):
  text = 'a<|end|>b <|think|> <|/tool|><|pad|>'
  ids = tokenizer.encode(text)
  assert ids.min() >= tokenizer_lib.NUM_RESERVED
  assert tokenizer.decode(ids) == text
  document = tokenizer.encode_document(text)
  assert np.flatnonzero(document < tokenizer_lib.NUM_RESERVED).tolist() == [
    0,
    len(document) - 1,
  ]


def test_digits_are_single(tokenizer):
  ids = tokenizer.encode('2025 1234567')
  assert [tokenizer.decode([i]) for i in ids.tolist()] == list('2025 1234567')


def test_training_twice_gives_the_same_tokenizer(tokenizer):
  again = tokenizer_lib.train(TEXTS, TrainedTokenizer(600))
  assert again.digest == tokenizer.digest


def test_a_long_text_goes_in_pieces_and_comes_back(tokenizer):
  text = ''.join(corpora.prose(i, 20_000) for i in range(8)) + 'y' * 600_000
  assert len(text) > 2 * tokenizer_lib._PIECE_CHARS
  pieces = list(tokenizer_lib._pieces(text))
  assert len(pieces) >= 4 and ''.join(pieces) == text
  assert max(map(len, pieces)) <= 2 * tokenizer_lib._PIECE_CHARS
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_saving_and_loading_keeps_everything(tokenizer, tmp_path):
  tokenizer.save(tmp_path / 'tokenizer.json')
  for source in (tmp_path, TokenizerFile(str(tmp_path / 'tokenizer.json'))):
    loaded = tokenizer_lib.load(source)
    assert loaded.digest == tokenizer.digest
    assert loaded.vocab_size == 600
    text = corpora.prose(99)
    assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_tokens_that_a_file_does_not_call_special_are_text_too(
  tokenizer, tmp_path
):
  # The published GLM files declare think and tool tokens this way.
  tokenizer.save(tmp_path / 'tokenizer.json')
  fields = json.loads((tmp_path / 'tokenizer.json').read_text())
  for token in fields['added_tokens']:
    token['special'] = False
  (tmp_path / 'tokenizer.json').write_text(json.dumps(fields))
  loaded = tokenizer_lib.load(tmp_path)
  assert loaded.encode('<|think|>').min() >= tokenizer_lib.NUM_RESERVED


def test_an_unknown_path_says_what_to_set(tmp_path):
  with pytest.raises(FileNotFoundError, match=r'TokenizerFile\.path'):
    tokenizer_lib.load(tmp_path / 'nowhere.json')


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
  path = tmp_path / 'tokenizer.json'
  for content in ('{}', 'not json', '[]'):
    path.write_text(content)
    with pytest.raises(ValueError, match=r'tokenizer\.json: This is not a'):
      tokenizer_lib.load(path)


def test_a_missing_document_token_names_those_that_are_there(
  tokenizer, tmp_path
):
  tokenizer.save(tmp_path / 'tokenizer.json')
  with pytest.raises(ValueError, match=r"no token '<eos>'.*<\|pad\|>"):
    tokenizer_lib.load(TokenizerFile(str(tmp_path), end_token='<eos>'))


def test_a_model_with_too_few_rows_is_refused(tokenizer):
  tokenizer.check_vocab_size(600)
  tokenizer.check_vocab_size(1024)
  with pytest.raises(ValueError, match=r'600 ids.*vocab_size of 512.*at least'):
    tokenizer.check_vocab_size(512)


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
  with pytest.raises(ValueError, match='vocab_size is 300.*at least 320'):
    tokenizer_lib.train(TEXTS, TrainedTokenizer(300))


def test_the_config_s_tokenizer_is_trained_once_on_training_text(tmp_path):
  config = corpora.five_classes(tmp_path / 'corpus')
  store = preparation.prepare(config)
  first = pipeline.make_tokenizer(config)
  files = list(store.folder.glob('tokenizer-*.json'))
  assert len(files) == 1
  made = files[0].stat().st_mtime_ns
  assert pipeline.make_tokenizer(config).digest == first.digest
  assert files[0].stat().st_mtime_ns == made
  sampled = ''.join(tokenizer_lib.sample(config, store, 10**9))
  heldout = [d.text for d in pipeline.heldout_documents(config, first)]
  assert heldout and not any(text in sampled for text in heldout)


def test_the_sample_has_the_mixture_s_shares(tmp_path):
  config = corpora.five_classes(tmp_path / 'corpus', documents=40)
  store = preparation.prepare(config)
  size = 40_000
  got = sum(len(t.encode()) for t in tokenizer_lib.sample(config, store, size))
  assert size <= got <= size + 10
  assert pathlib.Path(config.cache).exists()
