"""The sampler, the grader, the learner and the checkpoints as one Engine."""

from collections.abc import Callable, Sequence
import dataclasses
import sys
import time
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_sched.control.base import digest
from jaxrl_sched.device import multihost
from jaxrl_sched.device.checkpoint import Checkpoints
from jaxrl_sched.device.learner import Learner
from jaxrl_sched.device.references import References
from jaxrl_sched.device.sampler import Sampler
from jaxrl_sched.device.tokenizers import answer_text
from jaxrl_sched.engine import Stopped
from jaxrl_sched.host import packing
from jaxrl_sched.host.grading import Grade, GradingPool
from jaxrl_sched.host.rewards import overlong_penalty
from jaxrl_sched.types import Completion, Group, Lesson, Request

FAILED_IN_A_ROW = 512  # answers without a verdict, and the verifier is broken


class CompileCounter:
  """Counts XLA compilations in this process."""

  def __init__(self):
    self.count = 0
    jax.monitoring.register_event_duration_secs_listener(self._hear)

  def _hear(self, event: str, *_, **__) -> None:
    self.count += event == '/jax/core/compile/backend_compile_duration'

  def take(self) -> int:
    """How many since the last call."""
    count, self.count = self.count, 0
    return count


class DeviceEngine:
  """Samples, grades and learns on this process's devices.

  Args:
    teacher: answers in the sampler's place during training, or None.
    overlong: keyword arguments of `overlong_penalty` but for the limit, or None.
    max_new_tokens: of training; the limit that shaping and averaging speak of.
    window, share_prompt: of the packing.
    stopping: whether (since a signal came) the run is to stop.

  Attributes:
    progress: told what is being done, such as 'sampling 24/96 answers'. To be set.
  """

  def __init__(
    self,
    *,
    sampler: Sampler,
    learner: Learner,
    grader: GradingPool,
    tokenizer: PreTrainedTokenizerBase,
    checkpoints: Checkpoints,
    max_new_tokens: int,
    window: int = 16,
    share_prompt: bool = False,
    overlong: dict[str, Any] | None = None,
    teacher: References | None = None,
    stopping: Callable[[], bool] = lambda: False,
  ):
    self.step = 0
    self.progress: Callable[[str], None] = lambda text: None
    self._sampler, self._learner, self._grader = sampler, learner, grader
    self._tokenizer, self._checkpoints = tokenizer, checkpoints
    self._max_new_tokens, self._window = max_new_tokens, window
    self._share_prompt = share_prompt
    self._overlong = overlong
    self._teacher = teacher
    self._stopping = stopping
    self._submitted: list[Request] = []
    # Sampled, and not yet given away as groups; their grades, as far as they are known.
    self._sampled: list[tuple[Request, tuple[Completion, ...]]] = []
    self._grades: dict[tuple[int, int], Grade] = {}
    self._compiled = CompileCounter()
    self._times = dict.fromkeys(('generate_s', 'reward_s'), 0.0)
    self._idle: list[float] = []
    self._failed = 0  # answers in a row that could not be graded
    self._warned: set[tuple[str, str]] = set()

  def agree(self, make: Callable[[], Any]) -> Any:
    return multihost.agree(make, name=f'plan {self.step}')

  def compare(self, what: str, make: Callable[[], Any]) -> None:
    multihost.compare(what, lambda: digest(make()), name=f'compare {self.step}')

  def warm_up(self, longest_prompt: int) -> None:
    """Compiles everything, so that no step does, the first after a resume included."""
    self._sampler.warm_up(longest_prompt)
    self._learner.warm_up(share_prompt=self._share_prompt)
    self._sampler.load(self._learner.parameters, self.step)
    self._compiled.take()

  def restore(self, step: int | None = None) -> dict[str, Any] | None:
    """Loads a checkpoint, the newest whole one. Returns the controllers' state."""
    found = self._checkpoints.restore(self._learner.like(), step=step)
    if found is None:
      return None
    self.step, self._learner.state, control, pending = found
    self._publish()
    return control | {'carried': pending}

  def save(self, control: dict[str, Any], *, score: float | None) -> None:
    control = dict(control)
    pending = control.pop('carried')
    self._checkpoints.save(
      self.step, self._learner.state, control=control, pending=pending, score=score
    )

  def wait(self) -> None:
    """Until the last save is committed. Raises RuntimeError if it failed."""
    self._checkpoints.wait()

  def submit(self, requests: Sequence[Request]) -> None:
    self._check()
    self._submitted.extend(requests)

  def collect(self, enough: Callable[[Sequence[Group]], bool]) -> list[Group]:
    requests, self._submitted = self._submitted, []
    source = self._sampler if self._teacher is None else self._teacher
    self._sample('sampling', source, requests)
    self._idle.append(source.idle_share)
    groups = self._grade(while_waiting=self._check, enough=enough)
    return [self._shape(group) for group in groups]

  def collect_rest(self) -> list[Group]:
    # Nothing may stop this half-way: an update has been made already. The time is that
    # of a step whose times have been told, and whoever waits knows it.
    kept = dict(self._times)
    groups = self._grade(while_waiting=lambda: None)
    self._times = kept
    return [self._shape(group) for group in groups]

  def evaluate(self, requests: Sequence[Request]) -> list[Group]:
    self._check()
    kept = dict(self._times)
    self._sample('evaluating', self._sampler, requests)
    groups = self._grade(while_waiting=self._check)
    self._times = kept  # not the time of a step
    return groups

  def text_of(self, completion: Completion, stop_ids: Sequence[int]) -> str:
    return answer_text(self._tokenizer, completion.tokens, stop_ids)

  def _sample(self, doing: str, source, requests: Sequence[Request]) -> None:
    """Samples, and hands each answer to the graders while others are sampled."""
    ended, total = 0, sum(request.size for request in requests)

    def grade(request: Request, completion: Completion) -> None:
      nonlocal ended
      ended += 1
      text = self.text_of(completion, request.sampling.stop_ids)
      self._grader.submit((completion.draw, completion.answer), text, request.prompt)

    def look() -> None:
      self._check()
      self.progress(f'{doing} {ended}/{total} answers')

    began = time.perf_counter()
    self._sampled, self._grades = [], {}
    rest = iter(source.generate(requests, on_finish=grade, on_chunk=look))
    for request in requests:
      self._sampled.append((request, tuple(next(rest) for _ in range(request.size))))
    self._times['generate_s'] += time.perf_counter() - began

  def _grade(
    self,
    *,
    while_waiting: Callable[[], None],
    enough: Callable[[Sequence[Group]], bool] = lambda groups: False,
  ) -> list[Group]:
    """Groups of what has been sampled, in draw order; with `enough` the first ones."""
    began = time.perf_counter()
    self._grades |= self._grader.collect(
      while_waiting=while_waiting,
      enough=lambda grades: enough(self._graded(self._grades | grades)),
    )
    self._times['reward_s'] += time.perf_counter() - began
    groups = self._graded(self._grades)
    self._sampled = self._sampled[len(groups) :]
    for group in groups:
      grades = [self._grades.pop((group.request.draw, k)) for k in range(group.size)]
      self._check_grading(grades)
      self._warn(group.request, grades)
    return groups

  def _graded(self, grades: dict[tuple[int, int], Grade]) -> list[Group]:
    """The first of what has been sampled, as far as there are grades for all."""
    groups = []
    for request, completions in self._sampled:
      found = [grades.get((request.draw, k)) for k in range(request.size)]
      if None in found:
        break
      verdicts = np.array([g.score for g in found], np.float32)
      groups.append(
        Group(
          request=request,
          completions=completions,
          verdicts=verdicts,
          rewards=verdicts,
          faults=tuple(g.fault for g in found),
        )
      )
    return groups

  def _check_grading(self, grades: Sequence[Grade]) -> None:
    """Single answers may fail; a verifier that never works ends the run."""
    for grade in grades:
      self._failed = self._failed + 1 if grade.fault is not None else 0
      if self._failed == FAILED_IN_A_ROW:
        raise ValueError(
          f'grading: {FAILED_IN_A_ROW} answers in a row could not be graded; the '
          f'last: {grade.fault}: {grade.detail}'
        )

  def _check(self) -> None:
    if self._stopping():
      raise Stopped

  def _warn(self, request: Request, grades: Sequence[Grade]) -> None:
    """Says what went wrong in a verifier, the first time of each kind."""
    for grade in grades:
      kind = (request.prompt.reward, grade.fault)
      if grade.fault is not None and kind not in self._warned:
        self._warned.add(kind)
        print(
          f'grading: {request.prompt.reward} on prompt {request.prompt.id}: '
          f'{grade.fault} ({grade.detail}), scored 0; more of it is only counted',
          file=sys.stderr,
        )

  def _shape(self, group: Group) -> Group:
    if self._overlong is None:
      return group
    penalty = overlong_penalty(
      group.lengths, limit=self._max_new_tokens, **self._overlong
    )
    return dataclasses.replace(group, rewards=group.verdicts + penalty)

  def learn(self, lesson: Lesson) -> dict[str, Any]:
    began = time.perf_counter()
    loss, groups, advantages = self._learner.loss, lesson.groups, lesson.advantages
    batches = []
    # Without an advantage or a penalty the gradient is 0: no update is better than
    # one of momentum and weight decay alone.
    if any(np.any(a) for a in advantages) or (groups and loss.kl_coef > 0):
      keep = lesson.keep
      if loss.overlong_filter:
        keep = [k * ~g.truncated for k, g in zip(keep, groups, strict=True)]
      weights = packing.answer_weights(
        [g.lengths for g in groups],
        averaging=loss.averaging or packing.AVERAGING[loss.kind],
        max_new_tokens=self._max_new_tokens,
        keep=keep,
        count=lesson.count,
      )
      batches = packing.fill(
        groups,
        advantages,
        weights,
        version=self.step,
        rows=self._learner.rows,
        row_tokens=self._learner.row_tokens,
        window=self._window,
        share_prompt=self._share_prompt,
      )
    metrics = {'update/skipped': float(not batches)}
    if batches:
      answers = sum(int(np.count_nonzero(k)) for k in keep)
      self.progress(f'learning from {answers} answers')
      metrics |= self._learner.update(batches)
      metrics |= {
        'packing/density': packing.density(batches),
        'packing/rows': sum(int(b.segments.any(axis=1).sum()) for b in batches),
      }
      lags = np.concatenate(
        [
          np.full(len(c.tokens), self.step - c.version)
          for g, k in zip(groups, keep, strict=True)
          for c, kept in zip(g.completions, k, strict=True)
          if kept
        ]
      )
      metrics |= {'lag/mean': float(lags.mean()), 'lag/max': int(lags.max())}
      if self._teacher is not None:
        # References carry log-probs of 0, so the gap to them is the likelihood.
        metrics['nll'] = metrics['mismatch/logp_abs_mean']
      if self._teacher is not None or not (lags == 0).any():
        # No answer of the current weights, so no gap between sampler and learner.
        gap = 'mismatch/logp_abs_'
        metrics = {k: v for k, v in metrics.items() if not k.startswith(gap)}
    self.step += 1
    self._publish()
    # The next sampling needs the new weights anyway; waiting here keeps times honest.
    jax.block_until_ready(self._learner.state)
    times = self._times | {'learn_s': time.perf_counter() - began}
    self._times = dict.fromkeys(self._times, 0.0)
    idle, self._idle = self._idle, []
    return (
      metrics
      | {f'time/{name}': value for name, value in times.items()}
      | {
        'rollout/idle_slots': float(np.mean(idle)) if idle else 0.0,
        'compile/count': self._compiled.take(),
      }
    )

  def _publish(self) -> None:
    self._sampler.load(self._learner.parameters, self.step)
    if self._teacher is not None:
      self._teacher.load(None, self.step)

  def close(self) -> None:
    try:
      self._checkpoints.close()
    finally:
      self._grader.close()
