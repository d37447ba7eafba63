"""Several processes with a few CPU devices each, as on several hosts."""

from collections.abc import Sequence
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]

START = """
import json, sys
me, given = int(sys.argv[1]), sys.argv[2]
sys.path.insert(0, sys.argv[3])
import jax
from jaxrl_sched.device import together
together.start()
"""


def launch(
  argv: Sequence[str],
  logs: pathlib.Path,
  *,
  count: int = 2,
  devices: int = 2,
  of: Sequence[Sequence[str]] | None = None,
) -> list[subprocess.Popen]:
  """Starts `python argv` `count` times; what each says goes to logs/<number>.txt.

  Args:
    of: what each is given besides.
  """
  logs.mkdir(parents=True, exist_ok=True)
  together = {}
  if count > 1:
    together = {
      'JAX_COORDINATOR_ADDRESS': f'localhost:{_free_port()}',
      'JAX_NUM_PROCESSES': str(count),
    }
  started = []
  for i in range(count):
    mine = {'JAX_PROCESS_ID': str(i)} if count > 1 else {}
    with (logs / f'{i}.txt').open('w') as log:
      started.append(
        subprocess.Popen(
          [sys.executable, *argv, *(of[i] if of else ())],
          stdout=log,
          stderr=subprocess.STDOUT,
          cwd=ROOT,
          env=os.environ
          | together
          | mine
          | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(devices)},
        )
      )
  return started


def ended(
  started: Sequence[subprocess.Popen], logs: pathlib.Path, *, timeout_s: float = 150
) -> tuple[list[int], list[str]]:
  """Exit codes and what was said. Whatever takes longer is killed: code -9."""
  until = time.monotonic() + timeout_s
  codes = []
  for process in started:
    try:
      process.wait(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
      process.kill()
    codes.append(process.wait())
  return codes, [(logs / f'{i}.txt').read_text() for i in range(len(started))]


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(('localhost', 0))
    return s.getsockname()[1]


def both(program: str, given: str | os.PathLike, *, timeout_s: float = 90) -> list[Any]:
  """What each of two processes prints last, as JSON.

  The program finds `json`, `sys`, `jax`, its number `me` and `given`, as text. A
  process that fails, or takes longer, fails the test with what it said.
  """
  given_to = [[str(i), str(given), str(ROOT)] for i in (0, 1)]
  with tempfile.TemporaryDirectory() as folder:
    logs = pathlib.Path(folder)
    started = launch(['-c', START + program], logs, of=given_to)
    codes, said = ended(started, logs, timeout_s=timeout_s)
  assert codes == [0, 0], '\n'.join(text[-3000:] for text in said)
  # Gloo speaks too, in brackets.
  told = (re.findall(r'^[{[](?!Gloo).*$', text, re.MULTILINE) for text in said)
  return [json.loads(found[-1]) for found in told]
