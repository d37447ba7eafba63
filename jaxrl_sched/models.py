"""From a config's model to its tokenizer, its shape and the ids that end an answer."""

from collections.abc import Sequence
import dataclasses
import pathlib
import tempfile
from typing import Any

import jax

from jaxrl_sched import settings
from jaxrl_sched.device import hf_config, hf_folder, lora, weights
from jaxrl_sched.device.model import ModelConfig
from jaxrl_sched.device.prompts import Tokenizer
from jaxrl_sched.device.sampler import MAX_STOP_IDS
from jaxrl_sched.device.tokenizers import (
  build_byte_tokenizer,
  known_ids,
  load_tokenizer,
  stop_ids,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """`path`: a Hugging Face folder or hub id. Or `init`: fresh weights of this shape
  (keyword arguments of ModelConfig) over `tokenizer`, a folder, a hub id or 'bytes'.
  `hf_config` is what the path's config.json says, so that `preflight` needs no files."""

  path: str | None = None
  init: dict | None = None
  tokenizer: str | None = None
  dtype: str = 'float32'
  hf_config: dict | None = None


def open_tokenizer(model: Model) -> Tokenizer:
  if (model.path is None) == (model.init is None):
    raise ValueError('config.model: expected either path or init')
  name = model.path if model.tokenizer is None else model.tokenizer
  if name is None:
    raise ValueError("config.model.tokenizer: missing, expected a folder or 'bytes'")
  if model.path is not None:
    # Looked at first: transformers reads it too, and would blame the tokenizer.
    raw = hf_folder.read_config(weights.folder(model.path))
    hf_config.read(raw, known_tokens=None, dtype=model.dtype)
  if name != 'bytes':
    return load_tokenizer(weights.folder(name, tokenizer_only=name != model.path))
  with tempfile.TemporaryDirectory() as folder:
    build_byte_tokenizer(folder)
    return load_tokenizer(folder)


def described_model(
  model: Model, tokenizer: Tokenizer, *, vocab_parts: int
) -> ModelConfig:
  """The shape of what is trained. The files of the weights are seen to be whole.

  Args:
    vocab_parts: into how many parts the mesh cuts the vocabulary.
  """
  if model.path is None:
    return fresh_model(model, tokenizer)
  shape = weights.describe(
    model.path,
    dtype=model.dtype,
    vocab_parts=vocab_parts,
    known_tokens=known_ids(tokenizer),
  )
  weights.check(model.path, shape)
  if model.hf_config is not None:
    _check_same(model)
  return shape


def _check_same(model: Model) -> None:
  """What `preflight` was told of the model is what the folder says."""
  there = hf_folder.read_config(weights.folder(model.path))
  said, found = (
    dataclasses.asdict(hf_config.read(raw, known_tokens=None, dtype=model.dtype))
    for raw in (model.hf_config, there)
  )
  for key, value in found.items():
    if said[key] != value:
      raise ValueError(
        f'config.model.hf_config: its {key} is {said[key]}, but that of {model.path} is '
        f'{value}'
      )


def end_ids(model: Model, tokenizer: Tokenizer, shape: ModelConfig) -> tuple[int, ...]:
  """The ids that end an answer, checked against the model's."""
  found = stop_ids(
    tokenizer, None if model.path is None else weights.generation_config(model.path)
  )
  if len(found) > MAX_STOP_IDS:
    raise ValueError(f'stop ids: {len(found)} of them, at most {MAX_STOP_IDS}: {found}')
  if max(found, default=0) >= shape.vocab_used:
    raise ValueError(
      f'tokenizer: its end token {tokenizer.eos_token!r} has id '
      f'{tokenizer.eos_token_id}, expected one below {shape.vocab_used}, of which the '
      'model has embeddings'
    )
  return found


def end_notes(
  tokenizer: Tokenizer,
  ends: Sequence[int],
  turn_end: Sequence[int],
  stop_strings: Sequence[str],
) -> list[str]:
  """What is to be said of how answers end.

  Args:
    ends: ids that end an answer.
    turn_end: ids that the chat template puts after an assistant's turn.
  """
  ways = 'sampling.max_new_tokens' + ' or a stop string' * bool(stop_strings)
  if not ends:
    return [
      'the model has no end-of-text id, neither in its tokenizer nor in '
      f'generation_config.json: answers end only at {ways}'
    ]
  if not turn_end or any(end in ends for end in turn_end):
    return []
  said = tokenizer.convert_ids_to_tokens([turn_end[0], *ends])
  return [
    f'the chat template ends an assistant turn by {said[0]!r}, which ends no answer '
    f'(that does {", ".join(map(repr, said[1:]))}): a model that learned that template '
    f'writes on to {ways}'
  ]


def fresh_model(model: Model, tokenizer: Tokenizer) -> ModelConfig:
  """The shape of `model.init`; the vocabulary is the tokenizer's, unless given."""
  known = known_ids(tokenizer)
  sizes = {'vocab_size': known, 'known_tokens': known, 'dtype': model.dtype}
  config = ModelConfig(
    **settings.keywords('config.model.init', sizes | model.init, ModelConfig)
  )
  if config.known_tokens < known:
    raise ValueError(
      f'config.model.init.known_tokens: {config.known_tokens}, expected at least the '
      f"tokenizer's {known}"
    )
  return config


def trained_model(
  c: dict[str, Any], model: ModelConfig, base: dict | None, mesh: jax.sharding.Mesh
) -> tuple[ModelConfig, dict[str, Any]]:
  """The model with its adapters, if any, and how its checkpoints describe it.

  Args:
    base: the weights that adapters are for. Not looked at where there are none.
  """
  if c['lora'] is None:
    return model, dataclasses.asdict(model)
  model = dataclasses.replace(model, lora=lora.Lora(**c['lora']))
  return model, dataclasses.asdict(model) | {'base': lora.fingerprint(base, mesh)}


def judge_folder(c: dict[str, Any], folder: str) -> str:
  """Puts a Hugging Face folder, its tokenizer and end ids too, in the model's place.

  Returns:
    The name under which its results are kept.
  """
  c['model'] |= dict(path=folder, init=None, tokenizer=None, hf_config=None)
  return f'hf-{pathlib.Path(folder).resolve().name}'
