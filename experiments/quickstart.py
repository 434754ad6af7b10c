"""A small GLM-5 learns real text on two cores in about ten minutes.

The large model's parts at a small size: latent attention, eight routed experts
and a shared one, Muon, the five-way mixture, two sequence lengths. Multi-token
prediction is off: it would cost a third of the ten minutes.

  make quickstart
"""

import dataclasses

from glm5_jax.data import presets as data_presets
from glm5_jax.data.config import LengthStage
from glm5_jax.data.config import TrainedTokenizer
from glm5_jax.experiment import Experiment
from glm5_jax.models.config import MlaConfig
from glm5_jax.models.config import ModelConfig
from glm5_jax.models.config import MoeConfig
from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training.config import CheckpointConfig
from glm5_jax.training.config import HooksConfig
from glm5_jax.training.config import OptimizerConfig
from glm5_jax.training.config import PretrainConfig
from glm5_jax.training.config import ScheduleConfig

VOCAB_SIZE = 4096


def get_config() -> Experiment:
  """Returns the experiment."""
  model = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_dim=192,
    num_layers=4,
    num_dense_layers=1,
    dense_dim=512,
    mla=MlaConfig(
      num_heads=4,
      query_latent_dim=96,
      latent_dim=64,
      plain_dim=32,
      rope_dim=16,
      value_dim=48,
      rope_theta=1e4,
    ),
    moe=MoeConfig(
      num_experts=8,
      experts_per_token=2,
      expert_dim=128,
      bias_update_rate=1e-2,
    ),
    max_length=1024,
    compute_dtype='float32',
    remat='none',
  )
  data = dataclasses.replace(
    data_presets.registry_corpus(),
    tokenizer=TrainedTokenizer(vocab_size=VOCAB_SIZE),
  )
  return Experiment(
    name='quickstart',
    model=model,
    mesh=MeshConfig(),
    job=PretrainConfig(
      data=data,
      stages=(
        LengthStage(sequence_length=256, batch_size=16, num_steps=210),
        LengthStage(sequence_length=512, batch_size=8, num_steps=40),
      ),
      optimizer=OptimizerConfig(
        kind='muon',
        learning_rate=2e-3,
        embedding_learning_rate=1e-2,
        muon_learning_rate=0.02,
        schedule=ScheduleConfig(kind='wsd', warmup_steps=10, decay_share=0.4),
      ),
      checkpoint=CheckpointConfig(every_steps=100),
      hooks=HooksConfig(log_every_steps=5, evaluate_every_steps=100),
    ),
  )
