"""Small tasks made by rule, for a first run on a laptop. Record i is a function of i.

Both can be answered at once or by a written-out scratchpad that ends with the
answer; the reference solutions mix the two. Answering at once is mostly wrong, so
what a policy can learn from rewards is to think first, and to think without slips.
"""

from typing import Any

import numpy as np


class Sums:
  """'17+5+40=': 'the sum', or running sums that end with it ('22,62').

  Args:
    count: number of records. seed: of the whole set.
    terms: fewest and most numbers to add. largest: of a number.
    direct: share of the solutions that answer at once.
  """

  def __init__(
    self,
    *,
    count: int,
    seed: int = 0,
    terms: tuple[int, int] = (2, 5),
    largest: int = 99,
    direct: float = 0.0,
  ):
    self._count, self._seed = count, seed
    self._terms, self._largest, self._direct = tuple(terms), largest, direct

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, i: int) -> dict[str, Any]:
    rng = np.random.default_rng((self._seed, 0, i))
    low, high = self._terms
    numbers = rng.integers(1, self._largest + 1, rng.integers(low, high + 1))
    totals = np.cumsum(numbers)[1:]
    if rng.random() < self._direct:
      totals = totals[-1:]
    return {
      'prompt': '+'.join(map(str, numbers)) + '=',
      'answer': int(numbers.sum()),
      'solution': ','.join(map(str, totals)),
    }


class Counting:
  """'b in abbac?': 'how many', or each letter with the count so far ('a0b1b2a2c2').

  Args:
    count, seed, direct: as for `Sums`.
    length: fewest and most letters. letters: how many different ones.
  """

  def __init__(
    self,
    *,
    count: int,
    seed: int = 0,
    length: tuple[int, int] = (5, 12),
    letters: int = 4,
    direct: float = 0.0,
  ):
    self._count, self._seed = count, seed
    self._length, self._letters, self._direct = tuple(length), letters, direct

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, i: int) -> dict[str, Any]:
    rng = np.random.default_rng((self._seed, 1, i))
    low, high = self._length
    text = [
      chr(97 + x) for x in rng.integers(0, self._letters, rng.integers(low, high))
    ]
    letter = chr(97 + rng.integers(0, self._letters))
    steps, seen = [], 0
    for x in text:
      seen += x == letter
      steps.append(f'{x}{seen}')
    direct = rng.random() < self._direct
    return {
      'prompt': f'{letter} in {"".join(text)}?',
      'answer': seen,
      'solution': str(seen) if direct else ''.join(steps),
    }
