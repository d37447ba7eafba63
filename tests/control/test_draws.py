"""Passes, quotas and request counts: numbers of algorithms.md, sections 2.4 and 2.6."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st
import pytest

from jaxrl_sched.control.draws import Draws, largest_remainder, requests_for


def test_largest_remainder_on_paper():
  assert largest_remainder(16, [0.5, 0.3, 0.2]) == [8, 5, 3]
  assert largest_remainder(3, [1, 1]) == [2, 1]  # ties to the first
  assert largest_remainder(5, [0, 1]) == [0, 5]


@given(
  st.integers(0, 500),
  st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
)
def test_quotas_add_up_and_are_within_one_of_exact(n, weights):
  parts = largest_remainder(n, weights)
  assert sum(parts) == n
  for part, weight in zip(parts, weights, strict=True):
    assert abs(part - n * weight / sum(weights)) < 1 + 1e-6


def test_requests_on_paper():
  assert requests_for(32, 0.5, None) == 64
  assert requests_for(32, 0.5, 0.95) == 78
  assert requests_for(0, 0.5, 0.95) == 0
  assert requests_for(7, 1.0, 0.95) == 7


@given(st.integers(1, 40), st.floats(0.05, 0.99))
def test_the_last_round_asks_for_the_least_that_is_likely_enough(missing, rate):
  def likely(m):  # P(Binomial(m, rate) >= missing), summed term by term
    return sum(
      math.comb(m, i) * rate**i * (1 - rate) ** (m - i) for i in range(missing, m + 1)
    )

  m = requests_for(missing, rate, 0.95)
  assert likely(m) >= 0.95 - 1e-9
  assert m == missing or likely(m - 1) < 0.95 + 1e-9


def indices(draws, dataset, n):
  found = draws.peek(dataset, n)
  draws.advance(dataset, n)
  return found


def test_each_prompt_comes_once_a_pass_and_passes_differ():
  """E2: epochs end in the middle of a round without harm."""
  draws = Draws({'a': 6}, {'a': 1.0}, seed=3)
  drawn = [x for n in (4, 4, 4, 4, 2) for x in indices(draws, 'a', n)]
  passes = [[i for i, number in drawn if number == p] for p in range(3)]
  assert all(sorted(p) == list(range(6)) for p in passes)
  assert passes[0] != passes[1]


def test_peeking_changes_nothing():
  draws = Draws({'a': 5}, {'a': 1.0})
  assert draws.peek('a', 12) == draws.peek('a', 12)
  assert indices(draws, 'a', 12)[:3] == Draws({'a': 5}, {'a': 1.0}).peek('a', 3)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=8), st.integers(0, 7))
def test_a_resume_at_any_point_draws_the_same(sizes, cut):
  """H3: the position in the data is in the checkpoint."""
  whole = Draws({'a': 5, 'b': 3}, {'a': 1, 'b': 1}, seed=1)
  first = Draws({'a': 5, 'b': 3}, {'a': 1, 'b': 1}, seed=1)
  expected = [indices(whole, 'a', n) for n in sizes]
  found = [indices(first, 'a', n) for n in sizes[:cut]]
  second = Draws({'a': 5, 'b': 3}, {'a': 1, 'b': 1}, seed=1)
  second.load_state_dict(json.loads(json.dumps(first.state_dict())))
  found += [indices(second, 'a', n) for n in sizes[cut:]]
  assert found == expected


def test_strange_state_and_settings_are_refused():
  draws = Draws({'a': 5}, {'a': 1.0})
  with pytest.raises(ValueError, match='other'):
    draws.load_state_dict({'other': 1})
  with pytest.raises(ValueError, match='draws.place'):
    draws.load_state_dict({'sizes': {'a': 5}, 'place': {'b': [0, 0]}})
  with pytest.raises(ValueError, match="prompts were {'a': 5} .* now {'a': 4}"):
    Draws({'a': 4}, {'a': 1.0}).load_state_dict(draws.state_dict())
  with pytest.raises(ValueError, match="dataset 'a': 0 prompts"):
    Draws({'a': 0}, {'a': 1.0})
  with pytest.raises(ValueError, match='sum is 0'):
    Draws({'a': 2}, {'a': 0.0})
  with pytest.raises(ValueError, match='weight -1'):
    Draws({'a': 2}, {'a': -1.0})
