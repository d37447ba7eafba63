"""A pool with engines of known lengths and verdicts; and the same told tick by tick.

`Run` drives the pool as an engine would. `BruteForce` knows neither events nor heaps: it
keeps every answer's first and last tick and looks at all of them at every decision.
"""

from collections.abc import Callable, Mapping
import dataclasses
from fractions import Fraction
import functools
import heapq
import math
import random

from jaxrl_sched.control.pool import BOUND, Asked, EngineClock, Pool


@dataclasses.dataclass
class Task:
  """What is sampled: all of it a function of its place."""

  length: Callable[[int, int], int]  # draw, answer -> tokens
  useful: Callable[[int, str], bool]  # draw, stream
  size: Callable[[int], int]  # draw -> answers of the group
  weights: Mapping[str, float]
  acceptance: float = 0.5  # that the pool reckons with
  usual: int = 4  # size of a group, likewise
  predicted: Callable[[int], float] = lambda draw: 1.0


@dataclasses.dataclass(frozen=True)
class Fill:
  """What a fill brought."""

  tick: int
  draws: list[int]
  missing: int
  done: list[int]


class Run:
  """A pool and its engines.

  Args:
    order: draws which report is handed over next, when the pool waits for some; None: all
      are handed over at once.
  """

  def __init__(
    self, pool: Pool, task: Task, *, engines: int, slots: int, chunk: int, order=None
  ):
    self.pool, self.task, self.chunk = pool, task, chunk
    self.clocks = [EngineClock(slots, chunk) for _ in range(engines)]
    self.ends: list[dict[int, tuple[int, int]]] = [{} for _ in range(engines)]
    self.left: dict[int, int] = {}  # draw -> answers that have not ended
    self.stream: dict[int, str] = {}
    self.starts: dict[tuple[int, int], int] = {}
    self.finished: dict[tuple[int, int], int] = {}
    self.plans: list[tuple[int, list[tuple[int, str, int]]]] = []
    self.next_draw = 0
    self.dry = self.slot_steps = self.empty = 0
    self.fed: list[int] = []  # answers in queues after every plan
    self._order = order
    self._held: list[tuple[object, Callable[[], None]]] = []

  def fills(self, count: int) -> list[Fill]:
    found = []
    while len(found) < count:
      found.append(self.fill())
    return found

  def fill(self) -> Fill:
    pool, task = self.pool, self.task
    while True:
      closing = pool.closing(task.weights)
      if closing is None:  # what is on its way has to come
        assert self._held, 'the pool waits for what has been handed over'
        self._hand_over()
        continue
      if closing:
        done = pool.close(closing)
        for clock in self.clocks:
          moved = clock.compact()
          e = self.clocks.index(clock)
          self.ends[e] = {moved[s]: x for s, x in self.ends[e].items()}
        return Fill(closing.tick, closing.draws, closing.missing, done)
      self._feed()
      if not self.pool._barrier:
        self._decode()
        pool.proceed()
      else:
        while self.left:
          self._decode()
        while self._held:
          self._hand_over()

  def _feed(self) -> None:
    pool, task = self.pool, self.task
    rate = lambda stream, size: task.acceptance  # noqa: E731
    if pool._barrier:
      missing = pool.missing(task.weights)
      streams = [
        s for s, n in missing.items() for _ in range(math.ceil(n / task.usual))
      ]
    else:
      streams = pool.wanted(task.weights, rate, task.usual)
    draws = range(self.next_draw, self.next_draw + len(streams))
    self.next_draw += len(streams)
    sizes = [task.size(draw) for draw in draws]
    predicted = [task.predicted(draw) for draw in draws]
    engines = pool.assign(sizes, predicted)
    asked = [
      Asked(draw=d, stream=s, size=n, engine=e, predicted=p)
      for d, s, n, e, p in zip(draws, streams, sizes, engines, predicted, strict=True)
    ]
    pool.ask(asked)
    for a in sorted(asked, key=lambda a: (-a.predicted, a.draw)):
      self.clocks[a.engine].put((a.draw, k) for k in range(a.size))
      self.left[a.draw], self.stream[a.draw] = a.size, a.stream
    if asked:
      self.plans.append((pool.tick, [(a.draw, a.stream, a.engine) for a in asked]))
      self.fed.append(sum(len(clock.queue) for clock in self.clocks))

  def _decode(self) -> None:
    for e, clock in enumerate(self.clocks):
      begun = clock.start()
      for slot, (draw, k) in begun:
        self.starts[draw, k] = clock.tick
        self.ends[e][slot] = (clock.tick + self.task.length(draw, k), draw)
        self.finished[draw, k] = self.ends[e][slot][0]
      self.dry += len(clock.running) < clock.slots
      self.slot_steps += clock.slots * self.chunk
      over = {s: x for s, x in self.ends[e].items() if x[0] <= clock.tick + self.chunk}
      busy = sum(min(x[0], clock.tick + self.chunk) for x in self.ends[e].values())
      self.empty += clock.slots * self.chunk - (busy - len(self.ends[e]) * clock.tick)
      for slot in over:
        del self.ends[e][slot]
      started = [(clock.tick, draw) for _, (draw, _) in begun]
      clock.advance(over)
      events = dict(started=started, ended=list(over.values()))
      self._hold(e, functools.partial(self.pool.report, e, clock.tick, **events))
      for _, draw in over.values():
        self.left[draw] -= 1
        if not self.left[draw]:
          del self.left[draw]
          useful = self.task.useful(draw, self.stream[draw])
          word = functools.partial(self.pool.judge, draw, useful)
          self._hold(('verdict', draw), word)
    if self._order is None:
      while self._held:
        self._hand_over()

  def _hold(self, source: object, word: Callable[[], None]) -> None:
    self._held.append((source, word))

  def _hand_over(self) -> None:
    """The oldest word, or with an order the oldest of any source: those of one engine
    stay in order, all else may overtake."""
    at = 0
    if self._order is not None:
      oldest = {source: i for i, (source, _) in reversed(list(enumerate(self._held)))}
      at = self._order.choice(sorted(oldest.values()))
    self._held.pop(at)[1]()


class BruteForce:
  """The rules of the open pool, read off all answers at every decision."""

  def __init__(
    self, task: Task, *, rollouts, engines, slots, chunk, grace, low_water, streams
  ):
    self.task, self.streams = task, streams
    self.n, self.slots, self.chunk, self.grace = rollouts, slots, chunk, grace * chunk
    self.low = max(1, math.ceil(low_water * slots))
    self.queues: list[list[tuple[int, int]]] = [[] for _ in range(engines)]
    self.alive: list[dict[int, tuple[int, int]]] = [{} for _ in range(engines)]
    self.starts: dict[tuple[int, int], int] = {}
    self.ends: dict[tuple[int, int], int] = {}
    self.group: dict[int, tuple[str, int, int]] = {}  # stream, size, engine
    self.made: dict[tuple[int, int], int] = {}
    self.taken = {s: Fraction(0) for s in streams}
    self.in_batches: set[int] = set()
    self.debt = self.tick = 0
    self.before = -math.inf  # what the closing before this fill knew
    self.plans = []

  def complete(self, draw: int, by: float) -> bool:
    size = self.group[draw][1]
    return all(self.ends.get((draw, k), math.inf) <= by for k in range(size))

  def waiting(self, by: float) -> dict[str, list[int]]:
    found = {s: [] for s in self.streams}
    for draw, (stream, *_) in self.group.items():
      if draw not in self.in_batches and self.complete(draw, by):
        if self.task.useful(draw, stream):
          found[stream].append(draw)
    return found

  def completed(self, stream: str, by: float) -> int:
    return sum(
      n
      for d, (s, n, _) in self.group.items()
      if s == stream and self.complete(d, by) and not self.complete(d, self.before)
    )

  def fill(self) -> Fill:
    while True:
      known = self.tick - self.grace
      batch = self.batch(known)
      if batch is not None:
        done = [
          d
          for d in self.group
          if self.complete(d, known) and not self.complete(d, self.before)
        ]
        self.before = known
        self.in_batches |= set(batch[0])
        return Fill(self.tick, sorted(batch[0]), batch[1], done)
      self.feed(known)
      for _ in range(self.chunk):
        self.step()

  def quota(self, stream: str) -> Fraction:
    weights = {s: Fraction(w) for s, w in self.task.weights.items()}
    return self.n * weights[stream] / sum(weights.values())

  def batch(self, known):
    waiting, target = self.waiting(known), self.n - self.debt
    live = [s for s in self.streams if self.task.weights[s] > 0]
    usual = self.usual(known)
    bound = {s for s in live if self.is_at_bound(s, known, usual)}
    taken, draws, total, empty = dict(self.taken), [], Fraction(0), Fraction(0)
    left = {s: list(waiting[s]) for s in live}
    while total < target:
      ranks = []
      for place, s in enumerate(live):
        size = Fraction(self.group[left[s][0]][1]) if left[s] else usual
        share = self.quota(s) / self.n
        owed = (share * (sum(taken.values()) + size) - taken[s]) / size
        least = Fraction(1, max(2 * len(live) - 2, 1))
        ranks.append((owed < least, (1 - least - owed) / share, place, s, size))
      *_, s, size = min(ranks)
      if left[s]:
        draws.append(left[s].pop(0))
      elif s in bound:
        empty += min(size, target - total)
      else:
        return None
      taken[s] += size
      total += size
    self.taken = taken
    self.debt = 0 if empty else int(max(0, total - target))
    return draws, round(float(empty))

  def usual(self, known) -> Fraction:
    sizes = [self.group[d][1] for ds in self.waiting(known).values() for d in ds]
    sizes += [n for d, (_, n, _) in self.group.items() if not self.complete(d, known)]
    return Fraction(sum(sizes), len(sizes)) if sizes else Fraction(1)

  def is_at_bound(self, stream, known, usual) -> bool:
    return self.completed(stream, known) >= BOUND * max(self.quota(stream), usual)

  def feed(self, known) -> None:
    task = self.task
    short = []
    for e in range(len(self.queues)):
      mine = [(d, k) for d, (_, n, o) in self.group.items() if o == e for k in range(n)]
      queued = sum(self.starts.get(a, math.inf) > known for a in mine)
      running = sum(
        self.starts.get(a, math.inf) <= known < self.ends.get(a, math.inf) for a in mine
      )
      short.append(2 * self.low - (queued - (self.slots - running)))
    if max(short) <= self.low:
      return
    live = [s for s in self.streams if task.weights[s] > 0]
    hand = {}
    for s in live:
      flying = [
        n
        for d, (o, n, _) in self.group.items()
        if o == s and not self.complete(d, known)
      ]
      ready = sum(self.group[d][1] for d in self.waiting(known)[s])
      hand[s] = ready + sum(n * task.acceptance for n in flying)
    usual, plan = self.usual(known), []
    bound = {s for s in live if self.is_at_bound(s, known, usual)}
    for _ in range(math.ceil(sum(max(0, n) for n in short) / task.usual)):
      ranks = []
      for place, s in enumerate(live):
        batches = round(hand[s] / float(self.quota(s)), 9)
        is_bound = s in bound
        ranks.append((is_bound, batches, place, s))
      s = min(ranks)[3]
      hand[s] += task.usual * task.acceptance
      plan.append(s)
    loads = [0.0] * len(self.queues)
    for d, (_, n, e) in self.group.items():
      if not self.complete(d, known):
        over = sum(self.ends.get((d, k), math.inf) <= known for k in range(n))
        loads[e] += (n - over) * task.predicted(d)
    first = len(self.group)
    draws = range(first, first + len(plan))
    engine = {}
    for d in sorted(draws, key=lambda d: (-task.predicted(d), d)):
      engine[d] = min(range(len(loads)), key=lambda e: (loads[e], e))
      loads[engine[d]] += task.size(d) * task.predicted(d)
      self.queues[engine[d]] += [(d, k) for k in range(task.size(d))]
    for d, s in zip(draws, plan, strict=True):
      self.group[d] = s, task.size(d), engine[d]
    self.plans.append(
      (self.tick, [(d, s, engine[d]) for d, s in zip(draws, plan, strict=True)])
    )

  def step(self) -> None:
    """One decode step of every engine."""
    for e, queue in enumerate(self.queues):
      if self.tick % self.chunk == 0:
        for slot in range(self.slots):
          if self.made.get((e, slot), 0) == 0 and queue:
            draw, k = queue.pop(0)
            self.alive[e][slot] = draw, k
            self.made[e, slot] = self.task.length(draw, k)
            self.starts[draw, k] = self.tick
      for slot in range(self.slots):
        if self.made.get((e, slot), 0) > 0:
          self.made[e, slot] -= 1
          if self.made[e, slot] == 0:
            self.ends[self.alive[e][slot]] = self.tick + 1
    self.tick += 1


def lognormal(seed: int, *, mean: float, sigma: float = 1.0, most: int = 10**9):
  """(draw, answer) -> a length, long-tailed, of about this mean before the cut."""

  def length(draw: int, answer: int) -> int:
    z = random.Random(f'{seed}/{draw}/{answer}').gauss(0.0, 1.0)
    value = mean * math.exp(sigma * z - sigma * sigma / 2)
    return max(1, min(most, round(value)))

  return length


def chance(seed: int, rates: Mapping[str, float]):
  """(draw, stream) -> whether a group is useful, with the rate of its stream."""
  return lambda draw, stream: random.Random(f'{seed}#{draw}').random() < rates[stream]


def ends_in_slots(lengths: list[int], slots: int, chunk: int) -> list[tuple[int, int]]:
  """(start, end) of answers that are all in the queue at tick 0: a heap of free slots."""
  free, found = [0] * slots, []
  for length in lengths:
    start = heapq.heappop(free)
    heapq.heappush(free, -(-(start + length) // chunk) * chunk)
    found.append((start, start + length))
  return found
