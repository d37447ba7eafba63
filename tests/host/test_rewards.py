r"""Verifiers give what arithmetic and the table of public faults say.

F and G cases: each row has the right value from the mathematics.
"""

import asyncio
import concurrent.futures
import sys
import time

import numpy as np
import pytest
import reasoning_gym

from jaxrl_sched.host import rewards
from jaxrl_sched.types import Prompt


def prompt(answer=None, *, reward='', max_reward=1.0, **meta) -> Prompt:
  return Prompt(
    id='toy/0',
    dataset='toy',
    index=0,
    tokens=np.array([1], np.int32),
    text='?',
    answer=answer,
    reward=reward,
    max_reward=max_reward,
    meta=meta,
  )


def score(name, text, answer=None, **kwargs) -> float:
  value = rewards.REWARDS[name](text, prompt(answer, **kwargs))
  assert isinstance(value, float)
  return value


# --- final_number


@pytest.mark.parametrize(
  'answer, text, right',
  [
    (42, 'so it is 42', 1),
    (42.0, '42', 1),  # F2
    ('42', '42.0', 1),
    (0.5, 'half: 0.5', 1),
    (0.5, '.50', 1),
    (-3, 'gives -3.', 1),
    (-3, 'gives \u22123', 1),
    (1e3, '1000', 1),
    ('1e3', '1,000', 1),
    ('1,234,567', '1234567', 1),
    ('1234567', 'about $1,234,567.00!', 1),
    (1000, r'\boxed{1{,}000}', 1),
    (5, '10-5', 1),  # an operator is no sign
    (-5, '10-5', 0),
    (-5, '= -5', 1),
    (-5, r'\boxed{-5}', 1),
    (4, '1, 2, 3, 4', 1),
    (2345, '1,2345', 1),  # no thousands: two numbers
    (100, 'in 2020,100', 1),
    (1000, '1 000', 0),
    (42, '42 of 43', 0),  # the last one counts
    (4, '3/4', 0),  # one number, not two
    ('3/4', 'it is 3/4.', 1),
    (0.75, '3/4', 1),
    (2, 'H2', 0),
    (5, '5cm', 1),
    (7, 'none', 0),
    (7, '', 0),
    (7, '7/0', 0),
    (0.1, '0.1', 1),
    (0.1, '0.1000000000000000055511151231257827', 0),  # exact, not in doubles
    (12345678901234567890, '12345678901234567891', 0),
    (7, '1e999999999999', 0),
    (7, '9' * 5000, 0),
    (0, '٣', 0),
  ],
)
def test_the_last_number_is_compared_exactly(answer, text, right):
  """F2."""
  assert score('final_number', text, answer) == right


@pytest.mark.parametrize('name', ['final_number', 'exact', 'math'])
@pytest.mark.parametrize('answer', [True, False, None, [], '', '  ', float('nan')])
def test_answers_that_cannot_be_compared_are_refused_at_load(name, answer):
  """F2."""
  with pytest.raises(ValueError, match='expected a'):
    rewards.check_answer(name, answer)
  with pytest.raises(ValueError, match='expected a'):
    score(name, '1', answer)


@pytest.mark.parametrize('name', ['final_number', 'exact', 'math'])
@pytest.mark.parametrize('answer', [42, 42.0, 0.5, -3, 1e3, '42'])
def test_numbers_of_json_are_answers_like_any_other(name, answer):
  """F2."""
  rewards.check_answer(name, answer)
  text = {0.5: '0.5', -3: '-3', 1e3: '1000'}.get(answer, '42')
  assert score(name, text, answer) == 1


def test_a_word_is_no_answer_to_a_number():
  with pytest.raises(ValueError, match="'forty-two' for reward 'final_number'"):
    rewards.check_answer('final_number', 'forty-two')


def test_what_meta_lacks_is_refused_at_load():
  with pytest.raises(ValueError, match=r"'countdown' needs meta\['target'\]"):
    rewards.check_meta('countdown', {'numbers': [1]})
  with pytest.raises(ValueError, match='expected a regular expression'):
    rewards.check_meta('format', {'pattern': '('})
  rewards.check_meta('final_number', {})


# --- exact, format


def test_exact_ignores_white_space_around_and_nothing_else():
  assert score('exact', ' a b\n', 'a b') == 1
  assert score('exact', 'a  b', 'a b') == 0
  assert score('exact', 'A b', 'a b') == 0


def test_format_wants_the_whole_text_across_lines():
  pattern = r'<think>.*</think>\d+'
  assert score('format', '<think>a\nb</think>12', pattern=pattern) == 1
  assert score('format', '<think>a\nb</think>12 ', pattern=pattern) == 0


def test_what_is_right_earns_the_declared_maximum():
  assert score('exact', 'a', 'a', max_reward=2.5) == 2.5
  assert score('exact', 'a', 'a', max_reward=None) == 1.0


# --- math

TABLE = [
  (r'\frac12', r'\dfrac{1}{2}', 1),
  (r'\frac{1}{2}', '0.5', 1),
  ('1,000', '1000', 1),
  ('1{,}000', '1000', 1),
  ('5', r'5\text{ cm}', 1),
  (r'90^\circ', '90', 1),
  ('(1,2)', '(2,1)', 0),
  ('[0,1)', '[0,1]', 0),
  (r'2\sqrt{3}', r'\sqrt{12}', 1),
  ('x^2+2x+1', '(x+1)^2', 1),
  (r'\text{13}', '13', 1),
  ('4', r'4\sqrt{2}', 0),
  ('-5', '\u22125', 1),
  ('10^{6}', '1e6', 1),
  (r'1\frac{1}{2}', r'\frac{3}{2}', 1),
  ('33.3', r'\frac{100}{3}', 0),
  (r'\text{(B)}', 'B', 1),
  ('x=5', '5', 1),
  ('12345678901234567890', '12345678901234567891', 0),
]


@pytest.mark.parametrize('gold, guess, right', TABLE)
@pytest.mark.parametrize('boxed_gold', [True, False])
def test_the_table_of_expressions(gold, guess, right, boxed_gold):
  """G6."""
  gold = f'\\boxed{{{gold}}}' if boxed_gold else gold
  assert score('math', f'so \\boxed{{{guess}}}.', gold) == right


@pytest.mark.parametrize(
  'text, gold, right',
  [
    (r'so \boxed{\frac{1}{3}}', r'\frac13', 1),  # G2
    (r'\boxed{\sqrt{\frac{2}{3}}}', r'\sqrt{2/3}', 1),
    (r'\boxed{\text{A}}', 'A', 1),
    (r'\boxed{42', '42', 0),
    (r'\boxed{42} no, \boxed{42', '42', 0),
    (r'\boxed 5', '5', 1),
    (r'First \boxed{1}. Correction: \boxed{7}', '7', 1),  # G3
    (r'\boxed{1} or \boxed{7} or \boxed{9}', '7', 0),
    (r'\boxed{7} ... \boxed{9}', '7', 0),
    (r'\boxed{\{1,2\}}', r'\{2,1\}', 1),  # G5
    (r'\boxed{\{1\}}', r'\{1,2\}', 0),
    (r'\boxed{\{1,2,3\}}', r'\{1,2\}', 0),
    (r'\boxed{1728}', '1331 and 1728', 0),
    (r'\boxed{1/2^{98}}', '1/2^{99}', 0),  # G4
    (r'\boxed{\frac{1}{2006!}}', r'\frac{1}{2004!}', 0),
    (r'\boxed{\frac{1}{2004!}}', r'\frac{1}{2004!}', 1),
    (r'\boxed{0}', '10^{-10}', 0),
    (r'\boxed{\sqrt{3}/10^{20}}', r'\sqrt{2}/10^{20}', 0),
    (r'\boxed{\sqrt{8}/10^{20}}', r'2\sqrt{2}/10^{20}', 1),
    (r'\boxed{0.333333}', r'\frac{1}{3}', 0),
    (r'\boxed{}', '1', 0),
    ('', '1', 0),
    ('2', '2', 1),  # no box: the whole text
    ('I do not know', '2', 0),
    (r'\boxed{\boxed{5}}', '5', 1),
    (r'\boxed{7} so \fbox{5}', '5', 1),
    ('It is $7$, no: $5$.', '5', 1),  # no box: the last maths
    (r'It is \(7\), no: \[5\]', '5', 1),
    ('The answer is 5', '5', 0),
    (r'It costs \$5 or \$7', '7', 0),  # a currency
  ],
)
def test_the_last_box_counts_and_counts_whole(text, gold, right):
  """G2 to G5."""
  assert score('math', text, gold) == right


# What a grader has to say of answers as models write them.
WRITTEN = [
  (r'\$5', '5', 1),
  ('$5', r'5\text{ dollars}', 1),
  ('5', '5 dollars', 1),
  ('5', '€5', 1),
  ('5', r'5\,\text{cm}', 1),
  ('5', r'5 \text{ km/h}', 1),
  ('5', r'5\text{ cm}^2', 1),
  (r'\frac{3}{4}\text{ miles}', '0.75', 1),
  ('5', r'6\text{ cm}', 0),
  ('5', r'5 \text{ million}', 0),
  ('5000000', r'5 \text{ million}', 1),
  ('3', r'3 \text{ or } 4', 0),
  ('10', '10 sqrt', 0),
  ('3', '3.0', 1),
  ('5', '5.', 1),
  ('1{,}234.5', '1234.5', 1),
  ('1000000', r'1\,000\,000', 1),
  ('12:30', '12:31', 0),
  (r'0.\overline{3}', r'\frac13', 1),
  (r'\frac16', r'0.1\overline{6}', 1),
  (r'0.\overline{3}', '0.3', 0),
  # A percent sign: a factor of 1/100, or a unit.
  (r'50\%', '50', 1),
  ('50%', '0.5', 1),
  ('50%', r'\frac12', 1),
  ('50', r'50\%', 1),
  ('0.5', r'50\%', 1),
  ('50', r'50\text{ percent}', 1),
  (r'50\%', '5', 0),
  (r'3\%', '0.3', 0),
  (r'3\%', r'4\%', 0),
  # Words and choices.
  ('Monday', r'\text{Monday}', 1),
  (r'\text{Monday}', 'Monday', 1),
  ('Monday', r'\text{Tuesday}', 0),
  ('C', '(C)', 1),
  ('C', r'\textbf{(C)}~5', 1),
  ('C', r'\text{(C) Paris}', 1),
  ('C', r'\text{(D) Paris}', 0),
  ('A', '(A) or (B)', 0),
  ('5', 'x = 5', 1),
  ('x=5', 'y=5', 0),
  # Sets, intervals, pairs, matrices.
  (r'\{1,2\}', '2, 1', 1),
  (r'\pm 5', '-5, 5', 1),
  (r'(-\infty,3]', r'\left(-\infty, 3\right]', 1),
  (r'(0,1)\cup(2,3)', r'(2,3)\cup(0,1)', 1),
  (r'(1,2)\cup\{3\}', r'\{3\}\cup(1,2)', 1),
  ('(1,2)', r'\{1,2\}', 0),
  (r'\emptyset', r'\varnothing', 1),
  (
    r'\begin{pmatrix}1\\2\end{pmatrix}',
    r'\begin{bmatrix}1\\2\end{bmatrix}',
    1,
  ),
  (
    r'\begin{pmatrix}1\\2\end{pmatrix}',
    r'\begin{pmatrix}2\\1\end{pmatrix}',
    0,
  ),
  # Bases, powers.
  ('101_2', '101', 1),
  ('101_2', '101_3', 0),
  ('2^{100}', '1267650600228229401496703205376', 1),
  ('2^{100}', '1267650600228229401496703205377', 0),
  (r'\sqrt{2}', '1.414', 0),
]


@pytest.mark.parametrize('gold, guess, right', WRITTEN)
def test_answers_as_models_write_them(gold, guess, right):
  """G6."""
  assert score('math', f'so \\boxed{{{guess}}}.', gold) == right


def boxed(gold, guess) -> float:
  return score('math', f'so \\boxed{{{guess}}}.', gold)


# The rows of a matrix end in two backslashes, with or without a space after them.
COLUMN = r'\begin{pmatrix} 1 \\ 2 \end{pmatrix}'
SQUARE = r'\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}'


@pytest.mark.parametrize(
  'gold, guess, right',
  [
    (COLUMN, r'\begin{pmatrix} 2 \\ 1 \end{pmatrix}', 0),
    (COLUMN, r'\begin{pmatrix}2\\1\end{pmatrix}', 0),
    (COLUMN, r'\begin{pmatrix}1\\2\end{pmatrix}', 1),
    (COLUMN, r'\begin{bmatrix} 1 \\2 \end{bmatrix}', 1),
    (COLUMN, r'\begin{pmatrix} 1 & 2 \end{pmatrix}', 0),
    (COLUMN, r'\left(\begin{array}{c} 1 \\ 2 \end{array}\right)', 1),
    (SQUARE, r'\begin{bmatrix}1&2\\3&4\end{bmatrix}', 1),
    (SQUARE, r'\left( \begin{matrix} 1 & 2 \\ 3 & 4 \end{matrix} \right)', 1),
    (SQUARE, r'\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}', 0),
    (SQUARE, r'\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}', 0),
    (SQUARE, r'\begin{pmatrix} 1 & 2 & 3 & 4 \end{pmatrix}', 0),
    ('-2', SQUARE, 0),  # its determinant
    (
      r'\begin{pmatrix}\frac12\\2\end{pmatrix}',
      r'\begin{pmatrix}.5\\2\end{pmatrix}',
      1,
    ),
    (
      r'\begin{pmatrix} 2 \\ \frac13 \end{pmatrix}',
      r'\begin{pmatrix} 2 \\ 0.333333333 \end{pmatrix}',
      0,
    ),
    ('(1,2)', r'\left(1,\ 2\right)', 1),
    ('(1,2)', r'\left( 2, 1 \right)', 0),
  ],
)
def test_rows_and_entries_keep_their_places(gold, guess, right):
  assert boxed(gold, guess) == right


@pytest.mark.parametrize(
  'guess',
  [r'3 halves', r'3 \text{ thirds}', '3 fifths', '3 squared', '3 cubed', '3 factorial']
  + ['3 plus four', '3 times five', r'3 \text{ times 2}', '3 over four', '3 infinity']
  + [r'3 \text{ hundred}', '3 dozen', '3 dozens', '3 pairs', r'3 \text{ or four}']
  + [r'3 \text{ is wrong}', '3 False', r'3 \text{ remainder one}', '3 less', '3 more']
  + [r'3 \text{ cm or more}', '3 per', r'\text{not } 3', r'3 \text{ and } 4', '3 th']
  + ['3d', '3h', '3m', '3 t', '3/m', '3mg', "3'", r'3\ldots', '3!', r'3 \pm 1'],
)
def test_a_word_that_is_no_unit_is_part_of_the_answer(guess):
  assert boxed('3', guess) == 0


@pytest.mark.parametrize(
  'guess',
  ['3 km/h', '3 mph', '3cm', '3 cm^2', '3 cm³', r'3\,\mathrm{m/s^2}', '3 m/s']
  + ['3 miles per hour', r'3 \text{ square feet}', '3 sq. ft.', '3 cubic centimetres']
  + [r'3 \text{ meters per second}', r'3\text{ m}', '3 units', '3 square units', '3°']
  + [r'3\degree', r'3^{\circ}', '3 degrees Celsius', r'3^\circ\text{C}', '3 hours']
  + ['3 people', '3 students', r'3 \text{ apples}', r'\text{3 apples}', r'\$3', '3 min']
  + ['3 apples per day', r'x = 3 \text{ cm}', r'\ 3 \ ', '**3**', r'\approx 3'],
)
def test_a_unit_or_a_plural_noun_is_not(guess):
  assert boxed('3', guess) == 1
  assert boxed('4', guess) == 0
  assert boxed(f'\\boxed{{{guess}}}', '3') == 1


@pytest.mark.parametrize(
  'gold, guess, right',
  [
    (r'5\text{ cm}', r'5 \text{ m}', 0),
    (r'5\text{ cm}', '5 centimeters', 1),
    (r'25\text{ cm}^2', r'25\text{ cm}', 0),
    (r'25\text{ cm}^2', '25 square centimetres', 1),
    ('60 minutes', '60 hours', 0),
    ('60 min', '60 minutes', 1),
    (r'\$5', '5 cents', 0),
    ('$5', '5 dollars', 1),
    (r'50\%', '50 cm', 0),
    ('7 apples', '7 oranges', 0),
    (r'20^\circ\text{C}', r'20^\circ\text{F}', 0),
    (r'90^\circ', '90 radians', 0),
    ('6:00 PM', '6:00 AM', 0),
    ('6:00 PM', r'6:00 \text{ p.m.}', 1),
    ('5 m', r'5\text{ m}', 1),
    ('300', r'3 \text{ hundred}', 1),
    ('3000000', r'\$3 \text{ million}', 1),
    ('36', '3 dozen', 1),
  ],
)
def test_two_units_must_be_the_same(gold, guess, right):
  assert boxed(gold, guess) == right


@pytest.mark.parametrize(
  'gold, guess, right',
  [
    (r'\frac{1}{3}', '0.3333333333333333', 0),
    (r'\pi', '3.14159265358979323846', 0),
    (r'\pi', r'\frac{355}{113}', 0),
    (r'\sqrt{2}', '1.41421356', 0),
    (r'10^{50}\pi', r'10^{50}\pi+1', 0),
    (r'(\frac13,1)', '(0.3333333333333333,1)', 0),
    (r'\{\frac12,1\}', r'\{1,0.5\}', 1),
    (r'(\sqrt{2}/10^{20},1)', r'(\sqrt{3}/10^{20},1)', 0),
    (r'x=10^{-30}', r'x=2\cdot 10^{-30}', 0),
    (r'\frac{x}{3}', '0.333333333333333x', 0),
    (r'\frac{x}{4}', '0.25x', 1),
    (r'\sqrt{2}', '2^{0.5}', 1),
    (r'\frac{\sqrt3}{2}', r'\sin 60^\circ', 1),
    (r'\cos 20^\circ', r'\sin 71^\circ', 0),
    ('i', r'\sqrt{-1}', 1),
    ('2+3i', r'2+3\sqrt{-1}', 1),
    (r'e^{i\pi}', '-1', 1),
    (r'\frac73', '2 1/3', 1),
    ('7', '3(4)', 0),
    ('12', '3(4)', 1),
    ('7', '3 4', 0),
    (r'\log_2 8', '3', 1),
    ('7', r'3 \quad 4', 0),
    (r'\frac12', r'\frac 1 2', 1),
    # An approximation counts for what it approximates, if it does.
    ('7', r'7 \approx 8', 0),
    ('7', r'8 \approx 7', 0),
    (r'\sqrt{2}', r'x = \sqrt{2} \approx 1.414', 1),
    (r'\sqrt{2}', r'\sqrt{2} \approx 2.414', 0),
    (r'\sqrt{2}', r'\approx 1.414', 0),
    # Every side of a chain is a name or the answer.
    ('8', 'x=3=8', 0),
    ('x=8', 'x=3=8', 0),
    ('8', '3=8', 0),
    ('8', '2x=8', 0),
    ('8', 'x+1=8', 0),
    ('8', '-x=8', 0),
    ('8', r'\sqrt{x}=8', 0),
    ('8', 'x=3+5=8', 1),
    ('8', 'f(2)=8', 1),
    ('8', r'\angle ABC = 8^\circ', 1),
    ('2x+3', 'y=2x+3', 1),
    (r'8', r'\text{Area} = 3 = 8', 0),
    (r'8', r'\text{Area} = 8\text{ cm}^2', 1),
    # What cannot be read as a whole is not searched for what can.
    ('7', r'8 ^^ \frac{7}{1}', 0),
    ('7', r'8 ((( \[7\]', 0),
    ('7', r'\foo{8} \(7\)', 0),
    # Cases, primes, words.
    ('x', 'X', 0),
    ('AB', 'ab', 0),
    ('f(x)', "f'(x)", 0),
    ('8', "8'", 0),
    (r'\text{east}', r'\text{seat}', 0),
    (r'\text{east}', 'East', 1),
    (r'\text{no solution}', r'\text{No solution}', 1),
    ('B', 'B) 5', 1),
    # Inequalities are intervals; a list is no pair.
    ('[0,1)', r'0 \le x < 1', 1),
    ('[0,1)', r'0 \le x \le 1', 0),
    (r'(3,\infty)', 'x>3', 1),
    (r'(3,\infty)', r'x \ge 3', 0),
    ('x>3', r'(3,\infty)', 1),
    ('(1,2)', '1,2', 0),
    ('1,2', '(1,2)', 0),
    ('1,234', '1, 234', 0),
  ],
)
def test_what_math_verify_would_take_for_equal_or_would_not(gold, guess, right):
  """G4, G6."""
  assert boxed(gold, guess) == right


def test_without_a_box_the_last_line_of_hashes_counts():
  assert score('math', 'so $3+4$\n#### 7', '7') == 1
  assert score('math', '#### 7\n#### 8', '7') == 0
  assert score('math', r'\boxed{7}', 'It is so.\n#### 7') == 1


@pytest.mark.parametrize(
  'answer', [r'\frac{', r'\boxed{}', r'\boxed{7', 'x}{', '1+' * 1000 + '1', '$$']
)
def test_an_answer_that_maths_cannot_use_is_refused_at_load(answer):
  with pytest.raises(ValueError, match="for reward 'math': expected an expression"):
    rewards.check_answer('math', answer)
  rewards.check_answer('exact', answer)


@pytest.mark.parametrize(
  'text',
  [
    'x' * 100_000,
    ' ' * 100_000 + '2',
    '9' * 100_000,
    '$' * 50_000,
    r'\boxed{' + '(' * 1900 + '}',
    r'\boxed{7' + ' cm' * 600 + '!}',
    r'\(' * 50_000,
    r'\boxed{' * 20_000,
    r'\boxed{' + '{' * 900 + '2' + '}' * 900,
    r'\boxed{0.' + '9' * 1900 + r'\overline{3}}',
    r'\boxed{\frac{1}{0}}',
    r'\boxed{\left(}',
    '\\boxed{\x00\ud83d}',
  ],
  ids=lambda text: f'{text[:20]}... {len(text)}'.replace('\x00', '0'),
)
def test_odd_texts_are_wrong_and_quickly_so(text):
  began = time.process_time()
  assert score('math', text, '1') == 0
  assert time.process_time() - began < 5


@pytest.mark.parametrize('gold', ['0.333...', r'x\equiv 3\pmod 5'])
def test_of_a_gold_answer_that_nobody_can_read_the_same_text_is_right(gold):
  """It is listed at the start, and faults at no draw."""
  assert not rewards.is_readable(gold)
  assert score('math', rf'\boxed{{{gold}}}', gold) == 1
  assert score('math', '1', gold) == 0


def test_maths_is_graded_on_any_thread():
  """G1: math-verify 0.9.0 raises here with its default settings."""
  answer = ('math', r'\boxed{\frac{4}{2}}', '2')
  with concurrent.futures.ThreadPoolExecutor(1) as threads:
    assert threads.submit(score, *answer).result() == 1

  async def task():
    return score(*answer)

  assert asyncio.run(task()) == 1


@pytest.mark.parametrize(
  'attack',
  [
    '__import__("pathlib").Path("MARKER").touch()',
    r'\text{open("MARKER","w")}',
    '(lambda: exit())()',
    'open("MARKER","w")',
    'raise SystemExit',
  ],
)
@pytest.mark.parametrize('name', ['math', 'countdown', 'final_number', 'reasoning_gym'])
def test_text_of_the_model_is_never_run(attack, name, tmp_path, monkeypatch):
  """G7."""
  monkeypatch.chdir(tmp_path)
  metas = [dict(numbers=[1, 2], target=3)]
  if name == 'reasoning_gym':
    metas = [
      dict(reasoning_gym=dataset, entry=gym_entry(dataset))
      for dataset in sorted(rewards._GYM_EVAL | rewards._GYM_SYMPY)
    ]
  for meta in metas:
    for text in (attack, f'\\boxed{{{attack}}}', f'<answer>{attack}</answer>'):
      # 0.1: what some datasets give for any answer at all.
      assert score(name, text, '2', **meta) <= 0.1
  assert list(tmp_path.iterdir()) == []
  assert score('math', r'\boxed{2}', '3') == 0


# --- countdown


@pytest.mark.parametrize(
  'text, right',
  [
    ('3*4+2', 1),
    ('<answer>(3 × 4) + 2</answer>', 1),
    ('Let me see.\nAnswer: 2+3*4 = 14', 1),
    (r'\boxed{3 \cdot 4 + 2}', 1),
    ('-2+4*4', 0),  # one 4 only
    ('4*3-(-2)', 1),
    ('28/2', 0),  # not a number given
    ('14', 0),
    ('6*2+2', 0),
    ('2+3', 0),
    ('3*4+', 0),
    ('3*(4+2', 0),
    ('3 4 2', 0),
    ('3**4', 0),
    ('3/(2-2)', 0),
    ('(' * 5000 + '1', 0),
    ('-' * 5000 + '1', 0),
    ('', 0),
  ],
)
def test_countdown_counts_numbers_and_value(text, right):
  assert score('countdown', text, numbers=[2, 3, 4], target=14) == right


def test_countdown_is_exact_in_fractions():
  # 8 / (3 - 8/3) = 24: in doubles 23.999999999999996.
  assert score('countdown', '8/(3-8/3)', numbers=[3, 3, 8, 8], target=24) == 1


# --- reasoning_gym


def gym_entry(dataset):
  return reasoning_gym.create_dataset(dataset, size=1, seed=1)[0]


@pytest.mark.parametrize(
  'dataset',
  ['chain_sum', 'puzzle24', 'countdown', 'simple_integration', 'spiral_matrix']
  + ['polynomial_multiplication', 'string_insertion', 'n_queens', 'binary_matrix'],
)
def test_a_reference_answer_of_reasoning_gym_scores_one(dataset):
  entry = gym_entry(dataset)
  if dataset == 'puzzle24':  # its entries have no reference answer
    entry['metadata']['numbers'] = [1, 2, 3, 4]
    entry['answer'] = '1*2*3*4'
  meta = dict(reasoning_gym=dataset, entry=entry)
  text = f'I think <answer>no</answer>, no: <answer>{entry["answer"]}</answer>'
  assert score('reasoning_gym', text, **meta) == 1
  assert score('reasoning_gym', '<answer>no</answer>', **meta) < 1


# --- by name


def test_a_function_of_the_users_is_found_by_its_path(tmp_path, monkeypatch):
  (tmp_path / 'my_rewards.py').write_text('def half(text, prompt):\n  return 0.5\n')
  monkeypatch.syspath_prepend(tmp_path)
  assert rewards.resolve('my_rewards:half')('', prompt()) == 0.5
  with pytest.raises(ValueError, match="'my_rewards:third' cannot be imported"):
    rewards.resolve('my_rewards:third')
  with pytest.raises(ValueError, match='expected a function'):
    rewards.resolve('my_rewards:__name__')


@pytest.mark.parametrize(
  'name, near', [('final_numbr', 'final_number'), ('maths', 'math'), ('', 'math')]
)
def test_an_unknown_name_is_refused_with_the_nearest_known(name, near):
  with pytest.raises(ValueError, match=f"reward '{name}' is unknown.*") as error:
    rewards.resolve(name)
  assert near in str(error.value)


def test_a_missing_extra_is_named(monkeypatch):
  monkeypatch.setattr(sys, 'path', [])
  monkeypatch.delitem(sys.modules, 'math_verify', raising=False)
  sys.path_importer_cache.clear()
  with pytest.raises(ValueError, match="needs math_verify: install the extra 'math'"):
    rewards.resolve('math')


def test_every_name_resolves_to_itself():
  for name, verifier in rewards.REWARDS.items():
    assert rewards.resolve(name) is verifier


# --- shaping


def test_the_overlong_penalty_is_counted_in_tokens():
  """A10."""
  penalty = rewards.overlong_penalty(
    np.array([1, 48, 56, 64, 80]), limit=64, buffer=16, factor=1.0
  )
  assert penalty.dtype == np.float32
  np.testing.assert_array_equal(penalty, [0, 0, -0.5, -1, -1])


def test_an_overlong_buffer_that_does_not_fit_is_refused():
  with pytest.raises(ValueError, match='buffer=65'):
    rewards.overlong_penalty(np.array([1]), limit=64, buffer=65, factor=1.0)
