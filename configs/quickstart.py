"""DAPO on two small tasks: can a small policy learn from rewards to think first?

    bash launch/quickstart.sh

Needs:  two CPU cores, 2 GiB of memory.
Time:   a minute, 0.4 to 2 s a step (two cores of an AMD EPYC).
Score:  held-out pass@1 at temperature 1, 256 prompts, 2 samples each: 0.33 to 0.38
        before, 0.986 to 0.996 after, seeds 0 to 2 (tests/bench/learning.py).
Source: arXiv 2503.14476 for clip-higher, token mean and dynamic sampling; the rest is
        ours. `:think` and `:mix` make the starting weights (launch/warm_start.sh).
"""

import pathlib

from ml_collections import ConfigDict

HERE = pathlib.Path(__file__).parent
TASKS = 'jaxrl_sched.host.tasks'


def get_config(variant: str = 'train') -> ConfigDict:
  c = ConfigDict()
  c.seed = 0
  c.steps = 45
  c.model = dict(path=str(HERE / 'quickstart_model'))
  c.prompts = dict(
    datasets=dict(
      sums=dict(source=f'{TASKS}:Sums', options=dict(count=4_000, seed=1)),
      last_digits=dict(source=f'{TASKS}:LastDigits', options=dict(count=4_000, seed=2)),
    ),
    template='chat',
    max_tokens=32,
  )
  c.sampling = dict(temperature=1.0, max_new_tokens=28)
  c.sampler = dict(slots=64, chunk=8)
  c.scheduler = dict(groups_per_step=16, group_size=8, max_rounds=2)
  c.advantage = dict(divide_by_std=True)
  c.loss = dict(kind='dapo', clip_low=0.2, clip_high=0.28)
  c.optimizer = dict(learning_rate=3e-5, warmup_steps=5, max_grad_norm=1.0)
  # Attention costs row_tokens a token: room for a prompt with most of its answers.
  c.learner = dict(rows=6, row_tokens=192, share_prompt=True)
  c.evaluate = dict(
    datasets=dict(
      sums=dict(source=f'{TASKS}:Sums', options=dict(count=128, held_out=True)),
      last_digits=dict(
        source=f'{TASKS}:LastDigits', options=dict(count=128, held_out=True)
      ),
    ),
    every=5,
    samples=2,
  )
  c.checkpoint = dict(every=15, keep=2)
  if variant == 'think':
    supervise(c, steps=2000, direct=0.0, learning_rate=2e-3)
    c.model = dict(
      init=dict(d_model=128, d_ff=384, layers=4, heads=4, kv_heads=2, head_dim=32),
      tokenizer='bytes',
    )
  elif variant == 'mix':
    supervise(c, steps=150, direct=0.75, learning_rate=3e-4)
    c.model = dict(path='given by launch/warm_start.sh')
  elif variant != 'train':
    raise ValueError(f"quickstart.py:{variant}: expected 'train', 'think' or 'mix'")
  return c


def supervise(
  c: ConfigDict, *, steps: int, direct: float, learning_rate: float
) -> None:
  """Supervised learning on reference solutions, some of which do not think."""
  c.teacher = 'solutions'
  c.steps = steps
  for dataset in c.prompts.datasets.values():
    dataset.options.update(count=32 * steps, seed=7, direct=direct)
  c.scheduler = dict(groups_per_step=64, group_size=1, dynamic_sampling=False)
  c.loss.tis_cap = None
  c.learner = dict(rows=12, row_tokens=128)
  c.optimizer = dict(
    learning_rate=learning_rate,
    warmup_steps=50,
    schedule='cosine',
    weight_decay=0.01,
  )
  c.evaluate.every = 100
  c.checkpoint = dict(every=500, keep=1)
