"""Slots and the pipeline: paper, a model that goes tick by tick, and the table of
algorithms.md 3.6."""

from collections import Counter
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxrl_sched.control import asp
from jaxrl_sched.control.timeline import makespan, refill_ends, timeline, version_for

quick = settings(max_examples=60, deadline=None, derandomize=True)
counts = st.integers(1, 4)


# --- slots -----------------------------------------------------------------------------


def test_refill_longest_first():
  """Slot 0: 900, 200 -> 1,100 and 100 more; slot 1: 500, 900, 1,200."""
  ends = refill_ends([900, 500, 400, 300, 200, 100], slots=2)
  assert ends.tolist() == [900, 500, 900, 1200, 1100, 1200]


def test_a_free_slot_waits_for_the_end_of_the_chunk():
  """Slots are free at 3 and 5; chunks of 4 end at 4 and 8; 4 + 4 = 8 is one, too."""
  assert refill_ends([3, 5, 4, 2, 1], slots=2, chunk=4).tolist() == [3, 5, 8, 10, 9]


def ends_by_ticks(lengths, slots, chunk):
  """A second writing: every slot is looked at in every decode step."""
  ends, running, coming, step = {}, {}, list(range(len(lengths))), 0
  while len(ends) < len(lengths):
    if step % chunk == 0:
      while coming and len(running) < slots:
        i = coming.pop(0)
        running[i] = lengths[i]
    step += 1
    for i in list(running):
      running[i] -= 1
      if running[i] == 0:
        ends[i] = step
        del running[i]
  return [ends[i] for i in range(len(lengths))]


@quick
@given(
  lengths=st.lists(st.integers(1, 12), max_size=12),
  slots=counts,
  chunk=st.integers(1, 5),
)
def test_refill_is_what_slots_do_step_by_step(lengths, slots, chunk):
  ends = refill_ends(lengths, slots, chunk)
  assert ends.tolist() == ends_by_ticks(lengths, slots, chunk)


def test_refill_takes_predicted_lengths_and_leaves_its_argument():
  lengths = np.array([2.5, 1.5, 1.25])
  assert refill_ends(lengths, slots=2).tolist() == [2.5, 1.5, 2.75]
  assert lengths.tolist() == [2.5, 1.5, 1.25]


@pytest.mark.parametrize('slots, chunk', [(0, 1), (1, 0)])
def test_no_slots_are_refused(slots, chunk):
  with pytest.raises(ValueError, match=f'slots and chunk: {slots} and {chunk}'):
    refill_ends([1], slots, chunk)


# --- the recursion ---------------------------------------------------------------------


@given(
  g=st.integers(1, 50),
  t=st.integers(1, 50),
  n=st.integers(1, 9),
  lag=st.integers(0, 12),
)
@quick
def test_constant_times(g, t, n, lag):
  """J (g + t) if synchronous; else all but the first and last step overlap."""
  expected = n * (g + t) if lag == 0 else g + (n - 1) * max(g, t) + t
  assert makespan([g] * n, [t] * n, lag) == expected


def test_five_bundles_of_ten_and_ten():
  assert [makespan([10] * 5, [10] * 5, lag) for lag in (0, 1, 2)] == [100, 60, 60]


def test_loads_and_rewards_on_paper():
  """Lag 1: bundles 0 and 1 need no load, bundle 2 waits for version 1 and loads it."""
  t = timeline([[3, 4], [3, 4], [3, 4]], [5, 5, 5], 1, load=2, reward=1)
  assert t.start.tolist() == [[0, 0], [3, 4], [12, 12]]
  assert t.end.tolist() == [[3, 4], [6, 8], [15, 16]]
  assert t.ready.tolist() == [5, 9, 17]
  assert t.learn.tolist() == [5, 10, 17]
  assert t.publish.tolist() == [0, 10, 15, 22]


def test_no_bundles_end_at_once():
  assert makespan(np.zeros((0, 2)), [], 1) == 0


def test_misshapen_times_are_refused():
  with pytest.raises(ValueError, match=r'gen and train: \[2, 1\] and \[3\], expected'):
    makespan([1, 2], [1, 2, 3], 0)
  with pytest.raises(ValueError, match='lag: -1, expected at least 0'):
    makespan([1], [1], -1)


@dataclasses.dataclass
class Ticks:
  """A pipeline that looks at every engine and the trainer in every tick."""

  gen: list[list[int]]  # [J][E], at least 1
  train: list[int]  # [J], at least 1
  lag: int

  def run(self) -> tuple[list[list[int]], int]:
    """The version each engine had at the start of each bundle, and the end."""
    bundles, engines = len(self.gen), len(self.gen[0])
    at, left = [0] * engines, [0] * engines  # an engine's bundle, and its ticks left
    loaded = [[-1] * engines for _ in range(bundles)]
    version, learning, tick = 0, 0, 0
    kept = {0}
    while version < bundles:
      for e in range(engines):
        if left[e] == 0 and at[e] < bundles and version_for(at[e], self.lag) <= version:
          loaded[at[e]][e] = version_for(at[e], self.lag)
          assert loaded[at[e]][e] in kept
          left[e] = self.gen[at[e]][e]
      # A version may go once every engine has loaded it, or a later one.
      needed = min(version_for(j, self.lag) for j in at)
      kept = {v for v in kept if v >= needed}
      if learning == 0 and all(a > version for a in at):
        learning = self.train[version]
      tick += 1
      for e in range(engines):
        left[e] = max(left[e] - 1, 0)
        at[e] += left[e] == 0 and at[e] < bundles and loaded[at[e]][e] >= 0
      if learning:
        learning -= 1
        if learning == 0:
          version += 1
          kept.add(version)
      assert len(kept) <= self.lag + 1
      assert max(at) - version <= self.lag + 1  # bundles that wait for the trainer
    return loaded, tick


@st.composite
def pipelines(draw):
  bundles, engines = draw(st.integers(1, 6)), draw(counts)
  times = st.integers(1, 9)
  row = st.lists(times, min_size=engines, max_size=engines)
  gen = draw(st.lists(row, min_size=bundles, max_size=bundles))
  train = draw(st.lists(times, min_size=bundles, max_size=bundles))
  return Ticks(gen, train, lag=draw(st.integers(0, 8)))


@given(pipelines())
@quick
def test_the_recursion_is_what_happens_tick_by_tick(pipeline):
  loaded, end = pipeline.run()
  assert makespan(pipeline.gen, pipeline.train, pipeline.lag) == end
  for j, versions in enumerate(loaded):
    assert {j - version for version in versions} == {min(j, pipeline.lag)}


@given(pipelines())
@quick
def test_more_lag_is_never_slower_and_cannot_beat_the_work(pipeline):
  ends = [makespan(pipeline.gen, pipeline.train, lag) for lag in range(9)]
  assert ends == sorted(ends, reverse=True)
  assert ends[-1] >= max(sum(pipeline.train), *np.sum(pipeline.gen, axis=0))
  assert ends[0] == np.max(pipeline.gen, axis=1).sum() + sum(pipeline.train)


# --- who is trained on: dispatch order, and its rivals ---------------------------------


def train_on(rule, ticks, *, batch, bound, updates, concurrent):
  """Groups in a pool, one update a tick where `batch` groups are to be had.

  rule:
    'dispatch': bundle j is started once version max(0, j - bound) is there, and step j
      trains on it and nothing else.
    'first': what finished first is trained on, whatever its age.
    'discard': so, but what is older than the bound is dropped and asked again.

  Returns:
    (prompt, lag) of all that was trained on.
  """
  queue, running, finished, trained = list(range(len(ticks))), [], [], []
  drawn = version = tick = 0
  while version < updates:
    while queue and len(running) < concurrent:
      bundle = drawn // batch
      if rule == 'dispatch' and version_for(bundle, bound) > version:
        break
      began = version_for(bundle, bound) if rule == 'dispatch' else version
      prompt = queue.pop(0)
      running.append((tick + ticks[prompt], bundle, prompt, began))
      drawn += 1
    tick += 1
    finished += [r for r in running if r[0] <= tick]
    running = [r for r in running if r[0] > tick]
    if rule == 'discard':
      queue += [r[2] for r in finished if version - r[3] > bound]
      finished = [r for r in finished if version - r[3] <= bound]
    ready = finished
    if rule == 'dispatch':
      ready = [r for r in finished if r[1] == version]
    if len(ready) >= batch:
      taken = ready[:batch]
      finished = [r for r in finished if r not in taken]
      trained += [(prompt, version - began) for _, _, prompt, began in taken]
      queue += [prompt for _, _, prompt, _ in taken]  # its turn comes again
      version += 1
  return trained


PROMPTS = np.random.default_rng(0).permutation([1, 4] * 16).tolist()  # ticks of each
FAULT_D4 = dict(batch=4, bound=2, updates=200, concurrent=32)


def test_dispatch_order_starves_nobody():
  """Fault D4: half of the prompts take 4 ticks, bound 2, 200 updates."""
  trained = train_on('dispatch', PROMPTS, **FAULT_D4)
  slow = np.mean([PROMPTS[prompt] == 4 for prompt, _ in trained])
  assert 0.475 <= slow <= 0.525
  assert set(Counter(prompt for prompt, _ in trained).values()) == {25}  # 800 / 32
  assert max(lag for _, lag in trained) == 2


def test_discarding_what_is_old_starves_the_slow():
  """Fast ones make an update a tick, so that 4 ticks are too old: for ever."""
  trained = train_on('discard', PROMPTS, **FAULT_D4)
  assert max(lag for _, lag in trained) <= 2
  assert {PROMPTS[prompt] for prompt, _ in trained} == {1}


def test_first_finished_without_a_check_of_age_breaks_the_bound():
  """The guard of the guard: one that takes 30 ticks is overtaken."""
  ticks = [30] + [1] * 31
  admit = dict(batch=4, bound=2, updates=50, concurrent=12)
  assert max(lag for _, lag in train_on('first', ticks, **admit)) > 2
  assert max(lag for _, lag in train_on('dispatch', ticks, **admit)) == 2


def test_admission_after_a_resume():
  """Fault D3: batch 8, bound 1, version 50, nothing in flight: bundles 50 and 51.

  Where versions go on but the count of what was accepted begins anew, admission by
  count would let in (1 + 50 + 1) * 8 - 0 = 416.
  """
  admitted = [j for j in range(50, 200) if version_for(j, 1) <= 50]
  assert 8 * len(admitted) == 16
  for version in range(51, 111):  # and one bundle a step from there
    now = [j for j in range(version, 200) if version_for(j, 1) <= version]
    assert now == [version, version + 1]


# --- the table of 3.6 ------------------------------------------------------------------

SLOTS = 8


def arrival(lengths):
  """Answer i on engine i mod 4, static minibatches in order of arrival."""
  return [
    sum(max(lengths[e::4][k : k + SLOTS]) for k in range(0, 32, SLOTS))
    for e in range(4)
  ]


def planned(lengths, minibatch):
  ones = np.ones(len(lengths))
  shares = asp.shares(ones, lengths, lengths, 4, minibatch=minibatch)
  return [asp.predicted_generation(s, lengths, lengths, SLOTS) for s in shares]


PLANS = {
  'static, arrival': (arrival, 608_969, 337_586, 0.61),
  'static, sorted': (lambda x: planned(x, SLOTS), 408_722, 248_522, 0.18),
  'refill': (lambda x: planned(x, None), 406_718, 248_457, 0.16),
}


@pytest.mark.parametrize('plan', PLANS)
def test_the_table(plan):
  """To the digits printed there; 3 % is asked for."""
  rule, synchronous, lag_one, idle = PLANS[plan]
  ends, idles = [], []
  for seed in range(8):
    z = np.random.default_rng(seed).standard_normal((40, 128))
    lengths = np.minimum(np.ceil(500 * np.exp(0.8 * z)), 8192)
    gen = np.array([rule(bundle) for bundle in lengths])
    ends.append([makespan(gen, [6000] * 40, lag) for lag in (0, 1)])
    idles.append(1 - lengths.sum() / (SLOTS * gen.sum()))
  assert np.mean(ends, axis=0) == pytest.approx([synchronous, lag_one], rel=1e-4)
  assert np.mean(idles) == pytest.approx(idle, abs=0.006)
