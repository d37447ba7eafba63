"""config.json of public models is read as it is; what is not implemented is refused."""

import dataclasses
import json
import math

from hf_configs import PUBLIC, read, refusal, sized, written
import jax
import pytest
import transformers

from jaxrl_sched.device import hf_config, model


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
    ('llama', dict(attention_bias='yes'), ['attention_bias', 'yes']),
    ('qwen2', dict(mlp_bias=True), ['mlp_bias: True']),
    ('mistral', dict(attention_bias=True), ['attention_bias: True']),
    ('qwen3', dict(attention_bias=True), ['attention_bias: True']),
    ('mistral', dict(mlp_bias=True), ['mlp_bias: True']),
    ('llama', dict(use_bias=True), ['use_bias: True']),
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


@pytest.mark.parametrize(
  'biases, d_model, said',
  [
    (dict(out_bias=True), None, 'only a Llama has out_bias'),
    (dict(qkv_bias=True, mlp_bias=True), None, 'only a Llama has out_bias'),
    (dict(mlp_bias=True), 34, 'd_model=34, expected a multiple of heads=4'),
  ],
)
def test_biases_that_no_architecture_has_are_not_written(biases, d_model, said):
  config = dataclasses.replace(sized(500.0, 8, None), heads=4, kv_heads=2, **biases)
  if d_model is not None:
    config = dataclasses.replace(config, d_model=d_model)
  with pytest.raises(ValueError, match=said):
    written(config)
