"""How a batch fills: whose useful groups it takes, and what it still lacks.

Each of these is offered useful groups in draw order, the carried ones first. `accepted`
are in, `left` are not. A `copy` may be offered more, to see what would be.
"""

from collections import deque
from collections.abc import Mapping, Sequence
import copy
import math

from jaxrl_sched.control.quotas import roll, split
from jaxrl_sched.control.sagc import Budget
from jaxrl_sched.types import Group


class Chosen:
  """A batch of the open pool, whose closing has chosen its groups.

  Args:
    missing: groups that nobody gave. borrowed: those that other streams gave.
  """

  def __init__(
    self, accepted: Sequence[Group] = (), *, missing: int = 0, borrowed: int = 0
  ):
    self.accepted, self.left = list(accepted), []
    self.missing, self.borrowed = missing, borrowed

  def lacking(self) -> dict[str, int]:
    return {'': self.missing + self.borrowed}

  def settle(self, *, last: bool) -> None:
    pass


class Quotas:
  """So many groups of each stream, and none from another in its place.

  With `borrow` a stream that has more than its quota fills up, at the end, what others
  could not give.
  """

  def __init__(self, quotas: Mapping[str, int], *, borrow: bool = False):
    self._quotas, self._borrow = dict(quotas), borrow
    self._accepted: dict[str, list[Group]] = {name: [] for name in quotas}
    self.left: list[Group] = []
    self._borrowed: list[Group] = []

  @property
  def accepted(self) -> list[Group]:
    own = [group for groups in self._accepted.values() for group in groups]
    return own + self._borrowed

  @property
  def borrowed(self) -> int:
    return len(self._borrowed)

  def copy(self) -> 'Quotas':
    other = Quotas(self._quotas, borrow=self._borrow)
    other._accepted = {name: list(groups) for name, groups in self._accepted.items()}
    return other

  def lacking(self) -> dict[str, int]:
    """Stream -> groups that are wanted of it."""
    return {n: quota - len(self._accepted[n]) for n, quota in self._quotas.items()}

  def offer(self, stream: str, group: Group) -> None:
    if len(self._accepted[stream]) < self._quotas[stream]:
      self._accepted[stream].append(group)
    else:
      self.left.append(group)

  def settle(self, *, last: bool) -> None:
    """A round is over; `last`: it was the last one. Call it once with `last`."""
    if last and self._borrow:
      short = sum(self.lacking().values()) - len(self._borrowed)
      self._borrowed += self.left[:short]
      self.left = self.left[short:]


class Pot:
  """So many groups, whoever gives them: weights hold before filtering only.

  What `Quotas` is for is seen against it: easy streams are starved by filtering.
  """

  def __init__(self, groups: int, weights: Mapping[str, float]):
    self._groups, self.weights = groups, dict(weights)
    self.accepted: list[Group] = []
    self.left: list[Group] = []

  def copy(self) -> 'Pot':
    other = Pot(self._groups, self.weights)
    other.accepted = list(self.accepted)
    return other

  def lacking(self) -> dict[str, int]:
    return split(self._groups - len(self.accepted), self.weights)

  def offer(self, stream: str, group: Group) -> None:
    del stream
    (self.accepted if len(self.accepted) < self._groups else self.left).append(group)

  def settle(self, *, last: bool) -> None:
    pass


class Turns:
  """Whatever comes, of streams that take turns.

  Whose turn it is hangs on `counts`, groups of each stream so far, also in earlier
  steps: the number of groups in a batch is not known beforehand.
  """

  def __init__(self, counts: Mapping[str, int], weights: Mapping[str, float]):
    self.counts, self._weights = dict(counts), dict(weights)
    self.accepted: list[Group] = []

  @property
  def left(self) -> list[Group]:
    return []

  def turns(self, n: int) -> list[str]:
    """Whose turns the next n are, if all give."""
    names, counts = list(self.counts), list(self.counts.values())
    weights, everyone = [self._weights[name] for name in names], [True] * len(names)
    order = []
    for _ in range(n):
      i = roll(counts, weights, everyone)
      counts[i] += 1
      order.append(names[i])
    return order

  def lacking(self) -> dict[str, int]:
    return dict.fromkeys(self.counts, 0)

  def offer(self, stream: str, group: Group) -> None:
    del stream  # it was counted when its turn was planned
    self.accepted.append(group)

  def settle(self, *, last: bool) -> None:
    pass


class Rolling(Turns):
  """So many rollouts in useful groups of several sizes, streams taking turns.

  A stream that has nothing to give keeps its turn until the last round; then others
  take it, and it is owed nothing: one that gives no more would have all turns in time.

  Args:
    sizes: of the groups that may still come; a group goes in where these can fill
      what it leaves.
    size: a usual one, by which the number of groups to come is reckoned.
  """

  def __init__(
    self,
    counts: Mapping[str, int],
    weights: Mapping[str, float],
    rollouts: int,
    sizes: list[int],
    size: int,
  ):
    super().__init__(counts, weights)
    self._budget, self._size = Budget(rollouts, sizes), size
    self._waiting: dict[str, deque[Group]] = {name: deque() for name in counts}
    self._surplus: list[Group] = []

  @property
  def left(self) -> list[Group]:
    waiting = [group for groups in self._waiting.values() for group in groups]
    return sorted(self._surplus + waiting, key=lambda group: group.request.draw)

  def copy(self) -> 'Rolling':
    other = copy.copy(self)
    other.counts, other._budget = dict(self.counts), copy.copy(self._budget)
    other._waiting = {name: deque(groups) for name, groups in self._waiting.items()}
    other.accepted, other._surplus = list(self.accepted), list(self._surplus)
    return other

  @property
  def rest(self) -> int:
    """Rollouts that are missing."""
    return self._budget.rest

  def lacking(self) -> dict[str, int]:
    order = self.turns(math.ceil(self.rest / self._size))
    return {
      name: max(0, order.count(name) - len(waiting))
      for name, waiting in self._waiting.items()
    }

  def offer(self, stream: str, group: Group) -> None:
    self._waiting[stream].append(group)

  def settle(self, *, last: bool) -> None:
    names = list(self.counts)
    weights = [self._weights[name] for name in names]
    while self.rest:
      counts = [self.counts[name] for name in names]
      turn = giver = roll(counts, weights, [True] * len(names))
      if last:
        giver = roll(counts, weights, [bool(self._waiting[name]) for name in names])
      if giver is None or not self._waiting[names[giver]]:
        break
      group = self._waiting[names[giver]].popleft()
      if not self._budget.fits(group.request.size):
        self._surplus.append(group)
        continue
      self._budget.take(group.request.size)
      self.counts[names[turn]] += 1
      self.accepted.append(group)
    if last:
      for name in self.turns(math.ceil(self.rest / self._size)):
        self.counts[name] += 1
