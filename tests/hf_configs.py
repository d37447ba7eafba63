"""config.json of public models, and settings of rope, to be read and refused."""

import json

import pytest

from jaxrl_sched.device import hf_config, rope
from jaxrl_sched.device.model import ModelConfig

# Rope of small models.

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

# Rope of public models.

LLAMA_32 = rope.Llama3(
  factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)
YARN_4 = rope.Yarn(
  factor=4.0,
  original_max_positions=32768,
  attention_factor=rope.yarn_attention_factor(4.0),
)

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


def read(kind: str, **changes) -> ModelConfig:
  """A change of ... removes the key."""
  raw = {k: v for k, v in (BASES[kind] | changes).items() if v is not ...}
  return hf_config.read(raw, known_tokens=None, dtype='float32')


def refusal(kind: str, **changes) -> str:
  with pytest.raises(ValueError) as error:
    read(kind, **changes)
  assert '\n' not in str(error.value)
  return str(error.value)
