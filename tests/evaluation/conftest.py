"""One small model for all tests of evaluation."""

import dataclasses

import jax
import pytest

from glm5_jax.models import definition
from glm5_jax.models import presets
from glm5_jax.parallelism.axis_rules import AxisRules

CONFIG = dataclasses.replace(
  presets.tiny,
  num_layers=1,
  num_dense_layers=1,
  vocab_size=512,
  mtp=None,
  loss_chunk=5,
)


@pytest.fixture(scope='package')
def model() -> definition.Definition:
  return definition.define(CONFIG, AxisRules())


@pytest.fixture(scope='package')
def variables(model: definition.Definition) -> definition.Variables:
  drawn = jax.jit(model.init)(jax.random.key(0))
  # Larger weights, so that tokens differ clearly in probability.
  louder = jax.tree.map(lambda x: 4 * x, drawn.params)
  return definition.Variables(louder, drawn.balance)
