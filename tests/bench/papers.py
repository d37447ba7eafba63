"""What the papers report, and what the same methods do here, on the simulated clock.

    python tests/bench/papers.py OUT [--seeds=3] [--figure=configs/papers.png]

Runs the variants of configs/papers.py, a few minutes in all, and writes OUT/papers.md
(README's table), OUT/runs/ (all the numbers: see `python -m jaxrl_sched.simulate`) and
the figure, for which matplotlib is needed. Every number is a mean over seeds, with the
smallest and largest in brackets; ratios are taken seed by seed.
"""

import argparse
from collections.abc import Callable
import pathlib
import sys
import time

import numpy as np

from jaxrl_sched import comparison, config, simulate
from jaxrl_sched.comparison import Run

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from configs.papers import VARIANTS  # noqa: E402

Runs = dict[str, list[Run]]  # variant -> a run for each seed

# Panel of the figure -> variant -> what it is called there.
STAGES = {
  'SAGC': {
    'sagc_fixed16': '16 answers',
    'sagc_fixed8': '8 answers',
    'sagc_fixed4': '4 answers',
    'sagc': 'SAGC of 2 to 16',
    'sagc_4816': 'SAGC of 4 to 16',
  },
  'Snoozing': {
    'snooze_dapo': 'dynamic sampling',
    'snooze_5': '+ snoozing, 5 passes',
    'snooze_filter': '+ filtering for good',
  },
  'ASP': {
    'asp_static': 'static minibatches',
    'asp_sorted': 'sorted, cut, spread',
    'asp_refill_longest': 'refilled slots',
    'asp_lag_longest': '+ lag 1',
    'asp_window': '+ window of 16',
  },
  'DPPO': {
    'dppo_grpo': 'GRPO',
    'dppo_answers': 'answers, 0.5',
    'dppo_prompts': 'prompts, 0.5',
    'dppo': 'both, 0.5',
    'dppo_70': 'both, 0.7',
  },
  'All four': {
    'four_none': 'DAPO, 16 answers',
    'four_sync': 'SAGC, snoozing, DPPO',
    'four': '+ lag 1',
  },
}


def run(variant: str, seeds: int) -> list[Run]:
  began = time.perf_counter()
  c = config.read(f'{ROOT}/configs/papers.py:{variant}')
  costs = simulate.costs_of(c, None)
  found = [simulate.simulate(c | {'seed': seed}, costs) for seed in range(seeds)]
  print(f'{variant}: {time.perf_counter() - began:.0f} s', flush=True)
  return found


def spread(values: list[float], form: str = '.2f') -> str:
  mean, low, high = (f'{x:{form}}' for x in (np.mean(values), min(values), max(values)))
  return mean if low == high else f'{mean} [{low}, {high}]'


def ratio(runs: Runs, base: str, name: str, of: Callable[[Run], float]) -> str:
  """How many times less it takes than the base."""
  pairs = zip(runs[base], runs[name], strict=True)
  return spread([of(b) / of(r) for b, r in pairs])


def wall(one: Run) -> float:
  return one.row['wall']


def tokens(one: Run) -> float:
  return one.row['tokens']


def late_groups(one: Run) -> float:
  groups = one.book.column('rollout/groups_generated')
  return float(np.nansum(groups[len(groups) // 2 :]))


def per_group(one: Run) -> float:
  """Seconds a trained group."""
  return one.row['wall'] / one.row['groups']


def seconds_to(one: Run, rollouts: float) -> float:
  """Until so many had been generated."""
  made, seconds = (
    np.nancumsum(one.book.column(key))
    for key in ('rollout/answers_generated', 'time/step_s')
  )
  if rollouts > made[-1]:
    raise ValueError(f'{rollouts:g} rollouts are not reached: {made[-1]:g}')
  return float(np.interp(rollouts, made, seconds))


def at_equal_rollouts(runs: Runs, base: str, name: str) -> str:
  pairs = zip(runs[base], runs[name], strict=True)
  return spread([wall(b) / seconds_to(r, b.row['rollouts']) for b, r in pairs])


def percent(runs: Runs, name: str, key: str) -> str:
  return spread([100 * one.row[key] for one in runs[name]], '.1f') + ' %'


def hours(runs: Runs, name: str) -> str:
  return spread([wall(one) / 3600 for one in runs[name]], '.1f') + ' h'


def report(runs: Runs) -> str:
  """The table: what is claimed, and what was found."""

  def times(base, name, of=wall):
    return ratio(runs, base, name, of)

  def events(base, name):
    return f'{percent(runs, base, "events")} to {percent(runs, name, "events")}'

  rows = [
    ('SAGC: groups with a straggler', '99.6 to 43.4 %', events('sagc_fixed16', 'sagc')),
    ('the same, event of a step of 8 prompts', '', events('any_fixed16', 'any')),
    ('the same, sizes 4, 8, 16', '', events('sagc_fixed16', 'sagc_4816')),
    (
      'time at equal prompts',
      '29.5 h to 16.0 h: 1.84',
      f'{hours(runs, "sagc_fixed16")} to {hours(runs, "sagc")}: '
      + times('sagc_fixed16', 'sagc'),
    ),
    ('the same, sizes 4, 8, 16', '', times('sagc_fixed16', 'sagc_4816')),
    (
      'time at equal rollouts',
      '',
      at_equal_rollouts(runs, 'sagc_fixed16', 'sagc_rollouts'),
    ),
    (
      'Snoozing, factor 5: generated tokens',
      'up to 3',
      times('snooze_dapo', 'snooze_5', tokens),
    ),
    (
      'generated groups, last half',
      '',
      times('snooze_dapo', 'snooze_5', late_groups),
    ),
    ('time', '', times('snooze_dapo', 'snooze_5')),
    (
      'Filtering for good: generated tokens',
      'about 3',
      times('snooze_dapo', 'snooze_filter', tokens),
    ),
    ('ASP: all', 'up to 3.22', times('asp_static', 'asp_window')),
    (
      'static minibatches sorted, cut and spread',
      '1.12 (scheduling alone: -10.9 %)',
      times('asp_static', 'asp_sorted'),
    ),
    ('then refilled slots', '', times('asp_sorted', 'asp_refill_longest')),
    ('then lag 1', '', times('asp_refill_longest', 'asp_lag_longest')),
    ('then a window of 16, auto', '', times('asp_lag_longest', 'asp_window')),
    ('the same at lag 4', '', times('asp_lag4', 'asp_lag4_window')),
    (
      'all, against 16 GPUs that do both in turn',
      '',
      times('asp_colocated', 'asp_window'),
    ),
    ('DPPO, both rates 0.5', '2.37', times('dppo_grpo', 'dppo')),
    ('both rates 0.7', '', times('dppo_grpo', 'dppo_70')),
    ('answers alone, 0.5', '', times('dppo_grpo', 'dppo_answers')),
    ('prompts alone, 0.5', '', times('dppo_grpo', 'dppo_prompts')),
    ('All four: time', '', times('four_none', 'four')),
    ('time a trained group', '', times('four_none', 'four', per_group)),
    ('the same without a lag', '', times('four_none', 'four_sync', per_group)),
  ]
  lines = ['| | paper | here, in simulation |', '|---|---|---|']
  lines += ['| ' + ' | '.join(row) + ' |' for row in rows]
  return '\n'.join(lines) + '\n'


def draw(runs: Runs, file: pathlib.Path) -> None:
  """Hours of each variant, and what the engines did in them."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(
    1, len(STAGES), figsize=(17, 3.2), layout='constrained'
  )
  for axis, (title, stages) in zip(axes, STAGES.items(), strict=True):
    left = np.zeros(len(stages))
    total = np.array([np.mean([wall(r) for r in runs[v]]) / 3600 for v in stages])
    idle = {
      key: np.array([np.mean([r.row[key] for r in runs[v]]) for v in stages])
      for key in ('padding', 'skew', 'ordering')
    }
    parts = {'at work, loading': 1 - sum(idle.values())} | idle
    for (label, share), colour in zip(
      parts.items(), ('C0', 'C1', 'C3', '0.75'), strict=True
    ):
      axis.barh(
        list(stages.values()), share * total, left=left, color=colour, label=label
      )
      left = left + share * total
    axis.invert_yaxis()
    axis.set(title=title, xlabel='hours')
  handles, labels = axes[0].get_legend_handles_labels()
  figure.legend(handles, labels, ncols=4, loc='outside lower center', frameon=False)
  figure.savefig(file, dpi=120)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('out', type=pathlib.Path)
  parser.add_argument('--seeds', type=int, default=3)
  parser.add_argument(
    '--figure', type=pathlib.Path, default=ROOT / 'configs' / 'papers.png'
  )
  arguments = parser.parse_args()
  runs = {variant: run(variant, arguments.seeds) for variant in VARIANTS}
  comparison.write(arguments.out / 'runs', 'papers.py', runs)
  text = report(runs)
  (arguments.out / 'papers.md').write_text(text)
  print(text)
  draw(runs, arguments.figure)
  return 0


if __name__ == '__main__':
  sys.exit(main())
