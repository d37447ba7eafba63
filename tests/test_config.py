"""Bad input: one line naming key, value and what was expected, before any model."""

import json
import math
import pathlib
import re
import shutil

from hf_files import change, edit
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_sched import checks, config, settings, train
from jaxrl_sched.device.tokenizers import build_byte_tokenizer

ROOT = pathlib.Path(__file__).parents[1]
SMOKE = str(ROOT / 'configs' / 'smoke.py')
MODEL = ROOT / 'configs' / 'quickstart_model'


def prepared(*overrides):
  return config.prepare(config.read(SMOKE, [o.split('=', 1) for o in overrides]))


@pytest.mark.parametrize(
  'override, message',
  [
    # Unknown keys, with the nearest known one.
    ('learnig_rate=1', "config: unknown key 'learnig_rate'"),
    ('optimizer.learning_rat=1', "config.optimizer: unknown key 'learning_rat'; did "),
    ('loss.clip_hi=1', "did you mean 'clip_high'"),
    ('optimiser.eps=1', "did you mean 'optimizer'"),
    ('evaluate.sample=3', "did you mean 'samples'"),
    ('prompts.datasets.sums.weigth=3', "did you mean 'weight'"),
    # Types (L1).
    ("optimizer.learning_rate='1e-6'", "config.optimizer.learning_rate: '1e-6', "),
    ("scheduler.groups_per_step='8'", "groups_per_step: '8', expected int"),
    ('scheduler.groups_per_step=8.5', 'groups_per_step: 8.5, expected int'),
    ('scheduler.dynamic_sampling=1', 'dynamic_sampling: 1, expected bool'),
    ('seed=None', 'config.seed: None, expected int'),
    ('optimizer.learning_rate=nan', "learning_rate: 'nan', expected float"),
    ('optimizer=5', 'config.optimizer: 5, expected a block'),
    (
      'snooze=on',
      "config.snooze: 'on', expected a block of keys, such as --config.snooze={} or "
      '--config.snooze.KEY=VALUE',
    ),
    ('snooze=True', 'config.snooze: True, expected a block of keys, such as --config.'),
    ('snooze.factor=five', "snooze.factor: 'five', expected a number, or inf"),
    # Numbers that cannot be.
    ('scheduler.group_size=1', 'config.scheduler.group_size: 1, expected at least 2'),
    ('sampling.max_new_tokens=0', 'max_new_tokens: 0, expected at least 1'),
    # D1: a sampler's renormalised log-probs would not be the learner's.
    ('sampling.top_p=0.9', 'config.sampling.top_p: 0.9, expected 1 in training'),
    ('sampling.top_k=5', 'config.sampling.top_k: 5, expected 0 in training'),
    ('sampling.temperature=0', 'config.sampling.temperature: 0.0, expected'),
    ('evaluate.temperature=0', 'config.evaluate.samples: 2, expected 1 at temperature'),
    ('evaluate.k=(1,9)', 'config.evaluate.k: 9, expected 1 to evaluate.samples=2'),
    ('steps=0', 'config.steps: 0, expected at least 1'),
    ('seed=8589934592', 'config.seed: 8589934592, expected 0 to'),
    ('evaluate.max_new_tokens=0', 'evaluate.max_new_tokens: 0, expected at least 1'),
    ('evaluate.top_p=1.5', 'evaluate.top_p: 1.5, expected above 0'),
    ('loss.clip_low=-1', 'clip_low and clip_high: -1.0'),
    ('loss.tis_cap=0', 'tis_cap: 0.0, expected above 0'),
    ('loss.dual_clip=0.5', 'dual_clip: 0.5'),
    ('sampling.stop_strings=(3,)', 'sampling.stop_strings: 3, expected some text'),
    ('grading.workers=0', 'grading.workers: 0, expected at least 1'),
    ('optimizer.b1=1', 'optimizer: b1=1.0'),
    ('overlong={"buffer": 4, "factor": -1}', 'overlong factor=-1.0'),
    ('prompts.datasets.sums.options.cuont=8', "unexpected keyword argument 'cuont'"),
    ("prompts.datasets.sums.options.count='8'", "count='8', expected a whole number"),
    (
      "model={'tokenizer': 'bytes', 'init': {'d_model': 8, 'd_ff': 8, 'layers': 1, "
      "'heads': 1, 'kv_heads': 0, 'head_dim': 8}}",
      'model.kv_heads: 0, expected at least 1',
    ),
    ('learner.window=0', 'learner.window: 0, expected at least 1'),
    ("sampling.stop_strings=['']", "sampling.stop_strings: '', expected some text"),
    ('model.init.d_model=64', 'config.model: expected either path or init'),
    ('checkpoint.keep=0', 'config.checkpoint.keep: 0, expected at least 1'),
    ('loss.kind=ppo', "config.loss.kind: 'ppo', expected one of grpo, dapo"),
    ('loss.kl=k4', "config.loss.kl: 'k4', expected one of k1, k2, k3"),
    ('optimizer.schedule=step', "optimizer.schedule: 'step', expected one of"),
    ('learner.row_tokens=16', 'learner.row_tokens: 16, expected at least'),
    # What does not divide (L2).
    (
      'mesh.data=3',
      'config.sampler.slots: 16, expected a multiple of the 3 devices of ',
    ),
    ('mesh.fsdp=8', 'config.learner.rows: 4, expected a multiple of mesh.data * '),
    # Data.
    ('prompts.datasets.sums.source=none.jsonl', 'none.jsonl'),
    ('prompts.datasets.sums.options.count=0', "Dataset 'sums': 0 prompts"),
    ('prompts.datasets.sums.reward=final_numbr', 'final_number'),
    ('prompts.max_tokens=2', '0 kept'),
    ('prompts.datasets.sums.options.count=1', "dataset 'sums': 1 prompts kept"),  # F4
    ('model.path=/nowhere', '/nowhere'),
  ],
)
def test_bad_settings_are_refused(override, message):
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    prepared(override)
  assert '\n' not in str(error.value)


def test_numbers_are_converted_exactly():
  """L1: an int where a float is declared is that float."""
  c = config.read(SMOKE, [('optimizer.learning_rate', '1'), ('evaluate.k', '[1, 2]')])
  assert c['optimizer']['learning_rate'] == 1.0
  assert isinstance(c['optimizer']['learning_rate'], float)
  assert c['evaluate']['k'] == (1, 2)


def test_a_block_can_be_left_out_and_put_in():
  overlong = [('overlong.buffer', '4'), ('overlong.factor', '1')]
  c = config.read(SMOKE, [('evaluate', 'None'), *overlong])
  assert c['evaluate'] is None and c['overlong'] == dict(buffer=4, factor=1.0)
  with pytest.raises(ValueError, match='config.overlong.factor: missing'):
    config.read(SMOKE, overlong[:1])
  c = config.read(SMOKE, [('mesh', 'None')])
  # Absence is the default, written.
  assert c['mesh'] == dict(data=1, fsdp=1, sequence=1, model=1)


def test_config_files_that_are_none(tmp_path):
  with pytest.raises(ValueError, match='there is no file'):
    config.read(str(tmp_path / 'none.py'))
  bad = tmp_path / 'bad.py'
  bad.write_text('x = 1\n')
  with pytest.raises(ValueError, match='no get_config'):
    config.read(str(bad))
  bad.write_text('def get_config():\n  return 1 / 0\n')
  with pytest.raises(ValueError, match='ZeroDivisionError'):
    config.read(str(bad))
  bad.write_text('def get_config():\n  return dict(seed=1)\n')
  with pytest.raises(ValueError, match='no ConfigDict'):
    config.read(str(bad))


def test_an_argument_reaches_get_config():
  warm = config.read(str(ROOT / 'configs' / 'quickstart.py') + ':think')
  assert warm['teacher'] == 'solutions'


def test_a_workdir_of_another_config_is_refused_by_the_differing_keys(tmp_path):
  """H7: never a mixture of two runs."""

  def check(*overrides):
    c = config.read(SMOKE, overrides)
    settings.check_workdir(tmp_path, c, config.free(c))
    return c

  settings.write(tmp_path, check())
  check()
  check(('steps', '9'), ('checkpoint.keep', '5'))
  check(('sampler.chunk', '8'))  # what it is anyway
  with pytest.raises(ValueError) as error:
    check(('seed', '1'), ('loss.kind', 'grpo'))
  assert 'seed: 0 -> 1' in str(error.value)
  assert 'loss.kind: dapo -> grpo' in str(error.value)
  # A decaying learning rate hangs on the steps.
  settings.write(tmp_path, config.read(SMOKE, [('optimizer.schedule', 'cosine')]))
  with pytest.raises(ValueError, match='steps: 6 -> 9'):
    check(('optimizer.schedule', 'cosine'), ('steps', '9'))
  (tmp_path / 'config.json').write_text('{')
  with pytest.raises(ValueError, match=r'config\.json: cannot be read'):
    check()


def test_a_refusal_names_what_the_user_gave_and_a_block_once(tmp_path):
  """Not each default of a block that one side lacks."""

  def check(*overrides):
    c = config.read(SMOKE, overrides)
    given = [key for key, _ in overrides]
    settings.check_workdir(tmp_path, c, config.free(c), given)
    return c

  settings.write(tmp_path, check(('lengths', '{}'), ('loss.tis_cap', '3.0')))
  with pytest.raises(ValueError) as error:
    check(('snooze.factor', '9'))
  told = str(error.value).partition('it differs in ')[2].partition('. Take another')[0]
  assert told == (
    'snooze.factor: 2.0 -> 9.0; lengths: a block -> None; loss.tis_cap: 3.0 -> 2.0'
  )
  with pytest.raises(ValueError, match='sagc: None -> a block; '):
    check(('sagc.tau', '1.5'))


def test_paths_of_files_are_free_and_names_of_programs_are_not(tmp_path):
  def given(source, path, table):
    c = config.read(SMOKE)
    c['prompts'] = c['prompts'] | {'datasets': {'a': dict(source=source)}}
    c['prompts']['examples'] = f'{path}/shots.jsonl'
    c['model'] = c['model'] | {'path': path}
    return c | {'tiers': {'table': table}}

  old = given('x/a.jsonl', 'model', 't.jsonl')
  settings.write(tmp_path, old)
  moved = given('/y/a.jsonl', '/z/model/', '/z/t.jsonl')
  settings.check_workdir(tmp_path, moved, config.free(moved))
  other = given('tasks:Sums', 'model', 't.jsonl')
  with pytest.raises(ValueError, match='datasets.a.source: x/a.jsonl -> tasks:Sums'):
    settings.check_workdir(tmp_path, other, config.free(other))


def test_a_workdir_is_for_one_run_at_a_time(tmp_path):
  with settings.only_one(tmp_path), pytest.raises(ValueError, match='another run'):
    with settings.only_one(tmp_path):
      pass
  with settings.only_one(tmp_path):
    pass
  file = tmp_path / 'file'
  file.touch()
  with pytest.raises(ValueError, match='cannot be written to'):
    with settings.only_one(file):
      pass


def test_the_command_exits_2_with_one_line(tmp_path, capsys):
  argv = [f'--config={SMOKE}', f'--workdir={tmp_path / "w"}', '--config.lr=3']
  assert train.main(argv) == 2
  out = capsys.readouterr()
  assert out.err.startswith("error: config: unknown key 'lr'")
  assert out.err.count('\n') == 1
  assert not (tmp_path / 'w').exists()  # nothing half written


def test_unknown_arguments_are_refused(tmp_path, capsys):
  assert train.main([f'--config={SMOKE}', f'--workdir={tmp_path}', '--stesp=3']) == 2
  assert '--stesp: unknown argument' in capsys.readouterr().err


def test_what_a_verifier_reads_beside_the_answer_is_asked_for_at_the_start(tmp_path):
  file = tmp_path / 'data.jsonl'
  source = [
    f'prompts.datasets.sums.source={file}',
    'prompts.datasets.sums.options={}',
    'prompts.datasets.sums.reward=format',
  ]
  for line, message in (
    ('{"prompt": "x"}', "line 1: reward 'format' needs meta['pattern']"),
    ('{"prompt": "x", "pattern": "("}', 'line 1: meta pattern'),
  ):
    file.write_text(line)
    with pytest.raises(ValueError, match=re.escape(message)):
      prepared(*source)


@pytest.mark.parametrize(
  'lines, message',
  [
    ('{"prompt": "1+1=", "answer": 2}\n{"prompt": \n', 'data.jsonl, line 2: not JSON'),
    ('{"prompt": "1+1="}\n', 'answer'),
    ('', 'empty'),
    (
      '{"id": "a", "prompt": "x", "answer": 1}\n{"id": "a", "prompt": "y", "answer": 1}',
      "id 'a'",
    ),
  ],
)
def test_bad_data_files_are_refused_by_file_and_line(tmp_path, lines, message):
  file = tmp_path / 'data.jsonl'
  file.write_text(lines)
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    prepared(f'prompts.datasets.sums.source={file}', 'prompts.datasets.sums.options={}')
  assert 'data.jsonl' in str(error.value)


# The model that a config names: looked at before anything is built.


@pytest.fixture
def folder(tmp_path):
  return shutil.copytree(MODEL, tmp_path / 'model')


def cut_vocabulary(where: pathlib.Path, rows: int) -> None:
  name = 'model.embed_tokens.weight'
  tensor = load_file(where / 'model.safetensors')[name]
  change(where / 'model.safetensors', **{name: tensor[:rows]})
  edit(where, vocab_size=rows)


def test_what_is_wrong_with_a_model_is_said_before_it_is_built(
  folder, tmp_path, capsys
):
  """I5: settings, header and positions; no workdir is made, nothing is compiled."""
  file = folder / 'model.safetensors'
  whole = (folder / 'config.json').read_bytes()
  for spoil, said in (
    (lambda: edit(folder, num_hidden_layers=3), 'tensors not used: model.layers.3.'),
    (lambda: edit(folder, max_position_embeddings=40), "the model's 40 positions"),
    (lambda: edit(folder, head_dim=31), 'model.head_dim: 31, expected an even number'),
    (lambda: edit(folder, hidden_act='gelu'), "hidden_act: 'gelu', expected silu"),
    (
      lambda: (folder / 'config.json').write_text(''),
      f'{folder}/config.json: not JSON',
    ),
    (lambda: (folder / 'config.json').write_text('[]'), 'config.json: [], expected an'),
    (
      lambda: (folder / 'config.json').write_bytes(b'\xff\xfe'),
      f'{folder}/config.json: not JSON',
    ),
    (lambda: (folder / 'config.json').unlink(), 'no such file; there is model.safe'),
    (lambda: file.write_bytes(file.read_bytes()[:-1]), 'not a whole safetensors file'),
  ):
    (folder / 'config.json').write_bytes(whole)
    spoil()
    argv = [f'--config={SMOKE}', f'--workdir={tmp_path}/w']
    assert train.main([*argv, f'--config.model.path={folder}']) == 2
    out = capsys.readouterr()
    assert said in out.err and out.err.count('\n') == 1, out.err
    assert out.out == '' and not (tmp_path / 'w').exists()


@pytest.mark.parametrize('path', ['', 'a\nb'])
@pytest.mark.parametrize('key', ['path', 'tokenizer'])
def test_a_name_that_is_none_is_refused(key, path):
  with pytest.raises(ValueError) as error:
    prepared(f'model.{key}={path}')
  assert str(error.value).startswith(f'model: {path!r}, expected a folder or a hub id')


def test_the_tokens_a_model_may_say_are_those_of_the_tokenizer_configured(
  folder, tmp_path
):
  """Not of the one in its folder: else unknown ids would be sampled."""
  assert prepared(f'model.path={folder}').shape.known_tokens == 262
  other = build_byte_tokenizer(tmp_path / 'other')
  other.add_tokens([f'word{i}' for i in range(20)])
  other.save_pretrained(folder)
  name = 'model.embed_tokens.weight'
  tensor = load_file(folder / 'model.safetensors')[name]
  more = np.concatenate([tensor, tensor[:38]])
  change(folder / 'model.safetensors', **{name: more})
  edit(folder, vocab_size=300)
  run = prepared(f'model.path={folder}')
  assert (run.shape.known_tokens, run.shape.vocab_used) == (282, 300)
  run = prepared(f'model.path={folder}', 'model.tokenizer=bytes')
  assert run.shape.known_tokens == 262
  engine = config.build_engine(run, tmp_path / 'w')
  try:
    assert engine._learner.config == run.shape
  finally:
    engine.close()


def test_a_tokenizer_with_more_ids_is_refused_where_they_are_used(folder, tmp_path):
  """The prompts of the tasks need ids up to 6 + ord('u') = 123."""
  cut_vocabulary(folder, 124)
  run = prepared(f'model.path={folder}')
  assert (run.shape.known_tokens, run.shape.vocab_used) == (124, 124)
  file = tmp_path / 'd.jsonl'
  lines = [dict(prompt=p, answer=1, solution='a') for p in 'abcdefgh']
  file.write_text('\n'.join(map(json.dumps, lines)))
  data = [
    f'model.path={folder}',
    f'prompts.datasets.sums.source={file}',
    'prompts.datasets.sums.options={}',
  ]
  prepared(*data)
  lines[7]['prompt'] = 'z'
  file.write_text('\n'.join(map(json.dumps, lines)))
  refused('d.jsonl, line 8: prompt sums/7 has token 128, expected ids below 124', *data)
  lines[7] |= dict(prompt='h', solution='z')
  file.write_text('\n'.join(map(json.dumps, lines)))
  only = f"prompts.datasets={{'sums': {{'source': '{file}'}}}}"
  said = "prompt 'sums/7': its solution has token 128, expected ids below 124"
  refused(said, f'model.path={folder}', only, *TEACHER)
  (folder / 'generation_config.json').write_text('{}')
  cut_vocabulary(folder, 2)
  refused("tokenizer: its end token '<|end|>' has id 2, expected one below 2", *data)


TEACHER = ['teacher=solutions', 'scheduler.group_size=1', 'loss.tis_cap=None']
TEACHER += ['scheduler.dynamic_sampling=False', 'snooze=None']


def refused(message: str, *overrides: str) -> None:
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    prepared(*overrides)
  assert '\n' not in str(error.value)


def test_an_odd_end_id_is_refused_with_its_file(folder):
  file = folder / 'generation_config.json'
  file.write_text('{"eos_token_id": [2, "3"]}')
  said = f"{file}: eos_token_id: [2, '3'], expected an id from 0 to 261"
  refused(said, f'model.path={folder}')
  file.unlink()
  edit(folder, eos_token_id=262)
  refused(f'{folder}/config.json: eos_token_id: 262, exp', f'model.path={folder}')


def test_a_teacher_has_something_to_say(tmp_path):
  file = tmp_path / 'd.jsonl'
  lines = [dict(prompt=p, answer=1, solution='') for p in 'abcdefgh']
  file.write_text('\n'.join(map(json.dumps, lines)))
  refused(
    "prompt 'sums/0': no solution, needed by teacher",
    f"prompts.datasets={{'sums': {{'source': '{file}'}}}}",
    *TEACHER,
  )


def test_no_number_is_named(tmp_path):
  file = tmp_path / 'c.py'
  file.write_text(
    'from ml_collections import ConfigDict\n'
    'def get_config():\n'
    '  return ConfigDict(dict(log=dict(wandb=dict(x=[float("nan")]))))\n'
  )
  with pytest.raises(ValueError, match='config.log.wandb.x: nan, expected a number'):
    config.read(str(file))


@pytest.mark.parametrize(
  'place, said',
  [('command line', 'inf'), ('command line', 'math.inf'), ('file', 'math.inf')],
)
def test_filtering_is_an_infinite_factor(place, said, tmp_path):
  """In a file, on the command line and through a workdir; JSON knows no infinity."""
  if place == 'command line':
    c = config.read(SMOKE, [('snooze.factor', said)])
  else:
    file = tmp_path / 'filtering.py'
    file.write_text(
      'import math, sys\n'
      f'sys.path.append({str(pathlib.Path(SMOKE).parent)!r})\n'
      'import smoke\n'
      'def get_config():\n'
      '  c = smoke.get_config()\n'
      f'  c.snooze = dict(factor={said})\n'
      '  return c\n'
    )
    c = config.read(str(file))
  assert c['snooze']['factor'] == math.inf
  settings.write(tmp_path, c)
  assert 'Infinity' not in (tmp_path / 'config.json').read_text()
  assert config.of_workdir(None, tmp_path, ())['snooze']['factor'] == math.inf
  settings.check_workdir(tmp_path, c)
  with pytest.raises(ValueError, match='learning_rate: .*expected'):
    config.read(SMOKE, [('optimizer.learning_rate', 'inf')])


SIZES = 'sagc.sizes=(2, 4, 8)'
WINDOW = ['asp.window=4', 'loss.averaging=group', 'lengths={}']
BY_PROMPT = (SIZES, 'sagc.prompt_aware=True', 'loss.averaging=group')


@pytest.mark.parametrize(
  'overrides, message',
  [
    (['sagc.sizes=(8, 4)'], 'config.sagc.sizes: (8, 4), expected whole numbers of at'),
    (['sagc.sizes=(1, 4)'], 'config.sagc.sizes: (1, 4), expected whole numbers of at'),
    ([SIZES, 'sagc.delta=1.0'], 'config.sagc.delta: 1.0, expected above 0 and below 1'),
    ([SIZES, 'sagc.delta=0'], 'config.sagc.delta: 0.0, expected above 0 and below 1'),
    ([SIZES, 'sagc.mode=all'], "config.sagc.mode: 'all', expected one of groups, mean"),
    (
      ['sagc.sizes=(4, 8)', 'scheduler.groups_per_step=5'],
      'rollouts: 20 a step (groups_per_step * group_size), expected a multiple of every '
      "size, as hold='rollouts' (sizes [4, 8]; it is none of [8])",
    ),
    (
      ['sagc.sizes=(2, 8)'],
      'config.scheduler.group_size: 4, expected one of config.sagc.sizes=[2, 8]',
    ),
    (BY_PROMPT, 'config.lengths: None, expected a block (--config.lengths={}), as sa'),
    (
      [SIZES, 'sagc.prompt_aware=True', 'lengths={}'],
      "config.loss.averaging: 'token', expected 'group' (a mean over the tokens of each "
      "group), 'sequence' or 'constant' with sagc.prompt_aware",
    ),
    (
      [*BY_PROMPT, 'lengths={}', 'sagc.hold=prompts'],
      "config.sagc.hold: 'prompts', expected 'rollouts' with prompt_aware",
    ),
    (
      [*BY_PROMPT, 'lengths={}', 'sagc.lambda_max=5.0'],
      'config.sagc.lambda_max: 5.0, expected at least 8 with prompt_aware',
    ),
    (
      ['prune_prompts.regime=fill'],
      "config.loss.averaging: 'token', expected 'group' (a mean over the tokens of each "
      "group), 'sequence' or 'constant' with prune_prompts",
    ),
    (
      ['prune_prompts.regime=fixed_candidates', 'loss.averaging=group'],
      "config.prune_prompts.regime: 'fixed_candidates', expected 'fill' with dynamic",
    ),
    (
      [SIZES, 'scheduler.groups_per_step=32', 'prompts.datasets.sums.options.count=20'],
      "dataset 'sums': 20 prompts kept (and 0 too long), expected at least the 32 of",
    ),
    (
      [SIZES, "sagc.prior=('a', 1)"],
      "sagc.prior: ('a', 1), expected two numbers above",
    ),
    (['tiers.table=(0,)'], 'tiers.table: (0,), expected a path or several'),
    (['prune_answers.rate=1.0'], 'config.prune_answers.rate: 1.0, expected 0 to below'),
    (
      ['prune_answers.rate=0.8'],
      'config.prune_answers.rate: 0.8, expected at most 0.7, above which the variance',
    ),
    (
      ['prune_answers.rule=worst'],
      "config.prune_answers.rule: 'worst', expected one of fixed, coins, balanced",
    ),
    (['prune_answers.final=2.0'], 'config.prune_answers.final: 2.0, expected 0 to 1'),
    (
      ['prune_answers.rule=fixed', 'prune_answers.cost=length'],
      "config.prune_answers.cost: has no say in rule 'fixed', expected rule 'balanced'",
    ),
    (
      ['scheduler.quotas=False', 'scheduler.borrow=True'],
      'scheduler.borrow: True, expected False without quotas',
    ),
    (
      ['scheduler.dynamic_sampling=False', 'scheduler.borrow=True'],
      'config.scheduler.borrow: True, expected False: there is no surplus without',
    ),
    (['snooze.factor=-1'], 'snooze.factor: -1.0, expected 0 or more passes'),
    (['lengths.beta=1.0'], 'lengths.beta: 1.0, expected above 0 and below 1'),
    (['tiers.table=none.jsonl'], 'none.jsonl: cannot be read'),
    (['checkpoint.compare_every=0'], 'checkpoint.compare_every: 0, expected at least'),
  ],
)
def test_bad_controllers_are_refused(overrides, message):
  refused(message, *overrides)


@pytest.mark.parametrize(
  'overrides, message',
  [
    (['asp.lag=-1'], 'config.asp.lag: -1, expected a whole number of at least 0'),
    (['asp.order=random'], "config.asp.order: 'random', expected one of shuffled"),
    (['asp.engines=2'], 'config.asp.engines: 2, expected 1, as samplers share the'),
    (['asp.pause_after=28'], 'config.asp.pause_after: 28, expected less than'),
    (
      ['asp.lag=1'],  # of the config: max_rounds=2
      'config.scheduler.max_rounds: 2, expected None or 1 with asp.lag: all engines',
    ),
    (
      ['asp.pause_after=8'],
      'config.scheduler.max_rounds: 2, expected None or 1 with asp.pause_after: what',
    ),
    (
      ['asp.window=4'],
      "config.loss.averaging: 'token', expected 'group', 'sequence' or 'constant' with",
    ),
    (
      ['asp.window=4', 'loss.averaging=group'],
      'config.lengths: None, expected a block (--config.lengths={}), as asp.window is',
    ),
    (
      ['asp.lag=1', 'scheduler.max_rounds=1', 'loss.tis_cap=None'],
      'config.loss.tis_cap: None, expected a number with asp.lag',
    ),
    (
      [*WINDOW, 'scheduler.quotas=False'],
      'asp.window: 4, expected 1, or scheduler.quotas',
    ),
    (
      [*WINDOW, SIZES, 'sagc.period=2'],
      'asp.window: 4, expected 1, or sagc.period a multiple of it',
    ),
    (['asp.first_finished=True'], 'config.asp.first_finished: True, expected False wi'),
    (
      ['asp.spare=2', 'asp.refill=False'],
      'config.asp.spare: 2, expected 0 with refill',
    ),
    (
      ['asp.spare=2', 'asp.pause_after=8'],
      'config.asp.spare: 2, expected 0 with pause',
    ),
    (
      ['sampler_mesh.data=3'],
      'config.sampler.slots: 16, expected a multiple of sampler_mesh.data = 3',
    ),
    (['sampler_mesh.model=0'], 'config.sampler_mesh.model: 0, expected at least 1'),
    (
      [*BY_PROMPT, 'lengths={}', 'asp.pause_after=8'],
      'config.asp.pause_after: 8, expected 0 with sagc: what goes on has the size',
    ),
  ],
)
def test_a_bad_schedule_is_refused(overrides, message):
  refused(message, *overrides)


@pytest.mark.parametrize(
  'overrides, message',
  [
    (
      ['scheduler.quotas=False', 'scheduler.groups_per_step=200'],
      'prompts: 128 may be drawn at step 0, expected at least the 200 of one batch',
    ),
    (
      [*BY_PROMPT, 'lengths={}', 'scheduler.groups_per_step=128'],
      "'last_digits': 64 prompts may be drawn at step 0, expected at least its share of "
      'a batch of 256 groups, 128',
    ),
  ],
)
def test_a_batch_that_prompts_are_too_few_for_is_refused(overrides, message):
  """F4, where sizes of groups or streams vary."""
  refused(message, *overrides)


def test_a_dataset_may_be_in_every_second_batch_only():
  """16 rollouts are one group of 16 at times: of two datasets each has it in turn."""
  scheduler = prepared('sagc.sizes=(4, 16)').scheduler
  assert len(scheduler.plan(0).requests) > 0


def test_group_sizes_with_a_lag_are_warned_of():
  """5.1: SAGC aims at synchronous waiting."""
  found = train.notes(prepared(SIZES, 'asp.lag=1', 'scheduler.max_rounds=None'))
  (note,) = [note for note in found if 'sagc' in note]
  assert note.startswith('sagc: with asp.lag=1 learning does not wait')
  assert not any('sagc' in note for note in train.notes(prepared(SIZES)))


def test_a_batch_that_live_tiers_are_too_few_for_is_refused(tmp_path):
  """60 of 64 prompts wait until half of the steps: 4 are too few for 8 of a batch."""
  ids = list(prepared().prompts.ids()['sums'])
  file = tmp_path / 'difficulty.jsonl'
  file.write_text(
    '\n'.join(
      json.dumps({'id': key, 'pass_rate': 0.0 if i < 60 else 0.5})
      for i, key in enumerate(ids)
    )
  )
  prepared(f'tiers.table={file}', 'scheduler.groups_per_step=8')
  refused(
    "'sums/medium': 4 prompts may be drawn at step 0, expected at least its share of a "
    'batch of 16 groups, 8',
    f'tiers.table={file}',
    'scheduler.groups_per_step=16',
  )


def test_weights_of_nothing_are_refused():
  overrides = [f'prompts.datasets.{name}.weight=0' for name in ('sums', 'last_digits')]
  refused('weight', *overrides)


def test_a_high_rate_is_taken_where_it_is_asked_for():
  prepared('prune_answers.rate=0.8', 'prune_answers.allow_high_rate=True')


@pytest.mark.parametrize('dynamic, fills', [('True', True), ('False', False)])
def test_the_regime_of_pruning_hangs_on_dynamic_sampling_unless_said(dynamic, fills):
  common = [f'scheduler.dynamic_sampling={dynamic}', 'loss.averaging=group']
  if dynamic == 'False':
    common.append('snooze=None')
  pruned = prepared(*common, 'prune_prompts={}')
  assert pruned.scheduler._pruner.fills == fills
  assert pruned.c['prune_prompts']['regime'] is None


def test_a_table_that_speaks_of_some_prompts_only_is_said_to(tmp_path, capsys):
  file = tmp_path / 'difficulty.jsonl'
  ids = [key for keys in prepared().prompts.ids().values() for key in keys]
  lines = [json.dumps({'id': key, 'pass_rate': 0.5}) + '\n' for key in ids]
  said = f'tiers: 3 of {len(ids)} prompts are in the table, the others count as medium'
  for part, told in ((lines[:3], f'{said}\n'), (lines, '')):
    file.write_text(''.join(part))
    prepared(f'tiers.table={file}')
    assert capsys.readouterr().out == told


def test_a_table_of_pass_rates_makes_tiers(tmp_path):
  """From stratify's lines to streams: ids by index, hard prompts held back."""
  whole = prepared()
  ids = {name: list(keys) for name, keys in whole.prompts.ids().items()}
  assert ids == {
    name: [p.id for p in whole.prompts.all() if p.dataset == name] for name in ids
  }
  file = tmp_path / 'difficulty.jsonl'
  rates = {key: (0.0, 0.5, 1.0)[i % 3] for i, key in enumerate(ids['sums'])}
  file.write_text(
    '\n'.join(json.dumps({'id': i, 'pass_rate': r}) for i, r in rates.items())
  )
  run = prepared(f'tiers.table={file}', 'steps=60')
  for first, tiers in ((0, {0.5, 1.0}), (30, {0.0, 0.5, 1.0})):
    seen = set()
    for step in range(first, first + 30):
      plan = run.scheduler.plan(step)
      run.scheduler.sent(plan)
      for stream, visits in plan.visits.items():
        assert stream.startswith(('sums/', 'last_digits/medium'))
        assert len(visits) == len(plan.draws[stream])
      drawn = [r.prompt.id for r in plan.requests if r.prompt.dataset == 'sums']
      seen |= {rates[key] for key in drawn}
      run.scheduler.take_batch(step)
      run.scheduler.close(step)
    assert seen == tiers


def test_orders_that_hang_on_the_number_of_engines_are_for_one_host():
  """Else a run would not go on as it was on another number of hosts."""
  window = [('asp.window', '4'), ('lengths', '{}'), ('loss.averaging', 'group')]
  c = config.read(SMOKE, [*window, ('asp.order', 'auto'), ('asp.train_cost', '0.1')])
  c['mesh'] |= dict(data=2)
  checks.check_numbers(c, hosts=1)
  with pytest.raises(ValueError, match="config.asp.order: 'auto', expected 'shuffled'"):
    checks.check_numbers(c, hosts=2)
  c['asp']['order'] = 'shuffled'
  checks.check_numbers(c, hosts=2)


def test_what_preflight_is_told_of_a_model_is_what_its_folder_says():
  said = json.loads((MODEL / 'config.json').read_text())
  prepared(f'model.hf_config={said}')
  larger = said | {'intermediate_size': 2 * said['intermediate_size']}
  with pytest.raises(ValueError, match=r'config.model.hf_config: its d_ff is \d+, but'):
    prepared(f'model.hf_config={larger}')


def lines_in(file, prompts, answer=1):
  file.write_text('\n'.join(json.dumps(dict(prompt=p, answer=answer)) for p in prompts))
  return f"{{'source': '{file}'}}"


def test_held_out_prompts_that_are_trained_on_are_refused_unless_allowed(tmp_path):
  """Issue 13, 3: one of 4 is a share of 0.25."""
  sums = lines_in(tmp_path / 'd.jsonl', [f'{i}+1=' for i in range(64)])
  held = lines_in(tmp_path / 'h.jsonl', ['3+1=', 'a', 'b', 'c'])
  data = [
    f"prompts.datasets={{'sums': {sums}}}",
    f"evaluate.datasets={{'held': {held}}}",
  ]
  refused(
    'config.evaluate.datasets.held: 1 of 4 prompts are also trained on, expected at most '
    'a share of 0.01',
    *data,
  )
  note = 'held-out prompts held: 1 of 4 are also trained on'
  assert note in train.notes(prepared(*data, 'evaluate.max_overlap=0.25'))
  lines_in(tmp_path / 'h.jsonl', ['a', 'b'])
  assert train.notes(prepared(*data)) == []
  refused(
    'config.evaluate.max_overlap: 1.5, expected 0 to 1', 'evaluate.max_overlap=1.5'
  )


def test_a_model_without_an_end_is_said_at_the_start(folder):
  """Issue 13, 18; and a turn that ends by another token than an answer does."""

  def changed(name, **changes):
    raw = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(raw | changes))

  def said(*overrides):
    notes = train.notes(prepared(f'model.path={folder}', *overrides))
    return [note for note in notes if 'end' in note]

  assert said() == []
  template = (folder / 'chat_template.jinja').read_text()
  (folder / 'chat_template.jinja').write_text(
    template.replace('eos_token', "'<|user|>\\n'")
  )
  assert said() == [
    "the chat template ends an assistant turn by '<|user|>', which ends no answer (that "
    "does '<|end|>'): a model that learned that template writes on to "
    'sampling.max_new_tokens'
  ]
  assert said('prompts.template={prompt}') == []
  changed('generation_config.json', eos_token_id=[2, 4])  # '<|user|>': now it does
  assert said() == []
  (folder / 'generation_config.json').write_text('{}')
  changed('tokenizer_config.json', eos_token=None)
  assert said("sampling.stop_strings=('x',)") == [
    'the model has no end-of-text id, neither in its tokenizer nor in '
    'generation_config.json: answers end only at sampling.max_new_tokens or a stop string'
  ]


def test_a_solution_that_would_end_before_its_end_is_refused(tmp_path):
  """Issue 13, 1: a warm start would learn to go on after the end of its turn."""
  file = tmp_path / 'd.jsonl'
  lines = [dict(prompt=p, answer=1, solution='a') for p in 'abcdefgh']
  lines[3]['solution'] = '1<|end|>2'
  file.write_text('\n'.join(map(json.dumps, lines)))
  refused(
    "prompt 'sums/3': its solution holds '<|end|>', expected text that ends only at",
    f"prompts.datasets={{'sums': {{'source': '{file}'}}}}",
    *TEACHER,
  )


@pytest.mark.parametrize(
  'key, text, said',
  [
    (
      'optimizer.learning_rate',
      '1e-6 # x',
      '1e-6 # x: expected a value without a comm',
    ),
    ('seed', '1 #', 'expected a value without a comment'),
    (
      'lora.targets',
      'q,v',
      """expected tuple; write --config.lora.targets="('q', 'v')\"""",
    ),
    ('lora.targets', 'q,', """write --config.lora.targets="('q',)\""""),
    ('prompts.system', '42', 'write --config.prompts.system="\'42\'"'),
    ('prompts.system', '1e3', 'write --config.prompts.system="\'TEXT\'"'),
    ('loss', "{'kl': 'k1', 'kl': 'k2'}", 'expected each key once'),
    ('prompts.system', "'a' 'b'", 'expected a comma between two texts'),
    ('prompts.datasets.sums', 'None', "dataset 'sums': None, expected a block"),
    ('optimizer.final_fraction', '5', 'final_fraction=5.0; expected'),
    (
      'log.wandb',
      'True',
      'write --config.log.wandb.KEY=VALUE, or --config.log.wandb={}',
    ),
    ('steps', '1e3', 'write --config.steps=1000'),
    ('steps', '1.5', 'config.steps: 1.5, expected int'),
    ('optimizer.learning_rate', 'nan', "'nan', expected float"),
    ('optimizer.learning_rate', '1e999', 'inf, expected a finite number'),
    ('grading.memory_gib', '0.1', '0.1, expected at least 0.25'),
    ('loss.clip_low', '1', '1.0 and 0.28, expected 0 to less than 1'),
    ('loss.clip_low', '1.5', 'expected 0 to less than 1'),
  ],
)
def test_a_refused_override_says_how_to_write_it(key, text, said):
  with pytest.raises(ValueError) as error:
    config.prepare(config.read(SMOKE, [(key, text)]))
  assert said in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize('text', ['none', 'None', 'null', 'NULL', ' None '])
def test_nothing_has_several_spellings(text):
  assert config.read(SMOKE, [('evaluate', text)])['evaluate'] is None


def test_a_hash_within_quotes_is_text_and_how_a_value_is_written_is_taken():
  given = [('prompts.system', "'#1'"), ('lora.targets', "('q', 'v')")]
  c = config.read(SMOKE, given)
  assert c['prompts']['system'] == '#1' and c['lora']['targets'] == ('q', 'v')
  assert config.read(SMOKE, [('prompts.system', 'no # 1')])['prompts']['system'] == (
    'no # 1'
  )


def test_an_override_given_twice_is_refused():
  with pytest.raises(ValueError, match='--config.seed: given twice, expected once'):
    train.overrides(['--config.seed=1', '--config.steps=2', '--config.seed=1'])
  with pytest.raises(
    ValueError, match='--config.sagc: expected before --config.sagc.t'
  ):
    train.overrides(['--config.sagc.tau=1.5', '--config.sagc={}'])
  assert config.read(SMOKE, [('sagc', '{}'), ('sagc.tau', '1.5')])['sagc']['tau'] == 1.5


def test_what_follows_a_key_without_a_value_is_no_value():
  with pytest.raises(ValueError, match='--config.prompts.system: expected a value'):
    train.overrides(['--config.prompts.system', '--config.steps=3'])
  assert train.overrides(['--config.seed', '-3']) == [('seed', '-3')]


def test_a_warm_up_longer_than_the_run_is_said():
  run = config.prepare(config.read(SMOKE, [('optimizer.warmup_steps', '6')]))
  assert any('warmup_steps: 6 of steps=6' in note for note in train.notes(run))
  run = config.prepare(config.read(SMOKE, [('optimizer.warmup_steps', '5')]))
  assert not any('warmup_steps' in note for note in train.notes(run))
