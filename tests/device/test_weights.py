"""Folders that transformers wrote, read by us; ours, read by transformers."""

import itertools
import json
import pathlib
import shutil
import tracemalloc

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
import torch
import transformers

from jaxrl_sched.device import hf_config, hf_tensors, model, weights
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device.model import ModelConfig
from jaxrl_sched.device.tokenizers import build_byte_tokenizer

SMALL = dict(
  vocab_size=272,
  hidden_size=32,
  intermediate_size=40,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=64,
  rms_norm_eps=1e-5,
)
# The theta is not transformers' default: one that is not read would be seen.
ROPE = dict(rope_type='default', rope_theta=500.0)
KINDS = {
  'llama': ('Llama', dict(tie_word_embeddings=False)),
  'llama tied': ('Llama', dict(tie_word_embeddings=True, head_dim=12)),
  'mistral': ('Mistral', dict(sliding_window=None)),
  'qwen2': ('Qwen2', dict(tie_word_embeddings=False)),
  'qwen2 tied': ('Qwen2', dict(tie_word_embeddings=True)),
  'qwen3': ('Qwen3', dict(tie_word_embeddings=True, head_dim=16)),
}
TOKENS = np.random.default_rng(0).integers(0, 272, (2, 12))


def reference(kind: str, **changes) -> torch.nn.Module:
  """A model of transformers' with something in every norm and bias."""
  name, more = KINDS[kind]
  settings = SMALL | dict(rope_parameters=dict(ROPE)) | more | changes
  config = getattr(transformers, f'{name}Config')(**settings)
  torch.manual_seed(0)
  made = getattr(transformers, f'{name}ForCausalLM')(config).eval()
  with torch.no_grad():
    for name, tensor in made.named_parameters():
      noise = torch.randn(tensor.shape)
      if name.endswith('norm.weight'):
        tensor.copy_(1 + 0.3 * noise)
      elif name.endswith('bias'):
        tensor.copy_(0.5 + 0.3 * noise)
      else:
        tensor.copy_(noise * (0.5 if 'embed' in name or 'head' in name else 0.2))
  return made


def folder(where: pathlib.Path, kind: str = 'llama', **changes) -> pathlib.Path:
  where = where / 'model'
  reference(kind, **changes).save_pretrained(where)
  return where


def edit(where: pathlib.Path, **changes) -> None:
  """Changes config.json; a value of ... removes the key."""
  file = where / 'config.json'
  raw = json.loads(file.read_text()) | changes
  file.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


def their_logits(made: torch.nn.Module) -> np.ndarray:
  with torch.no_grad():
    return made(torch.tensor(TOKENS)).logits.float().numpy()


def flat(parameters: dict) -> dict[str, np.ndarray]:
  leaves = jax.tree_util.tree_flatten_with_path(parameters)[0]
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_identical(a: dict, b: dict) -> None:
  a, b = flat(a), flat(b)
  assert a.keys() == b.keys()
  for key in a:
    assert a[key].dtype == b[key].dtype == np.float32
    np.testing.assert_array_equal(a[key], b[key], err_msg=key)


# Reading.


@pytest.mark.parametrize('kind', KINDS)
def test_logits_are_those_of_transformers(kind, tmp_path):
  """I1 tied and untied, I2 head width of its own, I6 biases of about 0.5."""
  made = reference(kind)
  made.save_pretrained(tmp_path)
  config, parameters = weights.load(tmp_path)
  assert ('head' in parameters) == (not config.tied)
  expected = their_logits(made)
  assert expected.std() > 0.5
  ours = model.logits(parameters, config, TOKENS)
  np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize('kind', ['llama tied', 'qwen2', 'qwen3'])
def test_each_device_gets_its_part(kind, tmp_path):
  where = folder(tmp_path, kind)
  config, whole = weights.load(where)
  mesh = meshes.make_mesh(data=2, fsdp=2, model=2)
  _, spread = weights.load(where, mesh=mesh)
  assert_identical(whole, spread)
  shardings = meshes.parameter_shardings(*model.abstract(config), mesh)
  same = jax.tree.map(lambda x, s: x.sharding == s, spread, shardings)
  assert all(jax.tree.leaves(same))
  q = spread['blocks']['attn']['q']
  layers, d, n, h = q.shape
  assert {s.data.shape for s in q.addressable_shards} == {(layers, d // 2, n // 2, h)}


@pytest.mark.parametrize('key', ['attn.q', 'attn.o', 'attn.k_bias', 'mlp.down'])
def test_any_part_is_that_part_of_the_whole(key, tmp_path):
  """Whichever axes a mesh cuts, the head's width too."""
  where = folder(tmp_path, 'qwen2')
  stored = load_file(where / 'model.safetensors')
  whole = weights.load(where)[1]['blocks']
  for name in key.split('.'):
    whole = whole[name]
  read = hf_tensors.reader(f'blocks.{key}', whole.shape, stored)
  halves = [(slice(0, n // 2), slice(n // 2, None)) for n in whole.shape]
  for index in itertools.product(*halves):
    np.testing.assert_array_equal(read(index), np.asarray(whole)[index])


def test_shards_are_read_as_one_file_is(tmp_path):
  made = reference('qwen2')
  made.save_pretrained(tmp_path / 'one')
  made.save_pretrained(tmp_path / 'many', max_shard_size='30KB')
  assert len(list((tmp_path / 'many').glob('*.safetensors'))) > 2
  one, many = (weights.load(tmp_path / name) for name in ('one', 'many'))
  assert one[0] == many[0]
  assert_identical(one[1], many[1])


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_halves_become_floats_exactly(dtype, tmp_path):
  made = reference('qwen3').to(getattr(torch, dtype))
  made.save_pretrained(tmp_path / 'half')
  made.to(torch.float32).save_pretrained(tmp_path / 'whole')
  halves, floats = (weights.load(tmp_path / name)[1] for name in ('half', 'whole'))
  assert_identical(halves, floats)


def test_dtype_is_that_of_the_computation_only(tmp_path):
  where = folder(tmp_path)
  config, parameters = weights.load(where, dtype='bfloat16')
  assert config.dtype == 'bfloat16'
  assert_identical(parameters, weights.load(where)[1])
  with pytest.raises(ValueError, match="dtype: 'int8', expected one of float32"):
    weights.load(where, dtype='int8')


def test_no_second_copy_is_held(tmp_path):
  """A model of 40 MB is read with room for a parameter or two besides."""
  where = folder(
    tmp_path,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=12,
    dtype='bfloat16',
  )
  jax.block_until_ready(weights.load(where))  # what is imported and kept is kept now
  tracemalloc.start()
  _, parameters = weights.load(where)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  sizes = sorted(x.nbytes for x in jax.tree.leaves(parameters))
  assert sum(sizes) > 30e6
  assert peak < sum(sizes) + 2 * sizes[-1]


@pytest.mark.parametrize(
  'spelling',
  [
    dict(rope_theta=500.0, rope_parameters=..., rope_scaling=None),  # transformers 4
    dict(rope_theta=500, rope_parameters=..., rope_scaling={'type': 'default'}),
    dict(rope_parameters=dict(ROPE)),  # transformers 5
    dict(rope_parameters=dict(ROPE), rope_theta=7.0),  # the newer one counts
    dict(rope_parameters={'rope_type': 'default'}, rope_theta=500.0),
  ],
)
def test_both_spellings_of_rope_are_read(spelling, tmp_path):
  """I3: no scaling asked for is the plain table; as transformers reads each."""
  where = folder(tmp_path)
  edit(where, **spelling)
  theirs = transformers.AutoConfig.from_pretrained(where)
  assert theirs.rope_parameters['rope_theta'] == 500.0
  assert weights.load(where)[0].rope_theta == 500.0


def test_what_the_file_leaves_out_is_as_in_transformers(tmp_path):
  where = folder(tmp_path, num_key_value_heads=4)
  edit(
    where, num_key_value_heads=..., head_dim=None, rope_parameters=..., model_type=...
  )
  edit(where, tie_word_embeddings=..., architectures=['LlamaForCausalLM'])
  config, _ = weights.load(where)
  assert (config.kv_heads, config.head_dim, config.rope_theta) == (4, 8, 10_000.0)
  assert not config.tied


@pytest.mark.parametrize(
  'shape, expected',
  [
    (dict(hidden_size=1024, num_attention_heads=16), [(1024, 16, 128), (1024, 8, 128)]),
    (dict(hidden_size=2560, num_attention_heads=32), [(2560, 32, 128), (2560, 8, 128)]),
  ],
)
def test_head_width_is_the_one_stated(shape, expected, tmp_path):
  """I2: Qwen3-0.6B (q [2048, 1024], k [1024, 1024]) and 4B (q [4096, 2560])."""
  where = folder(
    tmp_path,
    'qwen3',
    vocab_size=8,
    num_hidden_layers=1,
    num_key_value_heads=8,
    head_dim=128,
    **shape,
  )
  config, parameters = weights.load(where)
  attn = jax.tree.map(lambda x: x.shape[1:], parameters['blocks']['attn'])
  assert [attn['q'], attn['k']] == expected
  assert attn['o'] == (expected[0][1], 128, expected[0][0])
  assert attn['q_norm']['scale'] == attn['k_norm']['scale'] == (128,)
  out = tmp_path / 'out'
  weights.export(config, parameters, out)
  with safe_open(out / 'model.safetensors', framework='numpy') as file:
    q = file.get_slice('model.layers.0.self_attn.q_proj.weight').get_shape()
  assert q == [expected[0][1] * 128, expected[0][0]]


@pytest.mark.parametrize('kind', ['qwen2', 'qwen3'])
def test_a_window_switched_off_is_not_applied(kind, tmp_path):
  """I4: window 4, flag false, 12 tokens: full attention, also at position 11."""
  made = reference(kind, use_sliding_window=False, sliding_window=4)
  made.save_pretrained(tmp_path)
  edit(tmp_path, use_sliding_window=False, sliding_window=4, layer_types=...)
  config, parameters = weights.load(tmp_path)
  ours = model.logits(parameters, config, TOKENS)
  np.testing.assert_allclose(ours, their_logits(made), rtol=0, atol=1e-4)
  # On, but from a layer on that there is not.
  edit(tmp_path, use_sliding_window=True, max_window_layers=2)
  assert weights.load(tmp_path)[0] == config


@pytest.mark.parametrize('with_file', [True, False])
def test_known_tokens_are_those_of_the_tokenizer(with_file, tmp_path):
  """C6: the embedding has 272 rows, the tokenizer 262 ids."""
  where = folder(tmp_path)
  if with_file:
    build_byte_tokenizer(where)
  config, _ = weights.load(where)
  assert config.known_tokens == (262 if with_file else 272)


def test_a_tokenizer_larger_than_the_embedding_is_clipped(tmp_path):
  where = folder(tmp_path, vocab_size=200)
  build_byte_tokenizer(where)
  assert weights.load(where)[0].known_tokens == 200


# What is refused.


@pytest.mark.parametrize(
  'kind, changes, words',
  [
    ('llama', dict(architectures=['GemmaForCausalLM']), ['architectures', 'Gemma']),
    ('llama', dict(architectures=['Qwen2MoeForCausalLM']), ['Qwen2MoeForCausalLM']),
    (
      'llama',
      dict(architectures=['LlamaForSequenceClassification']),
      ['architectures', 'Sequence'],
    ),
    ('llama', dict(architectures=..., model_type='gpt2'), ['model_type', 'gpt2']),
    ('llama', dict(model_type='qwen2'), ['model_type', 'qwen2', 'llama']),
    ('llama', dict(hidden_act='gelu'), ['hidden_act', 'gelu', 'silu']),
    ('llama', dict(attention_bias=True), ['attention_bias', 'True']),
    ('qwen3', dict(attention_bias=True), ['attention_bias', 'True']),
    ('llama', dict(mlp_bias=True), ['mlp_bias', 'True']),
    ('llama', dict(num_local_experts=8), ['num_local_experts', '8']),
    ('llama', dict(partial_rotary_factor=0.5), ['partial_rotary_factor', '0.5']),
    (
      'llama',
      dict(rope_scaling={'rope_type': 'yarn', 'factor': 4.0}),
      ['rope_scaling', 'yarn', '4.0'],
    ),
    ('llama', dict(rope_scaling={'type': 'linear', 'factor': 2}), ['rope', 'linear']),
    (
      'llama',
      dict(rope_parameters={'rope_type': 'llama3', 'rope_theta': 5e5, 'factor': 8}),
      ['rope_parameters', 'llama3', '8'],
    ),
    ('llama', dict(rope_scaling={'rope_type': 'unheard-of'}), ['unheard-of']),
    (
      'qwen2',
      dict(rope_parameters={'full_attention': {'rope_type': 'default'}}),
      ['full_attention'],
    ),
    (
      'qwen2',
      dict(
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        layer_types=...,
      ),
      ['use_sliding_window', 'True', 'window of 4', 'layers 1 to 1'],
    ),
    (
      'qwen3',
      dict(layer_types=['full_attention', 'sliding_attention']),
      ['layer_types', 'sliding_attention'],
    ),
    ('mistral', dict(sliding_window=4096), ['sliding_window', '4096']),
    ('mistral', dict(sliding_window=...), ['sliding_window', '4096']),
    ('llama', dict(quantization_config={'bits': 4}), ['quantization_config', '4']),
    ('llama', dict(auto_map={'AutoModel': 'x.Y'}), ['auto_map', 'x.Y']),
    ('qwen2', dict(is_causal=False), ['is_causal', 'False']),
    ('llama', dict(hidden_size='32'), ['hidden_size', "'32'", 'whole number']),
    ('llama', dict(num_hidden_layers=...), ['num_hidden_layers', 'None']),
    ('llama', dict(tie_word_embeddings='false'), ['tie_word_embeddings', "'false'"]),
    ('llama', dict(rms_norm_eps=0), ['rms_norm_eps', '0']),
    ('llama', dict(rope_parameters={'rope_theta': -1}), ['rope_theta', '-1']),
  ],
)
def test_a_setting_that_is_not_implemented_is_refused(kind, changes, words, tmp_path):
  """I3, I4: not ignored. The line names key and value."""
  where = folder(tmp_path, kind)
  edit(where, **changes)
  with pytest.raises(ValueError) as error:
    weights.load(where)
  assert '\n' not in str(error.value)
  assert all(word in str(error.value) for word in words), error.value


def change(file: pathlib.Path, **tensors) -> None:
  """Rewrites a safetensors file; a value of None removes the tensor."""
  stored = load_file(file) | tensors
  kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
  save_file(kept, file, metadata={'format': 'pt'})


def refusal(where: pathlib.Path) -> str:
  with pytest.raises(ValueError) as error:
    weights.load(where)
  assert '\n' not in str(error.value)
  return str(error.value)


def test_tensors_missing_and_left_over_are_both_listed(tmp_path):
  """I6: every tensor consumed and every parameter filled, else an error with both."""
  where = folder(tmp_path, 'qwen2')
  bias = 'model.layers.1.self_attn.q_proj.bias'
  odd = {'model.layers.1.self_attn.o_proj.bias': np.zeros(32, np.float32), bias: None}
  change(where / 'model.safetensors', **odd)
  said = refusal(where)
  assert f'missing: {bias};' in said
  assert 'not used: model.layers.1.self_attn.o_proj.bias' in said


def test_biases_of_a_llama_are_not_skipped(tmp_path):
  """I6: zero is plausible enough to go unseen."""
  where = folder(tmp_path, 'qwen2')
  edit(where, architectures=['LlamaForCausalLM'], model_type='llama')
  assert 'not used: model.layers.0.self_attn.k_proj.bias' in refusal(where)


def test_a_head_is_not_made_up(tmp_path):
  """I1: untied without a head is an error, not a random head."""
  where = folder(tmp_path, 'qwen2 tied')
  edit(where, tie_word_embeddings=False)
  assert 'missing: lm_head.weight' in refusal(where)


def test_a_head_in_the_file_of_a_tied_model_is_the_embedding(tmp_path):
  """I1. Some writers store it twice; if it differs, which one counts is open."""
  where = folder(tmp_path, 'qwen2 tied')
  expected = weights.load(where)[1]
  file = where / 'model.safetensors'
  embed = load_file(file)['model.embed_tokens.weight']
  change(file, **{'lm_head.weight': embed})
  assert_identical(weights.load(where)[1], expected)
  change(file, **{'lm_head.weight': embed + 1})
  said = refusal(where)
  assert 'lm_head.weight' in said and 'tie_word_embeddings' in said


def test_tables_that_follow_from_the_config_may_be_there(tmp_path):
  """Old Llama files hold the rotary frequencies."""
  where = folder(tmp_path)
  name = 'model.layers.0.self_attn.rotary_emb.inv_freq'
  change(where / 'model.safetensors', **{name: np.ones(4, np.float32)})
  weights.load(where)


def test_a_tensor_of_another_shape_or_kind_is_named(tmp_path):
  where = folder(tmp_path)
  name, file = 'model.layers.1.mlp.up_proj.weight', where / 'model.safetensors'
  change(file, **{name: np.zeros((32, 40), np.float32)})
  assert f'{name} is [32, 40], expected [40, 32]' in refusal(where)
  change(file, **{name: np.zeros((40, 32), np.int8)})
  assert f'{name} is stored as I8, expected one of F32' in refusal(where)


@pytest.fixture(scope='module')
def in_shards(tmp_path_factory):
  where = tmp_path_factory.mktemp('weights') / 'model'
  reference('llama').save_pretrained(where, max_shard_size='40KB')
  return where


def test_a_shard_missing_extra_or_torn_is_named(in_shards, tmp_path):
  """I5."""
  where = shutil.copytree(in_shards, tmp_path / 'model')
  shards = sorted(where.glob('*.safetensors'))
  second, whole = shards[1], shards[1].read_bytes()
  second.unlink()
  assert f'no {second.name}, which the index' in refusal(where)
  second.write_bytes(whole[:-100])
  assert str(second) in refusal(where) and 'not a whole' in refusal(where)
  second.write_bytes(whole)
  other = where / 'model-00009-of-00009.safetensors'
  other.write_bytes(whole)
  assert f'{other.name} not in the index' in refusal(where)
  other.rename(where / 'model.safetensors')
  assert 'both model.safetensors and model.safetensors.index.json' in refusal(where)


def test_tensors_are_where_the_index_says(in_shards, tmp_path):
  """I5: an index copied from another cutting."""
  where = shutil.copytree(in_shards, tmp_path / 'model')
  file = where / 'model.safetensors.index.json'
  index = json.loads(file.read_text())
  name = 'model.layers.1.mlp.up_proj.weight'
  kept = index['weight_map'].pop(name)
  file.write_text(json.dumps(index))
  said = refusal(where)
  assert (
    kept in said and f'not in the index model.safetensors.index.json: {name}' in said
  )
  elsewhere = min(index['weight_map'].values())
  assert elsewhere != kept
  index['weight_map'][name] = elsewhere
  file.write_text(json.dumps(index))
  said = refusal(where)
  assert elsewhere in said and f'missing: {name}' in said
  for content in ('{', '[]', '{"weight_map": {}}'):
    file.write_text(content)
    assert str(file) in refusal(where)


def test_a_folder_that_is_none_is_said(tmp_path):
  assert 'no such folder' in refusal(tmp_path / 'absent')
  assert f'{tmp_path / "config.json"}: no such file' in refusal(tmp_path)
  where = folder(tmp_path)
  (where / 'model.safetensors').unlink()
  assert 'no model.safetensors or model.safetensors.index.json' in refusal(where)
  (where / 'config.json').write_text('{"a": ')
  assert 'config.json: not JSON' in refusal(where)


def test_a_hub_id_that_is_not_to_be_had_is_said():
  assert 'nobody/has-this: no such folder, and not to be had' in refusal(
    'nobody/has-this'
  )


# Writing.


@pytest.mark.parametrize('kind', KINDS)
def test_import_export_import_is_bit_identical(kind, tmp_path):
  config, parameters = weights.load(folder(tmp_path, kind))
  weights.export(config, parameters, tmp_path / 'out')
  again, same = weights.load(tmp_path / 'out')
  assert again == config
  assert_identical(parameters, same)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('shards', [1, 3])
def test_transformers_reads_what_was_trained(kind, shards, tmp_path):
  """I5: import, an update, export in 1 and in 3 shards, read by the reference."""
  config, parameters = weights.load(folder(tmp_path, kind))
  rng = np.random.default_rng(1)
  updated = jax.tree.map(
    lambda w: w + 0.05 * rng.standard_normal(w.shape).astype(np.float32), parameters
  )
  total = 4 * sum(x.size for x in jax.tree.leaves(updated))
  out = tmp_path / 'out'
  room = total if shards == 1 else int(total * 0.43)
  weights.export(config, updated, out, max_shard_bytes=room)
  files = sorted(file.name for file in out.glob('*.safetensors'))
  assert len(files) == shards
  if shards > 1:
    index = json.loads((out / 'model.safetensors.index.json').read_text())
    assert sorted(set(index['weight_map'].values())) == files
    assert index['metadata']['total_size'] == total
    assert_identical(weights.load(out)[1], updated)
  else:
    assert not (out / 'model.safetensors.index.json').exists()

  made, report = transformers.AutoModelForCausalLM.from_pretrained(
    out, dtype='auto', output_loading_info=True
  )
  assert not any(report.values()), report
  assert made.dtype == torch.float32
  ours = model.logits(updated, config, TOKENS)
  np.testing.assert_allclose(ours, their_logits(made.eval()), rtol=0, atol=1e-4)


def test_the_config_written_is_the_one_read(tmp_path):
  """Every key that transformers gave a value in its own file has it in ours, too."""
  for kind in ('llama', 'qwen2 tied', 'qwen3'):
    where = folder(tmp_path / kind, kind)
    weights.export(*weights.load(where), where / 'out')
    theirs, ours = (
      transformers.AutoConfig.from_pretrained(path).to_dict()
      for path in (where, where / 'out')
    )
    told = {'bos_token_id', 'eos_token_id', 'pad_token_id', '_name_or_path'}
    odd = {
      key: (theirs[key], ours.get(key))
      for key in theirs.keys() - told
      if theirs[key] != ours.get(key)
    }
    # Without a use while the window is off.
    assert odd.keys() <= {'sliding_window', 'max_window_layers'}, odd


@pytest.mark.parametrize('stored', ['bfloat16', 'float16'])
def test_halves_are_stored_as_said(stored, tmp_path):
  """I5: the config's dtype is true."""
  config, parameters = weights.load(folder(tmp_path, 'qwen2'))
  out = tmp_path / 'out'
  weights.export(config, parameters, out, stored_dtype=stored)
  made = transformers.AutoModelForCausalLM.from_pretrained(out, dtype='auto')
  assert made.dtype == getattr(torch, stored)
  rounded = jax.tree.map(
    lambda w: np.asarray(w).astype(stored).astype(np.float32), parameters
  )
  assert_identical(weights.load(out)[1], rounded)


def test_a_sharded_model_is_written_as_a_whole_one(tmp_path):
  where = folder(tmp_path, 'qwen3')
  config, whole = weights.load(where)
  mesh = meshes.make_mesh(fsdp=4, model=2)
  weights.export(config, weights.load(where, mesh=mesh)[1], tmp_path / 'out')
  assert_identical(weights.load(tmp_path / 'out')[1], whole)


def test_tokenizer_and_all_end_ids_are_written(tmp_path):
  """I5: end ids of the tokenizer (2) and of the source (7), and the chat template."""
  where = folder(tmp_path)
  tokenizer = build_byte_tokenizer(where)
  (where / 'generation_config.json').write_text(
    json.dumps({'eos_token_id': [7, 2], 'temperature': 0.6, 'do_sample': True})
  )
  out = tmp_path / 'out'
  weights.export(
    *weights.load(where),
    out,
    tokenizer=tokenizer,
    generation_config=weights.generation_config(where),
  )
  made = transformers.AutoModelForCausalLM.from_pretrained(out)
  assert made.generation_config.eos_token_id == [2, 7]
  assert made.generation_config.temperature == 0.6
  assert made.config.eos_token_id == [2, 7]
  assert (made.config.bos_token_id, made.config.pad_token_id) == (1, 0)
  again = transformers.AutoTokenizer.from_pretrained(out)
  messages = [{'role': 'user', 'content': 'naïve 🙂'}]
  ids = [
    t.apply_chat_template(messages, add_generation_prompt=True)['input_ids']
    for t in (again, tokenizer)
  ]
  assert ids[0] == ids[1]
  assert weights.generation_config(out)['eos_token_id'] == [2, 7]
  assert weights.load(out)[0].known_tokens == 262


def test_end_ids_are_not_made_up(tmp_path):
  """Transformers takes 2 for a Llama's end unless told that there is none."""
  where = folder(tmp_path)
  weights.export(*weights.load(where), tmp_path / 'out')
  assert weights.generation_config(tmp_path / 'out') is None
  made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out')
  assert made.generation_config.eos_token_id is None
  assert made.config.eos_token_id is None


def small() -> tuple[ModelConfig, dict]:
  raw = SMALL | dict(architectures=['LlamaForCausalLM'], tie_word_embeddings=True)
  config = hf_config.read(raw, known_tokens=None, dtype='float32')
  return config, model.init(config, 0)


def test_nothing_is_overwritten(tmp_path):
  config, parameters = small()
  out = tmp_path / 'out'
  out.mkdir()
  weights.export(config, parameters, out)  # an empty folder is fine
  before = sorted(file.name for file in out.iterdir())
  with pytest.raises(ValueError, match='out exists, expected a new or empty folder'):
    weights.export(config, parameters, out)
  assert sorted(file.name for file in out.iterdir()) == before
  assert [path.name for path in tmp_path.iterdir()] == ['out']


def test_nothing_is_written_by_halves(tmp_path):
  """The last tensor is at fault: what was written before it is gone."""
  config, parameters = small()
  parameters['blocks']['mlp']['down'] = (
    parameters['blocks']['mlp']['down'].at[1, 3, 3].set(1e6)
  )
  name = 'model.layers.1.mlp.down_proj.weight'
  with pytest.raises(ValueError, match=f'{name} is not finite in float16'):
    weights.export(
      config,
      parameters,
      tmp_path / 'out',
      stored_dtype='float16',
      max_shard_bytes=9_000,
    )
  assert list(tmp_path.iterdir()) == []
  weights.export(config, parameters, tmp_path / 'out')  # 1e6 is fine in float32
  mode = (tmp_path / 'out').stat().st_mode & 0o777
  (tmp_path / 'plain').mkdir()
  assert mode == (tmp_path / 'plain').stat().st_mode & 0o777
  modes = {file.stat().st_mode & 0o777 for file in (tmp_path / 'out').iterdir()}
  assert len(modes) == 1


def test_parameters_of_another_model_are_refused(tmp_path):
  config, parameters = small()
  cases = [
    (parameters | {'head': parameters['embed'].T}, 'head: .*expected None'),
    ({k: v for k, v in parameters.items() if k != 'embed'}, 'embed: None, expected'),
    (
      parameters | {'embed': parameters['embed'][1:]},
      'embed: .271, 32., expected .272',
    ),
  ]
  for odd, words in cases:
    with pytest.raises(ValueError, match=words):
      weights.export(config, odd, tmp_path / 'out')
  with pytest.raises(ValueError, match="stored_dtype: 'int8'"):
    weights.export(config, parameters, tmp_path / 'out', stored_dtype='int8')
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  'changes, words',
  [
    (dict(qkv_bias=True, qk_norm=True), 'no architecture has both'),
    (dict(d_model=30), 'd_model=30, heads=4'),
  ],
)
def test_a_model_that_transformers_has_not_is_refused(changes, words, tmp_path):
  settings = dict(
    vocab_size=8,
    known_tokens=8,
    d_model=32,
    d_ff=8,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=8,
  )
  config = ModelConfig(**(settings | changes))
  with pytest.raises(ValueError, match=words):
    weights.export(config, model.init(config, 0), tmp_path / 'out')
  assert list(tmp_path.iterdir()) == []
