"""Trains a policy from a config file. Run again with the same command, it resumes.

python -m jaxrl_sched.train --config=configs/quickstart.py --workdir=DIR
"""

import argparse
from collections.abc import Callable, Sequence
import contextlib
import pathlib
import sys
import time
from typing import Any
import uuid

from jaxrl_sched import config, evaluation, loop, models, report, settings, storage
from jaxrl_sched.console import duration
from jaxrl_sched.device import multihost, repeats, together
from jaxrl_sched.metrics import NoRecorder, Recorder
from jaxrl_sched.terminal import quietly, tell
from jaxrl_sched.types import Group

REFUSED_AT_END = 5  # updates in a row, and a run that has ended has failed
MARK = '.seen_by_all'  # in the workdir of several processes

EPILOG = """\
Any setting of the config can be overridden: --config.optimizer.learning_rate=1e-3
--config.evaluate=None. A config may take an argument: --config=configs/x.py:argument.

The workdir receives config.json, metrics.jsonl (a line a step), rollouts.jsonl (a line
a group), samples.jsonl (some answers' texts), timeline.jsonl (who was busy when),
checkpoints/, tensorboard/ and report.html. SIGTERM, Ctrl-C, SIGHUP, SIGUSR1, SIGUSR2 or
SIGXCPU saves and ends with 0; the same command resumes from there. Bad input ends with 2
and one line.
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
    '--workdir', required=workdir_needed, metavar='DIR', help='a folder, or gs://...'
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
      if not rest or rest[0].startswith('--'):
        raise ValueError(f'{name}: expected a value')
      value = rest.pop(0)
    key = name.removeprefix('--config.')
    for before, _ in found:
      if before == key:
        raise ValueError(f'{name}: given twice, expected once')
      if before.startswith(f'{key}.'):
        raise ValueError(f'{name}: expected before --config.{before}, a key of it')
    found.append((key, value))
  return found


def main(argv: list[str] | None = None) -> int:
  command = parser('train', __doc__, config_needed=False, workdir_needed=False)
  command.add_argument(
    '--print-config', action='store_true', help='every key with its value; then end'
  )
  command.add_argument(
    '--stopped-exit-code',
    type=int,
    default=0,
    metavar='N',
    help='what to end with when stopped by a signal, saved but not complete',
  )
  arguments, rest = command.parse_known_args(argv)

  if arguments.workdir is None and not arguments.print_config:
    command.error('the following arguments are required: --workdir')
  if arguments.config is None and arguments.print_config:
    command.error('the following arguments are required: --config')

  def body() -> int:
    if arguments.print_config:
      print(settings.dumps(config.read(arguments.config, overrides(rest))), end='')
      return 0
    complete, code = _train(arguments, overrides(rest))
    return code if complete else arguments.stopped_exit_code

  return together.run(body)


def _train(arguments, changes: list[tuple[str, str]]) -> tuple[bool, int]:
  """Whether the run is complete, and the exit code if it is."""
  workdir = storage.path(arguments.workdir, '--workdir=')

  def prepare() -> config.Run:
    c = config.of_workdir(arguments.config, workdir, changes)
    given = [key for key, _ in changes]
    settings.check_workdir(workdir, c, config.free(c), given)
    return config.prepare(c)

  run = multihost.together(prepare, name='preparing')
  same_config(run.c)
  sets = [found for found in (run.prompts, run.held_out) if found is not None]
  multihost.compare('the prompts', lambda: str([found.contents for found in sets]))
  if not multihost.is_first():
    see_one_workdir(workdir)
    found = _run(run, workdir, None)
  else:
    with settings.only_one(workdir) as home:
      see_one_workdir(workdir)
      found = _run(run, workdir, home)
  return multihost.agree(lambda: found, name='exit code')


def same_config(c: dict[str, Any]) -> None:
  """Whether all processes were given the same settings."""
  for i, other in enumerate(multihost.gather(lambda: c, name='config')):
    found = settings.differences(c, other)
    if found:
      raise ValueError(f'process {i} has other settings than this one: {[*found][0]}')


def see_one_workdir(workdir) -> None:
  """Whether all processes see the same folder: each writes a part of a checkpoint.

  Process 0 has made it.
  """
  if multihost.count() == 1:
    return

  def mark() -> str:
    text = uuid.uuid4().hex
    (workdir / MARK).write_text(text)
    return text

  def look(text: str) -> None:
    file = workdir / MARK
    if not file.exists() or file.read_text() != text:
      raise ValueError(
        f'--workdir={workdir}: process {multihost.index()} sees another folder than '
        'process 0, expected a shared one, or gs://'
      )

  text = multihost.agree(mark, name='workdir')
  multihost.together(lambda: look(text), name='one workdir')


def _run(
  run: config.Run, workdir: pathlib.Path, home: storage.Home | None
) -> tuple[bool, int]:
  """As `_train`. Without a home nothing is written or said."""
  began, steps = time.perf_counter(), run.c['steps']
  every = run.evaluate.every if run.evaluate else None
  stop = together.Stop()
  say = _say if home is not None else _silent
  for note in notes(run):
    say(note)
  say('Building the model and compiling ...')
  engine = config.build_engine(run, workdir, stopping=stop, say=say)
  with contextlib.closing(engine):
    resumed = _restore(run, engine, workdir, say)
    if home is not None:
      settings.write(home.folder, run.c)
      home.push()
    stop()  # whoever is asked to stop tells process 0
    if not multihost.agree(stop, name='stop before the first step'):
      engine.warm_up(run.longest_prompt)
      say(f'Built and compiled in {duration(time.perf_counter() - began)}.')
    with _recorder(run, home, engine.step) as recorder:
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
        samples_of=samples(engine, run.c['log']['samples']),
      )
      summary = recorder.summary()
    if home is not None:
      page = report.write_report(home.folder)
      home.push()
    engine.wait()  # what is said to be saved, is
  if home is None:
    return complete, 0
  took = duration(time.perf_counter() - began) + ' this time' * (resumed is not None)
  if not complete:
    say(
      f'Stopped after step {engine.step}, saved. The same command goes on from there.'
    )
    return False, 0
  say(f'{_held_out(summary) or "Done"} in {took}.')
  say(f'Workdir: {workdir}   Report: {workdir / page.name}')
  failure = _failure(run, summary)
  if (reason := run.scheduler.exhausted(engine.step)) is not None:
    failure = f'ended at step {engine.step} of {steps}: {reason}'
  if failure is not None:
    tell(sys.stderr, f'error: {failure}\n')
    return True, 1
  return True, 0


def _held_out(summary: dict[str, Any]) -> str | None:
  """The first evaluation and the last one."""
  parts = [
    f'{what} {summary[f"held_out/first{key}"]:.3f} -> '
    f'{summary[f"held_out/last{key}"]:.3f}'
    for what, key in (('reward', '_reward'), ('pass rate', ''))
    if f'held_out/first{key}' in summary
  ]
  return f'Held-out {", ".join(parts)}' if parts else None


def _failure(run: config.Run, summary: dict[str, Any]) -> str | None:
  """Why a run that has ended did not do its work, or None where it did."""
  made, refused = (int(summary.get(f'total/{k}', 0)) for k in ('updates', 'refused'))
  last = int(summary.get('total/refused_last', 0))
  if refused > made or last >= REFUSED_AT_END:
    rate = run.c['optimizer']['learning_rate']
    return (
      f'{refused} of {made + refused} updates were refused, the last {last} in a row, as '
      'gradient or change was not finite: most likely '
      f'config.optimizer.learning_rate={rate:g} is too high'
    )
  if made == 0 and 'total/updates' in summary:
    return 'no update was made: no group had answers of different reward'
  return None


def _say(text: str) -> None:
  tell(sys.stdout, f'{text}\n')


def _silent(text: str) -> None:
  del text


def _recorder(
  run: config.Run, home: storage.Home | None, start: int
) -> Recorder | NoRecorder:
  if home is None:
    return NoRecorder()
  log = run.c['log']
  return Recorder(
    home.folder,
    steps=run.c['steps'],
    start=start,
    evaluate_every=run.evaluate.every if run.evaluate else None,
    tensorboard=log['tensorboard'],
    wandb=log['wandb'],
    home=home,
  )


def notes(run: config.Run) -> list[str]:
  """What whoever starts a run may want to know, and is no error."""
  found = [
    f'{name}: {count} prompts dropped, longer than prompts.max_tokens'
    for name, count in run.prompts.dropped.items()
    if count
  ]
  sets = [run.prompts] if run.held_out is None else [run.prompts, run.held_out]
  found += [
    f"{name}: at least {count} answers cannot be read by 'math', the first at {where}: "
    'only the same text is right'
    for of in sets
    for name, (count, where) in of.unread.items()
  ]
  found += repeats.notes(run.prompts.asked, 'prompts')
  if run.held_out is not None:
    found += repeats.notes(run.held_out.asked, 'held-out prompts')
    shared = repeats.overlaps(run.prompts.asked, run.held_out.asked)
    found += repeats.overlap_notes(shared)
  found += models.end_notes(
    run.tokenizer,
    run.sampling.stop_ids,
    run.prompts.turn_end,
    run.sampling.stop_strings,
  )
  warm_up = run.c['optimizer']['warmup_steps']
  if warm_up and warm_up >= run.c['steps']:
    found.append(
      f'optimizer.warmup_steps: {warm_up} of steps={run.c["steps"]}, so that the '
      'learning rate never reaches optimizer.learning_rate'
    )
  lag, barrier = run.c['asp']['lag'], run.c['scheduler']['barrier']
  if run.c['sagc'] is not None and (lag or not barrier):
    why = f'asp.lag={lag}' if barrier else 'scheduler.barrier=False'
    found.append(
      f'sagc: with {why} learning does not wait for the longest answer, so its events no '
      'longer measure waiting'
    )
  return found if barrier else found + _pool_notes(run.c)


def _pool_notes(c: dict[str, Any]) -> list[str]:
  """What makes the open pool slower than it need be."""
  found, scheduler = [], c['scheduler']
  slots = c['sampler']['slots'] * c['asp']['engines']
  rollouts = scheduler['groups_per_step'] * scheduler['group_size']
  if slots > rollouts / 3:
    found.append(
      f'sampler.slots: {slots} in all, more than a third of the {rollouts} answers of a '
      'step: what runs when a step ends is read again with its weights'
    )
  if c['asp']['lag'] and c['sampler_mesh'] is None:
    found.append(
      f'asp.lag: {c["asp"]["lag"]} without scheduler.barrier and sampler_mesh: answers '
      'are older, and nothing is gained as both sides share their devices'
    )
  return found


def _restore(
  run: config.Run, engine, workdir: pathlib.Path, say: Callable[[str], None]
) -> int | None:
  """Goes on from the newest whole checkpoint, if there is one. Returns its step."""
  state = engine.restore()
  if state is not None:
    run.scheduler.load_state_dict(state)
    if engine.step > run.c['steps']:
      raise ValueError(
        f'config.steps: {run.c["steps"]}, but {workdir} is at {engine.step} already'
      )
    say(f'Resuming after step {engine.step}.')
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
  told, doubted = False, set()

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
    for doubt in set(evaluation.doubts(results)) - doubted:
      say(doubt)
      doubted.add(doubt)
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
        group, lambda c, s=group.request.sampling: engine.text_of(c, s)
      )
    ]

  return lines


if __name__ == '__main__':
  sys.exit(quietly(main))
