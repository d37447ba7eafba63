"""What of a config is compiled, and what lives on a device while it runs.

From shapes alone: no weights, no tokenizer, no data, and devices that need not be there.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax

from jaxrl_sched import config, models
from jaxrl_sched.checks import check_numbers
from jaxrl_sched.device import compiled, hf_config, learner, lora, slots, weights
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device.handover import Handover
from jaxrl_sched.device.model import ModelConfig
from jaxrl_sched.types import Batch, SharedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """A program, as training calls it.

  Attributes:
    own: what it is called with beside what is held all the time.
    trips: at most, of loops whose number of turns it does not say.
  """

  name: str
  program: Any
  arguments: tuple
  own: Any
  trips: int = 1

  def compile(self) -> compiled.Program:
    return compiled.compile_program(self.program, self.arguments, trips=self.trips)

  def needs(self, found: compiled.Program) -> int:
    """Bytes on a device while it runs, beside what is held all the time."""
    return compiled.bytes_of(self.own) + found.outputs + found.temporaries


class Footprint:
  """The programs of a config on these devices.

  Args:
    devices: of all hosts.
    host: those of one host, as they are where there is no other. A sampling engine's
      programs are compiled for these: the compiler knows no part of a topology.

  Attributes:
    mesh, of_sampler: the learner's mesh, and that of one sampling engine.
    parts: the programs, in the order of a step.
    held: what is on a device all the time: what it is, and its shapes.

  Raises:
    ValueError: the config does not go with itself, the model or the devices.
  """

  def __init__(self, c: dict[str, Any], devices: Sequence, host: Sequence):
    hosts = len(meshes.by_host(devices))
    check_numbers(c, hosts=hosts)
    shape = model_of(c)
    config.check_meshes(c, shape)
    trained = shape
    if c['lora'] is not None:
      trained = dataclasses.replace(shape, lora=lora.Lora(**c['lora']))
      trained.lora.check_rank(shape)
    longest = cache_length(c)
    if longest > shape.max_positions:
      raise ValueError(
        f'prompts.max_tokens + max_new_tokens = {longest}, expected at most the '
        f"model's {shape.max_positions} positions"
      )
    self.mesh = meshes.make_mesh(**c['mesh'], devices=devices)
    self.of_sampler = sampler_mesh(c, self.mesh, hosts, host)
    self._learner = learner_programs(c, trained, self.mesh)
    self._slots = slots.Programs(
      shape,
      c['sampler']['slots'],
      cache_length=longest,
      chunk=c['sampler']['chunk'],
      mesh=self.of_sampler,
      prefill_rows=c['sampler']['prefill_rows'],
    )
    self._handover = Handover(
      shape,
      self.mesh,
      model=None if c['sampler']['mesh'] == 'global' else config.sampler_parts(c),
      apart=c['sampler_mesh'] is not None,
    )
    self._c = c
    self.held = dict(self._held())

  @functools.cached_property
  def parts(self) -> list[Part]:
    return [*self._of_learner(), *self._of_sampler()]

  def part(self, name: str) -> Part:
    return next(part for part in self.parts if part.name == name)

  def _of_learner(self) -> Iterator[Part]:
    kind = SharedBatch if self._c['learner']['share_prompt'] else Batch
    arguments = self._learner.arguments(kind)
    total, *given = arguments['add']
    own = dict(add=(total, given[-1]), apply=total)
    for name, mine in own.items():
      yield Part(
        name=name,
        program=getattr(self._learner, name),
        arguments=arguments[name],
        own=mine,
      )
    # A whole version is made, one call a layer, beside those that are held.
    for name in ('layer', 'outside'):
      yield Part(
        name=f'give {name}',
        program=getattr(self._handover, name),
        arguments=self._handover.arguments[name],
        own=self._slots.weights,
      )

  def _of_sampler(self) -> Iterator[Part]:
    longest = self._c['prompts']['max_tokens']
    if self._c['asp']['pause_after']:
      longest += self._c['sampling']['max_new_tokens']
    arguments = self._slots.arguments(longest)
    own = dict(prefill=arguments['prefill'][1:], insert=arguments['insert'][2:])
    for name in ('prefill', 'insert', 'decode'):
      yield Part(
        name=name,
        program=getattr(self._slots, name),
        arguments=arguments[name],
        own=own.get(name),
        trips=self._c['sampler']['chunk'] if name == 'decode' else 1,
      )

  def _held(self) -> Iterator[tuple[str, Any]]:
    state = self._learner.state
    yield 'weights trained', state['parameters']
    yield 'optimizer', state['optimizer']
    if self._learner.adapters is not None:
      yield 'base', self._learner.weights
      merged = lora.map_adapted(
        lambda w, _: w, self._learner.weights, state['parameters']
      )
      yield 'adapted weights, merged', merged
    elif self._c['loss']['kl_coef'] > 0:
      yield 'reference', self._learner.weights
    versions = self._c['asp']['lag'] + 1
    yield f'weights of samplers, {versions}', [self._slots.weights] * versions
    yield f'cache of {self._slots.count} slots', self.cache

  @property
  def cache(self) -> Any:
    """Of all slots, and their state."""
    return self._slots.cache, self._slots.state

  @property
  def bytes_of_version(self) -> int:
    """Of the weights that a hand-over makes, beside those that are held."""
    return compiled.bytes_of(self._slots.weights)

  @property
  def bytes_held(self) -> int:
    return sum(map(compiled.bytes_of, self.held.values()))


def learner_programs(
  c: dict[str, Any], model: ModelConfig, mesh: jax.sharding.Mesh
) -> learner.Programs:
  return learner.Programs(
    model,
    mesh=mesh,
    rows=c['learner']['rows'],
    row_tokens=c['learner']['row_tokens'],
    optimizer=c['optimizer'] | {'steps': c['steps']},
    loss=learner.Loss(**c['loss']),
    temperature=c['sampling']['temperature'],
    remat=c['learner']['remat'],
    seed=c['seed'],
  )


def model_of(c: dict[str, Any]) -> ModelConfig:
  """The model's shape, by config.model.hf_config, or its path's config.json, or init.

  All ids of the vocabulary count as known where no tokenizer tells.
  """
  model, parts = models.Model(**c['model']), config.vocab_parts(c)
  if model.hf_config is not None:
    raw = dict(model.hf_config)
    found = hf_config.read(raw, known_tokens=None, dtype=model.dtype)
    return weights.padded(found, vocab_parts=parts)
  if model.path is not None:
    return weights.describe(model.path, dtype=model.dtype, vocab_parts=parts)
  return models.fresh_model(model, models.open_tokenizer(model))


def cache_length(c: dict[str, Any]) -> int:
  """Tokens of the longest prompt and answer."""
  most = c['sampling']['max_new_tokens']
  if c['evaluate'] is not None:
    most = max(most, c['evaluate']['max_new_tokens'] or 0)
  return c['prompts']['max_tokens'] + most


def sampler_mesh(
  c: dict[str, Any], mesh: jax.sharding.Mesh, hosts: int, host: Sequence
) -> jax.sharding.Mesh:
  """The mesh of a host's first sampling engine; `config.sampler_meshes` of a run."""
  if c['sampler']['mesh'] == 'global':
    return mesh
  learning = mesh.size // hosts  # devices of each
  if c['sampler_mesh'] is None:
    parts = config.sampler_parts(c)
    own = host[:learning]
    return meshes.make_mesh(data=learning // parts, model=parts, devices=own)
  left = host[learning:]
  each, engines = math.prod(c['sampler_mesh'].values()), c['asp']['engines']
  if each * engines > len(left):
    raise ValueError(
      f'config.sampler_mesh: {engines} engines of {each} devices, expected at most the '
      f'{len(left)} that a host has beside those of config.mesh'
    )
  return meshes.make_mesh(**c['sampler_mesh'], devices=left[:each])
