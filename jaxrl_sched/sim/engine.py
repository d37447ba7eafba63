"""The Engine protocol on a simulated clock: what a run would have taken, and why.

Times follow the recursion of `control/timeline.py`. A bundle's generation is worked out
when it is submitted: nothing that comes later could change it.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Protocol

import numpy as np

from jaxrl_sched.control import ledger
from jaxrl_sched.control.planning import Plan
from jaxrl_sched.engine import InFlight, Report, Span
from jaxrl_sched.host.advantages import nothing_to_learn
from jaxrl_sched.host.rewards import overlong_penalty
from jaxrl_sched.sim import relief, work
from jaxrl_sched.sim.clocks import IDLE, Clocks, Times
from jaxrl_sched.sim.costs import Costs
from jaxrl_sched.sim.counts import HOST, LEARN, Rows, learning
from jaxrl_sched.sim.groups import trained, whole_groups
from jaxrl_sched.sim.open_pool import OpenPool
from jaxrl_sched.sim.workload import ABORTED, Answers
from jaxrl_sched.types import Group, Lesson, Relief, Request

MOST_ANSWERS = 4_000_000  # on their way at a time, all rounds together


class Answering(Protocol):
  """What the engine asks of a workload."""

  def answers_of(self, requests: Sequence[Request], version: int) -> Answers:
    """The answers of a round, of the policy as it is at this version."""

  def trained(self, lesson: Lesson) -> None:
    """The policy has learned from this."""


@dataclasses.dataclass
class _Round:
  """What was submitted at once, on its way."""

  bundle: int
  groups: list[Group]
  times: Times
  reward: float  # seconds, after the last engine is done
  answers: int


class SimEngine:
  """Engines with slots, and a trainer, on a clock of their own.

  Args:
    workload: what the policy answers: a `Workload` or a `Trace`.
    costs: what everything takes.
    slots, chunk: of each engine's sampler.
    rows, row_tokens: of the learner's microbatches. None: nothing is packed, and
      `learn_batch` is not charged.
    window, share_prompt: of the packing.
    overlong_filter: truncated answers are not trained on.
    overlong: keyword arguments of `overlong_penalty` but for the limit, or None.
    kl_coef: of the loss; above 0 there is an update without any advantage too.
    shares_devices: engines and trainer are on the same ones, and take turns: what is
      being generated stands still while the trainer learns.
    grace: of the open pool: chunks between an event and the first decision that knows of
      it, by which its engines may be apart.

  Attributes:
    step: updates done so far.
  """

  def __init__(
    self,
    workload: Answering,
    costs: Costs,
    *,
    slots: int,
    chunk: int = 1,
    rows: int | None = None,
    row_tokens: int | None = None,
    window: int = 16,
    share_prompt: bool = False,
    overlong_filter: bool = False,
    overlong: dict[str, Any] | None = None,
    kl_coef: float = 0.0,
    shares_devices: bool = False,
    grace: int = 4,
  ):
    for name, value, least in (
      ('slots', slots, 1),
      ('chunk', chunk, 1),
      ('grace', grace, 0),
    ):
      if type(value) is not int or value < least:
        raise ValueError(f'sim.{name}: {value!r}, expected a whole number from {least}')
    self.step = 0
    self._workload, self._costs = workload, costs
    self._slots, self._chunk = slots, chunk
    self._packing = Rows(
      rows=rows, row_tokens=row_tokens, window=window, share_prompt=share_prompt
    )
    self._overlong, self._overlong_filter = overlong, overlong_filter
    self._has_penalty, self._shares_devices = kl_coef > 0, shares_devices
    self._clock = 0.0  # of the trainer
    self._on_their_way: list[_Round] = []
    self._clocks: Clocks | None = None  # of the engines, once it is known how many
    self._pool = OpenPool(costs, slots=slots, chunk=chunk, grace=grace)
    self._lessons: collections.deque[Lesson] = collections.deque()
    self._taught = 0  # the version that the policy is at
    self._is_open = False  # whether groups come from the pool
    self._published = [0.0]  # when each version of the weights was there
    self._collected: dict[int, list[_Round]] = {}  # bundle -> rounds
    self._waited = 0.0  # by the trainer, since the last update
    self._idle = 0.0  # of a mean engine, until then
    self._train = self._wait = 0.0  # of the trainer, so far
    self._spans: list[Span] = []

  # --- the protocol ---

  def agree(self, make: Callable[[], Any]) -> Any:
    return make()

  def compare(self, what: str, make: Callable[[], Any]) -> None:
    """There is one process, which agrees with itself."""

  def evaluate(self, requests: Sequence[Request]) -> list[Group]:
    raise ValueError('evaluate: a simulated policy cannot be evaluated')

  def save(self, control: dict[str, Any], *, score: float | None) -> None:
    pass

  def now(self) -> float:
    return self._clock

  def spans(self) -> list[Span]:
    spans, self._spans = self._spans, []
    return spans

  def submit(self, plan: Plan) -> None:
    if plan.version != self.step:
      raise ValueError(
        f'bundle {plan.step}: to be sampled with version {plan.version}, but the '
        f'weights are of version {self.step}'
      )
    engines = len(plan.shares)
    if self._clocks is None:
      self._clocks = Clocks(engines, self._slots, self._costs)
    if engines != self._clocks.engines:
      raise ValueError(
        f'bundle {plan.step}: shares of {engines} engines, expected '
        f'{self._clocks.engines}'
      )
    many = sum(one.answers for one in self._on_their_way)
    many += sum(r.size + r.relief.spare for r in plan.requests)
    if many > MOST_ANSWERS:
      raise ValueError(
        f'step {self.step}: {many:,} answers are to be sampled at a time (groups x (size '
        f'+ asp.spare), in asp.lag + 1 bundles), expected at most {MOST_ANSWERS:,}'
      )
    answers = self._workload.answers_of(plan.requests, plan.version)
    rewards = self._rewards(answers, plan.requests)
    how = (plan.requests, answers, plan.shares, self._slots, self._chunk)
    if _is_plain(plan.requests, answers):
      works = work.whole(*how)
      groups = whole_groups(plan.requests, plan.version, answers, rewards)
    else:
      found = relief.run(*how)
      works = work.relieved(*how[:3], found)
      groups = relief.groups(plan.requests, plan.version, answers, rewards, found)
    times = self._clocks.put(plan.step, plan.version, works, self._clock)
    count = sum(group.size + len(group.spares) for group in groups)
    reward = self._costs.reward_round + self._costs.reward_answer * count
    self._on_their_way.append(_Round(plan.step, groups, times, reward, count))

  def collect(
    self, bundle: int, enough: Callable[[Sequence[Group]], bool]
  ) -> list[Group]:
    return [group for one in self._take(bundle) for group in one.groups]

  def collect_rest(self) -> list[Group]:
    return []

  def drain(self, before: int) -> dict[int, list[Group]]:
    found = collections.defaultdict(list)
    for bundle in sorted({one.bundle for one in self._on_their_way}):
      if bundle < before:
        found[bundle] = [g for one in self._take(bundle) for g in one.groups]
    self._on_their_way = []
    if self._clocks is not None:
      self._clocks.forget()
    return dict(found)

  # --- the protocol, of the open pool ---

  def begin_fill(self, fill: int, version: int) -> None:
    if version > self.step:
      raise ValueError(
        f'fill {fill}: to be sampled with version {version}, but the weights are of '
        f'version {self.step}'
      )
    self._is_open = True
    self._teach(version)
    # Whoever shares devices takes turns.
    ready = self._clock if self._shares_devices else self._published[version]
    self._pool.begin_fill(fill, version, ready)

  def feed(self, plan: Plan) -> None:
    many = self._pool.answers + sum(request.size for request in plan.requests)
    if many > MOST_ANSWERS:
      raise ValueError(
        f'step {self.step}: {many:,} answers are in the pool, expected at most '
        f'{MOST_ANSWERS:,}'
      )
    answers = self._workload.answers_of(plan.requests, plan.version)
    self._pool.feed(plan, answers, self._rewards(answers, plan.requests))
    self._clocks = self._pool.clocks

  def advance(self, tick: int) -> tuple[list[Report], list[Group]]:
    return self._pool.advance(tick)

  def suspend(self) -> Callable[[], InFlight]:
    in_flight = self._pool.suspend()
    return lambda: in_flight

  def resume(self, in_flight: InFlight) -> None:
    """What this engine has not been asked is answered by the policy as it is now."""
    new = [r for r in in_flight.requests if r.draw not in self._pool]
    answers = self._workload.answers_of(new, self.step)
    rewards = self._rewards(answers, new)
    self._pool.resume(in_flight, new, answers, rewards, self._clock)
    self._clocks = self._pool.clocks

  def _take_fill(self, fill: int) -> dict[str, float]:
    """The trainer waits until a fill is over, if it is one of the open pool.

    Returns:
      Metrics of its own.
    """
    found = self._pool.take(fill)
    if found is None:
      return {}
    ends = float(found.times.ends.max())
    self._wait_until(self._pool.now if self._shares_devices else ends)
    self._clocks.count(found.times)
    self._spans += found.times.spans()
    one = _Round(fill, [], found.times, 0.0, found.answers)
    self._collected.setdefault(fill, []).append(one)
    return found.metrics

  # --- sampling ---

  def _rewards(self, answers: Answers, requests: Sequence[Request]) -> np.ndarray:
    """[answers] float32, shaped."""
    if answers.rewards is not None:
      return answers.rewards
    if self._overlong is None or not requests:
      return answers.verdicts
    limit = requests[0].sampling.max_new_tokens  # of all, in training
    shape = overlong_penalty(answers.lengths, limit=limit, **self._overlong)
    return answers.verdicts + shape

  def _take(self, bundle: int) -> list[_Round]:
    """The rounds of a bundle; the trainer waits until they are ready."""
    taken = [one for one in self._on_their_way if one.bundle == bundle]
    self._on_their_way = [one for one in self._on_their_way if one.bundle != bundle]
    for one in taken:
      self._wait_until(float(one.times.ends.max()) + one.reward)
      self._clocks.count(one.times)
      self._spans += one.times.spans()
    self._collected.setdefault(bundle, []).extend(taken)
    return taken

  def _wait_until(self, ready: float) -> None:
    """The trainer does, on its clock in seconds."""
    waited = max(0.0, ready - self._clock)
    self._clock += waited
    self._waited += waited
    self._wait += waited

  # --- learning ---

  def learn(self, lesson: Lesson) -> dict[str, Any]:
    of_fill = self._take_fill(self.step)
    groups, lags = [], {}
    why = nothing_to_learn(
      lesson, overlong_filter=self._overlong_filter, has_penalty=self._has_penalty
    )
    is_skipped = why is not None
    if not is_skipped:
      groups, lags = trained(lesson, self.step, overlong_filter=self._overlong_filter)
    counts, filled = learning(groups, self._packing)
    learn = 0.0 if is_skipped else float(counts @ self._costs.of(LEARN))
    rounds = self._collected.pop(self.step, [])
    host = (sum(one.answers for one in rounds), 1)
    overhead = float(host @ self._costs.of(HOST))
    begin = self._clock + overhead
    self._clock = begin + learn
    if self._shares_devices and learn and self._clocks is not None:
      self._clocks.stand_still(begin, learn)
    self._spans.append(Span('learner', 'learn', self.step, begin, self._clock))
    self._train += overhead + learn
    metrics = {'update/skipped': float(is_skipped)} | _of_rounds(rounds) | of_fill
    metrics |= ledger.lags(lags)
    metrics |= {'time/learn_s': learn, 'time/idle_s/learner': self._waited}
    if self._clocks is not None:
      idle = self._clocks.idle(self._clock)
      metrics['time/idle_s/sampler'], self._idle = idle - self._idle, idle
    if filled:
      places = counts[0] * self._packing.rows * self._packing.row_tokens
      metrics |= {'packing/rows': filled, 'packing/density': counts[1] / places}
    self._waited = 0.0
    self._published.append(self._clock)
    self.step += 1
    self._lessons.append(lesson)
    if not self._is_open:
      self._teach(self.step)
    return metrics

  def _teach(self, version: int) -> None:
    """Brings the policy to the weights of this version, which the next answers are of."""
    while self._taught < version:
      self._workload.trained(self._lessons.popleft())
      self._taught += 1

  def totals(self) -> dict[str, Any]:
    """Where the time has gone so far, in seconds.

    Returns:
      'wall'; of the trainer 'train' and 'wait', which sum to it; and of each engine
      [E] 'busy', 'load', 'padding', 'skew' and 'ordering' (see `Clocks`), which do so
      too, where nothing is on its way.
    """
    found = {'wall': self._clock, 'train': self._train, 'wait': self._wait}
    return found | ({} if self._clocks is None else self._clocks.totals(self._clock))


def _of_rounds(rounds: Sequence[_Round]) -> dict[str, float]:
  """Metrics of what was collected for a step; idle seconds are of a mean engine.

  They are booked where the round is, whenever it was sampled; 'time/idle_s/sampler' is
  what went by since the last update.
  """
  times = [one.times for one in rounds]
  metrics = {
    'time/generate_s': sum(one.generate for one in times),
    'time/load_s': sum(one.load for one in times),
    'time/reward_s': sum(one.reward for one in rounds),
  }
  for name in IDLE:
    metrics[f'sim/idle/{name}'] = sum(float(one.parts[name].mean()) for one in times)
  places, tokens = sum(one.places for one in times), sum(one.tokens for one in times)
  metrics['rollout/idle_slots'] = 1 - tokens / places if places else 0.0
  return metrics


def _is_plain(requests: Sequence[Request], answers: Answers) -> bool:
  """Whether every answer is sampled from first to last, and kept."""
  plain = Relief()
  return not any(r.begun or r.relief != plain for r in requests) and not (
    (answers.finish == ABORTED).any()
  )
