"""Reads the rollouts.jsonl of a run, and refuses what no run would have written."""

from collections.abc import Iterator
import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

from jaxrl_sched.control.ledger import FATES
from jaxrl_sched.sim.workload import FINISHES
from jaxrl_sched.types import LARGEST

# Of a line: those of `ledger.line`, and the step that settled the group's fate.
FIELDS = ('step', 'draw', 'prompt_id', 'dataset', 'size', 'lengths')
FIELDS += ('predicted_length', 'verdicts', 'rewards', 'finish', 'faults', 'versions')
FIELDS += ('fate', 'reason', 'weights')
OPTIONAL = ('predicted_longest', 'spares', 'earlier', 'round', 'components')
_BIG = 2**53  # numbers below are the same as float64
_LONGEST = 2**31  # tokens of an answer, where nothing says how many there may be
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
  fate: str
  weights: list[float] | None  # of each answer in the batch; None: it was not in it
  spares: list[int]  # tokens of those that ever ran
  earlier: list[list[list[int]]]  # of each answer; empty: none of it was ever paused
  round: int | None  # of the step, where it is known
  components: dict[str, list[float]]  # of each answer, where it has several rewards


def read(path: str | os.PathLike, *, limit: int | None = None) -> list[Record]:
  """The groups of a rollouts.jsonl, in the order of the file.

  Args:
    limit: the most tokens that an answer may have. None: any number.

  Raises:
    ValueError: it cannot be read, or a line is none that a run would write. The
      message names the file, the line, and what was expected.
  """
  records, seen = [], {}
  for number, line in lines_of(path):
    where = f'{path}:{number}'
    record = _record(where, line, limit)
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


def asp_of(path: str | os.PathLike) -> dict[str, Any]:
  """The `asp` settings of the run that wrote a rollouts.jsonl, where they are known.

  Raises:
    ValueError: the config.json beside it cannot be read.
  """
  file = pathlib.Path(path).with_name('config.json')
  try:
    found = json.loads(file.read_bytes())
  except FileNotFoundError:
    return {}
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(f'{file}: cannot be read: {error}') from None
  asp = found.get('asp') if isinstance(found, dict) else None
  return asp if isinstance(asp, dict) else {}


def lines_of(path: str | os.PathLike) -> Iterator[tuple[int, Any]]:
  """Numbers of lines, and what they hold. A torn last line behind others is not read."""
  try:
    with open(path, 'rb') as file:
      for number, text in enumerate(file, 1):
        if not text.strip():
          continue
        try:
          yield number, json.loads(text)
        except (ValueError, RecursionError):
          if text.endswith(b'\n') or number == 1:
            told = text.strip().decode(errors='replace')
            raise ValueError(f'{path}:{number}: not JSON: {told!r:.60}') from None
  except OSError as error:
    raise ValueError(f'{path}: cannot be read: {error}') from None


def _record(where: str, line: Any, limit: int | None) -> Record:
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
  kept |= {'earlier': line.get('earlier', []), 'components': line.get('components', {})}
  return Record(where=where, **({'round': None, 'predicted_longest': None} | kept))


def _check(where: str, line: dict[str, Any], limit: int | None) -> None:
  def need(good: bool, key: str, expected: str) -> None:
    if not good:
      raise ValueError(f'{where}: {key} {line[key]!r:.60}, expected {expected}')

  for key in ('step', 'draw', 'size'):
    need(_is_whole(line[key]) and line[key] >= 0, key, 'a whole number from 0')
    need(line[key] < _BIG, key, 'one below 2**53')
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
  most = _LONGEST if limit is None else limit
  good = all(_is_whole(n) and 1 <= n <= most for n in line['lengths'])
  need(good, 'lengths', f'each from 1 to {most}')
  for key in ('verdicts', 'rewards'):
    need(all(map(_is_number, line[key])), key, 'finite numbers')
    good = all(abs(value) <= LARGEST for value in line[key])
    need(good, key, f'none above {LARGEST:g} in size')
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
    good = good and all(_is_whole(n) and 0 <= n <= _LONGEST for n in line['spares'])
    need(good, 'spares', 'a list of tokens, from 0')
  if 'round' in line:
    good = _is_whole(line['round']) and 0 <= line['round'] < _BIG
    need(good, 'round', 'a number from 0')
  if 'components' in line:
    found = line['components']
    good = isinstance(found, dict) and all(
      isinstance(many, list)
      and len(many) == line['size']
      and all(map(_is_number, many))
      for many in found.values()
    )
    need(good, 'components', f'lists of {line["size"]} finite numbers by name')
  if 'earlier' in line:
    _check_earlier(where, line)


def _check_earlier(where: str, line: dict[str, Any]) -> None:
  """Of each answer, the runs of (tokens, version) before it was paused, if it was."""

  def good(answer: Any, length: int) -> bool:
    return (
      isinstance(answer, list)
      and all(isinstance(run, list) and len(run) == 2 for run in answer)
      and all(_is_whole(n) and n >= 1 for n, _ in answer)
      and all(_is_whole(v) and 0 <= v <= line['step'] for _, v in answer)
      and (not answer or sum(n for n, _ in answer) < length)
    )

  earlier, lengths = line['earlier'], line['lengths']
  is_list = isinstance(earlier, list) and len(earlier) == line['size']
  if not is_list or not all(map(good, earlier, lengths)):
    raise ValueError(
      f'{where}: earlier {earlier!r:.60}, expected for each of {line["size"]} answers a '
      'list of [tokens, version], tokens from 1 and fewer than it has, versions from 0 '
      f'to the step, {line["step"]}'
    )


def _is_whole(value: Any) -> bool:
  return type(value) is int


def _is_number(value: Any) -> bool:
  return type(value) in (int, float) and abs(value) <= sys.float_info.max
