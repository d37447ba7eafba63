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
from jaxrl_sched.device.optimizer import make_optimizer
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


_DTYPES = dict.fromkeys(('tokens', 'segments', 'positions', 'answers'), 'i4')
_DTYPES['fresh'] = '?'  # the rest is float32


def shardings(tree):
  """Of a tree of shapes that have them."""
  return jax.tree.map(lambda x: x.sharding, tree)


def _struct(x, sharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _placed(shapes, at):
  return jax.tree.map(_struct, shapes, at)


def _check_rows(mesh: jax.sharding.Mesh, rows: int, row_tokens: int) -> None:
  """Whether the mesh cuts a microbatch of this shape evenly."""
  for name, value, logical, axes in (
    ('rows', rows, 'rows', 'data * fsdp'),
    ('row_tokens', row_tokens, 'tokens', 'sequence'),
  ):
    parts = meshes.size(mesh, logical)
    if value < 1 or value % parts:
      raise ValueError(
        f'learner.{name}: {value}, expected a multiple of {axes} = {parts}'
      )


class Programs:
  """What a learner compiles, and the shapes and shardings of what it is called with.

  Holds no arrays, so that it can be compiled for devices that are not there.

  Args: as of `Learner`.

  Attributes:
    start: weights -> state, on whose arrays `apply` may write.
    gradient: trained weights, the rest, reference, microbatch -> gradient and sums.
    zero: () -> gradient and sums of no microbatch.
    add: gradient and sums so far, then as `gradient`; writes on those so far. What
      training compiles: a first microbatch is added to nothing, since a program of its
      own would make compilation twice as long.
    apply: state, gradient, sums, step -> state and metrics; writes on the state.
    weights: of the model without adapters; a tree of shapes with shardings, as are
    state: which has what is trained, and its optimizer's,
    adapters: of these alone, or None.
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    mesh: jax.sharding.Mesh,
    rows: int,
    row_tokens: int,
    optimizer: dict[str, Any],
    loss: Loss,
    temperature: float,
    remat: bool,
    seed: int,
  ):
    _check_rows(mesh, rows, row_tokens)
    if not temperature > 0:
      raise ValueError(f'learner.temperature: {temperature}, expected above 0')
    self.shape = (rows, row_tokens)
    self._loss = loss
    self._optimizer, self._rate = make_optimizer(**optimizer)
    self._whole = meshes.sharding(mesh)
    self._step = jax.ShapeDtypeStruct((), 'int32', sharding=self._whole)
    self.rows_at = meshes.sharding(mesh, 'rows', 'tokens')
    shapes, axes = model_lib.abstract(dataclasses.replace(config, lora=None))
    self.weights = _placed(shapes, meshes.parameter_shardings(shapes, axes, mesh))
    trained, self.adapters = self.weights, None
    if config.lora is not None:
      (_, shapes), (_, axes) = map(lora.split, model_lib.abstract(config))
      trained = _placed(shapes, meshes.parameter_shardings(shapes, axes, mesh))
      self.adapters = trained
    moments = jax.eval_shape(self._optimizer.init, trained)
    self.state = dict(parameters=trained, optimizer=self._beside(trained, moments))

    def start(parameters):
      if config.lora is None:
        fresh = jax.tree.map(lambda x: jnp.array(x, 'float32', copy=True), parameters)
      else:
        _, fresh = lora.split(model_lib.init(config, seed))
      return dict(parameters=fresh, optimizer=self._optimizer.init(fresh))

    loss_of = functools.partial(
      microbatch_loss,
      config=config,
      loss=loss,
      temperature=temperature,
      remat=remat,
      mesh=mesh,
    )

    def of_trained(trained, rest, reference, batch):
      return loss_of(lora.join(rest, trained), reference, batch)

    def zero():
      return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._summed())

    def add(total, *arguments):
      (old, old_sums), (new, sums) = total, self.gradient(*arguments)
      sums = {
        k: (jnp.maximum if k == 'gap_max' else jnp.add)(old_sums[k], v)
        for k, v in sums.items()
      }
      return jax.tree.map(jnp.add, old, new), sums

    state_at, summed_at = shardings(self.state), (shardings(trained), self._whole)
    self.start = jax.jit(start, out_shardings=state_at)
    self.gradient = jax.jit(jax.grad(of_trained, has_aux=True), out_shardings=summed_at)
    self.zero = jax.jit(zero, out_shardings=summed_at)
    self.add = jax.jit(add, donate_argnums=0, out_shardings=summed_at)
    self.apply = jax.jit(
      self._apply_gradient, donate_argnums=0, out_shardings=(state_at, self._whole)
    )

  def _beside(self, trained, optimizer):
    """The optimizer's shapes: moments lie as the weights that they are of."""
    return optax.tree_utils.tree_map_params(
      self._optimizer,
      lambda x, weight: _struct(x, weight.sharding),
      optimizer,
      trained,
      transform_non_params=lambda x: _struct(x, self._whole),
    )

  def batch(self, kind: type[Batch]) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a microbatch of Batch or SharedBatch, as shapes."""
    return {
      f.name: jax.ShapeDtypeStruct(
        self.shape, _DTYPES.get(f.name, 'f4'), sharding=self.rows_at
      )
      for f in dataclasses.fields(kind)
    }

  def arguments(self, kind: type[Batch] = Batch) -> dict[str, tuple]:
    """What each program is called with in training, as shapes, by its name."""
    given = self._given(kind)
    gradient, sums = self._summed()
    return dict(
      start=(self.weights,),
      gradient=given,
      zero=(),
      add=((gradient, sums), *given),
      apply=(self.state, gradient, sums, self._step),
    )

  def _given(self, kind: type[Batch]):
    rest = {} if self.adapters is None else self.weights
    reference = self.weights if self._loss.kl_coef > 0 else None
    return self.state['parameters'], rest, reference, self.batch(kind)

  def _summed(self):
    """Gradient and sums as shapes: they are the same of every kind of batch."""
    gradient, sums = jax.eval_shape(self.gradient, *self._given(Batch))
    gradient = _placed(gradient, shardings(self.state['parameters']))
    return gradient, jax.tree.map(lambda x: _struct(x, self._whole), sums)

  def _apply_gradient(self, state, gradient, sums, step):
    """One AdamW step, refused as a whole if the gradient is not finite.

    None either where it is 0 (every token clipped, say): momentum alone learns nothing.
    """
    norm = optax.tree_utils.tree_norm(gradient)
    rate = self._rate(step)
    changes, optimizer = self._optimizer.update(
      gradient, state['optimizer'], state['parameters']
    )
    changes = jax.tree.map(lambda change: -rate * change, changes)
    finite = jnp.isfinite(norm) & jnp.isfinite(optax.tree_utils.tree_norm(changes))
    good = finite & (norm > 0)
    new = dict(
      parameters=optax.apply_updates(state['parameters'], changes), optimizer=optimizer
    )
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
      'update/refused': 1.0 - finite,
      'update/skipped': 1.0 * (norm == 0),
    }
    if self._loss.dual_clip is not None:
      metrics['dual_clip_frac'] = sums['dual_clip_frac'] / tokens
    if 'tis' in sums:
      metrics['mismatch/tis_mean'] = sums['tis'] / tokens
    return state, metrics


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
    # The model that `parameters` are of: adapters are merged in them.
    self.config, self.loss = dataclasses.replace(config, lora=None), loss
    self.rows, self.row_tokens = rows, row_tokens
    self._step = -1  # of the last update
    self.programs = Programs(
      config,
      mesh=mesh,
      rows=rows,
      row_tokens=row_tokens,
      optimizer=optimizer,
      loss=loss,
      temperature=temperature,
      remat=remat,
      seed=seed,
    )
    at = shardings(self.programs.weights)
    parameters = meshes.put(parameters, at)
    self._reference = parameters if loss.kl_coef > 0 else None
    self._merged = None
    if config.lora is not None:
      adapters = self.programs.adapters
      self._merged = lora.Merged(parameters, adapters, at, config.lora.scale)
    self.state = self.programs.start(parameters)

  @property
  def parameters(self):
    """The policy's weights, float32, adapters merged in."""
    trained = self.state['parameters']
    return trained if self._merged is None else self._merged.by(trained)

  def like(self):
    """The state as shapes with shardings, for a checkpoint to fill."""
    return self.programs.state

  def gradient(self, batches: Sequence[Batch]):
    """The gradient of what is trained, over all microbatches, and sums for the log."""
    rest = {} if self._merged is None else self.parameters
    total = self.programs.zero()
    for batch in batches:
      arrays = meshes.put(dict(vars(batch)), self.programs.rows_at)
      total = self.programs.add(
        total, self.state['parameters'], rest, self._reference, arrays
      )
    return total

  def update(
    self, batches: Sequence[Batch], *, step: int | None = None
  ) -> dict[str, jax.Array]:
    """One step from these microbatches, at least one. Metrics are on their way.

    Args:
      step: of the run, for the schedule. None: the one after that of the last call.
    """
    self._step = self._step + 1 if step is None else step
    gradient, sums = self.gradient(batches)
    self.state, metrics = self.programs.apply(
      self.state, gradient, sums, np.int32(self._step)
    )
    return metrics

  def warm_up(self, *, share_prompt: bool = False) -> None:
    """Compiles the update, leaving the state as it was.

    Args:
      share_prompt: the update from SharedBatches.
    """
    kind = SharedBatch if share_prompt else Batch
    shapes = self.programs.batch(kind)
    nothing = kind(**{k: np.zeros(x.shape, x.dtype) for k, x in shapes.items()})
    gradient, sums = self.gradient([nothing])
    spoilt = jax.tree.map(lambda g: g + jnp.nan, gradient)
    self.state, _ = self.programs.apply(self.state, spoilt, sums, np.int32(0))
