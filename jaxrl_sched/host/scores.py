"""What each prompt of a dataset last had to teach, with totals that are never summed
anew. For `host/pruning.py`."""

from collections.abc import Callable
import math

import numpy as np

from jaxrl_sched.journal import Journal

MARGIN = 1e-6  # below the mean by less than this is not below it
UNSEEN = -1
TICKS = 1 << 20  # of a score of 1; what rounding moves stays inside MARGIN
USEFUL = 65535  # of a certainly useful prompt
BLOCK = 1024


class Scores:
  """Scores of one dataset, with totals over its prompts that are seen and awake.

  All are whole numbers, so that totals are exact however long they are kept, and
  those of a loaded state are those of the saved one. Rounding a score is no bias: a
  score may be anything that hangs on the past alone.

  Args:
    ranked: `low_share` is wanted.
    by_use: it counts each prompt with its chance to be useful.
  """

  def __init__(self, count: int, *, ranked: bool, by_use: bool = False):
    self.score = np.full(count, UNSEEN, np.int32)  # in ticks
    self.useful = np.zeros(count, np.uint16)  # chance to be useful, of USEFUL
    self.asleep = np.zeros(count, bool)
    self._journal = Journal(
      {'score': self.score, 'useful': self.useful, 'asleep': self.asleep}
    )
    self._is_ranked, self._by_use = ranked, by_use
    self._recount()

  def _recount(self) -> None:
    self.awake = int(np.count_nonzero(~self.asleep))
    self.seen = self.total = self.useful_total = 0
    self._ranks = _Ranks() if self._is_ranked else None
    self._count(np.flatnonzero(self.score != UNSEEN), 1)

  def _count(self, indices: np.ndarray, sign: int) -> None:
    """Adds these to the totals, or takes them out; no index twice."""
    live = indices[(self.score[indices] != UNSEEN) & ~self.asleep[indices]]
    ticks, useful = self.score[live], self.useful[live]
    self.seen += sign * live.size
    self.total += sign * int(ticks.sum(dtype=np.int64))
    self.useful_total += sign * int(useful.sum(dtype=np.int64))
    if self._ranks is not None:
      amounts = useful.astype(np.int64) if self._by_use else np.ones_like(live)
      self._ranks.add(ticks, sign * amounts)

  def observe(
    self, indices: np.ndarray, scores: np.ndarray, useful: np.ndarray, blend: float
  ) -> None:
    self._journal.note(indices)
    while indices.size:  # a prompt's groups one after another
      now, first = np.unique(indices, return_index=True)
      old = self.score[now]
      ticks = np.minimum(scores[first] * TICKS, np.iinfo(np.int32).max)
      ticks = np.where(old == UNSEEN, ticks, (1 - blend) * old + blend * ticks)
      self._count(now, -1)
      self.score[now] = np.rint(ticks)
      if self._ranks is not None:
        self.score[now] = np.minimum(self.score[now], _Ranks.TOP)
      self.useful[now] = np.rint(useful[first] * USEFUL)
      self._count(now, 1)
      rest = np.delete(np.arange(indices.size), first)
      indices, scores, useful = indices[rest], scores[rest], useful[rest]

  def move(self, indices: np.ndarray, *, asleep: bool) -> None:
    indices = indices[self.asleep[indices] != asleep]
    if not indices.size:  # as a rule
      return
    indices = np.unique(indices)
    self._journal.note(indices)
    self._count(indices, -1)
    self.asleep[indices] = asleep
    self._count(indices, 1)
    self.awake += -indices.size if asleep else indices.size

  @property
  def mean(self) -> float:
    """Of at least one seen prompt."""
    return self.total / self.seen / TICKS

  def _bound(self) -> int:
    """Low are scores below this."""
    if self.seen == 0:
      return 0
    return max(0, math.ceil(self.total / self.seen - MARGIN * TICKS))

  def low(self, indices: np.ndarray) -> np.ndarray:  # [C] bool
    score = self.score[indices]
    return (score != UNSEEN) & (score < self._bound())

  def low_share(self) -> float:
    """Of the awake prompts, by number or by use.

    An unseen prompt is taken to be as useful as a seen one on average.
    """
    whole = self.useful_total if self._by_use else self.seen
    if whole == 0:
      return 0.0
    return self._ranks.below(self._bound()) / whole * (self.seen / self.awake)

  def freeze(self) -> Callable[[], dict[str, np.ndarray]]:
    """The state as of now, to be copied later, see `Journal.freeze`."""
    return self._journal.freeze()

  def state_dict(self) -> dict[str, np.ndarray]:
    return self._journal.copies()

  def check(self, name: str, state: dict[str, np.ndarray]) -> None:
    own = self._journal.arrays
    if state.keys() != own.keys():
      raise ValueError(
        f'state of pruning, {name!r}: keys {sorted(state)}, expected {sorted(own)}'
      )
    for key, mine in own.items():
      found = np.asarray(state[key])
      if found.shape != mine.shape or found.dtype != mine.dtype:
        raise ValueError(
          f'state of pruning, {name!r}: {key} is {found.dtype} {found.shape}, '
          f'expected {mine.dtype} {mine.shape}'
        )
    score = np.asarray(state['score'])
    if score.min() < UNSEEN or (self._is_ranked and score.max() > _Ranks.TOP):
      raise ValueError(
        f'state of pruning, {name!r}: scores {score.min()} to {score.max()}, '
        f'expected {UNSEEN} to {_Ranks.TOP}'
      )

  def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
    self._journal.forget()
    for name, array in self._journal.arrays.items():
      array[...] = state[name]
    self._recount()


class _Ranks:
  """How much there is of scores below some bound.

  Amounts for each tick and for each block of ticks, so that nothing is ever scanned.
  """

  TOP = 4 * TICKS  # scores above are all alike: they would cost memory

  def __init__(self):
    self._ticks = np.zeros(TICKS + BLOCK, np.int64)
    self._blocks = np.zeros(self._ticks.size // BLOCK, np.int64)

  def add(self, ticks: np.ndarray, amounts: np.ndarray) -> None:
    if ticks.size and (need := ticks.max() // BLOCK + 1) > self._blocks.size:
      more = max(need, 2 * self._blocks.size) - self._blocks.size
      self._ticks = np.pad(self._ticks, (0, more * BLOCK))
      self._blocks = np.pad(self._blocks, (0, more))
    np.add.at(self._ticks, ticks, amounts)
    np.add.at(self._blocks, ticks // BLOCK, amounts)

  def below(self, bound: int) -> int:
    block = min(bound // BLOCK, self._blocks.size)
    found = self._blocks[:block].sum() + self._ticks[block * BLOCK : bound].sum()
    return int(found)
