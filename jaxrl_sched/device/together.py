"""Processes that start together, stop together and fail together.

What one process has to tell the others while they may be anywhere, in the middle of a
collective too, goes through the key-value store of JAX's coordination service.
"""

from collections.abc import Callable
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback

import jax
from jax._src import cloud_tpu_init  # whether this is a TPU VM has no public name

from jaxrl_sched.device import multihost
from jaxrl_sched.device.checkpoint import SaveError
from jaxrl_sched.storage import StorageError

BY_HAND = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
FAILURES = (SaveError, StorageError)  # told in a line, as bad input is
# A process that gives no sign for so long is lost, and ends all the others.
HEARTBEAT_S = 30
# Another's reason may take longer than the collective that it broke.
_REASON_S = HEARTBEAT_S + 10
_HEARD_S = 10
_LOOK_S = 0.5
_LOOKS_LOST = 5  # in a row, and process 0 is gone


def start() -> None:
  """Joins the other processes of the run, if there are any. Before jax looks for devices.

  By hand, with the environment's JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
  JAX_PROCESS_ID; on a TPU VM jax finds the other workers itself.
  """
  given = {name: os.environ[name] for name in BY_HAND if os.environ.get(name)}
  how = {}
  if given:
    missing = [name for name in BY_HAND if name not in given]
    if missing:
      raise ValueError(
        f'{", ".join(missing)}: missing, expected beside {" and ".join(given)}'
      )
    count, index = (_number(name, given[name]) for name in BY_HAND[1:])
    if not 0 <= index < count:
      raise ValueError(f'JAX_PROCESS_ID: {index}, expected 0 to {count - 1}')
    if count == 1:
      return
    how = dict(
      coordinator_address=given[BY_HAND[0]], num_processes=count, process_id=index
    )
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  elif not cloud_tpu_init.running_in_cloud_tpu_vm or jax.config.jax_platforms == 'cpu':
    return
  # jax's own listener for SIGTERM would take the place of ours.
  jax.config.update('jax_enable_preemption_service', False)
  jax.distributed.initialize(**how, heartbeat_timeout_seconds=HEARTBEAT_S)


def _number(name: str, text: str) -> int:
  if not text.isdecimal():
    raise ValueError(f'{name}: {text!r}, expected a number')
  return int(text)


def run(body: Callable[[], int]) -> int:
  """Starts the processes and runs a command on each; if one fails, all end.

  Returns:
    The exit code: that of `body`, 2 for bad input (ValueError) and 1 for a checkpoint
    that could not be saved, both told in one line. Where there are several processes, a
    failure of any kind ends this one, and the others within a minute.
  """
  try:
    start()
    if multihost.count() == 1:
      return body()
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except FAILURES as error:  # a full disk, say; what was saved before stays
    print(f'error: {error}', file=sys.stderr)
    return 1
  watch = _Watch()
  watch.start()
  try:
    code = body()
    multihost.barrier('the end')
  except BaseException as error:
    watch.fail(error)
  watch.rest()
  return code


class _Watch(threading.Thread):
  """Hears of other processes' failures, and ends this one."""

  def __init__(self):
    super().__init__(name='watch', daemon=True)
    self._store = multihost.Store('failed')
    self._is_failing = self._is_done = False

  def run(self) -> None:
    lost = 0
    while not self._is_done:
      time.sleep(_LOOK_S)
      try:
        told, lost = self._told(), 0
      except jax.errors.JaxRuntimeError as error:
        told, lost = None, lost + 1
        if lost == _LOOKS_LOST and not self._is_done:
          _say(f'error: process 0, which keeps all together, is gone: {_line(error)}')
          _leave(1, None)
      if told is not None and not self._is_failing:
        self._end(*told)

  def rest(self) -> None:
    self._is_done = True

  def fail(self, error: BaseException) -> None:
    """Tells the others and ends this process."""
    if multihost.of_runtime(error):
      # Perhaps for another's failure, and that one is to be heard.
      _say(f'{_line(error)}; looking for what has failed elsewhere')
      until = time.monotonic() + _REASON_S
      while time.monotonic() < until:
        time.sleep(_LOOK_S)  # in which the watch may end this process
    self._is_failing = True
    code = 2 if isinstance(error, ValueError) and not multihost.of_runtime(error) else 1
    if isinstance(error, (ValueError, *FAILURES)):
      _say(f'error: {error}')
    else:
      traceback.print_exception(error)
    me = multihost.index()
    self._store.set('why', json.dumps([me, code, _line(error)]))
    _leave(code, self._store)

  def _told(self) -> tuple[int, int, str] | None:
    found = self._store.get('why')
    return None if found is None else tuple(json.loads(found))

  def _end(self, process: int, code: int, why: str) -> None:
    if process == multihost.index():
      return
    _say(f'error: process {process} failed: {why}')
    _leave(code, self._store)


def _leave(code: int, store: multihost.Store | None) -> None:
  """Ends this process at once; process 0, on which the others hang, as the last."""
  if store is not None:
    store.set(f'heard {multihost.index()}', '')
  if multihost.is_first():
    until = time.monotonic() + _HEARD_S
    others = [f'heard {i}' for i in range(1, multihost.count())]
    while time.monotonic() < until and any(store.get(n) is None for n in others):
      time.sleep(0.1)
  sys.stdout.flush()
  sys.stderr.flush()
  # Not through the interpreter's end, where jax would wait for all the others.
  os._exit(code)


def _say(text: str) -> None:
  where = f'process {multihost.index()} of {multihost.count()}'
  print(f'{text} ({where})', file=sys.stderr, flush=True)


def _line(error: BaseException) -> str:
  return ' '.join(f'{type(error).__name__}: {error}'.split())[:500]


class Stop:
  """Whether a signal has asked any process to stop. A second Ctrl-C does not ask.

  Processes do not come to know at the same time: what follows from it is to be agreed on.
  """

  def __init__(self):
    self._asked = self._told = False
    self._looked_at = 0.0
    self._store = multihost.Store('stop')
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._hear)
    if multihost.count() > 1:
      self._tell_at_once()

  def _tell_at_once(self) -> None:
    """Tells the others while this process's main thread waits for them in a barrier,
    where `_hear` is not called."""
    ours, signals = socket.socketpair()
    signals.setblocking(False)
    signal.set_wakeup_fd(signals.fileno())
    self._signals = signals  # kept open

    def listen() -> None:
      while number := ours.recv(1):
        if number[0] in (signal.SIGTERM, signal.SIGINT):
          self._store.set('asked', '')

    threading.Thread(target=listen, name='signals', daemon=True).start()

  def __call__(self) -> bool:
    if multihost.count() > 1 and not self._told:
      if self._asked:
        self._store.set('asked', '')
        self._told = True
      elif time.monotonic() - self._looked_at > _LOOK_S:
        self._looked_at = time.monotonic()
        self._asked = self._told = self._store.get('asked') is not None
    return self._asked

  def _hear(self, number: int, _) -> None:
    self._asked = True
    signal.signal(signal.SIGINT, signal.default_int_handler)
