"""A recorded run as a workload: what it sampled is answered again.

A request that the run had, with its draw, prompt and size, gets the very answers of
then. Any other is answered by lot from recorded groups of its prompt, else of its
dataset, which are nearest in draw: so answers grow and get better as they did then.
"""

import bisect
import collections
from collections.abc import Iterator, Mapping, Sequence
import os
from typing import Protocol

import numpy as np

from jaxrl_sched.sim.records import Record, asp_of, read
from jaxrl_sched.sim.workload import FINISHES, Answers, uniforms
from jaxrl_sched.types import Lesson, Prompt, Request, tolerance

OF_PROMPT = 2  # groups of a prompt, that a new one is drawn from
OF_DATASET = 8  # groups of a dataset, one of which answers for an unseen prompt
_UNKEPT = 'the record does not say enough of answers that were not kept'
_WHICH = 2**32  # the lot that chooses among them; no answer has this number


class PromptSet(Protocol):
  """What a trace asks of a set of prompts."""

  sizes: Mapping[str, int]

  def get(self, dataset: str, index: int) -> Prompt: ...

  def ids(self) -> Mapping[str, Iterator[str]]: ...


class Trace:
  """Answers from a rollouts.jsonl.

  Attributes:
    prompts: as given. recorded, drawn: requests answered as then, and by lot, so far.
  """

  def __init__(
    self,
    path: str | os.PathLike,
    prompts: PromptSet,
    *,
    limit: int | None = None,
    seed: int = 0,
  ):
    """Reads and checks it all.

    Args:
      limit: the most tokens of an answer.

    Raises:
      ValueError: it is no trace of a run with these prompts, or of one that kept the
        answers that finished first, or paused some. The message names the file and,
        where it is one, the line.
    """
    _check_settings(path)
    records = read(path, limit=limit)
    _check_whole(records)
    _check_prompts(records, prompts)
    self.prompts, self._seed, self._path = prompts, seed, path
    # Where the first group with spare answers is.
    self._spares = next((record.where for record in records if record.spares), None)
    self.recorded = self.drawn = 0
    self._by_draw = {record.draw: record for record in records}
    self._by_prompt: dict[str, list[Record]] = collections.defaultdict(list)
    self._by_dataset: dict[str, list[Record]] = collections.defaultdict(list)
    for record in sorted(records, key=lambda record: record.draw):
      if record.size:
        self._by_prompt[record.prompt_id].append(record)
        self._by_dataset[record.dataset].append(record)

  def answers_of(self, requests: Sequence[Request], version: int) -> Answers:
    """The answers of a round. The policy is that of the record, not of a version."""
    if self._spares and any(request.relief.first_finished for request in requests):
      raise ValueError(
        f'{self._spares}: spare answers, expected none with asp.first_finished: {_UNKEPT}'
      )
    sizes = np.array([r.size + r.relief.spare for r in requests], np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    found, faults, components = [], {}, {}
    for i, request in enumerate(requests):
      answers = self._answers(request)
      found += answers
      if request.prompt.rewards:
        components[i] = {
          reward.name: np.array(
            [record.components[reward.name][k] for record, k in answers], np.float32
          )
          for reward in request.prompt.rewards
        }
      if any(record.faults[k] is not None for record, k in answers):
        faults[i] = tuple(record.faults[k] for record, k in answers)
    finish = np.array(
      [FINISHES.index(record.finish[k]) for record, k in found], np.int8
    )
    return Answers(
      starts=starts,
      lengths=np.array([record.lengths[k] for record, k in found], np.int64),
      finish=finish,
      verdicts=np.array([record.verdicts[k] for record, k in found], np.float32),
      rewards=np.array([record.rewards[k] for record, k in found], np.float32),
      faults=faults,
      components=components,
    )

  def trained(self, lesson: Lesson) -> None:
    """What the policy learned is in the record."""

  def _answers(self, request: Request) -> list[tuple[Record, int]]:
    """The record and the place in it of each answer."""
    record, size = self._by_draw.get(request.draw), request.size
    same = record is not None and record.size == size
    if same and record.prompt_id == request.prompt.id:
      self.recorded += 1
      known = [(record, k) for k in range(size)]
    else:
      self.drawn += 1
      known = []
    missing = range(len(known), size + request.relief.spare)
    return known + self._lots(request, missing)

  def _lots(self, request: Request, missing: range) -> list[tuple[Record, int]]:
    if not missing:
      return []
    draws = np.full(len(missing) + 1, request.draw, np.uint64)
    numbers = np.array([*missing, _WHICH], np.uint64)
    *lots, which = uniforms(self._seed, draws, numbers, 1)[0].tolist()
    groups = _nearest(
      self._by_prompt.get(request.prompt.id, ()), request.draw, OF_PROMPT
    )
    if not groups:
      near = self._by_dataset.get(request.prompt.dataset, ())
      near = _nearest(near, request.draw, OF_DATASET)
      if not near:
        raise ValueError(
          f'{self._path}: no answer to a prompt of dataset {request.prompt.dataset!r} '
          'is recorded, expected a group at least'
        )
      groups = [near[int(which * len(near))]]
    pool = [(record, k) for record in groups for k in range(record.size)]
    return [pool[int(lot * len(pool))] for lot in lots]


def _nearest(records: Sequence[Record], draw: int, count: int) -> Sequence[Record]:
  """Up to so many of these, which are in draw order, around a draw."""
  at = bisect.bisect_left(records, draw, key=lambda record: record.draw)
  low, high = max(0, at - count), min(len(records), at + count)
  near = sorted(records[low:high], key=lambda record: abs(record.draw - draw))
  return near[:count]


def _check_settings(path: str | os.PathLike) -> None:
  """Refuses a run whose answers do not tell what was decided on."""
  asp = asp_of(path)
  for key, usual in (('first_finished', False), ('pause_after', 0)):
    if asp.get(key, usual) != usual:
      raise ValueError(
        f'{path}: asp.{key}={asp[key]!r}, expected a run with {usual}: {_UNKEPT}'
      )


def _check_whole(records: Sequence[Record]) -> None:
  """Refuses answers that were continued in a later step."""
  for record in records:
    if 'paused' in record.finish or any(record.earlier):
      what = "finish 'paused'" if 'paused' in record.finish else 'earlier tokens'
      raise ValueError(
        f'{record.where}: {what}, of a run with asp.pause_after or without '
        f'scheduler.barrier: {_UNKEPT}'
      )


def _check_prompts(records: Sequence[Record], prompts: PromptSet) -> None:
  """Refuses records of datasets or prompts that there are not."""
  wanted = collections.defaultdict(set)
  for record in records:
    if record.dataset not in prompts.sizes:
      raise ValueError(
        f'{record.where}: dataset {record.dataset!r}, expected one of '
        f'{", ".join(prompts.sizes)}: it is from a run with other datasets'
      )
    wanted[record.dataset].add(record.prompt_id)
  ids = prompts.ids()
  places = {
    name: {key: index for index, key in enumerate(ids[name]) if key in some}
    for name, some in wanted.items()
  }
  for record in records:
    name, place = record.dataset, places[record.dataset].get(record.prompt_id)
    if place is None:
      raise ValueError(
        f'{record.where}: prompt {record.prompt_id!r}, expected one of the '
        f'{prompts.sizes[name]} of dataset {name!r}: it is from a run with other datasets'
      )
    prompt = prompts.get(name, place)
    best, worst = prompt.max_reward, prompt.min_reward
    near = float(tolerance(best, worst))
    if best is not None and max(record.verdicts, default=best) > best + near:
      raise ValueError(
        f'{record.where}: verdicts {record.verdicts!r:.60}, expected at most the '
        f'{best:g} of prompt {record.prompt_id!r}'
      )
    if min(record.verdicts, default=worst) < worst - near:
      raise ValueError(
        f'{record.where}: verdicts {record.verdicts!r:.60}, expected at least the '
        f'{worst:g} of prompt {record.prompt_id!r}'
      )
    names = [reward.name for reward in prompt.rewards]
    if record.size and sorted(record.components) != sorted(names):
      raise ValueError(
        f'{record.where}: components {sorted(record.components)}, expected the rewards '
        f'of dataset {name!r}: {names or "one, which has no name"}'
      )
