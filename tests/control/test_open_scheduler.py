"""The open pool under the loop: batches, counts that add up, and exact resume."""

import collections
import random

import numpy as np
import pytest
from toys import through_files

from jaxrl_sched import loop
from jaxrl_sched.control.asp import Asp
from jaxrl_sched.control.lengths import LengthPredictor
from jaxrl_sched.control.open_scheduler import OpenScheduler
from jaxrl_sched.control.pool import EngineClock
from jaxrl_sched.control.sagc import SAGC
from jaxrl_sched.control.scheduler import Scheduler
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.control.source import Source
from jaxrl_sched.engine import InFlight, Report, Stopped
from jaxrl_sched.host.pruning import AnswerPruner, PromptPruner
from jaxrl_sched.types import Completion, Group, Sampling
from tests.schedules import prompt_of

LIMIT = 60
SIZES = {'a': 400, 'b': 200}


def length_of(draw: int, answer: int) -> int:
  """Long-tailed, mean about 10."""
  z = random.Random(f'{draw}/{answer}').gauss(2.0, 0.8)
  return max(1, min(LIMIT, round(np.exp(z))))


def verdict_of(draw: int, answer: int) -> float:
  rate = random.Random(f'p{draw}').choice([0.0, 0.5, 0.5, 1.0])
  return float(random.Random(f'v{draw}/{answer}').random() < rate)


class PaperEngine:
  """Engines whose answers are a function of (draw, answer), graded late at random.

  Args:
    late: draws how many calls of `advance` a grade takes; None: none.
    stop: after so many calls of `advance` in all.
  """

  def __init__(self, engines=2, slots=8, chunk=2, *, late=None, stop=None):
    self.step, self.saved, self.lags = 0, {}, []
    self.clocks = [EngineClock(slots, chunk) for _ in range(engines)]
    self._late, self._stop, self._calls = late, stop, 0
    self._requests, self._made, self._segments = {}, {}, {}
    self._grading: list[tuple[int, Group]] = []
    self._version, self._batches = 0, []

  def agree(self, make):
    return make()

  def compare(self, what, make):
    make()

  def now(self):
    return 0.0

  def spans(self):
    return []

  def begin_fill(self, fill, version):
    assert fill == self.step and version <= self.step
    self._version = version

  def feed(self, plan):
    for request in plan.requests:
      self._requests[request.draw] = request
      self._segments |= {(request.draw, k): [] for k in range(request.size)}
    for clock, share in zip(self.clocks, plan.shares, strict=True):
      requests, answers = share.requests.tolist(), share.answers.tolist()
      clock.put(
        (plan.requests[i].draw, k) for i, k in zip(requests, answers, strict=True)
      )

  def advance(self, tick):
    self._calls += 1
    if self._calls == self._stop:
      raise Stopped
    reports = []
    for e, clock in enumerate(self.clocks):
      if clock.tick < tick:
        reports.append(self._decode(e, clock))
    self._grading = [(wait - 1, group) for wait, group in self._grading]
    groups = [group for wait, group in self._grading if wait <= 0]
    self._grading = [pair for pair in self._grading if pair[0] > 0]
    return reports, sorted(groups, key=lambda group: group.request.draw)

  def _decode(self, e, clock):
    started = [(clock.tick, key[0]) for _, key in clock.start()]
    ended, over = [], []
    for slot, (draw, k) in sorted(clock.running.items()):
      segments = self._segments[draw, k]
      before = sum(n for n, _ in segments)
      new = min(clock.chunk, length_of(draw, k) - before)
      if segments and segments[-1][1] == self._version:
        segments[-1] = segments[-1][0] + new, self._version
      else:
        segments.append((new, self._version))
      if before + new == length_of(draw, k):
        over.append(slot)
        ended.append((clock.tick + new, draw))
        self._made[draw, k] = None
    clock.advance(over)
    for draw in dict.fromkeys(draw for _, draw in ended):
      request = self._requests[draw]
      if all((draw, k) in self._made for k in range(request.size)):
        wait = 0 if self._late is None else self._late.randrange(12)
        self._grading.append((wait, self._group(request)))
    return Report(engine=e, tick=clock.tick, started=started, ended=ended)

  def _completion(self, draw, k, finish):
    segments = self._segments[draw, k]
    count = sum(n for n, _ in segments)
    return Completion(
      draw=draw,
      answer=k,
      tokens=np.arange(count, dtype=np.int32) + 1000 * draw + k,
      logps=np.full(count, -1 / 3, np.float32),
      finish=finish,
      version=segments[-1][1] if segments else self._version,
      earlier=tuple(segments[:-1]),
    )

  def _group(self, request):
    draw = request.draw
    verdicts = np.array([verdict_of(draw, k) for k in range(request.size)], np.float32)
    return Group(
      request=request,
      completions=tuple(
        self._completion(draw, k, 'length' if length_of(draw, k) == LIMIT else 'stop')
        for k in range(request.size)
      ),
      verdicts=verdicts,
      rewards=verdicts,
      faults=(None,) * request.size,
    )

  @classmethod
  def of_one(cls, request, version):
    """The group of a request, all of it of one version."""
    engine, draw = cls(), request.draw
    for k in range(request.size):
      engine._segments[draw, k] = [(length_of(draw, k), version)]
    return engine._group(request)

  def suspend(self):
    for clock in self.clocks:
      clock.compact()
    given = {group.request.draw for _, group in self._grading}
    open_ones = {
      draw
      for draw, request in self._requests.items()
      if draw in given or any((draw, k) not in self._made for k in range(request.size))
    }
    completions = {
      (draw, k): self._completion(
        draw, k, 'stop' if (draw, k) in self._made else 'paused'
      )
      for (draw, k), segments in self._segments.items()
      if draw in open_ones and segments
    }
    found = InFlight(
      tick=self.clocks[0].tick,
      requests=[self._requests[draw] for draw in sorted(open_ones)],
      completions=completions,
      running=[
        [clock.running[slot] for slot in sorted(clock.running)] for clock in self.clocks
      ],
      queued=[list(clock.queue) for clock in self.clocks],
    )
    return lambda: found

  def resume(self, in_flight):
    self._requests = {request.draw: request for request in in_flight.requests}
    self._segments = {
      (request.draw, k): []
      for request in in_flight.requests
      for k in range(request.size)
    }
    for key, c in in_flight.completions.items():
      rest = len(c.tokens) - sum(n for n, _ in c.earlier)
      self._segments[key] = [*c.earlier, (rest, c.version)]
      if c.finish != 'paused':
        self._made[key] = None
    engines = zip(self.clocks, in_flight.running, in_flight.queued, strict=True)
    for clock, running, queued in engines:
      clock.tick = in_flight.tick
      clock.put(running)
      clock.start()
      clock.put(queued)
    for request in in_flight.requests:
      if all((request.draw, k) in self._made for k in range(request.size)):
        self._grading.append((0, self._group(request)))

  def learn(self, lesson):
    self._batches.append(lesson)
    self.lags.append(
      [
        self.step - version
        for group in lesson.groups
        for c in group.completions
        for version in c.versions.tolist()
      ]
    )
    self.step += 1
    return {'update/skipped': float(not lesson.groups)}

  def save(self, control, *, score):
    self.saved[self.step] = through_files(control)


class Book:
  """Keeps what the loop records."""

  def __init__(self):
    self.metrics, self.lines = {}, collections.defaultdict(list)

  def log(self, step, metrics):
    self.metrics[step] = {k: v for k, v in metrics.items() if not k.startswith('time/')}

  def rollouts(self, step, lines):
    self.lines[step] += lines

  def samples(self, step, lines):
    pass

  def timeline(self, step, spans):
    pass

  def say(self, text):
    pass

  def flush(self):
    pass


def make(of=OpenScheduler, **settings):
  asp = settings.pop('asp', Asp(engines=2))
  weights = settings.pop('weights', {'a': 2.0, 'b': 1.0})
  snooze = Snooze(SIZES, weights, settings.pop('factor', 2.0), seed=3)
  settings = dict(groups_per_step=12, group_size=4, slots=8, barrier=False) | settings
  if of is OpenScheduler:
    settings['chunk'] = 2
  sampling = Sampling(max_new_tokens=LIMIT)
  return of(Source(snooze), prompt_of, sampling, asp=asp, **settings)


def train(engine, scheduler, *, steps=8, save_every=100, book=None):
  book = Book() if book is None else book
  loop.train(
    engine,
    scheduler,
    book,
    steps=steps,
    save_every=save_every,
    evaluate_every=steps,
    evaluate=None,
  )
  return book


def everything():
  """Many controllers at once."""
  return dict(
    sagc=SAGC(sizes=(2, 4, 8), start=4),
    lengths=LengthPredictor(SIZES, limit=LIMIT),
    prompt_pruner=PromptPruner(SIZES, rate=0.3, regime='fill', steps=8),
    answer_pruner=AnswerPruner(rate=0.3, steps=8, seed=0),
    asp=Asp(engines=2, lag=1),
  )


SETTINGS = {
  'plain': dict,
  'everything': everything,
  'one stream of all': lambda: dict(quotas=False),
  'no dynamic sampling': lambda: dict(dynamic_sampling=False),
  'sizes of prompts': lambda: dict(
    sagc=SAGC(
      (2, 4, 8), start=4, prompt_aware=True, lambda_max=99.0, delta=0.05, eta=2.0
    ),
    lengths=LengthPredictor(SIZES, limit=LIMIT),
  ),
}


def seen(book):
  return book.metrics, dict(book.lines)


@pytest.mark.parametrize('name', SETTINGS)
def test_every_group_has_one_fate_and_counts_add_up(name):
  engine, scheduler = PaperEngine(), make(**SETTINGS[name]())
  book = train(engine, scheduler)
  draws = [line['draw'] for lines in book.lines.values() for line in lines]
  assert len(draws) == len(set(draws))
  for what in ('groups', 'answers', 'tokens'):
    total = collections.Counter()
    for step in range(8):
      m = book.metrics[step]
      for fate in ('generated', 'trained', 'pruned', 'filtered', 'dropped'):
        total[fate] += m[f'rollout/{what}_{fate}']
      ended = sum(total[f] for f in ('trained', 'pruned', 'filtered', 'dropped'))
      assert total['generated'] == ended + m[f'rollout/{what}_pending']
  trained = [len(batch.groups) for batch in engine._batches]
  assert len(trained) == 8 and min(trained) > 0


def test_batches_hold_their_rollouts_and_shares():
  engine = PaperEngine()
  train(engine, make(), steps=20)
  of = collections.Counter()
  for batch in engine._batches:
    assert sum(group.size for group in batch.groups) == 48
    of.update(group.request.prompt.dataset for group in batch.groups)
    for group in batch.groups:
      assert 0 < group.verdicts.mean() < 1
  assert of == {'a': 160, 'b': 80}


def test_many_streams_with_less_than_a_group_each_take_turns():
  sizes = {f's{i}': 60 for i in range(20)}
  snooze = Snooze(sizes, dict.fromkeys(sizes, 1.0), 2.0, seed=3)
  how = dict(groups_per_step=6, group_size=4, slots=8, chunk=2, barrier=False)
  sampling = Sampling(max_new_tokens=LIMIT)
  engine = PaperEngine(engines=1)
  scheduler = OpenScheduler(Source(snooze), prompt_of, sampling, **how)
  train(engine, scheduler, steps=10)
  taken = [g.request.prompt.dataset for batch in engine._batches for g in batch.groups]
  assert set(collections.Counter(taken).values()) == {3}  # 60 groups of 20 streams


def test_sizes_of_prompts_average_the_rollouts():
  engine = PaperEngine()
  train(engine, make(**SETTINGS['sizes of prompts']()), steps=20)
  rollouts = [sum(g.size for g in batch.groups) for batch in engine._batches]
  assert abs(sum(rollouts) - 48 * 20) < 8
  assert len({g.size for batch in engine._batches for g in batch.groups}) > 1


@pytest.mark.parametrize('lag', [0, 1, 2])
def test_no_token_is_younger_than_its_fill_and_versions_never_fall(lag):
  engine = PaperEngine()
  train(engine, make(asp=Asp(engines=2, lag=lag)), steps=12)
  for batch in engine._batches:
    for group in batch.groups:
      for c in group.completions:
        assert (np.diff(c.versions) >= 0).all()
  assert all(min(lags) >= min(lag, step) for step, lags in enumerate(engine.lags))
  assert min(engine.lags[-1]) == lag  # the newest weights that there may be


@pytest.mark.parametrize('name', SETTINGS)
def test_grades_that_come_late_change_nothing(name):
  plain = train(PaperEngine(), make(**SETTINGS[name]()))
  late = PaperEngine(late=random.Random(1))
  assert seen(train(late, make(**SETTINGS[name]()))) == seen(plain)


@pytest.mark.parametrize('name', SETTINGS)
@pytest.mark.parametrize('stop', [1, 7, 40, 90])
def test_a_run_that_was_stopped_continues_as_if_it_had_not_been(name, stop):
  whole = train(PaperEngine(), make(**SETTINGS[name]()))
  engine, book = PaperEngine(stop=stop, late=random.Random(stop)), Book()
  train(engine, make(**SETTINGS[name]()), book=book)
  assert list(engine.saved) == [engine.step] and engine.step < 8
  again, scheduler = PaperEngine(), make(**SETTINGS[name]())
  again.step = engine.step
  scheduler.load_state_dict(engine.saved[engine.step])
  train(again, scheduler, book=book)
  assert seen(book) == seen(whole)


def test_a_checkpoint_is_one_of_the_run_whenever_it_is_made():
  engine = PaperEngine()
  whole = train(engine, make(), save_every=3)
  assert sorted(engine.saved) == [3, 6, 8]
  for step in (3, 6):
    again, scheduler = PaperEngine(), make()
    again.step = step
    scheduler.load_state_dict(engine.saved[step])
    book = train(again, scheduler)
    assert book.metrics == {s: m for s, m in whole.metrics.items() if s >= step}


@pytest.mark.parametrize(
  'settings, word',
  [
    (dict(asp=Asp(lag=1, window=2, train_cost=1.0)), 'asp.window=2'),
    (dict(asp=Asp(refill=False)), 'asp.refill=False'),
    (dict(asp=Asp(spare=1)), 'relief'),
    (dict(sagc=SAGC(sizes=(4, 8), start=4, mode='any')), "sagc.mode 'batch' or 'any'"),
    (
      dict(prompt_pruner=PromptPruner(SIZES, rate=0.3, regime='fixed_candidates')),
      'fixed_candidates',
    ),
  ],
)
def test_what_needs_a_barrier_is_refused(settings, word):
  if 'window' in word:
    settings['lengths'] = LengthPredictor(SIZES, limit=LIMIT)
  with pytest.raises(
    ValueError, match=f'scheduler.barrier: False, expected True.*{word}'
  ):
    make(**settings)


def test_a_checkpoint_with_a_barrier_is_named():
  engine, scheduler = PaperEngine(), make()
  train(engine, scheduler, steps=1, save_every=1)
  state = engine.saved[1]
  rest = {k: v for k, v in state['pending'].items() if k != 'pool'}
  with pytest.raises(ValueError, match='scheduler.barrier'):
    make().load_state_dict(state | {'pending': rest})


def test_what_was_asked_for_has_a_line_or_is_in_flight():
  engine, scheduler = PaperEngine(), make()
  book = train(engine, scheduler, steps=5)
  asked = {r.draw for r in engine._requests.values()}
  lines = {line['draw'] for lines in book.lines.values() for line in lines}
  in_flight = set(scheduler._pool.in_flight)
  assert asked == lines | in_flight and not lines & in_flight
  # What engines hold is in flight; the rest of it is graded, but not known of yet.
  assert {r.draw for r in engine.suspend()().requests} <= in_flight


# --- with a barrier ---

BARRIER = {
  'two streams': dict,
  'one stream': lambda: dict(weights={'a': 1.0, 'b': 0.0}),
  'long sleeps': lambda: dict(factor=5.0),
  'no dynamic sampling': lambda: dict(dynamic_sampling=False),
  'sagc': lambda: dict(sagc=SAGC((2, 4, 8), start=4)),
  'dppo': lambda: dict(
    prompt_pruner=PromptPruner(SIZES, rate=0.3, regime='fill', steps=8),
    answer_pruner=AnswerPruner(rate=0.3, steps=8, seed=0),
  ),
  'fixed candidates': lambda: dict(
    dynamic_sampling=False,
    prompt_pruner=PromptPruner(SIZES, rate=0.3, regime='fixed_candidates', steps=8),
  ),
  'two rounds': lambda: dict(max_rounds=2),
}


class Decisions(PaperEngine):
  """Writes down what is asked for."""

  def __init__(self):
    super().__init__(engines=1)
    self.rounds = []

  def begin_fill(self, fill, version):
    super().begin_fill(fill, version)
    self.rounds.append([])

  def feed(self, plan):
    super().feed(plan)
    self.rounds[-1].append([(r.draw, r.prompt.id, r.size) for r in plan.requests])


def of_rounds(steps, **settings):
  """What `Scheduler` decides, which knows no pool."""
  s, found = make(of=Scheduler, asp=Asp(), barrier=True, **settings), []
  for step in range(steps):
    rounds = []
    while plan := s.plan(step):
      s.sent(plan)
      rounds.append([(r.draw, r.prompt.id, r.size) for r in plan.requests])
      s.observe([PaperEngine.of_one(r, step) for r in plan.requests])
    lesson = s.take_batch(step)
    metrics, _ = s.close(step)
    found.append((rounds, sorted(g.request.draw for g in lesson.groups), metrics))
  return found


@pytest.mark.parametrize('name', BARRIER)
def test_with_a_barrier_decisions_are_those_of_rounds(name):
  engine, steps = Decisions(), 8
  book = train(engine, make(asp=Asp(), barrier=True, **BARRIER[name]()), steps=steps)
  for step, (rounds, draws, metrics) in enumerate(of_rounds(steps, **BARRIER[name]())):
    assert engine.rounds[step] == rounds
    assert [g.request.draw for g in engine._batches[step].groups] == draws
    assert metrics.items() <= book.metrics[step].items()


def test_with_a_barrier_no_answer_has_two_versions_and_nothing_is_in_flight():
  engine = PaperEngine()
  book = train(engine, make(asp=Asp(engines=2, lag=1), barrier=True), steps=6)
  for step, batch in enumerate(engine._batches):
    for group in batch.groups:
      assert {v for c in group.completions for v in c.versions} == {max(0, step - 1)}
    assert book.metrics[step]['rollout/answers_in_flight'] == 0


@pytest.mark.parametrize('stop', [1, 5, 30])
def test_with_a_barrier_a_stop_changes_nothing(stop):
  whole = train(PaperEngine(), make(barrier=True))
  engine, book = PaperEngine(stop=stop, late=random.Random(stop)), Book()
  train(engine, make(barrier=True), book=book)
  again, scheduler = PaperEngine(), make(barrier=True)
  again.step = engine.step
  scheduler.load_state_dict(engine.saved[engine.step])
  train(again, scheduler, book=book)
  assert seen(book) == seen(whole)
