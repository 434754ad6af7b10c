import io
import json
import math

import pytest
from rich import console as rich_console

from glm5_jax.data.config import LengthStage
from glm5_jax.evaluation import report
from glm5_jax.evaluation.compression import Compression
from glm5_jax.evaluation.likelihood import Likelihood
from glm5_jax.evaluation.samples import Sample
from glm5_jax.models import counting
from glm5_jax.models import presets

STAGES = (LengthStage(16, 4, 10), LengthStage(32, 4, 5))
FINDINGS = report.Findings(
  likelihoods={
    'code': Likelihood(bits=300.0, num_bytes=200, num_tokens=50),
    'web': Likelihood(bits=300.0, num_bytes=100, num_tokens=30),
  },
  compressed={
    'code': Compression(num_bytes=200, gzip_bytes=60, xz_bytes=50),
    'web': Compression(num_bytes=100, gzip_bytes=40, xz_bytes=40),
  },
  archive=Compression(num_bytes=1000, gzip_bytes=250, xz_bytes=200),
  token_counts={'code': 600, 'web': 400, 'papers': 0},
  target_shares={'code': 0.6, 'web': 0.4, 'papers': 0.0},
  tokens=1000,
  steps=15,
  rows=[
    {'step': 5, 'loss': 3.0, 'expert_load': [2.0, 4.0]},
    {'step': 10, 'loss': 2.0, 'expert_load': [1.0, 2.0]},
    {'step': 10, 'evaluation/bits_per_byte': 2.0},
  ],
  samples=[Sample('def f(', 'x): [/bold] return')],
)


@pytest.fixture
def made():
  return report.make(FINDINGS, presets.tiny, STAGES, seconds=12.5)


def test_scores_are_of_all_text_together(made):
  assert made['heldout_bits_per_byte'] == 600 / 300
  assert made['gzip_bits_per_byte'] == 8 * 100 / 300
  assert made['xz_bits_per_byte'] == 8 * 90 / 300
  assert made['classes']['code']['heldout_bits_per_byte'] == 1.5
  assert made['classes']['code']['xz_bits_per_byte'] == 2.0
  assert math.isnan(made['classes']['books']['heldout_bits_per_byte'])


def test_the_promised_keys_are_there(made):
  assert made['mixture'] == {'code': 0.6, 'web': 0.4, 'papers': 0.0}
  assert made['tokens'] == 1000
  assert made['seconds'] == 12.5
  count = counting.parameters(presets.tiny)
  assert made['parameters'] == count.total
  assert made['parameters_active'] == count.active
  assert made['training_text_as_archive']['xz_bits_per_byte'] == 1.6
  assert made['last_step']['loss'] == 2.0
  assert made['samples'] == [
    {'prompt': 'def f(', 'continuation': 'x): [/bold] return'}
  ]


def test_expert_load_is_a_mean_of_the_last_rows():
  assert report.expert_load(FINDINGS.rows) == [1.5, 3.0]
  many = [{'step': i, 'expert_load': [float(i)]} for i in range(100)]
  assert report.expert_load(many) == [94.5]
  assert report.expert_load([{'step': 1, 'loss': 1.0}]) == []


def test_flops_weigh_the_stages_by_their_tokens():
  short = counting.flops(presets.tiny, 16).training
  long = counting.flops(presets.tiny, 32).training
  expected = 1000 * (short + long) / 2  # Both stages have 640 tokens.
  assert report.training_flops(presets.tiny, STAGES, 1000) == pytest.approx(
    expected
  )


def test_the_file_is_whole_and_strict_json(made, tmp_path):
  path = tmp_path / 'report.json'
  path.write_text('old')
  report.write(path, made)
  text = path.read_text()
  assert 'NaN' not in text
  saved = json.loads(text)
  assert saved['classes']['books']['heldout_bits_per_byte'] is None
  assert saved['heldout_bits_per_byte'] == 2.0
  assert [p.name for p in tmp_path.iterdir()] == ['report.json']


def test_a_report_that_is_no_json_leaves_the_old_one(tmp_path):
  path = tmp_path / 'report.json'
  path.write_text('old')
  with pytest.raises(TypeError):
    report.write(path, {'x': object()})
  assert path.read_text() == 'old'


def test_the_table_shows_scores_and_text_as_it_is(made):
  console = rich_console.Console(file=io.StringIO(), width=100)
  report.show(made, console)
  shown = console.file.getvalue()
  for part in ('1.500', '2.400', '2.000', '60.0%', 'code', 'all', '2.667'):
    assert part in shown
  # A model's text is no markup.
  assert 'def f(x): [/bold] return' in shown
  assert '1.50, 3.00' in shown
