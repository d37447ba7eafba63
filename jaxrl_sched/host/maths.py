"""Numbers and expressions in a model's text: which one is meant.

Whether two of them are equal is said by `equality.py`.
"""

from fractions import Fraction
import math
import re
from typing import Any
import unicodedata

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


_ROOTS = {'√': '\\sqrt', '∛': '\\sqrt[3]', '∜': '\\sqrt[4]'}
_INNER = r'(?:[^{}()]|\{[^{}]*\}|\([^()]*\))*'
_ROOT = re.compile(
  rf'([√∛∜])\s*(?:(\{{{_INNER}\}})|\(({_INNER})\)'
  r'|([0-9]+(?:\.[0-9]+)?|\\frac\{[^{}]*\}\{[^{}]*\}|[A-Za-zπ]))'
)
_RAISED = '⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ'
_LOWERED = '₀₁₂₃₄₅₆₇₈₉₊₋'
_SHIFTED = re.compile(rf'([{_RAISED}]+)|([{_LOWERED}]+)')


def _plain(text: str) -> str:
  """One way of writing minus signs, thousands, and digits of any script or height."""
  text = text.replace('\u2212', '-').replace('{,}', ',').replace(',\\!', ',')
  if text.isascii():
    return text
  text = _SHIFTED.sub(_shift, text)
  text = ''.join(map(_plain_character, text))
  return _ROOT.sub(_root, text).replace('\u2044', '/')


def _shift(found: re.Match) -> str:
  digits = unicodedata.normalize('NFKC', found[0]).replace('\u2212', '-')
  return f'^{{{digits}}}' if found[1] else f'_{{{digits}}}'


def _plain_character(c: str) -> str:
  if c.isascii():
    return c
  if (digit := unicodedata.decimal(c, None)) is not None:
    return str(digit)
  if '\uff01' <= c <= '\uff5e':  # ASCII in full width
    return unicodedata.normalize('NFKC', c)
  spelled = unicodedata.normalize('NFKC', c)
  over, slash, under = spelled.partition('\u2044')
  if slash and over and under:  # a fraction as one character
    return rf'\frac{{{over}}}{{{under}}}'
  return c


def _root(found: re.Match) -> str:
  inner = found[2] or f'{{{found[3] or found[4]}}}'
  return _ROOTS[found[1]] + inner


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
  r'(?<![0-9])([0-9]{0,50})\.([0-9]{0,50})\\(?:overline|bar)\s*(?:\{([0-9]{1,50})\}|([0-9])(?![0-9]))'
)
# TeX takes one sign or command for an argument without braces: \\frac\\pi2.
_ARGUMENT = r'\s*(\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z0-9])'
_FRAC = re.compile(rf'\\[dt]?frac{_ARGUMENT}{_ARGUMENT}')
_MIXED = re.compile(r'(-?[0-9]+) ([0-9]+)/([0-9]+)')


UNBOXED = ('whole', 'last_number', 'answer_tag')


def tagged(text: str) -> str | None:
  """What stands in the last <answer>...</answer>, if there is one."""
  found = re.findall(r'<answer>((?:(?!<answer>).)*?)</answer>', text, re.DOTALL)
  return found[-1].strip() if found else None


def answer_in(text: str, unboxed: str = 'whole') -> str:
  """What is boxed last, in one way of writing it; '' for no answer.

  Args:
    unboxed: what is read where there is no box. 'whole': what follows the last ####,
      or else the last maths between dollar signs, or else the whole text.
      'last_number': the last number. 'answer_tag': the last <answer>...</answer>.
  """
  inner = last_box(text)
  if inner is None and unboxed == 'last_number':
    numbers = _NUMBER.findall(_plain(text))
    inner = numbers[-1] if numbers else ''
  elif inner is None and unboxed == 'answer_tag':
    inner = tagged(text) or ''
    box = last_box(inner)
    inner = inner if box is None else box
  elif inner is None:
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
  inner = _FRAC.sub(_braced, inner)
  inner = _MIXED.sub(r'\1\\frac{\2}{\3}', inner) if _MIXED.fullmatch(inner) else inner
  if re.fullmatch(r'\([A-Za-z]\)', inner):  # a choice: (B) is B
    inner = inner[1]
  return _SCIENTIFIC.sub(r'\1\\cdot 10^{\2}', inner).strip()


def _braced(found: re.Match) -> str:
  over, under = (x if x.startswith('{') else f'{{{x}}}' for x in found.groups())
  return rf'\frac{over}{under}'


def is_balanced(text: str) -> bool:
  """Whether every brace is closed that is opened."""
  depth = 0
  for mark in re.finditer(r'\\.|[{}]', text, re.DOTALL):
    depth += (mark[0] == '{') - (mark[0] == '}')
    if depth < 0:
      return False
  return depth == 0


def _as_fraction(found: re.Match) -> str:
  whole, once, braced, digit = found.groups()
  again = braced or digit
  over = int(whole + once + again) - int(whole + once or 0)
  return rf'\frac{{{over}}}{{{(10 ** len(again) - 1) * 10 ** len(once)}}}'
