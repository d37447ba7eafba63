"""What the configs of pods share: maths problems, two papers' settings, models' shapes.

Not a config itself; `qwen25_3b.py`, `llama32_3b.py`, `qwen3_4b.py` and `qwen3_8b.py` are.
Data are JSONL files, made from the public sets or your own:

    math/train.jsonl, math/test.jsonl        {"problem": "...", "answer": "\\frac{1}{2}"}
    gsm8k/train.jsonl, gsm8k/test.jsonl      {"question": "...", "answer": 42}

`answer` is the final answer alone: what stands in the last \\boxed{} of a solution of
MATH, and after #### in one of GSM8K.
"""

from typing import Any

from ml_collections import ConfigDict

DATA = {
  'math': dict(reward='math', fields=dict(prompt='problem')),
  'gsm8k': dict(reward='final_number', fields=dict(prompt='question')),
}
ASK = {
  'math': 'Reason step by step, and put your final answer within \\boxed{}.',
  'gsm8k': 'Reason step by step. End with the answer, a number.',
}


def config(variant: str, model: dict[str, Any]) -> ConfigDict:
  """DAPO on one of DATA. Rates and sizes are where to begin, not measured."""
  if variant not in DATA:
    raise ValueError(f'{variant!r}, expected one of {", ".join(DATA)}')
  c = ConfigDict()
  c.seed = 0
  c.steps = 300
  c.model = dict(model, dtype='bfloat16')
  how = DATA[variant]
  c.prompts = dict(
    datasets={variant: dict(source=f'{variant}/train.jsonl', **how)},
    template='chat',
    system=ASK[variant],
    max_tokens=512,
  )
  c.sampling = dict(temperature=1.0)
  c.advantage = dict(divide_by_std=True)
  c.loss = dict(kind='dapo', clip_low=0.2, clip_high=0.28)
  c.optimizer = dict(learning_rate=1e-6, warmup_steps=10, max_grad_norm=1.0)
  c.evaluate = dict(
    datasets={variant: dict(source=f'{variant}/test.jsonl', **how)}, every=25
  )
  c.checkpoint = dict(every=25, keep=2)
  return c


def sagc(c: ConfigDict) -> ConfigDict:
  """Group sizes 4, 8 and 16 (arXiv 2606.02218); its prompts a step and limit of an
  answer are not published: those of `papers.py`."""
  c.sampling.max_new_tokens = 3072
  c.scheduler = dict(groups_per_step=128, group_size=16)
  c.sagc = dict(sizes=(4, 8, 16), delta=0.4)
  return c


def dppo(c: ConfigDict) -> ConfigDict:
  """Half of what teaches least is left out (arXiv 2603.04135): prompts before they are
  sampled, answers after. Groups of 5 and 1024 tokens are published."""
  c.sampling.max_new_tokens = 1024
  c.scheduler = dict(groups_per_step=128, group_size=5)
  c.prune_prompts = dict(rate=0.5)
  c.prune_answers = dict(rate=0.5)
  c.loss.averaging = 'group'  # a token mean would hang on what was left out
  return c
