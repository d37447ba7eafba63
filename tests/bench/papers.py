"""What the papers report, and what the same methods do here, on the simulated clock.

    python tests/bench/papers.py OUT [--seeds=3] [--processes=2] [--figure=FILE.png]

Runs the variants of configs/papers.py that are compared, in about four minutes on two
cores, and writes OUT/papers.md (README's table and caption), OUT/runs/ (all the numbers:
see `python -m jaxrl_sched.simulate`) and the figure, for which matplotlib is needed. OUT
is a new folder. Every number is a mean over seeds, with the smallest and largest in
brackets; ratios are taken seed by seed.
"""

import argparse
from collections.abc import Callable
import concurrent.futures
import multiprocessing
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

CAPTION = """\
![hours of each variant, and what the engines did in them](configs/papers.png)

Simulated hours of the same number of steps, means of the seeds. *At work*: answers are
decoded, prompts read, weights loaded. *Padding*: slots stand empty beside others of the
same engine that are at work. *Skew*: an engine has done its share and waits for another.
*Ordering*: all engines wait, for the learner or for the next bundle."""
MEANINGS = {
  'at work': 'decode, prefill, load',
  'padding': 'slots empty beside\nothers at work',
  'skew': 'wait for another engine',
  'ordering': 'all wait, for the\nlearner or the next bundle',
}

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
    'snooze_growing': '+ snoozing, 5 to 32',
    'snooze_filter': '+ filtering for good',
  },
  'ASP': {
    'asp_static': 'static minibatches',
    'asp_sorted': 'sorted, cut, spread',
    'asp_refill_longest': 'refilled slots',
    'asp_lag_longest': '+ lag 1',
    'asp_window': '+ window of 16',
    'asp_lag4': 'lag 4',
    'asp_lag4_window': 'lag 4, window of 16',
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


def run(variant: str, seed: int) -> Run:
  began = time.perf_counter()
  c = config.read(f'{ROOT}/configs/papers.py:{variant}')
  found = simulate.simulate(c | {'seed': seed}, simulate.costs_of(c, None))
  took = time.perf_counter() - began
  print(f'{variant}, seed {seed}: {took:.0f} s', flush=True)
  return found


def run_all(variants: list[str], seeds: int, processes: int) -> Runs:
  pairs = [(variant, seed) for variant in variants for seed in range(seeds)]
  context = multiprocessing.get_context('spawn')  # jax has threads
  with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
    every = dict(zip(pairs, pool.map(run, *zip(*pairs, strict=True)), strict=True))
  return {v: [every[v, seed] for seed in range(seeds)] for v in variants}


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


# What is found of (runs, base, variant).


def wall_ratio(runs: Runs, base: str, name: str) -> str:
  return ratio(runs, base, name, wall)


def token_ratio(runs: Runs, base: str, name: str) -> str:
  return ratio(runs, base, name, tokens)


def late_ratio(runs: Runs, base: str, name: str) -> str:
  return ratio(runs, base, name, late_groups)


def group_ratio(runs: Runs, base: str, name: str) -> str:
  return ratio(runs, base, name, per_group)


def both_events(runs: Runs, base: str, name: str) -> str:
  return f'{percent(runs, base, "events")} to {percent(runs, name, "events")}'


def both_times(runs: Runs, base: str, name: str) -> str:
  found = f'{hours(runs, base)} to {hours(runs, name)}'
  return f'{found}: {wall_ratio(runs, base, name)}'


# README's table: what, the two that are compared, what the paper says, what is found.
ROWS = (
  (
    'SAGC: groups with a straggler',
    'sagc_fixed16',
    'sagc',
    '99.6 to 43.4 %',
    both_events,
  ),
  ('the same, event of a step of 8 prompts', 'any_fixed16', 'any', '', both_events),
  ('the same, sizes 4, 8, 16', 'sagc_fixed16', 'sagc_4816', '', both_events),
  (
    'time at equal prompts',
    'sagc_fixed16',
    'sagc',
    '29.5 h to 16.0 h: 1.84',
    both_times,
  ),
  ('the same, sizes 4, 8, 16', 'sagc_fixed16', 'sagc_4816', '', wall_ratio),
  ('time at equal rollouts', 'sagc_fixed16', 'sagc_rollouts', '', at_equal_rollouts),
  (
    'Snoozing, factor 5: generated tokens',
    *('snooze_dapo', 'snooze_5', 'up to 3', token_ratio),
  ),
  ('generated groups, last half', 'snooze_dapo', 'snooze_5', '', late_ratio),
  ('time', 'snooze_dapo', 'snooze_5', '', wall_ratio),
  (
    'Snoozes that grow, 5, 10, 20, 32: tokens',
    *('snooze_dapo', 'snooze_growing', '', token_ratio),
  ),
  ('where some never settle, factor 5', 'stubborn_dapo', 'stubborn_5', '', token_ratio),
  ('the same, growing', 'stubborn_dapo', 'stubborn_growing', '', token_ratio),
  (
    'Filtering for good: generated tokens',
    *('snooze_dapo', 'snooze_filter', 'about 3', token_ratio),
  ),
  ('ASP: all', 'asp_static', 'asp_window', 'up to 3.22', wall_ratio),
  (
    'static minibatches sorted, cut and spread',
    *('asp_static', 'asp_sorted', '1.12 (scheduling alone: -10.9 %)', wall_ratio),
  ),
  ('then refilled slots', 'asp_sorted', 'asp_refill_longest', '', wall_ratio),
  ('then lag 1', 'asp_refill_longest', 'asp_lag_longest', '', wall_ratio),
  ('then a window of 16, `auto`', 'asp_lag_longest', 'asp_window', '', wall_ratio),
  ('the same at lag 4', 'asp_lag4', 'asp_lag4_window', '', wall_ratio),
  (
    'all, against 16 GPUs that sample, then learn',
    *('asp_colocated', 'asp_window', '', wall_ratio),
  ),
  ('DPPO, both rates 0.5', 'dppo_grpo', 'dppo', '2.37', wall_ratio),
  ('both rates 0.7', 'dppo_grpo', 'dppo_70', '', wall_ratio),
  ('answers alone, 0.5', 'dppo_grpo', 'dppo_answers', '', wall_ratio),
  ('prompts alone, 0.5', 'dppo_grpo', 'dppo_prompts', '', wall_ratio),
  ('All four: time', 'four_none', 'four', '', wall_ratio),
  ('time a trained group', 'four_none', 'four', '', group_ratio),
  ('the same without a lag', 'four_none', 'four_sync', '', group_ratio),
)


def compared() -> list[str]:
  """The variants that the table or the figure speaks of."""
  found = {name for _, base, other, *_ in ROWS for name in (base, other)}
  found |= {name for stages in STAGES.values() for name in stages}
  return [name for name in VARIANTS if name in found]


def report(runs: Runs) -> str:
  """The table, and the figure's caption, as README has them."""
  lines = ['| | paper | here, in simulation | variants |', '|---|---|---|---|']
  for what, base, name, claimed, of in ROWS:
    found = of(runs, base, name)
    lines.append(f'| {what} | {claimed} | {found} | `{base}` / `{name}` |')
  return '\n'.join([*lines, '', CAPTION, ''])


def draw(runs: Runs, file: pathlib.Path) -> None:
  """Hours of each variant, and what the engines did in them."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  pyplot.rcParams['font.size'] = 13
  figure, axes = pyplot.subplots(2, 3, figsize=(15, 7.5), layout='constrained')
  *panels, last = axes.flat
  for axis, (title, stages) in zip(panels, STAGES.items(), strict=True):
    left = np.zeros(len(stages))
    total = np.array([np.mean([wall(r) for r in runs[v]]) / 3600 for v in stages])
    idle = {
      key: np.array([np.mean([r.row[key] for r in runs[v]]) for v in stages])
      for key in ('padding', 'skew', 'ordering')
    }
    parts = {'at work': 1 - sum(idle.values())} | idle
    for (label, share), colour in zip(
      parts.items(), ('C0', 'C1', 'C3', '0.75'), strict=True
    ):
      axis.barh(
        list(stages.values()), share * total, left=left, color=colour, label=label
      )
      left = left + share * total
    axis.invert_yaxis()
    axis.set(title=title, xlabel='hours')
  handles, labels = panels[0].get_legend_handles_labels()
  last.axis('off')
  last.legend(
    handles,
    [f'{label}: {MEANINGS[label]}' for label in labels],
    loc='center left',
    frameon=False,
    title='What the engines do',
    title_fontsize='large',
    labelspacing=1.0,
    alignment='left',
  )
  figure.savefig(file, dpi=100)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('out', type=pathlib.Path)
  parser.add_argument('--seeds', type=int, default=3)
  parser.add_argument('--processes', type=int, default=2)
  parser.add_argument('--figure', type=pathlib.Path, help='where to draw it')
  arguments = parser.parse_args()
  try:
    comparison.make_new(arguments.out)
  except ValueError as error:
    parser.error(str(error))
  runs = run_all(compared(), arguments.seeds, arguments.processes)
  notes = [f'{arguments.seeds} seeds', 'Costs and answers: see configs/papers.py']
  comparison.write(arguments.out / 'runs', 'papers.py', runs, notes)
  text = report(runs)
  (arguments.out / 'papers.md').write_text(text)
  print(text)
  if arguments.figure is not None:
    draw(runs, arguments.figure)
  return 0


if __name__ == '__main__':
  sys.exit(main())
