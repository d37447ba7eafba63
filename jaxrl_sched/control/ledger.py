"""What became of every group, answer and token, and the numbers that say so.

From the start of a run, whatever methods are on,

    generated = trained + pruned + filtered + dropped + pending

for groups, for answers and for their tokens alike.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from jaxrl_sched.control.snooze_rules import KINDS, columns, verdict_classes
from jaxrl_sched.types import (
  Completion,
  Group,
  Prompt,
  Relief,
  Request,
  Sampling,
  passes,
)

FATES = ('trained', 'pruned', 'filtered', 'dropped')  # and until one of them, pending
# Why groups are filtered, and why they are dropped.
FILTERED = ('easy', 'hard', 'constant')
DROPPED = ('surplus', 'stale', 'aborted', 'overlong')


@dataclasses.dataclass
class Entry:
  """A group whose fate is settled."""

  group: Group
  fate: str
  reason: str = ''
  keep: np.ndarray | None = None  # [G] float64, for groups of the batch: weights
  used: np.ndarray | None = None  # [G] bool, not left out for being truncated


def kinds(groups: Sequence[Group]) -> list[str]:
  """'useful' where verdicts differ within a group, else one of FILTERED."""
  found = ['constant'] * len(groups)  # no answer says nothing
  some = [i for i, group in enumerate(groups) if group.size]
  classes = verdict_classes(**columns([groups[i] for i in some]))
  for i, place in zip(some, classes.tolist(), strict=True):
    found[i] = KINDS[place]
  return found


def taken(group: Group, keep: np.ndarray, used: np.ndarray) -> Entry:
  """A group of the batch: trained on if any answer of it is."""
  if (used & (keep > 0)).any():
    return Entry(group, 'trained', '', keep, used)
  reason = ('dropped', 'overlong') if not used.any() else ('pruned', '')
  return Entry(group, *reason, keep, used)


def pass_rates(groups: Sequence[Group]) -> np.ndarray:  # [n] float64
  """The share of answers that passed; 0 for a group without answers."""
  found = np.zeros(len(groups))
  some = [i for i, group in enumerate(groups) if group.size]
  if some:
    verdicts, *bounds = zip(*(groups[i].deciding for i in some), strict=True)
    flat, starts, sizes = _flat(verdicts)
    passed = passes(flat, *(np.repeat(np.array(b, float), sizes) for b in bounds))
    found[some] = np.add.reduceat(passed.astype(np.int64), starts) / sizes
  return found


def _flat(
  values: Sequence[np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """All values in one array, float64, where each begins, and its size."""
  sizes = np.array([len(array) for array in values])
  return np.concatenate(values, dtype=np.float64), np.cumsum(sizes) - sizes, sizes


def count(
  sampled: Sequence[Group], settled: Sequence[Entry], pending: Sequence[Group]
) -> dict[str, float]:
  """Groups, answers and tokens of a step by fate.

  Args:
    sampled: those of the step's bundle, paused ones too.
  """
  found = {f'rollout/{what}_{fate}': 0 for what in _WHAT for fate in FATES}
  for what, value in zip(_WHAT, _new(sampled), strict=True):
    found[f'rollout/{what}_generated'] = value
  spares = [tokens for group in sampled for tokens in group.spares]
  found['rollout/answers_dropped'] += len(spares)
  found['rollout/tokens_dropped'] += sum(spares)
  for what, value in zip(_WHAT, _sizes(pending), strict=True):
    found[f'rollout/{what}_pending'] = value
  found |= {f'rollout/filtered_{reason}': 0 for reason in FILTERED}
  found |= {f'rollout/dropped_{reason}': 0 for reason in DROPPED}
  for entry in settled:
    found[f'rollout/groups_{entry.fate}'] += 1
    if entry.reason:
      found[f'rollout/{entry.fate}_{entry.reason}'] += 1
    for fate, which in _answers(entry):
      found[f'rollout/answers_{fate}'] += int(np.count_nonzero(which))
      found[f'rollout/tokens_{fate}'] += int(entry.group.lengths[which].sum())
  if generated := found['rollout/tokens_generated']:
    kept = found['rollout/tokens_trained'] + found['rollout/tokens_pruned']
    found['rollout/useful'] = kept / generated
  return found


def averages(seen: Sequence[Group]) -> dict[str, float]:
  """Over all that was generated, filtered or not: an unbiased view of the policy."""
  seen = [group for group in seen if group.size]
  if not seen:
    return {}
  lengths = np.concatenate([group.lengths for group in seen])
  truncated = np.concatenate([group.truncated for group in seen])
  passed = pass_rates(seen)
  rewards, starts, sizes = _flat([group.rewards for group in seen])
  found = {
    'reward/mean': float((np.add.reduceat(rewards, starts) / sizes).mean()),
    'pass_rate': float(passed.mean()),
    'rollout/length_mean': float(lengths.mean()),
    'rollout/length_max': int(lengths.max()),
    'rollout/truncated': float(truncated.mean()),
    'rollout/grading_faults': sum(
      fault is not None for group in seen for fault in group.faults
    ),
  }
  datasets = np.array([group.request.prompt.dataset for group in seen])
  for name in sorted(set(datasets.tolist())):
    found[f'pass_rate/{name}'] = float(passed[datasets == name].mean())
  return found | components(seen)


def components(groups: Sequence[Group]) -> dict[str, float]:
  """'reward/<dataset>/<name>': the mean of each of several rewards, before weighting.

  Args:
    groups: none of them without answers.
  """
  means: dict[str, list[float]] = {}
  for group in groups:
    for name, values in group.components.items():
      key = f'reward/{group.request.prompt.dataset}/{name}'
      means.setdefault(key, []).append(float(values.mean()))
  return {key: float(np.mean(values)) for key, values in sorted(means.items())}


def relief(sampled: Sequence[Group], how: Relief) -> dict[str, float]:
  """What is done about long answers, and what that costs in truth."""
  found = {}
  if how.pause_after:
    found['asp/paused'] = sum(group.is_paused for group in sampled)
  if how.spare:
    spares = [tokens for group in sampled for tokens in group.spares]
    found['asp/spares'] = len(spares)
    kept = [int(tokens) for group in sampled for tokens in group.lengths]
    if kept and how.first_finished:
      # Spares were cut short, so that this is the least that the bias may be.
      found['asp/length_bias'] = float(np.mean(kept) / np.mean(kept + spares) - 1)
  return found


def lags(tokens: Mapping[int, int]) -> dict[str, float]:
  """How old the weights are that trained tokens were sampled with.

  Args:
    tokens: lag -> tokens that have it.
  """
  there = {lag: count for lag, count in sorted(tokens.items()) if count}
  total = sum(there.values())
  if not total:
    return {}
  found = {
    'lag/mean': sum(lag * count for lag, count in there.items()) / total,
    'lag/max': max(there),
  }
  return found | {f'lag/share/{lag}': count / total for lag, count in there.items()}


_WHAT = ('groups', 'answers', 'tokens')


def _sizes(groups: Sequence[Group]) -> tuple[int, int, int]:
  return (
    len(groups),
    sum(group.size for group in groups),
    sum(int(group.lengths.sum()) for group in groups),
  )


def _new(sampled: Sequence[Group]) -> tuple[int, int, int]:
  """What was sampled, answers that were not kept too, but not in an earlier bundle."""
  groups = [group for group in sampled if not group.request.begun]
  answers = sum(group.size + len(group.spares) for group in groups)
  tokens = sum(int(group.lengths.sum()) + sum(group.spares) for group in sampled)
  before = sum(len(c.tokens) for group in sampled for c in group.request.begun)
  return len(groups), answers, tokens - before


def _answers(entry: Entry) -> Iterable[tuple[str, np.ndarray]]:
  """(fate, [G] bool) of the answers of a group."""
  if entry.keep is None:
    return [(entry.fate, np.ones(entry.group.size, bool))]
  kept = entry.keep > 0
  return [
    ('trained', entry.used & kept),
    ('pruned', entry.used & ~kept),
    ('dropped', ~entry.used),
  ]


# --- groups as JSON ---------------------------------------------------------------


def line(entry: Entry) -> dict[str, Any]:
  """A line of rollouts.jsonl, but for its step."""
  group, prompt = entry.group, entry.group.request.prompt
  found = {
    'draw': group.request.draw,
    'prompt_id': prompt.id,
    'dataset': prompt.dataset,
    'size': group.size,
    'lengths': group.lengths.tolist(),
    'predicted_length': _rounded(group.request.predicted_length),
    'predicted_longest': _rounded(group.request.predicted_longest),
    'verdicts': group.verdicts.tolist(),
    'rewards': group.rewards.tolist(),
    'finish': group.finishes,
    'faults': list(group.faults),
    'versions': group.versions,
    'fate': entry.fate,
    'reason': entry.reason,
    'weights': None if entry.keep is None else (entry.keep * entry.used).tolist(),
  }
  if group.components:
    found['components'] = _lists(group.components)
  if group.spares:
    found['spares'] = list(group.spares)
  if any(earlier := group.earlier):
    found['earlier'] = [[list(run) for run in runs] for runs in earlier]
  if group.request.round:
    found['round'] = group.request.round
  return found


def _lists(components: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
  return {name: values.tolist() for name, values in components.items()}


def _rounded(predicted: float | None) -> float | None:
  return None if predicted is None else round(predicted, 2)


def pack(group: Group) -> dict[str, Any]:
  """JSON that holds a group whole. Float32 numbers survive: they are floats in it."""
  request = group.request
  return {
    'draw': request.draw,
    'prompt_id': request.prompt.id,
    'dataset': request.prompt.dataset,
    'index': request.prompt.index,
    'size': request.size,
    'round': request.round,
    'pass': request.dataset_pass,
    'weight': request.weight,
    'predicted_length': request.predicted_length,
    'predicted_longest': request.predicted_longest,
    'exceedance': request.exceedance,
    'spares': list(group.spares),
    'verdicts': group.verdicts.tolist(),
    'rewards': group.rewards.tolist(),
    'faults': list(group.faults),
    'components': _lists(group.components),
    'completions': [_pack_completion(c) for c in group.completions],
    'begun': [_pack_completion(c) for c in request.begun],
  }


def _pack_completion(completion: Completion) -> dict[str, Any]:
  return {
    'answer': completion.answer,
    'tokens': completion.tokens.tolist(),
    'logps': [float(x) for x in completion.logps],
    'finish': completion.finish,
    'version': completion.version,
    'earlier': [list(run) for run in completion.earlier],
  }


def _unpack_completion(packed: dict[str, Any], draw: int) -> Completion:
  return Completion(
    draw=draw,
    answer=packed['answer'],
    tokens=np.array(packed['tokens'], np.int32),
    logps=np.array(packed['logps'], np.float32),
    finish=packed['finish'],
    version=packed['version'],
    earlier=tuple((count, version) for count, version in packed['earlier']),
  )


def unpack(packed: dict[str, Any], prompt: Prompt, sampling: Sampling) -> Group:
  """What `pack` was given.

  Raises:
    ValueError: `prompt` is another one than was packed, or has other rewards.
  """
  if prompt.id != packed['prompt_id']:
    raise ValueError(
      f'prompt {packed["index"]} of {packed["dataset"]!r} was {packed["prompt_id"]!r} '
      f'when this run began, now it is {prompt.id!r}'
    )
  components = packed.get('components', {})
  if list(components) != [r.name for r in prompt.rewards]:
    raise ValueError(
      f'carried group of draw {packed["draw"]}: rewards {list(components)}, expected '
      f'{[reward.name for reward in prompt.rewards]}'
    )
  parts = [value for values in components.values() for value in values]
  numbers = [packed['weight'], *packed['verdicts'], *packed['rewards'], *parts]
  each = [packed['verdicts'], *components.values()]
  if any(len(packed['completions']) != len(values) for values in each):
    raise ValueError(
      f'carried group of draw {packed["draw"]}: answers without verdicts'
    )
  if not np.isfinite(numbers).all() or packed['weight'] <= 0:
    raise ValueError(
      f'carried group of draw {packed["draw"]}: {numbers}, expected a '
      'weight above 0 and finite verdicts and rewards'
    )
  draw = packed['draw']
  completions = tuple(_unpack_completion(c, draw) for c in packed['completions'])
  request = Request(
    draw=draw,
    prompt=prompt,
    size=packed['size'],
    sampling=sampling,
    round=packed['round'],
    dataset_pass=packed['pass'],
    weight=packed['weight'],
    predicted_length=packed['predicted_length'],
    predicted_longest=packed['predicted_longest'],
    exceedance=packed['exceedance'],
    begun=tuple(_unpack_completion(c, draw) for c in packed['begun']),
  )
  return Group(
    request=request,
    completions=completions,
    verdicts=np.array(packed['verdicts'], np.float32),
    rewards=np.array(packed['rewards'], np.float32),
    faults=tuple(packed['faults']),
    components={k: np.array(v, np.float32) for k, v in components.items()},
    spares=tuple(packed['spares']),
  )
