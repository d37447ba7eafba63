"""Slots and chunks against a simulation that goes step by step."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np

from jaxrl_sched.control.timeline import refill_ends
from jaxrl_sched.sim.slots import refill, static

LENGTHS = st.lists(st.integers(1, 23), min_size=1, max_size=14)


def step_by_step(lengths, slots, chunk):
  """As the sampler's own loop: fill what is free, decode a chunk, look again."""
  waiting, running, ends = list(range(len(lengths))), {}, [0] * len(lengths)
  now = chunks = 0
  while waiting or running:
    while waiting and len(running) < slots:
      i = waiting.pop(0)
      running[i] = lengths[i]
    chunks += 1
    for _ in range(chunk):
      if not any(left > 0 for left in running.values()):
        break
      now += 1
      for i in running:
        running[i] -= 1
        if running[i] == 0:
          ends[i] = now
    running = {i: left for i, left in running.items() if left > 0}
  return ends, now, chunks


def test_refill_and_static_pairs_of_the_specification():
  lengths = np.array([900, 500, 400, 300, 200, 100])
  assert refill(lengths, 2).steps == 1200
  assert static(lengths, [0, 2, 4], 2, 1).steps == 1500
  assert static(lengths, [0, 2, 4], 2, 1).ends.tolist() == [
    *(900, 500),
    *(900 + 400, 900 + 300),
    *(1300 + 200, 1300 + 100),
  ]


def test_a_chunk_ends_early_when_nothing_is_alive():
  # Two slots, chunks of 8: both end at 3, so the next two start there, and not at 8.
  found = refill(np.array([3, 2, 9, 1]), 2, 8)
  assert found.ends.tolist() == [3, 2, 12, 4]
  assert (found.steps, found.chunks) == (12, 3)


@settings(derandomize=True, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 9))
def test_slots_do_as_a_loop_over_steps_does(lengths, slots, chunk):
  found = refill(np.array(lengths), slots, chunk)
  ends, steps, chunks = step_by_step(lengths, slots, chunk)
  assert found.ends.tolist() == ends
  assert (found.steps, found.chunks) == (steps, chunks)


@settings(derandomize=True, deadline=None)
@given(LENGTHS, st.integers(1, 5))
def test_with_chunks_of_one_step_it_is_the_rule_that_plans_go_by(lengths, slots):
  ends = refill(np.array(lengths), slots).ends
  assert ends.tolist() == refill_ends(lengths, slots).tolist()


@settings(derandomize=True, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 9), st.integers(1, 4))
def test_minibatches_wait_for_the_ones_before(lengths, slots, chunk, size):
  cuts = list(range(0, len(lengths), size))
  found = static(np.array(lengths), cuts, slots, chunk)
  ends, steps, chunks = [], 0, 0
  for cut in cuts:
    mine = step_by_step(lengths[cut : cut + size], slots, chunk)
    ends += [steps + end for end in mine[0]]
    steps, chunks = steps + mine[1], chunks + mine[2]
  assert found.ends.tolist() == ends
  assert (found.steps, found.chunks) == (steps, chunks)


def test_an_empty_share_takes_nothing():
  nothing = np.array([], np.int64)
  assert (refill(nothing, 4, 8).steps, refill(nothing, 4, 8).chunks) == (0, 0)
  assert static(nothing, [], 4, 8).steps == 0
