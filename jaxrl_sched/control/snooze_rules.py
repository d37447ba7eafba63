"""When a prompt counts as solved, and how long it sleeps then."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from jaxrl_sched.types import Group, tolerance

SMALL_GROUP = 4  # up to here one full group is weak evidence: it takes two in a row
LONGEST_STREAK = 2  # of full groups: a longer one says no more
DEEPEST_LEVEL = 2**16 - 1

KINDS = ('useful', 'constant', 'hard', 'easy')
USEFUL, CONSTANT, HARD, EASY = range(len(KINDS))

# Of several groups: verdicts, [G] each, and the best and the worst that there may be.
Columns = tuple[
  Sequence[Sequence[float] | np.ndarray], Sequence[float | None], Sequence[float]
]


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
  return KINDS[verdict_classes([verdicts], [max_reward], [min_reward])[0]]


def verdict_classes(
  verdicts: Sequence[Sequence[float] | np.ndarray],  # [G] each
  max_rewards: Sequence[float | None],
  min_rewards: Sequence[float],
  deciding: Columns | None = None,
) -> np.ndarray:
  """`verdict_class` of many groups, as places in KINDS: [groups] int8.

  Args:
    deciding: other verdicts, with their bounds, which say whether answers that are
      worth the same are the best or the worst.
  """
  arrays = [np.asarray(group) for group in verdicts]
  sizes = np.array([len(array) for array in arrays], np.int64)
  flat = np.concatenate(arrays, dtype=np.float64) if arrays else np.empty(0)
  if not (sizes > 0).all() or not np.isfinite(flat).all():
    bad = [a.tolist() for a in arrays if not len(a) or not np.isfinite(a).all()]
    raise ValueError(f'verdicts: {bad[0]}, expected finite numbers, at least one')
  if not arrays:
    return np.empty(0, np.int8)
  best = np.array(max_rewards, np.float64)  # None: NaN, which nothing is near to
  worst = np.array(min_rewards, np.float64)
  starts = np.cumsum(sizes) - sizes
  lowest, highest = np.minimum.reduceat(flat, starts), np.maximum.reduceat(flat, starts)
  differ = highest - lowest > tolerance(best, worst)
  if deciding is not None:
    flat = np.concatenate(
      [np.asarray(group) for group in deciding[0]], dtype=np.float64
    )
    best = np.array(deciding[1], np.float64)
    worst = np.array(deciding[2], np.float64)
    lowest = np.minimum.reduceat(flat, starts)
    highest = np.maximum.reduceat(flat, starts)
  kinds = np.full(len(arrays), CONSTANT, np.int8)
  near = tolerance(best, worst)
  for bound, kind in ((worst, HARD), (best, EASY)):
    kinds[(lowest >= bound - near) & (highest <= bound + near)] = kind
  kinds[differ] = USEFUL
  return kinds


def columns(groups: Sequence[Group]) -> dict[str, Any]:
  """Of these groups, the arguments of `verdict_classes`."""
  prompts = [group.request.prompt for group in groups]
  found = dict(
    verdicts=[group.verdicts for group in groups],
    max_rewards=[prompt.max_reward for prompt in prompts],
    min_rewards=[prompt.min_reward for prompt in prompts],
  )
  if any(group.components for group in groups):
    found['deciding'] = tuple(zip(*(g.deciding for g in groups), strict=True))
  return found


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
    self,
    kinds: np.ndarray,  # [n]
    sizes: np.ndarray,  # [n]
    asleep: np.ndarray,  # [n] bool
    streak: np.ndarray,  # [n] int64
    level: np.ndarray,  # [n] int64
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What results of these kinds, of groups of these sizes, do to prompts.

    Args:
      asleep: the prompt sleeps already, since an older request of it.
      streak, level: of the prompt so far.

    Returns:
      Its streak of easy groups, its level, and the passes it sleeps for: 0, and it is
      active. (A nap of 0 passes is none: such a prompt may be drawn while its result
      is out, so that a factor of 0 is dynamic sampling, request by request.)
    """
    easy = kinds == EASY
    streak = np.where(easy, np.minimum(streak + 1, LONGEST_STREAK), 0)
    solved = easy & ((sizes > SMALL_GROUP) | (streak >= 2))
    # A second result in flight prolongs a sleep, it does not deepen it.
    deeper = np.where(asleep, level, np.minimum(level + 1, DEEPEST_LEVEL))
    level = np.where(solved, deeper, np.where(easy, level, 0))
    nap = np.where(kinds == HARD, delay(1, self.hard_delay), 0.0)
    if solved.any():
      levels, which = np.unique(level[solved], return_inverse=True)
      naps = [delay(n, self.factor, self.growth, self.cap) for n in levels.tolist()]
      nap[solved] = np.array(naps, np.float64)[which]
    return streak, level, nap
