"""DAPO with LoRA on your own JSONL and a pretrained model: copy this and change it.

    .venv/bin/python -m jaxrl_sched.train --config=mine.py --workdir=runs/mine

A line of the files: {"question": "What is 6 * 7?", "answer": 42}. The config says
nothing that was measured: sizes and learning rate are where to begin.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  c = ConfigDict()
  c.seed = 0
  c.steps = 100
  c.model = dict(path='HuggingFaceTB/SmolLM2-135M-Instruct')  # or a folder
  c.lora = dict(rank=16, alpha=32.0)  # without this line all weights are trained
  mine = dict(reward='final_number', fields=dict(prompt='question'))
  c.prompts = dict(
    datasets=dict(mine=dict(source='train.jsonl', **mine)),
    template='chat',
    system='Think first. Say the answer as a number at the end.',
    max_tokens=256,  # longer prompts are dropped
  )
  c.sampling = dict(temperature=1.0, max_new_tokens=256)
  c.sampler = dict(slots=64)  # answers written at once
  c.scheduler = dict(groups_per_step=16, group_size=8, max_rounds=4)
  c.loss = dict(kind='dapo', clip_low=0.2, clip_high=0.28)
  c.optimizer = dict(learning_rate=1e-4, warmup_steps=5, max_grad_norm=1.0)
  c.learner = dict(rows=4, row_tokens=512)  # a row holds a prompt and its answer
  c.evaluate = dict(
    datasets=dict(held_out=dict(source='held_out.jsonl', **mine)), every=10, samples=4
  )
  c.checkpoint = dict(every=10, keep=2)
  return c
