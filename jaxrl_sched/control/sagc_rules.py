"""The pure rules of SAGC: what straggles, and a group size for each prompt.

`q` is the chance that one answer exceeds tau medians of its group, so that a group of
G straggles with 1 - (1 - q)^G. `pi` is what a length predictor says q is.
"""

from collections.abc import Sequence
import itertools
import math
import statistics

import numpy as np

LEAST, MOST = 1e-4, 0.5  # of pi: above 0.5 is impossible for tau >= 1
_NORMAL = statistics.NormalDist()


def exceeding(lengths: Sequence[np.ndarray], tau: float) -> np.ndarray:
  """How many answers of each group are longer than tau medians of it: [groups].

  The ratio is compared, which scaling all lengths cannot change, not even by rounding.
  """
  sizes = np.array([len(group) for group in lengths], np.int64)
  flat = np.concatenate(lengths)
  if flat.ndim != 1 or (flat.size and flat.min() < 1):
    raise ValueError('lengths: expected one [G] array a group, of at least 1 token')
  starts = np.cumsum(sizes) - sizes
  counts = np.zeros(len(lengths), np.int64)
  for size in np.unique(sizes[sizes > 1]):
    which = np.flatnonzero(sizes == size)
    rows = flat[starts[which][:, None] + np.arange(size)]
    median = np.median(rows, axis=1, keepdims=True)
    counts[which] = (rows / median > tau).sum(axis=1)
  return counts


def isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """The nearest values that never fall, by weighted squares (pool adjacent violators)."""
  blocks: list[tuple[float, float, int]] = []  # mean, weight, count
  for value, weight in zip(values, weights, strict=True):
    mean, count = value, 1
    while blocks and blocks[-1][0] > mean:
      before, mass, n = blocks.pop()
      mean = (before * mass + mean * weight) / (mass + weight)
      weight, count = weight + mass, count + n
    blocks.append((mean, weight, count))
  return np.repeat([b[0] for b in blocks], [b[2] for b in blocks])


def exceedance(
  quantiles: Sequence[tuple[float, float]], tau: float, cap: float
) -> float:
  """pi of one prompt, from (level, length) pairs of its predicted answer length.

  Length at a level is read linearly in (z, ln length), z the normal quantile of the
  level, and goes on straight outside: a lognormal gives 1 - Phi(ln tau / sigma) from
  any two pairs. An answer cut at `cap` tokens cannot be longer than that.
  """
  levels, lengths = zip(*sorted(quantiles), strict=True)
  return float(exceedances(levels, [lengths], tau, cap)[0])


def exceedances(
  levels: Sequence[float],  # at least two, rising
  lengths: np.ndarray,  # [prompt, level]
  tau: float,
  cap: float,
) -> np.ndarray:  # [prompt]
  """`exceedance` of many prompts whose lengths are given at the same levels."""
  if len(levels) < 2 or not (0 < levels[0] and levels[-1] < 1):
    raise ValueError(f'levels: {list(levels)}, expected at least two in (0, 1)')
  z = np.array([_NORMAL.inv_cdf(u) for u in levels])
  lengths = np.asarray(lengths, np.float64)
  rising = (np.diff(z) > 0).all() and (np.diff(lengths) >= 0).all()
  if not (rising and (lengths > 0).all() and np.isfinite(lengths).all()):
    raise ValueError(
      'quantiles: expected positive lengths that do not fall with the level, and no '
      'level twice'
    )
  y = np.log(lengths)
  j = min(max(int(np.searchsorted(z, 0.0)), 1), len(z) - 1)
  median = y[:, j - 1] - z[j - 1] * (y[:, j] - y[:, j - 1]) / (z[j] - z[j - 1])

  limit = median + math.log(tau)
  j = np.clip((y <= limit[:, None]).sum(axis=1), 1, len(z) - 1)
  rows = np.arange(len(y))
  below, rise = y[rows, j - 1], y[rows, j] - y[rows, j - 1]
  # Where lengths stop rising none is longer: infinitely many deviations away.
  at = np.full(len(y), np.inf)
  np.divide((limit - below) * (z[j] - z[j - 1]), rise, out=at, where=rise > 0)
  at[rise > 0] += z[j - 1][rise > 0]
  pi = np.array([math.erfc(x) / 2 for x in (at / math.sqrt(2)).tolist()])
  pi[limit >= math.log(cap)] = 0
  return np.clip(pi, LEAST, MOST)


def calibrate(
  q: float, pi_bar: float, pi: float | np.ndarray, trust: float
) -> float | np.ndarray:
  """A prompt's q: the level `q` is what happened, the order is the predictor's.

  Odds of q are scaled as the prediction's odds stand to those of `pi_bar`, the mean
  prediction. `trust` 0 gives q to every prompt.
  """
  own = (1 - trust) * pi_bar + trust * pi
  ratio = own / (1 - own) * ((1 - pi_bar) / pi_bar)
  return q * ratio / (1 - q + q * ratio)  # finite for q = 0 and 1 too


def _peak(g: int, h: int) -> float:
  """The most that going from g to h answers can add to the risk, over all q."""
  return (g / h) ** (g / (h - g)) - (g / h) ** (h / (h - g))


def size_for(
  q: float | np.ndarray, lam: float, sizes: Sequence[int]
) -> int | np.ndarray:
  """The group size that a risk is worth: never larger for a larger q or lam.

  Walks up while log2(h / g) > lam * (risk added). That rises with q to a peak and
  falls again, since a very risky prompt straggles at any size; behind its peak it
  counts with the peak, or the riskiest prompts would get the largest groups.
  """
  x = 1 - np.asarray(q, np.float64)
  size = np.full(x.shape, sizes[0])
  going = np.ones(x.shape, bool)
  for g, h in itertools.pairwise(sizes):
    peak = _peak(g, h)
    behind = x <= (g / h) ** (1 / (h - g))
    added = np.where(behind, peak, np.minimum(x**g - x**h, peak))
    going &= math.log2(h / g) > lam * added
    size[going] = h
  return int(size) if size.ndim == 0 else size


def holding(sizes: Sequence[int]) -> float:
  """Below this multiplier no risk moves a prompt past some pair of neighbours: 4 for
  sizes that double."""
  pairs = itertools.pairwise(sizes)
  return max((math.log2(h / g) / _peak(g, h) for g, h in pairs), default=0.0)


class Budget:
  """Rollouts that are to be used up exactly, by groups of these sizes."""

  def __init__(self, rollouts: int, sizes: Sequence[int]):
    sums = 1  # bit n: n is a sum of sizes
    for size in sizes:
      shift = size
      while shift <= rollouts:
        sums |= sums << shift
        shift *= 2
      sums &= (1 << (rollouts + 1)) - 1
    # As text, since a bit of a long number is slow to find.
    self._is_sum, self.rest = f'{sums:b}'[::-1], rollouts
    if len(self._is_sum) != rollouts + 1:
      raise ValueError(f'rollouts: {rollouts}, expected a sum of {list(sizes)}')

  def fits(self, size: int) -> bool:
    """Whether a group of this size leaves a rest that the sizes can fill."""
    return size <= self.rest and self._is_sum[self.rest - size] == '1'

  def take(self, size: int) -> None:
    if not self.fits(size):
      raise ValueError(f'size {size} does not fit into {self.rest} rollouts')
    self.rest -= size


def fill(
  qs: Sequence[float] | np.ndarray, lam: float, sizes: Sequence[int], rollouts: int
) -> list[int]:
  """Sizes for the first prompts of a queue, in its order, until `rollouts` are used.

  Each gets the largest size that fits and is not above its own, else the smallest
  that fits. Fewer prompts than that are all served.
  """
  budget = Budget(rollouts, sizes)
  given = []
  for own in np.atleast_1d(size_for(np.asarray(qs), lam, sizes)).tolist():
    if budget.rest == 0:
      break
    size = own
    if not budget.fits(size):
      fits = [g for g in sizes if budget.fits(g)]
      size = max((g for g in fits if g <= own), default=fits[0])
    budget.take(size)
    given.append(size)
  return given
