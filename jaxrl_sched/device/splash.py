"""Splash attention on TPUs: causal attention inside segments, never [T, T] in memory.

The kernel is jax's own: it comes with jax, whose releases test it. Tokamax (0.0.12) has
a descendant, under a private name that it calls experimental, and brings a dozen
dependencies.
"""

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as kernels
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxrl_sched.device import mesh as meshes

LANES = 128  # of a TPU: rows are cut into blocks of multiples of it
LARGEST_BLOCK = 512  # scores of a block are in fast memory, [512, 512] float32


def attend(q, k, v, segments, *, mesh, axes, interpret=False):
  """What `attention.packed` gives, by the kernel, on each device for its part.

  Rows that are no multiple of 128 on every device are padded.

  Args:
    axes: the logical axes of B and T. Queries are cut along T; keys and values are
      gathered, since a query may see them all.
    interpret: run the kernel's program without a TPU, for tests.
  """
  b, t, n, h = q.shape
  row, token = axes
  parts = 1 if token is None else meshes.size(mesh, token)
  ahead = -t % (LANES * parts)
  if ahead:  # at the end, where no other sees it; it sees itself, so it is finite
    q, k, v = (jnp.pad(x, ((0, 0), (0, ahead), (0, 0), (0, 0))) for x in (q, k, v))
    segments = jnp.pad(segments, ((0, 0), (0, ahead)))
  kernel = _kernel(n, t + ahead, mesh, parts, interpret)
  of_kernel = meshes.spec('heads', token)
  q = (q.astype(jnp.float32) * h**-0.5).astype(q.dtype)  # the kernel does not scale
  out = jax.shard_map(
    _rows,
    mesh=mesh,
    in_specs=(
      kernel.manual_sharding_spec(NamedSharding(mesh, of_kernel)),
      meshes.spec(row, 'heads', token, None),
      meshes.spec(row, 'kv_heads', None, None),
      meshes.spec(row, 'kv_heads', None, None),
      meshes.spec(row, token),
      meshes.spec(row, None),
    ),
    out_specs=meshes.spec(row, 'heads', token, None),
    check_vma=False,  # a kernel does not say over which axes its output varies
  )(kernel, *(x.swapaxes(1, 2) for x in (q, k, v)), segments, segments)
  return out.swapaxes(1, 2)[:, :t]


def _rows(kernel, q, k, v, own, seen):
  """q [B, N, T, H]; k, v [B, K, S, H]; segments of queries [B, T] and keys [B, S]."""
  return jax.vmap(kernel)(q, k, v, kernels.SegmentIds(own, seen))


def _kernel(heads: int, t: int, mesh, parts: int, interpret: bool):
  """For all heads and T, to be cut by the mesh; forward and backward."""
  each = t // parts
  block = max(x for x in range(LANES, LARGEST_BLOCK + 1, LANES) if each % x == 0)
  sizes = kernels.BlockSizes(
    block_q=block,
    block_kv=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_q_dq=block,
    block_kv_dq=block,
  )
  return kernels.make_splash_mha(
    kernels.MultiHeadMask([kernels.CausalMask((t, t))] * heads),
    block_sizes=sizes,
    head_shards=meshes.size(mesh, 'heads'),
    q_seq_shards=parts,
    interpret=interpret,
  )
