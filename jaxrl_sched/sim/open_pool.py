"""The engines of the open pool on a simulated clock.

They start and end answers as `control/pool.py:EngineClock` says, all at the same tick.
What time it is then is kept for each: an engine starts a chunk when it has done the one
before, and when all have done what the decision before that chunk is made of, which is
what lies `grace` chunks back.
"""

from collections import deque
from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from jaxrl_sched.control.planning import Plan
from jaxrl_sched.control.pool import EngineClock
from jaxrl_sched.engine import InFlight, Key, Report
from jaxrl_sched.sim.clocks import Clocks, Times
from jaxrl_sched.sim.costs import Costs
from jaxrl_sched.sim.counts import GENERATE
from jaxrl_sched.sim.groups import SimGroup, zeros
from jaxrl_sched.sim.workload import ABORTED, FINISHES, Answers
from jaxrl_sched.types import Completion, Group, Request


@dataclasses.dataclass
class _Asked:
  """A group that was not given yet, and what its answers will be; G of them."""

  request: Request
  lengths: np.ndarray  # [G] int64
  finish: np.ndarray  # [G] places in FINISHES
  verdicts: np.ndarray  # [G] float32
  rewards: np.ndarray  # [G] float32
  faults: tuple[str | None, ...]
  components: Mapping[str, np.ndarray]
  prompt: int  # tokens
  # k -> (tokens, version) of what was sampled in fills that are over, and of all that it
  # has where it has ended.
  parts: dict[int, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
  ended: set[int] = dataclasses.field(default_factory=set)
  read: int | None = None  # the last fill in which its prompt was read

  def sampled(self, k: int, tokens: int, version: int) -> None:
    """Answer k has so many tokens, the last of them of these weights."""
    parts = self.parts.setdefault(k, [])
    new = tokens - sum(count for count, _ in parts)
    if parts and parts[-1][1] == version:
      new += parts.pop()[0]
    if new or not parts:
      parts.append((new, version))

  def completion(self, k: int) -> Completion:
    """What there is of answer k, of which there is something."""
    *earlier, (last, version) = self.parts[k]
    tokens = last + sum(count for count, _ in earlier)
    return Completion(
      draw=self.request.draw,
      answer=k,
      tokens=zeros(tokens, np.int32),
      logps=zeros(tokens, np.float32),
      finish=FINISHES[self.finish[k]] if k in self.ended else 'paused',
      version=version,
      earlier=tuple(earlier),
    )

  def group(self) -> Group:
    """All have ended: those that are kept, graded."""
    is_lost = self.finish == ABORTED
    kept = np.flatnonzero(~is_lost)
    what = dict(
      request=self.request,
      verdicts=self.verdicts[kept],
      rewards=self.rewards[kept],
      faults=tuple(self.faults[k] for k in kept.tolist()),
      components={name: values[kept] for name, values in self.components.items()},
      spares=tuple(self.lengths[is_lost & (self.lengths > 0)].tolist()),
    )
    every = [version for parts in self.parts.values() for _, version in parts]
    if len(set(every)) == 1:
      return SimGroup(
        version=every[0],
        places=kept,
        lengths=self.lengths[kept],
        finish=self.finish[kept],
        **what,
      )
    return Group(completions=tuple(map(self.completion, kept.tolist())), **what)


class _Engine:
  """Slots, a queue, and what was done in this fill.

  Attributes:
    now: seconds, when it is at its tick.
  """

  def __init__(self, slots: int, chunk: int, *, tick: int, now: float):
    self.clock: EngineClock[Key] = EngineClock(slots, chunk, tick=tick)
    self.now = now
    self.left = np.zeros(slots, np.int64)  # tokens that each slot's answer still gets
    self.known = np.zeros(slots, np.int64)  # tokens in its cache
    self._is_taken = np.zeros(slots, bool)
    self.begin_fill()

  def begin_fill(self) -> None:
    self.seconds = self.skew = 0.0  # at work; waiting for other engines
    self.steps = self.tokens = self.refill = self.no_work = 0

  def place(self, asked: Mapping[int, _Asked]) -> list[tuple[int, Key]]:
    """Free slots take answers from the queue. Returns (slot, answer) of these."""
    begun = self.clock.start()
    for slot, (draw, k) in begun:
      group = asked[draw]
      before = sum(count for count, _ in group.parts.get(k, ()))
      self.left[slot] = group.lengths[k] - before
      self.known[slot] = group.prompt + before
      self._is_taken[slot] = True
    return begun

  def reread(self, asked: Mapping[int, _Asked], fill: int) -> tuple[int, int]:
    """Running answers are read with new weights, those of a group in one row with their
    prompt. Returns rows and tokens."""
    groups = {draw for draw, _ in self.clock.running.values()}
    tokens = int(self.known[self._is_taken].sum())
    for draw, _ in self.clock.running.values():
      tokens -= asked[draw].prompt
    for draw in groups:
      asked[draw].read = fill
      tokens += asked[draw].prompt
    return len(groups), tokens

  def decode(self) -> tuple[np.ndarray, list[tuple[int, Key]]]:
    """A chunk.

    Returns:
      [4] of GENERATE: steps, rows, lookbacks, launches; and (tick, answer) of those that
      have ended.
    """
    clock = self.clock
    made = np.minimum(self.left, clock.chunk)
    tokens, steps = int(made.sum()), int(made.max())
    # Token m of an answer looks back at what was known and at the m before it.
    cached = float(made @ (2 * self.known + made - 1)) / 2
    self.left -= made
    self.known += made
    over = np.flatnonzero(self._is_taken & (self.left == 0))
    took = made[over].tolist()
    empty = clock.slots * clock.chunk - tokens
    refill = clock.chunk * len(took) - sum(took) if clock.queue else 0
    self.steps += steps
    self.tokens += tokens
    self.refill += refill
    self.no_work += empty - refill
    slots = over.tolist()
    ended = [
      (clock.tick + n, clock.running[slot]) for slot, n in zip(slots, took, strict=True)
    ]
    self._is_taken[over] = False
    clock.advance(slots)
    return np.array((steps, tokens, cached, steps > 0), np.float64), ended

  def compact(self) -> None:
    """Running answers move to the first slots, in their order."""
    order = list(self.clock.compact())
    for column in (self.left, self.known, self._is_taken):
      column[: len(order)] = column[order]
      column[len(order) :] = 0


class _Clocks(Clocks):
  """Clocks of engines that learn of a fill when it is over."""

  def add(self, times: Times) -> None:
    self._idle = self._idle + times.parts['skew'] + times.parts['ordering']
    self._ends = times.ends
    self._under_way.append(times)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fill:
  """What was done in a fill."""

  times: Times
  answers: int  # of the groups that were given
  refill: float  # empty slot-steps until the next look at the queue, which had work
  no_work: float  # all other empty slot-steps

  @property
  def metrics(self) -> dict[str, float]:
    places = max(self.times.places, 1)
    return {
      'idle/refill': self.refill / places,
      'idle/no_work': self.no_work / places,
    }


class OpenPool:
  """Engines whose queues are fed while they sample.

  Args:
    slots, chunk: of each engine.
    grace: chunks between an event and the first decision that may know of it.

  Attributes:
    clocks: where the engines' time has gone. None: nothing was fed yet.
  """

  def __init__(self, costs: Costs, *, slots: int, chunk: int, grace: int):
    self.clocks: _Clocks | None = None
    self._costs, self._of = costs, costs.of(GENERATE)
    self._slots, self._chunk, self._grace = slots, chunk, grace
    self._tick = 0
    self._engines: list[_Engine] = []
    # Seconds when the last engine was at this tick, and at those before.
    self._reached: deque[float] = deque(maxlen=grace + 1)
    self._asked: dict[int, _Asked] = {}  # by draw
    self._fill = self._version = 0
    self._ready = 0.0  # when this fill may begin
    self._is_open = self._has_begun = False
    self._begins = np.zeros(0)  # [E] of this fill
    self._parts: dict[str, np.ndarray] = {}
    self._load, self._given, self._began_at = 0.0, 0, 0
    self._done: dict[int, Fill] = {}  # those that nobody has taken

  def __contains__(self, draw: int) -> bool:
    return draw in self._asked

  @property
  def answers(self) -> int:
    """Of groups that were not given yet."""
    return sum(len(group.lengths) for group in self._asked.values())

  @property
  def now(self) -> float:
    """Seconds, when the last engine is at the tick where all are."""
    return max((engine.now for engine in self._engines), default=0.0)

  # --- a fill ---

  def begin_fill(self, fill: int, version: int, ready: float) -> None:
    """Ends the fill before, if there is one.

    Args:
      ready: seconds, when the weights and the devices are there.
    """
    self._close()
    self._fill, self._version, self._ready = fill, version, ready
    self._is_open, self._has_begun = True, False
    if self._engines:
      self._begin()

  def _begin(self) -> None:
    """Engines load the weights, and read what is running anew."""
    ends = np.array([engine.now for engine in self._engines])
    known = self._decided()
    self._begins = np.maximum(ends, max(self._ready, known))
    skew = np.minimum(self._begins, ends.max()) - ends
    self._load = self._costs.load if self._version > 0 else 0.0
    self._parts = {'skew': skew, 'ordering': self._begins - ends - skew}
    self._given, self._began_at, self._has_begun = 0, self._tick, True
    for engine, begin in zip(self._engines, self._begins.tolist(), strict=True):
      engine.begin_fill()
      rows, tokens = engine.reread(self._asked, self._fill)
      engine.seconds = float(self._of[4:] @ (rows, tokens))
      engine.now = begin + self._load + engine.seconds

  def _decided(self) -> float:
    """Seconds, when all is there that a decision at this tick is made of."""
    return self._reached[0] if len(self._reached) > self._grace else 0.0

  def feed(self, plan: Plan, answers: Answers, rewards: np.ndarray) -> None:
    if not self._engines:
      self._make(len(plan.shares), self._ready)
    if len(plan.shares) != len(self._engines):
      raise ValueError(
        f'fill {plan.step}: shares of {len(plan.shares)} engines, expected '
        f'{len(self._engines)}'
      )
    if self._is_open and not self._has_begun:
      self._begin()
    self._ask(plan.requests, answers, rewards)
    draws = [request.draw for request in plan.requests]
    for engine, share in zip(self._engines, plan.shares, strict=True):
      pairs = zip(share.requests.tolist(), share.answers.tolist(), strict=True)
      engine.clock.put((draws[i], k) for i, k in pairs)

  def _make(self, engines: int, now: float) -> None:
    how = dict(tick=self._tick, now=now)
    self._engines = [_Engine(self._slots, self._chunk, **how) for _ in range(engines)]
    if self.clocks is None or self.clocks.engines != engines:
      self.clocks = _Clocks(engines, self._slots, self._costs)

  def _ask(
    self, requests: Sequence[Request], answers: Answers, rewards: np.ndarray
  ) -> None:
    bounds = answers.starts.tolist()
    for i, request in enumerate(requests):
      part = slice(bounds[i], bounds[i + 1])
      self._asked[request.draw] = _Asked(
        request=request,
        lengths=answers.lengths[part],
        finish=answers.finish[part],
        verdicts=answers.verdicts[part],
        rewards=rewards[part],
        faults=answers.faults.get(i, (None,) * request.size),
        components=answers.components.get(i, {}),
        prompt=len(request.prompt.tokens),
      )

  def advance(self, tick: int) -> tuple[list[Report], list[Group]]:
    """Every engine decodes a chunk, if it is below this tick; see the protocol."""
    if not self._engines or not self._has_begun:
      raise ValueError(f'advance({tick}): expected begin_fill and feed before it')
    if self._tick >= tick:
      return [], []
    reports, done, known = [], [], self._decided()
    for e, engine in enumerate(self._engines):
      engine.skew += max(0.0, known - engine.now)
      begun = engine.place(self._asked)
      rows, tokens = self._read(begun)
      counts, ended = engine.decode()
      seconds = float(self._of[:4] @ counts + self._of[4] * rows + self._of[5] * tokens)
      engine.seconds += seconds
      engine.now = max(engine.now, known) + seconds
      for _, (draw, k) in ended:
        if self._end(self._asked[draw], k):
          done.append(draw)
      reports.append(
        Report(
          engine=e,
          tick=engine.clock.tick,
          started=[(self._tick, draw) for _, (draw, _) in begun],
          ended=[(at, draw) for at, (draw, _) in ended],
        )
      )
    self._tick += self._chunk
    self._reached.append(self.now)
    groups = [self._asked.pop(draw).group() for draw in sorted(done)]
    self._given += sum(group.size + len(group.spares) for group in groups)
    return reports, groups

  def _read(self, begun: Sequence[tuple[int, Key]]) -> tuple[int, int]:
    """Prompts of answers that have started, once a fill each: how many, and tokens."""
    rows = tokens = 0
    for _, (draw, _) in begun:
      group = self._asked[draw]
      if group.read != self._fill:
        group.read = self._fill
        rows, tokens = rows + 1, tokens + group.prompt
    return rows, tokens

  def _end(self, group: _Asked, k: int) -> bool:
    """Answer k has ended. Returns whether all of its group have."""
    group.sampled(k, int(group.lengths[k]), self._version)
    group.ended.add(k)
    return len(group.ended) == len(group.lengths)

  def _close(self) -> None:
    """The fill is over, if there is one: at the tick where all engines are."""
    if self._is_open and self._has_begun:
      for engine in self._engines:
        for slot, (draw, k) in engine.clock.running.items():
          group = self._asked[draw]
          tokens = int(group.lengths[k] - engine.left[slot])
          group.sampled(k, tokens, self._version)
        engine.compact()
      self._done[self._fill] = self._summary()
      self.clocks.add(self._done[self._fill].times)
    self._is_open = self._has_begun = False

  def _summary(self) -> Fill:
    engines = self._engines
    seconds, steps, tokens, skew = (
      np.array([getattr(engine, name) for engine in engines], np.float64)
      for name in ('seconds', 'steps', 'tokens', 'skew')
    )
    places = steps * self._slots
    filled = np.divide(tokens, places, out=np.ones_like(seconds), where=places > 0)
    times = Times(
      bundle=self._fill,
      begins=self._begins,
      starts=self._begins + self._load,
      ends=np.array([engine.now for engine in engines]),
      stops=[],
      parts={
        'busy': seconds * filled,
        'load': np.full(len(engines), self._load),
        'padding': seconds * (1 - filled),
        'skew': self._parts['skew'] + skew,
        'ordering': self._parts['ordering'],
      },
      generate=float(seconds.max()),
      load=self._load,
      places=float((self._tick - self._began_at) * self._slots * len(engines)),
      tokens=float(tokens.sum()),
    )
    return Fill(
      times=times,
      answers=self._given,
      refill=float(sum(engine.refill for engine in engines)),
      no_work=float(sum(engine.no_work for engine in engines)),
    )

  def take(self, fill: int) -> Fill | None:
    """What was done in a fill, which is over now. None: there was no such fill."""
    if self._fill == fill:
      self._close()
    return self._done.pop(fill, None)

  # --- between two fills ---

  def suspend(self) -> InFlight:
    self._close()
    asked = dict(sorted(self._asked.items()))
    return InFlight(
      tick=self._tick,
      requests=[group.request for group in asked.values()],
      completions={
        (draw, k): group.completion(k)
        for draw, group in asked.items()
        for k in sorted(group.parts)
      },
      running=[
        [key for _, key in sorted(engine.clock.running.items())]
        for engine in self._engines
      ],
      queued=[list(engine.clock.queue) for engine in self._engines],
    )

  def resume(
    self,
    in_flight: InFlight,
    new: Sequence[Request],
    answers: Answers,
    rewards: np.ndarray,
    now: float,
  ) -> None:
    """Takes up what `suspend` gave.

    Args:
      new: requests among these that are not in this pool, with their answers. What was
        sampled of them before is so many tokens, whatever the answers say.
      now: seconds.
    """
    self._close()
    self._ask(new, answers, rewards)
    self._asked = {r.draw: self._asked[r.draw] for r in in_flight.requests}
    for group in self._asked.values():
      group.parts, group.ended, group.read = {}, set(), None
      group.lengths, group.finish = group.lengths.copy(), group.finish.copy()
    for (draw, k), completion in in_flight.completions.items():
      group, tokens = self._asked[draw], len(completion.tokens)
      last = tokens - sum(count for count, _ in completion.earlier)
      group.parts[k] = [*completion.earlier, (last, completion.version)]
      if completion.finish == 'paused':
        group.lengths[k] = max(group.lengths[k], tokens + 1)
      else:
        group.ended.add(k)
        group.lengths[k] = tokens
        group.finish[k] = FINISHES.index(completion.finish)
    was = [engine.now for engine in self._engines]
    self._tick, self._engines = in_flight.tick, []
    self._reached.clear()
    if in_flight.running:
      self._make(len(in_flight.running), now)
    if len(was) == len(self._engines):
      for engine, seconds in zip(self._engines, was, strict=True):
        engine.now = seconds
    for engine, running, queued in zip(
      self._engines, in_flight.running, in_flight.queued, strict=True
    ):
      if len(running) > self._slots:
        raise ValueError(
          f'sim.slots: {self._slots}, expected at least {len(running)} as were running'
        )
      engine.clock.put(running)
      engine.place(self._asked)
      engine.clock.put(queued)
