"""Dense prompt packing: answers into rows, and the weight of every token.

Averaging is data: the loss is a plain sum over tokens of weight x term, and the
weights are written here, where the whole batch is in sight. So neither rows,
microbatches nor hosts can change a gradient.
"""

import bisect
from collections.abc import Sequence
import dataclasses

import numpy as np

from jaxrl_sched.types import Batch, Completion, Group

# What the papers average over; see `answer_weights`.
AVERAGING = {
  'grpo': 'sequence',  # arXiv 2402.03300
  'dapo': 'token',  # arXiv 2503.14476
  'dr_grpo': 'constant',  # arXiv 2503.20783
  'gspo': 'sequence',  # arXiv 2507.18071
  'cispo': 'token',  # arXiv 2506.13585
}


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
) -> list[np.ndarray]:  # [G] float64 each
  """The weight of every token of each answer, for Q groups of G_q answers.

  | averaging  | weight of a token                  | each ... counts the same      |
  |------------|------------------------------------|-------------------------------|
  | `sequence` | 1 / (Q G_q length)                 | prompt, and answer within it  |
  | `token`    | 1 / all tokens of all groups       | token                         |
  | `constant` | 1 / (Q G_q max_new_tokens)         | prompt, and token within it   |

  `keep` multiplies: 0 leaves an answer out (overlong filtering: truncated ones),
  another number re-weights it (an importance weight). The denominators always
  count the full groups, whatever `keep` says: an answer left out gives its share
  to no other.
  """
  if averaging not in set(AVERAGING.values()):
    known = ', '.join(sorted(set(AVERAGING.values())))
    raise ValueError(f'averaging: {averaging!r}, expected one of {known}')
  if max_new_tokens < 1:
    raise ValueError(f'max_new_tokens: {max_new_tokens}, expected at least 1')
  lengths = [np.asarray(n, np.int64) for n in lengths_by_group]
  for q, n in enumerate(lengths):
    if n.ndim != 1 or n.size == 0 or n.min() < 0:
      raise ValueError(f'group {q}: expected lengths [G] >= 0, got {n.tolist()}')
  groups = len(lengths)
  tokens = sum(int(n.sum()) for n in lengths)
  weights = []
  for n in lengths:
    if averaging == 'sequence':
      each = groups * n.size * n
    elif averaging == 'token':
      each = np.full(n.shape, tokens)
    else:
      each = np.full(n.shape, groups * n.size * max_new_tokens)
    # An answer without tokens has none to weigh.
    weights.append(np.where(n > 0, 1 / np.maximum(each, 1), 0.0))
  if keep is None:
    return weights
  _check_groups('keep', keep, [n.size for n in lengths], least=0.0)
  return [w * k for w, k in zip(weights, keep, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Unit:
  """A prompt with one of its answers, on its way into a row."""

  prompt: np.ndarray  # [prompt] int32
  completion: Completion
  advantage: float
  weight: float

  @property
  def length(self) -> int:
    return len(self.prompt) + len(self.completion.tokens)


def fill(
  groups: Sequence[Group],
  advantages: Sequence[np.ndarray],  # [G] each
  weights: Sequence[np.ndarray],  # [G] each, from `answer_weights`
  *,
  version: int,
  rows: int,
  row_tokens: int,
  window: int,
) -> list[Batch]:
  """Packs whole prompts, each followed by one answer, into microbatches.

  Answers of weight 0 and answers without tokens are left out. All microbatches
  have the shape [rows, row_tokens]; empty rows fill the last. Nothing to train on
  gives no microbatch.

  Args:
    version: of the weights that will be trained; answers of it are `fresh`.
    window: of `pack`.
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
    for completion, advantage, weight in zip(
      group.completions, group_advantage, group_weight, strict=True
    ):
      if weight > 0:
        unit = _Unit(prompt, completion, advantage, weight)
        _check_unit(unit, row_tokens)
        if len(completion.tokens):
          units.append(unit)
  packed = pack([u.length for u in units], capacity=row_tokens, window=window)
  return [
    _batch(
      [[units[i] for i in row] for row in packed[start : start + rows]],
      version=version,
      shape=(rows, row_tokens),
    )
    for start in range(0, len(packed), rows)
  ]


def density(batches: Sequence[Batch]) -> float:
  """The share of all places that hold a token; 0 if there are none."""
  places = sum(batch.segments.size for batch in batches)
  used = sum(np.count_nonzero(batch.segments) for batch in batches)
  return used / places if places else 0.0


def _batch(rows: list[list[_Unit]], *, version: int, shape: tuple[int, int]) -> Batch:
  batch = Batch(
    tokens=np.zeros(shape, np.int32),
    segments=np.zeros(shape, np.int32),
    positions=np.zeros(shape, np.int32),
    logps=np.zeros(shape, np.float32),
    advantages=np.zeros(shape, np.float32),
    weights=np.zeros(shape, np.float32),
    fresh=np.zeros(shape, bool),
  )
  counting = np.arange(shape[1])
  for b, row in enumerate(rows):
    start = 0
    for segment, unit in enumerate(row, 1):
      answer, end = start + len(unit.prompt), start + unit.length
      batch.tokens[b, start:answer] = unit.prompt
      batch.tokens[b, answer:end] = unit.completion.tokens
      batch.segments[b, start:end] = segment
      batch.positions[b, start:end] = counting[: unit.length]
      batch.logps[b, answer:end] = unit.completion.logps
      batch.advantages[b, answer:end] = unit.advantage
      batch.weights[b, answer:end] = unit.weight
      batch.fresh[b, answer:end] = unit.completion.version == version
      start = end
  return batch


def _check_unit(unit: _Unit, row_tokens: int) -> None:
  """Refuses what would be trained on wrongly, naming the answer."""
  completion = unit.completion
  who = f'draw {completion.draw}, answer {completion.answer}'
  if completion.logps is None or len(completion.logps) != len(completion.tokens):
    have = 0 if completion.logps is None else len(completion.logps)
    raise ValueError(
      f'{who}: {have} log-probs for {len(completion.tokens)} tokens, expected as many'
    )
  if not np.isfinite(completion.logps).all():
    raise ValueError(f"{who}: the sampler's log-probs are not all finite")
  if len(unit.prompt) == 0:  # the first answer token would be scored on a neighbour
    raise ValueError(f'{who}: its prompt has no tokens, expected at least 1')
  if unit.length > row_tokens:
    raise ValueError(
      f'{who}: prompt and answer have {unit.length} tokens, '
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
