"""What the report promises: a page for any run, with nothing but itself, and right."""

import html.parser
import json
import re
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from jaxrl_sched import plots
from jaxrl_sched.engine import Span
from jaxrl_sched.report import write_report


def fill(folder, lines, *, rollouts=(), config=None):
  folder.mkdir(exist_ok=True)
  for name, rows in (('metrics.jsonl', lines), ('rollouts.jsonl', rollouts)):
    (folder / name).write_text(''.join(json.dumps(row) + '\n' for row in rows))
  if config is not None:
    (folder / 'config.json').write_text(json.dumps(config))
  return write_report(folder).read_text('utf-8')


def words(page: str) -> str:
  """What a reader sees."""
  page = re.sub(r'<style>.*?</style>', '', page, flags=re.S)
  return ' '.join(re.sub(r'<[^>]+>', ' ', page).split())


def full_line(step: int) -> dict:
  return {
    'step': step,
    'reward/mean': 0.5,
    'pass_rate': 0.25 + 0.05 * step,
    'loss': -0.01,
    'entropy': 0.3,
    'grad_norm': 1.5,
    'rollout/tokens_generated': 1000,
    'rollout/tokens_trained': 600,
    'rollout/length_mean': 20.0,
    'rollout/length_max': 64,
    'rollout/truncated': 0.125,
    'share/sums': 0.75,
    'share/sorting': 0.25,
    'mismatch/logp_abs_mean': 1e-6,
    'mismatch/logp_abs_max': 1e-4,
    'time/generate_s': 1.0,
    'time/learn_s': 0.5,
    'time/step_s': 2.0,
  }


def test_the_headline_says_what_the_run_achieved(tmp_path):
  lines = [full_line(step) for step in range(10)]
  lines[0] |= {'eval/sums/pass@1': 0.25, 'eval/sorting/pass@1': 0.5}
  lines.append({'step': 10, 'eval/sums/pass@1': 1.0, 'eval/sorting/pass@1': 0.875})
  lines[-1]['time/evaluate_s'] = 7.0
  seen = words(fill(tmp_path, lines, config={'steps': 12}))
  assert 'Held-out pass@1 0.375 → 0.938 mean of 2 datasets' in seen
  # Pass rates 0.25, 0.30, ... 0.70: the first five average 0.35, the last five 0.6.
  assert 'Pass rate in training 0.350 → 0.600 first and last 5 steps' in seen
  assert 'Steps 10 of 12' in seen
  assert 'Tokens generated 10k 60% trained on' in seen
  assert 'Time 20s 2 s a step' in seen
  assert 'Tokens a second 500' in seen
  assert 'sorting 0.500 0.875 10 0.875' in seen


def test_partial_rewards_come_first(tmp_path):
  lines = [full_line(step) for step in range(10)]
  lines[0] |= {'eval/sums/pass@1': 0.0, 'eval/sums/reward': -0.25}
  lines.append({'step': 10, 'eval/sums/pass@1': 0.0, 'eval/sums/reward': 0.5})
  page = fill(tmp_path, lines, config={'steps': 10})
  seen = words(page)
  assert seen.index('Held-out reward -0.250 → 0.500') < seen.index('Held-out pass@1')
  first = page[page.index('<figure>') : page.index('</figure>')]
  assert 'mean reward, of the maximum, on the prompts' in first
  assert '<title>step 0: -0.25</title>' in first  # below 0, and within the frame
  heights = [float(y) for y in re.findall(r'<circle[^>]* cy="([\d.]+)"', first)]
  assert all(10 <= y <= 214 for y in heights) and heights[0] > heights[1]


def test_updates_that_were_not_made_are_counted(tmp_path):
  lines = [full_line(step) for step in range(4)]
  for step, line in enumerate(lines):
    line |= {'update/refused': float(step > 1), 'update/skipped': float(step == 0)}
  seen = words(fill(tmp_path, lines))
  assert 'Updates not made 3 2 not finite, 1 without a gradient' in seen
  lines = [full_line(0) | {'update/refused': 0.0, 'update/skipped': 0.0}]
  assert 'Updates not made' not in words(fill(tmp_path, lines))


def test_rewards_of_0_and_1_are_not_shown_twice(tmp_path):
  lines = [full_line(0) | {'eval/sums/pass@1': 0.5, 'eval/sums/reward': 0.5}]
  seen = words(fill(tmp_path, lines))
  assert 'Held-out pass@1 0.500' in seen and 'Held-out reward' not in seen


def test_a_run_without_a_single_step_has_a_page_that_says_so(tmp_path):
  assert 'No step has been logged' in words(write_report(tmp_path).read_text())
  assert 'No step has been logged' in words(fill(tmp_path, [], config={'seed': 0}))


@pytest.mark.parametrize('key', sorted(full_line(0).keys() - {'step'}))
def test_any_key_may_be_missing_or_the_only_one(tmp_path, key):
  line = full_line(0)
  only = {'step': 0, key: line.pop(key)}
  for lines in ([only], [line], [line, only | {'step': 1}]):
    assert f'Steps {len(lines)}' in words(fill(tmp_path, lines))


@pytest.mark.parametrize('value', [0.0, -1.0, 1e-30, 1e30])
def test_any_value_can_be_drawn(tmp_path, value):
  lines = [{k: value for k in full_line(0)} | {'step': step} for step in range(3)]
  page = fill(tmp_path, lines)
  assert 'nan' not in page and 'inf' not in page.replace('info', '')


def test_the_page_needs_nothing_else_and_is_well_formed(tmp_path):
  lines = [full_line(step) for step in range(3)]
  rollouts = [{'step': 0, 'fate': 'trained'}]
  page = fill(tmp_path, lines, rollouts=rollouts, config={'steps': 3, 'a': {'b': None}})
  assert not re.search(r'<script|<link|<img|https?:|url\(|@import', page)
  svgs = re.findall(r'<svg.*?</svg>', page, flags=re.S)
  assert len(svgs) >= 10
  for svg in svgs:
    ET.fromstring(svg)
  assert page.count('<figure') == page.count('</figure>') == len(svgs)


def test_names_cannot_become_markup(tmp_path):
  evil = '<script>alert(1)</script>'
  page = fill(
    tmp_path,
    [{'step': 0, f'eval/{evil}/pass@1': 0.5, f'share/{evil}': 1.0}],
    rollouts=[{'step': 0, 'fate': evil}],
    config={evil: {evil: evil}},
  )

  class Tags(html.parser.HTMLParser):
    def handle_starttag(self, tag, attrs):
      assert tag != 'script'

  Tags().feed(page)
  assert html.escape(evil) in page


def test_groups_are_counted_by_fate(tmp_path):
  rollouts = [{'step': 3, 'fate': 'trained'}] * 2 + [{'step': 3, 'fate': 'filtered'}]
  rollouts += [{'step': 4, 'fate': 'trained'}, {'step': 4, 'fate': 'pruned'}]
  seen = words(fill(tmp_path, [full_line(3), full_line(4)], rollouts=rollouts))
  # The legend has the last step's counts; a fate that nobody foresaw is shown too.
  assert 'groups a step' in seen
  assert 'trained 1 filtered 0 pending 0 dropped 0 pruned 1' in seen


def test_the_newest_samples_are_shown(tmp_path):
  (tmp_path / 'samples.jsonl').write_text(
    ''.join(
      json.dumps(
        {'step': step, 'draw': step, 'prompt_id': f'sums/{step}', 'sample': k}
        | {'prompt': f'<|user|>asks {step}', 'truth': 40 + step, 'reward': 0.5 * k}
        | {'text': f'says {step}.{k} <b>' + 9000 * 'x', 'finish': 'stop', 'length': 3}
      )
      + '\n'
      for step in range(6)
      for k in range(5)
    )
  )
  page = fill(tmp_path, [full_line(step) for step in range(6)])
  seen = words(page)
  assert 'asks 1' not in seen and '&lt;b&gt;' in page and '<b>x' not in page
  for step in (2, 3, 4, 5):
    assert f'sums/{step}, step {step}, 4 of 5 answers' in seen
    assert f'prompt &lt;|user|&gt;asks {step} truth 4{step}' in seen
    assert f'1.5 stop says {step}.3' in seen and f'says {step}.4' not in seen
  assert len(page) < 150_000  # long texts are cut


def test_sizes_ascend_and_shares_are_said_to_be_of_what(tmp_path):
  line = {f'sagc/p/{size}': 0.5 for size in (16, 4, 8)}
  line |= {'share/sums': 1.0, 'snooze/asleep/sums': 0.5}
  seen = words(fill(tmp_path, [full_line(0) | line]))
  assert 'size 4 0.5 size 8 0.5 size 16 0.5' in seen
  assert 'Datasets share of the groups trained on' in seen
  assert 'Asleep share of prompts, by dataset' in seen


def test_the_last_steps_are_drawn_as_a_timeline(tmp_path):
  lines = [full_line(s) | {'time/idle_s/sampler': 0.5} for s in range(40)]
  assert 'Timeline' not in words(fill(tmp_path, lines))
  spans = [
    {'step': s, 'lane': lane, 'what': what, 'bundle': s, 'begin': a, 'end': a + 1.0}
    for s in range(40)
    for lane, what, a in (
      ('engine 0', 'generate', 2 * s),
      ('learner', 'learn', 2 * s + 1),
    )
  ]
  (tmp_path / 'timeline.jsonl').write_text(
    ''.join(json.dumps(span) + '\n' for span in spans)
  )
  page = write_report(tmp_path).read_text('utf-8')
  seen = words(page)
  assert 'Timeline The last steps' in seen and 'generate learn' in seen
  assert 'learner: learn 39, 1 s' in page and 'learner: learn 28, 1 s' in page
  assert 'learn 27' not in page  # twelve bundles
  assert 'Idle' in seen and 'sampler 0.5' in seen


def test_evaluations_among_the_last_steps_are_drawn(tmp_path):
  """They are of no bundle; one every eight steps, of ten seconds."""
  spans, now = [], 0.0
  for step in range(40):
    whats = [('generate', step, 3.0), ('learn', step, 1.0)]
    for what, bundle, took in [('evaluate', -1, 10.0)] * (step % 8 == 0) + whats:
      lane = 'learner' if what == 'learn' else 'engine 0'
      span = dict(lane=lane, what=what, bundle=bundle, begin=now, end=now + took)
      spans.append({'step': step} | span)
      now += took
  fill(tmp_path, [full_line(step) for step in range(40)])
  path = tmp_path / 'timeline.jsonl'
  path.write_text(''.join(json.dumps(span) + '\n' for span in spans))
  page = write_report(tmp_path).read_text('utf-8')
  # Bundles 28 to 39 are drawn: with them the evaluation of step 32, and no other.
  assert page.count('engine 0: evaluate, 10 s') == 1
  assert 'generate 28, 3 s' in page and 'generate 27' not in page and '>-1<' not in page


def test_with_a_lag_what_goes_on_at_the_same_time_is_not_summed(tmp_path):
  """1 s to generate and 0.5 s to learn, in steps of 2 s."""
  lines = [full_line(step) for step in range(3)]
  seen = words(fill(tmp_path, lines, config={'asp': {'lag': 1}}))
  assert 'generate 1 learn 0.5' in seen and 'step 2' in seen and 'no sum' in seen
  assert 'other 0.5' not in seen
  seen = words(fill(tmp_path, lines, config={'asp': {'lag': 0}}))
  assert 'generate 1 learn 0.5 other 0.5' in seen and 'no sum' not in seen


def test_config_blocks_are_shown_whole(tmp_path):
  config = {'seed': 3, 'loss': {'kind': 'dapo', 'deep': {'er': [1, 2]}, 'cap': None}}
  seen = words(fill(tmp_path, [full_line(0)], config=config))
  assert 'seed 3' in seen
  assert 'loss kind &quot;dapo&quot; deep.er [1, 2] cap null' in seen


def test_a_torn_last_line_does_not_matter(tmp_path):
  fill(tmp_path, [full_line(0)])
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 1, "lo')
  assert 'Steps 1' in words(write_report(tmp_path).read_text())


def test_ten_thousand_steps_take_seconds_and_a_small_page(tmp_path):
  lines = [full_line(step) for step in range(10_000)]
  rollouts = [{'step': s, 'fate': 'trained'} for s in range(10_000) for _ in range(8)]
  fill(tmp_path, lines, rollouts=rollouts)
  start = time.monotonic()
  page = write_report(tmp_path)
  assert time.monotonic() - start < 10
  assert page.stat().st_size < 2_000_000


# --- the plots themselves -------------------------------------------------------------


def paths(svg: str, name: str) -> list[list[tuple[float, float]]]:
  """The points of the paths of a class."""
  found = []
  for node in ET.fromstring(svg).iter('path'):
    if node.get('class') == name:
      pairs = node.get('d').strip('MZ').split('L')
      found.append([tuple(map(float, pair.split(','))) for pair in pairs])
  return found


def tick_places(svg: str) -> dict[float, float]:
  """Value -> height, read off the labels of the vertical axis."""
  labels = [n for n in ET.fromstring(svg).iter('text') if n.get('text-anchor') == 'end']
  return {
    float(n.text): float(n.get('y')) - 3.5 for n in labels if float(n.get('x')) < 60
  }


def test_a_curve_stands_where_the_ticks_say():
  values = np.array([0.2, 0.4, 0.8])
  svg, cut = plots.lines({'a': (np.arange(3), values)}, unit_range=True)
  assert cut == ''
  ticks = tick_places(svg)
  ((_, (_, y1), (_, y2)),) = paths(svg, 'l0')
  assert y1 == pytest.approx(ticks[0.4], abs=0.15)
  assert y2 == pytest.approx(ticks[0.8], abs=0.15)


def test_a_logarithmic_axis_has_powers_of_ten():
  svg, _ = plots.lines({'a': (np.arange(3), np.array([1e-4, 1e-3, 1e-2]))}, log=True)
  ticks = tick_places(svg)
  assert set(ticks) == {1e-4, 1e-3, 1e-2}
  ((*_, (_, y2)),) = paths(svg, 'l0')
  assert y2 == pytest.approx(ticks[1e-2], abs=0.15)


def test_areas_stand_on_each_other():
  steps = np.arange(2)
  svg, _ = plots.stacked(
    {'a': (steps, np.array([1.0, 2.0])), 'b': (steps, np.array([3.0, 2.0]))}
  )
  ticks = tick_places(svg)
  (lower,), (upper,) = paths(svg, 'a0'), paths(svg, 'a1')
  # Two steps, each as wide as half the picture: up, along, up, along, and back at 0.
  heights = [y for _, y in lower]
  tops, foots = heights[:4], heights[4:]
  assert tops == pytest.approx([ticks[1]] * 2 + [ticks[2]] * 2, abs=0.15)
  assert foots == pytest.approx([ticks[0]] * 4, abs=0.15)
  assert [y for _, y in upper[:4]] == pytest.approx([ticks[4]] * 4, abs=0.15)
  assert [y for _, y in upper[:3:-1]] == pytest.approx(tops, abs=0.15)


def bars(svg: str) -> dict[str, tuple[float, float, float]]:
  """What is told of a bar -> left, right and top."""
  found = {}
  for node in ET.fromstring(svg).iter('rect'):
    x, width, y = (float(node.get(name)) for name in ('x', 'width', 'y'))
    found[node.find('title').text] = x, x + width, y
  return found


def second_places(svg: str) -> dict[float, float]:
  """Second -> place, read off the labels of a timeline's axis."""
  texts = [n for n in ET.fromstring(svg).iter('text') if n.get('class') != 'in']
  found = {n.text.removesuffix(' s').replace(',', ''): n for n in texts}
  return {
    float(text): float(n.get('x'))
    for text, n in found.items()
    if text.replace('.', '').isdecimal()
  }


def test_bars_of_a_timeline_stand_at_their_seconds_in_their_lanes():
  svg, note = plots.timeline(
    [
      Span('engine 0', 'generate', 0, 100.0, 104.0),
      Span('engine 1', 'generate', 0, 100.0, 102.0),
      Span('learner', 'learn', 0, 104.0, 110.0),
      Span('engine 0', 'load', 1, 110.0, 110.001),
    ]
  )
  assert note == ''
  found, at = bars(svg), second_places(svg)
  assert found['engine 0: generate 0, 4 s'][:2] == pytest.approx(
    (at[100], at[104]), 0.1
  )
  left, right, y = found['learner: learn 0, 6 s']
  assert (left, right) == pytest.approx((at[104], at[110]), abs=0.15)
  tops = [found[k][2] for k in found if 'generate' in k]
  assert tops == sorted(tops) and y > tops[1]
  # The load is far too short for its number; the others bear theirs.
  numbers = [n.text for n in ET.fromstring(svg).iter('text') if n.get('class') == 'in']
  assert numbers == ['0', '0', '0']


def test_a_bar_that_is_wide_enough_bears_its_number():
  """Of 20 bars, with as much between them; each is about 26 wide, or 14 for 39."""
  for width, count in ((1.0, 12), (0.45, 12), (0.1, 0)):
    spans = [
      Span('learner', 'learn', j, 2.0 * j, 2.0 * j + width) for j in range(20, 40)
    ]
    svg, _ = plots.timeline(spans)
    numbers = [n for n in ET.fromstring(svg).iter('text') if n.get('class') == 'in']
    assert len(numbers) == count, width


def test_a_timeline_has_twelve_lanes_and_twelve_bundles():
  spans = [
    Span(f'engine {e}', 'generate', j, 2.0 * j, 2.0 * j + 1.5)
    for j in range(30)
    for e in range(64)
  ]
  spans += [Span('learner', 'learn', j, 2.0 * j + 1, 2.0 * j + 3) for j in range(30)]
  svg, note = plots.timeline(spans)
  assert note == '53 more engines are not drawn'
  found = bars(svg)
  lanes = {told.split(':')[0] for told in found}
  assert lanes == {f'engine {e}' for e in range(11)} | {'learner'}
  # Bundles 18 to 29; and of 17 what was not over yet, cut off at the edge.
  old = {told for told in found if ' 17, ' in told}
  assert old == {'learner: learn 17, 2 s'}
  left, right, _ = found['learner: learn 17, 2 s']
  at = second_places(svg)
  second = (at[40] - at[50]) / -10
  assert left == pytest.approx(at[40] - 4 * second, abs=0.2)  # second 36
  assert right - left == pytest.approx(second, abs=0.2)
  assert not any(' 16, ' in told for told in found)


@pytest.mark.parametrize('begin, end', [(0.0, 0.0), (1e6, 1e6 + 1e-3), (0.0, 1e9)])
def test_any_timeline_can_be_drawn(begin, end):
  svg, _ = plots.timeline([Span('learner', 'learn', 0, begin, end)])
  assert 'nan' not in svg and len(bars(svg)) == 1


def test_a_long_run_is_thinned_to_means():
  values = np.tile([0.0, 1.0], 6000)
  svg, _ = plots.lines({'a': (np.arange(12_000), values)}, unit_range=True)
  (raw,) = paths(svg, 'l0 raw')
  assert len(raw) == 600
  middle = (tick_places(svg)[0.4] + tick_places(svg)[0.6]) / 2
  assert [y for _, y in raw] == pytest.approx([middle] * 600, abs=0.15)


def test_one_slow_step_does_not_flatten_the_others():
  values = np.ones(40)
  values[0] = 100.0
  svg, cut = plots.lines({'a': (np.arange(40), values)})
  assert cut == 'peaks up to 100 cut off'
  assert max(tick_places(svg)) < 2


@pytest.mark.parametrize(
  'value, text',
  [
    (0, '0'),
    (0.1 + 0.2, '0.3'),
    (1e-6, '1e-6'),
    (999.6, '1,000'),
    (4170, '4,170'),
    (12_345, '12.3k'),
    (-35e6, '-35M'),
    (2e9, '2G'),
  ],
)
def test_numbers_are_short(value, text):
  assert plots.short(value) == text
