"""Which prompts get how many answers, and which of these are trained on.

Here the controllers meet. `plan` and `enough` decide and change nothing; `sent`,
`observe`, `take_batch` and `close` change state and are called on every process with the
same input.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any

import numpy as np

from jaxrl_sched.control import ledger, retiering, saved
from jaxrl_sched.control.asp import Asp
from jaxrl_sched.control.base import check_state
from jaxrl_sched.control.exhaustion import Exhaustion
from jaxrl_sched.control.filling import Pot, Quotas, Turns
from jaxrl_sched.control.learning import Learning, OpenBatch
from jaxrl_sched.control.lengths import LengthPredictor
from jaxrl_sched.control.opening import Opening, Terms, check_window
from jaxrl_sched.control.planning import Pick, Plan, Planner, When
from jaxrl_sched.control.sagc import SAGC, check_rollouts
from jaxrl_sched.control.source import Source
from jaxrl_sched.host.pruning import AnswerPruner, PromptPruner
from jaxrl_sched.types import Group, Lesson, Prompt, Sampling

VERSION = 4  # of the state
_STATE = ('version', 'draw', 'next', 'kept', 'in_vain', 'acceptance', 'turns', 'ahead')
_STATE += ('source', 'pending', 'sagc', 'lengths', 'pruner')


class Scheduler:
  """Plans rounds of requests until a batch is full, and takes in what comes of them.

  With dynamic sampling (DAPO, arXiv 2503.14476) groups without spread in their
  verdicts are filtered and replaced, in at most `max_rounds` rounds, until each stream
  (a dataset, or a difficulty tier of it) has its quota, or ten times as many groups of
  it were asked for. Useful groups past it are carried into the next batch, once, or
  dropped. What is None is absent.

  Args:
    source: whose turn it is: datasets, tiers, sleepers.
    prompt_of: (dataset, index) -> Prompt.
    sampling: settings of every request.
    groups_per_step, group_size: of a batch. Their product is the number of rollouts
      that `sagc` keeps to under hold='rollouts'; it begins with this size. (A carried
      group keeps the size it has, and stands for one of its stream's.)
    dynamic_sampling: False trains on every group.
    max_rounds: of a bundle; None: 8, or 1 where answers pause or there is a lag, for
      which all engines would wait for the bundle to close.
    surplus: 'carry' or 'drop'; None: 'carry' without a lag, else 'drop'.
    quotas: False takes useful groups from whatever stream they come.
    borrow: fill what a stream could not give with surplus of others.
    barrier: a batch waits for all that was asked for. False: see `OpenScheduler`, which
      reads the next two.
    grace: chunks between an event and the first decision that knows of it.
    low_water: slots' worth of queued answers below which more is asked for.
    overlong_filter: truncated answers are not trained on (the learner's setting).
    sagc: group sizes, one a step or one a prompt.
    lengths: predicts lengths, for the log and for sizes of prompts.
    prompt_pruner, answer_pruner: DPPO's two levels.
    advantages_of: rewards of a group [G] -> [G].
    leave_one_out: multiply advantages by G / (G - 1), which makes the gradient of
      centred ones independent of G on average.
    asp: how far sampling runs ahead, how it is spread, bundles planned together.
    slots: answers that a sampling engine decodes at once.
    steps: of the run, beyond which nothing is planned. None: without end.
    seed: of the order of bundles that are planned together.
  """

  is_open = False  # whether groups come from the pool

  def __init__(
    self,
    source: Source,
    prompt_of: Callable[[str, int], Prompt],
    sampling: Sampling,
    *,
    groups_per_step: int,
    group_size: int,
    dynamic_sampling: bool = True,
    max_rounds: int | None = None,
    surplus: str | None = None,
    quotas: bool = True,
    borrow: bool = False,
    barrier: bool = True,
    grace: int = 4,
    low_water: float = 1.0,
    overlong_filter: bool = False,
    sagc: SAGC | None = None,
    lengths: LengthPredictor | None = None,
    prompt_pruner: PromptPruner | None = None,
    answer_pruner: AnswerPruner | None = None,
    advantages_of: Callable[[np.ndarray], np.ndarray] = np.zeros_like,
    leave_one_out: bool = False,
    asp: Asp | None = None,
    slots: int = 1,
    steps: int | None = None,
    seed: int = 0,
  ):
    asp = Asp() if asp is None else asp
    if max_rounds is None:
      max_rounds = 1 if asp.lag or asp.pause_after else 8
    if surplus is None:
      surplus = 'drop' if asp.lag else 'carry'
    if groups_per_step < 1 or max_rounds < 1:
      raise ValueError(
        f'scheduler: groups_per_step={groups_per_step}, max_rounds={max_rounds}; '
        'expected at least 1'
      )
    if surplus not in ('carry', 'drop'):
      raise ValueError(f"scheduler.surplus: {surplus!r}, expected 'carry' or 'drop'")
    if borrow and not quotas:
      raise ValueError('scheduler.borrow: True, expected False without quotas')
    if barrier and (asp.lag or asp.pause_after) and max_rounds > 1 and dynamic_sampling:
      # Groups that pause would be asked for again, round after round, and pile up.
      raise ValueError(
        f'scheduler.max_rounds: {max_rounds}, expected 1 with asp.lag or asp.pause_after'
      )
    self._rollouts = groups_per_step * group_size
    if asp.window > 1:
      check_window(asp, source, sagc, quotas=quotas)
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
      asp=asp,
      slots=slots,
      seed=seed,
    )
    self._asp = asp
    self._last = math.inf if steps is None else steps - 1  # bundle
    self._opening = Opening(
      source,
      groups_per_step=groups_per_step,
      group_size=group_size,
      dynamic_sampling=dynamic_sampling,
      quotas=quotas,
      borrow=borrow,
      sagc=sagc,
    )
    self._exhaustion = Exhaustion(source, groups_per_step)
    self._dynamic, self._carries = dynamic_sampling, surplus == 'carry'
    self.barrier, self._grace, self._low_water = barrier, grace, low_water
    self._borrow, self._quotas = borrow, quotas
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
    self._next = 0  # the first bundle that is not planned
    self._open: dict[int, OpenBatch] = {}  # by bundle, ascending
    self._ahead: list[tuple[Pick, ...]] = []  # drawn for bundles not planned yet
    self._carried: list[Group] = []  # useful groups of the step before
    self._paused: list[Group] = []  # to go on in the next bundle that is planned
    self._notes: list[str] = []  # not told yet

  # --- a step, in the order of the loop ---

  def plan(self, step: int) -> Plan | None:
    """The next round that is due at a step, which is the snapshot it is made from.

    With lag h bundle `step + h` is planned at this step, from the results of bundles
    below `step`; at step 0 all up to bundle h are. None: nothing is due before what was
    asked for has been observed.
    """
    bundle = self._due(step)
    if bundle is None:
      return None
    batch = self._open.get(bundle) or self._begin(bundle, step)
    when = When(step=bundle, version=batch.version, part=batch.round, draw=self._draw)
    terms, filling = batch.terms, batch.filling
    if terms.by_turns:
      return self._planner.by_turns(filling, self._rollouts, terms.sizes, when)
    if batch.round == 0 and self._ahead:
      return self._planner.drawn(self._ahead[0], terms.size, when)
    if batch.round == 0 and (count := self._window(bundle)) > 1:
      return self._planner.window(
        self._wanted_in_window(bundle, count), terms.size, self._learning.kept, when
      )
    wanted = self._opening.wanted(filling, terms.size, batch.allowed)
    if terms.is_rolling:
      return self._planner.by_prompt(wanted, filling.rest, terms.sizes, when)
    paused = self._go_on(wanted) if batch.round == 0 else []
    return self._planner.alike(wanted, terms.size, when, paused=paused)

  def _due(self, step: int) -> int | None:
    """The bundle of the next round."""
    batch = self._open.get(step)
    if batch is not None and not batch.is_awaited and batch.round < self._max_rounds:
      return step
    bundle = max(self._next, step)
    return bundle if bundle <= min(step + self._asp.lag, self._last) else None

  def _begin(self, bundle: int, version: int) -> OpenBatch:
    """The batch of a bundle before its first round."""
    batch = self._batch_of(bundle, version, self._opening.terms(bundle))
    if self._asp.lag == 0:  # what is carried need not be asked for
      self._offer_first(batch)
    return batch

  def _batch_of(self, bundle: int, version: int, terms: Terms) -> OpenBatch:
    filling = self._opening.filling(terms)
    allowed = self._exhaustion.allowance(self._opening.quotas(terms))
    return OpenBatch(bundle, version, terms, filling, allowed)

  def _offer(self, filling: Quotas | Pot | Turns, groups: Sequence[Group]) -> None:
    """Useful groups of a round, or of an earlier bundle."""
    for (stream, _), group in zip(self._locate(groups), groups, strict=True):
      filling.offer(stream, group)
    filling.settle(last=False)

  def _offer_first(self, batch: OpenBatch) -> None:
    """What is carried, once it is known: with a lag long after the plan."""
    if not batch.has_begun:
      self._offer(batch.filling, self._carried)
      batch.has_begun = True

  def _window(self, bundle: int) -> int:
    """How many bundles are planned together from this one on: all or none of them after
    pruning has ended."""
    window = self._asp.window
    ends = [bundle + window - bundle % window, self._last + 1]
    if self._pruner is not None and bundle < self._pruner.ends:
      ends.append(self._pruner.ends)
    return int(min(ends)) - bundle

  def _wanted_in_window(self, bundle: int, count: int) -> list[dict[str, int]]:
    """Requests of each bundle. What is carried fills the first one only, and is not
    counted: the others would lack it."""
    wanted = []
    for terms in self._opening.window(bundle, count):
      filling = self._opening.filling(terms)
      allowed = self._exhaustion.allowance(self._opening.quotas(terms))
      wanted.append(self._opening.wanted(filling, terms.size, allowed))
    return wanted

  def _go_on(self, wanted: dict[str, int]) -> list[Group]:
    """Paused groups that go on in the places of as many that are wanted."""
    chosen = []
    for (stream, _), group in zip(
      self._locate(self._paused), self._paused, strict=True
    ):
      if wanted[stream] > 0:
        wanted[stream] -= 1
        chosen.append(group)
    return chosen

  def sent(self, plan: Plan) -> None:
    """The round is on its way."""
    batch = self._opened(plan.step, plan.version)
    if batch.round == 0 and self._ahead:
      self._ahead.pop(0)
    self._ahead += plan.ahead
    if batch.round == 0:
      batch.asked = len(plan.requests)
    batch.round += 1
    batch.is_awaited = True
    batch.visited += plan.visited
    batch.pruned += plan.pruned
    again = {request.draw for request in plan.requests if request.begun}
    batch.going_on = [g for g in self._paused if g.request.draw in again]
    self._paused = [g for g in self._paused if g.request.draw not in again]
    new = [request.prompt for request in plan.requests if not request.begun]
    for stream, _ in self._source.locate(new):
      batch.allowed[stream] = max(0, batch.allowed[stream] - 1)
    if batch.terms.is_pot:
      visited = {stream: len(plan.visits.get(stream, ())) for stream in batch.allowed}
      self._opening.turns.take(visited, batch.terms.weights)
    self._visit(plan)
    for stream, draws in plan.draws.items() if batch.terms.by_turns else ():
      # Under `fill` others have taken the places of those pruned.
      fills = self._pruner is not None and self._pruner.fills
      batch.filling.counts[stream] += len(draws) - fills * draws.count(None)
    if batch.terms.by_turns:
      self._opening.took(batch.terms, batch.filling.counts)

  def _visit(self, plan: Plan) -> None:
    """The prompts of a plan are drawn, or passed over."""
    for stream, visits in plan.visits.items():
      draws = plan.draws[stream]
      self._draw += len(draws) - draws.count(None)
      awake = self._source.take(stream, visits, draws)
      if self._pruner is not None:
        self._pruner.wake(stream, awake)

  def _opened(self, bundle: int, version: int) -> OpenBatch:
    """The batch of a bundle, which is begun if it has not been."""
    if bundle not in self._open:
      batch = self._begin(bundle, version)
      self._source.begin(bundle, batch.terms.groups)
      if self._sagc is not None:
        self._sagc.sent(bundle, batch.terms.size)
      self._open[bundle] = batch
      self._next = bundle + 1
    return self._open[bundle]

  @property
  def _batch(self) -> OpenBatch:
    """The batch whose groups are observed now: the oldest."""
    return next(iter(self._open.values()))

  def is_awaiting(self, step: int) -> bool:
    """Whether groups of this step's bundle are still to come."""
    return step in self._open and self._open[step].is_awaited

  @property
  def lag(self) -> int:
    """Steps that sampling runs ahead of training."""
    return self._asp.lag

  def asked(self, step: int) -> int:
    """Requests in the first round of a bundle."""
    return self._open[step].asked

  def waiting(self, step: int) -> list[Group] | None:
    """The groups of a bundle that was finished for a checkpoint. None: it was not."""
    return self._open[step].waiting

  def keep(self, drained: Mapping[int, Sequence[Group]]) -> None:
    """Holds groups of bundles that were finished for a checkpoint until their step."""
    for bundle, groups in drained.items():
      self._open[bundle].waiting = list(groups)

  def observe(self, groups: Sequence[Group]) -> None:
    """Takes in groups of the oldest bundle, a round of it or a part, in draw order."""
    batch = self._batch
    batch.is_awaited, batch.waiting, batch.going_on = False, None, []
    self._offer_first(batch)
    batch.paused += [group for group in groups if group.is_paused]
    groups = [group for group in groups if not group.is_paused]
    kinds = self._learn_of(batch, groups)
    for (stream, _), group, kind in zip(
      self._locate(groups), groups, kinds, strict=True
    ):
      if group.size < min(2, group.request.size):
        batch.settled.append(ledger.Entry(group, 'dropped', 'aborted'))
      elif kind == 'useful' or not self._dynamic:
        batch.filling.offer(stream, group)
      else:
        batch.settled.append(ledger.Entry(group, 'filtered', kind))
    batch.filling.settle(last=False)

  def _learn_of(self, batch: OpenBatch, groups: Sequence[Group]) -> list[str]:
    """Whoever chooses prompts learns of these groups; they count as the batch's.

    Returns:
      The kind of each.
    """
    kinds = ledger.kinds(groups)
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
    return kinds

  def _locate(self, groups: Sequence[Group]) -> list[tuple[str, int]]:
    return self._source.locate([group.request.prompt for group in groups])

  def enough(self, groups: Sequence[Group]) -> bool:
    """Whether these, the first of a round, fill the batch, whatever comes after."""
    if not self._dynamic:  # all are trained on
      return False
    filling = self._batch.filling.copy()
    if not self._batch.has_begun:
      self._offer(filling, self._carried)
    groups = [group for group in groups if not group.is_paused]
    kinds = zip(groups, ledger.kinds(groups), strict=True)
    self._offer(filling, [group for group, kind in kinds if kind == 'useful'])
    return not any(filling.lacking().values())

  def take_batch(self, step: int) -> Lesson:
    """What to train on, perhaps nothing. More surplus may still be observed."""
    # Where carried groups have filled it there was no round.
    batch = self._opened(step, step)
    self._offer_first(batch)
    batch.filling.settle(last=True)
    lesson = self._learning.lesson(batch, step)
    if self._asp.window > 1:  # a bundle that is short weighs no more (3.6)
      count = max(lesson.count, batch.terms.groups)
      lesson = dataclasses.replace(lesson, count=count)
    batch.lesson = lesson
    return lesson

  def close(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Ends the step: the controllers learn from all that its bundle generated.

    Returns:
      Metrics of the step, and a line for each group whose fate it settled.
    """
    batch = self._open.pop(step)
    lesson = batch.lesson
    self._carried = batch.settle(
      carries=self._carries, overlong_filter=self._overlong_filter
    )
    self._paused += batch.paused
    self._paused.sort(key=lambda group: group.request.draw)
    if batch.terms.is_rolling and not self.is_open:
      self._opening.took(batch.terms, batch.filling.counts)
    kinds = [
      (stream, group.request.size)
      for (stream, _), group in zip(batch.places, batch.seen, strict=True)
    ]
    useful = itertools.compress(kinds, batch.useful)
    self._exhaustion.observe(batch.useful, self._opening.quotas(batch.terms))
    self._opening.acceptance.count(
      collections.Counter(kinds), collections.Counter(useful)
    )
    self._learning.learn(batch, step)
    sampled = batch.seen + batch.paused
    pending = self._undecided()
    for other in self._open.values():  # their paused groups went on there
      pending += other.going_on
    metrics = ledger.count(sampled, batch.settled, pending)
    metrics |= ledger.averages(batch.seen)
    metrics |= self._source.shares([g.request.prompt for g in lesson.groups])
    metrics |= self._source.metrics() | self._learning.metrics(batch)
    metrics['rollout/rounds'] = batch.round
    prompts = {group.request.prompt.id for group in lesson.groups}
    metrics['rollout/repeats'] = len(lesson.groups) - len(prompts)
    if self._borrow:
      metrics['rollout/borrowed'] = batch.filling.borrowed
    if self._dynamic:
      lacking = sum(batch.filling.lacking().values())
      metrics['rollout/missing'] = lacking - metrics.get('rollout/borrowed', 0)
      metrics |= self._exhaustion.metrics()
    metrics |= ledger.relief(sampled, self._asp.relief)
    return metrics, [ledger.line(entry) for entry in batch.settled]

  def notes(self) -> list[str]:
    """What whoever watches the run should know, each once."""
    notes, self._notes = self._notes, []
    return notes + self._exhaustion.notes()

  def exhausted(self, step: int) -> str | None:
    """Why dynamic sampling finds nothing to learn from at this step and all later ones;
    None: it may."""
    return self._exhaustion.reason(step) if self._dynamic else None

  def pending(self) -> list[dict[str, Any]]:
    """A line for each group without a fate: what the end of a run leaves."""
    return [ledger.line(ledger.Entry(group, 'pending')) for group in self._undecided()]

  def _undecided(self) -> list[Group]:
    return self._carried + self._paused

  # --- state, between two steps ---

  def freeze(self) -> Callable[[], dict[str, Any]]:
    """The state as of now, to be written out later, if at all, before the next call.

    Only between `close` and the next `sent`: of batches that are open nothing may have
    been observed. Groups never change, so that holding them is enough: tokens are turned
    into JSON for a save only.
    """
    state = {
      'version': VERSION,
      'draw': self._draw,
      'next': self._next,
      'kept': self._learning.kept,
      'in_vain': self._exhaustion.in_vain,
      'acceptance': self._opening.acceptance.state_dict(),
      'turns': self._opening.turns.state_dict(),
      'ahead': [[list(dataclasses.astuple(p)) for p in picks] for picks in self._ahead],
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
    carried, paused = tuple(self._carried), tuple(self._paused)
    batches = tuple(self._open.values())
    return lambda: (
      dict.fromkeys(_STATE)
      | state
      | {name: write() for name, write in frozen.items()}
      | {
        'pending': {
          'carried': [ledger.pack(group) for group in carried],
          'paused': [ledger.pack(group) for group in paused],
          'bundles': [saved.pack(batch) for batch in batches],
        }
      }
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
    self._source.check(state['source'])
    if self._source.tiers is not None:
      state, self._notes = retiering.moved(state, self._source.tiers)
    self._source.load_state_dict(state['source'])  # says why streams are others
    saved.check(state, self._source.sizes)
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
    self._draw, self._next = state['draw'], state['next']
    self._exhaustion.in_vain = state['in_vain']
    self._learning.kept = state['kept']
    self._opening.acceptance.load_state_dict(state['acceptance'])
    self._opening.turns.load_state_dict(state['turns'])
    self._ahead = [tuple(Pick(*p) for p in picks) for picks in state['ahead']]
    pending = state['pending']
    self._carried = list(map(self._unpacked, pending['carried']))
    self._paused = list(map(self._unpacked, pending['paused']))
    self._open = {}
    for packed in pending['bundles']:
      terms = Terms(**packed['terms'])
      batch = self._batch_of(packed['bundle'], packed['version'], terms)
      saved.unpack(packed, batch, self._unpacked)
      self._open[batch.bundle] = batch

  def _unpacked(self, packed: dict[str, Any]) -> Group:
    prompt = self._prompt_of(packed['dataset'], packed['index'])
    return ledger.unpack(packed, prompt, self._sampling)
