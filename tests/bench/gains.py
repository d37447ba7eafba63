"""The arithmetic of a comparison of runs: crossings, gains, stragglers.

Every gain is told at equal generated tokens and at equal wall-clock, never one alone.
"""

import dataclasses
import json
import pathlib

import numpy as np

from jaxrl_sched.metrics import read_jsonl

X = np.ndarray


def crossing(x: X, y: X, level: float) -> float | None:
  """Where y(x), linear between its points, first reaches the level. None: it doesn't."""
  for i in range(len(x)):
    if y[i] >= level:
      if i == 0:
        return float(x[0])
      part = (level - y[i - 1]) / (y[i] - y[i - 1])
      return float(x[i - 1] + part * (x[i] - x[i - 1]))
  return None


def target(start: float, end: float) -> float:
  """Nine tenths of the way that the baseline went."""
  return start + 0.9 * (end - start)


def gain(base: tuple[X, X], method: tuple[X, X]) -> tuple[float | None, float]:
  """(x, y) of both -> how many times cheaper the target is, and what is gained at budget.

  The budget is the baseline's. A method that ended before has its last score there.
  """
  level = target(base[1][0], base[1][-1])
  theirs, ours = crossing(*base, level), crossing(*method, level)
  ratio = None if not theirs or not ours else theirs / ours
  return ratio, float(np.interp(base[0][-1], *method) - base[1][-1])


def straggles(lengths: list[int], tau: float) -> bool:
  return max(lengths) > tau * np.median(lengths)


def event_rates(groups: list[tuple[int, list[int]]], tau: float) -> dict[int, float]:
  """(step, lengths of a group) -> each step's share of straggling groups."""
  found: dict[int, list[bool]] = {}
  for step, lengths in groups:
    found.setdefault(step, []).append(straggles(lengths, tau))
  return {step: float(np.mean(events)) for step, events in sorted(found.items())}


def without_compiling(seconds: X, compiled: X) -> X:
  """Steps in which something was compiled count as the median of the others."""
  return np.where(compiled > 0, np.median(seconds[compiled == 0]), seconds)


# --- a run ------------------------------------------------------------------------


def complete(workdir: pathlib.Path, steps: int | None = None) -> bool:
  """Whether the line after the last step is there; `steps`: None is the config's."""
  file, settings = workdir / 'metrics.jsonl', workdir / 'config.json'
  if not file.exists() or not settings.exists():
    return False
  if steps is None:
    steps = json.loads(settings.read_text())['steps']
  return max((line['step'] for line in read_jsonl(file)), default=-1) == steps


@dataclasses.dataclass(frozen=True)
class Run:
  """Of one seed. E evaluations, N steps; what comes before an evaluation counts in it."""

  at: X  # [E] step
  score: X  # [E] mean pass@1 of the held-out sets
  tokens: X  # [E] generated so far
  trained: X  # [E] tokens trained on so far
  seconds: X  # [E] so far, without evaluation, checkpoints and compiling
  groups: X  # [N] generated
  size: X  # [N] answers a generated group, on average; none generated: nan
  events: dict[int, float]  # step -> share of straggling groups
  answers: dict[str, float]  # generated, accepted, trained: of the whole run
  shares: dict[str, float]  # dataset -> its share of the batches
  apart: dict[str, float]  # seconds of evaluation and compiling

  def reached(self, level: float, x: X) -> float | None:
    return crossing(x, self.score, level)

  def late_groups(self) -> float:
    """A step, over the last half."""
    return float(self.groups[len(self.groups) // 2 :].mean())

  def event_curve(self) -> X:
    """[N] a step's event rate; where nothing was generated, that of the step before."""
    found = [self.events.get(0, 0.0)]
    for step in range(1, len(self.groups)):
      found.append(self.events.get(step, found[-1]))
    return np.array(found)

  def event_rate(self, *, late: bool = False) -> float:
    first = len(self.groups) // 2 if late else 0
    return float(np.mean([rate for step, rate in self.events.items() if step >= first]))


def read(workdir: pathlib.Path, tau: float) -> Run:
  lines = list(read_jsonl(workdir / 'metrics.jsonl'))
  groups = {line['draw']: line for line in read_jsonl(workdir / 'rollouts.jsonl')}
  c = json.loads((workdir / 'config.json').read_text())
  steps, scored = lines[: c['steps']], [x for x in lines if 'time/evaluate_s' in x]

  def column(key):
    return np.array([line[key] for line in steps], float)

  def so_far(values):
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return sums[[line['step'] for line in scored]]

  took, compiled = column('time/step_s'), column('compile/count')
  seconds = without_compiling(took, compiled)
  generated = column('rollout/answers_generated')
  made = column('rollout/groups_generated')
  trained = [g for g in groups.values() if g['fate'] == 'trained']
  return Run(
    at=np.array([line['step'] for line in scored]),
    score=np.array([_score(line) for line in scored]),
    tokens=so_far(column('rollout/tokens_generated')),
    trained=so_far(column('rollout/tokens_trained')),
    seconds=so_far(seconds),
    groups=made,
    size=np.where(made > 0, generated / np.maximum(made, 1), np.nan),
    events=event_rates(
      [(g['step'], g['lengths']) for g in groups.values() if g['fate'] != 'pending'],
      tau,
    ),
    answers={
      'generated': float(generated.sum()),
      'accepted': float(sum(len(g['lengths']) for g in trained)),
      'trained': float(column('rollout/answers_trained').sum()),
    },
    shares={
      name: float(np.mean([g['dataset'] == name for g in trained]))
      for name in c['prompts']['datasets']
    },
    apart={
      'evaluating': float(sum(line['time/evaluate_s'] for line in scored)),
      'compiling': float((took - seconds).sum()),
    },
  )


def _score(line: dict) -> float:
  return float(np.mean([v for k, v in line.items() if k.endswith('/pass@1')]))
