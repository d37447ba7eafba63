"""From answers to groups: the verifiers' words on what has been sampled."""

from collections.abc import Callable, Collection, Iterator, Sequence
import contextlib
import sys
import time
from typing import Any

import numpy as np

from jaxrl_sched.device import multihost
from jaxrl_sched.device.lanes import EVALUATION, Job, Key, Part
from jaxrl_sched.host.grading import Grade, GradingPool
from jaxrl_sched.types import Completion, Group, Prompt, Request, Sampling

FAILED_IN_A_ROW = 512  # answers without a verdict, and the verifier is broken


class Marking:
  """Hands answers to the graders, and makes groups of them and their grades.

  Each process grades its own answers, and is told of the others' grades.

  Args:
    text_of: (completion, how it was sampled) -> what the graders see.
  """

  def __init__(
    self, grader: GradingPool, text_of: Callable[[Completion, Sampling], str]
  ):
    self._grader, self._text_of = grader, text_of
    self._grades: dict[Key, Grade] = {}  # of groups that have not been given away
    self._seconds = 0.0  # waited for graders
    self._failed = 0  # answers in a row that could not be graded
    self._warned: set[tuple[str, str]] = set()

  def submit(self, request: Request, completion: Completion) -> None:
    """To be called with each answer as it ends: it is graded while others go on."""
    if not request.relief.pause_after:  # else it may have to wait for others
      self._submit(request, completion)

  def _submit(self, request: Request, completion: Completion) -> None:
    if completion.finish != 'aborted':
      text = self._text_of(completion, request.sampling)
      self._grader.submit((completion.draw, completion.answer), text, request.prompt)

  # Of the open pool, whose answers are graded apart from those of an evaluation.

  def start(self, request: Request, completion: Completion) -> None:
    """To be called with each answer of the pool as it ends."""
    text = self._text_of(completion, request.sampling)
    self._grader.submit(('pool', *_key(completion)), text, request.prompt)

  def finished(
    self, keys: Collection[Key], wait: Callable[[], Any] | None = None
  ) -> dict[Key, Grade]:
    """Grades of the pool that are there.

    Args:
      wait: if given, until there is one at least; called several times a second.
    """
    if wait is None:
      found = self._grader.take([('pool', *key) for key in keys])
    else:
      began = time.perf_counter()
      found = self._grader.collect(
        [('pool', *key) for key in keys], while_waiting=wait, enough=bool
      )
      self._seconds += time.perf_counter() - began
    return {key[1:]: grade for key, grade in found.items()}

  def group(
    self,
    request: Request,
    completions: Sequence[Completion],
    grades: Sequence[Grade],
    gone: tuple[int, ...],
  ) -> Group:
    """A group all of whose answers are graded. Raises where a verifier never works."""
    self._check(grades)
    self._warn(request, grades)
    return group_of(request, completions, grades, gone)

  def begin(self, job: Job, everything: Part) -> None:
    """All of a round has ended: puts each request's answers together."""
    by_draw: dict[int, list[Completion]] = {r.draw: [] for r in job.requests}
    for (draw, _), completion in sorted(everything.completions.items()):
      by_draw[draw].append(completion)
    job.sampled, cut = [], {}
    for (draw, _), tokens in sorted(everything.cut.items()):
      cut.setdefault(draw, []).append(tokens)
    for request in job.requests:
      completions, gone = by_draw[request.draw], tuple(cut.get(request.draw, ()))
      if not any(map(_is_paused, completions)):
        if request.relief.pause_after:
          for completion in completions:
            if _key(completion) in job.mine:
              self._submit(request, completion)
        if job.bundle != EVALUATION:  # where what went wrong is no answer either
          gone += tuple(len(c.tokens) for c in completions if c.finish == 'aborted')
          completions = [c for c in completions if c.finish != 'aborted']
      gone = tuple(tokens for tokens in gone if tokens)  # else it never ran
      job.sampled.append((request, completions, gone))

  def groups(
    self,
    job: Job,
    *,
    while_waiting: Callable[[], Any],
    enough: Callable[[Sequence[Group]], bool] = lambda groups: False,
  ) -> list[Group]:
    """Groups of a round, in draw order; with `enough` the first ones."""
    began = time.perf_counter()
    keys = [
      _key(c)
      for _, completions, _ in job.sampled
      if not any(map(_is_paused, completions))
      for c in completions
      if c.finish != 'aborted' and _key(c) not in self._grades and _key(c) in job.mine
    ]

    def grades() -> dict[Key, Grade]:
      return self._grader.collect(
        keys,
        while_waiting=while_waiting,
        enough=lambda grades: enough(_graded(job, self._grades | grades)),
      )

    for found in multihost.gather(grades, name=f'grades of bundle {job.bundle}'):
      self._grades |= found
    self._seconds += time.perf_counter() - began
    groups = _graded(job, self._grades)
    job.sampled = job.sampled[len(groups) :]
    for group in groups:
      if not group.is_paused:
        ended = [c for c in group.completions if c.finish != 'aborted']
        grades = [self._grades.pop(_key(c)) for c in ended]
        self._check(grades)
        self._warn(group.request, grades)
    return groups

  @contextlib.contextmanager
  def not_timed(self) -> Iterator[None]:
    """What is waited for inside is not of the step."""
    before = self._seconds
    yield
    self._seconds = before

  def take_seconds(self) -> float:
    """Waited for graders since the last call."""
    seconds, self._seconds = self._seconds, 0.0
    return seconds

  def _check(self, grades: Sequence[Grade]) -> None:
    """Single answers may fail; a verifier that never works ends the run."""
    for grade in grades:
      self._failed = self._failed + 1 if grade.fault is not None else 0
      if self._failed == FAILED_IN_A_ROW:
        raise ValueError(
          f'grading: {FAILED_IN_A_ROW} answers in a row could not be graded; the '
          f'last: {grade.fault}: {grade.detail}'
        )

  def _warn(self, request: Request, grades: Sequence[Grade]) -> None:
    """Says what went wrong in a verifier, the first time of each kind."""
    for grade in grades:
      names = ', '.join(reward.verifier for reward in request.prompt.graded_by)
      kind = (names, grade.fault)
      if grade.fault is not None and kind not in self._warned:
        self._warned.add(kind)
        print(
          f'grading: {names} on prompt {request.prompt.id}: {grade.fault} '
          f'({grade.detail}), scored {grade.score:g}; more of it is only counted',
          file=sys.stderr,
        )

  def close(self) -> None:
    self._grader.close()


def _graded(job: Job, grades: dict[Key, Grade]) -> list[Group]:
  """The first groups of a round, as far as there are grades for all answers."""
  groups = []
  for request, completions, gone in job.sampled:
    prompt = request.prompt
    if any(map(_is_paused, completions)):
      found = [_lowest(prompt, None)] * len(completions)
    else:
      aborted = _lowest(prompt, 'aborted')
      found = [
        aborted if c.finish == 'aborted' else grades.get(_key(c)) for c in completions
      ]
    if None in found:
      break
    groups.append(group_of(request, completions, found, gone))
  return groups


def group_of(
  request: Request,
  completions: Sequence[Completion],
  grades: Sequence[Grade],  # one a completion
  gone: tuple[int, ...],  # tokens of each answer that is not kept
) -> Group:
  verdicts = np.array([grade.score for grade in grades], np.float32)
  return Group(
    request=request,
    completions=tuple(completions),
    verdicts=verdicts,
    rewards=verdicts,
    faults=tuple(grade.fault for grade in grades),
    components={
      reward.name: np.array([g.components[i] for g in grades], np.float32)
      for i, reward in enumerate(request.prompt.rewards)
    },
    spares=gone,
  )


def _lowest(prompt: Prompt, fault: str | None) -> Grade:
  """Of an answer that nobody grades."""
  parts = tuple(reward.min_reward for reward in prompt.rewards)
  return Grade(score=prompt.min_reward, fault=fault, components=parts)


def _key(completion: Completion) -> Key:
  return completion.draw, completion.answer


def _is_paused(completion: Completion) -> bool:
  return completion.finish == 'paused'
