"""Whether two answers are equal: numbers exactly, expressions by math-verify.

It is used so that nothing of a text is evaluated as code, and its 'equal' stands only
if the numbers of both agree exactly, or in forty digits.
"""

import dataclasses
from fractions import Fraction
import functools
import itertools
import re
from typing import Any

from jaxrl_sched.host import units
from jaxrl_sched.host.maths import number

_PERCENT = re.compile(r'\s*(?:\\?%|\\text\{\s*(?:percent|\\?%)\s*\}|percent)$')
_CHOICE = re.compile(r'(?:\\(?:text|mathrm|textbf|mathbf)\{\s*)?(?:\(|^)([A-Z])\)')
# A label of a choice before what it says: \\textbf{(C) }12.
_LABEL = re.compile(
  r'\\(?:text|mathrm|textbf|mathbf)\{\s*\(([A-Z])\)\s*\}[\s~]*(?=\S)'
  r'|\(([A-H])\)\s+(?=[0-9A-Za-z]|\\(?:[dt]?frac|sqrt|text|\$))'
)
# Numbers that are no sums or products: dates, times with seconds, versions, addresses.
_NAMES_OF_DIGITS = re.compile(
  r'[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}|[0-9]+/[0-9]+/[0-9]+|[0-9]+(?:\.[0-9]+){2,}'
  r'|[0-9]+(?::[0-9]+){2,}'
)
_HYPHENATED = re.compile(r'[0-9]+(?:-[0-9]+)+')
# Capitals, alone or with digits, spell something: NaCl2, H2O, A1.
_SYMBOLS = re.compile(r'[A-Z]{2,}|[A-Z][A-Za-z]*[0-9][A-Za-z0-9]*')
_IDENTIFIER = re.compile(r'[A-Za-z][0-9]+')
# Two letters that are a word, not a product of two unknowns.
_SHORT_WORDS = set(
  'no on of so go do to or if is it in at an as up us we be by'.split()
)
_BASED = re.compile(r'([0-9]+)_\{?([0-9]+)\}?')
_DECIMAL = re.compile(r'(?<![0-9.,])(?:[0-9]*\.[0-9]+|[0-9]+\.)(?![0-9.])')
_DOTS = re.compile(r'\\[a-z]*dots|\.\.\.|…')
_SIDE_BY_SIDE = re.compile(r'(?<!frac )(?<!frac)(?<![0-9.^_])[0-9.]+\s+[0-9.]')
# Where white space says nothing: not in 1 2, a b or 1, 234.
_NO_SPACE = r'(?<=[0-9]) (?![0-9])|(?<=[A-Za-z]) (?![A-Za-z])|(?<=[^0-9A-Za-z,]) '
_THOUSANDS = r'^-?[0-9]{1,3}(?:,[0-9]{3})+(?=\.[0-9])'
_WORDS = r'(?=.*[A-Za-z]{3})[A-Za-z]+(?:\s[A-Za-z]+)*'


def equal(gold: str, guess: str) -> bool:
  """Whether two answers, of `answer_in`, say the same.

  Of a gold one that cannot be read only the same text does: see `is_readable`.
  """
  if re.fullmatch('[A-Z]', gold) and len(labels := _CHOICE.findall(guess)) == 1:
    guess = labels[0] if _CHOICE.match(guess) else guess
  if _same_text(gold, guess):
    return True
  labels = [_LABEL.match(text) for text in (gold, guess)]
  if all(labels) and labels[0].groups() != labels[1].groups():
    return False
  if any(labels):
    gold, guess = (_LABEL.sub('', text, count=1) for text in (gold, guess))
    return equal(gold, guess)
  if any(map(_is_text, (gold, guess))) or _HYPHENATED.fullmatch(gold):
    return False
  (gold, unit), (guess, other) = units.split(gold), units.split(guess)
  bare_gold, bare_guess = (_PERCENT.sub('', s) for s in (gold, guess))
  unit, other = unit or bare_gold != gold, other or bare_guess != guess
  if unit and other and unit != other:
    return False
  if _same(bare_gold, bare_guess):
    return True
  if bare_gold != gold and bare_guess == guess:
    return _same(rf'\frac{{{bare_gold}}}{{100}}', guess)
  if bare_gold == gold and bare_guess != guess:
    return _same(gold, rf'\frac{{{bare_guess}}}{{100}}')
  return False


def is_readable(gold: str) -> bool:
  """Whether a gold answer, of `answer_in`, is compared by more than its text."""
  if _is_text(gold) or _HYPHENATED.fullmatch(gold) or re.fullmatch(_WORDS, gold):
    return True
  bare = _PERCENT.sub('', units.split(_LABEL.sub('', gold, count=1))[0])
  bare = _without_approximation(bare)[0]
  if number(bare) is not None or _BASED.fullmatch(bare):
    return True
  kind = _brackets(bare)
  members = [bare] if kind is None else _members(bare, kind)
  return all(number(x) is not None or bool(_read(x)) for x in members)


def _is_text(text: str) -> bool:
  """Whether only the same text says the same, since it is no expression."""
  return bool(_NAMES_OF_DIGITS.fullmatch(text) or _SYMBOLS.fullmatch(text)) or (
    _is_short_word(text)
  )


def _is_short_word(text: str) -> bool:
  # Nobody calls an unknown o; other pairs of small letters may be a product.
  is_word = text.casefold() in _SHORT_WORDS
  return is_word and (text.isupper() or 'o' in text.casefold())


def _same_text(gold: str, guess: str) -> bool:
  """The same but for white space and TeX's dress; a word also but for its case."""
  texts = []
  for text in (gold, guess):
    text = re.sub(r'\\(?:left|right|displaystyle)(?![A-Za-z])', '', text)
    text = units.WRAPPED.sub(r'\1', text.replace('\\dfrac', '\\frac'))
    text = re.sub(r'\s+', ' ', text).strip()
    texts.append(re.sub(_NO_SPACE, '', text))
  if re.fullmatch(f'{_WORDS}|[A-H]', texts[0]) or _is_short_word(texts[0]):
    texts = [text.casefold() for text in texts]
  return texts[0] == texts[1]


def _same(gold: str, guess: str) -> bool:
  if gold == guess:
    return True
  gold, _ = _without_approximation(gold)
  guess, near = _without_approximation(guess)
  if near is not None and not _is_near(gold, near):
    return False
  guess = _end_of_chain(gold, guess)
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
  if _IDENTIFIER.fullmatch(gold) and guess[:1].isdigit():
    return False  # math-verify takes A1 for A * 1
  if _IDENTIFIER.fullmatch(guess) and gold[:1].isdigit():
    return False
  # math-verify takes the pair (1,2) for the set {1,2}, or for the list 1, 2.
  kinds = _brackets(gold), _brackets(guess)
  if set(kinds) == {'pair', 'set'}:
    return False
  if 'list' in kinds:
    return _same_lists((gold, kinds[0]), (guess, kinds[1]))
  return _verified(gold, guess)


def _same_lists(gold: tuple[str, str | None], guess: tuple[str, str | None]) -> bool:
  """Of texts and their kinds, of which one is a list: the same members, as often.

  Values of several names are in the order that these are written in, so that x=1, y=2
  is (1, 2) and neither (2, 1) nor 2, 1.
  """
  (gold, gold_kind), (guess, guess_kind) = gold, guess
  golds, guesses = (_members(gold, gold_kind), _members(guess, guess_kind))
  names = [_names(golds), _names(guesses)]
  if sum(map(bool, names)) == 1:  # one says what its values are of
    named, other = (golds, guesses) if names[0] else (guesses, golds)
    other_kind = guess_kind if names[0] else gold_kind
    given = names[0] or names[1]
    several = len(set(given)) > 1
    if not several and other_kind == 'pair':
      return False
    if several:
      if other_kind != 'pair' or given != sorted(given) or len(named) != len(other):
        return False
      values = [member.partition('=')[2].strip() for member in named]
      return all(_same(a, b) for a, b in zip(values, other, strict=True))
  elif 'pair' in (gold_kind, guess_kind):
    return False
  if None in (gold_kind, guess_kind):
    single = guess if guess_kind is None else gold
    # What else stands for several values: 1 or 2, \\pm 2, an interval.
    if not re.search(r'\\pm|\\mp|\\cup|\\in|\\text|\\|and|or|;|[<>{}]', single):
      return False
    return _verified(gold, guess)
  if len(golds) != len(guesses) or len(golds) > 20:
    return False
  left = list(guesses)
  for member in golds:
    likely = sorted(left, key=lambda other: other != member)  # the same text first
    match = next((other for other in likely if _same(member, other)), None)
    if match is None:
      return False
    left.remove(match)
  return True


def _names(members: list[str]) -> list[str]:
  """What each member gives a value to: x of x=1; none where one gives none."""
  sides = [member.partition('=') for member in members]
  named = all(equals and _is_name(name.strip()) for name, equals, _ in sides)
  return [name.strip() for name, _, _ in sides] if named else []


_PARTING = r'(,\s*(?:and|or)\b|[,;]|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)'


def _members(text: str, kind: str | None) -> list[str]:
  """The members of a list, a set or a pair, but for what stands within brackets."""
  text = re.sub(r'\\(?:left|right)(?![A-Za-z])', '', text).strip()
  if kind == 'set':
    text = text[2:-2]
  elif kind == 'pair':
    text = text[1:-1]
  depth, members, start = 0, [], 0
  for mark in re.finditer(rf'{_PARTING}|\\[{{}}]|[([{{}}\])]', text):
    if mark[1] is None:
      depth += mark[0][-1] in '([{'
      depth -= mark[0][-1] in ')]}'
    elif depth == 0:
      members.append(text[start : mark.start()].strip())
      start = mark.end()
  return [*members, text[start:].strip()]


def _is_name(text: str) -> bool:
  r"""Whether x, f(2), a_1, \angle ABC: what an equation may give a value to."""
  text = re.sub(r"_(?:\{[^{}]*\}|.)|(?<=[A-Za-z'])\([^()]*\)", '', text).strip()
  odd = re.search(r'[0-9^!|<>]|\\(?:sqrt|log|ln|le|ge|neq|leq|geq)(?![A-Za-z])', text)
  return bool(re.search('[A-Za-z]', text)) and not odd and not text.startswith('-')


def _without_approximation(text: str) -> tuple[str, str | None]:
  r"""What stands before \approx and after it; what stands after it where it is alone."""
  exact, approx, rounded = text.partition('\\approx')
  if not approx:
    return text, None
  exact, rounded = units.split(exact.strip())[0], rounded.strip()
  if not exact or _is_name(exact):
    return rounded, None
  return exact, rounded


def _is_near(gold: str, rounded: str) -> bool:
  """Whether a number is the gold one to within a unit of its last digit."""
  value = number(rounded)
  if value is None or '/' in rounded or len(gold_read := _read(gold)) != 1:
    return False
  unit = Fraction(1, 10 ** len(rounded.partition('.')[2]))
  try:  # the border with what math-verify may find
    return bool(abs(gold_read[0].evalf() - float(value)) < float(unit) * (1 - 1e-9))
  except (AttributeError, TypeError, OverflowError):
    return False


def _end_of_chain(gold: str, guess: str) -> str:
  """The value that `x = 3 + 4 = 7` ends in: 7. Every other side is a name or equal.

  Returns:
    The guess as it is where it is no such chain or the gold answer is an equation;
    '' where a side says something else than the gold answer.
  """
  sides, gold_sides = _sides(guess), _sides(gold)
  if len(sides) < 2 or len(gold_sides) > 2:
    return guess
  if len(gold_sides) == 2:
    if len(sides) == 2 or not _is_name(gold_sides[0]):
      return guess
    last = _end_of_chain(gold_sides[1], '='.join(sides[1:]))
    return f'{sides[0]}={last}' if last else ''
  names = [_is_name(side) for side in sides[:-1]]
  values = [side for side, name in zip(sides[:-1], names, strict=True) if not name]
  return sides[-1] if all(_same(gold, side) for side in values) else ''


def _sides(text: str) -> list[str]:
  """The sides of the equations of a text, outside of brackets; one for a list."""
  depth, sides, start = 0, [], 0
  if re.search(r';|\\begin|\b(?:and|or)\b', text):
    return [text]
  for mark in re.finditer(r'\\[{}]|\\.|[([{}\])]|,|(?<![<>!:])=', text):
    depth += mark[0][-1] in '([{'
    depth -= mark[0][-1] in ')]}'
    if depth == 0 and mark[0] == ',':
      return [text]
    if depth == 0 and mark[0] == '=':
      sides.append(text[start : mark.start()].strip())
      start = mark.end()
  return [*sides, text[start:].strip()]


def _cases_differ(gold: str, guess: str) -> bool:
  """Whether one has a letter that the other has only in the other case."""
  mine, yours = (
    set(re.sub(r'\\[A-Za-z]+|[A-Za-z]{3,}', '', units.WRAPPED.sub('', s)))
    for s in (gold, guess)
  )
  mine, yours = ({c for c in s if c.isalpha()} for s in (mine, yours))
  return any(
    c not in b and c.swapcase() in b
    for a, b in ((mine, yours), (yours, mine))
    for c in a
  )


def _brackets(text: str) -> str | None:
  """'set', 'pair' or 'list' for members with commas between them, else None."""
  bare = re.sub(r'\\(?:left|right)(?![A-Za-z])', '', text).strip()
  if '\\cup' in bare or '\\begin' in bare or not re.search(_PARTING, bare):
    return None
  if number(bare) is not None or re.search(_THOUSANDS, bare):
    return None
  if len(_members(bare, None)) > 1:
    return 'list' if all(_members(bare, None)) else None
  if bare.startswith('\\{') and bare.endswith('\\}'):
    return 'set'
  if bare[0] in '([' and bare[-1] in ')]':
    return 'pair'
  return None


@functools.lru_cache(maxsize=64)
def _read(text: str) -> list[Any]:
  """What math-verify makes of a text, no more than one thing, its numbers exact."""
  import math_verify
  import sympy

  if _nesting(text) > 50:  # it takes minutes over a thousand brackets
    return []
  text = re.sub(_THOUSANDS, lambda m: m[0].replace(',', ''), text)
  text = _DECIMAL.sub(_exact, text.replace('^\\circ', ''))
  text = re.sub(r'(?<=[0-9])\(', r'\\cdot(', text)  # it takes 3(4) for 3 + 4
  # Only the LaTeX parser: the plain one hands strings to sympy, which evaluates
  # them. No units: those it knows are letters too. No alarms, for they work on a
  # main thread only: the pool has the clock.
  config = math_verify.LatexExtractionConfig(boxed_match_priority=0)
  plain = dataclasses.replace(config.normalization_config, units=False)
  found = math_verify.parse(
    f'\\boxed{{{text}}}',
    extraction_config=[dataclasses.replace(config, normalization_config=plain)],
    fallback_mode='no_fallback',
    extraction_mode='first_match',  # else it looks on, for a fraction within
    parsing_timeout=None,
  )
  # It takes the imaginary unit for a letter.
  letters = {sympy.Symbol('i', real=real): sympy.I for real in (True, False)}
  return [
    x.xreplace(letters) if letters.keys() & x.free_symbols else x
    for x in found
    if isinstance(x, (sympy.Basic, sympy.MatrixBase))
  ]


def _nesting(text: str) -> int:
  depths = itertools.accumulate((c in '([{') - (c in ')]}') for c in text)
  return max(depths, default=0)


def _exact(decimal: re.Match) -> str:
  value = Fraction(decimal[0])
  if value.denominator == 1:
    return f' {value}'
  fraction = rf'\frac{{{value.numerator}}}{{{value.denominator}}}'
  glued = re.search(r'(?:[\^_}]|\\[A-Za-z]+)\s*$', decimal.string[: decimal.start()])
  return f'{{{fraction}}}' if glued else fraction


def _verified(gold: str, guess: str) -> bool:
  import math_verify

  golds = _read(gold)
  if not golds:
    return False
  # math-verify adds the numbers 3 4, multiplies the letters of words (east is seat),
  # and drops dots, primes and the case of letters.
  if _SIDE_BY_SIDE.search(gold) or _SIDE_BY_SIDE.search(guess):
    return False
  if re.fullmatch(_WORDS, gold) and re.fullmatch(_WORDS, guess):
    return False
  if bool(_DOTS.search(gold)) != bool(_DOTS.search(guess)):
    return False
  if gold.count("'") != guess.count("'") or _cases_differ(gold, guess):
    return False
  try:  # the border with what a model may write
    guesses = _read(guess)
    found = math_verify.verify(
      golds, guesses, timeout_seconds=None, allow_set_relation_comp=True
    )
    return found and _agree(golds[0], guesses[0])
  except Exception:
    return False


def _agree(a: Any, b: Any) -> bool:
  """Whether the numbers of two expressions agree in forty digits of their own size."""
  import sympy

  if a == b:
    return True
  if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
    return all(map(_agree, a.flat(), b.flat()))
  if isinstance(a, sympy.Eq) and isinstance(b, sympy.Eq) and a.lhs == b.lhs:
    return _agree(a.rhs, b.rhs)
  if type(a) is type(b) and isinstance(a, (sympy.Tuple, sympy.Interval)):
    return all(map(_agree, a.args, b.args))
  if isinstance(a, sympy.FiniteSet) and isinstance(b, sympy.FiniteSet):
    return all(any(_agree(x, y) for y in b.args) for x in a.args)
  if not all(isinstance(x, sympy.Expr) and x.is_number for x in (a, b)):
    return True
  a, b = a.doit(), b.doit()
  if a.is_Rational and b.is_Rational:
    return bool(a == b)
  size = max(abs(a.evalf()), abs(b.evalf()))
  return bool(abs((a - b).evalf(50)) <= size * sympy.Rational(1, 10**40))
