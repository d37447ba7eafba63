"""What a run says while it goes on: one live line on a terminal, else plain ones."""

import collections
import math
import shutil
import statistics
import time
from typing import Any, TextIO

from jaxrl_sched.terminal import tell

_PLAIN_EVERY_S = 5.0  # plain lines of steps come at most this often
# What is being done within a step is told at most this often.
_LIVE_PROGRESS_S = 1.0
_PLAIN_PROGRESS_S = 60.0


class Console:
  """On a terminal one line drawn over and over, elsewhere a line now and then.

  Steps count from 1 here: 'step 1/30' tells of line 0 of the metrics.

  Args:
    steps: of the whole run.
    evaluate_every: steps between evaluations; None: there are none.
  """

  def __init__(self, steps: int, stream: TextIO, evaluate_every: int | None = None):
    self._steps, self._evaluate_every = steps, evaluate_every
    self._stream, self._live = stream, stream.isatty()
    self._seconds = collections.deque(maxlen=5)  # of the latest steps
    self._evaluation_s = 0.0  # what the latest one took
    self._told_s = time.monotonic()  # when anything was last told
    self._plain_s = -math.inf  # when a plain line of a step was
    self._waiting = ''  # a plain line that came too soon after another
    self._last: list[str] = []  # what was told of the last step
    self._shown = ''  # the live line
    self._doing = ''  # the first word of the progress that is shown

  def step(self, step: int, values: dict[str, Any], held_out: str | None) -> None:
    """Tells of a step; after the last, of the final evaluation, if there was one.

    Args:
      held_out: the numbers of the latest evaluation; None: there was none yet.
    """
    if step >= self._steps:
      self.end()
      if held_out is not None and any(key.startswith('eval/') for key in values):
        self._print(f'final evaluation | held-out {held_out}')
      return
    self._doing = ''
    self._last = [self._name(step), *self._parts(step, values, held_out)]
    text = ' | '.join(self._last)
    if self._live:
      self._draw(text)
      return
    self._waiting = text
    if time.monotonic() >= self._plain_s + _PLAIN_EVERY_S:
      self._print_waiting()

  def progress(self, step: int, text: str) -> None:
    """Tells what is being done within a step, such as 'sampling 24/96 answers'."""
    every = _LIVE_PROGRESS_S if self._live else _PLAIN_PROGRESS_S
    doing = text.split()[0]
    # Something else, after a thing that took long enough to be shown: shown at once.
    new = self._live and self._doing not in ('', doing)
    if time.monotonic() < self._told_s + every and not new:
      return
    self._doing = doing
    parts = [self._name(step), text]
    if self._live:
      if len(self._last) > 1:
        parts += [f'last step: {self._last[1]}', *self._last[2:]]
      self._draw(' | '.join(parts))
    else:
      self._print_waiting()
      self._print(' | '.join(parts))

  def say(self, text: str) -> None:
    """Prints a line, above the live one."""
    if self._live and self._shown:
      tell(self._stream, '\r\x1b[K')
    self._print(text)
    if self._live and self._shown:
      self._draw(self._shown)

  def end(self) -> None:
    """Leaves the line of the last step where it is."""
    self._print_waiting()
    if self._live and self._shown:
      if self._doing:
        self._draw(' | '.join(self._last))
      tell(self._stream, '\n')
    self._shown = self._doing = ''

  def _draw(self, text: str) -> None:
    width = shutil.get_terminal_size().columns - 1
    tell(self._stream, f'\r\x1b[K{text[:width]}')
    self._shown, self._told_s = text, time.monotonic()

  def _print(self, text: str) -> None:
    tell(self._stream, f'{text}\n')
    self._told_s = time.monotonic()

  def _print_waiting(self) -> None:
    if self._waiting:
      self._print(self._waiting)
      self._waiting, self._plain_s = '', time.monotonic()

  def _name(self, step: int) -> str:
    if step >= self._steps:
      return 'final evaluation'
    return f'step {step + 1:>{len(str(self._steps))}}/{self._steps}'

  def _parts(
    self, step: int, values: dict[str, Any], held_out: str | None
  ) -> list[str]:
    seconds, done = values.get('time/step_s'), step + 1
    self._evaluation_s = values.get('time/evaluate_s', self._evaluation_s)
    parts = []
    if 'reward/mean' in values:
      parts.append(f'reward {values["reward/mean"]:.3f}')
    if 'pass_rate' in values:
      parts.append(f'pass rate {values["pass_rate"]:.3f}')
    if values.get('update/skipped') == 1:
      parts.append(f'no update: {_why_not(values)}')
    if values.get('update/refused') == 1:
      parts.append('no update: not finite')
    if held_out is not None:
      parts.append(f'held-out {held_out}')
    if seconds:
      self._seconds.append(seconds)
      if 'rollout/tokens_generated' in values:
        rate = values['rollout/tokens_generated'] / seconds
        parts.append(f'{rate:,.0f} tokens/s')
    if self._seconds and done < self._steps:
      left = statistics.median(self._seconds) * (self._steps - done)
      if self._evaluate_every is not None:
        # Weights `done` up to the last ones are evaluated where that is due.
        due = (self._steps - 1) // self._evaluate_every - step // self._evaluate_every
        left += (due + 1) * self._evaluation_s
      parts.append(f'{duration(left)} left')
    return parts


def _why_not(values: dict[str, Any]) -> str:
  """Why a step had nothing to learn from."""
  generated = values.get('rollout/groups_generated')
  if generated and values.get('rollout/groups_filtered') == generated:
    return 'no group with spread'
  return values.get('update/why', 'nothing to train on')


def duration(seconds: float) -> str:
  """Two units at most: 42s, 3m05s, 2h07m, 1d04h."""
  whole = round(seconds)
  if whole < 60:
    return f'{whole}s'
  if whole < 3600:
    return f'{whole // 60}m{whole % 60:02}s'
  if whole < 86400:
    return f'{whole // 3600}h{whole % 3600 // 60:02}m'
  return f'{whole // 86400}d{whole % 86400 // 3600:02}h'
