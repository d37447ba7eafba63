"""A new difficulty table for a run that goes on: what is known of each prompt moves with
it to the stream that it is in now."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_sched.control.difficulty import Tiers
from jaxrl_sched.control.sleepers import FOREVER, ROW
from jaxrl_sched.host.scores import UNSEEN

_NEW_ROW = dict.fromkeys(ROW.names, 0) | {'last': -1, 'applied': -1}
_NEW_SCORE = {'score': UNSEEN, 'useful': 0, 'asleep': False}
_Streams = dict[str, tuple[str, np.ndarray]]  # as of `Tiers.streams`


def moved(state: dict[str, Any], tiers: Tiers) -> tuple[dict[str, Any], list[str]]:
  """The scheduler's state as it would be, had the run had these tiers.

  A stream with the prompts it had goes on where it was. One with others begins a new
  pass; a sleeping prompt in it has as many passes to sleep as it had left. What is
  counted by stream (its share so far, how many of its groups were useful, and how many
  were asked in vain) begins anew where the stream is a new one.

  Returns:
    The state, which is `state` itself if no prompt is in another tier; and a line for
    each dataset that has some.

  Raises:
    ValueError: bundles are under way, which were planned by the old tiers.
  """
  before, now = state['source']['tiers']['tiers'], tiers.of_prompts()
  if before == now or _sizes(before) != _sizes(now):  # `Tiers` refuses other sizes
    return state, []
  if state['pending']['bundles'] or state['pending']['paused'] or state['ahead']:
    raise ValueError(
      'tiers.table: its tiers are others than those of the checkpoint, in which prompts '
      'drawn by the old ones are under way (asp.lag, asp.window or asp.pause_after); '
      'expected the same table'
    )
  notes = []
  for name, old in before.items():
    old_digits, new_digits = (
      np.frombuffer(digits.encode(), np.uint8) for digits in (old, now[name])
    )
    count = int(np.count_nonzero(old_digits != new_digits))
    if count:
      notes.append(
        f'tiers: {count:,} of {len(old):,} prompts of {name} are in another tier than '
        'in the checkpoint; streams with other prompts begin a new pass'
      )
  streams = tiers.streams(), tiers.streams_of(before)
  snooze = _snooze(state['source']['snooze'], *streams)
  quotas = _none_taken(streams[0])
  planned = state['source']['tiers']['planned'] | {
    name: _none_taken([s for s, (of, _) in streams[0].items() if of == name])
    for name in now
    if now[name] != before[name]
  }
  source = state['source'] | {
    'snooze': snooze | {'quotas': quotas},
    'tiers': state['source']['tiers'] | {'tiers': now, 'planned': planned},
  }
  changed = {'source': source, 'turns': quotas}
  changed['acceptance'] = {s: state['acceptance'].get(s, []) for s in streams[0]}
  if state['pruner'] is not None:
    pools = _moved(state['pruner']['pools'], _NEW_SCORE, *streams)
    changed['pruner'] = state['pruner'] | {'pools': pools}
  return state | changed, notes


def _sizes(tiers: Mapping[str, str]) -> dict[str, int]:
  return {name: len(of) for name, of in tiers.items()}


def _none_taken(streams) -> dict[str, Any]:
  """The state of `RollingQuotas` before the first group."""
  return {'counts': dict.fromkeys(streams, 0), 'weights': {}}


def _snooze(state: dict[str, Any], now: _Streams, before: _Streams) -> dict[str, Any]:
  kept = {
    stream
    for place, stream in enumerate(now)
    if [*before][place : place + 1] == [stream]  # a pass's order depends on the place
    and np.array_equal(now[stream][1], before[stream][1])
  }
  places = {}
  for stream in now:
    number, cursor = state['place'].get(stream, (0, 0))
    places[stream] = [number, cursor] if stream in kept else [number + (cursor > 0), 0]
  # Passes are counted by stream: they move as distances from the one that is on.
  distances = {}
  for stream, rows in state['prompts'].items():
    wake, drawn = (rows[key].astype(np.int64) for key in ('wake', 'drawn'))
    number = state['place'][stream][0]
    wake = np.where(wake == FOREVER, FOREVER, wake - number)
    distances[stream] = rows | {'wake': wake, 'drawn': drawn - number}
  prompts = _moved(distances, _NEW_ROW, now, before)
  for stream, rows in prompts.items():
    for key in ('wake', 'drawn'):
      far = rows[key] == FOREVER
      number = np.clip(rows[key] + places[stream][0], 0, FOREVER - 1)
      rows[key] = np.where(far, FOREVER, number)
    prompts[stream] = {key: rows[key].astype(ROW[key]) for key in ROW.names}
  return state | {
    'sizes': {stream: len(indices) for stream, (_, indices) in now.items()},
    'place': places,
    'counters': {stream: state['counters'].get(stream, [0, 0]) for stream in now},
    'since': {
      stream: state['since'][stream] if stream in kept else state['draw'] - 1
      for stream in now
    },
    'prompts': prompts,
  }


def _moved(
  columns: Mapping[str, Mapping[str, np.ndarray]],  # stream -> name -> [prompts in it]
  new: Mapping[str, Any],  # name -> the value of a prompt that was in no stream
  now: _Streams,
  before: _Streams,
) -> dict[str, dict[str, np.ndarray]]:
  sizes = dict.fromkeys((name for name, _ in now.values()), 0)
  for name, indices in (*now.values(), *before.values()):
    sizes[name] = max(sizes[name], int(indices.max()) + 1)
  found: dict[str, dict[str, np.ndarray]] = {stream: {} for stream in now}
  for key, value in new.items():
    dtype = next(iter(columns.values()))[key].dtype
    whole = {name: np.full(size, value, dtype) for name, size in sizes.items()}
    for stream, (name, indices) in before.items():
      whole[name][indices] = columns[stream][key]
    for stream, (name, indices) in now.items():
      found[stream][key] = whole[name][indices]
  return found
