"""Sampling engines at work: each goes through its shares of bundles, in order.

One thread drives them all, and the learner beside them: nothing here waits for a device
unless it is told to.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import time
from typing import Protocol

from jaxrl_sched.engine import Span
from jaxrl_sched.types import Completion, Request, Share

Key = tuple[int, int]  # draw, answer
EVALUATION = -1  # in place of a bundle


class Rollout(Protocol):
  """Answers on their way; see `rollout.Rollout`."""

  completions: dict[Key, Completion]
  cut: dict[Key, int]
  busy: int  # slot-steps with an answer, once all is done
  slot_steps: int

  def advance(self) -> bool: ...

  def ready(self) -> bool: ...

  def abandon(self) -> None: ...


class Source(Protocol):
  """What answers: a sampler, or a teacher."""

  def begin(
    self,
    requests: Sequence[Request],
    *,
    share: Share,
    version: int,
    on_finish: Callable[[Request, Completion], None],
  ) -> Rollout: ...


@dataclasses.dataclass
class Part:
  """What some lanes have made of a round."""

  completions: dict[Key, Completion] = dataclasses.field(default_factory=dict)
  cut: dict[Key, int] = dataclasses.field(default_factory=dict)
  busy: int = 0  # slot-steps with an answer
  slot_steps: int = 0
  seconds: float = 0.0  # of the slowest lane

  def add(self, other: 'Part | Rollout', seconds: float) -> None:
    self.completions |= other.completions
    self.cut |= other.cut
    self.busy += other.busy
    self.slot_steps += other.slot_steps
    self.seconds = max(self.seconds, seconds)


@dataclasses.dataclass(eq=False)
class Job:
  """A round of a bundle on all lanes, of all processes."""

  bundle: int  # or EVALUATION
  version: int
  requests: list[Request]
  shares: Sequence[Share]
  lanes: int  # of this process
  on_finish: Callable[[Request, Completion], None]
  here: Part = dataclasses.field(default_factory=Part)  # of lanes that are done
  lanes_done: int = 0
  ended: int = 0  # answers
  mine: frozenset[Key] = frozenset()  # what is graded here, once all has ended
  # Once all has ended: each request's answers, and tokens of those that are not kept.
  sampled: list[tuple[Request, list[Completion], tuple[int, ...]]] | None = None

  @property
  def done(self) -> bool:
    """Whether all that this process has of it is."""
    return self.lanes_done == self.lanes


class Lane:
  """One sampling engine and what it still has to do."""

  def __init__(self, name: str, place: int, source: Source):
    self.name, self.place, self._source = name, place, source
    self._queue: deque[Job] = deque()
    self._job: Job | None = None  # under way
    self._rollout: Rollout | None = None
    self._began = 0.0
    self.spans: list[Span] = []  # since `forget`

  @property
  def has_work(self) -> bool:
    return self._job is not None or bool(self._queue)

  def ready(self) -> bool:
    """Whether `advance` would not have to wait for the device."""
    return self._rollout is None or self._rollout.ready()

  def versions(self) -> Iterable[int]:
    """Those of the weights that are still needed."""
    return [job.version for job in (*self._queue, *filter(None, [self._job]))]

  def put(self, job: Job) -> None:
    self._queue.append(job)

  def advance(self) -> None:
    """A chunk further, or into the next share. There has to be work."""
    if self._job is None:
      self._job, self._began = self._queue.popleft(), time.perf_counter()
      self._rollout = self._source.begin(
        self._job.requests,
        share=self._job.shares[self.place],
        version=self._job.version,
        on_finish=self._job.on_finish,
      )
    if self._rollout.advance():
      return
    job, self._job = self._job, None
    now = time.perf_counter()
    job.here.add(self._rollout, now - self._began)
    job.lanes_done += 1
    self._rollout = None
    self.spans.append(self._span(job, now))

  def forget(self, before: float) -> None:
    """Spans that were over by then are told, and needed no more."""
    self.spans = [span for span in self.spans if span.end > before]

  def running(self) -> list[Span]:
    """The span that is not over, as if it ended now."""
    if self._job is None:
      return []
    return [self._span(self._job, time.perf_counter())]

  def _span(self, job: Job, end: float) -> Span:
    what = 'evaluate' if job.bundle == EVALUATION else 'generate'
    return Span(self.name, what, job.bundle, self._began, end)

  def give_up(self, is_lost: Callable[[Job], bool]) -> None:
    """Forgets jobs, also the one under way."""
    self._queue = deque(job for job in self._queue if not is_lost(job))
    if self._job is not None and is_lost(self._job):
      self._rollout.abandon()
      self._job = self._rollout = None


def busy_within(spans: Iterable[Span], begin: float, end: float) -> float:
  """Seconds of this time that spans of one lane cover."""
  return sum(max(0.0, min(s.end, end) - max(s.begin, begin)) for s in spans)


def advance_one(lanes: Sequence[Lane]) -> bool:
  """One lane a chunk further: one that need not be waited for, if there is such.

  Which it is hangs on timing, which is no other process's matter: lanes of several
  processes have devices apart, and one on devices of all is alone.

  Returns:
    Whether any lane had work.
  """
  busy = [lane for lane in lanes if lane.has_work]
  if not busy:
    return False
  next((lane for lane in busy if lane.ready()), busy[0]).advance()
  return True
