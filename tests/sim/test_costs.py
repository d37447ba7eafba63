"""Costs fitted to a run: what they predict counts, not what they are."""

import dataclasses
import itertools
import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxrl_sched import loop
from jaxrl_sched.control.asp import Asp
from jaxrl_sched.control.lengths import LengthPredictor
from jaxrl_sched.control.scheduler import Scheduler
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.control.source import Source
from jaxrl_sched.host.advantages import group_advantages
from jaxrl_sched.metrics import Recorder, read_jsonl
from jaxrl_sched.sim import Costs, Dataset, SimEngine, Workload
from jaxrl_sched.sim.costs import fit, nonnegative_least_squares, read_run
from jaxrl_sched.sim.counts import (
  GENERATE,
  HOST,
  LEARN,
  REWARD,
  Rows,
  StepTimes,
  learning,
)
from jaxrl_sched.sim.trace import Trace
from jaxrl_sched.types import Sampling

# --- least squares --------------------------------------------------------------------


def by_enumeration(a, b):
  """The best of the least squares of every subset of columns that is nowhere below 0."""
  best = float(b @ b)
  for n in range(1, a.shape[1] + 1):
    for some in map(list, itertools.combinations(range(a.shape[1]), n)):
      x = np.linalg.lstsq(a[:, some], b, rcond=None)[0]
      if (x >= 0).all():
        best = min(best, float(((a[:, some] @ x - b) ** 2).sum()))
  return best


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_no_subset_of_columns_fits_better(seed, columns, rows, alike):
  rng = np.random.default_rng(seed)
  a = rng.standard_normal((rows, columns)) + rng.integers(0, 2)
  if alike:
    a[:, -1] = 2 * a[:, 0]  # columns that cannot be told apart
  b = rng.standard_normal(rows)
  x = nonnegative_least_squares(a, b)
  assert (x >= 0).all()
  wanted = by_enumeration(a, b)
  assert float(((a @ x - b) ** 2).sum()) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


# --- fitting --------------------------------------------------------------------------


def steps_of(rng, count, costs, *, noise):
  """Steps that get longer, and whose counts go together: only sums can be told."""
  found = []
  for step in range(count):
    answers, length = 64, 50 + 2 * step + rng.integers(0, 20)
    tokens = float(answers * length)
    chunks = np.ceil(2 * length / 16)
    counts = (2.0 * length, tokens, tokens * length / 2, chunks, 8.0, 160.0)
    learned = (np.ceil(tokens / 2000), tokens, 1.0)
    parts = [(GENERATE, counts), (REWARD, (1.0, answers)), (LEARN, learned)]
    host = np.array([answers, 1.0])
    times = [float(costs.of(n) @ c) * rng.lognormal(0, noise) for n, c in parts]
    found.append(
      StepTimes(
        step=step,
        generate=np.array(counts),
        reward=np.array(parts[1][1]),
        learn=np.array(learned),
        generate_s=times[0],
        reward_s=times[1],
        learn_s=times[2],
        load_s=costs.load,
        host=host,
        overhead_s=float(costs.of(HOST) @ host),
      )
    )
  return found


TRUE = Costs(
  decode_step=2e-3,
  decode_row=1e-5,
  decode_cached=1e-8,
  chunk=5e-3,
  prefill_prompt=1e-3,
  reward_round=0.01,
  reward_answer=1e-4,
  learn_step=0.1,
  learn_batch=0.05,
  learn_token=1e-5,
  load=0.2,
  overhead=0.03,
  overhead_answer=1e-5,
)
PARTS = (
  (GENERATE, 'generate'),
  (REWARD, 'reward'),
  (LEARN, 'learn'),
)


def predicted(costs, records, names, part):
  return sum(float(costs.of(names) @ getattr(r, part)) for r in records)


def measured(records, part):
  return sum(getattr(r, f'{part}_s') for r in records)


@pytest.mark.parametrize('seed', range(3))
def test_what_is_fitted_to_the_first_half_predicts_the_second(seed):
  records = steps_of(np.random.default_rng(seed), 40, TRUE, noise=0.05)
  costs = fit(records[:20])
  for names, part in PARTS:
    wanted = measured(records[20:], part)
    assert predicted(costs, records[20:], names, part) == pytest.approx(wanted, rel=0.1)
  host = costs.of(HOST) @ records[0].host
  assert (costs.load, host) == pytest.approx((0.2, 0.03 + 64e-5))


def test_times_without_noise_are_met_step_by_step():
  records = steps_of(np.random.default_rng(0), 30, TRUE, noise=0.0)
  costs = fit(records)
  for record in records:
    for names, part in PARTS:
      mine = predicted(costs, [record], names, part)
      assert mine == pytest.approx(measured([record], part), rel=1e-3)


@pytest.mark.parametrize('seed', range(3))
def test_predicted_times_sum_to_those_measured(seed):
  records = steps_of(np.random.default_rng(seed), 30, TRUE, noise=0.5)
  costs = fit(records)
  for names, part in PARTS:
    wanted = measured(records, part)
    assert predicted(costs, records, names, part) == pytest.approx(wanted, rel=0.01)


def test_a_fit_to_nothing_is_refused():
  with pytest.raises(ValueError, match='no step to fit to'):
    fit([])


@pytest.mark.parametrize('value', [-1.0, float('nan'), float('inf'), True, '1'])
def test_a_cost_is_a_number_of_seconds(value):
  with pytest.raises(
    ValueError, match='costs.decode_row: .*, expected a number of sec'
  ):
    Costs(decode_row=value)


def test_what_an_update_counts_on_paper():
  rows = Rows(rows=2, row_tokens=10, window=2)
  groups = [(3, [2, 4, 1]), (1, [5, 5])]
  # Units 5, 7, 4, 6, 6: rows 5 4, 7, 6, 6 of 10 tokens, hence two microbatches of 2.
  counts, filled = learning(groups, rows)
  assert (counts.tolist(), filled) == ([2, 28, 1], 4)
  # Sharing their prompt: 3 2 4 1, then 1 5 and 1 5, which are too much for one row.
  counts, filled = learning(groups, dataclasses.replace(rows, share_prompt=True))
  assert (counts.tolist(), filled) == ([2, 22, 1], 3)
  assert learning(groups, Rows())[0].tolist() == [0, 28, 1]
  shared = Rows(share_prompt=True)
  assert learning(groups, shared)[0].tolist() == [0, 3 + 7 + 1 + 10, 1]
  assert learning([], rows)[0].tolist() == [0, 0, 1]


# --- a run's folder -------------------------------------------------------------------


def line(draw, lengths, *, step, weights=None, **fields):
  size = len(lengths)
  return {
    'step': step,
    'draw': draw,
    'prompt_id': f'a/{draw}',
    'dataset': 'a',
    'size': size,
    'lengths': lengths,
    'predicted_length': None,
    'verdicts': [0.0] * size,
    'rewards': [0.0] * size,
    'finish': ['stop'] * size,
    'faults': [None] * size,
    'versions': [0] * size,
    'fate': 'trained' if weights else 'filtered',
    'reason': '',
    'weights': weights,
  } | fields


def metrics(step, groups, **fields):
  return {
    'step': step,
    'rollout/groups_generated': groups,
    'rollout/rounds': 1,
    'update/skipped': 0.0,
    'time/generate_s': 1.0,
    'time/reward_s': 0.5,
    'time/learn_s': 2.0,
    'time/idle_s': 0.25,
  } | fields


def folder(tmp_path, numbers, lines):
  config = dict(
    sampler=dict(slots=2, chunk=2),
    learner=dict(rows=1, row_tokens=10, share_prompt=False, window=16),
  )
  (tmp_path / 'config.json').write_text(json.dumps(config))
  for name, some in (('metrics', numbers), ('rollouts', lines)):
    text = ''.join(json.dumps(one) + '\n' for one in some)
    (tmp_path / f'{name}.jsonl').write_text(text)
  return tmp_path


def test_the_counts_of_a_run_on_paper(tmp_path):
  workdir = folder(
    tmp_path,
    [metrics(0, 2), metrics(1, 1), {'step': 2, 'eval/a/pass@1': 1.0}],
    [
      # Group 0 is carried, and trained on a step later.
      line(0, [3, 1], step=1, weights=[1.0, 0.0], versions=[0, 0]),
      line(1, [2], step=0, weights=[2.0]),
      line(2, [4], step=1),
    ],
  )
  prompts = Workload({'a': Dataset(count=3, prompt_tokens=5)}).prompts
  first, second = read_run(workdir, prompts=prompts)
  # Slots 2, chunks of 2: answers of 3 and 1, and one of 2 from step 2 to 4.
  cached = (5 + 6 + 7) + 5 + (5 + 6)
  assert first.generate.tolist() == [4, 6, cached, 2, 2, 10]
  assert second.generate.tolist() == [4, 4, 5 + 6 + 7 + 8, 2, 1, 5]
  assert first.reward.tolist() == [1, 3] and first.host.tolist() == [3, 1]
  assert first.learn.tolist() == [1, 2 + 5, 1]
  assert second.learn.tolist() == [1, 3 + 5, 1]
  assert (first.generate_s, first.reward_s, first.learn_s) == (1.0, 0.5, 2.0)
  assert (first.overhead_s, first.load_s) == (0.25, None)
  # Without prompts they count as empty.
  assert read_run(workdir)[1].generate.tolist() == [4, 4, 6, 2, 1, 0]
  assert [r.step for r in read_run(workdir, steps=range(1, 2))] == [1]


def test_answers_are_started_as_their_bounds_said(tmp_path):
  """In two slots 8, 2 and 2 tokens take 8 steps; 2, 2 and 8 take 10."""

  def steps(bounds):
    lines = [
      line(i, [n], step=0, predicted_length=3.0 - i, **bound)
      for i, (n, bound) in enumerate(zip([8, 2, 2], bounds, strict=True))
    ]
    return read_run(folder(tmp_path, [metrics(0, 3)], lines))[0].generate[0]

  assert steps([{'predicted_longest': n} for n in (9.0, 8.0, 7.0)]) == 8
  assert steps([{'predicted_longest': n} for n in (7.0, 8.0, 9.0)]) == 10
  assert steps([{}] * 3) == 8  # of older runs the means alone are known


def test_steps_that_are_not_recorded_whole_are_left_out(tmp_path):
  lines = [line(0, [3], step=0), line(2, [4], step=1)]
  workdir = folder(tmp_path, [metrics(0, 1), metrics(1, 2)], lines)
  assert [r.step for r in read_run(workdir)] == [0]
  with pytest.raises(ValueError, match='none of these steps is recorded whole'):
    read_run(workdir, steps=range(1, 5))


def test_a_run_that_is_still_going_is_read_to_its_last_whole_line(tmp_path):
  lines = [line(0, [3], step=0), line(1, [4], step=1)]
  workdir = folder(tmp_path, [metrics(0, 1), metrics(1, 1)], lines)
  for name in ('metrics', 'rollouts'):
    with (workdir / f'{name}.jsonl').open('a') as file:
      file.write('{"step": 2, "rollo')
  assert [r.step for r in read_run(workdir)] == [0, 1]


@pytest.mark.parametrize(
  'bad, said',
  [
    ([3], r'\[3\], expected the numbers of a step'),
    (metrics(1, 1, **{'time/generate_s': 'x'}), "time/generate_s 'x', expected a num"),
    (metrics(1, 1, **{'time/generate_s': math.nan}), 'time/generate_s nan, expected'),
    (
      metrics(1, 1, **{'time/generate_s': -1.0}),
      'time/generate_s -1.0, expected a num',
    ),
    (metrics(1, 1, **{'time/load_s': -1.0}), 'time/load_s -1.0, expected a number'),
    (metrics(1, 1, **{'time/idle_s': None}), 'time/idle_s None, expected a number'),
    (metrics(1, 'x'), "rollout/groups_generated 'x', expected a whole number from 0"),
    (metrics(1, -1), 'rollout/groups_generated -1, expected a whole number from 0'),
    (metrics(1, 10**30), 'rollout/groups_generated 10+, expected a whole number'),
    (metrics(0, 1), 'step 0, expected one above the 0 of the line before'),
    (metrics(1, 1, **{'update/skipped': 'no'}), "update/skipped 'no', expected 0 or 1"),
    ({'step': 1, 'rollout/groups_generated': 1}, "'rollout/rounds' is missing"),
  ],
)
def test_metrics_that_no_run_wrote_are_refused_with_their_line(tmp_path, bad, said):
  lines = [line(0, [3], step=0), line(1, [4], step=1)]
  workdir = folder(tmp_path, [metrics(0, 1), bad], lines)
  with pytest.raises(ValueError, match=said) as error:
    read_run(workdir)
  assert 'metrics.jsonl:2: ' in str(error.value) and '\n' not in str(error.value)


def test_groups_of_another_run_are_refused(tmp_path):
  lines = [line(0, [3], step=0), line(1, [4], step=0, weights=[1.0])]
  fates = {'rollout/groups_trained': 1, 'rollout/groups_filtered': 1}
  read_run(folder(tmp_path, [metrics(0, 2, **fates)], lines))
  workdir = folder(
    tmp_path, [metrics(0, 2, **fates | {'rollout/groups_trained': 2})], lines
  )
  said = 'rollouts.jsonl: 1 groups are trained at step 0, expected the 2 that metrics'
  with pytest.raises(ValueError, match=said):
    read_run(workdir)


def test_what_cannot_be_read_is_refused(tmp_path):
  with pytest.raises(ValueError, match='config.json: cannot be read'):
    read_run(tmp_path)
  workdir = folder(tmp_path, [metrics(0, 1)], [line(0, [3], step=0)])
  config = json.loads((workdir / 'config.json').read_text())
  for asp in (dict(spare=1), dict(pause_after=64), dict(window=2)):
    (workdir / 'config.json').write_text(json.dumps(config | {'asp': asp}))
    with pytest.raises(
      ValueError, match='asp.*expected a run with [01] .* does not say'
    ):
      read_run(workdir)
  (workdir / 'config.json').write_text('{"sampler": {"slots": 2}}')
  with pytest.raises(ValueError, match="'chunk' is missing"):
    read_run(workdir)
  (workdir / 'metrics.jsonl').write_text('{"step":')
  (workdir / 'metrics.jsonl').unlink()
  with pytest.raises(ValueError, match='metrics.jsonl: cannot be read'):
    read_run(workdir)
  workdir = folder(tmp_path, [metrics(0, 1)], [line(77, [3], step=0)])
  prompts = Workload({'a': Dataset(count=3)}).prompts
  with pytest.raises(ValueError, match=r"rollouts.jsonl:1: prompt 'a/77', expected"):
    read_run(workdir, prompts=prompts)


# --- all of it, through the loop ------------------------------------------------------

DATASETS = {
  'a': Dataset(count=300, median=60, gain=0.2, growth=0.01),
  'b': Dataset(count=300, median=150, pass_rate=0.2, gain=0.2, growth=0.01),
}
SAMPLING = Sampling(max_new_tokens=400)
STEPS = 24


def simulate(workdir, workload, costs, *, lag):
  """A run of the loop. Returns the engine."""
  prompts = workload.prompts
  engine = SimEngine(
    workload, costs, slots=16, chunk=8, rows=Rows(rows=2, row_tokens=800)
  )
  scheduler = Scheduler(
    Source(Snooze(prompts.sizes, prompts.weights, factor=5)),
    prompts.get,
    SAMPLING,
    groups_per_step=8,
    group_size=8,
    advantages_of=group_advantages,
    lengths=LengthPredictor(prompts.sizes, limit=400),
    asp=Asp(lag=lag, engines=1),
    slots=16,
    steps=STEPS,
  )
  with Recorder(workdir, steps=STEPS, tensorboard=False, console=False) as recorder:
    loop.train(
      engine,
      scheduler,
      recorder,
      steps=STEPS,
      save_every=STEPS,
      evaluate_every=STEPS,
      evaluate=None,
    )
  config = dict(
    sampler=dict(slots=16, chunk=8),
    learner=dict(rows=2, row_tokens=800, share_prompt=False, window=16),
    asp=dict(engines=1, refill=True),
  )
  (workdir / 'config.json').write_text(json.dumps(config))
  return engine


@pytest.mark.parametrize('lag', [0, 1])
def test_a_recorded_run_is_decided_again_and_its_time_is_predicted(tmp_path, lag):
  first = simulate(tmp_path / 'first', Workload(DATASETS, seed=4), TRUE, lag=lag)
  prompts = Workload(DATASETS, seed=9).prompts  # of a trace only lengths are asked
  half = range(STEPS // 2)
  costs = fit(read_run(tmp_path / 'first', prompts=prompts, steps=half))
  trace = Trace(tmp_path / 'first' / 'rollouts.jsonl', prompts, limit=400)
  second = simulate(tmp_path / 'second', trace, costs, lag=lag)

  assert trace.drawn == 0 and trace.recorded > 8 * STEPS
  lines = [
    read_jsonl(tmp_path / name / 'rollouts.jsonl') for name in ('first', 'second')
  ]
  assert lines[0] == lines[1]
  times = [
    sum(m['time/step_s'] for m in read_jsonl(tmp_path / name / 'metrics.jsonl')[12:-1])
    for name in ('first', 'second')
  ]
  assert times[1] == pytest.approx(times[0], rel=0.1)
  assert second.now() == pytest.approx(first.now(), rel=0.1)
