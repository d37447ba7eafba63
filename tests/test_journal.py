"""A journal gives arrays as they were, whatever is changed how often since."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxrl_sched.journal import Journal

quick = settings(derandomize=True, deadline=None, max_examples=80)


def arrays(size=6):
  return {'count': np.zeros(size, np.int32), 'share': np.zeros(size, np.float16)}


@quick
@given(
  st.lists(
    st.one_of(
      st.just('freeze'), st.integers(0, 5), st.lists(st.integers(0, 5), max_size=8)
    ),
    max_size=20,
  )
)
def test_what_was_frozen_is_what_was_there(events):
  """One row at a time, many, or the same ones twice in a note."""
  here = arrays()
  journal = Journal(here)
  frozen, then = journal.freeze(), journal.copies()
  for value, rows in enumerate(events, 1):
    if rows == 'freeze':
      frozen, then = journal.freeze(), journal.copies()
      continue
    if isinstance(rows, int):
      journal.note(rows, [array[rows].item() for array in here.values()])
    else:
      rows = np.array(rows, np.int64)
      journal.note(rows)
    for array in here.values():
      array[rows] = value
    for _ in range(2):
      np.testing.assert_equal(frozen(), then)
    assert {name: a.dtype for name, a in frozen().items()} == {
      name: a.dtype for name, a in here.items()
    }


def test_what_it_gives_is_the_callers_own():
  here = arrays()
  journal = Journal(here)
  frozen = journal.freeze()
  for found in (frozen(), journal.copies()):
    found['count'][:] = 7
  assert not here['count'].any() and not frozen()['count'].any()


def test_rows_of_several_columns_can_be_noted():
  rows = np.zeros(4, [('a', 'i1'), ('b', 'i4')])
  journal = Journal({'rows': rows})
  frozen = journal.freeze()
  journal.note(np.array([1, 2]))
  rows[[1, 2]] = (3, 4)
  assert frozen()['rows'].tolist() == [(0, 0)] * 4
  assert journal.copies()['rows'].tolist() == [(0, 0), (3, 4), (3, 4), (0, 0)]


def test_only_the_newest_holds_and_none_after_all_was_changed():
  journal = Journal(arrays())
  old, new = journal.freeze(), journal.freeze()
  with pytest.raises(RuntimeError, match='is past: a later one or a load replaced it'):
    old()
  new()
  journal.forget()
  with pytest.raises(RuntimeError, match='is past'):
    new()
