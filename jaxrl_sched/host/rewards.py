"""Verifiers: the text of an answer and its prompt in, a reward out. No model here.

A verifier gives the prompt's `max_reward` (1 where none is declared) for what is
right, its `min_reward` (0) for what is wrong, odd or hostile, never NaN; a
prompt that cannot be graded raises ValueError. Text of the model is never
evaluated as code. Time limits are the pool's (`grading.py`), not a verifier's.
"""

import ast
from collections import Counter
from collections.abc import Callable
import difflib
from fractions import Fraction
import functools
import importlib
import importlib.util
import inspect
import logging
import math
import operator
import re
from typing import Any

import numpy as np

from jaxrl_sched.host import equality, maths
from jaxrl_sched.types import Prompt

Verifier = Callable[[str, Prompt], float]

# --- numbers and maths ----------------------------------------------------------


def final_number(text: str, prompt: Prompt) -> float:
  """The last number of the text equals the answer, exactly; 42.0 is 42.

  Thousands may have commas; `3/4` is one number. For anything with structure
  (roots, powers, LaTeX fractions) use 'math'.
  """
  gold = maths.number(prompt.answer)
  if gold is None:
    raise _bad_answer('final_number', prompt.answer, 'a number or the text of one')
  return _scaled(prompt, maths.last_number(text) == gold)


def math_answer(text: str, prompt: Prompt) -> float:
  r"""The last boxed expression equals the answer, as mathematics.

  What is read of a text without any box is said by the dataset's math=dict(unboxed=...)
  (`maths.answer_in`). Decided in turn: the same string; two written-out numbers,
  exactly; then math-verify, whose verdict 'equal' stands only if the numbers in both are
  exactly equal. A decimal is the fraction it spells: 0.333 is not 1/3, nor 3.14159 pi.

  A unit, a currency or a plural noun after the number is ignored where one side has
  none, and must be the same where both have one (`units.py`). In `x = 3 + 4 = 7` the
  last side counts, and each other one must be a name or equal. `\sqrt{2} \approx
  1.41` is \sqrt{2}, if it is about 1.41; `\approx 7` is 7. Where one side has a
  percent sign, the other may be the number before it or that over 100: 50\% equals
  50 and 0.5. `(C)` and `\text{(C) Paris}` are the choice `C`. Digits without a base
  equal the same digits in any. A list has the same members as often, in any order; a
  pair in order; `x=1, y=2` is (1, 2). Dates, versions and words are texts. Of a gold
  answer that math-verify cannot read only the same text is right.
  """
  check_answer('math', prompt.answer)
  gold = maths.answer_in(_as_text(prompt.answer))
  guess = maths.answer_in(text, **prompt.reward_options)
  return _scaled(prompt, bool(guess) and equality.equal(gold, guess))


# --- text -----------------------------------------------------------------------


def exact(text: str, prompt: Prompt) -> float:
  """The text is the answer, white space around both aside."""
  check_answer('exact', prompt.answer)
  return _scaled(prompt, text.strip() == _as_text(prompt.answer))


def matches_pattern(text: str, prompt: Prompt) -> float:
  """The whole text matches the regular expression `meta['pattern']`; . is any char."""
  check_meta('format', prompt.meta)
  pattern = prompt.meta['pattern']
  return _scaled(prompt, re.fullmatch(pattern, text, re.DOTALL) is not None)


def _as_text(answer: Any) -> str:
  text = answer if isinstance(answer, str) else repr(answer).removesuffix('.0')
  return text.strip()


# --- countdown --------------------------------------------------------------------

_SIGNS = {
  '×': '*', '÷': '/', '\u2212': '-', '\\times': '*', '\\cdot': '*', '\\div': '/',
  '\\left': '', '\\right': '', '$': '',
}  # fmt: skip
_OPERATIONS = {
  '+': operator.add, '-': operator.sub, '*': operator.mul, '/': operator.truediv,
}  # fmt: skip


def countdown(text: str, prompt: Prompt) -> float:
  """An expression over `meta['numbers']`, each at most once, equals `meta['target']`.

  The expression is that of the last <answer> tag, else the last line that is not
  blank; what stands before a colon or after an equals sign is ignored.
  """
  check_meta('countdown', prompt.meta)
  numbers, target = prompt.meta['numbers'], prompt.meta['target']
  lines = [line for line in text.splitlines() if line.strip()]
  line = maths.tagged(text) or (lines[-1] if lines else '')
  box = maths.last_box(line)
  line = line if box is None else box
  for old, new in _SIGNS.items():
    line = line.replace(old, new)
  expression = line.rsplit(':', 1)[-1].split('=')[0].strip().rstrip('.')
  value, used = _arithmetic(expression)
  fair = not Counter(used) - Counter(Fraction(n) for n in numbers)
  return _scaled(prompt, value is not None and fair and value == Fraction(target))


def _arithmetic(text: str) -> tuple[Fraction | None, list[Fraction]]:
  """The value of + - * / ( ) over whole numbers, and the numbers used."""
  tokens = re.findall(r'[0-9]+|[-+*/()]', text)
  # Nothing else may stand there; and nesting must not exhaust the stack.
  foreign = re.sub(r'[-+*/()0-9\s]', '', text)
  if foreign or len(text) > 1000 or text.count('(') + text.count('-') > 100:
    return None, []
  used = []

  def total(i: int, level: int) -> tuple[Fraction, int]:
    signs = ('+-', '*/')[level]
    deeper = atom if level else functools.partial(total, level=1)
    value, i = deeper(i)
    while i < len(tokens) and tokens[i] in signs:
      right, after = deeper(i + 1)
      value, i = _OPERATIONS[tokens[i]](value, right), after
    return value, i

  def atom(i: int) -> tuple[Fraction, int]:
    if tokens[i] == '-':
      value, i = atom(i + 1)
      return -value, i
    if tokens[i] == '(':
      value, i = total(i + 1, 0)
      if tokens[i] != ')':
        raise ValueError('unclosed')
      return value, i + 1
    used.append(Fraction(int(tokens[i])))
    return used[-1], i + 1

  try:  # the border with what a model may write
    value, end = total(0, 0)
  except (ValueError, IndexError, ZeroDivisionError):
    return None, []
  return (value, used) if end == len(tokens) else (None, [])


# --- reasoning_gym ------------------------------------------------------------------

# These score by evaluating the answer (reasoning_gym 0.1.25), with eval or sympy.
_GYM_EVAL = {'string_insertion', 'spiral_matrix', 'binary_matrix', 'n_queens'}
_GYM_SYMPY = {
  'simple_integration', 'intermediate_integration', 'polynomial_multiplication',
  'puzzle24', 'countdown',
}  # fmt: skip
_GYM_CALLS = {'sin', 'cos', 'tan', 'exp', 'log', 'ln', 'sqrt', 'Abs', 'asin', 'acos'}
_GYM_CALLS |= {'atan', 'sinh', 'cosh', 'tanh', 'sec', 'csc', 'cot'}


def reasoning_gym(text: str, prompt: Prompt) -> float:
  """The score of `meta['entry']` by the dataset `meta['reasoning_gym']`.

  What stands in the last <answer> tag is scored, or without one the whole text.
  Where the dataset would evaluate the answer as Python, only literals and plain
  arithmetic get through to it; anything else scores 0.
  """
  check_meta('reasoning_gym', prompt.meta)
  name, entry = prompt.meta['reasoning_gym'], prompt.meta['entry']
  answer = maths.tagged(text)
  answer = text.strip() if answer is None else answer
  unsafe = name in _GYM_EVAL and not _is_inert(answer)
  unsafe |= name in _GYM_SYMPY and not _is_arithmetic(answer)
  return _scaled(prompt, 0.0 if unsafe else float(_gym_scorer(name)(answer, entry)))


def _is_inert(text: str) -> bool:
  """A literal, or text without a call or an attribute in it."""
  try:
    ast.literal_eval(text)
    return True
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return not re.search(r'[(){}@]|\.\s*[A-Za-z_]|__', text)


def _is_arithmetic(text: str) -> bool:
  if not re.fullmatch(r'[A-Za-z0-9\s.+\-*/^(),]*', text):
    return False
  called = re.findall(r'([A-Za-z][A-Za-z0-9]*)\s*\(', text)
  return set(called) <= _GYM_CALLS and not re.search(r'\.\s*[A-Za-z]|\)\s*\(', text)


@functools.lru_cache
def _gym_scorer(name: str) -> Callable[[str, dict], float]:
  import reasoning_gym as gym

  return gym.get_score_answer_fn(name)


# --- by name ------------------------------------------------------------------------

REWARDS: dict[str, Verifier] = {
  'final_number': final_number,
  'exact': exact,
  'format': matches_pattern,
  'math': math_answer,
  'countdown': countdown,
  'reasoning_gym': reasoning_gym,
}
_NEEDS = {'math': ('math_verify', 'math'), 'reasoning_gym': ('reasoning_gym', 'gym')}
# Verifiers that read these keys of `meta` and not the answer.
_META = {
  'format': ('pattern',),
  'countdown': ('numbers', 'target'),
  'reasoning_gym': ('reasoning_gym', 'entry'),
}


def resolve(name: str) -> Verifier:
  """The verifier of that name: one of REWARDS, or 'package.module:function'.

  Raises:
    ValueError: there is none. The message has the name, and the nearest known
      one, or the extra that is not installed, or why the import failed, or what was
      expected of a function that no answer could be graded by.
  """
  if name in REWARDS:
    module, extra = _NEEDS.get(name, (None, None))
    if module and importlib.util.find_spec(module) is None:
      raise ValueError(f'reward {name!r} needs {module}: install the extra {extra!r}')
    return REWARDS[name]
  module, colon, function = name.partition(':')
  if not colon:
    near = difflib.get_close_matches(name, REWARDS, n=1, cutoff=0.0)[0]
    known = ', '.join(REWARDS)
    raise ValueError(
      f'reward {name!r} is unknown: did you mean {near!r}? (known: {known}, or '
      f"'package.module:function')"
    )
  try:  # the border with a user's code
    found = functools.reduce(
      getattr, function.split('.'), importlib.import_module(module)
    )
  except (Exception, SystemExit) as error:
    raise ValueError(
      f'reward {name!r} cannot be imported: {type(error).__name__}: {error}'
    ) from error
  if wrong := _unfit(found):
    raise ValueError(
      f'reward {name!r} is {wrong}, expected a function (answer_text, prompt) -> '
      'a number'
    )
  return found


def _unfit(found: Any) -> str:
  """What is wrong with a verifier, as far as it shows without a call; '' if nothing."""
  if not callable(found) or isinstance(found, type):
    return f'{found!r:.60}'
  called = found
  while isinstance(called, functools.partial):
    called = called.func
  if not inspect.isroutine(called):
    called = type(called).__call__
  if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
    return 'an async function'
  if inspect.isgeneratorfunction(called):
    return 'a generator'
  try:
    signature = inspect.signature(found)
  except (ValueError, TypeError):  # of C code, it may have none
    return ''
  try:
    signature.bind('text', 'prompt')
  except TypeError:
    return f'a function of {signature}'
  # As TRL's are, which get lists of answers and give lists.
  if {'prompts', 'completions'} & signature.parameters.keys():
    return f'a function of {signature}'
  return ''


def load(name: str) -> Verifier:
  """As `resolve`, with the libraries it needs imported, so that its first call is
  as fast as its second."""
  verifier = resolve(name)
  if name in _NEEDS:
    importlib.import_module(_NEEDS[name][0])
  # It warns that its alarms are off: they are, on purpose.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  return verifier


def check_answer(name: str, answer: Any) -> None:
  """Refuses, at load, an answer field that the verifier cannot compare with.

  Verifiers that read `meta`, and a user's own, may have any answer or none.
  """
  if name not in REWARDS or name in _META:
    return
  if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
    raise _bad_answer(name, answer, 'a number or a text that is not empty')
  if isinstance(answer, str) and not answer.strip():
    raise _bad_answer(name, answer, 'a number or a text that is not empty')
  if isinstance(answer, float) and not math.isfinite(answer):
    raise _bad_answer(name, answer, 'a finite number')
  if name == 'final_number' and maths.number(answer) is None:
    raise _bad_answer(name, answer, 'a number or the text of one')
  if name == 'math':
    gold = maths.answer_in(_as_text(answer))
    if not gold or not maths.is_balanced(gold):
      raise _bad_answer(
        name, answer, f'an expression of 1 to {maths.LONGEST} characters, braces closed'
      )


@functools.lru_cache(maxsize=4096)
def is_readable(answer: Any) -> bool:
  """Whether 'math' compares with the answer by more than its text."""
  load('math')
  return equality.is_readable(maths.answer_in(_as_text(answer)))


def _bad_answer(name: str, answer: Any, expected: str) -> ValueError:
  return ValueError(f'answer {answer!r} for reward {name!r}: expected {expected}')


def check_meta(name: str, meta: dict[str, Any]) -> None:
  """Refuses, at load, a `meta` without what the verifier reads there."""
  for key in _META.get(name, ()):
    if key not in meta:
      raise ValueError(f'reward {name!r} needs meta[{key!r}]: got {sorted(meta)}')
  if name == 'format':
    try:
      re.compile(meta['pattern'])
    except (re.error, TypeError) as error:
      raise ValueError(
        f'meta pattern {meta["pattern"]!r}: expected a regular expression ({error})'
      ) from error


def _scaled(prompt: Prompt, part: float) -> float:
  """From the prompt's lowest reward (part 0) to its highest (part 1)."""
  best = 1.0 if prompt.max_reward is None else float(prompt.max_reward)
  return prompt.min_reward + (best - prompt.min_reward) * part


# --- shaping ------------------------------------------------------------------------


def overlong_penalty(
  lengths: np.ndarray,  # [G] tokens
  *,
  limit: int,  # tokens an answer may have
  buffer: int,  # tokens before the limit over which the penalty grows
  factor: float,  # the penalty at the limit
) -> np.ndarray:  # [G] float32, in [-factor, 0]
  """DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13), in tokens."""
  if not 0 < buffer <= limit:
    raise ValueError(f'overlong buffer={buffer}: expected 1 to limit={limit} tokens')
  if not factor >= 0:
    raise ValueError(f'overlong factor={factor}: expected 0 or more')
  over = (np.asarray(lengths, np.float64) - (limit - buffer)) / buffer
  return (-factor * np.clip(over, 0.0, 1.0)).astype(np.float32)
