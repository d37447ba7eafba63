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
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_sched.device import attention, lora, rope
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device.lora import Lora

# A logit that no softmax sees, yet finite: -inf would make nan of 0 * logit.
NEVER = -1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """What determines the function, in the project's axis letters."""

  vocab_size: int  # V, rows of the embedding
  known_tokens: int  # ids the tokenizer knows; rows past it are never predicted
  vocab_padding: int = 0  # the last of these rows: zeros, so that V can be cut anywhere
  d_model: int  # D
  d_ff: int  # F
  layers: int  # L
  heads: int  # N
  kv_heads: int  # K
  head_dim: int  # H
  rope_theta: float = 10_000.0
  rope_scaling: rope.Scaling | None = None
  norm_eps: float = 1e-6
  tied: bool = True  # the head is the embedding transposed
  qkv_bias: bool = False  # Qwen2, and Llama's attention_bias with
  out_bias: bool = False  # that of the output projection
  mlp_bias: bool = False  # Llama
  qk_norm: bool = False  # Qwen3
  max_positions: int = 4096
  dtype: str = 'float32'  # of the computation; masters are float32
  lora: Lora | None = None  # adapters beside the weights

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
    if not 0 <= self.vocab_padding < self.vocab_size:
      raise ValueError(
        f'model.vocab_padding: {self.vocab_padding}, expected 0 to less than '
        f'vocab_size={self.vocab_size}'
      )
    if not 0 < self.known_tokens <= self.vocab_used:
      raise ValueError(
        f'model.known_tokens: {self.known_tokens}, expected 1 to '
        f'vocab_size={self.vocab_used}'
      )
    if not isinstance(self.rope_scaling, rope.Scaling | None):
      raise ValueError(
        f'model.rope_scaling: {self.rope_scaling!r}, expected one of rope.py or None'
      )
    if self.head_dim % 2:
      raise ValueError(f'model.head_dim: {self.head_dim}, expected an even number')

  @property
  def vocab_used(self) -> int:
    """Rows that a Hugging Face file has."""
    return self.vocab_size - self.vocab_padding


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
  frequency, factor = rope.frequencies(
    config.rope_theta, config.head_dim, config.rope_scaling
  )
  lead = (1,) * positions.ndim
  angle = positions[..., None].astype(jnp.float32) * frequency.reshape((*lead, -1))
  return factor * jnp.cos(angle), factor * jnp.sin(angle)


def _rotate(x, cos, sin):  # x [..., heads, H]; the two halves are a pair (HF's layout)
  cos, sin = cos[..., None, :], sin[..., None, :]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _to_rows(x, mesh):
  """From the embedding's layout, cut along D, to that of rows and tokens.

  Untold, every device of an fsdp axis would compute all rows. Told at once, XLA would
  gather all of x on every device of a mesh with a sequence axis; it moves one axis at
  a time well, the last of those that cut D first.
  """
  ways = (('data', None, ('fsdp', 'sequence')), ('data', 'sequence', 'fsdp'))
  for way in (*ways, meshes.spec('rows', 'tokens', None)):
    at = NamedSharding(mesh, PartitionSpec(*way))
    x = jax.lax.with_sharding_constraint(x, at)
  return x


def _to_slots(x, mesh):
  """Cut along its first axis, as slots are; all else whole."""
  if mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, meshes.sharding(mesh, 'slots'))


class Norm(nnx.Module):
  def __init__(self, width, axes, config):
    self.scale = nnx.Param(jnp.ones(width, jnp.float32), axes=axes)
    self.eps = config.norm_eps

  def __call__(self, x):
    return _rms_norm(x, self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,)), self.eps)


# Weights [D, N, H] are multiplied as [D, N * H], in which form samplers have them.


def _to_heads(x, w, width):  # [..., D] -> [..., N, H]
  return (x @ w.reshape(w.shape[0], -1)).reshape(*x.shape[:-1], -1, width)


def _from_heads(y, w):  # [..., N, H] -> [..., D]
  return y.reshape(*y.shape[:-2], -1) @ w.reshape(-1, w.shape[-1])


def _biased(y, bias):  # [..., *bias]
  b = bias[...]
  return y + b.reshape((1,) * (y.ndim - b.ndim) + b.shape)


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
    if c.out_bias:
      self.o_bias = nnx.Param(jnp.zeros(d), axes=('embed',))
    if c.qk_norm:
      self.q_norm = Norm(h, ('head',), c)
      self.k_norm = Norm(h, ('head',), c)
    projections = {'q': (self.q, 1), 'k': (self.k, 1), 'v': (self.v, 1)}
    self.lora = lora.declare(c.lora, rngs, projections | {'o': (self.o, 2)})
    self.config = c

  def qkv(self, x, cos, sin):  # x [..., D] -> [..., N, H], [..., K, H], [..., K, H]
    q, k, v = (
      lora.add(self.lora, name, x, _to_heads(x, w[...], self.config.head_dim))
      for name, w in (('q', self.q), ('k', self.k), ('v', self.v))
    )
    if self.config.qkv_bias:
      q, k, v = (
        _biased(y, b) for y, b in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias))
      )
    if self.config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v

  def out(self, y):  # [..., N, H] -> [..., D]
    out = lora.add(self.lora, 'o', y, _from_heads(y, self.o[...]))
    return _biased(out, self.o_bias) if self.config.out_bias else out


class Mlp(nnx.Module):
  def __init__(self, c: ModelConfig, rngs):
    d, f = c.d_model, c.d_ff
    self.gate = _weight(rngs, (d, f), ('embed', 'mlp'), std=d**-0.5)
    self.up = _weight(rngs, (d, f), ('embed', 'mlp'), std=d**-0.5)
    self.down = _weight(rngs, (f, d), ('mlp', 'embed'), std=(2 * c.layers * f) ** -0.5)
    weights = {'gate': (self.gate, 1), 'up': (self.up, 1), 'down': (self.down, 1)}
    self.lora = lora.declare(c.lora, rngs, weights)
    self.has_bias = c.mlp_bias
    if c.mlp_bias:
      self.gate_bias = nnx.Param(jnp.zeros(f), axes=('mlp',))
      self.up_bias = nnx.Param(jnp.zeros(f), axes=('mlp',))
      self.down_bias = nnx.Param(jnp.zeros(d), axes=('embed',))

  def __call__(self, x):
    gate = lora.add(self.lora, 'gate', x, x @ self.gate[...])
    up = lora.add(self.lora, 'up', x, x @ self.up[...])
    if self.has_bias:
      gate, up = _biased(gate, self.gate_bias), _biased(up, self.up_bias)
    y = jax.nn.silu(gate) * up
    down = lora.add(self.lora, 'down', y, y @ self.down[...])
    return _biased(down, self.down_bias) if self.has_bias else down


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
      self.head = _weight(rngs, (c.vocab_size, c.d_model), embed_axes, std=0.02)

  def embedded(self, tokens):  # [...] -> [..., D]
    return self.embed[...][tokens].astype(self.config.dtype)

  def rows(self, tokens, segments, positions, *, answers=None, remat=False, mesh=None):
    """Packed rows, all [B, T] int32 -> hidden [B, T, D].

    A token sees its own segment up to itself.

    Args:
      answers: those of a segment that share its prompt and do not see each other.
      mesh: over which rows, and tokens of a row, are spread.
    """
    is_flat = meshes.is_one_cpu(mesh)
    if is_flat:
      positions = positions.reshape(-1)
    cos, sin = rotation(positions, self.config)
    graph, stacked = nnx.split(self.blocks)

    def attend(q, k, v):
      heads = [x.reshape(*segments.shape, *x.shape[-2:]) for x in (q, k, v)]
      mixed = attention.packed(*heads, segments, answers, mesh=mesh)
      return mixed.reshape(q.shape), None

    def layer(x, state):
      return nnx.merge(graph, state)(x, cos, sin, attend)

    if remat:
      layer = jax.checkpoint(layer, prevent_cse=is_flat)
    x = self.embedded(tokens)
    if is_flat:
      # XLA's products on CPUs have a backward that takes twice as long with two axes of
      # tokens, and a scan would cut every layer out of the stacks.
      x = x.reshape(-1, x.shape[-1])
      for state in _unstacked(stacked, self.config.layers):
        x, _ = layer(x, state)
      return self.norm(x).reshape(*tokens.shape, -1)
    if mesh is not None:
      x = _to_rows(x, mesh)
    # Scanned, so that the number of layers does not make compilation longer.
    x, _ = jax.lax.scan(layer, x, stacked)
    return self.norm(x)

  def prefill(self, layers, tokens, segments, *, mesh=None):
    """k and v of rows that begin at position 0: L pairs, each [B, T, K, H].

    Unrolled as `step` is, since there is one form of the weights: a scan would need
    them stacked, a second time. Depth makes this one longer to compile.

    Args:
      layers: what `unrolled` gave. tokens, segments: [B, T] int32.
      mesh: over which rows are spread, as slots are.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    cos, sin = rotation(positions, self.config)
    x, kept = _to_slots(self.embedded(tokens), mesh), []

    def attend(q, k, v):
      mixed = attention.packed(q, k, v, segments, mesh=mesh, axes=('slots', None))
      return mixed, (k, v)

    for block in layers:
      x, kv = block(x, cos, sin, attend)
      kept.append(kv)
    return tuple(kept)

  def step(self, layers, tokens, positions, cache, *, used: int):
    """One token in each slot.

    Args:
      layers: what `unrolled` gave.
      tokens: [R] int32.
      positions: [R] int32, where the token's k and v go; S or more: nowhere.
      cache: L pairs of k and v, each [R, K, S, H].
      used: no slot's position reaches this; the cache is read up to it.

    Returns:
      hidden [R, D] and the cache.
    """
    cos, sin = rotation(positions, self.config)
    x, new = self.embedded(tokens), []
    for block, (k_cache, v_cache) in zip(layers, cache, strict=True):

      def attend(q, k, v, k_cache=k_cache, v_cache=v_cache):
        kept = attention.write(k_cache, v_cache, k, v, positions)
        return attention.cached(q, *kept, positions, used=used), kept

      x, kept = block(x, cos, sin, attend)
      new.append(kept)
    return self.norm(x), tuple(new)

  def head_weight(self):  # [V, D]
    return self.embed[...] if self.config.tied else self.head[...]


def _unstacked(stacked, layers: int) -> list:
  """One tree a layer. Split at once, since the gradient of that is one concatenation."""
  parts = jax.tree.map(lambda w: jax.lax.split(w, (1,) * layers), stacked)
  return [
    jax.tree.map(
      lambda w, i=i: w[i].reshape(w[i].shape[1:]),
      parts,
      is_leaf=lambda x: isinstance(x, list | tuple),
    )
    for i in range(layers)
  ]


def head_logits(hidden, head, config: ModelConfig):
  """[..., D] and [V, D] -> [..., V] float32; ids no tokenizer knows get NEVER."""
  head = head.astype(hidden.dtype)
  out = jnp.einsum('...d,vd->...v', hidden, head, preferred_element_type=jnp.float32)
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
  """Fresh float32 parameters. Adapters leave the others as they would be."""
  apart = jax.random.fold_in(jax.random.key(seed), 1)
  return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(seed, lora=apart))))


def decoder(config: ModelConfig, parameters: dict) -> Decoder:
  """The module over these parameters, its blocks cast to the dtype of the computation.

  Embedding and head are not: they are read in parts, and cast there.
  """
  return _filled(*_skeleton(config), _cast(parameters, config, 'blocks'))


def _cast(parameters: dict, config: ModelConfig, *names: str) -> dict:
  """All but the last norm, which is read once and in float32, may be cast."""
  cast = {name: parameters[name] for name in names if name in parameters}
  return parameters | jax.tree.map(lambda w: w.astype(config.dtype), cast)


def _filled(graph, state, values: dict):
  """The module with these arrays for the abstract ones of the same names."""
  state = jax.tree.map(lambda x: x, state)  # a copy: the cached one stays abstract
  nnx.replace_by_pure_dict(state, values)
  return nnx.merge(graph, state)


def by_layer(config: ModelConfig, parameters: dict) -> dict:
  """The parameters as a sampler takes them: one tree a layer, of the dtype computed in.

  Made once for each version of the weights. A decode loop is fastest unrolled, and
  would cut every layer out of the stacks, a copy of all weights, each time it starts.
  """
  outside = {name: value for name, value in parameters.items() if name != 'blocks'}
  layers = [one_layer(config, parameters['blocks'], i) for i in range(config.layers)]
  return outside_layers(config, outside) | {'layers': layers}


def one_layer(config: ModelConfig, blocks: dict, i: int | jax.Array) -> dict:
  """Layer i of the stacked blocks, as `by_layer` has it.

  Heads and their width are one axis: a TPU, which lays the last two axes out in tiles,
  would hold a copy of each projection in another layout beside it.
  """

  def cut(w):
    return jax.lax.dynamic_index_in_dim(w, i, keepdims=False).astype(config.dtype)

  layer = jax.tree.map(cut, blocks)
  attn = layer['attn']
  flat = {name: attn[name].reshape(config.d_model, -1) for name in 'qkv'}
  flat['o'] = attn['o'].reshape(-1, config.d_model)
  return layer | {'attn': attn | flat}


def outside_layers(config: ModelConfig, outside: dict) -> dict:
  """What `by_layer` has beside the layers, of the parameters without blocks."""
  return _cast(outside, config, 'embed', 'head')


def by_layer_axes(config: ModelConfig) -> dict:
  """The logical axis names of what `by_layer` gives."""
  _, axes = abstract(config)
  blocks = axes.pop('blocks')
  layer = jax.tree.map(
    lambda names: names[1:], blocks, is_leaf=lambda x: isinstance(x, tuple)
  )
  flat = {name: layer['attn'][name][:2] for name in 'qkv'}
  flat['o'] = layer['attn']['o'][::2]
  layer['attn'] |= flat
  return axes | {'layers': [layer] * config.layers}


def unrolled(config: ModelConfig, tree: dict) -> tuple[Decoder, list[Block]]:
  """The module over what `by_layer` gave, and its blocks, which it has not itself."""
  outside = {name: value for name, value in tree.items() if name != 'layers'}
  model = _filled(*_skeleton(config), outside)
  block = nnx.split(model.blocks)
  return model, [_filled(*block, layer) for layer in tree['layers']]


@functools.partial(jax.jit, static_argnums=1)
def _logits(parameters, config, tokens, positions, segments):
  model = decoder(config, parameters)
  hidden = model.rows(tokens, segments, positions)
  return head_logits(hidden, model.head_weight(), config)[..., : config.vocab_used]


def logits(
  parameters: dict,
  config: ModelConfig,
  tokens: Any,  # [B, T] int
  *,
  positions: Any = None,  # [B, T]; None: 0, 1, ... in each segment
  segments: Any = None,  # [B, T]; None: a row is one segment; 0 is padding
) -> jax.Array:
  """[B, T, V less its padding] float32. For tests and small inputs: all at once.

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
