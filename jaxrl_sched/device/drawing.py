"""Drawing tokens from logits: top-k, top-p, and an inverse CDF. All in float32.

R slots, V vocabulary.
"""

import jax
import jax.numpy as jnp

from jaxrl_sched.device.model import NEVER

BLOCK = 128  # of the two-level inverse CDF


def keep_top(logits, top_k, top_p):
  """NEVER for what top-k, then top-p, leaves out. logits [R, V], top_k, top_p [R].

  Top-p keeps the fewest likeliest tokens whose mass reaches top_p, at least one.
  """
  order = jnp.argsort(-logits, axis=-1, stable=True)
  ranked = jnp.take_along_axis(logits, order, axis=-1)
  rank = jnp.arange(logits.shape[-1])[None]
  ranked = jnp.where((top_k[:, None] > 0) & (rank >= top_k[:, None]), NEVER, ranked)
  p = jax.nn.softmax(ranked, axis=-1)
  before = jnp.cumsum(p, axis=-1) - p
  # The margin: sums that reach top_p on paper may fall short of it by rounding.
  reached = (before >= top_p[:, None] - 1e-6) & (top_p[:, None] < 1)
  ranked = jnp.where(reached & (rank > 0), NEVER, ranked)
  rows = jnp.arange(logits.shape[0])[:, None]
  return jnp.zeros_like(logits).at[rows, order].set(ranked)


def pick(logits, uniform):
  """Inverse CDF in two levels: a block of the vocabulary, then a token in it.

  A running sum over the whole vocabulary in float32 would lose tokens rarer than
  its rounding; sums of 128 terms do not. A token of no mass is never picked: each
  level asks for the first running sum strictly above u * total, and u < 1.

  Args:
    logits: [R, V] float32. uniform: [R, 2] in [0, 1).

  Returns:
    [R] int32.
  """
  r, v = logits.shape
  mass = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
  mass = jnp.pad(mass, ((0, 0), (0, -v % BLOCK))).reshape(r, -1, BLOCK)

  def first_above(mass, u):  # [R, n], [R] -> [R]
    # Parallel sums are not monotone by an ulp: what has no mass is left out by name.
    total = jnp.where(mass > 0, jnp.cumsum(mass, axis=-1), 0.0)
    most = jnp.max(total, axis=-1, keepdims=True)
    return jnp.argmax(total > u[:, None] * most, axis=-1)

  block = first_above(mass.sum(axis=-1), uniform[:, 0])
  inside = jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0]
  return (block * BLOCK + first_above(inside, uniform[:, 1])).astype(jnp.int32)


def draw_tokens(logits, state):
  """One token a slot and its log-prob under the distribution it was drawn from.

  Greedy slots (temperature 0) draw from a point: their log-prob is 0.

  Args:
    logits: [R, V] float32, of the model. state: the slots' settings, as in `sampler.py`.

  Returns:
    tokens [R] int32, log-probs [R] float32.
  """
  greedy = state['temperature'] == 0
  logits = logits / jnp.where(greedy, 1.0, state['temperature'])[:, None]

  early = state['made'] + 1 < state['minimum']  # too early to stop

  def forbid_stop(x):
    rows = jnp.arange(x.shape[0])[:, None]
    stop = jnp.where(early[:, None] & (state['stop'] >= 0), state['stop'], x.shape[1])
    return x.at[rows, stop].set(NEVER, mode='drop')

  logits = jax.lax.cond(jnp.any(early), forbid_stop, lambda x: x, logits)

  filtered = ((state['top_k'] > 0) | (state['top_p'] < 1)) & ~greedy
  logits = jax.lax.cond(
    jnp.any(filtered & state['alive']),
    lambda x: keep_top(x, state['top_k'], state['top_p']),
    lambda x: x,
    logits,
  )

  def uniform(key, t):
    key = jax.random.wrap_key_data(key, impl='threefry2x32')
    return jax.random.uniform(jax.random.fold_in(key, t), (2,))

  drawn = pick(logits, jax.vmap(uniform)(state['key'], state['made']))
  token = jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), drawn)
  chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
  logp = chosen - jax.nn.logsumexp(logits, axis=-1)
  return token, jnp.where(greedy, 0.0, logp)
