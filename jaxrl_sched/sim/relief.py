"""Spare answers, and answers that pause until the next bundle, in simulated slots.

Which answers are kept follows from lengths alone. How far an answer that is not needed
gets before somebody notices hangs on the slots, as it does in a real engine; engines
tell one another nothing.
"""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from jaxrl_sched.host.relief import Race, versions_before
from jaxrl_sched.sim.groups import SimGroup, zeros
from jaxrl_sched.sim.slots import Decoded
from jaxrl_sched.sim.workload import ABORTED, FINISHES, PAUSED, Answers
from jaxrl_sched.types import Completion, Group, Request, Share


@dataclasses.dataclass
class Relieved:
  """What became of the answers of a round; [answers] as in `Answers`."""

  before: np.ndarray  # int64, tokens of earlier bundles
  made: np.ndarray  # int64, tokens in this one
  ended: np.ndarray  # bool
  decoded: list[Decoded]  # of each share


def run(
  requests: Sequence[Request],
  answers: Answers,
  shares: Sequence[Share],
  slots: int,
  chunk: int,
) -> Relieved:
  """Works through the shares of a round whose requests have relief or have begun."""
  total = int(answers.starts[-1])
  found = Relieved(
    np.zeros(total, int), np.zeros(total, int), np.zeros(total, bool), []
  )
  for i, request in enumerate(requests):
    for completion in request.begun:
      place = answers.starts[i] + completion.answer
      found.before[place] = len(completion.tokens)
      found.ended[place] = completion.finish != 'paused'
  for share in shares:
    bounds = [0] if share.cuts is None else share.cuts.tolist()
    bounds.append(len(share.requests))
    races = {i: _race(requests[i]) for i in set(share.requests.tolist())}
    steps = chunks = 0
    for begin, end in zip(bounds, bounds[1:], strict=False):
      engine = _Slots(requests, answers, found, races, slots, chunk)
      engine.work(share.requests[begin:end].tolist(), share.answers[begin:end].tolist())
      steps, chunks = steps + engine.now, chunks + engine.chunks
    found.decoded.append(Decoded(np.empty(0, int), steps, chunks))
  return found


def _race(request: Request) -> Race:
  """Of its answers, with those that ended in earlier bundles."""
  race = Race(request.size, first_finished=request.relief.first_finished)
  race.open = dict.fromkeys(request.missing, 0)
  for c in request.begun:
    if c.finish != 'paused':
      race.open[c.answer] = len(c.tokens)
      race.end(c.answer, len(c.tokens), aborted=c.finish == 'aborted')
  return race


@dataclasses.dataclass
class _Running:
  place: int
  request: int
  answer: int
  start: int  # the decode step
  end: int  # when it ends or pauses


class _Slots:
  """An engine that looks, between two chunks, at what has ended or is not needed."""

  def __init__(self, requests, answers, found, races, slots, chunk):
    self._requests, self._answers, self._found = requests, answers, found
    self._races, self._slots, self._chunk = races, slots, chunk
    self._running: list[_Running] = []
    self.now = self.chunks = 0

  def work(self, requests: list[int], answers: list[int]) -> None:
    waiting = list(zip(requests, answers, strict=True))[::-1]
    while True:
      self._running = [run for run in self._running if not self._is_over(run)]
      self._running = [run for run in self._running if not self._is_needless(run)]
      while waiting and len(self._running) < self._slots:
        self._begin(*waiting.pop())
      if not self._running:
        return
      # Nothing happens until the first one ends, or has made too many tokens.
      first = min(self._next(run) for run in self._running)
      launches = max(1, -(-(first - self.now) // self._chunk))
      last = max(run.end for run in self._running)  # then nothing is alive
      self.chunks += launches
      self.now = min(self.now + launches * self._chunk, last)

  def _begin(self, request: int, answer: int) -> None:
    place = int(self._answers.starts[request]) + answer
    before = int(self._found.before[place])
    if self._races[request].cutoff(answer) <= before:
      return  # not needed
    left = max(1, int(self._answers.lengths[place]) - before)
    pause = self._requests[request].relief.pause_after or left
    end = self.now + min(left, pause)
    self._found.ended[place] = left <= pause
    self._running.append(_Running(place, request, answer, self.now, end))

  def _next(self, run: _Running) -> int:
    cutoff = self._races[run.request].cutoff(run.answer)
    if cutoff == math.inf:
      return run.end
    return min(run.end, run.start + int(cutoff - self._found.before[run.place]))

  def _is_over(self, run: _Running) -> bool:
    """Whether it has ended, which it tells the others of its request, or pauses."""
    found = self._found
    found.made[run.place] = min(run.end, self.now) - run.start
    if run.end > self.now:
      return False
    if found.ended[run.place]:
      length = int(found.before[run.place] + found.made[run.place])
      is_lost = bool(self._answers.finish[run.place] == ABORTED)
      self._races[run.request].end(run.answer, length, aborted=is_lost)
    return True

  def _is_needless(self, run: _Running) -> bool:
    so_far = self._found.before[run.place] + self._found.made[run.place]
    if so_far < self._races[run.request].cutoff(run.answer):
      return False
    self._found.ended[run.place] = False
    return True


# --- groups --------------------------------------------------------------------------


def groups(
  requests: Sequence[Request],
  version: int,
  answers: Answers,
  rewards: np.ndarray,
  found: Relieved,
) -> list[Group]:
  return [
    _group(request, i, version, answers, rewards, found)
    for i, request in enumerate(requests)
  ]


def _group(
  request: Request,
  i: int,
  version: int,
  answers: Answers,
  rewards: np.ndarray,
  found: Relieved,
) -> Group:
  """What is kept of a request's answers, or all that may still be."""
  part = slice(int(answers.starts[i]), int(answers.starts[i + 1]))
  lengths = found.before[part] + found.made[part]
  finish = answers.finish[part].copy()
  for completion in request.begun:
    if completion.finish != 'paused':
      finish[completion.answer] = FINISHES.index(completion.finish)
  race = Race(request.size, first_finished=request.relief.first_finished)
  race.open = {k: n for k, n in enumerate(lengths.tolist()) if n}
  for k in np.flatnonzero(found.ended[part]).tolist():
    race.end(k, race.open[k], aborted=bool(finish[k] == ABORTED))
  race.drop()
  race.drop_ended()
  finish[list(race.open)] = PAUSED
  kept = np.array(sorted([*race.open, *race.ended]), int)
  if not race.open:  # else one that was aborted keeps its place until all have ended
    kept = kept[finish[kept] != ABORTED]
  is_over = finish[kept] != PAUSED  # nobody grades what has not ended
  left = np.ones(len(lengths), bool)
  left[kept] = False
  faults = answers.faults.get(i, (None,) * len(lengths))
  what = dict(
    request=request,
    verdicts=np.where(is_over, answers.verdicts[part][kept], np.float32(0)),
    rewards=np.where(is_over, rewards[part][kept], np.float32(0)),
    faults=tuple(faults[k] for k in kept.tolist()),
    components={
      name: np.where(is_over, values[kept], np.float32(0))
      for name, values in answers.components.get(i, {}).items()
    },
    spares=tuple(lengths[left & (lengths > 0)].tolist()),
  )
  if not request.begun:
    return SimGroup(
      version=version, places=kept, lengths=lengths[kept], finish=finish[kept], **what
    )
  completions = _completions(request, version, kept, lengths, finish)
  return Group(completions=completions, **what)


def _completions(
  request: Request, version: int, kept: np.ndarray, lengths: np.ndarray, finish
) -> tuple[Completion, ...]:
  """Of a request that has begun: what it had, gone on with."""
  begun, found = {c.answer: c for c in request.begun}, []
  for k in kept.tolist():
    old = begun[k]
    if old.finish == 'paused':
      old = dataclasses.replace(
        old,
        tokens=zeros(int(lengths[k]), np.int32),
        logps=zeros(int(lengths[k]), np.float32),
        finish=FINISHES[finish[k]],
        version=version,
        earlier=versions_before(old, version),
      )
    found.append(old)
  return tuple(found)
