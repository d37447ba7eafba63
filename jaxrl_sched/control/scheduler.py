"""Which prompts get answers, and which answers are trained on.

`plan` decides and changes nothing; `sent`, `observe` and `take_batch` change state
and are called on every process with the same input.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import numpy as np

from jaxrl_sched.control.base import check_state
from jaxrl_sched.control.snooze import Snooze, requests_for
from jaxrl_sched.types import SAME, Completion, Group, Prompt, Request, Sampling

FATES = ('trained', 'filtered', 'dropped')  # and, until one of them, pending
_STATE = ('draw', 'yields', 'source', 'carried')


@dataclasses.dataclass
class _Yield:
  """How often a dataset's groups turn out useful, forgetting slowly."""

  useful: float = 0.0
  generated: float = 0.0

  @property
  def rate(self) -> float:
    return max(0.05, (self.useful + 1) / (self.generated + 2))

  def count(self, useful: int, generated: int) -> None:
    self.useful = 0.9 * self.useful + useful
    self.generated = 0.9 * self.generated + generated


class Scheduler:
  """A fixed group size and DAPO's dynamic sampling (arXiv 2503.14476).

  Groups without spread in their verdicts are filtered and replaced, in at most
  `max_rounds` rounds, until each dataset has its quota. Useful groups past the
  quota are carried into the next batch, once, or dropped.

  Args:
    source: whose turn it is, and who sleeps.
    prompt_of: (dataset, index) -> Prompt.
    sampling: dataset-independent settings of every request.
    groups_per_step, group_size: of a batch.
    dynamic_sampling: False trains on every group.
    surplus: 'carry' or 'drop'.
    overlong_filter: truncated answers are not trained on (the learner's setting).
  """

  def __init__(
    self,
    source: Snooze,
    prompt_of: Callable[[str, int], Prompt],
    sampling: Sampling,
    *,
    groups_per_step: int,
    group_size: int,
    dynamic_sampling: bool = True,
    max_rounds: int = 8,
    surplus: str = 'carry',
    overlong_filter: bool = False,
  ):
    if groups_per_step < 1 or max_rounds < 1:
      raise ValueError(
        f'scheduler: groups_per_step={groups_per_step}, max_rounds={max_rounds}; '
        'expected at least 1'
      )
    if surplus not in ('carry', 'drop'):
      raise ValueError(f"scheduler.surplus: {surplus!r}, expected 'carry' or 'drop'")
    self._source, self._prompt_of, self._sampling = source, prompt_of, sampling
    self._quotas = source.quotas(groups_per_step)
    self._group_size = group_size
    self._dynamic, self._surplus_rule = dynamic_sampling, surplus
    self._overlong_filter = overlong_filter
    self._max_rounds = max_rounds if dynamic_sampling else 1
    self._draw = 0
    self._yields = {name: _Yield() for name in self._quotas}
    self._carried: list[Group] = []  # useful groups of the step before
    self._begin()

  def _begin(self) -> None:
    """The state of an open batch, which no checkpoint ever sees."""
    self._round = 0
    self._seen: list[Group] = []  # all groups of this step, in draw order
    self._accepted = {name: [] for name in self._quotas}
    self._surplus: list[Group] = []
    self._settled: list[tuple[Group, str, str]] = []  # group, fate, reason
    for group in self._carried:
      accepted = self._accepted[group.request.prompt.dataset]
      if len(accepted) < self._quotas[group.request.prompt.dataset]:
        accepted.append(group)
      else:
        self._settled.append((group, 'dropped', 'stale'))

  # --- a step, in the order of the loop ---

  def plan(self, step: int) -> list[Request]:
    """The requests of the next round; none: the batch is as full as it gets."""
    del step  # decisions hang on the state alone
    if self._round >= self._max_rounds:
      return []
    requests = []
    for name, quota in self._quotas.items():
      count = self._wanted(name, quota - len(self._accepted[name]))
      for index, number in self._source.peek(name, count):
        requests.append(
          Request(
            draw=self._draw + len(requests),
            prompt=self._prompt_of(name, index),
            size=self._group_size,
            sampling=self._sampling,
            dataset_pass=number,
          )
        )
    return requests

  def _wanted(self, name: str, missing: int) -> int:
    if not self._dynamic:
      return missing
    last = self._round + 1 == self._max_rounds
    wanted = requests_for(missing, self._yields[name].rate, 0.95 if last else None)
    return min(wanted, 10 * self._quotas[name])

  def sent(self, requests: Sequence[Request]) -> None:
    self._round += 1
    self._draw += len(requests)
    for name in self._quotas:
      mine = [r for r in requests if r.prompt.dataset == name]
      picks = [(r.prompt.index, r.dataset_pass) for r in mine]
      self._source.take(name, picks, [r.draw for r in mine])

  def observe(self, groups: Sequence[Group], step: int) -> None:
    """Takes in a round's groups, in draw order."""
    del step
    self._seen.extend(groups)
    for group in groups:
      name = group.request.prompt.dataset
      self._source.observe(
        name,
        group.request.prompt.index,
        group.verdicts,
        group.request.prompt.max_reward,
        draw=group.request.draw,
        drawn_pass=group.request.dataset_pass,
      )
      if group.size < 2 <= self._group_size:
        self._settled.append((group, 'dropped', 'aborted'))
      elif self._dynamic and np.ptp(group.verdicts) <= SAME:
        self._settled.append((group, 'filtered', _verdict(group)))
      elif len(self._accepted[name]) < self._quotas[name]:
        self._accepted[name].append(group)
      elif self._surplus_rule == 'carry':
        self._surplus.append(group)
      else:
        self._settled.append((group, 'dropped', 'surplus'))

  def take_batch(self) -> tuple[list[Group], dict[str, float], list[dict[str, Any]]]:
    """Closes the batch.

    Returns:
      The groups to train on (perhaps none), metrics of the step, and a line for
      each group whose fate it settled.
    """
    batch = [g for groups in self._accepted.values() for g in groups]
    for group in batch:
      used = self._trained_tokens(group) > 0
      fate = ('trained', '') if used else ('dropped', 'overlong')
      self._settled.append((group, *fate))
    for name, record in self._yields.items():
      seen = [g for g in self._seen if g.request.prompt.dataset == name]
      useful = sum(bool(np.ptp(g.verdicts) > SAME) for g in seen)
      record.count(useful, len(seen))
    self._carried = self._surplus
    metrics = self._metrics(batch)
    lines = [_line(*settled) for settled in self._settled]
    self._begin()
    return batch, metrics, lines

  def _trained_tokens(self, group: Group) -> int:
    kept = ~group.truncated if self._overlong_filter else np.ones(group.size, bool)
    return int(group.lengths[kept].sum())

  def pending(self) -> list[dict[str, Any]]:
    """A line for each group that is still carried: what the end of a run leaves."""
    return [_line(group, 'pending', '') for group in self._carried]

  # --- what it tells ---

  def _metrics(self, batch: Sequence[Group]) -> dict[str, float]:
    metrics = {
      'rollout/groups_generated': len(self._seen),
      'rollout/groups_pending': len(self._carried),
      'rollout/rounds': self._round,
      'rollout/tokens_generated': sum(int(g.lengths.sum()) for g in self._seen),
      'rollout/tokens_trained': sum(map(self._trained_tokens, batch)),
    }
    for fate in FATES:
      count = sum(settled[1] == fate for settled in self._settled)
      metrics[f'rollout/groups_{fate}'] = count
    if self._seen:
      # Over all that was generated, filtered or not: an unbiased view of the policy.
      lengths = np.concatenate([g.lengths for g in self._seen])
      metrics |= {
        'reward/mean': float(np.mean([g.rewards.mean() for g in self._seen])),
        'pass_rate': float(np.mean([g.passed.mean() for g in self._seen])),
        'rollout/length_mean': float(lengths.mean()),
        'rollout/length_max': int(lengths.max()),
        'rollout/truncated': float(
          np.concatenate([g.truncated for g in self._seen]).mean()
        ),
        'rollout/grading_faults': sum(
          fault is not None for g in self._seen for fault in g.faults
        ),
      }
    for name in self._quotas:
      seen = [g for g in self._seen if g.request.prompt.dataset == name]
      if seen:
        metrics[f'pass_rate/{name}'] = float(np.mean([g.passed.mean() for g in seen]))
      if batch:
        share = np.mean([g.request.prompt.dataset == name for g in batch])
        metrics[f'share/{name}'] = float(share)
    return metrics | self._source.metrics()

  # --- state, between two steps ---

  def freeze(self) -> Callable[[], dict[str, Any]]:
    """The state as of now, to be written out later, if at all, before the next call.

    Only between `take_batch` and the next `sent`: no batch may be open. Groups never
    change, so that holding them is enough: tokens are turned into JSON for a save only.
    """
    state = {
      'draw': self._draw,
      'yields': {n: [y.useful, y.generated] for n, y in self._yields.items()},
    }
    source, carried = self._source.freeze(), tuple(self._carried)
    return lambda: (
      state | {'source': source(), 'carried': [_pack_group(group) for group in carried]}
    )

  def state_dict(self) -> dict[str, Any]:
    """JSON and small arrays; when, see `freeze`."""
    return self.freeze()()

  def load_state_dict(self, state: dict[str, Any]) -> None:
    check_state('scheduler', state, dict.fromkeys(_STATE))
    check_state('scheduler.yields', state['yields'], self._yields)
    self._draw = state['draw']
    self._source.load_state_dict(state['source'])
    self._yields = {name: _Yield(*y) for name, y in state['yields'].items()}
    self._carried = [
      _unpack_group(packed, self._prompt_of, self._sampling)
      for packed in state['carried']
    ]
    self._begin()


def _verdict(group: Group) -> str:
  """Why a group without spread teaches nothing."""
  if group.request.prompt.max_reward is not None and group.passed.all():
    return 'easy'
  return 'hard' if group.verdicts.max() <= SAME else 'constant'


def _line(group: Group, fate: str, reason: str) -> dict[str, Any]:
  """A line of rollouts.jsonl, but for its step."""
  prompt = group.request.prompt
  return {
    'draw': group.request.draw,
    'prompt_id': prompt.id,
    'dataset': prompt.dataset,
    'size': group.size,
    'lengths': group.lengths.tolist(),
    'verdicts': [float(v) for v in group.verdicts],
    'rewards': [float(r) for r in group.rewards],
    'finish': [c.finish for c in group.completions],
    'faults': list(group.faults),
    'versions': [c.version for c in group.completions],
    'fate': fate,
    'reason': reason,
  }


def _pack_group(group: Group) -> dict[str, Any]:
  """JSON that holds a group whole. Float32 numbers survive: they are floats in it."""
  request = group.request
  return {
    'draw': request.draw,
    'prompt_id': request.prompt.id,
    'dataset': request.prompt.dataset,
    'index': request.prompt.index,
    'pass': request.dataset_pass,
    'verdicts': [float(v) for v in group.verdicts],
    'rewards': [float(r) for r in group.rewards],
    'faults': list(group.faults),
    'completions': [
      {
        'answer': c.answer,
        'tokens': c.tokens.tolist(),
        'logps': [float(x) for x in c.logps],
        'finish': c.finish,
        'version': c.version,
      }
      for c in group.completions
    ],
  }


def _unpack_group(
  packed: dict[str, Any], prompt_of: Callable[[str, int], Prompt], sampling: Sampling
) -> Group:
  completions = tuple(
    Completion(
      draw=packed['draw'],
      answer=c['answer'],
      tokens=np.array(c['tokens'], np.int32),
      logps=np.array(c['logps'], np.float32),
      finish=c['finish'],
      version=c['version'],
    )
    for c in packed['completions']
  )
  prompt = prompt_of(packed['dataset'], packed['index'])
  if prompt.id != packed['prompt_id']:
    raise ValueError(
      f'prompt {packed["index"]} of {packed["dataset"]!r} was {packed["prompt_id"]!r} '
      f'when this run began, now it is {prompt.id!r}'
    )
  request = Request(
    draw=packed['draw'],
    prompt=prompt,
    size=len(completions),
    sampling=sampling,
    dataset_pass=packed['pass'],
  )
  return Group(
    request=request,
    completions=completions,
    verdicts=np.array(packed['verdicts'], np.float32),
    rewards=np.array(packed['rewards'], np.float32),
    faults=tuple(packed['faults']),
  )
