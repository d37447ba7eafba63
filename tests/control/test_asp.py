"""ASP's rules: paper, brute force, a plain second writing (algorithms.md 3.4, 3.6)."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxrl_sched.control import asp
from jaxrl_sched.types import Relief

quick = settings(max_examples=60, deadline=None, derandomize=True)
# Up to 8, each number of them as often.
lengths_of = st.integers(1, 8).flatmap(
  lambda n: st.lists(st.integers(1, 30), min_size=n, max_size=n)
)
LENGTHS = [100, 900, 120, 880, 500, 520, 110, 910]


def padded(lengths, minibatches):
  return sum(len(m) * max(lengths[i] for i in m) for m in minibatches)


def sum_of_maxima(lengths, minibatches):
  return sum(max(lengths[i] for i in m) for m in minibatches)


# --- versions --------------------------------------------------------------------------


def test_the_version_of_a_bundle():
  assert [asp.version_for(j, 0) for j in range(4)] == [0, 1, 2, 3]
  assert [asp.version_for(j, 2) for j in range(5)] == [0, 0, 0, 1, 2]


# --- sort and cut ----------------------------------------------------------------------


def test_padding_on_paper():
  assert sum(LENGTHS) == 4040
  assert padded(LENGTHS, [[0, 1], [2, 3], [4, 5], [6, 7]]) == 6420
  cut = asp.sort_and_cut(LENGTHS, 2)
  assert cut == [[7, 1], [3, 5], [4, 2], [6, 0]]
  assert padded(LENGTHS, cut) == 4800


def partitions(items, blocks, size):
  """All ways to put items into at most so many blocks of at most `size`."""
  if not items:
    yield []
    return
  first, *rest = items
  for n in range(min(size, len(items))):
    for others in itertools.combinations(rest, n):
      left = [i for i in rest if i not in others]
      if blocks > 1 or not left:
        for tail in partitions(left, blocks - 1, size):
          yield [[first, *others], *tail]


def test_all_partitions_are_tried():
  """8! / (2!^4 4!) = 105 into pairs; 3 of 3 items into two of at most 2."""
  assert len(list(partitions(list(range(8)), 4, 2))) == 105
  assert len(list(partitions([0, 1, 2], 2, 2))) == 3


@settings(quick, max_examples=40)
@given(lengths=lengths_of, size=st.integers(1, 4))
def test_no_partition_beats_sort_and_cut(lengths, size):
  cut = asp.sort_and_cut(lengths, size)
  assert sorted(i for m in cut for i in m) == list(range(len(lengths)))
  assert len(cut) == -(-len(lengths) // size)
  assert all(len(m) == size for m in cut[:-1])
  every = partitions(list(range(len(lengths))), len(cut), size)
  assert sum_of_maxima(lengths, cut) == min(sum_of_maxima(lengths, p) for p in every)


def test_equal_lengths_stay_in_order():
  assert asp.sort_and_cut([5, 7, 5, 7, 5], 2) == [[1, 3], [0, 2], [4]]


# --- longest first ---------------------------------------------------------------------


def test_longest_first_on_paper():
  """9 | 7; 6 to 7; 5 to 9; 4 to 13; 2 to 14: loads 16 and 17."""
  assert asp.longest_first([9, 7, 6, 5, 4, 2], 2) == [[0, 3, 5], [1, 2, 4]]


def test_ties_go_to_the_lower_index_and_the_first_engine():
  assert asp.longest_first([3, 3, 3, 3, 3], 3) == [[0, 3], [1, 4], [2]]
  assert asp.longest_first([], 2) == [[], []]


@quick
@given(costs=st.lists(st.integers(0, 20), max_size=10), engines=st.integers(1, 4))
def test_longest_first_gives_each_to_the_least_loaded(costs, engines):
  """And its fullest engine has at most 4/3 - 1/(3m) of the best (Graham 1969)."""
  given_out = asp.longest_first(costs, engines)
  loads, plain = [0] * engines, [[] for _ in range(engines)]
  for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
    e = loads.index(min(loads))
    plain[e].append(i)
    loads[e] += costs[i]
  assert given_out == plain
  if len(costs) <= 6:
    best = (
      min(
        max(sum(c for c, to in zip(costs, way, strict=True) if to == e) for e in way)
        for way in itertools.product(range(engines), repeat=len(costs))
      )
      if costs
      else 0
    )
    assert max(loads) <= (4 / 3 - 1 / (3 * engines)) * best + 1e-9


# --- shares ----------------------------------------------------------------------------


def answers_of(share):
  return list(zip(share.requests.tolist(), share.answers.tolist(), strict=True))


def test_shares_with_refill():
  """Tokens 9, 20, 14, 12 over two engines: 20, 9 | 14, 12; inside by `high`."""
  two = asp.shares([1, 4, 2, 1], [9, 5, 7, 12], [10, 10, 30, 40], 2)
  assert [answers_of(s) for s in two] == [
    [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)],  # equal `high`: draw order
    [(3, 0), (2, 0), (2, 1)],
  ]
  assert all(s.cuts is None and s.requests.dtype == np.int32 for s in two)


def test_shares_of_minibatches():
  """By `high`: 30 | 20 20 | 10 10 10. Pairs 30+20, 20+10, 10+10 last 30, 20, 10."""
  two = asp.shares([2, 1, 2, 1], [9, 7, 6, 5], [10, 30, 20, 10], 2, minibatch=2)
  assert [answers_of(s) for s in two] == [
    [(1, 0), (2, 0)],
    [(2, 1), (0, 0), (0, 1), (3, 0)],
  ]
  assert [s.cuts.tolist() for s in two] == [[0], [0, 2]]


def test_an_engine_without_work_has_an_empty_share():
  for minibatch in (None, 4):
    full, empty = asp.shares([3], [5.0], [8.0], 2, minibatch=minibatch)
    assert answers_of(full) == [(0, 0), (0, 1), (0, 2)] and answers_of(empty) == []
    assert asp.predicted_generation(empty, [5.0], [8.0], 2) == 0
  assert empty.cuts.tolist() == []
  none = asp.shares([], [], [], 3)
  assert [answers_of(s) for s in none] == [[], [], []]


@st.composite
def rounds(draw):
  n = draw(st.integers(0, 12))
  column = st.lists(st.integers(1, 9), min_size=n, max_size=n)
  return draw(column), draw(column), draw(column)


@quick
@given(
  a_round=rounds(),
  engines=st.integers(1, 5),
  minibatch=st.one_of(st.none(), st.integers(1, 6)),
)
def test_every_answer_is_in_one_share(a_round, engines, minibatch):
  sizes, means, highs = a_round
  parts = asp.shares(sizes, means, highs, engines, minibatch=minibatch)
  assert len(parts) == engines
  everything = [a for part in parts for a in answers_of(part)]
  assert sorted(everything) == [(r, k) for r, n in enumerate(sizes) for k in range(n)]
  for part in parts:
    here = [highs[r] for r in part.requests]
    assert here == sorted(here, reverse=True)
    if minibatch is None:  # a request's answers follow each other, on one engine
      runs = [r for r, _ in itertools.groupby(part.requests.tolist())]
      assert len(runs) == len(set(runs))
      assert len(part.requests) == sum(sizes[r] for r in runs)
    else:
      begins = [*part.cuts.tolist(), len(part.requests)]
      assert begins[0] == 0
      assert all(0 < b - a <= minibatch for a, b in itertools.pairwise(begins))
  if minibatch is not None:  # no more of them than are needed
    assert sum(len(part.cuts) for part in parts) == -(-sum(sizes) // minibatch)


@settings(quick, max_examples=40)
@given(lengths=lengths_of, size=st.integers(1, 4))
def test_a_perfect_predictor_reaches_the_optimum(lengths, size):
  """Static minibatches of one engine then last as short as any partition's."""
  (share,) = asp.shares([1] * len(lengths), lengths, lengths, 1, minibatch=size)
  best = min(
    sum_of_maxima(lengths, p)
    for p in partitions(list(range(len(lengths))), len(share.cuts), size)
  )
  assert asp.predicted_generation(share, lengths, lengths, size) == best


def test_predicted_generation_on_paper():
  """Refill: means 3 3 5 5 in two slots, 3 + 5; static: the `high` of each pair."""
  means, highs = [5.0, 3.0], [6.0, 8.0]
  (refill,) = asp.shares([2, 2], means, highs, 1)
  assert asp.predicted_generation(refill, means, highs, slots=2) == 8
  (static,) = asp.shares([2, 2], means, highs, 1, minibatch=2)
  assert asp.predicted_generation(static, means, highs, slots=2) == 14


def test_misshapen_rounds_are_refused():
  with pytest.raises(
    ValueError, match=r'\[2\], \[1\], \[2\], expected of equal length'
  ):
    asp.shares([1, 1], [1.0], [1.0, 1.0], 1)
  with pytest.raises(ValueError, match='sizes of at least 1'):
    asp.shares([0], [1.0], [1.0], 1)
  with pytest.raises(ValueError, match='engines: 0, expected at least 1'):
    asp.shares([1], [1.0], [1.0], 0)
  with pytest.raises(ValueError, match='minibatch: 0, expected at least 1'):
    asp.shares([1], [1.0], [1.0], 1, minibatch=0)


# --- windows ---------------------------------------------------------------------------


def test_a_window_on_paper():
  """Sorted: 100 (0), 110, 120 | 500, 520, 880 ...: blocks of two, in draw order."""
  blocks = [block.tolist() for block in asp.windows(LENGTHS, [2] * 4)]
  assert blocks == [[0, 6], [2, 4], [3, 5], [1, 7]]
  assert [b.tolist() for b in asp.windows([], [0, 0])] == [[], []]
  # Of other sizes: cut elsewhere.
  assert [b.tolist() for b in asp.windows(LENGTHS, [3, 0, 5])] == [
    [0, 2, 6],
    [],
    [1, 3, 4, 5, 7],
  ]


@quick
@given(highs=st.lists(st.integers(1, 9), min_size=12, max_size=12))
def test_blocks_are_alike_in_length(highs):
  rising = sorted(range(12), key=lambda i: (highs[i], i))
  for count in (1, 2, 3, 4, 6, 12):
    blocks = asp.windows(highs, [12 // count] * count)
    assert len(blocks) == count
    for k, block in enumerate(np.array(rising).reshape(count, -1).tolist()):
      assert blocks[k].tolist() == sorted(block)


def test_windows_that_do_not_add_up_are_refused():
  with pytest.raises(ValueError, match=r'sizes: \[3, 3\], expected a sum of 8 prompts'):
    asp.windows(LENGTHS, [3, 3])
  with pytest.raises(ValueError, match=r'sizes: \[\], expected a sum of 8'):
    asp.windows(LENGTHS, [])


# --- the order of bundles --------------------------------------------------------------


def swing(durations, order):
  """The furthest that a prefix is from the mean, times n to stay whole."""
  n, total = len(durations), sum(durations)
  steps = (n * durations[i] - total for i in order)
  return max(abs(ahead) for ahead in itertools.accumulate(steps))


def test_levelled_on_paper():
  """Mean 4: 1 (-3), 9 (+2), 2 (0), 3 (-1), 5 (0)."""
  assert asp.levelled([1, 2, 3, 5, 9]) == [0, 4, 1, 2, 3]


@quick
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12))
def test_levelled_keeps_prefixes_near_the_mean(durations):
  order = asp.levelled(durations)
  assert sorted(order) == list(range(len(durations)))
  bound = max(abs(len(durations) * d - sum(durations)) for d in durations)
  assert swing(durations, order) <= bound


def test_ascending_order_may_swing_further():
  """1 1 1 9 9 9, mean 5: three short ones first are 12 behind; levelled 4 at most."""
  durations = [1, 1, 1, 9, 9, 9]
  ascending = asp.order_bundles('ascending', durations, lag=1, seed=0, first=0)
  assert swing(durations, ascending) == 6 * 12
  assert swing(durations, asp.levelled(durations)) == 6 * 4


PAIR = st.tuples(st.integers(1, 20), st.integers(1, 20))


def flow_shop(pairs):
  """Two machines in a row with room for all between them."""
  first = second = 0
  for a, b in pairs:
    first += a
    second = max(second, first) + b
  return second


@settings(quick, max_examples=40)
@given(st.integers(1, 7).flatmap(lambda n: st.lists(PAIR, min_size=n, max_size=n)))
def test_johnson_is_optimal_with_a_large_buffer(pairs):
  gen, train = np.array(pairs).T
  order = asp.johnson(gen, train)
  best = min(flow_shop(p) for p in itertools.permutations(pairs))
  assert asp.makespan(gen[order], train[order], lag=len(pairs)) == best


def test_johnson_on_paper():
  """gen < train: 2, 3; then by train: 6, 5 (of equal ones the first), 5, 1."""
  gen, train = [3, 9, 2, 8, 7, 5], [6, 6, 4, 5, 1, 5]
  assert asp.johnson(gen, train) == [2, 0, 1, 3, 5, 4]


@quick
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 20))
def test_with_constant_training_ascending_is_as_good_as_johnson(gen, train):
  gen, train = np.array(gen), np.full(len(gen), train)
  johnson = asp.johnson(gen, train)
  ascending = np.argsort(gen)
  lag = len(gen)
  ends = [asp.makespan(gen[o], train, lag) for o in (johnson, ascending)]
  assert ends[0] == ends[1]


def test_shuffled_is_by_seed_and_place():
  def order(seed, first):
    return asp.order_bundles('shuffled', [1.0] * 16, lag=1, seed=seed, first=first)

  assert order(0, 0) == order(0, 0) != order(0, 16) != order(1, 16)
  assert sorted(order(0, 0)) == list(range(16))
  places = [order(0, first).index(0) for first in range(400)]
  assert np.mean(places) == pytest.approx(7.5, abs=4 * np.sqrt((16**2 - 1) / 12 / 400))


def test_a_bundle_lasts_as_long_as_its_slowest_engine():
  gen = [[1, 8], [5, 5], [3, 2]]
  assert asp.order_bundles('ascending', gen, lag=1, seed=0, first=0) == [2, 1, 0]


@quick
@given(
  pairs=st.lists(st.tuples(*[st.integers(1, 20)] * 3), min_size=1, max_size=8),
  lag=st.integers(0, 4),
  seed=st.integers(0, 9),
)
def test_auto_is_the_best_where_that_pays(pairs, lag, seed):
  columns = np.array(pairs)
  gen, train = columns[:, :2], columns[:, 2]

  def end_of(order):
    return asp.makespan(gen[order], train[order], lag)

  place = dict(lag=lag, seed=seed, first=3)
  others = ('shuffled', 'ascending', 'johnson', 'levelled')
  orders = {how: asp.order_bundles(how, gen, train, **place) for how in others}
  chosen = asp.order_bundles('auto', gen, train, **place)
  best, shuffled = min(map(end_of, orders.values())), end_of(orders['shuffled'])
  if best <= 0.98 * shuffled:
    assert end_of(chosen) == best
  else:
    assert chosen == orders['shuffled']
  if lag == 0:  # nothing overlaps, so that no order saves anything
    assert chosen == orders['shuffled']


def test_orders_that_need_more_are_refused():
  for how in ('johnson', 'auto'):
    with pytest.raises(ValueError, match=f"train: None, .* with order='{how}'"):
      asp.order_bundles(how, [1, 2], lag=1, seed=0, first=0)
  with pytest.raises(ValueError, match="asp.order: 'best', expected one of shuffled, "):
    asp.order_bundles('best', [1, 2], lag=1, seed=0, first=0)


# --- settings --------------------------------------------------------------------------


def test_settings_as_they_come():
  plain = asp.Asp()
  assert (plain.lag, plain.window, plain.order, plain.engines) == (0, 1, 'shuffled', 1)
  assert plain.relief == Relief()
  helped = asp.Asp(spare=2, first_finished=True)
  assert helped.relief == Relief(spare=2, first_finished=True)
  assert asp.Asp(pause_after=64).relief == Relief(pause_after=64)
  asp.Asp(lag=2, window=16, order='auto', engines=4, train_cost=0.05)


@pytest.mark.parametrize(
  'bad, line',
  [
    (
      dict(lag=10**6 + 1),
      'asp.lag: 1000001, expected a whole number of at least 0, at most 1000000',
    ),
    (
      dict(window=65537),
      'asp.window: 65537, expected a whole number of at least 1, at most 65536',
    ),
    (
      dict(engines=65537),
      'asp.engines: 65537, expected a whole number of at least 1, at most 65536',
    ),
    (
      dict(spare=65537),
      'asp.spare: 65537, expected a whole number of at least 0, at most 65536',
    ),
    (dict(window=0), 'asp.window: 0, expected a whole number of at least 1'),
    (dict(lag=-1), 'asp.lag: -1, expected a whole number of at least 0'),
    (dict(lag='1'), "asp.lag: '1', expected a whole number of at least 0"),
    (dict(lag=True), 'asp.lag: True, expected a whole number of at least 0'),
    (dict(engines=0), 'asp.engines: 0, expected a whole number of at least 1'),
    (dict(engines=1.5), 'asp.engines: 1.5, expected a whole number of at least 1'),
    (dict(spare=-1), 'asp.spare: -1, expected a whole number of at least 0'),
    (
      dict(pause_after=-8),
      'asp.pause_after: -8, expected a whole number of at least 0',
    ),
    (dict(refill=1), 'asp.refill: 1, expected True or False'),
    (
      dict(order='fifo', window=2),
      "asp.order: 'fifo', expected one of shuffled, ascending, johnson, levelled, auto",
    ),
    (
      dict(order='levelled'),
      "asp.order: 'levelled', expected 'shuffled' with window=1: one bundle has no order",
    ),
    (
      dict(first_finished=True),
      'asp.first_finished: True, expected False without spare',
    ),
    (
      dict(order='auto', window=4),
      "asp.train_cost: None, expected a number above 0 with order='auto'",
    ),
    (dict(train_cost=0), 'asp.train_cost: 0, expected a number above 0, or None'),
    (dict(train_cost=float('nan')), 'asp.train_cost: nan, expected a number above 0'),
    (dict(train_cost='1'), "asp.train_cost: '1', expected a number above 0, or None"),
  ],
)
def test_settings_that_cannot_be_meant(bad, line):
  with pytest.raises(ValueError) as error:
    asp.Asp(**bad)
  assert str(error.value).startswith(line) and '\n' not in str(error.value)


def test_a_key_that_is_not_there_is_refused():
  with pytest.raises(TypeError, match='lags'):
    asp.Asp(lags=1)
