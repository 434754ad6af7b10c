import dataclasses
import math
import pathlib

import jax
import pytest

from glm5_jax import explain
from glm5_jax import launch
from glm5_jax.models import definition
from glm5_jax.parallelism import mesh as mesh_lib
from glm5_jax.parallelism.axis_rules import RULES
from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training import optimizer as optimizer_lib
from glm5_jax.training import state as state_lib

EXPERIMENTS = pathlib.Path(__file__).parent.parent / 'experiments'


@pytest.fixture(scope='module')
def tiny():
  experiment = launch.load(str(EXPERIMENTS / 'pretrain_tiny.py'))
  mesh = MeshConfig(fsdp=2, expert=2, tensor=2)
  return dataclasses.replace(experiment, mesh=mesh)


@pytest.fixture(scope='module')
def glm5():
  return launch.load(str(EXPERIMENTS / 'pretrain_glm5.py'))


@pytest.fixture(scope='module')
def glm5_text(glm5):
  return explain.explain(glm5)


def test_layout_is_that_of_real_devices(tiny):
  """What the abstract mesh says equals what eight devices would hold."""
  sizes = explain.checked_sizes(tiny, 8)
  layout = explain.layout(tiny, sizes)
  rules = RULES[tiny.mesh.rules]
  model = definition.define(tiny.model, rules)
  optimizer = optimizer_lib.make_optimizer(
    tiny.job.optimizer, model.axes.params, tiny.job.num_steps
  )
  state = jax.jit(
    lambda: jax.tree.map(
      lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype),
      state_lib.abstract(model, optimizer),
    ),
    out_shardings=state_lib.shardings(
      mesh_lib.make_mesh(tiny.mesh), model, optimizer
    ),
  )()

  def held(tree: object) -> list[int]:
    leaves = jax.tree.leaves(tree)
    return sorted(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

  assert held(state.variables.params) == sorted(
    leaf.bytes_per_device for leaf in layout.parameters
  )
  assert held(state.opt_state) == sorted(
    leaf.bytes_per_device for leaf in layout.optimizer
  )


def test_leaves_come_largest_first_with_their_axes(tiny):
  leaves = explain.layout(tiny, explain.checked_sizes(tiny, 8)).parameters
  sizes = [leaf.num_bytes for leaf in leaves]
  assert sizes == sorted(sizes, reverse=True)
  by_path = {leaf.path: leaf for leaf in leaves}
  experts = by_path['moe_layers.ffn.gate_up']
  assert experts.spec == '- expert fsdp - tensor'
  assert experts.num_bytes == 4 * math.prod(experts.shape)
  assert experts.bytes_per_device == experts.num_bytes / 8


def test_the_mission_model_has_its_published_size(glm5_text):
  assert 'Parameters: 743.9 B in total, 39.4 B active' in glm5_text
  assert 'apart: MTP layer 8.7 B' in glm5_text


def test_the_explanation_has_every_part(glm5, glm5_text):
  for part in (
    'model.hidden_dim = 7168',
    'FLOPs per token',
    'cache           99.0 KiB',
    '= 512 devices, rules tpu_pod',
    'moe_layers.ffn.gate_up',
  ):
    assert part in glm5_text
  tokens = sum(
    s.num_steps * s.batch_size * s.sequence_length for s in glm5.job.stages
  )
  assert round(tokens / 1e12) == 27
  assert '27.0 T tokens' in glm5_text


def test_devices_are_those_of_the_mesh_or_those_at_hand(tiny, glm5):
  assert explain.num_devices(glm5) == 512
  rest = dataclasses.replace(tiny, mesh=MeshConfig(fsdp=-1))
  assert explain.num_devices(rest) == jax.device_count()


def test_a_batch_that_does_not_divide_is_refused(tiny):
  mesh = MeshConfig(fsdp=32)
  with pytest.raises(ValueError, match='batch_size is 16; it must be'):
    explain.explain(dataclasses.replace(tiny, mesh=mesh))


def test_an_array_that_does_not_divide_is_named(tiny):
  mla = dataclasses.replace(tiny.model.mla, num_heads=3)
  model = dataclasses.replace(tiny.model, mla=mla)
  with pytest.raises(ValueError, match=r"key_up.*'heads' of size 3"):
    explain.explain(dataclasses.replace(tiny, model=model))
