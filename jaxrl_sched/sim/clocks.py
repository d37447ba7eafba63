"""The clocks of sampling engines: when each does its share, and why it waits."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from jaxrl_sched.engine import Span
from jaxrl_sched.sim.costs import Costs
from jaxrl_sched.sim.counts import GENERATE
from jaxrl_sched.sim.work import Work

IDLE = ('padding', 'skew', 'ordering')
PARTS = ('busy', 'load', *IDLE)  # of an engine's time


@dataclasses.dataclass(kw_only=True, eq=False)
class Times:
  """Of a round: when each of E engines does what, and seconds of it."""

  bundle: int
  begins: np.ndarray  # [E] it has all it needs,
  starts: np.ndarray  # [E] has loaded the weights,
  ends: np.ndarray  # [E] and has done its share
  stops: list[tuple[float, float]]  # from when to when whoever is at it stands still
  parts: dict[str, np.ndarray]  # of PARTS -> [E], since the end of what came before
  generate: float  # of the slowest engine
  load: float
  places: float  # slots times steps of decoding, of all engines
  tokens: float  # that were made in them

  def spans(self) -> list[Span]:
    found = []
    columns = (column.tolist() for column in (self.begins, self.starts, self.ends))
    for e, (begin, start, end) in enumerate(zip(*columns, strict=True)):
      for what, a, b in (('load', begin, start), ('generate', start, end)):
        for stop, again in self.stops:
          if a < stop < b:
            found.append(Span(f'engine {e}', what, self.bundle, a, stop))
          if a <= stop < b:
            a = again
        if b > a:
          found.append(Span(f'engine {e}', what, self.bundle, a, b))
    return found

  def stand_still(self, now: float, seconds: float) -> np.ndarray:
    """Whoever has not ended goes on so much later. Returns who, [E] bool."""
    late = self.ends > now
    if late.any():
      self.stops.append((now, now + seconds))
    for name in ('begins', 'starts', 'ends'):
      column = getattr(self, name)
      setattr(self, name, column + seconds * (late & (column >= now)))
    return late


class Clocks:
  """Of E engines that work through rounds in order, each at its own pace.

  An engine that has done its share waits for the others of that round first (*skew*),
  and then, as all do, for weights or work (*ordering*). Slots that are empty beside
  others of a decoding engine are its *padding*, by their share of slots and steps.
  """

  def __init__(self, engines: int, slots: int, costs: Costs):
    self.engines = engines
    self._slots, self._costs = slots, costs
    self._ends = np.zeros(engines)  # when they are done with all they have got
    self._loaded: int | None = None  # bundle that they have the weights of
    self._counted = np.zeros(engines)  # until when `_parts` speak
    self._parts = {name: np.zeros(engines) for name in PARTS}
    self._under_way: list[Times] = []  # not counted yet
    self._idle = np.zeros(engines)  # until `_ends`

  def put(self, bundle: int, version: int, works: Sequence[Work], now: float) -> Times:
    """Gives the engines a round that is submitted now, when its weights are there."""
    gen = np.array([one.counts for one in works]) @ self._costs.of(GENERATE)
    steps = np.array([one.steps for one in works])
    tokens = np.array([one.tokens for one in works])
    is_first = bundle != self._loaded
    self._loaded = bundle
    load = self._costs.load if is_first and version > 0 else 0.0
    begins = np.maximum(self._ends, now)
    starts = begins + load
    skew = np.minimum(begins, self._ends.max()) - self._ends
    places = steps * self._slots
    filled = np.divide(tokens, places, out=np.ones_like(gen), where=places > 0)
    parts = {
      'busy': gen * filled,
      'load': np.full(self.engines, load),
      'padding': gen * (1 - filled),
      'skew': skew,
      'ordering': begins - self._ends - skew,
    }
    self._idle += begins - self._ends
    self._ends = starts + gen
    times = Times(
      bundle=bundle,
      begins=begins,
      starts=starts,
      ends=self._ends,
      stops=[],
      parts=parts,
      generate=float(gen.max()),
      load=load,
      places=float(places.sum()),
      tokens=float(tokens.sum()),
    )
    self._under_way.append(times)
    return times

  def stand_still(self, now: float, seconds: float) -> None:
    """The trainer has the engines' devices from now on; then they go on."""
    waits = np.zeros(self.engines, bool)
    for times in self._under_way:
      late = times.stand_still(now, seconds)
      times.parts['ordering'] = times.parts['ordering'] + seconds * (late & ~waits)
      waits |= late
    self._ends = self._ends + seconds * waits
    self._idle += seconds * waits

  def count(self, times: Times) -> None:
    """This round is done; to be called in the order of `put`."""
    for name in PARTS:
      self._parts[name] += times.parts[name]
    self._counted = times.ends
    self._under_way.remove(times)

  def forget(self) -> None:
    """All rounds that are not counted."""
    self._ends = self._counted.copy()
    self._idle = self._parts['skew'] + self._parts['ordering']
    self._under_way = []

  def idle(self, now: float) -> float:
    """Seconds so far in which a mean engine waited, for others or for work."""
    return float((self._idle + np.maximum(now - self._ends, 0.0)).mean())

  def totals(self, now: float) -> dict[str, np.ndarray]:
    """PARTS -> [E] seconds so far, which sum to `now` where nothing is under way."""
    found = {name: seconds.copy() for name, seconds in self._parts.items()}
    waits = np.maximum(now - self._counted, 0.0)
    skew = np.maximum(min(now, float(self._counted.max())) - self._counted, 0.0)
    found['skew'] += skew
    found['ordering'] += waits - skew
    return found
