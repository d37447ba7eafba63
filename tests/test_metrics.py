"""What the recorder promises: valid JSON, nothing lost or twice, one step late."""

import fractions
import json
import pathlib
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sched.metrics import Recorder, read_jsonl


def quiet(folder, **settings) -> Recorder:
  """A recorder of ten steps that writes only the two files."""
  return Recorder(
    folder, **(dict(steps=10, tensorboard=False, console=False) | settings)
  )


def strict_lines(path: pathlib.Path) -> list[dict]:
  """Parsed as the standard has it: Python alone would take NaN for JSON."""

  def refuse(word):
    raise AssertionError(f'{word} is not JSON')

  return [json.loads(s, parse_constant=refuse) for s in path.read_text().splitlines()]


def test_a_line_a_step_with_the_step_first_and_keys_in_order(tmp_path):
  with quiet(tmp_path) as recorder:
    recorder.log(0, {'reward/mean': 0.5, 'loss': np.float64(0.1)})
    recorder.log(1, {'reward/mean': jnp.float32(0.75), 'rollout/length_max': 7})
  assert (tmp_path / 'metrics.jsonl').read_text() == (
    '{"step": 0, "loss": 0.1, "reward/mean": 0.5}\n'
    '{"step": 1, "reward/mean": 0.75, "rollout/length_max": 7}\n'
  )


def test_numbers_are_written_so_that_they_can_be_read_back_exactly(tmp_path):
  values = {'a': np.float32(0.1), 'b': 1 / 3, 'c': 2**60 + 1, 'd': jnp.bfloat16(1.5)}
  with quiet(tmp_path) as recorder:
    recorder.log(0, values)
  (line,) = read_jsonl(tmp_path / 'metrics.jsonl')
  assert line == {'step': 0, 'a': float(np.float32(0.1))} | {
    'b': 1 / 3,
    'c': 2**60 + 1,
    'd': 1.5,
  }


def test_a_step_is_fetched_only_when_the_next_is_logged(tmp_path):
  class OnItsWay:
    fetched = False

    def __array__(self, dtype=None, copy=None):
      self.fetched = True
      return np.array(2.0)

  first = OnItsWay()
  with quiet(tmp_path) as recorder:
    recorder.log(0, {'loss': first})
    assert not first.fetched
    assert read_jsonl(tmp_path / 'metrics.jsonl') == []
    recorder.log(1, {'loss': 1.0})
    assert read_jsonl(tmp_path / 'metrics.jsonl') == [{'step': 0, 'loss': 2.0}]
    recorder.flush()
    assert [r['step'] for r in read_jsonl(tmp_path / 'metrics.jsonl')] == [0, 1]


def test_m2_one_value_that_is_no_number_spoils_neither_its_line_nor_the_run(tmp_path):
  with quiet(tmp_path) as recorder:
    recorder.log(0, {'a': np.nan, 'b': jnp.inf, 'c': 1.0})
    recorder.log(1, {'a': 2.0, 'b': 3.0, 'c': 1.0})
  assert strict_lines(tmp_path / 'metrics.jsonl') == [
    {'step': 0, 'c': 1.0, 'metrics/not_finite': 2},
    {'step': 1, 'a': 2.0, 'b': 3.0, 'c': 1.0},
  ]


@pytest.mark.parametrize('call', ['write', 'flush', 'close'])
def test_m2_a_logger_that_raises_is_reported_once_and_the_run_goes_on(
  tmp_path, capsys, call
):
  def fails(*_):
    raise OSError('disk quota')

  broken = types.SimpleNamespace(
    write=lambda step, values: None, flush=lambda: None, close=lambda: None
  )
  setattr(broken, call, fails)
  seen = []
  sound = types.SimpleNamespace(
    write=lambda step, values: seen.append((step, values)),
    flush=lambda: None,
    close=lambda: None,
  )
  with quiet(tmp_path) as recorder:
    recorder.loggers |= {'board': broken, 'sound': sound}
    for step in range(3):
      recorder.log(step, {'loss': 1.0})
      recorder.flush()
  assert seen == [(step, {'loss': 1.0}) for step in range(3)]
  assert len(read_jsonl(tmp_path / 'metrics.jsonl')) == 3
  told = capsys.readouterr().err.splitlines()
  assert told == ['board is off for the rest of this run: OSError: disk quota']


def test_m2_tensorboard_that_cannot_start_does_not_stop_the_run(tmp_path, capsys):
  (tmp_path / 'tensorboard').write_text('a file where a folder is needed')
  with quiet(tmp_path, tensorboard=True) as recorder:
    recorder.log(0, {'loss': 1.0})
  assert read_jsonl(tmp_path / 'metrics.jsonl') == [{'step': 0, 'loss': 1.0}]
  assert 'TensorBoard is off' in capsys.readouterr().err


def test_tensorboard_has_every_number_and_a_resumed_run_none_twice(tmp_path):
  for start in (0, 2):
    with quiet(tmp_path, tensorboard=True, start=start) as recorder:
      for step in range(start, 4):
        recorder.log(step, {'loss': step / 2, 'note': 'text is not for plots'})
  files = sorted((tmp_path / 'tensorboard').iterdir())
  events = [event for file in files for event in scalars(file)]
  kept = {}
  for kind, step, value in events:
    if kind == 'start':  # what was written of this and later steps is void
      kept = {s: v for s, v in kept.items() if s < step}
    else:
      assert step not in kept
      kept[step] = value
  assert kept == {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5}


def scalars(path):
  """(kind, step, value) of an event file, whose records are length, crc, data, crc."""
  from tensorboardX.proto.event_pb2 import Event, SessionLog

  data = path.read_bytes()
  while data:
    size = int.from_bytes(data[:8], 'little')
    event = Event.FromString(data[12 : 12 + size])
    data = data[12 + size + 4 :]
    if event.session_log.status == SessionLog.START:
      yield 'start', event.step, None
    for value in event.summary.value:
      yield value.tag, event.step, value.simple_value


def test_an_array_is_refused_with_its_name_and_shape(tmp_path):
  recorder = quiet(tmp_path)
  recorder.log(0, {'loss': np.zeros(3)})
  with pytest.raises(ValueError, match=r"'loss' has shape \(3,\)"):
    recorder.flush()


def test_steps_must_rise(tmp_path):
  with quiet(tmp_path, start=3) as recorder:
    with pytest.raises(ValueError, match='Step 2 logged where 3 or later'):
      recorder.log(2, {})
    recorder.log(3, {})
    with pytest.raises(ValueError, match='Step 3 logged where 4 or later'):
      recorder.log(3, {})


def test_a_folder_that_is_not_local_is_refused():
  with pytest.raises(ValueError, match='gs://bucket/run'):
    quiet('gs://bucket/run')


def test_rollouts_keep_order_and_take_arrays_and_nan(tmp_path):
  with quiet(tmp_path) as recorder:
    recorder.rollouts(
      4,
      [
        {'draw': 9, 'rewards': np.array([1, np.nan], np.float32), 'fate': 'trained'},
        {'draw': 8, 'lengths': np.array([3, 5]), 'versions': (np.int64(4), 4)},
      ],
    )
  assert strict_lines(tmp_path / 'rollouts.jsonl') == [
    {'step': 4, 'draw': 9, 'rewards': [1.0, None], 'fate': 'trained'},
    {'step': 4, 'draw': 8, 'lengths': [3, 5], 'versions': [4, 4]},
  ]


def test_a_truth_that_json_does_not_know_is_written_as_text(tmp_path):
  """A verifier of one's own may compare with anything."""
  with quiet(tmp_path) as recorder:
    recorder.samples(0, [{'truth': fractions.Fraction(1, 3)}, {'truth': {1: [np.nan]}}])
  truths = [line['truth'] for line in strict_lines(tmp_path / 'samples.jsonl')]
  assert truths == ['1/3', {'1': [None]}]


def test_a_resumed_run_writes_the_bytes_of_one_never_stopped(tmp_path):
  def write(folder, steps, start=0):
    with quiet(folder, start=start) as recorder:
      for step in steps:
        recorder.rollouts(step, [{'draw': step, 'rewards': [step / 3]}])
        recorder.samples(step, [{'text': 'π', 'sample': k} for k in range(2)])
        recorder.log(step, {'loss': np.float32(step) / 3})

  write(tmp_path / 'whole', range(6))
  write(tmp_path / 'killed', range(5))
  for name in ('metrics.jsonl', 'rollouts.jsonl', 'samples.jsonl'):  # torn by the kill
    with (tmp_path / 'killed' / name).open('a') as file:
      file.write('{"step": 5, "lo')
  write(tmp_path / 'killed', range(3, 6), start=3)
  for name in ('metrics.jsonl', 'rollouts.jsonl', 'samples.jsonl'):
    whole = (tmp_path / 'whole' / name).read_bytes()
    assert (tmp_path / 'killed' / name).read_bytes() == whole


def test_a_broken_line_in_the_middle_is_named(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\n{"step": \n{"step": 2}\n')
  with pytest.raises(ValueError, match=r'metrics\.jsonl:2: not a JSON object'):
    read_jsonl(tmp_path / 'metrics.jsonl')


def test_a_last_line_without_newline_counts_if_it_is_whole(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 0}\n{"step": 1}')
  assert [line['step'] for line in read_jsonl(path)] == [0, 1]
  with quiet(tmp_path, start=2) as recorder:
    recorder.log(2, {})
  assert [line['step'] for line in read_jsonl(path)] == [0, 1, 2]


def test_what_was_flushed_outlives_a_kill(tmp_path):
  program = f"""
import os, signal
from jaxrl_sched.metrics import Recorder
recorder = Recorder({str(tmp_path)!r}, steps=9, tensorboard=False, console=False)
recorder.log(0, {{'loss': 1.0}})
recorder.rollouts(0, [{{'draw': 0}}])
recorder.flush()
recorder.log(1, {{'loss': 2.0}})
os.kill(os.getpid(), signal.SIGKILL)
"""
  assert subprocess.run([sys.executable, '-c', program]).returncode == -9
  assert read_jsonl(tmp_path / 'metrics.jsonl') == [{'step': 0, 'loss': 1.0}]
  assert read_jsonl(tmp_path / 'rollouts.jsonl') == [{'step': 0, 'draw': 0}]


def test_the_summary_spans_runs_in_the_same_folder(tmp_path):
  line = {'rollout/tokens_generated': 100, 'time/step_s': 2.0}
  with quiet(tmp_path) as recorder:
    recorder.log(0, line | {'eval/sums/pass@1': 0.2, 'eval/sort/pass@1': 0.4})
    recorder.log(1, line | {'reward/mean': 0.5})
  with quiet(tmp_path, start=2) as recorder:
    recorder.log(2, {'eval/sums/pass@1': 0.9, 'eval/sort/pass@1': 1.0})
    summary = recorder.summary()
  assert summary['held_out/first'] == pytest.approx(0.3)
  assert summary['held_out/last'] == pytest.approx(0.95)
  assert summary['total/tokens_generated'] == 200
  assert summary['total/seconds'] == 4.0
  assert summary['reward/mean'] == 0.5
  assert summary['step'] == 2


def test_the_summary_has_held_out_rewards_where_they_are_not_all_0_or_1(tmp_path):
  """Also where only a later evaluation, or one dataset, shows that."""
  with quiet(tmp_path) as recorder:
    both = {'eval/sums/pass@1': 0.5, 'eval/sums/reward': 0.5}
    recorder.log(0, both | {'eval/sort/pass@1': 0.0, 'eval/sort/reward': 0.0})
    assert 'held_out/first_reward' not in recorder.summary()
    recorder.log(1, both | {'eval/sort/pass@1': 0.0, 'eval/sort/reward': 0.25})
    summary = recorder.summary()
  assert (summary['held_out/first'], summary['held_out/last']) == (0.25, 0.25)
  assert summary['held_out/first_reward'] == 0.25
  assert summary['held_out/last_reward'] == 0.375


def test_the_summary_counts_refused_updates_apart(tmp_path):
  """made, refused, skipped, refused, refused."""
  with quiet(tmp_path) as recorder:
    for step, (skipped, refused) in enumerate([(0, 0), (0, 1), (1, 0), (0, 1), (0, 1)]):
      recorder.log(step, {'update/skipped': skipped, 'update/refused': refused})
    summary = recorder.summary()
  assert summary['total/updates'] == 1
  assert summary['total/refused'] == summary['total/refused_last'] == 3
