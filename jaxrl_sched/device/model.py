"""The decoder: Llama's and Qwen's block, on packed rows and on a cache.

Each weight is declared once, with its shape, logical axes and initializer; shapes
and shardings are views of that (`abstract`, `mesh.py`). Outside this file
parameters are a plain tree of arrays, layers stacked on a leading axis L.
"""

import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from jaxrl_sched.device import attention

# A logit that no softmax sees, yet finite: -inf would make nan of 0 * logit.
NEVER = -1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """What determines the function, in the project's axis letters."""

  vocab_size: int  # V, rows of the embedding
  known_tokens: int  # ids the tokenizer knows; rows past it are never predicted
  d_model: int  # D
  d_ff: int  # F
  layers: int  # L
  heads: int  # N
  kv_heads: int  # K
  head_dim: int  # H
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  tied: bool = True  # the head is the embedding transposed
  qkv_bias: bool = False  # Qwen2
  qk_norm: bool = False  # Qwen3
  max_positions: int = 4096
  dtype: str = 'float32'  # of the computation; masters are float32

  def __post_init__(self):
    sizes = ('vocab_size', 'd_model', 'd_ff', 'layers', 'heads', 'kv_heads', 'head_dim')
    for name in sizes:
      if vars(self)[name] < 1:
        raise ValueError(f'model.{name}: {vars(self)[name]}, expected at least 1')
    if self.dtype not in ('float32', 'bfloat16'):
      raise ValueError(f'model.dtype: {self.dtype!r}, expected float32 or bfloat16')
    if self.heads % self.kv_heads:
      raise ValueError(
        f'model.kv_heads: {self.kv_heads}, expected a divisor of heads={self.heads}'
      )
    if not 0 < self.known_tokens <= self.vocab_size:
      raise ValueError(
        f'model.known_tokens: {self.known_tokens}, expected 1 to '
        f'vocab_size={self.vocab_size}'
      )
    if self.head_dim % 2:
      raise ValueError(f'model.head_dim: {self.head_dim}, expected an even number')


def _weight(rngs, shape, axes, *, std):
  value = std * jax.random.normal(rngs.params(), shape, jnp.float32)
  return nnx.Param(value, axes=axes)


def _rms_norm(x, scale, eps):
  """In float32 whatever comes in."""
  x32 = x.astype(jnp.float32)
  x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
  return (x32 * scale.astype(jnp.float32)).astype(x.dtype)


def rotation(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
  """cos and sin, [..., H / 2] float32, of rotary embedding (arXiv:2104.09864)."""
  half = config.head_dim // 2
  frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[..., None].astype(jnp.float32) * frequency.reshape(
    (1,) * positions.ndim + (half,)
  )
  return jnp.cos(angle), jnp.sin(angle)


def _rotate(x, cos, sin):  # x [..., heads, H]; the two halves are a pair (HF's layout)
  cos, sin = cos[..., None, :], sin[..., None, :]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class Norm(nnx.Module):
  def __init__(self, width, axes, config):
    self.scale = nnx.Param(jnp.ones(width, jnp.float32), axes=axes)
    self.eps = config.norm_eps

  def __call__(self, x):
    return _rms_norm(x, self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,)), self.eps)


class Attention(nnx.Module):
  def __init__(self, c: ModelConfig, rngs):
    d, n, k, h = c.d_model, c.heads, c.kv_heads, c.head_dim
    std = d**-0.5
    self.q = _weight(rngs, (d, n, h), ('embed', 'heads', 'head'), std=std)
    self.k = _weight(rngs, (d, k, h), ('embed', 'kv_heads', 'head'), std=std)
    self.v = _weight(rngs, (d, k, h), ('embed', 'kv_heads', 'head'), std=std)
    out_std = (2 * c.layers * n * h) ** -0.5
    self.o = _weight(rngs, (n, h, d), ('heads', 'head', 'embed'), std=out_std)
    if c.qkv_bias:
      self.q_bias = nnx.Param(jnp.zeros((n, h)), axes=('heads', 'head'))
      self.k_bias = nnx.Param(jnp.zeros((k, h)), axes=('kv_heads', 'head'))
      self.v_bias = nnx.Param(jnp.zeros((k, h)), axes=('kv_heads', 'head'))
    if c.qk_norm:
      self.q_norm = Norm(h, ('head',), c)
      self.k_norm = Norm(h, ('head',), c)
    self.config = c

  def qkv(self, x, cos, sin):  # x [..., D] -> [..., N, H], [..., K, H], [..., K, H]
    q, k, v = (
      jnp.einsum('...d,dnh->...nh', x, w[...]) for w in (self.q, self.k, self.v)
    )
    if self.config.qkv_bias:
      lead = (1,) * (x.ndim - 1)
      q, k, v = (
        y + b[...].reshape(lead + b.shape)
        for y, b in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias))
      )
    if self.config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v

  def out(self, y):  # [..., N, H] -> [..., D]
    return jnp.einsum('...nh,nhd->...d', y, self.o[...])


class Mlp(nnx.Module):
  def __init__(self, c: ModelConfig, rngs):
    d, f = c.d_model, c.d_ff
    self.gate = _weight(rngs, (d, f), ('embed', 'mlp'), std=d**-0.5)
    self.up = _weight(rngs, (d, f), ('embed', 'mlp'), std=d**-0.5)
    self.down = _weight(rngs, (f, d), ('mlp', 'embed'), std=(2 * c.layers * f) ** -0.5)

  def __call__(self, x):
    return (jax.nn.silu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


class Block(nnx.Module):
  def __init__(self, c: ModelConfig, rngs):
    self.attn_norm = Norm(c.d_model, ('embed',), c)
    self.attn = Attention(c, rngs)
    self.mlp_norm = Norm(c.d_model, ('embed',), c)
    self.mlp = Mlp(c, rngs)

  def __call__(self, x, cos, sin, attend):
    """`attend(q, k, v)` gives the mixed values and what it wants kept of k and v."""
    y, kept = attend(*self.attn.qkv(self.attn_norm(x), cos, sin))
    x = x + self.attn.out(y)
    return x + self.mlp(self.mlp_norm(x)), kept


class Decoder(nnx.Module):
  def __init__(self, c: ModelConfig, rngs):
    self.config = c
    embed_axes = ('vocab', 'embed')
    self.embed = _weight(rngs, (c.vocab_size, c.d_model), embed_axes, std=0.02)

    @nnx.split_rngs(splits=c.layers)
    @nnx.vmap
    def stack(rngs):
      return Block(c, rngs)

    self.blocks = stack(rngs)
    self.norm = Norm(c.d_model, ('embed',), c)
    if not c.tied:
      shape = (c.d_model, c.vocab_size)
      self.head = _weight(rngs, shape, ('embed', 'vocab'), std=0.02)

  def layers(self) -> list[Block]:
    """One module a layer, for loops that are faster unrolled."""
    graph, stacked = nnx.split(self.blocks)
    return [
      nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], stacked))
      for i in range(self.config.layers)
    ]

  def rows(self, tokens, segments, positions, *, remat=False, keep_kv=False):
    """Packed rows, all [B, T] int32 -> hidden [B, T, D]; with `keep_kv` also k and v.

    A token sees its own segment up to itself. k and v are [L, B, T, K, H].
    """
    cos, sin = rotation(positions, self.config)
    graph, stacked = nnx.split(self.blocks)

    def attend(q, k, v):
      return attention.packed(q, k, v, segments), (k, v) if keep_kv else None

    def layer(x, state):
      return nnx.merge(graph, state)(x, cos, sin, attend)

    if remat:
      layer = jax.checkpoint(layer, prevent_cse=False)
    x, kv = jax.lax.scan(layer, self.embed[...][tokens], stacked)
    return (self.norm(x), kv) if keep_kv else self.norm(x)

  def step(self, layers, tokens, positions, cache, *, used: int):
    """One token in each slot.

    Args:
      layers: what `layers()` gave, made outside the loop that calls this.
      tokens: [R] int32.
      positions: [R] int32, where the token's k and v go; S or more: nowhere.
      cache: L pairs of k and v, each [R, S, K, H].
      used: no slot's position reaches this; the cache is read up to it.

    Returns:
      hidden [R, D] and the cache.
    """
    cos, sin = rotation(positions, self.config)
    x = self.embed[...][tokens]
    new = []
    for block, (k_cache, v_cache) in zip(layers, cache, strict=True):

      def attend(q, k, v, k_cache=k_cache, v_cache=v_cache):
        kept = attention.write(k_cache, v_cache, k, v, positions)
        return attention.cached(q, *kept, positions, used=used), kept

      x, kept = block(x, cos, sin, attend)
      new.append(kept)
    return self.norm(x), tuple(new)

  def head_kernel(self):  # [D, V]
    return self.embed[...].T if self.config.tied else self.head[...]


def head_logits(hidden, kernel, config: ModelConfig):
  """[..., D] and [D, V] -> [..., V] float32; ids no tokenizer knows get NEVER."""
  out = jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)
  if config.known_tokens == config.vocab_size:
    return out
  known = jnp.arange(config.vocab_size) < config.known_tokens
  return jnp.where(known.reshape((1,) * (out.ndim - 1) + (-1,)), out, NEVER)


@functools.lru_cache(maxsize=8)
def _skeleton(config: ModelConfig):
  return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))


def abstract(config: ModelConfig) -> tuple[dict, dict]:
  """Two trees like the parameters: shapes (float32), and logical axis names."""
  _, state = _skeleton(config)
  shapes = nnx.to_pure_dict(state)
  axes = {}
  for path, variable in nnx.to_flat_state(state):
    node = axes
    for key in path[:-1]:
      node = node.setdefault(key, {})
    names = variable.get_metadata()['axes']
    node[path[-1]] = ('layer', *names) if path[0] == 'blocks' else names
  return shapes, axes


def init(config: ModelConfig, seed: int) -> dict:
  """Fresh float32 parameters."""
  return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(seed))))


def decoder(config: ModelConfig, parameters: dict) -> Decoder:
  """The module over these parameters, cast to the dtype of the computation."""
  graph, state = _skeleton(config)
  state = jax.tree.map(lambda x: x, state)  # a copy: the cached one stays abstract
  cast = jax.tree.map(lambda w: w.astype(config.dtype), parameters)
  nnx.replace_by_pure_dict(state, cast)
  return nnx.merge(graph, state)


@functools.partial(jax.jit, static_argnums=1)
def _logits(parameters, config, tokens, positions, segments):
  model = decoder(config, parameters)
  hidden = model.rows(tokens, segments, positions)
  return head_logits(hidden, model.head_kernel(), config)


def logits(
  parameters: dict,
  config: ModelConfig,
  tokens: Any,  # [B, T] int
  *,
  positions: Any = None,  # [B, T]; None: 0, 1, ... in each segment
  segments: Any = None,  # [B, T]; None: a row is one segment; 0 is padding
) -> jax.Array:
  """[B, T, V] float32. For tests and small inputs: whole rows at once.

  Segments do not see each other and their positions restart.
  """
  tokens = jnp.asarray(tokens, jnp.int32)
  if segments is None:
    segments = jnp.ones_like(tokens)
  segments = jnp.asarray(segments, jnp.int32)
  if positions is None:
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    positions = place - jax.lax.cummax(jnp.where(starts, place, 0), axis=1)
  positions = jnp.asarray(positions, jnp.int32)
  return _logits(parameters, config, tokens, positions, segments)
