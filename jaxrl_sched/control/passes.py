"""Passes over a dataset, in which some of its prompts sleep."""

import dataclasses

import numpy as np

from jaxrl_sched.control.sleepers import Sleepers


class Orders:
  """An order of its own for each pass: a function of (seed, dataset, pass) alone.

  A large order takes a while to make (10 million prompts: about 0.4 s) and 4 bytes a
  prompt, so the one in use is kept, and for a moment the one that follows.
  """

  def __init__(self, seed: int, place: int, size: int):
    self._seed, self._place, self._size = seed, place, size
    self._kept: dict[int, np.ndarray] = {}  # pass -> order: a cache

  def of(self, number: int) -> np.ndarray:  # [size] int32
    if number not in self._kept:
      while len(self._kept) > 1:
        del self._kept[min(self._kept)]
      order = np.arange(self._size, dtype=np.int32)
      np.random.default_rng((self._seed, self._place, number)).shuffle(order)
      self._kept[number] = order
    return self._kept[number]

  def forget_before(self, number: int) -> None:
    """Gives back the memory of passes that are over."""
    for over in [n for n in self._kept if n < number]:
      del self._kept[over]


@dataclasses.dataclass(frozen=True, eq=False)
class Ahead:
  """The next requests of a dataset, and where they lead."""

  indices: np.ndarray  # [n] int64
  numbers: np.ndarray  # [n] int64, the pass of each
  early: np.ndarray  # [n] bool, woken before its time
  number: int  # the pass and the cursor after them
  cursor: int

  def picks(self) -> list[tuple[int, int]]:
    return list(zip(self.indices.tolist(), self.numbers.tolist(), strict=True))


class Passes:
  """The plan state of one dataset, and the rows of its prompts."""

  def __init__(self, seed: int, place: int, size: int):
    self.rows = Sleepers(size)
    self._orders = Orders(seed, place, size)
    self._peeked: Ahead | None = None  # a cache: `take` follows `ahead` as a rule

    self.number = 0  # the pass
    self.cursor = 0
    self.early_wakes = 0
    self.repeats = 0  # requests while an earlier one of the prompt was open

  def ahead(self, n: int) -> Ahead:
    """The next n requests, with nothing changed."""
    if self._peeked is not None and len(self._peeked.indices) == n:
      return self._peeked
    number, cursor, missing = self.number, self.cursor, n
    indices, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    woken = np.empty(0, np.int32)  # sleepers met on the way: they are on probe now
    while missing:
      found, cursor = self._scan(number, cursor, missing, woken)
      indices.append(found)
      numbers.append(np.full(len(found), number))
      woken = np.concatenate([woken, found[self.rows.is_asleep(found)]])
      missing -= len(found)
      # A pass through which all sleep does not count.
      if not missing or self.rows.count(number + 1) <= len(woken):
        break
      number, cursor = number + 1, 0
    early = np.empty(0, np.int64)
    if missing:
      # Those due have been met above, and are the first of all sleepers.
      early = self.rows.earliest(missing + len(woken))
      early = early[~np.isin(early, woken)]
      missing -= len(early)
    indices.append(early)
    if missing:
      open_ones = np.concatenate([self.rows.probes(), woken, early])
      indices.append(np.resize(open_ones, missing))  # round and round
    met = sum(map(len, numbers))
    numbers.append(np.full(n - met, number))
    is_early = np.zeros(n, bool)
    is_early[met : met + len(early)] = True
    self._peeked = Ahead(
      np.concatenate(indices), np.concatenate(numbers), is_early, number, cursor
    )
    return self._peeked

  def _scan(
    self, number: int, cursor: int, n: int, woken: np.ndarray
  ) -> tuple[np.ndarray, int]:
    """The next n of a pass that may be drawn, or all, and the cursor past them.

    What is passed by is not looked at again in the pass, so that all scans of a pass
    together cost less than making its order did.
    """
    found = [np.empty(0, np.int32)]
    if self.rows.count(number) > len(woken):
      order, at, piece = self._orders.of(number), cursor, max(64, 2 * n)
      while n and at < len(order):
        seen = order[at : at + piece]
        good = self.rows.may_be_drawn(seen, number)
        if len(woken):
          good &= ~np.isin(seen, woken)
        places = np.flatnonzero(good)[:n]
        if len(places):
          found.append(seen[places])
          n, cursor = n - len(places), at + int(places[-1]) + 1
        at, piece = at + len(seen), min(2 * piece, 1 << 20)
    return np.concatenate(found), cursor

  def take(self, ahead: Ahead, asked: np.ndarray, draws: np.ndarray) -> None:
    """Goes there. Those not asked, [n] bool, are visited and no more.

    `draws` are the numbers of those asked, ascending.
    """
    self.repeats += self.rows.take(ahead.indices[asked], draws, ahead.numbers[asked])
    self.early_wakes += int(np.count_nonzero(ahead.early & asked))
    self.go_to(ahead.number, ahead.cursor)

  def go_to(self, number: int, cursor: int) -> None:
    self.number, self.cursor = number, cursor
    self._orders.forget_before(number)
    self.forget_ahead()

  def forget_ahead(self) -> None:
    """Whoever changes rows calls this."""
    self._peeked = None
