"""Folders that are not as they should be: one line, naming the file and the tensor."""

import json
import pathlib
import shutil
import time

from hf_files import change
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_sched.device import hf_folder, model, weights
from jaxrl_sched.device.model import ModelConfig

ONE, INDEX = hf_folder.ONE, hf_folder.INDEX
LFS = 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4976698672\n'


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """One model in one file, and in shards."""
  config = ModelConfig(
    vocab_size=40,
    known_tokens=40,
    d_model=16,
    d_ff=24,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    tied=False,
  )
  parameters = model.init(config, 0)
  out = tmp_path_factory.mktemp('written')
  weights.export(config, parameters, out / 'one')
  weights.export(config, parameters, out / 'shards', max_shard_bytes=6_000)
  assert len(list((out / 'shards').glob('*.safetensors'))) > 3
  return out


@pytest.fixture
def one(written, tmp_path):
  return shutil.copytree(written / 'one', tmp_path / 'one')


@pytest.fixture
def shards(written, tmp_path):
  return shutil.copytree(written / 'shards', tmp_path / 'shards')


def refusal(where: pathlib.Path | str) -> str:
  with pytest.raises(ValueError) as error:
    weights.load(where)
  said = str(error.value)
  assert '\n' not in said and len(said) < 900
  return said


def reindex(where: pathlib.Path, **entries) -> None:
  """Changes the index; a value of None removes the tensor."""
  index = json.loads((where / INDEX).read_text())
  index['weight_map'] |= entries
  kept = {k: v for k, v in index['weight_map'].items() if v is not None}
  (where / INDEX).write_text(json.dumps(index | {'weight_map': kept}))


# What is no model in safetensors.


def test_a_folder_that_is_none_is_said(tmp_path, one):
  assert 'no such folder' in refusal(tmp_path / 'absent')
  assert f'{ONE}: a file, expected the folder' in refusal(one / ONE)
  (tmp_path / 'empty').mkdir()
  said = refusal(tmp_path / 'empty')
  assert said == f'{tmp_path / "empty" / "config.json"}: no such file'
  (one / ONE).unlink()
  assert refusal(one) == f'{one}: no {ONE} or {INDEX}'


@pytest.mark.parametrize('name', ['', 'a\nb', 'a/b\n', '\0'])
def test_a_name_that_is_none_is_one_line(name):
  """'' is not the folder one happens to be in."""
  assert refusal(name) == (
    f'model: {name!r}, expected a folder or a hub id (owner/name)'
  )


def test_a_hub_id_that_is_not_to_be_had_is_said_at_once():
  began = time.perf_counter()
  for get in (weights.load, weights.generation_config):
    with pytest.raises(ValueError, match='nobody/has-this: no such folder, and not to'):
      get('nobody/has-this')
  assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
  'name',
  [
    'pytorch_model.bin',
    'model.fp16.gguf',
    'model.fp16.safetensors',
    'flax_model.msgpack',
  ],
)
def test_weights_of_another_format_are_named(name, one):
  (one / ONE).rename(one / name)
  other = ', expected safetensors' * (not name.endswith('safetensors'))
  assert refusal(one) == f'{one}: no {ONE} or {INDEX}; there is {name}{other}'
  (one / 'config.json').unlink()
  assert f'config.json: no such file; there is {name}' in refusal(one)


def test_an_adapter_is_not_taken_for_a_model(one):
  """Even beside whole weights: transformers would load its base and add it."""
  (one / 'adapter_config.json').write_text('{}')
  assert 'adapter_config.json, an adapter of PEFT; expected a whole' in refusal(one)


def test_a_folder_is_not_taken_for_a_file(one):
  for name, said in (
    ('generation_config.json', ': a folder, expected a file'),
    ('config.json', ': a folder, expected a file'),
  ):
    (one / name).unlink(missing_ok=True)
    (one / name).mkdir()
    with pytest.raises(ValueError) as error:
      weights.generation_config(one)
    assert str(error.value) == f'{one / name}{said}'
  (one / 'config.json').rmdir()
  (one / ONE).unlink()
  (one / ONE).mkdir()
  assert refusal(one) == f'{one / "config.json"}: no such file'


@pytest.mark.parametrize('name', [ONE, 'config.json'])
def test_a_pointer_of_git_lfs_is_not_the_file(name, one):
  (one / name).write_text(LFS)
  assert refusal(one) == (
    f'{one / name}: a pointer of Git LFS, expected the file: git lfs pull'
  )


@pytest.mark.parametrize('left', [0, 7, 300, -4])
def test_a_file_cut_short_is_named(left, one):
  whole = (one / ONE).read_bytes()
  (one / ONE).write_bytes(whole[:left])
  assert refusal(one).startswith(f'{one / ONE}: not a whole safetensors file: ')


@pytest.mark.parametrize(
  'text', ['', '{"a": ', '[]', '{"vocab_size": 40, "vocab_size": 41}', b'\xff\xfe']
)
def test_a_config_that_is_not_an_object_is_named(text, one):
  (one / 'config.json').write_bytes(text if isinstance(text, bytes) else text.encode())
  assert refusal(one).startswith(f'{one / "config.json"}: ')


# Tensors.


def test_a_tensor_of_another_shape_or_kind_is_named_with_its_file(one):
  name, file = 'model.layers.1.mlp.up_proj.weight', one / ONE
  change(file, **{name: np.zeros((16, 24), np.float32)})
  assert refusal(one) == f'{file}: {name} is [16, 24], expected [24, 16]'
  for kind in ('int8', 'int64', 'float64', 'bool'):
    change(file, **{name: np.zeros((24, 16), kind)})
    said = refusal(one)
    assert f'{file}: {name} is stored as ' in said and 'one of F32, BF16, F16' in said


@pytest.mark.parametrize('kind', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize('odd', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
  'name', ['lm_head.weight', 'model.layers.1.mlp.up_proj.weight']
)
def test_weights_that_are_not_finite_are_named(name, odd, kind, one):
  tensor = load_file(one / ONE)[name]
  tensor[7, -1] = odd
  change(one / ONE, **{name: tensor.astype(kind)})
  assert refusal(one) == f'{one / ONE}: {name} is not finite: it has NaN or inf'
  tensor[7, -1] = 6e4  # the largest of float16, almost
  change(one / ONE, **{name: tensor.astype(kind)})
  weights.load(one)


def test_headers_are_looked_at_without_reading_what_is_behind_them(one):
  """So before a device is touched: a value that is not finite is not seen."""
  norm = 'model.norm.weight'
  change(one / ONE, **{norm: np.full(16, np.nan, np.float32)})
  weights.check(one, weights.describe(one))
  change(one / ONE, **{norm: np.zeros(15, np.float32)})
  with pytest.raises(ValueError, match=r'model.norm.weight is \[15\], expected \[16\]'):
    weights.check(one, weights.describe(one))


@pytest.mark.parametrize('file', ['generation_config.json', 'config.json'])
@pytest.mark.parametrize(
  'ends', ['x', [2, '3'], {'a': 1}, 2.5, [[2]], True, 40, -1, [2, None]]
)
def test_end_ids_that_are_none_are_named(ends, file, one):
  raw = json.loads((one / 'config.json').read_text()) if file == 'config.json' else {}
  (one / file).write_text(json.dumps(raw | {'eos_token_id': ends}))
  with pytest.raises(ValueError) as error:
    weights.generation_config(one)
  assert str(error.value) == (
    f'{one / file}: eos_token_id: {ends!r}, expected an id from 0 to 39, or a list of '
    'them'
  )


@pytest.mark.parametrize('ends', [0, 39, [39, 0], [], None])
def test_end_ids_of_the_model_are_taken(ends, one):
  file = one / 'generation_config.json'
  file.write_text(json.dumps({'eos_token_id': ends}))
  assert weights.generation_config(one)['eos_token_id'] == ends


def test_many_missing_tensors_are_counted(one):
  """A config with more layers than the file has: 9 tensors each."""
  raw = json.loads((one / 'config.json').read_text())
  (one / 'config.json').write_text(json.dumps(raw | {'num_hidden_layers': 80}))
  said = refusal(one)
  first = 'model.layers.10.input_layernorm.weight'
  assert f'tensors missing: {first}, ' in said
  assert f'and {78 * 9 - 8} more; tensors not used: none' in said


@pytest.mark.parametrize('prefix', ['', 'base_model.model.model.'])
def test_other_names_are_refused_with_a_list(prefix, one):
  """Of a model without its head, and of a wrapper."""
  stored = load_file(one / ONE)
  renamed = {prefix + name.removeprefix('model.'): x for name, x in stored.items()}
  save_file(renamed, one / ONE)
  said = refusal(one)
  assert f'not used: {prefix}embed_tokens.weight, {prefix}layers.0.input' in said
  assert 'missing: ' in said and 'model.embed_tokens.weight, ' in said


# Shards.


def test_a_shard_missing_extra_or_torn_is_named(shards):
  """I5."""
  second = sorted(shards.glob('*.safetensors'))[1]
  whole = second.read_bytes()
  second.unlink()
  assert f'no {second.name}, which the index' in refusal(shards)
  second.write_bytes(whole[:-100])
  assert f'{second}: not a whole safetensors file' in refusal(shards)
  second.write_text(LFS)
  assert f'{second}: a pointer of Git LFS' in refusal(shards)
  second.write_bytes(whole)
  other = shards / 'model-00009-of-00009.safetensors'
  other.write_bytes(whole)
  assert f'{other.name} not in the index' in refusal(shards)
  other.rename(shards / ONE)
  assert f'both {ONE} and {INDEX}' in refusal(shards)


def test_shards_without_an_index_are_not_passed_over(shards, one):
  (shards / INDEX).unlink()
  first = min(shards.glob('*.safetensors'))
  said = refusal(shards)
  assert f'no {ONE} or {INDEX}; there is {first.name}, ' in said
  shutil.copy(first, one / 'model-1.safetensors')
  assert refusal(one) == f'{one}: model-1.safetensors not read beside {ONE}'


def test_tensors_are_where_the_index_says(shards):
  """I5: an index copied from another cutting."""
  name = 'model.layers.1.mlp.up_proj.weight'
  kept = json.loads((shards / INDEX).read_text())['weight_map'][name]
  reindex(shards, **{name: None})
  assert f'{shards / kept}: tensors missing: none; tensors not in' in refusal(shards)
  assert f'the index {INDEX}: {name}' in refusal(shards)
  elsewhere = min(file.name for file in shards.glob('*.safetensors'))
  assert elsewhere != kept
  reindex(shards, **{name: elsewhere})
  assert f'{shards / elsewhere}: tensors missing: {name}' in refusal(shards)
  # In both files, listed for one.
  tensor = load_file(shards / kept)[name]
  change(shards / elsewhere, **{name: tensor})
  assert f'{shards / kept}: tensors missing: none; tensors not' in refusal(shards)


def test_a_tensor_listed_twice_is_named(shards):
  text = (shards / INDEX).read_text()
  line = '"lm_head.weight": "model-00001-of-00010.safetensors",'
  (shards / INDEX).write_text(
    text.replace('"weight_map": {', f'"weight_map": {{{line}')
  )
  assert refusal(shards) == f'{shards / INDEX}: not JSON: lm_head.weight given twice'


@pytest.mark.parametrize(
  'name',
  ['../x.safetensors', '/etc/x.safetensors', 'a/b.safetensors', '..', '', 7, 'x.bin'],
)
def test_an_index_does_not_lead_out_of_the_folder(name, shards):
  reindex(shards, **{'lm_head.weight': name})
  said = refusal(shards)
  assert f'{INDEX}: weight_map: lm_head.weight: {name!r}, expected a' in said


@pytest.mark.parametrize('text', ['{', '[]', '{}', '{"weight_map": {}}'])
def test_an_index_that_is_none_is_named(text, shards):
  (shards / INDEX).write_text(text)
  assert refusal(shards).startswith(f'{shards / INDEX}: ')


def test_what_else_an_index_says_does_not_matter(shards, written):
  index = json.loads((shards / INDEX).read_text())
  (shards / INDEX).write_text(json.dumps(index | {'metadata': {'total_size': -1}}))
  _, parameters = weights.load(shards)
  expected = weights.load(written / 'one')[1]
  np.testing.assert_array_equal(parameters['head'], expected['head'])
