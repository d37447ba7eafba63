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
  """The next requests of a dataset, and where each leads."""

  indices: np.ndarray  # [n] int64
  numbers: np.ndarray  # [n] int64, the pass of each
  cursors: np.ndarray  # [n] int64, after each
  met: int  # of them were met on the way; then come those woken before their time
  early: int  # so many

  def first(self, n: int) -> 'Ahead':
    met, early = min(n, self.met), min(max(0, n - self.met), self.early)
    arrays = self.indices[:n], self.numbers[:n], self.cursors[:n]
    return Ahead(*arrays, met, early)

  def is_early(self) -> np.ndarray:  # [n] bool
    place = np.arange(len(self.indices))
    return (place >= self.met) & (place < self.met + self.early)

  def picks(self) -> list[tuple[int, int]]:
    return list(zip(self.indices.tolist(), self.numbers.tolist(), strict=True))


_NOTHING = np.empty(0, np.int64)
_NONE_AHEAD = Ahead(_NOTHING, _NOTHING, _NOTHING, 0, 0)


class Passes:
  """The plan state of one dataset, and the rows of its prompts."""

  def __init__(self, seed: int, place: int, size: int):
    self.rows = Sleepers(size)
    self._orders = Orders(seed, place, size)
    self._peeked = _NONE_AHEAD  # a cache: `take` follows `ahead` as a rule

    self.number = 0  # the pass
    self.cursor = 0
    self.early_wakes = 0
    self.repeats = 0  # requests while an earlier one of the prompt was open

    self.since = -1  # the newest draw whose group had spread
    self.in_vain = 0  # prompts with a result of a later draw
    self._newest = -1  # the newest draw with a result

  def ahead(self, n: int) -> Ahead:
    """The next n requests, with nothing changed."""
    if len(self._peeked.indices) < n:
      self._peeked = self._look(n, self._peeked.first(self._peeked.met))
    return self._peeked.first(n)

  def _look(self, n: int, met: Ahead) -> Ahead:
    """The next n requests, of which these are the first."""
    number, cursor, missing = self.number, self.cursor, n - met.met
    if met.met:
      number, cursor = int(met.numbers[-1]), int(met.cursors[-1])
    indices, numbers, cursors = [met.indices], [met.numbers], [met.cursors]
    # Sleepers met on the way are on probe then; those of passes before are met again.
    is_woken = self.rows.is_asleep(met.indices)
    woken = met.indices[is_woken]
    before = met.indices[is_woken & (met.numbers < number)]
    while missing:
      found, after = self._scan(number, cursor, missing, before)
      indices.append(found)
      numbers.append(np.full(len(found), number))
      cursors.append(after)
      cursor = int(after[-1]) if len(after) else cursor
      woken = np.concatenate([woken, found[self.rows.is_asleep(found)]])
      missing -= len(found)
      # A pass through which all sleep does not count.
      if not missing or self.rows.count(number + 1) <= len(woken):
        break
      number, cursor, before = number + 1, 0, woken
    early = _NOTHING
    if missing:
      # Those due have been met above, and are the first of all sleepers.
      early = self.rows.earliest(missing + len(woken))
      early = early[~np.isin(early, woken)]
      indices.append(early)
    if missing > len(early):
      open_ones = np.concatenate([self.rows.probes(), woken, early])
      indices.append(np.resize(open_ones, missing - len(early)))  # round and round
    numbers.append(np.full(missing, number))
    cursors.append(np.full(missing, cursor))
    arrays = map(np.concatenate, (indices, numbers, cursors))
    return Ahead(*arrays, n - missing, len(early))

  def _scan(
    self, number: int, cursor: int, n: int, without: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """The next n of a pass that may be drawn, or all, and the cursors after them.

    What is passed by is not looked at again in the pass, so that all scans of a pass
    together cost less than making its order did.
    """
    found, cursors = [_NOTHING], [_NOTHING]
    count = self.rows.count(number)
    if count > len(without):
      order, at = self._orders.of(number), cursor
      while n and at < len(order):
        # As many as should hold n of them, and ever more if they do not.
        piece = max(64, (at - cursor) // 2, int(1.2 * n * len(order) / count))
        seen = order[at : at + min(piece, 1 << 20)]
        good = self.rows.may_be_drawn(seen, number)
        if len(without):
          good &= ~np.isin(seen, without)
        places = np.flatnonzero(good)[:n]
        found.append(seen[places])
        cursors.append(at + places + 1)
        n, at = n - len(places), at + len(seen)
    return np.concatenate(found), np.concatenate(cursors)

  def take(self, ahead: Ahead, asked: np.ndarray, draws: np.ndarray) -> None:
    """Goes there. Those not asked, [n] bool, are visited and no more.

    `draws` are the numbers of those asked, ascending.
    """
    self.repeats += self.rows.take(ahead.indices[asked], draws, ahead.numbers[asked])
    self.early_wakes += int(np.count_nonzero(ahead.is_early() & asked))
    if len(asked):
      self.go_to(int(ahead.numbers[-1]), int(ahead.cursors[-1]))

  def go_to(self, number: int, cursor: int) -> None:
    self.number, self.cursor = number, cursor
    self._orders.forget_before(number)
    self.forget_ahead()

  def count_in_vain(
    self,
    applied: np.ndarray,  # [n] the newest draw of each whose result was in before
    draws: np.ndarray,  # [n]
    spread: np.ndarray,  # [n] bool, whether verdicts differ
  ) -> None:
    """Results of different prompts have come; whichever of them comes first."""
    newest, self._newest = self._newest, max(self._newest, int(draws.max(initial=-1)))
    since = max(self.since, int(draws[spread].max(initial=-1)))
    if since == self.since:
      self.in_vain += int(np.count_nonzero(draws > since))
      self.in_vain -= int(np.count_nonzero(applied > since))
    elif since >= newest:
      self.since, self.in_vain = since, int(np.count_nonzero(draws > since))
    else:
      self.count_anew(since)

  def count_anew(self, since: int) -> None:
    """Looks at all prompts for who was asked after this draw."""
    self.since, self._newest = since, self.rows.newest_result()
    self.in_vain = self.rows.results_after(since)

  def forget_ahead(self) -> None:
    """Whoever changes rows calls this."""
    self._peeked = _NONE_AHEAD
