"""The export command: what a run's checkpoint holds is what transformers reads."""

import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys

from hf_files import change, edit
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file
import torch
import transformers

from jaxrl_sched import config, export, train
from jaxrl_sched.device import hf_tensors, model, weights

ROOT = pathlib.Path(__file__).parents[1]
SMOKE = str(ROOT / 'configs' / 'smoke.py')
TOKENS = np.random.default_rng(0).integers(0, 262, (2, 12))


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """Two steps on four devices, from a folder whose vocabulary has 262 rows."""
  workdir = tmp_path_factory.mktemp('run')
  run = ['--config.steps=2', '--config.evaluate=None', '--config.mesh.model=2']
  run.append('--config.mesh.fsdp=2')
  assert train.main([f'--config={SMOKE}', f'--workdir={workdir}', *run]) == 0
  return workdir


@pytest.fixture(scope='module')
def trained(workdir):
  """The model and the weights of step 2, as the engine has them."""
  run = config.prepare(config.of_workdir(None, workdir, []))
  engine = config.build_engine(run, workdir, read_only=True)
  try:
    engine.restore(2)
    return engine._learner.config, engine._learner.parameters
  finally:
    engine.close()


def run_export(workdir, out, *extra) -> int:
  return export.main([f'--workdir={workdir}', f'--out={out}', *extra])


def test_transformers_has_the_logits_that_were_trained(workdir, trained, tmp_path):
  """I5: logits equal to 1e-5; end ids, tokenizer and chat template are there."""
  out = tmp_path / 'out'
  assert run_export(workdir, out, '--step=2') == 0
  made = transformers.AutoModelForCausalLM.from_pretrained(out, dtype='auto')
  assert made.dtype == torch.float32
  with torch.no_grad():
    theirs = made(torch.tensor(TOKENS)).logits.numpy()
  ours = model.logits(trained[1], trained[0], TOKENS)
  np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-5)
  source = ROOT / 'configs' / 'quickstart_model'
  assert json.loads((out / 'config.json').read_text())['vocab_size'] == 262
  ids = [
    transformers.AutoTokenizer.from_pretrained(path).apply_chat_template(
      [{'role': 'user', 'content': 'Größe?'}], add_generation_prompt=True
    )['input_ids']
    for path in (source, out)
  ]
  assert ids[0] == ids[1]
  assert made.generation_config.eos_token_id is not None


def test_what_is_exported_was_trained_bit_for_bit(workdir, trained, tmp_path):
  """And what a run that starts from the export begins with."""
  out = tmp_path / 'out'
  assert run_export(workdir, out, '--max-shard-gb=0.001') == 0
  assert len(list(out.glob('*.safetensors'))) > 2
  read, again = weights.load(out)
  assert read == trained[0]
  before, ours = (hf_tensors.by_key(p) for p in (trained[1], again))
  source = weights.load(ROOT / 'configs' / 'quickstart_model')[1]
  assert before.keys() == ours.keys()
  for key, array in before.items():
    np.testing.assert_array_equal(array, ours[key], err_msg=key)
  assert not np.array_equal(source['embed'], again['embed'])


def test_half_is_the_rounded_whole(workdir, tmp_path):
  for dtype in ('float32', 'bfloat16'):
    assert run_export(workdir, tmp_path / dtype, f'--dtype={dtype}') == 0
  whole, half = (
    load_file(tmp_path / dtype / 'model.safetensors')
    for dtype in ('float32', 'bfloat16')
  )
  for name, array in whole.items():
    np.testing.assert_array_equal(array.astype('bfloat16'), half[name])


def test_only_a_cpu_and_the_workdir_are_needed(workdir, trained, tmp_path):
  """Not the four devices, nor the training data: here neither is there."""
  moved = shutil.copytree(workdir, tmp_path / 'moved')
  file = moved / 'config.json'
  text = file.read_text()
  assert 'jaxrl_sched.host.tasks:' in text
  file.write_text(text.replace('jaxrl_sched.host.tasks:', 'no_longer.there:'))
  program = f"""
import sys
import jax
jax.config.update('jax_num_cpu_devices', 1)
from jaxrl_sched import export
sys.exit(export.main(['--workdir={moved}', '--out={tmp_path / 'out'}']))
"""
  subprocess.run([sys.executable, '-c', program], cwd=ROOT, check=True)
  _, read = weights.load(tmp_path / 'out')
  np.testing.assert_array_equal(read['embed'], trained[1]['embed'])


def test_the_state_of_the_optimizer_is_not_loaded(workdir, monkeypatch):
  """Asked of orbax where it reads arrays: those of the model, and no more."""
  arrays, loaded = ocp.type_handlers.ArrayHandler, []
  deserialize = arrays.deserialize

  async def watched(self, infos, args=None):
    loaded.extend(info.name for info in infos)
    return await deserialize(self, infos, args)

  monkeypatch.setattr(arrays, 'deserialize', watched)
  c = config.of_workdir(None, workdir, [])
  _, parameters = export.checkpointed(c, workdir, 2)
  names = [f'parameters.{name}' for name in hf_tensors.by_key(parameters)]
  assert sorted(loaded) == sorted(names)
  saved = json.loads((workdir / 'checkpoints' / '2' / 'manifest.json').read_text())
  assert len(saved['manifest']['arrays']) > 3 * len(names)  # Adam's two moments, too


@pytest.mark.parametrize(
  'extra, words',
  [
    (['--step=1000'], 'checkpoints in .* are'),
    (['--step=all'], 'expected one step'),
    (['--max-shard-gb=0'], '--max-shard-gb=0.0: expected above 0'),
    (['--config.mode.path=x'], 'mode'),
    (['--config.model.path=nobody/has-this'], 'nobody/has-this: no such folder, and'),
  ],
)
def test_what_cannot_be_exported_ends_in_one_line(
  extra, words, workdir, tmp_path, capsys
):
  assert run_export(workdir, tmp_path / 'out', *extra) == 2
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and said.startswith('error: ')
  assert re.search(words, said)
  assert not (tmp_path / 'out').exists()


def test_a_folder_in_use_is_left_alone(workdir, tmp_path, capsys):
  (tmp_path / 'mine').touch()
  assert run_export(workdir, tmp_path) == 2
  assert f'--out={tmp_path}: exists, expected a new' in capsys.readouterr().err
  assert run_export(workdir, tmp_path / 'mine' / 'out') == 2
  assert capsys.readouterr().err.count('\n') == 1
  assert [p.name for p in tmp_path.iterdir()] == ['mine']


def test_a_full_disk_ends_in_one_line(workdir, tmp_path, capsys):
  """Here a limit on the size of a file; what was written is gone."""
  kept = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, kept[1]))
  try:
    assert run_export(workdir, tmp_path / 'out') == 2
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, kept)
  said = capsys.readouterr().err
  assert 'model.safetensors cannot be written' in said and said.count('\n') == 1
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(number, workdir, tmp_path, capsys, monkeypatch):
  """It comes after the first shard; one line, and the signals are as they were."""
  save, before = weights.save_file, signal.getsignal(number)

  def interrupted(*args, **kwargs):
    save(*args, **kwargs)
    os.kill(os.getpid(), number)

  monkeypatch.setattr(weights, 'save_file', interrupted)
  signals = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    assert run_export(workdir, tmp_path / 'out', '--max-shard-gb=0.001') == 1
  finally:
    signal.signal(signal.SIGINT, signals)
  out = capsys.readouterr()
  assert out.err == f'error: stopped, {tmp_path}/out is not written\n' and not out.out
  assert list(tmp_path.iterdir()) == []
  assert signal.getsignal(number) == before


def test_the_tokenizer_configured_is_exported_with_its_ids(tmp_path):
  """Not the one in the folder of the weights, which knows more: rows are as it has."""
  model_folder = shutil.copytree(
    ROOT / 'configs' / 'quickstart_model', tmp_path / 'model'
  )
  richer = transformers.AutoTokenizer.from_pretrained(model_folder)
  richer.add_tokens(['word'])
  richer.save_pretrained(model_folder)
  file = model_folder / 'model.safetensors'
  table = load_file(file)['model.embed_tokens.weight']
  change(file, **{'model.embed_tokens.weight': np.concatenate([table, table[:1]])})
  edit(model_folder, vocab_size=263)
  argv = [f'--config={SMOKE}', f'--workdir={tmp_path / "w"}', '--config.steps=1']
  argv += ['--config.evaluate=None', f'--config.model.path={model_folder}']
  assert train.main([*argv, '--config.model.tokenizer=bytes']) == 0
  assert run_export(tmp_path / 'w', tmp_path / 'out') == 0
  exported, _ = weights.load(tmp_path / 'out')
  assert (exported.known_tokens, exported.vocab_used) == (262, 263)
