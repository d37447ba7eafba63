"""From answers to groups: what went wrong, what goes on, what was not kept; what the
graders see, and which answers are right."""

import dataclasses
import functools
import json
import types

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
import toys
from transformers import PreTrainedTokenizerFast

from jaxrl_sched import evaluation
from jaxrl_sched.control import ledger
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.control.source import Source
from jaxrl_sched.device.engine import DeviceEngine
from jaxrl_sched.device.lanes import EVALUATION, Job, Part
from jaxrl_sched.device.marking import Marking
from jaxrl_sched.device.tokenizers import (
  answer_text,
  before_stop_string,
  build_byte_tokenizer,
)
from jaxrl_sched.host.advantages import group_advantages
from jaxrl_sched.host.grading import GradingPool
from jaxrl_sched.types import Completion, Relief, Reward


@pytest.fixture(scope='module')
def pool():
  with GradingPool(workers=1, warm=['exact']) as pool:
    yield pool


def job(finishes, *, bundle=0, cut=(), relief=None, **of_prompt):
  """A request for as many answers, each of two tokens, as there are finishes."""
  request = toys.request(3, [1, 2], len(finishes))
  of_prompt = dict(reward='exact', answer='right') | of_prompt
  prompt = dataclasses.replace(request.prompt, **of_prompt)
  request = dataclasses.replace(
    request, prompt=prompt, relief=Relief() if relief is None else relief
  )
  completions = {
    (3, k): Completion(
      draw=3,
      answer=k,
      tokens=np.zeros(0 if finish == 'aborted' else 2, np.int32),
      logps=np.zeros(0 if finish == 'aborted' else 2, np.float32),
      finish=finish,
      version=0,
    )
    for k, finish in enumerate(finishes)
  }
  found = Job(bundle, 0, [request], [], 1, lambda *_: None)
  found.here = Part(completions, {(3, 9 + i): n for i, n in enumerate(cut)})
  found.mine = frozenset(completions)
  return found


def marked(pool, job, text_of=lambda completion, sampling: 'right'):
  marking = Marking(pool, text_of)
  for completion in job.here.completions.values():
    if completion.finish != 'paused':
      marking.submit(job.requests[0], completion)
  marking.begin(job, job.here)
  (group,) = marking.groups(job, while_waiting=lambda: None)
  return group


def test_an_answer_that_went_wrong_is_left_out_of_its_group(pool):
  """2.4; and one that never ran was not generated."""
  group = marked(pool, job(['stop', 'aborted', 'length'], cut=(4, 0)))
  assert [c.answer for c in group.completions] == [0, 2] and group.spares == (4,)
  np.testing.assert_array_equal(group.verdicts, [1, 1])


def test_in_an_evaluation_it_counts_as_failed(pool):
  group = marked(pool, job(['aborted', 'stop'], bundle=EVALUATION))
  np.testing.assert_array_equal(group.verdicts, [0, 1])
  assert group.faults == ('aborted', None)

  class Given:
    def evaluate(self, requests):
      return [group]

  found = evaluation.evaluate(
    Given(), [group.request.prompt], group.request.sampling, samples=2, k=(2,)
  )
  assert found['toy'].numbers['pass@1'] == 0.5
  assert found['toy'].numbers['grading_faults'] == 1


def test_a_group_that_goes_on_is_not_graded_yet(pool):
  pausing = Relief(pause_after=2)
  group = marked(pool, job(['stop', 'paused', 'aborted'], relief=pausing))
  assert group.is_paused and group.finishes == ['stop', 'paused', 'aborted']
  np.testing.assert_array_equal(group.verdicts, [0, 0, 0])
  whole = marked(pool, job(['stop', 'length'], relief=pausing))
  np.testing.assert_array_equal(whole.verdicts, [1, 1])


# --- several rewards ----------------------------------------------------------------

RIGHT = Reward(name='right', verifier='exact')
SHORT = Reward(name='short', verifier='format', weight=0.25, min_reward=-1.0)
BOTH = dict(
  reward='',
  answer='4',
  rewards=(RIGHT, SHORT),
  max_reward=1.25,
  min_reward=-0.25,
  meta=dict(pattern='.{1,3}'),
)


def several(pool, texts, *, finishes=None, **how):
  """A group of these answers, by `exact` and by whether they are of 1 to 3 letters."""
  finishes = finishes or ['stop'] * len(texts)
  asked = job(finishes, **how, **BOTH)
  return marked(pool, asked, lambda completion, _: texts[completion.answer])


def test_several_rewards_are_summed_and_kept_apart(pool):
  """5: 1 + 0.25, 0 - 0.25, 0 + 0.25; the first says who is right."""
  group = several(pool, ['4', 'four', 'xyz'])
  np.testing.assert_array_equal(group.verdicts, [1.25, -0.25, 0.25])
  np.testing.assert_array_equal(group.components['right'], [1, 0, 0])
  np.testing.assert_array_equal(group.components['short'], [1, -1, 1])
  np.testing.assert_array_equal(group.passed, [True, False, False])
  assert ledger.pass_rates([group]).tolist() == [1 / 3]
  numbers = ledger.averages([group])
  assert numbers['pass_rate'] == numbers['pass_rate/toy'] == 1 / 3
  assert numbers['reward/mean'] == pytest.approx(1.25 / 3)
  assert numbers['reward/toy/right'] == pytest.approx(1 / 3)
  assert numbers['reward/toy/short'] == pytest.approx(1 / 3)
  line = ledger.line(ledger.Entry(group, 'trained'))
  assert line['components'] == {'right': [1, 0, 0], 'short': [1, -1, 1]}
  samples = evaluation.sample_lines(group, lambda completion: '')
  assert samples[1]['components'] == {'right': 0.0, 'short': -1.0}
  assert samples[1]['reward'] == -0.25


def test_a_carried_group_keeps_its_rewards_apart(pool):
  group = several(pool, ['4', 'four'])
  packed = json.loads(json.dumps(ledger.pack(group)))
  request = group.request
  again = ledger.unpack(packed, request.prompt, request.sampling)
  np.testing.assert_array_equal(again.components['short'], [1, -1])
  np.testing.assert_array_equal(again.passed, group.passed)
  fewer = dataclasses.replace(request.prompt, rewards=(RIGHT,))
  with pytest.raises(ValueError, match=r"rewards \['right', 'short'\], expected"):
    ledger.unpack(packed, fewer, request.sampling)


def test_an_answer_that_nobody_grades_scores_the_lowest_of_each(pool):
  finishes = ['aborted', 'stop']
  group = several(pool, ['4', '4'], finishes=finishes, bundle=EVALUATION)
  np.testing.assert_array_equal(group.verdicts, [-0.25, 1.25])
  np.testing.assert_array_equal(group.components['short'], [-1, 1])
  paused = several(
    pool, ['4', '4'], finishes=['paused', 'stop'], relief=Relief(pause_after=2)
  )
  assert paused.is_paused and paused.components.keys() == {'right', 'short'}


@pytest.mark.parametrize(
  'texts, kind',
  [
    (['4', '4', '4', '4', '4'], 'easy'),
    (['five', 'five', 'five', 'five', 'five'], 'hard'),
    (['5', '5', '5', '5', '5'], 'hard'),  # wrong, though not the lowest sum
    (['4', '4', '4', '4', '5'], 'useful'),
    (['5', 'five', '5', '5', '5'], 'useful'),  # worth different: there is a gradient
  ],
)
def test_prompts_sleep_by_the_reward_that_decides(pool, texts, kind):
  group = several(pool, texts)
  assert ledger.kinds([group]) == [kind]
  source = Source(Snooze({'toy': 9}, {'toy': 1.0}, seed=0, factor=5, hard_delay=3))
  source.observe('toy', [3], [group])
  assert source.asleep('toy', [3]).tolist() == [kind in ('easy', 'hard')]


def test_equal_sums_of_different_answers_are_constant(pool):
  """One right and long, the other wrong and short: nothing to learn, nobody's best."""
  parts = (RIGHT, dataclasses.replace(SHORT, weight=0.5))
  asked = job(['stop'] * 2, **BOTH | dict(rewards=parts, max_reward=1.5, answer='four'))
  group = marked(pool, asked, lambda c, _: ['four', 'xyz'][c.answer])
  np.testing.assert_array_equal(group.verdicts, [0.5, 0.5])
  assert ledger.kinds([group]) == ['constant']
  assert ledger.pass_rates([group]).tolist() == [0.5]


def test_held_out_rewards_are_told_one_by_one(pool):
  group = several(pool, ['4', 'four'], bundle=EVALUATION)

  class Given:
    def evaluate(self, requests):
      return [group]

  of = group.request
  found = evaluation.evaluate(Given(), [of.prompt], of.sampling, samples=2)
  metrics = evaluation.as_metrics(found)
  assert metrics['eval/toy/pass@1'] == 0.5
  assert metrics['eval/toy/reward/right'] == 0.5
  assert metrics['eval/toy/reward/short'] == 0.0
  assert found['toy'].numbers['reward_mean'] == 0.5


# --- which verdicts are a maximum ---------------------------------------------------


def graded(verdicts, best, worst=0.0):
  request = toys.request(0, [1, 2], len(verdicts))
  bounds = dict(max_reward=best, min_reward=worst)
  prompt = dataclasses.replace(request.prompt, **bounds)
  return toys.graded(dataclasses.replace(request, prompt=prompt), verdicts)


BOUNDS = [
  (50.1, 0.0),
  (0.1, 0.0),
  (1e-3, 0.0),
  (1e-7, 0.0),
  (1e9, 0.0),
  (16777217.0, 0),
]
BOUNDS += [(1.0, -1.0), (-0.3, -1.0), (0.0, -1.0), (0.0, -1e-5), (1000.1, 1000.0)]


@pytest.mark.parametrize('best, worst', BOUNDS)
def test_the_maximum_passes_whatever_its_size_and_nothing_else_does(best, worst):
  """10: 50.1 is 50.09999847 in float32."""
  near = best - (best - worst) / 20
  group = graded([best, best, worst, near], best, worst)
  assert group.verdicts.dtype == np.float32
  assert group.passed.tolist() == [True, True, False, False]
  assert ledger.pass_rates([group]).tolist() == [0.5]
  assert ledger.averages([group])['pass_rate'] == 0.5
  groups = [
    graded(verdicts, best, worst)
    for verdicts in ([best] * 5, [worst] * 5, [near] * 5, [best, best, worst])
  ]
  assert ledger.kinds(groups) == ['easy', 'hard', 'constant', 'useful']
  assert (ledger.pass_rates(groups) == [1, 0, 0, 2 / 3]).all()
  prompts = [dataclasses.replace(groups[0].request.prompt, index=i) for i in range(4)]
  source = Source(Snooze({'toy': 9}, {'toy': 1.0}, seed=0, factor=5))
  groups = [
    dataclasses.replace(g, request=dataclasses.replace(g.request, draw=i, prompt=p))
    for i, (g, p) in enumerate(zip(groups, prompts, strict=True))
  ]
  source.observe('toy', range(4), groups)
  assert source.asleep('toy', range(4)).tolist() == [True, False, False, False]
  useful = group_advantages(groups[3].rewards, divide_by_std=False)
  assert useful[0] > 0 > useful[2]


def test_without_a_declared_maximum_1_passes():
  assert graded([1.0, 0.5, 7.0], None).passed.tolist() == [True, False, True]


# --- what the graders see -----------------------------------------------------------


def spelling(*words):
  """A tokenizer whose tokens are these words; the last one ends a text."""
  plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, words[0]))
  plain.decoder = decoders.Fuse()
  return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=words[-1])


WORDS = ('x', '4', '2', '. So', '.', 'E', 'ND', 'END', ' THE ', '</a', '>', '|end|')
EOS = len(WORDS) - 1


def spelt(*words):
  return np.array([WORDS.index(word) for word in words], np.int32)


@pytest.mark.parametrize(
  'words, strings, text',
  [
    (['4', '2', '.'], ['.'], '42'),  # the issue's
    (['4', '2', '. So'], ['.'], '42'),  # and the rest of its token
    (['4', '2', '</a', '>'], ['</a>'], '42'),  # over two tokens
    (['4', '2', '. So'], ['So', '.'], '42'),  # of several in a token the first
    (['4', '2', 'END'], ['END', 'EN'], '42'),
    (['4', '2', 'END'], ['END', 'ND'], '42'),  # complete at once: the longer
    (['4', '2', ' THE ', 'END'], ['END', ' THE END'], '42'),
    (['4', '2', '|end|'], ['|end|'], '42'),  # a token that ends, and shows
    (['4', '2', 'E', '|end|'], ['E|end|'], '42'),  # part of one
    (['4', '2', '|end|'], ['.'], '42'),  # ended without one
    (['4', '2', 'E', 'ND'], ['.'], '42END'),  # by its length
    (['4', '2', '.'], [], '42.'),
    (['.'], ['.'], ''),
  ],
)
def test_graded_text_ends_before_the_stop_string(pool, words, strings, text):
  """9: by characters; tokens and log-probs stay as they were sampled."""
  tokenizer, tokens = spelling(*WORDS), spelt(*words)
  assert answer_text(tokenizer, tokens, (EOS,), strings) == text
  asked = job(['stop'], answer=text or '-')
  (request,), (key,) = asked.requests, asked.here.completions
  how = dict(stop_ids=(EOS,), stop_strings=tuple(strings))
  request = dataclasses.replace(
    request, sampling=dataclasses.replace(request.sampling, **how)
  )
  logps = np.full(len(tokens), -0.5, np.float32)
  asked.requests = [request]
  asked.here.completions[key] = completion = dataclasses.replace(
    asked.here.completions[key], tokens=tokens, logps=logps
  )

  has_tokenizer = types.SimpleNamespace(_tokenizer=tokenizer)
  text_of = functools.partial(DeviceEngine.text_of, has_tokenizer)
  group = marked(pool, asked, text_of)
  np.testing.assert_array_equal(group.verdicts, [1.0 if text else 0.0])
  assert group.completions == (completion,) and group.lengths.tolist() == [len(words)]
  [line] = evaluation.sample_lines(group, lambda c: text_of(c, request.sampling))
  assert (line['text'], line['length']) == (text, len(words))


def test_a_stop_string_of_characters_that_tokens_cut_is_found(tmp_path):
  """'é' is two tokens of bytes, and so is the '\u2581' that is no part of it."""
  tokenizer = build_byte_tokenizer(tmp_path)
  for text, strings, expected in (
    ('42é', ['é'], '42'),
    ('4é2', ['2'], '4é'),
    ('\u25812é', ['é', 'x'], '\u25812'),
  ):
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert answer_text(tokenizer, tokens, (), strings) == expected


@given(
  st.text('ab', max_size=12),
  st.lists(st.text('ab', min_size=1, max_size=4), max_size=3),
)
def test_it_is_the_string_that_a_reader_of_characters_would_stop_at(text, strings):
  for end in range(len(text) + 1):
    there = [s for s in strings if text[:end].endswith(s)]
    if there:
      assert before_stop_string(text, strings) == text[: end - max(map(len, there))]
      return
  assert before_stop_string(text, strings) == text
