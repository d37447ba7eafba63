"""What a dataset says of its rewards, and which mistakes show before anything costs."""

import json
import pathlib
import re

import pytest
from toys import compilations

from jaxrl_sched import config, settings, train
from jaxrl_sched.device import records
from jaxrl_sched.device.prompts import PromptSet
from jaxrl_sched.device.tokenizers import build_byte_tokenizer
from jaxrl_sched.types import Reward

SMOKE = str(pathlib.Path(__file__).parents[2] / 'configs' / 'smoke.py')
SOURCE = dict(source='d.jsonl')
MINE = """
def length(text, prompt):
  return -float(len(text))

def broken(text, prompt):
  return prompt.meta['gold']
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
  (tmp_path / 'rewards_of_mine.py').write_text(MINE)
  monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def opened(tmp_path):
  tokenizer = build_byte_tokenizer(tmp_path / 'bytes')

  def opened(lines, **dataset) -> PromptSet:
    (tmp_path / 'd.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    how = dict(tokenizer=tokenizer, template='{prompt}', max_tokens=64, root=tmp_path)
    return PromptSet({'d': SOURCE | dataset}, **how)

  return opened


SEVERAL = dict(
  short=dict(
    verifier='rewards_of_mine:length', weight=0.1, max_reward=0.0, min_reward=-50.0
  ),
  right=('final_number', 1.0),
  also=dict(verifier='exact', weight=0.5, max_reward=2.0),
)


def test_several_rewards_reach_the_prompt_with_the_bounds_of_their_sum(opened):
  """5: 1 + 0.5 * 2 + 0.1 * 0 at the most, 0.1 * -50 at the least."""
  data = opened([dict(prompt='1+1=', answer=2)], rewards=SEVERAL)
  prompt = data.get('d', 0)
  assert [reward.name for reward in prompt.rewards] == ['right', 'also', 'short']
  assert prompt.rewards[0] == Reward(name='right', verifier='final_number')
  assert (prompt.max_reward, prompt.min_reward, prompt.reward) == (2.0, -5.0, '')
  assert data.rewards == {'final_number', 'exact', 'rewards_of_mine:length'}
  other = opened([dict(prompt='1+1=', answer=2)], rewards=SEVERAL, decides='also')
  assert [r.name for r in other.get('d', 0).rewards] == ['also', 'right', 'short']


def test_one_reward_may_be_negative(opened):
  prompt = opened([dict(prompt='?', answer=2)], min_reward=-1).get('d', 0)
  assert (prompt.max_reward, prompt.min_reward, prompt.rewards) == (1.0, -1, ())
  assert prompt.graded_by == (Reward(verifier='final_number', min_reward=-1),)


def test_rewards_mean_the_same_from_the_config_of_a_workdir():
  """Where tuples are lists and keys are in alphabetical order."""
  given = SOURCE | dict(rewards=SEVERAL)
  again = json.loads(settings.dumps(given))
  assert list(again['rewards']) != list(SEVERAL)
  one, two = (records.checked('d', x).of_prompt for x in (given, again))
  assert one == two


def test_a_sum_without_a_bound_has_none():
  free = dict(verifier='rewards_of_mine:length', weight=0.1, max_reward=None)
  found = records.checked('d', SOURCE | dict(rewards=dict(a=('exact', 1), b=free)))
  assert found.of_prompt['max_reward'] is None
  assert found.of_prompt['min_reward'] == 0


@pytest.mark.parametrize(
  'dataset, message',
  [
    (dict(rewards=SEVERAL, reward='exact'), "reward: expected in each of 'rewards'"),
    (dict(rewards=SEVERAL, max_reward=2.0), "max_reward: expected in each of 'rewa"),
    (dict(rewards=SEVERAL, min_reward=0.0), "min_reward: expected in each of 'rewa"),
    (dict(decides='right'), "decides: expected beside 'rewards' only"),
    (dict(rewards=SEVERAL, decides='rihgt'), "decides='rihgt', expected one of ['als"),
    (dict(rewards={}), 'rewards: expected at least one of a weight above 0, found {}'),
    (dict(rewards=['exact']), "rewards: expected a dict, found ['exact']"),
    (dict(rewards=dict(a='exact')), "a: expected ('verifier', weight), or dict(ver"),
    (dict(rewards=dict(a=('exact', '1'))), "a, weight: expected a number, found '1'"),
    (dict(rewards=dict(a=('exact', -1))), 'a, weight: expected 0 or more, found -1'),
    (dict(rewards=dict(a=('exact', 0))), 'expected at least one of a weight above 0'),
    (dict(rewards=dict(a=('exat', 1))), "'exat' is unknown: did you mean 'exact'?"),
    (
      dict(rewards=dict(a=('exact', 1), b=('format', 1))),
      "a and b weigh alike, expected decides='a' or another to say whether",
    ),
    (
      dict(rewards=dict(a=dict(verifier='exact', wieght=2))),
      "a: unknown key 'wieght'; did you mean 'weight'?",
    ),
    (
      dict(rewards=dict(a=dict(verifier='exact', min_reward=1))),
      'a, max_reward: expected above 1 (min_reward), found 1.0',
    ),
    (dict(rewards={'a/b': ('exact', 1)}), "'a/b': expected a name without '/' and"),
    (dict(min_reward='-1'), "min_reward: expected a number, found '-1'"),
    (dict(min_reward=1), 'max_reward: expected above 1 (min_reward), found 1.0'),
    (dict(min_reward=-float('inf')), 'min_reward: expected at most 1e+30 in size'),
    (dict(max_reward=1e31), 'max_reward: expected at most 1e+30 in size, found 1e+31'),
    (
      dict(max_reward=1e9 + 1, min_reward=1e9),
      'max_reward: 1000000001.0 is too near to min_reward=1000000000.0',
    ),
  ],
)
def test_a_reward_that_cannot_be_is_refused(dataset, message):
  with pytest.raises(ValueError) as error:
    records.checked('d', SOURCE | dataset)
  text = str(error.value)
  assert text.startswith("Dataset 'd', ") and message in text and '\n' not in text


@pytest.mark.parametrize(
  'field, found', [('anwser', True), ('answers', True), ('ground_truth', True)]
  + [('label', True), ('Answer', True), ('target', True), ('topic', False)]
)  # fmt: skip
def test_a_field_that_may_be_the_answer_is_named(opened, field, found):
  """4: where no record has 'answer', and the verifier is the user's own."""
  own, lines = 'rewards_of_mine:length', [{'prompt': 'a', field: 4}, {'prompt': 'b'}]
  bounds = dict(max_reward=0, min_reward=-99)
  assert opened(lines, reward=own, **bounds).unanswered == (
    {'d': field} if found else {}
  )
  answered = [*lines, dict(prompt='c', answer=1)]
  assert opened(answered, reward=own, **bounds).unanswered == {}


def run_of(tmp_path, *overrides):
  file = tmp_path / 'd.jsonl'
  file.write_text('\n'.join(json.dumps(dict(prompt=p, anwser=4)) for p in 'abcdefgh'))
  dataset = {'d': dict(source=str(file), reward='rewards_of_mine:broken')}
  data = [('prompts.datasets', repr(dataset)), ('evaluate', 'None'), *overrides]
  return data


def test_a_verifier_that_never_works_ends_a_run_at_its_start(tmp_path, capsys):
  """4: exit code 2 and a line; nothing has been compiled."""
  changes = [f'--config.{key}={value}' for key, value in run_of(tmp_path)]
  with compilations() as compiled:
    workdir = f'--workdir={tmp_path / "run"}'
    assert train.main([f'--config={SMOKE}', workdir, *changes]) == 2
  *_, line = capsys.readouterr().err.splitlines()
  assert line == (
    "error: Dataset 'd', reward 'rewards_of_mine:broken': failed on each of 3 answers "
    "that were tried: raised: KeyError: 'gold'; expected a number for any text"
  )
  assert not compiled


def test_a_misspelt_answer_is_said_before_anything_is_loaded(tmp_path, monkeypatch):
  length = dict(reward='rewards_of_mine:length', max_reward=0, min_reward=-99)
  c = config.read(SMOKE, run_of(tmp_path))
  c['prompts']['datasets']['d'] |= length
  run, said = config.prepare(c), []

  def loads(*args, **how):
    raise InterruptedError

  monkeypatch.setattr(config, '_assemble', loads)
  with pytest.raises(InterruptedError):
    config.build_engine(run, tmp_path / 'run', say=said.append)
  assert re.fullmatch(
    "d: 'rewards_of_mine:length' gives -25 to a made-up ans.*", said[0]
  )
  assert said[1:] == [
    "warning: d: no record has 'answer'; if 'anwser' is meant, "
    "fields=dict(answer='anwser') says so"
  ]


def test_what_math_reads_without_a_box_is_said_by_the_dataset(opened):
  lines = [dict(prompt='1+1=', answer=2)]
  data = opened(lines, reward='math', math=dict(unboxed='last_number'))
  assert data.get('d', 0).reward_options == {'unboxed': 'last_number'}
  for settings_, said in (
    (dict(reward='math', math=dict(unboxd='whole')), "did you mean 'unboxed'"),
    (dict(reward='math', math=dict(unboxed='box')), "expected one of 'whole', "),
    (dict(math=dict(unboxed='whole')), "expected with the reward 'math' only"),
  ):
    with pytest.raises(ValueError, match=said):
      opened(lines, **settings_)


def test_answers_that_math_cannot_read_are_counted_with_the_first_place(opened):
  golds = ['12', r'x\equiv 3\pmod 5', '0.333...', 'no solution']
  lines = [dict(prompt=f'{i}', answer=gold) for i, gold in enumerate(golds)]
  count, where = opened(lines, reward='math').unread['d']
  assert count == 2 and where.endswith('d.jsonl, line 2')
  assert opened(lines, reward='exact').unread == {}
