"""The scheduler of the open pool: batches that wait for no answer (`control/pool.py`).

`decide` changes nothing that a decision is made of; `fed`, `report` and `take` change
state, and are called on every process with the same input.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_sched.control import ledger
from jaxrl_sched.control.filling import Chosen
from jaxrl_sched.control.learning import OpenBatch
from jaxrl_sched.control.planning import Plan, When
from jaxrl_sched.control.pool import Asked, Closing, Pool
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

  def __init__(self, *args, chunk: int, **settings):
    super().__init__(*args, **settings)
    asp, sagc, pruner = self._asp, self._sagc, self._pruner
    for good, what in (
      (asp.window == 1, f'asp.window={asp.window}'),
      (asp.refill, 'asp.refill=False'),
      (asp.relief == Relief(), 'relief for stragglers'),
      (sagc is None or not sagc.pools_steps, "sagc.mode 'batch' or 'any'"),
      (pruner is None or pruner.fills, "prune_prompts.regime='fixed_candidates'"),
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
      borrow=self._borrow,
      by_stream=settings.get('quotas', True),
    )
    self._ready: dict[int, Group] = {}  # graded groups that are in no batch
    self._in_flight: InFlight | None = None  # at the last closing

  # --- a step, in the order of the loop ---

  @property
  def tick(self) -> int:
    """Decode steps at which the next decision takes effect."""
    return self._pool.tick

  def begin_fill(self, step: int) -> int:
    """Settles the terms of a batch. Returns the version of the weights to sample with."""
    version = max(0, step - self._asp.lag)
    terms = self._opening.terms(step)
    self._source.begin(step, 0)  # shares are the pool's
    if self._sagc is not None:
      self._sagc.sent(step, terms.size)
    self._open[step] = OpenBatch(step, version, terms, Chosen(), {})
    self._next = step + 1
    return version

  def decide(self, step: int) -> Plan | Closing | None:
    """What takes effect at `tick`: the end of the fill, or a plan, perhaps an empty one.
    None: it is not known yet."""
    weights, terms = self._source.weights(step), self._open[step].terms
    closing = self._pool.closing(weights)
    if closing is None or closing:
      return closing
    streams = self._pool.wanted(weights, self._acceptance, terms.size)
    when = When(
      step=step,
      version=self._open[step].version,
      part=self._open[step].round,
      draw=self._draw,
    )
    return self._planner.feed(streams, terms.size, when, self._pool.assign)

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
    return groups

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

  @property
  def in_flight(self) -> InFlight | None:
    """What the engines are to take up after a resume."""
    return self._in_flight

  def keep(self, in_flight: InFlight) -> None:
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
        'in_flight': None if in_flight is None else _packed(in_flight),
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
    self._in_flight = None
    if (found := pending['in_flight']) is not None:
      groups = [self._unpacked(packed) for packed in found['groups']]
      self._in_flight = InFlight(
        tick=found['tick'],
        requests=[group.request for group in groups],
        completions={
          (c.draw, c.answer): c for group in groups for c in group.completions
        },
        running=_keys(found['running']),
        queued=_keys(found['queued']),
      )


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
