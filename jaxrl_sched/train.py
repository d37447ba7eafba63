"""Trains a policy from a config file. Run again with the same command, it resumes.

python -m jaxrl_sched.train --config=configs/quickstart.py --workdir=DIR
"""

import argparse
from collections.abc import Callable
import contextlib
import functools
import pathlib
import signal
import sys
import time

import numpy as np

from jaxrl_sched import config, evaluation, loop, report, settings
from jaxrl_sched.device.checkpoint import SaveError
from jaxrl_sched.host.advantages import group_advantages
from jaxrl_sched.metrics import Recorder, duration

EPILOG = """\
Any setting of the config can be overridden: --config.optimizer.learning_rate=1e-3
--config.evaluate=None. A config may take an argument: --config=configs/x.py:argument.

The workdir receives config.json, metrics.jsonl (a line a step), rollouts.jsonl (a line
a group), checkpoints/, tensorboard/ and report.html. SIGTERM or Ctrl-C saves and ends
with 0; the same command goes on from there. Bad input ends with 2 and one line.
"""


def parser(
  name: str, description: str, *, epilog: str = EPILOG, config_needed: bool = True
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
    '--workdir', required=True, metavar='DIR', help='where the run lives'
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
  arguments, rest = parser('train', __doc__).parse_known_args(argv)
  workdir = pathlib.Path(arguments.workdir)
  try:
    if '://' in arguments.workdir:
      raise ValueError(f'--workdir={arguments.workdir}: expected a local folder')
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
  began, steps = time.perf_counter(), run.c['steps']
  stop = Stop()
  for name, count in run.prompts.dropped.items():
    if count:
      print(f'{name}: {count} prompts dropped, longer than prompts.max_tokens')
  print('Building the model and compiling ...', flush=True)
  with contextlib.closing(config.build_engine(run, workdir, stopping=stop)) as engine:
    resumed = _restore(run, engine, workdir)
    settings.write(workdir, run.c)
    if not stop():
      engine.warm_up(run.longest_prompt)
    with Recorder(workdir, steps=steps, start=engine.step, **run.c['log']) as recorder:
      complete = loop.train(
        engine,
        run.scheduler,
        recorder,
        steps=steps,
        save_every=run.checkpoint.every,
        evaluate_every=run.evaluate.every if run.evaluate else 1,
        evaluate=evaluator(run, engine),
        advantages_of=advantages(run),
      )
      summary = recorder.summary()
    page = report.write_report(workdir)
    engine.wait()  # what is said to be saved, is
  took = duration(time.perf_counter() - began) + ' this time' * (resumed is not None)
  if not complete:
    print(f'Stopped at step {engine.step}, saved. The same command goes on from there.')
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


def _restore(run: config.Run, engine, workdir: pathlib.Path) -> int | None:
  """Goes on from the newest whole checkpoint, if there is one. Returns its step."""
  state = engine.restore()
  if state is not None:
    run.scheduler.load_state_dict(state)
    if engine.step > run.c['steps']:
      raise ValueError(
        f'config.steps: {run.c["steps"]}, but {workdir} is at {engine.step} already'
      )
    print(f'Resuming at step {engine.step}.', flush=True)
    return engine.step
  damaged = sorted(p.name for p in (workdir / 'checkpoints').glob('*.damaged*'))
  if damaged:
    raise ValueError(
      f'{workdir}/checkpoints holds damaged steps only ({", ".join(damaged)}): take '
      'another workdir, or remove them to begin anew'
    )
  return None


def advantages(run: config.Run) -> Callable[[np.ndarray], np.ndarray]:
  if run.c['teacher'] is not None:
    return np.ones_like  # the policy gradient is then that of supervised learning
  return functools.partial(group_advantages, **run.c['advantage'])


def evaluator(run: config.Run, engine):
  """step -> metrics and score, for the loop; None: nothing is evaluated."""
  if run.evaluate is None:
    return None
  prompts = list(run.held_out.all())

  def evaluate(step: int):
    del step
    results = evaluation.evaluate(
      engine,
      prompts,
      run.evaluation_sampling(),
      samples=run.evaluate.samples,
      k=run.evaluate.k,
    )
    return evaluation.as_metrics(results), evaluation.score(results)

  return evaluate


if __name__ == '__main__':
  sys.exit(main())
