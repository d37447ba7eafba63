"""The commands as people run them: the files, resume after any death, evaluation."""

import collections
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
import types

import pytest
from toys import graded, lines

from jaxrl_sched import config, evaluate, simulate, train
from jaxrl_sched.metrics import to_json
from jaxrl_sched.sim import Costs
from jaxrl_sched.sim.summary import Book

ROOT = pathlib.Path(__file__).parents[1]
FATES = ('trained', 'pruned', 'filtered', 'dropped')
SMOKE = str(ROOT / 'configs' / 'smoke.py:all')


def command(workdir, *extra, module='train', config=True):
  named = [f'--config={SMOKE}'] if config else []
  return [
    sys.executable,
    '-m',
    f'jaxrl_sched.{module}',
    *named,
    f'--workdir={workdir}',
    *extra,
  ]


def start(workdir, *extra):
  return subprocess.Popen(
    command(workdir, *extra),
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def finish(process, code=0):
  out, _ = process.communicate(timeout=300)
  assert process.returncode == code, out
  return out


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """A run that nobody stopped."""
  workdir = tmp_path_factory.mktemp('undisturbed')
  out = finish(start(workdir))
  return workdir, out


def test_a_run_leaves_what_it_promises(undisturbed):
  workdir, out = undisturbed
  names = {p.name for p in workdir.iterdir()}
  assert names >= {
    'config.json',
    'metrics.jsonl',
    'rollouts.jsonl',
    'samples.jsonl',
    'checkpoints',
    'tensorboard',
    'report.html',
  }
  metrics = lines(workdir)
  assert [m['step'] for m in metrics] == list(range(7))
  assert {'eval/sums/pass@1', 'eval/last_digits/pass@1'} <= metrics[0].keys()
  assert 'eval/sums/pass@1' in metrics[3] and 'eval/sums/pass@1' not in metrics[1]
  assert metrics[6].keys() == {'step'} | {k for k in metrics[6] if 'eval/' in k}
  for key in ('loss', 'entropy', 'grad_norm', 'lr', 'kl'):
    assert all(key in m for m in metrics[:6]), key
  # A batch that carried groups fill is not sampled for.
  sampled = [m for m in metrics[:6] if m['rollout/groups_generated']]
  assert len(sampled) > 3
  for key in ('reward/mean', 'pass_rate'):
    assert all(key in m for m in sampled), key
  assert str(workdir) in out and 'Held-out pass rate' in out


def test_the_console_tells_what_it_is_doing_and_how_it_went(undisturbed):
  _, out = undisturbed
  assert re.search(r'^Built and compiled in [\dm]+s\.$', out, re.M)
  assert out.count('Evaluating 16 prompts x 2 ...\n') == 1
  assert len(re.findall(r'^step 6/6 \| reward', out, re.M)) == 1
  assert len(re.findall(r'^final evaluation \| held-out \d', out, re.M)) == 1


def test_two_groups_of_each_step_can_be_read(undisturbed):
  """What was asked and said, by groups that rollouts.jsonl has too."""
  workdir, _ = undisturbed
  groups = {g['draw']: g for g in lines(workdir, 'rollouts.jsonl')}
  found = lines(workdir, 'samples.jsonl')
  per_step = [m['rollout/groups_generated'] for m in lines(workdir)[:6]]
  shown = list(dict.fromkeys((line['step'], line['draw']) for line in found))
  for step, generated in enumerate(per_step):
    assert sum(at == step for at, _ in shown) == min(2, generated)
  expected = [(draw, k) for _, draw in shown for k in range(groups[draw]['size'])]
  assert [(line['draw'], line['sample']) for line in found] == expected
  for line in found:
    group, k = groups[line['draw']], line['sample']
    assert line['prompt_id'] == group['prompt_id']
    for one, many in (
      ('reward', 'rewards'),
      ('finish', 'finish'),
      ('length', 'lengths'),
    ):
      assert line[one] == group[many][k]
    # Both tasks ask for a number, and their answers end with it.
    assert line['prompt'].startswith('<|bos|><|user|>')
    right = line['text'].split('=')[-1] == str(line['truth'])
    assert right == (line['reward'] == 1)
  # At first a round has groups of both datasets; later one may have what it needs.
  names = {groups[draw]['dataset'] for step, draw in shown if step == 0}
  assert names == {'last_digits', 'sums'}


def test_no_step_compiles(undisturbed):
  """Promise 3, from the first step on: all is compiled before."""
  workdir, _ = undisturbed
  metrics = lines(workdir)[:6]
  assert [m['compile/count'] for m in metrics] == [0] * 6
  # While sizes moved, and other prompts and answers were left out in each step.
  assert {g['size'] for g in lines(workdir, 'rollouts.jsonl')} == {2, 4, 8}
  assert len({m['rollout/answers_trained'] for m in metrics}) > 3
  assert sum(m['rollout/answers_pruned'] for m in metrics) > 0
  assert min(m.get('dppo/prompts_kept', 1) for m in metrics) < 1


def test_sampler_and_learner_agree(undisturbed):
  workdir, _ = undisturbed
  for m in lines(workdir)[:6]:
    assert m.get('mismatch/logp_abs_max', 0.0) < 1e-4
    assert 'mismatch/logp_abs_max' in m or not m['rollout/groups_generated']
    assert m['mismatch/tis_raw_mean'] == pytest.approx(1, abs=1e-3) or m['lag/max']


@pytest.mark.slow
def test_every_group_has_a_fate(undisturbed):
  """Promise 9."""
  workdir, _ = undisturbed
  metrics, groups = lines(workdir), lines(workdir, 'rollouts.jsonl')
  generated = sum(m.get('rollout/groups_generated', 0) for m in metrics)
  assert len(groups) == generated
  assert sorted(g['draw'] for g in groups) == list(range(generated))
  fates = [g['fate'] for g in groups]
  for what in ('groups', 'answers', 'tokens'):
    told = collections.Counter()
    for m in metrics[:6]:
      told.update({key: m[f'rollout/{what}_{key}'] for key in FATES + ('generated',)})
    settled = sum(told[fate] for fate in FATES)
    assert told['generated'] == settled + metrics[5][f'rollout/{what}_pending'], what
  for fate in ('trained', 'filtered', 'dropped'):
    told = sum(m.get(f'rollout/groups_{fate}', 0) for m in metrics)
    assert fates.count(fate) == told
  assert fates.count('pending') == metrics[5]['rollout/groups_pending']
  assert set(fates) <= {'trained', 'filtered', 'dropped', 'pending'}


def test_killed_at_three_instants_a_run_writes_the_same(undisturbed, tmp_path):
  """Promise 6, H3 to H5: kill -9 at any time, the same command, the same lines."""
  chance = random.Random(os.getpid())
  for after in sorted(chance.sample(range(1, 6), 3)):
    process = start(tmp_path)
    file = tmp_path / 'metrics.jsonl'
    while process.poll() is None:
      if file.exists() and file.read_bytes().count(b'\n') >= after:
        time.sleep(chance.random())
        break
      time.sleep(0.005)
    process.kill()
    process.communicate()
  finish(start(tmp_path))
  workdir, _ = undisturbed
  assert lines(tmp_path) == lines(workdir)
  for name in ('rollouts.jsonl', 'samples.jsonl'):
    assert lines(tmp_path, name) == lines(workdir, name)


def test_verifiers_that_are_slow_now_and_then_change_nothing(undisturbed, tmp_path):
  """E6: an update does not wait for grades of surplus, and yet the run is the same."""
  (tmp_path / 'slow_verifier.py').write_text(
    'import time\n'
    'from jaxrl_sched.host.rewards import REWARDS\n'
    'def slow(text, prompt):\n'
    '  if prompt.index % 4 == 1:\n'
    '    time.sleep(0.4)\n'
    "  return REWARDS['final_number'](text, prompt)\n"
  )
  slow = [
    f'--config.prompts.datasets.{name}.reward=slow_verifier:slow'
    for name in ('sums', 'last_digits')
  ]
  process = subprocess.Popen(
    command(tmp_path / 'run', *slow),
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=os.environ | {'PYTHONPATH': f'{tmp_path}:{os.environ["PYTHONPATH"]}'},
  )
  finish(process)
  workdir, _ = undisturbed
  for name in ('metrics.jsonl', 'rollouts.jsonl', 'samples.jsonl'):
    assert lines(tmp_path / 'run', name) == lines(workdir, name), name


def test_eight_devices_decide_and_learn_like_one(undisturbed, tmp_path):
  """Sampler, learner and optimizer cut over data, fsdp and model."""
  shape = [f'--config.mesh.{axis}=2' for axis in ('data', 'fsdp', 'model')]
  finish(start(tmp_path, *shape, '--config.steps=3'))
  workdir, _ = undisturbed
  for one, eight in zip(lines(workdir)[:3], lines(tmp_path)[:3], strict=True):
    assert one.keys() == eight.keys()
    for key, value in one.items():
      if 'mismatch/' not in key:  # rounding itself
        assert eight[key] == pytest.approx(value, rel=1e-4, abs=1e-4), key


@pytest.mark.slow
def test_the_simulator_makes_the_decisions_of_a_run_on_its_trace(undisturbed):
  """Promise 8: the same controllers under the same loop, told the same answers: who is
  asked, in what size, who is filtered and pruned, with what weight and forecast."""
  workdir, _ = undisturbed
  c, book = config.of_workdir(None, workdir, ()), Book(keeps_groups=True)
  trace = workdir / 'rollouts.jsonl'
  simulate.simulate(c, Costs(decode_step=0.01), trace, book)
  assert json.loads(to_json(book.settled)) == lines(workdir, 'rollouts.jsonl')
  shared = 0
  for ours, real in zip(book.lines[:6], lines(workdir), strict=False):
    for key in ours.keys() & real.keys() - {'compile/count'}:
      if not key.startswith(('time/', 'update/')):
        assert ours[key] == pytest.approx(real[key], rel=1e-6), key
        shared += 1
  assert shared > 6 * 50


def test_sigterm_saves_and_exits_0(undisturbed, tmp_path):
  # No checkpoint is due: what is there afterwards was saved because of the signal.
  process = start(tmp_path, '--config.checkpoint.every=100')
  file = tmp_path / 'metrics.jsonl'
  while not (file.exists() and file.read_bytes().count(b'\n') >= 2):
    assert process.poll() is None
    time.sleep(0.01)
  process.send_signal(signal.SIGTERM)
  out = finish(process, code=0)
  assert 'Stopped after step' in out
  assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] != []
  out = finish(start(tmp_path, '--config.checkpoint.every=100'))
  assert 'Resuming after step' in out
  workdir, _ = undisturbed
  assert lines(tmp_path) == lines(workdir)


def test_a_finished_run_can_be_started_again(undisturbed, capsys):
  workdir, _ = undisturbed
  names = ('metrics.jsonl', 'rollouts.jsonl', 'samples.jsonl')
  before = [lines(workdir, name) for name in names]
  assert train.main([f'--config={SMOKE}', f'--workdir={workdir}']) == 0
  assert [lines(workdir, name) for name in names] == before
  assert 'Resuming after step 6' in capsys.readouterr().out


def test_evaluate_counts_every_prompt_once(undisturbed, capsys):
  """N1: the number of slots divides nothing; and the run's own evaluation agrees."""
  workdir, _ = undisturbed
  argv = [f'--workdir={workdir}', '--config.sampler.slots=5']
  assert evaluate.main([*argv, '--step=latest']) == 0
  folder = workdir / 'eval' / '6'
  metrics = lines(workdir)[6]
  for dataset in ('sums', 'last_digits'):
    numbers = json.loads((folder / f'{dataset}.json').read_text())
    samples = lines(folder, f'{dataset}.samples.jsonl')
    assert len(samples) == 8 * 2 and numbers['prompts'] == 8
    assert len({(s['prompt_id'], s['sample']) for s in samples}) == 16
    for sample in samples:
      right = sample['text'].split('=')[-1] == str(sample['truth'])
      assert right == (sample['reward'] == 1)
      assert sample['prompt'].endswith('<|assistant|>')
    assert numbers['pass@1'] == sum(s['reward'] for s in samples) / 16
    assert numbers['pass@1'] == pytest.approx(metrics[f'eval/{dataset}/pass@1'])
  assert 'sums' in capsys.readouterr().out


def test_evaluate_greedy_all_steps_and_a_folder(undisturbed, capsys):
  """N2: evaluation has its own settings; greedy gives the same twice."""
  workdir, _ = undisturbed
  greedy = ['--config.evaluate.temperature=0', '--config.evaluate.samples=1']
  argv = [f'--workdir={workdir}', *greedy]
  assert evaluate.main([*argv, '--step=all']) == 0
  steps = {p.name for p in (workdir / 'checkpoints').iterdir()}
  assert {p.name for p in (workdir / 'eval').iterdir()} >= steps
  folder = ROOT / 'configs' / 'quickstart_model'
  first, second = [
    evaluate.main([*argv, f'--hf={folder}'])
    or (workdir / 'eval' / 'hf-quickstart_model' / 'sums.samples.jsonl').read_text()
    for _ in range(2)
  ]
  assert first == second and first.count('\n') == 8
  capsys.readouterr()


@pytest.mark.parametrize(
  'extra, message',
  [
    (['--step=4711'], '--step=4711: checkpoints in'),
    (['--step=some'], '--step=some: expected a number'),
    (['--hf=/nowhere'], '/nowhere'),
    (['--config.evaluate.samples=0'], 'evaluate.samples: 0'),
  ],
)
def test_evaluate_refuses(undisturbed, capsys, extra, message):
  workdir, _ = undisturbed
  assert evaluate.main([f'--workdir={workdir}', *extra]) == 2
  err = capsys.readouterr().err
  assert message in err and err.count('\n') == 1


def test_the_whole_config_is_printed_as_the_workdir_has_it(undisturbed, capsys):
  workdir, _ = undisturbed
  assert train.main([f'--config={SMOKE}', '--print-config']) == 0
  assert capsys.readouterr().out == (workdir / 'config.json').read_text()


def test_overrides_are_printed_and_bad_ones_refused(capsys):
  argv = [f'--config={SMOKE}', '--print-config']
  assert train.main([*argv, '--config.lora.rank=8']) == 0
  printed = json.loads(capsys.readouterr().out)
  assert printed['lora']['rank'] == 8 and 'targets' in printed['lora']
  assert train.main([*argv, '--config.lora.rnk=8']) == 2
  assert "did you mean 'rank'" in capsys.readouterr().err


def test_a_run_needs_a_workdir(capsys):
  with pytest.raises(SystemExit) as stop:
    train.main([f'--config={SMOKE}'])
  assert stop.value.code == 2
  assert 'required: --workdir' in capsys.readouterr().err


@pytest.mark.slow
def test_fewer_than_no_samples_are_refused(tmp_path, capsys):
  argv = [f'--config={SMOKE}', f'--workdir={tmp_path}', '--config.log.samples=-1']
  assert train.main(argv) == 2
  assert 'config.log.samples: -1, expected 0 or more' in capsys.readouterr().err


def test_the_config_to_copy_trains(tmp_path, monkeypatch, capsys):
  """configs/own_task.py with files of one's own; a smaller model, no texts kept."""
  own = f'--config={ROOT / "configs" / "own_task.py"}'
  assert train.main([own, '--print-config']) == 0
  assert json.loads(capsys.readouterr().out)['lora']['rank'] == 16
  for name in ('train', 'held_out'):
    last = 1 + (name == 'held_out')  # none of one file is in the other
    tasks = [{'question': f'sum a{i}b{last}', 'answer': i + last} for i in range(2, 9)]
    (tmp_path / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, tasks)) + '\n')
  monkeypatch.chdir(tmp_path)
  small = {
    'model.path': ROOT / 'configs' / 'quickstart_model',
    'prompts.max_tokens': 80,
    'sampling.max_new_tokens': 16,
    'sampler.slots': 8,
    'scheduler.groups_per_step': 2,
    'learner.row_tokens': 96,
    'steps': 1,
    'log.samples': 0,
  }
  argv = [own, '--workdir=run', *(f'--config.{k}={v}' for k, v in small.items())]
  assert train.main([*argv, '--config.scheduler.dynamic_sampling=False']) in (0, 1)
  found = lines(tmp_path / 'run')
  assert len(found) == 2 and found[0]['rollout/groups_trained'] == 2
  assert 'eval/held_out/pass@1' in found[1]
  assert lines(tmp_path / 'run', 'samples.jsonl') == []
  capsys.readouterr()


class Solved:
  """An engine under which every answer is right."""

  step, progress = 0, None

  def __getattr__(self, name):  # whatever else is asked of it
    return lambda *_, **__: {} if name == 'drain' else None

  def agree(self, make):
    return make()

  def now(self):
    return time.perf_counter()

  def spans(self):
    return []

  def submit(self, plan):
    self.requests = plan.requests

  def collect(self, bundle, enough):
    return [graded(r, [1.0] * r.size) for r in self.requests]

  def collect_rest(self):
    return []

  def learn(self, lesson):
    self.step += 1
    return {'update/skipped': 1.0}

  def text_of(self, completion, stop_ids):
    return ''


def test_a_solved_dataset_ends_the_run_with_a_reason(tmp_path, monkeypatch, capsys):
  """Two datasets of 64 prompts: once all were asked, and not much more."""
  monkeypatch.setattr(config, 'build_engine', lambda *_, **__: Solved())
  argv = [f'--config={ROOT}/configs/smoke.py', f'--workdir={tmp_path}']
  argv += ['--config.steps=300', '--config.evaluate=None']
  assert train.main(argv) == 1
  out, err = capsys.readouterr()
  found, [error] = lines(tmp_path), err.splitlines()
  ended = f'error: ended at step {len(found) - 1} of 300: nothing is left to learn from'
  assert error.startswith(ended)
  assert out.count('prompts were asked since a group had spread') == 2
  generated = [line.get('rollout/groups_generated', 0) for line in found]
  assert max(generated) <= 2 * 20 and 2 * 64 <= sum(generated) <= 2 * 64 + 2 * 20
  assert (tmp_path / 'report.html').exists()


def test_a_run_whose_every_update_is_refused_ends_with_1_and_the_likely_cause(
  tmp_path, capsys
):
  argv = [f'--config={SMOKE.replace(":all", "")}', f'--workdir={tmp_path}']
  changes = {'optimizer.learning_rate': 1e30, 'steps': 2, 'evaluate': None}
  changes['log.tensorboard'] = False
  code = train.main([*argv, *(f'--config.{k}={v}' for k, v in changes.items())])
  out, err = capsys.readouterr()
  assert code == 1, out + err
  assert err == (
    'error: 2 of 2 updates were refused, the last 2 in a row, as gradient or change was '
    'not finite: most likely config.optimizer.learning_rate=1e+30 is too high\n'
  )
  assert out.count('Step 1: the update was refused') == 1
  assert [m['update/refused'] for m in lines(tmp_path)[:2]] == [1, 1]


@pytest.mark.parametrize(
  'made, refused, last, failed',
  [
    (90, 10, 1, False),
    (10, 11, 0, True),  # mostly
    (90, 5, 5, True),  # the last ones: the weights are past use
    (90, 4, 4, False),
    (0, 0, 0, True),  # nothing was learned
  ],
)
def test_refused_updates_fail_a_run_where_they_are_most_or_the_last(
  made, refused, last, failed
):
  run = types.SimpleNamespace(c={'optimizer': {'learning_rate': 0.1}})
  summary = {'updates': made, 'refused': refused, 'refused_last': last}
  found = train._failure(run, {f'total/{k}': v for k, v in summary.items()})
  assert (found is not None) == failed


def test_the_last_line_shows_rewards_where_they_are_partial():
  passed = {'held_out/first': 0.0, 'held_out/last': 0.125}
  assert train._held_out({}) is None
  assert train._held_out(passed) == 'Held-out pass rate 0.000 -> 0.125'
  partial = passed | {'held_out/first_reward': -0.25, 'held_out/last_reward': 0.5}
  assert (
    train._held_out(partial)
    == 'Held-out reward -0.250 -> 0.500, pass rate 0.000 -> 0.125'
  )


def test_help(capsys):
  with pytest.raises(SystemExit) as stop:
    train.main(['--help'])
  assert stop.value.code == 0
  out = capsys.readouterr().out
  assert '--config' in out and '--workdir' in out and 'python -m jaxrl_sched' in out
