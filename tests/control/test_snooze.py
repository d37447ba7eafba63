"""Snoozing and the draw of prompts: sections 2.1 to 2.4 and 2.6 of algorithms.md.

The numbers are those of 2.10. Beside them stands the state machine of 2.3, written
plainly with a record a prompt, and every request is compared with it.
"""

import collections
import copy
import dataclasses
import json
import math
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxrl_sched.control.snooze import (
  Snooze,
  delay,
  largest_remainder,
  requests_for,
  roll,
  verdict_class,
)

EASY, HARD, USEFUL = [1.0] * 8, [0.0] * 8, [1.0, 0.0] * 4
quick = settings(derandomize=True, deadline=None, max_examples=60)


def snooze(size: int = 1, **how) -> Snooze:
  return Snooze({'a': size}, {'a': 1.0}, **how)


# --- the state machine of 2.3, one record a prompt ---


@dataclasses.dataclass
class Record:
  state: str = 'active'
  streak: int = 0
  level: int = 0
  wake: float = 0
  last: int = -1
  applied: int = -1


class Plain:
  """One dataset. Looks at every prompt for every request."""

  def __init__(self, size, factor, growth, cap, hard_delay, seed, place=0):
    self.settings = factor, growth, cap, hard_delay
    self.key, self.size = (seed, place), size
    self.records = [Record() for _ in range(size)]
    self.number = self.cursor = self.early_wakes = self.repeats = 0

  def order(self):
    return np.random.default_rng((*self.key, self.number)).permutation(self.size)

  def is_eligible(self, record, number):
    due = record.state == 'snoozed' and record.wake <= number
    return record.state == 'active' or due

  def pick(self) -> int:
    for _ in range(2):
      order = self.order().tolist()
      for place in range(self.cursor, self.size):
        if self.is_eligible(self.records[order[place]], self.number):
          self.cursor = place + 1
          return order[place]
      if not any(self.is_eligible(r, self.number + 1) for r in self.records):
        break
      self.number, self.cursor = self.number + 1, 0
    asleep = [(r.wake, r.last, i) for i, r in enumerate(self.records)
              if r.state == 'snoozed']  # fmt: skip
    if asleep:
      self.early_wakes += 1
      return min(asleep)[-1]
    return min((r.last, i) for i, r in enumerate(self.records))[-1]

  def next(self, draw) -> tuple[int, int]:
    index = self.pick()
    record = self.records[index]
    self.repeats += record.last > record.applied
    if record.state == 'snoozed':
      record.state = 'probe'
    record.last = draw
    return index, self.number

  def result(self, index, verdicts, draw, drawn):
    factor, growth, cap, hard_delay = self.settings
    record = self.records[index]
    if draw <= record.applied:
      return
    record.applied = draw
    if len(verdicts) < 2:  # our choice: nothing was seen
      if record.state == 'probe' and record.last == draw:
        record.state = 'snoozed'
      return
    nap = 0
    if min(verdicts) == 1:
      record.streak += 1
      if len(verdicts) > 4 or record.streak >= 2:
        record.level += record.state != 'snoozed'
        nap = factor * growth ** (record.level - 1)
        nap = nap if nap == math.inf else math.floor(nap + 0.5)
        nap = nap if cap is None else min(cap, nap)
    else:
      record.streak = record.level = 0
      if max(verdicts) == 0:
        nap = hard_delay
    record.state = 'snoozed' if nap else 'active'  # our choice: a nap of 0 is none
    if nap:
      record.wake = drawn + 1 + nap


HOW = st.fixed_dictionaries(
  {
    'factor': st.sampled_from([0, 0.3, 1, 2, 5, math.inf]),
    'growth': st.sampled_from([1.0, 1.6, 2.0]),
    'cap': st.sampled_from([None, None, 1, 4]),
    'hard_delay': st.sampled_from([0, 0, 2]),
    'seed': st.integers(0, 3),
  }
)
VERDICTS = [EASY, EASY, EASY, [1.0] * 4, [1.0] * 4, USEFUL, HARD, [0.5] * 4, [1.0], []]


@settings(quick, max_examples=250)
@given(st.integers(1, 9), HOW, st.integers(0, 2**32), st.integers(0, 30))
def test_every_request_is_that_of_the_plain_machine(size, how, key, cut):
  """E2: passes end in the middle of a round. H3: a resume at any point, mid-pass and
  mid-refill. Results come with any lag, late ones after newer ones and twice."""
  rng = np.random.default_rng(key)
  drawn, plain = snooze(size, **how), Plain(size, **how)
  draw, waiting = 0, []
  ease, n = rng.random(), 3
  for step in range(30):
    if step == cut:
      drawn, old = snooze(size, **how), drawn
      drawn.load_state_dict(copy.deepcopy(old.state_dict()))
    expected, peeked = [], drawn.peek('a', n)
    for _ in range(n):
      expected.append(plain.next(draw + len(expected)))
    assert peeked == drawn.peek('a', n) == expected
    drawn.take('a', peeked)
    waiting += [(draw + i, *pick) for i, pick in enumerate(peeked)]
    draw += n
    n = int(rng.integers(0, 6))
    drawn.peek('a', n)  # and results change what is next
    # Some results come: as a rule the oldest, in draw order; sometimes any.
    come = int(rng.integers(0, len(waiting) + 1))
    if rng.random() < 0.2:
      rng.shuffle(waiting)
    for number, index, in_pass in waiting[:come]:
      easy = rng.random() < ease
      verdicts = EASY if easy else VERDICTS[rng.integers(len(VERDICTS))]
      for _ in range(1 + (rng.random() < 0.1)):
        plain.result(index, verdicts, number, in_pass)
        how_sent = dict(draw=number, drawn_pass=in_pass)
        drawn.observe('a', index, verdicts, 1.0, **how_sent)
    waiting = waiting[come:]
    state = drawn.state_dict()
    assert state['counters']['a'] == [plain.early_wakes, plain.repeats]
    assert state['place']['a'] == [plain.number, plain.cursor]
    asleep = sum(r.state == 'snoozed' and r.wake > plain.number for r in plain.records)
    assert drawn.metrics().get('snooze/asleep/a', 0) == asleep / size


@pytest.mark.parametrize('size', [200, 3000])
def test_a_dataset_full_of_sleepers_wakes_in_order(size):
  """Also where the next to wake are not found by one search."""
  how = dict(factor=3, growth=2.0, cap=None, hard_delay=0, seed=0)
  drawn, plain = snooze(size, **how), Plain(size, **how)
  rng = np.random.default_rng(0)
  order = rng.permutation(size)
  for draw, index in enumerate(order.tolist()):
    in_pass = int(rng.integers(3))
    plain.records[index].last = draw
    plain.result(index, EASY, draw, in_pass)
    drawn.observe('a', index, EASY, 1.0, draw=draw, drawn_pass=in_pass)
  draw, open_ones = size, collections.deque()
  for step in range(60):
    expected = [plain.next(draw + i) for i in range(7)]
    assert drawn.peek('a', 7) == expected
    drawn.take('a', expected)
    open_ones.extend((draw + i, *pick) for i, pick in enumerate(expected))
    draw += 7
    while len(open_ones) > 9:
      number, index, in_pass = open_ones.popleft()
      verdicts = USEFUL if step in (20, 21) else EASY
      plain.result(index, verdicts, number, in_pass)
      drawn.observe('a', index, verdicts, 1.0, draw=number, drawn_pass=in_pass)
  assert drawn.metrics()['snooze/early_wakes/a'] == plain.early_wakes > 100


# --- 2.10, one after the other ---


def passes_of(source: Snooze, verdicts_of, passes: int) -> list[list[int]]:
  """What is drawn in each pass where every result comes before the next request."""
  drawn = [[] for _ in range(passes)]
  while True:
    [(index, number)] = source.peek('a', 1)
    if number >= passes:
      return drawn
    assert source.next('a') == index
    drawn[number].append(index)
    source.observe('a', index, verdicts_of(index), 1.0)


@pytest.mark.parametrize(
  'factor, generated', [(0, 3.333), (5, 1.667), (math.inf, 1.333)]
)
def test_cost_of_a_useful_group(factor, generated):
  """1. Shares 0.6 easy, 0.1 hard, 0.3 useful."""
  kind = [EASY] * 60 + [HARD] * 10 + [USEFUL] * 30
  drawn = passes_of(snooze(100, factor=factor), kind.__getitem__, 13)
  # Twelve passes: each solved prompt is met twice at factor 5. An infinite one has
  # met them all in pass 0.
  later = [index for in_pass in drawn[1:] for index in in_pass]
  useful = sum(index >= 70 for index in later)
  assert round(len(later) / useful, 3) == generated


def test_solved_prompts_are_not_generated_again_in_the_next_passes():
  """E3: 100 prompts, 60 of them solved."""
  kind = [EASY] * 60 + [USEFUL] * 40
  source = snooze(100)
  drawn = passes_of(source, kind.__getitem__, 13)
  assert [len(in_pass) for in_pass in drawn] == 2 * [100, 40, 40, 40, 40, 40] + [100]
  assert all(len(set(in_pass)) == len(in_pass) for in_pass in drawn)
  assert source.metrics()['snooze/asleep/a'] == 0.6


def test_schedule_of_one_that_is_always_solved():
  """2. Large groups, and small ones, of which it takes two."""
  large = passes_of(snooze(2), lambda i: [EASY, USEFUL][i], 60)
  assert [n for n in range(60) if 0 in large[n]] == list(range(0, 60, 6))
  small = passes_of(snooze(2), lambda i: [EASY[:4], USEFUL[:4]][i], 20)
  assert [n for n in range(20) if 0 in small[n]] == [0, 1, 7, 13, 19]
  assert all(1 in in_pass for in_pass in large + small)


def test_delays():
  assert [delay(n, 5, 1.0, None) for n in (1, 2, 9)] == [5, 5, 5]
  assert [delay(n, 1, 2.0, 32) for n in (1, 2, 5, 6, 7, 5000)] == [1, 2, 16, 32, 32, 32]
  assert [delay(n, 1, 1.5, None) for n in (1, 2, 3)] == [1, 2, 2]  # 1, 1.5, 2.25
  assert delay(3, 0, 2.0, None) == delay(5000, 0, 2.0, None) == 0
  assert delay(1, math.inf) == math.inf == delay(5000, 1, 2.0)
  assert delay(1, math.inf, 1.0, 7) == 7


def test_growing_naps():
  """Factor 1, growth 2, cap 4: naps of 1, 2, 4 and 4 passes."""
  source = snooze(2, factor=1, growth=2.0, cap=4)
  drawn = passes_of(source, lambda i: [EASY, USEFUL][i], 18)
  assert [n for n in range(18) if 0 in drawn[n]] == [0, 2, 5, 10, 15]


@quick
@given(
  st.integers(1, 6), st.lists(st.integers(0, 9), max_size=20), st.integers(0, 2**32)
)
def test_factor_0_is_dynamic_sampling_request_by_request(size, counts, key):
  """3. Shuffled passes over all prompts, whatever the verdicts and their lag."""
  rng, source, waiting = np.random.default_rng(key), snooze(size, factor=0), []
  found, draw = [], 0
  for n in counts:
    picks = source.peek('a', n)
    source.take('a', picks)
    found += picks
    waiting += [(draw + i, *pick) for i, pick in enumerate(picks)]
    draw += n
    come = rng.integers(0, len(waiting) + 1)
    for number, index, in_pass in waiting[:come]:
      verdicts = [EASY, EASY, USEFUL, HARD][rng.integers(4)]
      source.observe('a', index, verdicts, 1.0, draw=number, drawn_pass=in_pass)
    waiting = waiting[come:]
  expected = [
    (index, number)
    for number in range(len(found))
    for index in np.random.default_rng((0, 0, number)).permutation(size).tolist()
  ]
  assert found == expected[: len(found)]


@quick
@given(
  st.integers(1, 6), st.lists(st.integers(0, 5), max_size=20), st.integers(0, 2**32)
)
def test_an_infinite_factor_is_filtering(size, counts, key):
  """3. Passes over what has not been solved yet, until nothing is left."""
  rng, solved, draw = np.random.default_rng(key), set(), 0
  source = snooze(size, factor=math.inf, seed=2)
  number, cursor = 0, 0
  for n in counts:
    expected = []
    while len(expected) < n and len(solved) < size:
      order = np.random.default_rng((2, 0, number)).permutation(size).tolist()
      left = [place for place in range(cursor, size) if order[place] not in solved]
      left = left[: n - len(expected)]
      expected += [(order[place], number) for place in left]
      if len(expected) == n:
        cursor = left[-1] + 1
      else:
        number, cursor = number + 1, 0
    picks = source.peek('a', n)
    if len(solved) == size:
      break
    assert picks == expected
    source.take('a', picks)
    for i, (index, in_pass) in enumerate(picks):
      easy = rng.random() < 0.4
      verdicts = EASY if easy else USEFUL
      source.observe('a', index, verdicts, 1.0, draw=draw + i, drawn_pass=in_pass)
      # A pass in which it is drawn twice ends with its newest result.
      (solved.add if easy else solved.discard)(index)
    draw += n


def test_shares_without_quotas_and_with_them():
  """4. Two datasets of equal weight, useful rates 0.1 and 0.6."""
  kinds = {'a': [USEFUL] * 1 + [HARD] * 9, 'b': [USEFUL] * 6 + [HARD] * 4}
  source = Snooze({'a': 10, 'b': 10}, {'a': 1, 'b': 1})
  useful = {
    name: sum(kinds[name][i] is USEFUL for i, _ in source.peek(name, 700))
    for name in kinds
  }
  shares = [useful[name] / sum(useful.values()) for name in kinds]
  assert [round(share, 3) for share in shares] == [0.143, 0.857]
  # With quotas each dataset is asked until it has given its part.
  quotas = source.quotas(32)
  assert quotas == {'a': 16, 'b': 16}
  for name, quota in quotas.items():
    given_so_far = 0
    while given_so_far < quota:
      index = source.next(name)
      source.observe(name, index, kinds[name][index], 1.0)
      given_so_far += kinds[name][index] is USEFUL


def test_largest_remainder_on_paper():
  """4."""
  assert largest_remainder(16, [0.5, 0.3, 0.2]) == [8, 5, 3]
  assert largest_remainder(3, [1, 1]) == [2, 1]  # ties to the first
  assert largest_remainder(5, [0, 1]) == [0, 5]
  # Remainders of 0.4, 0.4, 0.2 and rounding that must not break the tie.
  assert largest_remainder(4, [0.1, 0.1, 0.8]) == [1, 0, 3]
  assert largest_remainder(14, [0.1, 0.1, 0.8]) == [2, 1, 11]


@quick
@given(st.integers(0, 500), st.lists(st.floats(0.01, 10), min_size=1, max_size=6))
def test_quotas_add_up_and_are_within_one_of_exact(n, weights):
  parts = largest_remainder(n, weights)
  assert sum(parts) == n
  for part, weight in zip(parts, weights, strict=True):
    assert abs(part - n * weight / sum(weights)) < 1 + 1e-6


@pytest.mark.parametrize(
  'how, visits',
  [
    (dict(factor=5), [*range(0, 108, 6)]),
    (dict(factor=5, growth=2.0, cap=32), [0, 6, 17, 38, 71, 104]),
  ],
)
def test_growing_snoozes_ask_less_of_what_stays_solved(how, visits):
  """Naps of 5 passes, or of 5, 10, 20, 32, 32: of 108 passes 18 visits, or 6. A relapse
  begins anew with 5."""
  source, given = snooze(2, **how), []
  while source.number('a') < 108:
    [(index, number)] = source.peek('a', 1)
    source.next('a')
    given += [number] * (index == 0)
    source.observe('a', index, EASY if index == 0 else USEFUL, 1.0)
  assert [number for number in given if number < 108] == visits
  at = source.number('a')
  while source.next('a') != 0:
    source.observe('a', 1, USEFUL, 1.0)
  source.observe('a', 0, USEFUL, 1.0)
  naps = []
  while len(naps) < 2:
    [(index, number)] = source.peek('a', 1)
    source.next('a')
    if index == 0:
      naps.append(number)
    source.observe('a', index, EASY if index == 0 else USEFUL, 1.0)
  assert naps[0] >= at and naps[1] - naps[0] == 6


def test_rolling_quotas_on_paper():
  """4."""
  counts, given_by = [0, 0, 0], []
  for _ in range(10):
    given_by.append(roll(counts, [0.5, 0.3, 0.2], [True] * 3))
    counts[given_by[-1]] += 1
  assert given_by == [0, 1, 2, 0, 0, 1, 0, 2, 1, 0]
  assert roll([5, 0, 0], [0.5, 0.3, 0.2], [True, False, False]) == 0
  assert roll([0, 0], [1.0, 0.0], [False, True]) is None
  assert roll([0, 0], [1.0, 1.0], [False, False]) is None


@quick
@given(st.lists(st.floats(0.05, 1), min_size=2, max_size=5), st.integers(1, 300))
def test_rolling_quotas_stay_near_the_weights(weights, groups):
  counts = [0] * len(weights)
  for _ in range(groups):
    counts[roll(counts, weights, [True] * len(weights))] += 1
  for count, weight in zip(counts, weights, strict=True):
    # The one furthest behind goes first, so none gets a whole group ahead.
    assert count < groups * weight / sum(weights) + 1


def test_requests_on_paper():
  """5."""
  assert requests_for(32, 0.5, None) == 64
  assert requests_for(32, 0.5, 0.95) == 78
  assert requests_for(0, 0.5, 0.95) == 0
  assert requests_for(7, 1.0, 0.95) == 7


@quick
@given(st.integers(1, 40), st.floats(0.05, 0.99))
def test_the_last_round_asks_for_the_least_that_is_likely_enough(missing, rate):
  """5."""

  def likely(m):  # P(Binomial(m, rate) >= missing), summed term by term
    return sum(
      math.comb(m, i) * rate**i * (1 - rate) ** (m - i) for i in range(missing, m + 1)
    )

  m = requests_for(missing, rate, 0.95)
  assert likely(m) >= 0.95 - 1e-9
  assert m == missing or likely(m - 1) < 0.95 + 1e-9


def test_requests_for_a_large_batch_take_no_time_to_count():
  """By the normal approximation: m u - 1.645 sqrt(m u (1-u)) = missing."""
  m = requests_for(1024, 0.05, 0.95)
  assert abs(m * 0.05 - 1.645 * math.sqrt(m * 0.05 * 0.95) - 1024) < 2


def test_starvation_on_paper():
  """6. Three prompts, all solved at once: the one that would wake next, each time."""
  source = snooze(3, seed=5)
  first = np.random.default_rng((5, 0, 0)).permutation(3).tolist()
  found = []
  for _ in range(9):
    found.append(source.next('a'))
    source.observe('a', found[-1], EASY, 1.0)
  assert found == first * 3
  assert source.metrics()['snooze/early_wakes/a'] == 6
  assert source.state_dict()['place']['a'][0] == 0  # passes that all sleep through
  assert source.metrics()['snooze/repeats/a'] == 0
  # None has an answer yet: who was asked longest ago is asked again.
  assert [i for i, _ in source.peek('a', 7)] == first + first + first[:1]
  source.take('a', source.peek('a', 7))
  assert source.metrics()['snooze/early_wakes/a'] == 9
  assert source.metrics()['snooze/repeats/a'] == 4


@quick
@given(
  st.integers(1, 5),
  st.sampled_from([1, 5, math.inf]),
  st.lists(st.integers(1, 12), max_size=8),
)
def test_a_dataset_that_is_all_solved_still_gives(size, factor, counts):
  """6. To each prompt alike, and says so."""
  source, times = snooze(size, factor=factor), np.zeros(size, int)
  for _ in range(size):
    source.observe('a', source.next('a'), EASY, 1.0)
  draw = size
  for n in counts:
    picks = source.peek('a', n)
    assert len(picks) == n
    source.take('a', picks)
    for i, (index, in_pass) in enumerate(picks):
      times[index] += 1
      source.observe('a', index, EASY, 1.0, draw=draw + i, drawn_pass=in_pass)
    draw += n
    assert np.ptp(times) <= 1  # round and round
  early = sum(min(n, size) for n in counts)
  assert source.metrics()['snooze/early_wakes/a'] == early
  assert source.metrics()['snooze/repeats/a'] == sum(counts) - early


@quick
@given(st.integers(0, 40), st.sampled_from([1.0, 2.0]))
def test_relapse(broken_from, growth):
  """7. Prompt 0 is solved in every pass before `broken_from`, then no more."""
  source, number = snooze(2, factor=2, growth=growth), 0
  visits = []
  while number < 80:
    [(index, number)] = source.peek('a', 1)
    source.next('a')
    solved = index == 0 and number < broken_from
    if index == 0:
      visits.append(number)
    source.observe('a', index, EASY if solved else USEFUL, 1.0)
  # Naps of 2, or of 2, 4, 8, ... passes while it lasts; then every pass.
  expected, level = [0], 0
  while expected[-1] < number - 1:
    nap = 0
    if expected[-1] < broken_from:
      nap, level = delay(level + 1, 2, growth), level + 1
    expected.append(expected[-1] + 1 + nap)
  assert visits[: len(expected) - 1] == expected[: len(visits)][: len(expected) - 1]
  at = int(source.state_dict()['prompts']['a']['level'][0])
  assert at == (0 if visits[-1] >= broken_from else level)


def test_late_and_duplicate_results_change_nothing():
  """8."""
  source = snooze(2)
  picks = source.peek('a', 4)  # two passes
  source.take('a', picks, [0, 1, 2, 3])
  for draw in (2, 3):
    source.observe('a', picks[draw][0], EASY, 1.0, draw=draw, drawn_pass=1)
  before = repr(source.state_dict())
  for draw in (0, 1, 2, 3, 2):
    index, number = picks[draw]
    source.observe('a', index, USEFUL, 1.0, draw=draw, drawn_pass=number)
  assert repr(source.state_dict()) == before
  source.observe('a', 0, USEFUL, 1.0)  # without a number it counts
  assert repr(source.state_dict()) != before


def test_a_second_result_in_flight_prolongs_a_sleep_without_deepening_it():
  """Two prompts, drawn in passes 0 and 1 before any result; factor 2, growth 3."""
  source = snooze(2, factor=2, growth=3.0)
  picks = source.peek('a', 4)
  source.take('a', picks)
  for draw, (index, number) in enumerate(picks):
    if index == 0:
      source.observe('a', 0, EASY, 1.0, draw=draw, drawn_pass=number)
  state = {k: int(v[0]) for k, v in source.state_dict()['prompts']['a'].items()}
  assert (state['level'], state['wake']) == (1, 1 + 1 + 2)
  assert source.metrics()['snooze/repeats/a'] == 2


def test_reward_ranges():
  """9."""
  assert verdict_class([0.7] * 8, 1.0) == 'constant'
  assert verdict_class(np.full(8, 0.7, np.float32), 1.0) == 'constant'
  assert verdict_class([2.0] * 8, 2.0) == 'easy'
  assert verdict_class([1.0] * 8, 2.0) == 'constant'
  assert verdict_class([0.0] * 8, 2.0) == 'hard'
  assert verdict_class([-1.0] * 8, 1.0, min_reward=-1.0) == 'hard'
  assert verdict_class([1.0] * 8, None) == 'constant'
  assert verdict_class([0.0] * 8, None) == 'hard'
  assert verdict_class([1.0, 1.0, 1.0 - 9e-7], 1.0) == 'easy'
  assert verdict_class([1.0, 1.0, 1.0 - 2e-6], 1.0) == 'useful'
  assert verdict_class(np.full(4, 1000.1, np.float32), 1000.1) == 'easy'
  with pytest.raises(ValueError, match='finite'):
    verdict_class([1.0, math.nan], 1.0)
  with pytest.raises(ValueError, match='at least one'):
    verdict_class([], 1.0)


def is_asleep(verdicts, max_reward, **how) -> bool:
  source = snooze(2, **how)
  source.observe('a', 0, verdicts, max_reward)
  return source.metrics()['snooze/asleep/a'] > 0


@quick
@given(st.integers(5, 16), st.floats(0, 10, width=32), st.floats(0.5, 10, width=32))
def test_only_the_declared_maximum_is_solved(size, verdict, best):
  """9."""
  verdicts = np.full(size, verdict, np.float32)
  assert is_asleep(verdicts, best) == (abs(verdict - best) <= 1e-6 * best)
  assert is_asleep(np.full(size, best, np.float32), best)
  assert not is_asleep(verdicts, None)
  assert not is_asleep(verdicts, None, hard_delay=3)
  assert is_asleep(np.zeros(size), best, hard_delay=3)


def test_an_aborted_group_says_nothing():
  """E4: no verdict 0 is made up for answers that were aborted. Seven of eight are a
  group, one is none: a prompt on probe is then tried again in the next pass."""
  source = snooze(2, factor=1)
  kinds = [EASY[:7], USEFUL]
  assert [0 in p for p in passes_of(source, kinds.__getitem__, 2)] == [True, False]
  while source.peek('a', 1)[0][0] != 0:  # pass 2, in which it is due
    source.observe('a', source.next('a'), USEFUL, 1.0)
  before = source.state_dict()['prompts']['a']
  assert source.next('a') == 0
  source.observe('a', 0, [0.0], 1.0)
  after = source.state_dict()['prompts']['a']
  for column in ('state', 'streak', 'level', 'wake'):
    np.testing.assert_array_equal(before[column], after[column])
  assert 0 in [i for i, number in source.peek('a', 4) if number == 3]


@quick
@given(st.integers(1, 12), st.lists(st.integers(0, 9), max_size=12), st.integers(0, 99))
def test_no_prompt_is_twice_in_one_bundle_unless_counted(size, counts, key):
  """10. A bundle's requests are open together."""
  rng, source, draw = np.random.default_rng(key), snooze(size, factor=1), 0
  repeats = 0
  for n in counts:
    picks = source.peek('a', n)
    source.take('a', picks)
    repeats += n - len({index for index, _ in picks})
    for i, (index, number) in enumerate(picks):
      verdicts = [EASY, USEFUL][rng.integers(2)]
      source.observe('a', index, verdicts, 1.0, draw=draw + i, drawn_pass=number)
    draw += n
  assert source.metrics()['snooze/repeats/a'] == repeats


# --- what the scheduler relies on ---


def test_peeking_changes_nothing_and_what_is_not_next_is_refused():
  source = snooze(5)
  before = repr(source.state_dict())
  picks = source.peek('a', 12)
  assert source.peek('a', 3) == picks[:3]
  assert repr(source.state_dict()) == before
  with pytest.raises(ValueError, match='not the next ones'):
    source.take('a', picks[1:3])
  with pytest.raises(ValueError, match='not ascend'):
    source.take('a', picks, [3] * 12)
  with pytest.raises(ValueError, match='1 for 12'):
    source.take('a', picks, [3])
  with pytest.raises(ValueError, match='draw 2147483647'):
    source.take('a', picks[:1], [2**31 - 1])
  with pytest.raises(ValueError, match="dataset 'b', expected one of"):
    source.next('b')
  with pytest.raises(ValueError, match='prompt 5, expected 0 to 4'):
    source.observe('a', 5, EASY, 1.0)
  assert repr(source.state_dict()) == before
  source.take('a', json.loads(json.dumps(picks)))  # as it comes from another process
  assert source.metrics()['epoch/a'] == 12 / 5


def test_next_is_peek_and_take():
  one, many = (Snooze({'a': 7, 'b': 3}, {'a': 1, 'b': 1}, seed=4) for _ in range(2))
  first = np.random.default_rng((4, 1, 0)).permutation(3)
  assert many.peek('b', 3) == [(index, 0) for index in first]
  for name, n in [('a', 5), ('b', 4), ('a', 6)]:
    picks = many.peek(name, n)
    assert [one.next(name) for _ in range(n)] == [index for index, _ in picks]
    many.take(name, picks)
  assert repr(one.state_dict()) == repr(many.state_dict())
  assert one.state_dict()['draw'] == 15


def test_who_is_passed_over_is_visited_and_keeps_its_nap():
  """DPPO's prompt level drops candidates before they are asked for (4.4)."""
  source = snooze(4, factor=1)
  order = [[i for i, _ in source.peek('a', 12)][n : n + 4] for n in (0, 4, 8)]
  for verdicts in (EASY, EASY, USEFUL, USEFUL):
    source.observe('a', source.next('a'), verdicts, 1.0)
  solved = order[0][:2]
  assert not set(solved) & {i for i, _ in source.peek('a', 2)}  # pass 1
  source.take('a', source.peek('a', 2))
  picks = source.peek('a', 4)  # pass 2: all are due
  assert [i for i, _ in picks] == order[2]
  draws = [None if i in solved else 10 + place for place, (i, _) in enumerate(picks)]
  source.take('a', picks, draws)
  columns = source.state_dict()['prompts']['a']
  assert (columns['state'][solved] == 1).all()
  assert (columns['last'][solved] == [0, 1]).all()
  assert {i for i, number in source.peek('a', 4) if number == 3} == set(range(4))


def test_the_order_in_which_answers_finish_does_not_matter():
  """8. Results of different prompts may be applied in any order."""
  sources = [snooze(9, factor=2) for _ in range(2)]
  for source, way in zip(sources, (1, -1), strict=True):
    draw = 0
    for n in (9, 9, 4, 9):
      picks = source.peek('a', n)
      source.take('a', picks)
      open_ones = [(draw + i, *pick) for i, pick in enumerate(picks)]
      open_ones.sort(key=lambda one, way=way: (way * one[1], one[0]))
      for number, index, in_pass in open_ones:
        verdicts = EASY if (index + number) % 3 == 0 else USEFUL
        source.observe('a', index, verdicts, 1.0, draw=number, drawn_pass=in_pass)
      draw += n
  assert repr(sources[0].state_dict()) == repr(sources[1].state_dict())


@quick
@given(st.integers(0, 2**32))
def test_a_frozen_state_is_that_of_its_moment(key):
  rng, source, draw = np.random.default_rng(key), snooze(6, factor=2), 0
  for step in range(10):
    if step % 3 == 0:
      frozen, before = source.freeze(), source.state_dict()
    picks = source.peek('a', int(rng.integers(0, 9)))
    source.take('a', picks)
    for i, (index, number) in enumerate(picks):
      if rng.random() < 0.7:
        verdicts = [EASY, USEFUL][rng.integers(2)]
        source.observe('a', index, verdicts, 1.0, draw=draw + i, drawn_pass=number)
    draw += len(picks)
    assert repr(frozen()) == repr(before)


def test_a_frozen_state_that_is_past_is_refused():
  source = snooze(3)
  old = source.freeze()
  new = source.freeze()
  with pytest.raises(RuntimeError, match='is past'):
    old()
  assert repr(new()) == repr(source.state_dict())


def test_a_load_ends_a_frozen_state():
  source = snooze(3)
  frozen = source.freeze()
  source.load_state_dict(snooze(3).state_dict())
  with pytest.raises(RuntimeError, match='is past'):
    frozen()


def wander(source: Snooze, rng: np.random.Generator, draw: int) -> int:
  """A bundle of any size, and results of most of it. The next draw number."""
  picks = source.peek('a', int(rng.integers(0, 9)))
  source.take('a', picks)
  for i, (index, number) in enumerate(picks):
    if rng.random() < 0.8:
      verdicts = [EASY, EASY, USEFUL, HARD, [1.0]][rng.integers(5)]
      source.observe('a', index, verdicts, 1.0, draw=draw + i, drawn_pass=number)
  return draw + len(picks)


@quick
@given(st.integers(0, 2**32), st.integers(1, 9), st.sampled_from([0, 1, 3, math.inf]))
def test_what_a_pool_needs_to_know(key, size, factor):
  """Who may not be drawn in this pass, and who sleeps but may: by the definition."""
  rng, source, draw = np.random.default_rng(key), snooze(size, factor=factor), 0
  for _ in range(12):
    draw = wander(source, rng, draw)
    state = source.state_dict()
    columns, number = state['prompts']['a'], state['place']['a'][0]
    sleeps = columns['state'] == 1
    assert source.number('a') == number
    asleep = source.asleep('a', range(size))
    np.testing.assert_array_equal(asleep, sleeps & (columns['wake'] > number))
    np.testing.assert_array_equal(source.due('a'), np.flatnonzero(sleeps & ~asleep))
    assert source.metrics().get('snooze/asleep/a', 0) == asleep.mean()
    assert repr(source.state_dict()) == repr(state)
  assert source.asleep('a', []).shape == (0,)
  for index in (-1, size):
    with pytest.raises(ValueError, match=f'prompt {index}, expected 0 to {size - 1}'):
      source.asleep('a', [0, index])
  for question in (source.number, source.due, lambda name: source.asleep(name, [0])):
    with pytest.raises(ValueError, match="dataset 'b', expected one of"):
      question('b')


@quick
@given(
  st.integers(0, 2**32),
  st.integers(1, 9),
  st.sampled_from([0, 1, 3, math.inf]),
  st.lists(st.integers(0, 30), min_size=1, max_size=4),
)
def test_looking_further_ahead_changes_nothing(key, size, factor, counts):
  """Peeks of any lengths, in any order, begin alike; so do takes after them."""
  rng, source, draw = np.random.default_rng(key), snooze(size, factor=factor), 0
  for _ in range(8):
    draw = wander(source, rng, draw)
    plain = copy.deepcopy(source)
    picks = plain.peek('a', counts[-1])
    longest = copy.deepcopy(source).peek('a', max(counts))
    for n in counts:
      assert source.peek('a', n) == longest[:n]
    for one in (source, plain):
      one.take('a', picks)
    draw += len(picks)
    assert repr(source.state_dict()) == repr(plain.state_dict())


@quick
@given(st.integers(0, 2**32), st.integers(1, 9), st.booleans())
def test_many_results_are_one_after_another(key, size, narrow):
  """Some of the same prompt, some late, some of too few answers."""
  rng = np.random.default_rng(key)
  many, one = (snooze(size, factor=2, growth=2.0, hard_delay=1) for _ in range(2))
  for _ in range(6):
    n = int(rng.integers(0, 12))
    indices, draws = rng.integers(size, size=n), np.sort(rng.integers(60, size=n))
    kinds = [EASY, EASY[:4], HARD, USEFUL, [0.7] * 8, [1.0], []]
    verdicts = [kinds[rng.integers(len(kinds))] for _ in range(n)]
    if narrow:
      verdicts = [np.array(v, np.float32) for v in verdicts]
    best = [[1.0, 0.7, None][rng.integers(3)] for _ in range(n)]
    passes = rng.integers(4, size=n)
    many.observe_many('a', indices, verdicts, best, draws=draws, drawn_passes=passes)
    for at in range(n):
      how = dict(draw=int(draws[at]), drawn_pass=int(passes[at]))
      one.observe('a', int(indices[at]), verdicts[at], best[at], **how)
    assert repr(many.state_dict()) == repr(one.state_dict())
    assert many.metrics() == one.metrics()


def test_many_results_are_refused_together():
  source = snooze(3)
  before = repr(source.state_dict())

  def observe(indices=(0, 1), seen=(EASY, EASY), draws=(4, 5)):
    source.observe_many(
      'a', indices, seen, [1.0, 1.0], draws=draws, drawn_passes=[0, 0]
    )

  for change, message in [
    (dict(indices=(0, 3)), 'prompt 3, expected 0 to 2'),
    (dict(seen=(EASY, [1.0, math.nan])), 'expected finite numbers'),
    (dict(draws=(4, 2**31 - 1)), 'draw 2147483647'),
    (dict(draws=(4,)), 'different number'),
  ]:
    with pytest.raises(ValueError, match=message):
      observe(**change)
    assert repr(source.state_dict()) == before
  observe()
  assert repr(source.state_dict()) != before


def test_metrics_speak_of_sleep_only_where_there_can_be_any():
  assert snooze(3, factor=0).metrics() == {'epoch/a': 0.0}
  assert set(snooze(3).metrics()) == {
    'epoch/a',
    'snooze/asleep/a',
    'snooze/early_wakes/a',
    'snooze/repeats/a',
  }


def test_a_prompt_needs_few_bytes():
  """Less than 48 with the order of a pass and of the next."""
  tracemalloc.start()
  size = 50_000
  source = Snooze({'a': size}, {'a': 1})
  for _ in range(3):
    picks = source.peek('a', size - 1)
    source.take('a', picks)
    del picks
    source.observe('a', 0, EASY, 1.0)
  held, _ = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert 20 * size < held < 48 * size


# --- what is refused ---


@pytest.mark.parametrize(
  'how, message',
  [
    (dict(factor=-1), 'snooze.factor: -1, expected 0 or more'),
    (dict(factor=math.nan), 'snooze.factor: nan'),
    (dict(growth=0.5), 'snooze.growth: 0.5, expected at least 1'),
    (dict(growth=math.inf), 'snooze.growth: inf'),
    (dict(growth=math.nan), 'snooze.growth: nan'),
    (dict(cap=0), 'snooze.cap: 0, expected None or a whole number'),
    (dict(cap=1.5), 'snooze.cap: 1.5'),
    (dict(cap=math.inf), 'snooze.cap: inf'),
    (dict(hard_delay=-1), 'snooze.hard_delay: -1'),
    (dict(seed=-1), 'snooze.seed: -1'),
    (dict(datasets={'a': 0}), "dataset 'a': 0 prompts, expected at least 1"),
    (dict(datasets={}, weights={}), 'at least one'),
    (dict(datasets={'b': 3}), 'expected one for each'),
    (dict(weights={'a': 0.0}), 'their sum is 0, expected something positive'),
    (dict(weights={'a': -1.0}), "dataset 'a': weight -1.0, expected 0 or more"),
    (dict(weights={'a': math.nan}), "dataset 'a': weight nan"),
    (dict(weights={'a': 1.0, 'b': 1.0}), 'expected one for each'),
  ],
)
def test_bad_settings_are_refused(how, message):
  with pytest.raises(ValueError, match=message):
    Snooze(**({'datasets': {'a': 3}, 'weights': {'a': 1.0}} | how))


@pytest.mark.parametrize('rate', [0.0, -0.1, 1.1, math.nan])
def test_bad_rates_are_refused(rate):
  with pytest.raises(ValueError, match='rate: '):
    requests_for(3, rate, None)
  with pytest.raises(ValueError, match='confidence: 1.0'):
    requests_for(3, 0.5, 1.0)


def spoil(**columns):
  return lambda state: state['prompts']['a'].update(columns)


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda s: s.update(other=1), 'state of snooze: keys'),
    (lambda s: s.pop('draw'), 'state of snooze: keys'),
    (lambda s: s.update(version=1), 'snooze.version: 1, expected 2'),
    (lambda s: s.update(since={'a': -2}), 'snooze.since.a: -2, expected a draw, or -1'),
    (lambda s: s.update(quotas={'counts': {'a': -1}, 'weights': {}}), 'quotas: counts'),
    (lambda s: s.update(sizes={'a': 4}), "were {'a': 4} .* now {'a': 3}"),
    (lambda s: s.update(place={'b': [0, 0]}), 'state of snooze.place'),
    (lambda s: s.update(place={'a': [0, 4]}), 'snooze.place.a'),
    (lambda s: s.update(place={'a': [0.5, 1]}), 'snooze.place.a'),
    (lambda s: s.update(counters={'a': [0]}), 'snooze.counters.a'),
    (lambda s: s.update(draw=1), 'snooze.draw: 1, expected at least 2'),
    (lambda s: s.update(draw='7'), 'snooze.draw'),
    (lambda s: s['prompts']['a'].pop('wake'), 'state of snooze.prompts.a'),
    (spoil(wake=[0, 0, 0]), 'wake: list, expected an array'),
    (spoil(wake=np.zeros(3)), r'wake: float64 \[3\], expected int32 \[3\]'),
    (spoil(wake=np.zeros(2, np.int32)), r'wake: int32 \[2\], expected int32 \[3\]'),
    (spoil(state=np.full(3, 3, np.int8)), 'state: 3 to 3, expected 0 to 2'),
    (spoil(drawn=np.full(3, -1, np.int32)), 'drawn: -1 to -1'),
    (spoil(applied=np.full(3, 9, np.int32)), 'newer than the newest request'),
  ],
)
def test_strange_state_is_refused_and_nothing_is_taken_over(change, message):
  source = snooze(3)
  source.take('a', source.peek('a', 2))
  state = source.state_dict()
  change(state)
  fresh = snooze(3)
  with pytest.raises(ValueError, match=message):
    fresh.load_state_dict(state)
  assert repr(fresh.state_dict()) == repr(snooze(3).state_dict())
