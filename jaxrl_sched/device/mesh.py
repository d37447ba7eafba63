"""Meshes, and the one table from logical axes to mesh axes.

Weights, optimizer state, activations, cache and rows are all sharded by it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

ON_CPU = ' (on a CPU JAX_NUM_CPU_DEVICES says how many)'
AXES = ('data', 'fsdp', 'sequence', 'model')
RULES = {
  'layer': None,
  'embed': ('fsdp', 'sequence'),
  'vocab': 'model',
  'heads': 'model',
  'kv_heads': 'model',
  'head': None,
  'mlp': 'model',
  'rows': ('data', 'fsdp'),  # of a packed batch
  'tokens': 'sequence',  # of a row
  'slots': ('data', 'fsdp', 'sequence'),  # of the sampler
}


def make_mesh(
  *, data: int = 1, fsdp: int = 1, sequence: int = 1, model: int = 1, devices=None
) -> Mesh:
  """A mesh of data x fsdp x sequence x model devices.

  Of each host the first, as many of one as of the other, and a host's beside each
  other, so that the last axes stay within a host where they can.

  Args:
    devices: to choose from; None: all there are.
  """
  devices = jax.devices() if devices is None else devices
  sizes = dict(zip(AXES, (data, fsdp, sequence, model), strict=True))
  count = math.prod(sizes.values())
  if min(sizes.values()) < 1 or count > len(devices):
    raise ValueError(
      f'mesh: {product(sizes)} = {count} devices, expected 1 to {len(devices)}, the '
      f'devices there are{ON_CPU if devices[0].platform == "cpu" else ""}'
    )
  hosts = by_host(devices)
  each = count // len(hosts)
  if count % len(hosts) or min(map(len, hosts)) < each:
    raise ValueError(
      f'mesh: {count} devices, expected a multiple of the {len(hosts)} hosts, each of '
      f'which has {min(map(len, hosts))}'
    )
  chosen = [device for host in hosts for device in host[:each]]
  return Mesh(np.asarray(chosen).reshape(tuple(sizes.values())), AXES)


def is_one_cpu(mesh: Mesh | None) -> bool:
  """Whether programs are to take the form that is fastest on a single CPU device."""
  return mesh is not None and mesh.size == 1 and mesh.devices.flat[0].platform == 'cpu'


def product(sizes: Mapping[str, int]) -> str:
  """'fsdp=4 * model=2': the axes of these sizes, without those of 1 where others are."""
  told = {name: n for name, n in sizes.items() if n != 1} or sizes
  return ' * '.join(f'{name}={n}' for name, n in told.items())


def by_host(devices: Sequence) -> list[list]:
  """The devices of each process, in its order."""
  hosts: dict[int, list] = {}
  for device in devices:
    hosts.setdefault(device.process_index, []).append(device)
  return [hosts[index] for index in sorted(hosts)]


def mesh_axes(logical: str | None) -> tuple[str, ...]:
  """The mesh axes that cut this logical axis."""
  names = None if logical is None else RULES[logical]
  return (names,) if isinstance(names, str) else names or ()


def size(mesh: Mesh, logical: str) -> int:
  """Into how many parts the mesh cuts this logical axis."""
  return math.prod(mesh.shape[name] for name in mesh_axes(logical))


def spec(*logical: str | None) -> PartitionSpec:
  return PartitionSpec(*(None if a is None else RULES[a] for a in logical))


def sharding(mesh: Mesh, *logical: str | None) -> NamedSharding:
  return NamedSharding(mesh, spec(*logical))


def put(tree: Any, shardings: Any) -> Any:
  """Brings a tree of arrays to shardings, also to those of several processes.

  Each process gives its devices their parts of what it has; all have to have the same.
  """

  def one(x, at):
    if at.is_fully_addressable or (isinstance(x, jax.Array) and x.sharding == at):
      return jax.device_put(x, at)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, at, lambda index: x[index])

  if isinstance(shardings, NamedSharding):
    return jax.tree.map(lambda x: one(x, shardings), tree)
  return jax.tree.map(one, tree, shardings)


# --- parameters ------------------------------------------------------------------


def parameter_shardings(shapes: dict, axes: dict, mesh: Mesh, *, whole=()) -> dict:
  """A tree of shardings like the parameters.

  Args:
    shapes, axes: what `model.abstract` gives.
    whole: logical axes that are not cut here (the sampler keeps 'embed' whole).

  Raises:
    ValueError: a dimension does not divide; see `check_divides`.
  """
  check_divides(shapes, axes, mesh.shape, whole=whole)
  return jax.tree.map(
    lambda _, names: sharding(mesh, *(None if n in whole else n for n in names)),
    shapes,
    axes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def check_divides(
  shapes: dict,
  axes: dict,
  sizes: Mapping[str, int],
  *,
  whole: Collection[str] = (),
  key: str = 'mesh',
) -> None:
  """Whether mesh axes of these sizes cut every parameter evenly.

  Args:
    shapes, axes: what `model.abstract` gives.
    sizes: of mesh axes; those that are not named are 1.
    key: what the sizes are called in the config.

  Raises:
    ValueError: they do not; the message names the axis, what it does not divide, and
      the nearest size that divides all that this axis cuts.
  """
  cut = [x for x in _dimensions(shapes, axes) if x[2] not in whole]
  for path, length, logical in cut:
    names = mesh_axes(logical)
    parts = math.prod(sizes.get(name, 1) for name in names)
    if length % parts:
      together = math.gcd(*(n for _, n, other in cut if mesh_axes(other) == names))
      fitting = [n for n in range(1, together + 1) if together % n == 0]
      nearest = min(fitting, key=lambda n: (abs(n - parts), n))
      cutting = product({name: sizes[name] for name in names if name in sizes})
      raise ValueError(
        f'{key}: {cutting} does not divide the {length} {logical} of {path}; the '
        f'nearest that fits is {nearest}'
      )


def _dimensions(shapes: dict, axes: dict) -> Iterator[tuple[str, int, str]]:
  """Name of a parameter, length and logical axis of each dimension that may be cut."""
  leaves = jax.tree_util.tree_leaves_with_path(shapes)
  named = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
  for (path, shape), names in zip(leaves, named, strict=True):
    for length, logical in zip(shape.shape, names, strict=True):
      if mesh_axes(logical):
        yield jax.tree_util.keystr(path), length, logical


# --- the sampler's meshes --------------------------------------------------------


def hosts_mesh(mesh: Mesh, *, model: int, cut: bool = False) -> Mesh:
  """The devices of `mesh`, so that each host has all of what 'data' does not cut.

  They are in the order of `mesh`, so that one program may use both.

  Args:
    model: into how many parts heads are cut.
    cut: whether a host's other devices cut the rest of a weight, as far as in `mesh`,
      or hold it whole.
  """
  hosts = by_host(mesh.devices.flat)
  each = len(hosts[0])
  if cut:  # samplers have other devices, and cut heads there as they like
    model = math.gcd(model, each)
  if model < 1 or each % model:
    fitting = ', '.join(str(n) for n in range(1, each + 1) if each % n == 0)
    raise ValueError(
      f'sampler.model: {model}, expected a divisor of the {each} devices that a host '
      f"has in the mesh ({fitting}), or sampler.mesh='global'"
    )
  fsdp = math.gcd(size(mesh, 'embed'), each // model) if cut else 1
  devices = [device for host in hosts for device in host]
  data = len(devices) // (fsdp * model)
  return make_mesh(data=data, fsdp=fsdp, model=model, devices=devices)


def host_part(mesh: Mesh, host: int) -> Mesh:
  """What one host has of a `hosts_mesh`."""
  devices = by_host(mesh.devices.flat)[host]
  sizes = {name: n for name, n in mesh.shape.items() if name != 'data'}
  data = len(devices) // math.prod(sizes.values())
  return make_mesh(data=data, **sizes, devices=devices)
