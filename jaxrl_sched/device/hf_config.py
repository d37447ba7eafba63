"""config.json of a Hugging Face model <-> `ModelConfig`.

What would change the function and is not implemented is refused, not ignored.
"""

import dataclasses
from typing import Any

from jaxrl_sched.device.model import ModelConfig

DTYPES = ('float32', 'bfloat16', 'float16')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Architecture:
  """How transformers reads the config of this architecture."""

  model_type: str
  qkv_bias: bool = False
  qk_norm: bool = False
  head_dim: int | None = None  # where the file has none; None: hidden / heads
  kv_heads: int | None = None  # where the file has none; None: as many as heads
  windows: str = ''  # 'by layer' or 'all' layers
  reads_attention_bias: bool = False  # a bias on o too


ARCHITECTURES = {
  'LlamaForCausalLM': _Architecture(model_type='llama', reads_attention_bias=True),
  'MistralForCausalLM': _Architecture(model_type='mistral', kv_heads=8, windows='all'),
  'Qwen2ForCausalLM': _Architecture(
    model_type='qwen2', qkv_bias=True, kv_heads=32, windows='by layer'
  ),
  'Qwen3ForCausalLM': _Architecture(
    model_type='qwen3',
    qk_norm=True,
    head_dim=128,
    kv_heads=32,
    windows='by layer',
    reads_attention_bias=True,
  ),
}

# Keys that would change the function, with the values that leave it as it is here.
# Any of them may be absent.
_ONLY = {
  'hidden_act': ('silu', 'swish'),
  'mlp_bias': (False, None),
  'partial_rotary_factor': (1, None),
  'rope_interleaved': (False, None),
  'is_causal': (True, None),
  'use_bidirectional_attention': (False, None),
  'num_experts': (0, None),
  'num_local_experts': (0, None),
  'attn_logit_softcapping': (None,),
  'final_logit_softcapping': (None,),
  'quantization_config': (None,),  # the stored numbers are codes, not weights
  'auto_map': (None, {}),  # code of its own
}


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
  for key, allowed in _ONLY.items():
    if key in raw and raw[key] not in allowed:
      raise _refused(key, raw[key], f'expected {allowed[0]}')
  if architecture.reads_attention_bias and raw.get('attention_bias'):
    raise _refused('attention_bias', raw['attention_bias'], 'expected False')
  layers = _integer(raw, 'num_hidden_layers')
  _check_windows(raw, architecture, layers)
  if dtype not in DTYPES:
    raise ValueError(f'dtype: {dtype!r}, expected one of {", ".join(DTYPES)}')
  heads, d_model = _integer(raw, 'num_attention_heads'), _integer(raw, 'hidden_size')
  kv_heads = raw.get('num_key_value_heads', architecture.kv_heads)
  head_dim = raw.get('head_dim', architecture.head_dim)
  if head_dim is None and d_model % heads:
    raise _refused('hidden_size', d_model, f'expected a multiple of {heads} heads')
  vocab_size = _integer(raw, 'vocab_size')
  tied = raw.get('tie_word_embeddings', False)
  if not isinstance(tied, bool):
    raise _refused('tie_word_embeddings', tied, 'expected true or false')
  return ModelConfig(
    vocab_size=vocab_size,
    known_tokens=min(known_tokens or vocab_size, vocab_size),
    d_model=d_model,
    d_ff=_integer(raw, 'intermediate_size'),
    layers=layers,
    heads=heads,
    kv_heads=heads
    if kv_heads is None
    else _integer(raw, 'num_key_value_heads', kv_heads),
    head_dim=d_model // heads
    if head_dim is None
    else _integer(raw, 'head_dim', head_dim),
    rope_theta=_rope_theta(raw),
    norm_eps=_number(raw, 'rms_norm_eps', 1e-6),
    tied=tied,
    qkv_bias=architecture.qkv_bias,
    qk_norm=architecture.qk_norm,
    max_positions=_integer(raw, 'max_position_embeddings'),
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
  kind = 'Qwen3' if config.qk_norm else 'Qwen2' if config.qkv_bias else 'Llama'
  name = f'{kind}ForCausalLM'
  if kind == 'Llama' and config.d_model % config.heads:
    raise ValueError(
      f'export: d_model={config.d_model}, heads={config.heads}: transformers has no '
      'Llama whose hidden size is not a multiple of its heads'
    )
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
    'rope_theta': config.rope_theta,
    'rope_parameters': {'rope_type': 'default', 'rope_theta': config.rope_theta},
    'tie_word_embeddings': config.tied,
    'attention_dropout': 0.0,
    'dtype': stored_dtype,
    'torch_dtype': stored_dtype,
    'use_cache': True,
    **special_ids,
  }
  if kind == 'Llama':
    raw |= {'attention_bias': False, 'mlp_bias': False}
  else:
    raw |= {'use_sliding_window': False, 'sliding_window': None}
    raw |= {'max_window_layers': config.layers}
  if kind == 'Qwen3':
    raw['attention_bias'] = False
  return raw


def _refused(key: str, value: Any, why: str) -> ValueError:
  return ValueError(f'config.json: {key}: {value!r}, {why}')


def _architecture(raw: dict[str, Any]) -> _Architecture:
  named = raw.get('architectures')
  if named is None:  # then the model type tells
    named = [
      n for n, a in ARCHITECTURES.items() if a.model_type == raw.get('model_type')
    ]
    if not named:
      known = ', '.join(a.model_type for a in ARCHITECTURES.values())
      raise _refused('model_type', raw.get('model_type'), f'expected one of {known}')
  if not (isinstance(named, list) and len(named) == 1 and named[0] in ARCHITECTURES):
    known = ', '.join(ARCHITECTURES)
    raise _refused('architectures', named, f'expected one of {known}')
  architecture = ARCHITECTURES[named[0]]
  if raw.get('model_type', architecture.model_type) != architecture.model_type:
    why = f'expected {architecture.model_type!r} for {named[0]}'
    raise _refused('model_type', raw['model_type'], why)
  return architecture


def _check_windows(
  raw: dict[str, Any], architecture: _Architecture, layers: int
) -> None:
  """Refuses a sliding window, but not one that is switched off."""
  window = raw.get('sliding_window', 4096)  # as transformers has it
  if architecture.windows == 'all' and window is not None:
    raise _refused('sliding_window', window, 'expected null: windows are not supported')
  if architecture.windows != 'by layer':
    return
  kinds = raw.get('layer_types')
  if kinds is not None:
    if set(kinds) - {'full_attention'}:
      raise _refused('layer_types', kinds, "expected 'full_attention' in all")
  elif raw.get('use_sliding_window') and window is not None:
    full = raw.get('max_window_layers', 28)  # layers from there on have the window
    if full < layers:
      why = f'expected false: layers {full} to {layers - 1} have a window of {window}'
      raise _refused('use_sliding_window', raw['use_sliding_window'], why)


def _rope_theta(raw: dict[str, Any]) -> float:
  """From either spelling; transformers 5 has rope_parameters, 4 has two keys.

  Scaled tables (linear, llama3, yarn ...) belong here and in `model.rotation`.
  """
  key = 'rope_scaling' if raw.get('rope_scaling') else 'rope_parameters'
  settings = raw.get(key) or {}
  if not isinstance(settings, dict):
    raise _refused(key, settings, 'expected an object')
  kind = settings.get('rope_type', settings.get('type', 'default'))
  by_layer = any(isinstance(value, dict) for value in settings.values())
  if kind != 'default' or by_layer or settings.get('partial_rotary_factor', 1) != 1:
    raise _refused(key, settings, "expected rope_type 'default' on whole heads")
  theta = settings.get('rope_theta', raw.get('rope_theta'))
  return 10_000.0 if theta is None else _number({'rope_theta': theta}, 'rope_theta')


def _integer(raw: dict[str, Any], key: str, default: Any = None) -> int:
  value = raw.get(key, default)
  if not isinstance(value, int) or isinstance(value, bool) or value < 1:
    raise _refused(key, value, 'expected a whole number of at least 1')
  return value


def _number(raw: dict[str, Any], key: str, default: Any = None) -> float:
  value = raw.get(key, default)
  if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
    raise _refused(key, value, 'expected a number above 0')
  return float(value)
