"""Which devices a command runs on: found out before jax looks for them, in one line."""

import glob
import importlib.metadata
import os

import jax
from jax._src import hardware_utils  # what jax itself knows of the hardware

# As libtpu finds chips: by the driver's files, or passed through to a virtual machine.
_TPU_FILES = ('/dev/accel*', '/dev/vfio/[0-9]*')
# Where a machine has been told that it has some.
_TPU_VARIABLES = (
  'JAX_FORCE_TPU_INIT',
  'TPU_ACCELERATOR_TYPE',
  'TPU_PROCESS_ADDRESSES',
  'TPU_WORKER_HOSTNAMES',
)


def has_tpu() -> bool:
  """Whether this machine has a TPU, as far as can be seen without libtpu."""
  return (
    hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0
    or any(glob.glob(pattern) for pattern in _TPU_FILES)
    or any(os.environ.get(name) for name in _TPU_VARIABLES)
  )


def choose() -> None:
  """Takes the CPU where there is nothing else. Before jax looks for devices.

  An installed libtpu without a TPU complains on stderr before jax takes the CPU by
  itself. What JAX_PLATFORMS says stays; where jax has a plugin for other accelerators, it
  looks by itself.
  """
  if 'JAX_PLATFORMS' in os.environ or jax.config.jax_platforms:
    return
  if not has_tpu() and not importlib.metadata.entry_points(group='jax_plugins'):
    jax.config.update('jax_platforms', 'cpu')


def check() -> None:
  """Makes jax look for its devices.

  Raises:
    ValueError: there are none of the kind asked for.
  """
  try:
    jax.devices()
  except (AssertionError, RuntimeError) as error:
    wanted = jax.config.jax_platforms
    if isinstance(error, jax.errors.JaxRuntimeError) or not wanted:
      raise
    said = str(error).partition(' (set JAX_PLATFORMS=')[0].splitlines()
    raise ValueError(
      f'JAX_PLATFORMS={wanted}: {said[0] if said else "no such device found"}; '
      "expected devices that this machine has, such as 'cpu'"
    ) from None
