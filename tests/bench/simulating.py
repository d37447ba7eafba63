"""How long does the simulator take? The two sizes that README speaks of.

    python tests/bench/simulating.py

Exits 1 where one takes longer than it may.
"""

import pathlib
import sys
import time

from jaxrl_sched import config, simulate

ROOT = pathlib.Path(__file__).parents[2]
# (steps, groups, group size, engines, seconds that it may take)
SIZES = ((1000, 128, 8, 16, 20.0), (100, 4096, 16, 64, 60.0))


def main() -> int:
  good = True
  for steps, groups, size, engines, most in SIZES:
    settings = {
      'steps': steps,
      'scheduler.groups_per_step': groups,
      'scheduler.group_size': size,
      'asp.engines': engines,
      'lengths': '{}',
    }
    pairs = [(key, str(value)) for key, value in settings.items()]
    c = config.read(f'{ROOT}/configs/papers.py:asp_lag', pairs)
    costs, began = simulate.costs_of(c, None), time.perf_counter()
    simulate.simulate(c, costs)
    took = time.perf_counter() - began
    good &= took < most
    print(
      f'{steps} steps of {groups * size:,} rollouts on {engines} engines: {took:.1f} s '
      f'({1000 * took / steps:.0f} ms a step)'
    )
  return 0 if good else 1


if __name__ == '__main__':
  sys.exit(main())
