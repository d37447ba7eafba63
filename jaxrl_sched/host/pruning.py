"""DPPO, unbiased dynamic pruning: what is left out, and the weight of what is kept.

After arXiv 2603.04135, at two levels: prompts before they are answered, answers
before they are trained on. Victims are always drawn at random, and what is kept
weighs the inverse of its *true* chance to be kept. So a sum over what is kept,
divided by the counts of the *full* batch, is on average the sum over everything:
with clipping and KL, since it is linear in the terms of the answers. The weight
multiplies an answer's whole term and enters nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import numpy as np

from jaxrl_sched.host import pruning_rules as rules
from jaxrl_sched.host.pruning_rules import chances, drop, last_step, useful_rate
from jaxrl_sched.host.scores import Scores

# These are names of this module too.
FLOOR, RULES = rules.FLOOR, rules.RULES
check_rate = rules.check_rate
inclusion = rules.inclusion
systematic = rules.systematic

REGIMES = ('fixed_candidates', 'fill')
# Purposes of random numbers: default_rng((seed, purpose, ...)).
ANSWERS, PROMPTS = 41, 42

STATE_VERSION = 1


# --- answers ---------------------------------------------------------------------


def prune_answers(
  advantages: np.ndarray,  # [G], from the full group
  *,
  rate: float,
  rule: str = 'fixed',
  rng: np.random.Generator,
  floor: float = FLOOR,
  cost: np.ndarray | None = None,  # [G] above 0, such as lengths
) -> tuple[np.ndarray, np.ndarray]:
  """Which answers of a group are trained on.

  The low answers are those whose |advantage| is below the group's mean of it.

  | rule       | who may go                                       | chance to stay     |
  |------------|--------------------------------------------------|--------------------|
  | `fixed`    | floor(rate n) of the n low ones, any as likely   | what that leaves   |
  | `coins`    | each low one by itself, with chance `rate`       | 1 - rate           |
  | `balanced` | any; about the sum of the chances stay           | see `inclusion`    |

  `balanced` (ours) has the least variance for its cost and ignores `rate`.

  Returns:
    keep [G] bool, and weight [G] float64: 1 / chance of the kept, 0 of the others.
  """
  pi = inclusion(advantages, rule, rate, floor, cost)
  if rule == 'balanced':
    keep = systematic(pi, rng.permutation(pi.size), rng.random())
  else:
    keep = drop(rules.below_mean(np.abs(advantages)), rate, rule, rng)
  return keep, np.where(keep, 1 / pi, 0.0)


class AnswerPruner:
  """`prune_answers` with the settings of a run, group by group.

  Args:
    rate, rule, floor: see `prune_answers`.
    cost: 'length': answers cost what they are long; None: all the same.
    final, steps: nothing is pruned in this last part of so many steps.
  """

  def __init__(
    self,
    *,
    rate: float,
    rule: str = 'fixed',
    floor: float = FLOOR,
    cost: str | None = None,
    final: float = 0.125,
    steps: int,
    seed: int,
  ):
    if cost not in (None, 'length'):
      raise ValueError(f"cost: {cost!r}, expected 'length' or None")
    lengths = None if cost is None else np.ones(1)
    inclusion(np.ones(1), rule, rate, floor, lengths)  # refuses strange settings
    if not 0 < floor <= 1:  # under any rule: it may be another's next time
      raise ValueError(f'floor: {floor}, expected above 0, at most 1')
    self._rate, self._rule, self._floor, self._cost = rate, rule, floor, cost
    self._seed, self._ends = seed, last_step(final, steps)

  def weights(
    self,
    draw: int,
    advantages: np.ndarray,  # [G], of the full group
    lengths: np.ndarray,  # [G] tokens
    step: int,
  ) -> np.ndarray:  # [G] float64
    """1 / chance of each answer that is kept, 0 of the others."""
    if step >= self._ends:
      return np.ones(len(advantages))
    return prune_answers(
      advantages,
      rate=self._rate,
      rule=self._rule,
      rng=np.random.default_rng((self._seed, ANSWERS, draw)),
      floor=self._floor,
      cost=None if self._cost is None else lengths,
    )[1]


def effective_sample_size(weights: np.ndarray) -> float:
  """(sum w)^2 / (n sum w^2) over the n trained answers: 1 for equal weights."""
  trained = np.asarray(weights, np.float64)
  trained = trained[trained > 0]
  if trained.size == 0:
    raise ValueError('weights: none is above 0, expected at least one')
  return float(trained.sum() ** 2 / (trained.size * np.square(trained).sum()))


def answer_metrics(weights: Sequence[np.ndarray]) -> dict[str, float]:
  """For the log, from the weights [G] of each group (a prompt's times its answers')."""
  if not weights:
    return {}
  weights = np.concatenate(weights)
  found = {'dppo/kept': float((weights > 0).mean())}
  if weights.any():
    found['dppo/ess'] = effective_sample_size(weights)
  return found


# --- prompts ---------------------------------------------------------------------


class PromptPruner:
  """Skips prompts whose groups had little to teach, before they are answered.

  A prompt's score is the mean |advantage| of its last full group. Low are prompts
  seen with a score below the mean of their pool: the seen and awake prompts of their
  dataset.

  | regime             | batch                              | divide by | weight  |
  |--------------------|------------------------------------|-----------|---------|
  | `fixed_candidates` | the kept of B candidates           | B         | 1 / pi  |
  | `fill`             | candidates are drawn until n stay  | n         | C / pi  |

  pi is 1 for prompts that are not low; C is the mean pi of the pool, unseen prompts
  included. What a step selects hangs on results before it alone, so that it is
  unbiased over coins and answers together. It may be asked any number of times.

  Args:
    datasets: how many prompts each has.
    rate: share of the low prompts that is skipped; any below 1 (see `check_rate`).
    draw: 'fixed' or 'coins', of `fixed_candidates`; `fill` always tosses coins.
    final, steps: nothing is pruned in this last part of so many steps; with `steps`
      None there is no such part.
    blend: share of a new score in the exponential average.
    unit: mean |advantage| at a pass rate of 1/2: 1, or 0.5 for those that are only
      centred. It makes scores of both kinds alike.
    dynamic_sampling: only useful groups are trained on, so C is weighted with the
      chance to be useful, from smoothed pass rates. Needs `fill`.

  Attributes:
    ends: the step from which on nothing is pruned.
  """

  def __init__(
    self,
    datasets: Mapping[str, int],
    *,
    rate: float,
    regime: str = 'fixed_candidates',
    draw: str = 'fixed',
    final: float = 0.125,
    steps: int | None = None,
    seed: int = 0,
    blend: float = 1.0,
    unit: float = 1.0,
    dynamic_sampling: bool = False,
  ):
    check_rate('rate', rate, allow_high_rate=True)
    if regime not in REGIMES:
      raise ValueError(f'regime: {regime!r}, expected one of {", ".join(REGIMES)}')
    if draw not in ('fixed', 'coins'):
      raise ValueError(f"draw: {draw!r}, expected 'fixed' or 'coins'")
    if not 0 < blend <= 1:
      raise ValueError(f'blend: {blend}, expected above 0, at most 1')
    if not (unit > 0 and math.isfinite(unit)):
      raise ValueError(f'unit: {unit}, expected above 0')
    if dynamic_sampling and regime != 'fill':
      raise ValueError(
        f"regime: {regime!r} with dynamic sampling, expected 'fill': groups without "
        'spread count in a fixed set of candidates, and must not be replaced'
      )
    for name, count in datasets.items():
      if count < 1:
        raise ValueError(f'dataset {name!r}: {count} prompts, expected at least 1')
    self._rate, self._regime, self._seed = rate, regime, seed
    self._rule = 'coins' if regime == 'fill' else draw
    self._blend, self._unit, self._dynamic = blend, unit, dynamic_sampling
    self.ends = last_step(final, steps)

    self._pools = {
      name: Scores(count, ranked=regime == 'fill', by_use=dynamic_sampling)
      for name, count in datasets.items()
    }

  # --- plan: nothing changes ---

  @property
  def fills(self) -> bool:
    """Whether others are drawn in the place of those skipped."""
    return self._regime == 'fill'

  def select(
    self, dataset: str, candidates: Sequence[int], step: int, *, part: int = 0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Which candidates get answers.

    Calls of one step must differ in `part` (the round) to be independent. Under
    `fill` a candidate's fate does not hang on how many stand behind it.

    Args:
      candidates: [C] int, places in the dataset.

    Returns:
      keep [C] bool, and weight [C] float64, 0 for those skipped.
    """
    low = self._low(dataset, candidates, step)
    keep = drop(low, self._rate, self._rule, self._rng(dataset, step, part))
    return keep, self._weights(dataset, low, keep, step)

  def _low(self, dataset: str, candidates: Sequence[int], step: int) -> np.ndarray:
    """[C] bool; none is low where nothing is pruned any more."""
    pool, candidates = self._pool(dataset), self._places(dataset, candidates)
    return pool.low(candidates) & (step < self.ends)

  def _rng(self, dataset: str, step: int, part: int) -> np.random.Generator:
    self._pool(dataset)  # refuses one that there is not
    place = list(self._pools).index(dataset)
    return np.random.default_rng((self._seed, PROMPTS, place, step, part))

  def _weights(
    self, dataset: str, low: np.ndarray, keep: np.ndarray, step: int
  ) -> np.ndarray:
    weight = 1 / chances(low, self._rate, self._rule)
    if self._regime == 'fill':
      weight *= self.mean_chance(dataset, step)
    return np.where(keep, weight, 0.0)

  def fill(
    self,
    dataset: str,
    peek: Callable[[int], Sequence[int]],
    n: int,
    step: int,
    *,
    part: int = 0,
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Candidates as far as n of them stay, with what `select` says of them.

    Args:
      peek: m -> the next m candidates, always from the same place.

    Returns:
      candidates [C] int, all of which were visited; keep [C] bool; weight [C].
    """
    if self._regime != 'fill':
      raise ValueError(f"regime: {self._regime!r} draws no more, expected 'fill'")
    rng, low, keep = (
      self._rng(dataset, step, part),
      np.zeros(0, bool),
      np.zeros(0, bool),
    )
    count = n
    while True:
      candidates = np.asarray(peek(count), np.int64)
      if candidates.size != count:
        raise ValueError(f'peek: {candidates.size} candidates, expected {count}')
      # Coins come one after another, so that those of the first are tossed already.
      more = self._low(dataset, candidates[low.size :], step)
      low = np.concatenate([low, more])
      keep = np.concatenate([keep, drop(more, self._rate, self._rule, rng)])
      kept = np.count_nonzero(keep)
      if kept >= n:
        end = int(np.searchsorted(np.cumsum(keep), n)) + 1 if n > 0 else 0
        low, keep = low[:end], keep[:end]
        return candidates[:end], keep, self._weights(dataset, low, keep, step)
      # Some more than those missing should take, but not many: to look ahead costs.
      count += math.ceil(1.2 * (n - kept) * count / max(1, kept)) + 4

  def mean_chance(self, dataset: str, step: int) -> float:
    """C of `fill`: the mean pi of the dataset's awake prompts.

    With dynamic sampling C_u, each prompt counting with its chance to be useful.
    """
    if step >= self.ends:
      return 1.0
    return 1 - self._rate * self._pool(dataset).low_share()

  # --- results ---

  def observe(
    self,
    dataset: str,
    index: int,
    advantages: np.ndarray,  # [G]
    *,
    pass_rate: float | None = None,
  ) -> None:
    rates = None if pass_rate is None else [pass_rate]
    self.observe_many(dataset, [index], [advantages], pass_rates=rates)

  def observe_many(
    self,
    dataset: str,
    indices: Sequence[int],
    advantages: Sequence[np.ndarray],  # [G] each, of full groups
    *,
    pass_rates: Sequence[float] | None = None,
  ) -> None:
    """Takes in groups, in draw order.

    Without pass rates the share of positive advantages stands in for them, which is
    the same for rewards of two values.
    """
    pool, indices = self._pool(dataset), self._places(dataset, indices)
    sizes = np.array([len(a) for a in advantages], np.int64)
    if sizes.size != indices.size or (sizes == 0).any():
      raise ValueError(
        f'advantages: groups of {sizes.tolist()} answers for {indices.size} prompts, '
        'expected a group of at least 1 for each'
      )
    if sizes.size == 0:
      return
    flat = np.concatenate(advantages, dtype=np.float64)
    if not np.isfinite(flat).all():
      raise ValueError(f'advantages of {dataset!r}: expected finite numbers')
    starts = np.cumsum(sizes) - sizes
    scores = np.add.reduceat(np.abs(flat), starts) / sizes / self._unit
    if pass_rates is None:
      passed = np.add.reduceat((flat > 0).astype(np.int64), starts)
    else:
      passed = np.asarray(pass_rates, np.float64) * sizes
    useful = useful_rate((passed + 1) / (sizes + 2), sizes)
    pool.observe(indices, scores, useful, self._blend)

  def sleep(self, dataset: str, indices: Sequence[int]) -> None:
    """These leave the pool: they are not drawn for a while."""
    self._pool(dataset).move(self._places(dataset, indices), asleep=True)

  def wake(self, dataset: str, indices: Sequence[int]) -> None:
    self._pool(dataset).move(self._places(dataset, indices), asleep=False)

  def metrics(self, step: int = 0) -> dict[str, float]:
    """As of a step: at the end of a run nothing is pruned."""
    found = {}
    for name, pool in self._pools.items():
      found[f'dppo/seen/{name}'] = float(pool.seen / max(1, pool.awake))
      if pool.seen:
        found[f'dppo/score/{name}'] = pool.mean
      if self._regime == 'fill':
        found[f'dppo/mean_chance/{name}'] = self.mean_chance(name, step)
    return found

  def freeze(self) -> Callable[[], dict[str, Any]]:
    """The state as of now, to be written out later, if at all.

    Costs next to nothing, and holds until the next call or load; a RuntimeError after
    that.
    """
    frozen = {name: pool.freeze() for name, pool in self._pools.items()}
    return lambda: {
      'version': STATE_VERSION,
      'pools': {name: arrays() for name, arrays in frozen.items()},
    }

  def state_dict(self) -> dict[str, Any]:
    pools = {name: pool.state_dict() for name, pool in self._pools.items()}
    return {'version': STATE_VERSION, 'pools': pools}

  def load_state_dict(self, state: dict[str, Any]) -> None:
    if state.keys() != {'version', 'pools'} or state['version'] != STATE_VERSION:
      raise ValueError(
        f'state of pruning: keys {sorted(state)}, version {state.get("version")}, '
        f"expected 'pools' and version {STATE_VERSION}"
      )
    if state['pools'].keys() != self._pools.keys():
      raise ValueError(
        f'state of pruning: datasets {sorted(state["pools"])}, '
        f'expected {sorted(self._pools)}'
      )
    for name, pool in self._pools.items():
      pool.check(name, state['pools'][name])  # all, before any is loaded
    for name, pool in self._pools.items():
      pool.load_state_dict(state['pools'][name])

  def _pool(self, dataset: str) -> Scores:
    if dataset not in self._pools:
      raise ValueError(
        f'dataset: {dataset!r}, expected one of {", ".join(self._pools)}'
      )
    return self._pools[dataset]

  def _places(self, dataset: str, indices: Sequence[int]) -> np.ndarray:
    indices, count = np.asarray(indices, np.int64), self._pools[dataset].score.size
    if indices.size and not 0 <= indices.min() <= indices.max() < count:
      raise ValueError(
        f'prompts of {dataset!r}: {indices.min()} to {indices.max()}, '
        f'expected 0 to {count - 1}'
      )
    return indices
