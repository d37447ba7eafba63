"""ASP: which engine samples what, in which order, and how far sampling runs ahead.

After 'Adaptive Scheduling Pipeline' (NeurIPS 2026, OpenReview oskhumpV2y).
Pure rules on predicted lengths: nothing here knows who is free, so that the schedule is
the same in every run.
"""

from collections.abc import Sequence
import dataclasses
import heapq
import math
from typing import Any

import numpy as np

from jaxrl_sched.control.timeline import makespan as makespan
from jaxrl_sched.control.timeline import refill_ends as refill_ends
from jaxrl_sched.control.timeline import version_for as version_for
from jaxrl_sched.types import Relief, Share

ORDERS = ('shuffled', 'ascending', 'johnson', 'levelled', 'auto')
WORTHWHILE = 0.98  # of the time of `shuffled`, for `auto` to take another order
# Far beyond what can be meant; memory and time grow with them.
_MOST = {'lag': 10**6, 'window': 65536, 'engines': 65536, 'spare': 65536}
_PURPOSE = 3606  # of our random numbers, apart from those of others with our seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asp:
  """The settings.

  Args:
    lag: steps that sampling runs ahead of training: bundle j is sampled with the
      weights of version max(0, j - lag), exactly.
    window: bundles planned together, each of prompts alike in predicted length.
    order: of the bundles of a window, one of `ORDERS`; see `order_bundles`.
    engines: that sample; each gets a share of every bundle.
    refill: a slot that gets free takes the next answer. False: static minibatches.
    spare: answers sampled beyond G; G are kept.
    first_finished: keep the shortest ones instead of the first in answer order, which
      makes what is trained on shorter than what was asked.
    pause_after: tokens after which an answer waits for the next bundle. 0: never.
    train_cost: decode steps in whose time one token is learned from.
  """

  lag: int = 0
  window: int = 1
  order: str = 'shuffled'
  engines: int = 1
  refill: bool = True
  spare: int = 0
  first_finished: bool = False
  pause_after: int = 0
  train_cost: float | None = None

  def __post_init__(self):
    self.check()

  def check(self) -> None:
    """Refuses, in one line, a value that cannot be meant.

    Raises:
      ValueError: naming the key, the value and what was expected.
    """
    least = {'lag': 0, 'window': 1, 'engines': 1, 'spare': 0, 'pause_after': 0}
    own = vars(self)
    for name, low in least.items():
      value, high = own[name], _MOST.get(name, math.inf)
      good = _is_whole(value) and low <= value <= high
      most = f', at most {high}' if name in _MOST else ''
      _need(good, name, value, f'a whole number of at least {low}{most}')
    for name in ('refill', 'first_finished'):
      _need(isinstance(own[name], bool), name, own[name], 'True or False')
    _need(self.order in ORDERS, 'order', self.order, f'one of {", ".join(ORDERS)}')
    alone = self.order == 'shuffled' or self.window > 1
    _need(
      alone, 'order', self.order, "'shuffled' with window=1: one bundle has no order"
    )
    good = self.spare > 0 or not self.first_finished
    _need(good, 'first_finished', self.first_finished, 'False without spare answers')
    together = 'refill=False: a request may be on several engines'
    _need(self.refill or not self.spare, 'spare', self.spare, f'0 with {together}')
    good = not (self.spare and self.pause_after)
    _need(good, 'spare', self.spare, '0 with pause_after: one relief at a time')
    cost = self.train_cost
    if cost is None:
      needed = self.order in ('johnson', 'auto')
      _need(
        not needed, 'train_cost', cost, f'a number above 0 with order={self.order!r}'
      )
    else:
      good = isinstance(cost, int | float) and not isinstance(cost, bool)
      good = good and 0 < cost < math.inf
      _need(good, 'train_cost', cost, 'a number above 0, or None')

  @property
  def relief(self) -> Relief:
    return Relief(
      spare=self.spare,
      first_finished=self.first_finished,
      pause_after=self.pause_after,
    )


def _is_whole(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _need(good: bool, key: str, value: Any, expected: str) -> None:
  if not good:
    raise ValueError(f'asp.{key}: {value!r}, expected {expected}')


# --- inside a bundle -------------------------------------------------------------------


def sort_and_cut(lengths: Sequence[float] | np.ndarray, size: int) -> list[list[int]]:
  """Minibatches of `size` answers alike in length, the longest first.

  No other partition into as many minibatches of at most `size` has a smaller sum of
  maxima. The last may be smaller.
  """
  _check_count('size', size)
  order = _descending(lengths).tolist()
  return [order[i : i + size] for i in range(0, len(order), size)]


def longest_first(costs: Sequence[float] | np.ndarray, engines: int) -> list[list[int]]:
  """Costs descending, each to the engine with the least so far (LPT).

  Returns:
    The indices of each engine, in the order in which they were given out.
  """
  _check_count('engines', engines)
  given = [[] for _ in range(engines)]
  loads = [(0.0, e) for e in range(engines)]  # a heap: equal loads go to the lower e
  costs = np.asarray(costs, np.float64)
  order = _descending(costs)
  for i, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
    load, e = loads[0]
    given[e].append(i)
    heapq.heapreplace(loads, (load + cost, e))
  return given


def shares(
  sizes: Sequence[int] | np.ndarray,
  means: Sequence[float] | np.ndarray,
  highs: Sequence[float] | np.ndarray,
  engines: int,
  *,
  minibatch: int | None = None,
) -> tuple[Share, ...]:
  """Spreads the answers of a round over engines.

  Args:
    sizes: [n] answers that each request is to be sampled, spare ones too.
    means: [n] predicted tokens of one answer.
    highs: [n] what the longest answer of each is predicted to stay under.
    engines: one share is made for each, even if it is empty.
    minibatch: answers that are sampled together, to the end of the longest; a request
      may then be on several engines. None: a slot that gets free takes the next
      answer, and a request stays on one engine, where its prompt is read once.
  """
  sizes, highs = np.asarray(sizes, np.int64), np.asarray(highs, np.float64)
  means = np.asarray(means, np.float64)
  if not sizes.shape == means.shape == highs.shape or (sizes < 1).any():
    raise ValueError(
      f'sizes, means, highs: {list(sizes.shape)}, {list(means.shape)}, '
      f'{list(highs.shape)}, expected of equal length, and sizes of at least 1'
    )
  if minibatch is None:
    spread = longest_first(sizes * means, engines)
    return tuple(
      _share(here[_descending(highs[here])], sizes)
      for here in (np.sort(np.array(given, np.int64)) for given in spread)
    )
  _check_count('minibatch', minibatch)
  whole = _share(_descending(highs), sizes)
  begins = np.arange(0, len(whole.requests), minibatch)
  spread = longest_first(highs[whole.requests[begins]], engines)
  return tuple(_minibatches(whole, begins[given], minibatch) for given in spread)


def predicted_generation(
  share: Share,
  means: Sequence[float] | np.ndarray,
  highs: Sequence[float] | np.ndarray,
  slots: int,
) -> float:
  """Decode steps until the last answer of a share has ended, as predicted.

  With refill every answer counts with its request's mean; a static minibatch with the
  highest `high` in it, since it lasts as long as its longest.
  """
  if not len(share.requests):
    return 0.0
  if share.cuts is None:
    predicted = np.asarray(means, np.float64)[share.requests]
    return float(refill_ends(predicted, slots).max())
  predicted = np.asarray(highs, np.float64)[share.requests]
  return float(np.maximum.reduceat(predicted, share.cuts).sum())


def _share(requests: np.ndarray, sizes: np.ndarray) -> Share:
  """All answers of these requests, one request after another."""
  counts = sizes[requests]
  first = np.repeat(np.cumsum(counts) - counts, counts)
  return Share(
    requests=np.repeat(requests, counts).astype(np.int32),
    answers=(np.arange(len(first)) - first).astype(np.int32),
  )


def _minibatches(whole: Share, begins: np.ndarray, size: int) -> Share:
  """Those that begin at these places of the whole, one after another."""
  counts = np.minimum(size, len(whole.requests) - begins)
  cuts = np.cumsum(counts) - counts
  places = np.arange(counts.sum()) + np.repeat(begins - cuts, counts)
  return Share(
    requests=whole.requests[places],
    answers=whole.answers[places],
    cuts=cuts.astype(np.int32),
  )


# --- the order of bundles --------------------------------------------------------------


def windows(
  highs: Sequence[float] | np.ndarray, sizes: Sequence[int]
) -> list[np.ndarray]:
  """One dataset's candidates of a window, cut into bundles alike in length.

  Args:
    highs: [n] predicted longest, in draw order.
    sizes: of the blocks, n in all.

  Returns:
    The indices of each block, the shortest block first; inside a block in draw order,
    as in a bundle that was planned alone.
  """
  highs = np.asarray(highs, np.float64)
  if not len(sizes) or min(sizes) < 0 or sum(sizes) != len(highs):
    raise ValueError(f'sizes: {list(sizes)}, expected a sum of {len(highs)} prompts')
  order = np.argsort(highs, kind='stable')
  return [np.sort(block) for block in np.split(order, np.cumsum(sizes)[:-1])]


def levelled(durations: Sequence[float] | np.ndarray) -> list[int]:
  """An order none of whose prefixes is far from the mean.

  No prefix's sum of (d - mean d) is beyond max |d - mean d|: a queue that is fed in
  this order swings by at most one bundle.
  """
  durations = np.asarray(durations)
  rising = np.argsort(durations, kind='stable').tolist()
  falling = _descending(durations).tolist()
  # In units of 1 / n: whole numbers stay exact, and ties are ties.
  ahead = (durations * len(durations) - durations.sum()).tolist()
  placed, order, sum_ahead = [False] * len(ahead), [], 0
  sources = {True: iter(rising), False: iter(falling)}
  while len(order) < len(ahead):
    i = next(i for i in sources[sum_ahead >= 0] if not placed[i])
    placed[i] = True
    order.append(i)
    sum_ahead += ahead[i]
  return order


def johnson(
  generate: Sequence[float] | np.ndarray, train: Sequence[float] | np.ndarray
) -> list[int]:
  """The order that ends first where nothing bounds how far sampling runs ahead.

  Johnson's rule for two machines in a row: what is generated faster than trained on
  in ascending generation time, then the rest in descending train time.
  """
  generate, train = np.asarray(generate), np.asarray(train)
  first = generate < train
  early, late = np.flatnonzero(first), np.flatnonzero(~first)
  early = early[np.argsort(generate[early], kind='stable')]
  return [*early.tolist(), *late[_descending(train[late])].tolist()]


def order_bundles(
  how: str,
  gen: np.ndarray,  # [W] or [W, E] predicted generation time of each engine's share
  train: np.ndarray | None = None,  # [W] predicted, in the same unit
  *,
  lag: int,
  seed: int,
  first: int,
) -> list[int]:
  """The order of the bundles of a window, of which the first is bundle `first`.

  `shuffled` keeps length from becoming a curriculum. `auto` takes the order that ends
  first by `makespan`, where that saves 2 % against `shuffled`.
  """
  gen = np.asarray(gen, np.float64)
  gen = gen[:, None] if gen.ndim == 1 else gen
  _need(how in ORDERS, 'order', how, f'one of {", ".join(ORDERS)}')
  if how in ('johnson', 'auto') and train is None:
    raise ValueError(f'train: None, expected predicted times with order={how!r}')
  durations = gen.max(axis=1)
  shuffled = np.random.default_rng((seed, _PURPOSE, first)).permutation(len(gen))
  rules = {
    'shuffled': lambda: shuffled.tolist(),
    'ascending': lambda: np.argsort(durations, kind='stable').tolist(),
    'johnson': lambda: johnson(durations, train),
    'levelled': lambda: levelled(durations),
  }
  if how != 'auto':
    return rules[how]()
  train = np.asarray(train, np.float64)
  orders = [rule() for rule in rules.values()]  # `shuffled` first
  ends = [makespan(gen[order], train[order], lag) for order in orders]
  best = int(np.argmin(ends))
  return orders[best if ends[best] <= WORTHWHILE * ends[0] else 0]


def _descending(values: Sequence[float] | np.ndarray) -> np.ndarray:
  """Indices, ties to the lower one."""
  return np.argsort(-np.asarray(values, np.float64), kind='stable')


def _check_count(name: str, value: int) -> None:
  if value < 1:
    raise ValueError(f'{name}: {value}, expected at least 1')
