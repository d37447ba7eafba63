"""Does it learn as well one and two steps behind, and who waits for whom?

    python tests/bench/asynchronous.py OUT [--figure=configs/asynchronous.png]

Runs configs/asynchronous.py on eight CPU devices: without a lag, with lag 1, with lag 2
and with four sampling engines. Prints the README's table; exits 1 where a run misses
0.90 or its lag. For the figure matplotlib is needed.
"""

import argparse
import os
import pathlib
import subprocess
import sys

from learning import held_out
import numpy as np

from jaxrl_sched.metrics import read_jsonl

ROOT = pathlib.Path(__file__).parents[2]
GOAL = 0.90
LAGS = {'sync': 0, 'h1': 1, 'h2': 2, 'engines': 1}
LABELS = {
  'sync': 'no lag (sync)',
  'h1': 'lag 1 (h1)',
  'h2': 'lag 2 (h2)',
  'engines': 'lag 1, four engines',
}
STYLES = {'sync': 'o-', 'h1': 's-', 'h2': '^:', 'engines': 'x:'}
COLOURS = {'generate': '#4878a8', 'learn': '#d97b3f', 'evaluate': '#bbbbbb'}
SHOWN = (21, 25)  # bundles of the timeline, between two evaluations


def run(variant: str, workdir: pathlib.Path) -> None:
  subprocess.run(
    [sys.executable, '-m', 'jaxrl_sched.train', f'--workdir={workdir}']
    + [f'--config=configs/asynchronous.py:{variant}'],
    cwd=ROOT,
    env=os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '8'},
    check=True,
  )


def row(variant: str, workdir: pathlib.Path) -> tuple[str, bool]:
  """A row of the table, and whether goal and lag were met."""
  curve = held_out(workdir)
  metrics = read_jsonl(workdir / 'metrics.jsonl')[:-1]
  reached = [step for step, score in curve.items() if score >= GOAL]
  lags = [m['lag/max'] for m in metrics]
  right = lags == [min(step, LAGS[variant]) for step in range(len(lags))]
  seconds = {
    key: float(np.median([m[f'time/{key}'] for m in metrics]))
    for key in ('step_s', 'generate_s', 'learn_s', 'idle_s/sampler', 'idle_s/learner')
  }
  cells = [
    f'`{variant}`',
    f'{curve[max(curve)]:.3f}',
    str(reached[0]) if reached else 'never',
    f'{max(lags)}',
    *(f'{value:.2f}' for value in seconds.values()),
    f'{np.mean([m["mismatch/tis_mean"] for m in metrics]):.4f}',
  ]
  return f'| {" | ".join(cells)} |', bool(reached) and right


def draw(workdirs: dict[str, pathlib.Path], file: pathlib.Path) -> None:
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure = pyplot.figure(figsize=(11, 4), layout='constrained')
  panels = figure.subplot_mosaic([['left', 'a'], ['left', 'b']], width_ratios=(1, 1.5))
  left, rights = panels['left'], (panels['a'], panels['b'])
  rights[0].sharex(rights[1])
  for variant, workdir in workdirs.items():
    curve = held_out(workdir)
    how = dict(zip(('marker', 'linestyle'), STYLES[variant], strict=True))
    left.plot(list(curve), list(curve.values()), label=LABELS[variant], **how)
  left.axhline(GOAL, color='grey', linewidth=0.8, linestyle='--')
  left.set(xlabel='step', ylabel='held-out pass rate', ylim=(0, 1))
  left.legend(loc='lower right', frameon=False)
  left.grid(alpha=0.3)
  for axes, variant in zip(rights, ('sync', 'h1'), strict=True):
    timeline(axes, read_jsonl(workdirs[variant] / 'timeline.jsonl'))
    what = f'{LABELS[variant]}: bundles {SHOWN[0]} to {SHOWN[1] - 1}'
    axes.set_title(what, fontsize=10, loc='left')
  figure.savefig(file, dpi=150)


def timeline(axes, spans) -> None:
  """Bars of the shown bundles, one lane below the other, in seconds."""
  shown = [s for s in spans if SHOWN[0] <= s['bundle'] < SHOWN[1]]
  zero = min(s['begin'] for s in shown)
  lanes = ['learner', *sorted({s['lane'] for s in shown} - {'learner'}, reverse=True)]
  for s in shown:
    y, width = lanes.index(s['lane']), s['end'] - s['begin']
    axes.barh(
      y,
      width,
      left=s['begin'] - zero,
      height=0.6,
      color=COLOURS[s['what']],
      edgecolor='w',
    )
    middle = s['begin'] - zero + width / 2
    axes.text(middle, y, s['bundle'], ha='center', va='center', fontsize=8, color='w')
  axes.set_yticks(range(len(lanes)), lanes)
  axes.set_xlabel('seconds')
  axes.spines[['top', 'right']].set_visible(False)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('out', type=pathlib.Path)
  parser.add_argument('--figure', type=pathlib.Path)
  arguments = parser.parse_args()
  workdirs = {variant: (arguments.out / variant).resolve() for variant in LAGS}
  for variant, workdir in workdirs.items():
    run(variant, workdir)
  print(
    '| variant | held-out | 0.90 at step | largest lag | seconds a step | generate '
    '| learn | sampler idle | learner idle | mean importance weight |'
  )
  print('|---' * 10 + '|')
  good = True
  for variant, workdir in workdirs.items():
    text, met = row(variant, workdir)
    print(text)
    good &= met
  if arguments.figure:
    draw(workdirs, arguments.figure)
  return 0 if good else 1


if __name__ == '__main__':
  sys.exit(main())
