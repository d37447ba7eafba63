"""Trains a policy from a config file. Run again with the same command, it resumes.

python -m jaxrl_sched.train --config=configs/quickstart.py --workdir=DIR
"""

import argparse
from collections.abc import Callable, Sequence
import contextlib
import pathlib
import signal
import sys
import time
from typing import Any

from jaxrl_sched import config, evaluation, loop, report, settings
from jaxrl_sched.console import duration
from jaxrl_sched.device.checkpoint import SaveError
from jaxrl_sched.metrics import Recorder
from jaxrl_sched.types import Group

EPILOG = """\
Any setting of the config can be overridden: --config.optimizer.learning_rate=1e-3
--config.evaluate=None. A config may take an argument: --config=configs/x.py:argument.

The workdir receives config.json, metrics.jsonl (a line a step), rollouts.jsonl (a line
a group), samples.jsonl (some answers' texts), timeline.jsonl (who was busy when),
checkpoints/, tensorboard/ and report.html. SIGTERM or Ctrl-C saves and ends with 0; the
same command goes on from there. Bad input ends with 2 and one line.
"""


def parser(
  name: str,
  description: str,
  *,
  epilog: str = EPILOG,
  config_needed: bool = True,
  workdir_needed: bool = True,
) -> argparse.ArgumentParser:
  result = argparse.ArgumentParser(
    prog=f'python -m jaxrl_sched.{name}',
    description=description.strip(),
    epilog=epilog,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  result.add_argument(
    '--config', required=config_needed, metavar='FILE.py[:ARG]', help='a config file'
  )
  result.add_argument(
    '--workdir', required=workdir_needed, metavar='DIR', help='where the run lives'
  )
  return result


def overrides(rest: list[str]) -> list[tuple[str, str]]:
  """--config.a.b=v, or --config.a.b v, as ('a.b', 'v')."""
  found, rest = [], list(rest)
  while rest:
    name, equals, value = rest.pop(0).partition('=')
    if not name.startswith('--config.'):
      raise ValueError(f'{name}: unknown argument; see --help')
    if not equals:
      if not rest:
        raise ValueError(f'{name}: expected a value')
      value = rest.pop(0)
    found.append((name.removeprefix('--config.'), value))
  return found


class Stop:
  """Whether a signal has asked the run to stop. A second Ctrl-C does not ask."""

  def __init__(self):
    self._asked = False
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._hear)

  def __call__(self) -> bool:
    return self._asked

  def _hear(self, number: int, _) -> None:
    self._asked = True
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main(argv: list[str] | None = None) -> int:
  command = parser('train', __doc__, workdir_needed=False)
  command.add_argument(
    '--print-config', action='store_true', help='every key with its value; then end'
  )
  arguments, rest = command.parse_known_args(argv)
  try:
    if arguments.print_config:
      print(settings.dumps(config.read(arguments.config, overrides(rest))), end='')
      return 0
    if arguments.workdir is None:
      command.error('the following arguments are required: --workdir')
    workdir = settings.local_workdir(arguments.workdir)
    c = config.read(arguments.config, overrides(rest))
    run = config.prepare(c)
    settings.check_workdir(workdir, c, config.free(c))
    with settings.only_one(workdir):
      return _train(run, workdir)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except SaveError as error:  # a full disk, say; what was saved before stays
    print(f'error: {error}', file=sys.stderr)
    return 1


def _train(run: config.Run, workdir: pathlib.Path) -> int:
  began, steps, log = time.perf_counter(), run.c['steps'], run.c['log']
  every = run.evaluate.every if run.evaluate else None
  stop = Stop()
  for note in notes(run):
    print(note)
  print('Building the model and compiling ...', flush=True)
  with contextlib.closing(config.build_engine(run, workdir, stopping=stop)) as engine:
    resumed = _restore(run, engine, workdir)
    settings.write(workdir, run.c)
    if not stop():
      engine.warm_up(run.longest_prompt)
      print(
        f'Built and compiled in {duration(time.perf_counter() - began)}.', flush=True
      )
    with Recorder(
      workdir,
      steps=steps,
      start=engine.step,
      evaluate_every=every,
      tensorboard=log['tensorboard'],
      wandb=log['wandb'],
    ) as recorder:
      engine.progress = recorder.progress
      complete = loop.train(
        engine,
        run.scheduler,
        recorder,
        steps=steps,
        save_every=run.checkpoint.every,
        evaluate_every=every or 1,
        evaluate=evaluator(run, engine, recorder.say),
        compare_every=run.checkpoint.compare_every,
        samples_of=samples(engine, log['samples']),
      )
      summary = recorder.summary()
    page = report.write_report(workdir)
    engine.wait()  # what is said to be saved, is
  took = duration(time.perf_counter() - began) + ' this time' * (resumed is not None)
  if not complete:
    print(
      f'Stopped after step {engine.step}, saved. The same command goes on from there.'
    )
    return 0
  first, last = summary.get('held_out/first'), summary.get('held_out/last')
  if last is not None:
    print(f'Held-out pass rate {first:.3f} -> {last:.3f} in {took}.')
  else:
    print(f'Done in {took}.')
  print(f'Workdir: {workdir}   Report: {page}')
  if summary.get('total/updates') == 0:
    print(
      'error: no update was made: no group had answers of different reward',
      file=sys.stderr,
    )
    return 1
  return 0


def notes(run: config.Run) -> list[str]:
  """What whoever starts a run may want to know, and is no error."""
  found = [
    f'{name}: {count} prompts dropped, longer than prompts.max_tokens'
    for name, count in run.prompts.dropped.items()
    if count
  ]
  lag = run.c['asp']['lag']
  if lag and run.c['sagc'] is not None:
    found.append(
      f'sagc: with asp.lag={lag} learning does not wait for the longest answer, so its '
      'events no longer measure waiting'
    )
  return found


def _restore(run: config.Run, engine, workdir: pathlib.Path) -> int | None:
  """Goes on from the newest whole checkpoint, if there is one. Returns its step."""
  state = engine.restore()
  if state is not None:
    run.scheduler.load_state_dict(state)
    if engine.step > run.c['steps']:
      raise ValueError(
        f'config.steps: {run.c["steps"]}, but {workdir} is at {engine.step} already'
      )
    print(f'Resuming after step {engine.step}.', flush=True)
    return engine.step
  damaged = sorted(p.name for p in (workdir / 'checkpoints').glob('*.damaged*'))
  if damaged:
    raise ValueError(
      f'{workdir}/checkpoints holds damaged steps only ({", ".join(damaged)}): take '
      'another workdir, or remove them to begin anew'
    )
  return None


def evaluator(run: config.Run, engine, say: Callable[[str], None]):
  """step -> metrics and score, for the loop; None: nothing is evaluated."""
  if run.evaluate is None:
    return None
  prompts, each = list(run.held_out.all()), run.evaluate.samples
  told = False

  def evaluate(step: int):
    nonlocal told
    del step
    if not told:
      say(f'Evaluating {len(prompts)} prompts x {each} ...')
      told = True
    began = time.perf_counter()
    results = evaluation.evaluate(
      engine, prompts, run.evaluation_sampling(), samples=each, k=run.evaluate.k
    )
    took = {'time/evaluate_s': time.perf_counter() - began}
    return evaluation.as_metrics(results) | took, evaluation.score(results)

  return evaluate


def samples(engine, count: int) -> Callable[[Sequence[Group]], list[dict[str, Any]]]:
  """Groups of a round, in draw order -> lines of samples.jsonl, of `count` of them."""

  def lines(groups: Sequence[Group]) -> list[dict[str, Any]]:
    groups = [group for group in groups if not group.is_paused]
    few = min(count, len(groups))
    # Evenly over the round, which goes from dataset to dataset.
    chosen = [groups[i * len(groups) // few] for i in range(few)]
    return [
      {'draw': group.request.draw} | line
      for group in chosen
      for line in evaluation.sample_lines(
        group, lambda c, s=group.request.sampling: engine.text_of(c, s.stop_ids)
      )
    ]

  return lines


if __name__ == '__main__':
  sys.exit(main())
