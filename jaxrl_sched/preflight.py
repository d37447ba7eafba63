"""Compiles a config's programs for a TPU topology, without a TPU, and says what fits.

python -m jaxrl_sched.preflight --config=configs/qwen25_3b.py --topology=v5e:4x4
"""

import argparse
from collections.abc import Callable
import importlib.util
import itertools
import math
import os
import re
import sys
from typing import Any

import jax
from jax.experimental import topologies

from jaxrl_sched import config, fitting, train
from jaxrl_sched.device import compiled
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.footprint import Footprint
from jaxrl_sched.terminal import quietly

EPILOG = """\
Needs the extra 'tpu' (libtpu holds the compiler), neither weights nor data: the model's
shape is that of config.model.hf_config, or of the folder or hub id in config.model.path.

Bytes are of one device. Outputs are those that do not lie where arguments did. FLOPs are
those of products of matrices on one device, 2 for a multiplication with its addition
(kernels of attention are not among them); bytes of a collective are of what it takes or
gives on a device, whichever is more. Both count what stands in a loop as often as it
turns, and a decode chunk's tokens all.

Exit code: 0 it fits, 1 it does not (the largest buffers are named), 2 bad input.
"""
QUIET = {
  'TPU_SKIP_MDS_QUERY': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # beside other programs that have it loaded
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-8',  # any: the topology asked for is what counts
  'TPU_LOG_DIR': 'disabled',
}


def main(argv: list[str] | None = None) -> int:
  command = argparse.ArgumentParser(
    prog='python -m jaxrl_sched.preflight',
    description=__doc__.strip(),
    epilog=EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  command.add_argument(
    '--config', required=True, metavar='FILE.py[:ARG]', help='a config file'
  )
  command.add_argument(
    '--topology', required=True, metavar='KIND:AxB[xC]', help='such as v5e:4x4'
  )
  command.add_argument(
    '--processes',
    type=int,
    metavar='N',
    help='hosts; default: as the topology has them',
  )
  command.add_argument(
    '--fit', action='store_true', help='look for the mesh, rows and slots that fit'
  )
  command.add_argument(
    '--margin',
    type=float,
    default=0.1,
    metavar='SHARE',
    help="of a device's memory, to be left free; default: 0.1",
  )
  arguments, rest = command.parse_known_args(argv)
  try:
    c = config.read(arguments.config, train.overrides(rest))
    if not 0 <= arguments.margin < 1:
      raise ValueError(f'--margin={arguments.margin}: expected 0 to below 1')
    devices = topology(arguments.topology, arguments.processes)
    found = None
    if not arguments.fit:
      check_covers(c, devices)
      found = Footprint(c, devices, one_host(arguments.topology, devices))
    room = int(compiled.memory_of(devices[0]) * (1 - arguments.margin))
    print(described(arguments.topology, devices), flush=True)
    if found is None:
      return _fit(c, devices, one_host(arguments.topology, devices), room)
    return 0 if report(found, room) else 1
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2


def _fit(
  c: dict[str, Any], devices: list[jax.Device], host: list[jax.Device], room: int
) -> int:
  search = fitting.Search(c, devices, host, room, say=_say, size=size)
  chosen = search.fit(lambda found: report(found, room))
  if chosen is None:
    print('error: no mesh of these devices fits', file=sys.stderr)
    return 1
  print(f'\nWith\n  {" ".join(fitting.overrides(chosen))}')
  return 0


# --- the topology ------------------------------------------------------------------


def topology(name: str, processes: int | None) -> list[jax.Device]:
  """The devices of a TPU topology, which need not be there.

  Args:
    name: such as 'v5p:4x4x4'.
    processes: over which they are spread; None: as that topology's machines do.
  """
  found = re.fullmatch(r'v\d+\w*:(\d+(?:x\d+){1,2})', name)
  if not found:
    raise ValueError(f'--topology={name}: expected such as v5e:4x4 or v5p:2x2x2')
  if importlib.util.find_spec('libtpu') is None:
    raise ValueError("libtpu: not installed, expected the extra 'tpu'")
  sizes = [*map(int, found[1].split('x')), 1][:3]
  if processes is None and max(sizes) <= 2 and math.prod(sizes) <= 4:
    processes = 1  # also of less than a whole machine
  how = {}
  if processes is not None:
    how['chips_per_host_bounds'] = _bounds(sizes, processes)
  for key, value in QUIET.items():
    os.environ.setdefault(key, value)
  try:
    return list(
      topologies.get_topology_desc(platform='tpu', topology_name=name, **how).devices
    )
  except jax.errors.JaxRuntimeError as error:
    line = str(error).splitlines()[0].partition(': ')[2]
    raise ValueError(f'--topology={name}: {line}') from None


def one_host(name: str, devices: list[jax.Device]) -> list[jax.Device]:
  """The devices of a host of this topology, as they are without the others."""
  own = meshes.by_host(devices)[0]
  lengths = [
    1 + max(axis) - min(axis) for axis in zip(*(d.coords for d in own), strict=True)
  ]
  kind, given = name.split(':')
  lengths = lengths[: given.count('x') + 1]
  return topology(f'{kind}:{"x".join(map(str, lengths))}', 1)


def _bounds(sizes: list[int], processes: int) -> list[int]:
  """The chips of a host along each axis of the topology, as near a cube as can be."""
  chips = math.prod(sizes)
  if processes < 1 or chips % processes:
    raise ValueError(
      f'--processes={processes}: expected a divisor of the {chips} chips'
    )
  divisors = [[n for n in range(1, size + 1) if size % n == 0] for size in sizes]
  whole = [b for b in itertools.product(*divisors) if math.prod(b) * processes == chips]
  if not whole:
    raise ValueError(
      f'--processes={processes}: no block of {chips // processes} chips divides '
      f'{"x".join(map(str, sizes))}'
    )
  return list(min(whole, key=max))


def check_covers(c: dict[str, Any], devices: list[jax.Device]) -> None:
  """Whether the config uses all devices of the topology."""
  needed = math.prod(c['mesh'].values())
  told = f'config.mesh: {meshes.product(c["mesh"])}'
  if c['sampler_mesh'] is not None:
    hosts = len(meshes.by_host(devices))
    each = math.prod(c['sampler_mesh'].values()) * c['asp']['engines']
    needed += hosts * each
    told += f' and {each} devices a host to sample on (config.sampler_mesh)'
  if needed != len(devices):
    raise ValueError(
      f'{told} are {needed} devices, expected the {len(devices)} of the topology: '
      f'--config.mesh.fsdp={len(devices)}, say, or --fit'
    )


def described(name: str, devices: list[jax.Device]) -> str:
  hosts = meshes.by_host(devices)
  room = size(compiled.memory_of(devices[0]))
  return (
    f'{name}: {len(devices)} devices ({devices[0].device_kind}) on {len(hosts)} hosts, '
    f'{room} each for programs'
  )


# --- the report --------------------------------------------------------------------


def report(found: Footprint, room: int) -> bool:
  """Compiles all programs and prints the tables. Whether they fit into `room` bytes."""
  return verdict(found, *measure(found), room)


def _say(line: str) -> None:
  print(line, flush=True)


def measure(
  found: Footprint, *, say: Callable[[str], None] = _say
) -> tuple[dict[str, compiled.Program], dict[str, compiled.DoesNotFit]]:
  """Compiles all programs, a line of the table each. And those that do not fit."""
  learner, sampler = (meshes.product(m.shape) for m in (found.mesh, found.of_sampler))
  say(f'learner: mesh {learner}; a sampling engine: {sampler}\n')
  columns = '{:12} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>6}  {}'
  heads = ('arguments', 'outputs', 'temporary', 'code', 'peak', 'FLOPs', 's')
  say(columns.format('program', *heads, 'collectives'))
  programs, failed = {}, {}
  for part in found.parts:
    try:
      p = programs[part.name] = part.compile()
    except compiled.DoesNotFit as error:
      failed[part.name] = error
      say(f'{part.name:12} {error}')
      continue
    sizes = map(size, (p.arguments, p.outputs, p.temporaries, p.code, p.peak))
    moved = ', '.join(
      f'{number} {kind} {size(n)}'
      for kind, (number, n) in sorted(p.collectives.items())
    )
    seconds = f'{p.seconds:.0f}'
    say(columns.format(part.name, *sizes, f'{p.flops:.2e}', seconds, moved or '-'))
  return programs, failed


def verdict(
  found: Footprint,
  programs: dict[str, compiled.Program],
  failed: dict[str, compiled.DoesNotFit],
  room: int,
) -> bool:
  """Prints what is on a device at once. Whether that is at most `room` bytes."""
  needs = {name: found.part(name).needs(p) for name, p in programs.items()}
  print('\nOn a device at once:')
  for name, tree in found.held.items():
    print(f'  {name:28} {size(compiled.bytes_of(tree)):>9}')
  code = sum(p.code for p in programs.values())
  print(f'  {"code of the programs":28} {size(code):>9}')
  total = found.bytes_held + code
  if needs:
    name = max(needs, key=needs.get)
    total += needs[name]
    print(f'  {"and the most beside: " + name:28} {size(needs[name]):>9}')
  fits = not failed and total <= room
  print(f'  {"together":28} {size(total):>9}, of {size(room)} (less the margin)')
  if fits:
    print('It fits.')
    return True
  print('It does not fit. The largest buffers:', file=sys.stderr)
  for name, error in failed.items():
    print(f'  {name}: {error}', file=sys.stderr)
    for line in error.largest[:5]:
      print(f'    {line}', file=sys.stderr)
  largest = [
    (f'{what}: {path}', n)
    for what, tree in found.held.items()
    for path, n in compiled.by_name(tree)[:3]
  ]
  largest += [(f'{name}: temporaries', p.temporaries) for name, p in programs.items()]
  for name, n in sorted(largest, key=lambda one: -one[1])[:8]:
    print(f'  {size(n):>9} {name}', file=sys.stderr)
  return False


def size(n: float) -> str:
  """1234567890 -> '1.15G'."""
  for power, letter in ((30, 'G'), (20, 'M'), (10, 'K')):
    if n >= 2**power:
      return f'{n / 2**power:.2f}{letter}'
  return str(int(n))


if __name__ == '__main__':
  # The compiler for TPUs needs a backend of jax's own that is always there.
  jax.config.update('jax_platforms', 'cpu')
  # Programs for devices that are not there can be written to jax's cache, not read.
  jax.config.update('jax_enable_compilation_cache', False)
  sys.exit(quietly(main))
