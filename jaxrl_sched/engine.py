"""The Engine protocol: what the loop asks of whatever samples and learns.

The device engine answers with chips, the simulator with a clock.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Protocol

from jaxrl_sched.control.planning import Plan
from jaxrl_sched.types import Completion, Group, Lesson, Request


class Stopped(Exception):
  """The run was asked to stop (SIGTERM); raised where nothing is half done."""


@dataclasses.dataclass(frozen=True)
class Span:
  """Something that one of the two sides was busy with."""

  lane: str  # 'engine 0', 'engine 1', ... or 'learner'
  what: str  # 'generate', 'load', 'learn' or 'evaluate'
  bundle: int
  begin: float  # seconds on the engine's clock
  end: float


Key = tuple[int, int]  # draw, answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What has happened on a sampling engine since its last report."""

  engine: int
  tick: int  # decode steps since the run began, up to which this report is complete
  started: list[tuple[int, int]]  # (tick, draw), one an answer
  ended: list[tuple[int, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFlight:
  """What the sampling engines hold between two fills. Nothing of it changes later."""

  tick: int  # of all engines
  requests: list[Request]  # of groups that were not given yet, in draw order
  completions: dict[Key, Completion]  # of these; those that run are 'paused'
  running: list[list[Key]]  # of each engine, in slot order
  queued: list[list[Key]]  # of each engine, in queue order


class Engine(Protocol):
  step: int  # updates done so far, which is the version of the weights

  def agree(self, make: Callable[[], Any]) -> Any:
    """The value of `make()` on process 0, given to every process."""

  def compare(self, what: str, make: Callable[[], Any]) -> None:
    """Makes sure that the state `make()` is the same on every process.

    Raises:
      RuntimeError: on all of them, naming `what` and the processes that differ.
    """

  def submit(self, plan: Plan) -> None:
    """Hands out a round of a bundle, to be sampled with weights `plan.version`.

    Engines work through rounds in the order in which they were submitted.
    """

  def collect(
    self, bundle: int, enough: Callable[[Sequence[Group]], bool]
  ) -> list[Group]:
    """All that was submitted of a bundle, sampled and graded, in draw order.

    Where the first of them are `enough`, and others are still being graded, it may
    give these, and leave the others to `collect_rest`.

    Raises:
      Stopped: the run was asked to stop.
    """

  def collect_rest(self) -> list[Group]:
    """What `collect` has left, in draw order. Never raises Stopped."""

  def drain(self, before: int) -> dict[int, list[Group]]:
    """Finishes what was submitted of bundles below `before`, and gives it, by bundle.

    All else that was submitted is forgotten. Never raises Stopped.
    """

  # The open pool: in place of `submit`, `collect`, `collect_rest` and `drain`.

  def begin_fill(self, fill: int, version: int) -> None:
    """From here on all is sampled with these weights. Answers that are running continue
    with them from a fresh prefill of prompt and tokens."""

  def feed(self, plan: Plan) -> None:
    """Puts answers at the end of the engines' queues (`plan.shares`, one an engine)."""

  def advance(self, tick: int) -> tuple[list[Report], list[Group]]:
    """Samples until every engine has done this many decode steps since the run began, a
    multiple of the chunk, and at most a chunk more than it has. Where all have, waits for
    a grade that is missing, if there is one.

    Returns:
      What has happened, and groups of which all answers have ended and are graded now,
      each once, in draw order.

    Raises:
      Stopped: the run was asked to stop.
    """

  def suspend(self) -> Callable[[], InFlight]:
    """Ends the fill.

    Returns:
      What is in flight, at the tick where all engines are, to be called by all processes
      or by none; at any time later it gives what was in flight then.
    """

  def resume(self, in_flight: InFlight) -> None:
    """Takes up what another process has kept, before anything is asked for."""

  def evaluate(self, requests: Sequence[Request]) -> list[Group]:
    """Samples and grades at once, without shaping; in the order given."""

  def learn(self, lesson: Lesson) -> dict[str, Any]:
    """One update from this lesson (an empty one: no update); the step counts on.

    Returns:
      Metrics, which may still be on their way.
    """

  def save(self, control: dict[str, Any], *, score: float | None) -> None:
    """Keeps weights, optimizer and the controllers' state as of this step."""

  def now(self) -> float:
    """Seconds on the engine's clock."""

  def spans(self) -> list[Span]:
    """What was done when, since the last call: the timeline."""
