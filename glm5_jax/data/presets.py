"""Data configs to start from."""

import dataclasses

from glm5_jax.data.config import DataConfig
from glm5_jax.data.config import PartShare


def registry_corpus(root: str = 'runs/corpus') -> DataConfig:
  """Returns the mixture over what `glm5_jax.data.corpus` collects at `root`.

  The five shares are the mission's; the parts' are what the corpus can give.
  """
  config = DataConfig(root=root)
  return dataclasses.replace(
    config,
    code=dataclasses.replace(
      config.code,
      parts=(
        PartShare('python', 0.8),
        PartShare('rust', 0.1),
        PartShare('javascript', 0.05),
      ),
    ),
    papers=dataclasses.replace(config.papers, parts=(PartShare('stem', 0.8),)),
    books=dataclasses.replace(
      config.books, parts=(PartShare('technical', 0.5),)
    ),
    other=dataclasses.replace(
      config.other,
      # Half of it in languages other than English, nine with their own share.
      parts=(
        PartShare('notes', 0.5),
        *(
          PartShare(language, 0.03)
          for language in ('ar', 'de', 'es', 'fr', 'hi', 'ja', 'ko', 'ru', 'zh')
        ),
      ),
    ),
  )
