"""The quickstart's path in seconds, for tests: the same model and tasks, and snoozing.

python -m jaxrl_sched.train --config=configs/smoke.py --workdir=DIR
"""

from ml_collections import ConfigDict
import quickstart


def get_config() -> ConfigDict:
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
  return c
