"""When answers end in the slots of one engine, counted in decode steps.

As `device/sampler.py` does it: R slots, decoded in chunks of steps; free slots take the
next answers between two chunks; a chunk ends early where nothing is alive.
"""

from collections.abc import Sequence
import dataclasses
import heapq

import numpy as np


@dataclasses.dataclass(frozen=True)
class Decoded:
  """An engine's work on its share."""

  ends: np.ndarray  # [n] int64, the decode step after which each answer has ended
  steps: int  # until the last one has
  chunks: int  # launches


def refill(lengths: np.ndarray, slots: int, chunk: int = 1) -> Decoded:
  """A slot that gets free takes the next answer, in the order given.

  Args:
    lengths: [n] tokens to be made, at least 1 each.
    slots: R. chunk: decode steps between two looks at what is free.
  """
  if len(lengths) <= slots:
    steps = int(lengths.max(initial=0))
    return Decoded(np.asarray(lengths, np.int64), steps, -(-steps // chunk))
  free = [0] * slots  # when each slot is next looked at: ends of chunks
  begin = last_look = last_end = chunks = 0
  ends = []
  for length in lengths.tolist():
    at = free[0]
    if at == last_look:  # all slots have run dry in one chunk, which ended early
      chunks -= (begin - last_end) // chunk
      at = begin = last_end
      free = [at] * slots
    end = at + length
    look = at - (-length // chunk) * chunk
    heapq.heapreplace(free, look)
    if look > last_look:
      last_look = look
    if end > last_end:
      last_end = end
    ends.append(end)
  chunks -= (begin - last_end) // chunk
  return Decoded(np.array(ends), last_end, chunks)


def static(lengths: np.ndarray, cuts: Sequence[int], slots: int, chunk: int) -> Decoded:
  """Minibatches one after another; each lasts as long as its longest answer.

  Args:
    cuts: where each begins, from 0 up. One larger than the slots is refilled within.
  """
  bounds = [*np.asarray(cuts).tolist(), len(lengths)]
  ends, steps, chunks = np.empty(len(lengths), np.int64), 0, 0
  for begin, end in zip(bounds, bounds[1:], strict=False):
    part = refill(lengths[begin:end], slots, chunk)
    ends[begin:end] = steps + part.ends
    steps, chunks = steps + part.steps, chunks + part.chunks
  return Decoded(ends, steps, chunks)
