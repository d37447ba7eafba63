"""Hugging Face folders <-> our parameters, exactly, a slice at a time.

On the way in each device's part of a tensor is read straight from the file, and the
host holds one tensor of the file at a time; on the way out no more than a shard.
Every tensor is used and every parameter filled, or the error names those that are not.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from jaxrl_sched import storage
from jaxrl_sched.device import hf_config, hf_folder, hf_tensors, model
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device.hf_fields import integer
from jaxrl_sched.device.hf_folder import Stored, folder
from jaxrl_sched.device.hf_tensors import Tensor
from jaxrl_sched.device.model import ModelConfig
from jaxrl_sched.device.tokenizers import known_ids, load_tokenizer, stop_ids

_STORED = ('F32', 'BF16', 'F16')
_SPECIAL_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')
# Rows of the vocabulary are made a multiple of this, so that every mesh with a power
# of two of devices can cut them and reads the others' checkpoints.
_VOCAB_STEP = 128

_TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'tokenizer.model',
  'vocab.json',
)


def generation_config(path_or_hub_id: str | os.PathLike) -> dict[str, Any] | None:
  """What generation_config.json says; it names end ids that the tokenizer does not.

  Where there is none the special ids of config.json stand in, as in transformers.
  """
  where = folder(path_or_hub_id)
  raw = hf_folder.read_config(where)
  file = where / 'generation_config.json'
  if file.exists():
    found = hf_folder.read_json(file)
  else:
    file = where / 'config.json'
    found = {key: raw[key] for key in _SPECIAL_IDS if raw.get(key) is not None}
  ends, rows = found.get('eos_token_id'), integer('vocab_size', raw.get('vocab_size'))
  for end in ends if isinstance(ends, list) else [0 if ends is None else ends]:
    if isinstance(end, bool) or not isinstance(end, int) or not 0 <= end < rows:
      why = f'expected an id from 0 to {rows - 1}, or a list of them'
      raise ValueError(f'{file}: eos_token_id: {ends!r:.200}, {why}')
  return found or None


def describe(
  path_or_hub_id: str | os.PathLike,
  *,
  dtype: str = 'float32',
  vocab_parts: int = 1,
  known_tokens: int | None = None,
) -> ModelConfig:
  """The model of a folder, as `load` has it, without its weights.

  Args:
    dtype: of the computation.
    vocab_parts: into how many parts the mesh cuts the vocabulary.
    known_tokens: ids that the tokenizer knows; None: that in the folder, if any.
  """
  where = folder(path_or_hub_id)
  raw = hf_folder.read_config(where)
  known_tokens = known_tokens or _known_tokens(where)
  config = hf_config.read(raw, known_tokens=known_tokens, dtype=dtype)
  return padded(config, vocab_parts=vocab_parts)


def padded(config: ModelConfig, *, vocab_parts: int) -> ModelConfig:
  """The model of a config.json, with rows of zeros so that its vocabulary divides."""
  padding = -config.vocab_size % math.lcm(_VOCAB_STEP, vocab_parts)
  return dataclasses.replace(
    config, vocab_size=config.vocab_size + padding, vocab_padding=padding
  )


def check(path_or_hub_id: str | os.PathLike, config: ModelConfig) -> None:
  """Whether the files have all that `load` reads, by their headers.

  Raises:
    ValueError: they do not; the message names the file and the tensor.
  """
  where = folder(path_or_hub_id)
  with contextlib.ExitStack() as stack:
    _check(hf_folder.open_tensors(where, stack), config, where)


def load(
  path_or_hub_id: str | os.PathLike,
  *,
  mesh: jax.sharding.Mesh | None = None,
  dtype: str = 'float32',
  vocab_parts: int | None = None,
  known_tokens: int | None = None,
) -> tuple[ModelConfig, dict]:
  """Reads a Llama, Mistral, Qwen2 or Qwen3 from an ordinary Hugging Face folder.

  Rows of zeros are added to the vocabulary up to a multiple of 128; no token has
  them, and `export` leaves them out.

  Args:
    path_or_hub_id: a folder with config.json and safetensors, gs:// or not, or
      owner/name.
    mesh: where the parameters go; None: one device.
    dtype: of the computation. The parameters are float32, whatever is stored.
    vocab_parts: as another mesh cuts the vocabulary; None: as this mesh does.
    known_tokens: ids that the tokenizer knows; None: that in the folder, if any.

  Raises:
    ValueError: a setting that is not implemented, a file or tensor that is missing,
      left over, of another shape, of a dtype that is not a float, or not finite.
  """
  where = folder(path_or_hub_id)
  if mesh is None:
    mesh = meshes.make_mesh(devices=jax.local_devices())
  vocab_parts = vocab_parts or meshes.size(mesh, 'vocab')
  config = describe(
    where, dtype=dtype, vocab_parts=vocab_parts, known_tokens=known_tokens
  )
  shapes, axes = model.abstract(config)
  shardings = meshes.parameter_shardings(shapes, axes, mesh)
  with contextlib.ExitStack() as stack:
    stored = hf_folder.open_tensors(where, stack)
    _check(stored, config, where)
    filled = _fill(config, shapes, shardings, stored)
  leaves = [filled.pop(key) for key in hf_tensors.by_key(shapes)]
  return config, jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _fill(
  config: ModelConfig, shapes: dict, shardings: dict, stored: dict[str, Stored]
) -> dict[str, jax.Array]:
  """Every parameter by its name, from one tensor of the file after the other."""
  shapes, shardings = hf_tensors.by_key(shapes), hf_tensors.by_key(shardings)
  filled: dict[str, jax.Array] = {}
  for tensor in hf_tensors.tensors(config):
    key, shape, at = tensor.key, shapes[tensor.key].shape, shardings[tensor.key]
    if tensor.layer is None:
      read = _reader(tensor, shape, stored[tensor.name])
      filled[key] = jax.make_array_from_callback(shape, at, read)
    else:
      zeros, put = _stacking(shape, at)
      read = _reader(tensor, shape[1:], stored[tensor.name])
      at = jax.sharding.NamedSharding(at.mesh, jax.P(*at.spec[1:]))
      part = jax.make_array_from_callback(shape[1:], at, read)
      whole = filled.pop(key) if key in filled else zeros()
      filled[key] = put(whole, part, tensor.layer)
    # Waits, so that one tensor at a time is on the host.
    filled[key].block_until_ready()
  return filled


def _reader(
  tensor: Tensor, shape: tuple[int, ...], stored: Stored
) -> Callable[[tuple[slice, ...]], np.ndarray]:
  """A function from an index to values, which are all finite."""
  read = hf_tensors.reader(tensor, shape, stored.slices)

  def finite(index):
    part = read(index)
    with np.errstate(invalid='ignore'):  # NaN is the least and the most of its array
      if not np.isfinite([part.min(), part.max()]).all():
        raise ValueError(
          f'{stored.file}: {tensor.name} is not finite: it has NaN or inf'
        )
    return part

  return finite


@functools.lru_cache(maxsize=64)
def _stacking(shape: tuple[int, ...], at: jax.sharding.NamedSharding):
  """Functions that make a parameter of zeros, and that put a layer into its place.

  Donated, all layers are there once, wherever they lie.
  """
  zeros = jax.jit(lambda: jnp.zeros(shape), out_shardings=at)
  put = jax.jit(
    lambda whole, part, layer: whole.at[layer].set(part),
    donate_argnums=0,
    out_shardings=at,
  )
  return zeros, put


def export(
  config: ModelConfig,
  parameters: dict,
  out: str | os.PathLike,
  *,
  tokenizer: PreTrainedTokenizerBase | None = None,
  stored_dtype: str = 'float32',
  generation_config: dict[str, Any] | None = None,
  max_shard_bytes: int = 5 * 10**9,
) -> None:
  """Writes a Hugging Face folder, whole or not at all.

  Args:
    out: a new or empty folder.
    tokenizer: its files are written too, and its end id is among those named.
    generation_config: settings for generation_config.json, such as the source's.
    max_shard_bytes: past it there are several files, with an index.

  Raises:
    ValueError: `out` is not empty, no architecture fits, parameters lie on devices of
      other processes, or a weight is not finite in `stored_dtype`.
    OSError: the disk is full, or not to be written to.
  """
  if storage.is_remote(out):
    raise ValueError(f'export: {out}, expected a local folder; see storage.written')
  out = pathlib.Path(out).expanduser()
  if out.exists() and not (out.is_dir() and not any(out.iterdir())):
    raise ValueError(f'export: {out} exists, expected a new or empty folder')
  if config.lora is not None:
    raise ValueError('export: adapters have no tensors of their own, merge them first')
  if stored_dtype not in hf_config.DTYPES:
    known = ', '.join(hf_config.DTYPES)
    raise ValueError(f'stored_dtype: {stored_dtype!r}, expected one of {known}')
  generation = _generation(tokenizer, generation_config)
  raw = hf_config.write(
    dataclasses.replace(config, vocab_size=config.vocab_used, vocab_padding=0),
    stored_dtype=stored_dtype,
    special_ids={k: generation.get(k) for k in _SPECIAL_IDS},
  )
  out.parent.mkdir(parents=True, exist_ok=True)
  made = pathlib.Path(
    tempfile.mkdtemp(prefix=f'.{out.name}.', suffix='.tmp', dir=out.parent)
  )
  try:
    _write_tensors(config, parameters, made, stored_dtype, max_shard_bytes)
    if tokenizer is not None:
      tokenizer.save_pretrained(made)
    if generation:
      hf_folder.write_json(made / 'generation_config.json', generation)
    hf_folder.write_json(made / 'config.json', raw)
    umask = os.umask(0)
    os.umask(umask)
    # mkdtemp and safetensors make what only the owner may read.
    made.chmod(0o777 & ~umask)
    for file in made.glob('*.safetensors'):
      file.chmod(0o666 & ~umask)
    made.rename(out)
  except BaseException:
    shutil.rmtree(made, ignore_errors=True)
    raise


def _generation(tokenizer, given: dict[str, Any] | None) -> dict[str, Any]:
  """generation_config.json: what was given, with every end id there is."""
  result = dict(given or {})
  if tokenizer is None:
    return result
  ends = stop_ids(tokenizer, given)
  if ends:
    result['eos_token_id'] = ends[0] if len(ends) == 1 else list(ends)
  for key, value in (
    ('bos_token_id', tokenizer.bos_token_id),
    ('pad_token_id', tokenizer.pad_token_id),
  ):
    if value is not None:
      result.setdefault(key, value)
  return result


def _known_tokens(where: pathlib.Path) -> int | None:
  if not any((where / name).exists() for name in _TOKENIZER_FILES):
    return None
  return known_ids(load_tokenizer(where))


def _check(stored: dict[str, Stored], config: ModelConfig, where) -> None:
  """Every tensor has a use, every parameter a tensor of its shape and a float."""
  expected = {t.name: t.shape for t in hf_tensors.tensors(config)}
  # Old files hold a table that follows from the config.
  there = {name for name in stored if not name.endswith('rotary_emb.inv_freq')}
  tied = config.tied and 'lm_head.weight' in there
  if tied:
    there.remove('lm_head.weight')
  hf_folder.same(there, set(expected), where, 'used')
  for name, shape in expected.items():
    slices, file = stored[name]
    found, kind = tuple(slices.get_shape()), slices.get_dtype()
    if found != shape:
      raise ValueError(f'{file}: {name} is {list(found)}, expected {list(shape)}')
    if kind not in _STORED:
      known = ', '.join(_STORED)
      raise ValueError(f'{file}: {name} is stored as {kind}, expected one of {known}')
  if tied:
    _check_tied(stored['lm_head.weight'], stored['model.embed_tokens.weight'].slices)


def _check_tied(head: Stored, embed) -> None:
  """A head stored beside a tied embedding is its copy.

  Every process reads both whole, a few rows at a time: few files hold such a head.
  """
  same = head.slices.get_shape() == embed.get_shape()
  rows = embed.get_shape()[0]
  for start in range(0, rows if same else 0, 4096):
    part = slice(start, min(start + 4096, rows))
    same = same and np.array_equal(head.slices[part], embed[part])
  if not same:
    raise ValueError(
      f'{head.file}: lm_head.weight differs from the embedding, though config.json has '
      'tie_word_embeddings true'
    )


def _write_tensors(config, parameters, where, stored_dtype, max_shard_bytes) -> None:
  values = _values(parameters, config)
  width = jnp.dtype(stored_dtype).itemsize
  shards, sizes = [[]], [0]
  for tensor in hf_tensors.tensors(config):
    size = width * math.prod(tensor.shape)
    if shards[-1] and sizes[-1] + size > max_shard_bytes:
      shards.append([])
      sizes.append(0)
    shards[-1].append(tensor)
    sizes[-1] += size
  weight_map = {}
  for number, shard in enumerate(shards, 1):
    file = f'model-{number:05}-of-{len(shards):05}.safetensors'
    file = file if len(shards) > 1 else hf_folder.ONE
    stored = {}
    for tensor in shard:
      stored[tensor.name] = hf_tensors.theirs(tensor, values[tensor.key], stored_dtype)
      if not np.isfinite(stored[tensor.name]).all():
        raise ValueError(f'export: {tensor.name} is not finite in {stored_dtype}')
    try:
      save_file(stored, where / file, metadata={'format': 'pt'})
    except SafetensorError as error:  # its own name for a full disk
      raise OSError(f'export: {file} cannot be written: {error}') from None
    weight_map |= dict.fromkeys(stored, file)
    del stored  # before the next shard is made
  if len(shards) > 1:
    index = {'metadata': {'total_size': sum(sizes)}, 'weight_map': weight_map}
    hf_folder.write_json(where / hf_folder.INDEX, index)


def _values(parameters: dict, config: ModelConfig) -> dict[str, Any]:
  ours = hf_tensors.by_key(parameters)
  values = {key: value.shape for key, value in ours.items()}
  shapes = hf_tensors.by_key(model.abstract(config)[0])
  expected = {key: shape.shape for key, shape in shapes.items()}
  if values != expected:
    odd = sorted(k for k in values | expected if values.get(k) != expected.get(k))
    key = odd[0]
    raise ValueError(
      f'export: parameter {key}: {values.get(key)}, expected {expected.get(key)}'
    )
  for key, leaf in ours.items():
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      raise ValueError(f'export: {key} lies on devices of other processes, too')
  return ours
