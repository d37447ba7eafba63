"""Difficulty tiers: hard prompts wait, easy ones go in time, the middle counts double.
From pass rates that other policies had: they choose weights, never verdicts.

Each (dataset, tier) is a stream, '<dataset>/<tier>': a dataset of its own for whatever
draws prompts. Weights are a function of the step and of what is recorded: when hard
prompts were released, and easy ones dropped.
"""

from collections.abc import Iterable, Mapping, Sequence
import math
import os
from typing import Any

import numpy as np

from jaxrl_sched.control.base import check_state
from jaxrl_sched.control.quotas import RollingQuotas
from jaxrl_sched.host import strict_json

VERSION = 3
TIERS = ('hard', 'medium', 'easy')
MARGIN = 1e-9  # a mean of rates of 0.05 may be rounded to more


def tier(rate: float, low: float = 0.05, high: float = 0.95) -> str:
  """'hard' up to `low`, 'easy' from `high` on, else 'medium'."""
  if not 0 <= rate <= 1:
    raise ValueError(f'pass rate {rate}, expected 0 to 1')
  return TIERS[int(_tiers(np.array([rate]), low, high)[0])]


def _tiers(rates: np.ndarray, low: float, high: float) -> np.ndarray:
  """[n] int8, places in TIERS. No rate (NaN) is medium."""
  found = np.ones(len(rates), np.int8)
  found[rates >= high - MARGIN] = 2
  found[rates <= low + MARGIN] = 0
  return found


def read_rates(
  tables: str | os.PathLike | Sequence[str | os.PathLike],
  ids: Mapping[str, Iterable[str]],
  *,
  unknown: str = 'refuse',
) -> dict[str, np.ndarray]:
  """The pass rate of each prompt, the mean over the models that a table speaks of.

  Args:
    tables: JSONL files of {'id': text, 'pass_rate': 0 to 1} and, where several models
      share a file, 'model': text. Other keys are not looked at.
    ids: dataset -> the id of each of its prompts ('<dataset>/<id>'), in order.
    unknown: 'refuse' ids that no prompt has, or 'skip' them: those of prompts too
      long for this run, say.

  Returns:
    dataset -> [n] float64, NaN for a prompt that no table has.

  Raises:
    ValueError: names file and line.
  """
  if unknown not in ('refuse', 'skip'):
    raise ValueError(f"tiers.unknown: {unknown!r}, expected 'refuse' or 'skip'")
  tables = [tables] if isinstance(tables, str | os.PathLike) else tables
  if not tables or not all(isinstance(path, str | os.PathLike) for path in tables):
    raise ValueError(f'tiers.table: {tables!r}, expected a path or several')
  place: dict[str, int] = {}
  sizes = {}
  for name, names in ids.items():
    before = len(place)
    for key in names:
      if key in place:
        raise ValueError(f'tiers: two prompts have the id {key!r}')
      place[key] = len(place)
    sizes[name] = len(place) - before
  total, models = np.zeros(len(place)), np.zeros(len(place), np.int32)
  seen: dict[str, np.ndarray] = {}  # model -> prompts it has a rate for
  for path in tables:
    before = models.sum()
    for where, key, rate, model in _lines(path):
      if key not in place:
        if unknown == 'skip':
          continue
        raise ValueError(
          f"{where}: id {key!r} is of no prompt, expected '<dataset>/<id>' with a "
          f'dataset of {[*sizes]}'
        )
      i = place[key]
      if model not in seen:
        seen[model] = np.zeros(len(place), bool)
      if seen[model][i]:
        raise ValueError(f'{where}: id {key!r} comes twice for model {model!r}')
      seen[model][i] = True
      total[i] += rate
      models[i] += 1
    if models.sum() == before:
      raise ValueError(f'{path}: no pass rate of any prompt in it')
  rates = np.where(models > 0, total / np.maximum(models, 1), np.nan)
  return dict(
    zip(sizes, np.split(rates, np.cumsum([*sizes.values()])[:-1]), strict=True)
  )


def _lines(path: str | os.PathLike):
  """(where, id, rate, model) of each line. The model is the file, unless it says."""
  try:
    file = open(path, 'rb')
  except OSError as error:
    raise ValueError(f'{path}: cannot be read: {error.strerror}') from None
  with file:
    for number, line in enumerate(file, 1):
      line = line.removeprefix(b'\xef\xbb\xbf') if number == 1 else line
      if not line.strip():
        continue
      where = f'{path}, line {number}'
      try:
        record = strict_json.loads(line)
      except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f'{where}: not JSON: {error}') from None
      if not isinstance(record, dict):
        raise ValueError(f'{where}: expected an object, found {record!r:.40}')
      key, rate = record.get('id'), record.get('pass_rate')
      model = record.get('model', str(path))
      if not isinstance(key, str) or not isinstance(model, str):
        wrong = 'id' if not isinstance(key, str) else 'model'
        raise ValueError(f'{where}: {wrong} {record.get(wrong)!r:.40}, expected text')
      number_like = isinstance(rate, int | float) and not isinstance(rate, bool)
      if not number_like or not 0 <= rate <= 1:
        raise ValueError(f'{where}: pass_rate {rate!r:.40}, expected 0 to 1')
      yield where, key, rate, model


class Tiers:
  """Which stream a prompt is in, and how much each stream counts.

  A stream of tier t gets w_d v_t / (sum of v over the dataset's live tiers), with
  v_t = (prompts in it) * boost_t, of the weight w_d of its dataset.

  Args:
    rates: dataset -> [n] pass rates, NaN where unknown (medium); see `read_rates`.
    weights: dataset -> its share of a batch.
    steps: planned for the run.
    low, high: hard up to, easy from on.
    boost: of hard, medium and easy prompts.
    release: hard prompts are drawn from this share of the steps on; 1 is never.
    drop_easy_at: easy ones are drawn before this share of the steps only; 0 is never, 1
      always.
  """

  def __init__(
    self,
    rates: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    *,
    steps: int,
    low: float = 0.05,
    high: float = 0.95,
    boost: tuple = (1.0, 2.0, 1.0),
    release: float = 0.5,
    drop_easy_at: float = 1.0,
  ):
    _check(rates, weights, steps, low, high, boost, release, drop_easy_at)
    self._weights, self._steps = {n: float(weights[n]) for n in rates}, steps
    self._boost = dict(zip(TIERS, map(float, boost), strict=True))
    # Rounding must not put a release at 0.55 of 100 steps off to step 56.
    self._release_at = math.ceil(release * steps - MARGIN)
    self._drop_at = math.ceil(drop_easy_at * steps - MARGIN)
    # Where the run goes past its planned end, easy ones are drawn on.
    self._drop_at = math.inf if drop_easy_at == 1 else self._drop_at
    # State, and `planned` below.
    self._released: int | None = None  # the step of it
    self._dropped: int | None = None
    self._tiers: dict[str, str] = {}  # dataset -> a digit a prompt, its place in TIERS
    self._ranks: dict[str, _Ranks] = {}
    self.unknown = 0  # prompts without a rate
    for name, known in rates.items():
      known = np.asarray(known, np.float64)
      self.unknown += int(np.isnan(known).sum())
      found = _tiers(known, low, high)
      self._ranks[name] = _Ranks(found)
      self._tiers[name] = (found + ord('0')).astype(np.uint8).tobytes().decode()
    self._streams = self.streams_of(self._tiers)
    # Dataset -> tier -> stream.
    self._of: dict[str, dict[str, str]] = {name: {} for name in rates}
    for stream, (name, _) in self._streams.items():
      self._of[name][stream.removeprefix(f'{name}/')] = stream
    for name, found in self._tiers.items():
      self._check_live(name, [found.count(str(t)) for t in range(len(TIERS))])
    self._planned = {n: RollingQuotas(of.values()) for n, of in self._of.items()}

  def _check_live(self, name: str, counts: Sequence[int]) -> None:
    """There must be something to draw in every phase, or the dataset has no share."""
    for step in self.phases:
      if not any(self._values(name, step).values()):
        told = ', '.join(f'{n} {t}' for n, t in zip(counts, TIERS, strict=True))
        raise ValueError(
          f'tiers: dataset {name!r} has {told} prompts, none of which may be drawn from '
          f'step {step} on: hard ones are released at step {self._release_at}, easy ones '
          + (
            'stay' if self._drop_at == math.inf else f'dropped at step {self._drop_at}'
          )
        )

  def _values(self, name: str, step: int) -> dict[str, float]:
    """v of the dataset's streams."""
    waits = {'hard': not self._is_released(step), 'easy': self._is_dropped(step)}
    return {
      stream: 0.0
      if waits.get(label, False)
      else len(self._streams[stream][1]) * self._boost[label]
      for label, stream in self._of[name].items()
    }

  # --- questions ---

  @property
  def phases(self) -> list[int]:
    """The steps of the run at which weights become others, the first one included."""
    changes = {0, self._release_at, self._drop_at}
    return sorted(step for step in changes if step < self._steps or step == 0)

  def is_release_due(self, step: int) -> bool:
    """Whether there are hard prompts that still wait at this step, but not to the end."""
    waits = not self._is_released(step) and self._release_at < self._steps
    return waits and any('hard' in of for of in self._of.values())

  @property
  def datasets(self) -> dict[str, float]:
    """The share of each dataset in a batch, up to a common factor."""
    return dict(self._weights)

  def streams(self) -> dict[str, tuple[str, np.ndarray]]:
    """Stream -> its dataset and the indices [n] int32 of its prompts there, ascending.

    Empty and dropped ones are not among them; hard ones that wait are.
    """
    return dict(self._streams)

  def streams_of(self, tiers: Mapping[str, str]) -> dict[str, tuple[str, np.ndarray]]:
    """`streams` as they would be of prompts in these tiers; see `of_prompts`."""
    streams = {}
    for name, found in tiers.items():
      digits = np.frombuffer(found.encode(), np.uint8) - ord('0')
      for t, label in enumerate(TIERS):
        indices = np.flatnonzero(digits == t).astype(np.int32)
        if len(indices) and not (label == 'easy' and self._drop_at == 0):
          streams[f'{name}/{label}'] = name, indices
    return streams

  def of_prompts(self) -> dict[str, str]:
    """Dataset -> a digit for each prompt: 0 hard, 1 medium, 2 easy."""
    return dict(self._tiers)

  def places(self, dataset: str, indices: Sequence[int]) -> list[tuple[str, int]]:
    """The stream of each prompt and its place there."""
    wanted, ranks = np.asarray(indices, np.int64), self._ranks[dataset]
    streams = [self._of[dataset].get(label) for label in TIERS]
    is_live = np.array([stream is not None for stream in streams])
    inside = (wanted >= 0) & (wanted < ranks.size)
    tiers, places = ranks.of(np.where(inside, wanted, 0))
    for i in np.flatnonzero(~(inside & is_live[tiers]))[:1]:
      raise ValueError(f'tiers: prompt {wanted[i]} of {dataset!r} is in no stream')
    found = zip(tiers.tolist(), places.tolist(), strict=True)
    return [(streams[t], place) for t, place in found]

  def weights(self, step: int) -> dict[str, float]:
    """Stream -> its share of a batch, 0 for one that waits. Sums to the datasets'."""
    found = {}
    for name, weight in self._weights.items():
      values = self._values(name, step)
      total = sum(values.values())
      found |= {stream: weight * v / total for stream, v in values.items()}
    return found

  def quotas(self, step: int, of: Mapping[str, int]) -> dict[str, int]:
    """Splits each dataset's groups among its streams.

    The split rolls on from step to step, so that a stream whose share of a batch is
    less than one group gets one now and then, and a dataset's total stays as it is.
    """
    found = dict.fromkeys(self._streams, 0)
    for name, groups in of.items():
      found |= self._planned[name].next(groups, self._values(name, step))
    return found

  def _is_released(self, step: int) -> bool:
    # Once is for good, also where the run is made longer.
    return step >= (self._release_at if self._released is None else self._released)

  def _is_dropped(self, step: int) -> bool:
    return step >= (self._drop_at if self._dropped is None else self._dropped)

  # --- what happened ---

  def sent(self, step: int, of: Mapping[str, int]) -> None:
    """The plan of a step, with `quotas(step, of)`, is on its way."""
    for name, groups in of.items():
      values = self._values(name, step)
      self._planned[name].take(self._planned[name].next(groups, values), values)
    if self._released is None and self._is_released(step):
      self._released = step
    if self._dropped is None and self._is_dropped(step):
      self._dropped = step

  def metrics(self) -> dict[str, float]:
    """Whether hard prompts are released, and easy ones dropped."""
    return {
      'tiers/released': float(self._released is not None),
      'tiers/easy_dropped': float(self._dropped is not None),
    }

  # --- state ---

  def state_dict(self) -> dict[str, Any]:
    return {
      'version': VERSION,
      'tiers': self.of_prompts(),
      'released': self._released,
      'dropped': self._dropped,
      'planned': {name: quotas.state_dict() for name, quotas in self._planned.items()},
    }

  def check(self, state: dict[str, Any]) -> None:
    """Refuses what is no state of tiers of these datasets, whatever their tiers."""
    own = self.state_dict()
    check_state('tiers', state, own)
    if state['version'] != VERSION:
      raise ValueError(
        f'state of tiers: version {state["version"]}, expected {VERSION}'
      )
    check_state('tiers.tiers', state['tiers'], own['tiers'])
    check_state('tiers.planned', state['planned'], own['planned'])

  def load_state_dict(self, state: dict[str, Any]) -> None:
    self.check(state)
    for name, found in self.of_prompts().items():
      if state['tiers'][name] != found:
        raise ValueError(
          f'tiers: {name!r} had prompts in other tiers, or another number of prompts'
        )
    for name, quotas in self._planned.items():
      quotas.load_state_dict(state['planned'][name])
    self._released, self._dropped = state['released'], state['dropped']


class _Ranks:
  """The tier of each prompt and its place there: 1.2 bytes a prompt, and no search."""

  _BLOCK = 64

  def __init__(self, tiers: np.ndarray):  # [n] int8, places in TIERS
    self.size = len(tiers)
    tiers = np.pad(tiers, (0, -len(tiers) % self._BLOCK), constant_values=-1)
    self._tiers = tiers.reshape(-1, self._BLOCK)
    # How many of each tier come before a block.
    counts = [(self._tiers == t).sum(axis=1, dtype=np.int32) for t in range(len(TIERS))]
    self._before = np.cumsum(counts, axis=1, dtype=np.int32) - counts

  def of(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # [n] each
    block, place = indices // self._BLOCK, indices % self._BLOCK
    tiers = self._tiers[block, place]
    alike = self._tiers[block] == tiers[:, None]
    alike &= np.arange(self._BLOCK) < place[:, None]
    return tiers, self._before[tiers, block] + alike.sum(axis=1)


def open_tiers(
  table: str | list | tuple,
  ids: Mapping[str, Iterable[str]],
  weights: Mapping[str, float],
  *,
  steps: int,
  unknown: str = 'refuse',
  low: float = 0.05,
  high: float = 0.95,
  boost: tuple = (1.0, 2.0, 1.0),
  release: float = 0.5,
  drop_easy_at: float = 1.0,
) -> Tiers:
  """Tiers by the pass rates of one or several tables; see `read_rates` and `Tiers`."""
  return Tiers(
    read_rates(table, ids, unknown=unknown),
    weights,
    steps=steps,
    low=low,
    high=high,
    boost=boost,
    release=release,
    drop_easy_at=drop_easy_at,
  )


def _check(rates, weights, steps, low, high, boost, release, drop_easy_at) -> None:
  def need(good: bool, key: str, value: Any, expected: str) -> None:
    if not good:
      raise ValueError(f'tiers.{key}: {value!r}, expected {expected}')

  need(len(rates) > 0, 'rates', dict(rates), 'at least one dataset')
  for name, known in rates.items():
    known = np.asarray(known, np.float64)
    good = np.isnan(known) | (abs(known - 0.5) <= 0.5)
    good = known.ndim == 1 and known.size > 0 and bool(good.all())
    need(good, f'rates.{name}', known, 'a rate from 0 to 1, or NaN, for each prompt')
    weight = weights.get(name)
    good = weight is not None and 0 < weight < math.inf
    need(good, f'weights.{name}', weight, 'above 0')
  need(steps >= 1, 'steps', steps, 'at least 1')
  need(
    0 <= low < high <= 1, 'low', low, f'0 or more, below high={high}, that at most 1'
  )
  good = len(boost) == 3 and all(
    isinstance(b, int | float) and 0 <= b < math.inf for b in boost
  )
  need(good, 'boost', boost, 'three numbers of 0 or more: hard, medium, easy')
  need(0 <= release <= 1, 'release', release, '0 to 1')
  good = type(drop_easy_at) in (int, float) and 0 <= drop_easy_at <= 1
  need(good, 'drop_easy_at', drop_easy_at, '0 to 1')
