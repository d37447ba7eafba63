"""The tensors of a Hugging Face file, and how their axes are made of ours."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_sched.device import model
from jaxrl_sched.device.model import ModelConfig

# Our parameter, its name in the file, and what the axes of that tensor are made of:
# ((1, 2), (0,)) is a matrix whose rows are our axes 1 and 2 and whose columns are our
# axis 0, the stacked axis L not counted.
_OUTSIDE = {
  'embed': ('model.embed_tokens.weight', ((0,), (1,))),
  'norm.scale': ('model.norm.weight', ((0,),)),
  'head': ('lm_head.weight', ((0,), (1,))),
}
_IN_LAYER = {
  'blocks.attn_norm.scale': ('input_layernorm.weight', ((0,),)),
  'blocks.attn.q': ('self_attn.q_proj.weight', ((1, 2), (0,))),
  'blocks.attn.k': ('self_attn.k_proj.weight', ((1, 2), (0,))),
  'blocks.attn.v': ('self_attn.v_proj.weight', ((1, 2), (0,))),
  'blocks.attn.o': ('self_attn.o_proj.weight', ((2,), (0, 1))),
  'blocks.attn.q_bias': ('self_attn.q_proj.bias', ((0, 1),)),
  'blocks.attn.k_bias': ('self_attn.k_proj.bias', ((0, 1),)),
  'blocks.attn.v_bias': ('self_attn.v_proj.bias', ((0, 1),)),
  'blocks.attn.o_bias': ('self_attn.o_proj.bias', ((0,),)),
  'blocks.attn.q_norm.scale': ('self_attn.q_norm.weight', ((0,),)),
  'blocks.attn.k_norm.scale': ('self_attn.k_norm.weight', ((0,),)),
  'blocks.mlp_norm.scale': ('post_attention_layernorm.weight', ((0,),)),
  'blocks.mlp.gate': ('mlp.gate_proj.weight', ((1,), (0,))),
  'blocks.mlp.up': ('mlp.up_proj.weight', ((1,), (0,))),
  'blocks.mlp.down': ('mlp.down_proj.weight', ((1,), (0,))),
  'blocks.mlp.gate_bias': ('mlp.gate_proj.bias', ((0,),)),
  'blocks.mlp.up_bias': ('mlp.up_proj.bias', ((0,),)),
  'blocks.mlp.down_bias': ('mlp.down_proj.bias', ((0,),)),
}


class Tensor(NamedTuple):
  """One tensor of the file."""

  name: str
  key: str  # our parameter
  layer: int | None  # its place on the stacked axis L, if it has one
  ours: tuple[int, ...]  # its shape in our axes, less L and the vocabulary's padding
  groups: tuple[tuple[int, ...], ...]

  @property
  def shape(self) -> tuple[int, ...]:
    """In the file."""
    return tuple(math.prod(self.ours[axis] for axis in g) for g in self.groups)


def by_key(tree: dict) -> dict[str, Any]:
  """The leaves of a tree like the parameters by their dotted names."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {'.'.join(entry.key for entry in path): leaf for path, leaf in leaves}


def tensors(config: ModelConfig) -> list[Tensor]:
  """All that a file of this model holds, in the order of the computation."""
  ours = {key: s.shape for key, s in by_key(model.abstract(config)[0]).items()}
  for key in ours.keys() & {'embed', 'head'}:
    ours[key] = (config.vocab_used, *ours[key][1:])
  outside = [
    Tensor(name, key, None, ours[key], groups)
    for key, (name, groups) in _OUTSIDE.items()
    if key in ours
  ]
  inside = [
    Tensor(f'model.layers.{layer}.{name}', key, layer, ours[key][1:], groups)
    for layer in range(config.layers)
    for key, (name, groups) in _IN_LAYER.items()
    if key in ours
  ]
  return outside[:1] + inside + outside[1:]


def theirs(tensor: Tensor, value: Any, dtype: str) -> np.ndarray:
  """The tensor as the file has it, from our whole parameter."""
  # A slice, which is an array of its own: the host's copy goes when it goes.
  value = value[: tensor.ours[0]] if tensor.layer is None else value[tensor.layer]
  order = [axis for group in tensor.groups for axis in group]
  array = np.asarray(value).transpose(order).reshape(tensor.shape)
  with np.errstate(over='ignore'):  # whoever stores it looks for inf
    return np.ascontiguousarray(array.astype(dtype))


def reader(
  tensor: Tensor, shape: tuple[int, ...], stored: Any
) -> Callable[[tuple[slice, ...]], np.ndarray]:
  """A function from an index into our axes of this tensor to float32 values.

  Only the rows and columns that the index covers are read.

  Args:
    shape: of ours. What it has past `tensor.ours`, the padding of the vocabulary, is 0.
    stored: the tensor in the file, as something that slices are read from.
  """
  seen = {}  # devices with the same part share it

  def read(index):
    bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
    if bounds not in seen:
      seen[bounds] = _padded(tensor, stored, bounds)
    return seen[bounds]

  return read


def _padded(tensor: Tensor, stored, bounds) -> np.ndarray:
  inside = tuple(
    (min(start, n), min(stop, n))
    for (start, stop), n in zip(bounds, tensor.ours, strict=True)
  )
  if inside == bounds:
    return _cut(tensor, stored, bounds)
  part = np.zeros([stop - start for start, stop in bounds], np.float32)
  there = tuple(slice(stop - start) for start, stop in inside)
  if all(s.stop for s in there):
    part[there] = _cut(tensor, stored, inside)
  return part


def _cut(tensor: Tensor, stored, bounds) -> np.ndarray:
  """The part of our array within bounds, float32."""
  rows, split, rest = [], [], []
  for first, *inner in tensor.groups:
    width = math.prod(tensor.ours[axis] for axis in inner)
    start, stop = bounds[first]
    rows.append(slice(start * width, stop * width))
    split += [stop - start, *(tensor.ours[axis] for axis in inner)]
    rest += [slice(None), *(slice(*bounds[axis]) for axis in inner)]
  block = stored[tuple(rows)].reshape(split)[tuple(rest)]
  order = [axis for group in tensor.groups for axis in group]
  return np.ascontiguousarray(block.transpose(np.argsort(order)), np.float32)
