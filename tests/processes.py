"""Two processes of two CPU devices each, as on two hosts."""

import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]

START = """
import json, sys
me, port, given = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path.insert(0, sys.argv[4])
import jax
jax.config.update('jax_num_cpu_devices', 2)
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(f'localhost:{port}', 2, me)
"""


def both(program: str, given: str | os.PathLike, *, timeout_s: float = 90) -> list[Any]:
  """What each process prints last, as JSON.

  The program finds `json`, `sys`, `jax`, its number `me` and `given`, as text. A
  process that fails, or takes longer, fails the test with what it said.
  """
  with socket.socket() as s:
    s.bind(('localhost', 0))
    port = s.getsockname()[1]
  argv = [sys.executable, '-c', START + program]
  processes = [
    subprocess.Popen(
      [*argv, str(i), str(port), str(given), str(ROOT)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=os.environ | {'JAX_PLATFORMS': 'cpu'},
    )
    for i in range(2)
  ]
  try:
    outputs = [process.communicate(timeout=timeout_s) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (_, errors) in zip(processes, outputs, strict=True):
    assert process.returncode == 0, errors[-3000:]
  return [json.loads(out.splitlines()[-1]) for out, _ in outputs]
