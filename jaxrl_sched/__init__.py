"""Reinforcement learning of language models on TPUs, without wasting what is sampled.

The data's way, one step:

  prompts by id           device/prompts.py      -> Prompt
  which, and how many     control/scheduler.py   -> Request
  sampling                device/sampler.py      -> Completion
  grading                 host/grading.py        -> Group
  what was learned of it  control/scheduler.py   (observe)
  advantages              host/advantages.py
  packing                 host/packing.py        -> Batch
  learning                device/learner.py      -> new weights, metrics
  record                  metrics.py, device/checkpoint.py

`loop.py` is that list as a program. Between the jitted steps all decisions are
plain Python on the host.

Axis letters: B rows of a packed batch, T tokens a row, G answers a group,
P prompts, V vocabulary, D model, F feed-forward, N heads, K key-value heads,
H head width, L layers, S cache length, R slots of the sampler.

Floors, imports going down only: types < host, control, engine < device, sim <
loop, evaluation, metrics, report < config < the commands. The two lowest know
nothing of jax.
"""

import sys

from jaxrl_sched import terminal

if sys.argv[:1] == ['-m']:  # the package of a command that is being started
  terminal.die_at_once()
