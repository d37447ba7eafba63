"""Numbers and expressions in a model's text: which one is meant, are two equal.

Numbers are compared exactly, expressions by math-verify, used so that nothing of the
text is evaluated as code.
"""

from fractions import Fraction
import functools
import math
import re
from typing import Any

_UNSIGNED = (
  r'(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?'
  r'|\.[0-9]+(?:[eE][-+]?[0-9]+)?'
)
# Digits glued to a word (H2O, step2) are no number; a sign after an operand
# (10-5) is an operator; a/b is one number, not two.
_NUMBER = re.compile(
  rf'(?<![A-Za-z0-9_])(?:(?<![)\]}}])[-+])?(?:{_UNSIGNED})(?:/[0-9]+(?![0-9]|\.[0-9]))?'
)


def _plain(text: str) -> str:
  """One way of writing minus signs and thousands."""
  return text.replace('\u2212', '-').replace('{,}', ',').replace(',\\!', ',')


def _number(token: str) -> Fraction | None:
  """The exact value of a token that `_NUMBER` matched; None if it has none."""
  over, _, under = token.replace(',', '').partition('/')
  exponent = re.search(r'[eE](.*)', over)
  # A written-out 1e999999999 would take the machine's memory.
  if len(token) > 1000 or (exponent and abs(int(exponent[1])) > 5000):
    return None
  value, divisor = Fraction(over), int(under or 1)
  return value / divisor if divisor else None


def number(answer: Any) -> Fraction | None:
  """The value of an answer field that is a number or the text of one."""
  if isinstance(answer, int) and not isinstance(answer, bool):
    return Fraction(answer)
  if isinstance(answer, float) and math.isfinite(answer):
    return Fraction(repr(answer))  # 0.1 means one tenth, not the nearest double
  if not isinstance(answer, str):
    return None
  text = _plain(answer).strip()
  return _number(text) if _NUMBER.fullmatch(text) else None


def last_number(text: str) -> Fraction | None:
  """The value of the last number in a text."""
  found = _NUMBER.findall(_plain(text))
  return _number(found[-1]) if found else None


# --- expressions ----------------------------------------------------------------

LONGEST = 2000  # characters: what is longer is no answer, and could keep us busy

_SCIENTIFIC = re.compile(
  r'(?<![A-Za-z\\0-9.])([0-9]+(?:\.[0-9]+)?|\.[0-9]+)[eE]([-+]?[0-9]+)(?!\w)'
)


def last_box(text: str) -> str | None:
  r"""What stands in the last \boxed of a text, braces counted.

  Returns:
    The content; None where no box stands at all; '' where the last one is never
    closed, so that an earlier box does not count instead.
  """
  starts = [m.end() for m in re.finditer(r'\\(?:boxed|fbox)(?![A-Za-z])\s*', text)]
  if not starts:
    return None
  rest = text[starts[-1] :]
  if not rest.startswith('{'):  # TeX: \boxed 5
    return re.match(r'[^\s$]*', rest)[0]
  depth = 0
  for mark in re.finditer(r'\\.|[{}]', rest, re.DOTALL):  # \{ does not count
    depth += (mark[0] == '{') - (mark[0] == '}')
    if depth == 0:
      return rest[1 : mark.start()]
  return ''


# Without a box: $...$, \(...\) or \[...\]. \$ is a currency.
_MATHS = re.compile(
  r'(?<!\\)\$\$?([^$]{1,500})(?<!\\)\$|\\\(([^$]{1,500}?)\\\)|\\\[([^$]{1,500}?)\\\]'
)
_PERCENT = re.compile(r'\s*(?:\\?%|\\text\{\s*(?:percent|\\?%)\s*\}|percent)$')
_CHOICE = re.compile(r'(?:\\(?:text|mathrm|textbf|mathbf)\{\s*)?\(([A-Z])\)')
# A word that stands after a number, with a power, in TeX's words or without.
_UNIT = re.compile(
  r'(?<=[0-9)}.])(?:\s*\\(?:text|mathrm|textrm|mbox)\{(?P<tex>[A-Za-z\s./]+)\}'
  r'|\s+(?P<word>[A-Za-z]{3,}(?:\s[A-Za-z]{3,})?))(?:\^(?:[0-9]|\{-?[0-9]\}))?$'
)
_POWERS = {'thousand': 3, 'million': 6, 'billion': 9, 'trillion': 12}
# Words after a number that are no units of it.
_NO_UNITS = set('or and to if at more less least most mod percent'.split())
_NO_UNITS |= set('sqrt sin cos tan log exp sum alpha beta theta dozen hundred'.split())
_REPEATING = re.compile(
  r'(?<![0-9])([0-9]{0,50})\.([0-9]{0,50})\\overline\{?([0-9]{1,50})\}?'
)
_BASED = re.compile(r'([0-9]+)_\{?([0-9]+)\}?')


def answer_in(text: str) -> str:
  """What is boxed last, in one way of writing it; '' for no answer.

  Without a box it is the last maths between dollar signs, or else the whole text.
  """
  inner = last_box(text)
  if inner is None:
    found = _MATHS.findall(text)
    inner = ''.join(found[-1]) if found else text
  inner = _plain(inner.strip())
  if len(inner) > LONGEST:
    return ''
  inner = re.sub(r'\\\$|[€£¥]', '', inner).strip().strip('$').strip()
  inner = re.sub(r'(?<=[0-9])(?:\\[,;:! ]|~)(?=[0-9]{3}(?![0-9]))', '', inner)
  inner = re.sub(r'\\[,;:! ]|~', ' ', inner).replace('\\varnothing', '\\emptyset')
  inner = re.sub(r'(?<!\.)\.$', '', inner).strip()
  inner = re.sub(r'^\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}$', r'\1', inner)
  inner = _UNIT.sub(_without_unit, inner).strip()
  inner = _REPEATING.sub(_as_fraction, inner)
  if re.fullmatch(r'\([A-Za-z]\)', inner):  # a choice: (B) is B
    inner = inner[1]
  return _SCIENTIFIC.sub(r'\1\\cdot 10^{\2}', inner).strip()


def _without_unit(found: re.Match) -> str:
  words = (found['tex'] or found['word']).split()
  if words and words[0] in _POWERS:
    return rf'\cdot 10^{{{_POWERS[words[0]]}}}'
  return found[0] if _NO_UNITS & set(words) else ''


def _as_fraction(found: re.Match) -> str:
  whole, once, again = found.groups()
  over = int(whole + once + again) - int(whole + once or 0)
  return rf'\frac{{{over}}}{{{(10 ** len(again) - 1) * 10 ** len(once)}}}'


def equal(gold: str, guess: str) -> bool:
  """Whether two answers, of `answer_in`, say the same.

  Raises:
    ValueError: the gold one cannot be read.
  """
  if re.fullmatch('[A-Z]', gold) and len(labels := _CHOICE.findall(guess)) == 1:
    guess = labels[0] if _CHOICE.match(guess) else guess
  bare_gold, bare_guess = (_PERCENT.sub('', s) for s in (gold, guess))
  if _same(bare_gold, bare_guess):
    return True
  if bare_gold != gold and bare_guess == guess:
    return _same(rf'\frac{{{bare_gold}}}{{100}}', guess)
  if bare_gold == gold and bare_guess != guess:
    return _same(gold, rf'\frac{{{bare_guess}}}{{100}}')
  return False


def _same(gold: str, guess: str) -> bool:
  if gold == guess:
    return True
  based = _BASED.fullmatch(gold), _BASED.fullmatch(guess)
  if any(based):
    if all(based):
      return based[0].groups() == based[1].groups()
    gold, guess = (_BASED.sub(r'\1', s) for s in (gold, guess))
  numbers = number(gold), number(guess)
  if None not in numbers:
    return numbers[0] == numbers[1]
  # math-verify takes the pair (1,2) for the set {1,2}.
  if {_brackets(gold), _brackets(guess)} == {'set', 'pair'}:
    return False
  return _verified(gold, guess)


def _brackets(text: str) -> str | None:
  bare = text.replace('\\left', '').replace('\\right', '').strip()
  if '\\cup' in bare or ',' not in bare:
    return None
  if bare.startswith('\\{') and bare.endswith('\\}'):
    return 'set'
  return 'pair' if bare[0] in '([' and bare[-1] in ')]' else None


def _verified(gold: str, guess: str) -> bool:
  import math_verify
  import sympy

  # Only the LaTeX parser: the plain one hands strings to sympy, which evaluates
  # them. No alarms, for they work on a main thread only: the pool has the clock.
  read = functools.partial(
    math_verify.parse,
    extraction_config=[math_verify.LatexExtractionConfig(boxed_match_priority=0)],
    fallback_mode='no_fallback',
    parsing_timeout=None,
  )
  golds = read(f'\\boxed{{{gold}}}')
  if not golds:
    raise ValueError(
      f"answer {gold!r} for reward 'math': expected an expression that math-verify "
      'can read'
    )
  try:  # the border with what a model may write
    guesses = read(f'\\boxed{{{guess}}}')
    if not math_verify.verify(golds, guesses, timeout_seconds=None):
      return False
    a, b = golds[0], guesses[0]
    if not all(isinstance(x, sympy.Expr) and x.is_number for x in (a, b)):
      return True
    # A decimal is the fraction it spells: 0.333333 is not 1/3.
    a, b = (sympy.nsimplify(x.doit(), rational=True) for x in (a, b))
    if a.is_Rational and b.is_Rational:
      return bool(a == b)
    return bool(abs((a - b).evalf()) <= 1e-6 * max(abs(a.evalf()), abs(b.evalf())))
  except Exception:
    return False
