"""What is solved, or hopeless, is not paid for again and again; and where nothing is left
the run ends with a reason."""

import collections

import numpy as np
import pytest
from schedules import EASY, HARD, USEFUL, play, prompt_of, scheduler
from toys import graded, through_files

from jaxrl_sched.control.asp import Asp
from jaxrl_sched.control.difficulty import Tiers
from jaxrl_sched.control.scheduler import Scheduler
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.control.source import Source
from jaxrl_sched.types import Sampling

SOLVED = [1] * 8  # of 8: one such group is enough to sleep


def asked(rounds) -> collections.Counter:
  return collections.Counter(r.prompt.dataset for requests in rounds for r in requests)


def until_exhausted(s, outcome, most=200) -> tuple[int, list[int]]:
  """Steps, and requests of each."""
  requests = []
  for step in range(most):
    if s.exhausted(step) is not None:
      return step, requests
    rounds, *_ = play(s, outcome, step)
    requests.append(sum(map(len, rounds)))
  raise AssertionError(f'not exhausted after {most} steps')


@pytest.mark.parametrize('factor', [0, 5, 1000, float('inf')])
@pytest.mark.parametrize('outcome', [SOLVED, [0] * 8, [0.5] * 8])
def test_a_run_that_has_nothing_to_learn_from_ends_after_one_pass(factor, outcome):
  """Ten quotas are asked for in the first step, in all its rounds, one in each later
  one: 100 prompts, four a step, are through after 40 + 15 * 4 groups."""
  s = scheduler(sizes={'a': 100}, factor=factor, group_size=8)
  steps, requests = until_exhausted(s, lambda r: outcome)
  assert requests == [40] + [4] * 15 and steps == 16
  reason = s.exhausted(steps)
  assert 'a whole pass over a brought no group with spread' in reason
  assert '\n' not in reason


def test_prompts_that_sleep_for_good_are_not_waited_for():
  """Half are solved in the first pass, filtered for good; the others never."""
  s = scheduler(sizes={'a': 40}, factor=float('inf'), group_size=8)
  outcome = lambda r: SOLVED if r.prompt.index % 2 else [0] * 8  # noqa: E731
  steps, requests = until_exhausted(s, outcome)
  assert sum(requests) <= 40 + 4 * 8


def test_a_prompt_that_is_learned_from_now_and_then_keeps_a_run_going():
  """One of 30: a pass never goes by without it."""
  s = scheduler(sizes={'a': 30}, group_size=8)
  for step in range(40):
    assert s.exhausted(step) is None
    play(s, lambda r: [1, 0] * 4 if r.prompt.index == 7 else SOLVED, step)


def test_bad_luck_in_a_small_dataset_does_not_end_a_run():
  """Three prompts are soon asked in vain; ten batches of groups must have been, too."""
  s = scheduler(sizes={'a': 3}, group_size=8, max_rounds=1)
  play(s, lambda r: SOLVED)
  assert s.exhausted(1) is None
  play(s, lambda r: USEFUL * 4, step=1)
  steps = 2
  while s.exhausted(steps) is None:
    play(s, lambda r: SOLVED, step=steps)
    steps += 1
  assert steps >= 2 + 3


def test_a_dead_dataset_among_live_ones_ends_nothing_and_costs_its_quota():
  s = scheduler(sizes={'a': 90, 'b': 900}, groups_per_step=8, group_size=8)
  outcome = lambda r: SOLVED if r.prompt.dataset == 'a' else [1, 0] * 4  # noqa: E731
  notes, missing = [], []
  for step in range(30):
    rounds, batch, metrics, _ = play(s, outcome, step)
    assert len(batch) == metrics['share/b'] * len(batch) == 4
    missing.append(metrics['rollout/missing'])
    # Quotas of four: ten of them in the first step, then one.
    assert asked(rounds)['a'] == (40 if step == 0 else 4)
    assert s.exhausted(step + 1) is None
    notes += s.notes()
  assert missing == [4] * 30
  assert len(notes) == 1 and notes[0].startswith(
    'a: 40 prompts were asked since a group'
  )
  assert metrics['rollout/in_vain/a'] == 90 and metrics['rollout/in_vain/b'] == 0


def test_one_group_with_spread_and_a_stream_is_asked_for_in_full_again():
  s = scheduler(sizes={'a': 500}, group_size=8)
  counts = []
  for step in range(4):
    relapsed = step == 2
    rounds, *_ = play(s, lambda r, x=relapsed: [1, 0] * 4 if x else SOLVED, step)
    counts.append(sum(map(len, rounds)))
  assert counts[0] == 40 and counts[1] == 4 and counts[2] == 4
  assert counts[3] == 40
  assert s.exhausted(4) is None


def test_ten_quotas_are_for_all_rounds_together():
  """Eight rounds of ten times the batch each were 80 quotas."""
  s = scheduler(sizes={'a': 5000}, groups_per_step=4)
  for step in range(6):
    # One in 40 is useful, so that it never counts as dead.
    rounds, *_ = play(s, lambda r: USEFUL if r.draw % 40 == 39 else HARD, step)
    assert sum(map(len, rounds)) <= 40


def test_hard_prompts_that_are_still_to_come_keep_a_run_going():
  rates = {'a': np.array([0.0] * 30 + [0.5] * 30)}
  tiers = Tiers(rates, {'a': 1.0}, steps=60)  # hard ones from 30 on
  sizes = {stream: len(i) for stream, (_, i) in tiers.streams().items()}
  s = Scheduler(
    Source(Snooze(sizes, tiers.weights(0), 0), tiers),
    prompt_of,
    Sampling(max_new_tokens=4),
    groups_per_step=4,
    group_size=8,
  )
  ended, _ = until_exhausted(s, lambda r: SOLVED)
  assert 30 < ended < 60


def test_without_dynamic_sampling_no_run_ends_early():
  """All groups are trained on (a KL term may learn from them): the budget is fixed."""
  s = scheduler(sizes={'a': 8}, dynamic_sampling=False)
  for step in range(30):
    rounds, *_ = play(s, lambda r: EASY, step)
    assert sum(map(len, rounds)) == 4 and s.exhausted(step + 1) is None


@pytest.mark.parametrize('cut', [1, 7, 15, 16])
def test_a_resume_ends_where_the_whole_run_does(cut):
  """At the end, too: the same command ends at once, for the same reason."""
  make = lambda: scheduler(sizes={'a': 100}, group_size=8, factor=5)  # noqa: E731
  whole, resumed = make(), make()
  steps, requests = until_exhausted(whole, lambda r: SOLVED)
  found = []
  for step in range(steps):
    if step == cut:
      state = through_files(resumed.state_dict())
      resumed = make()
      resumed.load_state_dict(state)
    assert resumed.exhausted(step) is None
    found.append(sum(map(len, play(resumed, lambda r: SOLVED, step)[0])))
  assert found == requests
  state = through_files(resumed.state_dict())
  again = make()
  again.load_state_dict(state)
  assert again.exhausted(steps) == whole.exhausted(steps) is not None


def test_with_a_lag_what_is_under_way_is_bounded_too():
  """One round a bundle: ten quotas until it is known, then one."""
  s = scheduler(sizes={'a': 300}, group_size=8, asp=Asp(lag=1))
  under_way, asked_for = {}, []
  for step in range(200):
    if s.exhausted(step) is not None:
      break
    while plan := s.plan(step):
      s.sent(plan)
      under_way[plan.step] = plan
      asked_for.append(len(plan.requests))
    plan = under_way.pop(step)
    s.observe([graded(r, SOLVED, version=plan.version) for r in plan.requests])
    s.take_batch(step)
    s.close(step)
  else:
    raise AssertionError('not exhausted')
  assert max(asked_for) <= 40 and asked_for[-1] == 4
  assert sum(asked_for) <= 300 + 3 * 40


def test_the_order_of_results_does_not_matter_to_what_was_in_vain():
  """Results of different prompts may come in any order, in any parts."""
  rng = np.random.default_rng(3)
  for _ in range(50):
    forth, back, parts = (Snooze({'a': 9}, {'a': 1.0}, 2) for _ in range(3))
    picks = forth.peek('a', 9)
    for s in (forth, back, parts):
      s.take('a', picks)
    verdicts = [[SOLVED, [1, 0] * 4][int(rng.random() < 0.3)] for _ in picks]
    useful = [i for i, v in enumerate(verdicts) if 0 in v]
    order = rng.permutation(9)

    def observe(s, which, picks=picks, verdicts=verdicts):
      s.observe_many(
        'a',
        [picks[i][0] for i in which],
        [verdicts[i] for i in which],
        [1.0] * len(which),
        draws=[i for i in which],
        drawn_passes=[picks[i][1] for i in which],
      )

    observe(forth, range(9))
    for i in range(8, -1, -1):
      observe(back, [i])
    observe(parts, sorted(order[:4].tolist()))
    observe(parts, sorted(order[4:].tolist()))
    expected = 8 - max(useful, default=-1)
    assert [s.in_vain('a') for s in (forth, back, parts)] == [expected] * 3
    assert forth.is_exhausted('a') == (not useful)
