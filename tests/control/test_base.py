"""A digest tells states apart exactly where a checkpoint would."""

import copy
import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

from jaxrl_sched.control.base import digest, visits
from jaxrl_sched.device import mixed_state

quick = settings(derandomize=True, deadline=None, max_examples=150)

scalars = st.one_of(
  st.none(), st.booleans(), st.integers(-3, 3), st.floats(width=16), st.text(max_size=2)
)
dtypes = st.sampled_from(['i1', 'u1', 'i4', '>i4', 'f2', 'f4', '?', 'U1'])
arrays = dtypes.flatmap(
  lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_side=2, min_side=0))
)
states = st.recursive(
  scalars | arrays,
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=2), inner, max_size=3)
  ),
  max_leaves=6,
)


def written(state) -> tuple:
  """What a checkpoint writes: its JSON, and the arrays as they lie in the file."""
  if isinstance(state, dict):
    return 'dict', tuple((key, written(state[key])) for key in sorted(state))
  if isinstance(state, list):
    return 'list', tuple(map(written, state))
  if isinstance(state, np.ndarray):
    return 'array', state.dtype.str, state.shape, state.tobytes()
  return 'json', repr(state)


@quick
@given(states, states)
def test_two_states_hash_alike_where_they_are_written_alike(one, other):
  assert (digest(one) == digest(other)) == (written(one) == written(other))
  assert digest(copy.deepcopy(one)) == digest(one)


@quick
@given(states)
def test_a_save_and_a_load_change_nothing(state):
  assert digest(mixed_state.load(*mixed_state.dump(state, 's'))) == digest(state)


def test_near_misses_are_told_apart():
  """Each differs from every other by one thing only."""
  zeros = np.zeros(4, np.int8)
  different = [
    None, False, 0, 0.0, -0.0, math.nan, math.inf, '', '0', [], {}, [[]], [{}], [None],
    ['ab', 'c'], ['a', 'bc'], [['ab'], 'c'], {'a': 1, 'b': 2}, {'a': 2, 'b': 1},
    {'a': {'b': 1}}, {'a': {}, 'b': 1}, zeros, zeros.view(bool), zeros.view(np.int32),
    zeros.reshape(2, 2), zeros.reshape(4, 1), zeros[:3], [zeros], [zeros, zeros],
    zeros.tolist(), np.array([0.0]), np.array([-0.0]), np.array(0.0), np.empty((0, 3)),
    np.empty((3, 0)), zeros.view([('a', 'i1')]), zeros.view([('b', 'i1')]),
    {'dict': {}}, {'array': []}, {'dict': {'a': 1, 'b': 2}}, [zeros, {}], [{}, zeros],
  ]  # fmt: skip
  hashes = [digest(state) for state in different]
  for (i, a), (j, b) in itertools.combinations(enumerate(hashes), 2):
    assert a != b, (different[i], different[j])
  # One that looks like what stands for an array inside.
  assert digest({'array': ['|i1', [4], 'ab']}) != digest(zeros)


def test_order_of_keys_and_layout_do_not_count():
  assert digest({'a': 1, 'b': [2]}) == digest({'b': [2], 'a': 1})
  grid = np.arange(6, dtype=np.int16).reshape(2, 3)
  assert digest(np.asfortranarray(grid)) == digest(grid)
  assert digest(np.arange(12, dtype=np.int16)[::2]) == digest(
    np.arange(0, 12, 2, dtype=np.int16)
  )


@pytest.mark.parametrize(
  'state, message',
  [
    ({'a': {1: 2}}, 'state.a: key 1, expected a string'),
    ({'a': [0, (1,)]}, 'state.a.1: tuple, expected JSON or an array'),
    ({'a': np.float32(1)}, 'state.a: float32'),
    ({'a': np.array([None])}, 'state.a: ndarray'),
  ],
)
def test_what_no_checkpoint_could_hold_is_refused(state, message):
  with pytest.raises(ValueError, match=message):
    digest(state)


@quick
@given(st.lists(st.integers(0, 4), max_size=12))
def test_visits_are_rounds_in_order(keys):
  """No key twice in a round; the k-th place of a key is in round k."""
  rounds = visits(np.array(keys, np.int64))
  seen = {}
  for number, places in enumerate(rounds):
    assert len(places) and sorted(places) == list(places)
    for place in places:
      seen[place] = number
  assert seen == {i: keys[:i].count(key) for i, key in enumerate(keys)}
