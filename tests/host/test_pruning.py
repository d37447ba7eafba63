"""Pruning answers changes what a step costs, not where it goes on average.

Averages are taken over all outcomes, each with its probability from paper.
"""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from masks import average, chances, outcomes
import numpy as np
import pytest

from jaxrl_sched.host import packing, pruning
from jaxrl_sched.host.advantages import group_advantages
from jaxrl_sched.host.pruning import PromptPruner, inclusion, prune_answers

quickly = settings(derandomize=True, max_examples=60, deadline=None)


def binary(right, size):
  return group_advantages(np.repeat([1.0, 0.0], [right, size - right]))


# --- answers: unbiased, and what is not -------------------------------------------


def test_two_levels_are_exact_by_enumeration():
  """Test 1 of algorithms.md 4.9, through the weights that packing writes."""
  f = np.array([[3.0, -1.0], [2.0, 5.0]])
  prompts = np.array([0.5, 1.0])  # chances to be kept
  answers = np.array([[1.0, 0.5], [0.75, 0.5]])
  lengths = np.array([[2, 3], [5, 1]])
  mean = square = 0.0
  for bits in itertools.product([0, 1], repeat=6):
    d, e = np.array(bits[:2]), np.array(bits[2:]).reshape(2, 2)
    odds = np.prod(np.where(d, prompts, 1 - prompts))
    odds *= np.prod(np.where(e, answers, 1 - answers))
    keep = (d / prompts)[:, None] * (e / answers)
    weights = packing.answer_weights(
      lengths, averaging='sequence', max_new_tokens=9, keep=keep
    )
    found = float(np.sum(np.array(weights) * lengths * f))
    mean, square = mean + odds * found, square + odds * found**2
  assert mean == pytest.approx(2.25, rel=1e-12)
  assert square - mean**2 == pytest.approx(2.0208333, abs=1e-7)


def test_the_worked_table():
  """Test 2 of 4.9: the expected coefficient of each answer, and the wrong estimators."""
  rewards = np.array([1.0, 0, 0, 0])
  a = group_advantages(rewards)
  np.testing.assert_allclose(a, [1.7321, -0.5774, -0.5774, -0.5774], atol=1e-4)
  found = outcomes(a, 'coins', 0.5)
  assert len(found) == 8

  def again(keep, weight):  # advantages of the survivors alone
    of_kept = np.zeros(4)
    of_kept[keep] = group_advantages(rewards[keep])
    return weight * of_kept / 4

  table = {
    'ours': lambda keep, weight: weight * a / 4,
    'no weight': lambda keep, weight: keep * a / 4,
    'recomputed': again,
    'kept count': lambda keep, weight: weight * a / keep.sum(),
    'self-normalised': lambda keep, weight: weight * a / weight.sum(),
    'C by kept count': lambda keep, weight: 0.625 * weight * a / keep.sum(),
  }
  found = {name: average(found, value) for name, value in table.items()}
  rows = [('ours', 0.4330, -0.1443), ('no weight', 0.4330, -0.0722)]
  for name, success, failure in [*rows, ('recomputed', 0.2805, -0.1870)]:
    np.testing.assert_allclose(found[name], [success, *[failure] * 3], atol=1e-4)
  for name, value in found.items():
    assert np.allclose(value, a / 4, rtol=1e-6) == (name == 'ours'), name


@pytest.mark.parametrize('rule', pruning.RULES)
@pytest.mark.parametrize(
  'rewards', [[1, 0, 0, 0, 0], [1, 1, 1, 0], [0.0, 0.2, 0.5, 0.9, 1.0], [1, 0], [1, 1]]
)
def test_every_rule_is_unbiased_for_any_terms(rule, rewards):
  a = group_advantages(np.array(rewards, float))
  found = outcomes(a, rule, 0.6)
  terms = np.random.default_rng(1).standard_normal((len(a), 3))
  np.testing.assert_allclose(
    average(found, lambda keep, weight: weight @ terms), terms.sum(0), rtol=1e-6
  )


def test_no_weight_is_lost_or_applied_twice():
  """E5: gradients 10, 1, 2, 3; the low three go with 0.5; all 8 outcomes.

  A11: the denominator is the count before pruning, always.
  """
  g = np.array([10.0, 1, 2, 3])
  found = outcomes(g, 'coins', 0.5)
  total = average(found, lambda keep, weight: weight @ g)
  assert total == pytest.approx(16, rel=1e-12)
  assert average(found, lambda k, w: (w @ g - total) ** 2) == pytest.approx(14)
  assert average(found, lambda keep, weight: weight @ g / 4) == pytest.approx(4.0)
  wrong = {
    6.8125: lambda keep, weight: weight @ g / keep.sum(),
    5.75: lambda keep, weight: keep @ g / keep.sum(),
    4.7428571: lambda keep, weight: weight @ g / weight.sum(),
  }
  for value, estimator in wrong.items():
    assert average(found, estimator) == pytest.approx(value, abs=1e-7)
  # Packing multiplies by the weight once, and counts all four.
  written = average(
    found,
    lambda keep, weight: packing.answer_weights(
      [np.full(4, 7)], averaging='token', max_new_tokens=9, keep=[weight]
    )[0],
  )
  np.testing.assert_allclose(written, 1 / 28, rtol=1e-12)


def test_an_aborted_answer_is_in_no_statistic():
  """E4: pruning sees the seven that are left; the four right answers are low."""
  a = group_advantages(np.array([1.0, 1, 0, 0, 1, 0, 1]))
  right = np.array([1, 1, 0, 0, 1, 0, 1], bool)
  np.testing.assert_allclose(a, np.where(right, 0.8660254, -1.1547005), rtol=1e-5)
  found = outcomes(a, 'fixed', 0.5)
  assert len(found) == 6  # two of four
  for _, keep, weight in found:
    assert keep[~right].all() and keep[right].sum() == 2
    np.testing.assert_array_equal(weight[keep], np.where(right, 2.0, 1.0)[keep])


@pytest.mark.parametrize('low, weight', [(1, 1.0), (2, 2.0), (3, 1.5)])
def test_weights_are_true_not_nominal(low, weight):
  """Test 6 of 4.9: floor(low / 2) of 1, 2, 3 low answers go."""
  a = np.array([1.0] * low + [-4.0] * low)
  rng = np.random.default_rng(0)
  keep, found = prune_answers(a, rate=0.5, rng=rng)
  assert keep[low:].all() and (found[low:] == 1).all()
  assert keep[:low].sum() == low - low // 2
  assert (found[:low][keep[:low]] == weight).all() and (found[~keep] == 0).all()


def test_closed_forms_for_binary_rewards():
  """Test 7 of 4.9. The answers' score vectors are orthogonal and of size 1."""
  a = binary(1, 8)
  np.testing.assert_allclose(a, [2.6458, *[-0.3780] * 7], atol=1e-4)
  assert np.abs(a).mean() == pytest.approx(0.6614, abs=1e-4)
  odds = chances(a, 'coins', 0.5)
  masks, odds = np.array(list(odds)), np.array(list(odds.values()))
  assert len(masks) == 128
  weights = masks / inclusion(a, 'coins', 0.5)
  variance = odds @ np.square(weights * a - a).sum(1)
  assert variance / np.square(a).sum() == pytest.approx(0.125, rel=1e-5)
  assert odds @ (1 - masks.mean(1)) == pytest.approx(0.4375)
  for rule in ('fixed', 'coins'):
    keep, weight = prune_answers(
      binary(4, 8), rate=0.5, rule=rule, rng=np.random.default_rng(0)
    )
    assert keep.all() and (weight == 1).all()


def test_below_the_mean_by_rounding_is_not_below():
  for gap, chance in ((1e-6, 1.0), (1e-5, 0.5)):  # half of it from the mean
    a = np.array([1.0, -1.0, 1 + gap, -1 - gap])
    np.testing.assert_array_equal(inclusion(a, 'coins', 0.5)[:2], chance)


@pytest.mark.parametrize('low', [[1, 1, 1, 1], [1, -1, 1, -1], [1, 2, -1, 3]])
def test_fixed_against_coins(low):
  """4.3: n / (n - 1) sum |f - mean f|^2 against sum |f|^2, at one inclusion of 1/2."""
  a, f = np.array([1.0] * 4 + [9.0] * 4), np.array([*low, 0, 0, 0, 0], float)
  low = np.array(low)
  expected = {
    'fixed': 4 / 3 * np.square(low - low.mean()).sum(),
    'coins': np.square(low).sum(),
  }
  for rule, variance in expected.items():
    found = outcomes(a, rule, 0.5)
    got = average(found, lambda keep, weight: (weight @ f - f.sum()) ** 2)
    assert got == pytest.approx(variance, rel=1e-12)


# --- balanced ---------------------------------------------------------------------


def test_balanced_keeps_as_many_of_each_class():
  """Test 11 of 4.9: p = 1/8, G = 8."""
  a = binary(1, 8)
  np.testing.assert_allclose(inclusion(a, 'balanced'), [1, *[1 / 7] * 7], rtol=1e-5)
  kept = set()
  for seed in range(300):
    keep, weight = prune_answers(
      a, rate=0.5, rule='balanced', rng=np.random.default_rng(seed)
    )
    assert keep[0] and keep.sum() == 2 and weight[0] == 1
    np.testing.assert_allclose(weight[1:][keep[1:]], 7, rtol=1e-5)
    kept.add(int(np.flatnonzero(keep)[1]))
  assert kept == set(range(1, 8))


def test_balanced_has_a_floor_and_may_count_cost():
  np.testing.assert_allclose(inclusion(binary(1, 16), 'balanced')[1:], 0.1)
  a = np.array([2.0, -1.0, 1.0, 0.0])
  np.testing.assert_allclose(inclusion(a, 'balanced', floor=0.2), [1, 0.5, 0.5, 0.2])
  # 2/2, 1/1, 1/4, 0: over the largest, and the floor.
  cost = np.array([4, 1, 16, 1])
  np.testing.assert_allclose(inclusion(a, 'balanced', cost=cost), [1, 1, 0.25, 0.1])
  keep, weight = prune_answers(
    a, rate=0.0, rule='balanced', rng=np.random.default_rng(0), cost=cost
  )
  assert keep[:2].all() and weight[2] in (0, 4)


@st.composite
def chances_in_order(draw):
  pi = draw(st.lists(st.floats(0.01, 1.0) | st.just(1.0), min_size=1, max_size=9))
  return np.array(pi), draw(st.permutations(range(len(pi))))


@quickly
@given(chances_in_order())
def test_systematic_sampling_has_exactly_its_chances(given):
  """Test 11 of 4.9, for every order: u runs over all intervals between two ends."""
  pi, order = given
  ends = np.cumsum(pi[order])
  cuts = np.unique(np.concatenate([[0, 1], ends % 1]))
  shares = np.zeros(len(pi))
  for low, high in itertools.pairwise(cuts):
    keep = pruning.systematic(pi, order, (low + high) / 2)
    shares += (high - low) * keep
    if high - low > 1e-9:
      assert math.floor(pi.sum() - 1e-9) <= keep.sum() <= math.ceil(pi.sum() + 1e-9)
    assert keep[pi == 1].all()
  np.testing.assert_allclose(shares, pi, atol=1e-9)


# --- null cases, refusals, the sample size ----------------------------------------


@quickly
@given(
  st.lists(st.floats(-9, 9), min_size=1, max_size=12),
  st.sampled_from(['fixed', 'coins']),
  st.integers(0, 9),
)
def test_a_rate_of_0_is_no_pruning(advantages, rule, seed):
  """Test 8 of 4.9: bit-identical."""
  a = np.array(advantages, np.float32)
  rng = np.random.default_rng(seed)
  keep, weight = prune_answers(a, rate=0.0, rule=rule, rng=rng)
  assert keep.all() and (weight == 1).all() and weight.dtype == np.float64
  written = [
    packing.answer_weights([np.arange(1, len(a) + 1)], **AVERAGED, keep=k)[0]
    for k in ([weight], None)
  ]
  assert written[0].tobytes() == written[1].tobytes()


AVERAGED = dict(averaging='sequence', max_new_tokens=16)


@quickly
@given(
  st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=12),
  st.sampled_from(pruning.RULES),
  st.floats(0, 0.999),
  st.integers(0, 99),
)
def test_what_is_kept_weighs_the_inverse_of_its_chance(advantages, rule, rate, seed):
  a = np.array(advantages)
  pi = inclusion(a, rule, rate)
  assert ((pi > 0) & (pi <= 1)).all()
  keep, weight = prune_answers(a, rate=rate, rule=rule, rng=np.random.default_rng(seed))
  assert keep.any() or rule == 'coins' and (pi < 1).all()
  np.testing.assert_array_equal(weight, np.where(keep, 1 / pi, 0))
  assert (pi[np.abs(a) >= np.abs(a).mean()] == 1).all() or rule == 'balanced'
  if np.ptp(np.abs(a)) == 0:  # nothing tells them apart
    assert keep.all() and (weight == 1).all()


@pytest.mark.parametrize('rate', [-0.1, 1.0, 1.5, math.nan])
def test_impossible_rates_are_refused(rate):
  with pytest.raises(ValueError, match=f'rate: {rate}, expected 0 to below 1'):
    prune_answers(np.ones(3), rate=rate, rng=np.random.default_rng(0))
  with pytest.raises(ValueError, match=f'rate: {rate}, expected 0 to below 1'):
    PromptPruner({'d': 1}, rate=rate)
  with pytest.raises(ValueError, match=f'dppo.answers: {rate}, expected'):
    pruning.check_rate('dppo.answers', rate, allow_high_rate=True)


def test_a_config_may_have_a_high_rate_when_it_says_so():
  pruning.check_rate('dppo.answers', 0.7)
  pruning.check_rate('dppo.answers', 0.9, allow_high_rate=True)
  with pytest.raises(ValueError, match='dppo.answers: 0.9.*allow_high_rate=True'):
    pruning.check_rate('dppo.answers', 0.9)


@pytest.mark.parametrize(
  'change, message',
  [
    (dict(rule='lowest'), "rule: 'lowest', expected one of fixed, coins, balanced"),
    (dict(advantages=[]), r'expected finite numbers \[G\]'),
    (dict(advantages=[1.0, np.nan]), r'expected finite numbers \[G\]'),
    (dict(advantages=[[1.0]]), r'expected finite numbers \[G\]'),
    (dict(rule='balanced', floor=0.0), 'floor: 0.0, expected above 0'),
    (dict(rule='balanced', cost=np.array([1, 0])), 'cost: expected 2 numbers above 0'),
    (dict(rule='balanced', cost=np.array([1])), 'cost: expected 2 numbers above 0'),
    (dict(cost=np.array([1, 1])), "cost: has no say in rule 'fixed'"),
  ],
)
def test_strange_settings_are_refused(change, message):
  how = dict(advantages=[1.0, -2.0], rate=0.5, rng=np.random.default_rng(0)) | change
  with pytest.raises(ValueError, match=message):
    prune_answers(how.pop('advantages'), **how)


def test_effective_sample_size():
  """Test 4 of 5.4; answers that are not trained do not count."""
  assert pruning.effective_sample_size([1, 1, 2, 2]) == pytest.approx(0.9)
  assert pruning.effective_sample_size([3, 0, 3, 3]) == 1
  weights = [np.array([1.0, 0, 1]), np.array([2.0, 2, 0])]
  assert pruning.answer_metrics(weights) == {
    'dppo/kept': pytest.approx(4 / 6),
    'dppo/ess': pytest.approx(0.9),
  }
  assert pruning.answer_metrics([np.zeros(3)]) == {'dppo/kept': 0.0}
  assert pruning.answer_metrics([]) == {}
