"""What each method gains: one task, one model, and eleven ways to choose what is sampled.

    bash launch/ablation.sh

`configs/ablation.py:VARIANT` is one of VARIANTS.

The task is the same for all variants, and a fair case of what snoozing is for: prompts
whose difficulty training does not level. Most are the quickstart's rows of numbers,
learned within a dozen steps and not lost again. One in eight is a row longer than any
the model can carry through, and need be right to within seven only: it is wrong at
first, right now and then for the whole run, and what is learned of it holds for rows
never seen. It is what still moves the held-out score from 0.87 past 0.90. By then
dynamic sampling generates ten groups for each that it keeps; the authors of snoozing
tell of more than six (ai21.com/blog/dynamic-data-snoozing, 2026). On the plain
quickstart prompts hardly come a second time, every one of them fails now and then, and
snoozing gains next to nothing. This task was searched for, about ten having been tried.

The averaging is within groups in all variants, so that only the sampling differs.
"""

import math
import pathlib
import sys
from typing import Any

from ml_collections import ConfigDict

from jaxrl_sched.host import tasks

# The datasets name `configs.ablation:Rows`: it is to be found from any folder.
ROOT = str(pathlib.Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
  sys.path.append(ROOT)

EVERY = 8  # one prompt in so many is long
LONG = (8, 10)  # numbers in a long row
WITHIN = 7  # of the sum of a long row


class Rows:
  """Records of a task of rows; some are long and to be summed roughly.

  Their patterns are for the verifier `format`: an answer ends in a number that is
  right, or near enough.
  """

  def __init__(
    self,
    *,
    task: str,
    count: int,
    seed: int = 0,
    held_out: bool = False,
    every: int = EVERY,
  ):
    common = dict(count=count, seed=seed, held_out=held_out)
    self._short = getattr(tasks, task)(**common)
    self._long = tasks.Sums(**common, terms=LONG)
    self._every = every

  def __len__(self) -> int:
    return len(self._short)

  def __getitem__(self, i: int) -> dict[str, Any]:
    long = i % self._every == 0
    record = (self._long if long else self._short)[i]
    off = WITHIN if long else 0
    right = range(record['answer'] - off, record['answer'] + off + 1)
    return record | {'pattern': f'(.*[^-0-9])?({"|".join(map(str, right))})'}


def rows(task: str, **options) -> dict[str, Any]:
  """A dataset of the config."""
  return dict(
    source='configs.ablation:Rows', reward='format', options=dict(task=task, **options)
  )


SNOOZE = dict(factor=5)
# Short rows end in answers of one length. Those to long rows differ by a label or two,
# hence a straggler is a fifth longer than the median: under snoozing, in the last half
# of a run, in 0.14 of groups of 4 and 0.32 of groups of 16. 48 steps are few: lambda has
# to climb to about 12, so its steps are large and the memory is short.
SAGC = dict(sizes=(4, 8, 16), tau=1.2, delta=0.2, eta=20.0, rho=0.9, lambda_max=60.0)
ANSWERS = dict(rate=0.5)
PROMPTS = dict(rate=0.5, regime='fill')

# Name -> the blocks that are switched on, and what changes in those there are. Group
# sizes are compared on top of snoozing: in what dynamic sampling alone generates nearly
# all groups are solved and of one length, and no size makes an event.
VARIANTS = {
  'grpo': dict(scheduler=dict(dynamic_sampling=False)),
  'dapo': {},
  'filtering': dict(snooze=dict(factor=math.inf)),
  'snoozing': dict(snooze=SNOOZE),
  'dppo_answers': dict(prune_answers=ANSWERS),
  'dppo_prompts': dict(prune_prompts=PROMPTS),
  'fixed4': dict(snooze=SNOOZE, scheduler=dict(groups_per_step=32, group_size=4)),
  'fixed16': dict(snooze=SNOOZE, scheduler=dict(groups_per_step=8, group_size=16)),
  'sagc': dict(snooze=SNOOZE, sagc=SAGC),
  'prompt_aware': dict(snooze=SNOOZE, sagc=SAGC | dict(prompt_aware=True), lengths={}),
  'all': dict(
    snooze=SNOOZE,
    prune_answers=ANSWERS,
    prune_prompts=PROMPTS,
    sagc=SAGC | dict(prompt_aware=True),
    lengths={},
  ),
}


def get_config(variant: str = 'dapo') -> ConfigDict:
  import quickstart  # beside this file, found while a config is loaded

  if variant not in VARIANTS:
    known = ', '.join(VARIANTS)
    raise ValueError(f'ablation.py:{variant}: expected one of {known}')
  c = quickstart.get_config()
  c.steps = 48
  c.prompts.datasets = ConfigDict(
    dict(
      sums=rows('Sums', count=336, seed=1),
      last_digits=rows('LastDigits', count=336, seed=2),
    )
  )
  c.prompts.max_tokens = 48
  c.optimizer.learning_rate = 1e-4
  c.loss.averaging = 'group'
  c.evaluate.datasets = ConfigDict(
    dict(
      sums=rows('Sums', count=192, held_out=True),
      last_digits=rows('LastDigits', count=192, held_out=True),
    )
  )
  c.evaluate.update(every=4, samples=4)
  c.checkpoint = dict(every=24, keep=1)
  c.log = dict(tensorboard=False, samples=0)
  for name, block in VARIANTS[variant].items():
    if name == 'scheduler':
      c[name].update(block)
    else:
      c[name] = ConfigDict(block)
  return c
