"""Which mesh axis each logical axis of an array divides over.

Parameters and activations name logical axes; this table is the only place that
turns them into mesh axes, so a change of layout is a change of one dataclass.
"""

import dataclasses
from typing import Literal

from jax.sharding import PartitionSpec

MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class AxisRules:
  """Mesh axes of every logical axis; None leaves an axis whole.

  The batch divides over the data, fsdp and expert axes together: for all that
  is not an expert, the expert axis is one more axis of data parallelism, over
  which weights are stored in pieces too.

  Attributes:
    batch: rows of a batch.
    time: positions of a sequence.
    layers: stacked layers.
    vocab: rows of the embedding, columns of the head.
    embed: model width of a weight outside the experts.
    heads: attention heads.
    head_dim: width of a head.
    latent: a latent where a down-projection writes it.
    query_latent: the query latent where an up-projection reads it.
    kv_latent: the key/value latent where an up-projection reads it.
    ffn: feed-forward width of dense layers and shared experts.
    experts: routed experts.
    expert_embed: model width of a routed expert's weight.
    expert_ffn: feed-forward width of a routed expert.
    router_experts: experts as the router's outputs.
    pair: gate and up of a gated feed-forward.
  """

  batch: MeshAxes = ('data', 'fsdp', 'expert')
  time: MeshAxes = 'context'
  layers: MeshAxes = None
  vocab: MeshAxes = 'tensor'
  embed: MeshAxes = ('fsdp', 'expert')
  heads: MeshAxes = 'tensor'
  head_dim: MeshAxes = None
  latent: MeshAxes = 'tensor'
  query_latent: MeshAxes = ('fsdp', 'expert')
  kv_latent: MeshAxes = ('fsdp', 'expert')
  ffn: MeshAxes = 'tensor'
  experts: MeshAxes = 'expert'
  expert_embed: MeshAxes = 'fsdp'
  expert_ffn: MeshAxes = 'tensor'
  router_experts: MeshAxes = None
  pair: MeshAxes = None

  def mesh_axes(self, name: str | None) -> tuple[str, ...]:
    """Returns the mesh axes of one logical axis.

    Raises:
      ValueError: `name` is not a logical axis.
    """
    if name is None:
      return ()
    known = [field.name for field in dataclasses.fields(self)]
    if name not in known:
      raise ValueError(
        f'{name!r} is not a logical axis. Known axes: {", ".join(known)}.'
      )
    axes = getattr(self, name)
    if axes is None:
      return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)

  def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
    """Returns the partition of an array with these logical axes.

    Raises:
      ValueError: two of the axes divide over one mesh axis.
    """
    owners: dict[str, str | None] = {}
    parts: list[MeshAxes] = []
    for name in axes:
      mesh_axes = self.mesh_axes(name)
      for mesh_axis in mesh_axes:
        if mesh_axis in owners:
          raise ValueError(
            f'Logical axes {owners[mesh_axis]!r} and {name!r} of one array '
            f'{axes} both divide over mesh axis {mesh_axis!r}. Map one of '
            'them elsewhere or to None in AxisRules.'
          )
        owners[mesh_axis] = name
      parts.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return PartitionSpec(*parts)


# On a pod every link is fast, so all storage is in pieces. Inside a GPU node
# the latents are kept whole: gathering them costs a kernel launch each time and
# saves little memory.
RULES: dict[Literal['tpu_pod', 'gpu_node', 'emulated'], AxisRules] = {
  'tpu_pod': AxisRules(),
  'gpu_node': AxisRules(latent=None),
  'emulated': AxisRules(),
}
