"""Which prompt comes next: passes over each dataset, in which the solved ones sleep.

A prompt whose whole group is right skips the next `factor` passes over its dataset
and is tried again (AI21, Dynamic Data Snoozing, 2026). A factor of 0 is DAPO's
dynamic sampling (arXiv 2503.14476), an infinite one filters for good.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import numpy as np

from jaxrl_sched.control import sleepers
from jaxrl_sched.control.base import check_state, visits
from jaxrl_sched.control.passes import Passes
from jaxrl_sched.control.quotas import (
  RollingQuotas,
  check_weights,
  largest_remainder,
  requests_for,
  roll,
)
from jaxrl_sched.control.sleepers import ACTIVE, FOREVER, PROBE, SNOOZED
from jaxrl_sched.control.snooze_rules import (
  USEFUL,
  Columns,
  Naps,
  delay,
  verdict_class,
  verdict_classes,
)
from jaxrl_sched.types import Unbounded

__all__ = [
  'Snooze',
  'delay',
  'largest_remainder',
  'requests_for',
  'roll',
  'verdict_class',
]

VERSION = 2  # of the state
_KEYS = (
  'version',
  'sizes',
  'draw',
  'quotas',
  'place',
  'counters',
  'since',
  'prompts',
)


class Snooze:
  """Draws prompts, one dataset at a time, and lets the solved ones sleep.

  In the order of the next pass a prompt comes that is active, or asleep and due; a
  woken one is on probe until its result is in. If all of a dataset sleeps past the
  next pass, the one that would wake first is woken early, and if all are on probe the
  one longest gone is asked again: a dataset always gives what it is asked for.

  Cursors, passes, probes and quotas are plan state and move in `take` (and `next`) and
  `take_quotas`; naps are result state and move in `observe`.
  """

  def __init__(
    self,
    datasets: Mapping[str, int],
    weights: Mapping[str, float],
    factor: Unbounded = 5,
    growth: float = 1.0,
    cap: int | None = None,
    seed: int = 0,
    *,
    hard_delay: Unbounded = 0,
  ):
    """Args:
    datasets: number of prompts of each.
    weights: their shares in every batch, up to a common factor.
    factor: passes that a solved prompt skips; math.inf: all of them.
    growth: each snooze in a row is this much longer than the one before. 2 with a cap
      of 32 asks less often for what stays solved than a factor of 5 alone, and finds a
      relapse as soon where a prompt has been solved once: see configs/papers.py.
    cap: no snooze is longer, in passes.
    seed: the order of a pass depends on it, the dataset's place and the pass.
    hard_delay: passes that a prompt skips whose whole group is wrong.
    """
    for name, size in datasets.items():
      if not 1 <= size < FOREVER:
        raise ValueError(f'dataset {name!r}: {size} prompts, expected at least 1')
    check_weights(datasets, weights)
    if not seed >= 0:
      raise ValueError(f'snooze.seed: {seed}, expected 0 or more')
    self._sizes = {name: int(size) for name, size in datasets.items()}
    self._weights = {name: weights[name] for name in datasets}
    self._naps = Naps(factor, growth, cap, hard_delay)

    self._draw = 0  # one past the newest
    self._quotas = RollingQuotas(self._sizes)
    self._of = {
      name: Passes(seed, place, size)
      for place, (name, size) in enumerate(self._sizes.items())
    }

  # --- questions, which change nothing ---

  @property
  def sizes(self) -> dict[str, int]:
    return dict(self._sizes)

  @property
  def weights(self) -> dict[str, float]:
    return dict(self._weights)

  def quotas(self, n: int, *, after: int = 0) -> dict[str, int]:
    """How many of the next n groups come from each dataset; see `RollingQuotas.next`."""
    return self._quotas.next(n, self._weights, after=after)

  def in_vain(self, dataset: str) -> int:
    """How many prompts have been asked since a group last had spread: none of theirs."""
    return self._dataset(dataset).in_vain

  def is_exhausted(self, dataset: str) -> bool:
    """Whether all prompts but those that sleep for good have been asked in vain."""
    of = self._dataset(dataset)
    if of.in_vain + of.rows.for_good() < of.rows.size:
      return False
    return of.rows.without_result_after(of.since) == 0

  def peek(self, dataset: str, n: int) -> list[tuple[int, int]]:
    """What n calls of `next` would give, each with its pass."""
    return self._dataset(dataset).ahead(n).picks()

  def number(self, dataset: str) -> int:
    """The pass that the dataset is in."""
    return self._dataset(dataset).number

  def asleep(self, dataset: str, indices: Sequence[int]) -> np.ndarray:
    """Who of these sleeps and may not be drawn in the present pass, [n] bool."""
    of = self._dataset(dataset)
    return of.rows.sleep_past(self._indices(dataset, indices), of.number)

  def due(self, dataset: str) -> np.ndarray:
    """Who sleeps but may be drawn in the present pass, [n] ascending.

    Looks at all prompts of the dataset: for the beginning of a pass.
    """
    of = self._dataset(dataset)
    return of.rows.due(of.number)

  def _indices(self, dataset: str, indices: Sequence[int]) -> np.ndarray:
    indices = np.asarray(indices, np.int64)
    for i in np.flatnonzero((indices < 0) | (indices >= self._sizes[dataset]))[:1]:
      raise ValueError(
        f'dataset {dataset!r}: prompt {indices[i]}, expected 0 to '
        f'{self._sizes[dataset] - 1}'
      )
    return indices

  def _dataset(self, name: str) -> Passes:
    if name not in self._of:
      raise ValueError(f'dataset {name!r}, expected one of {list(self._of)}')
    return self._of[name]

  # --- plan state ---

  def take_quotas(self, n: int) -> None:
    """A batch of n groups is on its way, with `quotas(n)`."""
    self._quotas.take(self.quotas(n), self._weights)

  def next(self, dataset: str) -> int:
    """Draws one prompt. Draw numbers count these calls from 0, over all datasets."""
    picks = self.peek(dataset, 1)
    self.take(dataset, picks)
    return picks[0][0]

  def take(
    self,
    dataset: str,
    picks: Sequence[tuple[int, int]],
    draws: Sequence[int | None] | None = None,
  ) -> None:
    """Draws what `peek` gave.

    Args:
      picks: (index, pass) of each, as it was peeked: a ValueError if they are not the
        next ones here, that is, if they were planned in another state.
      draws: their draw numbers, ascending. A None among them marks one that is passed
        over without a request (DPPO's prompt level): it counts as visited, its nap
        stays as it is, and the same peek does not meet it again in its next pass.
        None: the next numbers.
    """
    of = self._dataset(dataset)
    ahead = of.ahead(len(picks))
    if [tuple(pick) for pick in picks] != ahead.picks():
      raise ValueError(f'dataset {dataset!r}: these prompts are not the next ones here')
    if draws is None:
      draws = range(self._draw, self._draw + len(picks))
    if len(draws) != len(picks):
      raise ValueError(f'draws: {len(draws)} for {len(picks)} prompts')
    asked = np.array([draw is not None for draw in draws], bool)
    draws = np.array([draw for draw in draws if draw is not None], np.int64)
    before = np.concatenate([[of.rows.newest], draws])
    if np.any(np.diff(before) <= 0):
      raise ValueError(f'dataset {dataset!r}: draw numbers that do not ascend')
    if before[-1] >= FOREVER:
      raise ValueError(f'draw {before[-1]}, expected less than {FOREVER}')
    of.take(ahead, asked, draws)
    self._draw = max(self._draw, int(before[-1]) + 1)

  # --- result state ---

  def observe(
    self,
    dataset: str,
    index: int,
    verdicts: Sequence[float] | np.ndarray,
    max_reward: float | None,
    *,
    draw: int | None = None,
    drawn_pass: int | None = None,
    min_reward: float = 0.0,
  ) -> None:
    """Takes in a result; call it in draw order.

    A result that comes late (a newer one of the same prompt is in) or twice changes
    nothing.

    Args:
      verdicts: [G], before shaping. Fewer than two (the rest was aborted) say
        nothing: a prompt on probe goes back to sleep, due when it was.
      max_reward, min_reward: what the verifier declares. Without a maximum a prompt
        never sleeps.
      draw, drawn_pass: of the request. None: those of the prompt's newest request;
        without a draw number the result always counts.
    """
    of = self._dataset(dataset)
    [row] = of.rows.get(self._indices(dataset, [index]))
    last, drawn = int(row['last']), int(row['drawn'])
    if drawn_pass is None:
      drawn_pass = of.number if last < 0 else drawn
    self.observe_many(
      dataset,
      [index],
      [verdicts],
      [max_reward],
      draws=[last if draw is None else draw],
      drawn_passes=[drawn_pass],
      min_rewards=[min_reward],
      even_late=draw is None,
    )

  def observe_many(
    self,
    dataset: str,
    indices: Sequence[int],
    verdicts: Sequence[Sequence[float] | np.ndarray],
    max_rewards: Sequence[float | None],
    *,
    draws: Sequence[int],
    drawn_passes: Sequence[int],
    min_rewards: Sequence[float] | None = None,
    deciding: Columns | None = None,
    even_late: bool = False,
  ) -> None:
    """`observe` of many results, in draw order; much faster.

    Args:
      deciding: see `verdict_classes`.
      even_late: also those count that are late or come twice.
    """
    of = self._dataset(dataset)
    indices = self._indices(dataset, indices)
    sizes = np.array([len(group) for group in verdicts], np.int64)
    draws, drawn = np.asarray(draws, np.int64), np.asarray(drawn_passes, np.int64)
    if not len(indices) == len(sizes) == len(max_rewards) == len(draws) == len(drawn):
      raise ValueError(f'dataset {dataset!r}: results of different number')
    if draws.max(initial=-1) >= FOREVER:
      raise ValueError(f'draw {draws.max()}, expected less than {FOREVER}')
    kinds, spread = self._kinds(sizes, deciding, verdicts, max_rewards, min_rewards)
    results = indices, kinds, spread, sizes, draws, drawn
    for now in visits(indices):  # a prompt's results one after another
      self._apply(of, *(column[now] for column in results), even_late)
    of.forget_ahead()

  def _kinds(
    self, sizes, deciding, verdicts, max_rewards, min_rewards
  ) -> tuple[np.ndarray, np.ndarray]:
    """Of each group, for one that says nothing any; and whether its verdicts differ."""
    if min_rewards is None:
      min_rewards = [0.0] * len(sizes)
    columns, telling = (verdicts, max_rewards, min_rewards), sizes >= 2
    if telling.all():
      kinds = verdict_classes(*columns, deciding)
    else:
      kinds, those = np.zeros(len(sizes), np.int8), np.flatnonzero(telling)
      some = [[[of[i] for i in those] for of in c] for c in (columns, deciding or ())]
      kinds[those] = verdict_classes(*some[0], tuple(some[1]) or None)
    spread = telling & (kinds == USEFUL)
    # Without a maximum no prompt sleeps, be it as hard as can be.
    bests = max_rewards if deciding is None else deciding[1]
    kinds[[best is None for best in bests]] = USEFUL
    return kinds, spread

  def _apply(self, of, indices, kinds, spread, sizes, draws, drawn, even_late) -> None:
    """One result each of different prompts."""
    before = of.rows.get(indices)
    fresh = draws > before['applied']
    if not even_late and not fresh.all():
      before, indices, kinds = before[fresh], indices[fresh], kinds[fresh]
      spread, sizes = spread[fresh], sizes[fresh]
      draws, drawn = draws[fresh], drawn[fresh]
    after = before.copy()
    after['applied'] = draws
    unknown = draws > before['last']  # not drawn here, and believed
    after['last'][unknown], after['drawn'][unknown] = draws[unknown], drawn[unknown]
    self._draw = max(self._draw, int(draws[unknown].max(initial=-1)) + 1)

    streak, level, nap = self._naps.after(
      kinds,
      sizes,
      before['state'] == SNOOZED,
      before['streak'].astype(np.int64),
      before['level'].astype(np.int64),
    )
    told, naps = sizes >= 2, (sizes >= 2) & (nap > 0)
    after['streak'][told], after['level'][told] = streak[told], level[told]
    after['state'][told] = np.where(naps, SNOOZED, ACTIVE)[told]
    after['wake'][naps] = np.minimum(drawn + 1 + nap, FOREVER)[naps]
    lost = ~told & (before['state'] == PROBE) & (draws == after['last'])
    after['state'][lost] = SNOOZED
    of.rows.replace(indices, before, after)
    of.count_in_vain(before['applied'], draws, spread)

  # --- what it tells ---

  def metrics(self) -> dict[str, float]:
    """Passes; and, if prompts can sleep, the share that does, and counts so far."""
    metrics = {}
    for name, of in self._of.items():
      metrics[f'epoch/{name}'] = of.number + of.cursor / of.rows.size
      if self._naps.are_any:
        asleep = of.rows.asleep(of.number) / of.rows.size
        metrics[f'snooze/asleep/{name}'] = asleep
        metrics[f'snooze/early_wakes/{name}'] = of.early_wakes
        metrics[f'snooze/repeats/{name}'] = of.repeats
    return metrics

  # --- state ---

  def freeze(self) -> Callable[[], dict[str, Any]]:
    """The state as of now, to be written out later, if at all.

    Costs next to nothing: from here on rows are noted before they change. It holds
    until the next call or load; a RuntimeError after that.
    """
    scalars = self._scalars()
    frozen = {name: of.rows.freeze() for name, of in self._of.items()}
    return lambda: (
      scalars | {'prompts': {name: columns() for name, columns in frozen.items()}}
    )

  def state_dict(self) -> dict[str, Any]:
    """JSON, but for the arrays in 'prompts': dataset -> column -> [size]."""
    prompts = {name: of.rows.columns() for name, of in self._of.items()}
    return self._scalars() | {'prompts': prompts}

  def _scalars(self) -> dict[str, Any]:
    of = self._of.items()
    return {
      'version': VERSION,
      'sizes': dict(self._sizes),
      'draw': self._draw,
      'quotas': self._quotas.state_dict(),
      'place': {name: [d.number, d.cursor] for name, d in of},
      'counters': {name: [d.early_wakes, d.repeats] for name, d in of},
      'since': {name: d.since for name, d in of},
    }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    check_state('snooze', state, dict.fromkeys(_KEYS))
    if state['version'] != VERSION:
      raise ValueError(f'snooze.version: {state["version"]}, expected {VERSION}')
    if state['sizes'] != self._sizes:
      raise ValueError(
        f'prompts were {state["sizes"]} when this run began, now {self._sizes}'
      )
    for key in ('place', 'counters', 'since', 'prompts'):
      check_state(f'snooze.{key}', state[key], self._sizes)
    draws = [state['draw']]
    for name, size in self._sizes.items():
      place, counters = state['place'][name], state['counters'][name]
      _check_counts(f'snooze.place.{name}', place, (FOREVER - 1, size))
      _check_counts(f'snooze.counters.{name}', counters, (math.inf, math.inf))
      columns = state['prompts'][name]
      sleepers.check_columns(f'snooze.prompts.{name}', columns, size)
      since = state['since'][name]
      if type(since) is not int or not -1 <= since < FOREVER:
        raise ValueError(f'snooze.since.{name}: {since!r:.60}, expected a draw, or -1')
      draws.append(int(columns['last'].max()) + 1)
    _check_counts('snooze.draw', draws[:1], (FOREVER,))
    if draws[0] < max(draws):
      raise ValueError(f'snooze.draw: {draws[0]}, expected at least {max(draws)}')
    self._quotas.load_state_dict(state['quotas'])
    self._draw = state['draw']
    for name, of in self._of.items():
      of.early_wakes, of.repeats = state['counters'][name]
      of.rows.load(state['prompts'][name])
      of.count_anew(state['since'][name])
      of.go_to(*state['place'][name])


def _check_counts(key: str, values: Any, most: Sequence[float]) -> None:
  good = isinstance(values, list) and len(values) == len(most)
  if not good or not all(
    type(value) is int and 0 <= value <= limit
    for value, limit in zip(values, most, strict=True)
  ):
    raise ValueError(f'{key}: {values}, expected whole numbers up to {list(most)}')
