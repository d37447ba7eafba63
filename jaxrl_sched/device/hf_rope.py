"""Rope settings of a config.json <-> theta and `rope.Scaling`.

There are two spellings: `rope_theta` beside `rope_scaling` (transformers 4), and one
object `rope_parameters` (transformers 5). Both are read, with `type` or `rope_type`,
and both are written. A file that says two different things is refused: versions of
transformers differ in which of them they take.
"""

from typing import Any

from jaxrl_sched.device import rope
from jaxrl_sched.device.hf_fields import flag, integer, number, refused

_SPELLINGS = ('rope_scaling', 'rope_parameters')
_LENGTH = 'original_max_position_embeddings'
_YARN_OPTIONS = ('attention_factor', 'beta_fast', 'beta_slow', 'mscale')
_KEYS = {
  'default': (),
  'linear': ('factor',),
  'llama3': ('factor', 'low_freq_factor', 'high_freq_factor', _LENGTH),
  'yarn': ('factor', _LENGTH, *_YARN_OPTIONS, 'mscale_all_dim', 'truncate'),
}
_ALWAYS = ('rope_type', 'type', 'rope_theta', 'partial_rotary_factor')


def read(raw: dict[str, Any]) -> tuple[float, rope.Scaling | None]:
  """Theta, 10,000 where none is given, and the scaling, None where there is none.

  Args:
    raw: the content of config.json, whose max_position_embeddings is an integer.

  Raises:
    ValueError: another type, a key that is missing, unknown or of a wrong type, or
      two spellings that disagree.
  """
  thetas = {'rope_theta': raw['rope_theta']} if 'rope_theta' in raw else {}
  scalings = {}
  for key in _SPELLINGS:
    settings = raw.get(key)
    if settings is None or settings == {}:
      continue
    if not isinstance(settings, dict):
      raise refused(key, settings, 'expected an object')
    scalings[key] = _scaling(key, settings, raw)
    if 'rope_theta' in settings:
      thetas[f'{key}.rope_theta'] = settings['rope_theta']
  for key, value in thetas.items():
    if number(key, value, least=1) == 1:  # then all frequencies are one
      raise refused(key, value, 'expected a number above 1')
    _agree(thetas, key, value)
  for key, scaling in scalings.items():
    if scaling != next(iter(scalings.values())):
      _agree({k: raw[k] for k in scalings}, key, raw[key])
  theta = float(next(iter(thetas.values()), 10_000.0))
  return theta, next(iter(scalings.values()), None)


def write(theta: float, scaling: rope.Scaling | None) -> dict[str, Any]:
  """The keys of a config.json, in both spellings."""
  match scaling:
    case None:
      settings = {'rope_type': 'default'}
    case rope.Linear():
      settings = {'rope_type': 'linear', 'factor': scaling.factor}
    case rope.Llama3():
      settings = {
        'rope_type': 'llama3',
        'factor': scaling.factor,
        'low_freq_factor': scaling.low_freq_factor,
        'high_freq_factor': scaling.high_freq_factor,
        _LENGTH: scaling.original_max_positions,
      }
    case rope.Yarn():
      settings = {
        'rope_type': 'yarn',
        'factor': scaling.factor,
        _LENGTH: scaling.original_max_positions,
        'attention_factor': scaling.attention_factor,
        'beta_fast': scaling.beta_fast,
        'beta_slow': scaling.beta_slow,
        'truncate': scaling.truncate,
      }
  return {
    'rope_theta': theta,
    'rope_scaling': None if scaling is None else settings,
    'rope_parameters': settings | {'rope_theta': theta},
  }


def _agree(given: dict[str, Any], key: str, value: Any) -> None:
  """Refuses a value that is not the first."""
  first, other = next(iter(given.items()))
  if value != other:
    raise refused(first, other, f'but {key}: {value!r}: expected both to say the same')


def _scaling(
  where: str, settings: dict[str, Any], raw: dict[str, Any]
) -> rope.Scaling | None:
  kind = _kind(where, settings)
  for key in settings:
    if key not in (*_ALWAYS, *_KEYS[kind]):
      known = ', '.join(_KEYS[kind]) or 'no keys'
      raise refused(f'{where}.{key}', settings[key], f'expected {known} for {kind!r}')
  if settings.get('partial_rotary_factor', 1) not in (1, None):
    name = f'{where}.partial_rotary_factor'
    raise refused(name, settings['partial_rotary_factor'], 'expected 1')

  def take(key: str, **more) -> float:
    if key not in settings:
      raise refused(where, settings, f'expected {key} for {kind!r}')
    return number(f'{where}.{key}', settings[key], **more)

  def option(key: str) -> float | None:
    return None if settings.get(key) is None else take(key)

  if kind == 'default':
    return None
  factor = take('factor', least=1)
  if kind == 'linear':
    return rope.Linear(factor=factor)
  length = _original_length(where, settings, raw, kind)
  if kind == 'llama3':
    low, high = take('low_freq_factor'), take('high_freq_factor')
    if high <= low:
      name = f'{where}.high_freq_factor'
      raise refused(name, high, f'expected more than low_freq_factor={low}')
    return rope.Llama3(
      factor=factor,
      low_freq_factor=low,
      high_freq_factor=high,
      original_max_positions=length,
    )
  fast, slow = option('beta_fast') or 32.0, option('beta_slow') or 1.0
  if fast < slow:
    raise refused(f'{where}.beta_fast', fast, f'expected at least beta_slow={slow}')
  given = option('attention_factor')
  scales = option('mscale'), option('mscale_all_dim')
  return rope.Yarn(
    factor=factor,
    original_max_positions=length,
    attention_factor=given or rope.yarn_attention_factor(factor, *scales),
    beta_fast=fast,
    beta_slow=slow,
    truncate=flag(f'{where}.truncate', settings.get('truncate', True)),
  )


def _kind(where: str, settings: dict[str, Any]) -> str:
  names = {key: settings[key] for key in ('rope_type', 'type') if key in settings}
  for key, name in names.items():
    if not isinstance(name, str) or name not in _KEYS:
      known = ', '.join(_KEYS)
      raise refused(f'{where}.{key}', name, f'expected one of {known}')
    _agree(names, key, name)
  return next(iter(names.values()), 'default')


def _original_length(
  where: str, settings: dict[str, Any], raw: dict[str, Any], kind: str
) -> int:
  """In the object or beside it; YaRN without one was trained on max_positions."""
  given = {
    name: there[_LENGTH]
    for name, there in ((f'{where}.{_LENGTH}', settings), (_LENGTH, raw))
    if _LENGTH in there
  }
  for key, value in given.items():
    integer(key, value)
    _agree(given, key, value)
  if not given and kind != 'yarn':
    raise refused(where, settings, f'expected {_LENGTH} for {kind!r}')
  return next(iter(given.values()), raw['max_position_embeddings'])
