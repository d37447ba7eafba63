"""The processes of a run meet before jax brings them together.

jax's own connection says nothing while it waits, not even for whom, and ends in an abort
of the process. So process 0 first listens at the coordinator's address itself, all others
come there, and it tells each who is still awaited. Then the port is jax's.

What is sent are lines of JSON. To process 0: {"process": i, "of": n}. From it:
{"awaited": [i, ...]} whenever that changes, then {"go": true} or {"error": text}.
"""

from collections.abc import Callable, Iterable
import contextlib
import errno
import json
import selectors
import socket
import time

SAY_AFTER_S = 10.0  # then after twice as long, and so on
_RETRY_S = 0.25
_GRACE_S = 5.0


class Absent(Exception):
  """Some process did not come in time; the message names it."""


class Refused(ValueError):
  """The processes were not started alike: bad input."""


def meet(
  address: str,
  process: int,
  count: int,
  *,
  limit_s: float,
  say: Callable[[str], None],
  say_after_s: float = SAY_AFTER_S,
) -> None:
  """Returns once all processes have come.

  Args:
    address: host:port where process 0 listens.
    limit_s: how long to wait for them.
    say: is given a line about who is awaited, now and then.

  Raises:
    Absent: some did not come in time.
    Refused: two have the same number, or they differ in how many there are.
  """
  host, _, port = address.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 65536:
    raise Refused(f'JAX_COORDINATOR_ADDRESS: {address!r}, expected HOST:PORT')
  wait = _Wait(limit_s, say, say_after_s)
  if process == 0:
    with _listening(int(port), wait) as server:
      _Meeting(server, count, wait).run()
  else:
    _come((host.strip('[]'), int(port)), process, count, wait)


def named(processes: Iterable[int], count: int) -> str:
  """'process 3 of 4', or 'processes 1, 3 of 4'; of many the first ones."""
  numbers = sorted(processes)
  text = ', '.join(map(str, numbers[:8])) + ', ...' * (len(numbers) > 8)
  return f'process{"es" * (len(numbers) > 1)} {text} of {count}'


class _Wait:
  """Time, and what is said about it."""

  def __init__(self, limit_s: float, say: Callable[[str], None], say_after_s: float):
    self._began, self._limit_s = time.monotonic(), limit_s
    self._end = self._began + limit_s
    self._say, self._next = say, say_after_s

  def leave_it_to_process_0(self) -> None:
    """That one's limit counts from here on, unless it says nothing for much longer."""
    self._end = time.monotonic() + self._limit_s + _GRACE_S

  def look(self, what: str) -> None:
    """Says what is awaited where that is due. Raises Absent after the limit."""
    now = time.monotonic()
    passed = now - self._began
    if now >= self._end:
      raise Absent(
        f'{what} did not come within {self._limit_s:g} s (JAXRL_WAIT_S sets the limit)'
      )
    if passed >= self._next:
      self._next *= 2
      self._say(f'Waiting for {what} ({passed:.0f} of at most {self._limit_s:g} s) ...')


@contextlib.contextmanager
def _listening(port: int, wait: _Wait):
  """A socket at the port, once it is free: a run that ends may still have it."""
  six = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if six else socket.AF_INET
  while True:
    try:
      server = socket.create_server(('', port), family=family, dualstack_ipv6=six)
      break
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        raise Refused(f'port {port}: cannot listen there: {error}') from None
      wait.look(f'port {port}, in which another program listens,')
      time.sleep(_RETRY_S)
  with server:
    yield server


class _Meeting:
  """Process 0's side: who is there, by connection."""

  def __init__(self, server: socket.socket, count: int, wait: _Wait):
    self._server, self._count, self._wait = server, count, wait
    self._lines: dict[socket.socket, bytes] = {}  # what each has sent so far
    self._here: dict[int, socket.socket] = {}

  def run(self) -> None:
    with selectors.DefaultSelector() as selector:
      selector.register(self._server, selectors.EVENT_READ)
      try:
        while awaited := self._awaited():
          self._wait.look(named(awaited, self._count))
          for key, _ in selector.select(timeout=_RETRY_S):
            if key.fileobj is self._server:
              peer, _ = self._server.accept()
              self._lines[peer] = b''
              selector.register(peer, selectors.EVENT_READ)
            elif not self._hear(key.fileobj):
              selector.unregister(key.fileobj)
              self._forget(key.fileobj)
        self._tell({'go': True})
        for peer in self._here.values():  # who closes first keeps the port for a while
          peer.settimeout(_RETRY_S * 8)
          with contextlib.suppress(OSError):
            while peer.recv(1024):
              pass
      except Exception as error:
        said = {'error': str(error), 'refused': isinstance(error, Refused)}
        self._tell(said, self._lines)
        raise
      finally:
        for peer in self._lines:
          peer.close()

  def _awaited(self) -> list[int]:
    return [i for i in range(1, self._count) if i not in self._here]

  def _hear(self, peer: socket.socket) -> bool:
    """Whether it is still of use."""
    try:
      new = peer.recv(4096)
    except OSError:
      return False
    self._lines[peer] += new
    if not new or len(self._lines[peer]) > 4096:
      return False
    if peer in self._here.values() or not self._lines[peer].endswith(b'\n'):
      return True
    try:
      said = json.loads(self._lines[peer])
      process, count = said['process'], said['of']
    except (ValueError, KeyError, TypeError):
      return False  # none of ours
    if count != self._count:
      raise Refused(
        f'process {process} was started as one of {count} processes, process 0 as one '
        f'of {self._count}: expected the same JAX_NUM_PROCESSES'
      )
    if process in self._here:
      raise Refused(f'two processes were started as process {process} of {count}')
    self._here[process] = peer
    self._tell({'awaited': self._awaited()})
    return True

  def _forget(self, peer: socket.socket) -> None:
    """A process that ended while it waited, and may be started again."""
    peer.close()
    del self._lines[peer]
    self._here = {i: other for i, other in self._here.items() if other is not peer}
    self._tell({'awaited': self._awaited()})

  def _tell(self, what: dict, to: Iterable[socket.socket] | None = None) -> None:
    line = json.dumps(what).encode() + b'\n'
    for peer in self._here.values() if to is None else to:
      with contextlib.suppress(OSError):  # its end is seen when it is read from
        peer.sendall(line)


def _come(address: tuple[str, int], process: int, count: int, wait: _Wait) -> None:
  """Another process's side."""
  while True:
    wait.look(f'process 0 of {count} at {address[0]}:{address[1]}')
    try:
      with socket.create_connection(address, timeout=_RETRY_S * 8) as peer:
        if peer.getsockname() == peer.getpeername():
          raise OSError('connected to itself, as happens where nobody listens')
        peer.settimeout(_RETRY_S)
        hello = {'process': process, 'of': count}
        peer.sendall(json.dumps(hello).encode() + b'\n')
        wait.leave_it_to_process_0()
        if _told_to_go(peer, count, wait):
          return
    except OSError:  # not there yet, or gone again
      pass
    time.sleep(_RETRY_S)


def _told_to_go(peer: socket.socket, count: int, wait: _Wait) -> bool:
  """Whether it was; else process 0 has ended the connection."""
  awaited, text = [0], b''
  while True:
    try:
      new = peer.recv(4096)
    except TimeoutError:
      wait.look(named(awaited, count))
      continue
    if not new:
      return False
    text += new
    *lines, text = text.split(b'\n')
    for said in map(json.loads, lines):
      if 'error' in said:
        kind = Refused if said['refused'] else Absent
        raise kind(said['error'])
      if 'go' in said:
        return True
      awaited = said['awaited']
    wait.look(named(awaited, count))
