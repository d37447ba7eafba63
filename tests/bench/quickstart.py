"""The quickstart under seeds 0, 1, 2: does each get there, and how fast?

    python tests/bench/quickstart.py OUT [--figure=configs/quickstart.png]

Prints the README's table; exits 1 where a seed starts above 0.45, ends below 0.90 or
takes 8 minutes. For the figure matplotlib is needed.
"""

import argparse
import pathlib
import subprocess
import sys
import time

import numpy as np

from jaxrl_sched.metrics import read_jsonl

ROOT = pathlib.Path(__file__).parents[2]


def run(workdir: pathlib.Path, seed: int) -> float:
  """Seconds of the whole command."""
  began = time.perf_counter()
  subprocess.run(
    [
      sys.executable,
      '-m',
      'jaxrl_sched.train',
      '--config=configs/quickstart.py',
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
  parser.add_argument('out', type=pathlib.Path)
  parser.add_argument('--figure', type=pathlib.Path)
  arguments = parser.parse_args()
  curves, seconds = {}, {}
  for seed in range(3):
    workdir = arguments.out / f'seed{seed}'
    seconds[seed] = run(workdir, seed)
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
    draw(curves, arguments.figure)
  good = all(
    curve[0] <= 0.45 and curve[steps[-1]] >= 0.90 and seconds[seed] < 480
    for seed, curve in curves.items()
  )
  return 0 if good else 1


def draw(curves: dict[int, dict[int, float]], file: pathlib.Path) -> None:
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(6, 3), layout='constrained')
  for seed, curve in curves.items():
    axes.plot(list(curve), list(curve.values()), marker='.', label=f'seed {seed}')
  axes.axhline(0.9, color='grey', linewidth=0.8, linestyle='--')
  axes.set(xlabel='step', ylabel='held-out pass rate', ylim=(0, 1))
  axes.grid(alpha=0.3)
  axes.legend(loc='lower right', frameon=False)
  figure.savefig(file, dpi=150)


if __name__ == '__main__':
  sys.exit(main())
