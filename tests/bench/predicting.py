"""Does the simulator know what a real run takes, and what it decides?

    python tests/bench/predicting.py OUT [--config=configs/quickstart.py] [--config.a.b=v]

Trains (unless OUT/run is there already), fits costs to the first half of the steps, runs
the whole trace on the simulated clock, and compares the second half's time, evaluation
aside. Exits 1 where it is more than 10 % off, or a decision differs.
"""

import argparse
import pathlib
import subprocess
import sys

import numpy as np

from jaxrl_sched import config, simulate
from jaxrl_sched.metrics import read_jsonl, to_json
from jaxrl_sched.sim import costs as costs_lib
from jaxrl_sched.sim.summary import Book

ROOT = pathlib.Path(__file__).parents[2]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('out', type=pathlib.Path)
  parser.add_argument('--config', default='configs/quickstart.py')
  arguments, overrides = parser.parse_known_args()
  workdir = (arguments.out / 'run').resolve()
  if not workdir.exists():
    subprocess.run(
      [sys.executable, '-m', 'jaxrl_sched.train', f'--workdir={workdir}']
      + [f'--config={arguments.config}', *overrides],
      cwd=ROOT,
      check=True,
    )
  c = config.of_workdir(None, workdir, ())
  half, steps = c['steps'] // 2, c['steps']
  prompts = config.prepare(c).prompts
  records = costs_lib.read_run(workdir, prompts=prompts, steps=range(1, half))
  fitted, book = costs_lib.fit(records), Book(keeps_groups=True)
  simulate.simulate(c, fitted, workdir / 'rollouts.jsonl', book)
  real = read_jsonl(workdir / 'metrics.jsonl')
  print('| seconds of the second half | real | simulated | off |\n|---|---|---|---|')
  off = {}
  for key in ('generate_s', 'reward_s', 'learn_s', 'idle_s', 'step_s'):
    name = f'time/{key}'
    measured, predicted = (
      float(np.nansum([line.get(name, np.nan) for line in lines[half:steps]]))
      for lines in (real, book.lines)
    )
    off[key] = predicted / measured - 1 if measured else 0.0
    print(f'| {key[:-2]} | {measured:.2f} | {predicted:.2f} | {off[key]:+.1%} |')
  same = to_json(book.settled) == to_json(read_jsonl(workdir / 'rollouts.jsonl'))
  print(f'{len(book.settled)} groups decided {"alike" if same else "otherwise"}.')
  return 0 if same and abs(off['step_s']) <= 0.1 else 1


if __name__ == '__main__':
  sys.exit(main())
