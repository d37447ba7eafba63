"""What the console promises: all steps told of, none lost, and what goes on meanwhile."""

import io
import sys

import pytest

from jaxrl_sched import console
from jaxrl_sched.console import Console
from jaxrl_sched.metrics import Recorder, read_jsonl

STEP = {'reward/mean': 0.5, 'pass_rate': 0.25, 'rollout/tokens_generated': 6000}


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture(autouse=True)
def wide(monkeypatch):
  monkeypatch.setenv('COLUMNS', '150')


@pytest.fixture
def clock(monkeypatch):
  """Seconds, set by hand."""
  now = [1000.0]
  monkeypatch.setattr(console.time, 'monotonic', lambda: now[0])
  return now


def screen(shown: str) -> list[str]:
  """The lines that stay on a terminal, and last the one that the cursor is in."""
  return [line.split('\r\x1b[K')[-1] for line in shown.split('\n')]


def record(stream, folder, monkeypatch, **settings) -> Recorder:
  monkeypatch.setattr(sys, 'stdout', stream)
  return Recorder(folder, **(dict(steps=10, tensorboard=False) | settings))


def show(stream, folder, monkeypatch) -> str:
  with record(stream, folder, monkeypatch) as recorder:
    recorder.log(0, STEP | {'time/step_s': 100.0})  # compiles
    recorder.log(1, STEP | {'time/step_s': 2.0})
    recorder.log(9, STEP | {'time/step_s': 3.0, 'eval/sums/pass@1': 0.625})
    recorder.log(10, {'eval/sums/pass@1': 0.75, 'eval/sort/pass@1': 1.0})
  return stream.getvalue()


def test_a_terminal_has_one_live_line_and_the_final_evaluation_its_own(
  tmp_path, monkeypatch
):
  shown = show(Terminal(), tmp_path, monkeypatch)
  drawn = shown.split('\n')[0].split('\r\x1b[K')[1:]
  # 6000 tokens in 2 s; the median of 100 and 2 s is 51 s, times the 8 steps left.
  assert drawn[1] == (
    'step  2/10 | reward 0.500 | pass rate 0.250 | 3,000 tokens/s | 6m48s left'
  )
  last = 'step 10/10 | reward 0.500 | pass rate 0.250 | held-out 0.625 | 2,000 tokens/s'
  assert screen(shown) == [last, 'final evaluation | held-out 0.875', '']


@pytest.mark.parametrize(
  'skipped, filtered, told',
  [
    (0.0, 4, ''),
    (1.0, 4, ' | no update: no group with spread'),
    (1.0, 3, ' | no update: nothing to train on'),  # one was left out for its length
  ],
)
def test_a_step_without_an_update_says_why(skipped, filtered, told):
  stream = io.StringIO()
  groups = {'rollout/groups_generated': 4, 'rollout/groups_filtered': filtered}
  Console(1, stream).step(0, STEP | groups | {'update/skipped': skipped}, None)
  step = f'step 1/1 | reward 0.500 | pass rate 0.250{told}'
  assert stream.getvalue() == f'{step}\n'


@pytest.mark.parametrize('stream', [Terminal, io.StringIO])
def test_without_evaluation_the_last_steps_line_stays(tmp_path, monkeypatch, stream):
  stream = stream()
  with record(stream, tmp_path, monkeypatch, steps=2) as recorder:
    for step in range(2):
      recorder.log(step, STEP)
    recorder.log(2, {})
  lines = screen(stream.getvalue())
  assert lines[-2:] == ['step 2/2 | reward 0.500 | pass rate 0.250', '']
  assert 'step 2/2' not in lines[0] or len(lines) == 2


def test_elsewhere_plain_lines_come_now_and_then_and_the_last_always(
  tmp_path, monkeypatch
):
  lines = show(io.StringIO(), tmp_path, monkeypatch).splitlines()
  assert len(lines) == 3
  assert lines[0].startswith('step  1/10 | reward 0.500')
  assert lines[1].startswith('step 10/10 | reward 0.500')
  assert lines[2] == 'final evaluation | held-out 0.875'


def test_a_line_said_in_between_does_not_run_into_the_live_one(tmp_path, monkeypatch):
  terminal = Terminal()
  with record(terminal, tmp_path, monkeypatch) as recorder:
    recorder.log(0, STEP)
    recorder.flush()
    recorder.say('saved')
  step = 'step  1/10 | reward 0.500 | pass rate 0.250'
  assert screen(terminal.getvalue()) == ['saved', step, '']


def test_a_long_step_tells_what_it_does_each_second(clock):
  terminal = Terminal()
  shown = Console(30, terminal)
  for answers in range(5):  # every 0.4 s
    clock[0] += 0.4
    shown.progress(0, f'sampling {answers}/96 answers')
  # Sampling was long enough to be shown, so what comes after it is shown at once.
  shown.progress(0, 'learning from 96 answers')
  assert terminal.getvalue().split('\r\x1b[K')[1:] == [
    'step  1/30 | sampling 2/96 answers',
    'step  1/30 | learning from 96 answers',
  ]
  shown.step(0, STEP, None)
  clock[0] += 1.5
  shown.progress(1, 'sampling 7/96 answers')
  step = 'reward 0.500 | pass rate 0.250'
  assert screen(terminal.getvalue()) == [
    f'step  2/30 | sampling 7/96 answers | last step: {step}'
  ]
  shown.end()  # stopped here: what is not done leaves no line
  assert screen(terminal.getvalue()) == [f'step  1/30 | {step}', '']


def test_short_steps_do_not_flicker(clock):
  terminal = Terminal()
  shown = Console(30, terminal)
  for step in range(3):
    for text in ('sampling 1/8 answers', 'learning from 8 answers'):
      clock[0] += 0.4
      shown.progress(step, text)
    shown.step(step, STEP, None)
  drawn = terminal.getvalue().split('\r\x1b[K')[1:]
  assert [text.split(' | ')[0] for text in drawn] == [
    f'step {i:2}/30' for i in (1, 2, 3)
  ]
  assert 'answers' not in terminal.getvalue()


def test_elsewhere_a_long_step_tells_what_it_does_each_minute(clock):
  stream = io.StringIO()
  shown = Console(2, stream)
  for answers in range(1, 131):  # one a second
    clock[0] += 1
    shown.progress(0, f'sampling {answers}/200 answers')
  shown.step(0, STEP, None)
  shown.progress(1, 'sampling 0/200 answers')
  clock[0] += 61
  shown.progress(2, 'evaluating 3/8 answers')
  assert stream.getvalue().splitlines() == [
    'step 1/2 | sampling 60/200 answers',
    'step 1/2 | sampling 120/200 answers',
    'step 1/2 | reward 0.500 | pass rate 0.250',
    'final evaluation | evaluating 3/8 answers',
  ]


def test_a_step_is_told_of_as_soon_as_the_next_one_is_under_way(tmp_path, monkeypatch):
  with record(Terminal(), tmp_path, monkeypatch) as recorder:
    recorder.log(0, STEP)
    assert read_jsonl(tmp_path / 'metrics.jsonl') == []
    recorder.progress('sampling 0/8 answers')
    assert [line['step'] for line in read_jsonl(tmp_path / 'metrics.jsonl')] == [0]
  assert len(read_jsonl(tmp_path / 'metrics.jsonl')) == 1


@pytest.mark.parametrize(
  'step, evaluations',
  # Of weights 0, 4, 8 and 10. After step index 3 there are 4, 8 and 10 left.
  [(0, 3), (3, 3), (4, 2), (7, 2), (8, 1)],
)
def test_the_time_left_counts_the_evaluations_to_come(step, evaluations):
  stream = io.StringIO()
  shown = Console(10, stream, evaluate_every=4)
  shown.step(step, {'time/step_s': 1.0, 'time/evaluate_s': 20.0}, None)
  left = 10 - (step + 1) + 20 * evaluations
  assert stream.getvalue().endswith(f'| {console.duration(left)} left\n')


@pytest.mark.parametrize(
  'seconds, text',
  [
    (0.4, '0s'),
    (59.6, '1m00s'),
    (185, '3m05s'),
    (7620, '2h07m'),
    (100_800, '1d04h'),
  ],
)
def test_durations_have_two_units(seconds, text):
  assert console.duration(seconds) == text


def test_partial_rewards_are_shown_beside_the_pass_rate(tmp_path, monkeypatch):
  stream = io.StringIO()
  with record(stream, tmp_path, monkeypatch) as recorder:
    recorder.log(0, STEP | {'eval/sums/pass@1': 0.0, 'eval/sums/reward': 0.4375})
    recorder.log(10, {'eval/sums/pass@1': 0.125, 'eval/sums/reward': 0.5})
  first, last = stream.getvalue().splitlines()
  assert first.endswith('| held-out reward 0.438, passed 0.000')
  assert last == 'final evaluation | held-out reward 0.500, passed 0.125'


@pytest.mark.parametrize(
  'line, told',
  [
    ({'update/skipped': 0.0, 'update/refused': 1.0}, 'no update: not finite'),
    (
      {'update/skipped': 1.0, 'update/why': 'all answers left truncated'},
      'no update: all answers left truncated',
    ),
  ],
)
def test_an_update_that_was_not_made_has_its_own_reason(line, told):
  stream = io.StringIO()
  Console(1, stream).step(0, STEP | line, None)
  assert stream.getvalue().rstrip().split(' | ')[-1] == told
