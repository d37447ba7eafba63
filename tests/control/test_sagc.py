"""SAGC against paper: switch points, the dual trace, the rate it must keep, sizes of
prompts, and the same decisions after any cut."""

import fractions
import itertools
import json
import math
import statistics

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxrl_sched.control import sagc
from jaxrl_sched.control.sagc import SAGC
from jaxrl_sched.control.sagc_rules import exceedances, exceeding, isotonic
from jaxrl_sched.host.advantages import group_advantages

RISK = {4: 0.1, 8: 0.3, 16: 0.7}
CDF = statistics.NormalDist().cdf

quick = settings(derandomize=True, deadline=None, max_examples=60)
hits = st.lists(st.booleans(), min_size=1, max_size=6)  # of the groups of a step


def group(straggles: bool, size: int = 8) -> np.ndarray:
  lengths = np.full(size, 10)
  lengths[-1] = 21 if straggles else 20  # strictly above two medians, or just at it
  return lengths


def put(controller: SAGC, **changes) -> SAGC:
  controller.load_state_dict(controller.state_dict() | changes)
  return controller


def pinned(risks: dict[int, float], lam: float, index: int, **settings) -> SAGC:
  """So much evidence that a draw is the risk itself, to 1e-6."""
  return put(
    SAGC(tuple(risks), **settings),
    a=[1e12 * p for p in risks.values()],
    b=[1e12 * (1 - p) for p in risks.values()],
    lam=lam,
    index=index,
  )


def simulate(controller: SAGC, steps: int, rollouts: int = 128) -> tuple[float, list]:
  """The event rate and the sizes when groups straggle with RISK."""
  rng, rates, sizes = np.random.default_rng(7), [], []
  for step in range(steps):
    size = controller.propose(step)
    straggles = rng.random(rollouts // size) < RISK[size]
    controller.observe([group(s, size) for s in straggles], size, step)
    sizes.append(size)
    rates.append(straggles.mean())
  return float(np.mean(rates)), sizes


# --- the choice and the multiplier ---


@pytest.mark.parametrize(
  'lam, index, size',
  [
    (2.49, 1, 16),
    (2.51, 1, 8),
    (4.99, 0, 8),
    (5.01, 1, 4),
    (5.01, 2, 8),  # 4 is too far away
    (0.0, 0, 8),  # 16 is
  ],
)
def test_switch_points(lam, index, size):
  assert pinned(RISK, lam, index).propose(0) == size


def test_the_ends_cross_where_the_middle_is_not_offered():
  assert pinned({4: 0.1, 16: 0.7}, 3.33, 0).propose(0) == 16
  assert pinned({4: 0.1, 16: 0.7}, 3.34, 0).propose(0) == 4


def test_the_multiplier_follows_the_events():
  controller, trace = SAGC(eta=0.5, delta=0.4), []
  for step, straggles in enumerate([1, 1, 0, 1, 0, 0] + 7 * [0]):
    controller.observe([group(straggles)], 8, step)
    trace.append(controller.lam)
  np.testing.assert_allclose(trace[:6], [0.3, 0.6, 0.4, 0.7, 0.5, 0.3])
  assert trace[-1] == 0


@quick
@given(
  steps=st.lists(hits, min_size=1, max_size=60),
  delta=st.floats(0.05, 0.95),
  eta=st.floats(0.01, 1),
  mode=st.sampled_from(['groups', 'mean', 'any', 'prompts']),
)
def test_the_event_rate_telescopes_for_every_sequence(steps, delta, eta, mode):
  """lambda has paid for every event above delta: mean(S) - delta <= lambda / (eta T)."""
  aware = mode == 'prompts'
  controller = SAGC(
    delta=delta,
    eta=eta,
    mode='groups' if aware else mode,
    prompt_aware=aware,
    lambda_max=1e3,  # out of reach
  )
  rates = []
  for step, straggles in enumerate(steps):
    lengths = [group(s) for s in straggles]
    if aware:
      controller.observe_groups(lengths, [0.1] * len(lengths), step)
    else:
      controller.observe(lengths, 8, step)
    rates.append(float(any(straggles) if mode == 'any' else np.mean(straggles)))
    assert controller.metrics()['sagc/event_rate'] == pytest.approx(rates[-1])
  bound = controller.lam / (eta * len(steps))
  assert np.mean(rates) - delta <= bound + 1e-9


def test_it_finds_the_best_mix():
  """The linear programme: 8 and 16 at 0.75 and 0.25 straggle with 0.4."""
  rate, sizes = simulate(SAGC(delta=0.4), 8000)
  assert rate == pytest.approx(0.4, abs=0.01)
  assert np.mean([g == 8 for g in sizes]) == pytest.approx(0.75, abs=0.05)
  assert np.mean([g == 16 for g in sizes]) == pytest.approx(0.25, abs=0.05)
  assert np.log2(sizes).mean() == pytest.approx(3.25, abs=0.05)


def test_a_target_out_of_reach_gives_the_smallest_size_and_a_flag():
  controller = SAGC(delta=0.05, eta=0.5)
  _, sizes = simulate(controller, 2000)
  assert np.mean([g == 4 for g in sizes[1000:]]) > 0.95
  metrics = controller.metrics()
  assert metrics['sagc/lambda'] == 20 and metrics['sagc/at_cap'] == 1
  assert all(math.isfinite(x) for x in metrics.values())


@pytest.mark.parametrize(
  'mode, rate, hits, misses',
  [
    ('groups', 0.5, 2, 2),
    ('mean', 0.5, 0.5, 0.5),
    ('any', 1, 1, 0),
    ('batch', 1, 1, 0),
  ],
)
def test_modes(mode, rate, hits, misses):
  """Pooled, the median is 10 and the longest 21: an event."""
  controller = SAGC(mode=mode, rho=0.9)
  controller.observe([group(s) for s in (1, 0, 1, 0)], 8, 0)
  assert controller.posterior(8) == pytest.approx((1 + hits, 1 + misses))
  assert controller.posterior(4) == controller.posterior(16) == pytest.approx((1, 1))
  assert controller.metrics()['sagc/event_rate'] == rate


@quick
@given(steps=st.lists(hits, min_size=1, max_size=40), rho=st.floats(0.5, 0.95))
def test_forgetting_goes_to_the_prior_and_bounds_the_mass(steps, rho):
  controller = SAGC(rho=rho, prior=(2.0, 3.0))
  a, b = 2.0, 3.0
  for step, straggles in enumerate(steps):
    controller.observe([group(s) for s in straggles], 8, step)
    a = rho * a + (1 - rho) * 2 + sum(straggles)
    b = rho * b + (1 - rho) * 3 + len(straggles) - sum(straggles)
  assert controller.posterior(8) == pytest.approx((a, b))
  assert sum(controller.posterior(8)) <= 5 + max(map(len, steps)) / (1 - rho) + 1e-9
  for step in range(250):
    controller.observe([group(False, 4)], 4, len(steps) + step)
  assert controller.posterior(8) == pytest.approx((2, 3), abs=1e-3)  # unused since


def test_without_groups_nothing_is_learned():
  controller = SAGC()
  controller.observe([group(True)], 8, 0)
  before = controller.state_dict()
  controller.observe([], 16, 1)
  controller.observe([np.array([5])], 16, 2)
  after = controller.state_dict()
  assert {k: after[k] for k in ('a', 'b', 'lam')} == {
    k: before[k] for k in ('a', 'b', 'lam')
  }
  assert 'sagc/event_rate' not in controller.metrics()


# --- options ---


def test_isotonic():
  """Violators share their weighted mean: (3 * 1 + 1 * 3) / 4 = 1.5."""
  assert isotonic(np.array([0.0, 3, 1]), np.array([1.0, 1, 3])).tolist() == [
    0,
    1.5,
    1.5,
  ]
  assert isotonic(np.array([3.0, 2, 1]), np.ones(3)).tolist() == [2, 2, 2]
  assert isotonic(np.array([1.0, 2, 3]), np.ones(3)).tolist() == [1, 2, 3]


def test_monotone_does_not_believe_a_risk_that_falls_with_the_size():
  """At 4.9 risks 0.1, 0.7, 0.4 score 1.51, -0.43, 2.04; sizes 8 and 16 with their mean,
  0.55, score 0.305 and 1.305."""
  risks = {4: 0.1, 8: 0.7, 16: 0.4}
  assert pinned(risks, 4.9, 1).propose(0) == 16
  assert pinned(risks, 4.9, 1, monotone=True).propose(0) == 4


def test_signal_is_the_chance_that_verdicts_differ():
  """p = (1 + 0) / (8 + 2) = 0.1: 0.3439 at G = 4, 0.5695 at 8, 0.8147 at 16."""
  lengths, passed = [group(False)], [np.zeros(8, bool)]
  controller = SAGC(utility='signal')
  for step in range(3000):
    controller.observe(lengths, 8, step, passed=passed)
  state = controller.state_dict()
  found = np.array(state['signal']) / state['signal_mass']
  np.testing.assert_allclose(found, [0.3439, 0.56953, 0.814698], atol=1e-4)
  # From 8 to 16 it is worth 0.24516, against a risk that is 0.4 higher: 0.6129.
  state['a'], state['b'] = [1e11, 3e11, 7e11], [9e11, 7e11, 3e11]
  for lam, size in ((0.612, 16), (0.614, 8)):
    assert put(controller, **state | {'lam': lam, 'index': 1}).propose(5000) == size
  with pytest.raises(ValueError, match="passed: .*'signal', got None"):
    controller.observe(lengths, 8, 3000)


# --- places, boundaries, cuts ---


@st.composite
def histories(draw):
  steps = draw(st.integers(1, 30))
  return [draw(hits) for _ in range(steps)], draw(st.integers(0, steps))


@quick
@given(
  history=histories(),
  lag=st.integers(0, 2),
  radius=st.integers(1, 3),
  period=st.integers(1, 4),
  seed=st.integers(0, 5),
)
def test_moves_are_local_and_a_cut_changes_nothing(history, lag, radius, period, seed):
  """The credited size is the used one, also when it was planned before a cut."""
  steps, cut = history

  def fresh():
    return SAGC((2, 4, 8, 12, 16), radius=radius, period=period, seed=seed)

  def run(cut_at=None):
    controller, sizes, credits = fresh(), [], []
    for step in range(len(steps)):
      if step == cut_at:
        saved = json.loads(json.dumps(controller.state_dict()))
        told, controller = controller.metrics(), fresh()
        controller.load_state_dict(saved)
        assert controller.metrics() == told
      if step > lag:
        done = step - 1 - lag
        lengths = [group(s, sizes[done]) for s in steps[done]]
        before = sum(controller.posterior(sizes[done]))
        controller.observe(lengths, sizes[done], done)
        credits.append(sum(controller.posterior(sizes[done])) - before)
        forgotten = (1 - 0.99) * (before - 2)
        assert credits[-1] == pytest.approx(len(lengths) - forgotten)
      state = controller.state_dict()
      size = controller.propose(step)
      assert controller.propose(step) == size and controller.state_dict() == state
      controller.sent(step, size)
      assert controller.propose(step) == size  # a refill
      sizes.append(size)
    return sizes, credits, controller.state_dict(), controller.metrics()

  whole = run()
  assert run(cut) == whole
  places = [(2, 4, 8, 12, 16).index(g) for g in whole[0]]
  assert abs(places[0] - 2) <= radius
  for step, (i, j) in enumerate(itertools.pairwise(places), 1):
    assert abs(j - i) <= radius
    assert i == j or step % period == 0


def test_a_result_that_comes_late_does_not_move_the_size():
  controller = pinned(RISK, 0.0, 0)
  sizes = []
  for step in range(3):
    sizes.append(controller.propose(step))
    controller.sent(step, sizes[-1])
  controller.observe([group(False)], sizes[0], 0)
  assert sizes == [8, 16, 16] and controller.size == 16
  put(controller, lam=20.0)
  assert controller.propose(2) == 16 and controller.propose(3) == 8  # 2 has begun
  with pytest.raises(ValueError, match='step 1 was sent after step 2'):
    controller.sent(1, 16)
  with pytest.raises(ValueError, match='size of step 2: 8, expected 16'):
    controller.sent(2, 8)


def test_the_same_seed_gives_the_same_sizes_and_another_others():
  runs = [simulate(SAGC(seed=seed), 150)[1] for seed in (0, 0, 1)]
  assert runs[0] == runs[1] != runs[2]


# --- events ---


@quick
@given(
  lengths=st.lists(st.lists(st.integers(1, 40), min_size=2, max_size=9), min_size=1),
  tau=st.floats(1, 3),
  scale=st.integers(1, 1000),
  seed=st.integers(0, 9),
)
def test_events(lengths, tau, scale, seed):
  """A group at a time, as the definition reads; scale and order do not matter."""
  groups = [np.array(g) for g in lengths]
  found = exceeding(groups, tau)
  expected = [sum(x / statistics.median(g) > tau for x in g) for g in lengths]
  assert found.tolist() == expected
  assert exceeding([g * scale for g in groups], tau).tolist() == expected
  rng = np.random.default_rng(seed)
  assert exceeding([rng.permutation(g) for g in groups], tau).tolist() == expected
  assert not exceeding([np.full(len(g), scale) for g in lengths], tau).any()


def test_the_median_of_an_even_group_is_the_mean_of_the_central_two():
  """1, 2, 4, 6 have median 3: 6 is not above 2 * 3, 7 is."""
  lengths = [np.array([1, 2, 4, 6]), np.array([7, 1, 4, 2]), np.array([9, 9, 9, 30])]
  assert exceeding(lengths, 2.0).tolist() == [0, 1, 1]
  assert not exceeding([np.array([1, 1000])], 2.0).any()  # of two, never
  # 57 is 1.14 times 50, though 1.14 * 50 is a little less in binary.
  assert not exceeding([np.array([50, 50, 50, 57])], 1.14).any()


def test_an_aborted_answer_leaves_its_group():
  """Fault E4: seven lengths speak for themselves, and no 0 comes for the eighth."""
  seven = np.array([10, 10, 10, 10, 11, 11, 21])
  controller = SAGC()
  controller.observe([seven, group(False)], 8, 0)
  assert controller.posterior(8) == pytest.approx((2, 2))
  with pytest.raises(ValueError, match='at least 1 token'):
    controller.observe([np.append(seven, 0)], 8, 1)


@settings(derandomize=True, deadline=None, max_examples=8)
@given(sigma=st.floats(0.3, 1.2), tau=st.floats(1.6, 2.6), seed=st.integers(0, 99))
def test_risk_grows_with_size(sigma, tau, seed):
  """Of lognormal lengths; 4000 groups a size, so that a std is below 0.008."""
  rng = np.random.default_rng(seed)
  rates = []
  for size in (4, 8, 16, 32):
    lengths = np.exp(sigma * rng.standard_normal((4000, size))) * 1000
    rates.append((exceeding(lengths.astype(int) + 1, tau) > 0).mean())
  assert all(a < b + 0.02 for a, b in itertools.pairwise(rates))
  assert rates[0] < rates[-1]


# --- sizes of prompts ---


def test_prompts_leave_a_size_at_their_own_risk():
  """At lambda = 5: y - y^2 = 0.2 for y = x^8 or x^4, so q = 0.0396 and 0.0777."""
  sizes = (4, 8, 16)
  assert [sagc.size_for(q, 5.0, sizes) for q in (0.02, 0.05, 0.1, 0.3)] == [16, 8, 4, 4]
  y = (1 + math.sqrt(0.2)) / 2
  for q, above, below in ((1 - y ** (1 / 8), 16, 8), (1 - y ** (1 / 4), 8, 4)):
    assert sagc.size_for(q - 1e-9, 5.0, sizes) == above
    assert sagc.size_for(q + 1e-9, 5.0, sizes) == below
  assert (1 - y ** (1 / 8), 1 - y ** (1 / 4)) == pytest.approx(
    (0.0396, 0.0777), abs=5e-5
  )


@quick
@given(
  q=st.floats(0, 1),
  more=st.floats(0, 1),
  lam=st.one_of(st.floats(0, 50), st.sampled_from([0.0, 3.999999, 4.0, 5.0])),
  sizes=st.sampled_from([(4, 8, 16), (2, 3, 5, 16), (4, 6), (8,)]),
)
def test_a_size_never_grows_with_risk_or_multiplier(q, more, lam, sizes):
  size = sagc.size_for(q, lam, sizes)
  assert size in sizes
  assert sagc.size_for(min(1.0, q + more), lam, sizes) <= size
  assert sagc.size_for(q, lam + more, sizes) <= size
  # From 2 to 3 costs too much; that 3 to 16 would not is of no use.
  assert sagc.size_for(0.9, 4.1, (2, 3, 16)) == 2
  assert lam >= 4 or sizes != (4, 8, 16) or size == 16


@pytest.mark.parametrize(
  'trust, pi, q', [(1.0, 0.2, 0.1059), (0.0, 0.01, 0.05), (0.0, 0.4, 0.05)]
)
def test_calibration(trust, pi, q):
  """Odds 0.052632 / 0.111111 * 0.25 = 0.118421, and 0.118421 / 1.118421 = 0.1059."""
  assert sagc.calibrate(0.05, 0.10, pi, trust) == pytest.approx(q, abs=5e-5)


@quick
@given(
  q=st.floats(0.001, 0.9),
  pi_bar=st.floats(1e-4, 0.5),
  pi=st.floats(1e-4, 0.5),
  trust=st.floats(0, 1),
)
def test_calibration_keeps_order_and_level(q, pi_bar, pi, trust):
  own = sagc.calibrate(q, pi_bar, pi, trust)
  assert 0 < own < 1
  assert sagc.calibrate(q, pi_bar, min(0.5, pi * 1.5), trust) >= own - 1e-12
  assert sagc.calibrate(q * 1.1, pi_bar, pi, trust) >= own
  right = (1 - trust) * pi_bar + trust * pi  # what it predicts is what happens
  assert sagc.calibrate(pi_bar, pi_bar, pi, trust) == pytest.approx(right)


def test_the_budget_is_used_up_exactly():
  """32 = 16 + 4 + 8 + 4: the third would take 16 of 12, the last 8 of 4."""
  sizes = (4, 8, 16)
  assert sagc.fill([0.02, 0.1, 0.02, 0.05], 5.0, sizes, 32) == [16, 4, 8, 4]
  assert sagc.fill([0.02] * 9, 5.0, sizes, 32) == [16, 16]
  assert sagc.fill([0.3] * 3, 5.0, sizes, 32) == [4, 4, 4]  # a queue that ends
  # 12 of sizes 4 and 6: 6 leaves 6, 4 leaves 8; then 6 would leave 2.
  assert sagc.fill([0.3, 0.0, 0.0], 5.0, (4, 6), 12) == [4, 4, 4]
  with pytest.raises(ValueError, match='rollouts: 30, expected a sum of'):
    sagc.fill([0.1], 5.0, sizes, 30)


def is_sum(n: int, sizes: tuple[int, ...]) -> bool:
  return n == 0 or any(n >= g and is_sum(n - g, sizes) for g in sizes)


@quick
@given(
  qs=st.lists(st.floats(0, 1), min_size=24, max_size=24),
  lam=st.floats(0, 20),
  sizes=st.sampled_from([(4, 8, 16), (2, 3, 4), (3, 8, 12), (4, 6)]),
)
def test_any_queue_fills_the_budget(qs, lam, sizes):
  given = sagc.fill(qs, lam, sizes, 48)
  assert sum(given) == 48
  rest = 48
  for q, size in zip(qs, given, strict=False):
    own = sagc.size_for(q, lam, sizes)
    fits = [g for g in sizes if g <= rest and is_sum(rest - g, sizes)]
    assert size == max((g for g in fits if g <= own), default=min(fits))
    rest -= size


def test_a_budget_takes_only_what_leaves_a_rest_that_can_be_filled():
  budget = sagc.Budget(16, (4, 6))
  assert [g for g in (4, 6, 8, 14, 16) if budget.fits(g)] == [4, 6, 8, 16]
  budget.take(6)
  budget.take(6)
  assert budget.rest == 4 and not budget.fits(6)
  with pytest.raises(ValueError, match='size 6 does not fit into 4 rollouts'):
    budget.take(6)


# --- the predicted chance ---


def quantiles(sigma, levels, median=300.0):
  inverse = statistics.NormalDist().inv_cdf
  return [(u, median * math.exp(sigma * inverse(u))) for u in levels]


@quick
@given(
  sigma=st.floats(0.3, 2.5),
  tau=st.floats(1.2, 3),
  levels=st.sampled_from([(0.25, 0.75), (0.1, 0.5, 0.9), (0.6, 0.7), (0.9, 0.2)]),
)
def test_a_lognormal_gives_its_own_tail(sigma, tau, levels):
  found = sagc.exceedance(quantiles(sigma, levels), tau, cap=1e9)
  exact = 1 - CDF(math.log(tau) / sigma)
  assert found == pytest.approx(min(max(exact, 1e-4), 0.5), rel=1e-9)


def test_an_answer_at_the_limit_cannot_exceed():
  pairs = quantiles(1.0, (0.1, 0.5, 0.9), median=300)
  assert sagc.exceedance(pairs, 2.0, cap=601) > 0.2
  assert sagc.exceedance(pairs, 2.0, cap=599) == 1e-4
  assert sagc.exceedance(pairs, 1.0, cap=1e9) == 0.5


def test_between_levels_it_is_straight_and_where_lengths_stop_none_is_longer():
  """Levels at z = -1, 0, 1; ln length 0, 0, 1: half way up, z = 0.5."""
  levels = [CDF(-1), 0.5, CDF(1)]
  pairs = [(u, math.exp(y)) for u, y in zip(levels, (0, 0, 1), strict=True)]
  found = sagc.exceedance(pairs, math.exp(0.5), 1e9)
  assert found == pytest.approx(1 - CDF(0.5))
  assert sagc.exceedance([(0.1, 50), (0.5, 50), (0.9, 50)], 2.0, 1e9) == 1e-4
  both = exceedances(levels, [[1, 1, math.e], [7, 7, 7 * math.e]], math.exp(0.5), 1e9)
  np.testing.assert_allclose(both, found)


@pytest.mark.parametrize(
  'pairs',
  [[(0.5, 10)], [(0.5, 10), (0.5, 20)], [(0.1, 9), (0.9, 8)], [(0.0, 1), (1, 2)]],
)
def test_quantiles_that_are_none_are_refused(pairs):
  with pytest.raises(ValueError, match='expected'):
    sagc.exceedance(pairs, 2.0, 100)


# --- the controller that gives prompts their own size ---


def aware(**settings) -> SAGC:
  return SAGC(prompt_aware=True, **settings)


def test_prompts_get_what_their_risk_is_worth():
  """q = 0.05 and mean prediction 0.1: pi 0.04, 0.1, 0.2 are q 0.0194, 0.05, 0.1059."""
  known = {'a': [5e10], 'b': [95e10], 'num': 10.0, 'den': 100.0, 'lam': 5.0}
  controller = put(aware(trust=1.0), **known)
  assert controller.propose(3) == 8
  assert controller.propose_sizes(3, [0.04, 0.1, 0.2]) == [16, 8, 4]
  assert controller.propose_sizes(3, [0.04, 0.2, 0.04, 0.1], 32) == [16, 4, 8, 4]
  # Without trust all get the anchor's size.
  assert put(aware(trust=0.0), **known).propose_sizes(3, [0.04, 0.2]) == [8, 8]
  # Only sizes near the one in use are given.
  assert put(controller, index=0).propose_sizes(3, [0.04, 0.1, 0.2]) == [8, 8, 4]


def test_a_refill_goes_on_with_the_sizes_of_its_step():
  """At lambda = 0 all get the largest near one, 8 next to 4, and 16 a step later."""
  controller = aware(start=4)
  controller.sent(0, controller.propose(0))
  assert controller.size == 8
  resumed = aware(start=4)
  resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
  for one in (controller, resumed):
    assert one.propose_sizes(0, [0.1, 0.2]) == [8, 8] and one.allowed(0) == [4, 8]
    assert one.propose_sizes(1, [0.1, 0.2]) == [16, 16]


def test_shared_risk_counts_answers_and_predictions_alike():
  """3 of 12 answers are longer than two medians; predictions 0.1 * 8 + 0.3 * 4 = 2."""
  controller = aware(rho=0.9)
  eight = np.array([10, 10, 10, 10, 10, 10, 21, 30])
  four = np.array([10, 10, 10, 25])
  for rate, step in ((1.0, 0), (0.5, 1)):
    lengths = [eight, four if rate == 1 else group(False, 4)]
    controller.observe_groups(lengths, [0.1, 0.3], step)
    assert controller.metrics()['sagc/event_rate'] == rate
  # (1 + 3) * 0.9 + 0.1 + 2 and (9 + 9) * 0.9 + 0.9 + 10.
  assert controller.posterior(8) == pytest.approx((5.7, 27.1))
  state = controller.state_dict()
  assert (state['num'], state['den']) == pytest.approx((2 * 1.9, 12 * 1.9))
  assert controller.lam == pytest.approx(0.05 * (0.6 + 0.1))
  metrics = controller.metrics()
  assert metrics['sagc/group_size'] == 6
  assert metrics['sagc/event_rate/8'] == 1 and metrics['sagc/event_rate/4'] == 0
  assert metrics['sagc/share/4'] == metrics['sagc/share/8'] == 0.5
  q = 5.7 / 32.8
  assert metrics['sagc/p/16'] == pytest.approx(1 - (1 - q) ** 16)


@quick
@given(cut=st.integers(0, 12), seed=st.integers(0, 5), period=st.integers(1, 3))
def test_sizes_of_prompts_are_pure_and_survive_a_cut(cut, seed, period):
  def run(cut_at=None):
    rng, found = np.random.default_rng(seed), []
    controller = aware(seed=seed, delta=0.2, eta=1.0, period=period)
    for step in range(12):
      if step == cut_at:
        saved = json.loads(json.dumps(controller.state_dict()))
        controller = aware(seed=seed, delta=0.2, eta=1.0, period=period)
        controller.load_state_dict(saved)
      pis = rng.uniform(0.01, 0.4, 16)
      before = controller.state_dict()
      sizes = controller.propose_sizes(step, pis, 64)
      anchor, index = controller.propose(step), before['index']
      assert controller.state_dict() == before
      controller.sent(step, anchor)
      # A refill of the step decides as the step did, though the anchor has moved.
      assert controller.propose_sizes(step, pis, 64) == sizes
      assert abs(controller.sizes.index(anchor) - index) <= 1
      assert step % period == 0 or controller.sizes.index(anchor) == index
      assert sum(sizes) == 64
      lengths = [rng.integers(1, 60, size) for size in sizes]
      controller.observe_groups(lengths, pis[: len(sizes)], step)
      found.append(sizes)
    return found, controller.state_dict(), controller.metrics()

  assert run(cut) == run()


def test_prompts_of_their_own_size_learn_more_at_the_same_event_rate():
  """Four kinds of prompts and an exact predictor: a mean log2 G of 3.04 at 0.6."""
  sigmas, rng = np.array([0.35, 0.6, 0.9, 1.2]), np.random.default_rng(0)
  chances = np.array([1 - CDF(math.log(2) / s) for s in sigmas])
  controller, rates, gains = aware(delta=0.6, eta=0.1), [], []
  for step in range(1500):
    kinds = rng.integers(4, size=32)
    sizes = controller.propose_sizes(step, chances[kinds], 128)
    kinds = kinds[: len(sizes)]
    lengths = [
      1 + (1000 * np.exp(sigma * rng.standard_normal(size))).astype(int)
      for size, sigma in zip(sizes, sigmas[kinds], strict=True)
    ]
    controller.observe_groups(lengths, chances[kinds], step)
    rates.append(controller.metrics()['sagc/event_rate'])
    gains.append(np.log2(sizes).mean())
  assert np.mean(rates[500:]) == pytest.approx(0.6, abs=0.01)
  assert np.mean(gains[500:]) == pytest.approx(3.04, abs=0.03)  # 2.80 with one risk


# --- unequal groups ---


@pytest.mark.parametrize('size', [4, 8, 16])
def test_advantages_of_a_group_do_not_know_the_others(size):
  """One by one they equal [Q, G] at once: exactly for multiples of 1/64."""
  rng = np.random.default_rng(size)
  for rewards, tolerance in (
    (rng.integers(0, 65, (20, size)) / 64, 0),
    (rng.random((20, size)), 1e-6),
  ):
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    scaled = (centred / (rewards.std(axis=1, keepdims=True) + 1e-6)).astype(np.float32)
    found = [group_advantages(r) for r in rewards]
    np.testing.assert_allclose(found, scaled, rtol=0, atol=tolerance)
    # The squares sum to G for any G: the std is that of the population.
    np.testing.assert_allclose(np.square(found).sum(axis=1), size, rtol=1e-3)


def mean_gradient(p, size, advantages):
  """E of (1/G) sum A_i d log pi(answer i) / d logit, for answers that pass with p."""
  total = 0
  for outcome in itertools.product((0, 1), repeat=size):
    chance = math.prod(p if passed else 1 - p for passed in outcome)
    found = map(fractions.Fraction, advantages(np.array(outcome)).tolist())
    slope = sum(a * (passed - p) for a, passed in zip(found, outcome, strict=True))
    total += chance * slope / size
  return total


@pytest.mark.parametrize('size', [2, 4, 8])
def test_leaving_an_answer_out_of_its_baseline_removes_the_size(size):
  """Centred advantages give (1 - 1/G) of p (1 - p); times G / (G - 1) all, exactly."""
  p = fractions.Fraction(3, 10)
  centred = mean_gradient(p, size, lambda r: group_advantages(r, divide_by_std=False))
  assert centred == p * (1 - p) * fractions.Fraction(size - 1, size)
  assert centred * fractions.Fraction(size, size - 1) == p * (1 - p)


def test_std_normalised_advantages_keep_some_of_the_size():
  """The expected std of four answers is 0.7491 of the true one; 8 are nearer to it."""
  p = fractions.Fraction(3, 10)
  four, eight = (float(mean_gradient(p, size, group_advantages)) for size in (4, 8))
  assert four / math.sqrt(0.21) == pytest.approx(0.7491, abs=1e-4)
  assert four < eight < math.sqrt(0.21)


# --- what is refused ---


@pytest.mark.parametrize(
  'given, message',
  [
    (dict(sizes=(8, 4)), 'sizes: .*each larger than the last'),
    (dict(sizes=(1, 4)), 'sizes: .*of at least 2'),
    (dict(sizes=(4, 4)), 'sizes: '),
    (dict(sizes=()), 'sizes: '),
    (dict(sizes=(4.0, 8.0)), 'sizes: .*whole numbers'),
    (dict(sizes='48'), 'sizes: '),
    (dict(delta=0.0), 'delta: 0.0, expected above 0 and below 1'),
    (dict(delta=1.0), 'delta: '),
    (dict(delta=math.nan), 'delta: '),
    (dict(tau=0.9), 'tau: 0.9, expected at least 1'),
    (dict(rho=1.0), 'rho: '),
    (dict(rho=0.0), 'rho: '),
    (dict(eta=0.0), 'eta: '),
    (dict(prior=(0.0, 1.0)), 'prior: '),
    (dict(prior=(1.0,)), 'prior: '),
    (dict(radius=0), 'radius: '),
    (dict(period=0), 'period: '),
    (dict(seed=-1), 'seed: '),
    (dict(lambda_max=0.0), 'lambda_max: '),
    (dict(mode='all'), "mode: 'all', expected one of groups, mean, batch, any"),
    (dict(hold='both'), 'hold: '),
    (dict(utility='linear'), 'utility: '),
    (dict(start=5), r'start: 5, expected one of \[4, 8, 16\]'),
    (dict(trust=1.1), 'trust: '),
    (dict(prompt_aware=True, hold='prompts'), "hold: .*'rollouts' with prompt_aware"),
    (dict(prompt_aware=True, mode='any'), 'mode: '),
    (dict(prompt_aware=True, utility='signal'), 'utility: '),
    (dict(prompt_aware=True, monotone=True), 'monotone: '),
    (dict(prompt_aware=True, lambda_max=7.9), 'lambda_max: 7.9, expected at least 8 '),
    (dict(prompt_aware=True, prompt_prior=(1.0, 0.0)), 'prompt_prior: '),
  ],
)
def test_bad_settings_are_refused(given, message):
  with pytest.raises(ValueError, match=message):
    SAGC(**given)


def test_rollouts_must_be_a_multiple_of_every_size():
  """Fault L2: a batch of 8 and groups of 3."""
  with pytest.raises(ValueError, match=r'rollouts: 8 .*sizes \[2, 3\].* of \[3\]'):
    sagc.check_rollouts((2, 3), 8, 'rollouts')
  sagc.check_rollouts((2, 3), 12, 'rollouts')
  sagc.check_rollouts((2, 3), 8, 'prompts')


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'more': 1}, 'keys'),
    ({'version': 2}, 'version 2, expected 1'),
    ({'sizes': [4, 8]}, r'sizes \[4, 8\], expected \[4, 8, 16\]'),
    ({'prompt_aware': True}, 'prompt_aware'),
    ({'a': [1.0, 1.0]}, 'a: .*shape'),
    ({'a': [1.0, 0.0, 1.0]}, 'a: .*above 0'),
    ({'b': [1.0, math.nan, 1.0]}, 'b: '),
    ({'b': 'many'}, 'b: '),
    ({'lam': 21.0}, 'lam: 21.0, expected at most 20'),
    ({'lam': -1.0}, 'lam: '),
    ({'index': 3}, 'index: 3, expected a place'),
    ({'before': 1.0}, 'before: '),
    ({'step': None}, 'step: '),
    ({'seen': [1.0]}, 'seen: '),
  ],
)
def test_strange_states_are_refused_and_change_nothing(changes, message):
  controller = SAGC()
  before = controller.state_dict()
  with pytest.raises(ValueError, match=message):
    controller.load_state_dict(before | changes)
  assert controller.state_dict() == before


def test_results_that_are_not_its_own_are_refused():
  with pytest.raises(ValueError, match=r'size: 5, expected one of \[4, 8, 16\]'):
    SAGC().observe([group(True)], 5, 0)
  with pytest.raises(ValueError, match='observe_groups: prompt_aware is False'):
    SAGC().observe_groups([group(True)], [0.1], 0)
  with pytest.raises(ValueError, match='observe: prompt_aware is True'):
    aware().observe([group(True)], 8, 0)
  with pytest.raises(ValueError, match='pis: 1 of them, expected 2'):
    aware().observe_groups([group(True)] * 2, [0.1], 0)
  with pytest.raises(ValueError, match='pis: .*in \\[0, 1\\]'):
    aware().propose_sizes(0, [0.1, math.nan])
