"""The sampling loop: slots refilled between chunks of decode steps.

A chunk is launched and not waited for, so that one thread drives several samplers and
a learner. An answer's tokens do not depend on the order of the queue, nor on when a
slot gets free.
"""

import collections
from collections.abc import Callable, Sequence
import math

import numpy as np

from jaxrl_sched.device.slots import Answer, Slots
from jaxrl_sched.host import relief
from jaxrl_sched.types import Completion, Request, Share

Told = Callable[[Request, Completion], None]
Key = tuple[int, int]


def queue_of(requests: Sequence[Request], share: Share | None) -> list[Key]:
  """The answers of a share, (place of the request, answer), in the order of start.

  Raises:
    ValueError: the share does not fit the requests; the message names its prompt.
  """
  asked = [list(request.missing) for request in requests]
  if share is None:
    return [(place, k) for place, answers in enumerate(asked) for k in answers]
  queue = [(int(i), int(k)) for i, k in zip(share.requests, share.answers, strict=True)]
  named: dict[int, set[int]] = collections.defaultdict(set)
  for place, k in queue:
    if not 0 <= place < len(requests):
      raise ValueError(f'share: request {place}, expected 0 to {len(requests) - 1}')
    if k not in asked[place] or k in named[place]:
      raise ValueError(
        f'share: answer {k} of prompt {requests[place].prompt.id!r}, expected one of '
        f'{asked[place]}, and each once'
      )
    named[place].add(k)
  for place, answers in named.items():
    request = requests[place]
    alone = share.cuts is None and len(answers) == len(asked[place])
    if request.relief.spare > 0 and not alone:
      raise ValueError(
        f'prompt {request.prompt.id!r}: spare={request.relief.spare} with static '
        'minibatches or over several engines, expected all of its answers in one place'
      )
  return queue


def minibatch_ends(share: Share | None, count: int, slots: int) -> list[int]:
  """Where in the queue each static minibatch ends; without them, where all does."""
  if share is None or share.cuts is None:
    return [count]
  ends = [*(int(c) for c in share.cuts[1:]), count]
  sizes = np.diff([0, *ends])
  if (count and (len(share.cuts) == 0 or share.cuts[0] != 0)) or np.any(sizes < 0):
    cuts = np.asarray(share.cuts).tolist()
    raise ValueError(f'share: cuts={cuts}, expected 0 and then growing')
  if sizes.max() > slots:
    raise ValueError(
      f'share: a minibatch of {sizes.max()} answers, expected at most slots={slots}'
    )
  return ends


class Rollout:
  """Answers on their way, of requests that were checked.

  Ended answers of `Request.begun` are passed on, by whoever goes on with the first of
  the paused ones.

  Args:
    on_finish: called with each answer once it has ended and is certain to be kept, also
      with those that are passed on; not with paused ones.

  Attributes:
    completions: (draw, answer) -> what is kept, once `advance` has said that all is
      done. Of a request with a paused answer it is what the next bundle needs.
    cut: (draw, answer) -> tokens of what is not; 0 if it never ran.
    busy, slot_steps: with an answer, and in all, once all is done.
    done: nothing is left.
  """

  def __init__(
    self,
    slots: Slots,
    weights,
    version: int,
    requests: Sequence[Request],
    share: Share | None,
    *,
    detokenize: Callable[[Sequence[int]], str] | None,
    on_finish: Told | None,
  ):
    queue = queue_of(requests, share)
    self._minibatch_ends = minibatch_ends(share, len(queue), slots.count)
    self.completions: dict[Key, Completion] = {}
    self.cut: dict[Key, int] = {}
    self.busy, self.slot_steps, self.done = 0, 0, False
    self._slots, self._weights, self._version = slots, weights, version
    self._requests, self._detokenize = list(requests), detokenize
    self._on_finish = on_finish
    self._chunk = None  # under way
    self._free = collections.deque(range(slots.count))
    self._running: dict[int, Answer] = {}  # slot -> answer
    self._steps = self._busy = 0
    self._races: dict[int, relief.Race] = {}
    self._ended: dict[Key, Completion] = {}  # or paused; (place, answer) -> answer
    self._untold: dict[int, list[int]] = {}
    self._queue = collections.deque()  # (place in the share, answer)
    self._unfilled = collections.deque()  # (row, answer that stands for it)
    self._rows: dict[Key, tuple] = {}  # row -> (kv, place in it)
    self._waiting: collections.Counter[Key] = collections.Counter()  # of each row
    self._waits: dict[Key, Answer] = {}
    self._enqueue(queue)

  def ready(self) -> bool:
    """Whether `advance` would not have to wait for the device."""
    return self._chunk is None or all(x.is_ready() for x in self._chunk)

  def advance(self) -> bool:
    """Books the chunk under way, refills the slots and launches the next chunk.

    Returns:
      Whether anything is left.
    """
    if self.done:
      return False
    touched = list(self._races) if self._chunk is None else self._book()
    told = [key for place in touched for key in self._settle(place)]
    self._refill()
    if self._running:
      furthest = max(answer.position for answer in self._running.values())
      self._chunk = self._slots.launch(self._weights, furthest)
    else:
      self._close()
    if self._on_finish is not None:
      for place, answer in told:  # while the device computes
        self._on_finish(self._requests[place], self._ended[place, answer])
    return not self.done

  def abandon(self) -> None:
    """Gives up what is not done."""
    if not self.done:  # slots may be alive still
      self._slots.reset()
      self._chunk, self._weights, self.done = None, None, True

  def _enqueue(self, queue: Sequence[Key]) -> None:
    begun: dict[Key, Completion] = {}
    for place in dict.fromkeys(place for place, _ in queue):
      request = self._requests[place]
      self._races[place] = relief.Race(
        request.size, first_finished=request.relief.first_finished
      )
      self._untold[place] = []
      begun |= {(place, c.answer): c for c in request.begun}
    for at, (place, k) in enumerate(queue):
      request, before = self._requests[place], begun.get((place, k))
      tokens, logps = ([], []) if before is None else (before.tokens, before.logps)
      answer = Answer(request, place, k, before, list(tokens), list(logps))
      self._races[place].open[k] = len(answer.tokens)
      self._queue.append((at, answer))
      self._waits[place, k] = answer
      if not self._waiting[self._row(answer)]:
        self._unfilled.append(answer)
      self._waiting[self._row(answer)] += 1
    for (place, k), before in begun.items():
      if before.finish != 'paused':
        if self._requests[place].missing[0] in self._races[place].open:
          self._races[place].open[k] = len(before.tokens)
          self._end(place, before)

  @staticmethod
  def _row(answer: Answer) -> Key:
    """What is prefilled for it: the prompt, or also the tokens of its own."""
    return answer.place, -1 if answer.begun is None else answer.answer

  # --- from the queue into slots

  def _refill(self) -> None:
    starts: dict[int, tuple] = {}  # id(kv) -> (kv, its starts): one insertion each
    while self._free and self._queue:
      at, answer = self._queue[0]
      if (answer.place, answer.answer) not in self._waits:  # found not to be needed
        self._queue.popleft()
        continue
      if at >= self._minibatch_ends[0]:
        if self._running:
          break
        self._minibatch_ends.pop(0)
        continue
      self._queue.popleft()
      kv, row = self._prefilled(answer)
      slot = self._free.popleft()
      self._running[slot] = answer
      starts.setdefault(id(kv), (kv, []))[1].append((slot, row, answer))
      self._leave(answer)
    for kv, placed in starts.values():
      self._slots.start(kv, placed)

  def _prefilled(self, answer: Answer) -> tuple:
    """Its keys and values, prefilled together with those that are wanted next."""
    while self._row(answer) not in self._rows:
      batch = []
      while self._unfilled and len(batch) < self._slots.prefill_rows:
        first = self._unfilled.popleft()
        if self._waiting[self._row(first)]:
          batch.append(first)
      kv = self._slots.prefill(self._weights, batch)
      self._rows |= {self._row(first): (kv, i) for i, first in enumerate(batch)}
    return self._rows[self._row(answer)]

  def _leave(self, answer: Answer) -> None:
    """It waits no more. Keys and values that nobody waits for are let go."""
    row = self._row(answer)
    del self._waits[answer.place, answer.answer]
    self._waiting[row] -= 1
    if not self._waiting[row]:
      self._rows.pop(row, None)

  # --- from slots to completions

  def _book(self) -> list[int]:
    """Reads the chunk under way. Returns the requests that it was about."""
    tokens, logps, made = self._slots.read(self._chunk)
    self._chunk = None
    grown, touched, gone = [], {}, np.zeros(self._slots.count, bool)
    spoilt = np.zeros_like(gone)
    for slot, answer in sorted(self._running.items()):
      new, spoilt[slot] = extend(answer, slot, tokens, logps, made)
      grown.append(new)
      touched[answer.place] = None
      finish, alive = finish_of(
        answer, spoilt[slot], self._slots.chunk, self._detokenize
      )
      race = self._races[answer.place]
      race.open[answer.answer] = len(answer.tokens)
      if finish is not None:
        gone[slot] = alive
        self._end(answer.place, completion_of(answer, finish, self._version))
        self._release(slot)
    self._steps, self._busy = self._steps + max(grown), self._busy + sum(grown)
    for place in touched:
      for k in self._races[place].drop():
        self._drop(place, k, gone)
    if gone.any():
      self._slots.retire(gone)
    if spoilt.any():
      self._slots.wipe(spoilt)
    return list(touched)

  def _end(self, place: int, completion: Completion) -> None:
    k = completion.answer
    self._ended[place, k] = completion
    if completion.finish != 'paused':
      self._untold[place].append(k)
      self._races[place].end(
        k, len(completion.tokens), aborted=completion.finish == 'aborted'
      )

  def _release(self, slot: int) -> None:
    del self._running[slot]
    self._free.append(slot)

  def _drop(self, place: int, k: int, gone: np.ndarray) -> None:
    """It is not needed, whether it waits, runs or is paused."""
    key = self._requests[place].draw, k
    if (place, k) in self._ended:
      self.cut[key] = len(self._ended.pop((place, k)).tokens)
      return
    for slot, answer in self._running.items():
      if (answer.place, answer.answer) == (place, k):
        gone[slot] = True
        self.cut[key] = len(answer.tokens)
        self._release(slot)
        return
    answer = self._waits[place, k]
    self.cut[key] = len(answer.tokens)
    self._leave(answer)

  def _settle(self, place: int) -> list[Key]:
    """Those of a request's answers that are from now on certain to be kept."""
    race, untold = self._races[place], self._untold[place]
    if not untold:
      return []
    certain = [k for k in untold if race.is_kept(k)]
    self._untold[place] = [k for k in untold if k not in certain]
    return [(place, k) for k in certain]

  def _close(self) -> None:
    for place, race in self._races.items():
      for k in race.drop_ended():
        answer = self._ended.pop((place, k))
        self.cut[self._requests[place].draw, k] = len(answer.tokens)
    self.completions = {
      (self._requests[place].draw, k): completion
      for (place, k), completion in self._ended.items()
    }
    self.busy, self.slot_steps = self._busy, self._steps * self._slots.count
    self._weights, self.done = None, True


def extend(
  answer: Answer, slot: int, tokens: np.ndarray, logps: np.ndarray, made: np.ndarray
) -> tuple[int, bool]:
  """Gives an answer what its slot has made in a chunk; arguments as `Slots.read` has it.

  Returns:
    How many tokens, and whether the last was not a number's: it is taken off again.
  """
  new = int(made[slot]) - len(answer.tokens)
  answer.tokens.extend(tokens[:new, slot].tolist())
  answer.logps.extend(logps[:new, slot])
  is_spoilt = not math.isfinite(answer.logps[-1])
  if is_spoilt:
    del answer.tokens[-1], answer.logps[-1]
  return new, is_spoilt


def finish_of(
  answer: Answer,
  is_spoilt: bool,
  chunk: int,
  detokenize: Callable[[Sequence[int]], str] | None,
) -> tuple[str | None, bool]:
  """How the answer ended, if it has, and whether its slot does not know of it.

  Args:
    chunk: of its last tokens, those among which a stop string may have ended.
  """
  s, finish = answer.request.sampling, None
  if is_spoilt:
    finish = 'aborted'
  elif answer.tokens[-1] in s.stop_ids:
    finish = 'stop'
  elif len(answer.tokens) >= answer.limit:
    finish = 'length' if answer.limit == s.max_new_tokens else 'paused'
  if s.stop_strings and (end := _string_end(answer, chunk, detokenize)) is not None:
    del answer.tokens[end:], answer.logps[end:]
    return 'stop', finish is None
  return finish, False


def _string_end(
  answer: Answer, chunk: int, detokenize: Callable[[Sequence[int]], str]
) -> int | None:
  """Tokens up to and with the one that completes a stop string; None: none does."""
  strings = answer.request.sampling.stop_strings
  least = max(1, answer.request.sampling.min_new_tokens)
  made = len(answer.tokens)

  def has(count):
    text = detokenize(answer.tokens[:count])
    return any(s in text for s in strings)

  if made < least or not has(made):
    return None
  new = range(max(least, made - chunk + 1), made + 1)
  return next(count for count in new if has(count))


def completion_of(answer: Answer, finish: str, version: int) -> Completion:
  """What there is of an answer, whose newest tokens are of this version."""
  begun, earlier = answer.begun, ()
  if begun is not None and len(answer.tokens) == answer.start:  # nothing was added
    version, earlier = begun.version, begun.earlier
  elif begun is not None:
    earlier = relief.versions_before(begun, version)
  return Completion(
    draw=answer.request.draw,
    answer=answer.answer,
    tokens=np.array(answer.tokens, np.int32),
    logps=np.array(answer.logps, np.float32),
    finish=finish,
    version=version,
    earlier=earlier,
  )
