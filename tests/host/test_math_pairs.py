"""Pairs of answers that are equal as mathematics, and pairs that are not.

Each is graded both ways: the one as the gold answer and the other as the guess.
"""

import numpy as np
import pytest

from jaxrl_sched.host import rewards
from jaxrl_sched.types import Prompt

EQUAL = [
  # Arguments of \frac without braces.
  (r'\frac{\pi}{2}', r'\frac\pi2'),
  (r'\frac{2}{\pi}', r'\frac2\pi'),
  (r'\frac{x}{2}', r'\dfrac x2'),
  (r'\frac{3}{4}', r'\tfrac34'),
  # A choice with its label.
  ('12', r'\textbf{(C) }12'),
  ('12', r'\textbf{(C)}\ 12'),
  (r'\frac{1}{2}', r'\text{(A) }\frac12'),
  ('C', r'\textbf{(C)}'),
  # Lists, sets and pairs.
  (r'\{(1,2),(3,4)\}', '(1,2),(3,4)'),
  (r'\{(1,2),(3,4)\}', '(3,4),(1,2)'),
  ('3,3', '3, 3'),
  ('1,2', '2,1'),
  (r'\{1,2\}', '2,1'),
  ('1,1,2', '2,1,1'),
  (r'\frac12,3', '3,0.5'),
  ('(1,2)', '(1, 2)'),
  # Values of several names.
  ('x=1,y=2', 'y=2,x=1'),
  ('x=1,y=2', '(1,2)'),
  ('x=1,x=2', '2,1'),
  (r'x=1\text{ and }y=2', '(1,2)'),
  ('x=1; y=2', 'x=1,y=2'),
  ('1 or 2', '2, 1'),
  ('1, 2, and 3', '3,2,1'),
  # Repeating decimals.
  (r'\frac13', r'0.\bar{3}'),
  (r'\frac16', r'0.1\bar6'),
  (r'0.\overline{12}', r'\frac{4}{33}'),
  # Signs of Unicode.
  (r'\frac12', '½'),
  ('0.75', '¾'),
  ('2.5', '2½'),
  ('42', '４２'),
  ('42', '٤٢'),
  ('(1,2)', '（１，２）'),
  ('x^2', 'x²'),
  ('x^{12}', 'x¹²'),
  ('10^{-3}', '10⁻³'),
  ('a_1', 'a₁'),
  (r'\sqrt{2}', '√2'),
  (r'2\sqrt{3}', '2√3'),
  (r'\sqrt{x+1}', '√(x+1)'),
  ('2', '∛8'),
  ('3/4', '3⁄4'),
  ('-5', '−5'),
  ('1.5', '√2.25'),
  (r'\sqrt{\frac12}', '√½'),
  (r'\sqrt{\pi}', '√π'),
  (r'\sqrt{6}', '√(1+(2+3))'),
  # Texts.
  ('NO', 'no'),
  ('2023-01-02', '2023-01-02'),
  ('1.2.3', '1.2.3'),
  ('0.333...', '0.333...'),
  (r'x\equiv 3\pmod 5', r'x \equiv 3 \pmod 5'),
]

UNEQUAL = [
  ('x=1,y=2', '(2,1)'),
  ('x=1,y=2', '2,1'),
  ('x=1,y=2', '1,2'),  # in no order
  ('x=1,y=2', 'x=2,y=1'),
  ('x=1,y=2', 'x=1'),
  ('x=2', 'y=2'),
  ('3,3', '3'),
  ('1,1,2', '1,2'),
  ('1,2', '1,2,3'),
  ('1,2', '(1,2)'),
  ('(1,2)', '(2,1)'),
  (r'\{(1,2),(3,4)\}', '(1,2),(4,3)'),
  (r'\{(1,2),(3,4)\}', '(1,2)'),
  ('3,4', '34'),
  ('1,234', '1, 234'),
  ('[0,1)', '[0,1]'),
  ('NO', 'ON'),
  ('EAST', 'SEAT'),
  ('stop', 'pots'),
  ('A1', '1A'),
  ('2023-01-02', '2020'),
  ('2023-01-02', '2023-02-01'),
  ('2023-01-02', '2023-01-03'),
  ('1/2/2023', '2/1/2023'),
  ('192.168.0.1', '192.168.0.2'),
  ('3:4', '4:3'),
  ('12:30', '12:03'),
  (r'\textbf{(C) }12', r'\textbf{(D) }12'),
  ('12', r'\textbf{(C) }13'),
  (r'\frac{\pi}{2}', r'\frac2\pi'),
  (r'\frac13', '0.333'),
  (r'0.\bar{3}', '0.3'),
  (r'0.\bar{3}', '0.333...'),
  ('½', '2'),
  ('2½', '1'),
  ('x²', 'x_2'),
  ('x²', '2x'),
  ('√2', '2'),
  ('∛8', r'\sqrt{8}'),
  ('x<3', 'x>3'),
  (r'x\equiv 3\pmod 5', r'x\equiv 2\pmod 5'),
  ('1:2:3', '3:2:1'),
  ('1:2:3', '1:3:2'),
  # Brackets around a factor are no label of a choice.
  ('2', '(X) + 2'),
  ('-5', '(N) - 5'),
  ('2', r'(A) \cdot 2'),
  (r'\frac{\sqrt2}{4}', '√2.25'),
  ('1', r'0.\overline33'),
  ('(2,1)', 'x=1,x=2'),
  (r'x=1\text{ and }y=2', '(2,1)'),
  ('x=1; y=2', '(2,1)'),
  ('3;3', '3'),
  (r'3\text{ and }3', '3'),
  (r'1\text{ or }1\text{ or }2', r'1\text{ or }2'),
  ('OH', 'HO'),
  ('H2O', 'OH2'),
  ('A1B2', 'B2A1'),
  ('AB12', '12AB'),
]


def graded(gold: str, text: str, **options) -> float:
  prompt = Prompt(
    id='d/0',
    dataset='d',
    index=0,
    tokens=np.array([1]),
    text='',
    answer=gold,
    reward_options=options,
  )
  return rewards.math_answer(text, prompt)


def both_ways(one: str, other: str) -> set[float]:
  return {graded(one, rf'\boxed{{{other}}}'), graded(other, rf'\boxed{{{one}}}')}


@pytest.mark.parametrize('one, other', EQUAL)
def test_equal_answers_are_right(one, other):
  assert both_ways(one, other) == {1.0}


@pytest.mark.parametrize('one, other', UNEQUAL)
def test_unequal_answers_are_wrong(one, other):
  assert both_ways(one, other) == {0.0}


def test_a_difference_is_no_name_of_a_gold_answer_of_digits():
  """555-1234 as a gold answer is a text; a guess may be left as a difference."""
  assert graded('555-1234', r'\boxed{-679}') == 0
  assert graded('5', r'\boxed{10-5}') == 1


@pytest.mark.parametrize(
  'gold, readable',
  [
    (r'x\equiv 3\pmod 5', False),
    ('0.333...', False),
    ('NO', True),
    (r'\frac12', True),
    ('3,4', True),
    ('x=1,y=2', True),
    ('2023-01-02', True),
    (r'5\text{ cm}', True),
    (r'\text{no solution}', True),
  ],
)
def test_gold_answers_that_nobody_can_read_are_found(gold, readable):
  assert rewards.is_readable(gold) == readable


TEXT = r'So $x = 3$. <answer> \frac{8}{2} </answer> and that in 2 steps.'


@pytest.mark.parametrize(
  'text, unboxed, gold',
  [
    (TEXT, 'whole', '3'),  # the last maths between dollars
    (TEXT, 'last_number', '2'),
    (TEXT, 'answer_tag', '4'),
    (TEXT + r' \boxed{7}', 'last_number', '7'),  # a box goes first
    (r'<answer>so \boxed{5}</answer>', 'answer_tag', '5'),
    ('<answer>1</answer> no, <answer>6</answer>', 'answer_tag', '6'),
    ('It costs 1,234.50 dollars', 'last_number', '1234.5'),
  ],
)
def test_what_is_read_where_there_is_no_box(text, unboxed, gold):
  assert graded(gold, text, unboxed=unboxed) == 1.0
  assert graded('99', text, unboxed=unboxed) == 0.0


@pytest.mark.parametrize('unboxed', ['last_number', 'answer_tag'])
def test_a_text_without_what_is_asked_for_is_wrong(unboxed):
  assert graded('x', 'it is x', unboxed=unboxed) == 0.0
