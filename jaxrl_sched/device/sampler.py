"""Samples answers to requests with continuous batching.

Weights of several versions may be held; a rollout is sampled with one of them. What
the device does is in `slots.py`, the loop in `rollout.py`.
"""

from collections.abc import Callable, Sequence
import functools

import jax
import numpy as np

from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device import model as model_lib
from jaxrl_sched.device.model import ModelConfig
from jaxrl_sched.device.open_rollout import OpenRollout
from jaxrl_sched.device.rollout import Rollout
from jaxrl_sched.device.slots import MAX_STOP_IDS, Programs, Slots
from jaxrl_sched.host import relief
from jaxrl_sched.types import Completion, Request, Share


class Sampler:
  """Samples answers to requests with continuous batching.

  Args:
    parameters: float32 tree of `model.init` or `weights.load`; None: they are `put`.
    slots: R, answers decoded at once.
    cache_length: S; prompt and answer together must fit.
    chunk: decode steps between two looks of the host.
    mesh: slots are spread over all its axes but model, heads over that.
    seed: of the noise.
    prefill_rows: prompts prefilled together.
    detokenize: ids -> text, needed for stop strings only.

  Attributes:
    version: of the weights that were loaded last.
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
        axes = ' * '.join(meshes.mesh_axes('slots'))
        raise ValueError(
          f'sampler.{name}: {value}, expected a multiple of {axes} = {parts}'
        )
    if chunk < 1 or cache_length < 2:
      raise ValueError(
        f'sampler: chunk={chunk}, cache_length={cache_length}; expected at least 1 '
        'and 2'
      )
    self.config, self.slots, self.chunk = config, slots, chunk
    self.cache_length, self.prefill_rows = cache_length, prefill_rows
    self.detokenize = detokenize
    ready = functools.partial(model_lib.by_layer, config)
    self._ready = jax.jit(ready)  # always a copy: a learner gives its own arrays away
    programs = Programs(
      config,
      slots,
      cache_length=cache_length,
      chunk=chunk,
      mesh=mesh,
      prefill_rows=prefill_rows,
    )
    self._weights_at = jax.tree.map(lambda x: x.sharding, programs.weights)
    self._slots = Slots(programs, seed=seed)
    self._weights = {}  # version -> what `by_layer` gives
    self._rollout: Rollout | None = None
    if parameters is not None:
      self.load(parameters, version=0)

  def load(self, parameters, version: int) -> None:
    """Puts a version beside those held, and from now on samples with it unless told.

    Does not wait for the transfer.
    """
    self.put(self._ready(parameters), version)

  def put(self, ready, version: int) -> None:
    """`load` of what a `Handover` gave, which may serve several samplers."""
    self._weights.pop(version, None)
    self._weights[version] = meshes.put(ready, self._weights_at)
    self.version = version

  def wait(self) -> None:
    """Until the weights that were loaded last have arrived."""
    jax.block_until_ready(self._weights[self.version])

  def forget(self, before: int | None = None) -> None:
    """Lets versions below `before` go, or all. A rollout under way keeps its own."""
    self._weights = {
      version: weights
      for version, weights in self._weights.items()
      if before is not None and version >= before
    }

  def warm_up(self, longest_prompt: int, *, longest_part: int = 0) -> None:
    """Compiles all that a rollout may need.

    Args:
      longest_prompt: tokens.
      longest_part: tokens of an answer that is paused and gone on with.
    """
    self._slots.warm_up(self._weights[self.version], longest_prompt + longest_part)

  def begin(
    self,
    requests: Sequence[Request],
    *,
    share: Share | None = None,
    version: int | None = None,
    on_finish: Callable[[Request, Completion], None] | None = None,
  ) -> Rollout:
    """Starts on answers, to be driven by `Rollout.advance`. One at a time.

    Args:
      share: which answers, in which order. None: all, in request order.
      version: of the weights. None: those that were loaded last.
      on_finish: called with each answer once it has ended and is certain to be kept.

    Raises:
      ValueError: a request cannot be sampled; the message names its prompt. Or these
        weights are not held, or a rollout is under way.
    """
    version = self.version if version is None else version
    if self._rollout is not None and not self._rollout.done:
      raise ValueError('sampler: a rollout is under way, expected one at a time')
    if version not in self._weights:
      raise ValueError(
        f'sampler: version={version}, expected one of those held: '
        f'{sorted(self._weights)}'
      )
    draws = set()
    for request in requests:
      self.check(request)
      if request.draw in draws:  # they would share noise, and one answer would be lost
        raise ValueError(
          f'prompt {request.prompt.id!r}: draw {request.draw} is asked for twice'
        )
      draws.add(request.draw)
    self._rollout = Rollout(
      self._slots,
      self._weights[version],
      version,
      requests,
      share,
      detokenize=self.detokenize,
      on_finish=on_finish,
    )
    return self._rollout

  def open_rollout(self) -> OpenRollout:
    """An engine of the open pool on these slots, which are its own during a fill."""
    return OpenRollout(self._slots, detokenize=self.detokenize)

  def weights(self, version: int):
    """Those of a version that is held."""
    return self._weights[version]

  def generate(
    self,
    requests: Sequence[Request],
    *,
    on_finish: Callable[[Request, Completion], None] | None = None,
    on_chunk: Callable[[], None] | None = None,
  ) -> list[Completion]:
    """Samples every answer of every request.

    Args:
      on_finish: as of `begin`.
      on_chunk: called between chunks; it may raise to give up.

    Returns:
      Completions in request order, in answer order of each; of those with spare
      answers the ones that are kept.

    Raises:
      ValueError: a request cannot be sampled; the message names its prompt.
    """
    rollout = self.begin(requests, on_finish=on_finish)
    try:
      while rollout.advance():
        if on_chunk is not None:
          on_chunk()
    finally:
      rollout.abandon()
    place = {request.draw: i for i, request in enumerate(requests)}
    order = sorted(rollout.completions, key=lambda key: (place[key[0]], key[1]))
    return [rollout.completions[key] for key in order]

  def check(self, request: Request) -> None:
    """Raises ValueError, naming the prompt, for what cannot be sampled."""
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
    relief.check(request)
