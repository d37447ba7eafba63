"""The learner's weights, brought to every host as samplers take them (promise 5)."""

import functools
from typing import Any

import jax
import numpy as np

from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device import model as model_lib
from jaxrl_sched.device import multihost
from jaxrl_sched.device.model import ModelConfig


class Handover:
  """The same programs on all processes; what they give is each host's own.

  A layer at a time: XLA gathers weights beside where they are to lie, and would hold
  all of them twice.

  Args:
    config: of the model that is sampled, without adapters.
    mesh: the learner's.
    model: into how many parts samplers cut heads. None: they are on the learner's mesh,
      with all its hosts (sampler.mesh='global').
    apart: samplers have devices of their own, so that no device of the learner's needs
      more than its part of a host's copy.

  Attributes:
    layer: of the learner's stacked blocks, and which; a jitted function.
    outside: of the parameters without blocks; a jitted function.
    arguments: of each its arguments, as shapes with shardings.
  """

  def __init__(
    self,
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    *,
    model: int | None,
    apart: bool = False,
  ):
    ready = functools.partial(model_lib.by_layer, config)
    shapes, axes = model_lib.abstract(config)
    given = jax.tree.map(
      lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
      shapes,
      meshes.parameter_shardings(shapes, axes, mesh),
    )
    self._layers, self._is_global, hosts = config.layers, model is None, mesh
    if model is not None:
      hosts = meshes.hosts_mesh(mesh, model=model, cut=apart)
    at = meshes.parameter_shardings(
      jax.eval_shape(ready, shapes),
      model_lib.by_layer_axes(config),
      hosts,
      whole=() if apart else ('embed',),
    )
    # Cast before they travel: half the bytes where the computation is in bfloat16.
    self.layer = jax.jit(
      functools.partial(model_lib.one_layer, config), out_shardings=at['layers'][0]
    )
    self.outside = jax.jit(
      functools.partial(model_lib.outside_layers, config),
      out_shardings={name: x for name, x in at.items() if name != 'layers'},
    )
    index = jax.ShapeDtypeStruct((), 'int32', sharding=meshes.sharding(mesh))
    outside = {name: x for name, x in given.items() if name != 'blocks'}
    self.arguments = dict(layer=(given['blocks'], index), outside=(outside,))

  def __call__(self, parameters: Any) -> Any:
    """Float32 parameters on the learner's mesh -> what `Sampler.put` takes. A copy."""
    outside = {name: x for name, x in parameters.items() if name != 'blocks'}
    found = self.outside(outside)
    found['layers'] = [
      self.layer(parameters['blocks'], np.int32(i)) for i in range(self._layers)
    ]
    if self._is_global or multihost.count() == 1:
      return found
    return jax.tree.map(_of_this_host, found)


def _of_this_host(x: jax.Array) -> jax.Array:
  """This host's devices hold the whole of it among them; that, as an array of theirs."""
  mesh = x.sharding.mesh
  here = meshes.host_part(mesh, multihost.index())
  at = jax.sharding.NamedSharding(here, x.sharding.spec)
  parts = {shard.device: shard.data for shard in x.addressable_shards}
  devices = here.devices.flat
  return jax.make_array_from_single_device_arrays(
    x.shape, at, [parts[device] for device in devices]
  )
