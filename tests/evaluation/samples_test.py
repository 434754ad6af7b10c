import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.config import TrainedTokenizer
from glm5_jax.evaluation import samples
from glm5_jax.parallelism import mesh as mesh_lib
from glm5_jax.parallelism.config import MeshConfig

ROW_LENGTH = 12


@pytest.fixture(scope='module')
def greedy(model):
  mesh = mesh_lib.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
  return samples.Sampler(model, mesh, row_length=ROW_LENGTH, temperature=0.0)


def test_each_token_is_the_likeliest_after_all_before_it(
  model, variables, greedy, key
):
  prompts = [[5, 9, 2], [7]]
  bound = model.bind(variables)

  @jax.jit
  def likeliest(tokens):
    ones = jnp.ones_like(tokens)
    hidden, _ = bound(tokens, ones, jnp.arange(ROW_LENGTH)[None])
    return bound.logits(hidden).argmax(-1)

  for prompt, ids in zip(
    prompts, greedy.tokens(variables, prompts, key, 4), strict=True
  ):
    row = np.zeros((1, ROW_LENGTH), np.int32)
    row[0, : len(prompt) + 4] = prompt + ids
    after = np.asarray(likeliest(row))[0]
    assert ids == after[len(prompt) - 1 : len(prompt) + 3].tolist()


def test_sampling_follows_the_logits(key):
  logits = jnp.log(jnp.array([[0.7, 0.2, 0.1]]))
  keys = jax.random.split(key, 4000)
  draw = jax.vmap(lambda k: samples.next_tokens(logits, k, 1.0)[0])
  shares = np.bincount(np.asarray(draw(keys)), minlength=3) / 4000
  # Four standard errors of a share of a half.
  np.testing.assert_allclose(shares, [0.7, 0.2, 0.1], atol=4 * 0.008)


def test_a_mesh_of_eight_continues_alike(model, variables, greedy, key):
  mesh = mesh_lib.make_mesh(MeshConfig(fsdp=-1, expert=2, tensor=2))
  sharded = samples.Sampler(model, mesh, row_length=ROW_LENGTH, temperature=0.0)
  prompts = [[5, 9, 2], [7], [1, 1]]
  one = greedy.tokens(variables, prompts, key, 4)
  assert sharded.tokens(variables, prompts, key, 4) == one


def test_text_stops_at_the_end_token(greedy, variables, key, monkeypatch):
  tokenizer = tokenizer_lib.train(
    ['some text'], TrainedTokenizer(tokenizer_lib.MIN_VOCAB_SIZE)
  )
  one, two, three = (tokenizer.encode(text).tolist() for text in '123')
  drawn = [one + [tokenizer.end_id] + two, one + two + three]
  monkeypatch.setattr(greedy, 'tokens', lambda *_: drawn)
  first, second = greedy(
    variables, [two, three], tokenizer, key=key, num_tokens=3
  )
  assert first == samples.Sample('2', '1')
  assert second == samples.Sample('3', '123')


def test_what_does_not_fit_is_refused(greedy, variables, key):
  with pytest.raises(ValueError, match='3 tokens and 10 more do not fit'):
    greedy.tokens(variables, [[1, 2, 3]], key, 10)
