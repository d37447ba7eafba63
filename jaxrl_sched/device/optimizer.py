"""AdamW and its schedule, from the config's keyword arguments.

The schedule counts steps of the run, Adam's bias correction the updates that were made:
a run in which some were skipped still ends at the rate that it should.
"""

import jax
import optax


def make_optimizer(
  *,
  learning_rate: float,
  steps: int,
  warmup_steps: int = 0,
  schedule: str = 'constant',
  final_fraction: float = 0.1,
  weight_decay: float = 0.0,
  max_grad_norm: float | None = 1.0,
  b1: float = 0.9,
  b2: float = 0.95,
  eps: float = 1e-8,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """AdamW with linear warm-up, then 'constant', 'linear' or 'cosine'.

  Args:
    steps: of the whole run, at whose end the learning rate is
      `final_fraction` of its peak (unless constant).
    weight_decay: on matrices; norms and biases are spared.

  Returns:
    What gives the direction of an update, to be multiplied by minus the learning rate;
    and the learning rate of each step.
  """
  rest = max(1, steps - warmup_steps)
  shapes = {
    'constant': lambda: optax.constant_schedule(learning_rate),
    'linear': lambda: optax.linear_schedule(
      learning_rate, learning_rate * final_fraction, rest
    ),
    'cosine': lambda: optax.cosine_decay_schedule(learning_rate, rest, final_fraction),
  }
  if schedule not in shapes:
    raise ValueError(
      f'optimizer.schedule: {schedule!r}, expected one of {", ".join(shapes)}'
    )
  if learning_rate < 0 or warmup_steps < 0 or weight_decay < 0:
    raise ValueError(
      f'optimizer: learning_rate={learning_rate}, warmup_steps={warmup_steps}, '
      f'weight_decay={weight_decay}; expected 0 or more'
    )
  if not (0 <= b1 < 1 and 0 <= b2 < 1 and eps > 0 and 0 <= final_fraction <= 1):
    raise ValueError(
      f'optimizer: b1={b1}, b2={b2}, eps={eps}, final_fraction={final_fraction}; '
      'expected 0 to below 1, the same, above 0, and 0 to 1'
    )
  if max_grad_norm is not None and max_grad_norm <= 0:
    raise ValueError(f'optimizer.max_grad_norm: {max_grad_norm}, expected above 0')
  rate = shapes[schedule]()
  if warmup_steps:
    # The first update is not thrown away: it has 1 / warmup_steps of the rate.
    rise = optax.linear_schedule(
      learning_rate / warmup_steps, learning_rate, warmup_steps
    )
    rate = optax.join_schedules([rise, rate], [warmup_steps])

  def decays(parameters):
    return jax.tree_util.tree_map_with_path(
      lambda path, _: not str(path[-1].key).endswith(('scale', '_bias')), parameters
    )

  parts = [
    optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
    optax.add_decayed_weights(weight_decay, mask=decays),
  ]
  if max_grad_norm is not None:
    parts.insert(0, optax.clip_by_global_norm(max_grad_norm))
  return optax.chain(*parts), rate
