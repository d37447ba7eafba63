"""Whole runs on the simulated clock: every method, lag and relief; the sums hold."""

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
from jaxrl_sched.sim import Costs, Dataset, SimEngine, Workload
from jaxrl_sched.types import Sampling

DATASETS = {
  'a': Dataset(count=120, median=20, within_spread=0.4, aborts=0.05, gain=0.3),
  'b': Dataset(count=60, weight=0.5, median=60, pass_rate=0.2, growth=0.01),
}
SAMPLING = Sampling(max_new_tokens=150)
COSTS = Costs(
  decode_step=0.01,
  decode_row=1e-4,
  decode_cached=1e-6,
  chunk=0.01,
  load=0.3,
  reward_round=0.05,
  learn_token=1e-3,
  overhead=0.02,
)


class Lines:
  """What a recorder is told."""

  def __init__(self):
    self.metrics, self.groups, self.spans = [], [], []

  def log(self, step, metrics):
    self.metrics.append(metrics)

  def rollouts(self, step, lines):
    self.groups += lines

  def samples(self, step, lines):
    pass

  def timeline(self, step, spans):
    self.spans += spans

  def flush(self):
    pass


def run(seed=0, *, steps=6, asp=None, slots=8, **how):
  """Returns what was recorded, and the engine."""
  asp = Asp() if asp is None else asp
  workload = Workload(DATASETS, seed=seed)
  sizes, weights = workload.prompts.sizes, workload.prompts.weights
  engine = SimEngine(workload, COSTS, slots=slots, chunk=4)
  scheduler = Scheduler(
    Source(Snooze(sizes, weights, factor=2, seed=seed)),
    workload.prompts.get,
    SAMPLING,
    advantages_of=group_advantages,
    lengths=LengthPredictor(sizes, limit=150),
    asp=asp,
    slots=slots,
    steps=steps,
    seed=seed,
    **(dict(groups_per_step=6, group_size=4) | how),
  )
  lines = Lines()
  loop.train(
    engine,
    scheduler,
    lines,
    steps=steps,
    save_every=3,
    evaluate_every=steps,
    evaluate=None,
  )
  return lines, engine


RELIEF = st.sampled_from(
  [
    {},
    dict(spare=2),
    dict(spare=1, first_finished=True),
    dict(pause_after=25),
  ]
)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
  st.integers(0, 99),
  st.integers(0, 2),
  st.integers(1, 3),
  RELIEF,
  st.booleans(),
  st.booleans(),
)
def test_nothing_is_lost_and_clocks_add_up(seed, lag, engines, relief, refill, dynamic):
  asp = Asp(lag=lag, engines=engines, refill=refill or bool(relief), **relief)
  lines, engine = run(seed, asp=asp, dynamic_sampling=dynamic)
  metrics = lines.metrics[:-1]  # the last is of no step

  def total(key):
    return sum(m.get(f'rollout/{key}', 0) for m in metrics)

  for what in ('groups', 'answers', 'tokens'):
    fates = ('trained', 'pruned', 'filtered', 'dropped')
    settled = sum(total(f'{what}_{fate}') for fate in fates)
    pending = metrics[-1][f'rollout/{what}_pending']
    assert total(f'{what}_generated') == settled + pending
  assert len({group['draw'] for group in lines.groups}) == len(lines.groups)
  if lag and not relief:  # else groups are carried, or go on later
    assert all(m.get('lag/max', 0) <= min(j, lag) for j, m in enumerate(metrics))

  totals = engine.totals()
  assert totals['wall'] == pytest.approx(totals['train'] + totals['wait'])
  parts = ('busy', 'load', 'padding', 'skew', 'ordering')
  assert all((totals[name] >= -1e-9).all() for name in parts)
  np.testing.assert_allclose(sum(totals[name] for name in parts), totals['wall'])
  for lane in {span.lane for span in lines.spans}:
    mine = sorted((s.begin, s.end) for s in lines.spans if s.lane == lane)
    ends = [end for _, end in mine]
    assert all(
      begin >= end - 1e-9 for (begin, _), end in zip(mine[1:], ends, strict=False)
    )


def test_running_ahead_and_refilling_slots_take_less_time():
  how = dict(steps=20, dynamic_sampling=False)
  padded = run(asp=Asp(engines=2, refill=False), **how)[1].now()
  refilled = run(asp=Asp(engines=2), **how)[1].now()
  ahead = run(asp=Asp(engines=2, lag=1), **how)[1].now()
  assert ahead < refilled < padded
