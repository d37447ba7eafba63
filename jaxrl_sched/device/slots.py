"""R slots over one cache: the device's side of sampling.

A prompt is prefilled once and its keys and values are copied to the slots of its
answers. The token drawn at place t of answer k of draw d depends on (seed, d, k, t)
and the logits alone, so slots, neighbours and chunk length change nothing.

No shape depends on what is asked: group sizes and their mix, temperatures and
limits are data. What does compile (a few prompt lengths, a few cache lengths) is
compiled by `warm_up`.
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device import model as model_lib
from jaxrl_sched.device.drawing import draw_tokens
from jaxrl_sched.device.model import ModelConfig
from jaxrl_sched.types import Completion, Request

MAX_STOP_IDS = 8
SMALLEST_PROMPT = 16  # the shortest bucket, in tokens
SMALLEST_CACHE = 64


def bucket(length: int, smallest: int, most: int) -> int:
  """`smallest` doubled until it holds `length`, but `most` at the most."""
  size = smallest
  while size < length:
    size *= 2
  return min(size, most)


def buckets(smallest: int, most: int) -> list[int]:
  sizes = [bucket(1, smallest, most)]
  while sizes[-1] < most:
    sizes.append(bucket(sizes[-1] + 1, smallest, most))
  return sizes


# --- the jitted pieces -----------------------------------------------------------


def fresh_state(slots: int, cache_length: int) -> dict[str, np.ndarray]:
  """All slots empty. An empty slot's position is past the cache: it writes nowhere."""
  return dict(
    alive=np.zeros(slots, bool),
    token=np.zeros(slots, np.int32),  # to be fed next
    position=np.full(slots, cache_length, np.int32),  # where it goes
    made=np.zeros(slots, np.int32),  # tokens of the answer so far
    minimum=np.zeros(slots, np.int32),
    limit=np.ones(slots, np.int32),
    key=np.zeros((slots, 2), np.uint32),  # of (seed, draw, answer)
    temperature=np.ones(slots, np.float32),
    top_k=np.zeros(slots, np.int32),
    top_p=np.ones(slots, np.float32),
    stop=np.full((slots, MAX_STOP_IDS), -1, np.int32),
  )


def empty_place(slots: int, cache_length: int) -> dict[str, np.ndarray]:
  """What `_insert` is told where no answer is to be started in any slot."""
  place = fresh_state(slots, cache_length)
  del place['key']
  place['row'] = np.full(slots, -1, np.int32)
  place['draw'] = np.zeros(slots, np.uint32)
  place['answer'] = np.zeros(slots, np.uint32)
  return place


def _prefill(parameters, tokens, segments, *, config: ModelConfig, mesh):
  """[P, T] -> keys and values: L pairs, each [P, T, K, H]."""
  model, layers = model_lib.unrolled(config, parameters)
  return model.prefill(layers, tokens, segments, mesh=mesh)


def _insert(cache, state, kv, place, seed, *, mesh):
  """Starts answers: copies prefilled rows into slots and sets the slots' state.

  Args:
    kv: of `_prefill`.
    place: arrays of length R, an entry a slot: `row` of kv (below 0: what is in the
      slot stays), `draw`, `answer`, and the state's own fields.
  """
  row = place['row']
  begins, length = row >= 0, kv[0][0].shape[1]
  # A slot's row may be on any device. Rows are fewer than slots: they travel.
  everywhere = meshes.sharding(mesh, None, None, 'kv_heads', None)
  kv = jax.lax.with_sharding_constraint(kv, everywhere)

  def chosen(new, old):
    return jnp.where(begins.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)

  def start(old, new):  # [R, K, S, H], [P, T, K, H]
    new = jnp.swapaxes(new, 1, 2)[jnp.maximum(row, 0)]
    # Else XLA would choose over whole caches, and copy them.
    new = jax.lax.optimization_barrier(chosen(new, old[:, :, :length]))
    return jax.lax.dynamic_update_slice(old, new, (0, 0, 0, 0))

  cache = jax.tree.map(start, cache, kv)

  def key(draw, answer):
    base = jax.random.key(seed, impl='threefry2x32')
    return jax.random.key_data(
      jax.random.fold_in(jax.random.fold_in(base, draw), answer)
    )

  new = {k: v for k, v in place.items() if k in state}
  new['key'] = jax.vmap(key)(place['draw'], place['answer'])
  return cache, {k: chosen(new[k], old) for k, old in state.items()}


def _decode(
  parameters, cache, state, used: int, *, config: ModelConfig, chunk: int, mesh
):
  """Up to `chunk` tokens for every live slot.

  An answer ends at a token without a finite log-prob: its logits were not numbers.

  Returns:
    cache, state, tokens [chunk, R] int32 and log-probs [chunk, R]; a slot's are the
    first ones, as many as its `made` grew.
  """
  model, layers = model_lib.unrolled(config, parameters)
  head = model.head_weight()
  slots = state['alive'].shape[0]
  off = cache[0][0].shape[2]
  put = jax.lax.with_sharding_constraint
  whole_rows = meshes.sharding(mesh, 'slots', None)
  if slots % mesh.size == 0:
    whole_rows = jax.sharding.NamedSharding(mesh, PartitionSpec(mesh.axis_names, None))

  def body(carry):
    i, cache, state, tokens, logps = carry
    alive = state['alive']
    hidden, cache = model.step(
      layers, state['token'], state['position'], cache, used=used
    )
    logits = model_lib.head_logits(hidden, head, config)
    # Made where the head is, then each device draws whole slots: sorts and sums along a
    # cut vocabulary would be gathered by all, again and again.
    logits = put(put(logits, meshes.sharding(mesh, 'slots', 'vocab')), whole_rows)
    token, logp = put(draw_tokens(logits, state), meshes.sharding(mesh, 'slots'))
    # A greedy token's log-prob is 0 whatever its logit: nan is the largest of all.
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    logp = jnp.where(jnp.isfinite(chosen), logp, jnp.nan)
    made = state['made'] + alive
    stopped = jnp.any(token[:, None] == state['stop'], axis=-1) | ~jnp.isfinite(logp)
    goes_on = alive & ~stopped & (made < state['limit'])
    state = state | dict(
      alive=goes_on,
      token=jnp.where(alive, token, state['token']),
      position=jnp.where(goes_on, state['position'] + 1, off),
      made=made,
    )
    return i + 1, cache, state, tokens.at[i].set(token), logps.at[i].set(logp)

  def more(carry):
    return (carry[0] < chunk) & jnp.any(carry[2]['alive'])

  tokens = jnp.zeros((chunk, slots), jnp.int32)
  logps = jnp.zeros((chunk, slots), jnp.float32)
  carry = (0, cache, state, tokens, logps)
  _, cache, state, tokens, logps = jax.lax.while_loop(more, body, carry)
  return cache, state, tokens, logps


def _retire(state, gone):  # slots whose answer the host ended
  return state | dict(alive=state['alive'] & ~gone)


def _wipe(cache, spoilt):
  """Zeros where keys and values may not be numbers: 0 * nan would spoil what follows."""
  spoilt = spoilt[:, None, None, None]
  return jax.tree.map(lambda x: jnp.where(spoilt, jnp.zeros_like(x), x), cache)


# --- the host's side -------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Answer:
  """An answer on its way."""

  request: Request
  place: int  # of the request among those asked together
  answer: int
  begun: Completion | None  # of an earlier bundle, to be gone on with
  tokens: list[int]
  logps: list[float]

  @property
  def start(self) -> int:  # tokens it had before this bundle
    return 0 if self.begun is None else len(self.begun.tokens)

  @property
  def position(self) -> int:  # where the token fed next goes
    return len(self.request.prompt.tokens) - 1 + len(self.tokens)

  @property
  def limit(self) -> int:  # tokens at which it ends or pauses
    most, pause = self.request.sampling.max_new_tokens, self.request.relief.pause_after
    return min(most, self.start + pause) if pause else most


def weights_of(config: ModelConfig, mesh: jax.sharding.Mesh):
  """The weights as samplers on this mesh take them, as shapes with shardings."""
  shapes, _ = model_lib.abstract(config)
  shapes = jax.eval_shape(functools.partial(model_lib.by_layer, config), shapes)
  axes = model_lib.by_layer_axes(config)
  at = meshes.parameter_shardings(shapes, axes, mesh, whole=('embed',))
  return jax.tree.map(
    lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, at
  )


class Programs:
  """What is compiled to sample, and the shapes and shardings of what it works on.

  Holds no arrays, so that it can be compiled for devices that are not there.

  Args: as of `Sampler`.

  Attributes:
    prefill, insert, decode, retire, wipe: jitted; the functions above. All but the
      first write on the cache and the state that they are given.
    empty: () -> an empty cache.
    weights, cache, state: shapes with shardings.
  """

  def __init__(
    self,
    config: ModelConfig,
    count: int,
    *,
    cache_length: int,
    chunk: int,
    mesh: jax.sharding.Mesh,
    prefill_rows: int,
  ):
    self.count, self.cache_length = count, cache_length
    self.chunk, self.prefill_rows = chunk, prefill_rows
    whole, per_slot = meshes.sharding(mesh), meshes.sharding(mesh, 'slots')
    cache_at = meshes.sharding(mesh, 'slots', 'kv_heads', None, None)
    kv_at = meshes.sharding(mesh, 'slots', None, 'kv_heads', None)
    self._whole = whole
    # What the host reads: each of several hosts can read what is whole on all.
    shared = len(meshes.by_host(mesh.devices.flat)) > 1
    read = whole if shared else meshes.sharding(mesh, None, 'slots')
    fresh = fresh_state(count, cache_length)
    state_at = dict.fromkeys(fresh, per_slot) | {'made': whole if shared else per_slot}
    self.weights = weights_of(config, mesh)
    weights_at = jax.tree.map(lambda x: x.sharding, self.weights)

    self.prefill = jax.jit(
      functools.partial(_prefill, config=config, mesh=mesh),
      in_shardings=(weights_at, whole, whole),
      out_shardings=kv_at,
    )
    self.insert = jax.jit(
      functools.partial(_insert, mesh=mesh),
      donate_argnums=(0, 1),
      in_shardings=(cache_at, state_at, kv_at, whole, whole),
      out_shardings=(cache_at, state_at),
    )
    self.decode = jax.jit(
      functools.partial(_decode, config=config, chunk=chunk, mesh=mesh),
      static_argnums=3,
      donate_argnums=(1, 2),
      in_shardings=(weights_at, cache_at, state_at),
      out_shardings=(cache_at, state_at, read, read),
    )
    self.retire = jax.jit(
      _retire,
      donate_argnums=0,
      in_shardings=(state_at, whole),
      out_shardings=state_at,
    )
    self.wipe = jax.jit(
      _wipe, donate_argnums=0, in_shardings=(cache_at, whole), out_shardings=cache_at
    )
    shape = (count, config.kv_heads, cache_length, config.head_dim)
    self.cache = tuple(
      tuple(jax.ShapeDtypeStruct(shape, config.dtype, sharding=cache_at) for _ in 'kv')
      for _ in range(config.layers)
    )
    self.empty = jax.jit(
      lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.cache),
      out_shardings=cache_at,
    )
    self.state = {
      k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=state_at[k])
      for k, x in fresh.items()
    }

  def arguments(self, longest_prompt: int) -> dict[str, tuple]:
    """What programs are called with at the most in a rollout, as shapes.

    Args:
      longest_prompt: tokens; the prefill's is the bucket that holds them.
    """
    length = bucket(longest_prompt, SMALLEST_PROMPT, self.cache_length)

    def whole(x):
      return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=self._whole)

    tokens = whole(np.zeros((self.prefill_rows, length), np.int32))
    kv = jax.eval_shape(self.prefill, self.weights, tokens, tokens)
    place = jax.tree.map(whole, empty_place(self.count, self.cache_length))
    return dict(
      prefill=(self.weights, tokens, tokens),
      insert=(self.cache, self.state, kv, place, whole(np.uint32(0))),
      decode=(self.weights, self.cache, self.state, self.cache_length),
    )


class Slots:
  """The cache and the state of R slots, and what is done to them.

  Nothing here waits for the device but `read`.
  """

  def __init__(self, programs: Programs, *, seed: int):
    self.programs, self._seed = programs, np.uint32(seed)
    self.count, self.cache_length = programs.count, programs.cache_length
    self.chunk, self.prefill_rows = programs.chunk, programs.prefill_rows
    self._cache = programs.empty()
    self.reset()

  def reset(self) -> None:
    at = {k: x.sharding for k, x in self.programs.state.items()}
    self._state = meshes.put(fresh_state(self.count, self.cache_length), at)

  def warm_up(self, weights, longest: int) -> None:
    """Compiles everything, for prefills up to `longest` tokens."""
    longest = bucket(longest, SMALLEST_PROMPT, self.cache_length)
    for length in buckets(SMALLEST_PROMPT, longest):
      nothing = np.zeros((self.prefill_rows, length), np.int32)
      self.start(self.programs.prefill(weights, nothing, nothing), [])
    for used in buckets(SMALLEST_CACHE, self.cache_length):
      self._cache, self._state, *_ = self.programs.decode(
        weights, self._cache, self._state, used
      )
    self.retire(np.zeros(self.count, bool))
    self.wipe(np.zeros(self.count, bool))
    self.reset()

  def prefill(self, weights, answers: Sequence[Answer]):
    """Keys and values of what stands before each answer's next token.

    Without the last token, which is fed first.
    """
    rows = [
      np.concatenate([a.request.prompt.tokens, a.tokens])[:-1].astype(np.int32)
      for a in answers
    ]
    length = bucket(max(map(len, rows)), SMALLEST_PROMPT, self.cache_length)
    tokens = np.zeros((self.prefill_rows, length), np.int32)
    segments = np.zeros_like(tokens)
    for i, row in enumerate(rows):
      tokens[i, : len(row)] = row
      segments[i, : len(row)] = 1
    return self.programs.prefill(weights, tokens, segments)

  def start(self, kv, starts: Sequence[tuple[int, int, Answer]]) -> None:
    """Puts answers, each with its slot and its row of `kv`, into slots."""
    place = empty_place(self.count, self.cache_length)
    for slot, row, answer in starts:
      s, prompt = answer.request.sampling, answer.request.prompt.tokens
      values = dict(
        row=row,
        draw=answer.request.draw,
        answer=answer.answer,
        alive=True,
        token=answer.tokens[-1] if answer.tokens else prompt[-1],
        position=answer.position,
        made=len(answer.tokens),
        minimum=s.min_new_tokens,
        limit=answer.limit,
        temperature=s.temperature,
        top_k=max(0, s.top_k),
        top_p=s.top_p,
      )
      for name, value in values.items():
        place[name][slot] = value
      place['stop'][slot, : len(s.stop_ids)] = s.stop_ids
    self._cache, self._state = self.programs.insert(
      self._cache, self._state, kv, place, self._seed
    )

  def launch(self, weights, furthest: int):
    """Starts a chunk. No slot's position is past `furthest`. To be read by `read`."""
    used = bucket(furthest + self.chunk, SMALLEST_CACHE, self.cache_length)
    self._cache, self._state, tokens, logps = self.programs.decode(
      weights, self._cache, self._state, used
    )
    return tokens, logps, self._state['made']

  def read(self, chunk) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Waits: tokens [chunk, R], log-probs [chunk, R], tokens of each answer [R].

    Before anything else is done to the slots.
    """
    return jax.device_get(chunk)

  def retire(self, gone: np.ndarray) -> None:  # [R] bool
    self._state = self.programs.retire(self._state, gone)

  def wipe(self, spoilt: np.ndarray) -> None:  # [R] bool
    self._cache = self.programs.wipe(self._cache, spoilt)
