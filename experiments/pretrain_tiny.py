"""Pre-training of a toy on this repository's own files, to see that all works.

Half a minute on two cores, most of it compilation. The five classes are
stand-ins: nothing here says how good a model is.

  python -m glm5_jax.launch --config=experiments/pretrain_tiny.py \
      --workdir=runs/tiny
"""

from glm5_jax.data.config import ClassConfig
from glm5_jax.data.config import DataConfig
from glm5_jax.data.config import FolderSource
from glm5_jax.data.config import LengthStage
from glm5_jax.data.config import TrainedTokenizer
from glm5_jax.experiment import Experiment
from glm5_jax.models import presets
from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training.config import CheckpointConfig
from glm5_jax.training.config import HooksConfig
from glm5_jax.training.config import OptimizerConfig
from glm5_jax.training.config import PretrainConfig
from glm5_jax.training.config import ScheduleConfig


def get_config() -> Experiment:
  """Returns the experiment."""
  data = DataConfig(
    root='.',
    code=ClassConfig(0.35, FolderSource('glm5_jax'), filter=None),
    web=ClassConfig(0.25, FolderSource('*.md'), filter=None),
    papers=ClassConfig(0.15, FolderSource('docs/design'), filter=None),
    books=ClassConfig(0.10, FolderSource('docs'), filter=None),
    other=ClassConfig(0.15, FolderSource('tests'), filter=None),
    tokenizer=TrainedTokenizer(vocab_size=512, sample_bytes=200_000),
    heldout_share=0.1,
  )
  job = PretrainConfig(
    data=data,
    stages=(
      LengthStage(sequence_length=128, batch_size=16, num_steps=40),
      LengthStage(sequence_length=256, batch_size=8, num_steps=20),
    ),
    optimizer=OptimizerConfig(
      kind='muon',
      learning_rate=2e-3,
      embedding_learning_rate=2e-3,
      schedule=ScheduleConfig(kind='wsd', warmup_steps=5),
    ),
    checkpoint=CheckpointConfig(every_steps=20),
    hooks=HooksConfig(log_every_steps=5, evaluate_every_steps=30),
  )
  return Experiment(
    name='pretrain_tiny', model=presets.tiny, mesh=MeshConfig(), job=job
  )
