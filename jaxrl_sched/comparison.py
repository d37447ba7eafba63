"""Simulated runs beside one another: a table, curves, and who did what when."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import html
import itertools
import pathlib
import re
import tempfile

import numpy as np

from jaxrl_sched import plots, report
from jaxrl_sched.metrics import to_json
from jaxrl_sched.panels import Panel
from jaxrl_sched.sim import summary

_NAME = 120  # letters of a folder's name
_PAGE = 150  # letters of a table's line, with 4 between two columns
DRAWN = 8  # settings in a picture, at most: one a colour
PANELS = (
  Panel('Group size', 'answers a prompt', {'size/*': '*'}),
  Panel('Events', 'share of groups with a straggler', {'events/*': '*'}),
  Panel(
    'Waiting',
    'share of the time of a step in which an engine waits for others',
    {'waits/*': '*'},
    unit_range=True,
  ),
  Panel(
    'Empty slots',
    'share of those of engines at work',
    {'slots/*': '*'},
    unit_range=True,
  ),
  Panel('Pass rate', 'of what is drawn', {'pass_rate/*': '*'}, unit_range=True),
  Panel('Time', 'seconds a step', {'time/*': '*'}),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A simulated run that is over."""

  book: summary.Book
  row: summary.Row
  seed: int
  recorded: int = 0  # of the groups, those that a trace has answered as they were
  groups: int = 0  # that it was asked for


Runs = Mapping[str, Sequence[Run]]  # setting -> a run for each seed


def cells(found: Runs) -> list[list[str]]:
  """The table; its first line is the heading."""
  return summary.table(
    {name: [run.row for run in runs] for name, runs in found.items()}
  )


def make_new(folder: pathlib.Path) -> None:
  """Makes the folder, or takes an empty one.

  Raises:
    ValueError: it has anything in it, which would be mixed with what is written; or
      nothing can be written there.
  """
  try:
    what = 'a file' if folder.exists() and not folder.is_dir() else None
    if what is None:
      folder.mkdir(parents=True, exist_ok=True)
      inside = min((path.name for path in folder.iterdir()), default=None)
      if inside is None:
        tempfile.TemporaryFile(dir=folder).close()
      else:
        what = f'has {inside!r} in it'
  except OSError as error:
    raise ValueError(f'--out={folder}: cannot be written: {error}') from None
  if what is not None:
    raise ValueError(f'--out={folder}: {what}, expected a new or an empty folder')


def folders(names: Iterable[str]) -> dict[str, str]:
  """A folder's name for each setting: none is too long, and no two are the same."""
  found, taken = {}, {'table.md', 'simulate.html'}
  for name in names:
    plain = re.sub(r'[^\w.=,-]+', '_', name, flags=re.ASCII)[:_NAME]
    numbered = (f'{plain}_{number}' for number in itertools.count(2))
    found[name] = next(
      n for n in itertools.chain([plain], numbered) if n.lower() not in taken
    )
    taken.add(found[name].lower())
  return found


def write(
  folder: pathlib.Path, title: str, found: Runs, notes: Sequence[str] = ()
) -> None:
  """table.md, simulate.html, and SETTING/seed<seed>/metrics.jsonl.

  Args:
    notes: what it was made of: seeds, costs, answers.
  """
  folder.mkdir(parents=True, exist_ok=True)
  table = cells(found)
  (folder / 'table.md').write_text(summary.markdown(table), 'utf-8')
  places = folders(found)
  for name, runs in found.items():
    for run in runs:
      place = folder / places[name] / f'seed{run.seed}'
      place.mkdir(parents=True, exist_ok=True)
      with (place / 'metrics.jsonl').open('w', encoding='utf-8') as file:
        file.writelines(to_json(line) + '\n' for line in run.book.lines)
  first = {name: runs[0] for name, runs in itertools.islice(found.items(), DRAWN)}
  columns = {}
  for name, run in first.items():
    columns |= _curves(name, run.book)
  figures = ''.join(report.figure(panel, columns) for panel in PANELS)
  parts = [f'<h1>{html.escape(title)}</h1>']
  parts += [f'<p>{html.escape(note)}.</p>' for note in notes]
  parts += [
    _html_table([[line[0], *(line[i] for i in block)] for line in table])
    for block in summary.folded(table, _PAGE, gap=4)
  ]
  if len(found) > len(first):
    parts.append(f'<p>{len(found) - len(first)} more settings are not drawn.</p>')
  parts += ['<h2>Over the steps</h2>', f'<div class="plots">{figures}</div>']
  parts += [_lags(first), '<h2>The last steps</h2>']
  for name, run in first.items():
    if run.book.spans:
      parts.append(report.timeline(run.book.spans, html.escape(name)))
  report.write_page(folder / 'simulate.html', html.escape(title), parts)


def _curves(name: str, book: summary.Book) -> plots.Curves:
  """Of a run, as columns 'what/<setting>'."""
  seconds = book.column('time/step_s')
  with np.errstate(divide='ignore', invalid='ignore'):
    answers, groups = (
      book.column(f'rollout/{what}_generated') for what in ('answers', 'groups')
    )
    spares = np.nan_to_num(book.column('asp/spares'))  # not told where there are none
    found = {
      'size': (answers - spares) / groups,
      'events': book.column('sagc/event_rate'),
      'waits': book.column('time/idle_s/sampler') / seconds,
      'slots': book.column('rollout/idle_slots'),
      'pass_rate': book.column('pass_rate'),
      'time': seconds,
    }
  steps = book.column('step')
  there = {what: np.isfinite(column) for what, column in found.items()}
  return {
    f'{what}/{name}': (steps[there[what]], column[there[what]])
    for what, column in found.items()
    if there[what].any()
  }


def _lags(found: Mapping[str, Run]) -> str:
  """The histogram: how old the weights were that trained tokens were sampled with."""
  shares = {}
  for name, run in found.items():
    tokens = run.book.column('rollout/tokens_trained')
    keys = {key for line in run.book.lines for key in line}
    for key in keys:
      if key.startswith('lag/share/'):
        share = np.nansum(run.book.column(key) * tokens) / max(np.nansum(tokens), 1)
        shares.setdefault(int(key.removeprefix('lag/share/')), {})[name] = share
  if not shares:
    return ''
  lines = [['share of trained tokens with a lag of', *map(str, sorted(shares))]]
  for name in found:
    line = [shares[lag].get(name, 0.0) for lag in sorted(shares)]
    lines.append([name, *(f'{100 * share:.1f} %' for share in line)])
  return '<h2>Lag</h2>' + _html_table(lines)


def _html_table(lines: Sequence[Sequence[str]]) -> str:
  rows = [
    ''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in line)
    for tag, part in (('th', lines[:1]), ('td', lines[1:]))
    for line in part
  ]
  body = ''.join(f'<tr>{row}</tr>' for row in rows)
  return f'<div class="wide"><table class="numbers">{body}</table></div>'
