"""What do the controllers cost with ten million prompts and 1,024 groups a step?

    python tests/bench/controllers.py [--prompts=10000000] [--groups=1024] [--steps=40]

Prints, for snoozing alone at different points of a run and then for all controllers
together, as a scheduler calls them: CPU milliseconds of a step (median, and the longest:
a step that begins a pass shuffles it), bytes a prompt (held, and at the peak), and
seconds to write, read and hash their state. Exits 1 where a median, a peak or a time of
the state is over its limit.
"""

import argparse
import collections
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import sys
import time
import tracemalloc

import numpy as np

from jaxrl_sched.control.base import digest
from jaxrl_sched.control.difficulty import Tiers
from jaxrl_sched.control.lengths import LengthPredictor
from jaxrl_sched.control.sagc import SAGC
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.host.advantages import group_advantages
from jaxrl_sched.host.pruning import PromptPruner

SHARES = {'a': 0.4, 'b': 0.3, 'c': 0.2, 'd': 0.1}  # of the prompts; weights are equal
GROUP = 16
KINDS = [np.ones(GROUP), np.zeros(GROUP), np.arange(GROUP) % 2]  # easy, hard, useful
KINDS = [verdicts.astype(np.float32) for verdicts in KINDS]


@dataclasses.dataclass(frozen=True)
class Limits:
  step_ms: float  # median
  bytes_a_prompt: float  # at the peak of steps
  state_s: float  # to write, and to read


SNOOZE = Limits(step_ms=10, bytes_a_prompt=48, state_s=1)
TOGETHER = Limits(step_ms=15, bytes_a_prompt=64, state_s=2)


def seconds(do: Callable[[], object]) -> float:
  """Of CPU, so that others on the machine count little."""
  began = time.process_time()
  do()
  return time.process_time() - began


def memory(make: Callable[[], Iterator[None]]) -> tuple[int, int]:
  """Bytes held after the first item and at the peak from there to the last."""
  tracemalloc.start()
  steps = make()
  next(steps)
  held, _ = tracemalloc.get_traced_memory()
  tracemalloc.reset_peak()
  for _ in steps:
    pass
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  return held, peak


# --- snoozing ---


def snoozed(sizes: dict[str, int], solved: float) -> tuple[Snooze, int]:
  """As in pass 10, with a share of all prompts solved and a step or two left of it.

  Returns:
    It, and the next draw number.
  """
  source = Snooze(sizes, dict.fromkeys(sizes, 1.0))
  state, rng, draw = source.state_dict(), np.random.default_rng(0), 0
  for name, size in sizes.items():
    columns = state['prompts'][name]
    columns['last'][:] = columns['applied'][:] = draw + rng.permutation(size)
    draw += size
    asleep = np.flatnonzero(rng.random(size) < solved)
    columns['state'][asleep] = columns['streak'][asleep] = columns['level'][asleep] = 1
    columns['drawn'][asleep] = rng.integers(6, 11, len(asleep))
    columns['wake'][asleep] = columns['drawn'][asleep] + 6
    state['place'][name] = [10, max(0, size - 1000)]
  state['draw'] = draw
  source.load_state_dict(state)
  return source, draw


def snooze_steps(
  source: Snooze, draw: int, solved: float, groups: int, steps: int, took: list[float]
) -> Iterator[None]:
  """Peeks and takes for each dataset and observes every group; appends its seconds.

  As in a run, a state is frozen at every step.
  """
  rng, quotas = np.random.default_rng(1), source.quotas(groups)

  def step(draw: int, verdicts: list[np.ndarray]) -> None:
    sent = {}
    for name, quota in quotas.items():
      sent[name] = source.peek(name, quota)
      source.take(name, sent[name], range(draw, draw + quota))
      draw += quota
    draw, seen = draw - groups, iter(verdicts)
    for name, picks in sent.items():
      source.observe_many(
        name,
        [index for index, _ in picks],
        [next(seen) for _ in picks],
        [1.0] * len(picks),
        draws=range(draw, draw + len(picks)),
        drawn_passes=[number for _, number in picks],
      )
      draw += len(picks)

  for _ in range(steps):
    kinds = np.where(rng.random(groups) < solved, 0, rng.integers(1, 3, groups))
    verdicts = [KINDS[kind] for kind in kinds]
    source.freeze()
    took.append(seconds(lambda at=draw, seen=verdicts: step(at, seen)))
    draw += groups
    yield


def bench_snooze(sizes: dict[str, int], groups: int, steps: int) -> bool:
  good, total = True, sum(sizes.values())
  for title, solved in (
    ('none asleep', 0.0),
    ('half asleep', 0.5),
    ('99 % asleep', 0.99),
    ('all asleep, woken early', 1.0),
  ):

    def run(solved: float = solved, took: list | None = None) -> Iterator[None]:
      took = [] if took is None else took
      return snooze_steps(*snoozed(sizes, solved), solved, groups, steps, took)

    held, peak = (amount / total for amount in memory(run))
    took = []
    for _ in run(took=took):
      pass
    median, longest = 1e3 * float(np.median(took)), 1e3 * max(took)
    print(
      f'snooze, {title:24} {median:6.2f} ms a step, at most {longest:4.0f}; '
      f'{held:4.1f} bytes a prompt, at most {peak:4.1f}',
      flush=True,
    )
    good &= median <= SNOOZE.step_ms and peak <= SNOOZE.bytes_a_prompt

  source, _ = snoozed(sizes, 0.5)
  state = {}
  frozen = source.freeze()
  source.take('a', source.peek('a', groups))
  times = {
    'write': seconds(lambda: state.update(source.state_dict())),
    'write as it was frozen': seconds(frozen),
    'read': seconds(lambda: source.load_state_dict(state)),
  }
  print('snooze, state:', ', '.join(f'{key} {t:.2f} s' for key, t in times.items()))
  return good and max(times.values()) <= SNOOZE.state_s


# --- all together ---


class Clock:
  """CPU seconds by whose turn it is."""

  def __init__(self):
    self.seconds = collections.Counter()
    self._turn, self._since = 'none', time.process_time()

  def _pass_to(self, name: str) -> None:
    now = time.process_time()
    self.seconds[self._turn] += now - self._since
    self._turn, self._since = name, now

  @contextlib.contextmanager
  def turn(self, name: str) -> Iterator[None]:
    before = self._turn
    self._pass_to(name)
    yield
    self._pass_to(before)


class Together:
  """All controllers in the middle of a run, with three tiers a dataset.

  Args:
    solved: share of prompts that are, and that sleep.
    prompt_aware: sizes of prompts, and pruning that draws on; else one size a step,
      and pruning among fixed candidates.
  """

  def __init__(self, sizes: dict[str, int], solved: float, prompt_aware: bool):
    rng = np.random.default_rng(2)
    self.solved, self.prompt_aware, self.sizes = solved, prompt_aware, sizes
    rates = {name: rng.random(size, np.float32) for name, size in sizes.items()}
    weights = dict.fromkeys(sizes, 1.0)
    self.tiers = Tiers(rates, weights, steps=1, release=0.0, low=0.2, high=0.8)
    self.streams = self.tiers.streams()
    counts = {stream: len(indices) for stream, (_, indices) in self.streams.items()}
    self.snooze, self.draw = snoozed(counts, solved)
    self.lengths = LengthPredictor(sizes, limit=4096)
    self.sagc = SAGC(prompt_aware=prompt_aware)
    self.pruner = PromptPruner(
      counts,
      rate=0.5,
      regime='fill' if prompt_aware else 'fixed_candidates',
      dynamic_sampling=prompt_aware,
    )
    state = self.pruner.state_dict()
    for stream, pool in state['pools'].items():
      # Scores of groups of 16, of which k are right: 2 sqrt(p (1 - p)).
      p = rng.integers(0, GROUP + 1, counts[stream]) / GROUP
      pool['score'][:] = np.rint(2 * np.sqrt(p * (1 - p)) * (1 << 20))
      pool['useful'][:] = 40_000
      pool['asleep'][:] = self.snooze.asleep(stream, np.arange(counts[stream]))
    self.pruner.load_state_dict(state)

  def controllers(self) -> dict[str, object]:
    return {
      'snooze': self.snooze,
      'pruning': self.pruner,
      'lengths': self.lengths,
      'SAGC': self.sagc,
      'tiers': self.tiers,
    }

  def run(self, groups: int, steps: int, clocks: list[Clock]) -> Iterator[None]:
    rng = np.random.default_rng(1)
    for step in range(steps):
      clock = Clock()
      with clock.turn('freezing'):
        frozen = [c.freeze() for c in (self.snooze, self.pruner, self.lengths)]
        frozen += [self.sagc.state_dict(), self.tiers.state_dict()]
      sent = self._plan(step, groups, clock)
      keys = [
        (self.streams[stream][0], int(self.streams[stream][1][place]))
        for stream, place, *_ in sent
      ]
      with clock.turn('lengths'):
        prompt_lengths = np.full(len(sent), 80)
        pis = self.lengths.exceedance(keys, 2.0, prompt_lengths=prompt_lengths)
      with clock.turn('SAGC'):
        if self.prompt_aware:
          sizes = self.sagc.propose_sizes(step, pis, 16 * len(sent))
        else:
          sizes = [self.sagc.propose(step)] * len(sent)
      with clock.turn('lengths'):
        self.lengths.predict(keys, size=np.array(sizes), prompt_lengths=prompt_lengths)
      other = rng.integers(1, 3, len(sent))
      kinds = np.where(rng.random(len(sent)) < self.solved, 0, other)
      verdicts = [KINDS[k][:size] for k, size in zip(kinds, sizes, strict=True)]
      lengths = [rng.lognormal(6, 0.6, g).astype(np.int64).clip(1, 4096) for g in sizes]
      self._results(step, sent, keys, pis, verdicts, lengths, clock)
      clocks.append(clock)
      del frozen
      yield

  def _plan(self, step: int, groups: int, clock: Clock) -> list[tuple]:
    """Stream, place, pass and draw of each prompt that is asked."""
    sent = []
    with clock.turn('tiers'):
      parts = dict.fromkeys(self.sizes, groups // len(self.sizes))
      quotas = self.tiers.quotas(step, parts)
      self.tiers.sent(step, parts)
    for stream, quota in quotas.items():

      def peek(n: int, stream: str = stream) -> list[int]:
        with clock.turn('snooze'):
          return [place for place, _ in self.snooze.peek(stream, n)]

      with clock.turn('pruning'):
        if self.prompt_aware:
          met, keep, _ = self.pruner.fill(stream, peek, quota, step)
        else:
          met = peek(quota)
          keep, _ = self.pruner.select(stream, met, step)
      with clock.turn('snooze'):
        picks = self.snooze.peek(stream, len(met))
        draws = iter(range(self.draw, self.draw + len(met)))
        draws = [next(draws) if kept else None for kept in keep.tolist()]
        self.snooze.take(stream, picks, draws)
      asked = [
        (stream, *pick, draw)
        for pick, draw in zip(picks, draws, strict=True)
        if draw is not None
      ]
      self.draw += len(asked)
      with clock.turn('pruning'):
        self.pruner.wake(stream, [place for _, place, *_ in asked])
      sent += asked
    return sent

  def _results(self, step, sent, keys, pis, verdicts, lengths, clock) -> None:
    """Takes in a group for each that was sent."""
    advantages = [group_advantages(v) for v in verdicts]
    pass_rates = np.array([v.mean() for v in verdicts])
    by_dataset = [[i for of, i in keys if of == name] for name in self.sizes]
    with clock.turn('tiers'):
      for name, indices in zip(self.sizes, by_dataset, strict=True):
        self.tiers.places(name, indices)
    for stream in self.streams:
      mine = [i for i, one in enumerate(sent) if one[0] == stream]
      if not mine:
        continue
      _, places, numbers, draws = map(
        np.array, zip(*(sent[i] for i in mine), strict=True)
      )
      groups, rates = [advantages[i] for i in mine], pass_rates[mine]
      with clock.turn('snooze'):
        self.snooze.observe_many(
          stream,
          places,
          [verdicts[i] for i in mine],
          [1.0] * len(mine),
          draws=draws,
          drawn_passes=numbers,
        )
        asleep = self.snooze.asleep(stream, places)
      with clock.turn('pruning'):
        self.pruner.observe_many(stream, places, groups, pass_rates=rates)
        self.pruner.sleep(stream, places[asleep])
        self.pruner.wake(stream, places[~asleep])
    with clock.turn('lengths'):
      prompt_lengths = np.full(len(sent), 80)
      self.lengths.observe(
        keys, lengths, prompt_lengths=prompt_lengths, pass_rates=pass_rates
      )
    with clock.turn('SAGC'):
      if self.prompt_aware:
        self.sagc.observe_groups(lengths, pis, step)
      else:
        self.sagc.observe(lengths, self.sagc.size, step)


def bench_together(sizes: dict[str, int], groups: int, steps: int) -> bool:
  good, total = True, sum(sizes.values())
  for prompt_aware, solved in ((False, 0.5), (True, 0.5), (True, 0.99)):

    def make(of: tuple = (solved, prompt_aware)) -> Iterator[None]:
      return Together(sizes, *of).run(groups, steps, [])

    held, peak = (amount / total for amount in memory(make))
    run, clocks = Together(sizes, solved, prompt_aware), []
    for _ in run.run(groups, steps, clocks):
      pass
    table = {
      name: 1e3 * np.array([clock.seconds[name] for clock in clocks])
      for name in [*run.controllers(), 'freezing']
    }
    sums = sum(table.values())
    median = float(np.median(sums))
    print(
      f'all, {"sizes of prompts" if prompt_aware else "one size"}, '
      f'{solved:.0%} asleep: {median:.2f} ms a step, at most {sums.max():.0f}; '
      f'{held:.1f} bytes a prompt, at most {peak:.1f}'
    )
    print('  ', *(f'{name} {np.median(t):.2f} ms' for name, t in table.items()))
    good &= median <= TOGETHER.step_ms and peak <= TOGETHER.bytes_a_prompt
    good &= _state_in_time(run)
  return good


def _state_in_time(run: Together) -> bool:
  parts, states = run.controllers(), {}

  def write() -> None:
    states.update({name: part.state_dict() for name, part in parts.items()})

  def read() -> None:
    for name, part in parts.items():
      part.load_state_dict(states[name])

  times = {'write': write, 'read': read, 'hash': lambda: digest(states)}
  times = {key: seconds(do) for key, do in times.items()}
  print('   state:', ', '.join(f'{key} {t:.2f} s' for key, t in times.items()))
  return max(times.values()) <= TOGETHER.state_s


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--prompts', type=int, default=10_000_000)
  parser.add_argument('--groups', type=int, default=1024)
  parser.add_argument('--steps', type=int, default=40)
  args = parser.parse_args()
  sizes = {name: int(share * args.prompts) for name, share in SHARES.items()}
  good = [
    bench(sizes, args.groups, args.steps) for bench in (bench_snooze, bench_together)
  ]
  return 0 if all(good) else 1


if __name__ == '__main__':
  sys.exit(main())
