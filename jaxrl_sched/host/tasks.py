"""Small tasks made by rule, for a first run on a laptop. Record i is a function of i.

Each can be answered at once or by a written-out scratchpad that ends with the answer;
the reference solutions mix the two. At once is mostly wrong, so what rewards can teach
is to think first, and to think without slips. Terms carry letters to be found by.
"""

from typing import Any

import numpy as np


class _Running:
  """Numbers to be put together one after the other."""

  def __init__(
    self,
    *,
    count: int,
    seed: int = 0,
    terms: tuple[int, int],
    largest: int,
    direct: float = 0.0,
  ):
    """A set of records.

    Args:
      count: of records.
      seed: of the whole set.
      terms: fewest and most numbers of a record.
      largest: of a number.
      direct: share of the solutions that answer at once.
    """
    self._count, self._seed, self._direct = count, seed, direct
    self._terms, self._largest = tuple(terms), largest

  def __len__(self) -> int:
    return self._count

  def _record(self, i: int, name: str, running) -> dict[str, Any]:
    rng = np.random.default_rng((self._seed, i))
    low, high = self._terms
    numbers = rng.integers(1, self._largest + 1, rng.integers(low, high + 1))
    totals = running(np.cumsum(numbers)).tolist()

    def labelled(values):
      return ''.join(f'{chr(97 + i)}{x}' for i, x in enumerate(values))

    direct = rng.random() < self._direct
    return {
      'prompt': f'{name} {labelled(numbers)}',
      'answer': totals[-1],
      'solution': str(totals[-1]) if direct else labelled(totals),
    }


class Sums(_Running):
  """'sum a17b5c40': '62', or with the running sums, 'a17b22c62'."""

  def __init__(self, *, terms=(2, 5), largest=30, **settings):
    super().__init__(terms=terms, largest=largest, **settings)

  def __getitem__(self, i: int) -> dict[str, Any]:
    return self._record(i, 'sum', lambda totals: totals)


class Clock(_Running):
  """'clock a9b5c11': '1', or hour by hour, 'a9b2c1': sums on a dial of twelve."""

  def __init__(self, *, terms=(3, 8), largest=12, **settings):
    super().__init__(terms=terms, largest=largest, **settings)

  def __getitem__(self, i: int) -> dict[str, Any]:
    return self._record(i, 'clock', lambda totals: (totals - 1) % 12 + 1)
