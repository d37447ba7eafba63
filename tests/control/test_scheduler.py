"""Dynamic sampling: rounds, quotas, surplus carried once, and counts that add up."""

import collections
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from schedules import EASY, HARD, USEFUL, play, scheduler
from toys import graded, through_files, written

from jaxrl_sched.control.asp import Asp


def test_plan_is_pure():
  s = scheduler()
  before, after = s.plan(0), s.plan(0)
  assert [r.draw for r in before.requests] == [r.draw for r in after.requests]
  assert [r.prompt.id for r in before.requests] == [r.prompt.id for r in after.requests]


def test_a_full_batch_keeps_the_quotas_and_every_request_is_counted():
  s = scheduler(weights={'a': 3, 'b': 1}, groups_per_step=4)
  _, batch, metrics, lines = play(s, lambda r: USEFUL)
  by = collections.Counter(g.request.prompt.dataset for g in batch)
  assert by == {'a': 3, 'b': 1}
  assert metrics['share/a'] == 0.75
  generated = metrics['rollout/groups_generated']
  assert generated == 4 + metrics['rollout/groups_pending']
  assert [line['fate'] for line in lines] == ['trained'] * 4


def test_groups_without_spread_are_replaced_until_the_batch_is_full():
  """E1: an update on exactly the groups configured, none twice."""
  s = scheduler(sizes={'a': 50})
  dull = {0: EASY, 1: HARD, 2: EASY}
  rounds, batch, metrics, lines = play(s, lambda r: dull.get(r.draw, USEFUL))
  assert len(rounds) >= 1 and len(batch) == 4
  assert len({g.request.draw for g in batch}) == 4
  assert metrics['rollout/groups_filtered'] == 3
  reasons = {
    line['draw']: line['reason'] for line in lines if line['fate'] == 'filtered'
  }
  assert reasons == {0: 'easy', 1: 'hard', 2: 'easy'}


def test_useful_groups_past_the_batch_come_first_in_the_next_one():
  """E1: 4 of 5 useful groups are trained on, the fifth is kept for the next batch."""
  s = scheduler(sizes={'a': 50}, groups_per_step=4)
  # 4 missing at a rate of 1/2: 13 requests are enough in 95 of 100 cases, 12 in 93. 3 are
  # useful; then 1 missing: 5, since 1 - 1/2^4 is less than 0.95.
  useful = {0, 1, 2, 13, 14}
  rounds, batch, metrics, _ = play(
    s, lambda r: USEFUL if r.draw in useful else HARD, step=0
  )
  assert [len(r) for r in rounds] == [13, 5]
  assert [g.request.draw for g in batch] == [0, 1, 2, 13]
  assert metrics['rollout/groups_pending'] == 1
  # It keeps its version, and its place at the front.
  _, batch, _, _ = play(s, lambda r: USEFUL, step=1)
  assert batch[0].request.draw == 14
  assert [g.completions[0].version for g in batch] == [0, 1, 1, 1]


def test_at_most_max_rounds_then_what_there_is():
  s = scheduler(max_rounds=3)
  rounds, batch, metrics, _ = play(s, lambda r: HARD)
  assert len(rounds) == 3 and batch == []
  assert metrics['rollout/groups_trained'] == 0
  assert metrics['rollout/groups_filtered'] == metrics['rollout/groups_generated']


def test_what_is_left_over_twice_is_dropped_as_stale():
  s = scheduler(sizes={'a': 50}, groups_per_step=2, max_rounds=1)
  # The last round of an unknown dataset asks for more than it needs (95 %).
  _, _, metrics, _ = play(s, lambda r: USEFUL)
  left = metrics['rollout/groups_pending']
  assert left > 2
  rounds, batch, metrics, lines = play(s, lambda r: USEFUL, step=1)
  assert rounds == [] and len(batch) == 2
  assert metrics['rollout/groups_dropped'] == left - 2
  assert {line['reason'] for line in lines if line['fate'] == 'dropped'} == {'stale'}


def test_surplus_drop_drops_at_once():
  s = scheduler(sizes={'a': 50}, groups_per_step=2, max_rounds=1, surplus='drop')
  _, _, metrics, lines = play(s, lambda r: USEFUL)
  assert metrics['rollout/groups_pending'] == 0
  assert metrics['rollout/groups_dropped'] == metrics['rollout/groups_generated'] - 2
  assert {line['reason'] for line in lines if line['fate'] == 'dropped'} == {'surplus'}


def test_without_dynamic_sampling_every_group_is_trained_on():
  s = scheduler(dynamic_sampling=False)
  rounds, batch, _, _ = play(s, lambda r: HARD)
  assert len(rounds) == 1 and len(batch) == 4


def test_metrics_cover_all_that_was_generated():
  """E3: the logged reward is over all groups, not over those that were kept."""
  s = scheduler(sizes={'a': 50}, groups_per_step=1, max_rounds=2)
  outcomes = [EASY, USEFUL]
  _, _, metrics, _ = play(s, lambda r: outcomes[min(r.draw, 1)])
  n = metrics['rollout/groups_generated']
  assert metrics['pass_rate'] == pytest.approx((2 + (n - 1)) / (2 * n))


def test_verdicts_of_other_ranges():
  """All 0.7 is neither easy nor hard, yet teaches nothing; nearly equal is equal."""
  s = scheduler(sizes={'a': 50}, groups_per_step=2, max_rounds=1)
  plan = s.plan(0)
  s.sent(plan)
  outcomes = {0: [0.7, 0.7], 1: [0.3, 0.3 + 5e-7]}
  s.observe([graded(r, outcomes.get(r.draw, USEFUL)) for r in plan.requests])
  s.take_batch(0)
  _, lines = s.close(0)
  reasons = [line['reason'] for line in lines if line['fate'] == 'filtered']
  assert reasons == ['constant', 'constant']


@settings(deadline=None)
@given(
  st.lists(st.sampled_from([USEFUL, EASY, HARD]), min_size=200, max_size=200),
  st.integers(1, 8),
  st.sampled_from(['carry', 'drop']),
  st.integers(0, 5),
)
def test_counts_add_up_and_a_resume_changes_nothing(outcomes, rounds, rule, cut):
  """H3, H4, conservation: generated = trained + filtered + dropped + pending."""

  def outcome(request):
    return outcomes[request.draw % len(outcomes)]

  def run(s, steps):
    return [(play(s, outcome, step)[1:]) for step in steps]

  def make():
    return scheduler(max_rounds=rounds, surplus=rule, seed=5)

  whole, before, after = make(), make(), make()
  expected = run(whole, range(6))
  found = run(before, range(cut))
  after.load_state_dict(through_files(before.state_dict()))
  found += run(after, range(cut, 6))
  for (batch, metrics, lines), (batch2, metrics2, lines2) in zip(
    expected, found, strict=True
  ):
    assert metrics == metrics2 and lines == lines2
    for a, b in zip(batch, batch2, strict=True):
      assert a.request.draw == b.request.draw
      for x, y in zip(a.completions, b.completions, strict=True):
        np.testing.assert_array_equal(x.tokens, y.tokens)
        np.testing.assert_array_equal(x.logps, y.logps)
        assert (x.version, x.finish, x.logps.dtype) == (y.version, y.finish, np.float32)

  total = collections.Counter()
  for _, metrics, lines in expected:
    total['generated'] += metrics['rollout/groups_generated']
    total.update(line['fate'] for line in lines)
  pending = len(whole.pending())
  assert total['generated'] == (
    total['trained'] + total['filtered'] + total['dropped'] + pending
  )


def test_after_a_resume_no_more_is_drawn_and_nothing_older_is_trained_on():
  """D3 without a lag: 60 steps from version 50 on, resumed at each."""

  def outcome(request):
    return (USEFUL, HARD, EASY)[np.random.default_rng(request.draw).integers(3)]

  whole, resumed = scheduler(sizes={'a': 50}), scheduler(sizes={'a': 50})
  carried = 0
  for step in range(50, 110):
    state = through_files(resumed.state_dict())
    resumed = scheduler(sizes={'a': 50})
    resumed.load_state_dict(state)
    _, batch, metrics, _ = play(resumed, outcome, step)
    assert metrics == play(whole, outcome, step)[2]
    versions = {c.version for group in batch for c in group.completions}
    assert versions <= {step - 1, step}
    carried += step - 1 in versions
  assert carried > 0


@pytest.mark.parametrize('lag', [1, 2])
def test_a_run_that_begins_at_a_late_version_admits_no_more_than_its_lag(lag):
  """D3: batch 8, restored at version 50 with nothing under way: at most (lag + 1) * 8
  rollouts are asked for at once (a counter that forgot its past admits 416), and none
  of the next 60 steps trains on anything older than the lag."""
  how = dict(groups_per_step=2, group_size=4, dynamic_sampling=False)
  s, under_way = scheduler(sizes={'a': 50}, asp=Asp(lag=lag), **how), {}
  most = 0
  for step in range(50, 110):
    while plan := s.plan(step):
      s.sent(plan)
      under_way[plan.step] = plan
    most = max(most, sum(r.size for plan in under_way.values() for r in plan.requests))
    plan = under_way.pop(step)
    assert 0 <= step - plan.version <= lag
    s.observe([graded(r, USEFUL, version=plan.version) for r in plan.requests])
    s.take_batch(step)
    s.close(step)
  assert most == 8 * (lag + 1)


def test_what_is_carried_leaves_the_quotas_of_a_window_alone():
  """3.6: every bundle of a window asks each dataset for the same."""
  s = scheduler(
    sizes={'a': 90, 'b': 90}, groups_per_step=4, max_rounds=1, asp=Asp(window=4)
  )
  carried = 0
  for step in range(12):
    plan = s.plan(step)
    s.sent(plan)
    names = collections.Counter(r.prompt.dataset for r in plan.requests)
    assert names['a'] == names['b'] > 0
    s.observe([graded(r, USEFUL) for r in plan.requests])  # more than are needed
    s.take_batch(step)
    s.close(step)
    carried += len(s.pending())
  assert carried > 0


def test_in_a_window_a_short_bundle_weighs_no_more():
  """3.6: the normaliser is constant over the window, whatever is filtered."""
  for window, count in ((1, 1), (2, 4)):
    s = scheduler(
      sizes={'a': 50}, groups_per_step=4, asp=Asp(window=window), max_rounds=1
    )
    plan = s.plan(0)
    s.sent(plan)
    first = plan.requests[0].draw
    s.observe([graded(r, USEFUL if r.draw == first else HARD) for r in plan.requests])
    assert s.take_batch(0).count == count


def test_a_frozen_state_is_that_of_its_moment():
  s = scheduler(sizes={'a': 50}, groups_per_step=2, max_rounds=1)
  play(s, lambda r: USEFUL)
  now, later = s.state_dict(), s.freeze()
  assert now['pending']['carried']
  play(s, lambda r: HARD, step=1)
  play(s, lambda r: USEFUL, step=2)
  then = written(later())
  assert then == written(now) != written(s.state_dict())


def test_strange_settings_and_state_are_refused():
  with pytest.raises(ValueError, match="surplus: 'keep'"):
    scheduler(surplus='keep')
  with pytest.raises(ValueError, match='groups_per_step=0'):
    scheduler(groups_per_step=0)
  with pytest.raises(ValueError, match='expected'):
    scheduler().load_state_dict({'draw': 1})


@pytest.mark.parametrize(
  'key, value',
  [
    ('draw', 'x'),
    ('draw', -1),
    ('version', 1),
    ('acceptance', {'a': [[2, 1.0, float('nan')]], 'b': []}),
    ('acceptance', {'a': [[2, -1.0, 0.0]], 'b': []}),
    ('acceptance', {'a': [[2, 0.0]], 'b': []}),
    ('acceptance', 3),
    ('acceptance', {'a': []}),
    ('in_vain', -1),
    ('turns', {'counts': {'a': 0, 'b': 0}}),
    ('turns', {'counts': {'a': 0.5, 'b': 0}, 'weights': {}}),
    ('turns', {'counts': {'a': 0, 'b': 0}, 'weights': {'a': 1.0, 'b': float('nan')}}),
    ('turns', {'counts': {'a': 0, 'b': 0}, 'weights': {'a': 1.0}}),
    ('sagc', {}),
    ('source', None),
    ('source', {'snooze': {'place': 3}, 'tiers': None}),
    ('carried', None),
  ],
)
def test_a_strange_state_is_refused(key, value):
  state = scheduler().state_dict()
  scheduler().load_state_dict(state)
  with pytest.raises(ValueError, match='expected|began'):
    scheduler().load_state_dict(state | {key: value})


@pytest.mark.parametrize(
  'change',
  [
    {'weight': float('nan')},
    {'weight': -1.0},
    {'verdicts': [float('nan')] * 2},
    {'verdicts': []},
    {'completions': []},
    {'prompt_id': 'a/none'},
  ],
)
def test_a_strange_carried_group_is_refused(change):
  s = scheduler(sizes={'a': 50}, groups_per_step=2, max_rounds=1)
  play(s, lambda r: USEFUL)
  state = s.state_dict()
  state['pending']['carried'][0] |= change
  with pytest.raises(ValueError, match='carried group|when this run began'):
    scheduler(sizes={'a': 50}).load_state_dict(state)


def test_a_prompt_twice_in_a_batch_is_counted():
  """2.10, test 10: three prompts for a batch of four."""
  s = scheduler(sizes={'a': 3}, groups_per_step=4, dynamic_sampling=False)
  _, _, metrics, _ = play(s, lambda r: HARD)
  assert metrics['rollout/repeats'] == 1


# --- snoozing (its own promises are in test_snooze.py) -------------------------------


def test_solved_prompts_are_not_asked_for_while_they_sleep():
  """8 prompts, of which 4 are always solved, groups of 8, a factor of 3: a solved one
  is sampled in passes 0, 4, 8 ... only, and no useful one is ever left out."""
  s = scheduler(
    sizes={'a': 8}, factor=3, groups_per_step=4, group_size=8, dynamic_sampling=False
  )
  seen = collections.defaultdict(list)

  def outcome(request):
    seen[request.prompt.index].append(request.dataset_pass)
    return [1.0] * 8 if request.prompt.index < 4 else [1.0] * 4 + [0.0] * 4

  for step in range(30):
    play(s, outcome, step)
  last = max(max(passes) for passes in seen.values())
  assert last >= 9
  for index, passes in seen.items():
    whole = [p for p in passes if p < last]  # the last pass may not be over
    assert whole == list(range(0, last, 4 if index < 4 else 1)), index


def test_a_dataset_that_is_solved_still_gets_its_requests():
  """All of it sleeps: the ones that would wake first are woken, the step ends. Ten
  quotas of 2 are asked for until all are known to be solved, then one a step."""
  s = scheduler(sizes={'a': 5, 'b': 50}, factor=100, group_size=8, max_rounds=3)

  def outcome(request):
    solved = request.prompt.dataset == 'a'
    return [1.0] * 8 if solved else [1.0] * 4 + [0.0] * 4

  for step in range(6):
    rounds, batch, metrics, _ = play(s, outcome, step)
    asked = [r.prompt.dataset for requests in rounds for r in requests].count('a')
    assert (len(rounds), asked) == ((3, 20) if step == 0 else (1, 2))
    assert {g.request.prompt.dataset for g in batch} == {'b'}
  assert metrics['snooze/early_wakes/a'] > 0 == metrics['snooze/early_wakes/b']
  assert metrics['snooze/asleep/a'] == 1.0


def test_a_shaped_reward_does_not_hide_that_a_prompt_is_solved():
  """The verdict decides, before any penalty for length."""
  s = scheduler(sizes={'a': 4}, factor=9, groups_per_step=4, group_size=8, max_rounds=1)
  plan = s.plan(0)
  s.sent(plan)
  shaped = np.linspace(0.5, 1.0, 8).astype(np.float32)
  groups = [graded(r, [1.0] * 8, version=0) for r in plan.requests]
  s.observe([dataclasses.replace(g, rewards=shaped) for g in groups])
  s.take_batch(0)
  metrics, _ = s.close(0)
  assert metrics['snooze/asleep/a'] == 1.0
