"""Training without a barrier, as people run it: exact after any death, whatever verifiers
take, and nothing is compiled on the way."""

import collections
import os
import random
import signal
import subprocess
import time

import numpy as np
import processes
import pytest
from test_processes import NOT_DECIDED, kill, wait_for
from test_train import FATES, ROOT, SMOKE, command, finish
from toys import lines

pytestmark = pytest.mark.slow
OPEN = ('--config.scheduler.barrier=False', '--config.checkpoint.every=2')
FILES = ('metrics.jsonl', 'rollouts.jsonl', 'samples.jsonl')
SLOW = (
  'import random, time\n'
  'from jaxrl_sched.host.rewards import REWARDS\n'
  'def slow(text, prompt):\n'
  '  time.sleep(random.choice([0.0, 0.0, 0.0, 0.3]))\n'
  "  return REWARDS['final_number'](text, prompt)\n"
)


def start(workdir, *extra, path=''):
  return subprocess.Popen(
    command(workdir, *OPEN, *extra),
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=os.environ | {'PYTHONPATH': f'{path}:{os.environ["PYTHONPATH"]}'},
  )


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('open')
  finish(start(workdir))
  return workdir


def test_no_step_compiles_and_answers_span_versions(undisturbed):
  metrics, groups = lines(undisturbed)[:6], lines(undisturbed, 'rollouts.jsonl')
  assert [m['compile/count'] for m in metrics] == [0] * 6
  assert any(m['rollout/answers_in_flight'] for m in metrics)
  assert any('earlier' in group for group in groups)
  assert max(m.get('lag/max', 0) for m in metrics) >= 1


def test_counts_add_up(undisturbed):
  metrics, groups = lines(undisturbed)[:6], lines(undisturbed, 'rollouts.jsonl')
  assert len({group['draw'] for group in groups}) == len(groups)
  for what in ('groups', 'answers', 'tokens'):
    told = collections.Counter()
    for m in metrics:
      told.update({key: m[f'rollout/{what}_{key}'] for key in FATES + ('generated',)})
    settled = sum(told[fate] for fate in FATES)
    assert told['generated'] == settled + metrics[5][f'rollout/{what}_pending'], what


def test_killed_and_stopped_under_slow_verifiers_a_run_writes_the_same(
  undisturbed, tmp_path
):
  (tmp_path / 'slow_verifier.py').write_text(SLOW)
  slow = [
    f'--config.prompts.datasets.{name}.reward=slow_verifier:slow'
    for name in ('sums', 'last_digits')
  ]
  run, chance = tmp_path / 'run', random.Random(os.getpid())
  for number, after in ((signal.SIGKILL, 1), (signal.SIGTERM, 3), (signal.SIGKILL, 4)):
    process = start(run, *slow, path=tmp_path)
    file = run / 'metrics.jsonl'
    while process.poll() is None:
      if file.exists() and file.read_bytes().count(b'\n') >= after:
        time.sleep(chance.random())
        break
      time.sleep(0.005)
    process.send_signal(number)
    process.communicate()
  finish(start(run, *slow, path=tmp_path))
  for name in FILES:
    assert lines(run, name) == lines(undisturbed, name), name


def test_what_decides_what_is_trained_on_is_named_on_resume(undisturbed):
  out = finish(start(undisturbed, '--config.sampler.chunk=4'), code=2)
  assert 'sampler.chunk' in out and len(out.splitlines()) < 4


def test_engines_of_one_process_or_of_two_one_of_which_is_killed(tmp_path):
  argv = ['-m', 'jaxrl_sched.train', f'--config={SMOKE}', *OPEN]
  argv += ['--config.mesh.data=2', '--config.sampler_mesh.data=1']
  one, two = tmp_path / 'one', tmp_path / 'two'
  started = processes.launch(
    [*argv, '--config.asp.engines=2', f'--workdir={one}'], one, count=1, devices=4
  )
  codes, said = processes.ended(started, one)
  assert codes == [0], said
  for is_last in (False, True):
    started = processes.launch([*argv, f'--workdir={two}'], two, devices=2)
    if not is_last:
      wait_for(two, 3, started)
      kill(started[1])
    codes, said = processes.ended(started, two)
    assert (codes == [0, 0]) == is_last, said
  assert lines(one, 'rollouts.jsonl') == lines(two, 'rollouts.jsonl')
  for ours, theirs in zip(lines(one), lines(two), strict=True):
    for key, value in theirs.items():
      if not key.startswith(NOT_DECIDED):
        np.testing.assert_allclose(ours[key], value, rtol=1e-4, atol=1e-4, err_msg=key)
