"""Meshes, and the one table from logical axes to mesh axes.

Weights, optimizer state, rows and slots are all sharded by it.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

ON_CPU = ' (on a CPU JAX_NUM_CPU_DEVICES says how many)'
AXES = ('data', 'fsdp', 'model')
RULES = {
  'layer': None,
  'embed': 'fsdp',
  'vocab': 'model',
  'heads': 'model',
  'kv_heads': 'model',
  'head': None,
  'mlp': 'model',
  'rows': ('data', 'fsdp'),  # of a packed batch
  'slots': ('data', 'fsdp'),  # of the sampler
}


def make_mesh(*, data: int = 1, fsdp: int = 1, model: int = 1, devices=None) -> Mesh:
  """A mesh of data x fsdp x model devices, the first of those there are."""
  devices = jax.devices() if devices is None else devices
  shape = (data, fsdp, model)
  count = int(np.prod(shape))
  if min(shape) < 1 or count > len(devices):
    raise ValueError(
      f'mesh: data={data} * fsdp={fsdp} * model={model} = {count} devices, expected '
      f'1 to {len(devices)}, the devices there are'
      f'{ON_CPU if devices[0].platform == "cpu" else ""}'
    )
  return Mesh(np.asarray(devices[:count]).reshape(shape), AXES)


def size(mesh: Mesh, logical: str) -> int:
  """Into how many parts the mesh cuts this logical axis."""
  names = RULES[logical]
  if names is None:
    return 1
  names = (names,) if isinstance(names, str) else names
  return int(np.prod([mesh.shape[name] for name in names]))


def spec(*logical: str | None) -> PartitionSpec:
  return PartitionSpec(*(None if a is None else RULES[a] for a in logical))


def sharding(mesh: Mesh, *logical: str | None) -> NamedSharding:
  return NamedSharding(mesh, spec(*logical))


def parameter_shardings(shapes: dict, axes: dict, mesh: Mesh, *, whole=()) -> dict:
  """A tree of shardings like the parameters.

  Args:
    shapes, axes: what `model.abstract` gives.
    whole: logical axes that are not cut here (the sampler keeps 'embed' whole).

  Raises:
    ValueError: a dimension does not divide; the message names it.
  """

  def one(path, shape, names):
    for length, name in zip(shape.shape, names, strict=True):
      parts = 1 if name is None or name in whole else size(mesh, name)
      if length % parts:
        raise ValueError(
          f'mesh: {jax.tree_util.keystr(path)} has {length} {name}, which '
          f'{RULES[name]}={parts} does not divide'
        )
    return sharding(mesh, *(None if n in whole else n for n in names))

  return jax.tree_util.tree_map_with_path(
    one, shapes, axes, is_leaf=lambda x: isinstance(x, tuple)
  )
