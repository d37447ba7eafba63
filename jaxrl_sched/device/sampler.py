"""The sampling loop: R slots over one cache, refilled between chunks of decode steps.

A prompt is prefilled once and its keys and values are copied to the slots of its
answers. The token drawn at place t of answer k of draw d depends on (seed, d, k, t)
and the logits alone, so slots, neighbours and chunk length change nothing.

No shape depends on what is asked: group sizes and their mix, temperatures and
limits are data. What does compile (a few prompt lengths, a few cache lengths) is
compiled by `warm_up`.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
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


def _fresh_state(slots: int, cache_length: int) -> dict[str, np.ndarray]:
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


def _prefill(parameters, tokens, segments, config):
  """[P, T] -> keys and values: L pairs, each [P, T, K, H]."""
  model, layers = model_lib.unrolled(config, parameters)
  return model.prefill(layers, tokens, segments)


def _insert(cache, state, kv, place, seed):
  """Starts answers: copies prefilled rows into slots and sets the slots' state.

  Args:
    kv: of `_prefill`. place: arrays of length R, one entry an answer: `slot` (R:
      no answer), `row` of kv, `draw`, `answer`, and the state's own fields.
  """
  slot, row = place['slot'], place['row']
  length = kv[0][0].shape[1]
  cache = jax.tree.map(
    lambda old, new: old.at[slot, :length].set(new[row], mode='drop'), cache, kv
  )

  def key(draw, answer):
    base = jax.random.key(seed, impl='threefry2x32')
    return jax.random.key_data(
      jax.random.fold_in(jax.random.fold_in(base, draw), answer)
    )

  new = {k: v for k, v in place.items() if k in state}
  new['key'] = jax.vmap(key)(place['draw'], place['answer'])
  state = {k: state[k].at[slot].set(new[k], mode='drop') for k in state}
  return cache, state


def _decode(parameters, cache, state, *, config: ModelConfig, chunk: int, used: int):
  """Up to `chunk` tokens for every live slot.

  Returns:
    cache, state, tokens [chunk, R] int32 and log-probs [chunk, R]; a slot's are the
    first ones, as many as its `made` grew.
  """
  model, layers = model_lib.unrolled(config, parameters)
  head = model.head_weight()
  slots = state['alive'].shape[0]
  off = cache[0][0].shape[1]

  def body(carry):
    i, cache, state, tokens, logps = carry
    alive = state['alive']
    hidden, cache = model.step(
      layers, state['token'], state['position'], cache, used=used
    )
    token, logp = draw_tokens(model_lib.head_logits(hidden, head, config), state)
    made = state['made'] + alive
    stopped = jnp.any(token[:, None] == state['stop'], axis=-1)
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


def _retire(state, gone):  # slots whose answer the host ended (stop strings)
  return state | dict(alive=state['alive'] & ~gone)


# --- the host's side -------------------------------------------------------------


@dataclasses.dataclass
class _Running:
  """An answer in a slot."""

  request: Request
  answer: int
  tokens: list[int] = dataclasses.field(default_factory=list)
  logps: list[float] = dataclasses.field(default_factory=list)

  @property
  def position(self) -> int:  # where the token fed next goes
    return len(self.request.prompt.tokens) - 1 + len(self.tokens)


class Sampler:
  """Samples answers to requests with continuous batching.

  Args:
    parameters: float32 tree of `model.init` or `weights.load`.
    slots: R, answers decoded at once.
    cache_length: S; prompt and answer together must fit.
    chunk: decode steps between two looks of the host.
    mesh: slots are spread over data x fsdp, heads over model.
    seed: of the noise.
    prefill_rows: prompts prefilled together.
    detokenize: ids -> text, needed for stop strings only.
  """

  def __init__(
    self,
    parameters,
    config: ModelConfig,
    *,
    slots: int,
    cache_length: int,
    chunk: int,
    mesh=None,
    seed: int = 0,
    prefill_rows: int = 8,
    detokenize: Callable[[Sequence[int]], str] | None = None,
  ):
    mesh = meshes.make_mesh() if mesh is None else mesh
    for name, value in dict(slots=slots, prefill_rows=prefill_rows).items():
      if value < 1 or value % meshes.size(mesh, 'slots'):
        parts = meshes.size(mesh, 'slots')
        raise ValueError(
          f'sampler.{name}: {value}, expected a multiple of data * fsdp = {parts}'
        )
    if chunk < 1 or cache_length < 2:
      raise ValueError(
        f'sampler: chunk={chunk}, cache_length={cache_length}; expected at least 1 '
        'and 2'
      )
    self.config, self.slots, self.chunk = config, slots, chunk
    self.cache_length, self.prefill_rows = cache_length, prefill_rows
    self.detokenize = detokenize
    self.idle_share = 0.0  # of the slot-steps of the last `generate`
    self._mesh, self._seed = mesh, np.uint32(seed)
    ready = functools.partial(model_lib.by_layer, config)
    self._ready = jax.jit(ready)
    self._weights_at = meshes.parameter_shardings(
      jax.eval_shape(ready, model_lib.abstract(config)[0]),
      model_lib.by_layer_axes(config),
      mesh,
      whole=('embed',),
    )
    per_slot = meshes.sharding(mesh, 'slots')
    cache_at = meshes.sharding(mesh, 'slots', None, 'kv_heads', None)
    out = meshes.sharding(mesh, None, 'slots')
    self._prefill = jax.jit(
      functools.partial(_prefill, config=config), out_shardings=cache_at
    )
    self._insert = jax.jit(
      _insert, donate_argnums=(0, 1), out_shardings=(cache_at, per_slot)
    )
    self._decode = jax.jit(
      functools.partial(_decode, config=config, chunk=chunk),
      static_argnames='used',
      donate_argnums=(1, 2),
      out_shardings=(cache_at, per_slot, out, out),
    )
    self._retire = jax.jit(_retire, donate_argnums=0, out_shardings=per_slot)
    shape = (slots, cache_length, config.kv_heads, config.head_dim)
    self._cache = jax.jit(
      lambda: tuple(
        tuple(jnp.zeros(shape, config.dtype) for _ in 'kv')
        for _ in range(config.layers)
      ),
      out_shardings=cache_at,
    )()
    self._per_slot = per_slot
    self._reset()
    self.load(parameters, version=0)

  def load(self, parameters, version: int) -> None:
    """From now on samples with these weights."""
    self._parameters = None  # two versions are never held at a time
    # Cast before they travel: half the bytes where the computation is in bfloat16.
    self._parameters = jax.device_put(self._ready(parameters), self._weights_at)
    self.version = version

  def _reset(self) -> None:
    fresh = _fresh_state(self.slots, self.cache_length)
    self._state = jax.device_put(fresh, self._per_slot)

  def warm_up(self, longest_prompt: int) -> None:
    """Compiles all that `generate` may need for prompts up to this long."""
    longest = bucket(longest_prompt, SMALLEST_PROMPT, self.cache_length)
    for length in buckets(SMALLEST_PROMPT, longest):
      nothing = np.zeros((self.prefill_rows, length), np.int32)
      self._start(self._prefill(self._parameters, nothing, nothing), [])
    for used in buckets(SMALLEST_CACHE, self.cache_length):
      self._cache, self._state, *_ = self._decode(
        self._parameters, self._cache, self._state, used=used
      )
    self._state = self._retire(self._state, np.zeros(self.slots, bool))
    self._reset()

  def generate(
    self,
    requests: Sequence[Request],
    *,
    on_finish: Callable[[Request, Completion], None] | None = None,
    on_chunk: Callable[[], None] | None = None,
  ) -> list[Completion]:
    """Samples every answer of every request.

    Args:
      on_finish: called with each answer as soon as it ends.
      on_chunk: called between chunks; it may raise to give up.

    Returns:
      Completions in request order, answers 0 .. G-1 of each.

    Raises:
      ValueError: a request cannot be sampled; the message names its prompt.
    """
    draws = set()
    for request in requests:
      self._check(request)
      if request.draw in draws:  # they would share noise, and one answer would be lost
        raise ValueError(
          f'prompt {request.prompt.id!r}: draw {request.draw} is asked for twice'
        )
      draws.add(request.draw)
    waiting = collections.deque(requests)  # not prefilled yet
    ready = collections.deque()  # (kv, row, request, answer)
    free = collections.deque(range(self.slots))
    running: dict[int, _Running] = {}
    done: dict[tuple[int, int], Completion] = {}
    steps = busy = 0
    whole = False
    try:
      while waiting or ready or running:
        while free and (waiting or ready):
          if not ready:
            ready.extend(self._next_prefill(waiting))
          self._fill(ready, free, running)
        grown = self._step(running)
        steps, busy = steps + max(grown), busy + sum(grown)
        for slot, completion in self._ended(running):
          request = running.pop(slot).request
          free.append(slot)
          done[completion.draw, completion.answer] = completion
          if on_finish is not None:
            on_finish(request, completion)
        if on_chunk is not None:
          on_chunk()
      whole = True
    finally:
      if not whole:  # slots may be alive still
        self._reset()
    self.idle_share = 1 - busy / max(1, steps * self.slots)
    return [done[r.draw, k] for r in requests for k in range(r.size)]

  def _check(self, request: Request) -> None:
    name, s = f'prompt {request.prompt.id!r}', request.sampling
    prompt = len(request.prompt.tokens)
    if s.max_new_tokens < 1:
      raise ValueError(f'{name}: max_new_tokens={s.max_new_tokens}, expected 1 or more')
    if s.min_new_tokens > s.max_new_tokens:
      raise ValueError(
        f'{name}: min_new_tokens={s.min_new_tokens}, expected at most '
        f'max_new_tokens={s.max_new_tokens}'
      )
    if prompt < 1 or prompt + s.max_new_tokens > self.cache_length:
      raise ValueError(
        f'{name}: {prompt} prompt tokens + max_new_tokens={s.max_new_tokens}, '
        f'expected 1 or more and together at most cache_length={self.cache_length}'
      )
    ids = request.prompt.tokens
    if np.min(ids) < 0 or np.max(ids) >= self.config.vocab_used:
      raise ValueError(
        f'{name}: token ids from {np.min(ids)} to {np.max(ids)}, expected 0 to '
        f'{self.config.vocab_used - 1}'
      )
    if len(s.stop_ids) > MAX_STOP_IDS:
      raise ValueError(f'{name}: {len(s.stop_ids)} stop ids, at most {MAX_STOP_IDS}')
    if not 0 <= s.temperature < np.inf or not 0 < s.top_p <= 1 or request.size < 1:
      raise ValueError(
        f'{name}: temperature={s.temperature}, top_p={s.top_p}, size={request.size}; '
        'expected finite and >= 0, in (0, 1] and >= 1'
      )
    if s.stop_strings and self.detokenize is None:
      raise ValueError(f'{name}: stop_strings need a sampler with `detokenize`')

  def _next_prefill(self, waiting):
    """Prefills the next prompts, without their last token, which is fed first."""
    requests = [waiting.popleft() for _ in range(min(len(waiting), self.prefill_rows))]
    prompts = [r.prompt.tokens[:-1] for r in requests]
    length = bucket(max(map(len, prompts)), SMALLEST_PROMPT, self.cache_length)
    tokens = np.zeros((self.prefill_rows, length), np.int32)
    segments = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
      tokens[row, : len(prompt)] = prompt
      segments[row, : len(prompt)] = 1
    kv = self._prefill(self._parameters, tokens, segments)
    return [(kv, row, r, k) for row, r in enumerate(requests) for k in range(r.size)]

  def _fill(self, ready, free, running) -> None:
    """Starts answers of one prefill in free slots."""
    kv, starts = ready[0][0], []
    while ready and free and ready[0][0] is kv:
      _, row, request, answer = ready.popleft()
      slot = free.popleft()
      running[slot] = _Running(request, answer)
      starts.append((slot, row, running[slot]))
    self._start(kv, starts)

  def _start(self, kv, starts) -> None:
    place = _fresh_state(self.slots, self.cache_length)
    del place['key']
    place['slot'] = np.full(self.slots, self.slots, np.int32)
    place['row'] = np.zeros(self.slots, np.int32)
    place['draw'] = np.zeros(self.slots, np.uint32)
    place['answer'] = np.zeros(self.slots, np.uint32)
    for i, (slot, row, run) in enumerate(starts):
      s = run.request.sampling
      values = dict(
        slot=slot,
        row=row,
        draw=run.request.draw,
        answer=run.answer,
        alive=True,
        token=run.request.prompt.tokens[-1],
        position=run.position,
        minimum=s.min_new_tokens,
        limit=s.max_new_tokens,
        temperature=s.temperature,
        top_k=max(0, s.top_k),
        top_p=s.top_p,
      )
      for name, value in values.items():
        place[name][i] = value
      place['stop'][i, : len(s.stop_ids)] = s.stop_ids
    self._cache, self._state = self._insert(
      self._cache, self._state, kv, place, self._seed
    )

  def _step(self, running) -> list[int]:
    """One chunk; its tokens are added to the answers. Returns how far each grew."""
    reach = max(run.position for run in running.values()) + self.chunk
    used = bucket(reach, SMALLEST_CACHE, self.cache_length)
    self._cache, self._state, tokens, logps = self._decode(
      self._parameters, self._cache, self._state, used=used
    )
    tokens, logps, made = jax.device_get((tokens, logps, self._state['made']))
    grown = []
    for slot, run in running.items():
      new = int(made[slot]) - len(run.tokens)
      run.tokens.extend(tokens[:new, slot].tolist())
      run.logps.extend(logps[:new, slot])
      grown.append(new)
    return grown

  def _ended(self, running) -> list[tuple[int, Completion]]:
    """The slots whose answer has ended, with the answer, in slot order."""
    ended, cut = [], np.zeros(self.slots, bool)
    for slot, run in sorted(running.items()):
      s = run.request.sampling
      finish = None
      if run.tokens[-1] in s.stop_ids:
        finish = 'stop'
      elif len(run.tokens) >= s.max_new_tokens:
        finish = 'length'
      if s.stop_strings and (end := self._string_end(run)) is not None:
        del run.tokens[end:], run.logps[end:]
        cut[slot] = finish is None
        finish = 'stop'
      if finish is not None:
        tokens = np.array(run.tokens, np.int32)
        logps = np.array(run.logps, np.float32)
        draw = run.request.draw
        completion = Completion(
          draw=draw,
          answer=run.answer,
          tokens=tokens,
          logps=logps,
          finish=finish,
          version=self.version,
        )
        ended.append((slot, completion))
    if cut.any():
      self._state = self._retire(self._state, cut)
    return ended

  def _string_end(self, run) -> int | None:
    """Tokens up to and with the one that completes a stop string; None: none does."""
    strings = run.request.sampling.stop_strings
    least = max(1, run.request.sampling.min_new_tokens)

    def has(count):
      text = self.detokenize(run.tokens[:count])
      return any(s in text for s in strings)

    if len(run.tokens) < least or not has(len(run.tokens)):
      return None
    new = range(max(least, len(run.tokens) - self.chunk + 1), len(run.tokens) + 1)
    return next(count for count in new if has(count))
