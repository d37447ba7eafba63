"""When a prompt counts as solved, and how long it sleeps then."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import numpy as np

from jaxrl_sched.types import SAME

SMALL_GROUP = 4  # up to here one full group is weak evidence: it takes two in a row
LONGEST_STREAK = 2  # of full groups: a longer one says no more
DEEPEST_LEVEL = 2**16 - 1


def delay(
  level: int, factor: float, growth: float = 1.0, cap: float | None = None
) -> float:
  """How many passes a prompt skips at its level-th snooze in a row; perhaps math.inf."""
  most = math.inf if cap is None else cap
  if factor == 0:
    return 0
  try:
    wanted = factor * growth ** (level - 1) + 0.5
  except OverflowError:
    return most
  return min(most, math.floor(wanted) if math.isfinite(wanted) else math.inf)


def verdict_class(
  verdicts: Sequence[float] | np.ndarray,  # [G]
  max_reward: float | None,  # None: the verifier declares no maximum
  min_reward: float = 0.0,
) -> str:
  """'easy' or 'hard' if all are the best or the worst, else 'constant' or 'useful'."""
  array = np.asarray(verdicts)
  values = array.tolist()
  if not values or not math.isfinite(sum(values)):
    raise ValueError(f'verdicts: {values}, expected finite numbers, at least one')
  if max(values) - min(values) > SAME:
    return 'useful'
  if array.dtype == np.float32:  # then the bounds went through float32 too
    min_reward = _as_float32(min_reward)
    max_reward = None if max_reward is None else _as_float32(max_reward)
  if max_reward is not None and abs(values[0] - max_reward) <= SAME:
    return 'easy'
  return 'hard' if abs(values[0] - min_reward) <= SAME else 'constant'


@functools.cache  # verifiers declare few
def _as_float32(reward: float) -> float:
  return float(np.float32(reward))


@dataclasses.dataclass(frozen=True)
class Naps:
  """How long a prompt sleeps after which result. The settings are those of Snooze."""

  factor: float
  growth: float
  cap: float | None
  hard_delay: float

  def __post_init__(self):
    def need(good: bool, key: str, value: Any, expected: str) -> None:
      if not good:
        raise ValueError(f'snooze.{key}: {value}, expected {expected}')

    cap = self.cap
    need(self.factor >= 0, 'factor', self.factor, '0 or more passes')
    need(1 <= self.growth < math.inf, 'growth', self.growth, 'at least 1')
    whole = cap is None or (cap >= 1 and cap % 1 == 0)
    need(whole, 'cap', cap, 'None or a whole number of passes, at least 1')
    need(self.hard_delay >= 0, 'hard_delay', self.hard_delay, '0 or more passes')

  @property
  def are_any(self) -> bool:
    return self.factor > 0 or self.hard_delay > 0

  def after(
    self, kind: str, size: int, asleep: bool, streak: int, level: int
  ) -> tuple[int, int, float]:
    """What a result of this kind, of a group of this size, does to a prompt.

    Args:
      asleep: the prompt sleeps already, since an older request of it.
      streak, level: of the prompt so far.

    Returns:
      Its streak of easy groups, its level, and the passes it sleeps for: 0, and it is
      active. (A nap of 0 passes is none: such a prompt may be drawn while its result
      is out, so that a factor of 0 is dynamic sampling, request by request.)
    """
    if kind != 'easy':
      return 0, 0, delay(1, self.hard_delay) if kind == 'hard' else 0
    streak = min(streak + 1, LONGEST_STREAK)
    if size <= SMALL_GROUP and streak < 2:
      return streak, level, 0
    # A second result in flight prolongs a sleep, it does not deepen it.
    if not asleep:
      level = min(level + 1, DEEPEST_LEVEL)
    return streak, level, delay(level, self.factor, self.growth, self.cap)
