"""Logical axes to mesh axes."""

import dataclasses

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec
import pytest

from glm5_jax.models import definition
from glm5_jax.models import presets
from glm5_jax.parallelism import partitioning
from glm5_jax.parallelism.axis_rules import RULES
from glm5_jax.parallelism.axis_rules import AxisRules

POD = {
  'data': 1,
  'fsdp': 32,
  'stage': 1,
  'expert': 4,
  'context': 1,
  'tensor': 8,
}


def test_each_axis_maps_to_its_mesh_axes():
  spec = AxisRules().spec(('batch', 'time', None, 'heads'))
  assert spec == PartitionSpec(
    ('data', 'fsdp', 'expert'), 'context', None, 'tensor'
  )


def test_two_axes_on_one_mesh_axis_are_refused():
  with pytest.raises(ValueError, match="'heads' and 'ffn'.*'tensor'"):
    AxisRules().spec(('heads', 'ffn'))
  AxisRules(ffn=None).spec(('heads', 'ffn'))


def test_unknown_axes_are_refused():
  with pytest.raises(ValueError, match="'head' is not a logical axis"):
    AxisRules().spec(('head',))


@pytest.mark.parametrize('rules', list(RULES))
@pytest.mark.parametrize('preset', ['glm5_744b', 'glm5_hf', 'glm52_hf'])
def test_every_large_leaf_of_the_large_models_is_in_pieces(preset, rules):
  """On a 1024-chip pod no leaf over 1 MiB lies whole on a device."""
  config = getattr(presets, preset)
  made = definition.define(config, RULES[rules])
  mesh = AbstractMesh(tuple(POD.values()), tuple(POD))
  shardings = partitioning.shardings(
    mesh, RULES[rules], made.axes, made.abstract
  )
  for (path, leaf), sharding in zip(
    jax.tree_util.tree_leaves_with_path(made.abstract),
    jax.tree.leaves(shardings),
    strict=True,
  ):
    # Stacked norms are counted by the layer: a layer's scale is 28 KB.
    layers = leaf.shape[0] if leaf.ndim > 1 else 1
    if leaf.size * 4 // layers >= 2**20:
      piece = sharding.shard_shape(leaf.shape)
      assert piece != leaf.shape, jax.tree_util.keystr(path)


def test_widths_that_do_not_divide_are_named():
  config = dataclasses.replace(
    presets.tiny,
    mla=dataclasses.replace(presets.tiny.mla, num_heads=3),
  )
  made = definition.define(config, AxisRules())
  mesh = AbstractMesh((1, 2, 1, 1, 1, 2), tuple(POD))
  with pytest.raises(ValueError, match=r"key_up.*'heads' of size 3"):
    partitioning.shardings(mesh, AxisRules(), made.axes, made.abstract)
