"""The quickstart's tasks: right by arithmetic, reproducible, of two styles."""

import re

import numpy as np
import pytest

from jaxrl_sched.host.rewards import REWARDS
from jaxrl_sched.host.tasks import LastDigits, Sums
from jaxrl_sched.types import Prompt


def numbers(text):
  return [int(x) for x in re.findall(r'\d+', text)]


def prompt(record):
  return Prompt(
    id='x/0',
    dataset='x',
    index=0,
    tokens=np.array([1]),
    text=record['prompt'],
    answer=record['answer'],
  )


@pytest.mark.parametrize('task', [Sums, LastDigits])
@pytest.mark.parametrize('direct', [0.0, 1.0])
def test_every_solution_is_right_and_of_its_style(task, direct):
  records = task(count=300, seed=3, direct=direct)
  assert len(records) == 300
  for i in range(300):
    record = records[i]
    terms = numbers(record['prompt'])
    total = sum(terms) if task is Sums else sum(terms) % 10
    assert record['answer'] == total
    assert REWARDS['final_number'](record['solution'], prompt(record)) == 1.0
    steps = numbers(record['solution'])
    assert len(steps) == (1 if direct else len(terms) + 1)


def test_a_record_is_a_function_of_its_place():
  one, other = Sums(count=50, seed=4), Sums(count=10, seed=4)
  assert [one[i] for i in range(10)] == [other[i] for i in reversed(range(10))][::-1]
  assert Sums(count=9, seed=5)[3] != one[3]
  assert len({one[i]['prompt'] for i in range(50)}) > 45


def test_the_share_of_direct_answers_is_as_asked():
  records = Sums(count=2000, seed=0, direct=0.6)
  share = np.mean([len(numbers(records[i]['solution'])) == 1 for i in range(2000)])
  assert abs(share - 0.6) < 4 * (0.6 * 0.4 / 2000) ** 0.5


@pytest.mark.parametrize('task', [Sums, LastDigits])
def test_held_out_prompts_are_never_trained_on(task):
  train, aside = task(count=4000, seed=1), task(count=200, seed=9, held_out=True)
  trained = {train[i]['prompt'] for i in range(4000)}
  assert not trained & {aside[i]['prompt'] for i in range(200)}
