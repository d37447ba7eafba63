"""Seconds a step with a barrier and with the open pool, on the simulated clock.

    python tests/bench/pool.py [--steps=40] [--seeds=2] [--only=NAME ...]

Three workloads: two of configs/papers.py, and answers as long as those of reasoning. The
barrier is what `python -m jaxrl_sched.simulate` runs; with the pool its decisions are
taken by `control/pool.py` alone, without any other controller: prompts come in turn, and
acceptance is counted as the scheduler counts it. Both have DAPO's dynamic sampling, the
same costs, and engines and learner that take turns. The first third of the steps is left
out; numbers are medians over the seeds.
"""

import argparse
import collections
from collections.abc import Iterator, Sequence
import dataclasses
import pathlib
import sys
import time
from typing import Any

import numpy as np

from jaxrl_sched import config, simulate
from jaxrl_sched.control import ledger
from jaxrl_sched.control.opening import Acceptance
from jaxrl_sched.control.planning import Plan
from jaxrl_sched.control.pool import Asked, Closing, Pool
from jaxrl_sched.host.advantages import group_advantages
from jaxrl_sched.sim import SimEngine, Workload
from jaxrl_sched.types import Group, Lesson, Request, Sampling, Share

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from configs.papers import costs  # noqa: E402

# Name -> the variant of configs/papers.py that it is made of, and what differs.
WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
  'snooze_dapo': ('snooze_dapo', dict(sampler=dict(chunk=8))),
  'sagc_fixed16': ('sagc_fixed16', dict(sampler=dict(chunk=8))),
  'reasoning': (
    'snooze_dapo',
    dict(
      sampling=dict(max_new_tokens=16_384),
      sampler=dict(slots=64, chunk=64),
      scheduler=dict(groups_per_step=64, group_size=8),
      asp=dict(engines=8),
      learner=dict(row_tokens=17_408),
      simulate=dict(
        costs=costs(7.6, 8, 57_344),
        workload=dict(
          maths=dict(
            count=8192,
            median=2500.0,
            spread=0.6,
            within=0.5,
            within_spread=0.2,
            pass_rate=0.4,
            pass_spread=1.5,
            gain=0.3,
            transfer=1.0,
            hard_is_long=0.5,
            prompt_tokens=150.0,
            prompt_spread=0.4,
          )
        ),
      ),
    ),
  ),
}


@dataclasses.dataclass(frozen=True)
class Row:
  """Means over the steps of a run that count."""

  seconds: float  # a step
  empty: float  # share of slot-steps
  refill: float = np.nan  # of them, those before the next look at the queue
  asked: float = np.nan  # steps between a group's asking and its training
  asked_most: float = np.nan
  lag: float = np.nan  # of a token, in steps
  lag_most: float = np.nan
  length: float = np.nan  # of trained groups, by that of drawn useful ones


def settings_of(name: str, seed: int, chunk: int | None) -> dict[str, Any]:
  variant, changes = WORKLOADS[name]
  c = config.read(f'{ROOT}/configs/papers.py:{variant}')
  c = c | {key: c[key] | block for key, block in changes.items()} | {'seed': seed}
  if chunk is not None:
    c['sampler'] = c['sampler'] | {'chunk': chunk}
  return c


def barrier(c: dict[str, Any], steps: int) -> Row:
  run = simulate.simulate(c | {'steps': steps}, simulate.costs_of(c, None))
  seconds = run.book.column('time/step_s')[steps // 3 : steps]
  empty = run.book.column('rollout/idle_slots')[steps // 3 : steps]
  return Row(float(np.nanmean(seconds)), float(np.nanmean(empty)))


class Driver:
  """The loop, as far as the pool needs it."""

  def __init__(self, c: dict[str, Any], *, grace: int, low_water: float):
    blocks = simulate.datasets(c['simulate']['workload'])
    self.workload = Workload(blocks, seed=c['seed'])
    sampler, scheduler = c['sampler'], c['scheduler']
    self.engines, self.size = c['asp']['engines'], scheduler['group_size']
    self.engine = SimEngine(
      self.workload,
      simulate.costs_of(c, None),
      slots=sampler['slots'],
      chunk=sampler['chunk'],
      shares_devices=True,
      share_prompt=c['learner']['share_prompt'],
      grace=grace,
    )
    self.weights = self.workload.prompts.weights
    self.pool = Pool(
      list(self.weights),
      rollouts=scheduler['groups_per_step'] * self.size,
      engines=self.engines,
      slots=sampler['slots'],
      chunk=sampler['chunk'],
      grace=grace,
      low_water=low_water,
    )
    self.sampling = Sampling(**c['sampling'])
    self.acceptance = Acceptance(self.weights)
    self.prompts = {stream: self._in_turn(stream) for stream in self.weights}
    self.draw = 0
    self.ready: dict[int, Group] = {}  # complete, and not yet judged by a fill
    self.asked_in: dict[int, int] = {}  # draw -> fill
    self.plans: list[range] = []  # their draws
    # Draw -> whether the group is useful, and the mean tokens of its answers.
    self.completed: dict[int, tuple[bool, float]] = {}

  def _in_turn(self, stream: str) -> Iterator:
    prompts = self.workload.prompts
    while True:
      for index in range(prompts.sizes[stream]):
        yield prompts.get(stream, index)

  def step(self, step: int) -> tuple[list[Group], dict[str, Any]]:
    """A fill and what is learned from it. Returns its groups, and metrics."""
    self.engine.begin_fill(step, step)
    while not (closing := self.pool.closing(self.weights)):
      if closing is None:
        raise RuntimeError('the pool waits for what has been reported')
      self._feed(step)
      self.pool.proceed()
      reports, groups = self.engine.advance(self.pool.tick)
      for r in reports:
        self.pool.report(r.engine, r.tick, started=r.started, ended=r.ended)
      for group, kind in zip(groups, ledger.kinds(groups), strict=True):
        draw, is_useful = group.request.draw, kind == 'useful'
        self.ready[draw] = group
        self.completed[draw] = is_useful, float(group.lengths.mean())
        self.pool.judge(draw, is_useful)
    groups = self._close(closing)
    lesson = Lesson(
      groups=groups,
      advantages=[group_advantages(group.rewards) for group in groups],
      keep=[np.ones(group.size) for group in groups],
      count=len(groups),
    )
    return groups, self.engine.learn(lesson)

  def _feed(self, step: int) -> None:
    rate = lambda stream, size: self.acceptance.rate([stream], size)  # noqa: E731
    streams = self.pool.wanted(self.weights, rate, self.size)
    if not streams and self.draw:
      return
    draws = range(self.draw, self.draw + len(streams))
    self.draw = draws.stop
    engines = self.pool.assign([self.size] * len(streams), [1.0] * len(streams))
    self.pool.ask(
      Asked(draw=draw, stream=stream, size=self.size, engine=engine)
      for draw, stream, engine in zip(draws, streams, engines, strict=True)
    )
    self.plans.append(draws)
    self.asked_in |= dict.fromkeys(draws, step)
    requests = [
      Request(
        draw=draw,
        prompt=next(self.prompts[stream]),
        size=self.size,
        sampling=self.sampling,
      )
      for draw, stream in zip(draws, streams, strict=True)
    ]
    self.engine.feed(
      Plan(
        step=step,
        version=step,
        requests=requests,
        shares=tuple(self._share(engines, engine) for engine in range(self.engines)),
        visits={},
        draws={},
        visited=len(requests),
        pruned=0,
      )
    )

  def _share(self, engines: Sequence[int], engine: int) -> Share:
    mine = np.flatnonzero(np.array(engines, np.int32) == engine)
    answers = np.tile(np.arange(self.size), len(mine))
    return Share(
      requests=np.repeat(mine, self.size).astype(np.int32),
      answers=answers.astype(np.int32),
    )

  def _close(self, closing: Closing) -> list[Group]:
    done = self.pool.close(closing)
    generated, useful = collections.Counter(), collections.Counter()
    for draw in done:
      group, (is_useful, _) = self.ready[draw], self.completed[draw]
      key = group.request.prompt.dataset, self.size
      generated[key] += 1
      useful[key] += is_useful
      if not is_useful:
        del self.ready[draw]
    self.acceptance.count(generated, useful)
    return [self.ready.pop(draw) for draw in closing.draws]

  def length_drawn(self, first: int) -> float:
    """Mean tokens of an answer of the useful groups that were asked for from this step
    on, in plans before the first one that is not complete."""
    found = []
    for draws in self.plans:
      if any(draw not in self.completed for draw in draws):
        break
      found += [d for d in draws if self.asked_in[d] >= first and self.completed[d][0]]
    return float(np.mean([self.completed[draw][1] for draw in found] or [np.nan]))


def pool(c: dict[str, Any], steps: int, *, grace: int, low_water: float) -> Row:
  driver, first = Driver(c, grace=grace, low_water=low_water), steps // 3
  lines, lengths, waits = [], [], []
  for step in range(steps):
    began = driver.engine.now()
    groups, metrics = driver.step(step)
    if step >= first:
      lines.append(metrics | {'seconds': driver.engine.now() - began})
      lengths += [float(group.lengths.mean()) for group in groups]
      waits += [step - driver.asked_in[group.request.draw] for group in groups]
  totals = driver.engine.totals()
  parts = [totals[name] for name in ('busy', 'load', 'padding', 'skew', 'ordering')]
  np.testing.assert_allclose(sum(parts), totals['wall'])
  mean = lambda key: float(np.mean([line[key] for line in lines]))  # noqa: E731
  return Row(
    seconds=mean('seconds'),
    empty=mean('rollout/idle_slots'),
    refill=mean('idle/refill'),
    asked=float(np.mean(waits)),
    asked_most=float(max(waits)),
    lag=mean('lag/mean'),
    lag_most=max(float(line['lag/max']) for line in lines),
    length=float(np.mean(lengths)) / driver.length_drawn(first),
  )


def cells(name: str, before: Sequence[Row], after: Sequence[Row]) -> str:
  b, a = (
    {f.name: np.median([getattr(row, f.name) for row in rows]) for f in FIELDS}
    for rows in (before, after)
  )
  gain = np.median([x.seconds / y.seconds for x, y in zip(before, after, strict=True)])
  return (
    f'| {name} | {b["seconds"]:.1f} | {a["seconds"]:.1f} | {gain:.2f} '
    f'| {b["empty"]:.1%} | {a["empty"]:.1%} ({a["refill"]:.1%}) '
    f'| {a["asked"]:.2f} / {a["asked_most"]:.0f} | {a["lag"]:.2f} / {a["lag_most"]:.0f} '
    f'| {a["length"]:.3f} |'
  )


FIELDS = dataclasses.fields(Row)
HEADING = """\
| work | barrier, s a step | pool, s a step | gain | empty slots, barrier \
| empty slots, pool (until refilled) | group's age, mean / largest \
| token's lag, mean / largest | length, trained by drawn |
|---|---|---|---|---|---|---|---|---|"""


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=int, default=40)
  parser.add_argument('--seeds', type=int, default=2)
  parser.add_argument('--only', nargs='+', choices=WORKLOADS, default=list(WORKLOADS))
  parser.add_argument('--chunk', type=int, help="instead of each workload's")
  parser.add_argument('--grace', type=int, default=4)
  parser.add_argument('--low-water', type=float, default=0.5)
  arguments = parser.parse_args()
  how = dict(grace=arguments.grace, low_water=arguments.low_water)
  lines = []
  for name in arguments.only:
    before, after = [], []
    for seed in range(arguments.seeds):
      c, began = settings_of(name, seed, arguments.chunk), time.perf_counter()
      before.append(barrier(c, arguments.steps))
      between = time.perf_counter()
      after.append(pool(c, arguments.steps, **how))
      took = between - began, time.perf_counter() - between
      print(f'{name}, seed {seed}: {took[0]:.0f} s and {took[1]:.0f} s', flush=True)
    lines.append(cells(name, before, after))
  print('\n'.join([HEADING, *lines]))
  return 0


if __name__ == '__main__':
  sys.exit(main())
