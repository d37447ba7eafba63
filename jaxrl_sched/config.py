"""From a config to the objects it names, checked before a chip is touched.

A config is a Python file with `get_config() -> ConfigDict`. Each block holds the
keyword arguments of what it is named after (`BLOCKS`); None or absence leaves an
optional block out. Whatever is wrong ends in one ValueError of one line that names
the key, the value and what was expected.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
import pathlib
from typing import Any

import jax

from jaxrl_sched import models, settings
from jaxrl_sched.checks import check_numbers
from jaxrl_sched.control.asp import Asp
from jaxrl_sched.control.difficulty import open_tiers
from jaxrl_sched.control.lengths import LengthPredictor
from jaxrl_sched.control.sagc import SAGC
from jaxrl_sched.control.scheduler import Scheduler
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.controllers import PruneAnswers, PrunePrompts, make_scheduler
from jaxrl_sched.device import contents, lora, multihost, repeats, weights
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device import model as model_lib
from jaxrl_sched.device.checkpoint import Checkpoints
from jaxrl_sched.device.engine import DeviceEngine
from jaxrl_sched.device.handover import Handover
from jaxrl_sched.device.learner import Learner, Loss, make_optimizer
from jaxrl_sched.device.mesh import ON_CPU, make_mesh
from jaxrl_sched.device.model import ModelConfig
from jaxrl_sched.device.prompts import PromptSet, Tokenizer
from jaxrl_sched.device.references import References
from jaxrl_sched.device.sampler import Sampler
from jaxrl_sched.device.tokenizers import answer_text, before_stop_string
from jaxrl_sched.host import trials
from jaxrl_sched.host.advantages import group_advantages
from jaxrl_sched.host.grading import GradingPool
from jaxrl_sched.host.rewards import overlong_penalty
from jaxrl_sched.models import Model
from jaxrl_sched.sim.settings import Simulate
from jaxrl_sched.types import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerBlock:
  slots: int  # of each engine
  chunk: int = 16
  prefill_rows: int = 8
  mesh: str = 'local'  # an engine a host; or 'global': one on all hosts' devices
  model: int | None = None  # parts that heads are cut into; None: mesh.model


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerBlock:
  rows: int
  row_tokens: int
  remat: bool = False
  window: int = 16  # of the packing
  share_prompt: bool = False  # a prompt is stored once, with all its answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
  datasets: dict
  every: int = 25
  samples: int = 1
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  max_new_tokens: int | None = None  # None: that of training
  k: tuple = (1,)
  # Share of a dataset's prompts that may be trained on, too. It shifts the pass rate by
  # at most as much: 0.01 is what two decimals show.
  max_overlap: float = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
  every: int = 50
  keep: int = 2
  compare_every: int = 50  # steps between comparisons of controllers over processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
  tensorboard: bool = True
  wandb: dict | None = None
  samples: int = 2  # groups of each step whose texts are kept; 0: none


@dataclasses.dataclass(frozen=True)
class Block:
  names: Callable  # its parameters are the block's keys
  given: frozenset[str]  # parameters that are not for the config
  absent: str  # 'refused', 'defaults' or 'off'


def _block(names, *given, absent='refused'):
  return Block(names, frozenset(given), absent)


BLOCKS = {
  'model': _block(Model),
  'lora': _block(lora.Lora, absent='off'),
  'mesh': _block(make_mesh, 'devices', absent='defaults'),
  'prompts': _block(PromptSet, 'tokenizer', 'ids_below'),
  'sampling': _block(Sampling, 'stop_ids'),
  'sampler': _block(SamplerBlock),
  'scheduler': _block(
    Scheduler,
    *('source', 'prompt_of', 'sampling', 'overlong_filter'),
    *('sagc', 'lengths', 'prompt_pruner', 'answer_pruner'),
    *('advantages_of', 'leave_one_out', 'asp', 'slots', 'steps', 'seed'),
  ),
  'asp': _block(Asp, absent='defaults'),
  'sampler_mesh': _block(make_mesh, 'devices', absent='off'),
  'tiers': _block(open_tiers, 'ids', 'weights', 'steps', absent='off'),
  'snooze': _block(Snooze, 'datasets', 'weights', 'seed', absent='off'),
  'sagc': _block(SAGC, 'start', 'seed', absent='off'),
  'lengths': _block(LengthPredictor, 'datasets', 'limit', absent='off'),
  'prune_prompts': _block(PrunePrompts, absent='off'),
  'prune_answers': _block(PruneAnswers, absent='off'),
  'advantage': _block(group_advantages, 'rewards', absent='defaults'),
  'loss': _block(Loss),
  'overlong': _block(overlong_penalty, 'lengths', 'limit', absent='off'),
  'optimizer': _block(make_optimizer, 'steps'),
  'learner': _block(LearnerBlock),
  'grading': _block(GradingPool, 'warm', absent='defaults'),
  'evaluate': _block(Evaluate, absent='off'),
  'checkpoint': _block(Checkpoint, absent='defaults'),
  'log': _block(Log, absent='defaults'),
  'simulate': _block(Simulate, absent='defaults'),
}
PLAIN = {'seed': int, 'steps': int, 'teacher': str | None}
KEYS = (*PLAIN, *BLOCKS)


def free(c: dict[str, Any]) -> tuple[str, ...]:
  """The keys in which a workdir's config may differ when it is continued."""
  # A decaying learning rate hangs on the number of steps, and so does what comes at a
  # share of them: the end of pruning, the release of hard prompts.
  hang = c['optimizer']['schedule'] != 'constant'
  hang |= any(
    c[name] is not None for name in ('prune_prompts', 'prune_answers', 'tiers')
  )
  # Nothing is planned past the end, so that a longer run had other bundles under way.
  asp = c['asp']
  hang |= asp['lag'] > 0 or asp['window'] > 1
  steps = () if hang else ('steps',)
  # On other chips the same run goes on: where something is done decides nothing.
  where = ['mesh', 'sampler_mesh', 'learner.rows', 'learner.remat']
  where += [f'sampler.{name}' for name in ('mesh', 'model', 'prefill_rows')]
  # Without a barrier a batch is made of what has ended by then.
  if c['scheduler']['barrier']:
    where.append('sampler.chunk')
    if asp['window'] == 1 and asp['refill']:  # else orders depend on what runs at once
      where += ['sampler.slots', 'asp.engines']
  return (*steps, *where, *_paths(c), *_ANYWHERE)


_ANYWHERE = ('evaluate', 'checkpoint', 'log', 'grading', 'simulate')


def _paths(c: dict[str, Any]) -> list[str]:
  """Keys that say where files are. What they hold is compared by the checkpoint."""
  found = ['model.path'] if c['model']['path'] is not None else []
  if c['model']['tokenizer'] not in (None, 'bytes'):
    found.append('model.tokenizer')
  if c['tiers'] is not None:
    found.append('tiers.table')  # its tiers are compared
  found.append('prompts.root')
  named = {'prompts.examples': c['prompts']['examples']}
  for name, dataset in c['prompts']['datasets'].items():
    for key in ('source', 'examples'):
      named[f'prompts.datasets.{name}.{key}'] = dataset.get(key)
  return found + [
    key
    for key, value in named.items()
    if isinstance(value, str) and value.endswith(('.jsonl', '.parquet'))
  ]


# --- reading ---------------------------------------------------------------------


def read(name: str, overrides: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
  """The config file's dict, overridden and checked: every key known, every type right.

  Args:
    name: path of the file, or 'path:argument' for `get_config(argument)`.
    overrides: ('a.b', 'value') pairs; a value is read as a Python literal, or text.
  """
  return _changed(settings.load(name), overrides)


def of_workdir(
  name: str | None, workdir: pathlib.Path, overrides: Sequence[tuple[str, str]]
) -> dict[str, Any]:
  """The config named, or else the one that made the workdir; overridden, checked."""
  if name is not None:
    return read(name, overrides)
  found = settings.of_workdir(workdir)
  if found is None:
    raise ValueError(f'--workdir={workdir}: no config.json there; name one by --config')
  return _changed(found, overrides)


def _changed(c: dict[str, Any], overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
  for key, text in overrides:
    settings.override(c, key, text, KEYS)
  return check(c)


# --- checking --------------------------------------------------------------------


def check(c: dict[str, Any]) -> dict[str, Any]:
  """Names and types of everything; ints become floats where floats are declared."""
  c = dict(c)
  for key in c:
    settings.check_known(key, KEYS, 'config')
  c.setdefault('teacher', None)
  for key, kind in PLAIN.items():
    if key not in c:
      raise ValueError(f'config.{key}: missing')
    c[key] = settings.typed(f'config.{key}', c[key], kind)
  for name, block in BLOCKS.items():
    if c.get(name) is None:
      if block.absent == 'refused':
        raise ValueError(f'config.{name}: missing')
      c[name] = {} if block.absent == 'defaults' else None
      if block.absent == 'off':
        continue
    c[name] = settings.keywords(f'config.{name}', c[name], block.names, block.given)
  for block in filter(None, (c['prompts'], c['evaluate'])):
    for name, dataset in block['datasets'].items():
      if not isinstance(dataset, dict):
        raise ValueError(f'dataset {name!r}: {dataset!r}, expected a block of keys')
    # In one order, however they were written: draws are counted along it.
    block['datasets'] = dict(sorted(block['datasets'].items()))
  return c


# --- building --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What a config names, but for what lies on devices."""

  c: dict[str, Any]
  tokenizer: Tokenizer
  model: Model
  shape: ModelConfig
  prompts: PromptSet
  held_out: PromptSet | None
  sampling: Sampling
  evaluate: Evaluate | None
  sampler: SamplerBlock
  learner: LearnerBlock
  loss: Loss
  checkpoint: Checkpoint
  scheduler: Scheduler

  @property
  def longest_prompt(self) -> int:
    return self.c['prompts']['max_tokens']

  @property
  def verifiers(self) -> list[str]:
    held_out = self.held_out.rewards if self.held_out is not None else set()
    return sorted(self.prompts.rewards | held_out)

  @property
  def cache_length(self) -> int:
    most = self.sampling.max_new_tokens
    if self.evaluate is not None and self.evaluate.max_new_tokens is not None:
      most = max(most, self.evaluate.max_new_tokens)
    return self.longest_prompt + most

  def evaluation_sampling(self) -> Sampling:
    e = self.evaluate
    return dataclasses.replace(
      self.sampling,
      temperature=e.temperature,
      top_k=e.top_k,
      top_p=e.top_p,
      max_new_tokens=e.max_new_tokens or self.sampling.max_new_tokens,
    )


def prepare(c: dict[str, Any]) -> Run:
  """Everything that can be looked at without a device, looked at.

  Raises:
    ValueError: the first thing that is wrong.
  """
  check_numbers(c, hosts=multihost.count())
  model = Model(**c['model'])
  tokenizer = models.open_tokenizer(model)
  shape = models.described_model(model, tokenizer, vocab_parts=vocab_parts(c))
  check_meshes(c, shape)
  if c['lora'] is not None:
    lora.Lora(**c['lora']).check_rank(shape)
  sampling = Sampling(**c['sampling'], stop_ids=models.end_ids(model, tokenizer, shape))
  of_model = {'tokenizer': tokenizer, 'ids_below': shape.vocab_used}
  prompts = PromptSet(**c['prompts'], **of_model)
  evaluate, held_out = None, None
  if c['evaluate'] is not None:
    evaluate = Evaluate(**c['evaluate'])
    # Scores over the short ones only would be another benchmark's.
    changed = {'datasets': evaluate.datasets, 'too_long': 'refuse'}
    held_out = PromptSet(**c['prompts'] | changed, **of_model)
    found = repeats.overlaps(prompts.asked, held_out.asked)
    repeats.check_overlaps(found, evaluate.max_overlap)
  hosts = multihost.count() if c['sampler']['mesh'] == 'local' else 1
  scheduler = make_scheduler(c, prompts, sampling, hosts=hosts)
  if c['teacher'] is not None:
    teacher = References(tokenizer)
    teacher.check(prompts.all(), sampling.max_new_tokens, shape.vocab_used)
  run = Run(
    c=c,
    tokenizer=tokenizer,
    model=model,
    shape=shape,
    prompts=prompts,
    held_out=held_out,
    sampling=sampling,
    evaluate=evaluate,
    sampler=SamplerBlock(**c['sampler']),
    learner=LearnerBlock(**c['learner']),
    loss=Loss(**c['loss']),
    checkpoint=Checkpoint(**c['checkpoint']),
    scheduler=scheduler,
  )
  if run.cache_length > shape.max_positions:
    raise ValueError(
      f'prompts.max_tokens + max_new_tokens = {run.cache_length}, expected at most the '
      f"model's {shape.max_positions} positions"
    )
  return run


def sampler_parts(c: dict[str, Any]) -> int:
  """Into how many parts samplers cut heads and vocabulary."""
  if c['sampler_mesh'] is not None:
    return c['sampler_mesh']['model']
  return c['sampler']['model'] or c['mesh']['model']


def vocab_parts(c: dict[str, Any]) -> int:
  """Into how many parts the vocabulary is to be cut by learner and samplers."""
  return math.lcm(c['mesh']['model'], sampler_parts(c))


def check_meshes(c: dict[str, Any], shape: ModelConfig) -> None:
  """Whether the model can be cut as the config asks for."""
  shapes, axes = model_lib.abstract(shape)
  meshes.check_divides(shapes, axes, c['mesh'], key='config.mesh')
  parts = {'model': sampler_parts(c)}
  meshes.check_divides(shapes, axes, parts, whole=('embed',), key='config.sampler')


def sampler_meshes(c: dict[str, Any], mesh: jax.sharding.Mesh) -> list:
  """The mesh of each of this process's engines.

  On its devices in the learner's mesh, or on those that are left; or, with
  sampler.mesh='global', the learner's mesh.
  """
  if c['sampler']['mesh'] == 'global':
    return [mesh]
  host = multihost.index()
  if c['sampler_mesh'] is None:
    return [meshes.host_part(meshes.hosts_mesh(mesh, model=sampler_parts(c)), host)]
  own, engines = jax.local_devices(), c['asp']['engines']
  left = [device for device in own if device not in set(mesh.devices.flat)]
  each = math.prod(c['sampler_mesh'].values())
  if engines * each > len(left):
    learning = len(own) - len(left)
    needed = learning + engines * each
    of_host = ' a host' if multihost.count() > 1 else ''
    raise ValueError(
      f'config.sampler_mesh: {each} devices for each of {engines} engines and '
      f'{learning} to learn on are {needed}{of_host}, expected at most the {len(own)} '
      f'there are{ON_CPU if own[0].platform == "cpu" else ""}'
    )
  starts = range(0, engines * each, each)
  return [make_mesh(**c['sampler_mesh'], devices=left[i:]) for i in starts]


def build_engine(
  run: Run,
  workdir: pathlib.Path,
  *,
  read_only: bool = False,
  stopping: Callable[[], bool] = lambda: False,
  say: Callable[[str], None] = lambda line: None,
) -> DeviceEngine:
  """Tries the verifiers, loads the initial weights and puts the device engine together.

  Args:
    read_only: never writes into the workdir's checkpoints.
    stopping: whether the engine is to stop.
    say: called with each line on how the verifiers did.
  """
  grader = GradingPool(**run.c['grading'], warm=run.verifiers)
  try:
    lines = multihost.agree(lambda: _tried(run, grader), name='trying the verifiers')
    for line in lines:
      say(line)
    return _assemble(run, workdir, grader, read_only=read_only, stopping=stopping)
  except BaseException:
    grader.close()
    raise


def _tried(run: Run, grader: GradingPool) -> list[str]:
  """What verifiers say of a few answers, and what records may have misspelt."""
  sets = {'': run.prompts, ' (held out)': run.held_out}
  prompts, notes = {}, []
  for kind, of in sets.items():
    if of is None:
      continue
    for name, size in of.sizes.items():
      prompts[f'{name}{kind}'] = [of.get(name, i) for i in trials.chosen(size)]
    for name, near in of.unanswered.items():
      notes.append(
        f"warning: {name}{kind}: no record has 'answer'; if {near!r} is meant, "
        f'fields=dict(answer={near!r}) says so'
      )
  shown = functools.partial(before_stop_string, stop_strings=run.sampling.stop_strings)
  return trials.try_verifiers(grader, prompts, shown=shown) + notes


def _contents(run: Run, parameters, mesh) -> dict[str, Any]:
  """What a resume reads again from files, whatever their paths."""
  model = dict(
    tokenizer=contents.of_tokenizer(run.tokenizer), stop_ids=list(run.sampling.stop_ids)
  )
  if run.loss.kl_coef > 0:  # the base of adapters is in the model's description
    model['reference'] = lora.fingerprint(parameters, mesh)
  held_out = {} if run.held_out is None else run.held_out.contents
  return dict(prompts=run.prompts.contents, held_out=held_out, model=model)


def _assemble(
  run: Run,
  workdir: pathlib.Path,
  grader: GradingPool,
  *,
  read_only: bool,
  stopping: Callable[[], bool],
) -> DeviceEngine:
  mesh = make_mesh(**run.c['mesh'])
  path = run.model.path
  if path is not None:
    model, parameters = weights.load(
      path,
      mesh=mesh,
      dtype=run.model.dtype,
      vocab_parts=vocab_parts(run.c),
      known_tokens=run.shape.known_tokens,
    )
  else:
    model, parameters = run.shape, model_lib.init(run.shape, run.c['seed'])
    at = meshes.parameter_shardings(*model_lib.abstract(model), mesh)
    parameters = meshes.put(parameters, at)
  trained, description = models.trained_model(run.c, model, parameters, mesh)
  checkpoints = Checkpoints(
    workdir / 'checkpoints',
    keep=run.checkpoint.keep,
    model=description,
    contents=None if read_only else _contents(run, parameters, mesh),
    read_only=read_only,
  )
  samplers = [
    Sampler(
      None,  # the handover brings them
      model,
      slots=run.sampler.slots,
      cache_length=run.cache_length,
      chunk=run.sampler.chunk,
      prefill_rows=run.sampler.prefill_rows,
      mesh=of_sampler,
      seed=run.c['seed'],
      detokenize=lambda ids: answer_text(run.tokenizer, ids),
    )
    for of_sampler in sampler_meshes(run.c, mesh)
  ]
  learner = Learner(
    parameters,
    trained,
    mesh=mesh,
    rows=run.learner.rows,
    row_tokens=run.learner.row_tokens,
    optimizer=run.c['optimizer'] | {'steps': run.c['steps']},
    loss=run.loss,
    temperature=run.sampling.temperature,
    remat=run.learner.remat,
    seed=run.c['seed'],
  )
  is_global = run.sampler.mesh == 'global'
  continues = run.c['asp']['pause_after'] or not run.c['scheduler']['barrier']
  return DeviceEngine(
    samplers=samplers,
    handover=Handover(
      model,
      mesh,
      model=None if is_global else sampler_parts(run.c),
      apart=run.c['sampler_mesh'] is not None,
    ),
    is_global=is_global,
    learner=learner,
    grader=grader,
    tokenizer=run.tokenizer,
    checkpoints=checkpoints,
    max_new_tokens=run.sampling.max_new_tokens,
    lag=run.c['asp']['lag'],
    longest_part=run.sampling.max_new_tokens if continues else 0,
    window=run.learner.window,
    share_prompt=run.learner.share_prompt,
    overlong=run.c['overlong'],
    teacher=References(run.tokenizer) if run.c['teacher'] else None,
    stopping=stopping,
  )


def checkpointed_steps(workdir: pathlib.Path, which: str) -> list[int]:
  """The checkpoints that 'latest', 'all' or a number stands for."""
  there = Checkpoints(workdir / 'checkpoints', read_only=True).steps()
  chosen = there if which == 'all' else there[-1:]
  if which.isdecimal():
    chosen = [step for step in there if step == int(which)]
  elif which not in ('all', 'latest'):
    raise ValueError(f"--step={which}: expected a number, 'latest' or 'all'")
  if not chosen:
    raise ValueError(f'--step={which}: checkpoints in {workdir} are {there or "none"}')
  return chosen
