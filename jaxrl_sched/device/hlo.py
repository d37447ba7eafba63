"""Counts FLOPs and collectives in the text of a compiled program."""

import collections
import dataclasses
import math
import re

import numpy as np

KINDS = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
  'collective-broadcast',
)
_HEAD = re.compile(r'^(ENTRY )?%?([\w.-]+) \(.*\{$')
_LINE = re.compile(r'^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$')
_SHAPE = re.compile(r'\b([a-z]+)(\d*)\w*\[([\d,]*)\]')
_CALLED = re.compile(r'(?:calls|to_apply|body|\w+_computation)=%?([\w.-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')


@dataclasses.dataclass(frozen=True)
class Counts:
  """FLOPs, and of each kind of collective the number and the bytes, on one device."""

  flops: float
  collectives: dict[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class _Line:
  name: str
  shape: str
  kind: str
  rest: str  # operands and attributes

  @property
  def operands(self) -> list[str]:
    return re.findall(r'%([\w.-]+)', self.rest.partition(')')[0])

  def attribute(self, name: str) -> str | None:
    found = re.search(rf'\b{name}=(\{{[^}}]*\}}|[^,\s]+)', self.rest)
    return None if found is None else found[1].strip('{}%')


def read(text: str, *, trips: int = 1) -> Counts:
  """What a device does in one run of the program.

  What stands in a loop counts as often as the loop turns: as the program says, or as
  the loop's condition does where that compares a counter, from 0, with a constant.

  FLOPs are those of products of matrices, 2 for a multiplication with its addition, and
  those that a custom kernel says it needs.

  Bytes of a collective are those of what it takes, or of what it gives, whichever is
  more: a gather's are the whole, a reduction's what is reduced. One that was broken
  into steps, to go on beside products, is one.

  Args:
    trips: of other loops.
  """
  computations, entry = _computations(text)
  flops, found = 0.0, {}

  def visit(name: str, times: int) -> None:
    nonlocal flops
    lines = computations[name]
    for line in lines.values():
      kind = line.kind.removesuffix('-start')
      flops += times * _flops(line, lines)
      if kind in KINDS:
        reduces_part = kind == 'all-reduce' and 'all-reduce-scatter' in name
        told = 'reduce-scatter' if reduces_part else kind
        place = told, line.attribute('channel_id') or (name, line.name)
        size = _moved(line, lines)
        found[place] = max(found.get(place, (0, 0)), (times, times * size))
      inner = times
      if line.kind == 'while':
        inner *= _trips(line, computations) or trips
      for other in _called(line):
        visit(other, inner)

  visit(entry, 1)
  totals = collections.defaultdict(lambda: (0, 0))
  for (kind, _), (number, size) in found.items():
    before = totals[kind]
    totals[kind] = (before[0] + number, before[1] + size)
  return Counts(flops, dict(totals))


def _computations(text: str) -> tuple[dict[str, dict[str, _Line]], str]:
  """Each computation's lines by name, and the name of the first to run."""
  found, entry, lines = {}, '', {}
  for line in text.splitlines():
    head = _HEAD.match(line)
    if head:
      lines = found[head[2]] = {}
      entry = head[2] if head[1] else entry
    elif one := _LINE.match(line):
      lines[one[1]] = _Line(*one.groups())
  if not entry:
    raise ValueError('not the text of a compiled program: no ENTRY in it')
  return found, entry


def _called(line: _Line) -> list[str]:
  found = _CALLED.findall(line.rest)
  if branches := _BRANCHES.search(line.rest):  # all of them, though one is run
    found += re.findall(r'%([\w.-]+)', branches[1])
  return found


def _trips(line: _Line, computations: dict[str, dict[str, _Line]]) -> int | None:
  """How often a loop turns; None: it is not said."""
  if told := re.search(r'"known_trip_count":\{"n":"(\d+)"', line.rest):
    return int(told[1])
  condition = computations[line.attribute('condition')]
  body = computations[line.attribute('body')]
  end, root = list(condition.values())[-1], list(body.values())[-1]
  if end.kind != 'compare' or end.attribute('direction') != 'LT':
    return None
  counter, bound = (condition.get(name) for name in end.operands)
  if counter is None or counter.kind != 'get-tuple-element' or root.kind != 'tuple':
    return None
  new = body[root.operands[int(counter.attribute('index'))]]
  steps = [_constant(body.get(name)) for name in new.operands]
  step = next((n for n in steps if n), None) if new.kind == 'add' else None
  most = _constant(bound)
  return None if most is None or step is None else -(-most // step)


def _constant(line: _Line | None) -> int | None:
  if line is None or line.kind != 'constant':
    return None
  return int(line.rest.partition(')')[0])


def _sizes(shape: str) -> list[int]:
  """Bytes of each array in a shape, which may be a tuple of them."""
  return [
    max(1, int(bits or 8) // 8) * math.prod(_dims(dims))
    for _, bits, dims in _SHAPE.findall(shape)
  ]


def _dims(text: str) -> list[int]:
  return [int(n) for n in text.split(',') if n]


def _shape(line: _Line) -> list[int]:
  return _dims(_SHAPE.search(line.shape)[3])


def _moved(line: _Line, lines: dict[str, _Line]) -> int:
  taken = sum(sum(_sizes(lines[name].shape)) for name in line.operands)
  if not line.kind.endswith('-start'):
    return max(taken, sum(_sizes(line.shape)))
  # It gives what it takes, too, and scalars to keep track.
  arrays = re.sub(r'\w+\[\]', '', line.shape)
  return max(taken, sum(_sizes(arrays)) - taken)


def _flops(line: _Line, lines: dict[str, _Line]) -> float:
  if line.kind == 'custom-call':
    told = re.search(r'"cost_estimate":\{"flops":"?(\d+)', line.rest)
    return float(told[1]) if told else 0.0
  if line.kind not in ('dot', 'convolution'):
    return 0.0
  left, right = (_shape(lines[name]) for name in line.operands[:2])
  if line.kind == 'dot':
    along = _dims(line.attribute('lhs_contracting_dims') or '')
    return 2.0 * math.prod(_shape(line)) * math.prod(left[i] for i in along)
  return _of_convolution(line, left, right)


def _of_convolution(line: _Line, left: list[int], right: list[int]) -> float:
  """TPUs have products of matrices as convolutions; batches are among the windows."""
  of_left, rest = line.attribute('dim_labels').split('_')
  of_right, of_out = rest.split('->')
  out = dict(zip(of_out, _shape(line), strict=True))
  left, right = (
    dict(zip(labels, shape, strict=True))
    for labels, shape in ((of_left, left), (of_right, right))
  )
  total = 2.0 * out['b'] * out['f'] * right['i']
  window = line.attribute('window') or ''
  for i in sorted(label for label in of_out if label.isdigit()):
    total *= _positions(int(i), window, left[i], right[i], out[i])
  return total


def _positions(i: int, window: str, left: int, right: int, out: int) -> int:
  """Pairs of an output and a place in the window that meet an entry of the input."""

  def of(name: str, default: str) -> str:
    found = re.search(rf'\b{name}=([\w-]+)', window)
    return found[1].split('x')[i] if found else default

  low = int(of('pad', '0_0').split('_')[0])
  stride, spread = int(of('stride', '1')), int(of('lhs_dilate', '1'))
  at = stride * np.arange(out)[:, None] - low
  at = at + int(of('rhs_dilate', '1')) * np.arange(right)[None]
  return int(np.sum((at >= 0) & (at <= (left - 1) * spread) & (at % spread == 0)))
