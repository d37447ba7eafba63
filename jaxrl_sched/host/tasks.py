"""Small tasks made by rule, for a first run on a laptop. Record i is a function of i.

Each can be answered at once or by a written-out scratchpad that ends with the answer;
the reference solutions mix the two. At once is mostly wrong, so what rewards can teach
is to think first, and to think without slips. Terms carry letters to be found by.
"""

import itertools
from typing import Any
import zlib

import numpy as np

ASIDE = 8  # one prompt in so many is held out


def _number_of(text: str) -> int:
  """One number a text, the same everywhere: which part it is of hangs on it."""
  return zlib.crc32(text.encode())


class _Running:
  """Numbers to be put together one after the other."""

  TERMS: tuple[int, int]

  def __init__(
    self,
    *,
    count: int,
    seed: int = 0,
    terms: tuple[int, int] | None = None,
    largest: int = 9,
    direct: float = 0.0,
    held_out: bool = False,
  ):
    """A set of records.

    Args:
      count: of records.
      seed: of the whole set.
      terms: fewest and most numbers of a record; None: as is usual for the task.
      largest: of a number.
      direct: share of the solutions that answer at once.
      held_out: whether prompts are of the part set aside. Which part a prompt is of
        depends on its text, so that no seed or count mixes them.
    """
    for name, value in dict(count=count, seed=seed).items():
      if not isinstance(value, int) or value < 0:
        raise ValueError(f'{name}={value!r}, expected a whole number from 0')
    if not 0 <= direct <= 1:
      raise ValueError(f'direct={direct}, expected 0 to 1')
    self._held_out = held_out
    self._count, self._seed, self._direct = count, seed, direct
    self._terms, self._largest = tuple(terms or self.TERMS), largest

  def __len__(self) -> int:
    return self._count

  def _record(self, i: int, name: str, running) -> dict[str, Any]:
    low, high = self._terms
    for attempt in itertools.count():
      rng = np.random.default_rng((self._seed, i, attempt))
      numbers = rng.integers(1, self._largest + 1, rng.integers(low, high + 1))
      aside = _number_of(f'{name} {numbers.tolist()}') % ASIDE == 0
      if aside == self._held_out:
        break
    totals = running(numbers).tolist()

    def labelled(values):
      return ''.join(f'{chr(97 + i)}{x}' for i, x in enumerate(values))

    direct = rng.random() < self._direct
    return {
      'prompt': f'{name} {labelled(numbers)}',
      'answer': totals[-1],
      'solution': f'{"" if direct else labelled(totals)}={totals[-1]}',
    }


class Sums(_Running):
  """'sum a7b5c9': '=21', or with the running sums, 'a7b12c21=21'."""

  TERMS = (3, 6)

  def __getitem__(self, i: int) -> dict[str, Any]:
    return self._record(i, 'sum', np.cumsum)


class LastDigits(_Running):
  """'last a7b5c9': '=1', or 'a7b2c1=1': the last digit of the sum."""

  TERMS = (3, 7)

  def __getitem__(self, i: int) -> dict[str, Any]:
    return self._record(i, 'last', lambda numbers: np.cumsum(numbers) % 10)


class Products:
  """'What is a * b?' for all pairs of whole numbers, one part of them held out.

  A pair is held out in both orders: who has learned 3 * 7 knows 7 * 3.
  """

  ASIDE = 4  # one unordered pair in so many is held out

  def __init__(self, *, smallest: int = 2, largest: int = 12, held_out: bool = False):
    if not 0 <= smallest <= largest:
      raise ValueError(f'smallest={smallest}, largest={largest}; expected 0 <= both')
    numbers = range(smallest, largest + 1)
    self._pairs = [
      (a, b)
      for a, b in itertools.product(numbers, numbers)
      if held_out == (_number_of(f'{min(a, b)} * {max(a, b)}') % self.ASIDE == 0)
    ]

  def __len__(self) -> int:
    return len(self._pairs)

  def __getitem__(self, i: int) -> dict[str, Any]:
    a, b = self._pairs[i]
    return {'id': f'{a}x{b}', 'prompt': f'What is {a} * {b}?', 'answer': a * b}
