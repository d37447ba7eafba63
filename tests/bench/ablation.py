"""What does each method gain, at equal generated tokens and at equal wall-clock?

    python tests/bench/ablation.py OUT [--seeds=3] [--variants=dapo,snoozing] [--check]

Runs configs/ablation.py as OUT/VARIANT/seed<k>; what is complete is not run again, what
was cut goes on. Then writes OUT/table.md and OUT/figure.png (which needs matplotlib) of
all that is complete there. `--check` says for each goal whether it is reached. Ends with
1 only where a run failed: goals are reported, not bent.

Every number is a mean over seeds, with the smallest and largest in brackets.
"""

import argparse
import pathlib
import subprocess
import sys

from gains import Run, X, complete, gain, read
import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
# The config says what a straggler is, for all variants.
from configs.ablation import SAGC, VARIANTS  # noqa: E402

BASE, GOAL = 'dapo', 0.90
OVER = 5  # steps that a point of the figure's bottom row is the mean of
EVENT = f'groups with an answer above {SAGC["tau"]:g} medians'  # stragglers
Runs = dict[str, dict[int, Run]]  # variant -> seed -> run

# --- running ----------------------------------------------------------------------


def train(variant: str, workdir: pathlib.Path, seed: int) -> bool:
  """Whether the run is complete now."""
  if complete(workdir):
    return True
  command = [sys.executable, '-m', 'jaxrl_sched.train']
  command += [f'--config=configs/ablation.py:{variant}', f'--workdir={workdir}']
  print(f'== {variant}, seed {seed}', flush=True)
  return subprocess.run([*command, f'--config.seed={seed}'], cwd=ROOT).returncode == 0


# --- what is told -----------------------------------------------------------------


def spread(values: list[float | None], digits: int = 2) -> str:
  """Mean and range; how many never got there."""
  there = [v for v in values if v is not None]
  if not values:
    return f'no seed of {BASE}'
  if not there:
    return 'not reached'
  text = f'{np.mean(there):,.{digits}f} [{min(there):,.{digits}f}, '
  text += f'{max(there):,.{digits}f}]'
  missing = len(values) - len(there)
  return text + (f', {missing} of {len(values)} not reached' if missing else '')


def table(head: list[str], rows: dict[str, list[str]]) -> str:
  lines = ['| variant | ' + ' | '.join(head) + ' |', '|---' * (len(head) + 1) + '|']
  return '\n'.join(
    lines + [f'| {n} | ' + ' | '.join(row) + ' |' for n, row in rows.items()]
  )


def report(runs: Runs) -> str:
  def of(select, digits=2):
    return {n: spread([select(r) for r in s.values()], digits) for n, s in runs.items()}

  def columns(found: dict[str, dict[str, str]]) -> str:
    return table(list(found), {n: [f[n] for f in found.values()] for n in runs})

  datasets = next(iter(next(iter(runs.values())).values())).shares
  cost = {
    f'generated tokens to {GOAL:.2f}': of(lambda r: r.reached(GOAL, r.tokens), 0),
    'trained tokens': of(lambda r: r.reached(GOAL, r.trained), 0),
    'seconds': of(lambda r: r.reached(GOAL, r.seconds), 1),
    'final score': of(lambda r: r.score[-1], 3),
    'generated tokens in all': of(lambda r: r.tokens[-1], 0),
    'seconds in all': of(lambda r: r.seconds[-1], 1),
    'evaluating': of(lambda r: r.apart['evaluating'], 1),
    'compiling': of(lambda r: r.apart['compiling'], 1),
  }
  sampled = {
    'rollouts a step': of(lambda r: r.answers['generated'] / len(r.groups), 0),
    'groups a step, last half': of(lambda r: r.late_groups(), 0),
    f'share of {EVENT}': of(lambda r: r.event_rate(), 3),
    'the same, last half': of(lambda r: r.event_rate(late=True), 3),
    'trained / generated answers': of(
      lambda r: r.answers['trained'] / r.answers['generated'], 3
    ),
    'trained / accepted': of(lambda r: r.answers['trained'] / r.answers['accepted'], 3),
  }
  sampled |= {f'share of {d}': of(lambda r, d=d: r.shares[d], 2) for d in datasets}
  parts = [
    f'Mean [smallest, largest] of {max(map(len, runs.values()))} seeds.',
    f'To {GOAL:.2f} held-out; seconds are without evaluating, saving and compiling.',
    columns(cost),
    "What was sampled. Medians are of the group's answers, in tokens.",
    columns(sampled),
  ]
  if BASE in runs:
    parts += [
      f'Gain over {BASE}: how many times cheaper nine tenths of its way are; the '
      'difference of scores at its budget.',
      gains(runs),
    ]
  return '\n\n'.join(parts) + '\n'


def gains(runs: Runs) -> str:
  rows = {}
  for name, seeds in runs.items():
    row = []
    for axis in ('tokens', 'seconds'):
      pairs = [
        gain((getattr(b, axis), b.score), (getattr(r, axis), r.score))
        for seed, r in seeds.items()
        if (b := runs[BASE].get(seed)) is not None
      ]
      row += [spread([p[0] for p in pairs]), spread([p[1] for p in pairs], 3)]
    row.append(
      spread([r.answers['generated'] / len(r.groups) for r in seeds.values()], 0)
    )
    rows[name] = row
  return table(
    [
      'at equal generated tokens: times',
      'difference',
      'at equal wall-clock: times',
      'difference',
      'rollouts a step',
    ],
    rows,
  )


def check(runs: Runs) -> list[str]:
  """Each goal of the project, and what was found."""

  def mean(name, select):
    found = [select(run) for run in runs[name].values()]
    return None if None in found else float(np.mean(found))

  def say(what, names, value, limit, note=''):
    missing = [n for n in names if n not in runs]
    if missing:
      return f'not run: {what}: {", ".join(missing)}'
    found, more = value(), note and f'; {note()}'
    if found is None:
      return f'MISSED: {what}: {GOAL:.2f} was not reached under every seed{more}'
    met = 'reached' if found <= limit else 'MISSED'
    return f'{met}: {what}: {found:.3f}, at most {limit:.3f}{more}'

  def ratio(name, select):
    ours, base = mean(name, select), mean(BASE, select)
    return None if ours is None or base is None else ours / base

  def final(name):
    return abs(mean(name, lambda r: r.score[-1]) - mean(BASE, lambda r: r.score[-1]))

  def apart():
    """The largest difference in score at the same step, of means over seeds."""
    ours, base = ([r.score for r in runs[n].values()] for n in ('dppo_answers', BASE))
    return float(np.abs(np.mean(ours, axis=0) - np.mean(base, axis=0)).max())

  delta = SAGC['delta']
  late = mean('sagc', lambda r: r.event_rate(late=True)) if 'sagc' in runs else None
  sized = [n for n in ('fixed4', 'snoozing', 'fixed16') if n in runs]
  fixed = ', '.join(f'{n} {mean(n, Run.event_rate):.3f}' for n in sized)
  return [
    say(
      "snoozing's groups over dapo's, last half",
      ('snoozing', BASE),
      lambda: ratio('snoozing', Run.late_groups),
      1 / 2.5,
    ),
    say(
      'snoozing: difference of final scores',
      ('snoozing', BASE),
      lambda: final('snoozing'),
      0.01,
    ),
    say(
      f'sagc: share of {EVENT}: distance from {delta}',
      ('sagc',),
      lambda: abs(mean('sagc', Run.event_rate) - delta),
      0.05,
      lambda: f'over the last half {abs(late - delta):.3f}; fixed sizes: {fixed}',
    ),
    say(
      'dppo_answers: trained of accepted answers',
      ('dppo_answers',),
      lambda: mean(
        'dppo_answers', lambda r: r.answers['trained'] / r.answers['accepted']
      ),
      0.65,
    ),
    say(
      'dppo_answers: largest difference of scores at a step',
      ('dppo_answers', BASE),
      apart,
      0.02,
    ),
    say(
      f"all: seconds to {GOAL:.2f} over dapo's",
      ('all', BASE),
      lambda: ratio('all', lambda r: r.reached(GOAL, r.seconds)),
      1 / 3,
    ),
  ]


def draw(runs: Runs, file: pathlib.Path) -> None:
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(2, 3, figsize=(16, 9))
  for place, (name, seeds) in enumerate(runs.items()):
    style = dict(color=f'C{place % 10}', linestyle='-' if place < 10 else '--')
    found, score = list(seeds.values()), np.mean([r.score for r in seeds.values()], 0)
    for axis, x in (
      (axes[0, 0], [r.tokens / 1e6 for r in found]),
      (axes[0, 1], [r.seconds for r in found]),
      (axes[0, 2], [r.trained / 1e6 for r in found]),
    ):
      axis.plot(np.mean(x, axis=0), score, label=name, linewidth=1.4, **style)
    for axis, y in (
      (axes[1, 0], [r.groups for r in found]),
      (axes[1, 1], [r.size for r in found]),
      (axes[1, 2], [r.event_curve() for r in found]),
    ):
      mean = running_mean(np.ma.masked_invalid(y).mean(axis=0).filled(np.nan))
      axis.plot(mean, linewidth=1.4, **style)
  for axis, x in zip(
    axes[0],
    ('million tokens generated', 'seconds (see table.md)', 'million tokens trained on'),
    strict=True,
  ):
    axis.axhline(GOAL, color='grey', linewidth=0.8, linestyle=':')
    # What comes before is the same for all: solving the short rows.
    axis.set(xlabel=x, ylabel='held-out pass rate', ylim=(0.8, None))
  axes[1, 0].set(xlabel='step', yscale='log')
  axes[1, 0].set_ylabel('groups generated a step (log scale)')
  axes[1, 1].set(xlabel='step', ylabel='answers a generated group', ylim=(0, None))
  axes[1, 2].axhline(SAGC['delta'], color='grey', linewidth=0.8, linestyle=':')
  axes[1, 2].set(xlabel='step', ylabel=f'share of {EVENT}')
  for axis in axes.flat:
    axis.grid(alpha=0.3)
  handles, labels = axes[0, 0].get_legend_handles_labels()
  figure.legend(handles, labels, ncols=11, loc='lower center', frameon=False)
  note = f'bottom row: means over the {OVER} steps up to each'
  figure.text(0.99, 0.04, note, ha='right', color='grey')
  figure.tight_layout(rect=(0, 0.06, 1, 1))
  figure.savefig(file, dpi=120)


def running_mean(y: X, over: int = OVER) -> X:
  """Of the `over` steps up to each, as far as there are numbers."""
  return np.array(
    [np.ma.masked_invalid(y[max(i - over, 0) : i]).mean() for i in range(1, len(y) + 1)]
  )


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('out', type=pathlib.Path)
  parser.add_argument('--seeds', type=int, default=3)
  parser.add_argument('--variants', default=','.join(VARIANTS))
  parser.add_argument('--check', action='store_true', help='also judge the goals')
  arguments = parser.parse_args()
  variants = arguments.variants.split(',')
  if unknown := sorted(set(variants) - set(VARIANTS)):
    parser.error(f'--variants: {unknown}, expected some of {list(VARIANTS)}')
  folder = {
    # Seeds outermost: what else the machine does then falls on all variants.
    (variant, seed): arguments.out.resolve() / variant / f'seed{seed}'
    for seed in range(arguments.seeds)
    for variant in variants
  }
  failed = [key for key, at in folder.items() if not train(key[0], at, key[1])]
  runs: Runs = {}
  for variant in VARIANTS:
    for seed in range(arguments.seeds):
      workdir = arguments.out / variant / f'seed{seed}'
      if complete(workdir):
        runs.setdefault(variant, {})[seed] = read(workdir, SAGC['tau'])
  if runs:
    text = report(runs)
    (arguments.out / 'table.md').write_text(text)
    print(text)
    draw(runs, arguments.out / 'figure.png')
  if arguments.check:
    print('\n'.join(check(runs)))
  for variant, seed in failed:
    print(f'failed: {variant}, seed {seed}', file=sys.stderr)
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main())
