"""Processes that start together, stop together and fail together.

What one process has to tell the others while they may be anywhere, in the middle of a
collective too, goes through the key-value store of JAX's coordination service.
"""

from collections.abc import Callable, Collection, Iterator
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback

import jax
from jax._src import (  # whether this is a TPU VM, and who is in it, has no public name
  cloud_tpu_init,
  clusters,
  distributed,
)

from jaxrl_sched.device import backend, multihost, rendezvous
from jaxrl_sched.device.checkpoint import SaveError
from jaxrl_sched.device.rendezvous import named
from jaxrl_sched.storage import StorageError
from jaxrl_sched.terminal import INTERRUPTED, tell

BY_HAND = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
# Told in a line, as bad input is.
FAILURES = (SaveError, StorageError, rendezvous.Absent)
START_S = 300.0  # for all processes to come
_CONNECT_S = 60  # for jax to bring them together, once they have
SILENT_S = 45.0  # a process that gives no sign for so long is lost, and ends all others
# jax's own watch ends a process by an abort that names nobody: ours comes first.
_HEARTBEAT_S = 20 * 60
_BEAT_S = 2.0
_SAY_AFTER_S = 60.0  # of waiting for another process; then after twice as long, ...
# Another's reason may take longer than the collective that it broke.
_REASON_S = SILENT_S + 5
_HEARD_S = 10
_REST_S = 5.0
_LOOK_S = 0.5
_LOOKS_LOST = 5  # in a row, and process 0 is gone


def start() -> None:
  """Joins the other processes of the run, if there are any. Before jax looks for devices.

  By hand, with the environment's JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
  JAX_PROCESS_ID; on a TPU VM jax finds the other workers itself. JAXRL_WAIT_S is how
  many seconds to wait for them, START_S if it is not set.

  Raises:
    ValueError: bad input, or processes that were started with different ones.
    rendezvous.Absent: some did not come.
  """
  backend.choose()
  limit_s = multihost.limit_s(START_S)
  given = {name: os.environ[name] for name in BY_HAND if os.environ.get(name)}
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
    address = given[BY_HAND[0]]
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  elif not cloud_tpu_init.running_in_cloud_tpu_vm or jax.config.jax_platforms == 'cpu':
    return
  else:
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params
    address, count, index, _ = found(None, None, None, None, None, int(limit_s))
  # jax's own listener for SIGTERM would take the place of ours.
  jax.config.update('jax_enable_preemption_service', False)
  where = f'process {index} of {count}'
  if address is not None and count > 1:
    rendezvous.meet(
      address,
      index,
      count,
      limit_s=limit_s,
      say=lambda text: tell(sys.stderr, f'{text} ({where})\n'),
    )
  with _or_end(_CONNECT_S, f'error: jax did not connect all processes ({where})'):
    jax.distributed.initialize(
      address,
      count,
      index,
      initialization_timeout=2 * _CONNECT_S,
      heartbeat_timeout_seconds=_HEARTBEAT_S,
    )


@contextlib.contextmanager
def _or_end(seconds: float, text: str) -> Iterator[None]:
  """Ends the process with a line if what is inside takes longer: jax would abort."""

  def end() -> None:
    tell(sys.stderr, f'{text} within {seconds:g} s\n')
    os._exit(1)

  timer = threading.Timer(seconds, end)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def _number(name: str, text: str) -> int:
  if not text.isdecimal():
    raise ValueError(f'{name}: {text!r}, expected a number')
  return int(text)


def run(body: Callable[[], int]) -> int:
  """Starts the processes and runs a command on each; if one fails, all end.

  Returns:
    The exit code: that of `body`, 2 for bad input (ValueError) and 1 for a checkpoint
    that could not be saved or a process that did not come, all told in one line. Where
    there are several processes, a failure of any kind ends this one, and the others
    within a minute.
  """
  try:
    start()
    if distributed.global_state.num_processes == 1:
      backend.check()
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
    backend.check()
    code = body()
    multihost.barrier('the end')
  except BaseException as error:
    watch.fail(error)
  watch.rest()
  return code


class _Watch(threading.Thread):
  """Hears of other processes' failures, and ends this one.

  Every process gives a sign now and then, with the place where it waits for the others.
  From these it is said who is awaited, and process 0 finds out who gives no more.
  """

  def __init__(self):
    super().__init__(name='watch', daemon=True)
    state = distributed.global_state
    self._me, self._count = state.process_id, state.num_processes
    self._store, self._signs = multihost.Store('failed'), multihost.Store('signs')
    self._is_failing = self._is_done = False
    self._beats, self._beat_at = 0, 0.0
    now = time.monotonic()
    self._seen = {i: (0, now) for i in range(self._count)}  # sign, and when it was new
    self._said: tuple[str | None, float] = (None, 0.0)  # place, and when to say it next
    self._unheard_s = 0.0  # how long process 0 has not answered

  def start(self) -> None:
    super().start()
    # Calls to process 0 do not return while it is stopped.
    threading.Thread(target=self._guard, name='guard', daemon=True).start()

  def run(self) -> None:
    lost = 0
    while not self._is_done:
      time.sleep(_LOOK_S)
      try:
        told, lost = self._told(), 0
        if told is None:
          self._beat()
        self._unheard_s = 0.0
      except jax.errors.JaxRuntimeError as error:
        told, lost = None, lost + 1
        if lost == _LOOKS_LOST and not self._is_done:
          self._say(
            f'error: process 0, which keeps all together, is gone: {_line(error)}'
          )
          self._leave(1, tells=False)
      if told is not None and not self._is_failing:
        self._end(*told)

  def _guard(self) -> None:
    while not self._is_done:
      time.sleep(_LOOK_S)
      self._unheard_s += _LOOK_S  # not by the clock: this process may have been stopped
      if self._unheard_s > _silent_s() and not self._is_done:
        self._say(
          'error: process 0, which keeps all together, has given no sign for '
          f'{_silent_s():g} s'
        )
        self._leave(1, tells=False)

  def _beat(self) -> None:
    now = time.monotonic()
    if now < self._beat_at:
      return
    self._beat_at, self._beats = now + _BEAT_S, self._beats + 1
    place, since = multihost.Waiting.place, multihost.Waiting.since
    self._signs.put(str(self._me), json.dumps([self._beats, place]))
    signs = {int(i): json.loads(text) for i, text in self._signs.all().items()}
    now = time.monotonic()
    for i, (beat, _) in signs.items():
      if beat != self._seen[i][0]:
        self._seen[i] = beat, now
    silent = [i for i, (_, at) in self._seen.items() if now - at > _silent_s()]
    if silent and self._me == 0 and not (self._is_done or self._is_failing):
      why = f'no sign of it for {_silent_s():g} s'
      self._store.set('why', json.dumps([silent[0], 1, why]))
      self._say(f'error: {named(silent, self._count)} failed: {why}')
      self._leave(1, without=silent)
    if place is not None:
      there = {i for i, (_, at) in signs.items() if at == place} | {self._me}
      self._say_who(set(range(self._count)) - there, place, now - since)

  def _say_who(self, awaited: set[int], place: str, seconds: float) -> None:
    if self._said[0] != place:
      self._said = place, _SAY_AFTER_S
    if awaited and seconds >= self._said[1]:
      self._said = place, 2 * seconds
      limit_s = multihost.limit_s(multihost.TIMEOUT_S)
      self._say(
        f'Waiting for {named(awaited, self._count)} at {place!r} ({seconds:.0f} of at '
        f'most {limit_s:g} s) ...'
      )

  def rest(self) -> None:
    self._is_done = True
    # At the interpreter's end a thread inside one of jax's calls would abort the process.
    self.join(_REST_S)

  def fail(self, error: BaseException) -> None:
    """Tells the others and ends this process."""
    is_absent = isinstance(error, TimeoutError)
    if multihost.of_runtime(error) and not is_absent:
      # Perhaps for another's failure, and that one is to be heard.
      self._say(f'{_line(error)}; looking for what has failed elsewhere')
      until = time.monotonic() + _REASON_S
      while time.monotonic() < until:
        time.sleep(_LOOK_S)  # in which the watch may end this process
    self._is_failing = True
    code = 2 if isinstance(error, ValueError) and not multihost.of_runtime(error) else 1
    if isinstance(error, KeyboardInterrupt):
      code = INTERRUPTED
      self._say('error: interrupted')
    elif isinstance(error, (ValueError, *FAILURES)) or is_absent:
      self._say(f'error: {error}')
    else:
      traceback.print_exception(error)
    self._store.set('why', json.dumps([self._me, code, _line(error)]))
    self._leave(code)

  def _told(self) -> tuple[int, int, str] | None:
    found = self._store.get('why')
    return None if found is None else tuple(json.loads(found))

  def _end(self, process: int, code: int, why: str) -> None:
    self._say(f'error: process {process} failed: {why}')
    self._leave(code)

  def _leave(
    self, code: int, *, tells: bool = True, without: Collection[int] = ()
  ) -> None:
    """Ends this process at once; process 0, on whose service all depend, as the last.

    Args:
      tells: the others, that it has heard.
      without: waiting for these.
    """
    if tells:
      self._store.set(f'heard {self._me}', '')
    if self._me == 0:
      until = time.monotonic() + _HEARD_S
      others = [f'heard {i}' for i in range(1, self._count) if i not in without]
      while time.monotonic() < until and any(map(self._is_unset, others)):
        time.sleep(0.1)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's end, where jax would wait for all the others.
    os._exit(code)

  def _is_unset(self, key: str) -> bool:
    return self._store.get(key) is None

  def _say(self, text: str) -> None:
    tell(sys.stderr, f'{text} (process {self._me} of {self._count})\n')


def _silent_s() -> float:
  return min(SILENT_S, multihost.limit_s(SILENT_S))


def _line(error: BaseException) -> str:
  return ' '.join(f'{type(error).__name__}: {error}'.split())[:500]


# What asks a process to end, by a person, a supervisor or a batch system that gives
# notice. SIGQUIT is left for those who want it dead.
SIGNALS = (
  signal.SIGTERM,
  signal.SIGINT,
  signal.SIGHUP,
  signal.SIGUSR1,
  signal.SIGUSR2,
  signal.SIGXCPU,
)


class Stop:
  """Whether a signal has asked any process to stop. A second Ctrl-C does not ask.

  A signal that is ignored (SIGHUP under nohup) stays so, but for SIGTERM.

  Processes do not come to know at the same time: what follows from it is to be agreed on.
  """

  def __init__(self):
    self._asked = self._told = False
    self._looked_at = 0.0
    self._store = multihost.Store('stop')
    for number in SIGNALS:
      is_ignored = signal.getsignal(number) == signal.SIG_IGN
      if number == signal.SIGTERM or not is_ignored:
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
        if number[0] in SIGNALS:
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
    if signal.getsignal(signal.SIGINT) == self._hear:
      signal.signal(signal.SIGINT, signal.default_int_handler)
