"""The simulated engines of the open pool: times by hand, and against those of rounds."""

import dataclasses
import random

import numpy as np
import pools
import pytest

from jaxrl_sched.control.planning import Plan
from jaxrl_sched.sim import Costs, SimEngine, work
from jaxrl_sched.sim.counts import GENERATE
from jaxrl_sched.sim.groups import SimGroup
from jaxrl_sched.sim.workload import ABORTED, STOP, Answers, Dataset, Workload
from jaxrl_sched.types import Lesson, Prompt, Request, Sampling, Share

SAMPLING = Sampling(max_new_tokens=10_000)
EVERYTHING = Costs(
  decode_step=1.0,
  decode_row=0.1,
  decode_cached=0.001,
  chunk=0.5,
  prefill_prompt=2.0,
  prefill_token=0.01,
)


class Given:
  """Answers of these lengths: draw -> [G]. Those in `lost` are aborted."""

  def __init__(self, lengths, lost=()):
    self.lengths, self.lost = lengths, set(lost)

  def answers_of(self, requests, version):
    flat = [n for r in requests for n in self.lengths[r.draw]]
    keys = [(r.draw, k) for r in requests for k in range(r.size)]
    sizes = [r.size for r in requests]
    return Answers(
      starts=np.cumsum([0, *sizes]),
      lengths=np.array(flat, np.int64),
      finish=np.array([ABORTED if k in self.lost else STOP for k in keys], np.int8),
      verdicts=np.array([(d + k) % 2 for d, k in keys], np.float32),
    )

  def trained(self, lesson):
    pass


def request(draw, size, tokens=5):
  prompt = Prompt(
    id=f'a/{draw}', dataset='a', index=draw, tokens=np.zeros(tokens, np.int32), text=''
  )
  return Request(draw=draw, prompt=prompt, size=size, sampling=SAMPLING)


def plan(fill, version, shares, tokens=5):
  """`shares`: of each engine, the (draw, size) of groups that join its queue."""
  every = sorted(pair for share in shares for pair in share)
  place = {draw: i for i, (draw, _) in enumerate(every)}
  return Plan(
    step=fill,
    version=version,
    requests=[request(draw, size, tokens) for draw, size in every],
    shares=tuple(
      Share(
        requests=np.array([place[d] for d, n in s for _ in range(n)], np.int32),
        answers=np.array([k for _, n in s for k in range(n)], np.int32),
      )
      for s in shares
    ),
    visits={},
    draws={},
    visited=len(every),
    pruned=0,
  )


def lesson(groups):
  return Lesson(
    groups=groups,
    advantages=[np.ones(g.size, np.float32) for g in groups],
    keep=[np.ones(g.size) for g in groups],
    count=len(groups),
  )


def advanced(engine, chunk, until, begin=0):
  """Reports and groups, chunk by chunk."""
  reports, groups = [], []
  for tick in range(begin + chunk, until + 1, chunk):
    mine, given = engine.advance(tick)
    reports += mine
    groups += given
  return reports, groups


def sums(engine):
  """Seconds of each engine, and of the trainer."""
  found = engine.totals()
  parts = ('busy', 'load', 'padding', 'skew', 'ordering')
  return sum(found[p] for p in parts), found['train'] + found['wait'], found['wall']


# --- by hand --------------------------------------------------------------------------


def test_two_engines_by_hand():
  # Engine 0: slots for two of lengths 3, 5, 2; engine 1: one of 7. Chunks of 4 steps.
  policy = Given({0: [3, 5], 1: [2], 2: [7]})
  costs = Costs(decode_step=1.0, learn_step=10.0, load=3.0)
  engine = SimEngine(policy, costs, slots=2, chunk=4, shares_devices=True)
  engine.begin_fill(0, 0)
  engine.feed(plan(0, 0, [[(0, 2), (1, 1)], [(2, 1)]]))
  (one, two), groups = engine.advance(4)
  assert (one.tick, one.started, one.ended) == (4, [(0, 0), (0, 0)], [(3, 0)])
  assert (two.tick, two.started, two.ended) == (4, [(0, 2)], [])
  assert groups == []
  (one, two), groups = engine.advance(8)
  assert (one.started, one.ended) == ([(4, 1)], [(6, 1), (5, 0)])
  assert (two.started, two.ended) == ([], [(7, 2)])
  assert [g.request.draw for g in groups] == [0, 1, 2]
  assert [g.lengths.tolist() for g in groups] == [[3, 5], [2], [7]]
  assert engine.advance(8) == ([], [])
  # 4 and 2 steps; 4 and 3 steps, since a chunk ends where nothing is alive.
  metrics = engine.learn(lesson(groups))
  assert engine.now() == 17
  assert metrics['time/generate_s'] == 7
  assert metrics['time/idle_s/learner'] == 7
  # Slot-steps: 2 engines x 2 slots x 8, in which are 17 tokens. The answer of 3 leaves
  # one empty until the next look at the queue.
  assert metrics['rollout/idle_slots'] == 15 / 32
  assert metrics['idle/refill'] == 1 / 32
  assert metrics['idle/no_work'] == 14 / 32
  # The next fill begins after learning, with new weights.
  engine.begin_fill(1, 1)
  policy.lengths[3] = [1]
  engine.feed(plan(1, 1, [[(3, 1)], []]))
  _, groups = engine.advance(12)
  metrics = engine.learn(lesson(groups))
  assert metrics['time/load_s'] == 3
  assert engine.now() == 17 + 3 + 1 + 10
  engines, trainer, wall = sums(engine)
  assert engines.tolist() == [wall, wall]
  assert trainer == wall


def test_what_runs_at_a_closing_is_read_again_and_has_tokens_of_two_versions():
  policy = Given({0: [6, 9, 1]})
  engine = SimEngine(policy, EVERYTHING, slots=2, chunk=4, shares_devices=True)
  engine.begin_fill(0, 0)
  engine.feed(plan(0, 0, [[(0, 3)]]))
  assert engine.advance(4)[1] == []
  engine.learn(lesson([]))
  # A prompt of 5; 4 steps of 2 rows, each looking back at 5, 6, 7 and 8; one launch.
  first = 2 + 0.05 + 4 + 0.8 + 0.001 * 2 * (5 + 6 + 7 + 8) + 0.5
  assert engine.now() == pytest.approx(first)
  engine.begin_fill(1, 1)
  (report,), groups = engine.advance(8)
  assert (report.ended, groups) == ([(6, 0)], [])
  (report,), groups = engine.advance(12)
  assert sorted(report.ended) == [(9, 0), (9, 0)]
  engine.learn(lesson(groups))
  # Two rows share their prompt: 5 + 4 + 4 tokens. The third answer does not read it.
  again = 2 + 0.13
  again += 4 + 0.6 + 0.001 * (9 + 10 + 9 + 10 + 11 + 12) + 0.5
  again += 1 + 0.2 + 0.001 * (13 + 5) + 0.5
  assert engine.now() == pytest.approx(first + again)
  (group,) = groups
  assert group.earlier == [((4, 0),), ((4, 0),), ()]
  assert group.versions == [1, 1, 1]
  assert [c.versions.tolist() for c in group.completions] == [
    [0] * 4 + [1] * 2,
    [0] * 4 + [1] * 5,
    [1],
  ]


def test_lags_count_tokens():
  policy = Given({0: [6, 9], 1: [3, 3]})
  engine = SimEngine(policy, EVERYTHING, slots=4, chunk=4)
  engine.begin_fill(0, 0)
  engine.feed(plan(0, 0, [[(0, 2), (1, 2)]]))
  _, groups = advanced(engine, 4, 4)
  assert isinstance(groups[0], SimGroup)
  engine.learn(lesson(groups))
  engine.begin_fill(1, 1)
  _, groups = advanced(engine, 4, 12, begin=4)
  metrics = engine.learn(lesson(groups))  # of 15 tokens 8 are one step old
  assert metrics['lag/mean'] == pytest.approx(8 / 15)
  assert metrics['lag/max'] == 1


def test_an_aborted_answer_is_left_out():
  engine = SimEngine(Given({0: [3, 2, 4]}, lost=[(0, 1)]), EVERYTHING, slots=4, chunk=4)
  engine.begin_fill(0, 0)
  engine.feed(plan(0, 0, [[(0, 3)]]))
  _, (group,) = engine.advance(4)
  assert group.lengths.tolist() == [3, 4]
  assert group.spares == (2,)
  assert group.places.tolist() == [0, 2]


def test_a_slower_engine_is_waited_for_when_it_is_grace_chunks_behind():
  # A step of engine 0 has one row, one of engine 1 has four: 1 and 4 seconds.
  policy = Given({draw: [8] for draw in range(5)})
  shares = [[(0, 1)], [(draw, 1) for draw in range(1, 5)]]
  spans = {}
  for grace in (0, 2, 9):
    engine = SimEngine(policy, Costs(decode_row=1.0), slots=4, chunk=1, grace=grace)
    engine.begin_fill(0, 0)
    engine.feed(plan(0, 0, shares))
    _, groups = advanced(engine, 1, 8)
    engine.learn(lesson(groups))
    assert engine.now() == 32
    spans[grace] = {s.lane: s.end for s in engine.spans()}['engine 0']
    engines, trainer, wall = sums(engine)
    assert engines.tolist() == [wall, wall]
    assert trainer == wall
  # Engine 0 begins its last chunk, at tick 7, when both are at tick 7 - grace.
  assert spans == {0: 28 + 1, 2: 20 + 1, 9: 8}


def test_with_devices_apart_and_a_lag_engines_do_not_wait_for_learning():
  policy = Given({draw: [10] for draw in range(6)})
  costs = Costs(decode_step=1.0, learn_step=10.0)
  ends = {}
  for lag in (0, 1):
    engine, fills = SimEngine(policy, costs, slots=1, chunk=10), []
    for step in range(5):
      while len(fills) <= min(step + lag, 4):
        fill = len(fills)
        engine.begin_fill(fill, max(0, fill - lag))
        engine.feed(plan(fill, max(0, fill - lag), [[(fill, 1)]]))
        fills.append(engine.advance(10 * (fill + 1))[1])
      engine.learn(lesson(fills[step]))
    ends[lag] = engine.now()
    engines, trainer, wall = sums(engine)
    assert engines.tolist() == [wall]
    assert trainer == wall
  assert ends == {0: 100, 1: 60}  # as of rounds: tests/sim/test_engine.py


# --- against others -------------------------------------------------------------------


@pytest.mark.parametrize('slots, chunk', [(1, 1), (3, 4), (4, 7), (16, 2)])
def test_starts_and_ends_are_those_of_slots(slots, chunk):
  rng = random.Random(f'{slots}/{chunk}')
  lengths = [rng.randint(1, 30) for _ in range(40)]
  engine = SimEngine(
    Given({d: [n] for d, n in enumerate(lengths)}), EVERYTHING, slots=slots, chunk=chunk
  )
  engine.begin_fill(0, 0)
  engine.feed(plan(0, 0, [[(draw, 1) for draw in range(40)]]))
  reports, groups = advanced(engine, chunk, chunk * sum(lengths))
  starts = {draw: tick for r in reports for tick, draw in r.started}
  ends = {draw: tick for r in reports for tick, draw in r.ended}
  expected = pools.ends_in_slots(lengths, slots, chunk)
  assert [(starts[d], ends[d]) for d in range(40)] == expected
  assert sorted(g.request.draw for g in groups) == list(range(40))


@pytest.mark.parametrize('is_equal', [True, False])
@pytest.mark.parametrize('slots, chunk', [(4, 1), (8, 4), (64, 8)])
def test_the_seconds_of_a_fill_are_those_of_a_round(slots, chunk, is_equal):
  rng = random.Random(f'{slots}/{chunk}')
  lengths = {
    d: [12 if is_equal else rng.randint(1, 40) for _ in range(4)] for d in range(8)
  }
  policy = Given(lengths)
  one = plan(0, 0, [[(draw, 4) for draw in range(8)]])
  by_rounds = SimEngine(policy, EVERYTHING, slots=slots, chunk=chunk)
  by_rounds.submit(one)
  by_rounds.learn(lesson(by_rounds.collect(0, lambda groups: False)))
  engine = SimEngine(policy, EVERYTHING, slots=slots, chunk=chunk)
  engine.begin_fill(0, 0)
  engine.feed(one)
  _, groups = advanced(engine, chunk, chunk * 400)
  metrics = engine.learn(lesson(groups))
  answers = policy.answers_of(one.requests, 0)
  (mine,) = work.whole(one.requests, answers, one.shares, slots, chunk)
  seconds = float(mine.counts @ EVERYTHING.of(GENERATE))
  assert metrics['time/generate_s'] == pytest.approx(seconds)
  assert engine.now() == pytest.approx(by_rounds.now())
  assert [g.lengths.tolist() for g in groups if g.request.draw == 3] == [lengths[3]]


# --- suspending -----------------------------------------------------------------------


def sampled(interrupt, *, fills=4, ticks=24, chunk=4):
  """What is reported in some fills, and the engine; `interrupt(engine)` between fills."""
  rng = random.Random(1)
  lengths = {d: [rng.randint(1, 60) for _ in range(3)] for d in range(40)}
  policy = Given(lengths, lost=[(5, 1)])
  engine = SimEngine(policy, EVERYTHING, slots=4, chunk=chunk, shares_devices=True)
  seen = []
  for fill in range(fills):
    engine = interrupt(engine, policy)
    engine.begin_fill(fill, fill)
    draws = range(10 * fill, 10 * fill + 10)
    engine.feed(
      plan(fill, fill, [[(d, 3) for d in draws[:5]], [(d, 3) for d in draws[5:]]])
    )
    reports, groups = advanced(engine, chunk, ticks * (fill + 1), begin=ticks * fill)
    seen += [dataclasses.astuple(report) for report in reports]
    seen += [
      (g.request.draw, g.lengths.tolist(), g.rewards.tolist(), g.earlier, g.versions)
      for g in groups
    ]
    seen.append(engine.learn(lesson(groups)))
  return seen, engine


def test_suspended_and_resumed_is_as_if_it_had_not_been():
  def suspend(engine, policy):
    engine.suspend()
    return engine

  def resume(engine, policy):
    in_flight = engine.suspend()()
    engine.resume(in_flight)
    again = engine.suspend()()
    assert again.requests == in_flight.requests
    assert (again.running, again.queued) == (in_flight.running, in_flight.queued)
    for key, completion in in_flight.completions.items():
      other = again.completions[key]
      assert len(other.tokens) == len(completion.tokens) == len(completion.logps)
      assert other.earlier == completion.earlier
      assert other.finish == completion.finish
    return engine

  expected, engine = sampled(lambda engine, policy: engine)
  assert any(isinstance(x, tuple) and len(x) == 5 and any(x[3]) for x in expected)
  for interrupt in (suspend, resume):
    found, other = sampled(interrupt)
    assert found == expected
    assert other.now() == engine.now()
  engines, trainer, wall = sums(engine)
  assert engines == pytest.approx(np.full(2, wall))
  assert trainer == pytest.approx(wall)


def test_what_is_in_flight_tells_each_answer():
  engine = SimEngine(Given({0: [2, 9, 3], 1: [1]}), EVERYTHING, slots=2, chunk=4)
  engine.begin_fill(0, 0)
  engine.feed(plan(0, 0, [[(0, 3), (1, 1)]]))
  engine.advance(4)
  found = engine.suspend()()
  assert found.tick == 4
  assert [r.draw for r in found.requests] == [0, 1]
  assert found.running == [[(0, 1)]]
  assert found.queued == [[(0, 2), (1, 0)]]
  told = {
    key: (len(c.tokens), c.finish, c.version) for key, c in found.completions.items()
  }
  assert told == {(0, 0): (2, 'stop', 0), (0, 1): (4, 'paused', 0)}
  # Another process knows these answers only as far as they are told.
  other = SimEngine(Given({0: [2, 9, 3], 1: [1]}), EVERYTHING, slots=2, chunk=4)
  other.resume(found)
  for one in (engine, other):
    one.begin_fill(1, 0)
    reports, groups = advanced(one, 4, 20, begin=4)
    ended = sorted(pair for r in reports for pair in r.ended)
    assert ended == [(7, 0), (9, 0), (9, 1)]
    assert [g.lengths.tolist() for g in groups] == [[2, 9, 3], [1]]


def test_a_fill_is_sampled_with_weights_that_are_there():
  engine = SimEngine(Given({}), EVERYTHING, slots=1)
  with pytest.raises(ValueError, match='of version 0'):
    engine.begin_fill(0, 1)
  with pytest.raises(ValueError, match='begin_fill and feed before'):
    engine.advance(1)


# --- with the pool's decisions --------------------------------------------------------


def test_the_pool_takes_the_same_decisions_as_with_known_engines():
  """The simulated engines and `pools.Run` under one task: same closings, same batches."""
  task = pools.Task(
    length=pools.lognormal(3, mean=20.0, most=200),
    useful=pools.chance(3, {'a': 0.6}),
    size=lambda draw: 4,
    weights={'a': 1.0},
    usual=4,
  )
  how = dict(engines=2, slots=8, chunk=4)
  make = lambda: pools.Pool(['a'], rollouts=32, grace=2, **how)  # noqa: E731
  expected = pools.Run(make(), task, **how).fills(8)
  lengths = {d: [task.length(d, k) for k in range(4)] for d in range(400)}
  engine = SimEngine(Given(lengths), EVERYTHING, slots=8, chunk=4, grace=2)
  pool, draw, found = make(), 0, []
  for fill in range(8):
    engine.begin_fill(fill, fill)
    while True:
      closing = pool.closing(task.weights)
      assert closing is not None
      if closing:
        found.append((closing.tick, closing.draws))
        pool.close(closing)
        break
      streams = pool.wanted(task.weights, lambda stream, size: 0.5, 4)
      engines = pool.assign([4] * len(streams), [1.0] * len(streams))
      draws = range(draw, draw + len(streams))
      draw += len(streams)
      pool.ask(
        pools.Asked(draw=d, stream='a', size=4, engine=e)
        for d, e in zip(draws, engines, strict=True)
      )
      shares = [
        [(d, 4) for d, o in zip(draws, engines, strict=True) if o == e]
        for e in range(2)
      ]
      engine.feed(plan(fill, fill, shares))
      pool.proceed()
      reports, groups = engine.advance(pool.tick)
      for r in reports:
        pool.report(r.engine, r.tick, started=r.started, ended=r.ended)
      for g in groups:
        pool.judge(g.request.draw, task.useful(g.request.draw, 'a'))
    engine.learn(lesson([]))
  assert found == [(fill.tick, fill.draws) for fill in expected]


def test_a_workload_answers_as_of_when_it_was_asked():
  workload = Workload({'a': Dataset(count=9, median=20.0)})
  engine = SimEngine(workload, Costs(decode_step=1.0), slots=2, chunk=8)
  engine.begin_fill(0, 0)
  engine.feed(plan(0, 0, [[(0, 4)]]))
  lengths = workload.answers_of([request(0, 4)], 0).lengths.tolist()
  engine.advance(8)
  engine.learn(lesson([]))
  engine.begin_fill(1, 1)
  groups = []
  for tick in range(16, 8000, 8):
    groups += engine.advance(tick)[1]
  assert groups[0].lengths.tolist() == lengths
