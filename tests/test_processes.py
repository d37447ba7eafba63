"""Runs of two processes: they decide as one does, and fail, stop and resume together."""

import json
import os
import re
import signal
import time

import numpy as np
import processes
import pytest

from jaxrl_sched.device import multihost

SMOKE = f'--config={processes.ROOT}/configs/smoke.py:all'
TRAIN = ['-m', 'jaxrl_sched.train', SMOKE, '--config.log.tensorboard=False']
ON_EIGHT = [f'--config.mesh.{axis}=2' for axis in ('data', 'fsdp', 'model')]

# Where and when something was done decides nothing.
NOT_DECIDED = ('time/', 'compile/', 'rollout/idle_slots')


def lines(workdir, name='metrics.jsonl'):
  file = workdir / name
  text = file.read_text() if file.exists() else ''
  return [
    json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == '\n'
  ]


def wait_for(workdir, count, started):
  """Until as many steps have been logged."""
  until = time.monotonic() + 150
  while len(lines(workdir)) < count and all(p.poll() is None for p in started):
    assert time.monotonic() < until
    time.sleep(0.02)


def wait_for_text(log, text, started):
  """Until a process has said it."""
  until = time.monotonic() + 150
  while text not in log.read_text() and all(p.poll() is None for p in started):
    assert time.monotonic() < until
    time.sleep(0.02)


def kill(process, number=signal.SIGKILL):
  if process.poll() is None:
    os.kill(process.pid, number)


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  """What one process with eight devices writes, whom nobody stops."""
  workdir = tmp_path_factory.mktemp('alone')
  argv = [*TRAIN, f'--workdir={workdir}', *ON_EIGHT]
  started = processes.launch(argv, workdir / 'logs', count=1, devices=8)
  codes, said = processes.ended(started, workdir / 'logs')
  assert codes == [0], said
  return workdir


@pytest.fixture(scope='module')
def disturbed(tmp_path_factory):
  """The same run by two processes, whom much happens to; and what they said."""
  workdir = tmp_path_factory.mktemp('together')
  logs, said = workdir / 'logs', {}
  argv = [*TRAIN, f'--workdir={workdir}', '--stopped-exit-code=75']

  started = processes.launch([*argv, *ON_EIGHT], logs, devices=4)
  wait_for(workdir, 3, started)
  kill(started[1])
  began = time.monotonic()
  said['killed'] = processes.ended(started, logs)
  said['seconds'] = time.monotonic() - began

  # On the devices of both at once: for models too large for a host.
  one_sampler = ['--config.sampler.mesh=global', '--config.mesh.fsdp=4']
  started = processes.launch([*argv, *one_sampler], logs, devices=2)
  wait_for_text(logs / '0.txt', 'Built and compiled', started)
  wait_for(workdir, 3, started)
  kill(started[1], signal.SIGHUP)
  said['stopped'] = processes.ended(started, logs)

  # On fewer devices, of one process.
  few = ['--config.mesh.fsdp=2', '--config.mesh.model=2']
  started = processes.launch([*argv, *few], logs, count=1, devices=4)
  said['rest'] = processes.ended(started, logs)
  return workdir, said


@pytest.mark.slow
def test_when_one_is_killed_the_other_ends_and_says_why(disturbed):
  _, said = disturbed
  codes, (text, _) = said['killed']
  assert codes[1] == -signal.SIGKILL and codes[0] not in (0, 2), text
  assert said['seconds'] < 75
  assert 'error: process 1 of 2 failed: no sign of it for 45 s' in text


@pytest.mark.slow
def test_a_signal_to_one_saves_and_ends_all(disturbed):
  _, said = disturbed
  codes, (first, second) = said['stopped']
  assert codes == [75, 75], first + second
  assert 'Resuming after step' in first and 'saved. The same command' in first
  assert 'step' not in second  # one speaks for all


@pytest.mark.slow
def test_on_whatever_mesh_and_processes_the_decisions_are_the_same(disturbed, alone):
  """Promises 4 to 6: two processes, killed, resumed with one sampler over both, stopped,
  and finished by one process on other devices, write what one process writes."""
  workdir, said = disturbed
  codes, (text,) = said['rest']
  assert codes == [0], text
  assert lines(workdir, 'rollouts.jsonl') == lines(alone, 'rollouts.jsonl')
  assert len(lines(workdir)) == 7
  for ours, theirs in zip(lines(workdir), lines(alone), strict=True):
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
      if not key.startswith(NOT_DECIDED):
        np.testing.assert_allclose(ours[key], value, rtol=1e-5, atol=1e-5, err_msg=key)


FAILING = """
import time
from jaxrl_sched.device import multihost

def body():
  if me == 1:
    raise {error}
  {meanwhile}
  return 0

sys.exit(together.run(body))
"""


@pytest.mark.parametrize(
  'error, code, meanwhile',
  [
    ("KeyError('no such verifier')", 1, "multihost.barrier('plan')"),
    ("ValueError('data.jsonl:3: not JSON')", 2, 'time.sleep(100)'),
  ],
)
def test_what_goes_wrong_in_one_ends_all_with_its_reason(
  error, code, meanwhile, tmp_path
):
  program = processes.START.replace('together.start()', '') + FAILING.format(
    error=error, meanwhile=meanwhile
  )
  began = time.monotonic()
  of = [[str(i), '', str(processes.ROOT)] for i in (0, 1)]
  started = processes.launch(['-c', program], tmp_path, of=of, devices=1)
  codes, (first, second) = processes.ended(started, tmp_path)
  assert codes == [code, code], first + second
  assert time.monotonic() - began < 60
  kind, said = error.rstrip("')").split("('")
  assert f'error: process 1 failed: {kind}: ' in first and said in first
  assert said in second


WAITING = """
import os, signal, time
from jaxrl_sched.device import multihost, together

def body():
  multihost.barrier('all here')
  if me == {who}:
    os.kill(os.getpid(), getattr(signal, '{stopped}')) if '{stopped}' else time.sleep(100)
  multihost.barrier('plan 7')
  return 0

together._SAY_AFTER_S = 1.0
together.SILENT_S = 2.0 if '{stopped}' else 60.0
sys.exit(together.run(body))
"""


def waiting(tmp_path, monkeypatch, who, limit_s, stopped=''):
  """What two processes end with where one does not come to a barrier."""
  monkeypatch.setenv('JAXRL_WAIT_S', limit_s)
  program = processes.START.replace('together.start()', '') + WAITING.format(
    who=who, stopped=stopped
  )
  of = [[str(i), '', str(processes.ROOT)] for i in (0, 1)]
  started = processes.launch(['-c', program], tmp_path, of=of, devices=1)
  other = started[1 - who]
  try:
    other.wait(timeout=60)
  finally:
    if stopped:
      started[who].kill()
  codes, said = processes.ended(started, tmp_path, timeout_s=20)
  assert codes[1 - who] == 1, said
  for text in said:
    assert 'Check failure' not in text and 'Traceback' not in text
  return codes, said


def test_a_process_that_never_comes_is_named_at_once_and_at_the_end(
  tmp_path, monkeypatch
):
  """Each of the others has a line, exit code 1, and no abort."""
  monkeypatch.setenv('JAXRL_WAIT_S', '8')
  program = processes.START.replace(
    'together.start()',
    'from jaxrl_sched.device import rendezvous\n'
    'rendezvous.meet.__kwdefaults__["say_after_s"] = 1.0\n'
    'sys.exit(together.run(lambda: 0))\n',
  )
  of = [[str(i), '', str(processes.ROOT)] for i in (0, 1, 2)]
  started = processes.launch(['-c', program], tmp_path, of=of, count=3, devices=1)
  started[1].kill()
  began = time.monotonic()
  codes, said = processes.ended(started, tmp_path, timeout_s=60)
  assert codes[::2] == [1, 1], said
  assert time.monotonic() - began < 30
  assert re.search(
    r'Waiting for process(es)? 1[2, ]* of 3 \(\d of at most 8 s', said[0]
  )
  for text in said[::2]:
    last = text.strip().splitlines()[-1]
    assert re.match(r'error: process.* of 3 did not come within 8 s', last), text
    assert 'Check failure' not in text and 'Traceback' not in text


def test_a_process_that_stalls_alive_is_waited_for_and_named(tmp_path, monkeypatch):
  codes, (first, second) = waiting(tmp_path, monkeypatch, 1, '8')
  assert "Waiting for process 1 of 2 at 'plan 7' (" in first
  assert "error: Barrier 'plan 7': absent after 8 s: process 1" in first
  assert codes == [1, 1]  # the other hears of that, and ends too
  assert 'error: process 0 failed: TimeoutError' in second


@pytest.mark.parametrize(
  'who, stopped, line',
  [
    (
      0,
      'SIGSTOP',
      'error: process 0, which keeps all together, has given no sign for 2 s',
    ),
    (1, 'SIGSTOP', 'error: process 1 of 2 failed: no sign of it for 2 s'),
    (1, 'SIGKILL', 'error: process 1 of 2 failed: no sign of it for 2 s'),
  ],
)
def test_a_process_that_is_stopped_gives_no_sign_and_ends_the_other(
  who, stopped, line, tmp_path, monkeypatch
):
  _, said = waiting(tmp_path, monkeypatch, who, '60', stopped)
  assert line in said[1 - who]


def test_a_broken_collective_is_no_bad_input():
  """Which a supervisor would not start again. Gloo's own words, when a peer is killed."""
  broken = 'UNKNOWN: Gloo AllGather failed: [pair.cc:538] Connection reset by peer'
  assert multihost.of_runtime(ValueError(broken))
  assert not multihost.of_runtime(ValueError('config.steps: 0, expected at least 1'))


def test_a_file_that_only_one_can_read_ends_both_before_a_model_is_built(tmp_path):
  whole = processes.ROOT / 'configs' / 'quickstart_model'
  of = [[f'--config.model.path={path}'] for path in (whole, tmp_path / 'none')]
  argv = [*TRAIN, f'--workdir={tmp_path}/run', *ON_EIGHT]
  started = processes.launch(argv, tmp_path, of=of, devices=4)
  codes, (first, second) = processes.ended(started, tmp_path)
  assert codes == [2, 2], first + second
  for text in (first, second):
    assert f'{tmp_path}/none' in text and 'Building' not in text
  assert 'Process 1 failed' in first
  assert not (tmp_path / 'run').exists()
