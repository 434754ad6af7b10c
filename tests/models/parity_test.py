"""Equal numbers to the published architecture on small random checkpoints.

The golden logits come from transformers 5.24.0 (`GlmMoeDsaForCausalLM`, eager,
float32). Its queries choose the best `index_topk` keys, which are all keys
until the sequence is longer than that: so far dense attention must agree.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from glm5_jax.models import definition
from glm5_jax.models.config import MlaConfig
from glm5_jax.models.config import ModelConfig
from glm5_jax.models.config import MoeConfig
from glm5_jax.parallelism.axis_rules import AxisRules

GOLDEN = pathlib.Path(__file__).parent / 'golden'
# The float64 reference itself stays within 4e-5 of these logits, whose largest
# is about 6.
TOLERANCE = 1e-4


def _config(published: dict) -> ModelConfig:
  return ModelConfig(
    vocab_size=published['vocab_size'],
    hidden_dim=published['hidden_size'],
    num_layers=published['num_hidden_layers'],
    num_dense_layers=published['first_k_dense_replace'],
    dense_dim=published['intermediate_size'],
    mla=MlaConfig(
      num_heads=published['num_attention_heads'],
      query_latent_dim=published['q_lora_rank'],
      latent_dim=published['kv_lora_rank'],
      plain_dim=published['qk_nope_head_dim'],
      rope_dim=published['qk_rope_head_dim'],
      value_dim=published['v_head_dim'],
      rope_theta=published['rope_parameters']['rope_theta'],
      latent_norm_epsilon=1e-6,
    ),
    moe=MoeConfig(
      num_experts=published['n_routed_experts'],
      experts_per_token=published['num_experts_per_tok'],
      expert_dim=published['moe_intermediate_size'],
      routed_scale=published['routed_scaling_factor'],
    ),
    norm_epsilon=published['rms_norm_eps'],
    compute_dtype='float32',
    remat='none',
  )


def _attention(tensors, prefix, config):
  mla = config.mla
  N, O, R = mla.num_heads, mla.plain_dim, mla.latent_dim
  get = lambda name: tensors[f'{prefix}.{name}.weight']
  kv_down = get('kv_a_proj_with_mqa')
  kv_up = get('kv_b_proj').reshape(N, O + mla.value_dim, R)
  return {
    'query_down': get('q_a_proj').T,
    'query_norm': {'scale': get('q_a_layernorm')},
    'query_up': get('q_b_proj').T.reshape(-1, N, mla.head_dim),
    'kv_down': kv_down[:R].T,
    'key_rope': kv_down[R:].T,
    'kv_norm': {'scale': get('kv_a_layernorm')},
    'key_up': kv_up[:, :O].transpose(2, 0, 1),
    'value_up': kv_up[:, O:].transpose(2, 0, 1),
    'out': get('o_proj').T.reshape(N, mla.value_dim, -1),
  }


def _gated(tensors, prefix):
  gate, up, down = (
    tensors[f'{prefix}.{name}_proj.weight'].T for name in ('gate', 'up', 'down')
  )
  return {'gate_up': np.stack([gate, up], axis=1), 'down': down}


def _ffn(tensors, prefix, config, has_experts):
  if not has_experts:
    return _gated(tensors, prefix), None
  experts = [
    _gated(tensors, f'{prefix}.experts.{e}')
    for e in range(config.moe.num_experts)
  ]
  params = jax.tree.map(lambda *x: np.stack(x), *experts)
  params['router'] = tensors[f'{prefix}.gate.weight'].T
  params['shared'] = _gated(tensors, f'{prefix}.shared_experts')
  return params, tensors[f'{prefix}.gate.e_score_correction_bias']


def _variables(tensors, config):
  dense, moe, biases = [], [], []
  for layer in range(config.num_layers):
    prefix = f'model.layers.{layer}'
    has_experts = layer >= config.num_dense_layers
    ffn, bias = _ffn(tensors, f'{prefix}.mlp', config, has_experts)
    norm = lambda name, prefix=prefix: {
      'scale': tensors[f'{prefix}.{name}.weight']
    }
    (moe if has_experts else dense).append(
      {
        'attention_norm': norm('input_layernorm'),
        'attention': _attention(tensors, f'{prefix}.self_attn', config),
        'ffn_norm': norm('post_attention_layernorm'),
        'ffn': ffn,
      }
    )
    if has_experts:
      biases.append(bias)
  stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
  return definition.Variables(
    params={
      'embedding': jnp.asarray(tensors['model.embed_tokens.weight']),
      'dense_layers': stack(dense),
      'moe_layers': stack(moe),
      'final_norm': {'scale': jnp.asarray(tensors['model.norm.weight'])},
      'head': jnp.asarray(tensors['lm_head.weight'].T),
    },
    balance={'moe_layers': {'ffn': {'bias': jnp.stack(biases)}}},
  )


@pytest.mark.parametrize('name', ['glm5_tiny', 'glm52_tiny'])
def test_logits_equal_the_published_architecture(name):
  published = json.loads((GOLDEN / name / 'config.json').read_text())
  golden = np.load(GOLDEN / name / 'golden.npz')
  config = _config(published)
  made = definition.define(config, AxisRules())
  variables = _variables(load_file(GOLDEN / name / 'model.safetensors'), config)
  assert jax.tree.map(jnp.shape, variables) == jax.tree.map(
    lambda x: x.shape, made.abstract
  )
  length = published['index_topk']
  ids = jnp.asarray(golden['input_ids'])
  ones = jnp.ones_like(ids)

  @jax.jit
  def logits(variables):
    model = made.bind(variables)
    hidden, _ = model(ids, ones, jnp.asarray(golden['position_ids']))
    return model.logits(hidden)

  with jax.default_matmul_precision('highest'):
    got = np.asarray(logits(variables))
  error = np.abs(got - golden['logits'])
  assert error[:, :length].max() < TOLERANCE
  # Beyond, the published model attends to fewer keys: the comparison can fail.
  assert error[:, length:].max() > 100 * TOLERANCE
