"""The scheduler over the pool (`control/pool.py`): batches that wait for no answer, or
with a barrier for all that was asked for. Only three values differ between the two: when
a fill is closed, how much is asked for, and how old what is trained on may be.

`decide` changes nothing that a decision is made of; `fed`, `report` and `take` change
state, and are called on every process with the same input.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import numpy as np

from jaxrl_sched.control import ledger
from jaxrl_sched.control.filling import Chosen
from jaxrl_sched.control.learning import OpenBatch
from jaxrl_sched.control.opening import CONFIDENCE
from jaxrl_sched.control.planning import Plan, When
from jaxrl_sched.control.pool import Asked, Closing, Pool
from jaxrl_sched.control.quotas import requests_for
from jaxrl_sched.control.scheduler import Scheduler
from jaxrl_sched.engine import InFlight, Report
from jaxrl_sched.types import Group, Relief

_OPEN = ('pool', 'ready', 'in_flight')  # keys of the state beside those of `Scheduler`


class OpenScheduler(Scheduler):
  """Keeps the engines' queues filled, and closes a batch when useful groups fill it.

  Args: as of `Scheduler`; of `asp` only lag and engines.
    chunk: decode steps between two looks at the sampling engines.

  Raises:
    ValueError: something that needs a barrier is on.
  """

  is_open = True

  def __init__(self, *args, chunk: int, **settings):
    super().__init__(*args, **settings)
    asp, sagc, pruner = self._asp, self._sagc, self._pruner
    for good, what in (
      ()
      if self.barrier
      else (
        (asp.window == 1, f'asp.window={asp.window}'),
        (asp.refill, 'asp.refill=False'),
        (asp.relief == Relief(), 'relief for stragglers'),
        (sagc is None or not sagc.pools_steps, "sagc.mode 'batch' or 'any'"),
        (pruner is None or pruner.fills, "prune_prompts.regime='fixed_candidates'"),
      )
    ):
      if not good:
        raise ValueError(f'scheduler.barrier: False, expected True with {what}')
    self._pool = Pool(
      list(self._source.sizes),
      rollouts=self._rollouts,
      engines=asp.engines,
      slots=settings.get('slots', 1),
      chunk=chunk,
      grace=self._grace,
      low_water=self._low_water,
      barrier=self.barrier,
      borrow=self._borrow,
      by_stream=settings.get('quotas', True),
    )
    # Of what waits: versions between sampling and training. None: no bound.
    self._max_staleness = max(1, asp.lag) if self.barrier else None
    self._ready: dict[int, Group] = {}  # graded groups that are in no batch
    self._in_flight: Callable[[], InFlight] | None = None  # at the last closing
    self.resumed: InFlight | None = None  # what the engines are to take up

  # --- a step, in the order of the loop ---

  @property
  def tick(self) -> int:
    """Decode steps that the next decision waits for."""
    return self._pool.horizon

  def begin_fill(self, step: int) -> int:
    """Settles the terms of a batch. Returns the version of the weights to sample with."""
    version = max(0, step - self._asp.lag)
    terms = self._opening.terms(step)
    self._source.begin(step, 0)  # shares are the pool's
    if self._sagc is not None:
      self._sagc.sent(step, terms.size)
    allowed = {}
    if self.barrier:
      quotas = self._pool.usual(self._source.weights(step), terms.size)
      allowed = self._exhaustion.allowance(
        {stream: quotas.count(stream) for stream in self._source.sizes}
      )
    self._open[step] = OpenBatch(step, version, terms, Chosen(), allowed)
    self._next = step + 1
    return version

  def decide(self, step: int) -> Plan | Closing | None:
    """What takes effect next: the end of the fill, or a plan, perhaps an empty one. None:
    it is not known yet."""
    batch, weights = self._open[step], self._source.weights(step)
    is_last = self.barrier and batch.round >= self._max_rounds
    closing = self._pool.closing(weights, is_last=is_last)
    if closing is None or closing:
      return closing
    size, when = batch.terms.size, self._when(batch)
    if not self.barrier:
      streams = self._pool.wanted(weights, self._acceptance, size)
      return self._planner.feed(streams, size, when, self._pool.assign)
    streams = self._missing(batch, weights)
    if not streams:
      return self._pool.closing(weights, is_last=True)
    return self._planner.feed(streams, size, when, self._pool.assign)

  def _when(self, batch: OpenBatch) -> When:
    return When(
      step=batch.bundle, version=batch.version, part=batch.round, draw=self._draw
    )

  def _missing(self, batch: OpenBatch, weights: Mapping[str, float]) -> list[str]:
    """The streams of the groups of a round: as many as should bring what the batch lacks
    in 95 of 100 cases, and no more than are allowed."""
    size, streams = batch.terms.size, []
    for stream, rollouts in self._pool.missing(weights).items():
      count = math.ceil(rollouts / size - 1e-9)
      if self._dynamic:
        count = requests_for(count, self._acceptance(stream, size), CONFIDENCE)
      if self._quotas:
        streams += [stream] * min(count, batch.allowed.get(stream, 0))
      else:
        count = min(count, sum(batch.allowed.values()))
        streams = self._pool.turns(weights, count, size)
    return streams

  def _acceptance(self, stream: str, size: int) -> float:
    if not self._dynamic:
      return 1.0
    streams = [stream] if self._quotas else list(self._source.sizes)
    return self._opening.acceptance.rate(streams, size)

  def fed(self, plan: Plan) -> None:
    """The plan has been handed to the engines; on to the next multiple of the chunk."""
    if plan.visited:
      batch = self._open[plan.step]
      batch.round += 1
      batch.visited += plan.visited
      batch.pruned += plan.pruned
      self._visit(plan)
      located = self._source.locate([request.prompt for request in plan.requests])
      for stream, _ in located if self.barrier else ():
        batch.allowed[stream] = max(0, batch.allowed[stream] - 1)
      self._pool.ask(
        Asked(
          draw=request.draw,
          stream=stream,
          size=request.size,
          engine=engine,
          predicted=request.predicted_length or 1.0,
        )
        for request, (stream, _), engine in zip(
          plan.requests, located, plan.engines, strict=True
        )
      )
    self._pool.proceed()

  def report(self, reports: Sequence[Report], groups: Sequence[Group]) -> None:
    """Takes in what has happened on the engines, and groups that are graded."""
    for r in reports:
      self._pool.report(r.engine, r.tick, started=r.started, ended=r.ended)
    for group, kind in zip(groups, ledger.kinds(groups), strict=True):
      self._ready[group.request.draw] = group
      self._pool.judge(group.request.draw, self._is_useful(group, kind))

  def _is_useful(self, group: Group, kind: str) -> bool:
    if group.size < min(2, group.request.size):
      return False
    return kind == 'useful' or not self._dynamic

  def take(self, closing: Closing, step: int) -> list[Group]:
    """Ends the fill. Returns the groups that have been completed in it."""
    batch = self._open[step]
    groups = [self._ready[draw] for draw in self._pool.close(closing)]
    batch.filling = Chosen(
      [self._ready.pop(draw) for draw in closing.draws],
      missing=round(closing.missing / batch.terms.size),
      borrowed=round(closing.borrowed / batch.terms.size),
    )
    kinds = self._learn_of(batch, groups)
    for group, kind in zip(groups, kinds, strict=True):
      if self._is_useful(group, kind):
        continue
      del self._ready[group.request.draw]
      reason = ('filtered', kind)
      if group.size < min(2, group.request.size):
        reason = ('dropped', 'aborted')
      batch.settled.append(ledger.Entry(group, *reason))
    if self._max_staleness is not None:
      self._drop_stale(batch, step + 1)
    return groups

  def _drop_stale(self, batch: OpenBatch, step: int) -> None:
    """What waits and would be too old in this step is not trained on."""
    waiting = [self._ready[draw] for draw in self._pool.waiting]
    stale = [g for g in waiting if step - _oldest(g) > self._max_staleness]
    self._pool.drop(group.request.draw for group in stale)
    for group in stale:
      del self._ready[group.request.draw]
      batch.settled.append(ledger.Entry(group, 'dropped', 'stale'))

  def asked(self, step: int) -> int:
    return len(self._open[step].seen)

  def close(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    metrics, lines = super().close(step)
    metrics['rollout/answers_in_flight'] = self._pool.answers_in_flight
    return metrics, lines

  def _undecided(self) -> list[Group]:
    # Groups that decisions do not know of yet are in flight, whether or not graded.
    return [self._ready[draw] for draw in self._pool.waiting]

  # --- state, between two steps ---

  def keep(self, in_flight: Callable[[], InFlight]) -> None:
    """What the engines hold at this boundary, which is a part of the state."""
    self._in_flight = in_flight

  def freeze(self) -> Callable[[], dict[str, Any]]:
    write, pool, in_flight = super().freeze(), self._pool.state_dict(), self._in_flight
    ready = [group for _, group in sorted(self._ready.items())]

    def state() -> dict[str, Any]:
      found = write()
      found['pending'] |= {
        'pool': pool,
        'ready': [ledger.pack(group) for group in ready],
        'in_flight': None if in_flight is None else _packed(in_flight()),
      }
      return found

    return state

  def load_state_dict(self, state: dict[str, Any]) -> None:
    pending = state['pending']
    if missing := [key for key in _OPEN if key not in pending]:
      raise ValueError(
        f'scheduler.barrier: False, expected True as in the checkpoint, which has no '
        f'{missing[0]}'
      )
    rest = {key: value for key, value in pending.items() if key not in _OPEN}
    super().load_state_dict(state | {'pending': rest})
    self._pool.load_state_dict(pending['pool'])
    groups = map(self._unpacked, pending['ready'])
    self._ready = {group.request.draw: group for group in groups}
    if (found := pending['in_flight']) is not None:
      groups = [self._unpacked(packed) for packed in found['groups']]
      self.resumed = InFlight(
        tick=found['tick'],
        requests=[group.request for group in groups],
        completions={
          (c.draw, c.answer): c for group in groups for c in group.completions
        },
        running=_keys(found['running']),
        queued=_keys(found['queued']),
      )


def _oldest(group: Group) -> int:
  """The version of its oldest token."""
  return min(int(c.versions[0]) for c in group.completions if len(c.tokens))


def _packed(in_flight: InFlight) -> dict[str, Any]:
  """JSON. A group in flight is packed as one without verdicts."""
  by_draw: dict[int, list] = {request.draw: [] for request in in_flight.requests}
  for (draw, _), completion in sorted(in_flight.completions.items()):
    by_draw[draw].append(completion)
  groups = []
  for request in in_flight.requests:
    completions = tuple(by_draw[request.draw])
    nothing = np.zeros(len(completions), np.float32)
    groups.append(
      Group(
        request=request,
        completions=completions,
        verdicts=nothing,
        rewards=nothing,
        faults=(None,) * len(completions),
        components={reward.name: nothing for reward in request.prompt.rewards},
      )
    )
  return {
    'tick': in_flight.tick,
    'groups': [ledger.pack(group) for group in groups],
    'running': [[list(key) for key in keys] for keys in in_flight.running],
    'queued': [[list(key) for key in keys] for keys in in_flight.queued],
  }


def _keys(packed: list[list[list[int]]]) -> list[list[tuple[int, int]]]:
  return [[(draw, answer) for draw, answer in keys] for keys in packed]
