"""Schedulers of nothing but streams, and steps of theirs, for tests."""

import numpy as np
from toys import graded

from jaxrl_sched.control.scheduler import Scheduler
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.control.source import Source
from jaxrl_sched.types import Prompt, Sampling

SIZES = {'a': 12, 'b': 7}


def prompt_of(dataset, index):
  return Prompt(
    id=f'{dataset}/{index}',
    dataset=dataset,
    index=index,
    tokens=np.array([1, 2], np.int32),
    text='',
  )


def scheduler(sizes=SIZES, weights=None, seed=0, factor=0, **settings):
  snooze = Snooze(sizes, weights or dict.fromkeys(sizes, 1.0), factor, seed=seed)
  settings = dict(groups_per_step=4, group_size=2) | settings
  return Scheduler(Source(snooze), prompt_of, Sampling(max_new_tokens=4), **settings)


def play(s, outcome, step=0):
  """One step; `outcome(request)` gives the verdicts. Returns rounds and the batch."""
  rounds = []
  while plan := s.plan(step):
    s.sent(plan)
    rounds.append(plan.requests)
    s.observe([graded(r, outcome(r), version=step) for r in plan.requests])
  lesson = s.take_batch(step)
  metrics, lines = s.close(step)
  return rounds, lesson.groups, metrics, lines


USEFUL, EASY, HARD = [1, 0], [1, 1], [0, 0]
