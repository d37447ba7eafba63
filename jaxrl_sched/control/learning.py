"""From a step's batch to a lesson, and from all that it generated to the controllers."""

from collections.abc import Callable
import dataclasses

import numpy as np

from jaxrl_sched.control import ledger
from jaxrl_sched.control.filling import Chosen, Pot, Quotas, Turns
from jaxrl_sched.control.lengths import LengthPredictor
from jaxrl_sched.control.opening import Terms
from jaxrl_sched.control.sagc import SAGC
from jaxrl_sched.host.pruning import AnswerPruner, PromptPruner, answer_metrics
from jaxrl_sched.types import Group, Lesson


@dataclasses.dataclass
class OpenBatch:
  """A bundle from its plan to the step that trains on it."""

  bundle: int
  version: int  # of the weights it is sampled with
  terms: Terms
  filling: Quotas | Pot | Turns | Chosen
  allowed: dict[str, int]  # stream -> requests that there may still be
  round: int = 0
  asked: int = 0  # requests in the first round
  is_awaited: bool = False  # a round is on its way
  has_begun: bool = False  # groups of earlier bundles have been offered
  waiting: list[Group] | None = None  # all of it, where a checkpoint has drained it
  visited: int = 0  # prompts, and how many of them were pruned
  pruned: int = 0
  seen: list[Group] = dataclasses.field(default_factory=list)  # in draw order
  places: list[tuple[str, int]] = dataclasses.field(default_factory=list)  # of `seen`
  useful: list[bool] = dataclasses.field(default_factory=list)  # of `seen`
  rates: list[float] = dataclasses.field(default_factory=list)  # of `seen`: passed
  paused: list[Group] = dataclasses.field(default_factory=list)  # go on later
  going_on: list[Group] = dataclasses.field(default_factory=list)  # as they were
  settled: list[ledger.Entry] = dataclasses.field(default_factory=list)
  lesson: Lesson | None = None  # once it is full

  def settle(self, *, carries: bool, overlong_filter: bool) -> list[Group]:
    """It has been learned from, which settles what becomes of its groups.

    Args:
      carries: useful groups that it did not take go into the next batch, once.
      overlong_filter: truncated answers were not trained on.

    Returns:
      Those that are carried.
    """
    for group, keep in zip(self.lesson.groups, self.lesson.keep, strict=True):
      used = ~group.truncated if overlong_filter else np.ones(group.size, bool)
      self.settled.append(ledger.taken(group, keep, used))
    new, carried = {group.request.draw for group in self.seen}, []
    for group in self.filling.left:
      is_new = group.request.draw in new
      if carries and is_new:
        carried.append(group)
      else:
        reason = 'surplus' if is_new else 'stale'
        self.settled.append(ledger.Entry(group, 'dropped', reason))
    return carried


class Learning:
  """What is made of the groups of a step. The arguments are those of `Scheduler`."""

  def __init__(
    self,
    *,
    dynamic_sampling: bool,
    sagc: SAGC | None,
    lengths: LengthPredictor | None,
    prompt_pruner: PromptPruner | None,
    answer_pruner: AnswerPruner | None,
    advantages_of: Callable[[np.ndarray], np.ndarray],
    leave_one_out: bool,
  ):
    self._dynamic = dynamic_sampling
    self._sagc, self._lengths = sagc, lengths
    self._pruner, self._answer_pruner = prompt_pruner, answer_pruner
    self._advantages_of, self._leave_one_out = advantages_of, leave_one_out
    self.kept = 1.0  # share of sampled tokens that is trained on, forgetting slowly

  def lesson(self, batch: OpenBatch, step: int) -> Lesson:
    """The groups that were accepted, and how much of each is trained on."""
    groups = batch.filling.accepted
    advantages = [self._advantages(group) for group in groups]
    keep = [np.full(group.size, group.request.weight) for group in groups]
    if self._answer_pruner is not None:
      keep = [
        w * self._answer_pruner.weights(g.request.draw, a, g.lengths, step)
        for w, g, a in zip(keep, groups, advantages, strict=True)
      ]
    count = len(groups)
    if self._pruner is not None and not self._pruner.fills:
      count += batch.pruned
    return Lesson(groups=groups, advantages=advantages, keep=keep, count=count)

  def _advantages(self, group: Group) -> np.ndarray:  # [G] float32
    advantages = self._advantages_of(group.rewards)
    if self._leave_one_out and group.size > 1:
      advantages = advantages * np.float32(group.size / (group.size - 1))
    return advantages

  def learn(self, batch: OpenBatch, step: int) -> None:
    """What the controllers make of all groups that the step generated."""
    seen, lengths = batch.seen, [group.lengths for group in batch.seen]
    if sampled := sum(int(n.sum()) for n in lengths):
      groups, keep = batch.lesson.groups, batch.lesson.keep
      trained = sum(int(g.lengths @ (k > 0)) for g, k in zip(groups, keep, strict=True))
      self.kept = 0.9 * self.kept + 0.1 * min(1.0, trained / sampled)
    if self._sagc is not None and self._sagc.prompt_aware:
      chances = [group.request.exceedance for group in seen]
      self._sagc.observe_groups(lengths, chances, step)
    elif self._sagc is not None:
      sizes = {group.request.size for group in seen} or {batch.terms.size}
      for size in sorted(
        sizes
      ):  # groups in the pool keep the size they were asked with
        some = [i for i, group in enumerate(seen) if group.request.size == size]
        passed = [seen[i].passed for i in some] if self._sagc.needs_passed else None
        self._sagc.observe([lengths[i] for i in some], size, step, passed=passed)
    if self._lengths is not None:
      some = [i for i, group in enumerate(seen) if group.size]
      prompts = [seen[i].request.prompt for i in some]
      self._lengths.observe(
        [(prompt.dataset, prompt.index) for prompt in prompts],
        [lengths[i] for i in some],
        prompt_lengths=np.array([len(prompt.tokens) for prompt in prompts]),
        pass_rates=np.array([batch.rates[i] for i in some]),
      )
    if self._pruner is not None:
      self._score(batch)

  def _score(self, batch: OpenBatch) -> None:
    """Tells the pruner what each prompt had to teach; a filtered group had nothing."""
    lesson = batch.lesson
    known = {
      group.request.draw: advantages
      for group, advantages in zip(lesson.groups, lesson.advantages, strict=True)
    }
    nothing = {size: np.zeros(size) for size in {group.size for group in batch.seen}}
    found: dict[str, list[tuple[int, np.ndarray, float]]] = {}
    for (stream, place), group, useful, rate in zip(
      batch.places, batch.seen, batch.useful, batch.rates, strict=True
    ):
      if group.size < 2:
        continue
      advantages = nothing[group.size]
      if useful or not self._dynamic:
        advantages = known.get(group.request.draw)
        if advantages is None:  # useful, and not in the batch
          advantages = self._advantages(group)
      if self._leave_one_out:  # scores of all sizes are to be alike
        advantages = advantages * ((group.size - 1) / group.size)
      found.setdefault(stream, []).append((place, advantages, rate))
    for stream, records in found.items():
      places, advantages, rates = zip(*records, strict=True)
      self._pruner.observe_many(stream, places, advantages, pass_rates=rates)

  def metrics(self, batch: OpenBatch) -> dict[str, float]:
    """Of the controllers, after `learn`."""
    metrics = {}
    if self._pruner is not None:
      metrics |= self._pruner.metrics(batch.bundle)
      if batch.visited:
        metrics['dppo/prompts_kept'] = 1 - batch.pruned / batch.visited
    if self._pruner is not None or self._answer_pruner is not None:
      entries = [entry for entry in batch.settled if entry.keep is not None]
      metrics |= answer_metrics([entry.keep * entry.used for entry in entries])
    if self._sagc is not None:
      metrics |= self._sagc.metrics() | self._by_size(batch)
    if self._lengths is not None:
      metrics |= self._lengths.metrics()
    return metrics

  def _by_size(self, batch: OpenBatch) -> dict[str, float]:
    """Mean |advantage| of trained groups, and the share of useful ones, by size."""
    metrics, lesson = {}, batch.lesson
    for size in self._sagc.sizes:
      useful = [
        good
        for group, good in zip(batch.seen, batch.useful, strict=True)
        if group.request.size == size
      ]
      if useful:
        metrics[f'sagc/useful/{size}'] = float(np.mean(useful))
      advantages = [
        a
        for g, a in zip(lesson.groups, lesson.advantages, strict=True)
        if g.request.size == size
      ]
      if advantages:
        mean = float(np.abs(np.concatenate(advantages)).mean())
        metrics[f'sagc/advantage_abs/{size}'] = mean
    return metrics
