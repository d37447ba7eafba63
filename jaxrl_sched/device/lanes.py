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


@dataclasses.dataclass(eq=False)
class Job:
  """A round of a bundle on all lanes."""

  bundle: int  # or EVALUATION
  version: int
  requests: list[Request]
  shares: Sequence[Share]
  on_finish: Callable[[Request, Completion], None]
  rollouts: list[Rollout] = dataclasses.field(default_factory=list)  # that are done
  ended: int = 0  # answers
  seconds: float = 0.0  # of the slowest lane
  # Once all has ended: each request's answers, and tokens of those that are not kept.
  sampled: list[tuple[Request, list[Completion], tuple[int, ...]]] | None = None

  @property
  def done(self) -> bool:
    return len(self.rollouts) == len(self.shares)

  def completions(self) -> dict[Key, Completion]:
    return {k: c for rollout in self.rollouts for k, c in rollout.completions.items()}

  def cut(self) -> dict[Key, int]:
    return {k: n for rollout in self.rollouts for k, n in rollout.cut.items()}

  def slot_steps(self) -> tuple[int, int]:
    """With an answer, and in all, of all lanes."""
    busy = sum(rollout.busy for rollout in self.rollouts)
    return busy, sum(rollout.slot_steps for rollout in self.rollouts)


class Lane:
  """One sampling engine and what it still has to do."""

  def __init__(self, name: str, place: int, source: Source):
    self.name, self._place, self._source = name, place, source
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
        share=self._job.shares[self._place],
        version=self._job.version,
        on_finish=self._job.on_finish,
      )
    if self._rollout.advance():
      return
    job, self._job = self._job, None
    job.rollouts.append(self._rollout)
    self._rollout = None
    now = time.perf_counter()
    job.seconds = max(job.seconds, now - self._began)
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

  Which it is hangs on timing. With several processes there is one lane, and no choice.

  Returns:
    Whether any lane had work.
  """
  busy = [lane for lane in lanes if lane.has_work]
  if not busy:
    return False
  next((lane for lane in busy if lane.ready()), busy[0]).advance()
  return True
