"""Relations between the numbers of a config, before anything is opened or built."""

from collections.abc import Callable, Iterator
import contextlib
import importlib.util
import math
from typing import Any

from jaxrl_sched.control.asp import Asp
from jaxrl_sched.control.sagc_checks import check_sizes
from jaxrl_sched.device import losses
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device.learner import make_optimizer
from jaxrl_sched.device.lora import Lora
from jaxrl_sched.host.packing import AVERAGES, AVERAGING
from jaxrl_sched.host.pruning import check_rate
from jaxrl_sched.host.rewards import overlong_penalty


@contextlib.contextmanager
def named(prefix: str) -> Iterator[None]:
  """What is refused inside is told as a key of the config."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{prefix}{error}') from None


def check_numbers(c: dict[str, Any], *, hosts: int = 1) -> None:
  """Relations between settings, in numbers.

  Args:
    hosts: that the devices of `mesh` are spread over.
  """

  def need(good: bool, key: str, value: Any, expected: str) -> None:
    if not good:
      raise ValueError(f'config.{key}: {value!r}, expected {expected}')

  s, group = c['sampling'], c['scheduler']['group_size']
  most = s['max_new_tokens']
  need(1 <= c['steps'] <= 10**9, 'steps', c['steps'], 'at least 1, at most 10**9')
  need(0 <= c['seed'] < 2**32, 'seed', c['seed'], '0 to 2**32 - 1')
  need(most >= 1, 'sampling.max_new_tokens', most, 'at least 1')
  need(c['teacher'] in (None, 'solutions'), 'teacher', c['teacher'], "'solutions'")
  if c['teacher'] is None:
    expected = 'at least 2: advantages compare the answers of a group'
    need(group >= 2, 'scheduler.group_size', group, expected)
    heat = s['temperature']
    need(heat > 0, 'sampling.temperature', heat, 'above 0')
    # The learner's softmax runs over the whole vocabulary.
    why = 'in training: the log-probs of sampler and learner would not agree'
    need(s['top_p'] == 1, 'sampling.top_p', s['top_p'], f'1 {why}')
    need(s['top_k'] <= 0, 'sampling.top_k', s['top_k'], f'0 {why}')
    early = s['min_new_tokens']
    need(early == 0, 'sampling.min_new_tokens', early, f'0 {why}')
  else:
    need(group == 1, 'scheduler.group_size', group, '1, as there is a teacher')
    dynamic = c['scheduler']['dynamic_sampling']
    expected = 'False, as there is a teacher'
    need(not dynamic, 'scheduler.dynamic_sampling', dynamic, expected)
    # Nobody sampled the references: there is no importance to truncate.
    cap = c['loss']['tis_cap']
    need(cap is None, 'loss.tis_cap', cap, 'None, as there is a teacher')

  _check_meshes(c, need, hosts)
  longest = c['prompts']['max_tokens'] + most
  need(
    c['learner']['row_tokens'] >= longest,
    'learner.row_tokens',
    c['learner']['row_tokens'],
    f'at least prompts.max_tokens + sampling.max_new_tokens = {longest}',
  )
  chunk = c['sampler']['chunk']
  need(chunk >= 1, 'sampler.chunk', chunk, 'at least 1')
  _check_choices(c, need)
  _check_controllers(c, need)
  _check_asp(c, need, hosts)


def _check_controllers(c: dict[str, Any], need: Callable) -> None:
  """How group sizes, pruning and the rest go together."""
  scheduler, sagc, loss = c['scheduler'], c['sagc'], c['loss']
  dynamic, group = scheduler['dynamic_sampling'], scheduler['group_size']
  if c['teacher'] is not None:
    for name in (
      'snooze',
      'tiers',
      'sagc',
      'lengths',
      'prune_prompts',
      'prune_answers',
    ):
      need(c[name] is None, name, c[name], 'None, as there is a teacher')
  if not dynamic:
    surplus = 'there is no surplus without dynamic sampling'
    need(not scheduler['borrow'], 'scheduler.borrow', True, f'False: {surplus}')
    quotas = scheduler['quotas']
    need(quotas, 'scheduler.quotas', quotas, 'True without dynamic sampling')
  by_prompt = sagc is not None and sagc['prompt_aware']
  if sagc is not None:
    with named('config.sagc.'):
      sizes = check_sizes(sagc['sizes'])
    expected = f'one of config.sagc.sizes={list(sizes)}, as it is the first size'
    need(group in sizes, 'scheduler.group_size', group, expected)
  if by_prompt:
    expected = 'a block (--config.lengths={}), as sagc.prompt_aware is on'
    need(c['lengths'] is not None, 'lengths', None, expected)
    need(scheduler['quotas'], 'scheduler.quotas', False, 'True with sagc.prompt_aware')
    borrow = scheduler['borrow']
    need(not borrow, 'scheduler.borrow', borrow, 'False with sagc.prompt_aware')
  # Where the number of tokens hangs on what was decided, they cannot be averaged over.
  average = loss['averaging'] or AVERAGING[loss['kind']]
  why = 'prune_prompts' if c['prune_prompts'] is not None else 'sagc.prompt_aware'
  if average == 'token' and (by_prompt or c['prune_prompts'] is not None):
    expected = (
      "'group' (a mean over the tokens of each group), 'sequence' or 'constant'"
    )
    need(False, 'loss.averaging', average, f'{expected} with {why}')
  for name in ('prune_prompts', 'prune_answers'):
    if c[name] is not None:
      key, high = f'config.{name}.rate', c[name]['allow_high_rate']
      check_rate(key, c[name]['rate'], allow_high_rate=high)
  if c['prune_prompts'] is not None:
    regime, expected = c['prune_prompts']['regime'], "'fill' with dynamic sampling"
    good = regime in (None, 'fill') or not dynamic
    need(good, 'prune_prompts.regime', regime, expected)
  every = c['checkpoint']['compare_every']
  need(every >= 1, 'checkpoint.compare_every', every, 'at least 1')


def _check_meshes(c: dict[str, Any], need: Callable, hosts: int) -> None:
  """What the devices of a mesh share is to divide."""
  mesh, apart, sampler = c['mesh'], c['sampler_mesh'], c['sampler']
  for name, sizes in (('mesh', mesh), ('sampler_mesh', apart or {})):
    for axis, value in sizes.items():
      need(value >= 1, f'{name}.{axis}', value, 'at least 1')
  need(
    math.prod(mesh.values()) % hosts == 0,
    'mesh',
    meshes.product(mesh),
    f'as many devices on each of the {hosts} hosts',
  )
  where = sampler['mesh']
  need(where in ('local', 'global'), 'sampler.mesh', where, "'local' or 'global'")
  if apart is not None:
    need(where == 'local', 'sampler.mesh', where, "'local' with a sampler_mesh")
    model = sampler['model']
    need(model is None, 'sampler.model', model, 'sampler_mesh.model in its place')
  elif where == 'global':
    model = sampler['model']
    good = model in (None, mesh['model'])
    need(good, 'sampler.model', model, "that of the mesh with sampler.mesh='global'")
  rows = meshes.mesh_axes('rows')
  slots, of = meshes.mesh_axes('slots'), 'mesh' if apart is None else 'sampler_mesh'
  if apart is None and where == 'local':
    each = math.prod(mesh.values()) // hosts
    model = sampler['model'] or mesh['model']
    expected = f"a divisor of the {each} devices of a host, or sampler.mesh='global'"
    need(model >= 1 and each % model == 0, 'sampler.model', model, expected)
    parts = each // model
    told = f'the {each} devices of a host' + f' / {model} parts of heads' * (model > 1)
  else:
    parts = math.prod(c[of][axis] for axis in slots)
    told = ' * '.join(f'{of}.{axis}' for axis in slots if c[of][axis] > 1) or '1'
  for name in ('slots', 'prefill_rows'):
    value, multiple = sampler[name], f'a multiple of {told} = {parts}'
    need(value >= 1 and value % parts == 0, f'sampler.{name}', value, multiple)
  for name, axes in (('rows', rows), ('row_tokens', meshes.mesh_axes('tokens'))):
    value, parts = c['learner'][name], math.prod(mesh[axis] for axis in axes)
    multiple = f'a multiple of {" * ".join(f"mesh.{axis}" for axis in axes)} = {parts}'
    need(value >= 1 and value % parts == 0, f'learner.{name}', value, multiple)


def _check_asp(c: dict[str, Any], need: Callable, hosts: int) -> None:
  """How far sampling runs ahead, and how it is spread."""
  engine_hosts = hosts if c['sampler']['mesh'] == 'local' else 1
  with named('config.'):
    asp = Asp(**c['asp'])
  if c['teacher'] is not None:
    need(asp == Asp(), 'asp', c['asp'], 'its defaults, as there is a teacher')
  if c['sampler_mesh'] is None:
    expected = '1, as samplers share the devices of mesh (config.sampler_mesh is None)'
    need(asp.engines == 1, 'asp.engines', asp.engines, expected)
  most = c['sampling']['max_new_tokens']
  expected = f'less than sampling.max_new_tokens={most}'
  need(asp.pause_after < most, 'asp.pause_after', asp.pause_after, expected)
  average = c['loss']['averaging'] or AVERAGING[c['loss']['kind']]
  if asp.window > 1:
    # Others hang on how many engines there are: not the same run on other hosts.
    expected = "'shuffled' with a window on several hosts"
    good = asp.order == 'shuffled' or engine_hosts == 1
    need(good, 'asp.order', asp.order, expected)
    # Bundles are alike in length: a token of a short one would count for more.
    expected = "'group', 'sequence' or 'constant' with asp.window above 1"
    need(average != 'token', 'loss.averaging', average, expected)
    # Without forecasts all prompts are alike, and so are all orders.
    expected = 'a block (--config.lengths={}), as asp.window is above 1'
    need(c['lengths'] is not None, 'lengths', None, expected)
  if c['sagc'] is not None and len(c['sagc']['sizes']) > 1:
    expected = '0 with sagc: what goes on has the size that it began with'
    need(asp.pause_after == 0, 'asp.pause_after', asp.pause_after, expected)
  if asp.lag:
    expected = (
      'a number with asp.lag: what is older than the weights is corrected by it'
    )
    need(c['loss']['tis_cap'] is not None, 'loss.tis_cap', None, expected)
  if not c['scheduler']['barrier']:
    expected = 'a number without scheduler.barrier: many answers are of older weights'
    need(c['loss']['tis_cap'] is not None, 'loss.tis_cap', None, expected)
    expected = 'None without scheduler.barrier'
    need(c['teacher'] is None, 'teacher', c['teacher'], expected)
    return
  rounds, dynamic = c['scheduler']['max_rounds'], c['scheduler']['dynamic_sampling']
  expected = 'None or 1 with asp.lag: all engines would wait for the bundle to close'
  good = asp.lag == 0 or not dynamic or rounds in (None, 1)
  need(good, 'scheduler.max_rounds', rounds, expected)
  expected = 'None or 1 with asp.pause_after: what pauses would be asked for again'
  good = asp.pause_after == 0 or not dynamic or rounds in (None, 1)
  need(good, 'scheduler.max_rounds', rounds, expected)


def _check_choices(c: dict[str, Any], need: Callable) -> None:
  loss = c['loss']
  kinds = ', '.join(AVERAGING)
  need(loss['kind'] in AVERAGING, 'loss.kind', loss['kind'], f'one of {kinds}')
  need(loss['kl'] in ('k1', 'k2', 'k3'), 'loss.kl', loss['kl'], 'one of k1, k2, k3')
  losses.check_settings(
    loss['kind'],
    loss['clip_low'],
    loss['clip_high'],
    loss['dual_clip'],
    loss['tis_cap'],
  )
  if c['overlong'] is not None:
    overlong_penalty([1], limit=c['sampling']['max_new_tokens'], **c['overlong'])
  need(loss['kl_coef'] >= 0, 'loss.kl_coef', loss['kl_coef'], '0 or more')
  expected = f'one of {", ".join(AVERAGES)}'
  average = loss['averaging']
  need(average is None or average in AVERAGES, 'loss.averaging', average, expected)
  make_optimizer(**c['optimizer'], steps=c['steps'])
  if c['lora'] is not None:
    Lora(**c['lora'])
  dtype = c['model']['dtype']
  need(dtype in ('float32', 'bfloat16'), 'model.dtype', dtype, 'float32 or bfloat16')
  checkpoint = c['checkpoint']
  window = c['learner']['window']
  need(window >= 1, 'learner.window', window, 'at least 1')
  samples = c['log']['samples']
  need(samples >= 0, 'log.samples', samples, '0 or more')
  if c['log']['wandb'] is not None and importlib.util.find_spec('wandb') is None:
    raise ValueError(
      "config.log.wandb: set, but wandb is not installed (extra 'wandb')"
    )
  for text in c['sampling']['stop_strings']:
    good = isinstance(text, str) and bool(text)
    need(good, 'sampling.stop_strings', text, 'some text')
  grading = c['grading']
  need(grading['workers'] >= 1, 'grading.workers', grading['workers'], 'at least 1')
  # Importing reasoning_gym takes 0.12 GiB of a worker's data, math-verify 0.09.
  memory, least = grading['memory_gib'], 0.25
  expected = f'at least {least}, which imports of verifiers take, or None'
  need(memory is None or memory >= least, 'grading.memory_gib', memory, expected)
  deadline = grading['deadline_s']
  need(deadline > 0, 'grading.deadline_s', deadline, 'above 0')
  eps = c['advantage']['eps']
  need(eps >= 0, 'advantage.eps', eps, '0 or more')
  need(checkpoint['every'] >= 1, 'checkpoint.every', checkpoint['every'], 'at least 1')
  need(checkpoint['keep'] >= 1, 'checkpoint.keep', checkpoint['keep'], 'at least 1')
  if c['evaluate'] is None:
    return
  e = c['evaluate']
  need(e['every'] >= 1, 'evaluate.every', e['every'], 'at least 1')
  need(e['samples'] >= 1, 'evaluate.samples', e['samples'], 'at least 1')
  need(0 < e['top_p'] <= 1, 'evaluate.top_p', e['top_p'], 'above 0, at most 1')
  limit = e['max_new_tokens']
  need(limit is None or limit >= 1, 'evaluate.max_new_tokens', limit, 'at least 1')
  overlap = e['max_overlap']
  need(0 <= overlap <= 1, 'evaluate.max_overlap', overlap, '0 to 1')
  need(e['temperature'] >= 0, 'evaluate.temperature', e['temperature'], '0 or more')
  if e['temperature'] == 0:
    expected = '1 at temperature 0, where all samples are the same'
    need(e['samples'] == 1, 'evaluate.samples', e['samples'], expected)
  for k in e['k']:
    good = isinstance(k, int) and 1 <= k <= e['samples']
    need(good, 'evaluate.k', k, f'1 to evaluate.samples={e["samples"]}')
