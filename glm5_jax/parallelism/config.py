"""How devices are arranged, as plain data."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Sizes of the mesh axes; at most one may be -1: all devices left over.

  Attributes:
    data: replicas of everything; batches divide over it.
    fsdp: weights, gradients and optimizer state divide over it; batches too.
    expert: experts divide over it; batches too, and other weights' storage.
    context: sequences divide over it.
    tensor: heads, feed-forward widths and the vocabulary divide over it.
    stage: layers divide over it.
    rules: which table maps logical axes to mesh axes.
  """

  data: int = 1
  fsdp: int = -1
  expert: int = 1
  context: int = 1
  tensor: int = 1
  stage: int = 1
  rules: Literal['tpu_pod', 'gpu_node', 'emulated'] = 'emulated'

  def __post_init__(self) -> None:
    sizes = self.sizes
    for name, size in sizes.items():
      if size < 1 and size != -1:
        raise ValueError(
          f'MeshConfig.{name} is {size}; it must be positive, or -1 for all '
          'devices left over.'
        )
    if sum(size == -1 for size in sizes.values()) > 1:
      raise ValueError(
        f'MeshConfig has more than one axis of size -1: {sizes}. Give all '
        'but one a size.'
      )
    for name in ('context', 'stage'):
      if sizes[name] != 1:
        raise ValueError(
          f'MeshConfig.{name} is {sizes[name]}; nothing divides over this '
          'axis yet. Set it to 1.'
        )

  @property
  def sizes(self) -> dict[str, int]:
    """Axis name to size, outermost axis first."""
    return {
      'data': self.data,
      'fsdp': self.fsdp,
      'stage': self.stage,
      'expert': self.expert,
      'context': self.context,
      'tensor': self.tensor,
    }
