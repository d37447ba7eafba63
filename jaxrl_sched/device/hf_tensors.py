"""The tensors of a Hugging Face file, and how their axes are made of ours."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_sched.device.model import ModelConfig

# Our parameter, its name in the file, and what the axes of that tensor are made of:
# ((1, 2), (0,)) is a matrix whose rows are our axes 1 and 2 and whose columns are our
# axis 0, the stacked axis L not counted.
_OUTSIDE = {
  'embed': ('model.embed_tokens.weight', ((0,), (1,))),
  'norm.scale': ('model.norm.weight', ((0,),)),
  'head': ('lm_head.weight', ((1,), (0,))),
}
_IN_LAYER = {
  'attn_norm.scale': ('input_layernorm.weight', ((0,),)),
  'attn.q': ('self_attn.q_proj.weight', ((1, 2), (0,))),
  'attn.k': ('self_attn.k_proj.weight', ((1, 2), (0,))),
  'attn.v': ('self_attn.v_proj.weight', ((1, 2), (0,))),
  'attn.o': ('self_attn.o_proj.weight', ((2,), (0, 1))),
  'attn.q_bias': ('self_attn.q_proj.bias', ((0, 1),)),
  'attn.k_bias': ('self_attn.k_proj.bias', ((0, 1),)),
  'attn.v_bias': ('self_attn.v_proj.bias', ((0, 1),)),
  'attn.q_norm.scale': ('self_attn.q_norm.weight', ((0,),)),
  'attn.k_norm.scale': ('self_attn.k_norm.weight', ((0,),)),
  'mlp_norm.scale': ('post_attention_layernorm.weight', ((0,),)),
  'mlp.gate': ('mlp.gate_proj.weight', ((1,), (0,))),
  'mlp.up': ('mlp.up_proj.weight', ((1,), (0,))),
  'mlp.down': ('mlp.down_proj.weight', ((1,), (0,))),
}


class Tensor(NamedTuple):
  """One tensor of the file."""

  name: str
  shape: tuple[int, ...]
  key: str  # our parameter
  layer: int | None  # its place on the stacked axis L, if it has one
  groups: tuple[tuple[int, ...], ...]


def dotted(path) -> str:
  """Our parameter's name from its place in the tree."""
  return '.'.join(entry.key for entry in path)


def tensors(config: ModelConfig, shapes: dict) -> list[Tensor]:
  """All that a file of this model holds, in the order of the computation."""
  ours = {
    dotted(path): shape.shape
    for path, shape in jax.tree_util.tree_flatten_with_path(shapes)[0]
  }

  def tensor(name, key, layer, groups):
    shape = ours[key] if layer is None else ours[key][1:]
    theirs = tuple(math.prod(shape[axis] for axis in group) for group in groups)
    return Tensor(name, theirs, key, layer, groups)

  outside = [
    tensor(name, key, None, groups)
    for key, (name, groups) in _OUTSIDE.items()
    if key in ours
  ]
  inside = [
    tensor(f'model.layers.{layer}.{name}', f'blocks.{key}', layer, groups)
    for layer in range(config.layers)
    for key, (name, groups) in _IN_LAYER.items()
    if f'blocks.{key}' in ours
  ]
  return outside[:1] + inside + outside[1:]


def theirs(tensor: Tensor, value: Any, dtype: str) -> np.ndarray:
  """The tensor as the file has it, from our whole parameter."""
  value = value if tensor.layer is None else value[tensor.layer]
  order = [axis for group in tensor.groups for axis in group]
  array = np.asarray(value).transpose(order).reshape(tensor.shape)
  with np.errstate(over='ignore'):  # whoever stores it looks for inf
    return np.ascontiguousarray(array.astype(dtype))


def reader(key: str, shape, stored) -> Callable[[tuple[slice, ...]], np.ndarray]:
  """A function from an index into our parameter to its values."""
  seen = {}  # devices with the same part share it

  def read(index):
    bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
    if bounds not in seen:
      if key in _OUTSIDE:
        name, groups = _OUTSIDE[key]
        seen[bounds] = _cut(stored[name], groups, shape, bounds)
      else:
        name, groups = _IN_LAYER[key.removeprefix('blocks.')]
        part = np.empty([stop - start for start, stop in bounds], np.float32)
        for i, layer in enumerate(range(*bounds[0])):
          tensor = stored[f'model.layers.{layer}.{name}']
          part[i] = _cut(tensor, groups, shape[1:], bounds[1:])
        seen[bounds] = part
    return seen[bounds]

  return read


def _cut(tensor, groups, shape, bounds) -> np.ndarray:
  """The part of our array within bounds, float32, from a tensor of the file."""
  rows, split, rest = [], [], []
  for first, *inner in groups:
    width = math.prod(shape[axis] for axis in inner)
    start, stop = bounds[first]
    rows.append(slice(start * width, stop * width))
    split += [stop - start, *(shape[axis] for axis in inner)]
    rest += [slice(None), *(slice(*bounds[axis]) for axis in inner)]
  block = tensor[tuple(rows)].reshape(split)[tuple(rest)]
  order = [axis for group in groups for axis in group]
  return np.ascontiguousarray(block.transpose(np.argsort(order)), np.float32)
