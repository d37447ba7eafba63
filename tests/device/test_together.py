"""What ends a process, and on which devices it runs."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest

from jaxrl_sched import terminal
from jaxrl_sched.device import backend, together

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def handlers():
  """Handlers of signals are put back."""
  before = {number: signal.getsignal(number) for number in together.SIGNALS}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.mark.parametrize('name', ['TERM', 'INT', 'HUP', 'USR1', 'USR2', 'XCPU'])
def test_whatever_asks_a_process_to_end_is_heard(name, handlers):
  number = signal.Signals[f'SIG{name}']
  signal.signal(number, signal.SIG_DFL)
  stop = together.Stop()
  assert not stop()
  os.kill(os.getpid(), number)
  assert stop()


@pytest.mark.parametrize('name', ['HUP', 'INT', 'USR1'])
def test_an_ignored_signal_stays_ignored(name, handlers):
  """As nohup leaves SIGHUP, and a shell SIGINT of what it starts in the background."""
  number = signal.Signals[f'SIG{name}']
  signal.signal(number, signal.SIG_IGN)
  stop = together.Stop()
  os.kill(os.getpid(), number)
  assert not stop() and signal.getsignal(number) == signal.SIG_IGN


def test_a_second_ctrl_c_ends_at_once(handlers):
  signal.signal(signal.SIGINT, signal.default_int_handler)
  stop = together.Stop()
  os.kill(os.getpid(), signal.SIGINT)
  assert stop()
  with pytest.raises(KeyboardInterrupt):
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_command_ends_with_130_and_a_line(capsys, handlers):
  def interrupted():
    raise KeyboardInterrupt

  assert terminal.quietly(interrupted) == 130
  assert capsys.readouterr().err == 'error: interrupted\n'
  assert terminal.quietly(lambda: 7) == 7


def start(program, **env):
  # A new program ignores what is ignored here, and hears what is heard here.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    return subprocess.Popen(
      [sys.executable, *program],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=ROOT,
      env={k: v for k, v in (os.environ | env).items() if v is not None},
    )
  finally:
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_it_imports_leaves_no_traceback(tmp_path):
  """`jax`, first on the path, stands for imports that take long."""
  (tmp_path / 'jax.py').write_text(
    "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
  )
  process = start(
    ['-m', 'jaxrl_sched.train', '--help'], PYTHONPATH=f'{tmp_path}:{ROOT}'
  )
  assert process.stdout.readline() == 'importing\n'
  process.send_signal(signal.SIGINT)
  out, err = process.communicate(timeout=30)
  assert process.returncode == -signal.SIGINT  # 130 in a shell
  assert out == err == ''


def test_a_terminal_that_is_gone_loses_nothing():
  """Its other end closed, each write fails; the process goes on, and ends with 0."""
  process = start(
    [
      '-c',
      'import sys\n'
      'from jaxrl_sched.terminal import tell\n'
      'sys.stdin.readline()\n'
      "for i in range(3): tell(sys.stdout, 'step\\n')\n"
      "print('still here', file=sys.stderr)\n",
    ]
  )
  process.stdout.close()
  process.stdout = None
  _, err = process.communicate(timeout=30)
  assert (process.returncode, err) == (0, 'still here\n')


DEVICES = (
  'import sys, jax\n'
  'from jaxrl_sched.device import together\n'
  'sys.exit(together.run(lambda: print(jax.devices()[0].platform) or 0))\n'
)
NO_TPU = dict.fromkeys(backend._TPU_VARIABLES)


def test_without_a_tpu_the_cpu_is_taken_quietly(monkeypatch):
  """Though libtpu is installed, which would say that it has found none."""
  for name in NO_TPU:  # preflight, tested in this process, sets some
    monkeypatch.delenv(name, raising=False)
  if backend.has_tpu():
    pytest.fail('these tests are for machines without a TPU')
  process = start(['-c', DEVICES], JAX_PLATFORMS=None, **NO_TPU)
  out, err = process.communicate(timeout=60)
  assert (process.returncode, out, err) == (0, 'cpu\n', '')


@pytest.mark.parametrize('wanted', ['cuda', 'tpus'])
def test_devices_that_are_not_there_are_refused_in_a_line(wanted):
  process = start(['-c', DEVICES], JAX_PLATFORMS=wanted)
  out, err = process.communicate(timeout=60)
  assert (process.returncode, out) == (2, '')
  assert err.startswith(f'error: JAX_PLATFORMS={wanted}: ') and err.count('\n') == 1


@pytest.mark.parametrize(
  'tpu, plugins, given, set_to',
  [
    (False, [], None, ['cpu']),
    (False, ['cuda'], None, []),  # jax looks for it
    (True, [], None, []),
    (False, [], 'cuda', []),  # what the user says stays
    (False, [], '', []),
  ],
)
def test_the_cpu_is_taken_only_where_there_is_nothing_else(
  tpu, plugins, given, set_to, monkeypatch
):
  found = []
  monkeypatch.setattr(jax.config, 'update', lambda name, value: found.append(value))
  monkeypatch.setattr(type(jax.config), 'jax_platforms', None, raising=False)
  monkeypatch.setattr(backend, 'has_tpu', lambda: tpu)
  monkeypatch.setattr(backend.importlib.metadata, 'entry_points', lambda group: plugins)
  monkeypatch.delenv('JAX_PLATFORMS')
  if given is not None:
    monkeypatch.setenv('JAX_PLATFORMS', given)
  backend.choose()
  assert found == set_to


@pytest.mark.parametrize('name', backend._TPU_VARIABLES)
def test_a_machine_that_says_it_has_a_tpu_is_believed(name, monkeypatch):
  monkeypatch.setattr(backend, '_TPU_FILES', ())
  for other in backend._TPU_VARIABLES:
    monkeypatch.delenv(other, raising=False)
  monkeypatch.setattr(
    backend.hardware_utils, 'num_available_tpu_chips_and_device_id', lambda: (0, None)
  )
  assert not backend.has_tpu()
  monkeypatch.setenv(name, '1')
  assert backend.has_tpu()


def test_a_process_that_jax_does_not_connect_ends_with_a_line():
  process = start(
    [
      '-c',
      'import time\n'
      'from jaxrl_sched.device import together\n'
      "with together._or_end(0.2, 'error: not connected'):\n"
      '  time.sleep(60)\n',
    ]
  )
  began = time.monotonic()
  _, err = process.communicate(timeout=60)
  assert (process.returncode, err) == (1, 'error: not connected within 0.2 s\n')
  assert time.monotonic() - began < 50
