"""Agreement between processes. The only file that asks which process this is.

Process 0 decides, all apply: `agree` gives its decision to every process, `gather`
gives every process what each has. If one process fails in either, all raise, and
none waits for an absent one beyond a time limit.
"""

from collections.abc import Callable
import math
import os
import pickle
import re
import time
from typing import Any

import jax
from jax._src import distributed  # the coordination client has no public name
from jax.experimental import multihost_utils
import numpy as np

# A slow host may be a whole rollout behind; an absent one is an error.
TIMEOUT_S = 1800.0
_STATUS = re.compile(
  r'(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED'
  r'|FAILED_PRECONDITION|RESOURCE_EXHAUSTED): '
)
_PIECE = 1 << 18  # bytes; all travels in pieces of this one shape, compiled once


def index() -> int:
  return jax.process_index()


def count() -> int:
  return jax.process_count()


def is_first() -> bool:
  return jax.process_index() == 0


def limit_s(default: float) -> float:
  """Seconds to wait for another process: what JAXRL_WAIT_S says, else `default`.

  Raises:
    ValueError: it is no number of seconds.
  """
  text = os.environ.get('JAXRL_WAIT_S')
  if not text:
    return default
  try:
    seconds = float(text)
  except ValueError:
    seconds = math.nan
  if not 1 <= seconds < math.inf:
    raise ValueError(f'JAXRL_WAIT_S: {text!r}, expected seconds, at least 1')
  return seconds


class Waiting:
  """Where this process waits for the others, for `together` to tell them."""

  place: str | None = None  # the name of a barrier; None: it is at work
  since = 0.0  # on the monotonic clock


def barrier(name: str, *, timeout_s: float | None = None) -> None:
  """Waits until every process has come to the barrier of this name.

  A name may be used again, but two places of a program should not share one: were
  they to get out of step, each would take the other's arrival for its own.

  Raises:
    TimeoutError: naming the processes that did not come within `timeout_s`; None: as
      long as JAXRL_WAIT_S says, or TIMEOUT_S.
  """
  if jax.process_count() == 1:
    return
  if timeout_s is None:
    timeout_s = limit_s(TIMEOUT_S)
  client = distributed.global_state.client
  Waiting.place, Waiting.since = name, time.monotonic()
  try:
    client.wait_at_barrier(name, int(timeout_s * 1000))
  except jax.errors.JaxRuntimeError as error:
    if 'DEADLINE_EXCEEDED' not in str(error):
      raise
    absent = re.search(r'timed out task names:\s*((?:\S+\n)+)', str(error))
    who = ', '.join(absent.group(1).split()) if absent else 'unknown'
    raise TimeoutError(
      f'Barrier {name!r}: absent after {timeout_s:g} s: process {who}'
      f' (this is process {jax.process_index()} of {jax.process_count()})'
    ) from error
  finally:
    Waiting.place = None


def of_runtime(error: BaseException) -> bool:
  """Whether it was not raised by us: a collective that broke, say.

  Some come as ValueError, and are known by the status that they begin with.
  """
  if isinstance(error, jax.errors.JaxRuntimeError | TimeoutError):
    return True
  return type(error) is ValueError and _STATUS.match(str(error)) is not None


class Store:
  """What a process tells all others while they may be anywhere: a few short texts."""

  def __init__(self, name: str):
    self._prefix = f'jaxrl_sched/{name}/'

  def set(self, key: str, text: str) -> None:
    """The first to set a key has set it for all."""
    client = distributed.global_state.client
    try:
      client.key_value_set(self._prefix + key, text)
    except jax.errors.JaxRuntimeError as error:
      if 'ALREADY_EXISTS' not in str(error):
        raise

  def put(self, key: str, text: str) -> None:
    """In the place of what was there."""
    client = distributed.global_state.client
    client.key_value_set(self._prefix + key, text, allow_overwrite=True)

  def all(self) -> dict[str, str]:
    found = distributed.global_state.client.key_value_dir_get(self._prefix)
    return {key.removeprefix(self._prefix): text for key, text in found}

  def get(self, key: str) -> str | None:
    client = distributed.global_state.client
    try:
      return client.key_value_try_get(self._prefix + key)
    except jax.errors.JaxRuntimeError as error:
      if 'NOT_FOUND' not in str(error):
        raise
      return None


def together(make: Callable[[], Any], *, name: str) -> Any:
  """What `make()` gives on this process, once no process has failed in it.

  For what every process does for itself and that may fail on one: a file, say, that is
  not there.
  """
  found = []
  gather(lambda: found.append(make()), name=name)
  return found[0]


def agree(
  make: Callable[[], Any], *, name: str = 'agree', timeout_s: float | None = None
) -> Any:
  """The value of `make()` on process 0, given to every process.

  Args:
    make: runs on process 0 only; its value is pickled.
    name: of the decision, such as 'plan 7'. Processes that have come to different
      decisions time out, each naming the other, instead of mixing them up.
    timeout_s: how long process 0 waits for the others, and they for it; see `barrier`.

  Raises:
    Exception: on process 0 what `make` raised; elsewhere ValueError if it was one,
      so that bad input ends every process alike, or else RuntimeError.
    TimeoutError: a process did not come.
  """
  if jax.process_count() == 1:
    return make()
  payload, error = _attempt(make) if is_first() else (b'', None)
  barrier(name, timeout_s=timeout_s)
  received = _exchange(
    payload, lambda piece: multihost_utils.broadcast_one_to_all(piece)[None]
  )
  return _values(received, error)[0]


def gather(
  make: Callable[[], Any], *, name: str = 'gather', timeout_s: float | None = None
) -> list[Any]:
  """The values of `make()` on each process, in process order, given to all.

  Arguments and errors as for `agree`, but `make` runs on every process.
  """
  if jax.process_count() == 1:
    return [make()]
  payload, error = _attempt(make)
  barrier(name, timeout_s=timeout_s)
  return _values(_exchange(payload, multihost_utils.process_allgather), error)


def compare(what: str, make: Callable[[], str], *, name: str = 'compare') -> None:
  """Makes sure that `make()` is the same everywhere; one process alone is not asked.

  Raises:
    RuntimeError: on all processes, if some differ from process 0.
  """
  if jax.process_count() == 1:
    return
  found = gather(make, name=name)
  others = [str(i) for i, value in enumerate(found) if value != found[0]]
  if others:
    raise RuntimeError(
      f'{what} differs on process {", ".join(others)} from that on process 0 ({name}): '
      'the processes no longer make the same run, so it is stopped'
    )


def _attempt(make: Callable[[], Any]) -> tuple[bytes, Exception | None]:
  """Pickles (value, None), or (None, what went wrong); and the error itself."""
  try:
    return pickle.dumps((make(), None)), None
  except Exception as error:  # not swallowed: `_values` raises it on all processes
    is_bad_input = isinstance(error, ValueError) and not of_runtime(error)
    wrong = (is_bad_input, f'{type(error).__name__}: {error}')
    return pickle.dumps((None, wrong)), error


def _values(received: list[bytes], error: Exception | None) -> list[Any]:
  if error is not None:
    raise error
  results = [pickle.loads(payload) for payload in received]
  for process, (_, wrong) in enumerate(results):
    if wrong is not None:
      is_value_error, text = wrong
      raise (ValueError if is_value_error else RuntimeError)(
        f'Process {process} failed: {text}'
      )
  return [value for value, _ in results]


def _exchange(payload: bytes, send: Callable[[np.ndarray], np.ndarray]) -> list[bytes]:
  """Sends any number of bytes by collectives of one shape: [_PIECE] -> [N, _PIECE].

  The first 8 bytes say how many follow.
  """
  data = np.frombuffer(len(payload).to_bytes(8, 'little') + payload, np.uint8)
  pieces, start, end = [], 0, 1
  while start < end:
    piece = np.zeros(_PIECE, np.uint8)
    part = data[start : start + _PIECE]
    piece[: len(part)] = part
    pieces.append(np.asarray(send(piece)))
    if start == 0:
      ends = [8 + int.from_bytes(row[:8].tobytes(), 'little') for row in pieces[0]]
      end = max(ends)
    start += _PIECE
  rows = np.concatenate(pieces, axis=1)
  return [row[8:end].tobytes() for row, end in zip(rows, ends, strict=True)]
