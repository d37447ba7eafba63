"""Looks for the mesh, the rows and the slots that fit, by few compilations.

What is held all the time is known from shapes. What programs need beside it grows
linearly with rows and slots, near enough: two compilations, a prediction, and one that
proves it.
"""

from collections.abc import Callable, Iterator, Sequence
import copy
import math
from typing import Any

import jax

from jaxrl_sched import config
from jaxrl_sched.checks import check_numbers
from jaxrl_sched.device import compiled
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.footprint import Footprint, cache_length, model_of

# A row of the learner's has to hold the kernel's smallest block on every device.
_BLOCK = 128


def meshes_for(
  c: dict[str, Any], devices: Sequence[jax.Device]
) -> Iterator[dict[str, Any]]:
  """The config on each mesh that divides the model, least communication first.

  Heads and tokens are cut no more than has to be. One sampling engine a host, whose
  devices hold the model in as few parts as learner's do, in more, or in all of them.
  """
  count, hosts = len(devices), len(meshes.by_host(devices))
  model = model_of(c)
  cuts = [(s, n) for n in _divisors(count) for s in _divisors(count // n)]
  for sequence, parts in sorted(cuts):
    rest = count // (sequence * parts)
    fsdp = max(n for n in _divisors(rest) if model.d_model % (n * sequence) == 0)
    mesh = dict(data=rest // fsdp, fsdp=fsdp, sequence=sequence, model=parts)
    if c['learner']['row_tokens'] % (_BLOCK * sequence):
      continue
    for of_sampler in _divisors(count // hosts):
      found = _with(c, mesh=mesh, sampler=dict(mesh='local', model=of_sampler))
      try:
        found = _smallest(found, hosts)
        check_numbers(found, hosts=hosts)
        config.check_meshes(found, model_of(found))
      except ValueError:
        continue
      yield found


class Search:
  """Finds the rows and slots that fit into `room` bytes of each device.

  Args:
    devices, host: as of Footprint.
    say, size: for the lines that tell what was tried.

  Raises:
    ValueError: samplers have a mesh of their own.
  """

  def __init__(
    self,
    c: dict[str, Any],
    devices: Sequence[jax.Device],
    host: Sequence[jax.Device],
    room: int,
    *,
    say: Callable[[str], None],
    size: Callable[[float], str],
  ):
    if c['sampler_mesh'] is not None:
      raise ValueError('--fit: config.sampler_mesh is set, expected None')
    self._c, self._room = c, room
    self._devices, self._host = devices, host
    self._say, self._size = say, size
    self._needed: dict[str, int | None] = {}  # what was compiled -> bytes

  def fit(self, prove: Callable[[Footprint], bool]) -> dict[str, Any] | None:
    """The config with mesh, rows and slots that fit.

    Of what is free beside what is held, half goes to the rows of a microbatch, and to
    no more of them than a step fills; the rest to slots, and no more than answers are
    asked for at once.

    Args:
      prove: compiles all programs; whether they fit.
    """
    hosts = len(meshes.by_host(self._devices))
    answers = math.prod(
      self._c['scheduler'][name] for name in ('groups_per_step', 'group_size')
    )
    for c in meshes_for(self._c, self._devices):
      told = (
        f'mesh {meshes.product(c["mesh"])}, sampler.model={c["sampler"]["model"]}: '
      )
      found = Footprint(c, self._devices, self._host)
      free = self._room - found.bytes_held
      if free < 0:
        self._say(f'{told}{self._size(found.bytes_held)} are held all the time')
        continue
      filled = -(-answers * cache_length(c) // c['learner']['row_tokens'])
      rows, learning = self._largest(
        c, 'learner', 'rows', 'add', filled, free, share=0.5
      )
      if not rows:
        self._say(f'{told}no room for a row a device')
        continue
      c = _with(c, learner=dict(rows=rows))
      cache = compiled.bytes_of(found.cache)
      slots, _ = self._largest(
        c,
        *('sampler', 'slots', 'decode', answers // hosts, free + cache),
        share=1.0,
        least=max(learning, found.bytes_of_version),
        each=cache / c['sampler']['slots'],
      )
      self._say(f'{told}rows={rows} and slots={slots} by prediction')
      c = _with(c, sampler=dict(slots=slots))
      if slots and prove(Footprint(c, self._devices, self._host)):
        return c
    return None

  def _largest(
    self,
    c: dict[str, Any],
    block: str,
    name: str,
    program: str,
    most: int,
    room: float,
    *,
    share: float,
    least: float = 0.0,
    each: float = 0.0,
  ) -> tuple[int, float]:
    """The largest c[block][name] up to `most` with which a program is within `room`.

    Args:
      share: of what is left beside the fewest, that more of them may take.
      least: what is needed by another program, at another time.
      each: bytes held for one of them.

    Returns:
      That multiple of c[block][name], 0 if not even that fits; and what it needs.
    """
    step = c[block][name]

    def needs(count: int) -> float:
      changed = _with(c, **{block: {name: step * count}})
      found = self._needs(changed, program)
      return max(found, least) + each * step * count

    fewest = needs(1)
    if fewest > room:
      return 0, fewest
    limit = fewest + (room - fewest) * share
    other = min(4, most // step)  # so far apart that what is rounded up decides little
    more = needs(other) if other > 1 else math.inf
    if other <= 1 or more == math.inf:
      return step, fewest
    slope = max((more - fewest) / (other - 1), 1.0)
    count = max(1, min(1 + int((limit - fewest) / slope), most // step))
    return step * count, fewest + slope * (count - 1)

  def _needs(self, c: dict[str, Any], program: str) -> float:
    """Bytes; inf: the compiler found no way."""
    mine = c['learner'] if program == 'add' else c['sampler']
    key = repr((program, c['mesh'], mine))
    if key not in self._needed:
      part = Footprint(c, self._devices, self._host).part(program)
      try:
        self._needed[key] = part.needs(part.compile())
      except compiled.DoesNotFit:
        self._needed[key] = math.inf
    return self._needed[key]


def overrides(c: dict[str, Any]) -> list[str]:
  """What `fit` chose, as arguments of a command."""
  chosen = {f'mesh.{axis}': n for axis, n in c['mesh'].items()}
  chosen |= {
    f'sampler.{k}': c['sampler'][k] for k in ('model', 'slots', 'prefill_rows')
  }
  chosen['learner.rows'] = c['learner']['rows']
  return [f'--config.{key}={value}' for key, value in chosen.items()]


def _smallest(c: dict[str, Any], hosts: int) -> dict[str, Any]:
  """With the fewest rows and slots that this mesh divides."""
  rows = c['mesh']['data'] * c['mesh']['fsdp']
  each = math.prod(c['mesh'].values()) // hosts // c['sampler']['model']
  # 8 slots fill the registers of a device.
  sampler = dict(
    slots=8 * each, prefill_rows=math.lcm(each, c['sampler']['prefill_rows'])
  )
  return _with(c, learner=dict(rows=rows), sampler=sampler)


def _with(c: dict[str, Any], **blocks: dict[str, Any]) -> dict[str, Any]:
  c = copy.deepcopy(c)
  for name, changes in blocks.items():
    c[name] |= changes
  return c


def _divisors(n: int) -> list[int]:
  return [k for k in range(1, n + 1) if n % k == 0]
