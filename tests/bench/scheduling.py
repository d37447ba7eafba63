"""What does a step of the whole scheduler cost with ten million prompts?

    python tests/bench/scheduling.py [--prompts=10000000] [--groups=1024] [--steps=20]

Four datasets, groups of 8, everything on: snoozing, difficulty tiers, SAGC, length
prediction, pruning of prompts and answers. Prints CPU milliseconds (median over steps)
of `plan`, `sent`, `observe`, `take_batch` (advantages, pruning of answers) and `close`,
of which `learn` is the controllers' part (the rest is the record); bytes a prompt; and
seconds to write, to hash and to read the state. Exits 1 where plan + sent + observe,
memory or a time of the state is over its limit.
"""

import argparse
import sys
import time
import tracemalloc

import numpy as np

from jaxrl_sched.control.base import digest
from jaxrl_sched.control.difficulty import Tiers
from jaxrl_sched.control.lengths import LengthPredictor
from jaxrl_sched.control.sagc import SAGC
from jaxrl_sched.control.scheduler import Scheduler
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.control.source import Source
from jaxrl_sched.host.advantages import group_advantages
from jaxrl_sched.host.pruning import AnswerPruner, PromptPruner
from jaxrl_sched.types import Completion, Group, Prompt, Sampling

SHARES = {'a': 0.4, 'b': 0.3, 'c': 0.2, 'd': 0.1}  # of the prompts; weights are equal
LIMIT = 1024
TOKENS = np.zeros(LIMIT, np.int32)
LOGPS = np.zeros(LIMIT, np.float32)

MOST_MS, MOST_BYTES, MOST_STATE_S = 20.0, 64.0, 2.0


def prompt_of(dataset: str, index: int) -> Prompt:
  return Prompt(
    id=f'{dataset}/{index}', dataset=dataset, index=index, tokens=TOKENS[:50], text=''
  )


def make(prompts: int, groups: int, *, by_prompt: bool) -> Scheduler:
  """With everything on. About half of the groups asked for are useful."""
  sizes = {name: int(share * prompts) for name, share in SHARES.items()}
  weights, rng = dict.fromkeys(sizes, 1.0), np.random.default_rng(0)
  rates = {name: rng.random(size) for name, size in sizes.items()}
  tiers = Tiers(rates, weights, steps=1000)
  streams = {name: len(places) for name, (_, places) in tiers.streams().items()}
  return Scheduler(
    Source(Snooze(streams, tiers.weights(0), 5), tiers),
    prompt_of,
    Sampling(max_new_tokens=LIMIT),
    groups_per_step=groups // 2,
    surplus='drop',
    group_size=8,
    max_rounds=1,
    sagc=SAGC(sizes=(4, 8, 16), start=8, prompt_aware=by_prompt),
    lengths=LengthPredictor(sizes, limit=LIMIT),
    prompt_pruner=PromptPruner(
      streams, rate=0.5, regime='fill', dynamic_sampling=True, steps=1000
    ),
    answer_pruner=AnswerPruner(rate=0.5, steps=1000, seed=0),
    advantages_of=group_advantages,
  )


def answered(request, step: int) -> Group:
  """Half of the groups are useful, a third solved."""
  rng = np.random.default_rng(request.draw)
  p = (1.0, 0.5, 0.5, 1.0, 0.3, 0.0)[request.draw % 6]
  lengths = np.minimum(LIMIT, rng.geometric(1 / 300, request.size)).tolist()
  verdicts = (rng.random(request.size) < p).astype(np.float32)
  return Group(
    request=request,
    completions=tuple(
      Completion(
        draw=request.draw,
        answer=k,
        tokens=TOKENS[:n],
        logps=LOGPS[:n],
        finish='stop',
        version=step,
      )
      for k, n in enumerate(lengths)
    ),
    verdicts=verdicts,
    rewards=verdicts,
    faults=(None,) * request.size,
  )


def run(scheduler: Scheduler, steps: int) -> dict[str, list[float]]:
  """CPU milliseconds of each call, by step."""
  took: dict[str, list[float]] = {}

  def timed(name: str, step: int, do):
    began = time.process_time()
    found = do()
    spent = 1e3 * (time.process_time() - began)
    records = took.setdefault(name, [])
    if len(records) <= step:
      records.append(0.0)
    records[step] += spent
    return found

  learn = scheduler._learning.learn
  scheduler._learning.learn = lambda batch, step: timed(
    'learn', step, lambda: learn(batch, step)
  )
  for step in range(steps):
    timed('freeze', step, scheduler.freeze)
    groups = 0
    while plan := timed('plan', step, lambda at=step: scheduler.plan(at)):
      timed('sent', step, lambda at=plan: scheduler.sent(at))
      found = [answered(request, step) for request in plan.requests]
      groups += len(found)
      timed('observe', step, lambda at=step, of=found: scheduler.observe(of))
    timed('take_batch', step, lambda at=step: scheduler.take_batch(at))
    timed('close', step, lambda at=step: scheduler.close(at))
    took.setdefault('groups', []).append(groups)
  return took


def bench(prompts: int, groups: int, steps: int, *, by_prompt: bool) -> bool:
  tracemalloc.start()
  scheduler = make(prompts, groups, by_prompt=by_prompt)
  held, _ = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  took = run(scheduler, steps)
  median = {name: float(np.median(values[2:])) for name, values in took.items()}
  step_ms = sum(median[name] for name in ('plan', 'sent', 'observe'))
  print(
    'sizes by prompt' if by_prompt else 'one size a step',
    f'({median["groups"]:.0f} groups):',
    ', '.join(f'{k} {v:.1f} ms' for k, v in median.items() if k != 'groups'),
    f'| plan + sent + observe {step_ms:.1f} ms |',
    f'{held / prompts:.1f} bytes a prompt',
    flush=True,
  )
  times, began = {}, time.process_time()
  state = scheduler.state_dict()
  times['write'] = time.process_time() - began
  for name, do in (
    ('hash', lambda: digest(state)),
    ('read', lambda: scheduler.load_state_dict(state)),
  ):
    began = time.process_time()
    do()
    times[name] = time.process_time() - began
  print('  state:', ', '.join(f'{name} {value:.2f} s' for name, value in times.items()))
  return (
    step_ms <= MOST_MS
    and held / prompts <= MOST_BYTES
    and max(times.values()) <= MOST_STATE_S
  )


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--prompts', type=int, default=10_000_000)
  parser.add_argument('--groups', type=int, default=1024)
  parser.add_argument('--steps', type=int, default=20)
  args = parser.parse_args()
  good = [
    bench(args.prompts, args.groups, args.steps, by_prompt=by_prompt)
    for by_prompt in (False, True)
  ]
  return 0 if all(good) else 1


if __name__ == '__main__':
  sys.exit(main())
