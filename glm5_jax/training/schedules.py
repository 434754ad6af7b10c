"""Learning rate over steps, as pure functions of the step.

Every function gives a share of the peak rate. `step` is the number of updates
done so far, so the first update sees 0. The n-th update (n = step + 1) sees
`n / warmup` while that is below one: no update is wasted on a rate of zero, and
the last one sees exactly the final share.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Float
from jaxtyping import Int

from glm5_jax.training.config import ScheduleConfig

Step = int | Int[Array, '']
Schedule = Callable[[Step], Float[Array, '']]


def _number(step: Step) -> Float[Array, '']:
  """Returns the number of the update, from 1, in float32."""
  return jnp.asarray(step, jnp.float32) + 1


def warmup(step: Step, warmup_steps: int) -> Float[Array, '']:
  """Returns `min(1, n / warmup_steps)`."""
  return jnp.minimum(1.0, _number(step) / max(1, warmup_steps))


def cosine(
  step: Step, num_steps: int, *, warmup_steps: int, final_share: float
) -> Float[Array, '']:
  """Returns warm-up, then half a cosine from 1 to `final_share`.

  `final + (1 - final) (1 + cos(pi p)) / 2`, p the part of the steps after
  warm-up that is done (arXiv 1608.03983, equation 5, without restarts).
  """
  rest = max(1, num_steps - warmup_steps)
  done = jnp.clip((_number(step) - warmup_steps) / rest, 0.0, 1.0)
  fall = 0.5 * (1 + jnp.cos(jnp.pi * done))
  share = final_share + (1 - final_share) * fall
  return jnp.where(
    _number(step) < warmup_steps, warmup(step, warmup_steps), share
  )


def warmup_stable_decay(
  step: Step,
  num_steps: int,
  *,
  warmup_steps: int,
  decay_share: float,
  final_share: float,
) -> Float[Array, '']:
  """Returns warm-up, the peak, then a line to `final_share` (arXiv 2404.06395).

  The line spans the last `decay_share` of all steps.
  """
  decay_steps = max(1.0, decay_share * num_steps)
  done = (_number(step) - (num_steps - decay_steps)) / decay_steps
  fall = 1 - (1 - final_share) * jnp.clip(done, 0.0, 1.0)
  return jnp.minimum(warmup(step, warmup_steps), fall)


def make_schedule(
  config: ScheduleConfig, peak: float, num_steps: int
) -> Schedule:
  """Returns the learning rate as a function of the step.

  Args:
    config: shape of the curve.
    peak: highest learning rate.
    num_steps: updates of the whole run.

  Raises:
    ValueError: the curve needs more steps than there are.
  """
  warmup_steps = config.warmup_steps
  decay_steps = config.decay_share * num_steps if config.kind == 'wsd' else 0
  if warmup_steps + decay_steps > num_steps:
    raise ValueError(
      f'ScheduleConfig.warmup_steps is {warmup_steps}'
      + (f' and decay takes {decay_steps:g} steps' if decay_steps else '')
      + f', but the run has {num_steps}. Shorten the warm-up'
      + (' or lower decay_share.' if decay_steps else '.')
    )

  def schedule(step: Step) -> jax.Array:
    match config.kind:
      case 'cosine':
        share = cosine(
          step,
          num_steps,
          warmup_steps=warmup_steps,
          final_share=config.final_share,
        )
      case 'wsd':
        share = warmup_stable_decay(
          step,
          num_steps,
          warmup_steps=warmup_steps,
          decay_share=config.decay_share,
          final_share=config.final_share,
        )
      case 'constant':
        share = warmup(step, warmup_steps)
    return peak * share

  return schedule
