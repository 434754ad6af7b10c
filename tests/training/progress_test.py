"""Progress is a bar on a terminal and lines elsewhere."""

import io

from rich import console as rich_console

from glm5_jax.training import progress
from tests.training.hooks_test import report


def _shown(*, is_terminal):
  stream = io.StringIO()
  console = rich_console.Console(
    file=stream, force_terminal=is_terminal, width=100
  )
  bar = progress.ProgressBar(10, every_steps=2, console=console)
  bar.on_start(0)
  for step in range(1, 7):
    bar.on_step(report(step, seconds=None if step == 1 else 0.5))
  bar.on_results(6, {'bits_per_byte': 1.25})
  bar.close()
  bar.close()
  return stream.getvalue()


def test_lines_come_every_so_many_steps():
  lines = _shown(is_terminal=False).splitlines()
  assert len(lines) == 4
  assert lines[0] == 'step 2/10  loss 4.5000  160 tokens/s  0:00:04 left'
  assert lines[2] == 'step 6/10  loss 8.5000  160 tokens/s  0:00:02 left'
  assert lines[3] == 'step 6/10  bits_per_byte 1.2500'


def test_the_bar_shows_speed_and_time_left():
  shown = _shown(is_terminal=True)
  for part in ('6/10', 'loss 8.5000', '160 tokens/s', '0:00:02 left'):
    assert part in shown
  assert 'bits_per_byte 1.2500' in shown
