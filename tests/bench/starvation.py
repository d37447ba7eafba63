"""Does a dataset starve when what is solved is filtered for good? The figure of it.

    python tests/bench/starvation.py OUT [--figure=configs/starvation.png]

Two datasets of equal weight and different difficulty, made of configs/ablation.py: half
of `sums` are long rows, which stay hard, and one in 24 of `last_digits`. (a) filters
what is solved for good and fills the batch with whatever is left; (b) filters too, and
keeps the quotas; (c) keeps them, and lets what is solved sleep for five passes. After
AI21's post on snoozing (2026). The figure, for which matplotlib is needed, shows whose
groups the batches are made of: faint lines single steps, bold means of 5. What is
complete in OUT is not run again.
"""

import argparse
import pathlib
import subprocess
import sys

from gains import complete
import numpy as np

from jaxrl_sched.metrics import read_jsonl

ROOT = pathlib.Path(__file__).parents[2]
OVER = 5  # steps that a point of the figure is the mean of
EVERY = {'sums': 2, 'last_digits': 24}  # one row in so many is long
RUNS = {  # title -> folder, variant, settings
  '(a) filtered for good, no quotas': (
    'filtering',
    'filtering',
    ['--config.scheduler.quotas=False'],
  ),
  '(b) filtered for good, quotas': ('filtering_quotas', 'filtering', []),
  '(c) snoozed for 5 passes, quotas': ('snoozing', 'snoozing', []),
}


def train(variant: str, workdir: pathlib.Path, settings: list[str], steps: int) -> None:
  if complete(workdir, steps):
    return
  command = [sys.executable, '-m', 'jaxrl_sched.train', f'--workdir={workdir}']
  command += [f'--config=configs/ablation.py:{variant}', '--config.evaluate=None']
  command += [f'--config.steps={steps}', '--config.scheduler.max_rounds=8', *settings]
  for name, every in EVERY.items():
    command.append(f'--config.prompts.datasets.{name}.options.every={every}')
  subprocess.run(command, cwd=ROOT, check=True)


def shares(workdir: pathlib.Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """Steps that trained on something, and by dataset its share of them."""
  lines = [x for x in read_jsonl(workdir / 'metrics.jsonl') if f'share/{first()}' in x]
  found = {name: np.array([line[f'share/{name}'] for line in lines]) for name in EVERY}
  return np.array([line['step'] for line in lines]), found


def first() -> str:
  return next(iter(EVERY))


def draw(workdirs: dict[str, pathlib.Path], file: pathlib.Path) -> None:
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(
    1, len(workdirs), figsize=(13, 3.2), sharey=True, layout='constrained'
  )
  for axis, (title, workdir) in zip(axes, workdirs.items(), strict=True):
    steps, by_name = shares(workdir)
    for i, (name, every) in enumerate(EVERY.items()):
      share, label = by_name[name], f'{name} (1 in {every} stays hard)'
      axis.plot(steps, share, color=f'C{i}', alpha=0.25, linewidth=0.8)
      mean = np.convolve(share, np.ones(OVER) / OVER, 'valid')
      axis.plot(steps[OVER - 1 :], mean, color=f'C{i}', label=label)
    axis.axhline(1 / len(EVERY), color='grey', linewidth=0.8, linestyle='--')
    axis.set(title=title, xlabel='step', ylim=(0, 1))
    axis.grid(alpha=0.3)
  axes[0].set_ylabel('share of the batch')
  axes[-1].legend(loc='upper right', frameon=False)
  figure.savefig(file, dpi=150)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('out', type=pathlib.Path)
  parser.add_argument('--steps', type=int, default=60)
  parser.add_argument(
    '--figure', type=pathlib.Path, default=ROOT / 'configs' / 'starvation.png'
  )
  arguments = parser.parse_args()
  workdirs = {}
  for title, (folder, variant, settings) in RUNS.items():
    workdirs[title] = arguments.out.resolve() / folder
    train(variant, workdirs[title], settings, arguments.steps)
    steps, by_name = shares(workdirs[title])
    late = steps >= arguments.steps // 2
    told = ', '.join(f'{name} {by_name[name][late].mean():.2f}' for name in EVERY)
    print(f'{title}: share of the batch over the last half: {told}')
  draw(workdirs, arguments.figure)
  return 0


if __name__ == '__main__':
  sys.exit(main())
