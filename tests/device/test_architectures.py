"""Each architecture and each rope scaling against transformers, and what is refused."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_models import build
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxrl_sched.device import hf_config, model, prompts, rope, weights
from jaxrl_sched.device.model import ModelConfig
from jaxrl_sched.device.tokenizers import build_byte_tokenizer

SMALL = dict(
  vocab_size=97,
  intermediate_size=40,
  num_hidden_layers=2,
  num_attention_heads=6,
  num_key_value_heads=2,
  max_position_embeddings=64,
  rms_norm_eps=1e-5,
)
NINE = dict(num_attention_heads=9, num_key_value_heads=3)
PLAIN = dict(rope_type='default', rope_theta=500.0)
LINEAR = dict(rope_type='linear', rope_theta=500.0, factor=4.0)
LLAMA3 = dict(
  rope_type='llama3',
  rope_theta=500.0,
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=16,
)
# With the usual 32 and 1 turns a context of 16 has no frequency that is kept.
YARN = dict(
  rope_type='yarn',
  rope_theta=500.0,
  factor=4.0,
  original_max_position_embeddings=16,
  beta_fast=2.0,
  beta_slow=0.25,
)
DEEPSEEK = YARN | dict(mscale=1.0, mscale_all_dim=0.7)
OWN_FACTOR = YARN | dict(attention_factor=1.3, truncate=False)
KINDS = {
  'llama 2': ('Llama', NINE | dict(hidden_size=54), PLAIN),
  'llama 3.1': ('Llama', dict(hidden_size=48, head_dim=16), LLAMA3),
  'llama 3.2': ('Llama', NINE | dict(hidden_size=72, head_dim=16, tie=True), LLAMA3),
  'smollm2': ('Llama', NINE | dict(hidden_size=36, head_dim=4, tie=True), PLAIN),
  'mistral': (
    'Mistral',
    dict(hidden_size=40, head_dim=16, sliding_window=None),
    LINEAR,
  ),
  'qwen2': ('Qwen2', NINE | dict(hidden_size=40, head_dim=16), DEEPSEEK),
  'qwen2.5': ('Qwen2', dict(hidden_size=84, num_attention_heads=14, tie=True), YARN),
  'qwen3': ('Qwen3', NINE | dict(hidden_size=40, head_dim=16, tie=True), YARN),
  'qwen3 untied': ('Qwen3', dict(hidden_size=40, head_dim=10), OWN_FACTOR),
}
LENGTHS = 9, 23, 61  # the context before scaling is 16


def sequences() -> list[np.ndarray]:
  rng = np.random.default_rng(0)
  return [rng.integers(0, 97, n) for n in LENGTHS]


@pytest.fixture(scope='module')
def theirs(tmp_path_factory):
  """A kind's model by transformers, its folder, and its logits of each sequence."""
  made = {}

  def get(kind: str):
    if kind not in made:
      name, sizes, settings = KINDS[kind]
      sizes = dict(sizes)
      tied = sizes.pop('tie', False)
      more = dict(rope_parameters=dict(settings), tie_word_embeddings=tied)
      reference = build(name, **SMALL | sizes | more)
      where = tmp_path_factory.mktemp('theirs') / 'model'
      reference.save_pretrained(where)
      made[kind] = reference, where, their_logits(reference)
    return made[kind]

  return get


def their_logits(reference: torch.nn.Module) -> list[np.ndarray]:
  with torch.no_grad():
    return [reference(torch.tensor(s)[None]).logits[0].numpy() for s in sequences()]


def assert_close(a, b, atol: float) -> None:
  np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol)


# Logits.


@pytest.mark.parametrize('kind', KINDS)
def test_logits_are_those_of_transformers_alone_and_packed(kind, theirs):
  """I1 tied and untied, I2 head width of its own, I3 scaling, I6 biases of about 0.5.

  Three rows padded on the right, and a fourth that holds all three sequences.
  """
  reference, where, expected = theirs(kind)
  config, parameters = weights.load(where)
  assert ('head' in parameters) == (not config.tied)
  tokens, segments = np.full((2, 4, 96), 5)
  segments[:] = 0
  for i, s in enumerate(sequences()):
    tokens[i, : len(s)], segments[i, : len(s)] = s, 1
  tokens[3, : sum(LENGTHS)] = np.concatenate(sequences())
  segments[3, : sum(LENGTHS)] = np.repeat([1, 2, 3], LENGTHS)
  ours = model.logits(parameters, config, tokens, segments=segments)
  assert np.concatenate(expected).std() > 0.5  # or nothing is compared
  for i, logits in enumerate(expected):
    assert_close(ours[i, : LENGTHS[i]], logits, atol=1e-4)
  assert_close(ours[3, : sum(LENGTHS)], np.concatenate(expected), atol=1e-4)


@pytest.mark.parametrize('kind', ['llama 3.2', 'mistral', 'qwen2', 'qwen3 untied'])
def test_transformers_reads_what_is_exported(kind, theirs, tmp_path):
  """The model is the same function, with its scaling, its sizes and its biases."""
  _, where, expected = theirs(kind)
  config, parameters = weights.load(where)
  weights.export(config, parameters, tmp_path / 'out')
  assert weights.load(tmp_path / 'out')[0] == config
  made, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'out', output_loading_info=True
  )
  assert not any(report.values()), report
  for a, b in zip(their_logits(made.eval()), expected, strict=True):
    assert_close(a, b, atol=1e-5)


# Frequencies.

LLAMA_32 = rope.Llama3(
  factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)
YARN_4 = rope.Yarn(
  factor=4.0,
  original_max_positions=32768,
  attention_factor=rope.yarn_attention_factor(4.0),
)
TABLES = {
  'plain': (10_000.0, 128, None),
  'linear': (10_000.0, 128, rope.Linear(factor=2.5)),
  'Llama-3.2': (500_000.0, 64, LLAMA_32),
  'Llama-3.1': (500_000.0, 128, dataclasses.replace(LLAMA_32, factor=8.0)),
  'Qwen2.5': (1_000_000.0, 128, YARN_4),
  'exact ramp': (1_000_000.0, 128, dataclasses.replace(YARN_4, truncate=False)),
  # Its ramp ends past the last frequency.
  'long ramp': (
    10_000.0,
    64,
    dataclasses.replace(YARN_4, original_max_positions=131_072),
  ),
  'steep ramp': (
    10_000.0,
    64,
    dataclasses.replace(YARN_4, beta_slow=16.0, beta_fast=16.0, truncate=False),
  ),
}


def sized(theta: float, head_dim: int, scaling: rope.Scaling | None) -> ModelConfig:
  return ModelConfig(
    vocab_size=8,
    known_tokens=8,
    d_model=4 * head_dim,
    d_ff=8,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=head_dim,
    rope_theta=theta,
    rope_scaling=scaling,
    max_positions=131_072,
  )


def written(config: ModelConfig) -> dict:
  raw = hf_config.write(config, stored_dtype='float32', special_ids={})
  return json.loads(json.dumps(raw))


def their_table(raw: dict) -> tuple[np.ndarray, float]:
  config = transformers.LlamaConfig.from_dict(raw)
  kind = config.rope_parameters['rope_type']
  if kind == 'default':
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    frequency, factor = rotary.compute_default_rope_parameters(config)
  else:
    frequency, factor = ROPE_INIT_FUNCTIONS[kind](config)
  return frequency.numpy(), factor


@pytest.mark.parametrize('name', TABLES)
@pytest.mark.parametrize('spelling', ['both', 'rope_scaling', 'rope_parameters'])
def test_frequencies_are_those_of_transformers(name, spelling):
  """I3: at the settings of public models, through each spelling that we write."""
  config = sized(*TABLES[name])
  raw = written(config)
  if spelling == 'rope_scaling':  # all that transformers 4 looks at
    del raw['rope_parameters']
  elif spelling == 'rope_parameters':
    del raw['rope_scaling'], raw['rope_theta']
  expected, factor = their_table(raw)
  ours, our_factor = rope.frequencies(*TABLES[name])
  assert ours.dtype == np.float32
  np.testing.assert_allclose(ours, expected, rtol=3e-7)
  assert our_factor == pytest.approx(factor, rel=1e-12)
  assert hf_config.read(raw, known_tokens=None, dtype='float32') == config


@pytest.mark.parametrize('name', TABLES)
def test_cos_and_sin_are_those_of_transformers_far_out(name):
  """At position 131,071 an angle moves 0.008 with the last bit of its frequency."""
  config = sized(*TABLES[name])
  positions = np.array([[0, 1, 16, 4095, 131_071]])
  rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
  made = rotary(transformers.LlamaConfig.from_dict(written(config)))
  expected = made(torch.zeros(1), torch.tensor(positions))
  half = config.head_dim // 2
  for ours, table in zip(
    model.rotation(jnp.asarray(positions), config), expected, strict=True
  ):
    assert_close(ours[:, :4], table[:, :4, :half], atol=1e-3)
    assert_close(ours[:, 4], table[:, 4, :half], atol=0.02)


def test_llama3_keeps_fast_frequencies_and_divides_slow_ones():
  """More than 4 turns in 8,192 positions: kept; less than 1: divided by 32."""
  plain, _ = rope.frequencies(500_000.0, 64, None)
  scaled, factor = rope.frequencies(500_000.0, 64, LLAMA_32)
  turns = 8192 * plain.astype(float) / (2 * math.pi)
  fast, slow = turns > 4.01, turns < 0.99
  np.testing.assert_array_equal(scaled[fast], plain[fast])
  np.testing.assert_array_equal(scaled[slow], plain[slow] / np.float32(32))
  between = ~fast & ~slow
  assert fast.any() and slow.any() and between.any()
  assert (scaled < plain)[between].all() and (scaled > plain / 32)[between].all()
  assert factor == 1.0


@pytest.mark.parametrize(
  'factor, expected', [(2.0, 1.0693147), (4.0, 1.1386294), (8.0, 1.2079442), (1.0, 1.0)]
)
def test_yarn_sharpens_by_a_tenth_of_the_logarithm(factor, expected):
  """I3: 0.1 ln f + 1, unless the file says otherwise; on cos and sin alike."""
  settings = {'type': 'yarn', 'factor': factor}
  config = read('qwen2', rope_scaling=settings)
  assert config.rope_scaling.attention_factor == pytest.approx(expected, abs=5e-8)
  cos, sin = model.rotation(jnp.array([5]), config)
  assert_close(jnp.hypot(cos, sin), np.full((1, 32), expected), atol=1e-6)
  told = read('qwen2', rope_scaling=settings | {'attention_factor': 0.7})
  assert told.rope_scaling.attention_factor == 0.7


@pytest.mark.parametrize(
  'scaling', [{'factor': 2.0}, rope.Linear, 'linear'], ids=['dict', 'class', 'name']
)
def test_a_scaling_that_is_none_is_refused(scaling):
  with pytest.raises(ValueError, match='model.rope_scaling: .*expected one of'):
    sized(500.0, 8, scaling)


# config.json of public models.

LLAMA_1B = dict(
  architectures=['LlamaForCausalLM'],
  attention_bias=False,
  attention_dropout=0.0,
  bos_token_id=128000,
  eos_token_id=[128001, 128008, 128009],
  head_dim=64,
  hidden_act='silu',
  hidden_size=2048,
  initializer_range=0.02,
  intermediate_size=8192,
  max_position_embeddings=131072,
  mlp_bias=False,
  model_type='llama',
  num_attention_heads=32,
  num_hidden_layers=16,
  num_key_value_heads=8,
  pretraining_tp=1,
  rms_norm_eps=1e-05,
  rope_scaling=dict(
    factor=32.0,
    high_freq_factor=4.0,
    low_freq_factor=1.0,
    original_max_position_embeddings=8192,
    rope_type='llama3',
  ),
  rope_theta=500000.0,
  tie_word_embeddings=True,
  torch_dtype='bfloat16',
  transformers_version='4.45.0.dev0',
  use_cache=True,
  vocab_size=128256,
)
LLAMA_2_7B = dict(
  _name_or_path='meta-llama/Llama-2-7b-hf',
  architectures=['LlamaForCausalLM'],
  bos_token_id=1,
  eos_token_id=2,
  hidden_act='silu',
  hidden_size=4096,
  initializer_range=0.02,
  intermediate_size=11008,
  max_position_embeddings=4096,
  model_type='llama',
  num_attention_heads=32,
  num_hidden_layers=32,
  num_key_value_heads=32,
  pretraining_tp=1,
  rms_norm_eps=1e-05,
  rope_scaling=None,
  tie_word_embeddings=False,
  torch_dtype='float16',
  transformers_version='4.31.0.dev0',
  use_cache=True,
  vocab_size=32000,
)
SMOLLM2_135M = dict(
  architectures=['LlamaForCausalLM'],
  attention_bias=False,
  attention_dropout=0.0,
  bos_token_id=1,
  eos_token_id=2,
  hidden_act='silu',
  hidden_size=576,
  initializer_range=0.041666666666666664,
  intermediate_size=1536,
  is_llama_config=True,
  max_position_embeddings=8192,
  mlp_bias=False,
  model_type='llama',
  num_attention_heads=9,
  num_hidden_layers=30,
  num_key_value_heads=3,
  pad_token_id=2,
  pretraining_tp=1,
  rms_norm_eps=1e-05,
  rope_interleaved=False,
  rope_scaling=None,
  rope_theta=100000,
  tie_word_embeddings=True,
  torch_dtype='bfloat16',
  transformers_version='4.42.3',
  use_cache=True,
  vocab_size=49152,
)
SMOLLM2_135M['transformers.js_config'] = {'kv_cache_dtype': {'q4f16': 'float16'}}
MISTRAL_7B = dict(
  architectures=['MistralForCausalLM'],
  attention_dropout=0.0,
  bos_token_id=1,
  eos_token_id=2,
  hidden_act='silu',
  hidden_size=4096,
  initializer_range=0.02,
  intermediate_size=14336,
  max_position_embeddings=32768,
  model_type='mistral',
  num_attention_heads=32,
  num_hidden_layers=32,
  num_key_value_heads=8,
  rms_norm_eps=1e-05,
  rope_theta=1000000.0,
  sliding_window=None,
  tie_word_embeddings=False,
  torch_dtype='bfloat16',
  transformers_version='4.42.0.dev0',
  use_cache=True,
  vocab_size=32768,
)
QWEN25_HALF_B = dict(
  architectures=['Qwen2ForCausalLM'],
  attention_dropout=0.0,
  bos_token_id=151643,
  eos_token_id=151645,
  hidden_act='silu',
  hidden_size=896,
  initializer_range=0.02,
  intermediate_size=4864,
  max_position_embeddings=32768,
  max_window_layers=21,
  model_type='qwen2',
  num_attention_heads=14,
  num_hidden_layers=24,
  num_key_value_heads=2,
  rms_norm_eps=1e-06,
  rope_theta=1000000.0,
  sliding_window=32768,
  tie_word_embeddings=True,
  torch_dtype='bfloat16',
  transformers_version='4.43.1',
  use_cache=True,
  use_sliding_window=False,
  vocab_size=151936,
)
QWEN3_06B = dict(
  architectures=['Qwen3ForCausalLM'],
  attention_bias=False,
  attention_dropout=0.0,
  bos_token_id=151643,
  eos_token_id=151645,
  head_dim=128,
  hidden_act='silu',
  hidden_size=1024,
  initializer_range=0.02,
  intermediate_size=3072,
  max_position_embeddings=40960,
  max_window_layers=28,
  model_type='qwen3',
  num_attention_heads=16,
  num_hidden_layers=28,
  num_key_value_heads=8,
  rms_norm_eps=1e-06,
  rope_scaling=None,
  rope_theta=1000000,
  sliding_window=None,
  tie_word_embeddings=True,
  torch_dtype='bfloat16',
  transformers_version='4.51.0',
  use_cache=True,
  use_sliding_window=False,
  vocab_size=151936,
)
BASES = {
  'llama': LLAMA_1B,
  'mistral': MISTRAL_7B,
  'qwen2': QWEN25_HALF_B,
  'qwen3': QWEN3_06B,
}
# transformers 5 writes no rope_theta of its own, and dtype for torch_dtype.
QWEN25_IN_5 = {
  key: value for key, value in QWEN25_HALF_B.items() if key != 'rope_theta'
} | dict(
  dtype='bfloat16',
  layer_types=['full_attention'] * 24,
  rope_parameters=dict(rope_theta=1000000.0, rope_type='default'),
  sliding_window=None,
  transformers_version='5.0.0',
)
PUBLIC = {
  'Llama-3.2-1B': (LLAMA_1B, 1_235_814_400),
  'Llama-3.1-8B': (
    LLAMA_1B
    | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
    | dict(head_dim=None, tie_word_embeddings=False),
    8_030_261_248,
  ),
  'Llama-2-7B': (LLAMA_2_7B, 6_738_415_616),
  'SmolLM2-135M': (SMOLLM2_135M, 134_515_008),
  'Mistral-7B-v0.3': (MISTRAL_7B, 7_248_023_552),
  'Mistral-Nemo-12B': (
    MISTRAL_7B
    | dict(hidden_size=5120, head_dim=128, num_hidden_layers=40, vocab_size=131072),
    12_247_782_400,
  ),
  'Qwen2.5-0.5B': (QWEN25_HALF_B, 494_032_768),
  'Qwen2.5-0.5B, saved by transformers 5': (QWEN25_IN_5, 494_032_768),
  'Qwen2.5-0.5B, saved by unsloth': (
    QWEN25_HALF_B | dict(unsloth_fixed=True, unsloth_version='2025.3.1'),
    494_032_768,
  ),
  'Qwen3-0.6B': (QWEN3_06B, 596_049_920),
}


def read(kind: str, **changes) -> ModelConfig:
  """A change of ... removes the key."""
  raw = {k: v for k, v in (BASES[kind] | changes).items() if v is not ...}
  return hf_config.read(raw, known_tokens=None, dtype='float32')


def refusal(kind: str, **changes) -> str:
  with pytest.raises(ValueError) as error:
    read(kind, **changes)
  assert '\n' not in str(error.value)
  return str(error.value)


@pytest.mark.parametrize('name', PUBLIC)
def test_public_models_have_the_parameters_that_they_are_known_to_have(name):
  raw, parameters = PUBLIC[name]
  config = hf_config.read(raw, known_tokens=None, dtype='bfloat16')
  shapes, _ = model.abstract(config)
  assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == parameters


@pytest.mark.parametrize('name', PUBLIC)
def test_what_is_written_is_read_as_the_same_model(name):
  """By us, and by transformers: what both say of the function is equal."""
  raw, _ = PUBLIC[name]
  config = hf_config.read(raw, known_tokens=None, dtype='float32')
  again = written(config)
  assert hf_config.read(again, known_tokens=None, dtype='float32') == config
  ours, before = (
    transformers.AutoConfig.for_model(**json.loads(json.dumps(x))) for x in (again, raw)
  )
  for key in (
    'hidden_size intermediate_size num_hidden_layers num_attention_heads '
    'num_key_value_heads hidden_act rms_norm_eps tie_word_embeddings vocab_size '
    'max_position_embeddings rope_parameters'
  ).split():
    assert getattr(ours, key) == getattr(before, key), key


def test_both_spellings_are_one_model():
  """I3: also with `type` for `rope_type`, whole numbers, and an object of no scaling."""
  settings = LLAMA_1B['rope_scaling']
  expected = read('llama')
  assert expected.rope_scaling == LLAMA_32
  assert expected.rope_theta == 500_000
  inside = settings | {'rope_theta': 500000}
  old = {'type' if k == 'rope_type' else k: v for k, v in settings.items()}
  for changes in (
    dict(rope_scaling=..., rope_theta=..., rope_parameters=inside),
    dict(rope_scaling=None, rope_theta=..., rope_parameters=inside),
    dict(rope_scaling=..., rope_parameters=settings),
    dict(rope_parameters=inside),
    dict(rope_scaling=inside, rope_theta=...),
    dict(rope_scaling=old),
    dict(rope_scaling=settings | {'type': 'llama3', 'factor': 32}),
    dict(original_max_position_embeddings=8192),
    dict(
      rope_scaling={
        k: v for k, v in settings.items() if k != 'original_max_position_embeddings'
      },
      original_max_position_embeddings=8192,
    ),
  ):
    assert read('llama', **changes) == expected, changes


def test_no_scaling_asked_for_is_the_plain_table():
  """I3."""
  expected = read('qwen2')
  assert (expected.rope_theta, expected.rope_scaling) == (1e6, None)
  theta = {'rope_theta': 1000000}
  for changes in (
    dict(rope_scaling=None),
    dict(rope_scaling={}),
    dict(rope_scaling={'type': 'default'}),
    dict(rope_parameters=theta | {'rope_type': 'default'}),
    dict(rope_theta=..., rope_parameters=theta),
    dict(rope_parameters={'rope_type': 'default', 'partial_rotary_factor': 1.0}),
  ):
    assert read('qwen2', **changes) == expected, changes
  assert read('qwen2', rope_theta=...).rope_theta == 10_000.0


def test_yarn_is_read_as_transformers_reads_it():
  """Left out, the trained length is max_position_embeddings and the betas 32 and 1."""
  settings = {'type': 'yarn', 'factor': 4.0}
  config = read('qwen2', rope_scaling=settings)
  assert config.rope_scaling == YARN_4
  spelt_out = settings | dict(
    original_max_position_embeddings=32768,
    beta_fast=None,
    beta_slow=1,
    attention_factor=None,
    truncate=True,
  )
  assert read('qwen2', rope_scaling=spelt_out) == config
  scales = dict(mscale=1.0, mscale_all_dim=0.5)
  with_scales = read('qwen2', rope_scaling=settings | scales).rope_scaling
  quotient = (1 + 0.1 * math.log(4)) / (1 + 0.05 * math.log(4))
  assert with_scales.attention_factor == pytest.approx(quotient, rel=1e-12)
  one = read('qwen2', rope_scaling=settings | dict(mscale=0.7))
  assert one.rope_scaling == YARN_4  # it takes both


def test_what_the_file_leaves_out_is_as_in_transformers():
  left_out = dict(num_key_value_heads=..., head_dim=..., tie_word_embeddings=...)
  llama = read('llama', **left_out, rope_scaling=..., rope_theta=...)
  assert (llama.kv_heads, llama.head_dim, llama.tied) == (32, 64, False)
  assert llama.rope_theta == 10_000.0
  assert read('mistral', num_key_value_heads=...).kv_heads == 8
  assert read('mistral', num_key_value_heads=None).kv_heads == 32
  assert read('qwen3', head_dim=...).head_dim == 128
  assert read('qwen3', architectures=..., model_type='qwen3') == read('qwen3')
  assert read('qwen3', model_type=...) == read('qwen3')


# What is refused.


@pytest.mark.parametrize(
  'changes, words',
  [
    (dict(rope_scaling={'type': 'dynamic', 'factor': 2.0}), ['type', "'dynamic'"]),
    (dict(rope_scaling={'rope_type': 'longrope'}), ['rope_type', "'longrope'"]),
    (dict(rope_scaling={'rope_type': 'unheard-of'}), ["'unheard-of'", 'yarn']),
    (dict(rope_scaling={'rope_type': None}), ['rope_type: None']),
    (dict(rope_scaling={'rope_type': ['yarn']}), ["rope_type: ['yarn']"]),
    (dict(rope_scaling={'type': 'yarn', 'rope_type': 'linear'}), ['yarn', 'linear']),
    (dict(rope_scaling='yarn'), ["rope_scaling: 'yarn'", 'object']),
    (dict(rope_scaling=[]), ['rope_scaling: []', 'object']),
    (dict(rope_scaling=False), ['rope_scaling: False', 'object']),
    (dict(rope_scaling={'factor': 4.0}), ['factor: 4.0', 'no keys', 'default']),
    (dict(rope_scaling={'type': 'linear'}), ['linear', 'expected factor']),
    (dict(rope_scaling={'type': 'yarn'}), ['yarn', 'expected factor']),
    (
      dict(rope_parameters={'rope_type': 'llama3', 'rope_theta': 1e6, 'factor': 8}),
      ['rope_parameters', 'llama3', 'expected original_max_position_embeddings'],
    ),
    (
      dict(
        rope_parameters={k: v for k, v in LLAMA3.items() if k != 'high_freq_factor'}
      ),
      ['rope_parameters', 'expected high_freq_factor'],
    ),
    (
      dict(rope_scaling=LLAMA3 | {'rope_theta': 1e6, 'high_freq_factor': 1.0}),
      ['high_freq_factor: 1.0', 'low_freq_factor=1.0'],
    ),
    (dict(rope_scaling={'type': 'linear', 'factor': '2'}), ["factor: '2'", 'number']),
    (dict(rope_scaling={'type': 'linear', 'factor': True}), ['factor: True']),
    (dict(rope_scaling={'type': 'linear', 'factor': None}), ['factor: None']),
    (dict(rope_scaling={'type': 'linear', 'factor': 0.5}), ['factor: 0.5', 'least 1']),
    (dict(rope_scaling={'type': 'linear', 'factor': math.nan}), ['factor: nan']),
    (dict(rope_scaling={'type': 'linear', 'factor': math.inf}), ['factor: inf']),
    (
      dict(rope_scaling={'type': 'linear', 'factor': 2.0, 'mscale': 1.0}),
      ['rope_scaling.mscale: 1.0', 'expected factor', 'linear'],
    ),
    (dict(rope_scaling=YARN | {'rope_theta': 1e6, 'llama_4': 1}), ['llama_4: 1']),
    (dict(rope_scaling=YARN | {'rope_theta': 1e6, 'truncate': 1}), ['truncate: 1']),
    (
      dict(rope_scaling=YARN | {'rope_theta': 1e6, 'beta_fast': 0.1}),
      ['beta_fast: 0.1', 'beta_slow=0.25'],
    ),
    (
      dict(rope_scaling=YARN | {'rope_theta': 1e6, 'attention_factor': -1}),
      ['attention_factor: -1'],
    ),
    (
      dict(
        rope_scaling={
          'type': 'yarn',
          'factor': 4,
          'original_max_position_embeddings': 4096.0,
        }
      ),
      ['original_max_position_embeddings: 4096.0', 'whole number'],
    ),
    (
      dict(rope_parameters={'full_attention': {'rope_type': 'default'}}),
      ['rope_parameters.full_attention'],
    ),
    (
      dict(rope_parameters={'partial_rotary_factor': 0.5}),
      ['rope_parameters.partial_rotary_factor: 0.5', 'expected 1'],
    ),
    (dict(rope_theta=-1), ['rope_theta: -1']),
    (dict(rope_theta=1.0), ['rope_theta: 1.0']),
    (dict(rope_theta='1e6'), ["rope_theta: '1e6'"]),
    (dict(rope_theta=None), ['rope_theta: None']),
    # Versions of transformers differ in what they take of these.
    (
      dict(rope_parameters={'rope_theta': 500.0}),
      ['rope_theta: 1000000.0', 'rope_parameters.rope_theta: 500.0', 'the same'],
    ),
    (
      dict(
        rope_parameters={'rope_theta': 1e6},
        rope_scaling={'type': 'linear', 'factor': 2},
      ),
      ['rope_scaling', 'linear', 'rope_parameters', 'the same'],
    ),
    (
      dict(
        rope_scaling={
          'type': 'yarn',
          'factor': 4,
          'original_max_position_embeddings': 4096,
        },
        original_max_position_embeddings=8192,
      ),
      ['original_max_position_embeddings: 4096', '8192', 'the same'],
    ),
  ],
)
def test_rope_that_is_not_whole_or_not_known_is_refused(changes, words):
  """I3: refused, not ignored. The line names key and value."""
  said = refusal('qwen2', **changes)
  assert all(word in said for word in words), said


@pytest.mark.parametrize(
  'kind, changes, words',
  [
    ('llama', dict(architectures=['GemmaForCausalLM']), ['architectures', 'Gemma']),
    ('llama', dict(architectures=['Qwen2MoeForCausalLM']), ['Qwen2MoeForCausalLM']),
    ('llama', dict(architectures=['LlamaForSequenceClassification']), ['Sequence']),
    ('llama', dict(architectures=[{}]), ['architectures: [{}]']),
    ('llama', dict(architectures='LlamaForCausalLM'), ['architectures']),
    ('llama', dict(architectures=..., model_type='gpt2'), ['model_type', 'gpt2']),
    ('llama', dict(model_type='qwen2'), ['model_type', 'qwen2', 'llama']),
    ('llama', dict(hidden_act='gelu'), ['hidden_act', 'gelu', 'silu']),
    ('llama', dict(hidden_act=None), ['hidden_act: None']),
    ('llama', dict(attention_bias=True), ['attention_bias: True']),
    ('mistral', dict(attention_bias=True), ['attention_bias: True']),
    ('qwen3', dict(attention_bias=True), ['attention_bias: True']),
    ('llama', dict(mlp_bias=True), ['mlp_bias: True']),
    ('llama', dict(num_local_experts=8), ['num_local_experts: 8']),
    ('qwen3', dict(num_experts=128), ['num_experts: 128']),
    ('qwen3', dict(moe_intermediate_size=768), ['moe_intermediate_size: 768']),
    ('llama', dict(partial_rotary_factor=0.5), ['partial_rotary_factor: 0.5']),
    ('llama', dict(rope_interleaved=True), ['rope_interleaved: True']),
    ('llama', dict(no_rope_layers=[0, 1]), ['no_rope_layers: [0, 1]']),
    ('llama', dict(attention_chunk_size=8192), ['attention_chunk_size: 8192']),
    ('llama', dict(final_logit_softcapping=30.0), ['final_logit_softcapping: 30.0']),
    ('llama', dict(attn_logit_softcapping=50.0), ['attn_logit_softcapping: 50.0']),
    ('llama', dict(logits_scaling=8.0), ['logits_scaling: 8.0', 'expected 1']),
    ('llama', dict(embedding_multiplier=12.0), ['embedding_multiplier: 12.0']),
    ('llama', dict(residual_multiplier=0.22), ['residual_multiplier: 0.22']),
    ('llama', dict(attention_multiplier=0.015), ['attention_multiplier: 0.015']),
    ('llama', dict(scale_emb=12), ['scale_emb: 12']),
    ('llama', dict(quantization_config={'bits': 4}), ['quantization_config', '4']),
    ('llama', dict(quantization={'bits': 4}), ['quantization', '4']),
    ('llama', dict(auto_map={'AutoModel': 'x.Y'}), ['auto_map', 'x.Y']),
    ('llama', dict(pruned_heads={'0': [1]}), ['pruned_heads', '[1]']),
    ('qwen2', dict(is_causal=False), ['is_causal: False']),
    ('qwen2', dict(use_bidirectional_attention=True), ['use_bidirectional_attention']),
    ('llama', dict(use_rope=False), ['use_rope: False', 'delete it']),
    ('llama', dict(nobody_knows='x' * 5000), ['nobody_knows', 'not a key known here']),
    ('llama', dict(hidden_size='32'), ['hidden_size', "'32'", 'whole number']),
    ('llama', dict(hidden_size=2048.0), ['hidden_size: 2048.0', 'whole number']),
    ('llama', dict(num_attention_heads=0), ['num_attention_heads: 0']),
    ('llama', dict(num_key_value_heads=True), ['num_key_value_heads: True']),
    ('llama', dict(num_key_value_heads=5), ['kv_heads: 5', 'heads=32']),
    ('llama', dict(num_hidden_layers=...), ['num_hidden_layers: None']),
    ('llama', dict(head_dim=63), ['head_dim: 63', 'even']),
    ('llama', dict(head_dim=..., hidden_size=2050), ['hidden_size: 2050', '32 heads']),
    ('llama', dict(tie_word_embeddings='false'), ['tie_word_embeddings', "'false'"]),
    ('llama', dict(rms_norm_eps=0), ['rms_norm_eps: 0']),
  ],
)
def test_a_setting_that_is_not_implemented_is_refused(kind, changes, words):
  """Never ignored, and what nobody here knows is not guessed at."""
  said = refusal(kind, **changes)
  assert len(said) < 500
  assert all(word in said for word in words), said


@pytest.mark.parametrize(
  'changes',
  [
    dict(pretraining_tp=2),  # how a matrix is cut, in old versions only
    dict(nobody_knows=None),
    dict(_private='anything'),
    dict(embedding_multiplier=1.0, logits_scaling=1, attention_chunk_size=None),
    dict(temperature=0.6, top_p=0.9, id2label={'0': 'LABEL_0'}),
  ],
)
def test_a_setting_of_no_consequence_is_none(changes):
  assert read('llama', **changes) == read('llama')


@pytest.mark.parametrize(
  'kind, changes, words',
  [
    (
      'qwen2',
      dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
      ['use_sliding_window: True', 'window of 4', 'layers 1 to 23'],
    ),
    ('qwen3', dict(layer_types=['sliding_attention'] * 28), ['layer_types']),
    ('qwen3', dict(layer_types=['full_attention'] * 27), ['layer_types', '28 times']),
    ('llama', dict(layer_types='full_attention'), ['layer_types']),
    ('qwen2', dict(use_sliding_window='no'), ["use_sliding_window: 'no'"]),
    (
      'qwen2',
      dict(use_sliding_window=True, max_window_layers=None),
      ['max_window_layers: None'],
    ),
    ('mistral', dict(sliding_window=4096), ['sliding_window: 4096']),
    ('mistral', dict(sliding_window=...), ['sliding_window: 4096']),
    # It has no flag there, and engines differ in whether they apply it.
    ('llama', dict(sliding_window=4096), ['sliding_window: 4096']),
  ],
)
def test_a_window_that_is_on_is_refused(kind, changes, words):
  """I4: our policy is to refuse. Left out, it is on in Mistral's and off in Qwen's."""
  said = refusal(kind, **changes)
  assert all(word in said for word in words), said


@pytest.mark.parametrize('kind', ['qwen2', 'qwen3'])
def test_a_window_that_is_off_is_none(kind):
  """I4: whatever its width, left out or null."""
  expected = read(kind)
  for window in (4, None, ...):
    assert read(kind, sliding_window=window, use_sliding_window=...) == expected
    assert read(kind, sliding_window=window) == expected
  layers = dict(max_window_layers=expected.layers)  # from a layer on that there is not
  assert read(kind, use_sliding_window=True, sliding_window=4, **layers) == expected


def test_both_biases_and_norms_of_heads_have_no_architecture():
  config = dataclasses.replace(sized(500.0, 8, None), qkv_bias=True, qk_norm=True)
  with pytest.raises(ValueError, match='no architecture has both'):
    written(config)


# End ids.


def test_all_end_ids_of_llama_3_end_an_answer_and_are_exported(tmp_path):
  """I5: three ids in generation_config.json, one more in the tokenizer."""
  config = dataclasses.replace(
    sized(500_000.0, 4, LLAMA_32), vocab_size=128_256, known_tokens=128_256
  )
  source, out = tmp_path / 'source', tmp_path / 'out'
  tokenizer = build_byte_tokenizer(source)
  ends = [128001, 128008, 128009]
  (source / 'generation_config.json').write_text(json.dumps({'eos_token_id': ends}))
  generation = weights.generation_config(source)
  every = [tokenizer.eos_token_id, *ends]
  assert prompts.stop_ids(tokenizer, generation) == tuple(every)
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), model.abstract(config)[0])
  weights.export(
    config,
    zeros,
    out,
    tokenizer=tokenizer,
    generation_config=generation,
  )
  assert prompts.stop_ids(tokenizer, weights.generation_config(out)) == tuple(every)
  made = transformers.GenerationConfig.from_pretrained(out)
  assert made.eos_token_id == every
  assert transformers.AutoConfig.from_pretrained(out).eos_token_id == every
