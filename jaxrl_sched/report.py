"""A run as one page of HTML: headline numbers, plots, some answers and the config.

Everything is inside the page: no scripts, no network. What a run did not log is left
out, so a run of any length and any set of methods has a report.
"""

import collections
import dataclasses
import html
import json
import os
import pathlib
import re
from typing import Any

import numpy as np

from jaxrl_sched import plots
from jaxrl_sched.console import duration
from jaxrl_sched.engine import Span
from jaxrl_sched.metrics import iter_jsonl, read_jsonl
from jaxrl_sched.panels import BESIDE, HELD_OUT, PARTIAL, SECTIONS, TIME, Panel

_TIMES = ('time/generate_s', 'time/reward_s', 'time/learn_s', 'time/idle_s')
_SAMPLES = 4  # groups, the newest
_ANSWERS = 4  # of each
_LONGEST = 3000  # characters of a text; the middle of a longer one is left out
_SPAN = tuple(field.name for field in dataclasses.fields(Span))
_FATES = ('trained', 'filtered', 'pending', 'dropped')  # others come after


def write_report(workdir: str | os.PathLike) -> pathlib.Path:
  """Writes `report.html` from the files in a run's folder, and gives its path."""
  workdir = pathlib.Path(workdir)
  columns = _columns(workdir / 'metrics.jsonl')
  name = html.escape(workdir.resolve().name)
  config_file = workdir / 'config.json'
  config = json.loads(config_file.read_text('utf-8')) if config_file.exists() else {}

  parts = [f'<h1>{name}</h1>']
  if columns:
    parts.append(_headline(columns, config))
    parts += [_held_out_table(columns, *both) for both in _held_out(columns).items()]
  else:
    parts.append('<p>No step has been logged in this folder yet.</p>')
  columns |= _fates(workdir / 'rollouts.jsonl')
  lag = (config.get('asp') or {}).get('lag', 0)
  for title, panels in SECTIONS.items():
    panels = [BESIDE if lag and panel is TIME else panel for panel in panels]
    if _has_partial_rewards(columns) and HELD_OUT in panels:
      panels.insert(panels.index(HELD_OUT), PARTIAL)
    figures = ''.join(figure(panel, columns) for panel in panels)
    if figures:
      parts.append(f'<h2>{title}</h2><div class="plots">{figures}</div>')
  parts.append(_timeline(workdir / 'timeline.jsonl'))
  parts.append(_samples(workdir / 'samples.jsonl'))
  if config:
    parts.append(f'<h2>Config</h2>{_config_table(config)}')

  return write_page(workdir / 'report.html', name, parts)


def write_page(out: pathlib.Path, title: str, parts: list[str]) -> pathlib.Path:
  """Whoever has it open never sees half a page. The title is HTML."""
  page = _PAGE.replace('@title', title).replace('@body', '\n'.join(parts))
  new = out.with_name(out.name + '.new')
  new.write_text(page, 'utf-8')
  os.replace(new, out)
  return out


def _columns(path: pathlib.Path) -> plots.Curves:
  """What was logged, by key; and 'speed' and 'time/other_s' worked out of it."""
  table = collections.defaultdict(lambda: ([], []))
  for line in read_jsonl(path) if path.exists() else []:
    values = {k: v for k, v in line.items() if isinstance(v, int | float)}
    seconds = values.get('time/step_s')
    if seconds:
      if 'rollout/tokens_generated' in values:
        values['speed'] = values['rollout/tokens_generated'] / seconds
      known = [values[k] for k in _TIMES if k in values]
      if known:
        values['time/other_s'] = max(0.0, seconds - sum(known))
    for key, value in values.items():
      steps, column = table[key]
      steps.append(line['step'])
      column.append(value)
  return {k: (np.array(s), np.array(v, np.float64)) for k, (s, v) in table.items()}


def _fates(path: pathlib.Path) -> plots.Curves:
  """Groups a step by what became of them, as columns 'fate/<fate>'."""
  counts = collections.defaultdict(collections.Counter)
  for line in iter_jsonl(path) if path.exists() else []:
    if isinstance(line.get('fate'), str):
      counts[line['fate']][line['step']] += 1
  steps = sorted(set().union(*counts.values()))
  if not steps:
    return {}
  order = [*_FATES, *sorted(counts.keys() - set(_FATES))]  # so each keeps its colour
  return {
    f'fate/{f}': (np.array(steps), np.array([counts[f][s] for s in steps], np.float64))
    for f in order
  }


def _matching(columns: plots.Curves, keys: dict[str, str]) -> plots.Curves:
  """The columns of the keys that were logged, by label; group sizes ascend."""
  found = {}
  for pattern, label in keys.items():
    regex = re.compile(re.escape(pattern).replace(r'\*', '(.+)'))
    for key in sorted(columns, key=_size):  # others stay in their order
      if match := regex.fullmatch(key):
        text = label.replace('*', match[1]) if '*' in label else label
        found[text] = columns[key]
  return found


def _size(key: str) -> int:
  """The group size that a key ends in; 0: in none."""
  last = key.rpartition('/')[2]
  return int(last) if last.isdecimal() else 0


def figure(panel: Panel, columns: plots.Curves) -> str:
  """The panel's plot with title and legend, or '' where nothing of it was logged."""
  curves = _matching(columns, panel.keys)
  if not curves:
    return ''
  if panel.stacked:
    svg, cut = plots.stacked(curves)
  else:
    svg, cut = plots.lines(curves, unit_range=panel.unit_range, log=panel.log)
  legend = ''.join(
    f'<span><i class="b{i % plots.COLOURS}"></i>{html.escape(label)} '
    f'<b>{plots.short(values[-1])}</b></span>'
    for i, (label, (_, values)) in enumerate(curves.items())
  )
  note = '; '.join(filter(None, [panel.note, cut]))
  return (
    f'<figure><figcaption><h3>{panel.title}</h3><p>{note}</p></figcaption>'
    f'{svg}<div class="legend">{legend}</div></figure>'
  )


def _timeline(path: pathlib.Path) -> str:
  """Who was busy with what in the last steps, where that was logged."""
  newest: dict[int, list[Span]] = {}  # by the step that told of them
  for line in iter_jsonl(path) if path.exists() else []:
    span = Span(**{field: line[field] for field in _SPAN})
    newest.setdefault(line['step'], []).append(span)
    # Longer than what is drawn: a lane may be some bundles behind another.
    while max(newest) - min(newest) > 2 * plots.BUNDLES:
      del newest[min(newest)]
  spans = [span for spans in newest.values() for span in spans]
  return f'<h2>Timeline</h2>{timeline(spans, "The last steps")}' if spans else ''


def timeline(spans: list[Span], title: str) -> str:
  """Spans as a figure. The title is HTML."""
  svg, cut = plots.timeline(spans)
  note = '; '.join(filter(None, ['bars bear the number of their bundle', cut]))
  legend = ''.join(
    f'<span><i class="b{i}"></i>{kind}</span>'
    for i, kind in enumerate(plots.KINDS)
    if f'class="b{i}"' in svg
  )
  return (
    f'<figure><figcaption><h3>{title}</h3><p>{note}</p></figcaption>'
    f'{svg}<div class="legend">{legend}</div></figure>'
  )


def _headline(columns: plots.Curves, config: dict[str, Any]) -> str:
  tiles = []

  def tile(label: str, value: str, note: str = '') -> None:
    tiles.append(f'<div><dt>{label}</dt><dd>{value}</dd><small>{note}</small></div>')

  for what, key in _held_out(columns).items():
    held_out = _matching(columns, {key: '*'})
    first = np.mean([values[0] for _, values in held_out.values()])
    last = np.mean([values[-1] for _, values in held_out.values()])
    note = f'mean of {len(held_out)} datasets' if len(held_out) > 1 else ''
    tile(what, f'{first:.3f} → {last:.3f}', note)
  if 'pass_rate' in columns:
    values = columns['pass_rate'][1]
    few = min(5, len(values))
    first, last = values[:few].mean(), values[-few:].mean()
    note = f'first and last {few} steps' if few > 1 else ''
    tile('Pass rate in training', f'{first:.3f} → {last:.3f}', note)
  # The line after the last step has nothing but that step's evaluation.
  evaluation = 'eval/', 'step', 'time/evaluate_s'
  ends = [s[-1] for k, (s, _) in columns.items() if not k.startswith(evaluation)]
  if ends:
    planned = f'of {config["steps"]:,}' if 'steps' in config else ''
    tile('Steps', f'{max(ends) + 1:,}', planned)
  refused, skipped = (
    columns[key][1].sum() if key in columns else 0
    for key in ('update/refused', 'update/skipped')
  )
  if refused or skipped:
    note = f'{refused:.0f} not finite, {skipped:.0f} without a gradient'
    tile('Updates not made', f'{refused + skipped:,.0f}', note)
  if 'rollout/tokens_generated' in columns:
    generated = columns['rollout/tokens_generated'][1].sum()
    note = ''
    if 'rollout/tokens_trained' in columns and generated:
      note = f'{columns["rollout/tokens_trained"][1].sum() / generated:.0%} trained on'
    tile('Tokens generated', plots.short(generated), note)
  if 'time/step_s' in columns:
    seconds = columns['time/step_s'][1]
    tile('Time', duration(seconds.sum()), f'{np.median(seconds):.2g} s a step')
  if 'speed' in columns:
    tile('Tokens a second', plots.short(generated / seconds.sum()), 'over all steps')
  return f'<dl>{"".join(tiles)}</dl>'


def _held_out(columns: plots.Curves) -> dict[str, str]:
  """Which keys show held-out prompts: heading -> keys."""
  found = {}
  if _has_partial_rewards(columns):
    found['Held-out reward'] = 'eval/*/reward'
  if _matching(columns, {'eval/*/pass@1': '*'}):
    found['Held-out pass@1'] = 'eval/*/pass@1'
  return found


def _has_partial_rewards(columns: plots.Curves) -> bool:
  """Whether held-out rewards are not all 0 or the maximum."""
  rewards = _matching(columns, {'eval/*/reward': '*'})
  rates = _matching(columns, {'eval/*/pass@1': '*'})
  return any(
    not np.allclose(values, rates[name][1], rtol=0, atol=1e-6)
    for name, (_, values) in rewards.items()
  )


def _held_out_table(columns: plots.Curves, what: str, key: str) -> str:
  rows = []
  for name, (steps, values) in _matching(columns, {key: '*'}).items():
    best = int(np.argmax(values))
    cells = f'{values[0]:.3f}', f'{values[best]:.3f}', steps[best], f'{values[-1]:.3f}'
    rows.append(
      f'<tr><th>{html.escape(name)}</th>' + ''.join(f'<td>{c}</td>' for c in cells)
    )
  head = ''.join(f'<th>{h}</th>' for h in (what, 'first', 'best', 'at step', 'last'))
  return f'<table class="numbers"><tr>{head}</tr>{"".join(rows)}</table>'


def _samples(path: pathlib.Path) -> str:
  """What was asked and answered in the newest groups whose texts were kept."""
  groups: dict[tuple, list[dict[str, Any]]] = {}
  for line in iter_jsonl(path) if path.exists() else []:
    groups.setdefault((line['step'], line['draw']), []).append(line)
    while len(groups) > _SAMPLES:
      del groups[next(iter(groups))]
  cards = []
  for (step, _), lines in groups.items():
    first = lines[0]
    rows = ''.join(
      f'<tr><td>{line["reward"]:.3g}</td><td>{html.escape(line["finish"])}</td>'
      f'<td><pre>{_text(line["text"])}</pre></td></tr>'
      for line in lines[:_ANSWERS]
    )
    cards.append(
      f'<table class="samples"><caption>{html.escape(first["prompt_id"])}, step {step}, '
      f'{min(_ANSWERS, len(lines))} of {len(lines)} answers</caption>'
      f'<tr><th>prompt</th><td colspan="2"><pre>{_text(first["prompt"])}</pre></td></tr>'
      f'<tr><th>truth</th><td colspan="2">{_text(json.dumps(first["truth"]))}</td></tr>'
      f'<tr><th>reward</th><th>finish</th><th>text</th></tr>{rows}</table>'
    )
  return '<h2>Samples</h2>' + '\n'.join(cards) if cards else ''


def _text(text: str) -> str:
  if len(text) > _LONGEST:
    half = _LONGEST // 2
    text = f'{text[:half]} [...] {text[-half:]}'
  return html.escape(text)


def _config_table(config: dict[str, Any]) -> str:
  blocks = collections.defaultdict(list)
  for key, value in config.items():
    if isinstance(value, dict):
      blocks[key] += _flat(value)
    else:
      blocks[''].append((key, value))
  tables = []
  for block in sorted(blocks):  # '' comes first
    rows = ''.join(
      f'<tr><th>{html.escape(k)}</th><td>{html.escape(json.dumps(v))}</td></tr>'
      for k, v in blocks[block]
    )
    caption = f'<caption>{html.escape(block)}</caption>' if block else ''
    tables.append(f'<table>{caption}{rows}</table>')
  return f'<div class="config">{"".join(tables)}</div>'


def _flat(block: dict[str, Any], prefix: str = '') -> list[tuple[str, Any]]:
  rows = []
  for key, value in block.items():
    if isinstance(value, dict) and value:
      rows += _flat(value, f'{prefix}{key}.')
    else:
      rows.append((prefix + key, value))
  return rows


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@title</title>
<style>
:root {
  color-scheme: light dark;
  --back: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #667085; --line: #e4e7ec;
  --c0: #2f6fde; --c1: #e07b1a; --c2: #1f9d6b; --c3: #c8455b;
  --c4: #7d5bd0; --c5: #12a0b4; --c6: #9a7b1f; --c7: #8a94a6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #12161c; --card: #1b2129; --ink: #e6eaf0; --soft: #98a2b3; --line: #2d3540;
    --c0: #6ea3ff; --c1: #f5a04c; --c2: #4cc795; --c3: #f0798d;
    --c4: #ab8ff2; --c5: #4fcbdc; --c6: #d0b257; --c7: #8a94a6;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1240px; padding: 28px 20px 60px; background: var(--back);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
}
h1 { font-size: 26px; margin: 0 0 18px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 34px 0 12px; }
h3 { font-size: 15px; margin: 0; }
dl { display: grid; gap: 12px; margin: 0 0 16px;
  grid-template-columns: repeat(auto-fit, minmax(195px, 1fr)); }
dl div, figure, table {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
}
dl div { padding: 12px 16px; }
dt, small, figcaption p, caption { color: var(--soft); font-size: 13px; }
dd { margin: 2px 0; font-size: 20px; font-weight: 600; white-space: nowrap; }
.plots { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; padding: 12px 16px 10px; }
figcaption { display: flex; gap: 10px; align-items: baseline; flex-wrap: wrap; }
figcaption p { margin: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
svg text.in { fill: var(--card); font-weight: 600; }
svg path { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg path.grid { stroke: var(--line); stroke-width: 1; }
svg path.tick { stroke: var(--soft); stroke-width: 1; }
svg path.raw { opacity: 0.25; stroke-width: 1; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin-right: 6px; }
.legend b { font-weight: 600; font-variant-numeric: tabular-nums; }
table { border-collapse: separate; border-spacing: 0; font-size: 13px; }
caption { text-align: left; font-weight: 600; padding: 0 0 4px 2px; }
th, td { padding: 4px 12px; text-align: left; vertical-align: top; font-weight: 400; }
tr + tr > * { border-top: 1px solid var(--line); }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
th { color: var(--soft); }
.numbers { margin-bottom: 12px; }
.numbers td, .numbers th + th { text-align: right; }
.numbers td:first-child { text-align: left; }
.wide { overflow-x: auto; margin-bottom: 12px; }
.wide td, .wide th { white-space: nowrap; }
.samples { width: 100%; margin-bottom: 16px; }
.samples td:last-child { width: 90%; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px; }
.config { columns: 360px; column-gap: 14px; }
.config table { width: 100%; margin-bottom: 16px; break-inside: avoid; }
.config th { width: 45%; overflow-wrap: anywhere; }
@marks
</style>
<body>
@body
</body>
</html>
""".replace(
  '@marks',
  '\n'.join(
    f'.l{i} {{ stroke: var(--c{i}); }} .b{i} {{ background: var(--c{i}); '
    f'fill: var(--c{i}); }} svg path.a{i} {{ fill: var(--c{i}); opacity: 0.85; }}'
    for i in range(plots.COLOURS)
  ),
)
