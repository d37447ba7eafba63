"""Samples every training prompt and writes its pass rate: a table for difficulty tiers.

    python -m jaxrl_sched.stratify --workdir=DIR [--config=FILE.py] [--samples=8]
        [--step=N|latest | --hf=FOLDER]

By the weights that the config starts from, those of a checkpoint of the workdir, or a
Hugging Face folder. Appends to stratify/<start|step|hf-name>.jsonl in the workdir, a
line a prompt: id, pass_rate, samples, model. The same command goes on from where it
was stopped. Tables of several models may be given to the tiers together.
"""

import collections
from collections.abc import Iterator
import contextlib
import dataclasses
import itertools
import json
import pathlib
import sys
from typing import Any

from jaxrl_sched import config, models, settings, storage
from jaxrl_sched.control.difficulty import TIERS, tier
from jaxrl_sched.device import backend
from jaxrl_sched.device.together import Stop
from jaxrl_sched.engine import Stopped
from jaxrl_sched.evaluation import FIRST_DRAW
from jaxrl_sched.terminal import quietly
from jaxrl_sched.train import overrides, parser
from jaxrl_sched.types import Request

EPILOG = """\
Answers are drawn as in training: --config.sampling.temperature=0.6 changes that.
Without --config the workdir's own config.json is used.
"""
ROUNDS = 16  # times that every slot is filled between two writes


def main(argv: list[str] | None = None) -> int:
  arguments = parser('stratify', __doc__, epilog=EPILOG, config_needed=False)
  arguments.add_argument(
    '--samples', type=int, default=8, metavar='N', help='answers a prompt; 8'
  )
  which = arguments.add_mutually_exclusive_group()
  which.add_argument('--step', metavar='N', help='a checkpoint: a step or latest')
  which.add_argument('--hf', metavar='FOLDER', help='a Hugging Face folder')
  arguments, rest = arguments.parse_known_args(argv)
  backend.choose()
  try:
    backend.check()
    workdir = storage.path(arguments.workdir, '--workdir=')
    c = config.of_workdir(arguments.config, workdir, overrides(rest))
    c['evaluate'] = None  # held-out prompts are none of its business
    c['tiers'] = None  # its table may be what is to be made
    step, label = None, 'start'
    if arguments.hf is not None:
      label = models.judge_folder(c, arguments.hf)
    elif arguments.step is not None:
      if arguments.step == 'all':
        raise ValueError('--step=all: expected one step')
      [step] = config.checkpointed_steps(workdir, arguments.step)
      label = str(step)
    run = config.prepare(c)
    _check_samples(arguments.samples, run.sampling.temperature)
    with settings.only_one(workdir / 'stratify') as home:
      table = home.folder / f'{label}.jsonl'
      _same_settings(table, _described(run, arguments.samples, step))
      code = _stratify(run, workdir, home, table, arguments.samples, step)
      home.push()
    return code
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except OSError as error:  # a full disk, say; what was written before stays
    print(f'error: {error}, writing to {workdir}/stratify', file=sys.stderr)
    return 1


def _check_samples(samples: int, temperature: float) -> None:
  if samples < 1:
    raise ValueError(f'--samples={samples}: expected at least 1')
  if temperature == 0 and samples > 1:
    raise ValueError(
      f'--samples={samples}: expected 1 at temperature 0, where all samples are the same'
    )


def _described(run: config.Run, samples: int, step: int | None) -> dict[str, Any]:
  """All that a pass rate hangs on."""
  of_model = {key: run.c[key] for key in ('model', 'lora', 'seed')}
  return of_model | {
    'step': step,
    'samples': samples,
    'sampling': dataclasses.asdict(run.sampling),
    'prompts': run.c['prompts'],
  }


def _same_settings(table: pathlib.Path, now: dict[str, Any]) -> None:
  """Refuses to go on with a table that was begun with other settings."""
  file = table.with_suffix('.settings.json')
  if file.exists():
    try:
      before = json.loads(file.read_text(encoding='utf-8'))
    except ValueError as error:
      raise ValueError(f'{file}: cannot be read: {error}') from None
    found = settings.as_lines(settings.differences(before, now))
    if found:
      raise ValueError(
        f'{table} was begun with other settings: {"; ".join(found[:5])}. Take these, or '
        'move it away'
      )
    return
  if table.exists():
    raise ValueError(f'{table}: exists, but {file.name} beside it does not')
  half = file.with_suffix('.half')
  half.write_text(json.dumps(now, indent=2) + '\n', encoding='utf-8')
  half.replace(file)


def _stratify(
  run: config.Run,
  workdir: pathlib.Path,
  home: storage.Home,
  table: pathlib.Path,
  samples: int,
  step: int | None,
) -> int:
  rates = _written(table)
  total = sum(run.prompts.sizes.values())
  if len(rates) < total:
    stop = Stop()
    print(f'{len(rates)} of {total} prompts done. Building the model ...', flush=True)
    engine = config.build_engine(run, workdir, read_only=True, stopping=stop)
    with contextlib.closing(engine), table.open('a', encoding='utf-8') as file:
      if step is not None:
        engine.restore(step)
      requests = _requests(run, samples, done=set(rates))
      at_once = max(1, ROUNDS * run.sampler.slots // samples)
      model = f'{workdir.resolve().name}/{table.stem}'
      while batch := list(itertools.islice(requests, at_once)):
        try:
          groups = engine.evaluate(batch)
        except Stopped:
          print(f'Stopped, {len(rates)} of {total} done. The same command goes on.')
          return 0
        for group in groups:
          key, rate = group.request.prompt.id, float(group.passed.mean())
          rates[key] = rate
          line = dict(id=key, pass_rate=rate, samples=group.size, model=model)
          file.write(json.dumps(line, ensure_ascii=False) + '\n')
        file.flush()
        home.push_if_due()
        print(f'{len(rates):>8} of {total} prompts', flush=True)
  _print_summary(run, rates)
  print(f'Written to {workdir / "stratify" / table.name}', flush=True)
  return 0


def _requests(run: config.Run, samples: int, done: set[str]) -> Iterator[Request]:
  """What is left. A prompt's noise hangs on its place: a resume changes no answer."""
  for place, prompt in enumerate(run.prompts.all()):
    if prompt.id not in done:
      yield Request(
        draw=FIRST_DRAW + place, prompt=prompt, size=samples, sampling=run.sampling
      )


def _written(table: pathlib.Path) -> dict[str, float]:
  """Pass rates by id so far. A line that was half written is cut off."""
  rates: dict[str, float] = {}
  if not table.exists():
    return rates
  with table.open('rb+') as file:
    whole = 0
    for number, line in enumerate(file, 1):
      if not line.endswith(b'\n'):
        file.truncate(whole)
        break
      whole += len(line)
      try:
        record = json.loads(line)
        rates[record['id']] = record['pass_rate']
      except (ValueError, TypeError, KeyError):
        raise ValueError(f'{table}, line {number}: not a line of a table') from None
  return rates


def _print_summary(run: config.Run, rates: dict[str, float]) -> None:
  print(
    f'{"dataset":20}{"prompts":>10}{"mean":>8}' + ''.join(f'{t:>10}' for t in TIERS)
  )
  for name in run.prompts.sizes:
    mine = [rate for key, rate in rates.items() if key.split('/')[0] == name]
    counts = collections.Counter(map(tier, mine))
    mean = sum(mine) / max(1, len(mine))
    numbers = ''.join(f'{counts[t]:>10}' for t in TIERS)
    print(f'{name:20}{len(mine):>10}{mean:>8.3f}{numbers}')


if __name__ == '__main__':
  sys.exit(quietly(main))
