"""What things take on the simulated clock, in seconds; given, or fitted to a run."""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from jaxrl_sched.sim.counts import GENERATE, HOST, LEARN, REWARD, StepTimes
from jaxrl_sched.sim.past import read_run as read_run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Seconds. All are at least 0; what is left at 0 is free.

  A decode step takes `decode_step`, `decode_row` for each answer that is alive and
  `decode_cached` for each token in the cache that one of them looks back at.
  """

  decode_step: float = 0.0
  decode_row: float = 0.0
  decode_cached: float = 0.0
  chunk: float = 0.0  # a launch of several decode steps
  prefill_prompt: float = 0.0
  prefill_token: float = 0.0
  load: float = 0.0  # a new version of the weights into an engine
  reward_round: float = 0.0  # after the last answer of a round has ended
  reward_answer: float = 0.0
  learn_step: float = 0.0
  learn_batch: float = 0.0  # a microbatch
  learn_token: float = 0.0  # of prompt and kept answers, as trained on
  overhead: float = 0.0  # of the host, once a step
  overhead_answer: float = 0.0  # that is taken in

  def __post_init__(self):
    self.check()

  def check(self) -> None:
    """Raises ValueError, naming the cost, for one that is negative or no number."""
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      real = isinstance(value, int | float) and not isinstance(value, bool)
      if not real or not 0 <= value < math.inf:
        raise ValueError(
          f'costs.{field.name}: {value!r}, expected a number of seconds from 0'
        )

  def of(self, names: Sequence[str]) -> np.ndarray:  # [len(names)]
    return np.array([getattr(self, name) for name in names], np.float64)


# --- fitting -------------------------------------------------------------------------


def fit(records: Sequence[StepTimes]) -> Costs:
  """The costs under which these steps take what they took.

  Where steps are too much alike to tell two costs apart, what is charged to which is
  arbitrary, but the sum is not: over the steps given, the times predicted sum to those
  measured.
  """
  if not records:
    raise ValueError('costs: no step to fit to, expected one at least')
  loads = [r.load_s for r in records if r.load_s is not None]
  found = {'load': float(np.mean(loads)) if loads else 0.0}
  for names, features, times in (
    (GENERATE, [r.generate for r in records], [r.generate_s for r in records]),
    (REWARD, [r.reward for r in records], [r.reward_s for r in records]),
    (HOST, [r.host for r in records], [r.overhead_s for r in records]),
    (LEARN, [r.learn for r in records], [r.learn_s for r in records]),
  ):
    fitted = _fit(np.array(features), np.array(times))
    found |= dict(zip(names, fitted.tolist(), strict=True))
  return Costs(**found)


def predicted(costs: Costs, records: Sequence[StepTimes]) -> tuple[float, float]:
  """What these steps take by the costs, and what they took, in seconds."""
  told = taken = 0.0
  for r in records:
    for names, counts in (
      (GENERATE, r.generate),
      (REWARD, r.reward),
      (HOST, r.host),
      (LEARN, r.learn),
    ):
      told += float(counts @ costs.of(names))
    told += costs.load * (r.load_s is not None)
    taken += r.generate_s + r.reward_s + r.overhead_s + r.learn_s + (r.load_s or 0.0)
  return told, taken


def _fit(features: np.ndarray, times: np.ndarray) -> np.ndarray:
  """[k] >= 0 for features [n, k] and times [n].

  The variance is taken to grow with the time: then long steps have not all the say,
  and the times predicted sum to those measured.
  """
  scale = np.abs(features).max(axis=0)
  scale[scale == 0] = 1.0
  scaled = features / scale
  weights = np.ones(len(times))
  for _ in range(8):
    x = nonnegative_least_squares(scaled * weights[:, None], times * weights)
    predicted = scaled @ x
    weights = 1 / np.sqrt(np.maximum(predicted, 1e-3 * times.mean() + 1e-12))
  return x / scale


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """The x >= 0 [k] for which |a x - b| is least; a is [n, k], b [n].

  The active-set method of Lawson and Hanson (1974): columns join one by one, and leave
  where they would turn negative.
  """
  x = np.zeros(a.shape[1])
  is_in = np.zeros(a.shape[1], bool)
  small = 1e-10 * max(1e-30, float(np.abs(a.T @ b).max(initial=0.0)))
  for _ in range(10 * a.shape[1]):
    slope = a.T @ (b - a @ x)
    slope[is_in] = -np.inf
    best = int(np.argmax(slope))
    if slope[best] <= small:
      break
    is_in[best] = True
    while is_in.any():  # one less each time
      full = np.zeros_like(x)
      full[is_in] = np.linalg.lstsq(a[:, is_in], b, rcond=1e-10)[0]
      bad = is_in & (full <= 0)
      if not bad.any():
        break
      # As far towards it as all stay at 0 or above; who gets to 0 leaves.
      gap = x[bad] - full[bad]
      shares = np.divide(x[bad], gap, out=np.zeros_like(gap), where=gap > 0)
      x = x + shares.min() * (full - x)
      is_in &= x > 1e-14 * max(1e-30, float(x.max()))
      is_in[np.flatnonzero(bad)[shares.argmin()]] = False
      x[~is_in] = 0.0
      full = x
    x = full
  return x
