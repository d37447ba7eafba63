"""Files of records: nothing in them is changed on the way, or the place is named."""

import datetime
import decimal
import json

import numpy as np
import pyarrow
from pyarrow import parquet
import pytest

from jaxrl_sched.control.difficulty import read_rates
from jaxrl_sched.device.records import read_examples
from jaxrl_sched.device.sources import open_source
from jaxrl_sched.host import rewards, strict_json
from jaxrl_sched.types import Prompt


def lines_of(folder, *lines: str):
  (folder / 'd.jsonl').write_text('\n'.join(lines))
  return open_source('d.jsonl', {}, folder)


def rows_of(folder, **columns):
  parquet.write_table(pyarrow.table(columns), folder / 'd.parquet')
  return open_source('d.parquet', {}, folder)


GOOD = '{"prompt": "x", "answer": 1}'


@pytest.mark.parametrize(
  'line, said',
  [
    ('{"prompt": "x", "answer": 1, "answer": 2}', 'answer given twice'),
    ('{"prompt": "x", "meta": {"a": 1, "a": 1}}', 'a given twice'),  # inside, and equal
    ('{"prompt": "x", "answer": NaN}', 'NaN is no number of JSON'),
    ('{"prompt": "x", "answer": -Infinity}', '-Infinity is no number of JSON'),
    ('{"prompt": "x", "answer": 1e999}', '1e999 is too large'),
    ('{"a": ' + '[' * 100_000 + ']' * 100_000 + '}', 'nested too deeply'),
  ],
)
def test_what_python_would_change_is_refused_by_line(tmp_path, line, said):
  source = lines_of(tmp_path, GOOD, line)
  with pytest.raises(ValueError) as caught:
    source[1]
  assert str(caught.value) == f'{tmp_path}/d.jsonl, line 2: not JSON: {said}'
  with pytest.raises(ValueError, match=f'line 2: not JSON: {said}'):
    read_examples('d.jsonl', tmp_path)


def test_a_large_whole_number_is_exact():
  digits = '1234567890123456789012345678901'
  assert strict_json.loads(f'[{digits}, 1e3]') == [int(digits), 1000.0]


def test_a_table_of_pass_rates_says_each_thing_once(tmp_path):
  table = tmp_path / 'table.jsonl'
  for line, said in (
    ('{"id": "a/0", "pass_rate": 0.1, "pass_rate": 0.9}', 'pass_rate given twice'),
    ('{"id": "a/0", "pass_rate": NaN}', 'NaN is no number'),
  ):
    table.write_text(line)
    with pytest.raises(ValueError, match=f'table.jsonl, line 1: not JSON: {said}'):
      read_rates(table, {'a': ['a/0']})


@pytest.mark.parametrize(
  'kind, value, expected',
  [
    (pyarrow.decimal128(9, 2), decimal.Decimal('0.10'), 0.1),
    (pyarrow.decimal128(9, 2), decimal.Decimal('42.00'), 42),
    (pyarrow.decimal256(60, 30), decimal.Decimal('0.' + '1' * 30), '0.' + '1' * 30),
    (pyarrow.float32(), 0.1, 0.1),
    (pyarrow.float16(), np.float16(0.1), 0.1),
    (pyarrow.int64(), 2**62 + 1, 2**62 + 1),
    (pyarrow.date32(), datetime.date(2024, 7, 26), '2024-07-26'),
    (pyarrow.timestamp('s'), datetime.datetime(2024, 7, 26, 9), '2024-07-26T09:00:00'),
    (
      pyarrow.list_(pyarrow.decimal128(3, 1)),
      [decimal.Decimal('0.5'), None],
      [0.5, None],
    ),
    (
      pyarrow.struct([('a', pyarrow.float32())]),
      {'a': 0.3},
      {'a': 0.3},
    ),
    (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), 'b', 'b'),
  ],
  ids=str,
)
def test_parquet_gives_what_json_would_hold(tmp_path, kind, value, expected):
  """Decimals are numbers; a float of 32 bits has its own digits, not 64 bits of them."""
  array = pyarrow.array([None, value], kind)
  source = rows_of(tmp_path, answer=array)
  assert source[0] == {'answer': None}
  assert source[1] == {'answer': expected}
  assert type(source[1]['answer']) is type(expected)
  json.dumps(source[1])  # as samples.jsonl has it


def test_a_decimal_answer_is_graded_exactly(tmp_path):
  values = [
    decimal.Decimal(text) for text in ('0.10', '3.00', '0.1000000000000000000001')
  ]
  source = rows_of(tmp_path, answer=pyarrow.array(values, pyarrow.decimal128(30, 22)))
  grade = rewards.resolve('final_number')
  for i, (right, wrong) in enumerate(
    [('0.1', '0.11'), ('3', '3.01'), ('0.1000000000000000000001', '0.1')]
  ):
    answer = source[i]['answer']
    rewards.check_answer('final_number', answer)
    given = dict(id='d/0', dataset='d', index=0, tokens=np.zeros(1, np.int32), text='')
    prompt = Prompt(**given, answer=answer, reward='final_number')
    assert (grade(right, prompt), grade(wrong, prompt)) == (1, 0)


def test_what_other_rows_hold_is_not_made_up(tmp_path):
  """Arrow fills in null: a tool would have the parameters of all others."""
  tools = [[{'name': 'f', 'properties': {key: {'type': 'string'}}}] for key in 'ab']
  source = rows_of(tmp_path, tools=pyarrow.array(tools))
  assert [source[i]['tools'] for i in range(2)] == tools


def test_columns_of_one_name_are_refused(tmp_path):
  table = pyarrow.Table.from_arrays(
    [pyarrow.array(['a']), pyarrow.array([1]), pyarrow.array([2])],
    names=['prompt', 'answer', 'answer'],
  )
  parquet.write_table(table, tmp_path / 'd.parquet')
  with pytest.raises(ValueError, match=r"d\.parquet: column 'answer' given twice"):
    open_source('d.parquet', {}, tmp_path)
