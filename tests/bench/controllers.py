"""What do the controllers cost with ten million prompts and 1,024 groups a step?

    python tests/bench/controllers.py [--prompts=10000000] [--groups=1024] [--steps=40]

Prints, for each controller and for runs at different points: CPU milliseconds of a step
(median, and the longest: a step that begins a pass shuffles it), bytes a prompt (held,
and at the peak), and seconds to write and to read its state. Exits 1 where a median, a
peak or a time of the state is over its limit.
"""

import argparse
from collections.abc import Callable, Iterator
import dataclasses
import sys
import time
import tracemalloc

import numpy as np

from jaxrl_sched.control.snooze import Snooze

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
    sent = []
    for name, quota in quotas.items():
      picks = source.peek(name, quota)
      source.take(name, picks, range(draw, draw + quota))
      sent += [(name, *pick, draw + i) for i, pick in enumerate(picks)]
      draw += quota
    for (name, index, number, at), seen in zip(sent, verdicts, strict=True):
      source.observe(name, index, seen, 1.0, draw=at, drawn_pass=number)

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


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--prompts', type=int, default=10_000_000)
  parser.add_argument('--groups', type=int, default=1024)
  parser.add_argument('--steps', type=int, default=40)
  args = parser.parse_args()
  sizes = {name: int(share * args.prompts) for name, share in SHARES.items()}
  good = [bench_snooze(sizes, args.groups, args.steps)]
  return 0 if all(good) else 1


if __name__ == '__main__':
  sys.exit(main())
