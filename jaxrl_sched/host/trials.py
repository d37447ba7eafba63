"""Verifiers tried on a few answers at the start, where a fault costs nothing yet."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

from jaxrl_sched.host.grading import Grade, GradingPool
from jaxrl_sched.types import Prompt, Reward, passes

MADE_UP = 'This is a made-up answer.'  # which no verifier should take for right
_PROMPTS = 3  # of a dataset


def chosen(count: int) -> list[int]:
  """The indices of a few of so many prompts, evenly spread."""
  return sorted({0, count // 2, count - 1})[:_PROMPTS]


def try_verifiers(
  pool: GradingPool,
  prompts: Mapping[str, Sequence[Prompt]],
  *,
  shown: Callable[[str], str] = lambda text: text,
) -> list[str]:
  """Grades a made-up answer to each prompt, and its reference solution.

  A prompt without a solution is answered with its bare 'answer', if that is text or a
  number.

  Args:
    prompts: a few, by the dataset's name as it is to be shown.
    shown: a solution -> what graders would see of it as an answer.

  Returns:
    A line for each dataset, and warnings.

  Raises:
    ValueError: a verifier failed on every answer. The message names it, the dataset
      and what happened.
  """
  for name, some in prompts.items():
    for i, prompt in enumerate(some):
      texts = {'made up': MADE_UP, 'known': _known(prompt, shown)}
      for place, reward in enumerate(prompt.graded_by):
        alone = dataclasses.replace(
          prompt,
          reward=reward.verifier,
          max_reward=reward.max_reward,
          min_reward=reward.min_reward,
          rewards=(),
        )
        for kind, text in texts.items():
          if text is not None:
            pool.submit((name, place, kind, i), text, alone)
  grades = pool.collect()
  lines, warnings = [], []
  for name, some in prompts.items():
    solved = any(prompt.solution is not None for prompt in some)
    parts = []
    for place, reward in enumerate(some[0].graded_by):
      made_up, known = (
        [g for key, g in grades.items() if key[:3] == (name, place, kind)]
        for kind in ('made up', 'known')
      )
      _check(name, reward, [*known, *made_up])
      what = 'reference solutions' if solved else 'bare answers'
      parts.append(_told(reward, known, made_up, what))
      if place == 0:
        warnings += _doubts(name, reward, known if solved else [], made_up)
    lines.append(f'{name}: {"; ".join(parts)}')
  return lines + warnings


def _known(prompt: Prompt, shown: Callable[[str], str]) -> str | None:
  """An answer that should be right."""
  if prompt.solution is not None:
    return shown(prompt.solution)
  answer = prompt.answer
  if isinstance(answer, bool) or not isinstance(answer, str | int | float):
    return None
  return answer if isinstance(answer, str) else repr(answer).removesuffix('.0')


def _check(name: str, reward: Reward, grades: Sequence[Grade]) -> None:
  if all(grade.fault is not None for grade in grades):
    raise ValueError(
      f'Dataset {name!r}, reward {reward.verifier!r}: failed on each of {len(grades)} '
      f'answers that were tried: {_fault(grades[0])}; expected a number for any text'
    )


def _told(
  reward: Reward, known: Sequence[Grade], made_up: Sequence[Grade], what: str
) -> str:
  """'math' gives 1 to 3 of 3 reference solutions, 0 to a made-up answer."""
  label = repr(reward.verifier) + f' ({reward.name})' * bool(reward.name)
  parts = []
  if scores := _scores(known):
    right = [score for score in scores if _passes(reward, score)]
    parts.append(f'{_span(right or scores)} to {len(right or scores)} of {len(known)}')
    parts[0] += f' {what}'
  if scores := _scores(made_up):
    parts.append(f'{_span(scores)} to a made-up answer')
  failed = [grade for grade in (*known, *made_up) if grade.fault is not None]
  if failed:
    count = len(known) + len(made_up)
    parts.append(f'fails on {len(failed)} of {count} answers ({_fault(failed[0])})')
  return f'{label} gives {", ".join(parts)}'


def _doubts(
  name: str, reward: Reward, solutions: Sequence[Grade], made_up: Sequence[Grade]
) -> list[str]:
  best = '1' if reward.max_reward is None else f'max_reward={reward.max_reward:g}'
  found, verifier = [], repr(reward.verifier)
  if solutions and not any(_passes(reward, score) for score in _scores(solutions)):
    found.append(f'warning: {name}: no reference solution gets {best} from {verifier}')
  if any(_passes(reward, score) for score in _scores(made_up)):
    found.append(
      f'warning: {name}: a made-up answer ({MADE_UP!r}) gets {best} from {verifier}'
    )
  return found


def _scores(grades: Sequence[Grade]) -> list[float]:
  return [grade.score for grade in grades if grade.fault is None]


def _passes(reward: Reward, score: float) -> bool:
  return bool(passes(score, reward.max_reward, reward.min_reward))


def _span(scores: Sequence[float]) -> str:
  low, high = f'{min(scores):g}', f'{max(scores):g}'
  return low if low == high else f'{low} ... {high}'


def _fault(grade: Grade) -> str:
  return f'{grade.fault}: {grade.detail}' if grade.detail else grade.fault
