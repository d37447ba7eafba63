"""The sampler, the grader, the learner and the checkpoints as one Engine."""

from collections.abc import Callable, Sequence
import dataclasses
import time
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_sched.control import ledger
from jaxrl_sched.control.asp import shares
from jaxrl_sched.control.base import digest
from jaxrl_sched.control.planning import Plan
from jaxrl_sched.device import multihost
from jaxrl_sched.device.checkpoint import Checkpoints
from jaxrl_sched.device.handover import Handover
from jaxrl_sched.device.lanes import (
  EVALUATION,
  Job,
  Lane,
  Part,
  advance_one,
  busy_within,
)
from jaxrl_sched.device.learner import Learner
from jaxrl_sched.device.marking import Marking
from jaxrl_sched.device.references import References
from jaxrl_sched.device.sampler import Sampler
from jaxrl_sched.device.tokenizers import answer_text
from jaxrl_sched.engine import Span, Stopped
from jaxrl_sched.host import packing
from jaxrl_sched.host.grading import GradingPool
from jaxrl_sched.host.rewards import overlong_penalty
from jaxrl_sched.types import Completion, Group, Lesson, Request, Share

LOOK_EVERY = 32  # chunks between looks at whether to stop, where all have to agree


def _never(groups: Sequence[Group]) -> bool:
  del groups
  return False


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
  """Samples and grades on this process's devices, and learns with all others'.

  Each process samples its own shares of a round, at its own pace, and grades what it has
  sampled; then all are given everything, so that each packs the same batch.

  Without a lag sampling and learning take turns. With one the learner's work is
  launched, and while the device is at it the samplers go on with bundles ahead: one
  thread launches all.

  Args:
    samplers: this process's, one a sampling engine.
    handover: brings them the learner's weights.
    is_global: the one sampler is on all processes' devices, and works for all of them.
    lag: steps that sampling runs ahead; above 0 samplers go on while the learner learns.
    teacher: answers in the samplers' place during training, or None.
    overlong: keyword arguments of `overlong_penalty` but for the limit, or None.
    max_new_tokens: of training; the limit that shaping and averaging speak of.
    window, share_prompt: of the packing.
    longest_part: tokens of an answer that is paused and gone on with.
    stopping: whether (since a signal came) the run is to stop.

  Attributes:
    progress: told what is being done, such as 'sampling 24/96 answers'. To be set.
  """

  def __init__(
    self,
    *,
    samplers: Sequence[Sampler],
    handover: Handover,
    learner: Learner,
    grader: GradingPool,
    is_global: bool = False,
    tokenizer: PreTrainedTokenizerBase,
    checkpoints: Checkpoints,
    max_new_tokens: int,
    lag: int = 0,
    window: int = 16,
    share_prompt: bool = False,
    longest_part: int = 0,
    overlong: dict[str, Any] | None = None,
    teacher: References | None = None,
    stopping: Callable[[], bool] = lambda: False,
  ):
    self.step = 0
    self._zero = time.perf_counter()  # of our clock
    self.progress: Callable[[str], None] = lambda text: None
    self._samplers, self._learner = list(samplers), learner
    self._handover, self._is_global = handover, is_global
    self._tokenizer, self._checkpoints = tokenizer, checkpoints
    self._marking = Marking(grader, self.text_of)
    self._max_new_tokens, self._window, self._lag = max_new_tokens, window, lag
    self._share_prompt, self._longest_part = share_prompt, longest_part
    self._overlong = overlong
    self._stopping = stopping
    hosts = 1 if is_global else multihost.count()
    self._engines = hosts * len(self._samplers)
    first = 0 if is_global else multihost.index() * len(self._samplers)
    places = range(first, first + len(self._samplers))
    self._judges = [
      Lane(f'engine {e}', e, sampler)
      for e, sampler in zip(places, self._samplers, strict=True)
    ]
    self._lanes = self._judges
    if teacher is not None:
      self._lanes = [Lane(f'engine {e}', e, teacher) for e in places]
    self._has_teacher = teacher is not None
    self._is_alone = multihost.count() == 1
    # Else when a sampler goes on would hang on each process's own timing.
    self._samples_between = self._is_alone or not is_global
    self._looks = 0
    self._jobs: list[Job] = []  # submitted and not given away, in that order
    self._compiled = CompileCounter()
    self._slot_steps: dict[int, list[int]] = {}  # bundle -> with an answer, and in all
    self._generated: dict[int, float] = {}  # bundle -> seconds
    self._since = time.perf_counter()  # when the newest update was done
    self._told: list[Span] = []  # since the last call of `spans`
    self._publish()

  def agree(self, make: Callable[[], Any]) -> Any:
    return self._agree(make, 'plan')

  def _agree(self, make: Callable[[], Any], what: str) -> Any:
    self._stopping()  # whoever is asked to stop tells process 0
    stops, made = multihost.agree(
      lambda: (self._stopping(), make()), name=f'{what} {self.step}'
    )
    if stops:
      raise Stopped
    return made

  def compare(self, what: str, make: Callable[[], Any]) -> None:
    multihost.compare(what, lambda: digest(make()), name=f'compare {self.step}')

  def now(self) -> float:
    return time.perf_counter() - self._zero

  def warm_up(self, longest_prompt: int) -> None:
    """Compiles everything, so that no step does, the first after a resume included."""
    for sampler in self._samplers:
      sampler.warm_up(longest_prompt, longest_part=self._longest_part)
    self._learner.warm_up(share_prompt=self._share_prompt)
    self._publish()
    self._compiled.take()
    self._since = time.perf_counter()

  def restore(self, step: int | None = None) -> dict[str, Any] | None:
    """Loads a checkpoint, the newest whole one. Returns the controllers' state."""
    found = self._checkpoints.restore(self._learner.like(), step=step)
    if found is None:
      return None
    self.step, self._learner.state, control, pending = found
    saved = pending.pop('slot_steps')
    self._slot_steps = {int(bundle): both for bundle, both in saved.items()}
    self._publish()
    return control | {'pending': pending}

  def save(self, control: dict[str, Any], *, score: float | None) -> None:
    control = dict(control)
    slot_steps = {str(bundle): both for bundle, both in self._slot_steps.items()}
    pending = control.pop('pending') | {'slot_steps': slot_steps}
    self._checkpoints.save(
      self.step, self._learner.state, control=control, pending=pending, score=score
    )

  def wait(self) -> None:
    """Until the last save is committed. Raises RuntimeError if it failed."""
    self._checkpoints.wait()

  # --- sampling ---

  def submit(self, plan: Plan) -> None:
    self._put(self._lanes, plan.step, plan.version, plan.requests, plan.shares)

  def _put(
    self,
    lanes: Sequence[Lane],
    bundle: int,
    version: int,
    requests: Sequence[Request],
    shares: Sequence[Share],
  ) -> Job:
    """Queues a round. Answers are graded while others are sampled."""

    def heard(request: Request, completion: Completion) -> None:
      job.ended += 1
      if self._is_mine(request.draw):
        self._marking.submit(request, completion)

    job = Job(bundle, version, list(requests), shares, len(lanes), heard)
    self._jobs.append(job)
    for lane in lanes:
      lane.put(job)
    return job

  def collect(
    self, bundle: int, enough: Callable[[Sequence[Group]], bool]
  ) -> list[Group]:
    job = next(job for job in self._jobs if job.bundle == bundle)
    self._finish(job, 'sampling', may_stop=True)
    # Sampling goes on while answers are graded.
    return self._groups(job, lambda: self._check() or self._between(), enough)

  def collect_rest(self) -> list[Group]:
    # Nothing may stop this half-way: an update has been made already. The time is that
    # of a step whose times have been told, and whoever waits knows it.
    with self._marking.not_timed():
      left = [job for job in self._jobs if job.sampled]
      return [group for job in left for group in self._groups(job, self._between)]

  def drain(self, before: int) -> dict[int, list[Group]]:
    self._forget(lambda job: job.bundle >= before)
    # What rounds of these bundles have told is told anew by those that take their place.
    self._slot_steps = {b: x for b, x in self._slot_steps.items() if b < before}
    found = {}
    with self._marking.not_timed():
      for job in list(self._jobs):
        self._finish(job, 'finishing', may_stop=False)
        found[job.bundle] = self._groups(job, self._between)
    return found

  def _groups(
    self,
    job: Job,
    while_waiting: Callable[[], Any],
    enough: Callable[[Sequence[Group]], bool] = _never,
  ) -> list[Group]:
    """Groups of a round, in draw order, shaped; with `enough` the first ones.

    With several processes all of them: each would have another number graded.
    """
    if not self._is_alone:
      enough = _never
    groups = self._marking.groups(job, while_waiting=while_waiting, enough=enough)
    if not job.sampled:
      self._jobs.remove(job)
    return [self._shape(group) for group in groups]

  def _forget(self, is_lost: Callable[[Job], bool]) -> None:
    for lane in [*self._lanes, *self._judges]:
      lane.give_up(is_lost)
    self._jobs = [job for job in self._jobs if not is_lost(job)]

  def evaluate(self, requests: Sequence[Request]) -> list[Group]:
    self._agree(lambda: None, 'evaluate')
    began = time.perf_counter()
    ones = np.ones(len(requests))
    sizes = [request.size for request in requests]
    spread = shares(sizes, ones, ones, self._engines)
    job = self._put(self._judges, EVALUATION, self.step, requests, spread)
    try:
      self._finish(job, 'evaluating', may_stop=True)
      with self._marking.not_timed():  # it is not of a step
        return self._marking.groups(job, while_waiting=self._check)
    finally:
      self._forget(lambda other: other is job)
      self._since += time.perf_counter() - began

  def text_of(self, completion: Completion, stop_ids: Sequence[int]) -> str:
    return answer_text(self._tokenizer, completion.tokens, stop_ids)

  def _between(self) -> bool:
    """Sampling while something else is waited for. Whether there was work."""
    return self._samples_between and self._go_on()

  def _go_on(self) -> bool:
    """One sampler a chunk further, with whatever it is at. Whether there was work."""
    lanes = self._lanes if not self._has_teacher else [*self._lanes, *self._judges]
    return advance_one(lanes)

  def _finish(self, job: Job, doing: str, *, may_stop: bool) -> None:
    """Samples until all of this round has ended; what was submitted before it, first.

    Raises:
      Stopped: on all processes.
    """
    if job.sampled is not None:
      return
    total = sum(len(job.shares[lane.place].requests) for lane in self._judges)
    while not (job.done or (may_stop and self._is_stopping())):
      self._go_on()
      self.progress(f'{doing} {min(job.ended, total)}/{total} answers')
    everything = self._exchange(job)
    if job.bundle != EVALUATION:
      busy, slot_steps = self._slot_steps.get(job.bundle, [0, 0])
      both = [busy + everything.busy, slot_steps + everything.slot_steps]
      self._slot_steps[job.bundle] = both
      seconds = self._generated.get(job.bundle, 0.0) + everything.seconds
      self._generated[job.bundle] = seconds
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
      lags = self._lags(groups, keep)
      metrics |= ledger.lags(dict(enumerate(np.bincount(lags).tolist())))
      if self._has_teacher:
        # References carry log-probs of 0, so the gap to them is the likelihood.
        metrics['nll'] = metrics['mismatch/logp_abs_mean']
      if self._has_teacher or not (lags == 0).any():
        # No answer of the current weights, so no gap between sampler and learner.
        gap = 'mismatch/logp_abs_'
        metrics = {k: v for k, v in metrics.items() if not k.startswith(gap)}
    self.step += 1
    if self._lag:  # samplers go on while the device learns
      while not _is_ready(self._learner.state) and self._between():
        pass
    # Waiting here keeps times honest.
    jax.block_until_ready(self._learner.state)
    learned_at = time.perf_counter()
    self._publish()
    self._told.append(Span('learner', 'learn', self.step - 1, began, learned_at))
    return metrics | self._times(began, learned_at)

  def _lags(self, groups: Sequence[Group], keep: Sequence[np.ndarray]) -> np.ndarray:
    """Versions between sampling and learning, of each token trained on."""
    return np.concatenate(
      [
        self.step - c.versions
        for g, k in zip(groups, keep, strict=True)
        for c, kept in zip(g.completions, k, strict=True)
        if kept
      ]
    )

  def _times(self, began: float, learned_at: float) -> dict[str, float]:
    """Where the time since the last update went, and what else is of the step."""
    since, now = self._since, time.perf_counter()
    self._since = now
    sampling = np.mean(
      [busy_within([*lane.spans, *lane.running()], since, now) for lane in self._lanes]
    )
    for lane in {*self._lanes, *self._judges}:
      self._told += [span for span in lane.spans if span.end <= now]
      lane.forget(now)
    bundle = self.step - 1
    busy, slot_steps = self._slot_steps.pop(bundle, [0, 0])
    return {
      'time/generate_s': self._generated.pop(bundle, 0.0),
      'time/reward_s': self._marking.take_seconds(),
      'time/learn_s': learned_at - began,
      'time/load_s': now - learned_at,
      'time/idle_s/sampler': now - since - float(sampling),
      'time/idle_s/learner': now - since - (learned_at - began),
      'rollout/idle_slots': 1 - busy / slot_steps if slot_steps else 0.0,
      'compile/count': self._compiled.take(),
    }

  def spans(self) -> list[Span]:
    told, self._told = self._told, []
    found = [
      dataclasses.replace(s, begin=s.begin - self._zero, end=s.end - self._zero)
      for s in told
    ]
    return sorted(found, key=lambda span: (span.end, span.lane))

  def _publish(self) -> None:
    """Brings the weights of this step to the samplers, once."""
    needed = [v for lane in self._judges for v in lane.versions()]
    ready = self._handover(self._learner.parameters)
    for sampler in self._samplers:
      sampler.forget(min([*needed, self.step]))
      sampler.put(ready, self.step)
    for sampler in self._samplers:
      sampler.wait()

  def close(self) -> None:
    try:
      self._checkpoints.close()
    finally:
      self._marking.close()


def _is_ready(tree: Any) -> bool:
  return all(leaf.is_ready() for leaf in jax.tree.leaves(tree))
