"""A checkpoint step's manifest.json: what the step consists of, to each file's bytes.

It holds its own checksum, and is written last.
"""

from collections.abc import Iterator, Sequence
import json
import os
from typing import Any
import zlib

from etils import epath

from jaxrl_sched.storage import is_remote

_NAME = 'manifest.json'


def write(step: epath.Path, manifest: dict[str, Any], files: Sequence[str]) -> None:
  """Of a step of which all else is written.

  Args:
    files: and folders, by name, of which it says size and checksum.
  """
  found = [file for name in files for file in _files(step / name)]
  sizes = {file.relative_to(step).as_posix(): _measure(file) for file in sorted(found)}
  _write(step / _NAME, {**manifest, 'files': sizes})


def change(step: epath.Path, **changes: Any) -> None:
  """Whole or not at all."""
  half = step / f'{_NAME}.half'
  _write(half, read(step) | changes)
  half.replace(step / _NAME)


def read(step: epath.Path) -> dict[str, Any]:
  """Raises ValueError or OSError when it is not as it was written."""
  text = (step / _NAME).read_text()
  body = text[text.index('\n') + 1 : -2]
  if json.loads(text)['crc'] != zlib.crc32(body.encode()):
    raise ValueError('it has changed')
  return json.loads(body)


def fault(step: epath.Path, *, deep: bool = False) -> str | None:
  """What is wrong with a committed step; `deep` reads every file through."""
  try:
    files = read(step)['files']
  except (ValueError, KeyError, TypeError, OSError) as error:
    return f'{_NAME} cannot be read ({type(error).__name__}: {error})'
  for name, (size, *crc) in files.items():
    file = step / name
    if not file.exists():
      return f'{name} is missing'
    if file.stat().length != size:
      return f'{name} has {file.stat().length} bytes, expected {size}'
    if deep and crc and _crc(file) != crc[0]:
      return f'{name} has changed since it was written'
  return None


def _write(file: epath.Path, manifest: dict[str, Any]) -> None:
  body = json.dumps(manifest)
  crc = zlib.crc32(body.encode())
  file.write_text(f'{{"crc": {crc}, "manifest":\n{body}}}\n')
  _sync(file)


def _measure(file: epath.Path) -> list[int]:
  """[size] or [size, checksum]: an object store checks its own bytes."""
  size = file.stat().length
  if is_remote(file):
    return [size]
  _sync(file)
  return [size, _crc(file)]


def _sync(file: epath.Path) -> None:
  """The rename must not reach the disk before what it commits."""
  if not is_remote(file):
    with file.open('rb') as f:
      os.fsync(f.fileno())


def _files(path: epath.Path) -> Iterator[epath.Path]:
  if path.is_dir():
    for inner in path.iterdir():
      yield from _files(inner)
  else:
    yield path


def _crc(file: epath.Path) -> int:
  crc = 0
  with file.open('rb') as f:
    while block := f.read(1 << 20):
      crc = zlib.crc32(block, crc)
  return crc
