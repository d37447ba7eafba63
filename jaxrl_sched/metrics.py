"""What a run writes down: JSON lines, a console line, TensorBoard, Weights & Biases.

Numbers are fetched one step late: those of step n, which may still be on their way
from the accelerators, are turned into Python numbers when step n + 1 has got under way
(`progress`) or is logged, or at `flush`. No jax here: `np.asarray` waits for a device
array and fetches it.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import re
import statistics
import sys
from typing import Any, Protocol
import uuid

import numpy as np

from jaxrl_sched import storage
from jaxrl_sched.console import Console
from jaxrl_sched.engine import Span

_HELD_OUT = re.compile(r'(eval/.+)/pass@1')
_EQUAL = 1e-6  # a mean reward and a pass rate this close are of rewards 0 and 1
_FILES = ('metrics', 'rollouts', 'samples', 'timeline')


class Recorder:
  """Writes what a run reports, one step late.

  Use it as a context manager, or call `close`. Besides the run's own files it tells
  `loggers`: objects by name with `write(step, numbers)`, `flush()` and `close()`. One
  that raises is reported once and left out from then on, since a broken dashboard is
  no reason to lose a run. That a file of the run cannot be written is an error.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    steps: int,
    start: int = 0,
    evaluate_every: int | None = None,
    tensorboard: bool = True,
    wandb: dict[str, Any] | None = None,
    console: bool = True,
    home: storage.Home | None = None,
  ):
    """Opens the files; what an earlier run wrote of steps before `start` stays.

    Args:
      workdir: a local folder; made if it is not there.
      steps: of the whole run.
      start: the first step that will be logged. Lines of this and later steps, and a
        last line that was torn when an earlier run was killed, are dropped.
      evaluate_every: steps between evaluations, for the time that is left.
      tensorboard: whether to write events into `workdir/tensorboard`.
      wandb: keyword arguments of `wandb.init`, or None for no W&B.
      console: whether to print how the run is doing.
      home: is told when to copy the workdir to where the run lives, if that is
        elsewhere: at every `flush`, and now and then.
    """
    if '://' in str(workdir):
      raise ValueError(f'Metrics need a local folder, but workdir is {workdir}')
    self.workdir = pathlib.Path(workdir)
    self.workdir.mkdir(parents=True, exist_ok=True)
    self._home = home
    self._next = start  # the lowest step that may be logged
    self._pending: tuple[int, dict[str, Any]] | None = None
    self._summary = _Summary()

    paths = {name: self.workdir / f'{name}.jsonl' for name in _FILES}
    for path in paths.values():
      _drop_from(path, start)
    self._files = {n: path.open('a', encoding='utf-8') for n, path in paths.items()}
    for line in iter_jsonl(paths['metrics']):
      self._summary.add(line)
    self._console = Console(steps, sys.stdout, evaluate_every) if console else None

    self.loggers: dict[str, Logger] = {}
    if tensorboard:
      self._start('TensorBoard', lambda: _TensorBoard(self.workdir, start))
    if wandb is not None:
      if importlib.util.find_spec('wandb') is None:
        raise ValueError(
          "wandb is set, but not installed: pip install 'jaxrl_sched[wandb]'"
        )
      self._start('wandb', lambda: _WandB(self.workdir, wandb))

  def __enter__(self) -> 'Recorder':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def log(self, step: int, metrics: dict[str, Any]) -> None:
    """Takes the numbers of a step, and writes those of the step before.

    A value that is NaN or infinite is left out of this step's line, which then counts
    such values in 'metrics/not_finite'.

    Args:
      step: higher than at the last call.
      metrics: flat keys; numbers, arrays of one element, on a device or not, or text.
    """
    if step < self._next:
      raise ValueError(f'Step {step} logged where {self._next} or later is expected')
    self._next = step + 1
    self._write_pending()
    self._pending = (step, metrics)
    if self._home:
      try:
        self._home.push_if_due()
      except storage.StorageError as error:  # `flush` will see whether it lasts
        self.say(f'Not copied this time: {error}')

  def rollouts(self, step: int, lines: list[dict[str, Any]]) -> None:
    """Writes a line for each group. Arrays become lists, NaN and infinity null."""
    self._append('rollouts', step, lines)

  def samples(self, step: int, lines: list[dict[str, Any]]) -> None:
    """Writes what was said in some groups, a line an answer."""
    self._append('samples', step, lines)

  def timeline(self, step: int, spans: Sequence[Span]) -> None:
    """Writes what was done when."""
    self._append('timeline', step, [dataclasses.asdict(span) for span in spans])

  def progress(self, text: str) -> None:
    """Shows what is being done within the step that is logged next."""
    self._write_pending()  # of the step before; its numbers are ready by now
    if self._console:
      self._console.progress(self._next, text)

  def _append(self, name: str, step: int, lines: list[dict[str, Any]]) -> None:
    for line in lines:
      print(to_json({'step': step} | line), file=self._files[name])
    self._files[name].flush()

  def flush(self) -> None:
    """Makes sure that all that was logged is on disk: to be called before a save.

    Where the run lives elsewhere, it is there, too, or an error says that it is not.
    """
    self._write_pending()
    for file in self._files.values():
      file.flush()
      os.fsync(file.fileno())
    self._tell(lambda logger: logger.flush())
    if self._home:
      self._home.push()

  def close(self) -> None:
    """Writes what is pending and ends; further calls do nothing."""
    if self._files['metrics'].closed:
      return
    try:
      self.flush()
    finally:
      if self._console:
        self._console.end()
      self._tell(lambda logger: logger.close())
      for file in self._files.values():
        file.close()

  def say(self, text: str) -> None:
    """Prints a line without spoiling the progress line."""
    if self._console:
      self._console.say(text)
    else:
      print(text, file=sys.stderr)

  def summary(self) -> dict[str, Any]:
    """The latest value of every key logged, also by earlier runs in this folder.

    Besides: 'held_out/first' and 'held_out/last', the mean pass@1 over datasets at the
    first and the last evaluation; where rewards are not all 0 or 1, the same of rewards
    as 'held_out/first_reward' and 'held_out/last_reward'; and the sums
    'total/tokens_generated', 'total/seconds', 'total/updates' (made, not skipped),
    'total/refused' and 'total/refused_last' (in a row, at the end), each where there is
    one.
    """
    if not self._files['metrics'].closed:
      self._write_pending()
    return self._summary.values()

  def _write_pending(self) -> None:
    if self._pending is None:
      return
    (step, metrics), self._pending = self._pending, None
    values = _finite({k: _number(k, v) for k, v in metrics.items()})
    line = {'step': step} | dict(sorted(values.items()))
    print(json.dumps(line, allow_nan=False), file=self._files['metrics'], flush=True)
    self._summary.add(line)
    if self._console:
      self._console.step(step, values, self._summary.held_out())
    self._tell(lambda logger: logger.write(step, values))

  def _start(self, name: str, make: Callable[[], 'Logger']) -> None:
    try:
      self.loggers[name] = make()
    except Exception as error:  # the border to a dashboard
      self._report(name, error)

  def _tell(self, what: Callable[['Logger'], None]) -> None:
    for name, logger in list(self.loggers.items()):
      try:
        what(logger)
      except Exception as error:  # the border to a dashboard
        del self.loggers[name]
        self._report(name, error)

  def _report(self, name: str, error: Exception) -> None:
    self.say(f'{name} is off for the rest of this run: {type(error).__name__}: {error}')


class NoRecorder:
  """In a Recorder's place on processes that write nothing down."""

  def __enter__(self) -> 'NoRecorder':
    return self

  def __exit__(self, *_) -> None:
    pass

  def log(self, step: int, metrics: dict[str, Any]) -> None:
    pass

  def rollouts(self, step: int, lines: list[dict[str, Any]]) -> None:
    pass

  def samples(self, step: int, lines: list[dict[str, Any]]) -> None:
    pass

  def timeline(self, step: int, spans: Sequence[Span]) -> None:
    pass

  def progress(self, text: str) -> None:
    pass

  def say(self, text: str) -> None:
    pass

  def flush(self) -> None:
    pass

  def summary(self) -> dict[str, Any]:
    return {}


class Logger(Protocol):
  """What a `Recorder` tells of every step besides its own files."""

  def write(self, step: int, values: dict[str, Any]) -> None: ...

  def flush(self) -> None: ...

  def close(self) -> None: ...


class _TensorBoard:
  """Events for TensorBoard; those that a killed run wrote of later steps are void."""

  def __init__(self, workdir: pathlib.Path, start: int):
    import tensorboardX

    self._writer = tensorboardX.SummaryWriter(
      str(workdir / 'tensorboard'),
      purge_step=start,
      # Files are named by the second: one that restarts at once gets its own too.
      filename_suffix=f'.from{start:08}',
    )
    self.flush = self._writer.flush
    self.close = self._writer.close

  def write(self, step: int, values: dict[str, Any]) -> None:
    for key, value in values.items():
      if not isinstance(value, str):
        self._writer.add_scalar(key, value, step)


class _WandB:
  """A run at Weights & Biases. Started again it goes on in the same place there."""

  def __init__(self, workdir: pathlib.Path, settings: dict[str, Any]):
    import wandb

    kept = workdir / 'wandb_id.txt'
    if not kept.exists():
      kept.write_text(uuid.uuid4().hex[:12])
    ours = {'id': kept.read_text(), 'resume': 'allow', 'dir': str(workdir)}
    self._run = wandb.init(**{**ours, **settings})
    self.close = self._run.finish

  def write(self, step: int, values: dict[str, Any]) -> None:
    self._run.log(values, step=step)

  def flush(self) -> None:
    pass  # it sends in its own time


def iter_jsonl(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
  """The objects of a JSON lines file. A torn last line is passed over.

  Raises:
    ValueError: another line is not a JSON object. The message names file and line.
  """
  for _, value in _lines(path):
    yield value


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
  """All objects of a JSON lines file: see `iter_jsonl`."""
  return list(iter_jsonl(path))


def _lines(path: str | os.PathLike) -> Iterator[tuple[bytes, dict[str, Any]]]:
  with open(path, 'rb') as file:
    for number, line in enumerate(file, 1):
      try:
        value = json.loads(line)
      except ValueError:
        value = None
      if isinstance(value, dict):
        yield line.rstrip(b'\n') + b'\n', value
      elif line.endswith(b'\n'):
        raise ValueError(f'{path}:{number}: not a JSON object')


def _drop_from(path: pathlib.Path, start: int) -> None:
  """Leaves only lines of steps below `start`, and no torn one.

  The file is replaced whole at the end: a kill half-way leaves the old one.
  """
  if not path.exists():
    return
  new = path.with_name(path.name + '.new')
  with new.open('wb') as file:
    file.writelines(line for line, value in _lines(path) if value['step'] < start)
    file.flush()
    os.fsync(file.fileno())
  os.replace(new, path)


def _number(key: str, value: Any) -> int | float | str:
  if isinstance(value, str):
    return value
  array = np.asarray(value)
  if array.size != 1:
    raise ValueError(f'Metric {key!r} has shape {array.shape}, expected one number')
  item = array.item()
  return int(item) if isinstance(item, bool | int) else float(item)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
  """Without NaN and infinity, which are not JSON; counted where there were any."""
  kept = {k: v for k, v in values.items() if isinstance(v, str) or math.isfinite(v)}
  if len(kept) < len(values):
    kept['metrics/not_finite'] = len(values) - len(kept)
  return kept


def to_json(line: dict[str, Any]) -> str:
  """One line. Arrays are lists, NaN and infinity null, and what else JSON lacks text."""
  return json.dumps(_plain(line), ensure_ascii=False, allow_nan=False, default=str)


def _plain(value: Any) -> Any:
  """Arrays as lists, numpy's numbers as Python's, NaN and infinity as None."""
  if isinstance(value, dict):
    return {str(k): _plain(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(v) for v in value]
  if isinstance(value, np.ndarray | np.generic):
    return _plain(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


class _Summary:
  """The latest of all keys, and what is told of a whole run."""

  def __init__(self):
    self._latest: dict[str, Any] = {}
    self._totals: dict[str, float] = {}
    # Of the first and the last evaluation.
    self._pass_rates: list[float] = []
    self._rewards: list[float] = []
    self._has_partial_rewards = False

  def add(self, line: dict[str, Any]) -> None:
    self._latest |= line
    for total, key in (
      ('total/tokens_generated', 'rollout/tokens_generated'),
      ('total/seconds', 'time/step_s'),
    ):
      if key in line:
        self._totals[total] = self._totals.get(total, 0) + line[key]
    if 'update/skipped' in line:
      self._add_update(line['update/skipped'], line.get('update/refused', 0))
    found = [match[1] for key in line if (match := _HELD_OUT.fullmatch(key))]
    if found:
      rates = [line[f'{name}/pass@1'] for name in found]
      rewards = [line.get(f'{name}/reward', line[f'{name}/pass@1']) for name in found]
      self._has_partial_rewards |= any(
        abs(a - b) > _EQUAL for a, b in zip(rates, rewards, strict=True)
      )
      self._pass_rates = [*self._pass_rates[:1], statistics.fmean(rates)]
      self._rewards = [*self._rewards[:1], statistics.fmean(rewards)]

  def _add_update(self, skipped: float, refused: float) -> None:
    totals = self._totals
    for key, more in (
      ('total/updates', 1 - skipped - refused),
      ('total/refused', refused),
    ):
      totals[key] = totals.get(key, 0) + more
    if not skipped:
      in_a_row = totals.get('total/refused_last', 0)
      totals['total/refused_last'] = in_a_row + 1 if refused else 0

  def held_out(self) -> str | None:
    """The latest evaluation in a few words; None: there was none."""
    if not self._pass_rates:
      return None
    passed = f'{self._pass_rates[-1]:.3f}'
    if not self._has_partial_rewards:
      return passed
    return f'reward {self._rewards[-1]:.3f}, passed {passed}'

  def values(self) -> dict[str, Any]:
    values = self._latest | self._totals
    kinds = [('', self._pass_rates)]
    if self._has_partial_rewards:
      kinds.append(('_reward', self._rewards))
    for kind, both in kinds:
      if both:
        values |= {f'held_out/first{kind}': both[0], f'held_out/last{kind}': both[-1]}
    return values
