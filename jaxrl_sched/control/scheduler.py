"""Which prompts get how many answers, and which of these are trained on.

Here the controllers meet. `plan` and `enough` decide and change nothing; `sent`,
`observe`, `take_batch` and `close` change state and are called on every process with the
same input.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import itertools
import math
from typing import Any

import numpy as np

from jaxrl_sched.control import ledger
from jaxrl_sched.control.base import check_state
from jaxrl_sched.control.filling import Pot, Quotas, Rolling, Turns
from jaxrl_sched.control.learning import Learning, OpenBatch
from jaxrl_sched.control.lengths import LengthPredictor
from jaxrl_sched.control.planning import Plan, Planner
from jaxrl_sched.control.quotas import requests_for
from jaxrl_sched.control.sagc import SAGC, check_rollouts
from jaxrl_sched.control.source import Source
from jaxrl_sched.host.pruning import AnswerPruner, PromptPruner
from jaxrl_sched.types import Group, Lesson, Prompt, Sampling

VERSION = 2  # of the state
_STATE = ('version', 'draw', 'yields', 'turns', 'source', 'carried')
_STATE += ('sagc', 'lengths', 'pruner')


@dataclasses.dataclass
class _Yield:
  """How often a stream's groups turn out useful, forgetting slowly."""

  useful: float = 0.0
  generated: float = 0.0

  @property
  def rate(self) -> float:
    return max(0.05, (self.useful + 1) / (self.generated + 2))

  def count(self, useful: int, generated: int) -> None:
    self.useful = 0.9 * self.useful + useful
    self.generated = 0.9 * self.generated + generated


class Scheduler:
  """Plans rounds of requests until a batch is full, and takes in what comes of them.

  With dynamic sampling (DAPO, arXiv 2503.14476) groups without spread in their
  verdicts are filtered and replaced, in at most `max_rounds` rounds, until each stream
  (a dataset, or a difficulty tier of it) has its quota. Useful groups past it are
  carried into the next batch, once, or dropped. What is None is absent.

  Args:
    source: whose turn it is: datasets, tiers, sleepers.
    prompt_of: (dataset, index) -> Prompt.
    sampling: settings of every request.
    groups_per_step, group_size: of a batch. Their product is the number of rollouts
      that `sagc` keeps to under hold='rollouts'; it begins with this size. (A carried
      group keeps the size it has, and stands for one of its stream's.)
    dynamic_sampling: False trains on every group.
    surplus: 'carry' or 'drop'.
    quotas: False takes useful groups from whatever stream they come.
    borrow: fill what a stream could not give with surplus of others.
    overlong_filter: truncated answers are not trained on (the learner's setting).
    sagc: group sizes, one a step or one a prompt.
    lengths: predicts lengths, for the log and for sizes of prompts.
    prompt_pruner, answer_pruner: DPPO's two levels.
    advantages_of: rewards of a group [G] -> [G].
    leave_one_out: multiply advantages by G / (G - 1), which makes the gradient of
      centred ones independent of G on average.
  """

  def __init__(
    self,
    source: Source,
    prompt_of: Callable[[str, int], Prompt],
    sampling: Sampling,
    *,
    groups_per_step: int,
    group_size: int,
    dynamic_sampling: bool = True,
    max_rounds: int = 8,
    surplus: str = 'carry',
    quotas: bool = True,
    borrow: bool = False,
    overlong_filter: bool = False,
    sagc: SAGC | None = None,
    lengths: LengthPredictor | None = None,
    prompt_pruner: PromptPruner | None = None,
    answer_pruner: AnswerPruner | None = None,
    advantages_of: Callable[[np.ndarray], np.ndarray] = np.zeros_like,
    leave_one_out: bool = False,
  ):
    if groups_per_step < 1 or max_rounds < 1:
      raise ValueError(
        f'scheduler: groups_per_step={groups_per_step}, max_rounds={max_rounds}; '
        'expected at least 1'
      )
    if surplus not in ('carry', 'drop'):
      raise ValueError(f"scheduler.surplus: {surplus!r}, expected 'carry' or 'drop'")
    if borrow and not quotas:
      raise ValueError('scheduler.borrow: True, expected False without quotas')
    self._rollouts = groups_per_step * group_size
    self._by_prompt = sagc is not None and sagc.prompt_aware
    if sagc is not None:
      check_rollouts(sagc.sizes, self._rollouts, sagc.hold)
    self._source, self._prompt_of, self._sampling = source, prompt_of, sampling
    self._planner = Planner(
      source,
      prompt_of,
      sampling,
      sagc=sagc,
      lengths=lengths,
      pruner=prompt_pruner,
      is_mixed=not quotas,
    )
    self._groups, self._group_size = groups_per_step, group_size
    self._dynamic, self._surplus_rule = dynamic_sampling, surplus
    self._quotas, self._borrow = quotas, borrow
    self._overlong_filter = overlong_filter
    self._max_rounds = max_rounds if dynamic_sampling else 1
    self._sagc, self._lengths = sagc, lengths
    self._pruner = prompt_pruner
    self._learning = Learning(
      dynamic_sampling=dynamic_sampling,
      sagc=sagc,
      lengths=lengths,
      prompt_pruner=prompt_pruner,
      answer_pruner=answer_pruner,
      advantages_of=advantages_of,
      leave_one_out=leave_one_out,
    )

    self._draw = 0
    self._yields = {stream: _Yield() for stream in source.sizes}
    self._turns = dict.fromkeys(source.sizes, 0)  # groups so far, where sizes differ
    self._turned: dict[str, float] = {}  # the weights they were counted under
    self._carried: list[Group] = []  # useful groups of the step before
    self._batch: OpenBatch | None = None

  # --- a step, in the order of the loop ---

  def plan(self, step: int) -> Plan | None:
    """The next round; None: the batch is as full as it gets."""
    batch = self._batch or self._open(step)
    if batch.round >= self._max_rounds:
      return None
    where = dict(step=step, part=batch.round, draw=self._draw)
    if self._by_prompt and not self._dynamic:
      return self._planner.by_turns(batch.filling, self._rollouts, **where)
    wanted = self._wanted(batch)
    if self._by_prompt:
      return self._planner.by_prompt(wanted, batch.filling.rest, **where)
    return self._planner.alike(wanted, batch.size, **where)

  def _open(self, step: int) -> OpenBatch:
    """The batch of a step before its first round: carried groups are in it."""
    size, groups = self._group_size, self._groups
    if self._sagc is not None:
      size = self._sagc.propose(step)
      if self._sagc.hold == 'rollouts':
        groups = self._rollouts // size
    weights = self._source.weights(step)
    if self._by_prompt:
      sizes = self._sagc.allowed(step)
      # Weights that have changed make new shares: nobody is owed what was before.
      turns = self._turns if weights == self._turned else dict.fromkeys(weights, 0)
      filling = Turns(turns, weights)
      if self._dynamic:
        filling = Rolling(turns, weights, self._rollouts, sizes, size)
      groups = 0
    elif self._quotas:
      filling = Quotas(self._source.quotas(step, groups), borrow=self._borrow)
    else:
      filling = Pot(groups, weights)
    most = {stream: 10 * n for stream, n in filling.lacking().items()}
    for (stream, _), group in zip(
      self._locate(self._carried), self._carried, strict=True
    ):
      filling.offer(stream, group)
    filling.settle(last=False)
    return OpenBatch(filling, size, groups, most)

  def _wanted(self, batch: OpenBatch) -> dict[str, int]:
    """Stream -> requests of the next round."""
    lacking = batch.filling.lacking()
    if not self._dynamic:
      return lacking
    confidence = 0.95 if batch.round + 1 == self._max_rounds else None
    if not self._quotas:  # all streams are one
      records = self._yields.values()
      every = _Yield(sum(y.useful for y in records), sum(y.generated for y in records))
      wanted = requests_for(sum(lacking.values()), every.rate, confidence)
      return batch.filling.split(min(wanted, sum(batch.most.values())))
    wanted = {}
    for stream, missing in lacking.items():
      # Where streams take turns, what one lacks grows while others give small groups.
      most = max(batch.most[stream], 10 * missing)
      wanted[stream] = min(
        requests_for(missing, self._yields[stream].rate, confidence), most
      )
    return wanted

  def sent(self, plan: Plan) -> None:
    """The round is on its way."""
    self._begin(plan.step)
    batch = self._batch
    batch.round += 1
    self._draw += len(plan.requests)
    for stream, visits in plan.visits.items():
      draws = plan.draws[stream]
      awake = self._source.take(stream, visits, draws)
      batch.visited += len(draws)
      batch.pruned += draws.count(None)
      if self._pruner is not None:
        self._pruner.wake(stream, awake)
      if self._by_prompt and not self._dynamic:
        # Under `fill` others have taken the places of those pruned.
        fills = self._pruner is not None and self._pruner.fills
        batch.filling.counts[stream] += len(draws) - fills * draws.count(None)

  def _begin(self, step: int) -> None:
    """Opens the batch of a step, if that has not been done."""
    if self._batch is not None:
      return
    self._batch = self._open(step)
    self._source.begin(step, self._batch.groups)
    if self._sagc is not None:
      self._sagc.sent(step, self._batch.size)

  def observe(self, groups: Sequence[Group]) -> None:
    """Takes in a round's groups, or some of them, in draw order."""
    batch, kinds = self._batch, ledger.kinds(groups)
    located = self._locate(groups)
    by_stream: dict[str, list[int]] = {}
    for i, (stream, _) in enumerate(located):
      by_stream.setdefault(stream, []).append(i)
    for stream, mine in by_stream.items():
      places = [located[i][1] for i in mine]
      self._source.observe(stream, places, [groups[i] for i in mine])
      if self._pruner is not None:
        asleep = self._source.asleep(stream, places)
        self._pruner.sleep(stream, np.array(places)[asleep])
        self._pruner.wake(stream, np.array(places)[~asleep])
    batch.seen.extend(groups)
    batch.places.extend(located)
    batch.useful.extend(kind == 'useful' for kind in kinds)
    batch.rates.extend(ledger.pass_rates(groups).tolist())
    for (stream, _), group, kind in zip(located, groups, kinds, strict=True):
      if group.size < min(2, group.request.size):
        batch.settled.append(ledger.Entry(group, 'dropped', 'aborted'))
      elif kind == 'useful' or not self._dynamic:
        batch.filling.offer(stream, group)
      else:
        batch.settled.append(ledger.Entry(group, 'filtered', kind))
    batch.filling.settle(last=batch.round >= self._max_rounds)

  def _locate(self, groups: Sequence[Group]) -> list[tuple[str, int]]:
    return self._source.locate([group.request.prompt for group in groups])

  def enough(self, groups: Sequence[Group]) -> bool:
    """Whether these, the first of a round, fill the batch, whatever comes after."""
    if not self._dynamic:  # all are trained on
      return False
    filling = self._batch.filling.copy()
    located = self._locate(groups)
    for (stream, _), group, kind in zip(
      located, groups, ledger.kinds(groups), strict=True
    ):
      if kind == 'useful':
        filling.offer(stream, group)
    filling.settle(last=False)
    return not any(filling.lacking().values())

  def take_batch(self, step: int) -> Lesson:
    """What to train on, perhaps nothing. More surplus may still be observed."""
    self._begin(step)  # where carried groups have filled it there was no round
    self._batch.lesson = self._learning.lesson(self._batch, step)
    return self._batch.lesson

  def close(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Ends the step: the controllers learn from all that it generated.

    Returns:
      Metrics of the step, and a line for each group whose fate it settled.
    """
    batch, lesson = self._batch, self._batch.lesson
    for group, keep in zip(lesson.groups, lesson.keep, strict=True):
      used = ~group.truncated if self._overlong_filter else np.ones(group.size, bool)
      batch.settled.append(ledger.taken(group, keep, used))
    self._carried = []
    new = {group.request.draw for group in batch.seen}
    for group in batch.filling.left:
      if self._surplus_rule == 'carry' and group.request.draw in new:
        self._carried.append(group)
      else:
        reason = 'surplus' if group.request.draw in new else 'stale'
        batch.settled.append(ledger.Entry(group, 'dropped', reason))
    if self._by_prompt:
      self._turns, self._turned = batch.filling.counts, self._source.weights(step)
    self._count_yields(batch)
    self._learning.learn(batch, step)
    metrics = ledger.count(batch.seen, batch.settled, self._carried)
    metrics |= ledger.averages(batch.seen) | self._shares(lesson)
    metrics |= self._source.metrics() | self._learning.metrics(batch)
    metrics['rollout/rounds'] = batch.round
    prompts = {group.request.prompt.id for group in lesson.groups}
    metrics['rollout/repeats'] = len(lesson.groups) - len(prompts)
    if self._borrow:
      metrics['rollout/borrowed'] = batch.filling.borrowed
    self._batch = None
    return metrics, [ledger.line(entry) for entry in batch.settled]

  def _count_yields(self, batch: OpenBatch) -> None:
    streams = [stream for stream, _ in batch.places]
    generated = collections.Counter(streams)
    useful = collections.Counter(itertools.compress(streams, batch.useful))
    for stream, record in self._yields.items():
      record.count(useful[stream], generated[stream])

  def _shares(self, lesson: Lesson) -> dict[str, float]:
    """Of each dataset in the batch, and of each tier in its dataset."""
    counts = collections.Counter(g.request.prompt.dataset for g in lesson.groups)
    streams = collections.Counter(stream for stream, _ in self._locate(lesson.groups))
    found = {}
    for stream in self._source.sizes if lesson.groups else ():
      name = self._source.dataset(stream)
      found[f'share/{name}'] = counts[name] / len(lesson.groups)
      if stream != name and counts[name]:
        found[f'tiers/share/{stream}'] = streams[stream] / counts[name]
    return found

  def pending(self) -> list[dict[str, Any]]:
    """A line for each group that is still carried: what the end of a run leaves."""
    return [ledger.line(ledger.Entry(group, 'pending')) for group in self._carried]

  # --- state, between two steps ---

  def freeze(self) -> Callable[[], dict[str, Any]]:
    """The state as of now, to be written out later, if at all, before the next call.

    Only between `close` and the next `sent`: no batch may be open. Groups never
    change, so that holding them is enough: tokens are turned into JSON for a save only.
    """
    state = {
      'version': VERSION,
      'draw': self._draw,
      'yields': {n: [y.useful, y.generated] for n, y in self._yields.items()},
      'turns': [dict(self._turns), dict(self._turned)],
      'sagc': None if self._sagc is None else self._sagc.state_dict(),
    }
    frozen = {
      name: controller.freeze()
      for name, controller in (
        ('source', self._source),
        ('lengths', self._lengths),
        ('pruner', self._pruner),
      )
      if controller is not None
    }
    carried = tuple(self._carried)
    return lambda: (
      dict.fromkeys(_STATE)
      | state
      | {name: write() for name, write in frozen.items()}
      | {'carried': [ledger.pack(group) for group in carried]}
    )

  def state_dict(self) -> dict[str, Any]:
    """JSON and arrays. Like another `freeze`, which ends the one before."""
    return self.freeze()()

  def load_state_dict(self, state: dict[str, Any]) -> None:
    check_state('scheduler', state, dict.fromkeys(_STATE))
    if state['version'] != VERSION:
      raise ValueError(
        f'state of scheduler: version {state["version"]}, expected {VERSION}'
      )
    self._source.load_state_dict(state['source'])  # says why streams are others
    self._check_saved(state)
    for name, controller in (
      ('sagc', self._sagc),
      ('lengths', self._lengths),
      ('pruner', self._pruner),
    ):
      if (state[name] is None) != (controller is None):
        was = 'off' if state[name] is None else 'on'
        raise ValueError(f'state of scheduler: {name} was {was} when this run began')
      if controller is not None:
        controller.load_state_dict(state[name])
    self._draw = state['draw']
    self._yields = {name: _Yield(*y) for name, y in state['yields'].items()}
    self._turns, self._turned = map(dict, state['turns'])
    self._carried = [
      ledger.unpack(
        packed, self._prompt_of(packed['dataset'], packed['index']), self._sampling
      )
      for packed in state['carried']
    ]
    self._batch = None

  def _check_saved(self, state: dict[str, Any]) -> None:
    """Refuses numbers that no run would have saved."""

    def need(good: bool, key: str, value: Any, expected: str) -> None:
      if not good:
        raise ValueError(
          f'state of scheduler: {key} {value!r:.60}, expected {expected}'
        )

    draw, turns = state['draw'], state['turns']
    need(type(draw) is int and draw >= 0, 'draw', draw, 'a whole number from 0')
    check_state('scheduler.yields', state['yields'], self._yields)
    for stream, pair in state['yields'].items():
      good = isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair))
      need(good, f'yields.{stream}', pair, 'two numbers from 0')
    good = isinstance(turns, list) and len(turns) == 2
    need(good, 'turns', turns, 'counts and weights')
    check_state('scheduler.turns', turns[0], self._turns)
    for stream, count in turns[0].items():
      good = type(count) is int and count >= 0
      need(good, f'turns.{stream}', count, 'a whole number from 0')
    weights = turns[1]
    good = isinstance(weights, dict) and all(map(_is_count, weights.values()))
    need(good, 'turns', weights, 'weights from 0')
    need(isinstance(state['carried'], list), 'carried', state['carried'], 'groups')


def _is_count(value: Any) -> bool:
  return type(value) in (int, float) and 0 <= value < math.inf
