"""The learner: log-probs without [B, T, V], gradients summed over microbatches, AdamW.

Supervised learning is this very update with advantage 1 on given answers.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_sched.device import lora, losses
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device import model as model_lib
from jaxrl_sched.device.logps import LOGITS_AT_ONCE, token_logps
from jaxrl_sched.device.model import ModelConfig
from jaxrl_sched.types import Batch, SharedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
  """The objective; see `losses.policy_loss` for the terms.

  `averaging` None is that of the kind. `overlong_filter` leaves truncated answers
  out. `tis_cap` None switches the correction off. With `kl_coef` above 0 the
  initial weights are kept as the reference.
  """

  kind: str = 'dapo'
  clip_low: float = 0.2
  clip_high: float = 0.28
  dual_clip: float | None = None
  tis_cap: float | None = 2.0
  kl_coef: float = 0.0
  kl: str = 'k3'
  averaging: str | None = None
  overlong_filter: bool = False


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
    steps: updates of the whole run, at whose end the learning rate is
      `final_fraction` of its peak (unless constant).
    weight_decay: on matrices; norms and biases are spared.
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
  if not (0 <= b1 < 1 and 0 <= b2 < 1 and eps > 0 and final_fraction >= 0):
    raise ValueError(
      f'optimizer: b1={b1}, b2={b2}, eps={eps}, final_fraction={final_fraction}; '
      'expected 0 to below 1, the same, above 0, and 0 or more'
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

  adamw = optax.adamw(
    rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decays
  )
  if max_grad_norm is not None:
    adamw = optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)
  return adamw, rate


def _predictors(answers):
  """[B, T] int32: the place whose hidden state predicts the token after place t.

  That is t itself, but the end of the prompt where an answer begins at t + 1.
  """
  place = jnp.broadcast_to(jnp.arange(answers.shape[1])[None], answers.shape)
  ends = jax.lax.cummax(jnp.where(answers == 0, place, 0), axis=1)
  return jnp.where(jnp.roll(answers, -1, axis=1) == answers, place, ends)


def answer_logps(
  parameters,
  config,
  batch,
  *,
  temperature=1.0,
  remat=False,
  mesh=None,
):
  """log-probs and entropies of a packed batch's tokens, [B, T]; entry 0 is 0.

  Args:
    mesh: over which rows and weights are spread; None: one device.
  """
  mesh = meshes.make_mesh() if mesh is None else mesh
  model = model_lib.decoder(config, parameters)
  answers = batch.get('answers')  # of a SharedBatch
  hidden = model.rows(
    batch['tokens'],
    batch['segments'],
    batch['positions'],
    answers=answers,
    remat=remat,
    mesh=mesh,
  )
  if answers is not None:
    hidden = jnp.take_along_axis(hidden, _predictors(answers)[..., None], axis=1)
  targets = jnp.roll(batch['tokens'], -1, axis=1)  # the last one's is never read
  found = token_logps(
    hidden,
    model.head_weight(),
    config,
    targets,
    temperature=temperature,
    parts=meshes.size(mesh, 'vocab'),
    at_once=LOGITS_AT_ONCE * meshes.size(mesh, 'rows') * meshes.size(mesh, 'vocab'),
  )
  return tuple(jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in found)


def microbatch_loss(
  parameters,
  reference,
  batch,
  *,
  config,
  loss: Loss,
  temperature,
  remat,
  mesh,
):
  """The loss of one microbatch: a plain sum. Returns it with sums for the log."""
  logps_of = functools.partial(
    answer_logps, config=config, batch=batch, temperature=temperature, mesh=mesh
  )
  logp, entropy = logps_of(parameters, remat=remat)
  weight, trained = batch['weights'], batch['weights'] > 0
  held = jax.lax.stop_gradient(logp)
  fresh = batch['fresh']
  total, sums = losses.policy_loss(
    logp,
    jnp.where(fresh, held, batch['logps']),
    batch['advantages'],
    weight,
    kind=loss.kind,
    clip_low=loss.clip_low,
    clip_high=loss.clip_high,
    dual_clip=loss.dual_clip,
    tis_cap=loss.tis_cap,
    logp_sampled=batch['logps'],
    segments=batch.get('answers', batch['segments']),
  )
  if reference is not None:  # weights without adapters
    logp_ref, _ = logps_of(reference, config=dataclasses.replace(config, lora=None))
    total += losses.kl_penalty(logp, logp_ref, weight, coef=loss.kl_coef, kind=loss.kl)
    estimate = losses.kl_estimate(
      jnp.where(trained, held, 0.0), jnp.where(trained, logp_ref, 0.0), kind='k3'
    )
    sums['kl'] = jnp.sum(estimate)
  same = trained & fresh
  gap = jnp.where(same, jnp.abs(held - batch['logps']), 0.0)
  sums |= dict(
    loss=total,
    entropy=jnp.sum(jnp.where(trained, entropy, 0.0)),
    fresh=jnp.sum(same),
    gap=jnp.sum(gap),
    gap_max=jnp.max(gap),
  )
  return total, jax.tree.map(lambda x: jax.lax.stop_gradient(x).astype('float32'), sums)


def _gradients(loss_of):
  """Two functions: gradient and sums of a microbatch, and those added to a total."""

  def of_trained(trained, rest, reference, batch):
    return loss_of(lora.join(rest, trained), reference, batch)

  first = jax.grad(of_trained, has_aux=True)

  def add(total, *arguments):
    new, sums = first(*arguments)
    old, old_sums = total
    sums = {
      k: (jnp.maximum if k == 'gap_max' else jnp.add)(old_sums[k], v)
      for k, v in sums.items()
    }
    return jax.tree.map(jnp.add, old, new), sums

  return first, add


class Learner:
  """Holds the weights and the optimizer; `update` does one step.

  With `config.lora` only adapters are trained, and they and their optimizer are the
  state. The weights that were given stay as they are, uncopied; they are the reference
  of the KL penalty, too.

  Args:
    parameters: float32 tree, without adapters; brought to the learner's shardings,
      never donated.
    rows, row_tokens: shape of a microbatch; their number is the host's choice.
    optimizer: keyword arguments of `make_optimizer`.
    temperature: of the sampling, at which log-probs are computed.
    remat: compute activations again in the backward instead of keeping them.
    seed: of fresh adapters.
  """

  def __init__(
    self,
    parameters,
    config: ModelConfig,
    *,
    mesh=None,
    rows: int,
    row_tokens: int,
    optimizer: dict[str, Any],
    loss: Loss,
    temperature: float = 1.0,
    remat: bool = False,
    seed: int = 0,
  ):
    mesh = meshes.make_mesh() if mesh is None else mesh
    if rows < 1 or rows % meshes.size(mesh, 'rows'):
      raise ValueError(
        f'learner.rows: {rows}, expected a multiple of data * fsdp = '
        f'{meshes.size(mesh, "rows")}'
      )
    if not temperature > 0:
      raise ValueError(f'learner.temperature: {temperature}, expected above 0')
    # The model that `parameters` are of: adapters are merged in them.
    self.config, self.loss = dataclasses.replace(config, lora=None), loss
    self.rows, self.row_tokens = rows, row_tokens
    self._optimizer, self._rate = make_optimizer(**optimizer)
    shapes, axes = model_lib.abstract(self.config)
    at = meshes.parameter_shardings(shapes, axes, mesh)
    parameters = jax.device_put(parameters, at)
    self._reference = parameters if loss.kl_coef > 0 else None
    self._merged = None
    if config.lora is not None:
      (_, shapes), (_, axes) = map(lora.split, model_lib.abstract(config))
      self._merged = lora.Merged(parameters, shapes, at, config.lora.scale)
      at = meshes.parameter_shardings(shapes, axes, mesh)
    whole = meshes.sharding(mesh)
    optimizer_at = optax.tree_utils.tree_map_params(
      self._optimizer,
      lambda _, sharding: sharding,
      jax.eval_shape(self._optimizer.init, shapes),
      at,
      transform_non_params=lambda _: whole,
    )
    self._state_at = dict(parameters=at, optimizer=optimizer_at)
    self._row_at = meshes.sharding(mesh, 'rows', None)

    def start(parameters):
      if config.lora is None:
        trained = jax.tree.map(lambda x: jnp.array(x, 'float32', copy=True), parameters)
      else:
        _, trained = lora.split(model_lib.init(config, seed))
      return dict(parameters=trained, optimizer=self._optimizer.init(trained))

    self.state = jax.jit(start, out_shardings=self._state_at)(parameters)

    loss_of = functools.partial(
      microbatch_loss,
      config=config,
      loss=loss,
      temperature=temperature,
      remat=remat,
      mesh=mesh,
    )
    first, add = _gradients(loss_of)
    self._first = jax.jit(first, out_shardings=(at, whole))
    self._add = jax.jit(add, donate_argnums=0, out_shardings=(at, whole))
    self._apply = jax.jit(
      self._apply_gradient,
      donate_argnums=0,
      out_shardings=(self._state_at, whole),
    )

  @property
  def parameters(self):
    """The policy's weights, float32, adapters merged in."""
    trained = self.state['parameters']
    return trained if self._merged is None else self._merged.by(trained)

  def like(self):
    """The state as shapes with shardings, for a checkpoint to fill."""
    return jax.tree.map(
      lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
      self.state,
      self._state_at,
    )

  def _apply_gradient(self, state, gradient, sums):
    """One AdamW step, refused as a whole if the gradient is not finite."""
    norm = optax.tree_utils.tree_norm(gradient)
    changes, optimizer = self._optimizer.update(
      gradient, state['optimizer'], state['parameters']
    )
    good = jnp.isfinite(norm) & jnp.isfinite(optax.tree_utils.tree_norm(changes))
    new = dict(
      parameters=optax.apply_updates(state['parameters'], changes), optimizer=optimizer
    )
    # Adam and the schedule count alike; refused steps count in neither.
    counts = optax.tree_utils.tree_get_all_with_path(state['optimizer'], 'count')
    rate = self._rate(counts[0][1])
    state = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state)
    tokens, fresh = jnp.maximum(sums['tokens'], 1), jnp.maximum(sums['fresh'], 1)
    metrics = {
      'loss': sums['loss'],
      'entropy': sums['entropy'] / tokens,
      'grad_norm': norm,
      'clip_frac': sums['clip_frac'] / tokens,
      'kl': sums.get('kl', sums['kl_old']) / tokens,
      'lr': rate,
      'mismatch/logp_abs_mean': sums['gap'] / fresh,
      'mismatch/logp_abs_max': sums['gap_max'],
      'mismatch/tis_raw_mean': sums['tis_raw'] / tokens,
      'update/refused': 1.0 - good,
    }
    if self.loss.dual_clip is not None:
      metrics['dual_clip_frac'] = sums['dual_clip_frac'] / tokens
    if 'tis' in sums:
      metrics['mismatch/tis_mean'] = sums['tis'] / tokens
    return state, metrics

  def gradient(self, batches: Sequence[Batch]):
    """The gradient of what is trained, over all microbatches, and sums for the log."""
    total, rest = None, {} if self._merged is None else self.parameters
    for batch in batches:
      arrays = {
        f.name: jax.device_put(getattr(batch, f.name), self._row_at)
        for f in dataclasses.fields(batch)
      }
      arguments = self.state['parameters'], rest, self._reference, arrays
      if total is None:
        total = self._first(*arguments)
      else:
        total = self._add(total, *arguments)
    return total

  def update(self, batches: Sequence[Batch]) -> dict[str, jax.Array]:
    """One step from these microbatches, at least one. Metrics are on their way."""
    gradient, sums = self.gradient(batches)
    self.state, metrics = self._apply(self.state, gradient, sums)
    return metrics

  def warm_up(self, *, share_prompt: bool = False) -> None:
    """Compiles the update, leaving the state as it was.

    Args:
      share_prompt: the update from SharedBatches.
    """
    shape = (self.rows, self.row_tokens)
    dtypes = dict.fromkeys(('tokens', 'segments', 'positions', 'answers'), 'i4')
    dtypes['fresh'] = '?'
    kind = SharedBatch if share_prompt else Batch
    nothing = kind(
      **{
        f.name: np.zeros(shape, dtypes.get(f.name, 'f4'))
        for f in dataclasses.fields(kind)
      }
    )
    gradient, sums = self.gradient([nothing, nothing])
    spoilt = jax.tree.map(lambda g: jnp.full_like(g, jnp.nan), gradient)
    self.state, _ = self._apply(self.state, spoilt, sums)
