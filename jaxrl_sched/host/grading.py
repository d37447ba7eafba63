"""A pool of killable processes that grades answers, with a deadline for each.

One answer that hangs, crashes, raises or scores NaN gets the lowest score and a named
fault, and holds up nobody else's. A process that an answer has worn out, by memory that
it keeps for example, is replaced; what failed in it for that is graded again.
Nothing of the parent but its `sys.path` enters a worker: no
fork (the parent runs jax's threads), no second run of `__main__`, no jax.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
import dataclasses
from decimal import Decimal
import json
import math
from multiprocessing.connection import Connection
import numbers
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from jaxrl_sched.types import LARGEST, Prompt, Reward, tolerance

# An answer that runs for longer than this lets a spare worker take its turn.
PATIENCE_S = 0.25
# Importing a verifier's libraries is not part of any answer's time, but must end.
IMPORT_S = 300.0
# A worker's code. Its sys.path is the parent's, so that a user's function imports.
BOOT = (
  'import sys; sys.path[:] = sys.argv[4:]; '
  'from jaxrl_sched.host import grading_worker; '
  'grading_worker.serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grade:
  """What became of one answer."""

  score: float  # the weighted sum of several; the lowest where there is a fault
  # timeout, crashed, raised, not a number, out of range; 'name: raised' of several
  fault: str | None = None
  detail: str = ''  # of the fault, one line
  seconds: float = 0.0  # that the verifiers took
  components: tuple[float, ...] = ()  # before weighting, as `Prompt.rewards` are


@dataclasses.dataclass(kw_only=True)
class _Answer:
  """An answer, and what its verifiers have said so far."""

  key: Hashable
  rewards: tuple[Reward, ...]
  grades: dict[int, Grade] = dataclasses.field(default_factory=dict)  # by place

  def grade(self) -> Grade:
    """Of all verifiers together."""
    if not self.rewards[0].name:
      return self.grades[0]
    grades = [self.grades[i] for i in range(len(self.rewards))]
    both = list(zip(self.rewards, grades, strict=True))
    wrong = next(((r, g) for r, g in both if g.fault is not None), None)
    return Grade(
      score=math.fsum(r.weight * g.score for r, g in both),
      fault=wrong and f'{wrong[0].name}: {wrong[1].fault}',
      detail=wrong[1].detail if wrong else '',
      seconds=sum(g.seconds for g in grades),
      components=tuple(g.score for g in grades),
    )


@dataclasses.dataclass(kw_only=True)
class _Task:
  """What one verifier is to say of an answer."""

  answer: _Answer
  place: int  # of the verifier among the answer's
  payload: bytes  # text and prompt, pickled
  again: bool = False  # it failed once, in a worker that may have been at fault

  @property
  def reward(self) -> Reward:
    return self.answer.rewards[self.place]


@dataclasses.dataclass(kw_only=True, eq=False)
class _Worker:
  process: subprocess.Popen
  connection: Connection
  ready: bool = False
  answered: bool = False  # something before its task
  task: _Task | None = None
  waiting: _Task | None = None  # for this worker, which has just been started
  since: float = 0.0  # monotonic time at which the task began
  loading: bool = False  # the task waits for an import: its clock has not begun
  loaded: set[str] = dataclasses.field(default_factory=set)


class GradingPool:
  """Grades answers in processes that can be killed.

  At most `workers` answers run at once, not counting those that have run for
  longer than `PATIENCE_S`: for each of these a spare, as many as the workers and
  started with them, takes a turn. Only misbehaviour ends a process. An answer that ends
  one, or that fails for want of memory, threads or files where others were graded
  before, is graded once more in a new one.

  Verifiers' prints to stdout are discarded; what they write to stderr is seen.

  Args:
    workers: answers graded at once.
    deadline_s: seconds a verifier may take for an answer, from when a worker begins.
    memory_gib: memory a worker may allocate; None: as much as there is.
    warm: verifiers to load before the first answer comes.
  """

  def __init__(
    self,
    *,
    workers: int = 2,
    deadline_s: float = 10.0,
    memory_gib: float | None = 4.0,
    warm: Iterable[str] = (),
  ):
    if workers < 1:
      raise ValueError(f'grading workers={workers}: expected at least 1')
    if not deadline_s > 0:
      raise ValueError(f'grading deadline_s={deadline_s}: expected more than 0')
    self._size = workers
    self._deadline_s = deadline_s
    self._memory_gib = memory_gib or 0.0
    self._names = set(warm)  # verifiers seen: a new worker loads them first
    self._path = [str(entry) for entry in sys.path]

    self._queue: deque[_Task] = deque()  # appended to by submit, taken by the thread
    self._changed = threading.Condition()  # guards the four below
    self._keys: dict[Hashable, None] = {}  # submitted and not yet collected, in order
    self._grades: dict[Hashable, Grade] = {}
    self._wanted: set[Hashable] = set()  # what `collect` still waits for
    self._ended: BaseException | str | None = None  # why nothing more will be graded

    # From here on the thread's own, but for the wake-up pipe.
    self._workers: list[_Worker] = []
    self._failed_starts = 0
    self._selector = selectors.DefaultSelector()
    self._wake_out, self._wake_in = os.pipe()
    os.set_blocking(self._wake_in, False)
    self._selector.register(self._wake_out, selectors.EVENT_READ)
    self._closing = False
    self._thread = threading.Thread(target=self._run, name='grading', daemon=True)
    self._thread.start()

  def submit(self, key: Hashable, text: str, prompt: Prompt) -> None:
    """Queues an answer and returns at once; `key` names it in `collect`."""
    answer = _Answer(key=key, rewards=prompt.graded_by)
    try:  # a user's meta may hold anything
      tasks = [
        _Task(answer=answer, place=i, payload=_payload(text, prompt, reward))
        for i, reward in enumerate(answer.rewards)
      ]
    except Exception as error:
      raise ValueError(f'prompt {prompt.id!r} cannot be pickled: {error}') from error
    with self._changed:
      self._raise_if_ended()
      if key in self._keys:
        raise ValueError(f'answer {key!r} was submitted twice before a collect')
      self._keys[key] = None
    self._queue.extend(tasks)
    self._wake()

  def take(self, keys: Iterable[Hashable]) -> dict[Hashable, Grade]:
    """Those of these grades that are there; waits for none."""
    with self._changed:
      self._raise_if_ended()
      there = {key: self._grades.pop(key) for key in keys if key in self._grades}
      for key in there:
        del self._keys[key]
    return there

  def collect(
    self,
    keys: Iterable[Hashable] | None = None,
    *,
    while_waiting: Callable[[], Any] = lambda: None,
    enough: Callable[[dict[Hashable, Grade]], bool] = lambda grades: False,
  ) -> dict[Hashable, Grade]:
    """Waits for what was submitted; grades in the order of submission.

    Args:
      keys: of what was submitted; None: all of it.
      while_waiting: called several times a second, or again and again while it returns
        something true; it may raise to give up.
      enough: whether these grades will do. The others are left to the next call.
    """
    with self._changed:
      keys = list(self._keys if keys is None else keys)
      self._wanted = {key for key in keys if key not in self._grades}
    patience = 0.25
    while True:
      with self._changed:
        if self._changed.wait_for(lambda: not self._wanted or self._ended, patience):
          if self._wanted:
            self._raise_if_ended()
          break
        there = {key: self._grades[key] for key in keys if key in self._grades}
      patience = 0.0 if while_waiting() else 0.25
      if enough(there):
        break
    with self._changed:
      self._wanted = set()
    return self.take(keys)

  def close(self) -> None:
    """Ends every worker, also in the middle of an answer. May be called twice."""
    if self._closing:
      return
    self._closing = True
    self._wake()
    self._thread.join()
    os.close(self._wake_in)
    os.close(self._wake_out)

  def __enter__(self) -> 'GradingPool':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  @property
  def pids(self) -> tuple[int, ...]:
    """Process ids of the workers, spares included."""
    return tuple(worker.process.pid for worker in list(self._workers))

  def _raise_if_ended(self) -> None:
    if self._ended:
      cause = self._ended if isinstance(self._ended, BaseException) else None
      raise RuntimeError(f'the grading pool has ended: {self._ended}') from cause

  def _wake(self) -> None:
    try:
      os.write(self._wake_in, b'.')
    except BlockingIOError:  # full: the thread will wake anyhow
      pass

  # The rest runs on the thread. It starts every worker, because the kernel ties a
  # worker's life (PR_SET_PDEATHSIG) to the thread that started it.

  def _run(self) -> None:
    ended: BaseException | str = 'closed'
    try:
      # Inherited: a worker is deaf to them from its first moment (see _settle).
      signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
      for _ in range(2 * self._size):
        self._start()
      while not self._closing:
        self._hand_out()
        for event, _ in self._selector.select(self._time_left()):
          if event.data is None:
            os.read(self._wake_out, 4096)
          elif event.data in self._workers:
            self._read(event.data)
        self._enforce_deadlines()
    except BaseException as error:  # told to whoever collects
      ended = error
    finally:
      for worker in list(self._workers):
        self._end(worker)
      self._selector.close()
      with self._changed:
        self._ended = ended
        self._changed.notify_all()

  def _start(self, waiting: _Task | None = None) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
      fd = theirs.fileno()
      arguments = [fd, os.getpid(), self._memory_gib, *self._path]
      process = subprocess.Popen(
        [sys.executable, '-c', BOOT, *map(str, arguments)],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Its own group: signals to ours pass it by, and its children die with it.
        start_new_session=True,
        env=os.environ
        | {
          'JAX_PLATFORMS': 'cpu',  # should a user's verifier load jax
          'OMP_NUM_THREADS': '1',
          'OPENBLAS_NUM_THREADS': '1',
          'PYTHONHASHSEED': '0',  # verdicts repeat from run to run
        },
      )
    worker = _Worker(
      process=process, connection=Connection(ours.detach()), waiting=waiting
    )
    self._workers.append(worker)
    self._selector.register(worker.connection, selectors.EVENT_READ, worker)
    worker.loaded = set(self._names)
    self._send(worker, json.dumps(sorted(self._names)).encode())

  def _send(self, worker: _Worker, payload: bytes) -> bool:
    try:
      worker.connection.send_bytes(payload)
    except OSError:  # dead: its end of the pipe reads as closed, and is seen to there
      return False
    return True

  def _end(self, worker: _Worker) -> int:
    """Kills a worker and its children; its exit code."""
    self._workers.remove(worker)
    self._selector.unregister(worker.connection)
    worker.connection.close()
    try:
      os.killpg(worker.process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # gone already
      pass
    return worker.process.wait()  # of one that had died: how it died

  def _hand_out(self) -> None:
    now = time.monotonic()
    busy = sum(now < self._turn(w) for w in self._workers if w.task)
    for worker in [w for w in self._workers if w.ready and w.task is None]:
      if busy >= self._size:
        return
      if worker.waiting is None and not self._queue:
        continue
      task = worker.waiting or self._queue.popleft()
      if not self._send(worker, task.payload):
        if worker.waiting is None:
          self._queue.appendleft(task)
        worker.ready = False
        continue
      name = task.reward.verifier
      worker.task, worker.since, worker.waiting = task, now, None
      worker.loading = name not in worker.loaded
      worker.loaded.add(name)
      self._names.add(name)
      busy += 1

  def _time_left(self) -> float | None:
    """Until the next deadline, or until a spare may take a turn."""
    now = time.monotonic()
    ends = [w.since + self._limit(w) for w in self._workers if w.task]
    if self._queue:
      turns = [self._turn(w) for w in self._workers if w.task]
      ends += [turn for turn in turns if turn > now]
    return max(0.0, min(ends) - now) if ends else None

  def _turn(self, worker: _Worker) -> float:
    """When a spare may take a turn; not while the worker imports, as it would too."""
    return math.inf if worker.loading else worker.since + PATIENCE_S

  def _limit(self, worker: _Worker) -> float:
    return IMPORT_S if worker.loading else self._deadline_s

  def _read(self, worker: _Worker) -> None:
    try:
      # JSON and not pickle: a worker must not be able to make us run anything.
      kind, *fields = json.loads(worker.connection.recv_bytes(1 << 16))
    except (EOFError, OSError, ValueError):
      self._bury(worker)
      return
    if kind == 'ready':
      worker.ready, self._failed_starts = True, 0
    elif kind == 'begun':
      worker.loading, worker.since = False, time.monotonic()
    else:
      score, fault, detail, seconds, worn = fields
      grade = Grade(score=score, fault=fault, detail=detail, seconds=seconds)
      if worn:
        self._replace(worker, grade)
      else:
        self._finish(worker, grade)

  def _replace(self, worker: _Worker, grade: Grade) -> None:
    """Starts another in a worker's place. A crash, and what failed where others had been
    graded before, is its answer's own fault only if it happens again."""
    if worker in self._workers:
      self._end(worker)
    doubtful = grade.fault == 'crashed' or (grade.fault is not None and worker.answered)
    if doubtful and not worker.task.again:
      self._start(dataclasses.replace(worker.task, again=True))
      worker.task = None
    else:
      self._finish(worker, grade)
      self._start()

  def _bury(self, worker: _Worker) -> None:
    """A worker died, and another takes its place."""
    code = self._end(worker)
    how = f'exit code {code}' if code >= 0 else f'signal {signal.Signals(-code).name}'
    if worker.task:
      seconds = time.monotonic() - worker.since
      self._replace(worker, self._failed(worker, 'crashed', how, seconds))
      return
    if not worker.ready:
      self._failed_starts += 1
      if self._failed_starts > 2 * self._size:
        names = ', '.join(sorted(self._names))
        raise RuntimeError(f'grading workers die at their start ({how}; {names})')
    self._start(worker.waiting)

  def _enforce_deadlines(self) -> None:
    now = time.monotonic()
    for worker in list(self._workers):
      seconds = now - worker.since
      # An answer that has just come in is read, not killed.
      if not worker.task or seconds < self._limit(worker) or worker.connection.poll():
        continue
      self._end(worker)
      what = 'to import' if worker.loading else 'to grade'
      detail = f'more than {self._limit(worker):g} s {what}'
      self._finish(worker, self._failed(worker, 'timeout', detail, seconds))
      self._start()

  def _failed(self, worker: _Worker, fault: str, detail: str, seconds: float) -> Grade:
    worst = worker.task.reward.min_reward
    return Grade(score=worst, fault=fault, detail=detail, seconds=seconds)

  def _finish(self, worker: _Worker, grade: Grade) -> None:
    task, worker.task, worker.answered = worker.task, None, True
    answer = task.answer
    answer.grades[task.place] = grade
    if len(answer.grades) < len(answer.rewards):
      return
    key = answer.key
    with self._changed:
      self._grades[key] = answer.grade()
      if key in self._wanted:
        self._wanted.discard(key)
        if not self._wanted:
          self._changed.notify_all()


def _payload(text: str, prompt: Prompt, reward: Reward) -> bytes:
  """What a worker gets: each of several verifiers sees the prompt as its own."""
  if reward.name:
    prompt = dataclasses.replace(
      prompt,
      reward=reward.verifier,
      max_reward=reward.max_reward,
      min_reward=reward.min_reward,
      rewards=(),
    )
  return pickle.dumps((text, prompt), pickle.HIGHEST_PROTOCOL)


def judge(
  value: Any, max_reward: float | None, min_reward: float = 0.0
) -> tuple[float, str | None, str]:
  """A verifier's word as (score, fault, detail): in [min_reward, max_reward].

  What is no such number is a fault, and scores `min_reward`.
  """
  if isinstance(value, np.ndarray) and value.ndim == 0:
    value = value[()]
  if not isinstance(value, (numbers.Real, Decimal, np.bool_)):
    return min_reward, 'not a number', one_line(repr(value))
  try:
    score = float(value)
  except OverflowError:
    score = math.inf
  if math.isnan(score):
    return min_reward, 'not a number', 'nan'
  top = LARGEST if max_reward is None else max_reward
  if min_reward <= score <= top:
    return score, None, ''
  near = float(tolerance(max_reward, min_reward))  # a sum of parts may round beyond
  if not min_reward - near <= score <= top + near:
    expected = f'min_reward={min_reward:g} to max_reward={top:g}'
    return min_reward, 'out of range', f'{score:g}, expected {expected}'
  return min(max(score, min_reward), top), None, ''


def one_line(text: str) -> str:
  return ' '.join(text.split())[:300]


def describe(error: BaseException) -> str:
  try:
    return one_line(f'{type(error).__name__}: {error}')
  except BaseException:  # its own __str__ fails
    return type(error).__name__
