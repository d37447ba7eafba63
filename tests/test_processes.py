"""Runs of two processes: they decide as one does, and fail, stop and resume together."""

import json
import os
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
  wait_for(workdir, 4, started)
  kill(started[1], signal.SIGTERM)
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
  assert said['seconds'] < 60
  assert 'Task 1' in text or 'unhealthy (stopped sending heartbeats):\n1' in text


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
