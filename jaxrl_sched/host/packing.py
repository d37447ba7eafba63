"""Dense prompt packing: answers into rows, and the weight of every token.

Averaging is data: the loss is a plain sum over tokens of weight x term, and the
weights are written here, where the whole batch is in sight. So neither rows,
microbatches nor hosts can change a gradient.
"""

import bisect
from collections.abc import Sequence
import dataclasses

import numpy as np

from jaxrl_sched.types import Batch, Completion, Group, SharedBatch

# What the papers average over; see `answer_weights`.
AVERAGING = {
  'grpo': 'sequence',  # arXiv 2402.03300
  'dapo': 'token',  # arXiv 2503.14476
  'dr_grpo': 'constant',  # arXiv 2503.20783
  'gspo': 'sequence',  # arXiv 2507.18071
  'cispo': 'token',  # arXiv 2506.13585
}
AVERAGES = (*dict.fromkeys(AVERAGING.values()), 'group')


def pack(lengths: Sequence[int], *, capacity: int, window: int) -> list[list[int]]:
  """Packs units into rows of at most `capacity` tokens.

  A buffer of `window` units is kept full, in order of arrival. Each row starts
  with the oldest unit of the buffer, so that none waits for ever, and goes on with
  the largest that still fits (of equal ones the oldest).

  Returns:
    The rows, each a list of indices into `lengths`, in the order of the row.
  """
  if capacity < 1 or window < 1:
    raise ValueError(
      f'capacity and window: expected at least 1, got {capacity} and {window}'
    )
  for i, length in enumerate(lengths):
    if not 1 <= length <= capacity:
      raise ValueError(
        f'unit {i} has {length} tokens: expected 1 to the capacity, {capacity}'
      )
  # Sorted by length, then newest first: the last entry of at most some length is
  # the oldest of the largest that fit.
  buffer = sorted((n, -i) for i, n in enumerate(lengths[:window]))
  arrived, oldest = len(buffer), 0
  taken = np.zeros(len(lengths), bool)

  def take(place: int) -> tuple[int, int]:
    nonlocal arrived
    length, minus_i = buffer.pop(place)
    taken[-minus_i] = True
    if arrived < len(lengths):
      bisect.insort(buffer, (lengths[arrived], -arrived))
      arrived += 1
    return length, -minus_i

  rows = []
  while buffer:
    while taken[oldest]:
      oldest += 1
    used, first = take(bisect.bisect_left(buffer, (lengths[oldest], -oldest)))
    row = [first]
    while fits := bisect.bisect_right(buffer, (capacity - used, 0)):
      length, i = take(fits - 1)
      used += length
      row.append(i)
    rows.append(row)
  return rows


def answer_weights(
  lengths_by_group: Sequence[np.ndarray],  # [G] int each
  *,
  averaging: str,
  max_new_tokens: int,
  keep: Sequence[np.ndarray] | None = None,  # [G] float each
  count: int | None = None,
) -> list[np.ndarray]:  # [G] float64 each
  """The weight of every token of each answer, for Q groups of G_q answers.

  | averaging  | weight of a token                  | each ... counts the same      |
  |------------|------------------------------------|-------------------------------|
  | `sequence` | 1 / (Q G_q length)                 | prompt, and answer within it  |
  | `token`    | 1 / all tokens of all groups       | token                         |
  | `group`    | 1 / (Q tokens of the group)        | prompt, and token within it   |
  | `constant` | 1 / (Q G_q max_new_tokens)         | prompt, however long          |

  `keep` multiplies: 0 leaves an answer out (overlong filtering: truncated ones),
  another number re-weights it (an importance weight). The denominators always
  count the full groups, whatever `keep` says: an answer left out gives its share
  to no other. `count` is Q where prompts have been left out too: with these they were
  so many. A `token` mean counts tokens that such prompts do not have, and is refused.
  """
  if averaging not in AVERAGES:
    known = ', '.join(AVERAGES)
    raise ValueError(f'averaging: {averaging!r}, expected one of {known}')
  if max_new_tokens < 1:
    raise ValueError(f'max_new_tokens: {max_new_tokens}, expected at least 1')
  lengths = [np.asarray(n, np.int64) for n in lengths_by_group]
  for q, n in enumerate(lengths):
    if n.ndim != 1 or n.size == 0 or n.min() < 0:
      raise ValueError(f'group {q}: expected lengths [G] >= 0, got {n.tolist()}')
  groups = len(lengths) if count is None else count
  if groups < len(lengths) or (averaging == 'token' and groups > len(lengths)):
    raise ValueError(
      f'count: {groups} prompts for {len(lengths)} groups and averaging {averaging!r}, '
      f'expected {"as many" if averaging == "token" else "at least as many"}'
    )
  tokens = sum(int(n.sum()) for n in lengths)
  weights = []
  for n in lengths:
    if averaging == 'sequence':
      each = groups * n.size * n
    elif averaging == 'token':
      each = np.full(n.shape, tokens)
    elif averaging == 'group':
      each = np.full(n.shape, groups * n.sum())
    else:
      each = np.full(n.shape, groups * n.size * max_new_tokens)
    # An answer without tokens has none to weigh.
    weights.append(np.where(n > 0, 1 / np.maximum(each, 1), 0.0))
  if keep is None:
    return weights
  _check_groups('keep', keep, [n.size for n in lengths], least=0.0)
  return [w * k for w, k in zip(weights, keep, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Answer:
  completion: Completion
  advantage: float
  weight: float

  @property
  def length(self) -> int:
    return len(self.completion.tokens)


@dataclasses.dataclass(frozen=True)
class _Unit:
  """A prompt with one answer, or with several that share it, on its way into a row."""

  prompt: np.ndarray  # [prompt] int32
  answers: list[_Answer]

  @property
  def length(self) -> int:
    return len(self.prompt) + sum(answer.length for answer in self.answers)


def fill(
  groups: Sequence[Group],
  advantages: Sequence[np.ndarray],  # [G] each
  weights: Sequence[np.ndarray],  # [G] each, from `answer_weights`
  *,
  version: int,
  rows: int,
  row_tokens: int,
  window: int,
  share_prompt: bool = False,
) -> list[Batch]:
  """Packs whole prompts, each followed by one answer, into microbatches.

  Answers of weight 0 and answers without tokens are left out. All microbatches
  have the shape [rows, row_tokens]; empty rows fill the last. Nothing to train on
  gives no microbatch.

  Args:
    version: of the weights that will be trained; answers of it are `fresh`.
    window: of `pack`.
    share_prompt: a prompt is followed by all its answers, and the microbatches are
      SharedBatches. Where these do not fit into one row, the prompt is stored again:
      it is followed by as many answers, in order, as fit, then again by the next.
  """
  if rows < 1:
    raise ValueError(f'rows: {rows}, expected at least 1')
  sizes = [group.size for group in groups]
  _check_groups('advantages', advantages, sizes)
  _check_groups('weights', weights, sizes, least=0.0)
  units = []
  for group, group_advantage, group_weight in zip(
    groups, advantages, weights, strict=True
  ):
    prompt = group.request.prompt.tokens
    answers = [
      _Answer(completion, advantage, weight)
      for completion, advantage, weight in zip(
        group.completions, group_advantage, group_weight, strict=True
      )
      if weight > 0
    ]
    for answer in answers:
      _check_answer(answer, prompt, row_tokens)
    answers = [answer for answer in answers if answer.length]
    if share_prompt:
      units += _shared(prompt, answers, row_tokens)
    else:
      units += [_Unit(prompt, [answer]) for answer in answers]
  packed = pack([u.length for u in units], capacity=row_tokens, window=window)
  return [
    _batch(
      [[units[i] for i in row] for row in packed[start : start + rows]],
      version=version,
      shape=(rows, row_tokens),
      share_prompt=share_prompt,
    )
    for start in range(0, len(packed), rows)
  ]


def density(batches: Sequence[Batch]) -> float:
  """The share of all places that hold a token; 0 if there are none."""
  places = sum(batch.segments.size for batch in batches)
  used = sum(np.count_nonzero(batch.segments) for batch in batches)
  return used / places if places else 0.0


def _shared(
  prompt: np.ndarray, answers: Sequence[_Answer], row_tokens: int
) -> list[_Unit]:
  """The prompt with all answers, or as often as it takes to give each a place."""
  units, room = [], 0
  for answer in answers:
    if answer.length > room or not units:
      units.append(_Unit(prompt, []))
      room = row_tokens - len(prompt)
    units[-1].answers.append(answer)
    room -= answer.length
  return units


def _batch(
  rows: list[list[_Unit]],
  *,
  version: int,
  shape: tuple[int, int],
  share_prompt: bool,
) -> Batch:
  fields = dict(
    tokens=np.zeros(shape, np.int32),
    segments=np.zeros(shape, np.int32),
    positions=np.zeros(shape, np.int32),
    logps=np.zeros(shape, np.float32),
    advantages=np.zeros(shape, np.float32),
    weights=np.zeros(shape, np.float32),
    fresh=np.zeros(shape, bool),
  )
  if share_prompt:
    batch = SharedBatch(**fields, answers=np.zeros(shape, np.int32))
  else:
    batch = Batch(**fields)
  counting = np.arange(shape[1])
  for b, row in enumerate(rows):
    start = number = 0  # of the next token, and of the last answer
    for segment, unit in enumerate(row, 1):
      length = len(unit.prompt)
      batch.segments[b, start : start + unit.length] = segment
      batch.tokens[b, start : start + length] = unit.prompt
      batch.positions[b, start : start + length] = counting[:length]
      start += length
      for answer in unit.answers:
        number += 1
        at = b, slice(start, start + answer.length)
        batch.tokens[at] = answer.completion.tokens
        batch.positions[at] = counting[length : length + answer.length]
        batch.logps[at] = answer.completion.logps
        batch.advantages[at] = answer.advantage
        batch.weights[at] = answer.weight
        batch.fresh[at] = answer.completion.versions == version
        if share_prompt:
          batch.answers[at] = number
        start += answer.length
  return batch


def _check_answer(answer: _Answer, prompt: np.ndarray, row_tokens: int) -> None:
  """Refuses what would be trained on wrongly, naming the answer."""
  completion = answer.completion
  who = f'draw {completion.draw}, answer {completion.answer}'
  if completion.logps is None or len(completion.logps) != len(completion.tokens):
    have = 0 if completion.logps is None else len(completion.logps)
    raise ValueError(
      f'{who}: {have} log-probs for {len(completion.tokens)} tokens, expected as many'
    )
  if not np.isfinite(completion.logps).all():
    raise ValueError(f"{who}: the sampler's log-probs are not all finite")
  if len(prompt) == 0:  # the first answer token would be scored on a neighbour
    raise ValueError(f'{who}: its prompt has no tokens, expected at least 1')
  if len(prompt) + answer.length > row_tokens:
    raise ValueError(
      f'{who}: prompt and answer have {len(prompt) + answer.length} tokens, '
      f'expected at most row_tokens, {row_tokens}'
    )


def _check_groups(
  name: str,
  values: Sequence[np.ndarray],
  sizes: Sequence[int],
  *,
  least: float = -np.inf,
) -> None:
  """Refuses values that are not one finite number >= `least` an answer."""
  if len(values) != len(sizes):
    raise ValueError(f'{name}: {len(values)} groups, expected {len(sizes)}')
  for q, (value, size) in enumerate(zip(values, sizes, strict=True)):
    value = np.asarray(value)
    if value.shape != (size,):
      raise ValueError(f'{name}: group {q} has shape {value.shape}, expected ({size},)')
    if not (np.isfinite(value) & (value >= least)).all():
      raise ValueError(
        f'{name}: group {q} has {value.tolist()}, expected finite numbers'
        + (f' of at least {least:g}' if np.isfinite(least) else '')
      )
