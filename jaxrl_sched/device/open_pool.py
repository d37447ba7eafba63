"""This process's engines of the open pool, and the grading of what they make."""

from collections.abc import Callable, Sequence

from jaxrl_sched.control.planning import Plan
from jaxrl_sched.device.marking import Marking
from jaxrl_sched.device.sampler import Sampler
from jaxrl_sched.engine import InFlight, Key, Report, Stopped
from jaxrl_sched.host.grading import Grade
from jaxrl_sched.types import Completion, Group, Request


class OpenPool:
  """What has been asked for and not given away.

  Args:
    stopping: whether (since a signal came) the run is to stop.
    progress: given a line on what is being done.
  """

  def __init__(
    self,
    samplers: Sequence[Sampler],
    marking: Marking,
    *,
    stopping: Callable[[], bool],
    progress: Callable[[str], None],
  ):
    self._samplers, self._marking = list(samplers), marking
    self._stopping, self._progress = stopping, progress
    self._engines = [sampler.open_rollout() for sampler in samplers]
    self._requests: dict[int, Request] = {}  # by draw: of groups not given yet
    self._ended: dict[int, dict[int, Completion]] = {}  # draw -> answer -> it
    self._ungraded: dict[int, set[int]] = {}  # draw -> answers that are being graded
    self._grades: dict[Key, Grade] = {}

  @property
  def tick(self) -> int:
    """Decode steps that all engines have done."""
    return min(engine.clock.tick for engine in self._engines)

  def begin_fill(self, version: int) -> None:
    for engine, sampler in zip(self._engines, self._samplers, strict=True):
      engine.begin_fill(sampler.weights(version), version)

  def feed(self, plan: Plan) -> None:
    for request in plan.requests:
      self._samplers[0].check(request)
      self._requests[request.draw] = request
      self._ended[request.draw], self._ungraded[request.draw] = {}, set()
    for engine, share in zip(self._engines, plan.shares, strict=True):
      of = [plan.requests[i].draw for i in share.requests.tolist()]
      keys = list(zip(of, share.answers.tolist(), strict=True))
      engine.put(plan.requests, keys)

  def advance(self, tick: int) -> tuple[list[Report], list[Group]]:
    """See `Engine.advance`; rewards are not shaped yet."""
    if self._stopping():
      raise Stopped
    behind = [(e, x) for e, x in enumerate(self._engines) if x.clock.tick < tick]
    for _, engine in behind:
      engine.launch()
    reports = []
    for e, engine in behind:
      started, ended, completions = engine.book()
      for request, completion in completions:
        self._end(request, completion)
      reports.append(
        Report(engine=e, tick=engine.clock.tick, started=started, ended=ended)
      )
    self._take_grades(waits=not behind)
    queued = sum(len(engine.clock.queue) for engine in self._engines)
    running = sum(len(engine.clock.running) for engine in self._engines)
    self._progress(f'sampling {running} answers, {queued} waiting')
    return reports, self._complete()

  def _end(self, request: Request, completion: Completion) -> None:
    self._ended[request.draw][completion.answer] = completion
    if completion.finish != 'aborted':
      self._ungraded[request.draw].add(completion.answer)
      self._marking.start(request, completion)

  def _take_grades(self, *, waits: bool) -> None:
    keys = [(draw, k) for draw, answers in self._ungraded.items() for k in answers]
    if not keys:
      return
    found = self._marking.finished(keys, self._check if waits else None)
    for (draw, k), grade in found.items():
      self._ungraded[draw].discard(k)
      self._grades[draw, k] = grade

  def _check(self) -> None:
    if self._stopping():
      raise Stopped

  def _complete(self) -> list[Group]:
    """Groups of which all answers have ended and are graded, each once."""
    groups = []
    for draw, request in sorted(self._requests.items()):
      ended = self._ended[draw]
      if len(ended) < request.size or self._ungraded[draw]:
        continue
      kept = [ended[k] for k in sorted(ended) if ended[k].finish != 'aborted']
      gone = [len(c.tokens) for c in ended.values() if c.finish == 'aborted']
      grades = [self._grades.pop((draw, c.answer)) for c in kept]
      what = request, kept, grades, tuple(n for n in gone if n)
      groups.append(self._marking.group(*what))
    for group in groups:
      for of in (self._requests, self._ended, self._ungraded):
        del of[group.request.draw]
    return groups

  # --- between two fills

  def suspend(self) -> InFlight:
    completions = {
      (draw, k): completion
      for draw, ended in self._ended.items()
      for k, completion in ended.items()
    }
    for engine in self._engines:
      completions |= engine.suspend()
    return InFlight(
      tick=self.tick,
      requests=[self._requests[draw] for draw in sorted(self._requests)],
      completions=completions,
      running=[engine.running() for engine in self._engines],
      queued=[list(engine.clock.queue) for engine in self._engines],
    )

  def resume(self, in_flight: InFlight) -> None:
    """To be called before anything was asked for."""
    requests = {request.draw: request for request in in_flight.requests}
    self._requests = requests
    self._ended = {draw: {} for draw in requests}
    self._ungraded = {draw: set() for draw in requests}
    for completion in in_flight.completions.values():
      if completion.finish != 'paused':
        self._end(requests[completion.draw], completion)
    for e, engine in enumerate(self._engines):
      keys = in_flight.running[e], in_flight.queued[e]
      engine.resume(
        in_flight.tick, requests.values(), *keys, dict(in_flight.completions)
      )

  def slot_steps(self) -> tuple[int, int]:
    """With an answer, and in all, of the fill so far."""
    busy = sum(engine.busy for engine in self._engines)
    return busy, sum(engine.slot_steps for engine in self._engines)
