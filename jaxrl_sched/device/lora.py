"""LoRA (arXiv:2106.09685): a frozen weight W acts as W + (alpha / rank) A B.

Sampler and learner compute with one and the same merged weights: beside a bfloat16 W
adapters would not be what is left of them in a bfloat16 sum. In the learner A and B
stand beside the merged weight only to receive their gradients, so that no gradient
of W is ever made. They are ordinary weights of the decoder, under the key 'lora' of
the module whose weights they adapt. Left out of LoRA: dropout, biases, adapters of
the embedding and of the head.
"""

from collections.abc import Callable
import dataclasses
import difflib
import functools
from typing import Any
import zlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sched.device import mesh as meshes

MOST_SCALE = 1000  # what is usual is 1 to 64
TARGETS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')
_KEY = 'lora'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
  """Which weights have adapters, and how wide and strong these are."""

  rank: int = 16
  alpha: float = 32.0
  targets: tuple = TARGETS

  def __post_init__(self):
    if self.rank < 1:
      raise ValueError(f'lora.rank: {self.rank}, expected at least 1')
    if not 0 < self.scale <= MOST_SCALE:
      wanted = f'above 0, at most {MOST_SCALE} times the rank'
      raise ValueError(f'lora.alpha: {self.alpha}, expected {wanted}')
    known = ', '.join(TARGETS)
    if not self.targets:
      raise ValueError(f'lora.targets: {self.targets}, expected some of {known}')
    for name in self.targets:
      if name not in TARGETS:
        short = str(name).removesuffix('_proj')  # the name in Hugging Face's models
        near = difflib.get_close_matches(short, TARGETS, 1)
        hint = f'; did you mean {near[0]!r}?' if near else ''
        raise ValueError(f'lora.targets: {name!r}, expected some of {known}{hint}')
    if len(set(self.targets)) < len(self.targets):
      raise ValueError(f'lora.targets: {self.targets}, expected each name once')

  @property
  def scale(self) -> float:
    return self.alpha / self.rank

  def check_rank(self, model) -> None:
    """Refuses a rank above the smaller side of a target: there is no more to gain.

    Args:
      model: the ModelConfig of the base.
    """
    n, k = (heads * model.head_dim for heads in (model.heads, model.kv_heads))
    sides = dict(q=n, k=k, v=k, o=n, gate=model.d_ff, up=model.d_ff, down=model.d_ff)
    for name in self.targets:
      smaller = min(model.d_model, sides[name])
      if self.rank > smaller:
        raise ValueError(
          f'lora.rank: {self.rank}, expected at most {smaller}, the smaller side of '
          f'{name}'
        )


class Adapter(nnx.Module):
  """scale (x A) B, where A takes in the first `ins` axes of the weight."""

  def __init__(self, lora: Lora, rngs: nnx.Rngs, weight: nnx.Param, ins: int):
    axes = weight.get_metadata()['axes']
    # The paper's normal, with the spread of PEFT's default, so that learning rates
    # found there fit here. B is 0: training starts from the base itself.
    std = (3 * np.prod(weight.shape[:ins])) ** -0.5
    a = std * jax.random.normal(rngs.lora(), (*weight.shape[:ins], lora.rank))
    b = jnp.zeros((lora.rank, *weight.shape[ins:]))
    self.a = nnx.Param(a.astype(jnp.float32), axes=(*axes[:ins], None))
    self.b = nnx.Param(b.astype(jnp.float32), axes=(None, *axes[ins:]))
    self.ins, self.scale = ins, lora.scale

  def __call__(self, x):  # [..., in] -> [..., out]
    narrow = jnp.tensordot(x, self.a[...], axes=self.ins)
    return jnp.tensordot(self.scale * narrow, self.b[...], axes=1)


def declare(
  lora: Lora | None, rngs: nnx.Rngs, weights: dict[str, tuple[nnx.Param, int]]
) -> nnx.Dict:
  """The adapters of one module.

  Args:
    weights: by name, each with the number of its axes that x is contracted with.
  """
  targets = () if lora is None else lora.targets
  return nnx.Dict(
    {
      name: Adapter(lora, rngs, weight, ins)
      for name, (weight, ins) in weights.items()
      if name in targets
    }
  )


def add(adapters: nnx.Dict, name: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """y = x W, with a gradient for W's adapter if it has one.

  W is merged already: y's value and its gradient of x are right as they are.
  """
  if name not in adapters:
    return y
  part = adapters[name](jax.lax.stop_gradient(x))
  return y + (part - jax.lax.stop_gradient(part))


# --- trees ---------------------------------------------------------------------------


def split(tree: dict) -> tuple[dict, dict]:
  """A tree like the parameters (or shapes, axes) as base and adapters."""
  base, found = {}, {}
  for key, node in tree.items():
    if key == _KEY:
      found[key] = node
    elif isinstance(node, dict):
      base[key], inner = split(node)
      if inner:
        found[key] = inner
    else:
      base[key] = node
  return base, found


def join(tree: dict, over: dict) -> dict:
  """Both trees in one; where both have a leaf it is that of `over`."""
  out = dict(tree)
  for key, node in over.items():
    deeper = isinstance(node, dict) and key in tree
    out[key] = join(tree[key], node) if deeper else node
  return out


def map_adapted(function: Callable[[Any, dict], Any], base: dict, adapters: dict):
  """function(W, {'a': A, 'b': B}) for every W that has an adapter, at W's place."""
  out = {}
  for key, node in adapters.items():
    if key == _KEY:
      out |= {name: function(base[name], pair) for name, pair in node.items()}
    else:
      out[key] = map_adapted(function, base[key], node)
  return out


def merge(base: dict, adapters: dict, scale: float) -> dict:
  """W + scale A B in float32, of the weights that have adapters alone."""

  def one(weight, pair):  # [L, in, out], [L, in, rank], [L, rank, out]
    a, b = pair['a'], pair['b']
    along = (((a.ndim - 1,), (1,)), ((0,), (0,)))
    # Else a TPU would multiply in bfloat16.
    product = jax.lax.dot_general(a, b, along, precision='highest')
    return weight + scale * product

  return map_adapted(one, base, adapters)


class Merged:
  """The base with the adapters of one version merged in.

  Args:
    base: stays as it is, uncopied, and lends what has no adapter.
    adapters: a tree like them.
    at: shardings of the base.
  """

  def __init__(self, base: dict, adapters: dict, at: dict, scale: float):
    self._base, self._whole, self._version = base, None, None
    self._merge = jax.jit(
      functools.partial(merge, scale=scale),
      out_shardings=map_adapted(lambda sharding, _: sharding, at, adapters),
    )

  def by(self, adapters: dict) -> dict:
    """Made when these adapters are first asked for."""
    if self._version is not adapters:
      self._whole = self._version = None  # not two of them at a time
      self._whole = join(self._base, self._merge(self._base, adapters))
      self._version = adapters
    return self._whole


def fingerprint(parameters: dict, mesh: jax.sharding.Mesh) -> str:
  """Tells one base from another by every bit of it, the same on all meshes.

  A checkpoint holds adapters only: over another base they would mean nothing.
  """

  def checksum(weight):
    bits = jax.lax.bitcast_convert_type(weight, jnp.uint32)
    place = jnp.zeros(weight.shape, jnp.uint32)
    for axis, length in enumerate(weight.shape):
      place = place * length + jax.lax.broadcasted_iota(jnp.uint32, weight.shape, axis)
    # Modulo 2**32, where the order of a sum does not matter.
    return jnp.sum(_mixed(bits ^ _mixed(place)), dtype=jnp.uint32)

  whole = meshes.sharding(mesh)
  sums = jax.jit(lambda tree: jax.tree.map(checksum, tree), out_shardings=whole)
  values = jax.tree.leaves(jax.device_get(sums(parameters)))
  return f'{zlib.crc32(b"".join(v.tobytes() for v in values)):08x}'


def _mixed(x: jax.Array) -> jax.Array:
  """Uint32 one to one to uint32 as if by chance (MurmurHash3's last step)."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
