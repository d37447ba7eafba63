"""The files of a Hugging Face folder: fetched, opened, and seen to be whole."""

from collections.abc import Iterable
import contextlib
import fnmatch
import json
import os
import pathlib
import re
from typing import Any, NamedTuple

import huggingface_hub
from safetensors import SafetensorError, safe_open

from jaxrl_sched import storage
from jaxrl_sched.host import strict_json

ONE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
_TEXTS = ['*.json', '*.jinja', 'tokenizer*', '*.txt']
_DOUBLE = 'consolidated*'  # the same weights once more, in Mistral's form


def folder(
  path_or_hub_id: str | os.PathLike, *, tokenizer_only: bool = False
) -> pathlib.Path:
  """The folder of a model; one on the hub or at gs:// is copied to this host once."""
  name = os.fspath(path_or_hub_id)
  if not name or not name.isprintable():
    raise ValueError(f'model: {name!r}, expected a folder or a hub id (owner/name)')
  if storage.is_remote(name):
    path = storage.fetched(name, lambda file: _is_wanted(file, tokenizer_only))
  else:
    path = pathlib.Path(name).expanduser()
  if path.is_dir():
    return path
  if path.exists():
    raise ValueError(f'model: {name}: a file, expected the folder that it is in')
  if not re.fullmatch(r'[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*', name):
    raise ValueError(f'model: {name}: no such folder, and not a hub id (owner/name)')
  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(
        name,
        allow_patterns=_wanted(tokenizer_only),
        ignore_patterns=['*/*', _DOUBLE],
      )
    )
  except Exception as error:  # the hub's client raises many kinds, of many lines
    reason = ' '.join(str(error).split())[:200]
    raise ValueError(
      f'model: {name}: no such folder, and not to be had from the hub: {reason}'
    ) from error


def _wanted(tokenizer_only: bool) -> list[str]:
  return _TEXTS if tokenizer_only else [*_TEXTS, '*.safetensors']


def _is_wanted(file: str, tokenizer_only: bool) -> bool:
  patterns = _wanted(tokenizer_only)
  of_use = any(fnmatch.fnmatch(file, pattern) for pattern in patterns)
  return of_use and not fnmatch.fnmatch(file, _DOUBLE)


class Stored(NamedTuple):
  """A tensor of the folder."""

  slices: Any  # what parts of it are read from
  file: pathlib.Path


def read_config(where: pathlib.Path) -> dict[str, Any]:
  """config.json of a whole model."""
  file = where / 'config.json'
  if (where / 'adapter_config.json').exists():
    raise ValueError(
      f'{where}: has adapter_config.json, an adapter of PEFT; expected a whole model, '
      'into which it is merged'
    )
  if not file.exists():
    raise ValueError(f'{file}: no such file{_instead(where)}')
  return read_json(file)


def _instead(where: pathlib.Path) -> str:
  kinds = ('.safetensors', '.bin', '.gguf', '.pt', '.pth', '.h5', '.msgpack')
  files = (file for file in where.iterdir() if file.is_file())
  others = {file.name for file in files if file.suffix in kinds}
  if not others:
    return ''
  usable = any(name.endswith('.safetensors') for name in others)
  return f'; there is {some(others)}' + ', expected safetensors' * (not usable)


def open_tensors(where: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Stored]:
  """Every tensor stored, by name."""
  weight_map = _weight_map(where)
  files = {ONE} if weight_map is None else set(weight_map.values())
  extra = {file.name for file in where.glob('model-*.safetensors')} - files
  if extra:
    says = f'in the index {INDEX}' if weight_map else f'read beside {ONE}'
    raise ValueError(f'{where}: {some(extra)} not {says}')
  stored: dict[str, Stored] = {}
  for name in sorted(files):
    file = where / name
    if not file.is_file():
      raise ValueError(f'{where}: no {name}, which the index {INDEX} names')
    opened = _open_file(file, stack)
    here = set(opened.keys())
    if weight_map is not None:
      listed = {tensor for tensor, whose in weight_map.items() if whose == name}
      same(here, listed, file, f'in the index {INDEX}')
    stored |= {tensor: Stored(opened.get_slice(tensor), file) for tensor in here}
  return stored


def _weight_map(where: pathlib.Path) -> dict[str, str] | None:
  """Tensor -> file by the index; None where a single file has everything."""
  one, index = where / ONE, where / INDEX
  if not index.exists():
    if not one.is_file():
      raise ValueError(f'{where}: no {ONE} or {INDEX}{_instead(where)}')
    return None
  if one.exists():
    raise ValueError(f'{where}: has both {ONE} and {INDEX}, expected one of them')
  weight_map = read_json(index).get('weight_map')
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f'{index}: weight_map: {weight_map!r:.60}, expected an object')
  for tensor, name in weight_map.items():
    if not (isinstance(name, str) and re.fullmatch(r'[\w-][\w.-]*\.safetensors', name)):
      raise ValueError(
        f'{index}: weight_map: {tensor}: {name!r:.60}, expected a safetensors file of '
        'this folder'
      )
  return weight_map


def _open_file(file: pathlib.Path, stack: contextlib.ExitStack) -> safe_open:
  _check_fetched(file)
  try:
    return stack.enter_context(safe_open(file, framework='numpy'))
  except (SafetensorError, OSError) as error:
    raise ValueError(f'{file}: not a whole safetensors file: {error}') from None


def _check_fetched(file: pathlib.Path) -> None:
  """A repository cloned without Git LFS has notes of files in their place."""
  with file.open('rb') as content:
    if content.read(40).startswith(b'version https://git-lfs.github.com'):
      raise ValueError(f'{file}: a pointer of Git LFS, expected the file: git lfs pull')


def same(there: set[str], expected: set[str], where: pathlib.Path, whose: str) -> None:
  if there != expected:
    raise ValueError(
      f'{where}: tensors missing: {some(expected - there)}; '
      f'tensors not {whose}: {some(there - expected)}'
    )


def some(names: Iterable[str]) -> str:
  names = sorted(names)
  shown = ', '.join(names[:8])
  return f'{shown} and {len(names) - 8} more' if len(names) > 8 else shown or 'none'


def read_json(file: pathlib.Path) -> dict[str, Any]:
  if not file.is_file():
    found = 'a folder, expected a file' if file.is_dir() else 'no such file'
    raise ValueError(f'{file}: {found}')
  _check_fetched(file)
  try:
    content = json.loads(
      file.read_text(encoding='utf-8'), object_pairs_hook=strict_json.once
    )
  except ValueError as error:
    raise ValueError(f'{file}: not JSON: {error}') from None
  if not isinstance(content, dict):
    raise ValueError(f'{file}: {content!r:.60}, expected an object')
  return content


def write_json(file: pathlib.Path, content: dict[str, Any]) -> None:
  file.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
