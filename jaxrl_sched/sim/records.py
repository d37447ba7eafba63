"""Reads the rollouts.jsonl of a run, and refuses what no run would have written."""

from collections.abc import Iterator
import dataclasses
import json
import math
import os
from typing import Any

from jaxrl_sched.control.ledger import FATES
from jaxrl_sched.sim.workload import FINISHES

# Of a line: those of `ledger.line`, and the step that settled the group's fate.
FIELDS = ('step', 'draw', 'prompt_id', 'dataset', 'size', 'lengths')
FIELDS += ('predicted_length', 'verdicts', 'rewards', 'finish', 'faults', 'versions')
FIELDS += ('fate', 'reason', 'weights')
OPTIONAL = ('predicted_longest', 'spares', 'earlier', 'round')
_LISTS = ('lengths', 'verdicts', 'rewards', 'finish', 'versions')  # an entry an answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """A group as it was written down."""

  where: str  # file and line, for messages
  step: int
  draw: int
  prompt_id: str
  dataset: str
  size: int
  lengths: list[int]
  predicted_length: float | None
  predicted_longest: float | None
  verdicts: list[float]
  rewards: list[float]
  finish: list[str]
  faults: list[str | None]
  versions: list[int]
  weights: list[float] | None  # of each answer in the batch; None: it was not in it
  spares: list[int]  # tokens of those that ever ran
  round: int | None  # of the step, where it is known


def read(path: str | os.PathLike, *, limit: int | None = None) -> list[Record]:
  """The groups of a rollouts.jsonl, in the order of the file.

  Args:
    limit: the most tokens that an answer may have. None: any number.

  Raises:
    ValueError: it cannot be read, or a line is none that a run would write. The
      message names the file, the line, and what was expected.
  """
  records, seen = [], {}
  for number, text in _lines(path):
    where = f'{path}:{number}'
    record = _record(where, text, limit)
    if record.draw in seen:
      raise ValueError(
        f'{where}: draw {record.draw} is already in line {seen[record.draw]}, expected '
        'every group once'
      )
    seen[record.draw] = number
    records.append(record)
  if not records:
    raise ValueError(f'{path}: no line, expected a group at least')
  return records


def _lines(path: str | os.PathLike) -> Iterator[tuple[int, str]]:
  try:
    with open(path, encoding='utf-8') as file:
      for number, text in enumerate(file, 1):
        if text.strip():
          yield number, text
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'{path}: cannot be read: {error}') from None


def _record(where: str, text: str, limit: int | None) -> Record:
  try:
    line = json.loads(text)
  except (ValueError, RecursionError):
    raise ValueError(f'{where}: not JSON: {text.strip()!r:.60}') from None
  if not isinstance(line, dict):
    raise ValueError(f'{where}: {line!r:.60}, expected the fields of a group')
  for key in line:
    if key not in FIELDS + OPTIONAL:
      raise ValueError(f'{where}: unknown field {key!r}, expected {", ".join(FIELDS)}')
  for key in FIELDS:
    if key not in line:
      raise ValueError(f'{where}: field {key!r} is missing')
  _check(where, line, limit)
  faults = line['faults'] or [None] * line['size']
  kept = {f.name: line[f.name] for f in dataclasses.fields(Record) if f.name in line}
  kept |= {'faults': faults, 'spares': [n for n in line.get('spares', []) if n]}
  return Record(where=where, **({'round': None, 'predicted_longest': None} | kept))


def _check(where: str, line: dict[str, Any], limit: int | None) -> None:
  def need(good: bool, key: str, expected: str) -> None:
    if not good:
      raise ValueError(f'{where}: {key} {line[key]!r:.60}, expected {expected}')

  for key in ('step', 'draw', 'size'):
    need(_is_whole(line[key]) and line[key] >= 0, key, 'a whole number from 0')
  for key in ('prompt_id', 'dataset', 'fate', 'reason'):
    need(isinstance(line[key], str), key, 'text')
  fates = (*FATES, 'pending')
  need(line['fate'] in fates, 'fate', f'one of {", ".join(fates)}')
  for key in ('predicted_length', 'predicted_longest'):
    predicted = line.get(key)
    good = predicted is None or (_is_number(predicted) and predicted > 0)
    need(good, key, 'a number above 0, or null')
  for key in (*_LISTS, 'faults', 'weights'):
    many = line[key]
    is_absent = (key == 'weights' and many is None) or (key == 'faults' and many == [])
    good = isinstance(many, list) and len(many) == line['size']
    need(good or is_absent, key, f'a list of {line["size"]} entries, as size says')
  most = math.inf if limit is None else limit
  good = all(_is_whole(n) and 1 <= n <= most for n in line['lengths'])
  need(good, 'lengths', f'each from 1 to {"any number" if limit is None else limit}')
  for key in ('verdicts', 'rewards'):
    need(all(map(_is_number, line[key])), key, 'finite numbers')
  good = all(_is_number(w) and w >= 0 for w in line['weights'] or ())
  need(good, 'weights', 'numbers from 0, or null')
  good = all(name in FINISHES for name in line['finish'])
  need(good, 'finish', f'each one of {", ".join(FINISHES)}')
  good = all(fault is None or isinstance(fault, str) for fault in line['faults'])
  need(good, 'faults', 'text or null')
  good = all(_is_whole(n) and 0 <= n <= line['step'] for n in line['versions'])
  need(good, 'versions', f'each from 0 to the step, {line["step"]}')
  if 'spares' in line:
    good = isinstance(line['spares'], list)
    good = good and all(_is_whole(n) and n >= 0 for n in line['spares'])
    need(good, 'spares', 'a list of tokens, from 0')
  if 'round' in line:
    need(_is_whole(line['round']) and line['round'] >= 0, 'round', 'a number from 0')


def _is_whole(value: Any) -> bool:
  return type(value) is int


def _is_number(value: Any) -> bool:
  return type(value) in (int, float) and math.isfinite(value)
