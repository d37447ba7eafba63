"""A scheduler's state in a checkpoint: bundles under way, and what no run would save."""

from collections.abc import Callable, Iterable
import dataclasses
import math
from typing import Any

from jaxrl_sched.control import ledger
from jaxrl_sched.control.base import check_state
from jaxrl_sched.control.learning import OpenBatch
from jaxrl_sched.control.opening import Terms
from jaxrl_sched.types import Group

_PENDING = ('carried', 'paused', 'bundles')
_BUNDLE = ('bundle', 'version', 'terms', 'visited', 'pruned', 'going_on', 'groups')


def pack(batch: OpenBatch) -> dict[str, Any]:
  """A bundle that was planned and not observed. Its groups are those that a checkpoint
  has waited for; None where nobody has."""
  groups = batch.waiting
  return {
    'bundle': batch.bundle,
    'version': batch.version,
    'terms': dataclasses.asdict(batch.terms),
    'visited': batch.visited,
    'pruned': batch.pruned,
    'going_on': [ledger.pack(group) for group in batch.going_on],
    'groups': None if groups is None else [ledger.pack(group) for group in groups],
  }


def unpack(
  packed: dict[str, Any], batch: OpenBatch, unpacked: Callable[[dict[str, Any]], Group]
) -> None:
  """Puts what `pack` gave into the batch of its bundle, as it was on its way."""
  batch.round, batch.is_awaited, batch.asked = 1, True, len(packed['groups'])
  batch.visited, batch.pruned = packed['visited'], packed['pruned']
  batch.going_on = list(map(unpacked, packed['going_on']))
  batch.waiting = list(map(unpacked, packed['groups']))


def check(state: dict[str, Any], streams: Iterable[str]) -> None:
  """Refuses numbers that no run would have saved."""

  def need(good: bool, key: str, value: Any, expected: str) -> None:
    if not good:
      raise ValueError(f'state of scheduler: {key} {value!r:.60}, expected {expected}')

  def need_whole(key: str, value: Any) -> None:
    good = type(value) is int and value >= 0
    need(good, key, value, 'a whole number from 0')

  pending, own = state['pending'], dict.fromkeys(streams)
  need_whole('draw', state['draw'])
  need_whole('next', state['next'])
  need_whole('in_vain', state['in_vain'])
  good = _is_count(state['kept']) and state['kept'] <= 1
  need(good, 'kept', state['kept'], 'a share')
  check_state('scheduler.acceptance', state['acceptance'], own)
  for stream, rows in state['acceptance'].items():
    good = isinstance(rows, list) and all(
      isinstance(row, list) and len(row) == 3 and all(map(_is_count, row))
      for row in rows
    )
    need(good, f'acceptance.{stream}', rows, 'sizes with two numbers from 0 each')
  need(isinstance(state['ahead'], list), 'ahead', state['ahead'], 'bundles')
  check_state('scheduler.pending', pending, dict.fromkeys(_PENDING))
  for name in _PENDING:
    need(isinstance(pending[name], list), name, pending[name], 'a list')
  for bundle in pending['bundles']:
    check_state('scheduler.bundles', bundle, dict.fromkeys(_BUNDLE))
    terms = dict.fromkeys(f.name for f in dataclasses.fields(Terms))
    check_state('scheduler.terms', bundle['terms'], terms)
    groups = bundle['groups']
    need(isinstance(groups, list), 'groups', groups, 'those of a bundle under way')


def _is_count(value: Any) -> bool:
  return type(value) in (int, float) and 0 <= value < math.inf
