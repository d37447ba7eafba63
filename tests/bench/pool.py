"""Seconds a step with a barrier and with the open pool, on the simulated clock.

    python tests/bench/pool.py [--steps=60] [--seeds=3]

Three workloads of configs/papers.py. Both ways have DAPO's dynamic sampling, the same
costs, and engines and learner that take turns. The first third of the steps is left out;
numbers are medians over the seeds.
"""

import argparse
import pathlib
import statistics

import numpy as np

from jaxrl_sched import config, simulate

PAPERS = pathlib.Path(__file__).parents[2] / 'configs' / 'papers.py'
WORKLOADS = ('snooze_dapo', 'sagc_fixed16', 'reasoning')
HEAD = """\
| work | barrier, s a step | pool, s a step | gain | empty slots | token lag, mean, most |
|---|---|---|---|---|---|"""


def measured(variant: str, steps: int, seed: int) -> dict[str, float]:
  c = config.read(f'{PAPERS}:{variant}') | {'seed': seed, 'steps': steps}
  book = simulate.simulate(c, simulate.costs_of(c, None)).book

  def column(name: str) -> np.ndarray:
    return book.column(name)[steps // 3 : steps]

  return {
    'seconds': float(np.nanmean(column('time/step_s'))),
    'empty': float(np.nanmean(column('rollout/idle_slots'))),
    'lag': float(np.nanmean(column('lag/mean'))),
    'most': float(np.nanmax(column('lag/max'))),
  }


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('--steps', type=int, default=60)
  parser.add_argument('--seeds', type=int, default=3)
  arguments = parser.parse_args()
  print(HEAD)
  for name in WORKLOADS:
    pairs = [
      [measured(v, arguments.steps, seed) for v in (name, f'{name}_pool')]
      for seed in range(arguments.seeds)
    ]

    def median(which: int, key: str, pairs=pairs) -> float:
      return statistics.median(pair[which][key] for pair in pairs)

    seconds = median(0, 'seconds'), median(1, 'seconds')
    gain = statistics.median(a['seconds'] / b['seconds'] for a, b in pairs)
    empty = f'{median(0, "empty"):.1%} to {median(1, "empty"):.1%}'
    lag = f'{median(1, "lag"):.2f}, {median(1, "most"):.0f}'
    print(
      f'| `{name}` | {seconds[0]:.1f} | {seconds[1]:.1f} | {gain:.2f} | {empty} | {lag} |'
    )


if __name__ == '__main__':
  main()
