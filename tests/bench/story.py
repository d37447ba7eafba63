"""How much code a step runs through, and how many lines each floor has.

    python tests/bench/story.py [--config.scheduler.barrier=False ...]

Trains configs/smoke.py for four steps in this process and counts over the last three the
package's files, functions, classes (a method of which runs) and record types (dataclasses
that are made). Settings are those of `train`.
"""

import collections
import dataclasses
import pathlib
import sys
import tempfile

import jaxrl_sched
from jaxrl_sched import loop, train

ROOT = pathlib.Path(jaxrl_sched.__file__).parent


class Story:
  """What runs while it listens."""

  def __init__(self):
    self.functions: set[tuple[str, str]] = set()
    self.classes: set[type] = set()
    self.records: set[type] = set()

  def __call__(self, frame, event, _) -> None:
    if event != 'call' or not frame.f_code.co_filename.startswith(str(ROOT)):
      if event == 'call' and frame.f_code.co_name == '__init__':
        self._of(frame.f_locals.get('self'))  # a dataclass's own is made, not written
      return
    code = frame.f_code
    self.functions.add((code.co_filename, code.co_qualname))
    self._of(frame.f_locals.get('self'))

  def _of(self, instance) -> None:
    kind = type(instance)
    if not kind.__module__.startswith('jaxrl_sched'):
      return
    (self.records if dataclasses.is_dataclass(kind) else self.classes).add(kind)


def main() -> None:
  story, step = Story(), loop._step

  def listened(engine, scheduler, recorder, number, samples_of):
    sys.setprofile(story if number else None)
    try:
      return step(engine, scheduler, recorder, number, samples_of)
    finally:
      sys.setprofile(None)

  loop._step = listened
  with tempfile.TemporaryDirectory() as workdir:
    config = f'--config={ROOT.parent}/configs/smoke.py'
    train.main([config, f'--workdir={workdir}', '--config.steps=4', *sys.argv[1:]])
  files = {file for file, _ in story.functions}
  print(
    f'a step runs through {len(files)} files, {len(story.functions)} functions, '
    f'{len(story.classes)} classes and {len(story.records)} record types'
  )
  lines = collections.Counter()
  for file in ROOT.rglob('*.py'):
    floor = file.relative_to(ROOT).parts[0] if file.parent != ROOT else 'top'
    lines[floor] += len(file.read_text().splitlines())
  print('lines: ' + ', '.join(f'{floor} {n:,}' for floor, n in sorted(lines.items())))
  print(f'in all {sum(lines.values()):,}')


if __name__ == '__main__':
  main()
