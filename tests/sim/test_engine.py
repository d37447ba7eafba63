"""The simulated engine against the timeline's recursion, and against real sleeps."""

import queue
import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxrl_sched.control import asp
from jaxrl_sched.control.planning import Plan
from jaxrl_sched.sim import Costs, SimEngine, makespan
from jaxrl_sched.sim.workload import LENGTH, STOP, Answers
from jaxrl_sched.types import Lesson, Prompt, Relief, Request, Sampling, Share

LIMIT = 10_000
SAMPLING = Sampling(max_new_tokens=LIMIT)
ONE = Costs(decode_step=1.0)  # time is decode steps


class Given:
  """Answers whose lengths are known: of each draw."""

  def __init__(self, lengths):
    self.lengths = lengths

  def answers_of(self, requests, version):
    found = [self.lengths[request.draw] for request in requests]
    flat = np.concatenate(found or [np.zeros(0, np.int64)])
    return Answers(
      starts=np.concatenate([[0], np.cumsum([len(n) for n in found])]).astype(int),
      lengths=flat,
      finish=np.where(flat < LIMIT, STOP, LENGTH).astype(np.int8),
      verdicts=(np.arange(len(flat)) % 2).astype(np.float32),
    )

  def trained(self, lesson):
    pass


def prompt(index, tokens=5):
  return Prompt(
    id=f'a/{index}',
    dataset='a',
    index=index,
    tokens=np.zeros(tokens, np.int32),
    text='',
  )


def request(draw, size, **how):
  return Request(draw=draw, prompt=prompt(draw), size=size, sampling=SAMPLING, **how)


def share(requests, answers, cuts=None):
  cuts = None if cuts is None else np.array(cuts, np.int32)
  return Share(
    requests=np.array(requests, np.int32),
    answers=np.array(answers, np.int32),
    cuts=cuts,
  )


def plan(step, requests, shares, *, lag=0):
  return Plan(
    step=step,
    version=max(0, step - lag),
    requests=requests,
    shares=tuple(shares),
    visits={},
    draws={},
    visited=0,
    pruned=0,
  )


def lesson(groups):
  return Lesson(
    groups=groups,
    advantages=[np.ones(g.size, np.float32) for g in groups],
    keep=[np.ones(g.size) for g in groups],
    count=len(groups),
  )


def one_a_draw(bundles):
  """Requests of one answer each, for bundles of lengths, and who answers them."""
  lengths, requests = {}, []
  for bundle in bundles:
    mine = []
    for length in bundle:
      mine.append(request(len(lengths), 1))
      lengths[len(lengths)] = np.array([length])
    requests.append(mine)
  return requests, Given(lengths)


def run(engine, plans, lag):
  """The loop, at one round a bundle. Returns its metrics."""
  found, sent = [], 0
  for step in range(len(plans)):
    while sent < len(plans) and sent <= step + lag:
      engine.submit(plans[sent])
      sent += 1
    groups = engine.collect(step, lambda groups: False)
    found.append(engine.learn(lesson(groups)))
  return found


# --- the timeline ---------------------------------------------------------------------


@pytest.mark.parametrize('lag, end', [(0, 100), (1, 60), (2, 60)])
def test_generation_and_training_of_ten_each(lag, end):
  requests, policy = one_a_draw([[10]] * 5)
  engine = SimEngine(policy, Costs(decode_step=1.0, learn_step=10.0), slots=1)
  plans = [plan(j, r, [share([0], [0])], lag=lag) for j, r in enumerate(requests)]
  run(engine, plans, lag)
  assert engine.now() == end


TIMES = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=7)


@settings(derandomize=True, deadline=None)
@given(
  TIMES.filter(len),
  st.integers(0, 3),
  st.sampled_from([0.0, 0.5]),
  st.sampled_from([0.0, 2.0]),
  st.integers(0, 12),
)
def test_the_clock_is_the_recursion_of_the_specification(gen, lag, load, reward, train):
  requests, policy = one_a_draw([[t for t in row if t] for row in gen])
  plans = []
  for j, row in enumerate(gen):
    places = iter(range(len(row)))
    shares = [share([next(places)], [0]) if t else share([], []) for t in row]
    plans.append(plan(j, requests[j], shares, lag=lag))
  costs = Costs(decode_step=1.0, load=load, reward_round=reward, overhead=float(train))
  engine = SimEngine(policy, costs, slots=2)
  metrics = run(engine, plans, lag)
  # Of paper: the recursion, engine by engine.
  publish, ends = [0.0], [0.0] * 3
  for j, row in enumerate(gen):
    version = max(0, j - lag)
    begin = [max(end, publish[version]) for end in ends]
    ends = [b + load * (version > 0) + t for b, t in zip(begin, row, strict=True)]
    publish.append(max(publish[j], max(ends) + reward) + train)
  assert engine.now() == pytest.approx(publish[-1])
  wanted = makespan(np.array(gen), np.full(len(gen), train), lag, load, reward)
  assert engine.now() == pytest.approx(wanted)
  # And where the time went.
  totals = engine.totals()
  assert totals['wall'] == pytest.approx(totals['train'] + totals['wait'])
  parts = ('busy', 'load', 'padding', 'skew', 'ordering')
  assert all((totals[name] >= -1e-9).all() for name in parts)
  np.testing.assert_allclose(sum(totals[name] for name in parts), totals['wall'])
  np.testing.assert_allclose(totals['busy'] + totals['padding'], np.sum(gen, axis=0))
  waits = sum(m['time/idle_s/learner'] for m in metrics)
  assert waits == pytest.approx(totals['wait'])


@settings(derandomize=True, deadline=None)
@given(
  TIMES.filter(len),
  st.integers(0, 3),
  st.sampled_from([0.0, 2.0]),
  st.sampled_from([0.0, 1.5]),
  st.integers(0, 12),
)
def test_on_shared_devices_sampling_stands_still_while_the_learner_learns(
  gen, lag, load, overhead, train
):
  requests, policy = one_a_draw([[t for t in row if t] for row in gen])
  plans = []
  for j, row in enumerate(gen):
    places = iter(range(len(row)))
    shares = [share([next(places)], [0]) if t else share([], []) for t in row]
    plans.append(plan(j, requests[j], shares, lag=lag))
  costs = Costs(decode_step=1.0, load=load, overhead=overhead, learn_step=float(train))
  engine = SimEngine(policy, costs, slots=2, shares_devices=True)
  metrics = run(engine, plans, lag)
  spans = engine.spans()
  # No engine is at work while the learner is, and each does all of its work.
  learned = [(s.begin, s.end) for s in spans if s.lane == 'learner']
  for s in spans:
    if s.lane != 'learner':
      for begin, end in learned:
        assert begin == end or s.end <= begin + 1e-9 or s.begin >= end - 1e-9
  for e, column in enumerate(np.sum(gen, axis=0)):
    mine = [s for s in spans if s.lane == f'engine {e}']
    generated = sum(s.end - s.begin for s in mine if s.what == 'generate')
    assert generated == pytest.approx(column)
    bundles = [s.bundle for s in mine]
    assert bundles == sorted(bundles)  # in their order
    for a, b in zip(mine, mine[1:], strict=False):
      assert b.begin >= a.end - 1e-9
  totals = engine.totals()
  assert totals['wall'] == pytest.approx(totals['train'] + totals['wait'])
  parts = ('busy', 'load', 'padding', 'skew', 'ordering')
  assert all((totals[name] >= -1e-9).all() for name in parts)
  np.testing.assert_allclose(sum(totals[name] for name in parts), totals['wall'])
  idle = sum(m['time/idle_s/sampler'] for m in metrics)
  assert idle == pytest.approx((totals['skew'] + totals['ordering']).mean())


@pytest.mark.parametrize('lag', [0, 1, 2, 3])
def test_shared_devices_gain_nothing_by_a_lag(lag):
  requests, policy = one_a_draw([[10]] * 5)
  costs = Costs(decode_step=1.0, learn_step=7.0)
  engine = SimEngine(policy, costs, slots=1, shares_devices=True)
  run(
    engine,
    [plan(j, r, [share([0], [0])], lag=lag) for j, r in enumerate(requests)],
    lag,
  )
  assert engine.now() == 5 * (10 + 7)


def test_what_stands_still_goes_on_where_it_was():
  # Learning of 5 s, from 10 on: bundle 1 was to be sampled from 10 to 30 and is from 15;
  # the next, from 35 on, comes when the learner begins with bundle 1 (35 to 40).
  requests, policy = one_a_draw([[10], [20], [4]])
  costs = Costs(decode_step=1.0, learn_step=5.0, reward_round=2.0)
  engine = SimEngine(policy, costs, slots=1, shares_devices=True)
  run(engine, [plan(j, r, [share([0], [0])], lag=1) for j, r in enumerate(requests)], 1)
  spans = [(s.lane, s.bundle, s.begin, s.end) for s in engine.spans()]
  assert [s for s in spans if s[0] == 'engine 0'] == [
    ('engine 0', 0, 0, 10),
    ('engine 0', 1, 10, 12),  # while bundle 0 is graded
    ('engine 0', 1, 17, 35),
    ('engine 0', 2, 35, 37),
    ('engine 0', 2, 42, 44),
  ]
  assert engine.now() == 44 + 2 + 5


@settings(derandomize=True, deadline=None)
@given(
  st.lists(
    st.lists(st.integers(1, 30), min_size=2, max_size=6), min_size=1, max_size=6
  ),
  st.integers(0, 3),
  st.integers(1, 3),
  st.integers(0, 40),
)
def test_every_bundle_is_as_stale_as_the_lag_and_no_more(bundles, lag, engines, train):
  requests, policy = one_a_draw(bundles)
  plans = [
    plan(j, r, asp.shares([1] * len(r), [1] * len(r), [1] * len(r), engines), lag=lag)
    for j, r in enumerate(requests)
  ]
  engine = SimEngine(policy, Costs(decode_step=1.0, learn_step=float(train)), slots=2)
  for step, metrics in enumerate(run(engine, plans, lag)):
    late = min(step, lag)
    assert metrics['lag/max'] == metrics['lag/mean'] == late
    assert metrics[f'lag/share/{late}'] == 1.0


def test_a_bundle_is_refused_with_weights_that_are_not_those_of_now():
  requests, policy = one_a_draw([[5]])
  engine = SimEngine(policy, ONE, slots=1)
  with pytest.raises(ValueError, match='bundle 3: .* version 3, .* of version 0'):
    engine.submit(plan(3, requests[0], [share([0], [0])]))


def test_answers_that_would_fill_the_memory_are_refused():
  """Before a single one is made: 'Given' knows none of them."""
  engine = SimEngine(Given({}), ONE, slots=1)
  many = [request(draw, 10**6, relief=Relief(spare=10**6)) for draw in range(3)]
  with pytest.raises(ValueError, match='step 0: 6,000,000 answers are to be sampled'):
    engine.submit(plan(0, many, [share([], [])]))


def test_skew_is_waiting_for_engines_and_ordering_is_waiting_for_weights():
  requests, policy = one_a_draw([[10, 4], [6, 6]])
  engine = SimEngine(policy, Costs(decode_step=1.0, learn_step=3.0), slots=1)
  both = [share([0], [0]), share([1], [0])]
  run(engine, [plan(0, requests[0], both), plan(1, requests[1], both)], 0)
  totals = engine.totals()  # 10, train 3, 6, train 3
  assert totals['wall'] == 22
  assert totals['skew'].tolist() == [0, 6]
  assert totals['ordering'].tolist() == [6, 6]
  assert totals['busy'].tolist() == [16, 10]


def test_empty_slots_beside_busy_ones_are_padding():
  requests, policy = one_a_draw([[10, 4]])
  engine = SimEngine(policy, ONE, slots=2)
  metrics = run(engine, [plan(0, requests[0], [share([0, 1], [0, 0])])], 0)[0]
  # 14 of 20 places: 10 seconds with 7 of work in them.
  assert engine.totals()['busy'].tolist() == [7]
  assert metrics['sim/idle/padding'] == pytest.approx(3)
  assert metrics['rollout/idle_slots'] == pytest.approx(0.3)


def test_slots_and_seconds_are_those_of_all_rounds_and_engines():
  requests, policy = one_a_draw([[10, 4, 5], [3]])
  engine = SimEngine(policy, ONE, slots=2)
  engine.submit(plan(0, requests[0], [share([0, 1], [0, 0]), share([2], [0])]))
  engine.submit(plan(0, requests[1], [share([0], [0]), share([], [])]))
  metrics = engine.learn(lesson(engine.collect(0, lambda groups: False)))
  # Of the slots for 10, 5 and 3 steps, 22 places were taken; the slowest: 10, then 3.
  assert metrics['rollout/idle_slots'] == pytest.approx(1 - 22 / (2 * 18))
  assert metrics['time/generate_s'] == 13


def test_a_further_round_starts_when_it_is_submitted():
  requests, policy = one_a_draw([[10, 4], [5]])
  engine = SimEngine(policy, Costs(decode_step=1.0, reward_round=2.0), slots=1)
  engine.submit(plan(0, requests[0], [share([0], [0]), share([1], [0])]))
  assert [g.request.draw for g in engine.collect(0, lambda groups: False)] == [0, 1]
  assert engine.now() == 12
  engine.submit(plan(0, requests[1], [share([], []), share([0], [0])]))
  assert [g.request.draw for g in engine.collect(0, lambda groups: False)] == [2]
  assert engine.now() == 12 + 5 + 2
  spans = [s for s in engine.spans() if s.lane == 'engine 1']
  assert [(s.begin, s.end) for s in spans] == [(0, 4), (12, 17)]
  assert engine.spans() == []


def test_weights_are_loaded_once_a_version_and_the_first_are_there():
  requests, policy = one_a_draw([[10], [10], [5]])
  engine = SimEngine(policy, Costs(decode_step=1.0, load=3.0), slots=1)
  run(engine, [plan(0, requests[0], [share([0], [0])])], 0)
  for mine in requests[1:]:  # two rounds of a bundle
    engine.submit(plan(1, mine, [share([0], [0])]))
    groups = engine.collect(1, lambda groups: False)
  assert engine.now() == 10 + (3 + 10) + 5
  assert engine.totals()['load'].tolist() == [3]
  assert engine.learn(lesson(groups))['time/load_s'] == 3


def test_what_a_drain_leaves_is_forgotten():
  requests, policy = one_a_draw([[10], [20], [30]])
  engine = SimEngine(policy, ONE, slots=1)
  one = [share([0], [0])]
  for j in range(3):
    engine.submit(plan(j, requests[j], one, lag=2))
  drained = engine.drain(2)
  assert [(j, [g.request.draw for g in drained[j]]) for j in drained] == [
    (0, [0]),
    (1, [1]),
  ]
  assert engine.now() == 30  # they were finished
  engine.submit(plan(2, requests[2], one, lag=2))
  engine.collect(2, lambda groups: False)
  assert engine.now() == 60
  assert engine.totals()['busy'].tolist() == [60]


# --- costs ----------------------------------------------------------------------------


def test_what_a_round_takes_on_paper():
  # Two prompts of 5 tokens; answers of 3, 1 (of the first) and 2; 2 slots, chunks of 2.
  lengths = {0: np.array([3, 1]), 1: np.array([2])}
  costs = Costs(
    decode_step=1e0,
    decode_row=1e1,
    decode_cached=1e2,
    chunk=1e4,
    prefill_prompt=1e5,
    prefill_token=1e6,
  )
  engine = SimEngine(Given(lengths), costs, slots=2, chunk=2)
  engine.submit(plan(0, [request(0, 2), request(1, 1)], [share([0, 0, 1], [0, 1, 0])]))
  engine.collect(0, lambda groups: False)
  # Steps: the second slot is free after 2, and its answer ends at 4: two chunks.
  cached = (5 + 6 + 7) + 5 + (5 + 6)
  assert engine.now() == 4 + 10 * 6 + 100 * cached + 2e4 + 2e5 + 1e7


def test_what_an_update_takes_on_paper():
  lengths = {0: np.array([3, 1]), 1: np.array([2, 2])}
  costs = Costs(
    learn_step=1.0,
    learn_batch=10.0,
    learn_token=100.0,
    overhead=0.1,
    overhead_answer=0.1,
  )
  engine = SimEngine(Given(lengths), costs, slots=4, rows=1, row_tokens=20)
  engine.submit(
    plan(0, [request(0, 2), request(1, 2)], [share([0, 0, 1, 1], [0, 1, 0, 1])])
  )
  groups = engine.collect(0, lambda groups: False)
  pruned = Lesson(
    groups=groups,
    advantages=[np.ones(2, np.float32)] * 2,
    keep=[np.array([2.0, 0.0]), np.ones(2)],
    count=2,
  )
  metrics = engine.learn(pruned)
  tokens = (5 + 3) + 2 * (5 + 2)  # 8, 7 and 7: two rows of 20
  assert metrics['time/learn_s'] == 1 + 10 * 2 + 100 * tokens
  assert engine.now() == metrics['time/learn_s'] + 0.5
  assert metrics['update/skipped'] == 0.0 and engine.step == 1
  assert (metrics['packing/rows'], metrics['packing/density']) == (2, 22 / 40)


def test_rewards_are_shaped_and_truncated_answers_left_out():
  engine = SimEngine(
    Given({0: np.array([9_000, 10_000])}),
    Costs(learn_token=1.0),
    slots=2,
    overlong=dict(buffer=2_000, factor=0.5),
    overlong_filter=True,
  )
  engine.submit(plan(0, [request(0, 2)], [share([0, 0], [0, 1])]))
  (group,) = engine.collect(0, lambda groups: False)
  assert group.truncated.tolist() == [False, True]
  assert group.verdicts.tolist() == [0, 1]
  assert group.rewards.tolist() == [-0.25, 0.5]
  assert engine.learn(lesson([group]))['time/learn_s'] == 5 + 9_000


def test_nothing_to_learn_from_takes_no_time():
  engine = SimEngine(Given({}), Costs(learn_step=1.0), slots=1)
  empty = Lesson(groups=[], advantages=[], keep=[], count=0)
  metrics = engine.learn(empty)
  assert metrics['update/skipped'] == 1.0 and 'lag/max' not in metrics
  assert (engine.now(), engine.step) == (0.0, 1)


@pytest.mark.parametrize(
  'how, advantage, keep, is_made',
  [
    ({}, 0.0, [1.0, 1.0], False),
    (dict(kl_coef=0.1), 0.0, [1.0, 1.0], True),  # the penalty has a gradient
    (dict(kl_coef=0.1), 0.0, [0.0, 0.0], False),
    ({}, 1.0, [0.0, 0.0], False),  # all pruned
    ({}, 1.0, [0.0, 1.0], True),
    (dict(overlong_filter=True), 1.0, [0.0, 1.0], False),  # and the rest truncated
    (dict(overlong_filter=True), 1.0, [1.0, 1.0], True),
    (dict(overlong_filter=True), [0.0, 1.0], [1.0, 1.0], False),  # all that teaches
    (dict(overlong_filter=True), [1.0, 0.0], [1.0, 1.0], True),
  ],
)
def test_an_update_is_made_where_there_is_something_to_learn_from(
  how, advantage, keep, is_made
):
  lengths = {0: np.array([3, LIMIT])}
  engine = SimEngine(Given(lengths), Costs(learn_step=1.0), slots=2, **how)
  engine.submit(plan(0, [request(0, 2)], [share([0, 0], [0, 1])]))
  groups = engine.collect(0, lambda groups: False)
  metrics = engine.learn(
    Lesson(
      groups=groups,
      advantages=[np.zeros(2, np.float32) + advantage],
      keep=[np.array(keep)],
      count=1,
    )
  )
  assert metrics['update/skipped'] == float(not is_made)
  assert metrics['time/learn_s'] == engine.now() == float(is_made)
  assert ('lag/max' in metrics) == is_made and engine.step == 1


def test_groups_look_like_those_of_a_real_engine():
  engine = SimEngine(Given({7: np.array([3, 1])}), ONE, slots=2)
  engine.submit(plan(0, [request(7, 2)], [share([0, 0], [0, 1])]))
  (group,) = engine.collect(0, lambda groups: False)
  assert group.size == 2 and group.lengths.tolist() == [3, 1]
  assert [c.answer for c in group.completions] == [0, 1]
  assert [len(c.tokens) for c in group.completions] == [3, 1]
  assert [c.finish for c in group.completions] == ['stop', 'stop']
  assert {c.draw for c in group.completions} == {7}
  assert group.passed.tolist() == [False, True] and group.faults == (None, None)
  assert not group.is_paused and not group.truncated.any()


# --- the table of 3.6 -----------------------------------------------------------------

GEN = (40, 128)


def lengths_of(seed):
  z = np.random.default_rng(seed).standard_normal(GEN)
  return np.minimum(np.ceil(500 * np.exp(0.8 * z)), 8192).astype(int)


def arrival(lengths):
  """Answer i on engine i mod 4, in minibatches of 8."""
  every = [np.arange(e, len(lengths), 4) for e in range(4)]
  return [share(mine, [0] * 32, range(0, 32, 8)) for mine in every]


def sorted_and_cut(lengths):
  return asp.shares([1] * len(lengths), lengths, lengths, 4, minibatch=8)


def longest_first(lengths):
  return asp.shares([1] * len(lengths), lengths, lengths, 4)


@pytest.mark.parametrize(
  'spread, lag, end, idle',
  [
    (arrival, 0, 608_969, 0.61),
    (arrival, 1, 337_586, 0.61),
    (sorted_and_cut, 1, 248_522, 0.18),
    (longest_first, 0, 406_718, 0.16),
    (longest_first, 1, 248_457, 0.16),
  ],
)
def test_the_table_of_where_gains_come_from(spread, lag, end, idle):
  ends, padded = [], []
  for seed in range(8):
    bundles = lengths_of(seed)
    requests, policy = one_a_draw(bundles)
    costs = Costs(decode_step=1.0, learn_step=6000.0)
    engine = SimEngine(policy, costs, slots=8)
    plans = [plan(j, r, spread(bundles[j]), lag=lag) for j, r in enumerate(requests)]
    run(engine, plans, lag)
    totals = engine.totals()
    padding, busy = totals['padding'].sum(), totals['busy'].sum()
    ends.append(engine.now())
    padded.append(padding / (padding + busy))
  assert np.mean(ends) == pytest.approx(end, rel=0.03)
  assert np.mean(padded) == pytest.approx(idle, abs=0.01)


# --- against real time ----------------------------------------------------------------


def measured(gen, train, lag):
  """Seconds of engines and a trainer that are threads, and whose work is to sleep."""
  bundles, engines = gen.shape
  published = [threading.Event() for _ in range(bundles + 1)]
  ready = [queue.SimpleQueue() for _ in range(bundles)]
  published[0].set()

  def sample(e):
    for j in range(bundles):
      published[max(0, j - lag)].wait()
      time.sleep(gen[j, e])
      ready[j].put(e)

  threads = [threading.Thread(target=sample, args=(e,)) for e in range(engines)]
  began = time.perf_counter()
  for thread in threads:
    thread.start()
  for j in range(bundles):
    for _ in range(engines):
      ready[j].get()
    time.sleep(train[j])
    published[j + 1].set()
  took = time.perf_counter() - began
  for thread in threads:
    thread.join()
  return took


@pytest.mark.parametrize('lag', [0, 1, 2])
def test_the_makespan_is_that_of_engines_made_of_sleeps(lag):
  rng = np.random.default_rng((14, lag))
  steps = rng.integers(20, 120, (6, 3))
  requests, policy = one_a_draw(steps)
  train = 0.08
  engine = SimEngine(policy, Costs(decode_step=1e-3, learn_step=train), slots=1)
  shares = [share([e], [0]) for e in range(3)]
  run(engine, [plan(j, r, shares, lag=lag) for j, r in enumerate(requests)], lag)
  for _ in range(3):  # on a busy machine threads wake late, but never early
    took = measured(steps * 1e-3, np.full(6, train), lag)
    if took < 1.1 * engine.now():
      break
  assert engine.now() == pytest.approx(took, rel=0.1)
