"""How a bundle begins: its group size, whose groups it takes, how many it asks for."""

from collections.abc import Iterable, Mapping
import dataclasses
from typing import Any

from jaxrl_sched.control.asp import Asp
from jaxrl_sched.control.filling import Pot, Quotas, Rolling, Turns
from jaxrl_sched.control.quotas import RollingQuotas, requests_for
from jaxrl_sched.control.sagc import SAGC
from jaxrl_sched.control.source import Source

CONFIDENCE = 0.95  # that a round brings what is lacking


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
  """What was settled for a bundle when it was planned. All of it is JSON."""

  size: int  # of groups; of a prompt of average risk, if each has its own
  groups: int  # whose quotas are kept; 0: sizes differ, and streams take turns
  # Stream -> quota; where streams take turns, groups so far; in a pot, nothing.
  counts: dict[str, int]
  weights: dict[str, float]  # of the streams, unless there are quotas
  sizes: list[int]  # those of prompts may have
  is_rolling: bool = False

  @property
  def is_pot(self) -> bool:
    """Whether useful groups are taken from whatever stream they come."""
    return self.groups > 0 and bool(self.weights)

  @property
  def by_turns(self) -> bool:
    """Whether streams take turns, and all that is asked for is trained on."""
    return self.groups == 0 and not self.is_rolling


class Acceptance:
  """How often groups turn out useful, by stream and group size, forgetting slowly.

  A size that a stream has not had of late is judged by what its other sizes gave. If a
  share of its prompts is settled, and the pass rates of the others are anything from 0
  to 1, groups of size G are useful in proportion to the mean of 1 - p^G - (1 - p)^G,
  which is (G - 1) / (G + 1).
  """

  def __init__(self, streams: Iterable[str]):
    # stream -> size -> useful groups, all groups
    self.counts: dict[str, dict[int, list[float]]] = {stream: {} for stream in streams}

  def rate(self, streams: Iterable[str], size: int) -> float:
    """Of groups of this size of these streams, taken together: 0.05 to 1."""
    useful = generated = 0.0
    others_useful = others_generated = (
      0.0  # of other sizes, as if they had been of this
    )
    for stream in streams:
      for other, (u, n) in self.counts[stream].items():
        if other == size:
          useful, generated = useful + u, generated + n
        else:
          others_useful += u * _undecided(size) / _undecided(other)
          others_generated += n
    prior = min(1.0, (others_useful + 1) / (others_generated + 2))
    return max(0.05, (useful + 2 * prior) / (generated + 2))

  def count(
    self,
    generated: Mapping[tuple[str, int], int],
    useful: Mapping[tuple[str, int], int],
  ) -> None:
    """Takes in a bundle's groups by (stream, size)."""
    for sizes in self.counts.values():
      for pair in sizes.values():
        pair[:] = (0.9 * x for x in pair)
    for (stream, size), n in generated.items():
      pair = self.counts[stream].setdefault(size, [0.0, 0.0])
      pair[:] = pair[0] + useful.get((stream, size), 0), pair[1] + n

  def state_dict(self) -> dict[str, Any]:
    return {
      stream: [[size, *pair] for size, pair in sizes.items()]
      for stream, sizes in self.counts.items()
    }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Takes what `saved.check` has passed."""
    self.counts = {
      stream: {size: pair for size, *pair in rows} for stream, rows in state.items()
    }


def _undecided(size: int) -> float:
  """The chance that a group has both right and wrong answers, its pass rate unknown."""
  return (size - 1) / (size + 1)


class Opening:
  """Settles the terms of bundles. The arguments are those of `Scheduler`."""

  def __init__(
    self,
    source: Source,
    *,
    groups_per_step: int,
    group_size: int,
    dynamic_sampling: bool,
    quotas: bool,
    borrow: bool,
    sagc: SAGC | None,
  ):
    self._source, self._sagc = source, sagc
    self._groups, self._group_size = groups_per_step, group_size
    self.rollouts = groups_per_step * group_size
    self._dynamic, self._quotas, self._borrow = dynamic_sampling, quotas, borrow
    self.by_prompt = sagc is not None and sagc.prompt_aware
    self.acceptance = Acceptance(source.sizes)
    # Groups so far where sizes differ, requests where streams share a pot.
    self.turns = RollingQuotas(source.sizes)

  def terms(self, bundle: int) -> Terms:
    size, groups = self._group_size, self._groups
    if self._sagc is not None:
      size = self._sagc.propose(bundle)
      if self._sagc.hold == 'rollouts':
        groups = self.rollouts // size
    weights = self._source.weights(bundle)
    if self.by_prompt:
      return Terms(
        size=size,
        groups=0,
        counts=self.turns.counts(weights),
        weights=weights,
        sizes=self._sagc.allowed(bundle),
        is_rolling=self._dynamic,
      )
    if self._quotas:
      quotas = self._source.quotas(bundle, groups)
      return Terms(size=size, groups=groups, counts=quotas, weights={}, sizes=[])
    return Terms(size=size, groups=groups, counts={}, weights=weights, sizes=[])

  def window(self, bundle: int, count: int) -> list[Terms]:
    """Of so many bundles that are planned together: their quotas follow one another."""
    first = self.terms(bundle)
    after = [i * first.groups for i in range(count)]
    quotas = [self._source.quotas(bundle, first.groups, after=n) for n in after]
    return [dataclasses.replace(first, counts=counts) for counts in quotas]

  def took(self, terms: Terms, counts: Mapping[str, int]) -> None:
    """Turns that a bundle has taken: `counts` at its end, or when it was planned."""
    self.turns.take({n: counts[n] - terms.counts[n] for n in counts}, terms.weights)

  def filling(self, terms: Terms) -> Quotas | Pot | Turns:
    """What takes in the groups of a bundle of these terms."""
    if terms.is_rolling:
      how = (self.rollouts, terms.sizes, terms.size)
      return Rolling(terms.counts, terms.weights, *how)
    if not terms.groups:
      return Turns(terms.counts, terms.weights)
    if terms.weights:
      return Pot(terms.groups, terms.weights)
    return Quotas(terms.counts, borrow=self._borrow)

  def wanted(
    self,
    filling: Quotas | Pot | Turns,
    size: int,
    allowed: Mapping[str, int],
  ) -> dict[str, int]:
    """Stream -> requests of the next round, groups of this size: as many as should
    bring what is lacking in 95 of 100 cases, and no more than are allowed."""
    lacking = filling.lacking()
    if not self._dynamic:
      return lacking
    if not self._quotas:  # all streams are one
      rate = self.acceptance.rate(lacking, size)
      n = requests_for(sum(lacking.values()), rate, CONFIDENCE)
      n = min(n, sum(allowed.values()))
      return self.turns.next(n, filling.weights)
    wanted = {}
    for stream, missing in lacking.items():
      rate = self.acceptance.rate([stream], size)
      wanted[stream] = min(requests_for(missing, rate, CONFIDENCE), allowed[stream])
    return wanted

  def quotas(self, terms: Terms) -> dict[str, int]:
    """Stream -> groups of it in a batch; where sizes differ, if all are small."""
    filling = self.filling(terms)
    if not terms.is_rolling:
      return filling.lacking()
    order = filling.turns(self.rollouts // min(terms.sizes))
    return {stream: order.count(stream) for stream in terms.counts}


def check_window(asp: Asp, source: Source, sagc: SAGC | None, *, quotas: bool) -> None:
  """Bundles that are planned together have the same terms.

  Raises:
    ValueError: something is on that gives each of its own.
  """
  together = sagc is None or sagc.period % asp.window == 0
  for good, what in (
    (quotas, 'scheduler.quotas'),
    (source.tiers is None, 'tiers=None'),
    (sagc is None or not sagc.prompt_aware, 'sagc.prompt_aware=False'),
    (together, 'sagc.period a multiple of it'),
    (not asp.pause_after, 'asp.pause_after=0'),
  ):
    if not good:
      raise ValueError(f'asp.window: {asp.window}, expected 1, or {what}')
