"""Small packed batches for tests of the model."""

import jax.numpy as jnp
import numpy as np

from glm5_jax.data.batch import Batch


def packed(
  batch_size: int, length: int, vocab_size: int, *, seed: int = 0
) -> Batch:
  """Returns rows of one to three documents with some padding at the end."""
  random = np.random.RandomState(seed)
  segments = np.sort(random.randint(1, 4, (batch_size, length)), axis=1)
  segments[:, length - length // 8 :] = 0
  positions = np.zeros_like(segments)
  for t in range(1, length):
    same = segments[:, t] == segments[:, t - 1]
    positions[:, t] = np.where(same, positions[:, t - 1] + 1, 0)
  tokens = random.randint(0, vocab_size, (batch_size, length))
  continues = np.zeros(segments.shape, bool)
  continues[:, :-1] = segments[:, 1:] == segments[:, :-1]
  continues &= segments > 0
  following = np.roll(tokens, -1, axis=1)
  return Batch(
    tokens=jnp.asarray(tokens, jnp.int32),
    targets=jnp.asarray(np.where(continues, following, 0), jnp.int32),
    weights=jnp.asarray(continues, jnp.float32),
    segment_ids=jnp.asarray(segments, jnp.int32),
    positions=jnp.asarray(positions, jnp.int32),
    source_ids=jnp.asarray(np.where(segments > 0, 0, -1), jnp.int32),
  )
