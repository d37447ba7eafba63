"""What every controller can do. State is JSON and numpy arrays: a checkpoint and a
test can carry it."""

import hashlib
import json
from typing import Any, Protocol

import numpy as np


class Controller(Protocol):
  def metrics(self) -> dict[str, float]:
    """Numbers for the log, under the controller's own prefix."""

  def state_dict(self) -> dict[str, Any]:
    """All that a resume needs, JSON-able but for arrays, and no more."""

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Raises ValueError for a state that is not this controller's."""


def check_state(name: str, state: dict[str, Any], own: dict[str, Any]) -> None:
  """Refuses a state whose keys are not those of `own`."""
  if not isinstance(state, dict):
    raise ValueError(f'state of {name}: {state!r:.60}, expected keys {sorted(own)}')
  if state.keys() != own.keys():
    raise ValueError(f'state of {name}: keys {sorted(state)}, expected {sorted(own)}')


def digest(state: Any) -> str:
  """A hash of a state: equal for those that a checkpoint would write alike, and for no
  others. The order of keys does not count, nor does an array's layout in memory.

  Raises:
    ValueError: what a checkpoint could not hold.
  """
  text = json.dumps(_described(state, 'state'), sort_keys=True)
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


_JSON_TYPES = {type(None), bool, int, float, str}


def _described(value: Any, name: str) -> Any:
  """JSON that says all of a state. Arrays and dicts are told apart by their wrapping,
  whatever keys a dict has."""
  if type(value) in _JSON_TYPES:
    return value
  if isinstance(value, list):
    if set(map(type, value)) <= _JSON_TYPES:  # lists of numbers are long
      return value
    return [_described(item, f'{name}.{i}') for i, item in enumerate(value)]
  if isinstance(value, dict):
    for key in value:
      if type(key) is not str:
        raise ValueError(f'{name}: key {key!r}, expected a string')
    return {'dict': {key: _described(v, f'{name}.{key}') for key, v in value.items()}}
  if isinstance(value, np.ndarray) and not value.dtype.hasobject:
    described = np.lib.format.dtype_to_descr(value.dtype)
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return {'array': [described, list(value.shape), hashlib.blake2b(flat).hexdigest()]}
  raise ValueError(f'{name}: {type(value).__name__}, expected JSON or an array')


def visits(flat: np.ndarray) -> list[np.ndarray]:
  """Positions of every prompt's first group, then of every second one, and so on."""
  if len(np.unique(flat)) == len(flat):  # as a rule
    return [np.arange(len(flat))] if len(flat) else []
  order = np.argsort(flat, kind='stable')
  first = np.diff(flat[order], prepend=-1) != 0
  place = np.arange(len(flat))
  nth = np.empty(len(flat), np.int64)
  nth[order] = place - np.maximum.accumulate(np.where(first, place, 0))
  return [np.flatnonzero(nth == n) for n in range(int(nth.max()) + 1)]
