"""The open pool: when a batch is closed, which groups are in it, and what is asked next.

Sampling never waits for its longest answer. Groups are asked for while others are
sampled; a batch is closed as soon as useful groups fill it; answers that are running
then are continued in the next fill. Rollouts that are partial at an update are those of
Kimi k1.5 (arXiv 2501.12599), updates in flight those of PipelineRL (arXiv 2509.19128).
Here, when a batch is closed and what is asked for when depends on the engines' clocks
only: on which decode step an answer starts and ends, never on wall-clock time.

A *tick* is a decode step, counted from the start of the run; a *fill* is the sampling
done for one batch. Every decision takes effect at a multiple of `chunk` and is made of
what had happened `grace` chunks before, so that verdicts and other hosts' reports arrive
while sampling continues. In whatever order reports come, decisions are the same.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
import dataclasses
import heapq
import math
from typing import Any, Generic, TypeVar

from jaxrl_sched.control.base import check_state
from jaxrl_sched.control.quotas import Shares

BOUND = 10  # quotas that a stream completes in a fill without filling its own
VERSION = 1  # of the state

Key = TypeVar('Key', bound=Hashable)


class EngineClock(Generic[Key]):
  """The queue and the slots of one sampling engine.

  An answer starts at the first multiple of the chunk at which a slot is free, in queue
  order, the lowest slot first.

  Attributes:
    tick: decode steps so far, a multiple of the chunk.
    queue: answers that have not started.
    running: slot -> answer.
  """

  def __init__(self, slots: int, chunk: int, *, tick: int = 0):
    self.slots, self.chunk, self.tick = slots, chunk, tick
    self.queue: deque[Key] = deque()
    self.running: dict[int, Key] = {}
    self._free = list(range(slots))  # a heap

  def put(self, answers: Iterable[Key]) -> None:
    """These come after all that are in the queue."""
    self.queue.extend(answers)

  def start(self) -> list[tuple[int, Key]]:
    """(slot, answer) of those that start at this tick."""
    started = []
    while self.queue and self._free:
      slot = heapq.heappop(self._free)
      self.running[slot] = self.queue.popleft()
      started.append((slot, self.running[slot]))
    return started

  def advance(self, ended: Iterable[int]) -> None:
    """A chunk has been decoded, in which the answers in these slots have ended."""
    for slot in ended:
      del self.running[slot]
      heapq.heappush(self._free, slot)
    self.tick += self.chunk

  def compact(self) -> dict[int, int]:
    """A fill is closed: running answers move to the first slots, in their order.

    Returns:
      Slot before -> slot now.
    """
    moved = {before: now for now, before in enumerate(sorted(self.running))}
    self.running = {now: self.running[before] for before, now in moved.items()}
    self._free = list(range(len(moved), self.slots))
    return moved


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """A group that is asked for."""

  draw: int
  stream: str
  size: int  # answers
  engine: int
  predicted: float = 1.0  # tokens of an answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Closing:
  """The end of a fill, and its batch."""

  tick: int  # on every engine
  draws: list[int]  # groups of the batch, in draw order
  missing: int  # rollouts that streams at their bound did not give
  borrowed: int  # and those that others gave in their place
  debt: int  # rollouts over N, by which the next batch has fewer
  taken: dict[str, float]  # stream -> rollouts that count for its share from now on


@dataclasses.dataclass
class _Group:
  """A group in the pool, as far as decisions know of it."""

  asked: Asked
  started: int = 0  # answers
  ended: int = 0

  @property
  def in_queue(self) -> int:
    return self.asked.size - self.started


class Pool:
  """All groups that are asked for and not in a batch yet.

  The caller tells it what happens (`report`, `judge`). At each multiple of the chunk
  it asks for `closing`, which is None until enough is known; where the fill is not
  closed, it gives what is `wanted` with `ask`, and goes to the next with `proceed`.

  With a barrier (the synchronous trainer) a decision is made when all that was asked for
  has ended, and then knows of all of it.

  Args:
    streams: in the order in which ties are broken.
    rollouts: N, of a batch.
    engines, slots, chunk: of sampling.
    grace: chunks between an event and the first decision that knows of it.
    low_water: slots' worth of answers below which a queue is filled to twice that.
    barrier: closes a fill when nothing is in flight.
    borrow: waiting groups of other streams fill what a stream at its bound did not give.
    by_stream: False takes useful groups from whatever stream they come; weights are then
      those of what is asked for.

  Attributes:
    tick: at which the next decision takes effect.
  """

  def __init__(
    self,
    streams: Sequence[str],
    *,
    rollouts: int,
    engines: int,
    slots: int,
    chunk: int,
    grace: int = 4,
    low_water: float = 0.5,
    barrier: bool = False,
    borrow: bool = False,
    by_stream: bool = True,
  ):
    for name, value, least in (
      ('rollouts', rollouts, 1),
      ('asp.engines', engines, 1),
      ('sampler.slots', slots, 1),
      ('sampler.chunk', chunk, 1),
      ('scheduler.grace', grace, 0),
    ):
      if type(value) is not int or value < least:
        raise ValueError(f'{name}: {value!r}, expected a whole number from {least}')
    if not 0 < low_water < math.inf:
      raise ValueError(f'scheduler.low_water: {low_water!r}, expected above 0')
    self._settings = dict(
      rollouts=rollouts,
      engines=engines,
      slots=slots,
      chunk=chunk,
      grace=grace,
      low_water=low_water,
      barrier=barrier,
    )
    self._rollouts, self._chunk, self._slots = rollouts, chunk, slots
    self._grace = grace * chunk
    self._low = max(1, math.ceil(low_water * slots))
    self._barrier, self._borrow, self._by_stream = barrier, borrow, by_stream

    self.tick = 0
    self._shares = Shares(streams)  # of what is trained on, or of what is asked for
    self._debt = 0
    self._in_flight: dict[int, _Group] = {}  # by draw
    self._events: list[tuple[int, int, int]] = []  # a heap: (tick, draw, 0 start or 1)
    self._reported = [0] * engines  # ticks up to which all is known
    self._verdicts: dict[int, bool] = {}  # of groups in flight
    self._waiting: dict[str, dict[int, int]] = {s: {} for s in streams}  # draw -> size
    self._completed = dict.fromkeys(streams, 0)  # rollouts in this fill
    self._done: list[int] = []  # draws completed in this fill
    self._running, self._queued = [0] * engines, [0] * engines  # answers

  # --- what has happened ---

  def report(
    self,
    engine: int,
    tick: int,
    *,
    started: Iterable[tuple[int, int]] = (),
    ended: Iterable[tuple[int, int]] = (),
  ) -> None:
    """All that has happened on an engine up to and at this tick.

    Args:
      started, ended: (tick, draw), one an answer, of what was not reported before.
    """
    for kind, events in enumerate((started, ended)):
      for at, draw in events:
        heapq.heappush(self._events, (at, draw, kind))
    self._reported[engine] = max(self._reported[engine], tick)

  def judge(self, draw: int, useful: bool) -> None:
    """Whether a group can be learned from; known once all its answers are graded."""
    self._verdicts[draw] = useful

  def _known(self) -> bool:
    """Takes in all that a decision at `tick` is made of; False: some is not reported."""
    until = math.inf if self._barrier else self.tick - self._grace
    if not self._barrier and min(self._reported) < until:
      return False
    while self._events and self._events[0][0] <= until:
      _, draw, is_end = self._events[0]
      group = self._in_flight[draw]
      engine, size = group.asked.engine, group.asked.size
      if is_end and group.ended + 1 == size and draw not in self._verdicts:
        return False
      heapq.heappop(self._events)
      group.started += not is_end
      group.ended += is_end
      self._queued[engine] -= not is_end
      self._running[engine] += 1 - 2 * is_end
      if group.ended == size:
        self._complete(self._in_flight.pop(draw).asked)
    if self._barrier and not self._in_flight:
      self.tick = math.ceil(max(self._reported) / self._chunk) * self._chunk
    return not (self._barrier and self._in_flight)

  def _complete(self, asked: Asked) -> None:
    self._completed[asked.stream] += asked.size
    self._done.append(asked.draw)
    if self._verdicts.pop(asked.draw):
      self._waiting[asked.stream][asked.draw] = asked.size

  # --- closing ---

  def closing(
    self, weights: Mapping[str, float], *, is_last: bool = False
  ) -> Closing | bool | None:
    """The end of the fill, if it is at `tick`; False: it is not; None: not known yet.

    It is at the first multiple of the chunk by which what is known fills the batch: N
    rollouts, less what earlier batches had over it, streams by their shares, of each the
    first groups in draw order. A stream that has completed ten times its quota in this
    fill counts as filled with what it has.

    Args:
      weights: of the streams; one at least is above 0.
      is_last: nothing more will be asked for: all streams count as filled.
    """
    if not self._known():
      return None
    if self._by_stream:
      self._shares.set_weights(weights)
    quotas = self._quotas(weights)
    at_bound = set(quotas) if is_last else self._at_bound(quotas)
    waiting = sum(sum(sizes.values()) for sizes in self._waiting.values())
    if waiting < self._rollouts - self._debt and not at_bound:
      return False
    batch, lacking = self._compose(quotas, at_bound)
    return False if lacking else batch

  def missing(self, weights: Mapping[str, float]) -> dict[str, float]:
    """Stream -> rollouts that the batch still lacks of it, as far as is known; of all as
    one, under '', where groups are taken from whatever stream they come."""
    if self._by_stream:
      self._shares.set_weights(weights)
    quotas = self._quotas(weights)
    lacking = self._compose(quotas, set())[1]
    return {s: lacking[s] for s in (*self._waiting, '') if s in lacking}

  def _quotas(self, weights: Mapping[str, float]) -> dict[str, float]:
    """Stream -> rollouts of it in a usual batch, of streams with a weight."""
    total = sum(weights.values())
    return {s: self._rollouts * w / total for s, w in weights.items() if w > 0}

  def _at_bound(self, quotas: Mapping[str, float]) -> set[str]:
    """Streams of which ten quotas, a group at least each, were completed in this fill."""
    least = self._usual_size()
    return {
      stream
      for stream, quota in quotas.items()
      if self._completed[stream] >= BOUND * max(quota, least)
    }

  def _compose(
    self, quotas: Mapping[str, float], at_bound: set[str]
  ) -> tuple[Closing, dict[str, float]]:
    """A batch of what is waiting, and what streams not at their bound did not give."""
    target = self._rollouts - self._debt
    shares, groups = self._shares.copy(), self._candidates(quotas)
    if not self._by_stream:
      at_bound = {''} if at_bound == set(quotas) else set()
    usual = self._usual_size()
    at = dict.fromkeys(groups, 0)  # of each, groups taken
    draws, total, empty = [], 0.0, 0.0
    lacking: dict[str, float] = {}
    while total < target:
      sizes = {s: g[at[s]][1] if at[s] < len(g) else usual for s, g in groups.items()}
      stream = shares.next(sizes) if self._by_stream else ''
      if at[stream] < len(groups[stream]):
        draws.append(groups[stream][at[stream]][0])
        at[stream] += 1
      elif stream in at_bound:  # its place stays empty, and it is owed nothing for it
        empty += min(sizes[stream], target - total)
      else:
        lacking[stream] = lacking.get(stream, 0.0) + min(sizes[stream], target - total)
      if self._by_stream:
        shares.take(stream, sizes[stream])
      total += sizes[stream]
    over, borrowed = max(0.0, total - target) if not empty else 0.0, 0
    if self._borrow and empty:
      left = [pair for stream, pairs in groups.items() for pair in pairs[at[stream] :]]
      for draw, size in sorted(left):
        if borrowed >= empty:
          break
        draws.append(draw)
        borrowed += size
      over = max(0.0, borrowed - empty)
    closing = Closing(
      tick=self.tick,
      draws=sorted(draws),
      missing=max(0, round(empty) - borrowed),
      borrowed=borrowed,
      debt=round(over),
      taken=shares.taken(),
    )
    return closing, lacking

  def _candidates(
    self, quotas: Mapping[str, float]
  ) -> dict[str, list[tuple[int, int]]]:
    """Stream -> (draw, size) of those that may be in the batch, in draw order."""
    waiting = {s: sorted(sizes.items()) for s, sizes in self._waiting.items()}
    if self._by_stream:
      return {stream: waiting[stream] for stream in quotas}
    return {'': sorted(pair for pairs in waiting.values() for pair in pairs)}

  def _usual_size(self) -> float:
    """Of a group, by those that are waiting or in flight."""
    sizes = [n for stream in self._waiting.values() for n in stream.values()]
    sizes += [group.asked.size for group in self._in_flight.values()]
    return sum(sizes) / len(sizes) if sizes else 1.0

  def close(self, closing: Closing) -> list[int]:
    """Ends the fill, whose batch is taken out.

    Returns:
      Draws of all groups that were completed in it, ascending.
    """
    chosen = set(closing.draws)
    for stream, sizes in self._waiting.items():
      kept = {draw: size for draw, size in sizes.items() if draw not in chosen}
      self._waiting[stream] = kept
    if self._by_stream:
      self._shares.set_taken(closing.taken)
    self._debt = closing.debt
    self._completed = dict.fromkeys(self._completed, 0)
    done, self._done = sorted(self._done), []
    return done

  def drop(self, draws: Iterable[int]) -> None:
    """These are not wanted any more, whether they wait or are in flight.

    Between two fills only: nothing of them may be reported later.
    """
    gone = set(draws)
    for sizes in self._waiting.values():
      for draw in gone & sizes.keys():
        del sizes[draw]
    self._events = [event for event in self._events if event[1] not in gone]
    heapq.heapify(self._events)
    for draw in gone & self._in_flight.keys():
      group = self._in_flight.pop(draw)
      self._queued[group.asked.engine] -= group.in_queue
      self._running[group.asked.engine] -= group.started - group.ended
      self._verdicts.pop(draw, None)

  # --- feeding ---

  def wanted(
    self,
    weights: Mapping[str, float],
    acceptance: Callable[[str, int], float],
    size: int,
  ) -> list[str]:
    """The streams of the groups that are asked for at `tick`, in draw order.

    None of them as long as each queue holds `low_water` * slots answers beyond those that
    free slots take; else as many as fill all queues to twice that. The next group is of
    the stream with the fewest batches in hand: what is waiting, and what is in flight
    times its acceptance, by its quota. Streams at their bound come after all others: one
    that never gives would be asked for ever.

    Args:
      acceptance: (stream, group size) -> share of groups that can be learned from.
      size: of a usual group, by which the number of groups is reckoned.
    """
    short = [self._short(e) for e in range(len(self._queued))]
    if max(short) <= self._low:
      return []
    quotas = self._quotas(weights)
    in_hand = {s: float(sum(self._waiting[s].values())) for s in quotas}
    for group in self._in_flight.values():
      stream, n = group.asked.stream, group.asked.size
      if stream in in_hand:
        in_hand[stream] += n * acceptance(stream, n)
    rate = {stream: acceptance(stream, size) for stream in quotas}
    count = math.ceil(sum(max(0, n) for n in short) / size)
    if not self._by_stream:
      return self.turns(weights, count, size)

    at_bound = self._at_bound(quotas)

    def rank(stream: str) -> tuple[bool, float]:
      batches = round(in_hand[stream] / quotas[stream], 9)  # a tie on paper is one here
      return stream in at_bound, batches

    streams = []
    for _ in range(count):
      streams.append(min(quotas, key=rank))
      in_hand[streams[-1]] += size * rate[streams[-1]]
    return streams

  def _short(self, engine: int) -> int:
    """Answers that its queue is short of twice the low-water mark."""
    free = self._slots - self._running[engine]
    return 2 * self._low - (self._queued[engine] - free)

  def loads(self) -> list[float]:
    """Predicted tokens that each engine has still to sample [E]."""
    found = [0.0] * len(self._queued)
    for group in self._in_flight.values():
      left = group.asked.size - group.ended
      found[group.asked.engine] += left * group.asked.predicted
    return found

  def assign(self, sizes: Sequence[int], predicted: Sequence[float]) -> list[int]:
    """The engine of each new group, longest predicted first: that with the fewest
    predicted tokens left."""
    loads, engines = self.loads(), [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-predicted[i], i)):
      engines[i] = min(range(len(loads)), key=lambda e: (loads[e], e))
      loads[engines[i]] += sizes[i] * predicted[i]
    return engines

  def ask(self, groups: Iterable[Asked]) -> None:
    """These are in their engines' queues from `tick` on."""
    for asked in groups:
      self._in_flight[asked.draw] = _Group(asked)
      self._queued[asked.engine] += asked.size
      if not self._by_stream:
        self._shares.take(asked.stream, asked.size)

  def turns(self, weights: Mapping[str, float], count: int, size: int) -> list[str]:
    """The streams of so many groups of this size, by weight, after those before."""
    shares = self._shares.copy()
    shares.set_weights(weights)
    streams = []
    for _ in range(count):
      streams.append(shares.next(dict.fromkeys(weights, float(size))))
      shares.take(streams[-1], size)
    return streams

  def usual(self, weights: Mapping[str, float], size: int) -> list[str]:
    """The streams of a whole batch of groups of this size."""
    return self.turns(weights, math.ceil(self._rollouts / size), size)

  def proceed(self) -> None:
    """To the next multiple of the chunk."""
    if not self._barrier:
      self.tick += self._chunk

  @property
  def horizon(self) -> int:
    """Decode steps that engines are to have done before the next decision; with a
    barrier a chunk more than they have."""
    return max(self._reported) + self._chunk if self._barrier else self.tick

  @property
  def in_flight(self) -> list[int]:
    """Draws of groups that are not complete, as far as is known."""
    return sorted(self._in_flight)

  @property
  def answers_in_flight(self) -> int:
    return sum(group.asked.size - group.ended for group in self._in_flight.values())

  @property
  def waiting(self) -> list[int]:
    """Draws of complete groups that may be in a batch."""
    return sorted(draw for sizes in self._waiting.values() for draw in sizes)

  # --- state, between two fills ---

  def state_dict(self) -> dict[str, Any]:
    return {
      'version': VERSION,
      'settings': self._settings,
      'tick': self.tick,
      'shares': self._shares.state_dict(),
      'debt': self._debt,
      'in_flight': [
        [*dataclasses.astuple(group.asked), group.started, group.ended]
        for group in self._in_flight.values()
      ],
      'events': sorted(map(list, self._events)),
      'reported': list(self._reported),
      'verdicts': [[draw, useful] for draw, useful in self._verdicts.items()],
      'waiting': {s: sorted(map(list, w.items())) for s, w in self._waiting.items()},
      'completed': dict(self._completed),
      'done': list(self._done),
    }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    check_state('pool', state, self.state_dict())
    if state['version'] != VERSION:
      raise ValueError(f'state of pool: version {state["version"]}, expected {VERSION}')
    for name, value in self._settings.items():
      if (was := state['settings'].get(name)) != value:
        raise ValueError(
          f'{name}: {value!r}, expected {was!r} as in the checkpoint: it decides what is '
          'trained on'
        )
    check_state('pool.waiting', state['waiting'], self._waiting)
    check_state('pool.completed', state['completed'], self._completed)
    self._shares.load_state_dict(state['shares'])
    self.tick, self._debt = state['tick'], state['debt']
    self._reported, self._done = list(state['reported']), list(state['done'])
    self._verdicts = {draw: useful for draw, useful in state['verdicts']}
    self._waiting = {
      s: {d: n for d, n in pairs} for s, pairs in state['waiting'].items()
    }
    self._completed = dict(state['completed'])
    self._events = [tuple(event) for event in state['events']]  # sorted, thus a heap
    self._in_flight = {}
    self._running, self._queued = ([0] * len(self._reported) for _ in range(2))
    for draw, stream, size, engine, predicted, started, ended in state['in_flight']:
      asked = Asked(
        draw=draw, stream=stream, size=size, engine=engine, predicted=predicted
      )
      self._in_flight[draw] = group = _Group(asked, started, ended)
      self._queued[engine] += group.in_queue
      self._running[engine] += started - ended
