"""The quickstart's path in seconds, for tests: the same model and tasks, and snoozing.
`:all` switches on every method.

python -m jaxrl_sched.train --config=configs/smoke.py --workdir=DIR
"""

from ml_collections import ConfigDict
import quickstart


def get_config(variant: str = 'snoozing') -> ConfigDict:
  c = quickstart.get_config()
  c.steps = 6
  for dataset in c.prompts.datasets.values():
    dataset.options.count = 64
  for dataset in c.evaluate.datasets.values():
    dataset.options.count = 8
  c.evaluate.every = 3
  c.sampler.slots = 16
  c.scheduler.update(groups_per_step=4, group_size=4)
  c.snooze = dict(factor=2)
  c.learner.update(rows=4, row_tokens=128)
  c.checkpoint.every = 2
  if variant == 'all':
    for dataset in c.prompts.datasets.values():
      dataset.options.count = 16  # so that prompts come again
    c.scheduler.groups_per_step = 8
    # A quick multiplier, so that sizes move within six steps.
    c.sagc = dict(sizes=(2, 4, 8), tau=1.5, eta=8.0, lambda_max=40.0, prompt_aware=True)
    c.lengths = dict()
    c.prune_prompts = dict(rate=0.5, regime='fill')
    c.prune_answers = dict(rate=0.5)
    c.loss.averaging = 'group'
  elif variant != 'snoozing':
    raise ValueError(f"smoke.py:{variant}: expected 'snoozing' or 'all'")
  return c
