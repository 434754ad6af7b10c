"""Pre-training of GLM-5 (744 B) on the five-way mixture, on a pod of 512 chips.

27 T tokens: 26 T at 4096 tokens a row, the last trillion at 32 768. Longer
stages wait for the context axis. Nobody has run this here: `--explain` shows
its size and layout in seconds.

  python -m glm5_jax.launch --config=experiments/pretrain_glm5.py --explain
  python -m glm5_jax.launch --config=experiments/pretrain_glm5.py \
      --workdir=runs/glm5
"""

from glm5_jax.data.config import ClassConfig
from glm5_jax.data.config import CodeFilter
from glm5_jax.data.config import DataConfig
from glm5_jax.data.config import LengthStage
from glm5_jax.data.config import ParquetSource
from glm5_jax.data.config import PartShare
from glm5_jax.data.config import ProseFilter
from glm5_jax.data.config import TokenizerFile
from glm5_jax.experiment import Experiment
from glm5_jax.models import presets
from glm5_jax.parallelism.config import MeshConfig
from glm5_jax.training.config import CheckpointConfig
from glm5_jax.training.config import HooksConfig
from glm5_jax.training.config import OptimizerConfig
from glm5_jax.training.config import PretrainConfig
from glm5_jax.training.config import ScheduleConfig

PROSE = ProseFilter()


def get_config() -> Experiment:
  """Returns the experiment."""
  data = DataConfig(
    root='data/glm5',
    code=ClassConfig(0.35, ParquetSource('code'), CodeFilter()),
    web=ClassConfig(0.25, ParquetSource('web'), PROSE),
    papers=ClassConfig(
      0.15, ParquetSource('papers'), PROSE, (PartShare('stem', 0.8),)
    ),
    books=ClassConfig(
      0.10, ParquetSource('books'), PROSE, (PartShare('technical', 0.5),)
    ),
    other=ClassConfig(0.15, ParquetSource('other'), PROSE),
    tokenizer=TokenizerFile('data/glm5/tokenizer.json'),
    # A hundred megabytes of a hundred terabytes.
    heldout_share=1e-6,
  )
  job = PretrainConfig(
    data=data,
    stages=(
      LengthStage(sequence_length=4096, batch_size=8192, num_steps=775_000),
      LengthStage(sequence_length=32_768, batch_size=1024, num_steps=30_000),
    ),
    optimizer=OptimizerConfig(
      kind='muon',
      learning_rate=2e-4,
      embedding_learning_rate=2e-4,
      muon_learning_rate=2e-4,
      schedule=ScheduleConfig(kind='wsd', warmup_steps=2000),
    ),
    microbatches=16,
    checkpoint=CheckpointConfig(every_steps=500, keep_every_steps=25_000),
    hooks=HooksConfig(evaluate_every_steps=5000),
  )
  return Experiment(
    name='pretrain_glm5',
    model=presets.glm5_744b,
    mesh=MeshConfig(fsdp=8, expert=8, tensor=8, rules='tpu_pod'),
    job=job,
  )
