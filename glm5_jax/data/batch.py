"""What the model is fed."""

from typing import NamedTuple

from jaxtyping import Float32
from jaxtyping import Int32
import numpy as np


class Batch(NamedTuple):
  """Rows of packed segments; a segment is a document or a piece of one.

  Attributes:
    tokens: ids; 0 where there is padding.
    targets: the next token of the same segment; 0 where there is none.
    weights: 1 where the target counts, else 0.
    segment_ids: 1, 2, ... within the row; 0 is padding.
    positions: from 0 in each segment; 0 where there is padding.
    source_ids: index into `config.TEXT_CLASSES`; -1 where there is padding.
  """

  tokens: Int32[np.ndarray, 'B T']
  targets: Int32[np.ndarray, 'B T']
  weights: Float32[np.ndarray, 'B T']
  segment_ids: Int32[np.ndarray, 'B T']
  positions: Int32[np.ndarray, 'B T']
  source_ids: Int32[np.ndarray, 'B T']
