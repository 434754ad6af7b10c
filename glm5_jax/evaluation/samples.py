"""Text that a model goes on with, by a full forward pass a token.

There is no cache here: a few short continuations do not pay for one.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int
from jaxtyping import Key
import numpy as np

from glm5_jax.data.tokenizer import Tokenizer
from glm5_jax.models.definition import Definition
from glm5_jax.models.definition import Variables
from glm5_jax.parallelism import partitioning


@dataclasses.dataclass(frozen=True)
class Sample:
  """A prompt and what the model made of it.

  Attributes:
    prompt: text that was given.
    continuation: text that was sampled.
  """

  prompt: str
  continuation: str


def next_tokens(
  logits: Float[Array, 'B V'], key: Key[Array, ''], temperature: float
) -> Int[Array, ' B']:
  """Draws a token from each row's logits; the likeliest at temperature 0."""
  if temperature == 0:
    return jnp.argmax(logits, axis=-1)
  return jax.random.categorical(key, logits / temperature)


class Sampler:
  """Continues prompts with one compiled program."""

  def __init__(
    self,
    definition: Definition,
    mesh: jax.sharding.Mesh,
    *,
    row_length: int,
    temperature: float,
  ):
    """Sets the shape and the temperature.

    Args:
      definition: the model.
      mesh: its devices.
      row_length: tokens of prompt and continuation together.
      temperature: divisor of the logits.
    """
    self.row_length = row_length
    self._mesh = mesh

    def step(
      variables: Variables,
      tokens: Int[Array, 'B T'],
      lengths: Int[Array, ' B'],
      key: Key[Array, ''],
    ) -> Int[Array, 'B T']:
      model = definition.bind(variables)
      places = jnp.arange(row_length)[None]
      segment_ids = (places < lengths[:, None]).astype(jnp.int32)
      hidden, _ = model(tokens, segment_ids, places * segment_ids)
      last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)
      drawn = next_tokens(model.logits(last)[:, 0], key, temperature)
      is_next = places == lengths[:, None]
      return jnp.where(is_next, drawn[:, None], tokens)

    # The same layout going in and coming out: one program serves all tokens.
    self._sharding = partitioning.batch_sharding(mesh, definition.rules)
    self._step: Callable[..., Array] = jax.jit(
      step, out_shardings=self._sharding
    )

  def tokens(
    self,
    variables: Variables,
    prompts: Sequence[Sequence[int]],
    key: Key[Array, ''],
    num_tokens: int,
  ) -> list[list[int]]:
    """Returns each prompt's continuation, which may go past an end token.

    Raises:
      ValueError: a prompt and its continuation do not fit into a row.
    """
    longest = max(map(len, prompts))
    if longest + num_tokens > self.row_length:
      raise ValueError(
        f'A prompt of {longest} tokens and {num_tokens} more do not fit into '
        f'a row of {self.row_length}. Shorten one or lengthen the row.'
      )
    # As many rows as devices, so that any mesh divides them.
    num_rows = -(-len(prompts) // self._mesh.size) * self._mesh.size
    buffer = np.zeros((num_rows, self.row_length), np.int32)
    lengths = np.ones((num_rows,), np.int32)
    for row, prompt in enumerate(prompts):
      buffer[row, : len(prompt)] = prompt
      lengths[row] = len(prompt)
    tokens = jax.device_put(buffer, self._sharding)
    with jax.set_mesh(self._mesh):
      for number in range(num_tokens):
        key_now = jax.random.fold_in(key, number)
        tokens = self._step(variables, tokens, lengths + number, key_now)
    done = np.asarray(tokens)
    return [
      done[row, len(prompt) : len(prompt) + num_tokens].tolist()
      for row, prompt in enumerate(prompts)
    ]

  def __call__(
    self,
    variables: Variables,
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    *,
    key: Key[Array, ''],
    num_tokens: int,
  ) -> list[Sample]:
    """Returns prompts and continuations as text; an end token ends one."""
    continuations = self.tokens(variables, prompts, key, num_tokens)
    samples = []
    for prompt, ids in zip(prompts, continuations, strict=True):
      if tokenizer.end_id in ids:
        ids = ids[: ids.index(tokenizer.end_id)]
      samples.append(Sample(tokenizer.decode(prompt), tokenizer.decode(ids)))
    return samples
