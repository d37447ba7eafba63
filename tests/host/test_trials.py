"""Verifiers are tried before a run costs anything: what is said, doubted and refused."""

import dataclasses
import re

import numpy as np
import pytest

from jaxrl_sched.host import rewards
from jaxrl_sched.host.grading import GradingPool
from jaxrl_sched.host.trials import MADE_UP, chosen, try_verifiers
from jaxrl_sched.types import Prompt, Reward

MINE = """
import os, time

def right(text, prompt):
  return float(text == prompt.answer)

def parsing(text, prompt):
  return float(int(text) == int(prompt.answer))

def generous(text, prompt):
  return 1.0

def partial(text, prompt):
  return 0.25 + 0.5 * (text == prompt.answer)

def needs_gold(text, prompt):
  return float(text == prompt.meta['gold'])

def silent(text, prompt):
  pass

def crash(text, prompt):
  os._exit(3)

def hang(text, prompt):
  time.sleep(3600)

def length(text, prompt):
  return -len(text)

# What cannot grade, as far as it shows without a call.

async def asynchronous(text, prompt):
  return 1.0

def generator(text, prompt):
  yield 1.0

def of_trl(completions, **kwargs):
  return [1.0 for _ in completions]

def of_trl_too(prompts, completions, **kwargs):
  return [1.0 for _ in completions]

def of_verl(data_source, solution_str, ground_truth, extra_info=None):
  return 1.0

def named_only(*, text, prompt):
  return 1.0

class Class:
  def __init__(self, text='', prompt=None):
    pass

class Async:
  async def __call__(self, text, prompt):
    return 1.0

instance = Async()
number = 3

# And what can.

def more(text, prompt, strict=True):
  return 1.0

def any_of(*args, **kwargs):
  return 1.0

class Grader:
  def __call__(self, text, prompt):
    return 1.0

grader = Grader()
"""


@pytest.fixture(scope='module')
def pool(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tried')
  (folder / 'tried_verifiers.py').write_text(MINE)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(folder)
    with GradingPool(workers=2, deadline_s=1.0) as pool:
      yield pool


def prompts(reward, *, count=3, solutions=True, answer='4', **fields):
  return [
    Prompt(
      id=f'd/{i}',
      dataset='d',
      index=i,
      tokens=np.array([1], np.int32),
      text='?',
      answer=answer,
      solution=f'2 + 2 = {answer}' if solutions else None,
      reward=reward if ':' not in reward else f'tried_verifiers{reward}',
      **fields,
    )
    for i in range(count)
  ]


def tried(pool, some, **how):
  return try_verifiers(pool, {'d': some}, **how)


def test_it_says_what_verifiers_gave(pool):
  """4: the line of the issue, and that of a dataset without solutions."""
  lines = try_verifiers(
    pool,
    {
      'sums': prompts('final_number'),
      'bare': prompts('exact', solutions=False),
      'none': prompts(':any_of', solutions=False, answer=None, max_reward=None),
    },
  )
  assert lines[:3] == [
    "sums: 'final_number' gives 1 to 3 of 3 reference solutions, 0 to a made-up answer",
    "bare: 'exact' gives 1 to 3 of 3 bare answers, 0 to a made-up answer",
    "none: 'tried_verifiers:any_of' gives 1 to a made-up answer",
  ]


def test_a_solution_that_is_not_right_and_a_made_up_answer_that_is_are_doubted(pool):
  lines = tried(pool, prompts('exact'))  # '2 + 2 = 4' is not '4'
  assert lines == [
    "d: 'exact' gives 0 to 3 of 3 reference solutions, 0 to a made-up answer",
    "warning: d: no reference solution gets max_reward=1 from 'exact'",
  ]
  lines = tried(pool, prompts(':generous'))
  assert lines[1:] == [
    f"warning: d: a made-up answer ('{MADE_UP}') gets max_reward=1 from "
    "'tried_verifiers:generous'"
  ]


def test_some_that_are_right_and_part_of_a_reward_raise_no_doubt(pool):
  some = prompts('final_number')
  some[1] = dataclasses.replace(some[1], solution='5')
  [line] = tried(pool, some)
  assert 'gives 1 to 2 of 3 reference solutions, 0 to' in line
  [line] = tried(pool, prompts(':partial', solutions=False, max_reward=0.75))
  assert line.endswith('gives 0.75 to 3 of 3 bare answers, 0.25 to a made-up answer')


def test_one_that_fails_on_odd_text_only_is_said_so(pool):
  """Each of six answers: three bare ones, and three that are no number."""
  [line] = tried(pool, prompts(':parsing', solutions=False))
  assert 'gives 1 to 3 of 3 bare answers, fails on 3 of 6 answers (raised: ' in line


@pytest.mark.parametrize(
  'name, why',
  [
    (':needs_gold', "raised: KeyError: 'gold'"),
    (':silent', 'not a number: None'),
    (':crash', 'crashed: exit code 3'),
    (':hang', 'timeout: more than 1 s to grade'),
    (':length', 'out of range: -9, expected min_reward=0 to max_reward=1'),
  ],
)
def test_one_that_fails_on_every_answer_is_refused_in_a_line(pool, name, why):
  with pytest.raises(ValueError) as error:
    tried(pool, prompts(name, count=1))
  message = str(error.value)
  assert message.startswith(f"Dataset 'd', reward 'tried_verifiers{name}': failed on ")
  assert why in message and '\n' not in message
  assert tried(pool, prompts('final_number'))  # the pool is none the worse


def test_several_rewards_are_said_one_by_one(pool):
  parts = (
    Reward(name='right', verifier='final_number'),
    Reward(
      name='short',
      verifier='tried_verifiers:length',
      weight=0.1,
      max_reward=0.0,
      min_reward=-99.0,
    ),
  )
  [line] = tried(pool, prompts('', rewards=parts))
  assert line == (
    "d: 'final_number' (right) gives 1 to 3 of 3 reference solutions, 0 to a made-up "
    "answer; 'tried_verifiers:length' (short) gives -9 to 3 of 3 reference solutions, "
    f'-{len(MADE_UP)} to a made-up answer'
  )
  bad = Reward(name='odd', verifier='tried_verifiers:silent', weight=0.1)
  with pytest.raises(ValueError, match="reward 'tried_verifiers:silent': failed on"):
    tried(pool, prompts('', rewards=(parts[0], bad)))


def test_a_solution_is_tried_as_graders_would_see_it(pool):
  some = [dataclasses.replace(p, solution='4\n\nQ: 5') for p in prompts('exact')]
  [line] = tried(pool, some, shown=lambda text: text.split('\n\n')[0])
  assert 'gives 1 to 3 of 3 reference solutions' in line


@pytest.mark.parametrize('count', [1, 2, 3, 4, 1000])
def test_a_few_prompts_are_chosen_from_first_to_last(count):
  found = chosen(count)
  assert len(found) == min(count, 3) and found == sorted(set(found))
  assert found[0] == 0 and found[-1] == count - 1


@pytest.mark.parametrize(
  'name, wrong',
  [
    ('asynchronous', 'an async function'),
    ('instance', 'an async function'),
    ('generator', 'a generator'),
    ('of_trl', r'a function of \(completions, \*\*kwargs\)'),
    ('of_trl_too', r'a function of \(prompts, completions, \*\*kwargs\)'),
    ('of_verl', r'a function of \(data_source, solution_str, ground_truth, extra_info'),
    ('named_only', r'a function of \(\*, text, prompt\)'),
    ('Class', '<class '),
    ('number', '3'),
    ('Grader.__call__', r'a function of \(self, text, prompt\)'),
  ],
)
def test_a_function_that_no_answer_can_be_graded_by_is_refused(pool, name, wrong):
  del pool  # its module is there
  with pytest.raises(ValueError) as error:
    rewards.resolve(f'tried_verifiers:{name}')
  expected = f"reward 'tried_verifiers:{name}' is {wrong}.*, expected a function "
  assert re.match(expected, str(error.value)), error.value
  assert '(answer_text, prompt) -> a number' in str(error.value)


@pytest.mark.parametrize('name', ['more', 'any_of', 'grader'])
def test_a_function_of_a_text_and_a_prompt_is_taken(pool, name):
  del pool
  assert rewards.resolve(f'tried_verifiers:{name}')('4', None) == 1.0
