"""The controllers of a config, put together: what is sampled, and how much is kept."""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import numpy as np

from jaxrl_sched import storage
from jaxrl_sched.checks import named
from jaxrl_sched.control.asp import Asp
from jaxrl_sched.control.difficulty import open_tiers
from jaxrl_sched.control.lengths import LengthPredictor
from jaxrl_sched.control.open_scheduler import OpenScheduler
from jaxrl_sched.control.sagc import SAGC
from jaxrl_sched.control.scheduler import Scheduler
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.control.source import Source
from jaxrl_sched.device.prompts import PromptSet
from jaxrl_sched.host.advantages import group_advantages
from jaxrl_sched.host.pruning import FLOOR, AnswerPruner, PromptPruner
from jaxrl_sched.types import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrunePrompts:
  """DPPO before answers are sampled; see `PromptPruner`."""

  rate: float = 0.5
  regime: str | None = None  # 'fill' with dynamic sampling, else 'fixed_candidates'
  draw: str = 'fixed'
  final: float = 0.125
  blend: float = 1.0
  allow_high_rate: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneAnswers:
  """DPPO before answers are trained on; see `AnswerPruner`."""

  rate: float = 0.5
  rule: str = 'fixed'
  floor: float = FLOOR
  cost: str | None = None
  final: float = 0.125
  allow_high_rate: bool = False


def make_scheduler(
  c: dict[str, Any], prompts: PromptSet, sampling: Sampling, *, hosts: int = 1
) -> Scheduler:
  """The controllers that a checked config names, put together.

  Args:
    hosts: each of which has asp.engines sampling engines.

  Raises:
    ValueError: what does not go together, or with these prompts.
  """
  s, sagc, lengths = c['scheduler'], None, None
  most = s['groups_per_step']
  if c['sagc'] is not None:
    with named('config.sagc.'):
      sagc = SAGC(**c['sagc'], start=s['group_size'], seed=c['seed'])
    if sagc.hold == 'rollouts':
      most = most * s['group_size'] // min(sagc.sizes)
  if s['quotas'] and not (sagc is not None and sagc.prompt_aware):  # those roll
    _check_quotas(prompts, most)
  tiers, sizes, weights = None, prompts.sizes, prompts.weights
  if c['tiers'] is not None:
    block = c['tiers'] | {'table': _on_this_host(c['tiers']['table'])}
    tiers = open_tiers(ids=prompts.ids(), weights=weights, steps=c['steps'], **block)
    sizes = {stream: len(indices) for stream, (_, indices) in tiers.streams().items()}
    weights = tiers.weights(0)
    _say_unknown(tiers.unknown, sum(prompts.sizes.values()))
  # A factor of 0 is a sleep of no pass: plain dynamic sampling.
  snooze = Snooze(sizes, weights, seed=c['seed'], **c['snooze'] or {'factor': 0.0})
  if c['lengths'] is not None:
    limit = sampling.max_new_tokens
    lengths = LengthPredictor(prompts.sizes, limit=limit, **c['lengths'])
  source = Source(snooze, tiers)
  for step in [0] if tiers is None else tiers.phases:
    _check_pools(source, step, most, quotas=s['quotas'])
  of = Scheduler
  if not s['barrier']:
    of = functools.partial(OpenScheduler, chunk=c['sampler']['chunk'])
  return of(
    source,
    prompts.get,
    sampling,
    overlong_filter=c['loss']['overlong_filter'],
    sagc=sagc,
    lengths=lengths,
    prompt_pruner=_prompt_pruner(c, sizes),
    answer_pruner=_answer_pruner(c),
    advantages_of=_advantages(c),
    leave_one_out=sagc is not None
    and sagc.prompt_aware
    and not c['advantage']['divide_by_std'],
    asp=Asp(**c['asp'] | {'engines': hosts * c['asp']['engines']}),
    slots=c['sampler']['slots'],
    steps=c['steps'],
    seed=c['seed'],
    **s,
  )


def _check_pools(source: Source, step: int, most: int, *, quotas: bool) -> None:
  """What may be drawn in a step is to be enough for a batch of `most` groups."""
  weights = source.weights(step)
  live = {stream: source.sizes[stream] for stream, w in weights.items() if w > 0}
  if not quotas and sum(live.values()) < most:
    raise ValueError(
      f'prompts: {sum(live.values())} may be drawn at step {step}, expected at least '
      f'the {most} of one batch'
    )
  for stream, size in live.items() if quotas else ():
    share = most * weights[stream] / sum(weights.values())
    if math.floor(share + 1e-9) > size:
      raise ValueError(
        f'{stream!r}: {size} prompts may be drawn at step {step}, expected at least its '
        f'share of a batch of {most} groups, {share:g}'
      )


def _say_unknown(unknown: int, prompts: int) -> None:
  if unknown:
    print(
      f'tiers: {prompts - unknown} of {prompts} prompts are in the table, the others '
      'count as medium'
    )


def _prompt_pruner(c: dict[str, Any], sizes: dict[str, int]) -> PromptPruner | None:
  if c['prune_prompts'] is None:
    return None
  block = {k: v for k, v in c['prune_prompts'].items() if k != 'allow_high_rate'}
  dynamic = c['scheduler']['dynamic_sampling']
  if block['regime'] is None:
    block['regime'] = 'fill' if dynamic else 'fixed_candidates'
  with named('config.prune_prompts.'):
    return PromptPruner(
      sizes,
      steps=c['steps'],
      seed=c['seed'],
      unit=1.0 if c['advantage']['divide_by_std'] else 0.5,
      dynamic_sampling=dynamic,
      **block,
    )


def _answer_pruner(c: dict[str, Any]) -> AnswerPruner | None:
  if c['prune_answers'] is None:
    return None
  block = {k: v for k, v in c['prune_answers'].items() if k != 'allow_high_rate'}
  with named('config.prune_answers.'):
    return AnswerPruner(steps=c['steps'], seed=c['seed'], **block)


def _advantages(c: dict[str, Any]) -> Callable[[np.ndarray], np.ndarray]:
  if c['teacher'] is not None:
    return np.ones_like  # the policy gradient is then that of supervised learning
  return functools.partial(group_advantages, **c['advantage'])


def _on_this_host(tables: Any) -> Any:
  """Tables with those at gs:// copied; what is no path is for others to refuse."""
  if isinstance(tables, list | tuple):
    return type(tables)(_on_this_host(table) for table in tables)
  is_remote = isinstance(tables, str) and storage.is_remote(tables)
  return storage.fetched(tables) if is_remote else tables


def _check_quotas(prompts: PromptSet, most: int) -> None:
  """No prompt is to be twice in a batch, of at most so many groups."""
  total = sum(prompts.weights.values())
  for name, weight in prompts.weights.items():
    quota = math.ceil(most * weight / total - 1e-9)
    if quota > prompts.sizes[name]:
      raise ValueError(
        f'dataset {name!r}: {prompts.sizes[name]} prompts kept (and '
        f'{prompts.dropped[name]} too long), expected at least the {quota} of one '
        'batch'
      )
