"""Values of a config.json, each checked as it is taken."""

import sys
from typing import Any


def refused(key: str, value: Any, why: str) -> ValueError:
  """One line that names key and value."""
  return ValueError(f'config.json: {key}: {value!r:.200}, {why}')


def integer(key: str, value: Any) -> int:
  if not isinstance(value, int) or isinstance(value, bool) or value < 1:
    raise refused(key, value, 'expected a whole number of at least 1')
  return value


def number(key: str, value: Any, *, least: float | None = None) -> float:
  """A finite one above 0, or of at least `least`."""
  right = isinstance(value, int | float) and not isinstance(value, bool)
  right = right and 0 < value <= sys.float_info.max
  if not right or (least is not None and value < least):
    wanted = 'above 0' if least is None else f'of at least {least:g}'
    raise refused(key, value, f'expected a number {wanted}')
  return float(value)


def flag(key: str, value: Any) -> bool:
  if not isinstance(value, bool):
    raise refused(key, value, 'expected true or false')
  return value
