"""The router's arithmetic, and public bugs that it must not repeat."""

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.models import router
from glm5_jax.models.config import MoeConfig

CONFIG = MoeConfig(num_experts=8, experts_per_token=2, expert_dim=4)
# Two float32 roundings of weights around 1.
TOLERANCE = 1e-6


def _scores(key, shape=(64, 8)):
  return jax.nn.sigmoid(jax.random.normal(key, shape))


def test_bias_decides_who_and_not_how_much(key):
  scores = _scores(key)
  bias = jnp.zeros(8).at[3].set(10.0)
  ids, weights = router.select(scores, bias, CONFIG)
  assert (ids[:, 0] == 3).all()
  chosen = jnp.take_along_axis(scores, ids, -1)
  expected = chosen / chosen.sum(-1, keepdims=True) * 2.5
  np.testing.assert_allclose(weights, expected, atol=TOLERANCE)


def test_large_biases_keep_distinct_values(key):
  """A bias around 34.5 with spread 0.04, as in a published layer 3."""
  bias = 34.5 + 0.04 * jax.random.uniform(key, (256,))
  assert len(set(np.asarray(bias).tolist())) > 250
  assert len(set(np.asarray(bias.astype(jnp.bfloat16)).tolist())) < 8
  scores = jnp.full((1, 256), 0.5)
  config = MoeConfig(num_experts=256, experts_per_token=8, expert_dim=4)
  ids, _ = router.select(scores, bias, config)
  np.testing.assert_array_equal(ids[0], np.argsort(-np.asarray(bias))[:8])


def test_weights_survive_scores_far_below_the_bias():
  """`biased - bias` is exactly zero here; the scores are not."""
  scores = jnp.full((1, 8), 1e-8).at[0, 2].set(3e-8)
  bias = jnp.full((8,), 12.0).at[2].set(12.5)
  assert (scores[0, 2] + bias[2]) - bias[2] == 0.0
  ids, weights = router.select(scores, bias, CONFIG)
  assert ids[0, 0] == 2
  np.testing.assert_allclose(weights[0], [1.875, 0.625], rtol=1e-5)


def test_underflowing_scores_give_zero_and_no_nan():
  scores = jnp.zeros((3, 8))
  value, grad = jax.value_and_grad(
    lambda s: router.select(s, jnp.zeros(8), CONFIG)[1].sum()
  )(scores)
  assert value == 0.0
  assert jnp.isfinite(grad).all()


def test_ties_go_to_the_lower_expert():
  ids, _ = router.select(jnp.full((1, 8), 0.5), jnp.zeros(8), CONFIG)
  np.testing.assert_array_equal(ids[0], [0, 1])


def test_choice_stays_within_the_best_groups(key):
  config = MoeConfig(
    num_experts=8,
    experts_per_token=2,
    expert_dim=4,
    num_groups=4,
    groups_per_token=1,
  )
  scores = _scores(key)
  ids, _ = router.select(scores, jnp.zeros(8), config)
  best = np.asarray(scores).reshape(64, 4, 2).sum(-1).argmax(-1)
  group = np.asarray(ids) // 2
  np.testing.assert_array_equal(group, best[:, None].repeat(2, 1))


def test_load_counts_real_tokens_only():
  ids = jnp.array([[0, 1], [0, 2], [3, 4]])
  load = router.load(ids, jnp.array([1.0, 1.0, 0.0]), 8)
  np.testing.assert_array_equal(load, [2, 1, 1, 0, 0, 0, 0, 0])


def test_bias_rule_evens_out_a_skewed_router(key):
  """The rule alone, on a fixed skewed router, brings max/mean below 1.1."""
  logits = jax.random.normal(key, (4096, 8)) + jnp.linspace(-1, 1, 8)[None]
  scores, bias = jax.nn.sigmoid(logits), jnp.zeros(8)

  def load_of(bias):
    ids, _ = router.select(scores, bias, CONFIG)
    return router.load(ids, jnp.ones(4096), 8)

  before = load_of(bias)
  update = jax.jit(lambda b: router.balance_update(b, load_of(b), 1e-2))
  for _ in range(100):
    bias = update(bias)
  after = load_of(bias)
  assert before.max() / before.mean() > 1.5
  assert after.max() / after.mean() < 1.1


def test_router_gradient_reaches_scores_and_not_the_bias(key):
  scores = _scores(key)

  def value(scores, bias):
    return router.select(scores, bias, CONFIG)[1][:, 0].sum()

  by_scores, by_bias = jax.grad(value, argnums=(0, 1))(scores, jnp.zeros(8))
  assert abs(by_scores).max() > 0
  assert (by_bias == 0).all()
