"""Who is kept of a request's answers, against the definition: sort, and take G.

What is left after each bundle is the same under any order, slots and chunks.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import toys

from jaxrl_sched.host import relief
from jaxrl_sched.types import Completion

quick = settings(derandomize=True, deadline=None, max_examples=300)


@st.composite
def races(draw):
  size = draw(st.integers(1, 5))
  total = size + draw(st.integers(0, 4))
  numbers = st.lists(st.integers(1, 8), min_size=total, max_size=total)
  flags = st.lists(st.booleans(), min_size=total, max_size=total)
  return size, draw(numbers), draw(flags)


def race_on(begun, race, first_finished, *, slots, chunk, pause, order):
  """One bundle by plain arithmetic: the race when nothing runs, and who was dropped.

  Args:
    begun: answer -> tokens it had before.
  """
  size, lengths, aborted = race
  kept = toys.kept(lengths, aborted, size, first_finished)
  found = relief.Race(size, first_finished=first_finished)
  found.open = dict(begun)
  for a in begun:
    if begun[a] == lengths[a]:
      found.end(a, lengths[a], aborted=aborted[a])
  queue, running, dropped = [a for a in order if a in found.open], [], set()
  while queue or running:
    while queue and len(running) < slots:
      running.append(queue.pop(0))
    for a in running:
      found.open[a] = min(lengths[a], found.open[a] + chunk, begun[a] + pause)
      if found.open[a] == lengths[a]:
        found.end(a, lengths[a], aborted=aborted[a])
    dropped |= set(found.drop())
    running = [
      a for a in running if a in found.open and found.open[a] < begun[a] + pause
    ]
    queue = [a for a in queue if a in found.open]
    certain = {a for a in begun if found.is_kept(a)}
    assert certain <= kept and not dropped & kept
  return found, dropped | set(found.drop_ended())


timings = st.tuples(
  st.integers(1, 6), st.integers(1, 5), st.randoms(use_true_random=False)
)


@quick
@given(races(), st.booleans(), st.sampled_from([1, 2, 5, 99]), timings, timings)
def test_what_is_kept_hangs_on_lengths_alone(race, first_finished, pause, one, other):
  """Under any order of starts, slots and chunks; and what is left after each bundle."""
  size, lengths, aborted = race
  begun = dict.fromkeys(range(len(lengths)), 0)
  dropped = set()
  while True:
    ends = []
    for slots, chunk, random in (one, other):
      order = random.sample(range(len(lengths)), len(lengths))
      how = dict(slots=slots, chunk=chunk, pause=pause, order=order)
      ends.append(race_on(begun, race, first_finished, **how))
    (found, gone), (again, gone_again) = ends
    assert (found.open, found.ended, gone) == (again.open, again.ended, gone_again)
    dropped |= gone
    if not found.open:
      break
    begun = found.open | {a: lengths[a] for a in found.ended}
  kept = toys.kept(lengths, aborted, size, first_finished)
  assert set(found.ended) == kept and dropped == set(range(len(lengths))) - kept
  assert all(found.is_kept(a) for a in kept)


def test_the_first_in_answer_order_are_kept_and_not_the_first_to_end():
  """G = 2, one spare: of lengths 9, 5, 1 the first two; the spare goes when they end."""
  race = relief.Race(2, first_finished=False)
  race.open = dict.fromkeys(range(3), 0)
  race.end(2, 1)
  assert not race.is_kept(2)
  race.end(1, 5)
  assert race.is_kept(1) and not race.drop()
  race.end(0, 9)
  assert race.drop_ended() == [2] and race.is_kept(0)


def test_a_spare_takes_the_place_of_an_aborted_answer():
  race = relief.Race(2, first_finished=False)
  race.open = dict.fromkeys(range(4), 0)
  race.end(0, 3, aborted=True)
  race.end(2, 1)
  assert race.is_kept(2)  # at worst 1 and 2
  race.end(1, 4)
  assert race.drop() == [3] and race.drop_ended() == [0]


def test_a_long_answer_is_cut_when_the_shortest_are_sure():
  """Two of 4 tokens are in: who has made 4, or 3 with a higher number, is too late."""
  race = relief.Race(2, first_finished=True)
  race.open = {0: 3, 1: 4, 2: 0, 3: 0, 4: 3}
  race.end(2, 4)
  assert not race.drop()  # one is not two
  race.end(3, 4)
  assert race.drop() == [1, 4]  # (5, 1) and (4, 4) are above (4, 3); (4, 0) is not
  assert race.is_kept(2) and not race.is_kept(3)
  race.end(0, 4)
  assert race.drop_ended() == [3]


@quick
@given(races(), st.booleans())
def test_the_cutoff_is_the_first_token_that_makes_it_too_late(race, first_finished):
  """An answer that is told its cut-off is dropped there, and nowhere before."""
  size, lengths, aborted = race
  found = relief.Race(size, first_finished=first_finished)
  found.open = dict.fromkeys(range(len(lengths) + 1), 0)
  for a, length in enumerate(lengths):
    found.end(a, length, aborted=aborted[a])
  late, ranks = len(lengths), sorted(found.ended.values())
  for made in range(10):
    rank = (made + 1 if first_finished else 0, late)  # if it ended with one more
    assert (made >= found.cutoff(late)) == (sum(r < rank for r in ranks) >= size)


def test_versions_that_are_the_same_are_one_run():
  zeros = np.zeros(5, np.int32)
  begun = Completion(
    draw=0, answer=0, tokens=zeros, logps=zeros, finish='paused', version=3
  )
  assert relief.versions_before(begun, 3) == ()
  assert relief.versions_before(begun, 4) == ((5, 3),)
