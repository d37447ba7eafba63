"""The engines of the open pool on all processes, and the grading of what they make.

Each process samples on engines of its own and grades what they make; after every chunk
all are given what has happened everywhere, and groups that are complete. On a mesh of all
processes each of them has read all answers, and grades a share of them.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
import sys
import time
from typing import Any

from jaxrl_sched.control.planning import Plan
from jaxrl_sched.device import multihost
from jaxrl_sched.device.marking import Marking
from jaxrl_sched.device.sampler import Sampler
from jaxrl_sched.engine import InFlight, Key, Report, Stopped
from jaxrl_sched.host.grading import Grade
from jaxrl_sched.types import Completion, Group, Request, Share

_WORTH_SAYING = 0.1  # share of a fill in which sampling waits for verdicts


class OpenPool:
  """What has been asked for and not given away.

  Args:
    samplers: of this process, one an engine.
    is_global: the one sampler is on all processes' devices, and works for all of them.
    stopping: whether (since a signal came) the run is to stop.
    progress: given a line on what is being done.
  """

  def __init__(
    self,
    samplers: Sequence[Sampler],
    marking: Marking,
    *,
    is_global: bool,
    stopping: Callable[[], bool],
    progress: Callable[[str], None],
  ):
    self._is_global, self._is_alone = is_global, multihost.count() == 1
    self._first = 0 if is_global else multihost.index() * len(samplers)  # engine
    self._mine: set[int] = set()  # draws that are graded here
    self._waited_s, self._chunks, self._began = 0.0, 0, 0.0  # of this fill
    self._has_said = False
    self._slot_steps = 0, 0
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
    self._slot_steps = 0, 0
    self._waited_s, self._chunks, self._began = 0.0, 0, time.perf_counter()
    for engine, sampler in zip(self._engines, self._samplers, strict=True):
      engine.begin_fill(sampler.weights(version), version)

  def feed(self, plan: Plan) -> None:
    for request in plan.requests:
      self._samplers[0].check(request)
      self._ask(request)
    for engine, keys in zip(
      self._engines,
      [_keys(plan, share) for share in self._own(plan.shares)],
      strict=True,
    ):
      engine.put(plan.requests, keys)
      self._mine |= {draw for draw, _ in keys if self._is_graded_here(draw)}

  def _ask(self, request: Request) -> None:
    self._requests[request.draw] = request
    self._ended[request.draw], self._ungraded[request.draw] = {}, set()

  def _own(self, of_engines: Sequence[Any]) -> Sequence[Any]:
    """Of what each engine of all processes has, that of the engines here."""
    return of_engines[self._first : self._first + len(self._engines)]

  def _is_graded_here(self, draw: int) -> bool:
    """Of what is sampled here, or has been sampled anywhere."""
    return not self._is_global or draw % multihost.count() == multihost.index()

  def advance(self, tick: int) -> tuple[list[Report], list[Group]]:
    """See `Engine.advance`; rewards are not shaped yet."""
    if self._is_alone:
      self._check()
    parts = multihost.gather(lambda: self._advance(tick), name=f'tick {tick}')
    reports = [report for part in parts for report in part[0]]
    if self._is_global:
      reports = parts[0][0]
    groups = [group for part in parts for group in part[1]]
    for group in groups:
      for of in (self._requests, self._ended, self._ungraded):
        del of[group.request.draw]
      self._mine.discard(group.request.draw)
    counts = parts[:1] if self._is_global else parts
    busy, slot_steps = self._slot_steps
    busy, slot_steps = (
      busy + sum(part[2][0] for part in counts),
      slot_steps + sum(part[2][1] for part in counts),
    )
    self._slot_steps = busy, slot_steps
    return reports, sorted(groups, key=lambda group: group.request.draw)

  def _advance(self, tick: int) -> tuple[list[Report], list[Group], tuple[int, int]]:
    """What has happened here, groups that are complete, and slot-steps with an answer
    and in all."""
    behind = [(e, x) for e, x in enumerate(self._engines) if x.clock.tick < tick]
    self._chunks += bool(behind)
    for _, engine in behind:
      engine.launch()
    reports, busy, slot_steps = [], 0, 0
    for e, engine in behind:
      before = engine.busy
      started, ended, completions = engine.book()
      busy, slot_steps = busy + engine.busy - before, slot_steps + engine.chunk_steps
      for request, completion in completions:
        if request.draw in self._mine:
          self._end(request, completion)
      reports.append(
        Report(
          engine=self._first + e, tick=engine.clock.tick, started=started, ended=ended
        )
      )
    self._take_grades(waits=not behind)
    queued = sum(len(engine.clock.queue) for engine in self._engines)
    running = sum(len(engine.clock.running) for engine in self._engines)
    self._progress(f'sampling {running} answers, {queued} waiting')
    return reports, self._complete(), (busy, slot_steps)

  def _end(self, request: Request, completion: Completion) -> None:
    self._ended[request.draw][completion.answer] = completion
    if completion.finish != 'aborted':
      self._ungraded[request.draw].add(completion.answer)
      self._marking.start(request, completion)

  def _take_grades(self, *, waits: bool) -> None:
    keys = [(draw, k) for draw, answers in self._ungraded.items() for k in answers]
    if not keys:
      return
    began = time.perf_counter()
    found = self._marking.finished(keys, self._check if waits else None)
    self._waited_s += (time.perf_counter() - began) * waits
    for (draw, k), grade in found.items():
      self._ungraded[draw].discard(k)
      self._grades[draw, k] = grade

  def _check(self) -> None:
    # Several processes agree on it before the next decision.
    if self._is_alone and self._stopping():
      raise Stopped

  def _complete(self) -> list[Group]:
    """Groups of which all answers have ended and are graded, each once."""
    groups = []
    for draw in sorted(self._mine):
      request, ended = self._requests[draw], self._ended[draw]
      if len(ended) < request.size or self._ungraded[draw]:
        continue
      kept = [ended[k] for k in sorted(ended) if ended[k].finish != 'aborted']
      gone = [len(c.tokens) for c in ended.values() if c.finish == 'aborted']
      grades = [self._grades.pop((draw, c.answer)) for c in kept]
      what = request, kept, grades, tuple(n for n in gone if n)
      groups.append(self._marking.group(*what))
    return groups

  # --- between two fills

  def suspend(self) -> Callable[[], InFlight]:
    completions = {
      (draw, k): completion
      for draw, ended in self._ended.items()
      for k, completion in ended.items()
    }
    for engine in self._engines:
      completions |= engine.suspend()
    here = InFlight(
      tick=self.tick,
      requests=[self._requests[draw] for draw in sorted(self._requests)],
      completions=completions,
      running=[engine.running() for engine in self._engines],
      queued=[list(engine.clock.queue) for engine in self._engines],
    )
    return lambda: self._whole(here)

  def _whole(self, here: InFlight) -> InFlight:
    """Of all processes."""

    def mine():
      return here.completions, here.running, here.queued

    parts = multihost.gather(mine, name=f'in flight {here.tick}')
    completions: dict[Key, Completion] = {}
    for part in parts:
      completions |= part[0]
    of = parts[:1] if self._is_global else parts
    return dataclasses.replace(
      here,
      completions=dict(sorted(completions.items())),
      running=[keys for part in of for keys in part[1]],
      queued=[keys for part in of for keys in part[2]],
    )

  def resume(self, in_flight: InFlight) -> None:
    """To be called before anything was asked for."""
    requests = {request.draw: request for request in in_flight.requests}
    for request in requests.values():
      self._ask(request)
    running, queued = self._own(in_flight.running), self._own(in_flight.queued)
    for engine, *keys in zip(self._engines, running, queued, strict=True):
      engine.resume(in_flight.tick, requests.values(), *keys, in_flight.completions)
    here = {draw for of in (running, queued) for keys in of for draw, _ in keys}
    anywhere = {
      draw
      for of in (in_flight.running, in_flight.queued)
      for keys in of
      for draw, _ in keys
    }
    # What has ended and waits for grades is no engine's any more.
    left = {d for d in requests if d not in anywhere}
    here |= {d for d in left if d % multihost.count() == multihost.index()}
    self._mine = {draw for draw in here if self._is_graded_here(draw)}
    for completion in in_flight.completions.values():
      if completion.finish != 'paused' and completion.draw in self._mine:
        self._end(requests[completion.draw], completion)

  def say_if_waiting(self) -> None:
    """Says, once, that sampling waited for verdicts, and what would help."""
    took = time.perf_counter() - self._began
    if self._has_said or self._waited_s < _WORTH_SAYING * took:
      return
    self._has_said = True
    chunk_s = (took - self._waited_s) / max(1, self._chunks)
    more = math.ceil(self._waited_s / max(chunk_s, 1e-6))
    print(
      f'grading: in this step sampling waited {self._waited_s:.1f} of {took:.1f} s for '
      f'verdicts; scheduler.grace larger by {more} would do',
      file=sys.stderr,
    )

  def slot_steps(self) -> tuple[int, int]:
    """With an answer, and in all, of the fill so far."""
    return self._slot_steps


def _keys(plan: Plan, share: Share) -> list[Key]:
  """The answers of an engine's share, in its order."""
  draws = [plan.requests[i].draw for i in share.requests.tolist()]
  return list(zip(draws, share.answers.tolist(), strict=True))
