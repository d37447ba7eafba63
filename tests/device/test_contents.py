"""A resumed run has the contents it began with, wherever the files lie now."""

import json
import pathlib
import shutil
import warnings

import pytest
from toys import lines

from jaxrl_sched import config, train
from jaxrl_sched.device import contents

ROOT = pathlib.Path(__file__).parents[2]
A, B, C = b'a', b'b', b'c'


def described(*records: bytes) -> dict:
  digest = contents.Digest()
  for record in records:
    digest.add(record)
  return digest.described()


def of(prompts: dict, held_out: dict | None = None, **model) -> dict:
  return dict(prompts=prompts, held_out=held_out or {}, model=model)


@pytest.mark.parametrize(
  'now, said',
  [
    ([A, C, B], "'d' has the same 3 prompts in another order"),
    ([A, B], "'d' has 2 prompts, 3 when the run began"),
    ([A, B, B], "'d' has 3 prompts as when the run began, of which some have another"),
  ],
)
def test_other_data_is_refused_with_how_it_differs(now, said):
  before = of({'d': described(A, B, C), 'e': described(A)})
  contents.check(before, of({'d': described(A, B, C), 'e': described(A)}), 'x')
  with pytest.raises(ValueError, match=f'Checkpoint x began with .*: dataset {said}'):
    contents.check(before, of({'d': described(*now), 'e': described(A)}), 'x')


def test_a_record_is_the_same_in_each_process():
  one = {'b': {'x', 'y', 'z'}, 'a': object(), 'c': [1, 0.5, None]}
  other = {'c': [1, 0.5, None], 'a': object(), 'b': {'z', 'y', 'x'}}
  assert contents.canonical(one) == contents.canonical(other)
  assert contents.canonical(one) != contents.canonical(one | {'c': [1, 0.25, None]})


def test_another_tokenizer_or_reference_is_refused_by_name():
  before = of({}, tokenizer='1', reference='2')
  contents.check(before, of({}, tokenizer='1', reference='2'), 'x')
  with pytest.raises(ValueError, match="the model's reference is another"):
    contents.check(before, of({}, tokenizer='1', reference='3'), 'x')


def test_other_held_out_data_is_said():
  before, now = (of({}, {'h': described(x)}) for x in (A, B))
  with pytest.warns(UserWarning, match='scores before and after are of different'):
    contents.check(before, now, 'x')
  with warnings.catch_warnings(action='error'):
    contents.check(before, of({}, {'other': described(B)}), 'x')  # one more, or less


def test_a_moved_run_resumes_by_its_workdir_and_changed_data_does_not(tmp_path, capsys):
  """Reversed, a file without ids has other prompts under the same ids."""
  old, new, workdir = tmp_path / 'old', tmp_path / 'new', tmp_path / 'run'
  shutil.copytree(ROOT / 'configs' / 'quickstart_model', old / 'model')
  records = [
    dict(prompt=f'sum a{i % 9 + 1}b{i // 9 + 1}', answer=i % 9 + 1 + i // 9 + 1)
    for i in range(40)
  ]
  (old / 'd.jsonl').write_text('\n'.join(map(json.dumps, records)))
  (old / 'c.py').write_text(
    f'import sys; sys.path.insert(0, {str(ROOT / "configs")!r})\n'
    'import smoke\n'
    'def get_config():\n'
    '  c = smoke.get_config()\n'
    "  c.prompts.datasets = dict(d=dict(source='d.jsonl'))\n"
    '  c.evaluate, c.log = None, dict(tensorboard=False)\n'
    "  c.model.path = 'model'\n"
    '  return c\n'
  )

  def run(steps, *arguments):
    steps = f'--config.steps={steps}'
    code = train.main([f'--workdir={workdir}', steps, *arguments])
    return code, capsys.readouterr().err

  here = [f'--config.prompts.datasets.d.source={old}/d.jsonl']
  here += [f'--config.model.path={old}/model']
  code, err = run(1, f'--config={old}/c.py', *here)
  assert code == 0, err
  shutil.move(old, new)
  there = [f'--config.prompts.datasets.d.source={new}/d.jsonl']
  there += [f'--config.model.path={new}/model/']
  code, err = run(2, *there)
  assert code == 0, err
  assert [line['step'] for line in lines(workdir)] == [0, 1, 2]
  reversed_ = '\n'.join(map(json.dumps, records[::-1]))
  (new / 'd.jsonl').write_text(reversed_)
  code, err = run(3, *there)
  assert code == 2 and len(err.splitlines()) == 1
  assert "dataset 'd' has the same 40 prompts in another order" in err
  assert [line['step'] for line in lines(workdir)] == [0, 1, 2]


def test_a_workdir_alone_has_to_be_of_a_run(tmp_path, capsys):
  assert train.main([f'--workdir={tmp_path}']) == 2
  assert 'no config.json there; name one by --config' in capsys.readouterr().err


def test_a_resumed_run_may_be_given_a_new_table_of_difficulty(tmp_path, capsys):
  workdir, table = tmp_path / 'run', tmp_path / 'rates.jsonl'
  argv = [
    f'--config={ROOT}/configs/smoke.py',
    f'--workdir={workdir}',
    '--config.steps=2',
    '--config.checkpoint.every=1',
    '--config.checkpoint.keep=3',
    '--config.evaluate=None',
    '--config.log.tensorboard=False',
  ]
  run = config.prepare(config.read(f'{ROOT}/configs/smoke.py'))
  ids = list(dict(run.prompts.ids())['sums'])

  def trained(hard):
    rates = [dict(id=key, pass_rate=0.5 * (key not in hard)) for key in ids]
    table.write_text('\n'.join(map(json.dumps, rates)))
    assert train.main([*argv, f'--config.tiers.table={table}']) == 0
    return capsys.readouterr().out

  assert 'another tier' not in trained(ids[:3])
  shutil.rmtree(workdir / 'checkpoints' / '2')
  said = trained(ids[1:8])
  count = len({ids[0], *ids[3:8]})
  assert f'tiers: {count} of {len(ids)} prompts of sums are in another tier' in said
  metrics = lines(workdir)
  assert [line['step'] for line in metrics] == [0, 1, 2]
