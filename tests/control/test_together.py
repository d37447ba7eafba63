"""The controllers together: sums that hold, resumes that change nothing, absence."""

import collections
import dataclasses
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from toys import graded, through_files, written

from jaxrl_sched.control.asp import Asp
from jaxrl_sched.control.difficulty import Tiers
from jaxrl_sched.control.lengths import LengthPredictor
from jaxrl_sched.control.sagc import SAGC
from jaxrl_sched.control.scheduler import Scheduler
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.control.source import Source
from jaxrl_sched.host.advantages import group_advantages
from jaxrl_sched.host.pruning import AnswerPruner, PromptPruner
from jaxrl_sched.types import Prompt, Sampling

SIZES = {'a': 40, 'b': 11}
WEIGHTS = {'a': 1.0, 'b': 1.0}
STEPS = 8
LIMIT = 64


def prompt_of(dataset, index):
  return Prompt(
    id=f'{dataset}/{index}',
    dataset=dataset,
    index=index,
    tokens=np.arange(1 + index % 5, dtype=np.int32),
    text='',
  )


@dataclasses.dataclass(frozen=True)
class Methods:
  """Which of them are on."""

  dynamic: bool = True
  factor: float = 0.0
  tiers: bool = False
  sagc: str | None = None  # 'rollouts', 'prompts' or 'by prompt'
  lengths: bool = False
  prompts: str | None = None  # a regime
  answers: str | None = None  # a rule
  surplus: str = 'carry'
  max_rounds: int = 3
  overlong: bool = False
  quotas: bool = True
  borrow: bool = False
  lag: int = 0
  window: int = 1
  engines: int = 1
  spare: int = 0
  pause_after: int = 0

  @property
  def asp(self) -> Asp:
    """Without what is refused."""
    alike = self.quotas and not self.tiers and not self.sagc
    by_prompt = self.sagc == 'by prompt'
    pause_after = 0 if by_prompt or self.spare else self.pause_after
    return Asp(
      lag=self.lag,
      window=self.window if alike and not pause_after else 1,
      order='levelled' if alike and not pause_after and self.window > 1 else 'shuffled',
      engines=self.engines,
      spare=self.spare,
      pause_after=pause_after,
    )

  def scheduler(self, steps: int = STEPS) -> Scheduler:
    tiers, sizes, weights = None, SIZES, WEIGHTS
    if self.tiers:
      rates = {'a': np.linspace(0, 1, 40), 'b': np.full(11, np.nan)}
      tiers = Tiers(rates, WEIGHTS, steps=STEPS)
      sizes = {stream: len(i) for stream, (_, i) in tiers.streams().items()}
      weights = tiers.weights(0)
    sagc = None
    if self.sagc:
      by_prompt = self.sagc == 'by prompt'
      hold = 'rollouts' if by_prompt else self.sagc
      how = dict(hold=hold, prompt_aware=by_prompt, start=4, tau=1.2, eta=2.0)
      sagc = SAGC(sizes=(2, 4, 8), **how)
    pruner = None
    if self.prompts:
      how = dict(regime=self.prompts, dynamic_sampling=self.dynamic, steps=STEPS)
      pruner = PromptPruner(sizes, rate=0.5, **how)
    answers = None
    if self.answers:
      answers = AnswerPruner(rate=0.5, rule=self.answers, steps=STEPS, seed=0)
    return Scheduler(
      Source(Snooze(sizes, weights, self.factor), tiers),
      prompt_of,
      Sampling(max_new_tokens=LIMIT),
      groups_per_step=6,
      group_size=4,
      dynamic_sampling=self.dynamic,
      max_rounds=None if self.lag or self.asp.pause_after else self.max_rounds,
      surplus=self.surplus,
      asp=self.asp,
      steps=steps,
      overlong_filter=self.overlong,
      quotas=self.quotas or self.sagc == 'by prompt',
      borrow=self.borrow and self.quotas and self.sagc != 'by prompt',
      sagc=sagc,
      lengths=LengthPredictor(SIZES, limit=LIMIT) if self.lengths else None,
      prompt_pruner=pruner,
      answer_pruner=answers,
      advantages_of=group_advantages,
    )


def plain(sizes, *, factor=0.0, **settings) -> Scheduler:
  """Nothing but snoozing, and datasets of one weight."""
  snooze = Snooze(sizes, dict.fromkeys(sizes, 1.0), factor)
  return Scheduler(Source(snooze), prompt_of, Sampling(max_new_tokens=4), **settings)


def answered(request, version):
  """A third of the prompts is easy, a third hard; answers are of all lengths."""
  rng = np.random.default_rng((5, request.draw))
  p = (0.99, 0.5, 0.1)[request.prompt.index % 3]
  asked = request.size + request.relief.spare
  verdicts = rng.random(asked) < p
  lengths = np.minimum(LIMIT, 1 + rng.geometric(0.05, asked)).tolist()
  spares = tuple(lengths[request.size :])
  group = graded(request, verdicts[: request.size], version=version)
  before = {c.answer: c for c in request.begun}
  completions = tuple(
    _completed(c, n, before.get(c.answer), request.relief.pause_after)
    for c, n in zip(group.completions, lengths, strict=False)
  )
  kept = slice(0, 1 if request.draw % 17 == 3 else request.size)  # aborted but for one
  return dataclasses.replace(
    group,
    completions=completions[kept],
    verdicts=group.verdicts[kept],
    rewards=group.rewards[kept],
    faults=group.faults[kept],
    spares=spares,
  )


def _completed(completion, length, before, pause_after):
  """An answer of this length, or as far as it gets in one bundle."""
  made = 0 if before is None else len(before.tokens)
  if made == length:
    return before
  now = min(length, made + pause_after) if pause_after else length
  finish = 'length' if now == LIMIT else 'stop'
  earlier = () if before is None else (*before.earlier,)
  if before is not None:
    earlier += ((made - sum(count for count, _ in earlier), before.version),)
  return dataclasses.replace(
    completion,
    tokens=np.arange(now, dtype=np.int32),
    logps=np.full(now, -1 / 3, np.float32),
    finish=finish if now == length else 'paused',
    earlier=earlier,
  )


class Paper:
  """Answers on paper; what is under way is a list."""

  def __init__(self):
    self.plans = []  # those under way

  def submit(self, plan):
    self.plans.append(plan)

  def collect(self, bundle):
    mine = [plan for plan in self.plans if plan.step == bundle]
    self.plans = [plan for plan in self.plans if plan.step != bundle]
    return [answered(r, plan.version) for plan in mine for r in plan.requests]

  def drain(self, before):
    bundles = sorted({plan.step for plan in self.plans if plan.step < before})
    return {bundle: self.collect(bundle) for bundle in bundles}


def step_of(scheduler, step, paper):
  rounds = []
  while True:
    while plan := scheduler.plan(step):
      scheduler.sent(plan)
      paper.submit(plan)
      rounds.append(plan)
    if not scheduler.is_awaiting(step):
      break
    groups = scheduler.waiting(step)
    scheduler.observe(paper.collect(step) if groups is None else groups)
  lesson = scheduler.take_batch(step)
  scheduler.observe([])  # as the loop does where nothing is late
  return rounds, lesson, *scheduler.close(step)


def early_step_of(scheduler, step, paper):
  """As `step_of`, but what comes after enough is heard of when it has been learned."""
  rest = []
  while True:
    while plan := scheduler.plan(step):
      assert not rest
      scheduler.sent(plan)
      paper.submit(plan)
    if not scheduler.is_awaiting(step):
      break
    groups = paper.collect(step)
    ends = (n for n in range(len(groups)) if scheduler.enough(groups[:n]))
    first = next(ends, len(groups))
    scheduler.observe(groups[:first])
    rest = groups[first:]
  lesson = scheduler.take_batch(step)
  scheduler.observe(rest)
  return lesson, *scheduler.close(step), len(rest)


METHODS = st.builds(
  Methods,
  factor=st.sampled_from([0.0, 2.0, np.inf]),
  tiers=st.booleans(),
  sagc=st.sampled_from([None, 'rollouts', 'prompts', 'by prompt']),
  lengths=st.just(True),
  prompts=st.sampled_from([None, 'fill']),
  answers=st.sampled_from([None, 'fixed', 'coins', 'balanced']),
  surplus=st.sampled_from(['carry', 'drop']),
  max_rounds=st.integers(1, 4),
  overlong=st.booleans(),
  quotas=st.booleans(),
  borrow=st.booleans(),
  lag=st.integers(0, 2),
  window=st.sampled_from([1, 2, 3]),
  engines=st.integers(1, 3),
  spare=st.sampled_from([0, 0, 2]),
  pause_after=st.sampled_from([0, 0, 12]),
)
STATIC = st.builds(
  Methods,
  dynamic=st.just(False),
  factor=st.sampled_from([0.0, 2.0]),
  tiers=st.booleans(),
  sagc=st.sampled_from([None, 'rollouts', 'prompts', 'by prompt']),
  lengths=st.just(True),
  prompts=st.sampled_from([None, 'fill', 'fixed_candidates']),
  answers=st.sampled_from([None, 'fixed']),
  overlong=st.booleans(),
  lag=st.integers(0, 2),
  window=st.sampled_from([1, 2, 3]),
  spare=st.sampled_from([0, 0, 2]),
  pause_after=st.sampled_from([0, 0, 12]),
)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(METHODS | STATIC, st.integers(0, STEPS - 1))
def test_sums_hold_and_a_resume_changes_nothing(methods, cut):
  """5.4, tests 1 and 2: the ledger's identities for groups, answers and tokens, for
  any combination of methods, and the same run after a checkpoint anywhere."""
  whole, resumed = methods.scheduler(), methods.scheduler()
  paper, paper2, lag = Paper(), Paper(), methods.lag
  total, asked, counted = collections.Counter(), set(), collections.Counter()
  for step in range(STEPS):
    if step == cut:
      resumed.keep(paper2.drain(step + lag))
      state = through_files(resumed.state_dict())
      resumed, paper2 = methods.scheduler(), Paper()
      resumed.load_state_dict(state)
    rounds, lesson, metrics, lines = step_of(whole, step, paper)
    again = step_of(resumed, step, paper2)
    assert metrics == again[2] and lines == again[3]
    for ours, theirs in zip(lesson.keep, again[1].keep, strict=True):
      np.testing.assert_array_equal(ours, theirs)
    requests = [request for plan in rounds for request in plan.requests]
    asked.update(request.draw for request in requests)
    for plan in rounds:  # 3.2
      assert plan.version == max(0, plan.step - lag) <= step <= plan.step
      _check_shares(plan, methods)
    counted.update(line['draw'] for line in lines)
    for what in ('groups', 'answers', 'tokens'):
      total[what] += metrics[f'rollout/{what}_generated']
      for fate in ('trained', 'pruned', 'filtered', 'dropped'):
        total[what] -= metrics[f'rollout/{what}_{fate}']
      assert total[what] == metrics[f'rollout/{what}_pending'], what
    # Who is in the batch, and with how much.
    for name in SIZES if methods.tiers else ():
      tiers = [v for k, v in metrics.items() if k.startswith(f'tiers/share/{name}/')]
      assert sum(tiers) == pytest.approx(float(metrics.get(f'share/{name}', 0) > 0))
    assert len({id(group) for group in lesson.groups}) == len(lesson.groups)
    for group, keep in zip(lesson.groups, lesson.keep, strict=True):
      assert keep.shape == (group.size,) and (keep >= 0).all() and keep.any()
  # Every request is accounted for, once.
  pending = [line['draw'] for line in whole.pending()]
  assert asked == set(range(len(asked)))
  assert counted + collections.Counter(pending) == collections.Counter(asked)


def _check_shares(plan, methods):
  """Every answer that is to be sampled is on one engine, once."""
  places = [
    (i, k)
    for share in plan.shares
    for i, k in zip(share.requests.tolist(), share.answers.tolist(), strict=True)
  ]
  missing = [
    (i, k)
    for i, request in enumerate(plan.requests)
    for k in range(request.size + methods.spare)
    if not request.begun
    or k in {c.answer for c in request.begun if c.finish == 'paused'}
  ]
  assert sorted(places) == missing and len(plan.shares) == methods.engines


@settings(derandomize=True, deadline=None, max_examples=40)
@given(METHODS | STATIC)
def test_surplus_that_is_heard_of_late_changes_nothing(methods):
  """E6: an update need not wait for grades of what will not be in it."""
  whole, early, late = methods.scheduler(), methods.scheduler(), 0
  paper, paper2 = Paper(), Paper()
  for step in range(STEPS):
    _, lesson, metrics, lines = step_of(whole, step, paper)
    again, metrics2, lines2, rest = early_step_of(early, step, paper2)
    draws = [group.request.draw for group in lesson.groups]
    assert draws == [group.request.draw for group in again.groups]
    assert metrics == metrics2 and lines == lines2
    late += rest
  assert written(whole.state_dict()) == written(early.state_dict())
  assert not paper.plans and not paper2.plans  # nothing is planned past the end
  assert methods.dynamic or late == 0


def test_there_is_surplus_to_be_heard_of_late():
  scheduler, paper = Methods(max_rounds=2).scheduler(), Paper()
  assert sum(early_step_of(scheduler, step, paper)[3] for step in range(STEPS)) > 3


@settings(derandomize=True, deadline=None, max_examples=30)
@given(METHODS | STATIC)
def test_plans_are_pure(methods):
  scheduler, paper = methods.scheduler(), Paper()
  for step in range(3):
    before = written(scheduler.state_dict())
    plan, again = scheduler.plan(step), scheduler.plan(step)
    if plan is None:  # carried groups fill the batch
      assert again is None
      step_of(scheduler, step, paper)
      continue
    assert again.visits == plan.visits and again.draws == plan.draws
    for ours, theirs in zip(plan.requests, again.requests, strict=True):
      for field in ('draw', 'size', 'weight', 'predicted_length', 'exceedance'):
        assert getattr(ours, field) == getattr(theirs, field), field
      assert ours.prompt.id == theirs.prompt.id
    assert written(scheduler.state_dict()) == before
    step_of(scheduler, step, paper)


def decisions(methods, steps=STEPS):
  scheduler, found = methods.scheduler(), []
  for step in range(steps):
    rounds, lesson, _, _ = step_of(scheduler, step, Paper())
    found.append(
      (
        [[(r.draw, r.prompt.id, r.size, r.weight) for r in p.requests] for p in rounds],
        [group.request.draw for group in lesson.groups],
        [keep.tolist() for keep in lesson.keep],
        lesson.count,
      )
    )
  return found


def test_absent_is_absent():
  """5.4, test 3: a block that is on but can do nothing decides as if it were absent."""
  plain = decisions(Methods())
  assert decisions(Methods(lengths=True)) == plain
  assert decisions(Methods(tiers=True)) != plain
  assert decisions(Methods(sagc='rollouts')) != plain


@pytest.mark.parametrize('dynamic', [True, False])
def test_pruning_at_rate_0_decides_like_none(dynamic):
  class Off(Methods):
    def scheduler(self):
      return Scheduler(
        Source(Snooze(SIZES, WEIGHTS, 0.0)),
        prompt_of,
        Sampling(max_new_tokens=LIMIT),
        groups_per_step=6,
        group_size=4,
        dynamic_sampling=dynamic,
        max_rounds=3,
        prompt_pruner=PromptPruner(
          SIZES, rate=0.0, regime='fill', dynamic_sampling=dynamic
        ),
        answer_pruner=AnswerPruner(rate=0.0, steps=STEPS, seed=0),
        advantages_of=group_advantages,
      )

  assert decisions(Off()) == decisions(Methods(dynamic=dynamic))


@pytest.mark.parametrize('dynamic', [True, False])
def test_sizes_of_prompts_use_the_rollouts_exactly(dynamic):
  """1.5: the sizes of a full batch sum to N, whatever they are; quotas roll."""
  methods = Methods(dynamic=dynamic, sagc='by prompt', lengths=True, max_rounds=8)
  scheduler, shares, full = methods.scheduler(30), collections.Counter(), 0
  for step in range(30):
    rounds, lesson, metrics, _ = step_of(scheduler, step, Paper())
    sizes = [group.request.size for group in lesson.groups]
    if not dynamic:
      assert sum(r.size for plan in rounds for r in plan.requests) == 24
    # 4.. of 24 rollouts are missing only where all rounds were used up.
    assert sum(sizes) == 24 or not dynamic or len(rounds) == 8
    full += sum(sizes) == 24
    shares.update(group.request.prompt.dataset for group in lesson.groups)
    if sum(sizes) == 24:
      assert abs(shares['a'] - shares['b']) <= 2
  assert full >= 10
  assert {2, 4, 8} & set(sizes)


def test_a_set_of_candidates_counts_those_that_were_pruned():
  """4.2: the denominator of fixed_candidates is the candidates, the weight 1 / pi."""
  scheduler = Methods(dynamic=False, prompts='fixed_candidates').scheduler(STEPS + 1)
  pruned = 0
  for step in range(STEPS):
    rounds, lesson, metrics, _ = step_of(scheduler, step, Paper())
    (plan,) = rounds
    visited = sum(map(len, plan.visits.values()))
    assert visited == 6
    gone = sum(draws.count(None) for draws in plan.draws.values())
    aborted = sum(group.size < 2 for group in map(_answer(step), plan.requests))
    assert lesson.count == 6 - aborted
    assert len(plan.requests) == 6 - gone
    for name in SIZES:  # weights of a dataset's kept prompts sum to its candidates
      draws = plan.draws.get(name, [])
      weights = [r.weight for r in plan.requests if r.prompt.dataset == name]
      assert sum(weights) == pytest.approx(len(draws))
    pruned += gone
  assert pruned > 0 and step_of(scheduler, STEPS, Paper())[1].count >= 5


@pytest.mark.parametrize('regime', ['fixed_candidates', 'fill'])
@pytest.mark.parametrize('window', [1, 4])
def test_each_step_of_a_window_decides_whether_it_prunes(regime, window):
  """`final` 0.25 of 8 steps: bundles 4 and 5 are pruned, 6 and 7 of their window are not;
  all four were as the first was. A step of a window prunes where one by itself does."""
  sizes = {'a': 24}
  scheduler = Scheduler(
    Source(Snooze(sizes, {'a': 1.0}, 0)),
    prompt_of,
    Sampling(max_new_tokens=LIMIT),
    groups_per_step=12,
    group_size=4,
    dynamic_sampling=False,
    prompt_pruner=PromptPruner(sizes, rate=0.6, regime=regime, final=0.25, steps=8),
    lengths=LengthPredictor(sizes, limit=LIMIT),
    asp=Asp(window=window),
    steps=8,
    advantages_of=group_advantages,
  )

  def outcome(request):  # one of three prompts has nothing to teach
    return [1.0] * 4 if request.prompt.index % 3 == 0 else [1.0, 1.0, 0.0, 0.0]

  pruned, metrics = [], {}
  for step in range(8):
    plan = scheduler.plan(step)
    scheduler.sent(plan)
    scheduler.observe([graded(r, outcome(r), version=step) for r in plan.requests])
    lesson = scheduler.take_batch(step)
    weights = [set(keep.tolist()) for keep in lesson.keep]
    pruned.append(any(w != {1.0} for w in weights))
    assert lesson.count == 12
    metrics, _ = scheduler.close(step)
    if regime == 'fill':
      assert (metrics['dppo/mean_chance/a'] < 1) == (step < 6)
  assert pruned[4] or pruned[5]  # perhaps all low ones are among the short, or long
  assert not pruned[6] and not pruned[7]


def _answer(step):
  return lambda request: answered(request, step)


def test_pruned_prompts_are_passed_over_in_their_pass():
  """4.4: a skipped candidate counts as visited: every prompt once a pass."""
  scheduler = Methods(dynamic=False, prompts='fixed_candidates').scheduler(24)
  visits = collections.Counter()
  for step in range(24):
    for plan in step_of(scheduler, step, Paper())[0]:
      for stream, visited in plan.visits.items():
        visits.update((stream, place, number) for place, number in visited)
  assert set(visits.values()) == {1}


@pytest.mark.parametrize('quotas', [True, False])
def test_weights_hold_after_filtering_with_quotas_only(quotas):
  """2.10, test 4: useful rates of 0.1 and 0.6 give 14.3 % and 85.7 % of a batch that is
  drawn half and half, and half of a batch with quotas."""
  sizes = {'hard': 4000, 'easy': 4000}
  scheduler = plain(
    sizes,
    groups_per_step=32,
    group_size=8,
    max_rounds=8,
    quotas=quotas,
    surplus='drop',
  )
  shares = []
  for step in range(60):
    while plan := scheduler.plan(step):
      scheduler.sent(plan)
      groups = []
      for request in plan.requests:
        rate = 0.1 if request.prompt.dataset == 'hard' else 0.6
        useful = np.random.default_rng(request.draw).random() < rate
        groups.append(graded(request, [0.0] * 7 + [float(useful)], version=step))
      scheduler.observe(groups)
    lesson, (metrics, _) = scheduler.take_batch(step), scheduler.close(step)
    if len(lesson.groups) == 32:
      shares.append(metrics['share/hard'])
  assert len(shares) > 30
  if quotas:
    assert set(shares) == {0.5}
  else:
    assert np.mean(shares) == pytest.approx(1 / 7, abs=0.03)


def test_borrowing_is_counted():
  """A dataset that gives nothing useful leaves the batch short, or others fill it."""

  def run(borrow):
    sizes = {'a': 50, 'b': 50}
    scheduler = plain(
      sizes,
      groups_per_step=4,
      group_size=2,
      max_rounds=1,
      borrow=borrow,
    )
    plan = scheduler.plan(0)
    scheduler.sent(plan)
    solved = {'a': [1, 0], 'b': [1, 1]}
    groups = [graded(r, solved[r.prompt.dataset]) for r in plan.requests]
    scheduler.observe(groups)
    lesson = scheduler.take_batch(0)
    scheduler.observe([])
    metrics, lines = scheduler.close(0)
    assert len(lines) + len(scheduler.pending()) == len(groups)
    return [g.request.prompt.dataset for g in lesson.groups], metrics

  alone, metrics = run(False)
  assert alone == ['a', 'a'] and 'rollout/borrowed' not in metrics
  helped, metrics = run(True)
  assert helped == ['a'] * 4 and metrics['rollout/borrowed'] == 2


def test_an_aborted_answer_is_left_out_of_its_group():
  """E4: seven of eight answers, 4/7 right: +0.8660254 and -1.1547005, no reward 0."""
  scheduler = Methods().scheduler()
  plan = scheduler.plan(0)
  scheduler.sent(plan)
  rewards = [1, 1, 0, 0, 1, 0, 1]
  groups = []
  for request in plan.requests:
    group = graded(dataclasses.replace(request, size=8), rewards)
    groups.append(group)
  scheduler.observe(groups)
  lesson, (_, lines) = scheduler.take_batch(0), scheduler.close(0)
  for advantages, keep in zip(lesson.advantages, lesson.keep, strict=True):
    np.testing.assert_allclose(
      advantages, [0.8660254 if r else -1.1547005 for r in rewards], atol=1e-5
    )
    assert keep.shape == (7,)
  assert {tuple(line['rewards']) for line in lines} == {tuple(map(float, rewards))}


def test_epochs_end_while_a_batch_is_open():
  """E2: 6 prompts, 4 a round, the last round of an epoch all alike: both epochs run,
  each prompt once in each."""
  scheduler = plain(
    {'a': 6},
    factor=0.0,
    groups_per_step=4,
    group_size=2,
    max_rounds=1,
    dynamic_sampling=False,
  )
  seen = collections.Counter()
  for step in range(3):
    plan = scheduler.plan(step)
    scheduler.sent(plan)
    seen.update((r.prompt.index, r.dataset_pass) for r in plan.requests)
    scheduler.observe([graded(r, [1, 1]) for r in plan.requests])
    scheduler.take_batch(step)
    scheduler.close(step)
  assert seen == collections.Counter(itertools.product(range(6), range(2)))


def test_the_share_of_snoozed_prompts_is_not_generated():
  """E3: 60 of 100 prompts are solved: with a factor of 5 a pass costs 40 + 60 / 6
  requests on average, and the logged pass rate is of all that is generated."""
  scheduler = plain(
    {'a': 100},
    factor=5.0,
    groups_per_step=10,
    group_size=8,
    dynamic_sampling=False,
  )
  drawn = []
  for step in range(400):
    plan = scheduler.plan(step)
    scheduler.sent(plan)
    groups = [
      graded(r, [1] * 8 if r.prompt.index < 60 else [1, 0] * 4) for r in plan.requests
    ]
    drawn += [r.dataset_pass for r in plan.requests]
    scheduler.observe(groups)
    scheduler.take_batch(step)
    metrics, _ = scheduler.close(step)
    solved = np.mean([r.prompt.index < 60 for r in plan.requests])
    assert metrics['pass_rate'] == pytest.approx(solved + (1 - solved) / 2)
  passes = max(drawn) // 6 * 6  # whole rounds of six passes
  assert passes >= 60
  assert sum(number < passes for number in drawn) == passes // 6 * (6 * 40 + 60)
