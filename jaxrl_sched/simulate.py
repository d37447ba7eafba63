"""What would this config cost? Its loop and its controllers, on a simulated clock.

    python -m jaxrl_sched.simulate --config=FILE.py[:ARG] [--steps=N]
      [--costs=WORKDIR [--costs-steps=A:B]] [--trace=rollouts.jsonl]
      [--sweep asp.lag=0,1,2] [--seeds=N] [--out=DIR]

No chip and no weights: answers are lengths and verdicts, of the config's
`simulate.workload` or of a recorded run (--trace), and take the time that
`simulate.costs` says or that fits a run of yours (--costs). Who is asked, filtered,
pruned, and put on which engine is decided by the very code that trains.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import itertools
import json
import pathlib
import shutil
import sys
from typing import Any

import numpy as np

from jaxrl_sched import comparison, loop, settings
from jaxrl_sched.comparison import Run
from jaxrl_sched.sim import costs as costs_lib
from jaxrl_sched.sim import summary
from jaxrl_sched.sim.costs import Costs
from jaxrl_sched.sim.engine import SimEngine
from jaxrl_sched.sim.trace import Trace
from jaxrl_sched.sim.workload import Dataset, Workload
from jaxrl_sched.types import Sampling

EPILOG = """\
Any setting can be overridden: --config.asp.engines=8. --sweep runs a setting with each
of several values (--sweep sagc.delta=0.2,0.4,0.6); several of them, all combinations.
--out receives table.md, simulate.html and metrics.jsonl of every run. Bad input ends
with 2 and one line.
"""


def simulate(
  c: dict[str, Any],
  costs: Costs,
  trace: pathlib.Path | None = None,
  book: summary.Book | None = None,
) -> Run:
  """Runs a checked config from its first step to its last.

  Args:
    trace: the rollouts.jsonl of a run, whose answers are given again.
    book: is told what the loop records. None: one of its own.

  Raises:
    ValueError: something is wrong with the config, or the trace does not go with it.
  """
  # Not above: jax comes with it.
  from jaxrl_sched import checks, config, controllers

  blocks = c['simulate']['workload']
  if blocks is None:
    opened = config.prepare(c)
    prompts, sampling = opened.prompts, opened.sampling
    scheduler = opened.scheduler
    workload = _default(prompts.sizes, sampling.max_new_tokens, c['seed'])
  else:
    checks.check_numbers(c)
    sampling = Sampling(**c['sampling'])
    workload = Workload(datasets(blocks), seed=c['seed'])
    prompts = workload.prompts
    scheduler = controllers.make_scheduler(c, prompts, sampling)
  answering = workload
  if trace is not None:
    answering = Trace(trace, prompts, limit=sampling.max_new_tokens, seed=c['seed'])
  engine = SimEngine(
    answering,
    costs,
    slots=c['sampler']['slots'],
    chunk=c['sampler']['chunk'],
    overlong_filter=c['loss']['overlong_filter'],
    overlong=c['overlong'],
    kl_coef=c['loss']['kl_coef'],
    share_prompt=c['learner']['share_prompt'],
    **(_packing(c['learner']) if costs.learn_batch else {}),
  )
  if book is None:
    book = summary.Book(tau=2.0 if c['sagc'] is None else c['sagc']['tau'])
  steps = c['steps']
  loop.train(
    engine,
    scheduler,
    book,
    steps=steps,
    save_every=steps,
    evaluate_every=steps,
    evaluate=None,
    compare_every=steps,
  )
  row = summary.summarise(book, engine.totals())
  if trace is None:
    rates = [workload.pass_rates(name) for name in prompts.sizes]
    row['pass_rate'] = float(np.concatenate(rates).mean())
  else:
    row['recorded'] = answering.recorded / (answering.recorded + answering.drawn)
  return Run(book=book, row=row)


def _packing(learner: dict[str, Any]) -> dict[str, Any]:
  """Rows are only put together where they cost something."""
  return {key: learner[key] for key in ('rows', 'row_tokens', 'window')}


def _default(sizes: dict[str, int], limit: int, seed: int) -> Workload:
  """Answers to prompts of which nothing is known."""
  median = max(1.0, limit / 4)
  return Workload(
    {name: Dataset(count=size, median=median) for name, size in sizes.items()},
    seed=seed,
  )


def datasets(blocks: dict[str, Any]) -> dict[str, Dataset]:
  return {
    name: Dataset(
      **settings.keywords(f'config.simulate.workload.{name}', block, Dataset)
    )
    for name, block in sorted(blocks.items())
  }


def costs_of(c: dict[str, Any], fitted: Costs | None) -> Costs:
  """Those fitted, or else the config's."""
  if fitted is not None:
    return fitted
  block = c['simulate']['costs']
  if block is None:
    raise ValueError(
      'config.simulate.costs: None, expected a block of seconds, or --costs=WORKDIR to '
      'fit them to a run'
    )
  return Costs(**settings.keywords('config.simulate.costs', block, Costs))


def fit(workdir: pathlib.Path, steps: range | None = None) -> Costs:
  """Costs under which a run takes what it took. `steps`: only these; None: all."""
  from jaxrl_sched import config

  # The lengths of its prompts are in no record: they are opened once more.
  c = settings.of_workdir(workdir)
  if c is None:
    raise ValueError(f'--costs={workdir}: no config.json there, expected a run')
  prompts = config.prepare(config.check(c)).prompts
  return costs_lib.fit(costs_lib.read_run(workdir, prompts=prompts, steps=steps))


# --- settings -------------------------------------------------------------------------


def steps_between(text: str) -> range:
  """'100:200' is from step 100 up to and without step 200."""
  first, colon, end = text.partition(':')
  if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
    raise ValueError(f'--costs-steps={text}: expected A:B, from step A to before B')
  return range(int(first), int(end))


def swept(sweeps: Sequence[str]) -> list[tuple[tuple[str, str], ...]]:
  """'a.b=1,2' and 'c=3,4' as all combinations of (key, value) pairs."""
  choices = []
  for sweep in sweeps:
    key, equals, values = sweep.partition('=')
    if not (key and equals and values):
      raise ValueError(f'--sweep {sweep}: expected KEY=VALUE,VALUE,...')
    choices.append([(key.removeprefix('config.'), v) for v in _values(values)])
  return list(itertools.product(*choices))


def _values(text: str) -> list[str]:
  """At the commas that are in no bracket."""
  values, depth = [''], 0
  for letter in text:
    depth += (letter in '([{') - (letter in ')]}')
    if letter == ',' and depth == 0:
      values.append('')
    else:
      values[-1] += letter
  return values


# --- the command ----------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
  arguments, rest = _parser().parse_known_args(argv)
  try:
    found = _run(arguments, rest)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  cells = comparison.cells(found)
  width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
  print(summary.aligned(cells, width))
  if arguments.out is not None:
    try:
      comparison.write(arguments.out, pathlib.Path(arguments.config).name, found)
    except OSError as error:
      print(f'error: --out={arguments.out}: {error}', file=sys.stderr)
      return 2
    print(f'Written to {arguments.out}: table.md, simulate.html')
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m jaxrl_sched.simulate',
    description=__doc__.strip(),
    epilog=EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument('--config', required=True, metavar='FILE.py[:ARG]')
  parser.add_argument(
    '--trace',
    type=pathlib.Path,
    metavar='rollouts.jsonl',
    help='answers of a recorded run',
  )
  parser.add_argument(
    '--costs', type=pathlib.Path, metavar='WORKDIR', help='a run to fit costs to'
  )
  parser.add_argument(
    '--costs-steps',
    metavar='A:B',
    help='fit to steps A to B - 1 of that run only, as to its first half',
  )
  parser.add_argument('--steps', metavar='N', help="instead of the config's")
  parser.add_argument(
    '--sweep', nargs='+', action='extend', default=[], metavar='KEY=VALUE,...'
  )
  parser.add_argument('--seeds', type=int, default=1, metavar='N')
  parser.add_argument('--out', type=pathlib.Path, metavar='DIR')
  return parser


def _run(arguments: argparse.Namespace, rest: list[str]) -> dict[str, list[Run]]:
  """Setting -> what came of it, with each seed."""
  from jaxrl_sched import config, train

  if arguments.seeds < 1:
    raise ValueError(f'--seeds={arguments.seeds}: expected at least 1')
  common = train.overrides(rest)
  if arguments.steps is not None:
    common.append(('steps', arguments.steps))
  chosen = {}
  for values in swept(arguments.sweep):
    name = ', '.join(f'{key}={value}' for key, value in values)
    c = config.read(arguments.config, [*common, *values])
    chosen[name or pathlib.Path(arguments.config).name.replace('.py', '')] = c
  fitted, part = None, arguments.costs_steps
  if part is not None and arguments.costs is None:
    raise ValueError(f'--costs-steps={part}: expected with --costs=WORKDIR only')
  if arguments.costs is not None:
    fitted = fit(arguments.costs, None if part is None else steps_between(part))
    print(f'Costs: {json.dumps(dataclasses.asdict(fitted))}')
  every = {name: costs_of(c, fitted) for name, c in chosen.items()}
  found = {}
  for name, c in chosen.items():
    seeds = range(c['seed'], c['seed'] + arguments.seeds)
    found[name] = [
      simulate(c | {'seed': seed}, every[name], arguments.trace) for seed in seeds
    ]
  return found


if __name__ == '__main__':
  sys.exit(main())
