"""How often groups turn out useful, by stream and size, and what is asked for by it."""

import numpy as np
import pytest
from schedules import prompt_of
from toys import graded, through_files

from jaxrl_sched.control.opening import Acceptance
from jaxrl_sched.control.quotas import requests_for
from jaxrl_sched.control.sagc import SAGC
from jaxrl_sched.control.scheduler import Scheduler
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.control.source import Source
from jaxrl_sched.types import Sampling


def useful_rate(size: int, settled: float) -> float:
  """A share of prompts is settled; pass rates of the others are uniform in (0, 1): the
  integral of 1 - p^G - (1 - p)^G, term by term."""
  p = (np.arange(100_000) + 0.5) / 100_000
  return (1 - settled) * float(np.mean(1 - p**size - (1 - p) ** size))


def test_without_any_group_it_is_a_half_and_forgets_slowly():
  a = Acceptance(['s'])
  assert a.rate(['s'], 8) == 0.5
  a.count({('s', 8): 10}, {('s', 8): 4})
  assert a.rate(['s'], 8) == pytest.approx(5 / 12)
  a.count({('s', 8): 10}, {('s', 8): 10})
  assert a.rate(['s'], 8) == pytest.approx((0.9 * 4 + 10 + 1) / (0.9 * 10 + 10 + 2))
  a.count({('s', 8): 10_000}, {})
  assert a.rate(['s'], 8) == 0.05


@pytest.mark.parametrize('settled', [0.0, 0.4, 0.8])
@pytest.mark.parametrize('had, new', [(8, 2), (2, 8), (16, 4)])
def test_a_size_that_was_not_had_is_known_from_one_that_was(settled, had, new):
  """Exactly, where pass rates are as it supposes."""
  a, n = Acceptance(['s']), 10**6
  a.count({('s', had): n}, {('s', had): n * useful_rate(had, settled)})
  assert a.rate(['s'], new) == pytest.approx(useful_rate(new, settled), rel=1e-4)


def test_its_own_groups_outweigh_what_other_sizes_say():
  """Fifty groups of two, all useful, though those of eight say that a third is."""
  a = Acceptance(['s'])
  a.count({('s', 8): 900, ('s', 2): 50}, {('s', 8): 700, ('s', 2): 50})
  assert a.rate(['s'], 2) > 0.95
  assert a.rate(['s'], 8) == pytest.approx(700 / 900, rel=0.01)


def test_streams_know_nothing_of_one_another_unless_they_share_a_pot():
  a = Acceptance(['s', 't'])
  a.count({('s', 4): 98}, {('s', 4): 97})
  assert a.rate(['t'], 4) == 0.5 and a.rate(['s'], 4) == pytest.approx(0.98)
  a.count({('s', 4): 0, ('t', 4): 88.2}, {})
  assert a.rate(['s', 't'], 4) == pytest.approx((0.9 * 97 + 1) / (88.2 + 88.2 + 2))


def scheduler() -> Scheduler:
  """SAGC between 2 and 8 answers for 40 prompts."""
  return Scheduler(
    Source(Snooze({'a': 3000}, {'a': 1.0}, 0)),
    prompt_of,
    Sampling(max_new_tokens=64),
    groups_per_step=40,
    group_size=8,
    sagc=SAGC(sizes=(2, 8), hold='prompts', start=8, tau=1.5, delta=0.5, eta=20.0),
    surplus='drop',
    max_rounds=1,
  )


def test_when_the_size_moves_as_many_are_asked_for_as_it_takes():
  """Pass rates uniform in (0, 1): 7/9 of groups of eight are useful, a third of those of
  two. It was one rate for both: after 8 came 2 with 62 requests for 40 groups, of which
  21 are useful; after 2 came 8 with 145."""
  s, rng = scheduler(), np.random.default_rng(0)
  first: dict[int, list[int]] = {2: [], 8: []}  # requests where the size has just come
  filled, before = [], None
  for step in range(60):
    if step % 7 == 3:
      state = through_files(s.state_dict())
      s = scheduler()
      s.load_state_dict(state)
    plan = s.plan(step)
    s.sent(plan)
    size = plan.requests[0].size
    if step > 20 and size != before:
      first[size].append(len(plan.requests))
    before = size
    groups = []
    for request in plan.requests:
      verdicts = (rng.random(size) < rng.random()).astype(float)
      # Groups of 8 straggle and those of 2 cannot: the size moves to and fro.
      group = graded(request, verdicts, length=5)
      if size == 8:
        tokens = np.arange(20, dtype=np.int32)
        longest = group.completions[0]
        longest = type(longest)(
          draw=longest.draw,
          answer=0,
          tokens=tokens,
          logps=np.zeros(20, np.float32),
          finish='stop',
          version=0,
        )
        group = type(group)(
          request=request,
          completions=(longest, *group.completions[1:]),
          verdicts=group.verdicts,
          rewards=group.rewards,
          faults=group.faults,
        )
      groups.append(group)
    s.observe(groups)
    filled.append(len(s.take_batch(step).groups) / 40)
    s.close(step)
  for size, rate in ((8, 7 / 9), (2, 1 / 3)):
    expected = requests_for(40, rate, 0.95)
    assert len(first[size]) > 3
    assert np.mean(first[size]) == pytest.approx(expected, rel=0.1)
  assert np.mean(filled[20:]) > 0.98
