"""JSON that users wrote, read without a silent choice. Standard library only."""

import json
import math
from typing import Any


def loads(text: str | bytes) -> Any:
  """The value of a JSON text (RFC 8259).

  Raises:
    ValueError: not JSON or not UTF-8; or what Python would take and change: a key given
      twice (it keeps the last), NaN and Infinity, a number too large for a float.
  """
  if isinstance(text, bytes):
    text = text.decode()
  try:
    return json.loads(
      text, object_pairs_hook=once, parse_constant=_refused, parse_float=_finite
    )
  except RecursionError:
    raise ValueError('nested too deeply') from None


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """For json's `object_pairs_hook`: the object, in which no key comes twice."""
  content = dict(pairs)
  if len(content) < len(pairs):
    keys = [key for key, _ in pairs]
    twice = sorted(key for key in content if keys.count(key) > 1)
    raise ValueError(f'{", ".join(twice[:8])} given twice')
  return content


def _refused(name: str) -> None:
  raise ValueError(f'{name} is no number of JSON')


def _finite(digits: str) -> float:
  if math.isinf(value := float(digits)):
    raise ValueError(f'{digits:.40} is too large')
  return value
