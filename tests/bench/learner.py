"""How long an update takes on this machine, with prompts stored apart and shared.

    python tests/bench/learner.py [--model=runs/smollm2] [--repeats=3]

Random answers, the same for both; 16 groups of 8 as in the quickstart, with --model 12 as
in smollm2_products. Without --model a model of 3.4 M parameters. Prints seconds (medians,
in turns), and loss and norm of the gradient, which are to agree.
"""

import argparse
import statistics
import time

import jax
import numpy as np

from jaxrl_sched.device import model as model_lib
from jaxrl_sched.device import weights
from jaxrl_sched.device.learner import Learner, Loss
from jaxrl_sched.host import packing
from jaxrl_sched.types import Completion, Group, Prompt, Request, Sampling

SMALL = model_lib.ModelConfig(
  vocab_size=320,
  known_tokens=300,
  d_model=256,
  d_ff=768,
  layers=4,
  heads=8,
  kv_heads=4,
  head_dim=32,
)


def groups_of(
  count: int, prompt: int, mean: float, limit: int, ids: int
) -> list[Group]:
  """Groups of 8 answers of lognormal length, right and wrong at random."""
  rng, groups = np.random.default_rng(0), []
  for draw in range(count):
    task = Prompt(
      id=f'p/{draw}',
      dataset='p',
      index=draw,
      tokens=rng.integers(5, ids, prompt).astype(np.int32),
      text='',
    )
    lengths = np.clip(rng.lognormal(np.log(mean), 0.45, 8), 3, limit).astype(int)
    completions = tuple(
      Completion(
        draw=draw,
        answer=k,
        tokens=rng.integers(5, ids, n).astype(np.int32),
        logps=np.full(n, -1, np.float32),
        finish='stop',
        version=0,
      )
      for k, n in enumerate(lengths)
    )
    verdicts = np.array([0, 1, *rng.integers(0, 2, 6)], np.float32)
    sampling = Sampling(max_new_tokens=limit)
    groups.append(
      Group(
        request=Request(draw=draw, prompt=task, size=8, sampling=sampling),
        completions=completions,
        verdicts=verdicts,
        rewards=verdicts,
        faults=(None,) * 8,
      )
    )
  return groups


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('--model')
  parser.add_argument('--repeats', type=int, default=3)
  arguments = parser.parse_args()
  if arguments.model is None:
    config, parameters = SMALL, model_lib.init(SMALL, 0)
    groups = groups_of(16, prompt=28, mean=16, limit=28, ids=300)
    shapes = {False: (16, 128), True: (6, 192)}
  else:
    config, parameters = weights.load(arguments.model)
    groups = groups_of(12, prompt=36, mean=25, limit=48, ids=config.known_tokens)
    shapes = {False: (4, 256), True: (2, 512)}
  advantages = [g.rewards - g.rewards.mean() for g in groups]
  each = packing.answer_weights(
    [g.lengths for g in groups], averaging='token', max_new_tokens=48
  )
  learners, batches = {}, {}
  for share, (rows, row_tokens) in shapes.items():
    learners[share] = Learner(
      parameters,
      config,
      rows=rows,
      row_tokens=row_tokens,
      loss=Loss(),
      optimizer=dict(learning_rate=1e-6, warmup_steps=1, max_grad_norm=1.0, steps=10),
    )
    learners[share].warm_up(share_prompt=share)
    how = dict(version=0, rows=rows, row_tokens=row_tokens, window=64)
    batches[share] = packing.fill(groups, advantages, each, share_prompt=share, **how)
  taken: dict[bool, list[float]] = {False: [], True: []}
  for _ in range(arguments.repeats):
    for share, learner in learners.items():
      began = time.perf_counter()
      metrics = learner.update(batches[share], step=0)
      jax.block_until_ready(learner.state)
      taken[share].append(time.perf_counter() - began)
      loss, norm = float(metrics['loss']), float(metrics['grad_norm'])
      print(
        f'shared={share}: {taken[share][-1]:.2f} s, loss {loss:.7g}, norm {norm:.7g}'
      )
  apart, shared = (statistics.median(taken[share]) for share in (False, True))
  print(f'medians: apart {apart:.2f} s, shared {shared:.2f} s: {apart / shared:.2f}')


if __name__ == '__main__':
  main()
