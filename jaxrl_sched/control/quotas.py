"""How many groups come from each dataset, and how many requests they take."""

from collections.abc import Mapping, Sequence
import math

import numpy as np

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
