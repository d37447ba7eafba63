"""Files in an object store, gs://bucket/path, through etils' epath.

Nothing there can be appended to or locked, and a file is there whole or not at all. So
what a run writes lies in a folder of this host, which is copied whole again and again
(`Home`), and what a run reads is copied to this host first (`fetched`).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import contextlib
import datetime
import fcntl
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import socket
import tempfile
import time
from typing import Any
import uuid

OWNER = 'owner.json'  # in a remote workdir: which run is at work there
_EVERY_S = 60.0  # between copies that nobody waits for
_SHARE = 20  # and such copies take at most one part in so many of the time
_AT_ONCE = 8  # files copied at the same time
_NAME = re.compile(r'gs://[a-z0-9][a-z0-9._-]+(/.*)?')


class StorageError(OSError):
  """The object store could not be reached, or did not do what it was asked."""


def is_remote(name: str | os.PathLike) -> bool:
  return '://' in os.fspath(name)


def path(name: str | os.PathLike, what: str = '') -> pathlib.Path | Any:
  """A local path, or an epath for gs://bucket/path, which was seen to be reachable.

  Args:
    what: names the setting in messages, as '--workdir='.
  """
  name = os.fspath(name)
  if not is_remote(name):
    return pathlib.Path(name).expanduser()
  if not _NAME.fullmatch(name) or not name.isprintable() or '..' in name.split('/'):
    raise ValueError(f'{what}{name}: expected a local path, or gs://bucket/path')
  _check_installed(f'{what}{name}')
  from etils import epath

  found = epath.Path(name)
  with _told(f'{what}{name}'):
    found.exists()
  return found


def _check_installed(name: str) -> None:
  """epath takes TensorFlow for gs:// where that is installed, else gcsfs."""
  if importlib.util.find_spec('gcsfs') is not None:
    import fsspec

    # What another host has written meanwhile has to be seen.
    fsspec.config.conf.setdefault('gcs', {})['use_listings_cache'] = False
  elif importlib.util.find_spec('tensorflow') is None:
    raise ValueError(
      f"{name}: gs:// needs gcsfs, which is not installed: pip install 'jaxrl_sched[gcs]'"
    )


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
  """What goes wrong in there as one line, whichever client raised it.

  Raises:
    ValueError: it will go wrong the next time, too.
    StorageError: it may not.
  """
  try:
    yield
  except Exception as error:  # the border to a remote store
    reason = f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'
    lasting = isinstance(error, FileNotFoundError | PermissionError | ValueError)
    kind = ValueError if lasting or 'Forbidden' in reason else StorageError
    raise kind(f'{name}: {reason}') from error


def cache() -> pathlib.Path:
  """Where copies are kept on this host."""
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base) / 'jaxrl_sched'


@contextlib.contextmanager
def locked(folder: pathlib.Path, *, wait: bool = False) -> Iterator[bool]:
  """Makes the folder and holds it, for as long as this process lives at most.

  Yields:
    Whether it is held; with `wait` it always is.
  """
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / '.lock').open('w') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
      yield False
    else:
      yield True


# --- reading ---------------------------------------------------------------------


def join(root: str | os.PathLike, name: str) -> str:
  """A path that starts at `root` if it is relative; either may be gs://."""
  if is_remote(name) or not is_remote(root):
    return name if is_remote(name) else str(pathlib.Path(root, path(name)))
  return name if name.startswith(('/', '~')) else f'{str(root).rstrip("/")}/{name}'


def fetched(
  name: str | os.PathLike, keep: Callable[[str], bool] = lambda _: True
) -> pathlib.Path:
  """This host's copy of a gs:// file, or of the files right in a gs:// folder.

  There is one for each state of what is there, by names, sizes and times. It is made
  whole or not at all; of several processes one makes it, and the others wait.

  Args:
    keep: which files of a folder, by name.
  """
  source = path(name)
  if not is_remote(source):
    return source
  with _told(str(source)):
    is_folder = source.is_dir()
    state = _state(source, keep) if is_folder else _stat([source])
  if not state:
    raise ValueError(f'{source}: no such file, or a folder without files of use')
  about = json.dumps([str(source), state])
  home = cache() / 'fetched' / hashlib.sha256(about.encode()).hexdigest()[:24]
  made = home.joinpath(*source.parts[1:])  # messages that name it name the source
  with locked(home, wait=True):
    if made.exists():
      return made
    part = home / '.part'
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    part.mkdir()
    from_folder = source if is_folder else source.parent
    with _told(str(source)):
      _each(lambda file: (from_folder / file).copy(part / file), list(state))
      after = _state(source, keep) if is_folder else _stat([source])
    if after != state:
      raise ValueError(f'{source}: was changed while it was read')
    made.parent.mkdir(parents=True, exist_ok=True)
    (part if is_folder else part / source.name).rename(made)
  return made


def _state(folder: Any, keep: Callable[[str], bool]) -> dict[str, list[int]]:
  return _stat([file for file in folder.iterdir() if keep(file.name)])


def _stat(files: Sequence[Any]) -> dict[str, list[int]]:
  """Size and time of those that are files, by name."""
  with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
    found = zip(files, pool.map(_stat_one, files), strict=True)
    return {file.name: at for file, at in sorted(found) if at is not None}


def _stat_one(file: Any) -> list[int] | None:
  try:
    found = file.stat()
  except FileNotFoundError:  # deleted since it was listed, or never there
    return None
  return None if found.is_directory else [found.length, found.mtime]


def _each(do: Callable[[Any], Any], items: Sequence[Any]) -> None:
  with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
    list(pool.map(do, items))


# --- writing ---------------------------------------------------------------------


@contextlib.contextmanager
def written(folder: pathlib.Path | Any) -> Iterator[pathlib.Path]:
  """A folder to write into: this one, or one that is copied to it at the end.

  If that fails half-way, a folder that was not there before is none afterwards.
  """
  if not is_remote(folder):
    yield folder
    return
  with tempfile.TemporaryDirectory() as temporary:
    here = pathlib.Path(temporary) / folder.name
    yield here
    files = _files(here)
    with _told(str(folder)):
      is_new = not folder.exists()
      try:
        # A model without its config is none yet.
        whole = [file for file in files if file.name == 'config.json']
        _upload(here, folder, [file for file in files if file not in whole])
        _upload(here, folder, whole)
      except BaseException:
        if is_new:
          folder.rmtree(missing_ok=True)
        raise


class Home:
  """Where a run writes its files: the workdir itself, or a copy of it on this host.

  A copy in the object store is as old as the last `push`: what a run that was killed
  wrote since is lost there, and written again by the run that goes on.

  Attributes:
    folder: a local folder.
  """

  def __init__(self, folder: pathlib.Path, remote: Any = None):
    """Takes the remote folder over, and fetches its files, but not its folders.

    There are no locks in an object store: the run that comes last has it, and one that
    is still at work there learns of it at its next `push`, before it writes.

    Args:
      remote: None: the folder is the workdir itself.
    """
    self.folder, self._remote = folder, remote
    self._pushed: dict[pathlib.Path, tuple[int, int]] = {}
    self._next = time.monotonic() + _EVERY_S
    if remote is None:
      return
    self._id = uuid.uuid4().hex
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    owner = {'id': self._id, 'host': socket.gethostname(), 'started': started}
    with _told(str(remote)):
      (remote / OWNER).write_text(json.dumps(owner))
      files = list(_state(remote, lambda name: name != OWNER and name[0] != '.'))
      _each(lambda file: (remote / file).copy(folder / file, overwrite=True), files)
    self._pushed = _files(folder)

  def push(self) -> None:
    """Copies what has changed to where the run lives.

    Raises:
      ValueError: a later run has taken the workdir over.
      StorageError: it could not be copied.
    """
    if self._remote is None:
      return
    began = time.monotonic()
    try:
      self._check_held()
      files = _files(self.folder)
      changed = [file for file, at in files.items() if self._pushed.get(file) != at]
      with _told(str(self._remote)):
        _upload(self.folder, self._remote, changed)
      self._pushed = files
    finally:
      ended = time.monotonic()
      self._next = ended + max(_EVERY_S, _SHARE * (ended - began))

  def push_if_due(self) -> None:
    """As `push`, where the last one is long ago."""
    if self._remote is not None and time.monotonic() >= self._next:
      self.push()

  def _check_held(self) -> None:
    with _told(str(self._remote)):
      owner = json.loads((self._remote / OWNER).read_text())
    if owner['id'] != self._id:
      raise ValueError(
        f'{self._remote}: taken over by a run that was started on {owner["host"]} at '
        f'{owner["started"]}; this one has ended'
      )


def spool(remote: Any) -> pathlib.Path:
  """The folder of this host in which a run writes that lives in the remote one."""
  key = hashlib.sha256(str(remote).encode()).hexdigest()[:24]
  return cache() / 'workdirs' / key / remote.name


def _files(folder: pathlib.Path) -> dict[pathlib.Path, tuple[int, int]]:
  """Size and time of the files to be copied: not the half-written, nor W&B's own."""
  found = {}
  for file in sorted(folder.rglob('*')):
    inside = file.relative_to(folder)
    half = file.name.startswith('.') or file.suffix in ('.new', '.half')
    if file.is_file() and not half and inside.parts[0] != 'wandb':
      about = file.stat()
      found[inside] = (about.st_size, about.st_mtime_ns)
  return found


def _upload(folder: pathlib.Path, remote: Any, files: Sequence[pathlib.Path]) -> None:
  """Each whole or not at all: some clients end a broken upload as if it were whole."""
  from etils import epath

  def put(file: pathlib.Path) -> None:
    target = remote / file
    half = target.with_name(f'.{target.name}.half')
    epath.Path(folder / file).copy(half, overwrite=True)
    half.replace(target)

  _each(put, files)
