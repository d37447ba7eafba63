"""Rows are dense and fair; every token has the weight its average gives it."""

import dataclasses
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxrl_sched.host import packing
from jaxrl_sched.types import (
  Batch,
  Completion,
  Group,
  Prompt,
  Request,
  Sampling,
  SharedBatch,
)

ROOM = dict(version=3, rows=2, row_tokens=16, window=4)
EOS = 2


def completion(tokens, *, draw=0, answer=0, finish='stop', version=3) -> Completion:
  return Completion(
    draw=draw,
    answer=answer,
    tokens=np.array(tokens, np.int32),
    logps=-np.arange(1, len(tokens) + 1, dtype=np.float32) / 8,
    finish=finish,
    version=version,
  )


def group(prompt, *completions) -> Group:
  """A group of these completions, numbered in order; rewards play no part here."""
  prompt = Prompt(
    id='d/0', dataset='d', index=0, tokens=np.array(prompt, np.int32), text=''
  )
  request = Request(
    draw=completions[0].draw,
    prompt=prompt,
    size=len(completions),
    sampling=Sampling(max_new_tokens=8),
  )
  return Group(
    request=request,
    completions=tuple(
      dataclasses.replace(c, answer=k) for k, c in enumerate(completions)
    ),
    verdicts=np.zeros(len(completions), np.float32),
    rewards=np.zeros(len(completions), np.float32),
  )


# --- pack -------------------------------------------------------------------


def test_rows_of_the_worked_example():
  """Test 12 of algorithms.md 4.9."""
  sizes = [600, 500, 400, 500, 300, 700, 200, 100]
  rows = packing.pack(sizes, capacity=1000, window=3)
  assert [[sizes[i] for i in row] for row in rows] == [
    [600, 400],
    [500, 500],
    [300, 700],
    [200, 100],
  ]
  assert rows == [[0, 2], [1, 3], [4, 5], [6, 7]]


def test_of_equal_units_the_oldest_goes_first():
  assert packing.pack([5, 2, 2, 2], capacity=7, window=4) == [[0, 1], [2, 3]]


def test_a_window_of_one_keeps_the_order():
  assert packing.pack([3, 4, 2, 5], capacity=7, window=1) == [[0, 1], [2, 3]]


def test_no_units_make_no_rows():
  assert packing.pack([], capacity=10, window=2) == []


@pytest.mark.parametrize('length', [11, 0, -1])
def test_a_unit_that_cannot_be_packed_is_named(length):
  with pytest.raises(ValueError, match=f'unit 2 has {length} tokens.*capacity, 10'):
    packing.pack([1, 10, length], capacity=10, window=2)


@pytest.mark.parametrize('capacity, window', [(0, 1), (5, 0)])
def test_capacity_and_window_are_at_least_one(capacity, window):
  with pytest.raises(ValueError, match='capacity and window'):
    packing.pack([], capacity=capacity, window=window)


def pack_as_written(sizes, capacity, window):
  """The pseudo-code of 4.5, word for word and slow."""
  queue = list(range(len(sizes)))
  buffer, queue = queue[:window], queue[window:]
  rows = []

  def take(unit):
    buffer.remove(unit)
    if queue:
      buffer.append(queue.pop(0))
    return unit

  while buffer:
    row = [take(min(buffer))]
    while fitting := [
      i for i in buffer if sizes[i] <= capacity - sum(sizes[j] for j in row)
    ]:
      row.append(take(max(fitting, key=lambda i: (sizes[i], -i))))
    rows.append(row)
  return rows


@given(
  st.lists(st.integers(1, 20), max_size=60), st.integers(20, 45), st.integers(1, 9)
)
def test_packing_does_what_was_specified(sizes, capacity, window):
  rows = packing.pack(sizes, capacity=capacity, window=window)
  assert rows == pack_as_written(sizes, capacity, window)
  order = [i for row in rows for i in row]
  assert sorted(order) == list(range(len(sizes)))  # every unit once
  assert all(sum(sizes[i] for i in row) <= capacity for row in rows)
  # The waiting bound: unit i enters the buffer as the i-window-th is taken out.
  row_of = {i: r for r, row in enumerate(rows) for i in row}
  for i in range(len(sizes)):
    entered = row_of[order[i - window]] if i >= window else 0
    assert row_of[i] <= entered + window


# --- weights ----------------------------------------------------------------


@pytest.mark.parametrize(
  'averaging, expected', [('token', 1.6), ('sequence', 2.5), ('constant', 0.8)]
)
@pytest.mark.parametrize('lengths', [[[2, 8]], [[2], [8]]])
def test_reductions_are_not_confused(averaging, expected, lengths):
  """A3: 2 tokens of loss 4 and 8 of loss 1, constant length 10."""
  lengths = [np.array(n) for n in lengths]
  weights = packing.answer_weights(lengths, averaging=averaging, max_new_tokens=10)
  sums = np.concatenate(weights) * np.concatenate(lengths) * [4, 1]
  np.testing.assert_allclose(sums.sum(), expected, rtol=1e-12)


@pytest.mark.parametrize('averaging', ['sequence', 'constant'])
def test_every_prompt_counts_the_same_whatever_its_group_size(averaging):
  lengths = [np.full(2, 5), np.full(8, 5)]
  weights = packing.answer_weights(lengths, averaging=averaging, max_new_tokens=5)
  assert [w.dtype for w in weights] == [np.float64] * 2
  np.testing.assert_allclose([w.sum() * 5 for w in weights], [0.5, 0.5])


@pytest.mark.parametrize('averaging', ['sequence', 'token', 'constant'])
def test_a_smaller_batch_has_its_true_denominator(averaging):
  """E1: 3 groups where 4 were wanted weigh 1 together, as 4 would."""
  for groups in (3, 4):
    lengths = [np.full(4, 6)] * groups
    weights = packing.answer_weights(lengths, averaging=averaging, max_new_tokens=6)
    np.testing.assert_allclose(6 * np.sum(weights), 1.0)


@pytest.mark.parametrize('averaging', ['sequence', 'token', 'constant'])
def test_an_answer_left_out_gives_its_share_to_no_other(averaging):
  lengths = [np.array([3, 5]), np.array([4, 4])]
  settings = dict(averaging=averaging, max_new_tokens=8)
  full = packing.answer_weights(lengths, **settings)
  kept = packing.answer_weights(
    lengths, **settings, keep=[np.array([1, 0]), np.array([2.0, 1])]
  )
  np.testing.assert_array_equal(kept[0], full[0] * [1, 0])
  np.testing.assert_array_equal(kept[1], full[1] * [2, 1])


def test_rejected_tokens_stay_in_the_denominator():
  """A11: the fixed denominator 5 (0.4910059), not the number kept (1.2275149)."""
  ratio = np.exp([0.1, -1.5, 0.8, -10, 0.3])
  keep = np.where((ratio >= 0.5) & (ratio <= 2), ratio, 0)
  np.testing.assert_allclose(keep[keep > 0], [1.1051709, 1.3498588], rtol=1e-6)
  answers = [completion([9]) for _ in range(5)]
  weights = packing.answer_weights(
    [np.ones(5)], averaging='token', max_new_tokens=1, keep=[keep]
  )
  np.testing.assert_allclose(np.sum(weights), 0.4910059, rtol=1e-6)
  for row_tokens in (2, 16):  # an answer a row, then all in one
    batches = packing.fill(
      [group([7], *answers)],
      [np.ones(5)],
      weights,
      version=3,
      rows=1,
      row_tokens=row_tokens,
      window=8,
    )
    total = sum(batch.weights.sum() for batch in batches)
    np.testing.assert_allclose(total, 0.4910059, rtol=1e-6)


@pytest.mark.parametrize('averaging', ['sequence', 'token', 'constant'])
def test_answers_without_tokens_make_no_nan(averaging):
  for lengths in ([np.array([3, 0, 2])], [np.zeros(2, int)]):
    (weights,) = packing.answer_weights(lengths, averaging=averaging, max_new_tokens=4)
    assert np.isfinite(weights).all()
    assert not weights[lengths[0] == 0].any()


def test_every_loss_has_an_average():
  assert packing.AVERAGING == {
    'grpo': 'sequence',
    'dapo': 'token',
    'dr_grpo': 'constant',
    'gspo': 'sequence',
    'cispo': 'token',
  }


@pytest.mark.parametrize(
  'change, message',
  [
    (dict(averaging='tokens'), "averaging: 'tokens', expected one of sequence"),
    (dict(max_new_tokens=0), 'max_new_tokens: 0'),
    (dict(keep=[]), 'keep: 0 groups, expected 1'),
    (dict(keep=[np.ones(3)]), r'keep: group 0 has shape \(3,\), expected \(2,\)'),
    (dict(keep=[np.array([1, -1])]), 'keep: group 0 .* at least 0'),
    (dict(keep=[np.array([1, np.nan])]), 'keep: group 0'),
  ],
)
def test_weights_refuse_what_does_not_fit(change, message):
  settings = dict(averaging='token', max_new_tokens=4) | change
  with pytest.raises(ValueError, match=message):
    packing.answer_weights([np.array([1, 2])], **settings)


# --- fill -------------------------------------------------------------------


def fill(groups, advantages=None, weights=None, **change):
  advantages = advantages or [np.arange(1.0, g.size + 1) for g in groups]
  weights = weights or [np.full(g.size, 0.5) for g in groups]
  return packing.fill(groups, advantages, weights, **(ROOM | change))


def test_a_row_written_out():
  first = completion([5, 6, EOS], draw=4)
  second = completion([8, EOS], draw=4, version=2)
  (batch,) = fill(
    [group([10, 11], first, second)], weights=[np.array([0.25, 0.125])], row_tokens=10
  )
  assert batch.tokens[0].tolist() == [10, 11, 5, 6, EOS, 10, 11, 8, EOS, 0]
  assert batch.segments[0].tolist() == [1, 1, 1, 1, 1, 2, 2, 2, 2, 0]
  assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0]
  assert batch.logps[0].tolist() == [
    0,
    0,
    -0.125,
    -0.25,
    -0.375,
    0,
    0,
    -0.125,
    -0.25,
    0,
  ]
  assert batch.advantages[0].tolist() == [0, 0, 1, 1, 1, 0, 0, 2, 2, 0]
  assert batch.weights[0].tolist() == [0, 0, 0.25, 0.25, 0.25, 0, 0, 0.125, 0.125, 0]
  assert batch.fresh[0].tolist() == [False] * 2 + [True] * 3 + [False] * 5
  dtypes = {f.name: getattr(batch, f.name).dtype for f in dataclasses.fields(batch)}
  assert dtypes == {
    'tokens': np.int32,
    'segments': np.int32,
    'positions': np.int32,
    'logps': np.float32,
    'advantages': np.float32,
    'weights': np.float32,
    'fresh': bool,
  }
  for field in dataclasses.fields(batch):  # the second row is empty
    assert not getattr(batch, field.name)[1].any()
  assert packing.density([batch]) == 9 / 20


def test_the_first_answer_token_speaks_of_itself():
  """B3: entry t is log p(token t | before), not shifted by one."""
  answer = completion([3, 4, EOS])
  (batch,) = fill([group([1, 2], answer)])
  start = 2
  assert batch.tokens[0, start] == 3
  assert batch.logps[0, start] == answer.logps[0]
  assert batch.weights[0, :start].tolist() == [0, 0]


def test_an_answer_ends_with_its_first_stop_token():
  """B1: lengths 2 and 4, the stop token trained on and nothing after it."""
  answers = [completion([5, EOS]), completion([5, 6, 7, EOS])]
  (batch,) = fill([group([1], *answers)], weights=[np.ones(2)])
  assert group([1], *answers).lengths.tolist() == [2, 4]
  assert group([1], *answers).lengths.mean() == 3.0
  assert batch.weights.sum() == 6
  assert (batch.weights[batch.tokens == EOS] == 1).all()


def test_a_cut_answer_keeps_its_own_last_token():
  """B2: ids unchanged and all trained; ended exactly at the limit is not cut."""
  cut = completion([11, 12, 13, 14], finish='length')
  ended = completion([11, 12, 13, EOS], finish='stop')
  both = group([1], cut, ended)
  assert both.truncated.tolist() == [True, False]
  (batch,) = fill([both])
  answers = batch.tokens[0][batch.weights[0] > 0].reshape(2, 4)
  assert sorted(answers.tolist()) == [[11, 12, 13, EOS], [11, 12, 13, 14]]
  assert (batch.logps[batch.tokens == 14] == cut.logps[3]).all()
  # Overlong filtering takes the cut one only.
  weights = packing.answer_weights(
    [both.lengths], averaging='token', max_new_tokens=4, keep=[~both.truncated]
  )
  (batch,) = fill([both], weights=weights)
  assert 14 not in batch.tokens
  np.testing.assert_allclose(batch.weights.sum(), 0.5)


def test_nothing_to_train_on_makes_no_batch():
  """A6: every answer cut and filtered."""
  answers = [completion([5, 6], finish='length')] * 2
  assert fill([group([1], *answers)], weights=[np.zeros(2)]) == []
  assert fill([]) == []
  assert packing.density([]) == 0.0


def test_answers_without_tokens_hide_no_neighbour():
  """J1: 3, 0 and 2 tokens give 5 scored positions."""
  answers = [completion([5, 6, 7]), completion([]), completion([8, 9])]
  batches = fill([group([1], *answers)])
  assert sum(np.count_nonzero(batch.weights) for batch in batches) == 5
  assert sum(batch.segments.max() for batch in batches) == 2  # and no lone prompt


def test_room_left_in_a_row_is_nobodys():
  """J2: 12 tokens counted in rows of 8, not 16."""
  answers = [completion([5] * 4), completion([6] * 6)]
  (batch,) = fill([group([1], *answers)], row_tokens=8)
  assert [np.count_nonzero(row) for row in batch.segments] == [5, 7]
  assert packing.density([batch]) == 12 / 16


def test_rows_that_do_not_fill_a_microbatch_are_followed_by_empty_ones():
  """J3: the number of rows is in no weight."""
  answers = [completion([5, 6, EOS]) for _ in range(5)]
  batches = fill([group([1], *answers)], row_tokens=4, rows=2)
  assert [batch.tokens.shape for batch in batches] == [(2, 4)] * 3
  assert not batches[-1].segments[1].any()
  assert sum(batch.weights.sum() for batch in batches) == 5 * 3 * 0.5


def change(answer, **fields):
  return dataclasses.replace(answer, **fields)


ANSWER = completion([5, 6, EOS], draw=7)


@pytest.mark.parametrize(
  'answer, message',
  [
    (change(ANSWER, logps=ANSWER.logps[:2]), '2 log-probs for 3 tokens'),
    (change(ANSWER, logps=None), '0 log-probs for 3 tokens'),
    (change(ANSWER, logps=ANSWER.logps * np.nan), 'not all finite'),
    (completion([5] * 16, draw=7), '17 tokens, expected at most row_tokens, 16'),
  ],
)
def test_a_bad_answer_is_named(answer, message):
  """D2: a missing log-prob is never a silent 0."""
  bad = group([1], ANSWER, answer)
  with pytest.raises(ValueError, match=f'draw 7, answer 1: .*{message}'):
    fill([bad])
  fill([bad], weights=[np.array([1.0, 0.0])])  # left out, it does no harm


def test_an_empty_prompt_is_refused():
  with pytest.raises(ValueError, match='draw 7, answer 0: its prompt has no tokens'):
    fill([group([], ANSWER)])


@pytest.mark.parametrize(
  'change, message',
  [
    (dict(advantages=[np.ones(2)]), 'advantages: group 0 has shape'),
    (dict(advantages=[np.array([np.nan])]), 'advantages: group 0 has .nan.'),
    (dict(weights=[np.array([-1.0])]), 'weights: group 0'),
    (dict(weights=[np.ones(1)] * 2), 'weights: 2 groups, expected 1'),
    (dict(rows=0), 'rows: 0'),
  ],
)
def test_fill_refuses_what_does_not_fit(change, message):
  with pytest.raises(ValueError, match=message):
    fill([group([1], ANSWER)], **change)


def answers_of(batches):
  """What was trained on, read back from the batches, in no order."""
  found = []
  for batch in batches:
    for b, row in enumerate(batch.segments):
      for segment in range(1, row.max() + 1):
        places = row == segment
        assert np.flatnonzero(places).tolist() == list(
          range(places.argmax(), places.argmax() + places.sum())
        )
        assert batch.positions[b, places].tolist() == list(range(places.sum()))
        found.append(
          tuple(
            tuple(getattr(batch, name)[b, places].tolist())
            for name in ('tokens', 'logps', 'advantages', 'weights', 'fresh')
          )
        )
  return sorted(found)


@given(
  st.lists(
    st.tuples(st.integers(1, 4), st.lists(st.integers(0, 6), min_size=1, max_size=4)),
    max_size=5,
  ),
  st.integers(1, 3),
  st.integers(10, 30),
  st.integers(1, 6),
  st.randoms(),
)
def test_permuting_and_packing_change_no_answer(
  shapes, rows, row_tokens, window, random
):
  rng = np.random.default_rng(len(shapes))
  groups = [
    group(
      rng.integers(3, 90, prompt),
      *(completion(rng.integers(3, 90, n), draw=q, version=2 + q % 2) for n in lengths),
    )
    for q, (prompt, lengths) in enumerate(shapes)
  ]
  advantages = [rng.normal(size=g.size) for g in groups]
  weights = packing.answer_weights(
    [g.lengths for g in groups], averaging='sequence', max_new_tokens=6
  )
  alone = fill(groups, advantages, weights, rows=1, row_tokens=10, window=1)
  order = list(range(len(groups)))
  random.shuffle(order)
  packed = packing.fill(
    [groups[q] for q in order],
    [advantages[q] for q in order],
    [weights[q] for q in order],
    version=3,
    rows=rows,
    row_tokens=row_tokens,
    window=window,
  )
  assert all(batch.tokens.shape == (rows, row_tokens) for batch in packed)
  assert answers_of(packed) == answers_of(alone)
  assert len(answers_of(packed)) == sum(np.count_nonzero(g.lengths) for g in groups)


# --- prompts shared by their answers ------------------------------------------


def test_a_row_with_shared_prompts_written_out():
  answers = completion([5, 6]), completion([7]), completion([8, EOS], version=2)
  groups = [group([10, 11], *answers), group([12], completion([9]))]
  weights = [np.array([0.25, 0.0, 0.125]), np.array([0.5])]
  (batch,) = fill(groups, weights=weights, row_tokens=9, share_prompt=True)
  assert batch.tokens[0].tolist() == [10, 11, 5, 6, 8, EOS, 12, 9, 0]
  assert batch.segments[0].tolist() == [1, 1, 1, 1, 1, 1, 2, 2, 0]
  assert batch.answers[0].tolist() == [0, 0, 1, 1, 2, 2, 0, 3, 0]
  assert batch.positions[0].tolist() == [0, 1, 2, 3, 2, 3, 0, 1, 0]
  assert batch.logps[0].tolist() == [0, 0, -1 / 8, -2 / 8, -1 / 8, -2 / 8, 0, -1 / 8, 0]
  assert batch.advantages[0].tolist() == [0, 0, 1, 1, 3, 3, 0, 1, 0]
  assert batch.weights[0].tolist() == [0, 0, 0.25, 0.25, 0.125, 0.125, 0, 0.5, 0]
  assert np.flatnonzero(batch.fresh[0]).tolist() == [2, 3, 7]
  assert batch.answers.dtype == np.int32
  for field in dataclasses.fields(batch):  # the second row is empty
    assert not getattr(batch, field.name)[1].any()


def test_a_shared_prompt_is_stored_once():
  """A prompt of 10 and answers of 3 x 5: 25 places instead of 45."""
  one = group(range(20, 30), *(completion([5] * 5) for _ in range(3)))
  for share_prompt, kind, places in ((False, Batch, 45), (True, SharedBatch, 25)):
    (batch,) = fill([one], row_tokens=50, share_prompt=share_prompt)
    assert type(batch) is kind
    assert np.count_nonzero(batch.segments) == places
    assert packing.density([batch]) == places / 100


def test_answers_that_do_not_fit_together_have_the_prompt_again():
  """4 + 5 + 6 of 16 leave no room for 2; 4 + 2 + 8 none for 9; 4 + 12 are a row."""
  lengths = [5, 6, 2, 0, 8, 9, 12]
  one = group([20, 21, 22, 23], *(completion([30 + n] * n) for n in lengths))
  batches = fill([one], rows=4, window=1, share_prompt=True)
  tokens = [list(dict.fromkeys(row)) for row in batches[0].tokens.tolist()]
  assert [row[4:] for row in tokens] == [[35, 36, 0], [32, 38, 0], [39, 0], [42]]
  assert all(row[:4] == [20, 21, 22, 23] for row in tokens)
  assert (batches[0].segments.max(axis=1) == 1).all() and len(batches) == 1


def test_nothing_to_train_on_stores_no_shared_prompt():
  answers = [completion([5, 6]), completion([])]
  left_out = [np.array([0.0, 1.0])]
  assert fill([group([1], *answers)], weights=left_out, share_prompt=True) == []


@pytest.mark.parametrize(
  'answer, message',
  [
    (change(ANSWER, logps=None), '0 log-probs for 3 tokens'),
    (completion([5] * 16, draw=7), '17 tokens, expected at most row_tokens, 16'),
  ],
)
def test_a_bad_answer_is_named_though_the_prompt_is_shared(answer, message):
  bad = group([1], ANSWER, answer)
  with pytest.raises(ValueError, match=f'draw 7, answer 1: .*{message}'):
    fill([bad], share_prompt=True)
  fill([bad], weights=[np.array([1.0, 0.0])], share_prompt=True)


def each_with_its_prompt(batches):
  """Of SharedBatches what `answers_of` reads from others, and all lengths of segments."""
  found, segments = [], []
  for batch in batches:
    for b, row in enumerate(batch.answers):
      numbers = [k for k, _ in itertools.groupby(row) if k]
      assert numbers == list(range(1, row.max() + 1))  # each in one piece
      for answer in numbers:
        segment = batch.segments[b] == batch.segments[b, (row == answer).argmax()]
        places = segment & ((row == 0) | (row == answer))
        assert batch.positions[b, places].tolist() == list(range(places.sum()))
        found.append(
          tuple(
            tuple(getattr(batch, name)[b, places].tolist())
            for name in ('tokens', 'logps', 'advantages', 'weights', 'fresh')
          )
        )
      lengths = np.bincount(batch.segments[b])[1:]
      segments += lengths.tolist()
      assert not batch.segments[b, lengths.sum() :].any()  # no place between two
  return sorted(found), segments


@settings(derandomize=True, deadline=None)
@given(
  st.lists(
    st.tuples(
      st.integers(1, 4),
      st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=6),
    ),
    max_size=5,
  ),
  st.integers(1, 3),
  st.integers(10, 30),
  st.integers(1, 6),
)
def test_sharing_prompts_changes_no_answer(shapes, rows, row_tokens, window):
  """Property: every kept answer once with its prompt, which is stored no more often
  than the answers, in their order, need."""
  rng = np.random.default_rng(len(shapes))
  groups = [
    group(
      rng.integers(3, 90, prompt),
      *(completion(rng.integers(3, 90, n), draw=q, version=2 + q % 2) for n, _ in kept),
    )
    for q, (prompt, kept) in enumerate(shapes)
  ]
  advantages = [rng.normal(size=g.size) for g in groups]
  weights = packing.answer_weights(
    [g.lengths for g in groups],
    averaging='sequence',
    max_new_tokens=6,
    keep=[np.array([k for _, k in kept], float) for _, kept in shapes],
  )
  room = dict(rows=rows, row_tokens=row_tokens, window=window)
  shared = fill(groups, advantages, weights, **room, share_prompt=True)
  assert all(batch.tokens.shape == (rows, row_tokens) for batch in shared)
  found, segments = each_with_its_prompt(shared)
  assert found == answers_of(fill(groups, advantages, weights, **room))

  expected = []
  for prompt, kept in shapes:
    lengths = [n for n, k in kept if n and k]
    while lengths:
      fit = sum(prompt + np.cumsum(lengths) <= row_tokens)
      expected.append(prompt + sum(lengths[:fit]))
      lengths = lengths[fit:]
  assert sorted(segments) == sorted(expected)


@given(st.permutations(range(8)), st.data())
def test_a_constant_normaliser_does_not_see_which_bundle_a_group_is_in(order, data):
  """3.11, test 11: at fixed parameters the gradient is the sum of weights times the
  gradients of tokens, so a window's is the same however it is planned. A token mean over
  each bundle is not neutral: alike lengths make short answers count for more."""
  counts = [data.draw(st.integers(1, 5)) for _ in order]
  lengths = [np.array([1 + 7 * q + k for k in range(n)]) for q, n in enumerate(counts)]

  def weights(plan, averaging):
    found = {}
    for bundle in (plan[:4], plan[4:]):
      how = dict(averaging=averaging, max_new_tokens=100)
      given = packing.answer_weights([lengths[q] for q in bundle], **how)
      found |= dict(zip(bundle, given, strict=True))
    return np.concatenate([found[q] for q in range(8)])

  for averaging in ('group', 'sequence', 'constant'):
    sorted_plan, plan = weights(list(range(8)), averaging), weights(order, averaging)
    np.testing.assert_array_equal(sorted_plan, plan)
  lengths = [np.array([1 + 9 * q]) for q in range(8)]  # 58 tokens, and 202
  alike = weights(list(range(8)), 'token')
  np.testing.assert_allclose(alike, [1 / 58] * 4 + [1 / 202] * 4)
  mixed = weights([0, 2, 4, 6, 1, 3, 5, 7], 'token')
  np.testing.assert_allclose(mixed, [1 / 112, 1 / 148] * 4)
