"""Where records come from. A source has a length and gives record i alone.

Every source is what grain calls a random-access data source: `len(source)` and
`source[i]`, the same record each time. `where(i)` names a record for messages. A
record is a dict; `prompts.py` says which keys it reads.
"""

from array import array
import dataclasses
import decimal
import difflib
import importlib
import inspect
import os
import pathlib
from typing import Any, Protocol

import numpy as np

from jaxrl_sched import storage
from jaxrl_sched.host import strict_json


class Source(Protocol):
  """Records by position."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> dict[str, Any]: ...

  def where(self, index: int) -> str: ...


class JsonLines:
  """A file with one JSON object a line, read on access.

  Only the place of each record is kept in memory. Blank lines, a byte-order mark,
  CRLF and a missing final newline make no difference.
  """

  def __init__(self, path: pathlib.Path, name: str | None = None):
    self.path = name or path  # for messages
    self._file = open(path, 'rb')  # read with pread: no position shared by threads
    places = array('q')
    start = 0
    for number, line in enumerate(self._file, 1):
      mark = 3 if number == 1 and line.startswith(b'\xef\xbb\xbf') else 0
      if line[mark:].strip():
        places.extend((start + mark, len(line) - mark, number))
      start += len(line)
    self._places = np.array(places, np.int64).reshape(-1, 3)  # byte, bytes, line

  def __len__(self) -> int:
    return len(self._places)

  def __getitem__(self, index: int) -> dict[str, Any]:
    start, size, _ = self._places[index]
    line = os.pread(self._file.fileno(), int(size), int(start))
    try:
      record = strict_json.loads(line)
    except ValueError as error:  # not JSON, or not UTF-8
      raise ValueError(f'{self.where(index)}: not JSON: {error}') from None
    if not isinstance(record, dict):
      raise ValueError(
        f'{self.where(index)}: expected a JSON object, found {line.decode()[:40]!r}'
      )
    return record

  def where(self, index: int) -> str:
    return f'{self.path}, line {self._places[index, 2]}'


class Parquet:
  """A parquet file, held in Arrow's column form.

  Records hold what JSON would: decimals are numbers, a float has the digits of its own
  precision (0.1 of 32 bits is 0.1), and dates and times are texts of ISO 8601. A nested
  field without a value is left out: Arrow has all rows hold the fields of any.
  """

  def __init__(self, path: pathlib.Path, name: str | None = None):
    self.path = name or path  # for messages
    try:
      import pyarrow
      from pyarrow import parquet
    except ImportError:
      raise ValueError(
        f'{self.path}: reading parquet needs pyarrow, the extra jaxrl_sched[parquet]'
      ) from None
    try:
      with parquet.ParquetFile(path, memory_map=True) as file:
        self._table = file.read().combine_chunks()
    except (pyarrow.ArrowException, OSError) as error:
      raise ValueError(f'{self.path}: not parquet: {_line(error)}') from None
    names = self._table.column_names
    if twice := sorted({name for name in names if names.count(name) > 1}):
      raise ValueError(f'{self.path}: column {twice[0]!r} given twice')

  def __len__(self) -> int:
    return self._table.num_rows

  def __getitem__(self, index: int) -> dict[str, Any]:
    row = self._table.slice(index, 1)
    try:
      record = row.to_pylist()[0]
      return {f.name: _as_json(record[f.name], f.type) for f in row.schema}
    except (ValueError, ArithmeticError) as error:  # what Python has no value for
      raise ValueError(f'{self.where(index)}: {_line(error)}') from None

  def where(self, index: int) -> str:
    return f'{self.path}, row {index}'


def _as_json(value: Any, kind: Any) -> Any:
  """A value of Arrow's type `kind`, as a record of JSON lines would hold it."""
  from pyarrow import types

  if value is None:
    return None
  if types.is_dictionary(kind):
    return _as_json(value, kind.value_type)
  if types.is_struct(kind):
    found = {field.name: _as_json(value[field.name], field.type) for field in kind}
    return {name: item for name, item in found.items() if item is not None}
  if isinstance(value, list) and not types.is_map(kind):
    return [_as_json(item, kind.value_type) for item in value]
  if types.is_float16(kind) or types.is_float32(kind):
    return float(str(kind.to_pandas_dtype()(value)))
  if types.is_decimal(kind):
    return _number(value)
  if types.is_temporal(kind):
    return value.isoformat() if hasattr(value, 'isoformat') else str(value)
  return value


def _number(value: decimal.Decimal) -> int | float | str:
  """The same number, exactly; as text where it has more digits than a float."""
  if value == value.to_integral_value():
    return int(value)
  near = float(value)
  return near if decimal.Decimal(repr(near)) == value else f'{value:f}'


class Generated:
  """Records made by a program: the i-th a pure function of i."""

  def __init__(self, name: str, items: Any):
    self.name, self._items = name, items
    if not (hasattr(items, '__len__') and hasattr(items, '__getitem__')):
      raise ValueError(
        f'{name}: expected an object with a length and items, found '
        f'{type(items).__name__}'
      )
    # Prompts are made again when they are drawn, and again after a resume.
    try:
      len(items)
    except Exception as error:  # somebody's class
      raise ValueError(f'{name}: its length: {_line(error)}') from error
    if len(items) and repr(self[0]) != repr(self[0]):
      raise ValueError(f'{name}: record 0 differs from one access to the next')

  def __len__(self) -> int:
    return len(self._items)

  def __getitem__(self, index: int) -> dict[str, Any]:
    try:
      record = self._items[index]
    except Exception as error:  # somebody's class
      raise ValueError(f'{self.where(index)}: {_line(error)}') from error
    if not isinstance(record, dict):
      raise ValueError(f'{self.where(index)}: expected a dict, found {record!r:.40}')
    return record

  def where(self, index: int) -> str:
    return f'{self.name}, record {index}'


class Gym(Generated):
  """A dataset of reasoning_gym, with what its own scorer needs."""

  def __init__(self, name: str, options: dict[str, Any]):
    try:
      from reasoning_gym import factory
    except ImportError:
      raise ValueError(
        f'reasoning_gym:{name}: needs the extra jaxrl_sched[gym]'
      ) from None
    if name not in factory.DATASETS:
      raise ValueError(
        f'reasoning_gym:{name}: no such dataset{nearest(name, factory.DATASETS)}'
      )
    # Without a seed reasoning_gym draws one, and no two starts agree.
    options = {'seed': 0, **options}
    known = [field.name for field in dataclasses.fields(factory.DATASETS[name][1])]
    for key in options:
      if key not in known:
        raise ValueError(
          f'reasoning_gym:{name}: unknown option {key!r}{nearest(key, known)}'
        )
    try:
      items = factory.create_dataset(name, **options)
    except (AssertionError, TypeError, ValueError) as error:  # its own checks
      raise ValueError(f'reasoning_gym:{name}: {options}: {_line(error)}') from None
    self.dataset = name
    super().__init__(f'reasoning_gym:{name}', items)

  def __getitem__(self, index: int) -> dict[str, Any]:
    entry = self._items[index]
    return {
      'prompt': entry['question'],
      'answer': entry['answer'],
      'reasoning_gym': self.dataset,
      'entry': entry,
    }


def open_source(name: str, options: dict[str, Any], root: str | os.PathLike) -> Source:
  """Opens a source by its name.

  Args:
    name: a path, gs:// or not, ending in .jsonl or .parquet; 'reasoning_gym:NAME'; or
      'package.module:function', which is called with the options and returns an
      object with a length and items.
    options: for the last two; files take none.
    root: where relative paths start; gs:// or not.

  Raises:
    ValueError: nothing of that name, or options that it does not take.
  """
  if name.startswith('reasoning_gym:'):
    return Gym(name.removeprefix('reasoning_gym:'), options)
  if name.endswith(('.jsonl', '.parquet')):
    if options:
      raise ValueError(f'{name}: a file takes no options, found {sorted(options)}')
    where = storage.join(root, name)
    path = storage.fetched(where)
    if not path.is_file():
      raise ValueError(f'{where}: no such file')
    kind = JsonLines if name.endswith('.jsonl') else Parquet
    return kind(path, name=where)
  if ':' in name:
    return Generated(name, _generator(name, options))
  raise ValueError(
    f'source {name!r}: expected a path ending in .jsonl or .parquet, '
    "'reasoning_gym:NAME' or 'package.module:function'"
  )


def _generator(name: str, options: dict[str, Any]) -> Any:
  module_name, _, function_name = name.partition(':')
  try:
    module = importlib.import_module(module_name)
  except Exception as error:  # somebody's module: anything may be raised
    raise ValueError(f'{name}: cannot be imported: {_line(error)}') from error
  if not callable(function := vars(module).get(function_name)):
    raise ValueError(
      f'{name}: {module_name} has no such function'
      f'{nearest(function_name, vars(module))}'
    )
  try:
    inspect.signature(function).bind(**options)
  except TypeError as error:
    raise ValueError(f'{name}: options {options}: {error}') from None
  try:
    return function(**options)
  except Exception as error:  # somebody's function
    raise ValueError(f'{name}: options {options}: {_line(error)}') from error


def nearest(word: str, known) -> str:
  """'; did you mean ...?' for the end of a message, or nothing."""
  close = difflib.get_close_matches(word, list(known), n=1)
  return f'; did you mean {close[0]!r}?' if close else ''


def _line(error: Exception) -> str:
  text = str(error).strip()
  return (
    f'{type(error).__name__}: {text.splitlines()[0]}' if text else type(error).__name__
  )
