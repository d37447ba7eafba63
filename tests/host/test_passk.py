"""pass@k, majority and Wilson's interval against counting and paper."""

import itertools

import numpy as np
import pytest

from jaxrl_sched.host import passk


def test_one_right_of_four_and_none_of_four():
  """N3: mean accuracy 0.125, pass@4 0.5 and pass@1 0.125 are three numbers."""
  prompts = [[1, 0, 0, 0], [0, 0, 0, 0]]
  assert np.mean(prompts) == 0.125
  assert np.mean([passk.pass_at_k(4, sum(p), 4) for p in prompts]) == 0.5
  assert np.mean([passk.pass_at_k(4, sum(p), 1) for p in prompts]) == 0.125


@pytest.mark.parametrize('n', [1, 2, 5, 7])
def test_equals_the_share_of_subsets_with_a_right_answer(n):
  for c in range(n + 1):
    right = [i < c for i in range(n)]
    for k in range(1, n + 1):
      hits = [any(s) for s in itertools.combinations(right, k)]
      np.testing.assert_allclose(passk.pass_at_k(n, c, k), np.mean(hits), atol=1e-12)


def test_is_stable_where_binomials_overflow():
  # pass@1 is c/n whatever n; one right answer in n gives k/n.
  assert passk.pass_at_k(100_000, 30_000, 1) == pytest.approx(0.3, rel=1e-9)
  assert passk.pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize('n, c, k', [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_refuses_counts_that_cannot_be(n, c, k):
  with pytest.raises(ValueError, match='expected|needs'):
    passk.pass_at_k(n, c, k)


def test_refuses_no_samples():
  with pytest.raises(ValueError, match='n=0'):
    passk.pass_at_k(0, 0, 1)
  with pytest.raises(ValueError, match='n=0'):
    passk.wilson_interval(0, 0)


def test_the_majority_speaks_and_ties_go_to_the_first():
  assert passk.maj_at_k(['7', '8', '8'], [1, 0, 0]) == 0
  assert passk.maj_at_k(['7', '8'], [1, 0]) == 1
  assert passk.maj_at_k([None, None, '7'], [0, 0, 1]) == 1
  assert passk.maj_at_k([None], [0]) == 0


def test_wilson_ends_satisfy_their_defining_equation():
  # The ends are the rates p with |c/n - p| = z sqrt(p (1 - p) / n).
  for c, n in [(1, 10), (5, 10), (37, 200)]:
    for p in passk.wilson_interval(c, n):
      np.testing.assert_allclose(abs(c / n - p), 1.96 * np.sqrt(p * (1 - p) / n))


def test_wilson_at_the_edges_is_closed_form():
  z2 = 1.96**2
  assert passk.wilson_interval(0, 10) == pytest.approx((0.0, z2 / (10 + z2)))
  assert passk.wilson_interval(10, 10) == pytest.approx((10 / (10 + z2), 1.0))
