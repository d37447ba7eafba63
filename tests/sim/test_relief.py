"""Spare answers and pauses: who is kept follows from lengths, whatever the slots."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxrl_sched.control import ledger
from jaxrl_sched.control.planning import Plan
from jaxrl_sched.sim import Costs, SimEngine
from jaxrl_sched.sim.workload import ABORTED, STOP, Answers
from jaxrl_sched.types import (
  Lesson,
  Prompt,
  Relief,
  Request,
  Sampling,
  Share,
)

SAMPLING = Sampling(max_new_tokens=1000)


class Given:
  """Answers of known lengths, some of which are aborted: of each draw."""

  def __init__(self, lengths, aborted=()):
    self.lengths, self.aborted = lengths, set(aborted)

  def answers_of(self, requests, version):
    found = [self.lengths[request.draw] for request in requests]
    flat = np.concatenate(found)
    finish = [
      ABORTED if (r.draw, k) in self.aborted else STOP
      for r in requests
      for k in range(len(self.lengths[r.draw]))
    ]
    return Answers(
      starts=np.concatenate([[0], np.cumsum([len(n) for n in found])]).astype(int),
      lengths=flat,
      finish=np.array(finish, np.int8),
      verdicts=flat.astype(np.float32),  # so that it is seen whose verdict it is
    )

  def trained(self, lesson):
    pass


def request(draw, size, begun=(), **relief):
  prompt = Prompt(
    id=f'a/{draw}', dataset='a', index=draw, tokens=np.zeros(3, np.int32), text=''
  )
  return Request(
    draw=draw,
    prompt=prompt,
    size=size,
    sampling=SAMPLING,
    relief=Relief(**relief),
    begun=begun,
  )


def missing(r):
  if r.begun:
    return [c.answer for c in r.begun if c.finish == 'paused']
  return list(range(r.size + r.relief.spare))


def submit(engine, bundle, requests, version=0):
  pairs = [(i, k) for i, r in enumerate(requests) for k in missing(r)]
  share = Share(
    requests=np.array([i for i, _ in pairs], np.int32),
    answers=np.array([k for _, k in pairs], np.int32),
  )
  engine.submit(
    Plan(
      step=bundle,
      version=version,
      requests=requests,
      shares=(share,),
      visits={},
      draws={},
      visited=0,
      pruned=0,
    )
  )
  return engine.collect(bundle, lambda groups: False)


def answered(lengths, *, slots=2, chunk=1, aborted=(), size=2, **relief):
  engine = SimEngine(
    Given({0: np.array(lengths)}, [(0, k) for k in aborted]),
    Costs(decode_step=1.0),
    slots=slots,
    chunk=chunk,
  )
  (group,) = submit(engine, 0, [request(0, size, **relief)])
  return group, engine


def kept(group):
  return {c.answer: len(c.tokens) for c in group.completions}


# --- on paper -------------------------------------------------------------------------


def test_the_first_in_answer_order_are_kept_and_the_spare_one_is_cut():
  group, engine = answered([10, 30, 99], slots=3, spare=1)
  assert kept(group) == {0: 10, 1: 30}
  assert group.spares == (30,)  # it had got so far when nobody needed it any more
  assert engine.now() == 30
  assert group.verdicts.tolist() == [10, 30]


def test_a_spare_answer_stands_in_for_an_aborted_one():
  group, engine = answered([10, 30, 50], slots=3, spare=1, aborted=[0])
  assert kept(group) == {1: 30, 2: 50}
  assert group.spares == (10,)
  assert group.verdicts.tolist() == [30, 50]
  assert engine.now() == 50


def test_an_aborted_answer_is_missing_where_there_is_no_spare():
  group, _ = answered([10, 30], aborted=[1])
  assert kept(group) == {0: 10} and group.spares == (30,)


def test_a_spare_answer_that_waits_is_never_started():
  group, engine = answered([10, 30, 99], slots=1, spare=1)
  assert kept(group) == {0: 10, 1: 30} and group.spares == ()
  assert engine.now() == 40


def test_the_shortest_are_kept_where_the_first_finished_are():
  group, engine = answered([50, 30, 20], slots=3, spare=1, first_finished=True)
  assert kept(group) == {1: 30, 2: 20}
  assert group.spares == (30,)
  assert engine.now() == 30


def test_of_two_as_short_the_first_is_kept():
  # Answer 0 might still end at 30, with which it would beat answer 1: it is not cut
  # at 29 tokens, as answer 3 is.
  group, _ = answered([31, 30, 20, 99], slots=4, spare=2, first_finished=True)
  assert kept(group) == {1: 30, 2: 20}
  group, _ = answered([30, 30, 20, 99], slots=4, spare=2, first_finished=True)
  assert kept(group) == {0: 30, 2: 20}


def test_who_is_not_needed_is_seen_between_two_chunks():
  group, engine = answered([10, 11, 99], slots=3, chunk=8, spare=1)
  assert group.spares == (16,)
  assert engine.now() == 16


def test_an_answer_pauses_and_goes_on_in_the_next_bundle():
  policy = Given({0: np.array([10, 45]), 1: np.array([5, 6])})
  engine = SimEngine(policy, Costs(decode_step=1.0, learn_step=1.0), slots=2)
  relief = dict(pause_after=20)
  (first,) = submit(engine, 0, [request(0, 2, **relief)])
  assert engine.now() == 20 and first.is_paused
  assert kept(first) == {0: 10, 1: 20} and first.verdicts.tolist() == [10, 0]
  assert [c.finish for c in first.completions] == ['stop', 'paused']
  engine.learn(Lesson(groups=[], advantages=[], keep=[], count=0))
  again = dataclasses.replace(first.request, begun=first.completions)
  second, other = submit(engine, 1, [again, request(1, 2, **relief)], version=1)
  assert engine.now() == 20 + 20  # of 25 tokens; its neighbours took the other slot
  assert kept(other) == {0: 5, 1: 6} and not other.is_paused
  assert kept(second) == {0: 10, 1: 40} and second.is_paused
  engine.learn(Lesson(groups=[], advantages=[], keep=[], count=0))
  again = dataclasses.replace(second.request, begun=second.completions)
  (third,) = submit(engine, 2, [again], version=2)
  assert engine.now() == 20 + 20 + 5
  assert kept(third) == {0: 10, 1: 45} and not third.is_paused
  assert third.verdicts.tolist() == [10, 45]
  assert third.completions[0].versions.tolist() == [0] * 10
  versions = third.completions[1].versions.tolist()
  assert versions == [0] * 20 + [1] * 20 + [2] * 5
  metrics = engine.learn(
    Lesson(
      groups=[third], advantages=[np.ones(2)], keep=[np.array([0.0, 1.0])], count=1
    )
  )
  assert metrics['lag/max'] == 2
  assert metrics['lag/mean'] == pytest.approx((20 * 2 + 20) / 45)
  assert metrics['lag/share/0'] == pytest.approx(5 / 45)


def test_an_aborted_answer_keeps_its_place_until_all_have_ended():
  policy = Given({0: np.array([10, 45])}, [(0, 0)])
  engine = SimEngine(policy, Costs(decode_step=1.0), slots=2)
  (first,) = submit(engine, 0, [request(0, 2, pause_after=40)])
  assert [c.finish for c in first.completions] == ['aborted', 'paused']
  assert first.spares == ()
  engine.learn(Lesson(groups=[], advantages=[], keep=[], count=0))
  again = dataclasses.replace(first.request, begun=first.completions)
  (second,) = submit(engine, 1, [again], version=1)
  assert kept(second) == {1: 45} and second.spares == (10,)
  assert second.verdicts.tolist() == [45] and not second.is_paused


def test_what_went_on_with_the_same_weights_is_one_run():
  policy = Given({0: np.array([45])})
  engine = SimEngine(policy, Costs(decode_step=1.0), slots=2)
  (group,) = submit(engine, 0, [request(0, 1, pause_after=20)])
  again = dataclasses.replace(group.request, begun=group.completions)
  (group,) = submit(engine, 1, [again])  # with a lag, of version 0 too
  assert group.earlier == [()] and group.versions == [0]
  engine.learn(Lesson(groups=[], advantages=[], keep=[], count=0))
  again = dataclasses.replace(group.request, begun=group.completions)
  (group,) = submit(engine, 2, [again], version=1)
  assert group.earlier == [((40, 0),)] and group.versions == [1]


def test_one_that_ends_with_its_last_token_before_the_pause_has_ended():
  group, _ = answered([20, 20], pause_after=20)
  assert kept(group) == {0: 20, 1: 20} and not group.is_paused


# --- properties -----------------------------------------------------------------------


def by_the_rules(lengths, aborted, size, first_finished):
  """Who is kept if all answers run to their ends."""
  ended = [k for k in range(len(lengths)) if k not in aborted]
  if first_finished:
    ended.sort(key=lambda k: (lengths[k], k))
  return sorted(ended[:size])


def step_by_step(lengths, aborted, size, slots, chunk, first_finished):
  """The slots of one request, token by token. Returns tokens made, and steps."""
  waiting, running = list(range(len(lengths))), []
  made, ended, now = [0] * len(lengths), [], 0

  def is_needed(k):
    if not first_finished:
      return sum(other < k for other in ended) < size
    best = sorted((lengths[other], other) for other in ended)
    return len(best) < size or (made[k] + 1, k) <= best[size - 1]

  while True:
    running = [k for k in running if is_needed(k)]
    while waiting and len(running) < slots:
      k = waiting.pop(0)
      running += [k] * is_needed(k)
    if not running:
      return made, now
    for _ in range(chunk):
      alive = [k for k in running if made[k] < lengths[k]]
      now += bool(alive)
      for k in alive:
        made[k] += 1
    over = [k for k in running if made[k] == lengths[k]]
    running = [k for k in running if k not in over]
    ended += [k for k in over if k not in aborted]


CASES = st.tuples(
  st.lists(st.integers(1, 15), min_size=2, max_size=8),
  st.integers(1, 4),
  st.integers(1, 4),
  st.integers(1, 6),
  st.booleans(),
  st.sets(st.integers(0, 7), max_size=2),
)


@settings(derandomize=True, deadline=None)
@given(CASES)
def test_slots_do_as_a_loop_over_tokens_does(case):
  lengths, spare, slots, chunk, first_finished, aborted = case
  spare = min(spare, len(lengths) - 1)
  size = len(lengths) - spare
  group, engine = answered(
    lengths,
    slots=slots,
    chunk=chunk,
    aborted=aborted,
    size=size,
    spare=spare,
    first_finished=first_finished,
  )
  made, steps = step_by_step(lengths, aborted, size, slots, chunk, first_finished)
  assert list(kept(group)) == by_the_rules(lengths, aborted, size, first_finished)
  assert engine.now() == steps
  left = [n for k, n in enumerate(made) if n and k not in kept(group)]
  assert list(group.spares) == left


@settings(derandomize=True, deadline=None)
@given(CASES, st.integers(1, 6))
def test_pauses_change_neither_who_is_kept_nor_what_is_counted(case, pause_after):
  lengths, spare, slots, chunk, first_finished, aborted = case
  spare = min(spare, len(lengths) - 1)
  size = len(lengths) - spare
  policy = Given({0: np.array(lengths)}, [(0, k) for k in aborted])
  engine = SimEngine(policy, Costs(decode_step=1.0), slots=slots, chunk=chunk)
  relief = dict(spare=spare, first_finished=first_finished, pause_after=pause_after)
  (group,) = submit(engine, 0, [request(0, size, **relief)])
  sampled, bundle = [group], 0
  while group.is_paused:
    bundle += 1
    engine.learn(Lesson(groups=[], advantages=[], keep=[], count=0))
    again = dataclasses.replace(group.request, begun=group.completions)
    (group,) = submit(engine, bundle, [again], version=bundle)
    sampled.append(group)
  wanted = by_the_rules(lengths, aborted, size, first_finished)
  assert kept(group) == {k: lengths[k] for k in wanted}
  assert group.verdicts.tolist() == [lengths[k] for k in wanted]
  for completion in group.completions:
    versions = completion.versions
    assert (np.diff(versions) >= 0).all() and np.bincount(versions).max() <= pause_after
  # The ledger's identity: what was made is kept or was left over.
  found = ledger.count(sampled, [], [])
  assert found['rollout/tokens_generated'] == sum(lengths[k] for k in wanted) + sum(
    sum(one.spares) for one in sampled
  )
  assert engine.totals()['busy'][0] * slots == pytest.approx(
    found['rollout/tokens_generated']
  )
