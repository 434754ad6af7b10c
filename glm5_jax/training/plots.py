"""Pictures of a run, drawn from its `metrics.jsonl`."""

from collections.abc import Sequence
import pathlib

from matplotlib import figure
import numpy as np

from glm5_jax.training import metrics
from glm5_jax.training import writers

LOSS_FILE = 'loss.png'
LOAD_FILE = 'expert_load.png'


def draw(
  rows_path: pathlib.Path, folder: pathlib.Path, load: np.ndarray | None
) -> None:
  """Draws what there is to draw; nothing where there are no rows.

  Args:
    rows_path: the run's `metrics.jsonl`.
    folder: where the pictures go.
    load: tokens that each expert received of late, `[layers, E]`.
  """
  rows = list(writers.read_rows(rows_path))
  if any('loss' in row for row in rows):
    loss_figure(rows).savefig(folder / LOSS_FILE, dpi=120)
  if load is not None and load.size:
    load_figure(rows, load).savefig(folder / LOAD_FILE, dpi=120)


def _curve(
  rows: Sequence[metrics.Row], name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns steps and values of the rows that have `name`."""
  pairs = [(row['step'], row[name]) for row in rows if name in row]
  steps = np.array([step for step, _ in pairs], np.float64)
  return steps, np.array([value for _, value in pairs], np.float64)


def _smooth(values: np.ndarray) -> np.ndarray:
  """Returns a running mean over a fiftieth of the curve."""
  width = max(1, len(values) // 50)
  padded = np.pad(values, (width - 1, 0), mode='edge')
  return np.convolve(padded, np.ones(width) / width, mode='valid')


def loss_figure(rows: Sequence[metrics.Row]) -> figure.Figure:
  """Returns the losses over steps, with evaluations as points."""
  picture = figure.Figure(figsize=(8, 5), layout='constrained')
  axes = picture.add_subplot()
  for name, label in (
    ('cross_entropy', 'next token'),
    ('mtp_cross_entropy', 'further tokens (MTP)'),
  ):
    steps, values = _curve(rows, name)
    if not len(values) or not values.any():
      continue
    (line,) = axes.plot(steps, values, alpha=0.25, linewidth=0.8)
    axes.plot(steps, _smooth(values), color=line.get_color(), label=label)
  axes.set_xlabel('step')
  axes.set_ylabel('nats per token')
  axes.grid(alpha=0.3)
  names = sorted(
    {
      name
      for row in rows
      for name in row
      if name.startswith(metrics.EVALUATION_PREFIX)
    }
  )
  if names:
    # Evaluations have units of their own (bits per byte).
    right = axes.twinx()
    right.set_ylabel('evaluation')
    for index, name in enumerate(names):
      steps, values = _curve(rows, name)
      label = name.removeprefix(metrics.EVALUATION_PREFIX)
      color = f'C{index + 2}'
      right.plot(steps, values, 'o-', color=color, label=label, markersize=4)
    handles, labels = right.get_legend_handles_labels()
  else:
    handles, labels = [], []
  own_handles, own_labels = axes.get_legend_handles_labels()
  axes.legend(own_handles + handles, own_labels + labels, loc='upper right')
  return picture


def load_figure(rows: Sequence[metrics.Row], load: np.ndarray) -> figure.Figure:
  """Returns the busiest expert's load over steps, and the load of each."""
  picture = figure.Figure(figsize=(10, 4), layout='constrained')
  left, right = picture.subplots(1, 2)
  steps, values = _curve(rows, 'expert_load')
  for layer in range(values.shape[1] if values.ndim == 2 else 0):
    left.plot(
      steps, _smooth(values[:, layer]), linewidth=1, label=f'layer {layer}'
    )
  left.axhline(1.0, color='black', linewidth=0.5)
  left.set_xlabel('step')
  left.set_ylabel('busiest expert / mean')
  left.grid(alpha=0.3)
  if 0 < (values.shape[1] if values.ndim == 2 else 0) <= 12:
    left.legend(fontsize='small')
  image = right.imshow(
    metrics.relative_load(load), aspect='auto', cmap='viridis', vmin=0
  )
  right.set_xlabel('expert')
  right.set_ylabel('layer with experts')
  right.set_title('load / mean, latest steps')
  picture.colorbar(image, ax=right)
  return picture
