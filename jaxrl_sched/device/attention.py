"""Attention on packed rows and on a cache. Scores and softmax in float32."""

import functools

import jax
import jax.numpy as jnp

from jaxrl_sched.device import mesh as meshes
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
  if meshes.is_one_cpu(mesh):
    return _by_head(q, k, v, mask)
  return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


def _by_head(q, k, v, mask):
  """As `jax.nn.dot_product_attention`, by matrices that follow one another in memory.

  Takes a CPU four fifths of the time. Not for arrays cut by a mesh, of which it makes
  one axis of rows and heads.
  """
  b, t, n, h = q.shape
  groups = k.shape[2]  # of heads that share a k and v
  each = n // groups

  def stacked(x):  # [B, T, K, H] -> [B * K, T, H]
    return x.transpose(0, 2, 1, 3).reshape(b * groups, t, h)

  q = q.reshape(b, t, groups, each, h).transpose(0, 2, 3, 1, 4)
  q = q.reshape(b * groups, each * t, h)
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  scores = product('bth,bsh->bts', q, stacked(k)) * h**-0.5
  scores = jnp.where(mask[:, None], scores.reshape(b, n, t, t), -1e30)
  p = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
  mass = p.sum(axis=-1).reshape(b * groups, each * t, 1)
  p = p.reshape(b * groups, each * t, t).astype(v.dtype)
  mixed = (product('bts,bsh->bth', p, stacked(v)) / mass).astype(v.dtype)
  mixed = mixed.reshape(b, groups, each, t, h).transpose(0, 3, 1, 2, 4)
  return mixed.reshape(b, t, n, h)


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
