"""The arithmetic of the length predictor: normal order statistics, what a dataset knows
of its lengths, and scores."""

import functools
import math
from statistics import NormalDist

import numpy as np

RIDGE = 1.0  # on the slopes; the intercept is free, so that averages are exact
# Said of a dataset of which nothing was seen. With this spread two medians are exceeded
# with chance 0.08, near the prior of SAGC's shared risk, 0.1.
FIRST_SPREAD, FIRST_VARIANCE, FIRST_SHARE = 0.5, 0.25, 0.25


@functools.cache
def expected_longest(size: int) -> float:
  """xi_G: about the expected largest of G standard normals (Blom 1958); 0 for one."""
  return NormalDist().inv_cdf((size - 0.375) / (size + 0.25))


@functools.cache
def quantile_of_longest(beta: float, size: int) -> float:
  """The beta-quantile of the largest of `size` standard normals."""
  return NormalDist().inv_cdf(beta ** (1 / size))


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float | None:
  """Spearman's, equal values at their mean rank; None where one has no spread."""

  def ranks(x: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    centred = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return centred - centred.mean()

  a, b = ranks(a), ranks(b)
  norm = math.sqrt(float(a @ a) * float(b @ b))
  return float(a @ b) / norm if norm > 0 else None


def padded_tokens(lengths: np.ndarray, size: int) -> int:
  """Tokens with padding where minibatches are cut in the order given."""
  starts = np.arange(0, len(lengths), size)
  counts = np.diff(starts, append=len(lengths))
  return int((np.maximum.reduceat(lengths, starts) * counts).sum())


class DatasetSums:
  """What datasets know: a ridge regression each, from sums that forget.

  The mean ln length of a prompt is regressed on x1 = ln prompt length and x2 = its
  pass rate before.

  Args:
    datasets: how many, D.
    limit: tokens of an answer, from which a dataset of no groups guesses.
    forgetting: of the sums, at each `add` that brings something.
  """

  def __init__(self, datasets: int, *, limit: int, forgetting: float):
    self._first_mean = max(0.0, math.log(limit * FIRST_SHARE))
    self._forgetting = forgetting
    self.products = np.zeros((datasets, 4, 4))  # sums over groups of row times row
    self.spreads = np.zeros((datasets, 2))  # sums over groups of (1, spread)

  def add(
    self,
    number: np.ndarray,  # [n] the dataset of each group
    rows: np.ndarray,  # [n, 4] (1, x1, x2, mean)
    spreads: np.ndarray,  # [n]
    shown: np.ndarray,  # [n] bool, where there is a spread to count
  ) -> None:
    for d in np.unique(number):
      mine = number == d
      products = (rows[mine, :, None] * rows[mine, None, :]).sum(0)
      self.products[d] = self._forgetting * self.products[d] + products
      spread = (shown[mine].sum(), spreads[mine & shown].sum())
      self.spreads[d] = self._forgetting * self.spreads[d] + spread

  def regression(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Means of (1, x1, x2, mean) [D, 4], slopes [D, 2], the variance that these leave
    [D], and the average spread [D]."""
    weight = self.products[:, 0, 0]
    seen = weight > 0
    weight = np.where(seen, weight, 1.0)
    means = self.products[:, 0, :] / weight[:, None]
    second = self.products / weight[:, None, None]
    centred = second - means[:, :, None] * means[:, None, :]
    xx, xy = centred[:, 1:3, 1:3], centred[:, 1:3, 3]
    ridge = RIDGE / weight[:, None, None] * np.eye(2)
    slopes = np.linalg.solve(xx + ridge, xy[:, :, None])[:, :, 0]
    fitted = (slopes[:, None] * xx).sum(2)
    left = centred[:, 3, 3] - (slopes * (2 * xy - fitted)).sum(1)
    means[~seen, 3] = self._first_mean
    variance = np.where(seen, np.maximum(left, 0.0), FIRST_VARIANCE)
    counted, spread = self.spreads.T
    average = spread / np.where(counted > 0, counted, 1.0)
    return means, slopes, variance, np.where(counted > 0, average, FIRST_SPREAD)
