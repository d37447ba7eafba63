"""What the steps of a real run did, counted anew from its files."""

import collections
from collections.abc import Iterator, Sequence
import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from jaxrl_sched.control.asp import shares
from jaxrl_sched.control.ledger import FATES
from jaxrl_sched.sim import slots as slots_lib
from jaxrl_sched.sim.counts import Rows, StepTimes, generation, learning
from jaxrl_sched.sim.records import Record, lines_of, read
from jaxrl_sched.sim.trace import PromptSet

# Key of asp -> its usual value, and why there is no fitting to a run with another.
_UNTOLD = {
  'spare': (0, 'how far answers had got that were not kept'),
  'pause_after': (0, 'in which step an answer that paused was sampled, and how far'),
  'window': (1, 'which of the groups drawn together were sampled in which step'),
}
# What is read of a line of the metrics, beside its step.
_COUNTS = ('rollout/groups_generated', 'rollout/rounds')
_TIMES = ('time/generate_s', 'time/reward_s', 'time/learn_s')
_FATES = tuple(f'rollout/groups_{fate}' for fate in FATES)


def read_run(
  workdir: str | os.PathLike,
  *,
  prompts: PromptSet | None = None,
  steps: range | None = None,
) -> list[StepTimes]:
  """The steps of a run, for `costs.fit`.

  Its slots are filled anew with the recorded lengths. `time/generate_s` is the sum over
  rounds of the slowest engine's time.

  Args:
    workdir: with config.json, metrics.jsonl and rollouts.jsonl.
    prompts: of the run, for the lengths of prompts. None: prompts count as empty, and
      what they take is part of what their answers do.
    steps: only these. None: all that are recorded whole.

  Raises:
    ValueError: a file cannot be read, or has what no run would write, or they are of
      two runs; or none of these steps is recorded whole; or the run had spare or
      paused answers, or several bundles drawn at once, of which the record does not
      say enough.
  """
  workdir = pathlib.Path(workdir)
  try:
    return _read(workdir, prompts, steps)
  except KeyError as error:
    raise ValueError(f'{workdir}: {error} is missing in what the run wrote') from None


def _read(
  workdir: pathlib.Path, prompts: PromptSet | None, steps: range | None
) -> list[StepTimes]:
  c = _json(workdir / 'config.json')
  asp = c.get('asp') or {}
  for key, (usual, why) in _UNTOLD.items():
    if asp.get(key, usual) != usual:
      raise ValueError(
        f'{workdir}: asp.{key}={asp[key]}, expected a run with {usual} to fit costs to: '
        f'the record does not say {why}'
      )
  lines = _metrics(workdir / 'metrics.jsonl')
  recorded = read(workdir / 'rollouts.jsonl')
  _check_fates(workdir, lines, recorded)
  records = {record.draw: record for record in recorded}
  known = _prompt_lengths(records, prompts)
  found, draw = [], 0
  for line in lines:
    count = line['rollout/groups_generated']
    draws, draw = range(draw, draw + count), draw + count
    # Else the run ended before their fate was settled.
    whole = all(i in records for i in draws)
    if whole and (steps is None or line['step'] in steps):
      trained = [r for r in records.values() if r.step == line['step'] and r.weights]
      mine = [records[i] for i in draws]
      found.append(_step(c, line, mine, trained, known))
  if not found:
    raise ValueError(f'{workdir}: none of these steps is recorded whole, expected one')
  return found


def _step(
  c: dict[str, Any],
  line: dict[str, Any],
  mine: list[Record],
  trained: list[Record],
  known: dict[str, int],
) -> StepTimes:
  rounds: dict[int, list[Record]] = {}
  for record in mine:
    rounds.setdefault(record.round or 0, []).append(record)
  generate = sum((_generate(c, some, known) for some in rounds.values()), np.zeros(6))
  answers = sum(record.size + len(record.spares) for record in mine)
  keys = [field.name for field in dataclasses.fields(Rows)]
  rows = Rows(**{key: c['learner'][key] for key in keys})
  is_made = not line['update/skipped']
  times = {what: line[f'time/{what}_s'] for what in ('generate', 'reward', 'learn')}
  return StepTimes(
    step=line['step'],
    generate=generate,
    host=np.array([answers, 1], np.float64),
    reward=np.array([line['rollout/rounds'], answers], np.float64),
    learn=learning(_learned(trained, known), rows)[0] * is_made,
    generate_s=times['generate'],
    reward_s=times['reward'],
    learn_s=times['learn'],
    load_s=line.get('time/load_s'),
    # With lag both sides are busy at once, and nothing says what the host took.
    overhead_s=max(0.0, line['time/idle_s']) if 'time/idle_s' in line else 0.0,
  )


def _generate(
  c: dict[str, Any], records: list[Record], known: dict[str, int]
) -> np.ndarray:
  """Counts of the slowest engine in a round."""
  slots, chunk = c['sampler']['slots'], c['sampler']['chunk']
  asp = c.get('asp') or {'engines': 1, 'refill': True}
  means = [r.predicted_length or 1.0 for r in records]
  highs = [r.predicted_longest or r.predicted_length or 1.0 for r in records]
  sizes = [record.size for record in records]
  if not all(sizes):  # nothing is left of a group, and nobody knows what was sampled
    records = [record for record in records if record.size]
    return _generate(c, records, known) if records else np.zeros(6)
  minibatch = None if asp['refill'] else slots
  found = []
  for share in shares(sizes, means, highs, asp['engines'], minibatch=minibatch):
    if not len(share.requests):
      continue
    pairs = zip(share.requests.tolist(), share.answers.tolist(), strict=True)
    made = np.array([records[i].lengths[k] for i, k in pairs])
    if share.cuts is None:
      decoded = slots_lib.refill(made, slots, chunk)
    else:
      decoded = slots_lib.static(made, share.cuts, slots, chunk)
    prompts = np.array([known[record.prompt_id] for record in records])
    read_in = prompts[np.unique(share.requests)]
    found.append(generation(decoded, made, prompts[share.requests], read_in))
  return max(found, key=lambda counts: counts[0])


def _learned(
  records: list[Record], known: dict[str, int]
) -> Iterator[tuple[int, list[int]]]:
  """Tokens of each prompt, and of its answers that a step was trained on."""
  for record in records:
    kept = zip(record.lengths, record.weights, strict=True)
    yield known[record.prompt_id], [length for length, w in kept if w > 0]


def _prompt_lengths(
  records: dict[int, Record], prompts: PromptSet | None
) -> dict[str, int]:
  if prompts is None:
    return {record.prompt_id: 0 for record in records.values()}
  wanted = {record.prompt_id for record in records.values()}
  found = {
    key: len(prompts.get(name, index).tokens)
    for name, ids in prompts.ids().items()
    for index, key in enumerate(ids)
    if key in wanted
  }
  for record in records.values():
    if record.prompt_id not in found:
      raise ValueError(
        f'{record.where}: prompt {record.prompt_id!r}, expected one of these prompts: '
        'it is from a run with other datasets'
      )
  return found


def _json(path: pathlib.Path) -> dict[str, Any]:
  try:
    found = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(f'{path}: cannot be read: {error}') from None
  if not isinstance(found, dict):
    raise ValueError(f'{path}: {found!r:.60}, expected the settings of a run')
  return found


def _metrics(path: pathlib.Path) -> list[dict[str, Any]]:
  """The lines of steps; that of the last evaluation is none."""
  found, last = [], -1
  for number, line in lines_of(path):
    if not isinstance(line, dict):
      raise ValueError(f'{path}:{number}: {line!r:.60}, expected the numbers of a step')
    if 'rollout/groups_generated' in line:
      _check_line(f'{path}:{number}', line, last)
      last = line['step']
      found.append(line)
  return found


def _check_line(where: str, line: dict[str, Any], last: int) -> None:
  """Raises ValueError, naming the key, for what no run would write after step `last`."""

  def need(good: bool, key: str, expected: str) -> None:
    if not good:
      raise ValueError(f'{where}: {key} {line[key]!r:.60}, expected {expected}')

  fates = [key for key in _FATES if key in line]  # older runs do not tell of them
  times = [*_TIMES, *(key for key in ('time/load_s',) if key in line)]
  for key in ('step', *_COUNTS, *_TIMES, 'update/skipped'):
    if key not in line:
      raise ValueError(f'{where}: {key!r} is missing, expected the numbers of a step')
  for key in ('step', *_COUNTS, *fates):
    good = type(line[key]) is int and 0 <= line[key] < 2**53
    need(good, key, 'a whole number from 0')
  need(line['step'] > last, 'step', f'one above the {last} of the line before')
  for key in times:
    good = _is_number(line[key]) and line[key] >= 0
    need(good, key, 'a number of seconds from 0')
  need(line['update/skipped'] in (0, 1), 'update/skipped', '0 or 1')
  if 'time/idle_s' in line:  # a little below 0 where clocks differ
    need(_is_number(line['time/idle_s']), 'time/idle_s', 'a number of seconds')


def _is_number(value: Any) -> bool:
  return type(value) in (int, float) and abs(value) < math.inf


def _check_fates(
  workdir: pathlib.Path, lines: Sequence[dict[str, Any]], records: Sequence[Record]
) -> None:
  """Refuses groups of another run: in each step, as many have met each fate."""
  found = collections.Counter((record.step, record.fate) for record in records)
  for line in lines:
    for fate, key in zip(FATES, _FATES, strict=True):
      count, step = found[line['step'], fate], line['step']
      if line.get(key, count) != count:
        raise ValueError(
          f'{workdir / "rollouts.jsonl"}: {count} groups are {fate} at step {step}, '
          f'expected the {line[key]} that metrics.jsonl tells of: is it of another run?'
        )
