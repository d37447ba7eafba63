"""The pure rules of pruning: who may go, with what chance, and who goes."""

import math

import numpy as np

from jaxrl_sched.host.scores import MARGIN

RULES = ('fixed', 'coins', 'balanced')
FLOOR = 0.1  # of an answer's chance under 'balanced'; it bounds the weights
HIGH_RATE = 0.7  # variance is called bounded up to here


def check_rate(name: str, rate: float, *, allow_high_rate: bool = False) -> None:
  """Refuses a pruning rate of the config that is impossible, or high unasked."""
  if not 0 <= rate < 1:
    raise ValueError(f'{name}: {rate}, expected 0 to below 1')
  if rate > HIGH_RATE and not allow_high_rate:
    raise ValueError(
      f'{name}: {rate}, expected at most {HIGH_RATE}, above which the variance grows '
      'fast; or allow_high_rate=True'
    )


def inclusion(
  advantages: np.ndarray,  # [G]
  rule: str = 'fixed',
  rate: float = 0.5,
  floor: float = FLOOR,
  cost: np.ndarray | None = None,  # [G]
) -> np.ndarray:  # [G] float64, in (0, 1]
  """The chance of each answer to be kept.

  Under `balanced` it is |advantage| / sqrt(cost) over the largest of these, and
  `floor` at least. Where all advantages are 0 nothing tells answers apart, and all
  are kept under every rule.
  """
  size = np.abs(np.asarray(advantages, np.float64))
  if size.ndim != 1 or size.size == 0 or not np.isfinite(size).all():
    raise ValueError(f'advantages: expected finite numbers [G], got {advantages}')
  if rule not in RULES:
    raise ValueError(f'rule: {rule!r}, expected one of {", ".join(RULES)}')
  check_rate('rate', rate, allow_high_rate=True)
  if rule != 'balanced':
    if cost is not None:
      raise ValueError(f"cost: has no say in rule {rule!r}, expected rule 'balanced'")
    return chances(below_mean(size), rate, rule)
  if not 0 < floor <= 1:
    raise ValueError(f'floor: {floor}, expected above 0, at most 1')
  if size.max() <= MARGIN:
    return np.ones(size.shape)
  if cost is not None:
    cost = np.asarray(cost, np.float64)
    if cost.shape != size.shape or not (np.isfinite(cost) & (cost > 0)).all():
      raise ValueError(f'cost: expected {size.size} numbers above 0, got {cost}')
    size = size / np.sqrt(cost)
  return np.maximum(floor, size / size.max())


def systematic(pi: np.ndarray, order: np.ndarray, u: float) -> np.ndarray:  # [G] bool
  """A random sample in which i has exactly the chance pi[i].

  In this order the chances are laid end to end; who has one of the points u, u + 1,
  u + 2, ... (u uniform in [0, 1)) is kept. Their number is the sum of the chances,
  rounded down or up.
  """
  pi, order = np.asarray(pi, np.float64), np.asarray(order)
  end = np.concatenate([[0.0], np.cumsum(pi[order])])
  whole = np.floor(end)
  points = whole + (u < end - whole)  # how many lie below each end
  keep = np.zeros(pi.shape, bool)
  keep[order] = np.diff(points) > 0
  return keep | (pi >= 1)  # whatever rounding did to the sums


def below_mean(size: np.ndarray) -> np.ndarray:  # [n] -> [n] bool
  """Low: not only by rounding below the mean."""
  return size < size.mean() - MARGIN


def _victims(low: int, rate: float) -> int:
  """How many of so many go under 'fixed'; never all."""
  return min(math.floor(rate * low + 1e-9), max(0, low - 1))


def chances(low: np.ndarray, rate: float, rule: str) -> np.ndarray:  # [n]
  """Of each to be kept, by 'fixed' or 'coins'."""
  pi, count = np.ones(low.shape), np.count_nonzero(low)
  if count:
    left = count - _victims(count, rate)
    pi[low] = 1 - rate if rule == 'coins' else left / count
  return pi


def drop(low: np.ndarray, rate: float, rule: str, rng) -> np.ndarray:
  """Who is kept, by 'fixed' or 'coins'."""
  if rule == 'coins':
    return ~low | (rng.random(low.size) >= rate)
  keep, places = np.ones(low.shape, bool), np.flatnonzero(low)
  keep[rng.permutation(places)[: _victims(places.size, rate)]] = False
  return keep


def last_step(final: float, steps: int | None) -> float:
  """The step from which on nothing is pruned any more."""
  if not 0 <= final <= 1:
    raise ValueError(f'final: {final}, expected 0 to 1')
  if steps is None:
    return math.inf
  if steps < 1:
    raise ValueError(f'steps: {steps}, expected at least 1, or None')
  return math.ceil((1 - final) * steps - 1e-9)


def useful_rate(pass_rate, size):
  """The chance that a group of this size has both right and wrong answers."""
  return 1 - pass_rate**size - (1 - pass_rate) ** size
