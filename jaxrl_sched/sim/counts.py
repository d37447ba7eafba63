"""What a step does, counted: what its time is made of, in a simulation and in a fit."""

from collections.abc import Iterable
import dataclasses
import math

import numpy as np

from jaxrl_sched.host.packing import pack
from jaxrl_sched.sim.slots import Decoded

# Names of the costs of each part of a step, in the order of its counts.
GENERATE = ('decode_step', 'decode_row', 'decode_cached', 'chunk')
GENERATE += ('prefill_prompt', 'prefill_token')
REWARD = ('reward_round', 'reward_answer')
HOST = ('overhead_answer', 'overhead')
LEARN = ('learn_batch', 'learn_token', 'learn_step')


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
  """What a step of a run did, and how long that took."""

  step: int
  generate: np.ndarray  # [len(GENERATE)] of the slowest engine
  reward: np.ndarray  # [len(REWARD)]
  host: np.ndarray  # [len(HOST)]
  learn: np.ndarray  # [len(LEARN)]
  generate_s: float
  reward_s: float
  learn_s: float
  load_s: float | None  # None: it is part of learning, or nothing was loaded
  overhead_s: float


def generation(
  decoded: Decoded,
  made: np.ndarray,  # [n] tokens of each answer
  known: np.ndarray,  # [n] tokens in its cache before them
  read: np.ndarray,  # [prompts] tokens of each row that is prefilled
) -> np.ndarray:  # [len(GENERATE)]
  """What an engine's share takes: steps, rows, lookbacks, launches, prompts, tokens."""
  # Token m of an answer looks back at what was known and at the m before it.
  cached = float(made @ (known + (made - 1) / 2))
  counts = (decoded.steps, made.sum(), cached, decoded.chunks, len(read), read.sum())
  return np.array(counts, np.float64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
  """How a learner packs what it is given; without a size of rows it does not."""

  rows: int | None = None  # of a microbatch
  row_tokens: int | None = None
  window: int = 16
  share_prompt: bool = False  # a group's prompt is trained on once


def learning(
  groups: Iterable[tuple[int, list[int]]], how: Rows
) -> tuple[np.ndarray, int]:
  """What an update from these groups takes, and the rows that it fills.

  Args:
    groups: tokens of the prompt, and of each answer that is trained on.

  Returns:
    [len(LEARN)] microbatches, tokens, one update; and rows. Without packing there are
    neither microbatches nor rows.
  """
  units = []
  for prompt, answers in groups:
    if how.share_prompt:
      units += _shared(prompt, answers, how.row_tokens or math.inf)
    else:
      units += [prompt + answer for answer in answers]
  filled = batches = 0
  if how.rows is not None and how.row_tokens is not None:
    filled = len(pack(units, capacity=how.row_tokens, window=how.window))
    batches = math.ceil(filled / how.rows)
  return np.array([batches, sum(units), 1], np.float64), filled


def _shared(prompt: int, answers: list[int], row_tokens: float) -> list[int]:
  """Tokens of a prompt and the answers that share it, as many as fit in a row."""
  units: list[int] = []
  for answer in answers:
    if not units or units[-1] + answer > row_tokens:
      units.append(prompt)
    units[-1] += answer
  return units
