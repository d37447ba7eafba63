"""Sampling ahead of learning, as people run it: exact lags, resumes, devices apart."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from toys import lines

ROOT = pathlib.Path(__file__).parents[1]
SMOKE = str(ROOT / 'configs' / 'smoke.py:all')
# Two devices to learn on, two engines of one device each.
APART = ('--config.sampler_mesh={}', '--config.asp.engines=2', '--config.mesh.data=2')
FILES = ('metrics.jsonl', 'rollouts.jsonl', 'samples.jsonl')


def start(workdir, *extra, **variables):
  return subprocess.Popen(
    [sys.executable, '-m', 'jaxrl_sched.train', f'--config={SMOKE}']
    + [f'--workdir={workdir}', '--config.scheduler.max_rounds=None', *extra],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=os.environ | variables,
  )


def finish(process):
  out, _ = process.communicate(timeout=300)
  assert process.returncode == 0, out
  return out


@pytest.fixture(scope='module', params=[1, 2])
def lagging(request, tmp_path_factory):
  """A run that nobody stopped, with its lag."""
  workdir = tmp_path_factory.mktemp(f'lag{request.param}')
  finish(start(workdir, f'--config.asp.lag={request.param}', *APART))
  return request.param, workdir


def test_every_bundle_has_exactly_its_lag(lagging):
  """3.2: bundle j is sampled with version max(0, j - h), and trained on in step j."""
  lag, workdir = lagging
  metrics = lines(workdir)[:6]
  assert [m['lag/max'] for m in metrics] == [min(j, lag) for j in range(6)]
  for j, m in enumerate(metrics):
    assert m['lag/mean'] == m['lag/max'] and m[f'lag/share/{min(j, lag)}'] == 1
    assert m['compile/count'] == 0 and m['rollout/rounds'] == 1
  groups = lines(workdir, 'rollouts.jsonl')
  assert {v for g in groups for v in g['versions']} == set(range(6 - lag))
  for group in groups:
    assert set(group['versions']) == {max(0, group['step'] - lag)}
  draws = [group['draw'] for group in groups]
  assert sorted(draws) == list(range(len(draws)))  # each once, and none is left


def test_both_sides_and_their_idle_time_are_told(lagging):
  _, workdir = lagging
  metrics = [
    json.loads(x) for x in (workdir / 'metrics.jsonl').read_text().split('\n')[:6]
  ]
  for m in metrics:
    assert m['time/idle_s/sampler'] >= 0 and m['time/idle_s/learner'] >= 0
    assert 'time/idle_s' not in m  # both are busy at the same time
  spans = lines(workdir, 'timeline.jsonl')
  for lane, what in (('learner', 'learn'), ('engine 0', 'generate')):
    mine = [s for s in spans if s['lane'] == lane and s['what'] == what]
    assert [s['bundle'] for s in mine] == list(range(6))
    assert all(a['end'] <= b['begin'] for a, b in zip(mine, mine[1:], strict=False))
  # Bundle 3 was under way before the learner was done with bundle 2.
  begin = {
    (s['lane'], s['bundle']): s['begin'] for s in spans if s['what'] != 'evaluate'
  }
  end = {(s['lane'], s['bundle']): s['end'] for s in spans}
  assert begin['engine 0', 4] < end['learner', 3]


@pytest.mark.slow
@pytest.mark.parametrize('lagging', [2], indirect=True)  # more is under way
def test_killed_at_two_instants_it_writes_the_same(lagging, tmp_path):
  """Promises 6 and 7: what is under way is in the checkpoints."""
  lag, whole = lagging
  chance = random.Random(os.getpid())
  how = (f'--config.asp.lag={lag}', *APART, '--config.checkpoint.every=1')
  for after in sorted(chance.sample(range(1, 6), 2)):
    process = start(tmp_path, *how)
    file = tmp_path / 'metrics.jsonl'
    while process.poll() is None:
      if file.exists() and file.read_bytes().count(b'\n') >= after:
        time.sleep(chance.random() / 2)
        break
      time.sleep(0.005)
    process.kill()
    process.communicate()
  finish(start(tmp_path, *how))
  for name in FILES:
    assert lines(tmp_path, name) == lines(whole, name), name


@pytest.mark.slow
@pytest.mark.parametrize('lagging', [2], indirect=True)  # more is under way
def test_sigterm_finishes_what_is_under_way_and_saves(lagging, tmp_path):
  lag, whole = lagging
  how = (f'--config.asp.lag={lag}', *APART, '--config.checkpoint.every=100')
  process = start(tmp_path, *how)
  file = tmp_path / 'metrics.jsonl'
  while not (file.exists() and file.read_bytes().count(b'\n') >= 2):
    assert process.poll() is None
    time.sleep(0.01)
  process.send_signal(signal.SIGTERM)
  assert 'Stopped after step' in finish(process)
  (saved,) = (tmp_path / 'checkpoints').iterdir()
  pending = json.loads((saved / 'pending.json').read_text())
  step = int(saved.name)
  under_way = range(step, min(step + lag, 6))
  assert [b['bundle'] for b in pending['bundles']] == list(under_way)
  assert [b['version'] for b in pending['bundles']] == [
    max(0, j - lag) for j in under_way
  ]
  finish(start(tmp_path, *how))
  assert lines(tmp_path) == lines(whole)


@pytest.mark.slow
@pytest.mark.parametrize('lagging', [2], indirect=True)  # more is under way
def test_delays_change_nothing(lagging, tmp_path):
  """3.11, test 7: whoever is late, batches, metrics and weights are the same."""
  lag, whole = lagging
  (tmp_path / 'sitecustomize.py').write_text(
    'import random, time\n'
    'def slow(module, name, seconds):\n'
    '  plain = getattr(module, name)\n'
    '  def later(*a, **k):\n'
    '    time.sleep(random.random() * seconds)\n'
    '    return plain(*a, **k)\n'
    '  setattr(module, name, later)\n'
    'import sys\n'
    "if sys.argv[:1] == ['-m']:\n"
    '  from jaxrl_sched.device.lanes import Lane\n'
    '  from jaxrl_sched.device.learner import Learner\n'
    "  slow(Lane, 'advance', 0.03)\n"
    "  slow(Learner, 'update', 0.3)\n"
  )
  how = (f'--config.asp.lag={lag}', *APART)
  finish(start(tmp_path / 'run', *how, PYTHONPATH=str(tmp_path)))
  for name in FILES:
    assert lines(tmp_path / 'run', name) == lines(whole, name), name


def test_without_a_lag_devices_apart_change_nothing(tmp_path):
  """h = 0 is the synchronous trainer, wherever its sampler is."""
  finish(start(tmp_path / 'one', '--config.steps=3'))
  finish(start(tmp_path / 'two', '--config.steps=3', '--config.sampler_mesh={}'))
  for name in FILES:
    assert lines(tmp_path / 'one', name) == lines(tmp_path / 'two', name), name


def test_both_sides_may_share_their_devices(lagging, tmp_path):
  """Whose devices the samplers have says nothing about what they sample."""
  lag, whole = lagging
  if lag == 1:
    finish(start(tmp_path, '--config.asp.lag=1', '--config.mesh.data=2'))
    for ours, theirs in zip(lines(tmp_path), lines(whole), strict=True):
      for key, value in theirs.items():
        if 'mismatch/' not in key and 'idle_slots' not in key:
          assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-4), key
