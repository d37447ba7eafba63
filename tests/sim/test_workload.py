"""Synthetic answers: the same in any company, spread as they are said to be."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxrl_sched.sim.workload import (
  ABORTED,
  LENGTH,
  Dataset,
  Workload,
  uniforms,
)
from jaxrl_sched.types import Group, Lesson, Relief, Request, Sampling

FREE = Sampling(max_new_tokens=10**9)


def request(workload, draw, size=4, *, dataset='a', index=0, sampling=FREE, **how):
  prompt = workload.prompts.get(dataset, index)
  return Request(draw=draw, prompt=prompt, size=size, sampling=sampling, **how)


def lesson(groups, *, advantage=1.0):
  return Lesson(
    groups=groups,
    advantages=[np.full(4, advantage)] * len(groups),
    keep=[np.ones(4)] * len(groups),
    count=len(groups),
  )


def group(asked):
  zeros = np.zeros(4, np.float32)
  return Group(request=asked, completions=(), verdicts=zeros, rewards=zeros)


# --- a function of its place ----------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
  st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 9), st.integers(0, 4)),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one[0],
  ),
  st.randoms(use_true_random=False),
)
def test_a_request_gets_the_same_answers_in_any_company(asked, random):
  workload = Workload({'a': Dataset(count=5, aborts=0.1)}, seed=3)
  requests = [request(workload, d, size, index=i) for d, size, i in asked]
  alone = [workload.answers_of([one], 0) for one in requests]
  order = list(range(len(requests)))
  random.shuffle(order)
  together = workload.answers_of([requests[i] for i in order], 0)
  for place, i in enumerate(order):
    part = slice(together.starts[place], together.starts[place + 1])
    for field in ('lengths', 'finish', 'verdicts'):
      mine = getattr(together, field)[part]
      assert mine.tolist() == getattr(alone[i], field).tolist()


def test_more_answers_do_not_change_the_first():
  workload = Workload({'a': Dataset()}, seed=3)
  few, many = request(workload, 7, 4), request(workload, 7, 6)
  spare = dataclasses.replace(few, relief=Relief(spare=2))
  lengths = workload.answers(many, 0)[0].tolist()
  assert workload.answers(few, 0)[0].tolist() == lengths[:4]
  assert workload.answers(spare, 0)[0].tolist() == lengths


def test_seeds_draws_and_answers_differ():
  numbers = {
    float(
      uniforms(seed, np.array([draw], np.uint64), np.array([k], np.uint64), 1)[0, 0]
    )
    for seed in range(5)
    for draw in range(20)
    for k in range(20)
  }
  assert len(numbers) == 5 * 20 * 20


def test_the_noise_is_uniform_and_neighbours_are_independent():
  draws = np.repeat(np.arange(1000, dtype=np.uint64), 100)
  answers = np.tile(np.arange(100, dtype=np.uint64), 1000)
  u, v = uniforms(0, draws, answers, 2)
  counts = np.histogram(u, bins=20, range=(0, 1))[0]
  # Chi-squared of 19 degrees of freedom: above 50 once in ten thousand times.
  assert ((counts - 5000) ** 2 / 5000).sum() < 50
  grid = u.reshape(1000, 100)
  for a, b in (
    (u, v),
    (grid[:, :-1].ravel(), grid[:, 1:].ravel()),  # the next answer
    (grid[:-1].ravel(), grid[1:].ravel()),  # the next draw
  ):
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(len(a))


# --- as it is said to be --------------------------------------------------------------


def many(dataset, size=64):
  """[count, size] lengths and verdicts of one group a prompt."""
  workload = Workload({'a': dataset}, seed=11)
  asked = [request(workload, i, size, index=i) for i in range(dataset.count)]
  found = workload.answers_of(asked, 0)
  return found.lengths.reshape(-1, size), found.verdicts.reshape(-1, size)


@pytest.mark.parametrize('size', [2, 4, 8])
def test_stubborn_prompts_never_settle(size):
  """Pass rates uniform in (0, 1), whatever is learned: (G - 1) / (G + 1) of their groups
  have right and wrong answers, the integral of 1 - p^G - (1 - p)^G."""
  d = Dataset(count=20_000, stubborn=1.0, gain=2.0, pass_rate=0.999, pass_spread=0.1)
  workload = Workload({'a': d}, seed=1)
  for version in range(3):
    asked = [request(workload, i, size, index=i) for i in range(d.count)]
    verdicts = workload.answers_of(asked, version).verdicts.reshape(-1, size)
    useful = (verdicts.min(axis=1) < verdicts.max(axis=1)).mean()
    assert useful == pytest.approx((size - 1) / (size + 1), abs=0.011)  # 3 deviations
    before = workload.pass_rates('a')
    workload.trained(lesson([group(one) for one in asked[:100]]))
    assert (workload.pass_rates('a') == before).all()


def test_a_share_is_stubborn_and_the_others_are_as_without():
  d = Dataset(count=5000, gain=1.0, transfer=0.0)
  plain, mixed = (
    Workload({'a': dataclasses.replace(d, stubborn=s)}, seed=1) for s in (0.0, 0.3)
  )
  visits = [group(request(mixed, i, index=i)) for i in range(d.count)]
  before = mixed.pass_rates('a')
  same = before == plain.pass_rates('a')
  mixed.trained(lesson(visits))
  assert (mixed.pass_rates('a') == before).tolist() == (~same).tolist()
  assert same.mean() == pytest.approx(0.7, abs=0.02)


@pytest.mark.parametrize('spread', [0.0, 0.5])
def test_gains_spread_over_prompts(spread):
  """A visit adds gain * exp(spread z) to log-odds, z normal; another prompt's adds that
  of the middle, `transfer` shared by all, as much faster or slower."""
  d = Dataset(count=4000, gain=0.2, gain_spread=spread, transfer=0.5, pass_spread=0.5)
  workload = Workload({'a': d}, seed=1)

  def odds():
    rates = workload.pass_rates('a')
    return np.log(rates / (1 - rates))

  before = odds()
  half = [group(request(workload, i, index=i)) for i in range(2000)]
  workload.trained(lesson(half))
  added = odds() - before
  visited, others = np.log(added[:2000]), np.log(added[2000:])
  shared = 0.5 * 0.2 * 2000 / 4000
  for found, middle in ((visited, 0.2 + shared), (others, shared)):
    assert found.mean() == pytest.approx(np.log(middle), abs=0.04)
    assert found.std() == pytest.approx(spread, abs=0.02)


def test_lengths_are_lognormal_over_prompts_and_within_groups():
  lengths, _ = many(Dataset(count=2000, median=5000, spread=0.6, within=0.3))
  ln = np.log(lengths)
  assert np.median(lengths) == pytest.approx(5000, rel=0.05)
  assert ln.std(axis=1, ddof=1).mean() == pytest.approx(0.3, rel=0.03)
  assert np.sqrt(ln.mean(axis=1).var() - 0.3**2 / 64) == pytest.approx(0.6, rel=0.05)
  z = (ln - ln.mean(axis=1, keepdims=True)) / 0.3
  assert np.mean(z > 1.2816) == pytest.approx(0.1, abs=0.01)  # normal, not only so wide


def test_some_prompts_are_prone_to_straggle():
  alike, _ = many(Dataset(count=500, within=0.3))
  prone, _ = many(Dataset(count=500, within=0.3, within_spread=0.5))
  spread = {
    name: np.log(np.log(lengths).std(axis=1)).std()
    for name, lengths in (('alike', alike), ('prone', prone))
  }
  # Of 64 answers the spread itself is known to about 1 / sqrt(126).
  assert spread['alike'] < 0.12
  assert spread['prone'] == pytest.approx(np.hypot(0.5, 0.09), rel=0.1)


def test_pass_rates_have_their_middle_and_hard_prompts_are_long():
  dataset = Dataset(
    count=2000, median=5000, pass_rate=0.3, pass_spread=1.0, hard_is_long=0.7
  )
  lengths, verdicts = many(dataset)
  rates = verdicts.mean(axis=1)
  assert np.median(rates) == pytest.approx(0.3, abs=0.03)
  workload = Workload({'a': dataset}, seed=11)
  true = workload.pass_rates('a')
  assert np.abs(rates - true).mean() < 0.06
  odds = np.log(true / (1 - true))
  assert odds.std() == pytest.approx(1.0, rel=0.05)
  rho = np.corrcoef(odds, np.log(lengths).mean(axis=1))[0, 1]
  assert rho == pytest.approx(-0.7, abs=0.05)


def test_an_answer_at_the_limit_is_cut_and_wrong():
  workload = Workload({'a': Dataset(median=100, within=0.5, pass_rate=0.99)})
  asked = request(workload, 0, 400, sampling=Sampling(max_new_tokens=100))
  lengths, verdicts, truncated = workload.answers(asked, 0)
  free = workload.answers(request(workload, 0, 400), 0)[0]
  assert truncated.tolist() == (free > 100).tolist() and 0 < truncated.sum() < 400
  assert lengths.tolist() == np.minimum(free, 100).tolist()
  assert not verdicts[truncated].any() and verdicts[~truncated].mean() > 0.5


def test_a_share_of_answers_is_lost():
  workload = Workload({'a': Dataset(aborts=0.25, pass_rate=0.9)})
  found = workload.answers_of([request(workload, 0, 4000)], 0)
  lost = found.finish == ABORTED
  assert lost.mean() == pytest.approx(0.25, abs=0.03)
  assert not found.verdicts[lost].any() and (found.finish != LENGTH).all()
  whole = Workload({'a': Dataset(pass_rate=0.9)})
  full = whole.answers(request(whole, 0, 4000), 0)[0]
  assert (found.lengths[lost] <= full[lost]).all() and found.lengths.min() >= 1
  assert found.lengths[~lost].tolist() == full[~lost].tolist()


# --- learning -------------------------------------------------------------------------


def test_what_is_trained_on_gets_better_and_a_little_of_it_all_of_its_dataset():
  one = Dataset(count=10, gain=0.5, transfer=0.4, growth=0.1)
  workload = Workload({'a': one, 'b': one}, seed=2)

  def odds(name):
    rates = workload.pass_rates(name)
    return np.log(rates / (1 - rates))

  before = odds('a'), odds('b')
  long = workload.answers(request(workload, 0, 2000), 0)[0]
  twice = [group(request(workload, d, index=3)) for d in (1, 2)]
  workload.trained(lesson(twice))
  gained = odds('a') - before[0]
  wanted = np.full(10, 2 * 0.5 * 0.4 / 10)
  wanted[3] += 2 * 0.5
  np.testing.assert_allclose(gained, wanted)
  np.testing.assert_allclose(odds('b'), before[1])
  longer = workload.answers(request(workload, 0, 2000), 1)[0]
  assert np.median(longer / long) == pytest.approx(np.exp(0.1), rel=0.01)


def test_nothing_is_learned_from_what_has_no_advantage_or_is_pruned():
  workload = Workload({'a': Dataset(count=10, gain=0.5, growth=0.1)}, seed=2)
  before, long = workload.pass_rates('a'), workload.answers(request(workload, 0), 0)[0]
  useless = lesson([group(request(workload, 1))], advantage=0.0)
  workload.trained(useless)
  pruned = lesson([group(request(workload, 1))])
  workload.trained(dataclasses.replace(pruned, keep=[np.zeros(4)]))
  assert workload.pass_rates('a').tolist() == before.tolist()
  assert workload.answers(request(workload, 0), 2)[0].tolist() == long.tolist()


def test_another_version_than_that_of_now_is_refused():
  workload = Workload({'a': Dataset()})
  with pytest.raises(ValueError, match='version 1, but the policy is at 0'):
    workload.answers_of([request(workload, 0)], 1)


# --- settings -------------------------------------------------------------------------


@pytest.mark.parametrize(
  'how, said',
  [
    (dict(count=0), 'workload.a.count: 0, expected at least 1'),
    (dict(count=2.5), 'workload.a.count: 2.5, expected a whole number'),
    (dict(median=0.5), 'workload.a.median: 0.5, expected at least 1'),
    (dict(spread=-1.0), 'workload.a.spread: -1.0, expected at least 0'),
    (dict(within=float('nan')), 'workload.a.within: nan, expected a number'),
    (dict(within='wide'), "workload.a.within: 'wide', expected a number"),
    (dict(pass_rate=1.0), 'workload.a.pass_rate: 1.0, expected above 0 and below 1'),
    (dict(hard_is_long=1.5), 'workload.a.hard_is_long: 1.5, expected -1 to 1'),
    (dict(aborts=1.0), 'workload.a.aborts: 1.0, expected below 1'),
    (dict(weight=0.0), 'workload.a: weight=0.0, .*expected above 0'),
  ],
)
def test_numbers_that_describe_no_dataset_are_refused(how, said):
  with pytest.raises(ValueError, match=said):
    Workload({'a': Dataset(**how)})


def test_a_workload_without_datasets_is_refused():
  with pytest.raises(ValueError, match='no dataset'):
    Workload({})


def test_prompts_are_as_the_controllers_want_them():
  workload = Workload(
    {
      'a': Dataset(count=2, weight=3, prompt_tokens=7),
      'b': Dataset(count=1, max_reward=2.0),
    }
  )
  prompts = workload.prompts
  assert (prompts.sizes, prompts.weights) == ({'a': 2, 'b': 1}, {'a': 3.0, 'b': 1.0})
  ids = {name: list(ids) for name, ids in prompts.ids().items()}
  assert ids == {'a': ['a/0', 'a/1'], 'b': ['b/0']}
  found = prompts.get('a', 1)
  assert (found.id, found.dataset, found.index, len(found.tokens)) == ('a/1', 'a', 1, 7)
  verdicts = workload.answers(request(workload, 0, 200, dataset='b'), 0)[1]
  assert set(verdicts.tolist()) == {0.0, 2.0}
