"""Tiers: which prompts wait, which count double, and tables of pass rates
(algorithms.md 2.5)."""

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxrl_sched.control.difficulty import TIERS, Tiers, read_rates, tier

quick = settings(max_examples=50, deadline=None, derandomize=True)
NAN = math.nan


def tiers(rates=None, weights=None, **changed) -> Tiers:
  """By default: one hard, two medium and one easy prompt in 'a', two medium in 'b'."""
  rates = rates or {'a': [0.0, 0.5, 1.0, 0.3], 'b': [0.5, NAN]}
  rates = {name: np.array(known) for name, known in rates.items()}
  weights = weights or dict.fromkeys(rates, 0.5)
  return Tiers(rates, weights, **dict(steps=100) | changed)


# --- tiers and weights ------------------------------------------------------------


@pytest.mark.parametrize(
  'rate, label',
  [
    (0.0, 'hard'),
    (0.05, 'hard'),
    ((0.05 + 0.05 + 0.05) / 3, 'hard'),  # rounded up to 0.05 and 7e-18
    (0.0501, 'medium'),
    (0.5, 'medium'),
    (0.9499, 'medium'),
    (0.95, 'easy'),
    (1 - 0.05 / 3 * 3, 'easy'),
    (1.0, 'easy'),
  ],
)
def test_tier(rate, label):
  assert tier(rate) == tier(rate, 0.05, 0.95) == label


@pytest.mark.parametrize('rate', [-0.1, 1.1, NAN])
def test_tier_of_no_rate(rate):
  with pytest.raises(ValueError, match='expected 0 to 1'):
    tier(rate)


def test_streams_and_places():
  """Without a rate a prompt is medium; a tier of no prompts is no stream."""
  t = tiers()
  assert t.unknown == 1
  found = {s: (name, list(indices)) for s, (name, indices) in t.streams().items()}
  assert found == {
    'a/hard': ('a', [0]),
    'a/medium': ('a', [1, 3]),
    'a/easy': ('a', [2]),
    'b/medium': ('b', [0, 1]),
  }
  for stream, (name, indices) in t.streams().items():
    assert t.places(name, indices) == [(stream, i) for i in range(len(indices))]
  assert t.places('a', [3, 0]) == [('a/medium', 1), ('a/hard', 0)]
  with pytest.raises(ValueError, match="prompt 4 of 'a' is in no stream"):
    t.places('a', [1, 4])


@quick
@given(st.integers(1, 300), st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_place_of_a_prompt_is_where_its_stream_has_it(size, key, drop_easy_at):
  rng = np.random.default_rng(key)
  rates = rng.choice([0.0, 0.5, 1.0, math.nan], size)
  rates[0] = 0.5  # there is something to draw
  t = tiers({'a': rates}, {'a': 1.0}, drop_easy_at=drop_easy_at)
  there = [int(i) for _, indices in t.streams().values() for i in indices]
  found = t.places('a', there)
  assert [t.streams()[stream][1][place] for stream, place in found] == there
  gone = sorted(set(range(size)) - set(there))
  for index in [*gone[:3], -1, size]:
    with pytest.raises(ValueError, match=f"prompt {index} of 'a' is in no stream"):
      t.places('a', [0, index])


def test_a_split_that_is_asked_again_has_rolled_on():
  """Shares 2/3 and 1/3, a group a step: what was sent counts, what was asked does not."""
  t = tiers({'a': [0.5, 1.0]}, {'a': 1.0})
  firsts = []
  for _ in range(6):
    for _ in range(2):
      quotas = t.quotas(0, {'a': 1})
    firsts.append(quotas['a/easy'])
    quotas['a/easy'] = 9  # the caller's own
    t.sent(0, {'a': 1})
  assert firsts == [0, 1, 0, 0, 1, 0]


def test_weights_before_and_after_the_release():
  """v = 1 hard, 2 * 2 medium, 1 easy: 0, 4/5, 1/5 of a half, then 1/6, 4/6, 1/6."""
  t = tiers()
  before = {'a/hard': 0, 'a/medium': 0.4, 'a/easy': 0.1, 'b/medium': 0.5}
  after = {'a/hard': 1 / 12, 'a/medium': 4 / 12, 'a/easy': 1 / 12, 'b/medium': 0.5}
  assert t.weights(0) == t.weights(49) == pytest.approx(before)
  assert t.weights(50) == t.weights(99) == pytest.approx(after)


def test_dropped_easy_prompts_are_in_no_stream():
  t = tiers(drop_easy_at=0)
  assert [*t.streams()] == ['a/hard', 'a/medium', 'b/medium']
  assert t.weights(0)['a/medium'] == 0.5
  assert t.weights(50)['a/hard'] == pytest.approx(0.1)
  with pytest.raises(ValueError, match="prompt 2 of 'a' is in no stream"):
    t.places('a', [2])


def test_boost():
  """v = 3 * 1, 1 * 2 and 0: after the release 3/5 and 2/5."""
  t = tiers(boost=(3, 1, 0), weights={'a': 1.0, 'b': 0.5})
  assert t.weights(50)['a/hard'] == pytest.approx(0.6)
  assert t.weights(50)['a/medium'] == pytest.approx(0.4)
  assert t.weights(50)['a/easy'] == 0


@pytest.mark.parametrize(
  'release, steps, first', [(0.5, 5, 3), (0.55, 100, 55), (0, 9, 0), (1, 9, 9)]
)
def test_the_step_of_the_release(release, steps, first):
  t = tiers(release=release, steps=steps)
  assert t.weights(first)['a/hard'] > 0
  assert first == 0 or t.weights(first - 1)['a/hard'] == 0


@quick
@given(
  st.lists(st.sampled_from([0.0, 0.3, 1.0, NAN]), min_size=1, max_size=30),
  st.floats(0.1, 9),
  st.floats(0, 1),
  st.integers(0, 99),
)
def test_a_dataset_keeps_its_weight(rates, weight, release, step):
  rates = [0.5, *rates]
  t = tiers({'a': rates, 'b': [0.2]}, {'a': weight, 'b': 1.0}, release=release)
  found = t.weights(step)
  assert sum(w for s, w in found.items() if s.startswith('a/')) == pytest.approx(weight)
  assert found['b/medium'] == 1.0
  # Every prompt is in exactly one stream.
  indices = [i for name, found in t.streams().values() if name == 'a' for i in found]
  assert sorted(indices) == [*range(len(rates))]


# --- quotas -----------------------------------------------------------------------


def run(t: Tiers, steps, groups=4):
  """The quotas of each step."""
  of = {'a': groups, 'b': groups}
  found = []
  for step in steps:
    quotas = t.quotas(step, of)
    assert quotas == t.quotas(step, of)  # a plan may be made twice
    t.sent(step, of)
    found.append(quotas)
  return found


def test_quotas_roll():
  """4/5 and 1/5: at each group of 'a' medium is owed 0.8, 0.6, 0.4, 1.2, 1.0 and easy
  0.2, 0.4, 0.6, -0.2, 0, so that easy gets the third, the eighth, and so on."""
  found = run(tiers(), range(5), groups=2)
  assert [q['a/easy'] for q in found] == [0, 1, 0, 1, 0]
  assert all(q['a/hard'] == 0 and q['b/medium'] == 2 for q in found)


def test_after_the_release_nobody_is_owed_what_was_before():
  """1/6 of four groups a step, from the first step on: no rush of hard prompts."""
  found = run(tiers(), range(62))
  assert all(q['a/hard'] == 0 for q in found[:50])
  assert sum(q['a/hard'] for q in found[50:]) == 8  # of 48
  assert max(q['a/hard'] for q in found[50:]) == 1


@quick
@given(
  st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=3, max_size=30),
  st.integers(1, 9),
  st.floats(0, 1),
)
def test_quotas_add_up_and_follow_the_shares(rates, groups, release):
  """In every batch the dataset's own; over time each stream's share, within a group:
  so no stream is too small to be drawn."""
  t = tiers({'a': [0.5, *rates], 'b': [0.5]}, release=release, steps=30)
  total = dict.fromkeys(t.streams(), 0)
  since = 0
  for step in range(40):
    weights = t.weights(step)
    if step and weights != t.weights(step - 1):
      total, since = dict.fromkeys(total, 0), 0
    [quotas] = run(t, [step], groups)
    since += groups
    of_a = {s: n for s, n in quotas.items() if s.startswith('a/')}
    assert sum(of_a.values()) == quotas['b/medium'] == groups
    for stream, n in of_a.items():
      total[stream] += n
      # Tijdeman's bound: 1/2 for two streams, 3/4 for three.
      assert abs(total[stream] - since * weights[stream] / 0.5) < 0.75 + 1e-6


def test_metrics():
  t = tiers()
  run(t, range(5), groups=1)
  assert t.metrics() == {'tiers/released': 0.0, 'tiers/easy_dropped': 0.0}
  run(t, [50])
  assert t.metrics() == {'tiers/released': 1.0, 'tiers/easy_dropped': 0.0}


# --- state ------------------------------------------------------------------------


@quick
@given(st.integers(0, 20))
def test_a_resume_changes_nothing(cut):
  """H3: at any step, before the release (10 of 20) and after it."""
  whole, before, after = (tiers(steps=20) for _ in range(3))
  expected = run(whole, range(20), groups=3)
  found = run(before, range(cut), groups=3)
  after.load_state_dict(json.loads(json.dumps(before.state_dict())))
  assert found + run(after, range(cut, 20), groups=3) == expected
  assert after.state_dict() == whole.state_dict()


def test_a_release_is_for_good():
  """It was at 50 of 100 steps; continued to 400, hard prompts do not wait again."""
  short, long = tiers(), tiers(steps=400)
  run(short, range(60))
  long.load_state_dict(short.state_dict())
  assert long.weights(60) == short.weights(60) and long.weights(60)['a/hard'] > 0
  assert long.state_dict()['released'] == 50


@pytest.mark.parametrize(
  'changed, message',
  [
    (dict(version=0), 'version 0, expected 3'),
    (dict(more=1), 'keys'),
    (dict(planned={'a/hard': 1}), 'keys'),
    (dict(tiers={'c': '01'}), 'keys'),
  ],
)
def test_a_strange_state_is_refused(changed, message):
  t = tiers()
  with pytest.raises(ValueError, match=message):
    t.load_state_dict(t.state_dict() | changed)


def test_a_state_of_other_tiers_is_refused():
  """As many prompts in each, but others: the snooze tables would speak of others."""
  other = tiers({'a': [0.5, 0.0, 1.0, 0.3], 'b': [0.5, NAN]})
  with pytest.raises(ValueError, match="'a' had prompts in other tiers"):
    tiers().load_state_dict(other.state_dict())


# --- what is refused --------------------------------------------------------------


@pytest.mark.parametrize(
  'changed, message',
  [
    (dict(low=0.95, high=0.05), 'tiers.low: 0.95, expected .* below high=0.05'),
    (dict(low=-0.1), 'tiers.low: -0.1'),
    (dict(high=1.5), 'high=1.5'),
    (dict(boost=(1, 2)), 'tiers.boost'),
    (dict(boost=(1, -2, 1)), 'tiers.boost'),
    (dict(release=1.5), 'tiers.release: 1.5, expected 0 to 1'),
    (dict(release=NAN), 'tiers.release: nan'),
    (dict(drop_easy_at=1.5), 'tiers.drop_easy_at: 1.5, expected 0 to 1'),
    (dict(drop_easy_at=True), 'tiers.drop_easy_at: True, expected 0 to 1'),
    (dict(steps=0), 'tiers.steps: 0'),
    (dict(weights={'a': 0.0, 'b': 1.0}), 'tiers.weights.a: 0.0, expected above 0'),
    (dict(weights={'a': 1.0}), 'tiers.weights.b: None'),
    (dict(rates={'a': [0.5, 1.5]}), 'tiers.rates.a'),
    (dict(rates={'a': []}), 'tiers.rates.a'),
  ],
)
def test_strange_settings_are_refused(changed, message):
  with pytest.raises(ValueError, match=message):
    tiers(**changed)


def test_a_dataset_with_nothing_to_draw_is_refused():
  """F4: it could not have its share; said before anything is built, with counts."""
  with pytest.raises(
    ValueError,
    match="'b' has 2 hard, 0 medium, 0 easy prompts.* from step 0 on.* at step 50",
  ):
    tiers({'a': [0.5], 'b': [0.0, 0.01]})
  tiers({'a': [0.5], 'b': [0.0, 0.01]}, release=0)
  with pytest.raises(ValueError, match='0 hard, 0 medium, 1 easy .* from step 0 on'):
    tiers({'a': [1.0]}, drop_easy_at=0)
  with pytest.raises(ValueError, match='from step 30 on: .* dropped at step 30'):
    tiers({'a': [1.0]}, drop_easy_at=0.3)
  # Between 30 and 50 there would be nothing; the other way round there is something.
  with pytest.raises(ValueError, match='1 hard, 0 medium, 1 easy .* from step 30 on'):
    tiers({'a': [0.0, 1.0]}, drop_easy_at=0.3, release=0.5)
  tiers({'a': [0.0, 1.0]}, drop_easy_at=0.5, release=0.3)


def test_easy_prompts_are_dropped_when_the_time_has_come():
  """v = 4 medium, 1 easy: 4/5 and 1/5 of a half, and from step 30 of 100 on all and
  nothing; from 50 on a hard one, 4/5 and 1/5. Each share begins anew."""
  t = tiers(drop_easy_at=0.3)
  assert t.phases == [0, 30, 50]
  assert t.weights(29)['a/easy'] == pytest.approx(0.1)
  assert t.weights(30)['a/easy'] == 0 and t.weights(30)['a/medium'] == 0.5
  assert t.weights(50)['a/hard'] == pytest.approx(0.1)
  found = run(t, range(60))
  assert sum(q['a/easy'] for q in found[:30]) == 24  # of 120
  assert all(q['a/easy'] == 0 and q['a/medium'] == 4 for q in found[30:50])
  assert sum(q['a/hard'] for q in found[50:]) == 8  # of 40
  assert t.metrics() == {'tiers/released': 1.0, 'tiers/easy_dropped': 1.0}
  # For good, also where the run is made longer; and at the end of one they stay.
  longer = tiers(drop_easy_at=0.3, steps=1000)
  longer.load_state_dict(json.loads(json.dumps(t.state_dict())))
  assert longer.weights(60)['a/easy'] == 0 < longer.weights(60)['a/hard']
  assert tiers(steps=9).weights(10**6)['a/easy'] > 0


@pytest.mark.parametrize('cut', [0, 5, 6, 14, 15, 19])
def test_a_resume_between_two_changes_changes_nothing(cut):
  """Easy prompts go at 6, hard ones come at 15 of 20."""
  how = dict(steps=20, drop_easy_at=0.3, release=0.75)
  whole, before, after = (tiers(**how) for _ in range(3))
  expected = run(whole, range(20), groups=3)
  found = run(before, range(cut), groups=3)
  after.load_state_dict(json.loads(json.dumps(before.state_dict())))
  assert found + run(after, range(cut, 20), groups=3) == expected
  assert after.state_dict() == whole.state_dict()


# --- tables -----------------------------------------------------------------------

IDS = {'a': ['a/0', 'a/x'], 'b': ['b/0']}


def table(tmp_path, *lines, name='table.jsonl'):
  path = tmp_path / name
  text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
  path.write_text('\n'.join(text))
  return path


def line(id, pass_rate, **more):
  return dict(id=id, pass_rate=pass_rate, **more)


def test_a_table(tmp_path):
  """In the order of the prompts; whole numbers are rates; other keys do not matter."""
  path = table(tmp_path, line('b/0', 1), line('a/0', 0.25, samples=8))
  found = read_rates(path, IDS)
  np.testing.assert_equal(found, {'a': [0.25, NAN], 'b': [1.0]})


@pytest.mark.parametrize('start', [b'', b'\xef\xbb\xbf'])
@pytest.mark.parametrize('end', [b'\n', b'\r\n'])
def test_blank_lines_and_marks_make_no_difference(tmp_path, start, end):
  """F1: good, blank, good, no final newline; with BOM and CRLF."""
  path = tmp_path / 'table.jsonl'
  lines = [b'{"id": "a/0", "pass_rate": 0.5}', b'', b'{"id": "a/x", "pass_rate": 0}']
  path.write_bytes(start + end.join(lines))
  np.testing.assert_equal(read_rates(path, IDS)['a'], [0.5, 0.0])


def test_models_are_averaged(tmp_path):
  """Whatever the number of samples of each; over those that a prompt has."""
  one = table(
    tmp_path,
    line('a/0', 0.0, model='small'),
    line('a/0', 0.5, model='large'),
    line('a/x', 0.75, model='large'),
  )
  other = table(tmp_path, line('a/0', 1.0), name='other.jsonl')
  found = read_rates([one, str(other)], IDS)
  np.testing.assert_equal(found['a'], [0.5, 0.75])


@pytest.mark.parametrize(
  'wrong, message',
  [
    ('{"id": "a/x", "pass_rate"', 'not JSON'),
    ('\\xff', 'not JSON'),
    ('[1]', 'expected an object, found'),
    (line('a/9', 0.5), "id 'a/9' is of no prompt, expected '<dataset>/<id>'"),
    (line('x', 0.5), r"id 'x' is of no prompt, .* dataset of \['a', 'b'\]"),
    (line('a/0', 0.5), "id 'a/0' comes twice for model '.*table.jsonl'"),
    (line(7, 0.5), 'id 7, expected text'),
    (dict(pass_rate=0.5), 'id None, expected text'),
    (line('a/x', 0.5, model=3), 'model 3, expected text'),
    (line('a/x', 1.01), 'pass_rate 1.01, expected 0 to 1'),
    (line('a/x', -0.5), 'pass_rate -0.5'),
    (line('a/x', NAN), 'not JSON: NaN is no number of JSON'),
    (line('a/x', math.inf), 'not JSON: Infinity is no number of JSON'),
    (dict(id='a/x'), 'pass_rate None'),
    (line('a/x', True), 'pass_rate True'),
    (line('a/x', '0.5'), "pass_rate '0.5'"),
    (line('a/x', []), r'pass_rate \[\]'),
  ],
)
def test_a_wrong_line_is_named(tmp_path, wrong, message):
  """F2, F3: numbers that are none, ids of nobody, ids that come twice."""
  path = table(tmp_path, line('a/0', 0.5), '', wrong)
  with pytest.raises(ValueError, match=f'table.jsonl, line 3: {message}'):
    read_rates(path, IDS)


def test_ids_of_no_prompt_can_be_skipped(tmp_path):
  path = table(tmp_path, line('a/9', 0.5), line('a/x', 0.5))
  np.testing.assert_equal(read_rates(path, IDS, unknown='skip')['a'], [NAN, 0.5])
  path = table(tmp_path, line('a/9', 0.5))
  with pytest.raises(ValueError, match='no pass rate of any prompt'):
    read_rates(path, IDS, unknown='skip')
  with pytest.raises(ValueError, match="tiers.unknown: 'keep'"):
    read_rates(path, IDS, unknown='keep')


def test_tables_of_nothing_are_refused(tmp_path):
  """F4."""
  with pytest.raises(ValueError, match='no pass rate of any prompt in it'):
    read_rates(table(tmp_path, ''), IDS)
  with pytest.raises(ValueError, match='none.jsonl: cannot be read'):
    read_rates(tmp_path / 'none.jsonl', IDS)
  with pytest.raises(ValueError, match='expected a path or several'):
    read_rates([], IDS)
  with pytest.raises(ValueError, match="two prompts have the id 'a/0'"):
    read_rates(table(tmp_path, line('a/0', 1)), {'a': ['a/0', 'a/0']})


def test_from_a_table_to_weights(tmp_path):
  path = table(tmp_path, line('a/0', 0.0), line('a/x', 0.5), line('b/0', 1.0))
  t = Tiers(read_rates(path, IDS), {'a': 1.0, 'b': 1.0}, steps=10)
  assert t.weights(0) == {'a/hard': 0.0, 'a/medium': 1.0, 'b/easy': 1.0}
  assert {s.split('/')[1] for s in t.streams()} == set(TIERS)
