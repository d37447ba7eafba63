"""Folders that transformers wrote, read by us; ours, read by transformers."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import tracemalloc

from hf_configs import LLAMA_32, sized, written
from hf_files import change, edit
import jax
import numpy as np
import processes
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
import torch
from torch_models import build
import transformers

from jaxrl_sched.device import hf_config, hf_tensors, model, weights
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device.model import ModelConfig
from jaxrl_sched.device.sampler import Sampler
from jaxrl_sched.device.tokenizers import build_byte_tokenizer, stop_ids
from jaxrl_sched.types import Prompt, Request, Sampling

ROOT = pathlib.Path(__file__).parents[2]
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
  name, more = KINDS[kind]
  return build(name, **SMALL | dict(rope_parameters=dict(ROPE)) | more | changes)


def folder(
  where: pathlib.Path, kind: str = 'llama', *, stored: str = 'float32', **changes
) -> pathlib.Path:
  where = where / 'model'
  reference(kind, **changes).to(getattr(torch, stored)).save_pretrained(where)
  return where


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
  config, parameters = weights.load(where)
  tensor = next(
    t for t in hf_tensors.tensors(config) if (t.key, t.layer) == (f'blocks.{key}', 1)
  )
  whole = hf_tensors.by_key(parameters)[tensor.key][1]
  read = hf_tensors.reader(tensor, whole.shape, stored[tensor.name])
  halves = [(slice(0, n // 2), slice(n // 2, None)) for n in whole.shape]
  for index in itertools.product(*halves):
    np.testing.assert_array_equal(read(index), np.asarray(whole)[index])


class Counting:
  """A stored tensor that counts the numbers read from it."""

  def __init__(self, tensor):
    self.tensor, self.read = tensor, 0

  def __getitem__(self, index):
    part = self.tensor[index]
    self.read += part.size
    return part


@pytest.mark.parametrize(
  'sizes, processes, share',
  [
    (dict(data=2, fsdp=2, model=2), 1, 1),  # both copies from one reading
    (dict(data=2, fsdp=2, model=2), 2, 1),  # a copy each
    (dict(fsdp=2, model=2), 2, 1 / 2),
    (dict(fsdp=4, model=2), 4, 1 / 4),
    (dict(fsdp=2, model=4), 2, 1 / 2),
  ],
)
def test_a_process_reads_what_its_devices_hold(sizes, processes, share, tmp_path):
  """Fsdp cuts every matrix and norm, and the devices of a process lie along it."""
  where = folder(tmp_path, 'llama', num_attention_heads=8, num_key_value_heads=4)
  stored = load_file(where / 'model.safetensors')
  mesh, config = meshes.make_mesh(**sizes), weights.describe(where)
  shapes, axes = model.abstract(config)
  at = hf_tensors.by_key(meshes.parameter_shardings(shapes, axes, mesh))
  shapes = hf_tensors.by_key(shapes)
  for devices in np.split(mesh.devices.ravel(), processes):
    for tensor in hf_tensors.tensors(config):
      inner = int(tensor.layer is not None)  # the axes after L
      shape, counting = shapes[tensor.key].shape, Counting(stored[tensor.name])
      read = hf_tensors.reader(tensor, shape[inner:], counting)
      indices = at[tensor.key].devices_indices_map(shape)
      for device in devices:
        read(indices[device][inner:])
      assert counting.read == share * stored[tensor.name].size, tensor


TWO_PROCESSES = """
import numpy as np
from jaxrl_sched.device import hf_folder, mesh, weights

read = []

class Counting:
  def __init__(self, slices):
    self.get_shape, self.get_dtype = slices.get_shape, slices.get_dtype
    self.slices = slices

  def __getitem__(self, index):
    part = self.slices[index]
    read.append(part.size)
    return part

opened = hf_folder.open_tensors
hf_folder.open_tensors = lambda *args: {
  name: hf_folder.Stored(Counting(slices), file)
  for name, (slices, file) in opened(*args).items()
}
_, parameters = weights.load(given, mesh=mesh.make_mesh(fsdp=4))
numbers = sum(read)
read.clear()
_, whole = weights.load(given)
right = [
  np.array_equal(shard.data, np.asarray(all_of_it)[shard.index])
  for part, all_of_it in zip(*map(jax.tree.leaves, (parameters, whole)))
  for shard in part.addressable_shards
]
print(json.dumps([numbers / sum(read), len(right), all(right)]), flush=True)
"""


def test_two_processes_read_half_each(tmp_path):
  where = folder(tmp_path, 'llama')
  seen = processes.both(TWO_PROCESSES, where)
  assert seen == [[0.5, 2 * 12, True]] * 2


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


def test_a_file_may_mix_dtypes(tmp_path):
  where = folder(tmp_path, 'qwen2', stored='bfloat16')
  expected = weights.load(where)[1]
  file = where / 'model.safetensors'
  stored = load_file(file)
  kinds = itertools.cycle(['float32', 'bfloat16', 'float16'])
  mixed = {
    name: x.astype(kind) for (name, x), kind in zip(stored.items(), kinds, strict=False)
  }
  exact = {name: np.array_equal(x, mixed[name]) for name, x in stored.items()}
  # What float16 does not hold stays as it was.
  save_file({n: x if exact[n] else stored[n] for n, x in mixed.items()}, file)
  kept = load_file(file).values()
  assert len({x.dtype.name for x in kept}) == 3
  assert_identical(weights.load(where)[1], expected)


def test_dtype_is_that_of_the_computation_only(tmp_path):
  where = folder(tmp_path)
  config, parameters = weights.load(where, dtype='bfloat16')
  assert config.dtype == 'bfloat16'
  assert_identical(parameters, weights.load(where)[1])
  for refused in ('int8', 'float16'):
    with pytest.raises(ValueError, match=f"dtype: '{refused}', expected float32 or bf"):
      weights.load(where, dtype=refused)


def test_no_second_copy_is_held(tmp_path):
  """Beside the weights, which XLA holds, there is room for a few of 111 tensors.

  numpy's memory is what is counted here, and a copy of the model would lie there. A
  tensor is there stored, as float32, and until XLA lets go of it.
  """
  where = folder(
    tmp_path,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=12,
    stored='bfloat16',
  )
  jax.block_until_ready(weights.load(where))  # what is imported and kept is kept now
  tracemalloc.start()
  config, parameters = weights.load(where)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  largest = 4 * max(math.prod(t.shape) for t in hf_tensors.tensors(config))
  assert sum(x.nbytes for x in jax.tree.leaves(parameters)) > 50 * largest
  assert peak < 6 * largest


@pytest.mark.slow
def test_the_memory_of_a_process_shows_no_second_copy(tmp_path):
  """As the kernel counts it, on one device and on eight."""
  script = ROOT / 'tests' / 'bench' / 'loading.py'
  argv = [sys.executable, str(script), str(tmp_path), '--gigabytes=0.2']
  run = subprocess.run(
    argv, cwd=ROOT, capture_output=True, text=True, env=os.environ | {'PYTHONPATH': '.'}
  )
  assert run.returncode == 0, run.stdout + run.stderr[-2000:]
  assert run.stdout.count('| 222 |') == 2


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


# The padding of the vocabulary.


def test_a_vocabulary_is_padded_so_that_a_mesh_can_cut_it(tmp_path):
  """300 rows -> 384. Known ids have the logits of before; the others are never drawn."""
  made = reference('qwen2', vocab_size=300)
  made.save_pretrained(tmp_path / 'model')
  config, whole = weights.load(tmp_path / 'model')
  assert (config.vocab_size, config.vocab_used, config.known_tokens) == (384, 300, 300)
  mesh = meshes.make_mesh(model=2, fsdp=4)
  _, parameters = weights.load(tmp_path / 'model', mesh=mesh)
  assert_identical(parameters, whole)
  for key in ('embed', 'head'):
    assert parameters[key].addressable_shards[0].data.shape == (192, 32 // 4)
    rows = np.asarray(parameters[key])
    assert rows.shape == (384, 32) and not rows[300:].any() and rows[299].any()
  ours = model.logits(parameters, config, TOKENS)
  np.testing.assert_allclose(ours, their_logits(made), rtol=0, atol=1e-4)
  hidden = np.ones((1, 32), np.float32)
  drawn_from = model.head_logits(hidden, parameters['head'], config)
  assert (np.asarray(drawn_from)[:, 300:] == model.NEVER).all()


@pytest.mark.parametrize('kind', ['qwen2', 'qwen2 tied'])
def test_padding_has_no_gradient_and_is_not_written(kind, tmp_path):
  where = folder(tmp_path, kind, vocab_size=300)
  config, parameters = weights.load(where)

  def likelihood(parameters):
    logits = model.logits(parameters, config, TOKENS)
    return jax.nn.log_softmax(logits)[:, :-1].mean() + logits.mean()

  gradient = jax.grad(likelihood)(parameters)
  for key in {'embed', 'head'} & gradient.keys():
    rows = np.asarray(gradient[key])
    assert rows.shape == (384, 32) and not rows[300:].any() and rows[:300].any()

  out = tmp_path / 'out'
  weights.export(config, parameters, out)
  for path in (where, out):
    assert json.loads((path / 'config.json').read_text())['vocab_size'] == 300
  same_files(where, out)
  made = transformers.AutoModelForCausalLM.from_pretrained(out)
  ours = model.logits(parameters, config, TOKENS)
  np.testing.assert_allclose(ours, their_logits(made), rtol=0, atol=1e-5)


def test_padding_is_alike_on_all_meshes_that_a_power_of_two_cuts(tmp_path):
  """So that a checkpoint of one is read on another."""
  where = folder(tmp_path, vocab_size=300)
  sizes = [weights.describe(where, vocab_parts=2**n).vocab_size for n in range(9)]
  assert sizes == [384] * 8 + [512]  # the last: 256 parts
  assert weights.describe(where, vocab_parts=9).vocab_size == 1152


@pytest.mark.parametrize('rows', [32_000, 32_768, 49_152, 128_256, 151_936, 152_064])
def test_the_usual_vocabularies_are_not_padded(rows, tmp_path):
  """Llama 2, Mistral 0.3, SmolLM2, Llama 3, Qwen2.5 and Qwen3: small, and large."""
  raw = SMALL | dict(vocab_size=rows, architectures=['LlamaForCausalLM'])
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  config = weights.describe(tmp_path, vocab_parts=16)
  assert (config.vocab_size, config.vocab_padding) == (rows, 0)


def test_a_prompt_with_ids_of_the_padding_is_refused(tmp_path):
  """The tokenizer knows more than the model: before and with padding."""
  config, parameters = weights.load(folder(tmp_path, vocab_size=200))
  sampler = Sampler(
    parameters, config, slots=1, cache_length=8, chunk=2, prefill_rows=1, seed=0
  )
  prompt = Prompt(
    id='a/0', dataset='a', index=0, tokens=np.array([3, 200], np.int32), text=''
  )
  request = Request(draw=0, prompt=prompt, size=1, sampling=Sampling(max_new_tokens=2))
  with pytest.raises(ValueError, match='ids from 3 to 200, expected 0 to 199'):
    sampler.generate([request])


# What is refused.


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


# Writing.


def same_files(a: pathlib.Path, b: pathlib.Path) -> None:
  """Every tensor stored, bit for bit: -0.0 is not 0.0 here."""
  a, b = (load_file(where / 'model.safetensors') for where in (a, b))
  assert a.keys() == b.keys()
  for name in a:
    assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
    assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_import_export_import_is_bit_identical(kind, dtype, tmp_path):
  """In the dtype of the source; zeros with a sign and the tiniest numbers too."""
  where = folder(tmp_path, kind, stored=dtype)
  file = where / 'model.safetensors'
  up = load_file(file)['model.layers.1.mlp.up_proj.weight']
  tiny = jax.numpy.finfo(dtype).smallest_subnormal
  up.ravel()[:4] = [-0.0, tiny, -tiny, 0.0]
  change(file, **{'model.layers.1.mlp.up_proj.weight': up})
  config, parameters = weights.load(where)
  weights.export(config, parameters, tmp_path / 'out', stored_dtype=dtype)
  same_files(where, tmp_path / 'out')
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
  updated['embed'] = updated['embed'].at[config.vocab_used :].set(0)
  if not config.tied:
    updated['head'] = updated['head'].at[config.vocab_used :].set(0)
  total = 4 * sum(x.size for x in jax.tree.leaves(updated))
  total -= 4 * SMALL['hidden_size'] * config.vocab_padding * (1 if config.tied else 2)
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


def test_no_second_copy_is_made(tmp_path):
  """A model of 40 MB is written with room for a shard of 8 MB and a tensor or two."""
  config, _ = small()
  config = dataclasses.replace(config, d_model=256, d_ff=704, layers=16)
  mesh = meshes.make_mesh(fsdp=4, model=2)
  shapes, axes = model.abstract(config)
  at = meshes.parameter_shardings(shapes, axes, mesh)
  ones = jax.tree.map(lambda s: np.ones(s.shape, np.float32), shapes)
  parameters = jax.device_put(ones, at)
  assert sum(x.nbytes for x in jax.tree.leaves(parameters)) > 30e6
  tracemalloc.start()
  weights.export(config, parameters, tmp_path / 'out', max_shard_bytes=8_000_000)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 8e6 + 2 * 4 * 256 * 704 + 1e6


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


def test_all_end_ids_of_llama_3_end_an_answer_and_are_exported(tmp_path):
  """I5: three ids in generation_config.json, one more in the tokenizer."""
  config = dataclasses.replace(
    sized(500_000.0, 4, LLAMA_32), vocab_size=128_256, known_tokens=128_256
  )
  source, out = tmp_path / 'source', tmp_path / 'out'
  tokenizer = build_byte_tokenizer(source)
  ends = [128001, 128008, 128009]
  (source / 'config.json').write_text(json.dumps(written(config)))
  (source / 'generation_config.json').write_text(json.dumps({'eos_token_id': ends}))
  generation = weights.generation_config(source)
  every = [tokenizer.eos_token_id, *ends]
  assert stop_ids(tokenizer, generation) == tuple(every)
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), model.abstract(config)[0])
  weights.export(
    config,
    zeros,
    out,
    tokenizer=tokenizer,
    generation_config=generation,
  )
  assert stop_ids(tokenizer, weights.generation_config(out)) == tuple(every)
  made = transformers.GenerationConfig.from_pretrained(out)
  assert made.eos_token_id == every
  assert transformers.AutoConfig.from_pretrained(out).eos_token_id == every


def test_without_a_generation_config_the_ids_of_the_config_end_answers(tmp_path):
  """As in transformers: files of fine-tuned models often lack the first."""
  where = folder(tmp_path, eos_token_id=[7, 9], pad_token_id=0)
  (where / 'generation_config.json').unlink(missing_ok=True)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(where).generation_config
  assert theirs.eos_token_id == [7, 9]
  found = weights.generation_config(where)
  assert found['eos_token_id'] == [7, 9] and found['pad_token_id'] == 0


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
    (parameters | {'head': parameters['embed']}, 'head: .*expected None'),
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
