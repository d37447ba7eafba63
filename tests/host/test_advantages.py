"""Advantages are relative to the group, and exactly 0 where nothing differs."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import toys

from jaxrl_sched.host.advantages import group_advantages, nothing_to_learn
from jaxrl_sched.types import Lesson

spread_rewards = st.lists(
  st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=16
).filter(lambda rewards: len(set(rewards)) > 1)


@pytest.mark.parametrize(
  'divide_by_std, expected',
  [
    (True, [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
    (False, [0.75, -0.25, -0.25, -0.25]),
  ],
)
def test_one_right_answer_of_four(divide_by_std, expected):
  """A1: population std, and dividing differs from centring."""
  advantages = group_advantages([1, 0, 0, 0], divide_by_std=divide_by_std)
  assert advantages.dtype == np.float32
  np.testing.assert_allclose(advantages, expected, rtol=1e-5)


@pytest.mark.parametrize('size', [2, 5, 8])
def test_binary_rewards_follow_the_closed_form(size):
  """A1: sqrt((1-p)/p) for successes, -sqrt(p/(1-p)) for failures."""
  for right in range(1, size):
    p = right / size
    advantages = group_advantages([1] * right + [0] * (size - right))
    np.testing.assert_allclose(advantages[:right], np.sqrt((1 - p) / p), rtol=1e-5)
    np.testing.assert_allclose(advantages[right:], -np.sqrt(p / (1 - p)), rtol=1e-5)


def test_aborted_answers_left_out_leave_the_other_seven():
  """E4: mean 4/7 and population std 0.4948717 of the seven that ended."""
  advantages = group_advantages([1, 1, 0, 0, 1, 0, 1])
  right, wrong = 0.8660254, -1.1547005
  expected = [right, right, wrong, wrong, right, wrong, right]
  np.testing.assert_allclose(advantages, expected, rtol=1e-5)


@pytest.mark.parametrize('reward', [0.0, 1.0, 0.1, 1e6 / 3, -7.0])
@pytest.mark.parametrize('divide_by_std', [True, False])
def test_a_uniform_group_gets_exact_zeros(reward, divide_by_std):
  """A2: two uniform groups of 1s and 0s teach nothing, each on its own."""
  advantages = group_advantages([reward] * 7, divide_by_std=divide_by_std)
  assert not advantages.any()


def test_rounding_noise_is_no_spread_but_a_small_difference_is():
  assert not group_advantages([0.3, 0.1 + 0.2, 0.3]).any()
  assert not group_advantages([1.0, 1.0 + 9e-7]).any()
  np.testing.assert_allclose(group_advantages([0.0, 0.01]), [-1, 1], rtol=1e-3)


def test_a_group_of_one_gets_zero():
  assert group_advantages([0.5]).tolist() == [0.0]


def test_two_groups_at_once_are_refused():
  """A2: groups cannot be mixed, because a call takes one."""
  with pytest.raises(ValueError, match=r'one group \[G\], got shape \(2, 4\)'):
    group_advantages([[1, 1, 1, 1], [0, 0, 0, 0]])
  with pytest.raises(ValueError, match='one group'):
    group_advantages([])


@pytest.mark.parametrize('bad', [None, np.nan, np.inf, -np.inf])
def test_a_reward_that_is_no_number_is_refused(bad):
  """G8: it must not turn its neighbours into NaN."""
  with pytest.raises(ValueError, match='expected finite numbers'):
    group_advantages([1, bad, 0, 0])


@given(spread_rewards)
def test_mean_is_0_and_std_is_1(rewards):
  advantages = group_advantages(rewards).astype(np.float64)
  np.testing.assert_allclose(advantages.mean(), 0, atol=1e-6)
  np.testing.assert_allclose(advantages.std(), 1, rtol=1e-4)


@given(spread_rewards, st.integers(1, 5), st.integers(-9, 9), st.randoms())
def test_scale_shift_and_order_of_rewards_do_not_matter(rewards, scale, shift, random):
  order = list(range(len(rewards)))
  random.shuffle(order)
  rewards = np.array(rewards)
  np.testing.assert_allclose(
    group_advantages(scale * rewards[order] + shift),
    group_advantages(rewards)[order],
    rtol=1e-4,
    atol=1e-6,
  )


@given(spread_rewards)
def test_centred_advantages_are_the_divided_ones_times_the_std(rewards):
  centred = group_advantages(rewards, divide_by_std=False)
  divided = group_advantages(rewards, eps=0.0)
  np.testing.assert_allclose(centred, divided * np.std(rewards), rtol=1e-5, atol=1e-6)


RIGHT = [3.0, -1.0]  # advantages of two answers


@pytest.mark.parametrize(
  'advantages, keep, truncated, how, why',
  [
    (RIGHT, [1, 1], [0, 0], {}, None),
    (RIGHT, [1, 0], [0, 1], {'overlong_filter': True}, None),
    ([0, 0], [1, 1], [0, 0], {}, 'advantages of all answers left 0'),
    # What has an advantage is truncated, or pruned: momentum would be all that is left.
    ([0, -1], [1, 1], [0, 1], {'overlong_filter': True}, 'advantages of all'),
    ([0, -1], [1, 1], [0, 1], {}, None),
    ([0, -1], [2, 0], [0, 0], {}, 'advantages of all'),
    (RIGHT, [0, 0], [0, 0], {}, 'all answers pruned'),
    (RIGHT, [1, 1], [1, 1], {'overlong_filter': True}, 'all answers left truncated'),
    (RIGHT, [0, 1], [0, 1], {'overlong_filter': True}, 'all answers left truncated'),
    # A penalty needs no advantage, but tokens.
    ([0, 0], [1, 1], [0, 0], {'has_penalty': True}, None),
    ([0, 0], [0, 0], [0, 0], {'has_penalty': True}, 'all answers pruned'),
  ],
)
def test_an_update_without_a_gradient_is_none(advantages, keep, truncated, how, why):
  request = toys.request(0, [1, 2], size=2)
  group = toys.graded(request, [1, 0])
  ends = ['length' if cut else 'stop' for cut in truncated]
  completions = tuple(
    dataclasses.replace(c, finish=finish)
    for c, finish in zip(group.completions, ends, strict=True)
  )
  lesson = Lesson(
    groups=[dataclasses.replace(group, completions=completions)],
    advantages=[np.array(advantages, np.float32)],
    keep=[np.array(keep, np.float64)],
    count=1,
  )
  found = nothing_to_learn(
    lesson, **{'overlong_filter': False, 'has_penalty': False} | how
  )
  assert found is None if why is None else found.startswith(why)


def test_answers_without_tokens_have_no_gradient():
  group = toys.graded(toys.request(0, [1]), [1, 0], length=0)
  lesson = Lesson(
    groups=[group], advantages=[np.array(RIGHT)], keep=[np.ones(2)], count=1
  )
  for has_penalty in (False, True):
    found = nothing_to_learn(lesson, overlong_filter=False, has_penalty=has_penalty)
    assert found == 'all answers pruned or empty'
