"""What runs in a process of the grading pool: one answer after another.

A verifier may leave things behind that are no fault of the next answer. What can be put
back is put back after each answer (the folder, the environment, handlers, timers); where
memory, threads, children or open files have piled up, an answer failed for want of them,
or limits are others, the process says that it is worn out, and the pool puts another in
its place.
"""

from collections.abc import Callable
import contextlib
import ctypes
import dataclasses
import errno
import json
from multiprocessing.connection import Connection
import os
import pickle
import resource
import signal
import sys
import time

from jaxrl_sched.host import rewards
from jaxrl_sched.host.grading import describe, judge
from jaxrl_sched.types import Prompt

_WANT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
# How many more of each there may be than after the first answers.
_MORE = {'threads': 32, 'children': 8, 'open files': 64}
_MEMORY_SHARE = 0.5  # of what may be allocated, from which on growth counts
_MEMORY_GROWTH = 1.25
# What a verifier may take from those after it, for good.
_LIMITS = [
  getattr(resource, f'RLIMIT_{name}')
  for name in ('AS', 'DATA', 'CPU', 'FSIZE', 'NOFILE', 'NPROC', 'STACK')
]
_LOOK_S = (
  0.01  # at the least between looks at what has piled up: quick answers are many
)


def serve(fd: int, parent: int, memory_gib: float) -> None:
  """A worker's life: load what it is asked to, then grade until the pipe closes."""
  _settle(fd, parent, memory_gib)
  worker = _Worker(Connection(fd))
  try:
    worker.begin()
    while True:
      worker.grade()
  except (EOFError, OSError):  # the parent closed, or is no more
    # Not sys.exit: a verifier's threads must not keep us.
    os._exit(0)


def _settle(fd: int, parent: int, memory_gib: float) -> None:
  os.set_inheritable(fd, False)
  # A stop goes to the parent, which saves first and closes us then. Handlers, as children
  # would inherit that a signal is ignored, and could not be ended by it.
  signal.signal(signal.SIGINT, _ignore)
  signal.signal(signal.SIGTERM, _ignore)
  signal.pthread_sigmask(signal.SIG_SETMASK, ())
  # One that comes before a fork's child has its handlers waits for them.
  ours = {signal.SIGINT, signal.SIGTERM}
  os.register_at_fork(
    before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ours),
    after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, ours),
    after_in_child=_heed_signals,
  )
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before we asked
      os._exit(0)
    try:  # where memory runs out, rather us than the trainer
      with open('/proc/self/oom_score_adj', 'w') as file:
        file.write('1000')
    except OSError:
      pass
  if memory_gib:
    limit, ceiling = (
      int(memory_gib * 2**30),
      resource.getrlimit(resource.RLIMIT_DATA)[1],
    )
    if ceiling != resource.RLIM_INFINITY:
      limit = min(limit, ceiling)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, ceiling))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _ignore(number: int, frame) -> None:
  del number, frame


def _heed_signals() -> None:
  """In a child that goes on in Python; one that runs a program has defaults anyway."""
  signal.signal(signal.SIGINT, signal.default_int_handler)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


class _Worker:
  def __init__(self, connection: Connection):
    self._connection = connection
    self._verifiers: dict[str, Callable] = {}
    self._answered: set[str] = set()  # verifiers that have had an answer
    self._folder = _folder()
    self._umask = os.umask(0o022)
    os.umask(self._umask)
    self._keep()

  def begin(self) -> None:
    for name in json.loads(self._connection.recv_bytes()):
      try:
        self._verifiers[name] = rewards.load(name)
      except Exception:  # said by the first answer that asks for it
        pass
    self._keep()
    self._send('ready')

  def grade(self) -> None:
    """One answer, from the pipe to its reply.

    The reply: score, fault, detail, seconds, and why this process is worn out, or ''.
    """
    payload = self._connection.recv_bytes()
    began, name = time.monotonic(), None
    try:
      text, prompt = pickle.loads(payload)
      name = prompt.reward
      verifier = self._loaded(name)
      began = time.monotonic()
      verdict = judge(verifier(text, prompt), prompt.max_reward, prompt.min_reward)
      worn = ''
    except BaseException as error:  # the border: SystemExit and MemoryError too
      worst = prompt.min_reward if name is not None else 0.0
      verdict = worst, 'raised', describe(error)
      worn = _wanted(error)
    seconds = time.monotonic() - began
    if _limits() != self._limits:
      worn = worn or 'limits'
    if name in self._answered:
      if time.monotonic() - self._looked_at > _LOOK_S:
        worn = worn or _worn(self._before, _usage())
        self._looked_at = time.monotonic()
    else:  # what a verifier opens once it may keep
      self._answered.add(name)
      self._look()
    self._restore()
    self._send('grade', *verdict, seconds, worn)

  def _loaded(self, name: str) -> Callable[[str, Prompt], float]:
    if name not in self._verifiers:
      try:
        self._verifiers[name] = rewards.load(name)
      finally:
        self._keep()
        self._send('begun')
    return self._verifiers[name]

  def _send(self, kind: str, *fields) -> None:
    # JSON and not pickle: a worker must not be able to make the pool run anything.
    self._connection.send_bytes(json.dumps([kind, *fields]).encode())

  def _keep(self) -> None:
    """What an import has set is as things are to be."""
    self._limits, self._environment = _limits(), os.environ._data.copy()
    self._look()

  def _look(self) -> None:
    self._before, self._looked_at = _usage(), time.monotonic()

  def _restore(self) -> None:
    """What a verifier changed, and the next one would not expect."""
    signal.setitimer(signal.ITIMER_REAL, 0)  # else it would go off in another's answer
    for number in (signal.SIGINT, signal.SIGTERM):
      if signal.getsignal(number) is not _ignore:
        signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(self._umask)
    if self._folder is not None and _folder() != self._folder:
      with contextlib.suppress(OSError):
        os.chdir(self._folder)
    # Its own comparison decodes every variable, which takes longer than most verifiers.
    if os.environ._data != self._environment:
      os.environ.clear()
      os.environb.update(self._environment)


def _folder() -> str | None:
  try:
    return os.getcwd()
  except OSError:  # it has been removed
    return None


def _limits() -> list[tuple[int, int]]:
  return list(map(resource.getrlimit, _LIMITS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Usage:
  memory: int = 0  # bytes that count towards RLIMIT_DATA
  threads: int = 0
  children: int = 0
  files: int = 0


def _usage() -> _Usage:
  """Of this process; what the system does not tell is 0."""
  found: dict[str, int] = {}
  try:
    tasks = os.listdir('/proc/self/task')
    found['threads'] = len(tasks)
    found['files'] = len(os.listdir('/proc/self/fd'))
    found['memory'] = int(_fields('statm')[5]) * resource.getpagesize()
    found['children'] = sum(len(_fields(f'task/{task}/children')) for task in tasks)
  except OSError:  # no such file here
    pass
  return _Usage(**found)


def _fields(name: str) -> list[bytes]:
  fd = os.open(f'/proc/self/{name}', os.O_RDONLY)  # a third of the time of `open`
  try:
    return os.read(fd, 1 << 16).split()
  finally:
    os.close(fd)


def _worn(before: _Usage, now: _Usage) -> str:
  """What has piled up since the first answers; '' if nothing has."""
  limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
  is_much = limit != resource.RLIM_INFINITY and now.memory > _MEMORY_SHARE * limit
  if is_much and now.memory > _MEMORY_GROWTH * before.memory:
    return 'memory'
  counts = zip(
    _MORE,
    (before.threads, before.children, before.files),
    (now.threads, now.children, now.files),
    strict=True,
  )
  return next((name for name, a, b in counts if b > a + _MORE[name]), '')


def _wanted(error: BaseException) -> str:
  """What an answer failed for want of, which an earlier one may have used up; or ''."""
  seen: set[int] = set()
  while error is not None and id(error) not in seen:
    seen.add(id(error))
    if isinstance(error, MemoryError):
      return 'memory'
    if isinstance(error, OSError) and error.errno in _WANT:
      return os.strerror(error.errno)
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
      return 'threads'
    error = error.__cause__ or error.__context__
  return ''
