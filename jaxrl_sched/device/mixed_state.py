"""State of controllers, JSON with arrays in it, as two files: JSON and npz."""

import io
import json
from typing import Any
import zipfile

import numpy as np

_ARRAY = '__array__'  # {'__array__': name} stands for the array of that name
_JSON_TYPES = {type(None), bool, int, float, str}


def dump(state: Any, name: str) -> tuple[str, bytes]:
  """Text and bytes from which `load` makes the same again.

  Raises:
    ValueError: what neither holds, or would change unnoticed; by `name` and its path.
  """
  arrays: dict[str, np.ndarray] = {}
  text = json.dumps(_out(state, name, arrays))
  file = io.BytesIO()
  np.savez(file, **arrays)
  return text, file.getvalue()


def load(text: str, data: bytes) -> Any:
  try:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
      return _in(json.loads(text), dict(arrays))
  except (zipfile.BadZipFile, KeyError) as error:
    raise ValueError(f'arrays of the state: {error}') from None


def check_json(value: Any, name: str) -> None:
  """Refuses what JSON would change unnoticed or cannot hold."""
  _out(value, name, None)


def _out(value: Any, name: str, arrays: dict[str, np.ndarray] | None) -> Any:
  if isinstance(value, dict):
    for key in value:
      if type(key) is not str or key == _ARRAY:
        raise ValueError(f'{name}: key {key!r}, expected a string')
    return {key: _out(item, f'{name}.{key}', arrays) for key, item in value.items()}
  if isinstance(value, list):
    if set(map(type, value)) <= _JSON_TYPES:  # lists of numbers are long
      return value
    return [_out(item, f'{name}.{i}', arrays) for i, item in enumerate(value)]
  if arrays is not None and isinstance(value, np.ndarray) and value.dtype != object:
    key = f'array{len(arrays)}'
    arrays[key] = value
    return {_ARRAY: key}
  if type(value) not in _JSON_TYPES:
    raise ValueError(f'{name}: {type(value).__name__}, expected what JSON can hold')
  return value


def _in(value: Any, arrays: dict[str, np.ndarray]) -> Any:
  if isinstance(value, dict):
    if value.keys() == {_ARRAY}:
      return arrays[value[_ARRAY]]
    return {key: _in(item, arrays) for key, item in value.items()}
  if isinstance(value, list):
    if set(map(type, value)) <= _JSON_TYPES:
      return value
    return [_in(item, arrays) for item in value]
  return value
