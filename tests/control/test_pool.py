"""The open pool against brute force, and what it promises."""

import json
import random

import numpy as np
import pytest

from jaxrl_sched.control.pool import Asked, EngineClock, Pool
from jaxrl_sched.control.quotas import Shares
from tests import pools
from tests.pools import BruteForce, Run, Task


def test_the_clock_by_hand():
  # Three slots, looked at every second step; lengths 3, 1, 5, 2, 4:
  #   slot 0: answer 0 in steps 0 to 2, free at 4: answer 4 in 4 to 7
  #   slot 1: answer 1 in step 0, free at 2: answer 3 in 2 and 3
  #   slot 2: answer 2 in steps 0 to 4
  clock, lengths, ends, seen = EngineClock(3, 2), [3, 1, 5, 2, 4], {}, []
  clock.put(range(5))
  while clock.queue or clock.running:
    for slot, answer in clock.start():
      seen.append((answer, slot, clock.tick))
      ends[slot] = clock.tick + lengths[answer]
    over = [slot for slot in clock.running if ends[slot] <= clock.tick + 2]
    clock.advance(over)
  assert seen == [(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 1, 2), (4, 0, 4)]
  assert clock.tick == 8


def test_the_clock_is_brute_force_on_10_000_queues():
  rng = random.Random(0)
  for _ in range(10_000):
    slots, chunk = rng.randint(1, 5), rng.randint(1, 6)
    lengths = [rng.randint(1, 20) for _ in range(rng.randint(1, 25))]
    clock, found = EngineClock(slots, chunk), {}
    clock.put(range(len(lengths)))
    ends: dict[int, int] = {}
    while clock.queue or clock.running:
      for slot, answer in clock.start():
        ends[slot] = clock.tick + lengths[answer]
        found[answer] = clock.tick, ends[slot]
      clock.advance([s for s in clock.running if ends[s] <= clock.tick + chunk])
    by_heap = pools.ends_in_slots(lengths, slots, chunk)
    assert [found[i] for i in range(len(lengths))] == by_heap


def test_closing_a_fill_numbers_slots_afresh():
  clock = EngineClock(4, 1)
  clock.put('abcdef')
  clock.start()
  clock.advance([0, 2])
  assert clock.compact() == {1: 0, 3: 1}
  assert clock.running == {0: 'b', 1: 'd'}
  assert clock.start() == [(2, 'e'), (3, 'f')]


# --- shares ---


def _counts(shares: Shares, weights, sizes, n: int) -> list[dict[str, int]]:
  """After each of n groups, how many of each stream."""
  shares.set_weights(weights)
  counts, seen = dict.fromkeys(weights, 0), []
  for _ in range(n):
    stream = shares.next(sizes)
    shares.take(stream, sizes[stream])
    counts[stream] += 1
    seen.append(dict(counts))
  return seen


def test_three_equal_streams_and_16_groups_take_turns_with_the_odd_one():
  weights = dict.fromkeys('abc', 1.0)
  seen = _counts(Shares('abc'), weights, dict.fromkeys('abc', 8.0), 48)
  steps = [seen[15], seen[31], seen[47]]
  of_step = [
    sorted(after[s] - (before or {}).get(s, 0) for s in 'abc')
    for before, after in zip([None, *steps], steps, strict=False)
  ]
  assert of_step == [[5, 5, 6]] * 3
  assert set(steps[-1].values()) == {16}


@pytest.mark.parametrize('seed', range(20))
def test_no_stream_is_ever_a_group_off_its_share(seed):
  rng = random.Random(seed)
  k = rng.randint(2, 6)
  weights = {str(i): rng.uniform(0.01, 1) for i in range(k)}
  total = sum(weights.values())
  for n, counts in enumerate(
    _counts(Shares(weights), weights, dict.fromkeys(weights, 4.0), 500), start=1
  ):
    for stream, weight in weights.items():
      off = abs(counts[stream] - n * weight / total)
      assert off <= 1 - 1 / (2 * k - 2) + 1e-9


def test_other_weights_make_new_shares_and_no_weight_gives_no_turn():
  shares = Shares('ab')
  shares.set_weights({'a': 1.0, 'b': 0.0})
  assert [shares.next({'a': 1.0, 'b': 1.0}) for _ in range(3)] == ['a'] * 3
  shares.take('a', 100.0)
  seen = _counts(shares, {'a': 1.0, 'b': 1.0}, {'a': 1.0, 'b': 1.0}, 10)
  assert seen[-1] == {'a': 5, 'b': 5}


def test_streams_with_groups_of_other_sizes_share_rollouts():
  seen = _counts(Shares('ab'), {'a': 1.0, 'b': 1.0}, {'a': 4.0, 'b': 16.0}, 500)
  rollouts = seen[-1]['a'] * 4, seen[-1]['b'] * 16
  assert abs(rollouts[0] - rollouts[1]) <= 16


# --- against brute force ---


def _random_case(seed: int):
  rng = random.Random(seed)
  streams = list('abc')[: rng.randint(1, 3)]
  rates = {s: rng.choice([1.0, 0.5, 0.2, 0.05]) for s in streams}
  sizes = rng.choice([[4], [4], [2, 4], [4, 16], [3, 5, 7]])
  how = dict(
    rollouts=rng.choice([8, 16, 24, 40]),
    engines=rng.randint(1, 3),
    slots=rng.choice([1, 4, 8, 13]),
    chunk=rng.choice([1, 2, 5]),
    grace=rng.choice([0, 1, 4]),
    low_water=rng.choice([0.5, 1.0, 3.0]),
  )
  task = Task(
    length=pools.lognormal(seed, mean=rng.choice([1, 6, 15]), most=60),
    useful=pools.chance(seed, rates),
    size=lambda draw: random.Random(f'{seed}s{draw}').choice(sizes),
    weights={s: rng.choice([1.0, 2.0, 0.5]) for s in streams},
    acceptance=rng.choice([0.05, 0.5, 1.0]),
    usual=sizes[0],
    predicted=lambda draw: random.Random(f'{seed}p{draw}').choice([3.0, 5.0, 9.0]),
  )
  return streams, how, task


def _run(streams, how, task, **more) -> Run:
  same = {key: how[key] for key in ('engines', 'slots', 'chunk')}
  return Run(Pool(streams, **how), task, **same, **more)


@pytest.mark.parametrize('block', range(10))
def test_every_decision_is_that_of_brute_force(block):
  for seed in range(12 * block, 12 * block + 12):
    streams, how, task = _random_case(seed)
    run, brute = _run(streams, how, task), BruteForce(task, streams=streams, **how)
    fills = 4 if how['rollouts'] < 40 else 2
    for _ in range(fills):
      assert run.fill() == brute.fill(), seed
    assert run.plans == brute.plans, seed
    assert {a: run.starts[a] for a in brute.starts} == brute.starts, seed


@pytest.mark.parametrize('seed', range(0, 60, 3))
def test_reports_may_come_in_any_order_and_late(seed):
  streams, how, task = _random_case(seed)
  plain, late = _run(streams, how, task), _run(streams, how, task)
  late._order = random.Random(seed)
  assert plain.fills(3) == late.fills(3)
  assert plain.plans == late.plans


@pytest.mark.parametrize('seed', range(0, 60, 4))
def test_a_pool_that_was_saved_decides_as_one_that_was_not(seed):
  streams, how, task = _random_case(seed)
  one, other = _run(streams, how, task), _run(streams, how, task)
  one.fills(2), other.fills(2)
  state = json.loads(json.dumps(other.pool.state_dict()))
  other.pool = Pool(streams, **how)
  other.pool.load_state_dict(state)
  assert other.pool.state_dict() == state
  assert one.fills(3) == other.fills(3)
  assert one.plans == other.plans


def test_another_chunk_on_resume_is_named():
  how = dict(rollouts=8, engines=1, slots=4, chunk=2)
  state = Pool('a', **how).state_dict()
  for key, value in (('chunk', 4), ('slots', 8), ('engines', 2), ('grace', 5)):
    with pytest.raises(ValueError, match=rf'{key}: {value}, expected'):
      Pool('a', **how | {key: value}).load_state_dict(state)


# --- promises ---

_ACCEPTANCES = (1.0, 0.5, 0.05, 0.01)


@pytest.mark.parametrize('rate', [*_ACCEPTANCES, 0.0])
def test_no_engine_runs_dry_and_the_pool_is_bounded(rate):
  # At rate 0 one of two streams is dead: batches are short by its half, not late.
  rates = {'a': rate} if rate else {'a': 0.5, 'b': 0.0}
  how = dict(rollouts=64, engines=2, slots=16, chunk=2, grace=4, low_water=1.0)
  task = Task(
    length=pools.lognormal(1, mean=24, most=400),
    useful=pools.chance(3, rates),
    size=lambda draw: 4,
    weights=dict.fromkeys(rates, 1.0),
    acceptance=max(0.05, rate),
  )
  run = _run(list(rates), how, task)
  fills, largest = [], 0
  for _ in range(6 if rate in (0.05, 0.01) else 25):
    fills.append(run.fill())
    largest = max(largest, len(run.pool.in_flight))
  assert run.dry == 0
  # Running, and twice the low-water mark queued on each engine, with a group to round up.
  assert largest * 4 <= 2 * (16 + 2 * 16 + 4) + 2 * 16 * 4
  if rate == 0.0:
    assert all(fill.missing == 32 and len(fill.draws) == 8 for fill in fills)
  elif rate > 0.1:  # ten quotas bring one
    assert all(fill.missing == 0 and len(fill.draws) == 16 for fill in fills)


@pytest.mark.parametrize('borrow', [False, True])
def test_with_borrow_others_fill_the_place_of_a_dead_stream(borrow):
  # Of 'a' eight groups are useful, of 'b' none of ten quotas: 8 x 4 of 32 rollouts.
  pool = Pool('ab', rollouts=32, engines=1, slots=1, chunk=1, grace=0, borrow=borrow)
  streams = 'a' * 8 + 'b' * 40
  pool.ask(Asked(draw=d, stream=s, size=4, engine=0) for d, s in enumerate(streams))
  for draw, stream in enumerate(streams):
    pool.report(0, 0, started=[(0, draw)] * 4, ended=[(0, draw)] * 4)
    pool.judge(draw, stream == 'a')
  closing = pool.closing({'a': 1.0, 'b': 1.0})
  assert closing.draws == list(range(8 if borrow else 4))
  assert (closing.missing, closing.borrowed) == ((0, 16) if borrow else (16, 0))
  assert closing.taken == {'a': 16.0, 'b': 16.0}  # nobody owes anything for it


def test_without_quotas_groups_are_taken_whatever_their_stream():
  how = dict(rollouts=32, engines=1, slots=8, chunk=2, by_stream=False)
  task = Task(
    length=lambda draw, k: 5,
    useful=pools.chance(0, {'a': 1.0, 'b': 0.25}),
    size=lambda draw: 4,
    weights={'a': 1.0, 'b': 1.0},
  )
  run = _run(['a', 'b'], how, task)
  fills = run.fills(40)
  taken = [run.stream[d] for fill in fills for d in fill.draws]
  assert taken.count('a') / len(taken) == pytest.approx(1 / 1.25, abs=0.05)
  asked = [stream for _, plan in run.plans for _, stream, _ in plan]
  assert abs(asked.count('a') - asked.count('b')) <= 1


@pytest.mark.parametrize('barrier', [False, True])
def test_answers_of_one_length_make_the_same_batches_with_and_without_a_barrier(
  barrier,
):
  how = dict(rollouts=24, engines=1, slots=8, chunk=2, barrier=barrier)
  task = Task(
    length=lambda draw, k: 6,
    useful=lambda draw, stream: True,
    size=lambda draw: 4,
    weights={'a': 1.0},
    acceptance=1.0,
  )
  fills = _run(['a'], how, task).fills(6)
  found = [fill.draws for fill in fills]
  assert found == [list(range(6 * b, 6 * b + 6)) for b in range(6)]


@pytest.mark.parametrize('seed', range(5))
def test_a_barrier_closes_when_all_that_was_asked_for_has_ended(seed):
  rng = random.Random(seed)
  rates = {'a': 0.7, 'b': 0.3}
  how = dict(rollouts=48, engines=rng.randint(1, 2), slots=8, chunk=3, barrier=True)
  task = Task(
    length=pools.lognormal(seed, mean=10, most=80),
    useful=pools.chance(seed, rates),
    size=lambda draw: 4,
    weights={'a': 2.0, 'b': 1.0},
  )
  run = _run(['a', 'b'], how, task)
  for _ in range(5):
    fill = run.fill()
    assert not run.pool.in_flight
    ended = [end for end in run.finished.values() if end <= fill.tick]
    assert len(ended) == len(run.finished) and fill.tick - max(ended) < 3
    streams = [run.stream[draw] for draw in fill.draws]
    assert (streams.count('a'), streams.count('b')) == (8, 4)
    assert fill.draws == sorted(fill.draws)


def test_one_slot_answers_one_after_the_other():
  how = dict(rollouts=4, engines=1, slots=1, chunk=1, grace=0, low_water=2.0)
  task = Task(
    length=lambda draw, k: 1 + (draw + k) % 3,
    useful=lambda draw, stream: True,
    size=lambda draw: 2,
    weights={'a': 1.0},
    usual=2,
  )
  run = _run(['a'], how, task)
  run.fills(5)
  order = sorted(run.starts)
  assert [run.starts[a] for a in order[1:]] == [run.finished[a] for a in order[:-1]]


def test_groups_of_4_and_16_stall_no_fill_and_average_n():
  how = dict(rollouts=64, engines=2, slots=16, chunk=2, low_water=1.0)
  task = Task(
    length=pools.lognormal(2, mean=12, most=120),
    useful=pools.chance(2, {'a': 0.5, 'b': 0.8}),
    size=lambda draw: 4 if random.Random(draw).random() < 0.7 else 16,
    weights={'a': 1.0, 'b': 1.0},
    usual=8,
  )
  run = _run(['a', 'b'], how, task)
  sizes, of = [], {'a': 0, 'b': 0}
  for fill in run.fills(200):
    sizes.append(sum(task.size(d) for d in fill.draws))
    for d in fill.draws:
      of[run.stream[d]] += task.size(d)
  assert abs(sum(sizes) - 64 * 200) < 16 and max(sizes) < 64 + 16
  assert abs(of['a'] - of['b']) <= 2 * 16


def test_a_batch_takes_the_first_of_a_stream_in_draw_order():
  how = dict(rollouts=16, engines=1, slots=16, chunk=1, grace=0, low_water=2.0)
  task = Task(
    length=lambda draw, k: 3 if draw else 40,  # draw 0 is late
    useful=lambda draw, stream: True,
    size=lambda draw: 4,
    weights={'a': 1.0},
    acceptance=1.0,
  )
  run = _run(['a'], how, task)
  fills = run.fills(12)
  assert 0 not in fills[0].draws
  first = next(fill for fill in fills if 0 in fill.done)
  assert first.draws[0] == 0  # none that completed waits behind a later one


def test_what_is_dropped_never_comes_back_and_frees_its_slots():
  how = dict(rollouts=16, engines=1, slots=8, chunk=2, low_water=1.0)
  task = Task(
    length=pools.lognormal(5, mean=20, most=200),
    useful=lambda draw, stream: True,
    size=lambda draw: 4,
    weights={'a': 1.0},
  )
  run = _run(['a'], how, task)
  run.fills(3)
  gone = set(run.pool.in_flight[:2]) | set(run.pool.waiting)
  run.pool.drop(gone)
  clock = run.clocks[0]
  clock.queue = type(clock.queue)(a for a in clock.queue if a[0] not in gone)
  over = [slot for slot, (draw, _) in clock.running.items() if draw in gone]
  for slot in over:
    del clock.running[slot], run.ends[0][slot]
    clock._free.append(slot)
  moved = clock.compact()
  run.ends[0] = {moved[slot]: x for slot, x in run.ends[0].items()}
  for draw in gone:
    run.left.pop(draw, None)
  drawn = {d for fill in run.fills(6) for d in fill.draws}
  assert not drawn & gone
  assert run.pool._running == [
    sum(
      s <= run.pool.tick - 8 < run.finished[a]
      for a, s in run.starts.items()
      if a[0] not in gone
    )
  ]


def test_nothing_is_lost_for_being_long():
  # Lognormal of sigma 1, cut at 8 times the mean: trained groups against drawn useful
  # ones, over fills 50 to 300.
  how = dict(rollouts=128, engines=2, slots=64, chunk=4, low_water=1.0)
  task = Task(
    length=pools.lognormal(9, mean=40, most=320),
    useful=pools.chance(9, {'a': 0.5}),
    size=lambda draw: 8,
    weights={'a': 1.0},
    usual=8,
  )
  run = _run(['a'], how, task)
  run.fills(50)
  trained = [d for fill in run.fills(250) for d in fill.draws]
  drawn = [d for d in range(min(trained), max(trained)) if task.useful(d, 'a')]
  mean = lambda draws: np.mean(  # noqa: E731
    [task.length(d, k) for d in draws for k in range(8)]
  )
  assert mean(trained) == pytest.approx(mean(drawn), rel=0.01)


def test_engines_are_given_what_is_longest_first():
  pool = Pool('a', rollouts=8, engines=2, slots=2, chunk=1)
  assert pool.assign([2, 2, 2, 2], [5.0, 4.0, 3.0, 2.0]) == [0, 1, 1, 0]
  pool.ask([Asked(draw=0, stream='a', size=2, engine=0, predicted=100.0)])
  assert pool.assign([2, 2], [5.0, 4.0]) == [1, 1]


@pytest.mark.parametrize(
  'key, value',
  [('rollouts', 0), ('slots', 1.5), ('chunk', 0), ('grace', -1), ('low_water', 0.0)],
)
def test_a_strange_setting_is_refused(key, value):
  how = dict(rollouts=8, engines=1, slots=4, chunk=2) | {key: value}
  with pytest.raises(ValueError, match=f'{key}: {value!r}, expected'):
    Pool('a', **how)
