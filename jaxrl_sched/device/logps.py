"""log p of given tokens without the logits [B, T, V], forward or backward.

The vocabulary is taken a slice at a time. What a slice adds to the gradient of the
head is whole at once, so that nothing as large as the head is summed over and over,
and each slice of a sharded head is gathered once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_sched.device.model import NEVER, ModelConfig

LOGITS_AT_ONCE = 2**22  # elements of [B, T, v] that a device holds in float32
LANES = 128  # of a TPU: slices are cut at multiples of it


def token_logps(
  hidden,
  head,
  config: ModelConfig,
  targets,
  *,
  temperature: float = 1.0,
  parts: int = 1,
  at_once: int = LOGITS_AT_ONCE,
):
  """log p(target) and entropy under softmax(logits / temperature).

  Args:
    hidden: [B, T, D].
    head: [V, D], of any dtype: slices of it are cast to that of `hidden`.
    targets: [B, T] int32.
    parts: into how many the mesh cuts V; each device slices its own.
    at_once: elements of a slice's logits, on all devices together.

  Returns:
    log-probs and entropies, each [B, T] float32. Entropies are for the log: they
    have no gradient.
  """
  b, t, _ = hidden.shape
  most = max(1, at_once // (b * t * parts))
  count = -(-config.vocab_size // parts // most)
  each = config.vocab_size // parts
  width = -(-each // count)
  if count > 1:
    width = min(each, -(-width // LANES) * LANES)
  cut = _Cut(config, parts, width, float(temperature))
  return _scored(hidden, head, targets, cut)


class _Cut(NamedTuple):
  """How the vocabulary is cut: `parts` times ceil(V / parts / width) slices."""

  config: ModelConfig
  parts: int
  width: int  # v
  temperature: float

  @property
  def each(self) -> int:  # tokens of a part
    return self.config.vocab_size // self.parts

  @property
  def count(self) -> int:
    return -(-self.each // self.width)

  def split(self, head):  # [V, D] -> [P, V / P, D]
    return head.reshape(self.parts, self.each, -1)

  def start(self, i):  # the last slice is as wide as the others, and begins earlier
    return jnp.minimum(i * self.width, self.each - self.width)

  def slice(self, head, i):  # [P, V / P, D] -> [P, v, D]
    return jax.lax.dynamic_slice_in_dim(head, self.start(i), self.width, axis=1)

  def logits(self, hidden, head, i):
    """Of slice i, given: logits [B, T, P, v] float32, and their ids [1, 1, P, v].

    -1 stands for an id that an earlier slice had; its logit, like that of ids no
    tokenizer knows, is NEVER.
    """
    logits = _product('btd,pvd->btpv', hidden, head)
    place = self.start(i) + jnp.arange(self.width)[None]
    ids = jnp.arange(self.parts)[:, None] * self.each + place
    ids = jnp.where(place >= i * self.width, ids, -1)[None, None]
    known = (ids >= 0) & (ids < self.config.known_tokens)
    return jnp.where(known, logits / self.temperature, NEVER), ids


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _scored(hidden, head, targets, cut: _Cut):
  return _forward(hidden, head, targets, cut)[0]


def _forward(hidden, head, targets, cut):
  split = cut.split(head)

  def add(i, carry):
    top, mass, moment, chosen = carry
    logits, ids = cut.logits(hidden, cut.slice(split, i).astype(hidden.dtype), i)
    new_top = jnp.maximum(top, logits.max(axis=3))
    below = logits - new_top[..., None]
    p, lower = jnp.exp(below), top - new_top
    moment = (moment + mass * lower) * jnp.exp(lower) + (p * below).sum(axis=3)
    mass = mass * jnp.exp(lower) + p.sum(axis=3)
    hit = ids == targets[..., None, None]
    return new_top, mass, moment, chosen + jnp.where(hit, logits, 0.0).sum(axis=3)

  # [B, T, P]: parts are put together once, after the loop, not in each slice. Masses
  # and moments are of logits less the largest: those of the logits would cancel.
  zero = jnp.zeros((*targets.shape, cut.parts), jnp.float32)
  start = (jnp.full_like(zero, NEVER), zero, zero, zero)
  top, mass, moment, chosen = jax.lax.fori_loop(0, cut.count, add, start)
  most = top.max(axis=2, keepdims=True)
  lower = top - most
  moment = ((moment + mass * lower) * jnp.exp(lower)).sum(axis=2)
  mass = (mass * jnp.exp(lower)).sum(axis=2)
  total = most[..., 0] + jnp.log(mass)
  found = chosen.sum(axis=2) - total, jnp.log(mass) - moment / mass
  return found, (hidden, head, targets, total)


def _backward(cut, kept, gradients):
  hidden, head, targets, total = kept
  gradient = gradients[0][..., None, None] / cut.temperature
  split = cut.split(head)

  def add(i, carry):
    d_hidden, d_head = carry
    part = cut.slice(split, i).astype(hidden.dtype)
    logits, ids = cut.logits(hidden, part, i)
    hit = (ids == targets[..., None, None]).astype(jnp.float32)
    d_logits = (hit - jnp.exp(logits - total[..., None, None])) * gradient
    d_logits = d_logits.astype(hidden.dtype)
    d_hidden += _product('btpv,pvd->btpd', d_logits, part)
    new = _product('btpv,btd->pvd', d_logits, hidden).astype(d_head.dtype)
    new += cut.slice(d_head, i)  # 0, but where the last slice begins earlier
    d_head = jax.lax.dynamic_update_slice_in_dim(d_head, new, cut.start(i), axis=1)
    return d_hidden, d_head

  b, t, d = hidden.shape
  start = (jnp.zeros((b, t, cut.parts, d), jnp.float32), jnp.zeros_like(split))
  d_hidden, d_head = jax.lax.fori_loop(0, cut.count, add, start)
  d_hidden = d_hidden.sum(axis=2).astype(hidden.dtype)
  return d_hidden, d_head.reshape(head.shape), None


_scored.defvjp(_forward, _backward)
