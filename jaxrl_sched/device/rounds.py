"""Rounds of requests on the sampling engines of all processes: from plans to groups.

Each process samples its own shares of a round, at its own pace, and grades what it has
sampled; then all are given everything.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl_sched.control.asp import shares
from jaxrl_sched.device import multihost
from jaxrl_sched.device.lanes import EVALUATION, Job, Lane, Part, advance_one
from jaxrl_sched.device.marking import Marking
from jaxrl_sched.device.references import References
from jaxrl_sched.device.sampler import Sampler
from jaxrl_sched.engine import Span, Stopped
from jaxrl_sched.types import Group, Request, Share

LOOK_EVERY = 32  # chunks between looks at whether to stop, where all have to agree


def _never(groups: Sequence[Group]) -> bool:
  del groups
  return False


class Rounds:
  """What has been submitted and not given away, in that order.

  Args:
    samplers: this process's, one a sampling engine.
    teacher: answers in the samplers' place but in evaluations, or None.
    is_global: the one sampler is on all processes' devices, and works for all of them.
    stopping: whether (since a signal came) the run is to stop.
    progress: told what is being done.

  Attributes:
    lanes: this process's engines in training.
    slot_steps: bundle -> slot-steps with an answer, and in all, of what has ended.
  """

  def __init__(
    self,
    samplers: Sequence[Sampler],
    marking: Marking,
    *,
    teacher: References | None,
    is_global: bool,
    stopping: Callable[[], bool],
    progress: Callable[[str], None],
  ):
    self._marking, self._is_global = marking, is_global
    self._stopping, self._progress = stopping, progress
    hosts = 1 if is_global else multihost.count()
    self._engines = hosts * len(samplers)
    first = 0 if is_global else multihost.index() * len(samplers)
    places = range(first, first + len(samplers))
    self._judges = [
      Lane(f'engine {e}', e, sampler)
      for e, sampler in zip(places, samplers, strict=True)
    ]
    self.lanes = self._judges
    if teacher is not None:
      self.lanes = [Lane(f'engine {e}', e, teacher) for e in places]
    self._is_alone = multihost.count() == 1
    # Else when a sampler goes on would hang on each process's own timing.
    self._samples_between = self._is_alone or not is_global
    self._looks = 0
    self._jobs: list[Job] = []
    self.slot_steps: dict[int, list[int]] = {}
    self._seconds: dict[int, float] = {}  # by bundle

  def all_lanes(self) -> list[Lane]:
    return list(dict.fromkeys([*self.lanes, *self._judges]))

  def versions(self) -> Iterable[int]:
    """Those of the weights that samplers still need."""
    return [version for lane in self._judges for version in lane.versions()]

  def take_numbers(self, bundle: int) -> tuple[float, list[int]]:
    """Seconds of sampling a bundle, and its slot-steps."""
    return self._seconds.pop(bundle, 0.0), self.slot_steps.pop(bundle, [0, 0])

  def book(
    self, fill: int, began: float, ended: float, slot_steps: tuple[int, int]
  ) -> None:
    """A fill of the open pool is over, which took these engines so long."""
    self._seconds[fill], self.slot_steps[fill] = ended - began, list(slot_steps)
    for lane in self.lanes:
      lane.spans.append(Span(lane.name, 'generate', fill, began, ended))

  def agree(self, make: Callable[[], Any], name: str) -> Any:
    """`make()` of process 0. Raises Stopped on all where one is to stop."""
    self._stopping()  # whoever is asked to stop tells process 0
    stops, made = multihost.agree(lambda: (self._stopping(), make()), name=name)
    if stops:
      raise Stopped
    return made

  def submit(
    self,
    bundle: int,
    version: int,
    requests: Sequence[Request],
    spread: Sequence[Share],
  ) -> None:
    self._put(self.lanes, bundle, version, requests, spread)

  def _put(
    self,
    lanes: Sequence[Lane],
    bundle: int,
    version: int,
    requests: Sequence[Request],
    spread: Sequence[Share],
  ) -> Job:
    """Queues a round. Answers are graded while others are sampled."""

    def heard(request: Request, completion) -> None:
      job.ended += 1
      if self._is_mine(request.draw):
        self._marking.submit(request, completion)

    job = Job(bundle, version, list(requests), spread, len(lanes), heard)
    self._jobs.append(job)
    for lane in lanes:
      lane.put(job)
    return job

  def collect(
    self, bundle: int, enough: Callable[[Sequence[Group]], bool]
  ) -> list[Group]:
    """As of `Engine.collect`, before shaping; so are the others."""
    job = next(job for job in self._jobs if job.bundle == bundle)
    self._finish(job, 'sampling', may_stop=True)
    # Sampling goes on while answers are graded.
    return self._groups(job, lambda: self._check() or self.between(), enough)

  def collect_rest(self) -> list[Group]:
    # Nothing may stop this half-way: an update has been made already. The time is that
    # of a step whose times have been told, and whoever waits knows it.
    with self._marking.not_timed():
      left = [job for job in self._jobs if job.sampled]
      return [group for job in left for group in self._groups(job, self.between)]

  def drain(self, before: int) -> dict[int, list[Group]]:
    self._forget(lambda job: job.bundle >= before)
    # What rounds of these bundles have told is told anew by those that take their place.
    self.slot_steps = {b: x for b, x in self.slot_steps.items() if b < before}
    found = {}
    with self._marking.not_timed():
      for job in list(self._jobs):
        self._finish(job, 'finishing', may_stop=False)
        found[job.bundle] = self._groups(job, self.between)
    return found

  def evaluate(self, requests: Sequence[Request], version: int) -> list[Group]:
    self.agree(lambda: None, f'evaluate {version}')
    ones = np.ones(len(requests))
    sizes = [request.size for request in requests]
    spread = shares(sizes, ones, ones, self._engines)
    job = self._put(self._judges, EVALUATION, version, requests, spread)
    try:
      self._finish(job, 'evaluating', may_stop=True)
      with self._marking.not_timed():  # it is not of a step
        return self._marking.groups(job, while_waiting=self._check)
    finally:
      self._forget(lambda other: other is job)

  def between(self) -> bool:
    """Sampling while something else is waited for. Whether there was work."""
    return self._samples_between and advance_one(self.all_lanes())

  def _groups(
    self,
    job: Job,
    while_waiting: Callable[[], Any],
    enough: Callable[[Sequence[Group]], bool] = _never,
  ) -> list[Group]:
    """Groups of a round, in draw order; with `enough` the first ones.

    With several processes all of them: each would have another number graded.
    """
    if not self._is_alone:
      enough = _never
    groups = self._marking.groups(job, while_waiting=while_waiting, enough=enough)
    if not job.sampled:
      self._jobs.remove(job)
    return groups

  def _forget(self, is_lost: Callable[[Job], bool]) -> None:
    for lane in self.all_lanes():
      lane.give_up(is_lost)
    self._jobs = [job for job in self._jobs if not is_lost(job)]

  def _finish(self, job: Job, doing: str, *, may_stop: bool) -> None:
    """Samples until all of this round has ended; what was submitted before it, first.

    Raises:
      Stopped: on all processes.
    """
    if job.sampled is not None:
      return
    total = sum(len(job.shares[lane.place].requests) for lane in self._judges)
    while not (job.done or (may_stop and self._is_stopping())):
      advance_one(self.all_lanes())
      self._progress(f'{doing} {min(job.ended, total)}/{total} answers')
    everything = self._exchange(job)
    if job.bundle != EVALUATION:
      busy, slot_steps = self.slot_steps.get(job.bundle, [0, 0])
      both = [busy + everything.busy, slot_steps + everything.slot_steps]
      self.slot_steps[job.bundle] = both
      seconds = self._seconds.get(job.bundle, 0.0) + everything.seconds
      self._seconds[job.bundle] = seconds
    self._marking.begin(job, everything)

  def _exchange(self, job: Job) -> Part:
    """Gives each process what all have sampled.

    Raises:
      Stopped: on all, if one of them is not done.
    """

    def mine() -> Part | None:
      if not job.done:
        return None
      # On a mesh of all processes each of them has read all answers.
      return Part() if self._is_global and not multihost.is_first() else job.here

    parts = multihost.gather(mine, name=f'answers of bundle {job.bundle}')
    if None in parts:
      raise Stopped
    everything = Part()
    for part in parts:
      everything.add(part, part.seconds)
    own = job.here.completions
    job.mine = frozenset(key for key in own if self._is_mine(key[0]))
    return everything

  def _is_mine(self, draw: int) -> bool:
    """Whether this process is to grade a draw, of which it has answers."""
    if not self._is_global:
      return True
    return draw % multihost.count() == multihost.index()

  def _is_stopping(self) -> bool:
    """Whether to break off sampling.

    Processes may find this at different times, but not where they sample together.
    """
    if self._samples_between:
      return self._stopping()
    self._looks += 1
    self._stopping()
    return self._looks % LOOK_EVERY == 0 and multihost.agree(
      self._stopping, name=f'stop {self._looks}'
    )

  def _check(self) -> None:
    if self._is_alone and self._stopping():
      raise Stopped
