"""Does a config learn what it says, under each seed, and how fast?

    python tests/bench/learning.py quickstart OUT [--figure=configs/quickstart.png]
    python tests/bench/learning.py smollm2_products OUT

Prints the README's table; exits 1 where a seed misses its goal. For the figure
matplotlib is needed.
"""

import argparse
import dataclasses
import pathlib
import subprocess
import sys
import time

import numpy as np

from jaxrl_sched.metrics import read_jsonl

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Goal:
  """Held-out pass rates at temperature 1."""

  seeds: int  # 0 up to it
  start: float  # at most, before training
  end: float  # at least, after it
  minutes: float  # at most


GOALS = {
  'quickstart': Goal(seeds=3, start=0.45, end=0.90, minutes=8),
  'smollm2_products': Goal(seeds=1, start=0.30, end=0.75, minutes=60),
}


def run(config: str, workdir: pathlib.Path, seed: int) -> float:
  """Seconds of the whole command."""
  began = time.perf_counter()
  subprocess.run(
    [
      sys.executable,
      '-m',
      'jaxrl_sched.train',
      f'--config=configs/{config}.py',
      f'--workdir={workdir}',
      f'--config.seed={seed}',
    ],
    cwd=ROOT,
    check=True,
  )
  return time.perf_counter() - began


def held_out(workdir: pathlib.Path) -> dict[int, float]:
  """step -> mean pass@1 of the held-out sets."""
  found = {}
  for line in read_jsonl(workdir / 'metrics.jsonl'):
    rates = [v for k, v in line.items() if k.startswith('eval/') and 'pass@1' in k]
    if rates:
      found[line['step']] = float(np.mean(rates))
  return found


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('config', choices=GOALS)
  parser.add_argument('out', type=pathlib.Path)
  parser.add_argument('--figure', type=pathlib.Path)
  arguments = parser.parse_args()
  goal = GOALS[arguments.config]
  curves, seconds = {}, {}
  for seed in range(goal.seeds):
    workdir = arguments.out / f'seed{seed}'
    seconds[seed] = run(arguments.config, workdir, seed)
    curves[seed] = held_out(workdir)
  steps = sorted(curves[0])
  shown = steps[:: max(1, len(steps) // 6)]
  shown += steps[-1:] if shown[-1] != steps[-1] else []
  print('| step | ' + ' | '.join(map(str, shown)) + ' | minutes |')
  print('|---' * (len(shown) + 2) + '|')
  for seed, curve in curves.items():
    row = ' | '.join(f'{curve[step]:.3f}' for step in shown)
    print(f'| seed {seed} | {row} | {seconds[seed] / 60:.1f} |')
  if arguments.figure:
    draw(curves, goal, arguments.figure)
  good = all(
    curve[0] <= goal.start
    and curve[steps[-1]] >= goal.end
    and seconds[seed] <= 60 * goal.minutes
    for seed, curve in curves.items()
  )
  return 0 if good else 1


def draw(curves: dict[int, dict[int, float]], goal: Goal, file: pathlib.Path) -> None:
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(6, 3), layout='constrained')
  for seed, curve in curves.items():
    axes.plot(list(curve), list(curve.values()), marker='.', label=f'seed {seed}')
  axes.axhline(goal.end, color='grey', linewidth=0.8, linestyle='--')
  axes.set(xlabel='step', ylabel='held-out pass rate', ylim=(0, 1))
  axes.grid(alpha=0.3)
  axes.legend(loc='lower right', frameon=False)
  figure.savefig(file, dpi=150)


if __name__ == '__main__':
  sys.exit(main())
