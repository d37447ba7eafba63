"""What is known of each prompt of a dataset, and who of them sleeps.

A row of 20 bytes a prompt, and a byte for the pass that is on. How many are awake and
how many wake in which pass is counted along, so that no question needs to look at all
prompts; but for `earliest`, `due` and the first of a pass, which do.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl_sched.control.base import check_state
from jaxrl_sched.control.snooze_rules import LONGEST_STREAK
from jaxrl_sched.journal import Journal

ACTIVE, SNOOZED, PROBE = 0, 1, 2
FOREVER = 2**31 - 1  # the wake pass of what shall not wake, and one past the last draw

ROW = np.dtype(
  [
    ('state', 'i1'),
    ('streak', 'i1'),  # easy groups in a row, at most LONGEST_STREAK
    ('level', 'u2'),  # snoozes in a row
    ('wake', 'i4'),  # the pass in which it may be drawn again
    ('last', 'i4'),  # the draw of its newest request, -1: none
    ('applied', 'i4'),  # the newest draw whose result is in, -1: none
    ('drawn', 'i4'),  # the pass of its newest request
  ]
)
_CHUNK = 1 << 20  # rows looked at together, so that a search needs little memory


class Sleepers:
  """The rows of one dataset."""

  def __init__(self, size: int):
    self.size = size
    self._rows = np.zeros(size, ROW)
    self._rows['last'] = self._rows['applied'] = -1
    self._journal = Journal({'rows': self._rows})
    # Who may be drawn in the pass that was last asked about: a byte a prompt, since
    # rows, far apart in memory, are slow to look at.
    self._open, self._open_in = np.zeros(size, bool), -1
    self._recount()

  def _recount(self) -> None:
    rows, self._open_in = self._rows, -1
    self._active = int(np.count_nonzero(rows['state'] == ACTIVE))
    self._asleep: dict[int, int] = {}  # wake pass -> how many
    self._count(rows['wake'][rows['state'] == SNOOZED], 1)
    self.newest = int(rows['last'].max())  # draw
    # The next to wake, found when needed: every sleeper whose key is at most `bound`
    # is in `near` or `fresh`, beside some who are none any more.
    self._bound: int | None = None
    self._near = np.empty(0, np.int64)
    self._fresh: list[int] = []

  # --- questions ---

  def count(self, number: int) -> int:
    """How many may be drawn in a pass."""
    due = sum(count for wake, count in self._asleep.items() if wake <= number)
    return self._active + due

  def asleep(self, number: int) -> int:
    """How many sleep through a pass."""
    return sum(count for wake, count in self._asleep.items() if wake > number)

  def is_asleep(self, indices: np.ndarray) -> np.ndarray:  # [n] -> [n] bool
    """Whether they sleep, due to wake or not."""
    return self._rows['state'][indices] == SNOOZED

  def may_be_drawn(self, indices: np.ndarray, number: int) -> np.ndarray:
    if number != self._open_in:
      np.less_equal(self._rows['wake'], number, out=self._open)
      self._open &= self._rows['state'] == SNOOZED
      self._open |= self._rows['state'] == ACTIVE
      self._open_in = number
    return self._open.take(indices)

  def sleep_past(self, indices: np.ndarray, number: int) -> np.ndarray:
    """Whether they sleep and are not due in a pass, [n] -> [n] bool."""
    return self.is_asleep(indices) & (self._rows['wake'][indices] > number)

  def due(self, number: int) -> np.ndarray:
    """Those who sleep and may be drawn in a pass, ascending. Looks at all."""
    state, wake = self._rows['state'], self._rows['wake']
    return np.flatnonzero((state == SNOOZED) & (wake <= number))

  def newest_result(self) -> int:
    """The newest draw whose result is in."""
    return int(self._rows['applied'].max())

  def results_after(self, draw: int) -> int:
    """How many have a result of a later draw. Looks at all."""
    return int(np.count_nonzero(self._rows['applied'] > draw))

  def without_result_after(self, draw: int) -> int:
    """How many have none, and do not sleep for good. Looks at all."""
    rows = self._rows
    gone = (rows['state'] == SNOOZED) & (rows['wake'] == FOREVER)
    return int(np.count_nonzero((rows['applied'] <= draw) & ~gone))

  def for_good(self) -> int:
    """How many sleep and are not to wake again."""
    return self._asleep.get(FOREVER, 0)

  def probes(self) -> np.ndarray:
    """Those woken and not heard of since, the longest gone first."""
    indices = np.flatnonzero(self._rows['state'] == PROBE)
    return indices[np.argsort(self._rows['last'][indices], kind='stable')]

  def earliest(self, n: int) -> np.ndarray:
    """The n sleepers with the smallest (wake, last), in order; or all, if fewer."""
    n = min(n, sum(self._asleep.values()))
    if self._bound is not None:
      self._tidy()
    if len(self._near) < n or self._bound is None:
      self._search(16 * n)
    return self._near[:n]

  def _keys(self, indices: np.ndarray | slice) -> np.ndarray:
    wake, last = self._rows['wake'][indices], self._rows['last'][indices]
    return (wake.astype(np.int64) << 32) + last

  def _tidy(self) -> None:
    """Puts `near` in order, without those who are none any more."""
    near = np.unique(np.concatenate([self._near, np.array(self._fresh, np.int64)]))
    near = near[self.is_asleep(near)]
    keys = self._keys(near)
    near, keys = near[keys <= self._bound], keys[keys <= self._bound]
    self._near, self._fresh = near[np.argsort(keys, kind='stable')], []

  def _search(self, n: int) -> None:
    """Looks at all prompts for the n who are next to wake."""
    near = np.empty(0, np.int64)
    self._bound = np.iinfo(np.int64).max
    for start in range(0, self.size, _CHUNK):
      found = np.flatnonzero(self._rows['state'][start : start + _CHUNK] == SNOOZED)
      near = np.concatenate([near, start + found])
      if len(near) > n:
        keys = self._keys(near)
        self._bound = int(np.partition(keys, n - 1)[n - 1])
        near = near[keys <= self._bound]
    self._near, self._fresh = near, []
    self._tidy()

  # --- changes ---

  def get(self, indices: np.ndarray) -> np.ndarray:  # [n] -> [n] of ROW
    return self._rows[indices]

  def replace(self, indices: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
    """Sets rows, none twice, that `get` has given as `before`."""
    self._journal.note(indices, [before])
    self._rows[indices] = after
    state, wake = after['state'], after['wake']
    slept, sleeps = before['state'] == SNOOZED, state == SNOOZED
    self._open[indices] = (state == ACTIVE) | (sleeps & (wake <= self._open_in))
    self._active += int(np.count_nonzero(state == ACTIVE))
    self._active -= int(np.count_nonzero(before['state'] == ACTIVE))
    self._count(before['wake'][slept], -1)
    self._count(wake[sleeps], 1)
    if self._bound is not None:
      near = sleeps & (self._keys(indices) <= self._bound)
      self._fresh += indices[near].tolist()
      if len(self._fresh) > len(self._near) + 4096:  # nobody asks
        self._bound, self._near, self._fresh = None, np.empty(0, np.int64), []
    self.newest = max(self.newest, int(after['last'].max(initial=-1)))

  def _count(self, wakes: np.ndarray, sign: int) -> None:
    """Counts sleepers with these wake passes in or out."""
    if not len(wakes):
      return
    for wake, count in zip(*np.unique(wakes, return_counts=True), strict=True):
      wake = int(wake)
      self._asleep[wake] = self._asleep.get(wake, 0) + sign * int(count)
      if not self._asleep[wake]:
        del self._asleep[wake]

  def take(self, indices: np.ndarray, draws: np.ndarray, numbers: np.ndarray) -> int:
    """Notes requests, in draw order; an index may come more than once.

    Returns:
      For how many of them an earlier request was still open.
    """
    rows = self._rows
    before = rows[indices]
    self._journal.note(indices, [before])
    once, first = np.unique(indices, return_index=True)
    is_open = before['last'] > before['applied']
    repeats = len(indices) - len(once) + int(np.count_nonzero(is_open[first]))
    woken = once[before['state'][first] == SNOOZED]
    self._count(rows['wake'][woken], -1)
    rows['state'][woken] = PROBE
    self._open[woken] = False
    rows['last'][indices] = draws  # of equal indices the last one counts
    rows['drawn'][indices] = numbers
    self.newest = max(self.newest, int(draws.max(initial=-1)))
    return repeats

  # --- state ---

  def freeze(self) -> Callable[[], dict[str, np.ndarray]]:
    """The columns as of now, to be copied later, see `Journal.freeze`."""
    as_frozen = self._journal.freeze()
    return lambda: _columns(as_frozen()['rows'])

  def columns(self) -> dict[str, np.ndarray]:
    return _columns(self._rows)

  def load(self, columns: Mapping[str, np.ndarray]) -> None:
    """Takes columns that `check_columns` has passed."""
    self._journal.forget()
    for name in ROW.names:
      self._rows[name] = columns[name]
    self._recount()


def _columns(rows: np.ndarray) -> dict[str, np.ndarray]:
  return {name: rows[name].copy() for name in ROW.names}


def check_columns(name: str, columns: Mapping[str, Any], size: int) -> None:
  """Refuses what no `columns` of a dataset of this size would give."""
  check_state(name, columns, dict.fromkeys(ROW.names))
  for key in ROW.names:
    column, dtype = columns[key], ROW[key]
    if not isinstance(column, np.ndarray):
      raise ValueError(f'{name}.{key}: {type(column).__name__}, expected an array')
    if column.dtype != dtype or column.shape != (size,):
      raise ValueError(
        f'{name}.{key}: {column.dtype} {list(column.shape)}, expected {dtype} [{size}]'
      )
  ranges = {
    'state': (ACTIVE, PROBE),
    'streak': (0, LONGEST_STREAK),
    'wake': (0, FOREVER),
    'last': (-1, FOREVER - 1),
    'applied': (-1, FOREVER - 1),
    'drawn': (0, FOREVER - 1),
  }
  for key, (least, most) in ranges.items():
    if columns[key].min() < least or columns[key].max() > most:
      raise ValueError(
        f'{name}.{key}: {columns[key].min()} to {columns[key].max()}, '
        f'expected {least} to {most}'
      )
  if np.any(columns['applied'] > columns['last']):
    raise ValueError(f'{name}: a result newer than the newest request')
