"""Several processes against one, and several of whom one after the other is killed.

    python tests/bench/processes.py compare OUT
    python tests/bench/processes.py chaos OUT [--times=10] [--steps=20] [--seed=0]

`compare` runs the smoke config with all methods on 1 process of 8 CPU devices, 2 of 4 and
4 of 2, and ends with 1 where a decision differs or a number by more than 1e-5. `chaos`
runs 3 processes undisturbed, and again in another folder while, at random moments after
they have found each other, a random one is killed or terminated; each time all are to end
within a minute, and are started again. It ends with 1 where the two runs' lines differ in
anything but times.
"""

import argparse
import json
import pathlib
import random
import signal
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / 'tests'))

import processes  # noqa: E402

TRAIN = [
  *('-m', 'jaxrl_sched.train', f'--config={ROOT}/configs/smoke.py:all'),
  '--config.log.tensorboard=False',
]
NOT_COMPARED = ('time/', 'compile/')
CLOSE = 1e-5


def lines(workdir: pathlib.Path, name: str) -> list[dict]:
  file = workdir / name
  text = file.read_text() if file.exists() else ''
  return [
    json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == '\n'
  ]


def joined(logs: pathlib.Path, count: int) -> bool:
  """Whether every process has joined the others: gloo tells."""
  return all((logs / f'{i}.txt').read_text() for i in range(count))


def run(workdir: pathlib.Path, *changes: str, count: int, devices: int) -> None:
  argv = [*TRAIN, f'--workdir={workdir}', *changes]
  began, logs = time.monotonic(), workdir.with_name(f'{workdir.name}.logs')
  started = processes.launch(argv, logs, count=count, devices=devices)
  codes, said = processes.ended(started, logs, timeout_s=1200)
  if any(codes):
    raise SystemExit('\n'.join([f'exit codes {codes}', *said]))
  took = time.monotonic() - began
  print(f'{count} x {devices} devices: {took:.0f} s, {workdir}', flush=True)


def differences(ours: pathlib.Path, theirs: pathlib.Path, *, close: float) -> list[str]:
  """What two runs' files do not agree in; numbers may differ by `close`, relatively."""
  found = []
  for name in ('rollouts.jsonl', 'samples.jsonl'):
    if lines(ours, name) != lines(theirs, name):
      found.append(name)
  both = lines(ours, 'metrics.jsonl'), lines(theirs, 'metrics.jsonl')
  if len(both[0]) != len(both[1]):
    found.append(f'metrics.jsonl: {len(both[0])} and {len(both[1])} lines')
  for a, b in zip(*both, strict=False):
    for key in sorted(a.keys() | b.keys()):
      x, y = a.get(key), b.get(key)
      if key.startswith(NOT_COMPARED) or x == y:
        continue
      if None in (x, y) or abs(x - y) > close * max(1.0, abs(x)):
        found.append(f'step {a["step"]}: {key}: {x} and {y}')
  return found


def compare(out: pathlib.Path) -> list[str]:
  mesh = [f'--config.mesh.{axis}=2' for axis in ('data', 'fsdp', 'model')]
  found = []
  for count in (1, 2, 4):
    run(out / f'{count}x{8 // count}', *mesh, count=count, devices=8 // count)
    differ = differences(out / f'{count}x{8 // count}', out / '1x8', close=CLOSE)
    # Slots of how many engines are idle hangs on how many there are.
    differ = [text for text in differ if 'idle_slots' not in text]
    print(f'{count} x {8 // count} against 1 x 8: {differ or "alike"}', flush=True)
    found += differ
  return found


def chaos(out: pathlib.Path, times: int, steps: int, seed: int) -> list[str]:
  chance = random.Random(seed)
  three = ('--config.mesh.data=3', '--config.learner.rows=6', f'--config.steps={steps}')
  run(out / 'undisturbed', *three, count=3, devices=1)
  workdir, logs = out / 'disturbed', out / 'disturbed.logs'
  argv = [*TRAIN, f'--workdir={workdir}', *three, '--stopped-exit-code=75']
  for number in range(times):
    started = processes.launch(argv, logs / str(number), count=3, devices=1)
    at = len(lines(workdir, 'metrics.jsonl'))
    while not joined(logs / str(number), 3):  # whoever never joins is waited for
      time.sleep(0.1)
    if chance.random() < 0.4:  # while it starts
      time.sleep(chance.uniform(0, 15))
    else:  # some steps on
      further = chance.randrange(1, 3)
      while len(lines(workdir, 'metrics.jsonl')) < min(at + further, steps):
        if any(process.poll() is not None for process in started):
          break
        time.sleep(0.01)
      time.sleep(chance.uniform(0, 1.5))
    victim = chance.randrange(3)
    kind = chance.choice((signal.SIGKILL, signal.SIGTERM))
    if started[victim].poll() is None:
      started[victim].send_signal(kind)
    began = time.monotonic()
    codes, _ = processes.ended(started, logs / str(number), timeout_s=90)
    took = time.monotonic() - began
    now = len(lines(workdir, 'metrics.jsonl'))
    print(
      f'{number}: {kind.name} to {victim} at {now} lines; codes {codes} after '
      f'{took:.0f} s',
      flush=True,
    )
    if took > 60:
      return [f'{number}: it took {took:.0f} s until all had ended']
  run(workdir, *three, count=3, devices=1)
  return differences(workdir, out / 'undisturbed', close=0.0)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('what', choices=('compare', 'chaos'))
  parser.add_argument('out', type=pathlib.Path)
  parser.add_argument('--times', type=int, default=10)
  parser.add_argument('--steps', type=int, default=20)
  parser.add_argument('--seed', type=int, default=0)
  arguments = parser.parse_args()
  arguments.out.mkdir(parents=True, exist_ok=True)
  if arguments.what == 'compare':
    found = compare(arguments.out)
  else:
    found = chaos(arguments.out, arguments.times, arguments.steps, arguments.seed)
  print('\n'.join(found[:20]) or 'alike')
  return 1 if found else 0


if __name__ == '__main__':
  sys.exit(main())
