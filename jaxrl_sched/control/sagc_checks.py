"""What SAGC takes as settings, saved numbers and predictions, and what it refuses."""

from collections.abc import Mapping, Sequence
import math
import operator
from typing import Any

import numpy as np

from jaxrl_sched.control.base import check_state
from jaxrl_sched.control.sagc_rules import LEAST, MOST, holding

CHOICES = {
  'mode': ('groups', 'mean', 'batch', 'any'),
  'hold': ('rollouts', 'prompts'),
  'utility': ('log2', 'signal'),
}
RANGES = {
  'tau': (lambda x: 1 <= x < math.inf, 'at least 1'),
  'delta': (lambda x: 0 < x < 1, 'above 0 and below 1'),
  'eta': (lambda x: 0 < x < math.inf, 'above 0'),
  'rho': (lambda x: 0 < x < 1, 'above 0 and below 1'),
  'lambda_max': (lambda x: 0 < x < math.inf, 'above 0'),
  'radius': (lambda x: x >= 1, 'at least 1'),
  'period': (lambda x: x >= 1, 'at least 1'),
  'seed': (lambda x: x >= 0, 'at least 0'),
  'trust': (lambda x: 0 <= x <= 1, '0 to 1'),
}


def check(name: str, value: Any, good: bool, expected: str) -> None:
  if not good:
    raise ValueError(f'{name}: {value!r}, expected {expected}')


def check_settings(settings: Mapping[str, Any]) -> None:
  """Each by itself."""
  for name, value in settings.items():
    if name in CHOICES:
      check(name, value, value in CHOICES[name], f'one of {", ".join(CHOICES[name])}')
    elif name in RANGES:
      holds, expected = RANGES[name]
      check(name, value, holds(value), expected)
    else:  # a Beta
      good = len(value) == 2 and all(
        isinstance(x, int | float) and 0 < x < math.inf for x in value
      )
      check(name, value, good, 'two numbers above 0')


def check_prompt_aware(
  sizes: Sequence[int],
  lambda_max: float,
  mode: str,
  hold: str,
  monotone: bool,
  utility: str,
) -> None:
  """What sizes of prompts need of the other settings."""
  check('hold', hold, hold == 'rollouts', "'rollouts' with prompt_aware")
  check('mode', mode, mode == 'groups', "'groups' with prompt_aware")
  check('utility', utility, utility == 'log2', "'log2' with prompt_aware")
  check('monotone', monotone, not monotone, 'False with prompt_aware')
  least = 2 * holding(sizes)  # all prompts have one size up to half of it
  good = lambda_max >= least
  check('lambda_max', lambda_max, good, f'at least {least:g} with prompt_aware')


def check_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
  """Ints, rising, at least 2: one answer has no group to be compared with."""
  try:
    whole = tuple(operator.index(size) for size in sizes)
  except TypeError:
    whole = ()
  rising = all(g < h for g, h in zip(whole, whole[1:], strict=False))
  good = bool(whole) and whole[0] >= 2 and rising
  check('sizes', sizes, good, 'whole numbers of at least 2, each larger than the last')
  return whole


def check_rollouts(sizes: Sequence[int], rollouts: int, hold: str) -> None:
  """Refuses a number of rollouts that some size does not divide, if it is to stay."""
  check('rollouts', rollouts, rollouts >= 1, 'at least 1')
  bad = [size for size in sizes if rollouts % size]
  if hold == 'rollouts' and bad:
    raise ValueError(
      f'rollouts: {rollouts} a step (groups_per_step * group_size), expected a '
      "multiple of every size, as hold='rollouts' "
      f'(sizes {list(sizes)}; it is none of {bad})'
    )


def check_chances(pis: Sequence[float] | np.ndarray) -> np.ndarray:  # [prompt] float64
  """Predicted chances, kept away from 0 and 1, where odds end."""
  pis = np.asarray(pis, np.float64)
  good = pis.ndim == 1 and ((pis >= 0) & (pis <= 1)).all()
  check('pis', pis.tolist(), good, 'one chance in [0, 1] a prompt')
  return np.clip(pis, LEAST, MOST)


def check_saved(
  state: dict[str, Any], own: dict[str, Any], lambda_max: float
) -> dict[str, np.ndarray]:
  """Refuses a state that is not like `own`; returns its numbers, float64."""
  check_state('sagc', state, own)
  for key in ('version', 'sizes', 'prompt_aware'):
    if state[key] != own[key]:
      raise ValueError(f'state of sagc: {key} {state[key]}, expected {own[key]}')

  def saved(key: str, good: bool, expected: str) -> None:
    check(f'state of sagc: {key}', state[key], bool(good), expected)

  numbers = {}
  for key in ('lam', 'a', 'b', 'num', 'den', 'signal', 'signal_mass'):
    try:
      numbers[key] = found = np.array(state[key], np.float64)
    except (TypeError, ValueError):
      found = np.array(np.nan)
    shape = np.shape(own[key])
    good = found.shape == shape and (np.isfinite(found) & (found >= 0)).all()
    saved(key, good, f'finite numbers >= 0 of shape {shape}')
  for key in ('a', 'b', 'signal_mass'):
    saved(key, (numbers[key] > 0).all(), 'numbers above 0')
  saved('lam', numbers['lam'] <= lambda_max, f'at most {lambda_max:g}')
  for key in ('index', 'before'):
    good = type(state[key]) is int and 0 <= state[key] < len(own['sizes'])
    saved(key, good, 'a place in sizes')
  saved('step', type(state['step']) is int and state['step'] >= -1, 'a step')
  seen = state['seen']
  good = isinstance(seen, dict) and all(isinstance(x, float) for x in seen.values())
  saved('seen', good, 'numbers by name')
  return numbers
