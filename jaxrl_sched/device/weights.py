"""Hugging Face folders <-> our parameters, exactly, a slice at a time.

On the way in each device's part is read straight from the file; on the way out no
more than a shard is held. Every tensor is used and every parameter filled, or the
error names those that are not.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
from typing import Any

import huggingface_hub
import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from jaxrl_sched.device import hf_config, hf_tensors, model
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device.model import ModelConfig
from jaxrl_sched.device.prompts import load_tokenizer, stop_ids

_ONE, _INDEX = 'model.safetensors', 'model.safetensors.index.json'
_STORED = ('F32', 'BF16', 'F16')

_TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'tokenizer.model',
  'vocab.json',
)


def folder(path_or_hub_id: str | os.PathLike) -> pathlib.Path:
  """The folder of a model; one on the hub is fetched, or found in the local cache."""
  path = pathlib.Path(path_or_hub_id).expanduser()
  if path.is_dir():
    return path
  name = os.fspath(path_or_hub_id)
  if not re.fullmatch(r'[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*', name):
    raise ValueError(f'model: {name}: no such folder, and not a hub id (owner/name)')
  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(
        name,
        allow_patterns=['*.json', '*.safetensors', '*.jinja', 'tokenizer*', '*.txt'],
        ignore_patterns=['*/*', 'consolidated*'],
      )
    )
  except Exception as error:  # the hub's client raises many kinds, of many lines
    reason = ' '.join(str(error).split())[:200]
    raise ValueError(
      f'model: {name}: no such folder, and not to be had from the hub: {reason}'
    ) from error


def generation_config(path_or_hub_id: str | os.PathLike) -> dict[str, Any] | None:
  """What generation_config.json says; it names end ids that the tokenizer does not."""
  file = folder(path_or_hub_id) / 'generation_config.json'
  return _json(file) if file.exists() else None


def load(
  path_or_hub_id: str | os.PathLike,
  *,
  mesh: jax.sharding.Mesh | None = None,
  dtype: str = 'float32',
) -> tuple[ModelConfig, dict]:
  """Reads a Llama, Mistral, Qwen2 or Qwen3 from an ordinary Hugging Face folder.

  Args:
    path_or_hub_id: a folder with config.json and safetensors, or owner/name.
    mesh: where the parameters go; None: one device.
    dtype: of the computation. The parameters are float32, whatever is stored.

  Raises:
    ValueError: a setting that is not implemented, a file or tensor that is missing,
      left over, of another shape or of a dtype that is not a float.
  """
  where = folder(path_or_hub_id)
  config = hf_config.read(
    _json(where / 'config.json'), known_tokens=_known_tokens(where), dtype=dtype
  )
  shapes, axes = model.abstract(config)
  if mesh is None:
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: one, shapes)
  else:
    shardings = meshes.parameter_shardings(shapes, axes, mesh)

  with contextlib.ExitStack() as stack:
    stored = _open(where, stack)
    _check(stored, config, shapes, where)

    def place(path, shape, sharding):
      read = hf_tensors.reader(hf_tensors.dotted(path), shape.shape, stored)
      array = jax.make_array_from_callback(shape.shape, sharding, read)
      return array.block_until_ready()  # so that one parameter at a time is on the host

    return config, jax.tree_util.tree_map_with_path(place, shapes, shardings)


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
  """
  out = pathlib.Path(out).expanduser()
  if out.exists() and not (out.is_dir() and not any(out.iterdir())):
    raise ValueError(f'export: {out} exists, expected a new or empty folder')
  if stored_dtype not in hf_config.DTYPES:
    known = ', '.join(hf_config.DTYPES)
    raise ValueError(f'stored_dtype: {stored_dtype!r}, expected one of {known}')
  generation = _generation(tokenizer, generation_config)
  ids = ('bos_token_id', 'eos_token_id', 'pad_token_id')
  raw = hf_config.write(
    config, stored_dtype=stored_dtype, special_ids={k: generation.get(k) for k in ids}
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
      _write_json(made / 'generation_config.json', generation)
    _write_json(made / 'config.json', raw)
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
  # Not len(): where ids have holes the last ones would be taken for unknown.
  return max(load_tokenizer(where).get_vocab().values()) + 1


# The tensors of a folder.


def _open(where: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
  """Every tensor stored, by name, as a slice to be read from."""
  one, index = where / _ONE, where / _INDEX
  if one.exists() and index.exists():
    raise ValueError(f'{where}: has both {_ONE} and {_INDEX}, expected one of them')
  weight_map = None
  files = [_ONE]
  if index.exists():
    weight_map = _json(index).get('weight_map')
    if not isinstance(weight_map, dict) or not weight_map:
      raise ValueError(f'{index}: weight_map: {weight_map!r:.60}, expected an object')
    files = sorted(set(weight_map.values()))
    extra = {f.name for f in where.glob('model*.safetensors')} - set(files)
    if extra:
      raise ValueError(f'{where}: {_some(extra)} not in the index {_INDEX}')
  stored = {}
  for name in files:
    if not (where / name).is_file():
      says = f', which the index {_INDEX} names' if weight_map else f' or {_INDEX}'
      raise ValueError(f'{where}: no {name}{says}')
    try:
      opened = stack.enter_context(safe_open(where / name, framework='numpy'))
    except SafetensorError as error:
      raise ValueError(
        f'{where / name}: not a whole safetensors file: {error}'
      ) from None
    here = set(opened.keys())
    if weight_map is not None:
      listed = {tensor for tensor, file in weight_map.items() if file == name}
      _same(here, listed, where / name, f'in the index {_INDEX}')
    stored |= {tensor: opened.get_slice(tensor) for tensor in here}
  return stored


def _same(there: set[str], expected: set[str], where: pathlib.Path, whose: str) -> None:
  if there != expected:
    raise ValueError(
      f'{where}: tensors missing: {_some(expected - there)}; '
      f'tensors not {whose}: {_some(there - expected)}'
    )


def _some(names: set[str]) -> str:
  shown = ', '.join(sorted(names)[:8])
  return f'{shown} and {len(names) - 8} more' if len(names) > 8 else shown or 'none'


def _check(stored: dict[str, Any], config: ModelConfig, shapes, where) -> None:
  """Every tensor has a use, every parameter a tensor of its shape and a float."""
  expected = {t.name: t.shape for t in hf_tensors.tensors(config, shapes)}
  # Old files hold a table that follows from the config.
  there = {name for name in stored if not name.endswith('rotary_emb.inv_freq')}
  if config.tied and 'lm_head.weight' in there:
    _check_tied(stored, where)
    there.remove('lm_head.weight')
  _same(there, set(expected), where, 'used')
  for name, shape in expected.items():
    found, kind = tuple(stored[name].get_shape()), stored[name].get_dtype()
    if found != shape:
      raise ValueError(f'{where}: {name} is {list(found)}, expected {list(shape)}')
    if kind not in _STORED:
      known = ', '.join(_STORED)
      raise ValueError(f'{where}: {name} is stored as {kind}, expected one of {known}')


def _check_tied(stored: dict[str, Any], where: pathlib.Path) -> None:
  head, embed = stored['lm_head.weight'], stored.get('model.embed_tokens.weight')
  same = embed is not None and head.get_shape() == embed.get_shape()
  rows = head.get_shape()[0]
  for start in range(0, rows if same else 0, 4096):
    part = slice(start, min(start + 4096, rows))
    same = same and np.array_equal(head[part], embed[part])
  if not same:
    raise ValueError(
      f'{where}: lm_head.weight differs from the embedding, though config.json has '
      'tie_word_embeddings true'
    )


def _write_tensors(config, parameters, where, stored_dtype, max_shard_bytes) -> None:
  shapes, _ = model.abstract(config)
  values = _values(parameters, shapes)
  width = jax.numpy.dtype(stored_dtype).itemsize
  shards, sizes = [[]], [0]
  for tensor in hf_tensors.tensors(config, shapes):
    size = width * math.prod(tensor.shape)
    if shards[-1] and sizes[-1] + size > max_shard_bytes:
      shards.append([])
      sizes.append(0)
    shards[-1].append(tensor)
    sizes[-1] += size
  weight_map = {}
  for number, shard in enumerate(shards, 1):
    file = f'model-{number:05}-of-{len(shards):05}.safetensors'
    file = file if len(shards) > 1 else _ONE
    stored = {}
    for tensor in shard:
      stored[tensor.name] = hf_tensors.theirs(tensor, values[tensor.key], stored_dtype)
      if not np.isfinite(stored[tensor.name]).all():
        raise ValueError(f'export: {tensor.name} is not finite in {stored_dtype}')
    save_file(stored, where / file, metadata={'format': 'pt'})
    weight_map |= dict.fromkeys(stored, file)
  if len(shards) > 1:
    index = {'metadata': {'total_size': sum(sizes)}, 'weight_map': weight_map}
    _write_json(where / _INDEX, index)


def _values(parameters: dict, shapes: dict) -> dict[str, Any]:
  flat = [
    {
      hf_tensors.dotted(path): leaf
      for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    for tree in (parameters, shapes)
  ]
  values, expected = ({k: v.shape for k, v in tree.items()} for tree in flat)
  if values != expected:
    odd = sorted(k for k in values | expected if values.get(k) != expected.get(k))
    key = odd[0]
    raise ValueError(
      f'export: parameter {key}: {values.get(key)}, expected {expected.get(key)}'
    )
  for key, leaf in flat[0].items():
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      raise ValueError(f'export: {key} lies on devices of other processes, too')
  return flat[0]


def _json(file: pathlib.Path) -> dict[str, Any]:
  if not file.is_file():
    raise ValueError(f'{file}: no such file')
  try:
    content = json.loads(file.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{file}: not JSON: {error}') from None
  if not isinstance(content, dict):
    raise ValueError(f'{file}: {content!r:.60}, expected an object')
  return content


def _write_json(file: pathlib.Path, content: dict[str, Any]) -> None:
  file.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
