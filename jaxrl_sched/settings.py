"""Config files as plain dicts: loading, overrides, keyword arguments, workdirs.

What the keys mean is `config.py`'s business. Every error is a ValueError of one line.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
import contextlib
import difflib
import importlib.util
import inspect
import io
import itertools
import json
import math
import pathlib
import shutil
import sys
import tokenize
import types
import typing
from typing import Any

from ml_collections import ConfigDict

from jaxrl_sched import storage
from jaxrl_sched.types import Unbounded


def load(name: str) -> dict[str, Any]:
  """The dict of a config file: a path, or 'path:argument' for `get_config(argument)`."""
  path, colon, argument = name.partition(':')
  file = pathlib.Path(path).resolve()
  if not file.is_file():
    raise ValueError(f'--config={name}: there is no file {path}')
  spec = importlib.util.spec_from_file_location(f'config_{file.stem}', file)
  if spec is None:
    raise ValueError(f'--config={name}: expected a Python file (.py)')
  module = importlib.util.module_from_spec(spec)
  sys.path.insert(0, str(file.parent))  # configs may import one another
  try:
    spec.loader.exec_module(module)
    if not hasattr(module, 'get_config'):
      raise ValueError('it has no get_config()')
    c = module.get_config(argument) if colon else module.get_config()
  except (Exception, SystemExit) as error:  # somebody's Python file
    text = ' '.join(str(error).split())
    raise ValueError(f'--config={name}: {type(error).__name__}: {text}') from error
  finally:
    sys.path.remove(str(file.parent))
  if not isinstance(c, ConfigDict):
    raise ValueError(f'--config={name}: get_config() gave no ConfigDict')
  return _plain(c)


def _plain(value: Any, at: str = 'config') -> Any:
  """ConfigDicts as dicts; what JSON does not hold is refused."""
  if isinstance(value, ConfigDict):
    value = value.to_dict()
  if isinstance(value, dict):
    for key in value:
      if not isinstance(key, str):
        raise ValueError(f'{at}: key {key!r}, expected text')
    return {key: _plain(item, f'{at}.{key}') for key, item in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(_plain(item, at) for item in value)
  if value is not None and not isinstance(value, bool | int | float | str):
    raise ValueError(f'{at}: {value!r}, expected a number, text, list or block')
  if isinstance(value, float) and math.isnan(value):
    raise ValueError(f'{at}: {value!r}, expected a number')
  return value


def override(c: dict[str, Any], key: str, text: str, known: Sequence[str]) -> None:
  """Puts text, read as a Python literal if it is one, at a.b.c; blocks are made."""
  value = _literal(key, text)
  *blocks, last = key.split('.')
  node, at = c, 'config'
  for name in blocks:
    at = f'{at}.{name}'
    if node is c:
      check_known(name, known, 'config')
    if node.get(name) is None:
      node[name] = {}
    node = node[name]
    if not isinstance(node, dict):
      raise ValueError(f'--config.{key}: {at} is {node!r}, which has no keys')
  node[last] = _plain(value, f'{at}.{last}')


_WORDS = {'true': True, 'false': False, 'none': None, 'null': None}


def _literal(key: str, text: str) -> Any:
  if text.strip().lower() in _WORDS:
    return _WORDS[text.strip().lower()]
  try:
    value = ast.literal_eval(text.strip())
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    return text
  # Python would pass over what follows a hash: a comment, or a part of what was meant.
  found = list(tokenize.generate_tokens(io.StringIO(text.strip()).readline))
  if any(token.type == tokenize.COMMENT for token in found):
    raise ValueError(f'--config.{key}={text}: expected a value without a comment')
  # It would also join texts side by side, and take the last of keys given twice.
  for one, other in itertools.pairwise(found):
    if one.type == other.type == tokenize.STRING:
      raise ValueError(f'--config.{key}={text}: expected a comma between two texts')
  for node in ast.walk(ast.parse(text.strip(), mode='eval')):
    keys = [ast.dump(k) for k in node.keys if k] if isinstance(node, ast.Dict) else []
    if len(set(keys)) < len(keys):
      raise ValueError(f'--config.{key}={text}: expected each key once')
  return value


def check_known(key: str, known: Sequence[str], where: str) -> None:
  """Refuses a key, naming the nearest known one."""
  if key not in known:
    near = difflib.get_close_matches(key, known, 1)
    hint = f'; did you mean {near[0]!r}?' if near else f'; known: {", ".join(known)}'
    raise ValueError(f'{where}: unknown key {key!r}{hint}')


def keywords(
  where: str, block: Any, names: Callable, given: frozenset[str] = frozenset()
) -> dict[str, Any]:
  """The block, as keyword arguments of `names`: each known, of its type, and there.

  What is left out gets its default, so that a config says all that a run does.

  Args:
    where: of the block, for messages.
    given: parameters of `names` that are not for the config.
  """
  if not isinstance(block, dict):
    raise ValueError(
      f'{where}: {block!r}, expected a block of keys, such as --{where}={{}} or '
      f'--{where}.KEY=VALUE'
    )
  signature = inspect.signature(names)
  hints = typing.get_type_hints(names.__init__ if inspect.isclass(names) else names)
  known = [p for p in signature.parameters if p not in given]
  for key in block:
    check_known(key, known, where)
  found = {}
  for name in known:
    default = signature.parameters[name].default
    if name in block:
      found[name] = typed(f'{where}.{name}', block[name], hints.get(name, Any))
    elif default is inspect.Parameter.empty:
      raise ValueError(f'{where}.{name}: missing')
    else:
      found[name] = default
  return found


def typed(where: str, value: Any, kind: Any) -> Any:
  """The value as the type declared, exactly, or an error."""
  if kind is Any:
    return value
  options = typing.get_args(kind) if _is_union(kind) else (kind,)
  for option in options:
    if option is Unbounded:
      if value in ('inf', 'math.inf', math.inf):
        return math.inf
      option = float
    plain = typing.get_origin(option) or option
    if plain is type(None):
      if value is None:
        return value
    elif plain is float:
      if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
          raise ValueError(f'{where}: {value!r}, expected a finite number')
        return float(value)
    elif plain is int:
      if isinstance(value, int) and not isinstance(value, bool):
        return value
    elif plain is tuple:
      if isinstance(value, list | tuple):
        return tuple(value)
    elif isinstance(plain, type) and isinstance(value, plain):
      return value
    elif not isinstance(plain, type):
      return value
  wanted = ' or '.join(_spoken(option) for option in options)
  raise ValueError(
    f'{where}: {value!r}, expected {wanted}{_how(where, value, options)}'
  )


def _how(where: str, value: Any, options: Sequence[Any]) -> str:
  """How the value is written that was most likely meant, for the end of a message."""
  kinds = {typing.get_origin(option) or option for option in options}
  if kinds & {tuple, list} and isinstance(value, str | int | float):
    parts = (value,)
    if isinstance(value, str):
      parts = tuple(part.strip() for part in value.split(',') if part.strip())
    return f'; write --{where}="{parts}"'
  if dict in kinds and not isinstance(value, dict):
    return f'; write --{where}.KEY=VALUE, or --{where}={{}}'
  if int in kinds and isinstance(value, float) and value.is_integer():
    return f'; write --{where}={int(value)}'
  if str in kinds and isinstance(value, int | float):
    text = value if type(value) is int else 'TEXT'
    return f'; write --{where}="\'{text}\'"'
  return ''


def _spoken(kind: Any) -> str:
  if kind is Unbounded:
    return 'a number, or inf'
  return 'None' if kind is type(None) else getattr(kind, '__name__', str(kind))


def _is_union(kind: Any) -> bool:
  return typing.get_origin(kind) in (typing.Union, types.UnionType)


def differences(
  old: dict[str, Any], new: dict[str, Any], free: Sequence[str] = ()
) -> dict[str, tuple[Any, Any]]:
  """Keys whose values differ -> both values, but for `free` ones and what they hold.

  A block that is on one side only is one difference. None and absence are the same:
  workdirs are older than keys.
  """
  return {
    key: pair
    for key, pair in _differing(json.loads(dumps(old)), json.loads(dumps(new)))
    if not _is_under(key, free)
  }


def _differing(
  old: dict[str, Any], new: dict[str, Any], prefix: str = ''
) -> Iterator[tuple[str, tuple[Any, Any]]]:
  for key in sorted(old.keys() | new.keys()):
    one, other = old.get(key), new.get(key)
    if isinstance(one, dict) and isinstance(other, dict):
      yield from _differing(one, other, f'{prefix}{key}.')
    elif one != other:
      yield f'{prefix}{key}', (one, other)


def as_lines(found: dict[str, tuple[Any, Any]]) -> list[str]:
  """Of `differences`: 'a.b: old -> new'. A block is not spelled out."""
  shown = {
    key: ['a block' if isinstance(value, dict) else f'{value}' for value in pair]
    for key, pair in found.items()
  }
  return [f'{key}: {old} -> {new}' for key, (old, new) in shown.items()]


def _is_under(key: str, names: Sequence[str]) -> bool:
  return any(key == name or key.startswith(f'{name}.') for name in names)


def dumps(c: dict[str, Any]) -> str:
  """As config.json has it."""
  return json.dumps(_spelled(c), indent=2, sort_keys=True, allow_nan=False) + '\n'


def _spelled(value: Any) -> Any:
  """Infinity as the text 'inf': JSON has no number for it."""
  if isinstance(value, dict):
    return {key: _spelled(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_spelled(item) for item in value]
  return 'inf' if value == math.inf else value


def of_workdir(workdir: pathlib.Path) -> dict[str, Any] | None:
  """The config that made a workdir, which may be remote; None: it is new."""
  file = workdir / 'config.json'
  if not file.exists():
    return None
  try:
    found = json.loads(file.read_text(encoding='utf-8'))
  except (ValueError, OSError) as error:
    raise ValueError(f'{file}: cannot be read: {error}') from None
  if not isinstance(found, dict):
    raise ValueError(f'{file}: expected the settings of a run')
  return found


def check_workdir(
  workdir: pathlib.Path,
  c: dict[str, Any],
  free: Sequence[str] = (),
  given: Sequence[str] = (),
) -> None:
  """Refuses a workdir that was made with another config.

  Args:
    free: keys that may differ from what made the workdir.
    given: keys that the user has overridden, which are named first.
  """
  old = of_workdir(workdir)
  found = {} if old is None else differences(old, c, free)
  if not found:
    return

  def is_given(key: str) -> bool:
    return _is_under(key, given) or any(_is_under(name, [key]) for name in given)

  told = as_lines(
    {key: found[key] for key in sorted(found, key=is_given, reverse=True)}
  )
  more = f' and {len(told) - 5} more' * (len(told) > 5)
  raise ValueError(
    f'workdir {workdir} belongs to another config; it differs in '
    f'{"; ".join(told[:5])}{more}. Take another workdir, or continue this one by '
    '--workdir alone'
  )


def write(workdir: pathlib.Path, c: dict[str, Any]) -> None:
  """config.json, whole or not at all."""
  half = workdir / '.config.json.half'
  half.write_text(dumps(c), encoding='utf-8')
  half.replace(workdir / 'config.json')


@contextlib.contextmanager
def only_one(workdir: pathlib.Path) -> Iterator[storage.Home]:
  """Makes the workdir, and holds it against a second run in the same place.

  A remote one is held against a second run on this host; one on another host takes it
  over (see `storage.Home`).

  Yields:
    Where the run is to write its files.
  """
  is_remote = storage.is_remote(workdir)
  spool = storage.spool(workdir) if is_remote else None
  with contextlib.ExitStack() as stack:
    try:
      held = stack.enter_context(storage.locked(spool.parent if spool else workdir))
    except OSError as error:
      raise ValueError(f'workdir {workdir}: cannot be written to: {error}') from None
    if not held:
      raise ValueError(f'workdir {workdir}: another run is at work there')
    if spool is None:
      yield storage.Home(workdir)
      return
    shutil.rmtree(spool, ignore_errors=True)  # the remote files are the true ones
    spool.mkdir()
    yield storage.Home(spool, workdir)
    shutil.rmtree(spool, ignore_errors=True)
