"""Text to ids and back, by byte-level BPE.

The first ids are reserved, for good: roles, thinking and tools of the later
stages have theirs from the first day, so that their checkpoints go on from this
one's. A document that spells a reserved token is encoded as plain text.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import hashlib
import json
import os
import pathlib
import re

from jaxtyping import Int32
import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from glm5_jax.data import store as store_lib
from glm5_jax.data.config import DataConfig
from glm5_jax.data.config import TokenizerFile
from glm5_jax.data.config import TrainedTokenizer

PAD = '<|pad|>'
BEGIN = '<|begin|>'
END = '<|end|>'
_NAMED = (
  PAD,
  BEGIN,
  END,
  '<|system|>',
  '<|user|>',
  '<|assistant|>',
  '<|observation|>',
  '<|think|>',
  '<|/think|>',
  '<|tool|>',
  '<|/tool|>',
  '<|end_of_turn|>',
)
NUM_RESERVED = 64
# Index is id. Never reorder; a new token takes the place of a `reserved` one.
RESERVED: tuple[str, ...] = _NAMED + tuple(
  f'<|reserved_{i}|>' for i in range(len(_NAMED), NUM_RESERVED)
)
MIN_VOCAB_SIZE = NUM_RESERVED + 256

# Contractions; words with the space or sign before them; single digits; signs;
# line ends; spaces, the last of which goes to the word after them.
_PATTERN = (
  r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}|"
  r' ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+'
)
# Longer texts go through the library in pieces that end with a line, as it
# needs some hundred bytes of memory a token.
_PIECE_CHARS = 1 << 18


class Tokenizer:
  """A tokenizer with the ids that stand around documents.

  Attributes:
    begin_id: id before each document.
    end_id: id after each document.
  """

  def __init__(self, content: str, begin_token: str, end_token: str) -> None:
    """Reads the text of a `tokenizer.json`.

    Raises:
      ValueError: the text is no tokenizer, or lacks one of the tokens.
    """
    try:
      fields = json.loads(content)
      # The library leaves special tokens in a text alone only if they are
      # declared special, which not every file does.
      for token in fields.get('added_tokens', ()):
        token['special'] = True
      self._library = tokenizers.Tokenizer.from_str(json.dumps(fields))
    except Exception as e:  # The library raises bare Exceptions.
      raise ValueError(f'This is not a tokenizer.json: {e}') from e
    self._library.encode_special_tokens = True
    self._content = self._library.to_str(pretty=False)
    self._begin_token, self._end_token = begin_token, end_token
    self.begin_id = self.token_id(begin_token)
    self.end_id = self.token_id(end_token)

  @property
  def vocab_size(self) -> int:
    """One more than the largest id."""
    return max(self._library.get_vocab(with_added_tokens=True).values()) + 1

  @property
  def digest(self) -> str:
    """Hash of all that decides the ids of a document."""
    content = '\0'.join((self._content, self._begin_token, self._end_token))
    return hashlib.sha256(content.encode()).hexdigest()

  def token_id(self, token: str) -> int:
    """Returns the id of one token.

    Raises:
      ValueError: there is no such token.
    """
    found = self._library.token_to_id(token)
    if found is None:
      added = self._library.get_added_tokens_decoder()
      names = [added[i].content for i in sorted(added)][:12]
      raise ValueError(
        f'The tokenizer has no token {token!r}; its special tokens are '
        f'{names}. Set begin_token and end_token of TokenizerFile to the ones '
        'that stand around its documents.'
      )
    return int(found)

  def encode(self, text: str) -> Int32[np.ndarray, 'T']:
    """Returns the ids of a text, never a special one."""
    pieces = self._library.encode_batch_fast(
      list(_pieces(text)), add_special_tokens=False
    )
    ids = [np.array(piece.ids, np.int32) for piece in pieces]
    return np.concatenate(ids) if ids else np.zeros(0, np.int32)

  def encode_document(self, text: str) -> Int32[np.ndarray, 'T']:
    """Returns the ids of a text between the begin id and the end id."""
    return np.concatenate(
      [[self.begin_id], self.encode(text), [self.end_id]], dtype=np.int32
    )

  def decode(self, ids: Sequence[int] | Int32[np.ndarray, 'T']) -> str:
    """Returns the text of ids, special tokens spelled out."""
    return self._library.decode(list(ids), skip_special_tokens=False)

  def check_vocab_size(self, model_vocab_size: int) -> None:
    """Raises `ValueError` where a model has no row for some id."""
    if self.vocab_size > model_vocab_size:
      raise ValueError(
        f'The tokenizer has {self.vocab_size} ids, the model a vocab_size of '
        f'{model_vocab_size}. Set model.vocab_size to at least '
        f'{self.vocab_size}, or use a smaller tokenizer.'
      )

  def save(self, path: str | pathlib.Path) -> None:
    """Writes the `tokenizer.json`."""
    pathlib.Path(path).write_text(self._content, encoding='utf-8')


def load(source: TokenizerFile | str | pathlib.Path) -> Tokenizer:
  """Reads a `tokenizer.json`.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is no tokenizer, or lacks the begin or end token.
  """
  if not isinstance(source, TokenizerFile):
    source = TokenizerFile(str(source))
  path = pathlib.Path(source.path)
  if path.is_dir():
    path /= 'tokenizer.json'
  if not path.is_file():
    raise FileNotFoundError(
      f'There is no tokenizer at {source.path!r}. Give TokenizerFile.path a '
      'tokenizer.json as the library `tokenizers` writes it, or set '
      'DataConfig.tokenizer to TrainedTokenizer() to train one.'
    )
  try:
    content = path.read_text(encoding='utf-8')
    return Tokenizer(content, source.begin_token, source.end_token)
  except ValueError as e:
    raise ValueError(f'{path}: {e}') from e


def for_store(config: DataConfig, store: store_lib.TextStore) -> Tokenizer:
  """Returns the config's tokenizer, trained on the store where it says so.

  A trained tokenizer is kept beside the store and found there the next time.
  """
  choice = config.tokenizer
  if isinstance(choice, TokenizerFile):
    return load(choice)
  name = f'tokenizer-{choice.vocab_size}-{choice.sample_bytes}.json'
  path = store.folder / name
  if not path.exists():
    texts = sample(config, store, choice.sample_bytes)
    made = train(texts, choice)
    # Its own name, as every host of a shared folder may be here at once.
    work = path.with_suffix(f'.{os.getpid()}')
    made.save(work)
    work.replace(path)
  return load(path)


def train(texts: Iterable[str], config: TrainedTokenizer) -> Tokenizer:
  """Trains byte-level BPE; equal texts give an equal tokenizer.

  Raises:
    ValueError: the vocabulary is too small for the reserved ids and the bytes.
  """
  if config.vocab_size < MIN_VOCAB_SIZE:
    raise ValueError(
      f'TrainedTokenizer.vocab_size is {config.vocab_size}; the reserved ids '
      f'and the 256 bytes need at least {MIN_VOCAB_SIZE}.'
    )
  library = tokenizers.Tokenizer(models.BPE())
  library.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(_PATTERN), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  library.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=config.vocab_size,
    min_frequency=2,
    special_tokens=[
      tokenizers.AddedToken(token, special=True, normalized=False)
      for token in RESERVED
    ],
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  library.train_from_iterator(
    (piece for text in texts for piece in _pieces(text)), trainer
  )
  return Tokenizer(library.to_str(), BEGIN, END)


def sample(
  config: DataConfig, store: store_lib.TextStore, num_bytes: int
) -> Iterator[str]:
  """Yields training texts of about `num_bytes`, in the mixture's shares.

  A lane with less than its share gives all that it has.
  """
  for lane in store_lib.lanes(config):
    wanted = lane.share * num_bytes
    documents = store.train(lane).seed(0).shuffle()
    for index in range(len(documents)):
      if wanted <= 0:
        break
      document = documents[index]
      assert document is not None
      text = document.text[: int(wanted) + 1]
      wanted -= len(text.encode())
      yield text


def _pieces(text: str) -> Iterator[str]:
  """Yields a text in pieces of bounded size that end with a line."""
  start = 0
  while len(text) - start > _PIECE_CHARS:
    match = _LINE_END.search(text, start + _PIECE_CHARS)
    stop = match.end() if match else len(text)
    # A single line of any length must not go whole.
    stop = min(stop, start + 2 * _PIECE_CHARS)
    yield text[start:stop]
    start = stop
  if start < len(text):
    yield text[start:]


_LINE_END = re.compile(r'\n')
