"""The loop and evaluation on an engine of dictionaries: order, resume, counts."""

import dataclasses
import itertools
import time

import numpy as np
import pytest
import toys
from toys import graded

from jaxrl_sched import evaluation, loop
from jaxrl_sched.control.scheduler import Scheduler
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.control.source import Source
from jaxrl_sched.engine import Stopped
from jaxrl_sched.host.advantages import group_advantages
from jaxrl_sched.metrics import Recorder, read_jsonl
from jaxrl_sched.types import Prompt, Sampling

SAMPLING = Sampling(max_new_tokens=8)


def prompt_of(dataset, index):
  tokens = np.array([index + 1], np.int32)
  return Prompt(
    id=f'{dataset}/{index}', dataset=dataset, index=index, tokens=tokens, text=''
  )


class PaperEngine:
  """Answer k of draw d is right if (d + k) is even; every event is written down."""

  def __init__(self, stop_in=None, saved=None):
    self.step, self.events, self.saved = 0, [], {} if saved is None else saved
    self._stop_in = stop_in
    if self.saved:
      self.step = max(self.saved)

  def agree(self, make):
    return make()

  def now(self):
    return time.perf_counter()

  def spans(self):
    return []

  def drain(self, before):
    return {}

  def submit(self, plan):
    self._requests = list(plan.requests)
    self.events.append(f'sample {self.step}')

  def collect(self, bundle, enough):
    if self.step == self._stop_in:
      raise Stopped
    return [
      graded(r, [(r.draw + k) % 2 for k in range(r.size)], version=self.step)
      for r in self._requests
    ]

  def collect_rest(self):
    return []

  def evaluate(self, requests):
    self.events.append(f'evaluate {self.step}')
    return [graded(r, [r.prompt.index % 2] * r.size) for r in requests]

  def compare(self, what, make):
    assert toys.written(make()) == toys.written(make())

  def learn(self, lesson):
    assert lesson.count == len(lesson.groups) == 2
    assert all(abs(a.sum()) < 1e-5 and a.any() for a in lesson.advantages)
    self.events.append(f'learn {self.step}')
    self.step += 1
    return {'loss': 0.5}

  def save(self, control, *, score):
    self.events.append(f'save {self.step}')
    self.saved[self.step] = toys.through_files(control), score


def run(engine, workdir, *, steps=4, save_every=2, evaluate_every=3, evaluate=True):
  scheduler = Scheduler(
    Source(Snooze({'a': 9}, {'a': 1.0}, factor=0)),
    prompt_of,
    SAMPLING,
    groups_per_step=2,
    group_size=4,
    surplus='drop',  # so that every step samples
    advantages_of=group_advantages,
  )
  if engine.saved:
    scheduler.load_state_dict(engine.saved[engine.step][0])

  def judge(step):
    assert step == engine.step
    results = evaluation.evaluate(
      engine, [prompt_of('a', i) for i in range(3)], SAMPLING, samples=2
    )
    return evaluation.as_metrics(results), evaluation.score(results)

  with Recorder(
    workdir, steps=steps, start=engine.step, tensorboard=False, console=False
  ) as recorder:
    return loop.train(
      engine,
      scheduler,
      recorder,
      steps=steps,
      save_every=save_every,
      evaluate_every=evaluate_every,
      evaluate=judge if evaluate else None,
    )


def lines(workdir, name='metrics.jsonl'):
  return [
    {k: v for k, v in line.items() if not k.startswith('time/')}
    for line in read_jsonl(workdir / name)
  ]


def test_the_order_of_a_run(tmp_path):
  engine = PaperEngine()
  assert run(engine, tmp_path)
  once = [event for event, _ in itertools.groupby(engine.events)]
  assert once == (
    ['evaluate 0', 'sample 0', 'learn 0', 'sample 1', 'learn 1']
    + ['save 2', 'sample 2', 'learn 2', 'evaluate 3', 'sample 3', 'learn 3']
    + ['evaluate 4', 'save 4']
  )
  assert [line['step'] for line in lines(tmp_path)] == [0, 1, 2, 3, 4]
  assert lines(tmp_path)[4] == {
    'step': 4,
    'eval/a/pass@1': pytest.approx(1 / 3),
    'eval/a/reward': pytest.approx(1 / 3),
    'eval/a/length_mean': 3.0,
    'eval/a/truncated': 0.0,
  }
  assert engine.saved[2][1] is None  # not evaluated there
  assert engine.saved[4][1] == pytest.approx(1 / 3)


@pytest.mark.parametrize('step', [0, 1, 2, 3])
def test_asked_to_stop_in_a_step_it_saves_that_steps_start(tmp_path, step):
  assert run(PaperEngine(), tmp_path / 'whole')
  stopped = PaperEngine(stop_in=step)
  assert not run(stopped, tmp_path / 'cut')
  assert max(stopped.saved) == step
  assert run(PaperEngine(saved=stopped.saved), tmp_path / 'cut')
  for name in ('metrics.jsonl', 'rollouts.jsonl'):
    assert lines(tmp_path / 'cut', name) == lines(tmp_path / 'whole', name)


def test_without_useful_groups_the_step_is_counted_and_the_run_goes_on(tmp_path):
  class AllRight(PaperEngine):
    def collect(self, bundle, enough):
      return [graded(r, [1] * r.size) for r in self._requests]

    def learn(self, lesson):
      assert lesson.groups == [] and lesson.advantages == []
      self.step += 1
      return {'update/skipped': 1.0}

  assert run(AllRight(), tmp_path, steps=2, evaluate=False)
  first = lines(tmp_path)[0]
  assert first['update/skipped'] == 1 and first['rollout/groups_trained'] == 0
  assert first['rollout/groups_filtered'] == first['rollout/groups_generated'] > 0
  assert first['pass_rate'] == 1


def test_a_run_with_nothing_left_to_learn_from_ends_evaluated_and_saved(tmp_path):
  """Nine prompts, all solved, two a step: twenty groups in the first step. The same
  command does not sample again."""

  class AllRight(PaperEngine):
    def collect(self, bundle, enough):
      return [graded(r, [1] * r.size) for r in self._requests]

    def learn(self, lesson):
      self.step += 1
      return {'update/skipped': 1.0}

  engine = AllRight()
  assert run(engine, tmp_path, steps=50, save_every=100, evaluate_every=100)
  found = lines(tmp_path)
  assert [line['step'] for line in found] == [0, 1]
  assert found[0]['rollout/groups_generated'] == 20
  assert 'eval/a/pass@1' in found[1] and 'pass_rate' not in found[1]
  assert list(engine.saved) == [1] and engine.saved[1][1] is not None
  again = AllRight(saved=engine.saved)
  assert run(again, tmp_path, steps=50, save_every=100, evaluate_every=100)
  assert not any(event.startswith('sample') for event in again.events)
  assert lines(tmp_path) == found


class Refusing(PaperEngine):
  """Whose updates are refused but where `good` says, and skipped where `skipped` says."""

  good = skipped = ()

  def learn(self, lesson):
    step, self.step = self.step, self.step + 1
    is_skipped = step in self.skipped
    is_refused = not is_skipped and step not in self.good
    return {'update/skipped': float(is_skipped), 'update/refused': float(is_refused)}


def test_a_run_whose_updates_are_all_refused_ends_early_saved_and_says_so(
  tmp_path, capsys
):
  engine = Refusing()
  assert run(engine, tmp_path, steps=1000, save_every=1000, evaluate_every=1000)
  assert engine.step == loop.REFUSED == max(engine.saved)
  assert lines(tmp_path)[-1]['step'] == loop.REFUSED  # with the final evaluation
  assert 'eval/a/pass@1' in lines(tmp_path)[-1]
  assert capsys.readouterr().err.count('the update was refused') == 1


def test_refused_updates_count_in_a_row_and_skipped_ones_neither_way(tmp_path, capsys):
  engine = Refusing()
  engine.good, engine.skipped = {10}, {5, 20, 21}
  assert run(engine, tmp_path, steps=1000, save_every=1000, evaluate=False)
  # Steps 11 to 32 are 22, of which two were skipped.
  assert engine.step == 11 + loop.REFUSED + 2
  assert capsys.readouterr().err.count('the update was refused') == 2


def judged(verdicts, max_reward=1.0, **settings):
  class Given:
    def evaluate(self, requests):
      return [graded(r, v, **settings) for r, v in zip(requests, verdicts, strict=True)]

  prompts = [
    dataclasses.replace(prompt_of('a', i), max_reward=max_reward)
    for i in range(len(verdicts))
  ]
  n = len(verdicts[0])
  return evaluation.evaluate(Given(), prompts, SAMPLING, samples=n, k=(1, n))


def test_pass_at_1_over_all_prompts():
  """N1: ten prompts give 0.7, whatever the batch."""
  right = [1, 1, 0, 1, 0, 0, 1, 1, 1, 1]
  assert judged([[r] for r in right])['a'].numbers['pass@1'] == pytest.approx(0.7)


def test_pass_at_k_is_not_accuracy():
  """N3: accuracy 1/8, pass@4 1/2."""
  numbers = judged([[1, 0, 0, 0], [0, 0, 0, 0]])['a'].numbers
  assert numbers['pass@1'] == numbers['reward_mean'] == pytest.approx(0.125)
  assert numbers['pass@4'] == pytest.approx(0.5)


def test_pass_at_1_is_there_whatever_is_asked_for():
  class Given:
    def evaluate(self, requests):
      return [graded(r, [1, 0]) for r in requests]

  results = evaluation.evaluate(
    Given(), [prompt_of('a', 0)], SAMPLING, samples=2, k=(2,)
  )
  assert evaluation.score(results) == 0.5
  assert evaluation.as_metrics(results)['eval/a/pass@2'] == 1.0


def test_truncation_speaks_of_the_limit():
  """M1: answers that ended are not truncated, however long the longest is."""
  assert judged([[1, 0]], length=5)['a'].numbers['truncated'] == 0
  assert judged([[1, 0]], finish='length')['a'].numbers['truncated'] == 1


@pytest.mark.parametrize(
  'verdicts, max_reward, reward, passed',
  [
    ([[0.5, 0.25], [0, 1]], 1.0, 0.4375, 0.25),
    ([[25.05, 0], [50.1, 50.1]], 50.1, 0.625, None),
    ([[-1, 1], [-0.5, 0.5]], 1.0, 0.0, 0.25),  # rewards may be below 0
    ([[2.0, 0.5]], None, 1.25, 0.5),  # no maximum is known
    ([[-1.0, -0.5]], 0.0, -0.75, 0.0),
  ],
)
def test_held_out_reward_is_a_share_of_the_maximum(
  verdicts, max_reward, reward, passed
):
  """And what the best checkpoint is chosen by."""
  results = judged(verdicts, max_reward)
  assert evaluation.as_metrics(results)['eval/a/reward'] == pytest.approx(reward)
  assert evaluation.score(results) == pytest.approx(reward)
  if passed is not None:
    assert evaluation.as_metrics(results)['eval/a/pass@1'] == passed


def test_of_rewards_0_and_1_the_score_is_the_pass_rate():
  results = judged([[0, 5], [5, 5], [0, 0]], max_reward=5.0)
  assert evaluation.score(results) == results['a'].numbers['pass@1'] == 0.5


def test_numbers_that_say_nothing_are_doubted():
  assert evaluation.doubts(judged([[1, 0]])) == []
  assert evaluation.doubts(judged([[0, 0], [0, 0]], finish='length')) == [
    'a: all held-out answers were cut off at their token limit'
  ]
  results = judged([[0, 0], [0, 0]])
  numbers = dict(results['a'].numbers)
  groups = [dataclasses.replace(g, faults=('raised',) * 2) for g in results['a'].groups]
  numbers['grading_faults'] = 3
  assert evaluation.doubts({'a': evaluation.Result(groups, numbers)}) == []
  numbers['grading_faults'] = 4
  assert evaluation.doubts({'a': evaluation.Result(groups, numbers)}) == [
    'a: no held-out answer could be graded (raised)'
  ]
