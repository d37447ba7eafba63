"""Graded groups without an object an answer: 65,536 of them a step are numbers only."""

import collections
from collections.abc import Mapping, Sequence
import functools

import numpy as np

from jaxrl_sched.sim.workload import FINISHES, LENGTH, PAUSED, Answers
from jaxrl_sched.types import Completion, Group, Lesson, Request

_ALONE: Mapping[str, np.ndarray] = {}  # of an answer with a single reward


class SimGroup(Group):
  """A group whose tokens nobody has sampled; they are 0, and made when asked for.

  Args:
    version: of the weights of every token.
    places: [G] k of each answer. finish: [G] places in FINISHES.
  """

  def __init__(
    self,
    *,
    request: Request,
    version: int,
    places: np.ndarray,
    lengths: np.ndarray,
    finish: np.ndarray,
    verdicts: np.ndarray,
    rewards: np.ndarray,
    faults: tuple[str | None, ...],
    components: Mapping[str, np.ndarray] = _ALONE,
    spares: tuple[int, ...] = (),
  ):
    # Past the guard of a frozen record; cached properties find what is here.
    self.__dict__.update(
      request=request,
      version=version,
      places=places,
      lengths=lengths,
      finish=finish,
      verdicts=verdicts,
      rewards=rewards,
      faults=faults,
      components=components,
      spares=spares,
    )

  @property
  def size(self) -> int:
    return len(self.lengths)

  @functools.cached_property
  def truncated(self) -> np.ndarray:  # [G] bool
    return self.finish == LENGTH

  # What a line of rollouts.jsonl says of completions, without making any.

  @property
  def finishes(self) -> list[str]:
    return [FINISHES[code] for code in self.finish.tolist()]

  @property
  def versions(self) -> list[int]:
    return [self.version] * self.size

  @property
  def earlier(self) -> list[tuple]:
    return [()] * self.size

  @property
  def is_paused(self) -> bool:
    pauses = self.request.relief.pause_after > 0
    return pauses and bool((self.finish == PAUSED).any())

  @functools.cached_property
  def completions(self) -> tuple[Completion, ...]:
    return tuple(
      Completion(
        draw=self.request.draw,
        answer=int(self.places[i]),
        tokens=zeros(length, np.int32),
        logps=zeros(length, np.float32),
        finish=FINISHES[self.finish[i]],
        version=self.version,
      )
      for i, length in enumerate(self.lengths.tolist())
    )


def zeros(count: int, dtype: type) -> np.ndarray:  # [count], of no memory
  return np.broadcast_to(np.zeros((), dtype), count)


def whole_groups(
  requests: Sequence[Request], version: int, answers: Answers, rewards: np.ndarray
) -> list[Group]:
  """Where every answer was sampled from first to last, and is kept."""
  bounds, groups = answers.starts.tolist(), []
  every = np.arange(max(np.diff(answers.starts), default=0))
  alike: dict[int, tuple] = {}  # size -> what groups of this size share
  for i, request in enumerate(requests):
    size, part = request.size, slice(bounds[i], bounds[i + 1])
    if size not in alike:
      alike[size] = every[:size], (None,) * size
    places, faults = alike[size]
    groups.append(
      SimGroup(
        request=request,
        version=version,
        places=places,
        lengths=answers.lengths[part],
        finish=answers.finish[part],
        verdicts=answers.verdicts[part],
        rewards=rewards[part],
        faults=answers.faults.get(i, faults),
        components=answers.components.get(i, _ALONE),
      )
    )
  return groups


def trained(
  lesson: Lesson, step: int, *, overlong_filter: bool
) -> tuple[list[tuple[int, list[int]]], dict[int, int]]:
  """What a step is trained on.

  Returns:
    Of each group, tokens of its prompt and of the answers that are kept; and how many
    tokens of answers have each lag.
  """
  found, lags = [], collections.Counter()
  for group, keep in zip(lesson.groups, lesson.keep, strict=True):
    kept = keep > 0
    if overlong_filter:
      kept = kept & ~group.truncated
    if kept.any():
      prompt = len(group.request.prompt.tokens)
      found.append((prompt, group.lengths[kept].tolist()))
      for version, tokens in _by_version(group, kept):
        lags[step - version] += tokens
  return found, lags


def _by_version(group: Group, kept: np.ndarray) -> list[tuple[int, int]]:
  """(version of the weights, tokens sampled with them) of a group's kept answers."""
  if isinstance(group, SimGroup):
    return [(group.version, int(group.lengths[kept].sum()))]
  found = []
  for completion, good in zip(group.completions, kept, strict=True):
    if good:
      before = sum(count for count, _ in completion.earlier)
      found += [(version, count) for count, version in completion.earlier]
      found.append((completion.version, len(completion.tokens) - before))
  return found
