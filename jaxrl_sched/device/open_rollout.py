"""A sampling engine of the open pool: it takes answers from a queue and never ends.

`control/pool.py:EngineClock` says what it does at which tick, `slots.py` what the device
does. Between two fills answers that run keep the tokens they have, and continue from a
fresh prefill of prompt and tokens with the weights of the next fill: each token was drawn
from exactly one version.
"""

from collections.abc import Callable, Iterable, Sequence
import itertools

import numpy as np

from jaxrl_sched.control.pool import EngineClock
from jaxrl_sched.device.rollout import completion_of, extend, finish_of
from jaxrl_sched.device.slots import Answer, Slots
from jaxrl_sched.engine import Key
from jaxrl_sched.types import Completion, Request

Event = tuple[int, int]  # tick, draw


class OpenRollout:
  """Answers in the queue and in the slots of one sampling engine.

  Each chunk: `launch`, which does not wait for the device, then `book`. Each fill:
  `begin_fill` before its first chunk and `suspend` after its last.

  Attributes:
    busy: decode steps of slots with an answer, in this fill.
    chunk_steps: of all slots, in a chunk.
  """

  def __init__(
    self, slots: Slots, *, detokenize: Callable[[Sequence[int]], str] | None
  ):
    self._slots, self._detokenize = slots, detokenize
    self.clock: EngineClock[Key] = EngineClock(slots.count, slots.chunk)
    self._answers: dict[Key, Answer] = {}  # in the queue or in a slot
    self._rows: dict[Key, tuple] = {}  # of prefilled prompts -> (kv, place in it)
    self._waiting: dict[int, int] = {}  # draw -> answers of it in the queue
    self._chunk = None  # under way
    self._started: list[Event] = []
    self._weights, self._version = None, 0
    self.busy, self.chunk_steps = 0, slots.count * slots.chunk

  def put(self, requests: Iterable[Request], keys: Sequence[Key]) -> None:
    """These answers, of these requests among others, join the queue in this order."""
    by_draw = {request.draw: request for request in requests}
    for draw, k in keys:
      self._answers[draw, k] = Answer(by_draw[draw], draw, k, None, [], [])
      self._waiting[draw] = self._waiting.get(draw, 0) + 1
    self.clock.put(keys)

  # --- a fill

  def begin_fill(self, weights, version: int) -> None:
    """All is sampled with these weights from here on."""
    self._weights, self._version, self._rows = weights, version, {}
    self.busy = 0
    self._place(sorted(self.clock.running.items()))

  def suspend(self) -> dict[Key, Completion]:
    """Ends the fill, so that the slots are free for others. Returns what there is of the
    answers that run."""
    self._slots.reset()
    self.clock.compact()
    self._weights, self._rows, partial = None, {}, {}
    for key in self.clock.running.values():
      answer = self._answers[key]
      answer.begun = partial[key] = completion_of(answer, 'paused', self._version)
    return partial

  def running(self) -> list[Key]:
    """In slot order."""
    return [self.clock.running[slot] for slot in sorted(self.clock.running)]

  def resume(
    self,
    tick: int,
    requests: Iterable[Request],
    running: Sequence[Key],
    queued: Sequence[Key],
    partial: dict[Key, Completion],
  ) -> None:
    """Takes up what `suspend` left, here or in another process."""
    self.clock = EngineClock(self._slots.count, self._slots.chunk, tick=tick)
    self._answers, self._waiting = {}, {}
    by_draw = {request.draw: request for request in requests}
    for key in running:
      before = partial[key]
      self._answers[key] = Answer(
        by_draw[key[0]], *key, before, before.tokens.tolist(), before.logps.tolist()
      )
    self.clock.put(running)
    self.clock.start()
    self.put(by_draw.values(), queued)

  # --- a chunk

  def launch(self) -> None:
    """Starts what the clock starts at this tick, and a chunk."""
    started = self.clock.start()
    for _, (draw, _) in started:
      self._waiting[draw] -= 1
      if not self._waiting[draw]:
        del self._waiting[draw]
    self._started += [(self.clock.tick, draw) for _, (draw, _) in started]
    self._place(started)
    self._rows = {row: kv for row, kv in self._rows.items() if row[0] in self._waiting}
    running = self.clock.running.values()
    if running:
      furthest = max(self._answers[key].position for key in running)
      self._chunk = self._slots.launch(self._weights, furthest)

  def _place(self, starts: Sequence[tuple[int, Key]]) -> None:
    """Puts answers into slots."""
    placed: dict[int, tuple] = {}  # id(kv) -> (kv, its starts): one insertion each
    for i, (slot, key) in enumerate(starts):
      answer = self._answers[key]
      if self._row(key) not in self._rows:
        after = [later for _, later in starts[i:]]
        self._prefill(itertools.chain(after, self.clock.queue))
      kv, row = self._rows[self._row(key)]
      placed.setdefault(id(kv), (kv, []))[1].append((slot, row, answer))
    for kv, of_kv in placed.values():
      self._slots.start(kv, of_kv)

  def _row(self, key: Key) -> Key:
    """What is prefilled for an answer: its prompt, or also the tokens of its own."""
    return key if self._answers[key].tokens else (key[0], -1)

  def _prefill(self, keys: Iterable[Key]) -> None:
    """The rows that these want first, as many as one prefill has."""
    wanted: dict[Key, Answer] = {}
    for key in keys:
      if len(wanted) == self._slots.prefill_rows:
        break
      if self._row(key) not in self._rows:
        wanted.setdefault(self._row(key), self._answers[key])
    kv = self._slots.prefill(self._weights, list(wanted.values()))
    self._rows |= {row: (kv, i) for i, row in enumerate(wanted)}

  def book(self) -> tuple[list[Event], list[Event], list[tuple[Request, Completion]]]:
    """Reads the chunk.

    Returns:
      (tick, draw) of answers that have started and ended since the last call, and those
      that have ended.
    """
    started, self._started = self._started, []
    ended, completions, over = [], [], []
    gone = np.zeros(self._slots.count, bool)
    spoilt = np.zeros_like(gone)
    if self._chunk is not None:
      chunk = self._slots.read(self._chunk)
      self._chunk = None
      for slot, key in sorted(self.clock.running.items()):
        answer = self._answers[key]
        before = len(answer.tokens)
        new, spoilt[slot] = extend(answer, slot, *chunk)
        self.busy += new
        finish, gone[slot] = finish_of(
          answer, spoilt[slot], self._slots.chunk, self._detokenize
        )
        if finish is not None:
          over.append(slot)
          made = max(
            1, len(answer.tokens) - before
          )  # it took its slot for that at least
          ended.append((self.clock.tick + made, key[0]))
          completion = completion_of(answer, finish, self._version)
          completions.append((answer.request, completion))
          del self._answers[key]
    if gone.any():
      self._slots.retire(gone)
    if spoilt.any():
      self._slots.wipe(spoilt)
    self.clock.advance(over)
    return started, ended, completions
