"""What the compiler says of a program: memory on a device, FLOPs, collectives.

A program is compiled from shapes, for devices that need not be there.
"""

import dataclasses
import functools
import re
import time
from typing import Any

import jax

from jaxrl_sched.device import hlo


class DoesNotFit(Exception):
  """The compiler found no way to run a program in the memory of a device.

  Attributes:
    needed, available: as the compiler writes them, such as '20.12G'; None: not told.
    largest: lines on the largest buffers, largest first.
  """

  def __init__(self, message: str):
    found = re.search(r'Used ([\d.]+\w?) of ([\d.]+\w?)', message) or re.search(
      r'temporaries \(([\d.]+\w?)\) exceeds available HBM \(([\d.]+\w?)\)', message
    )
    self.needed, self.available = found.groups() if found else (None, None)
    self.largest = _largest(message)
    told = f'needs {self.needed} of the {self.available} of a device'
    super().__init__(told if found else message.splitlines()[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """Bytes are of one device.

  Attributes:
    outputs: without those that lie where arguments do; `aliased` are these.
    peak: arguments and all that is alive at the worst moment, as the compiler says.
    flops: of products of matrices and of kernels that tell theirs; see `hlo.read`.
    collectives: kind -> their number and bytes; see `hlo.read`.
  """

  arguments: int
  outputs: int
  aliased: int
  temporaries: int
  code: int
  peak: int
  flops: float
  collectives: dict[str, tuple[int, int]]
  seconds: float


def compile_program(program: Any, arguments: tuple, *, trips: int = 1) -> Program:
  """Compiles a jitted function.

  Args:
    arguments: shapes with shardings on the devices to compile for, static ones as
      they are.
    trips: of loops whose number of turns the program does not say.

  Raises:
    DoesNotFit: the compiler ran out of the device's memory.
  """
  return described(*compiled(program, arguments), trips=trips)


def compiled(program: Any, arguments: tuple) -> tuple[jax.stages.Compiled, float]:
  """The compiled program, and the seconds it took."""
  began = time.perf_counter()
  lowered = program.lower(*arguments)
  try:
    found = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    raise DoesNotFit(str(error)) from None
  return found, time.perf_counter() - began


def described(
  program: jax.stages.Compiled, seconds: float = 0.0, *, trips: int = 1
) -> Program:
  memory = program.memory_analysis()
  counts = hlo.read(program.as_text(), trips=trips)
  return Program(
    arguments=memory.argument_size_in_bytes,
    outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    aliased=memory.alias_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    code=memory.generated_code_size_in_bytes,
    peak=memory.peak_memory_in_bytes,
    flops=counts.flops,
    collectives=counts.collectives,
    seconds=seconds,
  )


@functools.cache
def memory_of(device: jax.Device) -> int:
  """Bytes of a TPU's memory that the compiler lets programs have.

  The compiler's own word: it says so where it is asked for what no device has.
  """
  at = jax.sharding.SingleDeviceSharding(device)
  huge = jax.ShapeDtypeStruct((2**40,), 'float32', sharding=at)
  try:
    compiled(jax.jit(lambda x: x[::-1] + x), (huge,))
  except DoesNotFit as error:
    return _bytes(error.available)
  raise ValueError(f'{device.device_kind}: the compiler names no limit of its memory')


def bytes_of(tree: Any) -> int:
  """Bytes on a device of arrays with these shapes and shardings, without padding."""
  return sum(size for _, size in by_name(tree))


def by_name(tree: Any) -> list[tuple[str, int]]:
  """Of each array its path and its bytes on a device, largest first."""
  found = []
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    shard = x.sharding.shard_shape(x.shape)
    size = jax.dtypes.canonicalize_dtype(x.dtype).itemsize
    for length in shard:
      size *= length
    found.append((jax.tree_util.keystr(path), size))
  return sorted(found, key=lambda one: -one[1])


def _bytes(text: str) -> int:
  powers = {'K': 10, 'M': 20, 'G': 30, 'T': 40}
  return int(float(text.rstrip('KMGT')) * 2 ** powers.get(text[-1], 0))


def _largest(message: str) -> list[str]:
  """Of the compiler's list of allocations: sizes, shapes and where they come from."""
  found = []
  for part in re.split(r'\n\s*={5,}\s*', message):
    size = re.search(r'Size: ([\d.]+[KMGT]?)', part)
    shape = re.search(r'Shape: (\w+\[[\d,]*\])', part)
    name = re.search(r'op_name="([^"]*)"', part) or re.search(r'XLA label: (\S+)', part)
    if size and shape:
      told = (size[1], shape[1], name[1] if name else '')
      found.append(' '.join(told).strip())
  return found
