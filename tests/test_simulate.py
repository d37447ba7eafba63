"""The command that simulates, on runs whose end paper knows."""

import json
import math
import pathlib
import re
import xml.etree.ElementTree as ET

from bench import papers as bench
import numpy as np
import pytest

from jaxrl_sched import checks, config, controllers, loop, simulate
from jaxrl_sched.comparison import Run, cells, folders
from jaxrl_sched.device import backend
from jaxrl_sched.metrics import Recorder, read_jsonl, to_json
from jaxrl_sched.sim import Costs, Dataset, SimEngine, Workload, summary
from jaxrl_sched.types import Sampling

ROOT = pathlib.Path(__file__).parents[1]
# Every answer takes 100 tokens, and half of them are right: 4 groups of 8 fill the 32
# slots once. Generation takes 100 s, learning 60 s.
CONFIG = """
from ml_collections import ConfigDict

def get_config(kind='alike'):
  c = ConfigDict()
  c.seed, c.steps = 0, 5
  c.model = dict(path='none')
  c.prompts = dict(datasets={}, max_tokens=50)
  c.sampling = dict(max_new_tokens=400)
  c.sampler = dict(slots=32, chunk=1)
  c.scheduler = dict(groups_per_step=4, group_size=8, dynamic_sampling=False)
  c.loss = dict(kind='grpo', clip_low=0.2, clip_high=0.2)
  c.optimizer = dict(learning_rate=1e-6)
  c.learner = dict(rows=1, row_tokens=450)
  c.log = dict(tensorboard=False)
  block = dict(count=64, median=99.5, spread=0.0, within=0.0, pass_spread=0.0)
  if kind == 'varied':
    c.scheduler.dynamic_sampling = True
    c.snooze, c.lengths = {}, {}
    block |= dict(spread=0.4, within=0.6, pass_spread=2.0, gain=0.2)
  c.simulate = dict(
    workload=dict(sums=block), costs=dict(decode_step=1.0, learn_step=60.0)
  )
  return c
"""


@pytest.fixture
def file(tmp_path):
  path = tmp_path / 'toy.py'
  path.write_text(CONFIG)
  return str(path)


def run(file, **settings):
  """One run; keys have __ for a dot."""
  pairs = [(key.replace('__', '.'), str(value)) for key, value in settings.items()]
  c = config.read(file, pairs)
  return simulate.simulate(c, simulate.costs_of(c, None)).row


# --- what paper knows -----------------------------------------------------------------


@pytest.mark.parametrize('slots, g', [(32, 100), (16, 200), (8, 400)])
@pytest.mark.parametrize('grace', [0, 4])
def test_without_a_barrier_alike_steps_take_the_grace_once_more(file, slots, g, grace):
  # A decision knows of what was `grace` chunks (of one token) before; meanwhile the next
  # answers are sampled, so that only the first step is later.
  row = run(
    file, sampler__slots=slots, scheduler__grace=grace, scheduler__barrier=False
  )
  assert row['wall'] == pytest.approx(5 * (g + 60) + grace)
  assert row['groups'] == 20


def test_it_takes_the_cpu_where_there_is_no_tpu(file, monkeypatch):
  asked = []
  monkeypatch.setattr(backend, 'choose', lambda: asked.append(None))
  run(file)
  assert asked  # before anything looks for devices


@pytest.mark.parametrize('lag', [0, 1, 2])
@pytest.mark.parametrize('slots, g', [(32, 100), (16, 200), (8, 400)])
@pytest.mark.parametrize('is_shared', [False, True])
def test_alike_steps_take_what_the_closed_form_says(file, lag, slots, g, is_shared):
  mesh = None if is_shared else {}
  row = run(file, asp__lag=lag, sampler__slots=slots, sampler_mesh=mesh)
  t, steps = 60, 5
  apart = g + (steps - 1) * max(g, t) + t
  expected = apart if lag and not is_shared else steps * (g + t)
  if is_shared:  # the engine is at work whenever the learner is not
    assert row['ordering'] == pytest.approx(t / (g + t))
    assert row['trainer'] == pytest.approx(g / (g + t))
  assert row['wall'] == pytest.approx(expected)
  assert row['steps'] == steps and row['groups'] == 4 * steps
  assert row['rollouts'] == 32 * steps and row['tokens'] == 3200 * steps
  assert row['size'] == 8 and row['useful'] == 1
  # Bundle j has a lag of min(j, lag): 0, 1, 1, 1, 1 or 0, 1, 2, 2, 2.
  assert row['lag'] == pytest.approx({0: 0, 1: 0.8, 2: 1.4}[lag])
  assert row['lag_max'] == lag


def test_idle_time_is_whose_it_is(file):
  row = run(file)
  assert row['trainer'] == pytest.approx(100 / 160)  # waits for the answers
  assert row['ordering'] == pytest.approx(60 / 160)  # the engine, for the weights
  assert row['padding'] == row['skew'] == 0
  assert row['events'] == 0  # all answers of one length
  # Half of the slots stand empty, all the while the others are at work.
  row = run(file, sampler__slots=64)
  assert row['padding'] == pytest.approx(0.5 * 100 / 160)


@pytest.mark.parametrize('is_shared', [False, True])
@pytest.mark.parametrize('lag', [0, 1])
def test_no_step_waits_longer_than_it_takes(file, lag, is_shared):
  """Not even where the one before was full of carried groups, and sampled nothing."""
  pairs = [('steps', '30'), ('asp.lag', str(lag)), ('scheduler.groups_per_step', '1')]
  pairs += [('sampler_mesh', 'None' if is_shared else '{}')]
  c = config.read(f'{file}:varied', pairs)
  found = simulate.simulate(c, Costs(decode_step=1.0, learn_step=60.0, load=2.0))
  idle, took, groups = (
    found.book.column(key)[:-1]
    for key in ('time/idle_s/sampler', 'time/step_s', 'rollout/groups_generated')
  )
  assert (idle >= -1e-9).all() and (idle <= took + 1e-9).all()
  assert (groups == 0).any() or lag  # carried groups are dropped with a lag
  waits = (found.row['skew'] + found.row['ordering']) * found.row['wall']
  assert idle.sum() == pytest.approx(waits)


@pytest.mark.parametrize('lag', [0, 1])
def test_paused_groups_do_not_grow_without_end(file, lag):
  """What goes on takes the places of new requests: of each bundle no more is paused
  than it asks for, and as many bundles are under way as there are steps of lag."""
  pairs = [('steps', '40'), ('asp.lag', str(lag)), ('asp.pause_after', '1')]
  c = config.read(f'{file}:varied', pairs)
  found = simulate.simulate(c, Costs(decode_step=1.0, learn_step=60.0))
  most = 10 * 4  # requests of a bundle
  pending = found.book.column('rollout/groups_pending')[:-1]
  assert 0 < pending.max() <= (lag + 1) * most


@pytest.mark.parametrize('kl_coef, wall', [(0.0, 500), (0.1, 800)])
def test_a_penalty_is_learned_from_where_all_are_right(file, kl_coef, wall):
  """Steps of 100 s without an advantage; with the penalty there is an update of 60 s."""
  sure = {'simulate__workload__sums__pass_rate': 1 - 1e-9}
  assert run(file, loss__kl_coef=kl_coef, **sure)['wall'] == pytest.approx(wall)


def test_what_is_trained_on_is_compared_with_what_was_drawn():
  book = summary.Book()
  line = {'size': 2, 'weights': None}
  book.rollouts(
    0,
    [
      line | {'lengths': [10, 30], 'verdicts': [1.0, 0.0], 'weights': [1.0, 0.0]},
      line | {'lengths': [10, 10], 'verdicts': [1.0, 1.0]},  # filtered
      line | {'size': 0, 'lengths': [], 'verdicts': [], 'weights': []},
    ],
  )
  book.rollouts(1, [line | {'size': 3, 'lengths': [10, 10, 30], 'verdicts': [0.0] * 3}])
  row = summary.summarise(book, {'wall': 1.0, 'wait': 0.0})
  # One answer of 10 tokens, right, was trained on; seven were drawn: 110 tokens, three
  # right. One group of three has an answer above two medians.
  assert row['length_bias'] == pytest.approx(10 / (110 / 7) - 1)
  assert row['pass_bias'] == pytest.approx(1 - 3 / 7)
  assert row['events'] == pytest.approx(1 / 3)


def test_lag_is_averaged_over_trained_tokens():
  book = summary.Book()
  for step, (lag, tokens) in enumerate([(0.0, 100), (2.0, 300)]):
    book.log(step, {'lag/mean': lag, 'lag/max': lag, 'rollout/tokens_trained': tokens})
  book.log(2, {'rollout/tokens_trained': 0})  # a step that learned from nothing
  row = summary.summarise(book, {'wall': 1.0, 'wait': 0.0})
  assert row['lag'] == pytest.approx(1.5) and row['lag_max'] == 2


# --- sweeps and tables ----------------------------------------------------------------


@pytest.mark.parametrize(
  'sweeps, found',
  [
    ([], [()]),
    (['a.b=1,2'], [(('a.b', '1'),), (('a.b', '2'),)]),
    (['config.a=(4,8),[2, (1, 3)]'], [(('a', '(4,8)'),), (('a', '[2, (1, 3)]'),)]),
    (
      ['a=1,2', 'b=x,y'],
      [(('a', p), ('b', q)) for p in ('1', '2') for q in ('x', 'y')],
    ),
  ],
)
def test_sweeps_are_all_combinations(sweeps, found):
  assert simulate.swept(sweeps) == found


@pytest.mark.parametrize(
  'key, values, text',
  [
    ('wall', [30.0], '30 s'),
    ('wall', [9000.0, 10800.0, 12600.0], '3 [2.5, 3.5] h'),
    ('wall', [600.0, 1200.0], '15 [10, 20] min'),
    ('rollouts', [1200.0], '1,200'),
    ('tokens', [2.5e6, 3.5e6], '3 [2.5, 3.5] M'),
    ('padding', [0.25, 0.375], '31.2 [25.0, 37.5] %'),
    ('length_bias', [-0.05], '-5.0 %'),
    ('pass_bias', [0.125], '+0.125'),
  ],
)
def test_numbers_have_a_unit_that_suits_them(key, values, text):
  assert summary.cell(key, values) == text


def test_columns_that_do_not_fit_go_below():
  lines = [['setting', 'time', 'tokens'], ['a', '1 s', '20']]
  assert summary.aligned(lines, 80) == (
    'setting  time  tokens\n' + 'a         1 s      20'
  )
  assert summary.aligned(lines, 20) == (
    'setting  time\na         1 s\n\nsetting  tokens\na            20'
  )


def page_of(folder):
  return (folder / 'simulate.html').read_text('utf-8')


def test_a_sweep_with_seeds_is_a_table_and_a_page(file, tmp_path, capsys):
  out = tmp_path / 'out'
  arguments = [f'--config={file}:varied', '--steps=4', '--seeds=2', f'--out={out}']
  code = simulate.main([*arguments, '--sweep', 'asp.lag=0,1', 'asp.engines=1'])
  assert code == 0
  names = ['asp.lag=0, asp.engines=1', 'asp.lag=1, asp.engines=1']
  told = capsys.readouterr().out
  table = (out / 'table.md').read_text()
  for name in names:
    assert name in told and f'| {name} |' in table
    assert page_of(out).count(f'<td>{name}</td>') > 1  # the table is folded
    for seed in (0, 1):
      folder = out / name.replace(' ', '_') / f'seed{seed}'
      lines = read_jsonl(folder / 'metrics.jsonl')
      assert [line['step'] for line in lines] == [0, 1, 2, 3, 4]
  page = page_of(out)
  assert '</i>evaluate' not in page  # none of the bars
  svgs = re.findall(r'<svg.*?</svg>', page, flags=re.S)
  for svg in svgs:
    ET.fromstring(svg)
  assert len(svgs) >= 6 and 'learner: learn 3' in page
  assert not re.search(r'<script|<link|<img|https?:', page)
  # With a lag of 1 step 0 alone was trained on at once.
  lag = re.search(
    r'asp.lag=1, asp.engines=1</td><td>([\d.]+) %</td><td>([\d.]+) %', page
  )
  assert 0 < float(lag[1]) < float(lag[2])
  assert float(lag[1]) + float(lag[2]) == pytest.approx(100, abs=0.11)


def test_seeds_differ_and_repeat(file):
  rows = [run(f'{file}:varied', seed=seed, steps=4) for seed in (0, 1, 0)]
  assert rows[0] == rows[2] != rows[1]


# --- traces ---------------------------------------------------------------------------


def recorded(file, workdir, **settings):
  """A run whose rollouts are written down, as by train."""
  pairs = [(key.replace('__', '.'), str(value)) for key, value in settings.items()]
  c = config.read(file, pairs)
  checks.check_numbers(c)
  workload = Workload(simulate.datasets(c['simulate']['workload']), seed=c['seed'])
  scheduler = controllers.make_scheduler(c, workload.prompts, Sampling(**c['sampling']))
  return record(c, scheduler, workload, simulate.costs_of(c, None), workdir)


def record(c, scheduler, workload, costs, workdir):
  is_shared = c['sampler_mesh'] is None
  slots = c['sampler']['slots']
  engine = SimEngine(workload, costs, slots=slots, shares_devices=is_shared)
  with Recorder(
    workdir, steps=c['steps'], tensorboard=False, console=False
  ) as recorder:
    loop.train(
      engine,
      scheduler,
      recorder,
      steps=c['steps'],
      save_every=99,
      evaluate_every=99,
      evaluate=None,
    )
  return read_jsonl(workdir / 'metrics.jsonl')


@pytest.mark.parametrize('lag', [0, 1])
def test_a_run_on_its_own_trace_decides_the_same(file, tmp_path, lag):
  workdir, out = tmp_path / 'run', tmp_path / 'out'
  lines = recorded(f'{file}:varied', workdir, asp__lag=lag, steps=12)
  code = simulate.main(
    [
      f'--config={file}:varied',
      f'--config.asp.lag={lag}',
      '--steps=12',
      f'--trace={workdir / "rollouts.jsonl"}',
      f'--out={out}',
    ]
  )
  assert code == 0
  again = read_jsonl(out / 'toy_varied' / 'seed0' / 'metrics.jsonl')
  assert again == lines
  assert '| 100.0 % |' in (out / 'table.md').read_text().splitlines()[2][-12:]
  assert sum(line.get('rollout/groups_filtered', 0) for line in lines) > 0


def test_it_is_told_how_much_of_a_trace_fits(file, tmp_path, capsys):
  """Two steps are recorded, of 4 groups each, and three are simulated."""
  recorded(file, tmp_path / 'run', steps=2)
  arguments = [f'--config={file}', f'--trace={tmp_path / "run"}']
  assert simulate.main([*arguments, '--steps=2']) == 0
  assert 'groups are answered' not in capsys.readouterr().out
  arguments += ['--seeds=2', '--steps=3', f'--out={tmp_path / "out"}']
  assert simulate.main(arguments) == 0
  # The second seed draws others; of 12 groups, what the lot made the same is as then.
  found = re.search(
    r'toy: (\d+) of 24 groups are answered as recorded, (\d+) are drawn from other',
    capsys.readouterr().out,
  )
  assert int(found[1]) + int(found[2]) == 24 and 8 <= int(found[1]) <= 16
  page = (tmp_path / 'out' / 'simulate.html').read_text('utf-8')
  assert '<p>2 seeds: ' in page and found[0] in page
  assert 'in seconds: decode_step 1, learn_step 60.' in page
  assert f'Answers of {tmp_path / "run" / "rollouts.jsonl"}.' in page


def test_costs_are_fitted_to_the_steps_that_are_named(file, tmp_path, capsys):
  """Loading the weights took 1 s, and from step 3 on 3 s."""
  smoke = f'{ROOT}/configs/smoke.py'
  c = config.read(smoke, [('steps', '6')])
  opened = config.prepare(c)
  sizes = opened.prompts.sizes
  workload = Workload({name: Dataset(count=n, median=9) for name, n in sizes.items()})
  record(c, opened.scheduler, workload, Costs(decode_step=0.01), tmp_path)
  (tmp_path / 'config.json').write_text(to_json(c))
  metrics = tmp_path / 'metrics.jsonl'
  lines = read_jsonl(metrics)
  for line in lines[:6]:
    line['time/load_s'] = 1.0 if line['step'] < 3 else 3.0
  metrics.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  steps = sum(
    line[f'time/{what}_s']
    for line in lines[:3]
    for what in ('generate', 'reward', 'learn', 'idle')
  )
  for part, count, load in (
    ([], 6, '2'),
    (['--costs-steps=0:3'], 3, '1'),
    (['--costs-steps=3:6'], 3, '3'),
  ):
    assert simulate.main([f'--config={file}', f'--costs={tmp_path}', *part]) == 0
    told = capsys.readouterr().out
    costs = re.search(r'^Costs in seconds: (.*)$', told, flags=re.M)[1].split(', ')
    assert f'load {load}' in costs and not any(cost.endswith(' 0') for cost in costs)
    fitted = re.search(r'Fitted: (.*) steps, predicted (.*) s, measured (.*) s', told)
    assert int(fitted[1]) == count
    # The sum is right, whatever is charged to what.
    assert float(fitted[2]) == pytest.approx(float(fitted[3]), rel=2e-3)
    if part == ['--costs-steps=0:3']:
      assert float(fitted[3]) == pytest.approx(3 * 1.0 + steps, rel=1e-3)
  arguments = [f'--config={file}', f'--costs={tmp_path}', '--costs-steps=6:9']
  assert simulate.main(arguments) == 2
  assert 'none of these steps is recorded whole' in capsys.readouterr().err


# --- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
  'arguments, expected',
  [
    (['--config.steps=0'], 'config.steps: 0, expected at least 1'),
    (['--sweep', 'asp.lag'], '--sweep asp.lag: expected KEY=VALUE,VALUE,...'),
    (['--sweep', 'asp.lga=1,2'], "unknown key 'lga'; did you mean 'lag'?"),
    (['--sweep', 'asp.lag=0,-1'], 'config.asp.lag: -1, expected a whole number'),
    (['--config.asp.lag=1000001'], 'config.asp.lag: 1000001, expected a whole number'),
    (['--config.asp.spare=65537'], 'of at least 0, at most 65536'),
    (['--seeds=0'], '--seeds=0: expected at least 1'),
    (['--config.simulate.costs=None'], 'None, expected --costs=WORKDIR, to fit them'),
    (['--config.simulate.costs=None'], 'with some of decode_step, decode_row, '),
    (['--config.simulate.costs={}'], 'config.simulate.costs: all are 0, expected'),
    (['--seeds=20001'], '100,005 steps to be simulated'),
    (['--steps=1000000000'], '1,000,000,000 steps to be simulated'),
    (['--config.simulate.workload.sums.count=10**8'], 'workload.sums.count'),
    (['--config.simulate.workload.sums.count=100000000'], 'expected at most 10000000'),
    (['--config.simulate.costs.laod=1'], "did you mean 'load'?"),
    (['--config.simulate.costs.load=-1'], 'costs.load: -1'),
    (['--config.simulate.workload.sums.medain=1'], "did you mean 'median'?"),
    (['--config.simulate.workload.sums.count=0'], 'workload.sums.count: 0'),
    (['--trace=/nowhere.jsonl'], '/nowhere.jsonl'),
    (['--costs=/nowhere'], '--costs=/nowhere: no config.json there'),
    (['--wat=1'], '--wat: unknown argument'),
    (['--costs-steps=0:2'], '--costs-steps=0:2: expected with --costs=WORKDIR only'),
    (['--costs=.', '--costs-steps=2:2'], '--costs-steps=2:2: expected A:B, from'),
    (['--costs=.', '--costs-steps=5'], '--costs-steps=5: expected A:B, from'),
    (['--costs=.', '--costs-steps=-1:5'], '--costs-steps=-1:5: expected A:B, from'),
  ],
)
def test_bad_input_is_one_line_and_code_2(file, arguments, expected, capsys):
  assert simulate.main([f'--config={file}', *arguments]) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: ') and error.count('\n') == 1
  assert expected in error


@pytest.mark.parametrize('name', ['table.md', 'checkpoints'])
def test_a_folder_that_is_in_use_is_left_as_it_is(file, tmp_path, name, capsys):
  (tmp_path / 'out').mkdir()
  (tmp_path / 'out' / name).write_text('mine')
  assert simulate.main([f'--config={file}', f'--out={tmp_path / "out"}']) == 2
  error = capsys.readouterr().err
  assert f'has {name!r} in it, expected a new or an empty folder' in error
  assert error.count('\n') == 1
  assert [p.name for p in (tmp_path / 'out').iterdir()] == [name]
  assert (tmp_path / 'out' / name).read_text() == 'mine'


@pytest.mark.parametrize(
  'out, said', [('file', 'a file, expected'), ('file/out', 'cannot be written: ')]
)
def test_where_nothing_can_be_written_nothing_runs(
  file, tmp_path, monkeypatch, out, said, capsys
):
  (tmp_path / 'file').write_text('mine')
  monkeypatch.delattr(simulate, 'simulate')
  assert simulate.main([f'--config={file}', f'--out={tmp_path / out}']) == 2
  error = capsys.readouterr().err
  assert said in error and error.count('\n') == 1
  assert (tmp_path / 'file').read_text() == 'mine'


def test_every_setting_and_seed_has_a_folder_of_its_own(file, tmp_path):
  out = tmp_path / 'out'
  arguments = ['--sweep', 'simulate.workload.sums.count=64, 64', '--seeds=2']
  arguments += ['--config.seed=7', f'--out={out}']
  assert simulate.main([f'--config={file}', *arguments]) == 0
  found = sorted(str(path.parent.relative_to(out)) for path in out.rglob('*.jsonl'))
  names = [f'simulate.workload.sums.count={count}' for count in ('64', '_64')]
  assert found == [f'{name}/seed{seed}' for name in names for seed in (7, 8)]


def test_names_of_folders_are_short_and_no_two_are_the_same():
  names = [
    'a=[1]',
    'a=(1)',
    'A=(1)',
    'a=_1__2',
    'table.md',
    'x' * 500,
    'x' * 501,
    'ä/b',
  ]
  found = folders(names)
  assert list(found) == names
  assert len({name.lower() for name in found.values()} | {'table.md'}) == 9
  assert all(len(name.encode()) < 130 and '/' not in name for name in found.values())
  assert [found[name] for name in names[:4]] == [
    'a=_1_', 'a=_1__2', 'A=_1__3', 'a=_1__2_2'
  ]  # fmt: skip


def test_the_group_size_is_that_of_kept_answers(file):
  row = run(file, asp__spare=2, asp__lag=1)
  assert row['size'] == 8 and row['rollouts'] == 10 * 4 * 5


def test_the_config_is_printed_with_the_keys_of_costs_and_datasets(file, capsys):
  assert simulate.main([f'--config={file}', '--steps=7', '--print-config']) == 0
  told = capsys.readouterr()
  c = json.loads(told.out)
  assert c['steps'] == 7 and c['simulate']['costs']['learn_step'] == 60.0
  assert c['simulate']['costs']['load'] == 0.0  # as it is by default
  assert c['simulate']['workload']['sums']['median'] == 99.5
  assert c['simulate']['workload']['sums']['growth'] == 0.0 and told.err == ''
  arguments = [f'--config={ROOT}/configs/quickstart.py', '--print-config']
  assert simulate.main(arguments) == 0
  told = capsys.readouterr()
  assert json.loads(told.out)['simulate'] == {'costs': None, 'workload': None}
  costs, workload = told.err.splitlines()
  assert costs.startswith('simulate.costs, in seconds: decode_step, decode_row, ')
  assert workload.startswith('simulate.workload.NAME: count 1000, weight 1.0, ')


@pytest.mark.parametrize(
  'asp, key',
  [
    ({'pause_after': 60}, 'pause_after'),
    ({'spare': 1, 'first_finished': True}, 'first_finished'),
  ],
)
def test_a_run_that_did_not_keep_all_answers_is_no_trace(
  file, tmp_path, asp, key, capsys
):
  how = {f'asp__{key}': value for key, value in asp.items()}
  recorded(f'{file}:varied', tmp_path, steps=3, asp__lag=1, **how)
  (tmp_path / 'config.json').write_text(json.dumps({'asp': asp}))
  own = [f'--config.asp.{key}={value}' for key, value in asp.items()]
  arguments = [f'--config={file}:varied', '--config.asp.lag=1', f'--trace={tmp_path}']
  for more in ([], own):
    assert simulate.main([*arguments, *more]) == 2
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and 'rollouts.jsonl: ' in error
    assert f'asp.{key}={asp[key]}, expected a run with' in error
  (tmp_path / 'config.json').unlink()  # from what is recorded alone
  assert simulate.main([*arguments, *own]) == 2
  error = capsys.readouterr().err
  assert (
    error.count('\n') == 1
    and f'asp.{key}' in error
    and 'the record does not say' in error
  )
  assert 'rollouts.jsonl:' in error


@pytest.mark.parametrize('steps', ['0:2', '5:9'])
def test_costs_are_not_fitted_to_two_steps(file, tmp_path, steps, capsys):
  c = config.read(f'{ROOT}/configs/smoke.py', [('steps', '6')])
  opened = config.prepare(c)
  sizes = opened.prompts.sizes
  workload = Workload({name: Dataset(count=n, median=9) for name, n in sizes.items()})
  record(c, opened.scheduler, workload, Costs(decode_step=0.01), tmp_path)
  (tmp_path / 'config.json').write_text(to_json(c))
  arguments = [f'--config={file}', f'--costs={tmp_path}', f'--costs-steps={steps}']
  assert simulate.main(arguments) == 2
  error = capsys.readouterr().err
  assert 'recorded whole, expected at least 3' in error and error.count('\n') == 1


@pytest.mark.parametrize(
  'change, expected',
  [
    ({'dataset': 'others', 'prompt_id': 'others/1'}, 'others'),
    ({'lengths': [-3] * 8}, 'lengths'),
    ({'colour': 1}, 'colour'),
    ({'verdicts': [1.5] * 8}, 'verdicts'),
    ({'finish': ['paused'] * 8}, 'asp.pause_after'),
  ],
)
def test_a_strange_trace_is_refused_by_its_line(
  file, tmp_path, change, expected, capsys
):
  recorded(file, tmp_path, steps=2)
  trace = tmp_path / 'rollouts.jsonl'
  lines = read_jsonl(trace)
  lines[2] |= change
  trace.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  assert simulate.main([f'--config={file}', f'--trace={trace}']) == 2
  error = capsys.readouterr().err
  assert error.count('\n') == 1 and f'{trace}:3' in error and expected in error


def finished(wall, *steps):
  """A run of these (rollouts, seconds)."""
  book = summary.Book()
  for step, (rollouts, seconds) in enumerate(steps):
    book.log(step, {'rollout/answers_generated': rollouts, 'time/step_s': seconds})
  row = {'wall': wall, 'rollouts': sum(rollouts for rollouts, _ in steps)}
  return Run(book=book, row=row, seed=0)


def test_time_at_equal_rollouts_is_read_between_two_steps():
  # 150 rollouts are there in the middle of the second step: after 10 + 20 / 2 seconds.
  base, other = finished(60.0, (150, 60.0)), finished(70.0, (100, 10.0), (100, 20.0))
  assert bench.seconds_to(other, 150) == pytest.approx(20)
  assert bench.at_equal_rollouts({'b': [base], 'o': [other]}, 'b', 'o') == '3.00'
  with pytest.raises(ValueError, match='201 rollouts are not reached'):
    bench.seconds_to(other, 201)


def test_ratios_are_taken_seed_by_seed():
  runs = {
    'b': [finished(40.0, (1, 1.0)), finished(30.0, (1, 1.0))],
    'o': [finished(20.0, (1, 1.0)), finished(10.0, (1, 1.0))],
  }
  assert bench.ratio(runs, 'b', 'o', bench.wall) == '2.50 [2.00, 3.00]'
  assert bench.both_times(runs, 'b', 'o') == '0.0 h to 0.0 h: 2.50 [2.00, 3.00]'


def test_the_papers_variants_are_all_sound(monkeypatch):
  """Each is built, and runs for two steps."""
  monkeypatch.syspath_prepend(str(ROOT))
  from configs import papers

  found = {}
  for variant in papers.VARIANTS:
    c = config.read(f'{ROOT}/configs/papers.py:{variant}', [('steps', '2')])
    c['scheduler']['groups_per_step'] = 16
    found[variant] = [simulate.simulate(c, simulate.costs_of(c, None))]
    assert c['sampler_mesh'] is not None  # where both are at work, on GPUs of their own
  assert {name for row in bench.ROWS for name in row[1:3]} <= found.keys()
  assert {name for stages in bench.STAGES.values() for name in stages} <= found.keys()
  assert len(cells(found)) == len(found) + 1
  for runs in found.values():
    assert 0 < runs[0].row['wall'] < math.inf
    assert np.isfinite(list(runs[0].row.values())).all()
