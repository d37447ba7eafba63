"""Attention on packed rows and on a cache. Scores and softmax in float32."""

import jax
import jax.numpy as jnp

from jaxrl_sched.device import splash


def packed(q, k, v, segments, answers=None, *, mesh=None, axes=('rows', 'tokens')):
  """Causal attention inside segments, each a prompt and one answer, or several.

  On TPUs by the splash kernel. By `jax.nn.dot_product_attention`, with scores in
  memory, elsewhere, and for what the kernel does not take or is not worth: several
  answers to a segment, and rows shorter than its smallest block.

  Args:
    q: [B, T, N, H]; k, v: [B, T, K, H].
    segments: [B, T] int32; 0 is padding, which sees padding only.
    answers: [B, T] int32, 0 off the answers; none sees another. None: nothing in a
      segment is hidden from what comes after it.
    mesh: over which the arrays are spread; None: one device, of whatever kind.
    axes: the logical axes of B and T.

  Returns:
    [B, T, N, H].
  """
  t = q.shape[1]
  on_tpu = mesh is not None and mesh.devices.flat[0].platform == 'tpu'
  if on_tpu and answers is None and t >= splash.LANES:
    return splash.attend(q, k, v, segments, mesh=mesh, axes=axes)
  same = segments[:, :, None] == segments[:, None, :]
  causal = jnp.arange(t)[:, None] >= jnp.arange(t)[None, :]
  mask = same & causal[None]
  if answers is not None:
    keys = answers[:, None, :]
    mask &= (keys == 0) | (keys == answers[:, :, None])
  return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


def write(k_cache, v_cache, k, v, positions):
  """Puts k and v [R, K, H] at each slot's position [R]; S or more is dropped."""
  slots = jnp.arange(k.shape[0])[:, None]
  heads = jnp.arange(k.shape[1])[None]
  return tuple(
    cache.at[slots, heads, positions[:, None]].set(new.astype(cache.dtype), mode='drop')
    for cache, new in ((k_cache, k), (v_cache, v))
  )


def cached(q, k_cache, v_cache, positions, *, used: int):
  """One query a slot over the cache's first `used` entries up to its own position.

  Args:
    q: [R, N, H]; k_cache, v_cache: [R, K, S, H], since a TPU would copy what has heads
      between places and width, all of it for each token; positions: [R] int32.

  Returns:
    [R, N, H].
  """
  r, n, h = q.shape
  k, v = k_cache[:, :, :used], v_cache[:, :, :used]
  q = q.reshape(r, k.shape[1], -1, h)
  scores = jnp.einsum('rkgh,rksh->rkgs', q, k, preferred_element_type=jnp.float32)
  seen = jnp.arange(used)[None] <= positions[:, None]
  scores = jnp.where(seen[:, None, None], scores * h**-0.5, -jnp.inf)
  p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum('rkgs,rksh->rkgh', p, v).reshape(r, n, h)
