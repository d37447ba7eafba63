"""The length predictor against paper, a plain second writing of its rules, and
identities (algorithms.md 3.3)."""

import copy
import math
from statistics import NormalDist

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxrl_sched.control.length_rules import (
  RIDGE,
  expected_longest,
  padded_tokens,
  quantile_of_longest,
  rank_correlation,
)
from jaxrl_sched.control.lengths import LengthPredictor

PHI = NormalDist()
quick = settings(max_examples=40, deadline=None, derandomize=True)


def same(*answers):
  return np.array(answers, np.int64)


def two_prompts():
  """One answers with 100 tokens, always, and one with 400, out of three."""
  p = LengthPredictor({'d': 3}, limit=1600)
  p.observe([('d', 0), ('d', 1)], [same(100, 100, 100, 100), same(400, 400, 400, 400)])
  return p


# --- numbers on paper ------------------------------------------------------------


def test_the_expected_longest_of_normals():
  """Exactly 0, 0.5642, 1.0294, 1.4236 and 1.7660 (tables); Blom is within 0.03."""
  exact = {1: 0.0, 2: 0.5642, 4: 1.0294, 8: 1.4236, 16: 1.7660}
  for size, value in exact.items():
    assert expected_longest(size) == pytest.approx(value, abs=0.03)
  assert expected_longest(4) == pytest.approx(1.0491, abs=1e-4)  # Phi^-1(3.625 / 4.25)


def test_the_quantile_of_the_longest():
  """0.9^(1/4) = 0.9740037: the longest of four is below its quantile with 0.9."""
  z = quantile_of_longest(0.9, 4)
  assert PHI.cdf(z) == pytest.approx(0.9740037, abs=1e-7)
  assert quantile_of_longest(0.9, 1) == pytest.approx(1.2815516, abs=1e-6)


def test_a_prompt_is_drawn_towards_its_dataset():
  """M = ln 200 and T2 = (ln 2)^2; one group against two of the dataset's."""
  p = two_prompts()
  mean, high = p.predict([('d', 0), ('d', 1), ('d', 2)], size=1)
  t2 = math.log(2) ** 2
  seen = math.exp(t2 * 2 / 3 / 2)
  near, far = 100 * 2 ** (2 / 3), 400 / 2 ** (2 / 3)
  unseen = 200 * math.exp(t2 / 2)
  np.testing.assert_allclose(mean, [near * seen, far * seen, unseen], rtol=1e-6)
  # Both were below what a dataset of no groups expects, and c fell twice by 0.005.
  assert high[2] == pytest.approx(200 * 2**1.2815516 * math.exp(-0.01), rel=1e-6)


def test_an_average_forgets_by_half():
  """Of three groups the newest weighs 1/2, the older two 1/4 each, in ln tokens."""
  p = LengthPredictor({'d': 2}, limit=4000, prior_groups=1e-9)
  for length in (100, 400, 1600):
    p.observe([('d', 0)], [same(length, length)])
  mean, _ = p.predict([('d', 0)])
  assert mean[0] == pytest.approx(
    100 ** (1 / 4) * 400 ** (1 / 4) * 1600 ** (1 / 2), rel=1e-5
  )


def test_no_number_of_groups_silences_the_dataset():
  """v' = min(v, 3): with n0 = 2 a prompt's own word never weighs more than 3/5."""
  p = LengthPredictor({'d': 2}, limit=4000, forgetting=0.5)
  for _ in range(300):  # beyond what a byte counts
    p.observe([('d', 0)], [same(100, 100)])
  p.observe([('d', 1)], [same(1000, 1000)])
  # Weights 1/2 + 1/4 + ... = 1 of 100 tokens and 1 of 1000.
  mu, t2 = 0.6 * 2 + 0.4 * 2.5, (0.5 * math.log(10)) ** 2
  mean, _ = p.predict([('d', 0)])
  assert mean[0] == pytest.approx(10**mu * math.exp(0.4 * t2 / 2), rel=1e-5)


def test_exceedance_of_a_lognormal():
  """Lengths 100, 100, 100, 200: e = 0.75 ln 2 / 1.0491 = 0.4955, so that two medians
  are at z = 1.3988: 0.0809."""
  p = LengthPredictor({'d': 2}, limit=1000)
  p.observe([('d', 0)], [same(100, 100, 200, 100)])
  assert p.exceedance([('d', 0), ('d', 1)], 2.0) == pytest.approx(
    [0.0809] * 2, abs=1e-4
  )
  assert p.exceedance([('d', 0)], 1.0)[0] == 0.5


def test_exceedance_where_two_medians_are_past_the_limit():
  """The median is 100 * 2^(1/4) = 118.9: no answer of 200 has twice that."""
  for limit, chance in ((200, 1e-4), (237, 1e-4), (238, 0.0809)):
    p = LengthPredictor({'d': 1}, limit=limit)
    p.observe([('d', 0)], [same(100, 100, 200, 100)])
    assert p.exceedance([('d', 0)], 2.0)[0] == pytest.approx(chance, abs=1e-4)


def test_exceedance_uses_the_spread_within_a_group_alone():
  """Prompts that differ, each constant, straggle no more than equal ones."""
  assert (two_prompts().exceedance([('d', i) for i in range(3)], 2.0) == 1e-4).all()


def test_padded_tokens_of_the_worked_example():
  """Test 1 of 3.11."""
  lengths = np.array([100, 900, 120, 880, 500, 520, 110, 910])
  assert padded_tokens(lengths, 2) == 6420
  assert padded_tokens(np.sort(lengths)[::-1], 2) == 4800
  assert padded_tokens(lengths, 1) == lengths.sum() == 4040
  assert padded_tokens(lengths, 3) == 3 * 900 + 3 * 880 + 2 * 910


def test_rank_correlation():
  a = np.array([1.0, 2, 3, 4])
  assert rank_correlation(a, np.exp(a)) == pytest.approx(1)
  assert rank_correlation(a, -a) == pytest.approx(-1)
  assert rank_correlation(a, np.array([1, 3, 2, 4])) == pytest.approx(0.8)
  # Equal values share the mean of their ranks: 1.5, 1.5, 3.5, 3.5.
  assert rank_correlation(a, np.array([0, 0, 1, 1])) == pytest.approx(4 / 20**0.5)
  assert rank_correlation(a, np.ones(4)) is None


# --- the rules, written a second time, plainly ------------------------------------


class Plain:
  """A dict a prompt, and a list of all groups a dataset, each with its weight."""

  def __init__(self, limit):
    self.limit, self.prompts = limit, {}
    self.rows = {'a': [], 'b': []}  # weight, x1, x2, m, e
    self.ln_c = {'a': 0.0, 'b': 0.0}

  def dataset(self, name, x1, x2):
    """M, T2 and Sigma."""
    if not self.rows[name]:
      return math.log(self.limit / 4), 0.25, 0.5
    w, xa, xb, m, e = np.array(self.rows[name]).T
    root = np.sqrt(w)
    design = np.stack([np.ones_like(w), xa, xb], 1)
    penalty = np.diag([0, RIDGE**0.5, RIDGE**0.5])
    fit, *_ = np.linalg.lstsq(
      np.concatenate([design * root[:, None], penalty]),
      np.concatenate([m * root, [0, 0, 0]]),
      rcond=None,
    )
    variance = (w * (m - design @ fit) ** 2).sum() / w.sum()
    prediction = float(np.clip(fit @ [1, x1, x2], 0, math.log(self.limit)))
    return prediction, variance, (w * e).sum() / w.sum()

  def lognormal(self, key, prompt_length):
    v, m, e, rate = self.prompts.get(key, (0, 0.0, 0.0, 0.5))
    M, T2, Sigma = self.dataset(key[0], math.log(prompt_length), rate)
    v = min(v, 3)
    return (v * m + 2 * M) / (v + 2), (v * e + 2 * Sigma) / (v + 2), T2 * 2 / (v + 2)

  def predict(self, key, prompt_length, size):
    mu, sigma, tau2 = self.lognormal(key, prompt_length)
    z = PHI.inv_cdf(0.9 ** (1 / size))
    high = math.exp(self.ln_c[key[0]] + mu + math.sqrt(sigma**2 + tau2) * z)
    mean = math.exp(mu + (sigma**2 + tau2) / 2)
    return np.clip([mean, high], 1, self.limit)

  def observe(self, keys, lengths, prompt_lengths, rates):
    before = copy.deepcopy(self)
    for name in {name for name, _ in keys}:
      self.rows[name] = [(0.99 * w, *rest) for w, *rest in self.rows[name]]
    for key, answers, n, rate in zip(keys, lengths, prompt_lengths, rates, strict=True):
      before.prompts = self.prompts  # the prompt's own; the dataset as of before
      mu, sigma, tau2 = before.lognormal(key, n)
      size = len(answers)
      ln_high = mu + math.sqrt(sigma**2 + tau2) * PHI.inv_cdf(0.9 ** (1 / size))
      missed = math.log(max(answers)) > self.ln_c[key[0]] + ln_high
      self.ln_c[key[0]] += 0.05 * (missed - 0.1)
      m = float(np.log(answers).mean())
      xi = PHI.inv_cdf((size - 0.375) / (size + 0.25))
      e = (math.log(max(answers)) - m) / xi
      v, old_m, old_e, old_rate = self.prompts.get(key, (0, m, e, 0.5))
      m, e = (m + old_m) / 2, (e + old_e) / 2
      self.prompts[key] = (v + 1, m, e, rate)
      self.rows[key[0]].append((1.0, math.log(n), old_rate, m, e))


@st.composite
def steps(draw):
  """Steps of groups: keys (some twice), lengths, prompt lengths, pass rates."""
  found = []
  for _ in range(draw(st.integers(1, 5))):
    n = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    keys = [(str(rng.choice(['a', 'b'])), int(rng.integers(3))) for _ in range(n)]
    sizes = rng.choice([2, 4, 8], n)
    lengths = [np.exp(rng.uniform(0, 7, g)).astype(int).clip(1, 1000) for g in sizes]
    found.append((keys, lengths, rng.integers(5, 500, n), rng.integers(9, size=n) / 8))
  return found


@quick
@given(steps())
def test_it_is_what_the_rules_say(history):
  fast, plain = LengthPredictor({'a': 3, 'b': 3}, limit=1000), Plain(1000)
  everyone = [(name, i) for name in 'ab' for i in range(3)]
  for keys, lengths, prompt_lengths, rates in history:
    fast.observe(keys, lengths, prompt_lengths=prompt_lengths, pass_rates=rates)
    plain.observe(keys, lengths, prompt_lengths, rates)
    mean, high = fast.predict(everyone, size=4, prompt_lengths=np.arange(40, 46))
    expected = [plain.predict(k, 40 + i, 4) for i, k in enumerate(everyone)]
    np.testing.assert_allclose(np.stack([mean, high], 1), expected, rtol=1e-4)


# --- identities -------------------------------------------------------------------


@quick
@given(steps())
def test_coverage_is_bound_for_any_lengths(history):
  """Misses - (1 - beta) groups = ln c / 0.05 exactly: the steps of c telescope."""
  p = LengthPredictor({'a': 3, 'b': 3}, limit=1000)
  misses = groups = 0.0
  for keys, lengths, prompt_lengths, _ in history * 3:
    p.observe(keys, lengths, prompt_lengths=prompt_lengths)
    metrics = p.metrics()
    misses += len(keys) * (1 - metrics['lengths/coverage'])
    groups += len(keys)
    moved = sum(math.log(metrics[f'lengths/calibration/{d}']) for d in 'ab')
    assert misses - 0.1 * groups == pytest.approx(moved / 0.05, abs=1e-9)


@quick
@given(steps(), st.integers(1, 64))
def test_everything_is_a_number_from_1_to_the_limit(history, size):
  """Before any group too, and for prompts far longer than any seen (M2)."""
  p = LengthPredictor({'a': 3, 'b': 3}, limit=1000)
  keys = [('a', 0), ('b', 2)]
  for found in [None, *history]:
    if found is not None:
      p.observe(found[0], found[1], prompt_lengths=found[2], pass_rates=found[3])
    for values in p.predict(keys, size=size, prompt_lengths=np.array([1, 10**9])):
      assert ((values >= 1) & (values <= 1000)).all()
    chance = p.exceedance(keys, 1.5)
    assert ((chance >= 1e-4) & (chance <= 0.5)).all()
    assert np.isfinite(list(p.metrics().values())).all()


@quick
@given(steps(), steps())
def test_a_resume_changes_nothing(before, after):
  """H3, H4: at any point, though the one that was saved goes on."""
  whole = LengthPredictor({'a': 3, 'b': 3}, limit=1000)
  for keys, lengths, prompt_lengths, rates in before:
    whole.observe(keys, lengths, prompt_lengths=prompt_lengths, pass_rates=rates)
  state = whole.state_dict()
  kept = copy.deepcopy(state)
  resumed = LengthPredictor({'a': 3, 'b': 3}, limit=1000)
  for p in (whole, resumed):
    if p is resumed:
      p.load_state_dict(state)
    for keys, lengths, prompt_lengths, rates in after:
      p.observe(keys, lengths, prompt_lengths=prompt_lengths, pass_rates=rates)
  assert resumed.metrics() == whole.metrics()
  np.testing.assert_equal(resumed.state_dict(), whole.state_dict())
  np.testing.assert_equal(state, kept)


@quick
@given(steps(), st.integers(0, 5))
def test_a_frozen_state_is_that_of_its_moment(history, at):
  p = LengthPredictor({'a': 3, 'b': 3}, limit=1000)
  frozen, then = p.freeze(), p.state_dict()
  for place, (keys, lengths, prompt_lengths, rates) in enumerate(history):
    if place == at:
      frozen, then = p.freeze(), p.state_dict()
    p.observe(keys, lengths, prompt_lengths=prompt_lengths, pass_rates=rates)
    np.testing.assert_equal(frozen(), then)


def test_a_frozen_state_that_is_past_is_refused():
  p = two_prompts()
  old, new = p.freeze(), p.freeze()
  with pytest.raises(RuntimeError, match='is past'):
    old()
  np.testing.assert_equal(new(), p.state_dict())
  p.load_state_dict(LengthPredictor({'d': 3}, limit=1600).state_dict())
  with pytest.raises(RuntimeError, match='is past'):
    new()


@quick
@given(steps())
def test_datasets_do_not_know_each_other(history):
  """What 'a' learns with 'b' beside it, and without."""
  both = LengthPredictor({'b': 3, 'a': 3}, limit=1000)
  alone = LengthPredictor({'a': 3}, limit=1000)
  for keys, lengths, _, rates in history:
    both.observe(keys, lengths, pass_rates=rates)
    mine = [i for i, (name, _) in enumerate(keys) if name == 'a']
    alone.observe(
      [keys[i] for i in mine], [lengths[i] for i in mine], pass_rates=rates[mine]
    )
  keys = [('a', 0), ('a', 2)]
  np.testing.assert_equal(both.predict(keys), alone.predict(keys))


def test_groups_of_different_size_are_comparable():
  """Lognormal answers of spread 0.5: the longest of 4 and of 16 say the same, but for
  Blom's error: exactly 1.0294 and 1.7660, by his formula 1.0491 and 1.7688."""
  rng = np.random.default_rng(0)
  keys = [('d', i) for i in range(4000)]
  for size, exact, blom in ((4, 1.0294, 1.0491), (16, 1.7660, 1.7688)):
    p = LengthPredictor({'d': 4001}, limit=10**6)
    p.observe(keys, list(np.exp(rng.normal(7, 0.5, (4000, size))).astype(int)))
    z = math.log(2) / (0.5 * exact / blom)
    chance = p.exceedance([('d', 4000)], 2.0)[0]
    assert chance == pytest.approx(1 - PHI.cdf(z), rel=0.02)


def test_one_answer_says_nothing_of_the_spread():
  """Groups of one (some were aborted, or a teacher answers) keep what was expected."""
  p = LengthPredictor({'d': 2}, limit=1000)
  p.observe([('d', 0)], [same(100, 100, 200, 100)])
  before = p.exceedance([('d', 0), ('d', 1)], 2.0)
  for _ in range(3):
    p.observe([('d', 0), ('d', 1)], [same(120), same(120)])
  assert p.exceedance([('d', 0), ('d', 1)], 2.0) == pytest.approx(before, rel=1e-5)


def test_without_a_size_that_of_the_newest_group_counts():
  p = LengthPredictor({'d': 2, 'e': 1}, limit=1000)
  p.observe([('d', 0), ('d', 1)], [same(1, 2), same(5, 6, 7, 90)])
  keys = [('d', 0), ('e', 0)]
  _, high = p.predict(keys)
  np.testing.assert_equal(high, p.predict(keys, size=np.array([4, 1]))[1])
  assert p.predict(keys, size=8)[1][0] > high[0]


# --- does it predict? ---------------------------------------------------------------


def test_it_learns_from_prompt_lengths_and_pass_rates():
  """ln length = ln 100 + 0.5 ln(prompt / 50) - (pass rate - 0.5), from 300 prompts."""
  rng = np.random.default_rng(1)
  # No memory: the newest step alone counts.
  p = LengthPredictor({'d': 302}, limit=10**5, factor=1.0, forgetting=1e-6)
  prompt = np.exp(rng.uniform(3, 6, 300)).astype(int)
  rate = np.round(rng.random(300) * 8) / 8
  keys = [('d', i) for i in range(300)]
  for before in (np.full(300, 0.5), rate):  # the pass rate of the group before
    ln = math.log(100) + 0.5 * np.log(prompt / 50) - (before - 0.5)
    lengths = np.exp(ln[:, None] + 0.1 * rng.standard_normal((300, 8)))
    lengths = list(np.rint(lengths).astype(int))
    p.observe(keys, lengths, prompt_lengths=prompt, pass_rates=rate)
  mean, _ = p.predict([('d', 300), ('d', 301)], prompt_lengths=np.array([50, 200]))
  assert mean == pytest.approx([100, 200], rel=0.05)


def test_on_lognormal_answers_it_covers_and_ranks():
  rng = np.random.default_rng(2)
  level = rng.normal(6, 0.6, 200)
  p = LengthPredictor({'d': 200}, limit=10**5)
  covered, rank, lost = [], [], []
  for step in range(150):
    picked = rng.choice(200, 32, replace=False)
    lengths = np.exp(level[picked, None] + 0.3 * rng.standard_normal((32, 8)))
    p.observe([('d', int(i)) for i in picked], list(lengths.astype(int) + 1))
    if step >= 50:
      metrics = p.metrics()
      covered.append(metrics['lengths/coverage'])
      rank.append(metrics['lengths/rank_correlation'])
      lost.append(metrics['lengths/padded_lost'])
  assert np.mean(covered) == pytest.approx(0.9, abs=0.01)
  assert np.mean(rank) > 0.9
  assert 0 < np.mean(lost) < 1


def test_nothing_is_lost_where_the_order_is_right():
  p = two_prompts()
  p.observe([('d', 0), ('d', 1)], [same(*[100] * 8), same(*[400] * 8)])
  metrics = p.metrics()
  assert metrics['lengths/padded_lost'] == 0
  assert metrics['lengths/rank_correlation'] == pytest.approx(1)


def test_metrics_speak_of_the_newest_groups_only():
  """M2: a rank correlation of equal groups is undefined, and is left out."""
  p = two_prompts()
  assert 'lengths/rank_correlation' not in p.metrics()
  p.observe([], [])
  assert p.metrics().keys() == {'lengths/calibration/d'}


def test_a_prompt_takes_11_bytes():
  p = LengthPredictor({'a': 600_000, 'b': 400_000}, limit=1000)
  arrays = [v for v in p.state_dict().values() if isinstance(v, np.ndarray)]
  assert sum(a.nbytes for a in arrays) < 11 * 10**6 + 1000


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(limit=0), 'lengths.limit: 0, expected at least 1 token'),
    (dict(factor=0.0), 'lengths.factor: 0.0, expected 0.01 to 1'),
    (dict(prior_groups=0), 'lengths.prior_groups: 0'),
    (dict(beta=1.0), 'lengths.beta: 1.0'),
    (dict(calibration=math.nan), 'lengths.calibration: nan'),
    (dict(forgetting=1.01), 'lengths.forgetting: 1.01'),
    (dict(minibatch=0), 'lengths.minibatch: 0'),
    (dict(datasets={}), 'lengths.datasets'),
    (dict(datasets={'d': 0}), 'lengths.datasets.d: 0, expected at least 1 prompt'),
  ],
)
def test_strange_settings_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    LengthPredictor(**dict(datasets={'d': 2}, limit=100) | settings)


@pytest.mark.parametrize(
  'changed, message',
  [
    (dict(keys=[('d', 0), ('x', 0)]), "dataset 'x', expected one of"),
    (dict(keys=[('d', 0), ('d', 3)]), "prompt 3 of 'd', expected 0 to 2"),
    (dict(keys=[('d', 0), ('d', -1)]), "prompt -1 of 'd'"),
    (dict(keys=[('d', 0)]), '2 groups, expected 1'),
    (dict(lengths=[same(5), same()]), r"\('d', 1\) has none"),
    (dict(lengths=[same(5), same(5, 0)]), r"0 tokens in \('d', 1\), expected 1 to"),
    (dict(lengths=[same(5, 1601), same(5)]), r"1601 tokens in \('d', 0\).*1600"),
    (dict(lengths=[np.array([5.5]), same(5)]), 'whole numbers of tokens'),
    (dict(prompt_lengths=np.array([5, 0])), 'prompt_lengths'),
    (dict(prompt_lengths=np.array([5])), 'prompt_lengths'),
    (dict(pass_rates=np.array([0.5, 1.5])), 'pass_rates'),
    (dict(pass_rates=np.array([0.5, math.nan])), 'pass_rates'),
  ],
)
def test_a_strange_observation_is_refused_and_changes_nothing(changed, message):
  p = two_prompts()
  before = p.state_dict()
  call = dict(keys=[('d', 0), ('d', 1)], lengths=[same(5, 6), same(7, 8)]) | changed
  with pytest.raises(ValueError, match=message):
    p.observe(**call)
  np.testing.assert_equal(p.state_dict(), before)


def test_a_strange_question_is_refused():
  with pytest.raises(ValueError, match='size 0, expected at least 1'):
    two_prompts().predict([('d', 0)], size=0)
  with pytest.raises(ValueError, match='tau: 0.5, expected at least 1'):
    two_prompts().exceedance([('d', 0)], 0.5)


@pytest.mark.parametrize(
  'changed, message',
  [
    (dict(version=2), 'version 2, expected 1'),
    (dict(datasets={'d': 4}), "datasets {'d': 4}, expected {'d': 3}"),
    (
      dict(mean=np.zeros(4, np.float32)),
      r'mean is float32\[4\], expected float32\[3\]',
    ),
    (dict(mean=np.zeros(3)), r'mean is float64\[3\], expected float32\[3\]'),
    (dict(groups=np.zeros(3, np.int64)), 'groups is int64'),
    (dict(more=1), 'keys'),
  ],
)
def test_a_strange_state_is_refused_and_changes_nothing(changed, message):
  p = two_prompts()
  before = p.state_dict()
  with pytest.raises(ValueError, match=message):
    p.load_state_dict(before | changed)
  with pytest.raises(ValueError, match='keys'):
    p.load_state_dict({'version': 1})
  np.testing.assert_equal(p.state_dict(), before)
