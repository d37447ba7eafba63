"""When generation ends and training begins: slots, engines, and a queue bounded by lag.

Pure arithmetic on durations, in any one unit: decode steps or seconds.
"""

from collections.abc import Sequence
import dataclasses
import heapq

import numpy as np


def version_for(bundle: int, lag: int) -> int:
  """The version of the weights that a bundle is planned and sampled with."""
  return max(0, bundle - lag)


def refill_ends(
  lengths: Sequence[float] | np.ndarray, slots: int, chunk: int = 1
) -> np.ndarray:
  """When each answer ends, where a slot that gets free takes the next one.

  Args:
    lengths: [n] decode steps, in the order in which answers are started.
    slots: answers that run at a time.
    chunk: a slot that got free takes the next answer at a multiple of so many steps.

  Returns:
    [n], counted from the start of the first.
  """
  if slots < 1 or chunk < 1:
    raise ValueError(f'slots and chunk: {slots} and {chunk}, expected at least 1')
  lengths = np.asarray(lengths)
  ends = lengths.copy()  # the first ones start at once, each in a slot of its own
  free = lengths[:slots].tolist()  # when each slot is free again: the earliest first
  heapq.heapify(free)
  later = lengths[slots:].tolist()
  for i, length in enumerate(later):
    start = free[0] if chunk == 1 else -(-free[0] // chunk) * chunk
    later[i] = start + length
    heapq.heapreplace(free, later[i])
  ends[slots:] = later
  return ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
  """What was when: J bundles in the order of training, E engines."""

  start: np.ndarray  # [J, E] an engine begins its share, with the weights loaded
  end: np.ndarray  # [J, E] and is done with it
  ready: np.ndarray  # [J] the bundle is sampled and graded
  learn: np.ndarray  # [J] the trainer begins with it
  publish: np.ndarray  # [J + 1] version v of the weights is there


def timeline(
  gen: np.ndarray,  # [J] or [J, E] time of each engine's share of each bundle
  train: np.ndarray,  # [J]
  lag: int,
  *,
  load: float = 0.0,
  reward: float = 0.0,
) -> Timeline:
  """The recursion of a pipeline whose bundle j is sampled with version max(0, j - lag).

  An engine goes through its shares in order and waits for no other engine, only for
  the version that the bundle is to be sampled with.

  Args:
    load: time to load any version but the first, which engines have.
    reward: time from the last answer of a bundle to its last verdict.
  """
  gen, train = np.asarray(gen, np.float64), np.asarray(train, np.float64)
  gen = gen[:, None] if gen.ndim == 1 else gen
  bundles, engines = gen.shape
  if train.shape != (bundles,) or engines < 1:
    raise ValueError(
      f'gen and train: {list(gen.shape)} and {list(train.shape)}, expected [J, E] '
      'and [J], with an engine at least'
    )
  if lag < 0:
    raise ValueError(f'lag: {lag}, expected at least 0')
  start, end = np.empty_like(gen), np.empty_like(gen)
  ready, learn, publish = np.empty(bundles), np.empty(bundles), np.zeros(bundles + 1)
  done = np.zeros(engines)  # with the share before
  for j in range(bundles):
    version = version_for(j, lag)
    start[j] = np.maximum(done, publish[version]) + (load if version > 0 else 0.0)
    end[j] = done = start[j] + gen[j]
    ready[j] = done.max() + reward
    learn[j] = max(publish[j], ready[j])
    publish[j + 1] = learn[j] + train[j]
  return Timeline(start=start, end=end, ready=ready, learn=learn, publish=publish)


def makespan(
  gen: np.ndarray,
  train: np.ndarray,
  lag: int,
  load: float = 0.0,
  reward: float = 0.0,
) -> float:
  """When the last bundle is trained on; see `timeline`."""
  return float(timeline(gen, train, lag, load=load, reward=reward).publish[-1])
