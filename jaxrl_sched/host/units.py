r"""The unit after a number in an answer: `5\text{ cm}^2` is 5, in square centimetres.

The rule: a unit of the table below, alone or in products, powers and quotients, is
taken off a number, and so is a single plural noun (`7 apples`); any other word stays
where it is, and the answer that holds it equals no bare number. A number word is
multiplied in: `5 million` is 5000000.
"""

import functools
import re

# A line is one unit: the name it is known by, and what else it is called. What ends
# in -s or -es is looked up without. Letters of one or two keep their case.
_TABLE = """
mm millimeter millimetre
cm centimeter centimetre
dm decimeter decimetre
m meter metre
km kilometer kilometre
inch in
foot feet ft
yard yd
mile mi
acre
hectare ha
ml mL milliliter millilitre
liter litre l L
gallon gal
quart qt
pint pt
cup
tablespoon tbsp
teaspoon tsp
ounce oz
mg milligram
g gram
kg kilogram kilo
ton tonne
pound lb lbs
ms millisecond
second sec s
minute min
hour hr h
day
week wk
month
year yr
decade
am AM
pm PM
dollar USD buck
cent
euro EUR
yen
rupee Rs
penny pennies pence
degree deg
radian rad
C celsius
F fahrenheit
kelvin
N newton
J joule
kJ kilojoule
cal calorie
kcal kilocalorie
W watt
kW kilowatt
kWh
V volt
amp ampere
ohm
Hz hertz
kHz
MHz
Pa pascal
kPa
atm
mol mole
bit
byte
KB kB kilobyte
MB megabyte
GB gigabyte
rpm
time
people person
child children
man men
woman women
unit
"""
_NAMES = {name: line.split()[0] for line in _TABLE.split('\n') for name in line.split()}
_RATES = {
  'mph': 'mile / hour', 'kph': 'km / hour', 'kmh': 'km / hour', 'kmph': 'km / hour',
  'mps': 'm / s', 'cc': 'cubic cm',
}  # fmt: skip
_SCALES = {
  'dozen': '12', 'hundred': '100', 'thousand': '10^{3}', 'million': '10^{6}',
  'billion': '10^{9}', 'trillion': '10^{12}',
}  # fmt: skip
_BEFORE = {'square': 2, 'sq': 2, 'cubic': 3, 'cu': 3}
_AFTER = {'^2': 2, '^{2': 2, '^3': 3, '^{3': 3, 'squared': 2, 'cubed': 3}
# Words in -s that make another number of a number, or a sentence.
_NO_NOUNS = set(
  'halves thirds quarters pairs couples scores dozens hundreds thousands millions '
  'billions trillions ones twos threes fours fives sixes sevens eights nines tens '
  'times does equals divides exceeds differs powers roots squares factorials percents '
  'negatives inverses reciprocals always besides fails lies others infinities'.split()
)
_CURRENCIES = {r'\$': 'dollar', '€': 'euro', '£': 'pound', '¥': 'yen'}
_CURRENCY = re.compile(r'\\\$|[€£¥]')
_WRAP = r'\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox)\s*\{'
WRAPPED = re.compile(_WRAP + r'([^{}]*)\}')
# Letters that stand bare may be variables: 7m is 7 times m, and so is 7 m.
_PIECE = (
  rf'{_WRAP}[^{{}}]*\}}|\^\\circ(?:\s*[CF](?![A-Za-z]))?'
  r'|(?<![A-Za-z\\])(?:[A-Za-z]{2,}\.?|[ap]\.\s?m\.|(?<=/)[A-Za-z]|m(?=/s))'
  r'|\^[23](?![0-9])|\^\{[23]\}|[²³/\s]|\\cdot(?![A-Za-z])'
)
_TAIL = re.compile(rf'(?<=[0-9A-Za-z)}}\].])(?!\^[23{{]|[²³])(?:{_PIECE})+$')
_GLUED = re.compile(r'(?:mm|cm|km|kg|ft|lbs?|mph|km/h|m/s)(?![A-Za-z])')
_BARE_QUOTIENT = re.compile(r'\s*/\s*[A-Za-z](?![A-Za-z])')

Unit = tuple[tuple[str, int], ...]


def split(text: str) -> tuple[str, Unit]:
  """An answer without its unit, and the unit, () where there is none."""
  currency = _CURRENCY.search(text)
  text = _CURRENCY.sub('', text).strip()
  bare, unit = _without_tail(text)
  if currency:
    unit = tuple(sorted({*unit, (_CURRENCIES[currency[0]], 1)}))
  return bare, unit


def _without_tail(text: str) -> tuple[str, Unit]:
  tail = _TAIL.search(text)
  if not tail:
    return text, ()
  head, words = text[: tail.start()], tail[0]
  if re.match('[A-Za-z]', words) and not _GLUED.match(words):
    return text, ()
  if _BARE_QUOTIENT.match(words):
    return text, ()
  if not re.search(r'[0-9)}\].]$|\\pi$|(?<![A-Za-z])[a-z]$', head):
    return text, ()
  read = _read(words)
  if read is None:
    return text, ()
  scale, unit = read
  return head + scale, unit


def _read(words: str) -> tuple[str, Unit] | None:
  """The factor and the unit that some words mean; None where they mean more."""
  words = WRAPPED.sub(r' \1 ', words)
  words = re.sub(r'\b([ap])\.\s?m\b\.?', r'\1m', words)
  for sign, word in {
    '^\\circ': ' degree ',
    '²': '^2',
    '³': '^3',
    '\\cdot': ' ',
  }.items():
    words = words.replace(sign, word)
  words = re.sub(r'[A-Za-z]+', lambda m: _RATES.get(m[0], m[0]), words)
  if not re.fullmatch(r'(?:[A-Za-z/.\s]|\^\{?[23]\}?)*', words):
    return None
  tokens = re.findall(r'[A-Za-z]+|/|\^\{?[23]', words)
  scale = ''
  while tokens and tokens[0] in _SCALES:
    scale += rf'\cdot {_SCALES[tokens.pop(0)]}'
  unit = _product(tokens) if tokens or scale else None
  return None if unit is None else (scale, unit)


def _product(tokens: list[str]) -> Unit | None:
  factors, before, sign = [], 1, 1
  for i, token in enumerate(tokens):
    if token in ('/', 'per'):
      if sign < 0:
        return None
      sign = -1
    elif token in _BEFORE:
      before = _BEFORE[token]
    elif token in _AFTER:
      if not factors or before > 1 or sign < 0:
        return None
      name, power = factors.pop()
      factors.append((name, power * _AFTER[token]))
    else:
      name = _name(token) or (_plural(token) if i == 0 else None)
      degrees = bool(factors) and factors[-1] == ('degree', 1)
      if name is None or (name in 'CF' and not degrees):
        return None
      factors.append((name, sign * before))
      before, sign = 1, 1
  if before > 1 or sign < 0:
    return None
  return tuple(sorted(f for f in factors if f[0] != 'unit'))


@functools.cache
def _name(word: str) -> str | None:
  for known in (word, word.lower()) if len(word) > 2 else (word,):
    for stem in (known, known.removesuffix('s'), known.removesuffix('es')):
      # Without its -s a word of two letters is a variable.
      if stem in _NAMES and (stem == known or len(stem) > 1):
        return _NAMES[stem]
  return None


def _plural(word: str) -> str | None:
  word = word.lower()
  if not re.fullmatch(r'[a-z]{3,}s', word) or word in _NO_NOUNS:
    return None
  return None if re.search(r'(?:ss|us|is|ths)$', word) else word
