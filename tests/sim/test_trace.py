"""A recorded run answers again as it did, and what no run wrote is refused."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl_sched.control import ledger
from jaxrl_sched.sim.groups import whole_groups
from jaxrl_sched.sim.records import read
from jaxrl_sched.sim.trace import Trace
from jaxrl_sched.sim.workload import FINISHES, Dataset, Workload
from jaxrl_sched.types import Relief, Request, Reward, Sampling

LIMIT = 50
SAMPLING = Sampling(max_new_tokens=LIMIT)
PROMPTS = Workload({'a': Dataset(count=9), 'b': Dataset(count=9)}).prompts


def line(draw=0, **fields):
  """A group of two answers to a/1."""
  return {
    'step': 3,
    'draw': draw,
    'prompt_id': 'a/1',
    'dataset': 'a',
    'size': 2,
    'lengths': [7, 50],
    'predicted_length': 12.5,
    'verdicts': [1.0, 0.0],
    'rewards': [1.0, -0.5],
    'finish': ['stop', 'length'],
    'faults': [None, 'timeout'],
    'versions': [3, 3],
    'fate': 'trained',
    'reason': '',
    'weights': [1.0, 2.0],
  } | fields


def written(tmp_path, lines):
  path = tmp_path / 'rollouts.jsonl'
  texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
  path.write_text('\n'.join(texts) + '\n')
  return path


def trace(tmp_path, lines, limit=LIMIT):
  return Trace(written(tmp_path, lines), PROMPTS, limit=limit)


def request(draw, size=2, *, dataset='a', index=1, **how):
  prompt = PROMPTS.get(dataset, index)
  return Request(draw=draw, prompt=prompt, size=size, sampling=SAMPLING, **how)


# --- answers --------------------------------------------------------------------------


def test_a_recorded_request_gets_the_answers_of_then(tmp_path):
  found = trace(tmp_path, [line(4), line(5, lengths=[1, 2])])
  answers = found.answers_of([request(5), request(4)], 9)
  assert answers.starts.tolist() == [0, 2, 4]
  assert answers.lengths.tolist() == [1, 2, 7, 50]
  assert answers.verdicts.tolist() == [1, 0, 1, 0]
  assert answers.rewards.tolist() == [1, -0.5, 1, -0.5]
  assert [FINISHES[i] for i in answers.finish] == ['stop', 'length'] * 2
  assert answers.faults == {0: (None, 'timeout'), 1: (None, 'timeout')}
  assert (found.recorded, found.drawn) == (2, 0)


@pytest.mark.parametrize(
  'other', [request(8), request(4, 3), request(4, index=2), request(4, 2, dataset='b')]
)
def test_any_other_is_answered_by_lot(tmp_path, other):
  # Of another draw, size or prompt.
  lines = [line(4), line(6, prompt_id='b/1', dataset='b', lengths=[30, 31])]
  found = trace(tmp_path, lines)
  answers = found.answers_of([other], 0)
  near = [30, 31] if other.prompt.dataset == 'b' else [7, 50]
  assert set(answers.lengths.tolist()) <= set(near)
  assert len(answers.lengths) == other.size
  assert (found.recorded, found.drawn) == (0, 1)


def test_a_lot_falls_on_groups_of_the_prompt_that_are_near(tmp_path):
  lines = [
    line(draw, lengths=[draw, draw], prompt_id=f'a/{index}')
    for index in (1, 2)
    for draw in range(index, 49, 2)
  ]
  found = trace(tmp_path, lines)
  answers = found.answers_of([request(1000 + i, 40) for i in range(20)], 0)
  assert set(answers.lengths.tolist()) == {45, 47}  # the two last of a/1
  answers = found.answers_of([request(20, 400)], 0)
  assert set(answers.lengths.tolist()) == {19, 21}


def test_an_unseen_prompt_is_answered_by_one_group_of_its_dataset(tmp_path):
  lines = [line(draw, lengths=[draw, draw + 20]) for draw in range(1, 21)]
  found = trace(tmp_path, lines)
  seen = set()
  for draw in range(1000, 1100):
    lengths = found.answers_of([request(draw, 30, index=5)], 0).lengths
    low = lengths.min()
    assert set(lengths.tolist()) <= {low, low + 20}  # alike, as a prompt's answers are
    seen.add(int(low))
  assert seen == set(range(13, 21))


def test_lots_do_not_hang_on_company(tmp_path):
  lines = [line(draw, lengths=[draw, draw + 20]) for draw in range(1, 21)]
  found = trace(tmp_path, lines)
  asked = [request(draw, 5, index=5) for draw in range(30, 40)]
  together = found.answers_of(asked, 0).lengths.reshape(10, 5)
  alone = [found.answers_of([one], 0).lengths.tolist() for one in reversed(asked)]
  assert together.tolist() == alone[::-1]


def test_spare_answers_come_by_lot_behind_the_recorded_ones(tmp_path):
  found = trace(tmp_path, [line(4)])
  answers = found.answers_of([request(4, relief=Relief(spare=3))], 0)
  assert answers.lengths.tolist()[:2] == [7, 50] and len(answers.lengths) == 5


def test_a_dataset_without_a_record_is_refused(tmp_path):
  with pytest.raises(ValueError, match="no answer to a prompt of dataset 'b'"):
    trace(tmp_path, [line(4)]).answers_of([request(9, dataset='b')], 0)


def test_it_is_told_which_file_lacks_a_dataset(tmp_path):
  with pytest.raises(ValueError, match=r'rollouts\.jsonl: no answer to a prompt'):
    trace(tmp_path, [line(4)]).answers_of([request(9, dataset='b')], 0)


@pytest.mark.parametrize('torn', ['{"step": 3, "dr', '{"step": 3, "dataset": "\xe4'])
def test_a_torn_last_line_is_passed_over(tmp_path, torn):
  path = written(tmp_path, [line(4)])
  with path.open('ab') as file:
    file.write(torn.encode()[:-1])  # in the middle of a letter, once
  assert [record.draw for record in read(path)] == [4]


def test_what_paused_answers_had_before_is_read(tmp_path):
  runs = [[[3, 1], [3, 2]], []]
  (record,) = read(written(tmp_path, [line(1, earlier=runs)]))
  assert record.earlier == runs


@pytest.mark.parametrize(
  'asp, said',
  [
    ({'pause_after': 64}, 'asp.pause_after=64, expected a run with 0'),
    (
      {'first_finished': True, 'spare': 1},
      'asp.first_finished=True, expected a run with',
    ),
  ],
)
def test_a_run_that_did_not_keep_all_is_refused(tmp_path, asp, said):
  (tmp_path / 'config.json').write_text(json.dumps({'asp': asp}))
  with pytest.raises(ValueError, match=said) as error:
    trace(tmp_path, [line(4)])
  assert 'rollouts.jsonl: ' in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('asp', [{'spare': 2, 'first_finished': False}, None])
def test_a_run_that_kept_the_first_answers_is_a_trace(tmp_path, asp):
  (tmp_path / 'config.json').write_text(json.dumps({'asp': asp}))
  found = trace(tmp_path, [line(4, spares=[3])])
  assert found.answers_of([request(4)], 0).lengths.tolist() == [7, 50]
  quick = request(4, relief=Relief(spare=1, first_finished=True))
  with pytest.raises(ValueError, match=r'jsonl:1: spare.*none with asp.first_finished'):
    found.answers_of([quick], 0)


def test_a_verifier_without_a_maximum_gives_any_verdict(tmp_path):
  class Free:
    sizes, ids = PROMPTS.sizes, PROMPTS.ids

    def get(self, dataset, index):
      return dataclasses.replace(PROMPTS.get(dataset, index), max_reward=None)

  path = written(tmp_path, [line(4, verdicts=[17.0, 1.0])])
  Trace(path, Free(), limit=LIMIT)
  with pytest.raises(
    ValueError, match='jsonl:1: verdicts .*17.*at most the 1 of prompt'
  ):
    Trace(path, PROMPTS, limit=LIMIT)


class Several:
  """The prompts, with two rewards each: -1 or 1 and, for 0.5, 0 to 2."""

  sizes, ids = PROMPTS.sizes, PROMPTS.ids

  def get(self, dataset, index):
    parts = (
      Reward(name='right', verifier='x', min_reward=-1.0),
      Reward(name='style', verifier='y', weight=0.5, max_reward=2.0),
    )
    bounds = dict(max_reward=2.0, min_reward=-1.0, rewards=parts)
    return dataclasses.replace(PROMPTS.get(dataset, index), **bounds)


def test_several_rewards_are_answered_as_recorded(tmp_path):
  parts = {'right': [1.0, -1.0], 'style': [0.0, 2.0]}
  lines = [line(4, verdicts=[1.0, 0.0], components=parts)]
  found = Trace(written(tmp_path, lines), Several(), limit=LIMIT)
  asked = dataclasses.replace(request(4), prompt=Several().get('a', 1))
  answers = found.answers_of([asked], 0)
  (group,) = whole_groups([asked], 0, answers, answers.rewards)
  assert group.passed.tolist() == [True, False]  # by the first, whatever the sum is
  assert group.components['style'].tolist() == [0.0, 2.0]
  again = {'step': 3} | ledger.line(ledger.Entry(group, 'trained'))
  assert read(written(tmp_path, [again]))[0].components == parts


@pytest.mark.parametrize(
  'fields, said',
  [
    (
      {},
      "components \\[\\], expected the rewards of dataset 'a': \\['right', 'style'\\]",
    ),
    (dict(components={'right': [1, 1]}), "components \\['right'\\], expected the rew"),
    (
      dict(components={'right': [1], 'style': [1, 1]}),
      'components .*lists of 2 finite',
    ),
    (dict(components=[1, 1]), 'components .*lists of 2 finite numbers by name'),
    (
      dict(components={'right': [1, 1], 'style': [1, 1]}, verdicts=[-1.5, 0]),
      'verdicts .* expected at least the -1 of prompt',
    ),
  ],
)
def test_other_rewards_than_were_recorded_are_refused(tmp_path, fields, said):
  with pytest.raises(ValueError, match=f'jsonl:1: {said}'):
    Trace(written(tmp_path, [line(4, **fields)]), Several(), limit=LIMIT)


def test_negative_rewards_are_refused_where_none_are_declared(tmp_path):
  with pytest.raises(ValueError, match='jsonl:1: verdicts .* at least the 0 of prompt'):
    trace(tmp_path, [line(4, verdicts=[-1.0, 1.0])])
  with pytest.raises(
    ValueError, match=r"jsonl:1: components \['x'\], expected .* one,"
  ):
    trace(tmp_path, [line(4, components={'x': [1, 1]})])


def test_the_fields_are_those_that_the_ledger_writes(tmp_path):
  workload = Workload({'a': Dataset(count=9)})
  asked = request(4, predicted_length=12.344, predicted_longest=20.678)
  found = workload.answers_of([asked], 0)
  (group,) = whole_groups([asked], 0, found, found.verdicts)
  told = {'step': 0} | ledger.line(ledger.taken(group, np.ones(2), np.ones(2, bool)))
  (record,) = read(written(tmp_path, [told]))
  assert (record.predicted_length, record.predicted_longest) == (12.34, 20.68)
  again = trace(tmp_path, [told], limit=None)
  answers = again.answers_of([asked], 0)
  assert again.recorded == 1
  assert answers.lengths.tolist() == found.lengths.tolist()
  assert answers.verdicts.tolist() == found.verdicts.tolist()


def test_what_older_runs_wrote_is_read(tmp_path):
  """Without a bound on lengths, and with spare answers that never ran."""
  assert 'predicted_longest' not in line()
  old, new = read(
    written(tmp_path, [line(1, spares=[0, 4, 0]), line(2, predicted_longest=20.5)])
  )
  assert (old.predicted_longest, old.spares) == (None, [4])
  assert (new.predicted_longest, new.spares) == (20.5, [])


# --- refusals -------------------------------------------------------------------------


def without(key):
  return {k: v for k, v in line(1).items() if k != key}


@pytest.mark.parametrize(
  'bad, said',
  [
    ('{"step": 3, "dr', 'not JSON'),
    ('[1, 2]', 'expected the fields of a group'),
    (line(1, speed=3), "unknown field 'speed'"),
    (without('verdicts'), "field 'verdicts' is missing"),
    (line(0), 'draw 0 is already in line 1'),
    (line(-1), 'draw -1, expected a whole number from 0'),
    (line(1, lengths=[-7, 5]), 'lengths .*-7.*, expected each from 1 to 50'),
    (line(1, lengths=[0, 5]), 'lengths .*, expected each from 1 to 50'),
    (line(1, lengths=[7, 51]), 'lengths .*51.*, expected each from 1 to 50'),
    (line(1, lengths=[7, 5.5]), 'lengths .*, expected each from 1 to 50'),
    (line(1, lengths=[7]), 'lengths .*, expected a list of 2 entries'),
    (line(1, size=3), 'lengths .*, expected a list of 3 entries'),
    (line(1, verdicts=[1.0]), 'verdicts .*, expected a list of 2 entries'),
    (line(1, rewards=[1.0, None]), 'rewards .*, expected finite numbers'),
    (line(1, finish=['stop', 'tired']), 'finish .*, expected each one of stop'),
    (line(1, faults=[None, 3]), 'faults .*, expected text or null'),
    (line(1, versions=[3, 4]), 'versions .*, expected each from 0 to the step, 3'),
    (line(1, weights=[1.0, -1.0]), 'weights .*, expected numbers from 0'),
    (line(1, fate='lost'), "fate 'lost', expected one of trained"),
    (line(1, predicted_length=-3), 'predicted_length -3, expected a number above 0'),
    (line(1, spares=[-1]), 'spares .*, expected a list of tokens'),
    (line(1, predicted_longest=0), 'predicted_longest 0, expected a number above 0'),
    (line(1, earlier=[[[7, 1]], []]), 'earlier .*, expected for each of 2 answers'),
    (line(1, earlier=[[[0, 1]], []]), 'earlier .*, expected for each of 2 answers'),
    (line(1, earlier=[[[2, -1]], []]), 'earlier .*, expected for each of 2 answers'),
    (line(1, earlier=[[[2]], []]), 'earlier .*, expected for each of 2 answers'),
    (line(1, earlier=[[]]), 'earlier .*, expected for each of 2 answers'),
    (line(1, earlier='x'), 'earlier .*, expected for each of 2 answers'),
    (line(1, earlier=[[], [[2, 1]]]), 'earlier tokens, of a run with asp.pause_aft'),
    (line(1, finish=['stop', 'paused']), "finish 'paused', of a run with asp.pause_"),
    (line(1, verdicts=[-1e31, 0.0]), r'verdicts .*, expected none above 1e\+30'),
    (line(1, rewards=[1e31, 0.0]), r'rewards .*, expected none above 1e\+30'),
    (line(1, rewards=[10**400, 0.0]), 'rewards .*, expected finite numbers'),
    (line(1, verdicts=[1.5, 0.0]), 'verdicts .*, expected at most the 1 of prompt'),
    (line(2**53), 'draw 9007199254740992, expected one below'),
    (line(1, step=2**53), 'step 9007199254740992, expected one below'),
    (line(1, round=2**53), 'round 9007199254740992, expected a number'),
    (line(1, step='3'), "step '3', expected a whole number from 0"),
    (line(1, dataset='c', prompt_id='c/1'), "dataset 'c', expected one of a, b: .*run"),
    (
      line(1, prompt_id='a/77'),
      "prompt 'a/77', expected one of the 9 of .* 'a': .*run",
    ),
  ],
)
def test_bad_input_is_refused_with_its_line(tmp_path, bad, said):
  lines = [line(0), line(50), bad, line(51)]
  with pytest.raises(ValueError, match=said) as error:
    trace(tmp_path, lines)
  assert 'rollouts.jsonl:3: ' in str(error.value)
  assert '\n' not in str(error.value)


def test_a_file_that_is_empty_or_is_not_there_is_refused(tmp_path):
  with pytest.raises(ValueError, match='no line, expected a group at least'):
    trace(tmp_path, [''])
  path = tmp_path / 'weights.bin'
  path.write_bytes(bytes(range(128, 256)))
  with pytest.raises(ValueError, match=r'weights\.bin:1: not JSON'):
    Trace(path, PROMPTS)
  with pytest.raises(ValueError, match='cannot be read'):
    Trace(tmp_path / 'none.jsonl', PROMPTS)
