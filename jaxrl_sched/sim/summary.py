"""What a simulated run comes to: one row of numbers, from what its steps have told."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import sys
from typing import Any

import numpy as np

from jaxrl_sched.control.sagc_rules import exceeding
from jaxrl_sched.engine import Span

KEPT = 32  # bundles whose spans are kept, for a picture of the last ones
Line = dict[str, Any]
Row = dict[str, float]


@dataclasses.dataclass
class Tally:
  """Of answers: how many, how long, how good."""

  answers: int = 0
  tokens: int = 0
  verdicts: float = 0.0

  def add(self, lengths: np.ndarray, verdicts: np.ndarray) -> None:
    self.answers += len(lengths)
    self.tokens += int(lengths.sum())
    self.verdicts += float(verdicts.sum())


class Book:
  """Takes what the loop records, in place of a `Recorder`; nothing is written.

  Args:
    tau: a group with an answer longer than so many medians of it is a straggler.
    keeps_groups: keep the lines of groups, too, in `settled`.
  """

  def __init__(self, *, tau: float = 2.0, keeps_groups: bool = False):
    self.lines: list[Line] = []  # of the metrics, a step each
    self.spans: list[Span] = []  # of the newest bundles
    # All answers whose fate is settled, and those of them that were trained on.
    self.drawn, self.trained = Tally(), Tally()
    self.groups, self.stragglers = 0, 0
    self._tau, self._keeps_groups = tau, keeps_groups
    self.settled: list[Line] = []  # of rollouts.jsonl
    self.notes: list[str] = []  # that were said

  def log(self, step: int, metrics: Line) -> None:
    line = {'step': step} | metrics  # the same keys in all: one text each
    self.lines.append({sys.intern(key): value for key, value in line.items()})

  def rollouts(self, step: int, lines: Sequence[Line]) -> None:
    if self._keeps_groups:
      self.settled += [{'step': step} | line for line in lines]
    lines = [line for line in lines if line['lengths']]
    if not lines:
      return
    lengths = [np.array(line['lengths']) for line in lines]
    verdicts = np.concatenate([line['verdicts'] for line in lines])
    weights = [line['weights'] or [0.0] * line['size'] for line in lines]
    flat, used = np.concatenate(lengths), np.concatenate(weights) > 0
    self.drawn.add(flat, verdicts)
    self.trained.add(flat[used], verdicts[used])
    self.groups += len(lines)
    self.stragglers += int((exceeding(lengths, self._tau) > 0).sum())

  def samples(self, step: int, lines: Sequence[Line]) -> None:
    pass  # nobody has said anything

  def timeline(self, step: int, spans: Sequence[Span]) -> None:
    if step % KEPT == 0:
      self.spans = [span for span in self.spans if span.bundle > step - KEPT]
    self.spans += spans

  def say(self, text: str) -> None:
    self.notes.append(text)

  def flush(self) -> None:
    pass

  def column(self, key: str) -> np.ndarray:  # [steps] float64, NaN where not logged
    return np.array([line.get(key, math.nan) for line in self.lines], np.float64)

  def total(self, key: str) -> float:
    return float(np.nansum(self.column(key)))


def summarise(book: Book, totals: Mapping[str, Any]) -> Row:
  """The numbers of a run, by the keys of COLUMNS; what there is none of is left out.

  Args:
    totals: of the engine: where its time has gone.
  """
  wall = max(totals['wall'], 1e-12)
  row = {
    'wall': totals['wall'],
    'steps': float(np.isfinite(book.column('time/step_s')).sum()),
    'rollouts': book.total('rollout/answers_generated'),
    'groups': book.total('rollout/groups_trained'),
    'tokens': book.total('rollout/tokens_generated'),
    'trainer': totals['wait'] / wall,
  }
  for name in ('padding', 'skew', 'ordering'):
    row[name] = float(np.mean(totals.get(name, 0.0))) / wall
  kept = book.total('rollout/tokens_trained') + book.total('rollout/tokens_pruned')
  row['useful'] = kept / max(row['tokens'], 1)
  kept = row['rollouts'] - book.total('asp/spares')  # answers of their groups
  row['size'] = kept / max(book.total('rollout/groups_generated'), 1)
  lag, tokens = book.column('lag/mean'), book.column('rollout/tokens_trained')
  there = np.isfinite(lag)
  if there.any():
    row['lag'] = float(lag[there] @ tokens[there] / max(tokens[there].sum(), 1))
    row['lag_max'] = float(np.nanmax(book.column('lag/max')))
  events = book.column('sagc/event_rate')
  if np.isfinite(events).any():  # as its mode counts them
    row['events'] = float(np.nanmean(events))
  elif book.groups:
    row['events'] = book.stragglers / book.groups
  if book.trained.answers:
    t, d = book.trained, book.drawn
    row['length_bias'] = t.tokens / t.answers / (d.tokens / d.answers) - 1
    row['pass_bias'] = t.verdicts / t.answers - d.verdicts / d.answers
  return row


# --- as a table -----------------------------------------------------------------------


# Key -> heading, and how its numbers are written: by a unit that suits them, or in a
# format.
COLUMNS = {
  'wall': ('time', 'time'),
  'steps': ('steps', ',.0f'),
  'rollouts': ('rollouts', 'count'),
  'groups': ('groups trained', 'count'),
  'tokens': ('tokens', 'count'),
  'padding': ('padding', '.1%'),
  'skew': ('skew', '.1%'),
  'ordering': ('ordering', '.1%'),
  'trainer': ('trainer idle', '.1%'),
  'useful': ('useful', '.1%'),
  'lag': ('lag', '.2f'),
  'lag_max': ('max', '.0f'),
  'events': ('events', '.1%'),
  'size': ('group size', '.2f'),
  'length_bias': ('length bias', '+.1%'),
  'pass_bias': ('pass bias', '+.3f'),
  'pass_rate': ('pass rate', '.3f'),  # of all prompts, at the end
  'recorded': ('as recorded', '.1%'),  # requests that a trace could answer so
}
_UNITS = {  # from so much on, in what
  'time': ((7200, 3600, ' h'), (120, 60, ' min'), (0, 1, ' s')),
  'count': ((1e9, 1e9, ' G'), (1e6, 1e6, ' M'), (1e5, 1e3, ' k'), (0, 1, '')),
}


def cell(key: str, values: Sequence[float]) -> str:
  """The mean of some runs, and in brackets the smallest and the largest."""
  form, unit, mean = COLUMNS[key][1], '', float(np.mean(values))
  if form in _UNITS:
    scale, unit = next(u for least, *u in _UNITS[form] if mean >= least)
    values, mean = [v / scale for v in values], mean / scale
    form = ',.0f' if mean >= 1000 or form == 'count' and scale == 1 else '.3g'
  mean, low, high = (f'{v:{form}}' for v in (mean, min(values), max(values)))
  # The sign of percent stands once, behind all.
  unit = ' %' if '%' in mean else unit
  mean, low, high = (text.removesuffix('%') for text in (mean, low, high))
  return mean + ('' if low == high else f' [{low}, {high}]') + unit


def table(rows: Mapping[str, Sequence[Row]]) -> list[list[str]]:
  """Cells, the heading first: a line for each setting, over its seeds."""
  there = [
    key for key in COLUMNS if any(key in row for s in rows.values() for row in s)
  ]
  lines = [['setting', *(COLUMNS[key][0] for key in there)]]
  for name, seeds in rows.items():
    values = {key: [row[key] for row in seeds if key in row] for key in there}
    lines.append([name, *(cell(k, v) if v else '-' for k, v in values.items())])
  return lines


def markdown(lines: Sequence[Sequence[str]]) -> str:
  head, *rest = ['| ' + ' | '.join(line) + ' |' for line in lines]
  return '\n'.join([head, '|---' * len(lines[0]) + '|', *rest]) + '\n'


def folded(lines: Sequence[Sequence[str]], width: int, gap: int = 2) -> list[list[int]]:
  """Places of the columns that fit beside the first, in as many blocks as it takes.

  Args:
    width: in letters. gap: between two columns.
  """
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  blocks, used = [[]], widths[0]
  for i in range(1, len(widths)):
    if blocks[-1] and used + gap + widths[i] > width:
      blocks.append([])
      used = widths[0]
    blocks[-1].append(i)
    used += gap + widths[i]
  return blocks


def aligned(lines: Sequence[Sequence[str]], width: int) -> str:
  """For a terminal: columns that do not fit beside the others go below them."""
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return '\n\n'.join(
    '\n'.join(
      '  '.join([line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in block)])
      for line in lines
    )
    for block in folded(lines, width)
  )
