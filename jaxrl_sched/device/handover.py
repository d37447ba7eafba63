"""The learner's weights, brought to every host as samplers take them (promise 5)."""

import functools
from typing import Any

import jax

from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device import model as model_lib
from jaxrl_sched.device import multihost
from jaxrl_sched.device.model import ModelConfig


class Handover:
  """One program for all processes; what it gives is each host's own.

  Args:
    config: of the model that is sampled, without adapters.
    mesh: the learner's.
    model: into how many parts samplers cut heads. None: they are on the learner's mesh,
      with all its hosts (sampler.mesh='global').
    apart: samplers have devices of their own, so that no device of the learner's needs
      more than its part of a host's copy.

  Attributes:
    program: of the learner's parameters; a jitted function.
    arguments: its arguments, as shapes with shardings.
  """

  def __init__(
    self,
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    *,
    model: int | None,
    apart: bool = False,
  ):
    # Cast before they travel: half the bytes where the computation is in bfloat16.
    ready = functools.partial(model_lib.by_layer, config)
    shapes, axes = model_lib.abstract(config)
    given = meshes.parameter_shardings(shapes, axes, mesh)
    self.arguments = jax.tree.map(
      lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, given
    )
    self._is_global, hosts = model is None, mesh
    if model is not None:
      hosts = meshes.hosts_mesh(mesh, model=model, cut=apart)
    self._at = meshes.parameter_shardings(
      jax.eval_shape(ready, shapes),
      model_lib.by_layer_axes(config),
      hosts,
      whole=() if apart else ('embed',),
    )
    self.program = jax.jit(ready, out_shardings=self._at)

  def __call__(self, parameters: Any) -> Any:
    """Float32 parameters on the learner's mesh -> what `Sampler.put` takes. A copy."""
    found = self.program(parameters)
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
