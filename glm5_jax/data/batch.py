"""What the model is fed."""

from typing import Any
from typing import NamedTuple


class Batch(NamedTuple):
  """Rows of packed segments; a segment is a document or a piece of one.

  All arrays are `[B, T]`, of numpy on the host and of jax inside a step; int32,
  but for the float32 weights.

  Attributes:
    tokens: ids; 0 where there is padding.
    targets: the next token of the same segment; 0 where there is none.
    weights: 1 where the target counts, else 0.
    segment_ids: 1, 2, ... within the row; 0 is padding.
    positions: from 0 in each segment; 0 where there is padding.
    source_ids: index into `config.TEXT_CLASSES`; -1 where there is padding.
  """

  tokens: Any
  targets: Any
  weights: Any
  segment_ids: Any
  positions: Any
  source_ids: Any
