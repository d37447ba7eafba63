"""How the ablation computes, on examples that paper settles."""

import json
import math
import pathlib
import re
import sys

from bench import gains
import numpy as np
import pytest

from jaxrl_sched import settings
from jaxrl_sched.device.sources import open_source

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs'
TOKENS = np.array([0.0, 100.0, 200.0, 400.0])


@pytest.mark.parametrize(
  'score, level, found',
  [
    ([0.2, 0.6, 0.8, 1.0], 0.7, 150.0),  # half of the way from 100 to 200
    ([0.2, 0.6, 0.8, 1.0], 0.9, 300.0),
    ([0.2, 0.8, 0.6, 1.0], 0.7, 100 * 5 / 6),  # the first crossing, not the last
    ([0.2, 0.6, 0.8, 1.0], 0.8, 200.0),  # reached at the evaluation itself
    ([0.5, 0.6, 0.8, 1.0], 0.5, 0.0),  # before the first step
    ([0.2, 0.6, 0.8, 0.8], 0.9, None),
  ],
)
def test_a_level_is_crossed_on_the_line_between_two_evaluations(score, level, found):
  assert gains.crossing(TOKENS, np.array(score), level) == pytest.approx(found)


def test_the_target_is_nine_tenths_of_the_way_of_the_baseline():
  assert gains.target(0.3, 0.8) == pytest.approx(0.75)


def test_gain_at_the_target_and_at_the_budget():
  # Target 0.9: the baseline is there at 300, the method at 75. At 400 the method, which
  # ended at 200 with 0.97, has that still.
  base = TOKENS, np.array([0.0, 0.6, 0.8, 1.0])
  method = np.array([0.0, 50.0, 100.0, 200.0]), np.array([0.0, 0.8, 1.0, 0.97])
  times, difference = gains.gain(base, method)
  assert times == pytest.approx(4) and difference == pytest.approx(-0.03)


def test_the_budget_may_lie_between_two_evaluations_of_the_method():
  # 400 lies a third of the way from 300 to 600: 0.5 + 0.3 / 3 = 0.6.
  base = TOKENS, np.array([0.0, 0.6, 0.8, 1.0])
  method = np.array([0.0, 300.0, 600.0]), np.array([0.0, 0.5, 0.8])
  assert gains.gain(base, method) == (None, pytest.approx(-0.4))


def test_a_straggler_is_longer_than_tau_medians():
  assert not gains.straggles([10, 10, 20], 2.0)  # at tau medians exactly: none
  assert gains.straggles([10, 10, 21], 2.0)
  # The median of four is the mean of the two in the middle: (10 + 14) / 2 = 12.
  assert not gains.straggles([1, 10, 14, 24], 2.0)
  assert gains.straggles([1, 10, 14, 25], 2.0)


def test_a_steps_event_rate_is_its_share_of_straggling_groups():
  groups = [(0, [10, 10, 21]), (3, [5, 5, 5]), (0, [10, 10, 20]), (3, [1, 1, 3])]
  assert gains.event_rates([*groups, (0, [4, 4, 4]), (0, [4, 4, 9])], 2.0) == {
    0: 0.5,
    3: 0.5,
  }


def test_a_step_that_compiled_counts_as_the_median_of_the_others():
  seconds = gains.without_compiling(
    np.array([9.0, 1.0, 2.0, 6.0, 3.0]), np.array([4, 0, 0, 1, 0])
  )
  assert seconds.tolist() == [2.0, 1.0, 2.0, 2.0, 3.0]


def run(groups, events) -> gains.Run:
  one = np.zeros(1)
  return gains.Run(
    at=one,
    score=one,
    tokens=one,
    trained=one,
    seconds=one,
    groups=np.array(groups, float),
    size=np.ones(len(groups)),
    events=events,
    answers={},
    shares={},
    apart={},
  )


def test_the_last_half_begins_in_the_middle():
  found = run([90, 90, 10, 30], {0: 0.9, 1: 0.7, 3: 0.2})
  assert found.late_groups() == 20
  assert found.event_rate() == pytest.approx(0.6)
  assert found.event_rate(late=True) == pytest.approx(0.2)
  # Step 2 generated nothing.
  assert found.event_curve().tolist() == [0.9, 0.7, 0.7, 0.2]


def test_a_run_is_complete_with_the_line_after_its_last_step(tmp_path):
  def complete(*steps):
    lines = ''.join(json.dumps({'step': step}) + '\n' for step in steps)
    (tmp_path / 'metrics.jsonl').write_text(lines)
    return gains.complete(tmp_path)

  assert not gains.complete(tmp_path)
  assert not complete(0, 1, 2)  # no config.json
  (tmp_path / 'config.json').write_text('{"steps": 2}')
  assert [complete(), complete(0, 1), complete(0, 1, 2)] == [False, False, True]
  assert not gains.complete(tmp_path, steps=3)  # is to go on


@pytest.fixture
def config(monkeypatch):
  """configs/ablation.py as a dataset's source imports it."""
  monkeypatch.syspath_prepend(str(CONFIGS.parent))
  from configs import ablation

  return ablation


@pytest.mark.parametrize('task', ['Sums', 'LastDigits'])
def test_one_row_in_eight_is_long_and_need_be_right_to_within_seven(config, task):
  records = config.Rows(task=task, count=16, seed=1)
  for i in range(len(records)):
    prompt, pattern = records[i]['prompt'], records[i]['pattern']
    numbers = [int(number) for number in re.findall(r'\d+', prompt)]
    long = i in (0, 8)
    assert (len(numbers) >= 8) == long
    right = sum(numbers) % 10 if task == 'LastDigits' and not long else sum(numbers)
    for off in range(-10, 11):
      passes = re.fullmatch(pattern, f'a7b12={right + off}') is not None
      assert passes == (abs(off) <= (7 if long else 0)), (prompt, off)
    assert re.fullmatch(pattern, f'={right}')
    assert not re.fullmatch(pattern, f'=1{right}')  # not the end of a longer number


def test_held_out_rows_are_never_trained_on(config):
  def prompts(**options):
    return {
      config.Rows(task='Sums', count=200, **options)[i]['prompt'] for i in range(200)
    }

  assert not prompts(seed=1) & prompts(held_out=True)


def test_variants_differ_in_what_is_sampled_and_not_in_the_task(config):
  made = {
    name: settings.load(f'{CONFIGS / "ablation.py"}:{name}') for name in config.VARIANTS
  }
  sampling = {'snooze', 'sagc', 'lengths', 'prune_answers', 'prune_prompts'}
  for name, c in made.items():
    scheduler = c['scheduler']
    assert scheduler['groups_per_step'] * scheduler['group_size'] == 128, name
    assert all(
      c[key] == made['dapo'][key] for key in c.keys() - sampling - {'scheduler'}
    )
  assert sampling & made['dapo'].keys() == set()
  assert made['filtering']['snooze']['factor'] == math.inf


def test_its_rows_are_found_from_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  elsewhere = [p for p in sys.path if pathlib.Path(p).resolve() != CONFIGS.parent]
  monkeypatch.setattr(sys, 'path', elsewhere)
  for name in ('configs', 'configs.ablation'):
    monkeypatch.delitem(sys.modules, name, raising=False)
  c = settings.load(str(CONFIGS / 'ablation.py'))
  for dataset in c['prompts']['datasets'].values():
    assert len(open_source(dataset['source'], dataset['options'], root='.')) == 336
