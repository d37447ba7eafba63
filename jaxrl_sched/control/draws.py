"""Which prompt comes next: shuffled passes over each dataset, and dataset quotas."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

import numpy as np

from jaxrl_sched.control.base import check_state


def largest_remainder(n: int, weights: Sequence[float]) -> list[int]:
  """n in whole parts proportional to the weights; ties go to the first."""
  total = sum(weights)
  exact = [n * w / total for w in weights]
  parts = [math.floor(x + 1e-9) for x in exact]
  by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
  for i in by_remainder[: n - sum(parts)]:
    parts[i] += 1
  return parts


def requests_for(missing: int, rate: float, confidence: float | None) -> int:
  """How many requests give `missing` useful groups if each is useful with `rate`.

  On average (`confidence` None), or with at least that probability: the smallest m
  with P(Binomial(m, rate) >= missing) >= confidence.
  """
  if missing <= 0:
    return 0
  if confidence is None or rate >= 1:
    return math.ceil(missing / rate - 1e-9)
  # P(at least `missing`) grows by the chance that the m-th request is the one that
  # completes them: C(m-1, missing-1) rate^missing (1-rate)^(m-missing).
  reached, m = 0.0, missing
  log_base = missing * math.log(rate) - math.lgamma(missing)
  while True:
    log_p = log_base + math.lgamma(m) - math.lgamma(m - missing + 1)
    reached += math.exp(log_p + (m - missing) * math.log1p(-rate))
    if reached >= confidence:
      return m
    m += 1


class Draws:
  """Passes over each dataset, each in an order of its own.

  The order of a pass depends on (seed, dataset, pass) alone; a prompt comes once a
  pass.
  """

  def __init__(
    self, datasets: Mapping[str, int], weights: Mapping[str, float], *, seed: int = 0
  ):
    for name, count in datasets.items():
      if count < 1:
        raise ValueError(f'dataset {name!r}: {count} prompts, expected at least 1')
      if not (weights[name] >= 0 and math.isfinite(weights[name])):
        raise ValueError(
          f'dataset {name!r}: weight {weights[name]}, expected 0 or more'
        )
    if not sum(weights[name] for name in datasets) > 0:
      raise ValueError('dataset weights: their sum is 0, expected something positive')
    self._datasets, self._seed = dict(datasets), seed
    self._weights = [weights[name] for name in datasets]
    self._place = {name: [0, 0] for name in datasets}  # pass, cursor
    self._order: dict[str, tuple[int, np.ndarray]] = {}  # a cache: pass, order

  def quotas(self, n: int) -> dict[str, int]:
    """How many of n groups come from each dataset."""
    parts = largest_remainder(n, self._weights)
    return dict(zip(self._datasets, parts, strict=True))

  def _order_of(self, dataset: str, number: int) -> np.ndarray:
    if self._order.get(dataset, (None,))[0] != number:
      place = list(self._datasets).index(dataset)
      rng = np.random.default_rng((self._seed, place, number))
      self._order[dataset] = number, rng.permutation(self._datasets[dataset])
    return self._order[dataset][1]

  def peek(self, dataset: str, n: int) -> list[tuple[int, int]]:
    """The next n of a dataset as (index, pass), without drawing them."""
    (number, cursor), found = self._place[dataset], []
    while len(found) < n:
      order = self._order_of(dataset, number)
      piece = order[cursor : cursor + n - len(found)]
      found.extend((int(i), number) for i in piece)
      number, cursor = number + 1, 0
    return found

  def advance(self, dataset: str, n: int) -> None:
    number, cursor = self._place[dataset]
    passes, cursor = divmod(cursor + n, self._datasets[dataset])
    self._place[dataset] = [number + passes, cursor]

  def metrics(self) -> dict[str, float]:
    sizes = self._datasets
    return {
      f'epoch/{name}': number + cursor / sizes[name]
      for name, (number, cursor) in self._place.items()
    }

  def state_dict(self) -> dict[str, Any]:
    place = {name: list(place) for name, place in self._place.items()}
    return {'sizes': dict(self._datasets), 'place': place}

  def load_state_dict(self, state: dict[str, Any]) -> None:
    check_state('draws', state, self.state_dict())
    if state['sizes'] != self._datasets:
      raise ValueError(
        f'prompts were {state["sizes"]} when this run began, now {self._datasets}'
      )
    check_state('draws.place', state['place'], self._place)
    self._place = {name: list(state['place'][name]) for name in self._datasets}
