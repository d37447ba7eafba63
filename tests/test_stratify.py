"""The stratify command: the rates are those of evaluation, and nothing is done twice."""

import collections
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_sched import config, evaluate, settings, stratify, train
from jaxrl_sched.control.difficulty import Tiers, read_rates

ROOT = pathlib.Path(__file__).parents[1]
SMOKE = f'--config={ROOT / "configs" / "smoke.py"}'
COUNTS = {'sums': 9, 'last_digits': 6}
# 15 prompts, and a learning rate at which one step is seen.
FEW = [
  *(f'--config.prompts.datasets.{d}.options.count={n}' for d, n in COUNTS.items()),
  '--config.scheduler.groups_per_step=2',
  '--config.sampler.slots=8',
]
STEP = ['--config.steps=1', '--config.optimizer.learning_rate=0.01']
STEP += ['--config.optimizer.warmup_steps=0', '--config.optimizer.max_grad_norm=100.0']


def run(workdir, *extra, code=0):
  argv = [SMOKE, f'--workdir={workdir}', *FEW, *STEP, '--samples=4', *extra]
  assert stratify.main(argv) == code


def lines(table):
  return [json.loads(line) for line in table.read_text().splitlines()]


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A run of one step, with the tables of its first and of its last weights."""
  workdir = tmp_path_factory.mktemp('run')
  plain = [SMOKE, f'--workdir={workdir}', *FEW, *STEP]
  assert train.main([*plain, '--config.evaluate=None']) == 0
  run(workdir)
  run(workdir, '--step=latest')
  return workdir


def test_every_prompt_has_a_rate(workdir):
  """N1: once, though 15 prompts of 4 answers fill 8 slots unevenly."""
  found = lines(workdir / 'stratify' / 'start.jsonl')
  counts = collections.Counter(line['id'].split('/')[0] for line in found)
  assert counts == COUNTS and len({line['id'] for line in found}) == 15
  for line in found:
    assert line.keys() == {'id', 'pass_rate', 'samples', 'model'}
    assert line['pass_rate'] in (0, 0.25, 0.5, 0.75, 1) and line['samples'] == 4
    assert line['model'] == f'{workdir.name}/start'


def test_the_rates_are_those_of_evaluation(workdir, capsys):
  """N2: the same prompts judged by evaluate, 4 samples each and no more."""
  same = []
  for dataset, seed in (('sums', 1), ('last_digits', 2)):
    at = f'--config.evaluate.datasets.{dataset}.options'
    same += [
      f'{at}.count={COUNTS[dataset]}',
      f'{at}.held_out=False',
      f'{at}.seed={seed}',
    ]
  argv = [SMOKE, f'--workdir={workdir}', *FEW, *STEP, *same]
  assert evaluate.main([*argv, '--config.evaluate.samples=4']) == 0
  expected = collections.defaultdict(list)
  for dataset in COUNTS:
    for line in lines(workdir / 'eval' / '1' / f'{dataset}.samples.jsonl'):
      expected[line['prompt_id']].append(line['reward'])
  tables = {
    name: {
      line['id']: line['pass_rate']
      for line in lines(workdir / 'stratify' / f'{name}.jsonl')
    }
    for name in ('1', 'start')
  }
  assert {key: np.mean(rewards) for key, rewards in expected.items()} == tables['1']
  assert tables['1'] != tables['start']
  capsys.readouterr()


def test_stopped_and_cut_short_it_goes_on(workdir, tmp_path):
  """SIGTERM between two writes, then a line half written: in the end the same bytes,
  though all was sampled in other slots."""
  table = tmp_path / workdir.name / 'stratify' / 'start.jsonl'
  argv = ['-m', 'jaxrl_sched.stratify', SMOKE, f'--workdir={table.parents[1]}']
  process = subprocess.Popen(
    [
      sys.executable,
      *argv,
      *FEW[:-1],
      *STEP,
      '--samples=4',
      '--config.sampler.slots=1',
    ],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=os.environ | {'PYTHONUNBUFFERED': '1'},
  )
  said = []
  for line in process.stdout:
    said.append(line)
    if line.endswith('of 15 prompts\n'):
      process.send_signal(signal.SIGTERM)
      break
  rest, _ = process.communicate(timeout=300)
  assert process.returncode == 0, [*said, rest]
  assert 'Stopped, ' in rest
  done = len(lines(table))
  assert 4 <= done < 15
  with table.open('a') as file:
    file.write('{"id": "sums/')
  run(table.parents[1])
  assert table.read_bytes() == (workdir / 'stratify' / 'start.jsonl').read_bytes()


def test_a_whole_table_needs_no_model(workdir, capsys):
  before = (workdir / 'stratify' / 'start.jsonl').read_bytes()
  run(workdir)
  assert (workdir / 'stratify' / 'start.jsonl').read_bytes() == before
  out = capsys.readouterr().out
  assert 'Building' not in out
  [line] = [line for line in out.splitlines() if line.startswith('sums')]
  found = [x for x in lines(workdir / 'stratify' / 'start.jsonl') if 'sums/' in x['id']]
  hard = sum(x['pass_rate'] == 0 for x in found)
  easy = sum(x['pass_rate'] == 1 for x in found)
  assert list(map(int, line.split()[3:])) == [hard, 9 - hard - easy, easy]


def test_tables_of_two_models_make_tiers(workdir):
  run_ = config.prepare(config.of_workdir(None, workdir, []))
  ids = collections.defaultdict(list)
  for prompt in run_.prompts.all():
    ids[prompt.dataset].append(prompt.id)
  tables = [workdir / 'stratify' / f'{name}.jsonl' for name in ('start', '1')]
  rates = read_rates(tables, ids)
  first, second = ([x['pass_rate'] for x in lines(t)] for t in tables)
  expected = (np.array(first) + second) / 2
  np.testing.assert_array_equal(np.concatenate(list(rates.values())), expected)
  tiers = Tiers(rates, run_.prompts.weights, steps=10, release=0)
  assert sum(len(indices) for _, indices in tiers.streams().values()) == 15


@pytest.mark.parametrize(
  'extra, message',
  [
    (['--samples=5'], 'start.jsonl was begun with other settings: samples: 4 -> 5'),
    (['--config.sampling.temperature=0.7'], 'sampling.temperature: 1.0 -> 0.7'),
    (['--config.prompts.template={prompt}'], 'prompts.template'),
    (['--config.seed=1'], 'seed: 0 -> 1'),
    (['--samples=0'], '--samples=0: expected at least 1'),
    (['--step=4711'], '--step=4711: checkpoints in'),
    (['--step=all'], '--step=all: expected one step'),
    (['--hf=/nowhere'], '/nowhere'),
    (['--config.sampler.prefill_rows=0'], 'sampler.prefill_rows: 0'),
  ],
)
def test_refused(workdir, capsys, extra, message):
  run(workdir, *extra, code=2)
  err = capsys.readouterr().err
  assert message in err and err.count('\n') == 1


def test_a_strange_table_is_refused(workdir, tmp_path, capsys):
  folder = tmp_path / workdir.name / 'stratify'
  shutil.copytree(workdir / 'stratify', folder)
  with (folder / 'start.jsonl').open('a') as file:
    file.write('{"pass_rate": 1}\n')
  run(folder.parent, code=2)
  assert 'start.jsonl, line 16: not a line of a table' in capsys.readouterr().err
  (folder / 'start.settings.json').unlink()
  run(folder.parent, code=2)
  assert 'but start.settings.json beside it does not' in capsys.readouterr().err


def test_two_at_once_are_refused(workdir, capsys):
  with settings.only_one(workdir / 'stratify'):
    run(workdir, code=2)
  assert 'another run is at work there' in capsys.readouterr().err


def test_greedy_samples_are_one(workdir, capsys):
  """N2: at temperature 0 all samples are the same. A teacher allows that setting."""
  with pytest.raises(ValueError, match='--samples=8: expected 1 at temperature 0'):
    stratify._check_samples(8, 0.0)
  stratify._check_samples(1, 0.0)
  with pytest.raises(SystemExit):
    run(workdir, '--step=1', '--hf=/nowhere')
  assert 'not allowed with' in capsys.readouterr().err
