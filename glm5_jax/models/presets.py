"""Named model sizes; every number with its source.

`glm5_744b` is the mission's model. `glm5_hf`, `glm51_hf` and `glm52_hf` are the
published checkpoints (their `config.json`); `tiny` runs anywhere in seconds,
`small` in an hour on two cores.
"""

import dataclasses

from glm5_jax.models import config

glm5_744b = config.ModelConfig(
  vocab_size=154_880,
  hidden_dim=7168,  # 8-way tensor parallel: 896 each.
  num_layers=88,  # 8 pipeline stages of 11.
  num_dense_layers=2,
  dense_dim=18_432,
  mla=config.MlaConfig(
    num_heads=64,
    query_latent_dim=2048,
    latent_dim=512,
    plain_dim=128,
    rope_dim=64,
    value_dim=128,
  ),
  moe=config.MoeConfig(num_experts=192, experts_per_token=6, expert_dim=2048),
  mtp=config.MtpConfig(depth=3),  # arXiv 2602.15763: three shared depths.
  max_length=202_752,
)

# zai-org/GLM-5 config.json; num_nextn_predict_layers 1 is the MTP layer.
glm5_hf = config.ModelConfig(
  vocab_size=154_880,
  hidden_dim=6144,
  num_layers=78,
  num_dense_layers=3,
  dense_dim=12_288,
  mla=config.MlaConfig(
    num_heads=64,
    query_latent_dim=2048,
    latent_dim=512,
    plain_dim=192,
    rope_dim=64,
    value_dim=256,
    rope_theta=1e6,
    latent_norm_epsilon=1e-6,
  ),
  moe=config.MoeConfig(num_experts=256, experts_per_token=8, expert_dim=2048),
  mtp=config.MtpConfig(),
  max_length=202_752,
)

# GLM-5.1: the same architecture with other weights.
glm51_hf = glm5_hf

# GLM-5.2: a million tokens of context by a larger rotary base.
glm52_hf = dataclasses.replace(
  glm5_hf,
  mla=dataclasses.replace(glm5_hf.mla, rope_theta=8e6),
  max_length=1_048_576,
)

tiny = config.ModelConfig(
  vocab_size=512,
  hidden_dim=64,
  num_layers=3,
  num_dense_layers=1,
  dense_dim=192,
  mla=config.MlaConfig(
    num_heads=4,
    query_latent_dim=32,
    latent_dim=32,
    plain_dim=16,
    rope_dim=8,
    value_dim=16,
    rope_theta=1e4,
  ),
  moe=config.MoeConfig(num_experts=8, experts_per_token=2, expert_dim=64),
  mtp=config.MtpConfig(),
  max_length=4096,
  compute_dtype='float32',
  remat='none',
  loss_chunk=64,
)

small = config.ModelConfig(
  vocab_size=16_384,
  hidden_dim=512,
  num_layers=8,
  num_dense_layers=1,
  dense_dim=1536,
  mla=config.MlaConfig(
    num_heads=8,
    query_latent_dim=256,
    latent_dim=128,
    plain_dim=64,
    rope_dim=32,
    value_dim=64,
    rope_theta=1e4,
  ),
  moe=config.MoeConfig(num_experts=16, experts_per_token=2, expert_dim=512),
  mtp=config.MtpConfig(),
  max_length=8192,
)
