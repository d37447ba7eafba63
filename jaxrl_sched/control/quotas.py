"""How many groups come from each dataset, and how many requests they take."""

from collections.abc import Iterable, Mapping, Sequence
import math
from typing import Any

import numpy as np

from jaxrl_sched.control.base import check_state

_TIE = 1e-9  # what rounding may do to numbers that are equal on paper
_HEAVIEST = 1e12  # a weight


def check_weights(datasets: Mapping[str, int], weights: Mapping[str, float]) -> None:
  """Refuses weights that are not shares of something, one a dataset."""
  if not datasets or datasets.keys() != weights.keys():
    raise ValueError(
      f'dataset weights: of {sorted(weights)}, expected one for each of '
      f'{sorted(datasets)}, and at least one'
    )
  for name, weight in weights.items():
    if not 0 <= weight <= _HEAVIEST:
      raise ValueError(
        f'dataset {name!r}: weight {weight}, expected 0 or more, at most {_HEAVIEST:g}'
      )
  if not sum(weights.values()) > 0:
    raise ValueError('dataset weights: their sum is 0, expected something positive')


def largest_remainder(n: int, weights: Sequence[float]) -> list[int]:
  """n in whole parts proportional to the weights; ties go to the first."""
  total = sum(weights)
  exact = [n * w / total for w in weights]
  parts = [math.floor(x + _TIE) for x in exact]
  # Rounded, so that remainders which are equal on paper are a tie.
  short = [round(part - x, 9) for part, x in zip(parts, exact, strict=True)]
  by_remainder = sorted(range(len(parts)), key=lambda i: (short[i], i))
  for i in by_remainder[: n - sum(parts)]:
    parts[i] += 1
  return parts


def split(n: int, weights: Mapping[str, float]) -> dict[str, int]:
  """`largest_remainder` by name."""
  return dict(zip(weights, largest_remainder(n, list(weights.values())), strict=True))


class RollingQuotas:
  """The streams of the next groups, by weight: what rounding leaves is carried over.

  Tijdeman's rule (The chairman assignment problem, Discrete Mathematics 32, 1980): after
  any number of groups no stream is off its share by more than 1 - 1 / (2 k - 2) of a
  group, where k streams have a weight. Weights that change make new shares: nobody is
  owed what was before.

  Args:
    streams: in the order in which ties are broken.
  """

  def __init__(self, streams: Iterable[str]):
    self._counts = dict.fromkeys(streams, 0)  # groups of each so far
    self._weights: dict[str, float] = {}  # that these were counted under
    self._asked: tuple[Any, dict[str, int]] | None = None  # a cache: plans ask again

  def counts(self, weights: Mapping[str, float]) -> dict[str, int]:
    """Groups that count under these weights."""
    is_new = weights != self._weights
    return dict.fromkeys(self._counts, 0) if is_new else dict(self._counts)

  def next(
    self, n: int, weights: Mapping[str, float], *, after: int = 0
  ) -> dict[str, int]:
    """How many of n groups come from each stream; changes nothing.

    Args:
      after: groups that come before these n, beyond those that were taken.
    """
    asked = n, after, dict(weights)
    if self._asked is None or self._asked[0] != asked:
      self._asked = asked, self._next(n, weights, after)
    return dict(self._asked[1])

  def _next(self, n: int, weights: Mapping[str, float], after: int) -> dict[str, int]:
    counts, found = self.counts(weights), dict.fromkeys(self._counts, 0)
    live = [stream for stream in found if weights[stream] > 0]
    total = sum(weights[stream] for stream in live)
    shares = [(stream, weights[stream] / total) for stream in live]
    least = 1 / max(2 * len(live) - 2, 1)  # owed less than that, none is in a hurry
    done = sum(counts.values())
    for at in range(done + 1, done + after + n + 1) if len(live) > 1 else ():
      soonest = math.inf  # that one would be too far behind
      for stream, share in shares:
        owed = share * at - counts[stream]
        slack = (1 - least - owed) / share
        if owed >= least - _TIE and slack < soonest - _TIE:
          soonest, first = slack, stream
      counts[first] += 1
      found[first] += at > done + after
    return found if len(live) > 1 else found | dict.fromkeys(live, n)

  def take(self, quotas: Mapping[str, int], weights: Mapping[str, float]) -> None:
    """So many groups of each stream are on their way."""
    counts = self.counts(weights)
    self._counts = {stream: n + quotas[stream] for stream, n in counts.items()}
    self._weights, self._asked = dict(weights), None

  def state_dict(self) -> dict[str, Any]:
    return {'counts': dict(self._counts), 'weights': dict(self._weights)}

  def load_state_dict(self, state: dict[str, Any]) -> None:
    check_state('quotas', state, dict.fromkeys(('counts', 'weights')))
    for name, least in (('counts', int), ('weights', float)):
      if name == 'counts' or state[name]:  # no weights: nothing was taken yet
        check_state(f'quotas.{name}', state[name], self._counts)
      for stream, value in state[name].items():
        good = type(value) in (int, least) and 0 <= value < math.inf
        if not good:
          raise ValueError(
            f'state of quotas: {name} of {stream!r} {value!r:.60}, expected '
            f'{"a whole number" if least is int else "a number"} from 0'
          )
    self._counts, self._weights = dict(state['counts']), dict(state['weights'])
    self._asked = None


class Shares:
  """Which stream gives the next group of a batch, so that weights hold over batches.

  Counted in rollouts, so that groups of one size are a special case. Tijdeman's rule (The
  chairman assignment problem, Discrete Mathematics 32, 1980): among streams that are owed
  enough, the one that would first be too far behind. With k streams of positive weight
  and groups of one size none is ever off its share by more than 1 - 1 / (2 k - 2) of a
  group. Other weights make new shares: nobody is owed what was before.

  Args:
    streams: in the order in which ties are broken.
  """

  def __init__(self, streams: Iterable[str]):
    self._taken = dict.fromkeys(streams, 0.0)  # rollouts of each so far
    self._weights: dict[str, float] = {}

  def copy(self) -> 'Shares':
    other = Shares(())
    other._taken, other._weights = dict(self._taken), dict(self._weights)
    return other

  def set_weights(self, weights: Mapping[str, float]) -> None:
    if dict(weights) != self._weights:
      self._weights = dict(weights)
      self._taken = dict.fromkeys(self._taken, 0.0)

  def next(self, sizes: Mapping[str, float]) -> str | None:
    """The stream of the next group, among those in `sizes` (stream -> rollouts of the
    group it would give) with a weight. None: there is none."""
    weights = {s: w for s, w in self._weights.items() if w > 0}
    total, done = sum(weights.values()), sum(self._taken.values())
    least = 1 / max(2 * len(weights) - 2, 1)  # owed less than that, none is in a hurry
    best, soonest = None, (1, math.inf)
    for stream, weight in weights.items():
      if stream not in sizes:
        continue
      size, share = sizes[stream], weight / total
      owed = (share * (done + size) - self._taken[stream]) / size
      slack = (1 - least - owed) / share
      rank = (int(owed < least - _TIE), slack)
      if rank[0] < soonest[0] or (rank[0] == soonest[0] and slack < soonest[1] - _TIE):
        best, soonest = stream, rank
    return best

  def take(self, stream: str, size: float) -> None:
    self._taken[stream] += size

  def taken(self) -> dict[str, float]:
    return dict(self._taken)

  def set_taken(self, taken: Mapping[str, float]) -> None:
    self._taken = dict(taken)

  def state_dict(self) -> dict[str, Any]:
    return {'taken': dict(self._taken), 'weights': dict(self._weights)}

  def load_state_dict(self, state: dict[str, Any]) -> None:
    check_state('shares', state, self.state_dict())
    check_state('shares.taken', state['taken'], self._taken)
    self._taken, self._weights = dict(state['taken']), dict(state['weights'])


def roll(
  counts: Sequence[int],  # [datasets] groups taken so far
  weights: Sequence[float],  # [datasets]
  can_give: Sequence[bool],  # [datasets]
) -> int | None:
  """The dataset of the next group, where the number of groups is not fixed.

  It is the one furthest behind its share of all groups, the next one included, among
  those that can give one and have any weight. None: there is none. Ties go to the
  first.
  """
  total, after = sum(weights), sum(counts) + 1
  behind = {
    i: weight / total * after - count
    for i, (count, weight, can) in enumerate(
      zip(counts, weights, can_give, strict=True)
    )
    if can and weight > 0
  }
  if not behind:
    return None
  most = max(behind.values())
  return next(i for i, value in behind.items() if value >= most - _TIE)


def requests_for(missing: int, rate: float, confidence: float | None) -> int:
  """How many requests give `missing` useful groups if each is useful with `rate`.

  On average (`confidence` None), or with at least that probability: the smallest m
  with P(Binomial(m, rate) >= missing) >= confidence.
  """
  if not 0 < rate <= 1:
    raise ValueError(f'rate: {rate}, expected above 0 and at most 1')
  if missing <= 0:
    return 0
  if confidence is None or rate == 1:
    return math.ceil(missing / rate - _TIE)
  if not 0 < confidence < 1:
    raise ValueError(f'confidence: {confidence}, expected above 0 and below 1')
  # P(at least `missing`) grows by the chance that the m-th request is the one that
  # completes them: C(m-1, missing-1) rate^missing (1-rate)^(m-missing).
  most = 2 * math.ceil(missing / rate) + 64
  while True:
    m = np.arange(missing + 1, most)
    log_ratio = np.log((m - 1) / (m - missing)) + math.log1p(-rate)
    log_p = missing * math.log(rate) + np.concatenate([[0.0], np.cumsum(log_ratio)])
    reached = np.cumsum(np.exp(log_p))
    if reached[-1] >= confidence:
      return missing + int(np.searchsorted(reached, confidence))
    most *= 2
