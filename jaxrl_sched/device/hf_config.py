"""config.json of a Hugging Face model <-> `ModelConfig`.

What would change the function and is not implemented is refused, not ignored. So is a
key that nobody here has heard of, unless it is null: whoever knows that it is of no
consequence deletes it from the file. Keys of no consequence that public models have
are listed, so that those load as they are.
"""

import dataclasses
from typing import Any

from jaxrl_sched.device import hf_rope
from jaxrl_sched.device.hf_fields import flag, integer, number, refused
from jaxrl_sched.device.model import ModelConfig

DTYPES = ('float32', 'bfloat16', 'float16')  # that weights may be stored in


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Architecture:
  """How transformers reads the config of this architecture."""

  model_type: str
  qkv_bias: bool = False
  may_have_biases: bool = False  # as attention_bias and mlp_bias say
  qk_norm: bool = False
  head_dim: int | None = None  # where the file has none; None: hidden / heads
  kv_heads: int | None = None  # where the file has none; None: as many as heads
  window: int | None = None  # where the file has none
  window_has_flag: bool = False  # it applies where use_sliding_window is true


ARCHITECTURES = {
  'LlamaForCausalLM': _Architecture(model_type='llama', may_have_biases=True),
  'MistralForCausalLM': _Architecture(model_type='mistral', kv_heads=8, window=4096),
  'Qwen2ForCausalLM': _Architecture(
    model_type='qwen2', qkv_bias=True, kv_heads=32, window=4096, window_has_flag=True
  ),
  'Qwen3ForCausalLM': _Architecture(
    model_type='qwen3',
    qk_norm=True,
    head_dim=128,
    kv_heads=32,
    window=4096,
    window_has_flag=True,
  ),
}

# Keys that would change the function, with the values that leave it as it is here.
# Any of them may be absent.
_ONLY = {
  'hidden_act': ('silu', 'swish'),
  'use_bias': (False, None),
  'partial_rotary_factor': (1, None),
  'rope_interleaved': (False, None),
  'is_causal': (True, None),
  'use_bidirectional_attention': (False, None),
  'use_mrope': (False, None),  # in Qwen2.5's, off
  'is_encoder_decoder': (False, None),
  'add_cross_attention': (False, None),
  'num_experts': (0, None),
  'num_local_experts': (0, None),
  'embedding_multiplier': (1, None),
  'residual_multiplier': (1, None),
  'logits_scaling': (1, None),
  'logit_scale': (1, None),
  'no_rope_layers': (None, []),
  'attention_chunk_size': (None,),
  'attn_logit_softcapping': (None,),
  'final_logit_softcapping': (None,),
  'quantization_config': (None,),  # the stored numbers are codes, not weights
  'pruned_heads': (None, {}, []),
  'auto_map': (None, {}),  # code of its own
}
_READ = """
architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
num_attention_heads num_key_value_heads head_dim attention_bias mlp_bias rms_norm_eps
tie_word_embeddings max_position_embeddings original_max_position_embeddings rope_theta
rope_scaling rope_parameters sliding_window use_sliding_window max_window_layers
layer_types
""".split()
# The rest of what is found in files. Dropout is among it: there is none here.
_OF_NO_CONSEQUENCE = """
attn_implementation dtype is_llama_config max_sequence_length model_max_length
name_or_path tokenizer_class torch_dtype torchscript transformers.js_config
transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache
gradient_checkpointing initializer_range neftune_noise_alpha pretraining_tp
attention_dropout attention_probs_dropout_prob classifier_dropout embd_pdrop
hidden_dropout hidden_dropout_prob resid_pdrop
bos_token_id cls_token_id decoder_start_token_id eos_token_id mask_token_id
pad_token_id sep_token_id unk_token_id
chunk_size_feed_forward finetuning_task id2label is_decoder label2id num_labels
output_attentions output_hidden_states problem_type return_dict task_specific_params
tf_legacy_loss tie_encoder_decoder use_return_dict
bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
forced_eos_token_id length_penalty max_length max_new_tokens min_length
no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
prefix remove_invalid_values repetition_penalty return_dict_in_generate
suppress_tokens temperature top_k top_p typical_p
""".split()
_KNOWN = {*_READ, *_ONLY, *_OF_NO_CONSEQUENCE}


def read(raw: dict[str, Any], *, known_tokens: int | None, dtype: str) -> ModelConfig:
  """The model that a config.json describes.

  Args:
    raw: the file's content.
    known_tokens: ids the tokenizer knows; more than the embedding has rows, or None:
      as many as it has rows.
    dtype: of the computation.

  Raises:
    ValueError: the message begins with the key.
  """
  architecture = _architecture(raw)
  _check_keys(raw, architecture)
  layers = integer('num_hidden_layers', raw.get('num_hidden_layers'))
  _check_windows(raw, architecture, layers)
  sizes = {
    ours: integer(theirs, raw.get(theirs))
    for ours, theirs in (
      ('vocab_size', 'vocab_size'),
      ('d_model', 'hidden_size'),
      ('d_ff', 'intermediate_size'),
      ('heads', 'num_attention_heads'),
      ('max_positions', 'max_position_embeddings'),
    )
  }
  heads, d_model, vocab = sizes['heads'], sizes['d_model'], sizes['vocab_size']
  kv_heads = raw.get('num_key_value_heads', architecture.kv_heads)
  head_dim = raw.get('head_dim', architecture.head_dim)
  if head_dim is None and d_model % heads:
    raise refused('hidden_size', d_model, f'expected a multiple of {heads} heads')
  theta, scaling = hf_rope.read(raw)
  of_attention = architecture.may_have_biases and flag(
    'attention_bias', raw.get('attention_bias') or False
  )
  return ModelConfig(
    **sizes,
    known_tokens=min(known_tokens or vocab, vocab),
    layers=layers,
    kv_heads=heads if kv_heads is None else integer('num_key_value_heads', kv_heads),
    head_dim=d_model // heads if head_dim is None else integer('head_dim', head_dim),
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=number('rms_norm_eps', raw.get('rms_norm_eps', 1e-6)),
    tied=flag('tie_word_embeddings', raw.get('tie_word_embeddings', False)),
    qkv_bias=architecture.qkv_bias or of_attention,
    out_bias=of_attention,
    mlp_bias=architecture.may_have_biases
    and flag('mlp_bias', raw.get('mlp_bias') or False),
    qk_norm=architecture.qk_norm,
    dtype=dtype,
  )


def write(
  config: ModelConfig, *, stored_dtype: str, special_ids: dict[str, Any]
) -> dict[str, Any]:
  """A config.json that transformers reads as this model, in versions 4 and 5 alike.

  Args:
    special_ids: bos_token_id, eos_token_id and pad_token_id, None where there is
      none. They are always written: transformers has defaults of its own.
  """
  if config.qk_norm and config.qkv_bias:
    raise ValueError('export: no architecture has both qk_norm and qkv_bias')
  if (config.out_bias or config.mlp_bias) and (
    config.qk_norm or config.qkv_bias != config.out_bias
  ):
    raise ValueError('export: only a Llama has out_bias (with qkv_bias) and mlp_bias')
  if (config.out_bias or config.mlp_bias) and config.d_model % config.heads:
    raise ValueError(
      f'export: d_model={config.d_model}, expected a multiple of heads={config.heads}, '
      'as transformers has it for a Llama, which alone has such biases'
    )
  if config.qk_norm:
    kind = 'Qwen3'
  elif config.qkv_bias and not config.out_bias:
    kind = 'Qwen2'
  elif config.out_bias or config.mlp_bias:
    kind = 'Llama'
  else:  # the same function, but transformers has no Llama of such sizes
    kind = 'Mistral' if config.d_model % config.heads else 'Llama'
  name = f'{kind}ForCausalLM'
  raw = {
    'architectures': [name],
    'model_type': ARCHITECTURES[name].model_type,
    'vocab_size': config.vocab_size,
    'hidden_size': config.d_model,
    'intermediate_size': config.d_ff,
    'num_hidden_layers': config.layers,
    'num_attention_heads': config.heads,
    'num_key_value_heads': config.kv_heads,
    'head_dim': config.head_dim,
    'hidden_act': 'silu',
    'max_position_embeddings': config.max_positions,
    'rms_norm_eps': config.norm_eps,
    **hf_rope.write(config.rope_theta, config.rope_scaling),
    'tie_word_embeddings': config.tied,
    'attention_dropout': 0.0,
    'dtype': stored_dtype,
    'torch_dtype': stored_dtype,
    'use_cache': True,
    **special_ids,
  }
  if kind == 'Llama':
    raw |= {'attention_bias': config.out_bias, 'mlp_bias': config.mlp_bias}
  else:
    raw['sliding_window'] = None
  if kind.startswith('Qwen'):
    raw |= {'use_sliding_window': False, 'max_window_layers': config.layers}
  if kind == 'Qwen3':
    raw['attention_bias'] = False
  return raw


def _architecture(raw: dict[str, Any]) -> _Architecture:
  named = raw.get('architectures')
  if named is None:  # then the model type tells
    named = [
      n for n, a in ARCHITECTURES.items() if a.model_type == raw.get('model_type')
    ]
    if not named:
      known = ', '.join(a.model_type for a in ARCHITECTURES.values())
      raise refused('model_type', raw.get('model_type'), f'expected one of {known}')
  if not (isinstance(named, list) and named in [[name] for name in ARCHITECTURES]):
    known = ', '.join(ARCHITECTURES)
    raise refused('architectures', named, f'expected one of {known}')
  architecture = ARCHITECTURES[named[0]]
  if raw.get('model_type', architecture.model_type) != architecture.model_type:
    why = f'expected {architecture.model_type!r} for {named[0]}'
    raise refused('model_type', raw['model_type'], why)
  return architecture


def _check_keys(raw: dict[str, Any], architecture: _Architecture) -> None:
  for key, allowed in _ONLY.items():
    if key in raw and raw[key] not in allowed:
      raise refused(key, raw[key], f'expected {allowed[0]}')
  # A Qwen2 that says it has biases means those on q, k and v.
  for key, implied in (('attention_bias', architecture.qkv_bias), ('mlp_bias', False)):
    if raw.get(key) and not (architecture.may_have_biases or implied):
      raise refused(key, raw[key], 'expected False')
  for key, value in raw.items():
    if key not in _KNOWN and not key.startswith('_') and value is not None:
      why = 'not a key known here: delete it if it leaves the model as it is'
      raise refused(key, value, why)


def _check_windows(
  raw: dict[str, Any], architecture: _Architecture, layers: int
) -> None:
  """Refuses a sliding window, but not one that is switched off."""
  kinds = raw.get('layer_types')
  if kinds is not None and kinds != ['full_attention'] * layers:
    raise refused('layer_types', kinds, f"expected 'full_attention' {layers} times")
  window = raw.get('sliding_window', architecture.window)
  if window is None:
    return
  if not architecture.window_has_flag:
    raise refused('sliding_window', window, 'expected null: windows are not supported')
  used = flag('use_sliding_window', raw.get('use_sliding_window', False))
  if used and kinds is None:
    full = integer('max_window_layers', raw.get('max_window_layers', 28))
    if full < layers:  # layers from there on have the window
      why = f'expected false: layers {full} to {layers - 1} have a window of {window}'
      raise refused('use_sliding_window', used, why)
