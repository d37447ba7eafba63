"""What a terminal does to a command: Ctrl-C, and being closed.

Ctrl-C ends a command with exit code 130 and no traceback, while it imports too.
"""

from collections.abc import Callable
import os
import signal
import sys
from typing import TextIO

INTERRUPTED = 130  # as a shell has it: 128 and the signal's number


def die_at_once() -> None:
  """Until `quietly` Ctrl-C ends the process as any other signal does.

  Imports take seconds, and hold nothing that has to be put in order.
  """
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def quietly(main: Callable[[], int]) -> int:
  """The exit code of a command, Ctrl-C being one of its ends."""
  if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
    signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    return main()
  except KeyboardInterrupt:
    print('error: interrupted', file=sys.stderr)
    return INTERRUPTED


def tell(stream: TextIO, text: str) -> None:
  """Writes at once. Where nobody listens any more, nothing is written from then on.

  A terminal that was closed or a pipe that has ended is no reason to lose a run.
  """
  try:
    stream.write(text)
    stream.flush()
  except OSError:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
