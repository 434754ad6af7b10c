"""The pre-training loss as a step's objective."""

import dataclasses
from typing import Any

from jaxtyping import Array

from glm5_jax.models import losses
from glm5_jax.models.definition import Definition
from glm5_jax.models.definition import Variables


@dataclasses.dataclass(frozen=True)
class Pretraining:
  """Next-token loss, MTP loss and z-loss of a batch of packed text.

  Attributes:
    definition: the model.
    z_loss: weight of the squared log-partition.
  """

  definition: Definition
  z_loss: float

  def totals(self, batch: Any) -> losses.LossTotals:
    """Returns the divisors of the whole batch."""
    return losses.loss_totals(batch, self.definition.config)

  def loss(
    self, variables: Variables, batch: Any, totals: losses.LossTotals
  ) -> tuple[Array, losses.LossMetrics]:
    """Returns a microbatch's share of the loss, and its parts."""
    model = self.definition.bind(variables)
    return losses.pretraining_loss(model, batch, totals, z_loss=self.z_loss)

  def next_balance(self, balance: Any, parts: losses.LossMetrics) -> Any:
    """Returns the balance biases after a step."""
    return losses.updated_balance(
      balance, parts.expert_load, self.definition.config
    )
