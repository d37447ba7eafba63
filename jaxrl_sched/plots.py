"""Plots as SVG elements that need nothing else: colours come from the page's style.

The i-th curve has the classes l<i> (line), a<i> (area) and b<i> (mark).
"""

from collections.abc import Callable, Sequence
import html
import math

import numpy as np

from jaxrl_sched.engine import Span

# Label -> (steps [n], values [n]).
Curves = dict[str, tuple[np.ndarray, np.ndarray]]

COLOURS = 8  # then they begin again
_POINTS = 600  # of a curve, at most
# Width and height of a plot, and its margins.
_W, _H = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26
# Of a timeline: its width, its lanes' height and left margin; what is drawn of it at
# most; its colours.
_WIDE, _LANE, _LANE_LEFT = 1160, 26, 76
LANES, BUNDLES = 12, 12
KINDS = ('generate', 'load', 'learn', 'evaluate')


def lines(
  curves: Curves, *, unit_range: bool = False, log: bool = False
) -> tuple[str, str]:
  """Curves as an SVG element, and a remark on what was left out of it or ''.

  Long curves are drawn pale, with a running mean over them; short ones with a mark for
  each value. `unit_range` shows 0 to 1 whatever the values.
  """
  values = np.concatenate([v for _, v in curves.values()])
  log = log and bool((values > 0).any())
  if log:
    curves = {k: (s[v > 0], np.log10(v[v > 0])) for k, (s, v) in curves.items()}
    values = np.log10(values[values > 0])
    low, cut = math.floor(values.min()), ''
    high = max(math.ceil(values.max()), low + 1)
  elif unit_range or (values.min() >= 0 and 0.3 < values.max() <= 1):
    low, high, cut = 0.0, 1.0, ''
  else:
    high, cut = _top(values)
    low, high = _with_room(float(values.min()), high)
  axes = _Axes(np.concatenate([s for s, _ in curves.values()]), low, high, log=log)
  parts = [axes.grid()]
  for i, (steps, column) in enumerate(curves.values()):
    x, y = _thinned(steps, column)
    if len(x) > 60:  # the noise pale, a running mean over it
      parts.append(f'<path class="l{i % COLOURS} raw" d="{axes.path(x, y)}"/>')
      y = _running_mean(np.clip(y, low, high), max(3, len(y) // 40))
    parts.append(f'<path class="l{i % COLOURS}" d="{axes.path(x, y)}"/>')
    if len(x) <= 30:
      parts += [
        f'<circle class="b{i % COLOURS}" r="3" cx="{axes.x(a):.1f}" '
        f'cy="{axes.y(b):.1f}"><title>step {a:g}: {short(10**b if log else b)}</title>'
        '</circle>'
        for a, b in zip(x, y, strict=True)
      ]
  return _svg(parts), cut


def stacked(curves: Curves) -> tuple[str, str]:
  """Areas on top of each other, as `lines`. A step is a step wide: one can be seen."""
  grid = np.unique(np.concatenate([s for s, _ in curves.values()]))
  layers = np.zeros((len(curves), len(grid)))
  for layer, (steps, column) in zip(layers, curves.values(), strict=True):
    layer[np.searchsorted(grid, steps)] = column
  x, _ = _thinned(grid, layers[0])
  tops = np.cumsum([_thinned(grid, layer)[1] for layer in layers], axis=0)
  high, cut = _top(tops[-1])
  axes = _Axes(np.array([x[0] - 0.5, x[-1] + 0.5]), 0.0, max(1.05 * high, 1e-9))
  middles = (x[1:] + x[:-1]) / 2
  edges = np.concatenate([[x[0] - 0.5], middles, [x[-1] + 0.5]])
  there, below = np.repeat(edges, 2)[1:-1], np.zeros(2 * len(x))
  parts = []
  for i, top in enumerate(np.repeat(tops, 2, axis=1)):
    outline = axes.path(
      np.concatenate([there, there[::-1]]), np.concatenate([top, below[::-1]])
    )
    parts.append(f'<path class="a{i % COLOURS}" d="{outline}Z"/>')
    below = top
  return _svg([*parts, axes.grid()]), cut


def timeline(spans: Sequence[Span]) -> tuple[str, str]:
  """A lane for each engine and the learner, as `lines`: the newest bundles.

  Bars bear the number of their bundle; where there is none somebody waits.
  """
  first = max(span.bundle for span in spans) - BUNDLES + 1
  begin = min(span.begin for span in spans if span.bundle >= first)
  end = max(begin + 1e-3, *(span.end for span in spans))
  # What reaches into the picture from older bundles is there too: no gap is made up.
  spans = [span for span in spans if span.bundle >= first or span.end > begin]
  lanes, left_out = _lanes({span.lane for span in spans})
  height = _TOP + len(lanes) * _LANE + _BOTTOM
  scale = (_WIDE - _LANE_LEFT - _RIGHT) / (end - begin)

  def x(second: float) -> float:
    return _LANE_LEFT + (max(second, begin) - begin) * scale

  parts = _seconds(begin, end, x, height)
  for lane, place in lanes.items():
    y = _TOP + place * _LANE + _LANE / 2
    parts.append(
      f'<text x="{_LANE_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
      f'{html.escape(lane)}</text>'
    )
  for span in spans:
    if span.lane in lanes:
      parts += _bar(span, x(span.begin), x(span.end), _TOP + lanes[span.lane] * _LANE)
  note = f'{left_out} more engines are not drawn' if left_out else ''
  return _svg(parts, _WIDE, height), note


def _lanes(names: set[str]) -> tuple[dict[str, int], int]:
  """Lane -> its place from the top: the first engines, then the learner; and how many
  engines are left out."""
  engines = sorted(names - {'learner'}, key=lambda name: (len(name), name))
  drawn = engines[: LANES - 1] + sorted(names & {'learner'})
  return {name: i for i, name in enumerate(drawn)}, max(0, len(engines) - LANES + 1)


def _bar(span: Span, left: float, right: float, top: float) -> list[str]:
  kind = KINDS.index(span.what)
  label = str(span.bundle) if span.bundle >= 0 else ''  # an evaluation is of none
  told = f'{span.lane}: {span.what} {label}'.rstrip()
  told += f', {span.end - span.begin:.3g} s'
  bar = (
    f'<rect class="b{kind}" x="{left:.1f}" y="{top + 3:.1f}" rx="2" '
    f'width="{max(right - left, 0.5):.1f}" height="{_LANE - 6}">'
    f'<title>{html.escape(told)}</title></rect>'
  )
  if not label or right - left < 7 * len(label) + 1:
    return [bar]
  middle = (left + right) / 2
  return [
    bar,
    f'<text class="in" x="{middle:.1f}" y="{top + _LANE / 2 + 4:.1f}" '
    f'text-anchor="middle">{label}</text>',
  ]


def _seconds(
  begin: float, end: float, x: Callable[[float], float], height: int
) -> list[str]:
  """Grid and axis of a timeline."""
  foot, ticks = height - _BOTTOM, _ticks(begin, end, 10)
  gap = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
  digits = max(0, -math.floor(math.log10(gap) + 1e-9))
  parts = []
  for tick in ticks:
    parts.append(f'<path class="grid" d="M{x(tick):.1f},{_TOP}V{foot}"/>')
    text = f'{tick:,.{digits}f}' + ' s' * (tick == ticks[-1])
    anchor = 'end' if x(tick) > _WIDE - _RIGHT - 24 else 'middle'
    parts.append(
      f'<text x="{x(tick):.1f}" y="{foot + 16}" text-anchor="{anchor}">{text}</text>'
    )
  return [*parts, f'<path class="tick" d="M{_LANE_LEFT},{foot}H{_WIDE - _RIGHT}"/>']


class _Axes:
  """From steps and values to places in the picture; ticks and grid."""

  def __init__(self, steps: np.ndarray, low: float, high: float, *, log: bool = False):
    self._x0, self._x1 = float(steps.min()), float(steps.max())
    if self._x0 == self._x1:
      self._x0, self._x1 = self._x0 - 0.5, self._x1 + 0.5
    self._low, self._high, self._log = low, high, log

  def x(self, step):
    return _LEFT + (step - self._x0) / (self._x1 - self._x0) * (_W - _LEFT - _RIGHT)

  def y(self, value):
    # What is cut off leaves the frame by a little, so that it shows.
    share = np.clip((value - self._low) / (self._high - self._low), -0.05, 1.05)
    return _H - _BOTTOM - share * (_H - _TOP - _BOTTOM)

  def path(self, x: np.ndarray, y: np.ndarray) -> str:
    points = zip(self.x(x), self.y(y), strict=True)
    return 'M' + 'L'.join(f'{a:.1f},{b:.1f}' for a, b in points)

  def grid(self) -> str:
    parts = []
    for tick in _ticks(self._low, self._high, 5, whole=self._log):
      y, text = self.y(tick), short(10.0**tick if self._log else tick)
      parts.append(f'<path class="grid" d="M{_LEFT},{y:.1f}H{_W - _RIGHT}"/>')
      parts.append(
        f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>'
      )
    y = _H - _BOTTOM
    for tick in _ticks(self._x0, self._x1, 6, whole=True):
      x = self.x(tick)
      parts.append(f'<path class="tick" d="M{x:.1f},{y}v4"/>')
      # The last tick may stand at the very edge: its text must not hang over.
      anchor = 'end' if x > _W - _RIGHT - 12 else 'middle'
      parts.append(
        f'<text x="{x:.1f}" y="{y + 16}" text-anchor="{anchor}">{tick:,.0f}</text>'
      )
    parts.append(f'<path class="tick" d="M{_LEFT},{y}H{_W - _RIGHT}"/>')
    return ''.join(parts)


def _top(values: np.ndarray) -> tuple[float, str]:
  """The highest value to show, and a remark if that cuts off peaks.

  The first steps compile, and a gradient may explode: the rest is to be seen too.
  """
  high = float(values.max())
  usual = float(np.quantile(values, 0.95))
  if len(values) >= 20 and usual > 0 and high > 4 * usual:
    return 1.5 * usual, f'peaks up to {short(high)} cut off'
  return high, ''


def _with_room(low: float, high: float) -> tuple[float, float]:
  """From 0 where that costs little, and never empty."""
  if 0 <= low < 0.6 * high:
    low = 0.0
  if low == high == 0:
    return 0.0, 1.0
  if high - low < 1e-12:
    spread = abs(high) / 2 or 0.5
    return low - spread, high + spread
  room = (high - low) * 0.05
  return low - room * (low < 0), high + room


def _ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
  """About `count` round numbers within [low, high]."""
  rough = (high - low) / count
  size = 10.0 ** math.floor(math.log10(rough))
  step = min((m * size for m in (1, 2, 5, 10)), key=lambda s: abs(s - rough))
  if whole:
    step = max(1.0, round(step))
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  return [i * step for i in range(first, last + 1)]


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """At most _POINTS points, each the mean of neighbours."""
  if len(x) <= _POINTS:
    return x.astype(np.float64), y
  starts = np.linspace(0, len(x), _POINTS, endpoint=False).astype(int)
  sizes = np.diff(np.append(starts, len(x)))
  return np.add.reduceat(x, starts) / sizes, np.add.reduceat(y, starts) / sizes


def _running_mean(y: np.ndarray, width: int) -> np.ndarray:
  """Over `width` neighbours, fewer at the ends."""
  kernel = np.ones(2 * (width // 2) + 1)
  total = np.convolve(y, kernel, mode='same')
  return total / np.convolve(np.ones(len(y)), kernel, mode='same')


def short(x: float) -> str:
  """A number for people, in about three digits: 1.2k, 35M, 0.0042."""
  for size, letter in ((1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
    if abs(x) >= size:
      return f'{x / (1e3 if letter == "k" else size):.3g}{letter}'
  return f'{x:,.0f}' if abs(x) >= 100 else f'{x:.3g}'.replace('e-0', 'e-')


def _svg(parts: list[str], width: int = _W, height: int = _H) -> str:
  return f'<svg viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'
