"""The sampler, the grader, the learner and the checkpoints as one Engine."""

from collections.abc import Callable, Sequence
import dataclasses
import time
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_sched.control import ledger
from jaxrl_sched.control.base import digest
from jaxrl_sched.control.planning import Plan
from jaxrl_sched.device import multihost
from jaxrl_sched.device.checkpoint import Checkpoints
from jaxrl_sched.device.handover import Handover
from jaxrl_sched.device.lanes import busy_within
from jaxrl_sched.device.learner import Learner
from jaxrl_sched.device.marking import Marking
from jaxrl_sched.device.open_pool import OpenPool
from jaxrl_sched.device.references import References
from jaxrl_sched.device.rounds import Rounds
from jaxrl_sched.device.sampler import Sampler
from jaxrl_sched.device.tokenizers import answer_text
from jaxrl_sched.engine import InFlight, Report, Span
from jaxrl_sched.host import packing
from jaxrl_sched.host.advantages import nothing_to_learn
from jaxrl_sched.host.grading import GradingPool
from jaxrl_sched.host.rewards import overlong_penalty
from jaxrl_sched.types import Completion, Group, Lesson, Request, Sampling


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
    self._handover = handover
    self._tokenizer, self._checkpoints = tokenizer, checkpoints
    self._marking = Marking(grader, self.text_of)
    self._max_new_tokens, self._window, self._lag = max_new_tokens, window, lag
    self._share_prompt, self._longest_part = share_prompt, longest_part
    self._overlong = overlong
    self._rounds = Rounds(
      self._samplers,
      self._marking,
      teacher=teacher,
      is_global=is_global,
      stopping=stopping,
      progress=lambda text: self.progress(text),
    )
    self._pool = OpenPool(
      self._samplers,
      self._marking,
      is_global=is_global,
      stopping=stopping,
      progress=lambda text: self.progress(text),
    )
    self._filling: tuple[int, float] | None = None  # a fill, and when it began
    self._has_teacher = teacher is not None
    self._compiled = CompileCounter()
    self._since = time.perf_counter()  # when the newest update was done
    self._told: list[Span] = []  # since the last call of `spans`
    self._publish()

  def agree(self, make: Callable[[], Any]) -> Any:
    return self._rounds.agree(make, f'plan {self.step}')

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
    self._rounds.slot_steps = {int(bundle): both for bundle, both in saved.items()}
    self._publish()
    return control | {'pending': pending}

  def save(self, control: dict[str, Any], *, score: float | None) -> None:
    control = dict(control)
    slot_steps = {str(bundle): both for bundle, both in self._rounds.slot_steps.items()}
    pending = control.pop('pending') | {'slot_steps': slot_steps}
    self._checkpoints.save(
      self.step, self._learner.state, control=control, pending=pending, score=score
    )

  def wait(self) -> None:
    """Until the last save is committed. Raises RuntimeError if it failed."""
    self._checkpoints.wait()

  # --- sampling ---

  def submit(self, plan: Plan) -> None:
    self._rounds.submit(plan.step, plan.version, plan.requests, plan.shares)

  def collect(
    self, bundle: int, enough: Callable[[Sequence[Group]], bool]
  ) -> list[Group]:
    return list(map(self._shape, self._rounds.collect(bundle, enough)))

  def collect_rest(self) -> list[Group]:
    return list(map(self._shape, self._rounds.collect_rest()))

  def drain(self, before: int) -> dict[int, list[Group]]:
    found = self._rounds.drain(before)
    return {bundle: list(map(self._shape, groups)) for bundle, groups in found.items()}

  # Of the open pool.

  def begin_fill(self, fill: int, version: int) -> None:
    self._filling = fill, time.perf_counter()
    self._pool.begin_fill(version)

  def feed(self, plan: Plan) -> None:
    self._pool.feed(plan)

  def advance(self, tick: int) -> tuple[list[Report], list[Group]]:
    reports, groups = self._pool.advance(tick)
    return reports, list(map(self._shape, groups))

  def suspend(self) -> Callable[[], InFlight]:
    return self._pool.suspend()

  def resume(self, in_flight: InFlight) -> None:
    self._pool.resume(in_flight)

  def evaluate(self, requests: Sequence[Request]) -> list[Group]:
    began = time.perf_counter()
    try:
      return self._rounds.evaluate(requests, self.step)
    finally:
      self._since += time.perf_counter() - began

  def text_of(self, completion: Completion, sampling: Sampling) -> str:
    how = sampling.stop_ids, sampling.stop_strings
    return answer_text(self._tokenizer, completion.tokens, *how)

  def _shape(self, group: Group) -> Group:
    if self._overlong is None:
      return group
    penalty = overlong_penalty(
      group.lengths, limit=self._max_new_tokens, **self._overlong
    )
    return dataclasses.replace(group, rewards=group.verdicts + penalty)

  def learn(self, lesson: Lesson) -> dict[str, Any]:
    began = time.perf_counter()
    if self._filling is not None:
      self._rounds.book(*self._filling, began, self._pool.slot_steps())
      self._pool.say_if_waiting()
      self._filling = None
    loss, groups, advantages = self._learner.loss, lesson.groups, lesson.advantages
    batches = []
    why = nothing_to_learn(
      lesson, overlong_filter=loss.overlong_filter, has_penalty=loss.kl_coef > 0
    )
    if why is None:
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
    if why is not None:
      metrics['update/why'] = why
    else:
      answers = sum(int(np.count_nonzero(k)) for k in keep)
      self.progress(f'learning from {answers} answers')
      metrics |= self._learner.update(batches, step=self.step)
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
      while not _is_ready(self._learner.state) and self._rounds.between():
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
    lanes = self._rounds.lanes
    sampling = np.mean(
      [busy_within([*lane.spans, *lane.running()], since, now) for lane in lanes]
    )
    for lane in self._rounds.all_lanes():
      self._told += [span for span in lane.spans if span.end <= now]
      lane.forget(now)
    seconds, (busy, slot_steps) = self._rounds.take_numbers(self.step - 1)
    return {
      'time/generate_s': seconds,
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
    oldest = min([*self._rounds.versions(), max(0, self.step - self._lag)])
    for sampler in self._samplers:  # first, so that no more are held than have to be
      sampler.forget(oldest)
    ready = self._handover(self._learner.parameters)
    for sampler in self._samplers:
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
