"""DAPO on a real pretrained model: SmolLM2-135M-Instruct on "What is a * b?".

    .venv/bin/pip install -e '.[test]' && .venv/bin/python launch/smollm2.py
    .venv/bin/python -m jaxrl_sched.train --config=configs/smollm2_products.py \\
      --workdir=runs/products

2 <= a, b <= 12; the last number of the answer counts, 48 new tokens at most. One
pair in four is held out, in both orders. Nothing says how to answer: at temperature
1 the model talks its way past what it knows, and rewards teach it to say it.

Needs:  two CPU cores, 10 GiB of memory. With `--config.model.path=HuggingFaceTB/
        SmolLM2-135M-Instruct` the weights of the hub, not measured here.
Time:   22.5 minutes for 30 steps, 30 to 56 s a step (two cores of an AMD EPYC).
Score:  held-out pass@1 at temperature 1, 31 prompts, 8 samples each: 0.141 before,
        0.919 after, seed 0 (tests/bench/learning.py).
Source: arXiv 2503.14476 for clip-higher, token mean and dynamic sampling; the rest is
        ours. `:short` is two small steps, for tests.
"""

import pathlib

from ml_collections import ConfigDict

TASK = 'jaxrl_sched.host.tasks:Products'


def get_config(variant: str = 'train') -> ConfigDict:
  c = ConfigDict()
  c.seed = 0
  c.steps = 30
  c.model = dict(path=str(pathlib.Path(__file__).parent.parent / 'runs' / 'smollm2'))
  c.prompts = dict(
    datasets=dict(products=dict(source=TASK)), template='chat', max_tokens=48
  )
  c.sampling = dict(temperature=1.0, max_new_tokens=48)
  c.sampler = dict(slots=64, chunk=8)
  c.scheduler = dict(groups_per_step=12, group_size=8, max_rounds=2)
  c.advantage = dict(divide_by_std=True)
  c.loss = dict(kind='dapo', clip_low=0.2, clip_high=0.28)
  c.optimizer = dict(learning_rate=1e-5, warmup_steps=3, max_grad_norm=1.0)
  c.learner = dict(rows=4, row_tokens=256)
  c.evaluate = dict(
    datasets=dict(held_out=dict(source=TASK, options=dict(held_out=True))),
    every=5,
    samples=8,
  )
  c.checkpoint = dict(every=10, keep=1)
  if variant == 'short':
    c.steps = 2
    c.sampling.max_new_tokens = 24
    c.sampler.slots = 16
    c.scheduler.update(groups_per_step=2, max_rounds=6)
    c.learner = dict(rows=1, row_tokens=256)
    c.evaluate = None
    c.checkpoint.every = 2
  elif variant != 'train':
    raise ValueError(f"smollm2_products.py:{variant}: expected 'train' or 'short'")
  return c
