"""Large arrays as they were at an earlier moment, from notes of what changed since."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


class Journal:
  """Freezes arrays without copying them.

  Whoever changes rows says so first, and those rows are noted; the arrays of an
  earlier moment are a copy of now with the notes put back. Nothing is noted before
  the first `freeze`, and the notes of one are forgotten at the next.

  Args:
    arrays: of one length, only ever changed in place.
  """

  def __init__(self, arrays: Mapping[str, np.ndarray]):
    self.arrays = dict(arrays)
    self._notes: list[tuple[Any, Sequence[Any]]] | None = None

  def freeze(self) -> Callable[[], dict[str, np.ndarray]]:
    """The arrays as of now, to be copied later, if at all.

    It holds until the next call or `forget`; a RuntimeError after that.
    """
    notes = self._notes = []

    def as_frozen() -> dict[str, np.ndarray]:
      if notes is not self._notes:
        raise RuntimeError(
          'this frozen state is past: a later one or a load replaced it'
        )
      copies = self.copies()
      for rows, before in reversed(notes):  # the oldest note of a row counts
        for copy, values in zip(copies.values(), before, strict=True):
          copy[rows] = values
      return copies

    return as_frozen

  def note(self, rows: int | np.ndarray, before: Sequence[Any] | None = None) -> None:
    """These rows are about to change.

    Args:
      rows: one, or [n] int, of which some may be equal.
      before: what is in them, by array, where that is at hand.
    """
    if self._notes is None:
      return
    if before is None:
      before = [array[rows] for array in self.arrays.values()]
    self._notes.append((rows, before))

  def forget(self) -> None:
    """All rows are about to change: nothing frozen holds from here on."""
    self._notes = None

  def copies(self) -> dict[str, np.ndarray]:
    """The arrays now."""
    return {name: array.copy() for name, array in self.arrays.items()}
