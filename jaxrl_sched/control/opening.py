"""How a bundle begins: its group size, whose groups it takes, how many it asks for."""

from collections.abc import Mapping
import dataclasses

from jaxrl_sched.control.asp import Asp
from jaxrl_sched.control.filling import Pot, Quotas, Rolling, Turns
from jaxrl_sched.control.quotas import requests_for
from jaxrl_sched.control.sagc import SAGC
from jaxrl_sched.control.source import Source


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
  def by_turns(self) -> bool:
    """Whether streams take turns, and all that is asked for is trained on."""
    return self.groups == 0 and not self.is_rolling


@dataclasses.dataclass
class Yield:
  """How often a stream's groups turn out useful, forgetting slowly."""

  useful: float = 0.0
  generated: float = 0.0

  @property
  def rate(self) -> float:
    return max(0.05, (self.useful + 1) / (self.generated + 2))

  def count(self, useful: int, generated: int) -> None:
    self.useful = 0.9 * self.useful + useful
    self.generated = 0.9 * self.generated + generated


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
    self.yields = {stream: Yield() for stream in source.sizes}
    self.turns = dict.fromkeys(source.sizes, 0)  # groups so far, where sizes differ
    self.turned: dict[str, float] = {}  # the weights they were counted under

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
        counts=self._turns(weights),
        weights=weights,
        sizes=self._sagc.allowed(bundle),
        is_rolling=self._dynamic,
      )
    if self._quotas:
      quotas = self._source.quotas(bundle, groups)
      return Terms(size=size, groups=groups, counts=quotas, weights={}, sizes=[])
    return Terms(size=size, groups=groups, counts={}, weights=weights, sizes=[])

  def _turns(self, weights: Mapping[str, float]) -> dict[str, int]:
    # Weights that have changed make new shares: nobody is owed what was before.
    return dict(self.turns) if weights == self.turned else dict.fromkeys(weights, 0)

  def took(self, terms: Terms, counts: Mapping[str, int]) -> None:
    """Turns that a bundle has taken: `counts` at its end, or when it was planned."""
    turns = self._turns(terms.weights)
    self.turned = dict(terms.weights)
    self.turns = {n: turns[n] + counts[n] - terms.counts[n] for n in turns}

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
    most: Mapping[str, int],
    *,
    is_last: bool,
  ) -> dict[str, int]:
    """Stream -> requests of the next round.

    Args:
      most: requests to a stream in a round.
      is_last: whether this is the last round that there may be.
    """
    lacking = filling.lacking()
    if not self._dynamic:
      return lacking
    confidence = 0.95 if is_last else None
    if not self._quotas:  # all streams are one
      records = self.yields.values()
      every = Yield(sum(y.useful for y in records), sum(y.generated for y in records))
      wanted = requests_for(sum(lacking.values()), every.rate, confidence)
      return filling.split(min(wanted, sum(most.values())))
    wanted = {}
    for stream, missing in lacking.items():
      # Where streams take turns, what one lacks grows while others give small groups.
      at_most = max(most[stream], 10 * missing)
      rate = self.yields[stream].rate
      wanted[stream] = min(requests_for(missing, rate, confidence), at_most)
    return wanted

  def count(self, generated: Mapping[str, int], useful: Mapping[str, int]) -> None:
    """Takes in a bundle's groups by stream."""
    for stream, record in self.yields.items():
      record.count(useful.get(stream, 0), generated.get(stream, 0))


def check_window(asp: Asp, source: Source, sagc: SAGC | None, *, quotas: bool) -> None:
  """Bundles that are planned together have the same terms.

  Raises:
    ValueError: something is on that gives each of its own.
  """
  together = sagc is None or sagc.period % asp.window == 0
  for good, what in (
    (quotas, 'scheduler.quotas'),
    (not source.has_tiers, 'tiers=None'),
    (sagc is None or not sagc.prompt_aware, 'sagc.prompt_aware=False'),
    (together, 'sagc.period a multiple of it'),
    (not asp.pause_after, 'asp.pause_after=0'),
  ):
    if not good:
      raise ValueError(f'asp.window: {asp.window}, expected 1, or {what}')
