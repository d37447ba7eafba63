"""What would this config cost? Its loop and its controllers, on a simulated clock.

    python -m jaxrl_sched.simulate --config=FILE.py[:ARG] [--steps=N]
      [--costs=WORKDIR [--costs-steps=A:B]] [--trace=WORKDIR]
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
import pathlib
import shutil
import sys
from typing import Any

import numpy as np

from jaxrl_sched import comparison, loop, settings, storage
from jaxrl_sched.comparison import Run
from jaxrl_sched.sim import costs as costs_lib
from jaxrl_sched.sim import summary
from jaxrl_sched.sim.costs import Costs
from jaxrl_sched.sim.engine import SimEngine
from jaxrl_sched.sim.trace import Trace
from jaxrl_sched.sim.workload import Dataset, Workload
from jaxrl_sched.terminal import quietly
from jaxrl_sched.types import Sampling

EPILOG = """\
Any setting can be overridden: --config.asp.engines=8. --sweep runs a setting with each
of several values (--sweep sagc.delta=0.2,0.4,0.6); several of them (--sweep asp.lag=0,1
sampler.slots=32,64), all combinations. Settings that only change together are not
swept: simulate each of them (--config.asp.lag=1 --config.scheduler.max_rounds=1).

Without config.sampler_mesh samplers and learner share their devices and take turns: a
lag then gains nothing. --config.sampler_mesh={} gives the samplers devices of their own.

--costs: what the steps of that run cannot tell apart (a cost a step and a cost an answer,
say, where all steps have as many answers) is lumped together in one of the costs, and
the others are 0. Such costs speak of settings near those of that run.

--out, a new folder, receives table.md, simulate.html and metrics.jsonl of every run. Bad
input ends with 2 and one line.
"""
_RECORDS = ('config.json', 'metrics.jsonl', 'rollouts.jsonl')
LEAST = 3  # steps to fit costs to
MOST = 100_000  # steps, of all settings and seeds: they are kept in memory


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
  from jaxrl_sched.device import backend

  backend.choose()
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
    shares_devices=c['sampler_mesh'] is None,
    share_prompt=c['learner']['share_prompt'],
    grace=c['scheduler']['grace'],
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
  if (reason := scheduler.exhausted(engine.step)) is not None:
    book.say(f'ended at step {engine.step} of {steps}: {reason}')
  row = summary.summarise(book, engine.totals())
  if trace is None:
    rates = [workload.pass_rates(name) for name in prompts.sizes]
    row['pass_rate'] = float(np.concatenate(rates).mean())
    return Run(book=book, row=row, seed=c['seed'])
  groups = answering.recorded + answering.drawn
  row['recorded'] = answering.recorded / max(groups, 1)
  return Run(
    book=book,
    row=row,
    seed=c['seed'],
    recorded=answering.recorded,
    groups=groups,
  )


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
  block, keys = c['simulate']['costs'], ', '.join(_names(Costs))
  if fitted is None and block is None:
    raise ValueError(
      'config.simulate.costs: None, expected --costs=WORKDIR, to fit them to a run, or '
      f'a block of seconds (--config.simulate.costs.decode_step=0.01) with some of {keys}'
    )
  key = 'config.simulate.costs' if fitted is None else '--costs'
  found = fitted or Costs(**settings.keywords(key, block, Costs))
  if not _nonzero(found):
    raise ValueError(f'{key}: all are 0, expected seconds for some of {keys}')
  return found


def _names(of: type) -> list[str]:
  return [field.name for field in dataclasses.fields(of)]


def _nonzero(costs: Costs) -> dict[str, float]:
  return {name: x for name, x in dataclasses.asdict(costs).items() if x}


def told(costs: Costs) -> str:
  """In one line, without those that are 0."""
  return ', '.join(f'{name} {x:.3g}' for name, x in _nonzero(costs).items())


def fit(workdir: pathlib.Path, steps: range | None = None) -> Costs:
  """Costs under which a run takes what it took, which are told.

  Args:
    steps: only these. None: all.
  """
  from jaxrl_sched import config
  from jaxrl_sched.device import backend

  backend.choose()
  # The lengths of its prompts are in no record: they are opened once more.
  c = settings.of_workdir(workdir)
  if c is None:
    raise ValueError(f'--costs={workdir}: no config.json there, expected a run')
  prompts = config.prepare(config.check(c)).prompts
  records = costs_lib.read_run(workdir, prompts=prompts, steps=steps)
  if len(records) < LEAST:
    raise ValueError(
      f'--costs={workdir}: {len(records)} of these steps are recorded whole, expected '
      f'at least {LEAST} to fit costs to'
    )
  found = costs_lib.fit(records)
  predicted, measured = costs_lib.predicted(found, records)
  print(f'Costs in seconds: {told(found) or "none"}')
  print(
    f'Fitted: {len(records)} steps, predicted {predicted:.4g} s, measured '
    f'{measured:.4g} s'
  )
  return found


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
    if arguments.print_config:
      _print_config(arguments, rest)
      return 0
    found, notes = _run(arguments, rest)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  cells = comparison.cells(found)
  width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
  print(summary.aligned(cells, width))
  for note in _notes(found):
    print(note)
  if arguments.out is not None:
    try:
      title = pathlib.Path(arguments.config).name
      comparison.write(arguments.out, title, found, [*notes, *_notes(found)])
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
    metavar='WORKDIR',
    help='answers of a recorded run: its folder, or its rollouts.jsonl',
  )
  parser.add_argument('--costs', metavar='WORKDIR', help='a run to fit costs to')
  parser.add_argument(
    '--costs-steps',
    metavar='A:B',
    help='fit to steps A to B - 1 of that run only, as to its first half',
  )
  parser.add_argument('--steps', metavar='N', help="instead of the config's")
  parser.add_argument(
    '--sweep',
    nargs='+',
    action='extend',
    default=[],
    metavar='KEY=VALUE,...',
    help='a setting with each value; several settings: all combinations',
  )
  parser.add_argument(
    '--seeds', type=int, default=1, metavar='N', help="runs of each, from config's seed"
  )
  parser.add_argument('--out', type=pathlib.Path, metavar='DIR', help='a new folder')
  parser.add_argument(
    '--print-config', action='store_true', help='every key with its value; then end'
  )
  return parser


def _print_config(arguments: argparse.Namespace, rest: list[str]) -> None:
  """As `train` does it; what is left out of `simulate` is told beside it."""
  from jaxrl_sched import config

  c = config.read(arguments.config, _common(arguments, rest))
  block = c['simulate']
  if block['costs'] is None:
    print(f'simulate.costs, in seconds: {", ".join(_names(Costs))}', file=sys.stderr)
  else:
    block['costs'] = settings.keywords('config.simulate.costs', block['costs'], Costs)
  if block['workload'] is None:
    keys = settings.keywords('', {}, Dataset)
    defaults = ', '.join(f'{key} {value}' for key, value in keys.items())
    print(f'simulate.workload.NAME: {defaults}', file=sys.stderr)
  else:
    found = datasets(block['workload'])
    block['workload'] = {name: dataclasses.asdict(d) for name, d in found.items()}
  print(settings.dumps(c), end='')


def _common(arguments: argparse.Namespace, rest: list[str]) -> list[tuple[str, str]]:
  """What is overridden in all settings."""
  from jaxrl_sched import train

  found = train.overrides(rest)
  if arguments.steps is not None:
    found.append(('steps', arguments.steps))
  return found


def _recorded(name: str | None) -> pathlib.Path | None:
  """A run's folder, or its rollouts.jsonl; of one at gs:// a copy on this host."""
  if name is None:
    return None
  folder, _, file = name.rstrip('/').rpartition('/')
  if not storage.is_remote(name):
    return storage.path(name)
  if not file.endswith('.jsonl'):
    return storage.fetched(name, lambda file: file in _RECORDS)
  return storage.fetched(folder, lambda other: other in (file, 'config.json')) / file


def _notes(found: dict[str, list[Run]]) -> list[str]:
  """Of each setting: what its runs said, and whether the trace could answer all."""
  notes = []
  for name, runs in found.items():
    notes += [f'{name}, seed {r.seed}: {note}' for r in runs for note in r.book.notes]
    recorded, groups = (
      sum(getattr(r, k) for r in runs) for k in ('recorded', 'groups')
    )
    if recorded < groups:
      notes.append(
        f'{name}: {recorded:,} of {groups:,} groups are answered as recorded, '
        f'{groups - recorded:,} are drawn from other groups of the trace'
      )
  return notes


def _run(
  arguments: argparse.Namespace, rest: list[str]
) -> tuple[dict[str, list[Run]], list[str]]:
  """Setting -> what came of it, with each seed; and what it was made of."""
  from jaxrl_sched import config

  if arguments.seeds < 1:
    raise ValueError(f'--seeds={arguments.seeds}: expected at least 1')
  common, trace = _common(arguments, rest), _recorded(arguments.trace)
  if trace is not None and trace.is_dir():
    trace = trace / 'rollouts.jsonl'
  chosen = {}
  for values in swept(arguments.sweep):
    name = ', '.join(f'{key}={value}' for key, value in values)
    c = config.read(arguments.config, [*common, *values])
    chosen[name or pathlib.Path(arguments.config).name.replace('.py', '')] = c
  steps = arguments.seeds * sum(c['steps'] for c in chosen.values())
  if steps > MOST:
    raise ValueError(
      f'{steps:,} steps to be simulated (settings x seeds x config.steps), expected at '
      f'most {MOST:,}: all are kept in memory'
    )
  if arguments.out is not None:  # before what takes long
    comparison.make_new(arguments.out)
  fitted, part = None, arguments.costs_steps
  if part is not None and arguments.costs is None:
    raise ValueError(f'--costs-steps={part}: expected with --costs=WORKDIR only')
  if arguments.costs is not None:
    of_run = _recorded(arguments.costs)
    fitted = fit(of_run, None if part is None else steps_between(part))
  every = {name: costs_of(c, fitted) for name, c in chosen.items()}
  found = {}
  for name, c in chosen.items():
    seeds = range(c['seed'], c['seed'] + arguments.seeds)
    found[name] = [simulate(c | {'seed': seed}, every[name], trace) for seed in seeds]
  source = 'of the config' if fitted is None else f'fitted to {arguments.costs}'
  notes = [
    f'{arguments.seeds} seeds: the mean, and in brackets the smallest and the largest'
    if arguments.seeds > 1
    else 'One seed',
    f'Costs {source}, in seconds: '
    + '; '.join(dict.fromkeys(told(costs) for costs in every.values())),
    'Synthetic answers' if trace is None else f'Answers of {trace}',
  ]
  return found, notes


if __name__ == '__main__':
  sys.exit(quietly(main))
