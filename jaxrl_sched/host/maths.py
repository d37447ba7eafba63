"""Numbers and expressions in a model's text: which one is meant.

Whether two of them are equal is said by `equality.py`.
"""

from fractions import Fraction
import math
import re
from typing import Any

from jaxrl_sched.host import units

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


# Without a box: after ####, or else $...$, \(...\) or \[...\]. \$ is a currency.
_HASHES = re.compile(r'^####[ \t]*(\S.*)$', re.MULTILINE)
_MATHS = re.compile(
  r'(?<!\\)\$\$?([^$]{1,500})(?<!\\)\$|\\\(([^$]{1,500}?)\\\)|\\\[([^$]{1,500}?)\\\]'
)
_SIGNS = str.maketrans({
  '°': '^\\circ ', '≈': '\\approx ', '≤': '\\le ', '≥': '\\ge ', '≠': '\\neq ',
  '×': '\\times ', '·': '\\cdot ', 'π': '\\pi ', '∞': '\\infty ', '′': "'", '’': "'",
})  # fmt: skip
_SPACE = re.compile(r'(\\\\)|\\[,;:! ]|\\q?quad(?![A-Za-z])|~')
_DEGREE = re.compile(
  r'\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z])'
)
_TURNED = re.compile(r'(?<![A-Za-z0-9.])([0-9.]+)\^\\circ')
_TRIGONOMETRIC = re.compile(r'\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])')
_REPEATING = re.compile(
  r'(?<![0-9])([0-9]{0,50})\.([0-9]{0,50})\\overline\{?([0-9]{1,50})\}?'
)
_MIXED = re.compile(r'(-?[0-9]+) ([0-9]+)/([0-9]+)')


def answer_in(text: str) -> str:
  """What is boxed last, in one way of writing it; '' for no answer.

  Without a box it is what follows the last ####, or else the last maths between
  dollar signs, or else the whole text.
  """
  inner = last_box(text)
  if inner is None:
    hashes, found = _HASHES.findall(text), _MATHS.findall(text)
    inner = hashes[-1] if hashes else ''.join(found[-1]) if found else text
  if len(inner) > LONGEST:
    return ''
  inner = _plain(inner).translate(_SIGNS)
  inner = re.sub(r'(?<=[0-9])(?:\\[,;:! ]|~)(?=[0-9]{3}(?![0-9]))', '', inner)
  # The second backslash of \\ ends a row of a matrix; it makes no \ with a space.
  inner = _SPACE.sub(lambda found: found[1] or ' ', inner).strip()
  inner = re.sub(r'^(\*\*|["`])(.*)\1$', r'\2', inner, flags=re.DOTALL)
  if inner.startswith('$') and inner.count('$') == 1:
    inner = '\\' + inner
  inner = inner.strip('$').strip().replace('\\varnothing', '\\emptyset')
  inner = re.sub(r'(?<!\.)\.$', '', inner).strip()
  inner = units.WRAPPED.sub(r'\1', inner) if units.WRAPPED.fullmatch(inner) else inner
  inner = _DEGREE.sub(r'^\\circ', inner)
  if _TRIGONOMETRIC.search(inner):
    inner = _TURNED.sub(r'(\1\\cdot\\frac{\\pi}{180})', inner)
  inner = _REPEATING.sub(_as_fraction, inner.strip())
  inner = _MIXED.sub(r'\1\\frac{\2}{\3}', inner) if _MIXED.fullmatch(inner) else inner
  if re.fullmatch(r'\([A-Za-z]\)', inner):  # a choice: (B) is B
    inner = inner[1]
  return _SCIENTIFIC.sub(r'\1\\cdot 10^{\2}', inner).strip()


def is_balanced(text: str) -> bool:
  """Whether every brace is closed that is opened."""
  depth = 0
  for mark in re.finditer(r'\\.|[{}]', text, re.DOTALL):
    depth += (mark[0] == '{') - (mark[0] == '}')
    if depth < 0:
      return False
  return depth == 0


def _as_fraction(found: re.Match) -> str:
  whole, once, again = found.groups()
  over = int(whole + once + again) - int(whole + once or 0)
  return rf'\frac{{{over}}}{{{(10 ** len(again) - 1) * 10 ** len(once)}}}'
