"""What a pre-training run came to, as JSON and as a table.

Bits per byte of the model stand next to those of compressors on the same
held-out files, each compressed by itself.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import numpy as np
from rich import console as rich_console
from rich import table as rich_table
from rich import text as rich_text

from glm5_jax.data.config import TEXT_CLASSES
from glm5_jax.data.config import LengthStage
from glm5_jax.evaluation import likelihood
from glm5_jax.evaluation.compression import Compression
from glm5_jax.evaluation.likelihood import Likelihood
from glm5_jax.evaluation.samples import Sample
from glm5_jax.models import counting
from glm5_jax.models.config import ModelConfig
from glm5_jax.training.metrics import Row

# Rows of metrics over whose steps expert load is averaged: single steps are
# noisy.
_LOAD_ROWS = 10


@dataclasses.dataclass(frozen=True)
class Findings:
  """What was measured in and after a run.

  Attributes:
    likelihoods: cost of the held-out documents by class.
    compressed: their sizes compressed one by one, by class.
    archive: sizes of training text as one archive.
    token_counts: tokens drawn in training by class.
    target_shares: the mixture's shares by class.
    tokens: tokens trained on.
    steps: optimizer steps.
    rows: recorded metrics.
    samples: prompts and continuations.
  """

  likelihoods: Mapping[str, Likelihood]
  compressed: Mapping[str, Compression]
  archive: Compression
  token_counts: Mapping[str, int]
  target_shares: Mapping[str, float]
  tokens: int
  steps: int
  rows: Sequence[Row]
  samples: Sequence[Sample]


def expert_load(rows: Sequence[Row]) -> list[float]:
  """Returns each layer's busiest expert's load over the mean, recently."""
  loads = [row['expert_load'] for row in rows if 'expert_load' in row]
  if not loads:
    return []
  return [float(x) for x in np.mean(loads[-_LOAD_ROWS:], axis=0)]


def training_flops(
  model: ModelConfig, stages: Sequence[LengthStage], tokens: int
) -> float:
  """Returns the model FLOPs of a run, rows counted as single documents."""
  sizes = [s.num_steps * s.batch_size * s.sequence_length for s in stages]
  per_token = [
    counting.flops(model, stage.sequence_length).training for stage in stages
  ]
  mean = float(np.average(per_token, weights=sizes))
  return mean * tokens


def make(
  findings: Findings,
  model: ModelConfig,
  stages: Sequence[LengthStage],
  *,
  seconds: float,
) -> dict[str, Any]:
  """Returns the report, fit for JSON but for NaN where there was no text.

  Args:
    findings: what was measured.
    model: what was trained.
    stages: lengths and steps of the training.
    seconds: wall time of it all.
  """
  count = counting.parameters(model)
  heldout = likelihood.total(dict(findings.likelihoods))
  compressed = sum(findings.compressed.values(), Compression())
  drawn = max(1, sum(findings.token_counts.values()))
  last = [row for row in findings.rows if 'loss' in row][-1:]
  return {
    'heldout_bits_per_byte': heldout.bits_per_byte,
    'gzip_bits_per_byte': compressed.gzip_bits_per_byte,
    'xz_bits_per_byte': compressed.xz_bits_per_byte,
    'mixture': {
      name: number / drawn for name, number in findings.token_counts.items()
    },
    'tokens': findings.tokens,
    'parameters': count.total,
    'seconds': seconds,
    'mixture_target': dict(findings.target_shares),
    'classes': _classes(findings),
    'heldout_bytes': heldout.num_bytes,
    'heldout_documents': heldout.num_documents,
    'heldout_tokens': heldout.num_tokens,
    'training_text_as_archive': {
      'bytes': findings.archive.num_bytes,
      'gzip_bits_per_byte': findings.archive.gzip_bits_per_byte,
      'xz_bits_per_byte': findings.archive.xz_bits_per_byte,
    },
    'parameters_active': count.active,
    'parameters_mtp': count.mtp,
    'flops': training_flops(model, stages, findings.tokens),
    'steps': findings.steps,
    'expert_load': expert_load(findings.rows),
    'last_step': last[0] if last else {},
    'samples': [dataclasses.asdict(sample) for sample in findings.samples],
  }


def _classes(findings: Findings) -> dict[str, dict[str, float]]:
  classes: dict[str, dict[str, float]] = {}
  for name in TEXT_CLASSES:
    score = findings.likelihoods.get(name, Likelihood())
    size = findings.compressed.get(name, Compression())
    classes[name] = {
      'heldout_bits_per_byte': score.bits_per_byte,
      'gzip_bits_per_byte': size.gzip_bits_per_byte,
      'xz_bits_per_byte': size.xz_bits_per_byte,
      'heldout_bytes': score.num_bytes,
      'heldout_documents': score.num_documents,
      'tokens': findings.token_counts.get(name, 0),
    }
  return classes


def write(path: pathlib.Path, report: Mapping[str, Any]) -> None:
  """Writes the report; whoever reads sees a whole one. NaN becomes null."""
  partial = path.with_suffix('.partial')
  partial.write_text(
    json.dumps(_without_nan(report), indent=2, allow_nan=False) + '\n',
    encoding='utf-8',
  )
  os.replace(partial, path)


def _without_nan(value: Any) -> Any:
  """Returns plain data with null for NaN, which JSON does not have."""
  if isinstance(value, Mapping):
    return {key: _without_nan(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_without_nan(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def show(
  report: Mapping[str, Any], console: rich_console.Console | None = None
) -> None:
  """Prints the report."""
  console = console or rich_console.Console()
  console.print(_score_table(report))
  archive = report['training_text_as_archive']
  console.print(
    f'Training text as one archive ({archive["bytes"] / 1e6:.1f} MB): '
    f'gzip -9 {archive["gzip_bits_per_byte"]:.3f}, '
    f'xz -9 {archive["xz_bits_per_byte"]:.3f} bits per byte',
    highlight=False,
  )
  load = ', '.join(f'{x:.2f}' for x in report['expert_load'])
  console.print(
    f'{report["parameters"]:,} parameters, {report["parameters_active"]:,} '
    f'active, MTP {report["parameters_mtp"]:,} apart\n'
    f'{report["steps"]:,} steps, {report["tokens"]:,} tokens, '
    f'{report["flops"]:.3g} FLOPs, {report["seconds"]:,.0f} s\n'
    f'Busiest expert over mean, by layer: {load or "no experts"}',
    highlight=False,
  )
  for sample in report['samples']:
    # Text of a model may look like markup.
    shown = rich_text.Text()
    shown.append(sample['prompt'], style='bold')
    shown.append(sample['continuation'])
    console.rule('prompt and continuation', align='left')
    console.print(shown)


def _score_table(report: Mapping[str, Any]) -> rich_table.Table:
  """Returns the table of classes: shares of training and bits per byte."""
  table = rich_table.Table(title='Held-out text, bits per byte')
  table.add_column('class')
  for title in ('share', 'target', 'documents', 'KB', 'model', 'gzip -9'):
    table.add_column(title, justify='right')
  table.add_column('xz -9', justify='right')
  for name, scores in report['classes'].items():
    table.add_row(
      name,
      f'{report["mixture"].get(name, 0.0):.1%}',
      f'{report["mixture_target"].get(name, 0.0):.1%}',
      f'{scores["heldout_documents"]:,}',
      f'{scores["heldout_bytes"] / 1000:,.0f}',
      *_bits(scores),
    )
  table.add_section()
  table.add_row(
    'all',
    '',
    '',
    f'{report["heldout_documents"]:,}',
    f'{report["heldout_bytes"] / 1000:,.0f}',
    *_bits(report),
    style='bold',
  )
  return table


def _bits(scores: Mapping[str, float]) -> list[str]:
  names = ('heldout', 'gzip', 'xz')
  values = [scores[f'{name}_bits_per_byte'] for name in names]
  return ['-' if math.isnan(value) else f'{value:.3f}' for value in values]
