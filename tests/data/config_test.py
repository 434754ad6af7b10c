import dataclasses

import pytest

from glm5_jax.data import config as data_config
from glm5_jax.data import presets
from glm5_jax.data.config import DataConfig
from glm5_jax.data.config import LengthStage
from glm5_jax.data.config import PartShare


def test_default_shares_are_the_missions():
  config = DataConfig()
  shares = [
    config.class_config(name).share for name in data_config.TEXT_CLASSES
  ]
  assert shares == [0.35, 0.25, 0.15, 0.10, 0.15]


def test_shares_that_do_not_add_up_are_refused():
  code = dataclasses.replace(DataConfig().code, share=0.5)
  with pytest.raises(ValueError, match='add up to 1.15.*add up to 1'):
    DataConfig(code=code)


def test_parts_that_take_more_than_the_class_are_refused():
  with pytest.raises(ValueError, match='parts take 1.2'):
    dataclasses.replace(
      DataConfig().books, parts=(PartShare('a', 0.6), PartShare('b', 0.6))
    )


@pytest.mark.parametrize(
  'make',
  [
    lambda: LengthStage(0, 8, 1),
    lambda: LengthStage(8, -1, 1),
    lambda: PartShare('a', 1.5),
    lambda: data_config.FirstFit(0),
    lambda: data_config.ProseFilter(min_letters=2.0),
    lambda: DataConfig(heldout_share=-0.1),
  ],
)
def test_numbers_out_of_range_are_refused_by_name(make):
  with pytest.raises(ValueError, match=r'\w+\.\w+ is '):
    make()


def test_the_registry_preset_keeps_the_missions_shares_and_names_parts():
  config = presets.registry_corpus('somewhere')
  assert config.root == 'somewhere'
  assert config.code.share == 0.35
  assert {part.part for part in config.books.parts} == {'technical'}
  assert {part.part for part in config.papers.parts} == {'stem'}
  assert len(config.other.parts) >= 9
