"""The records that pass between stages. Frozen; numpy fields, shapes beside them."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NewType

import numpy as np

SAME = 1e-6  # verdicts this close are equal

Unbounded = NewType('Unbounded', float)  # a setting that may be math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """One task, tokenised once: these ids are sampled from and trained on."""

  id: str  # unique in the run: '<dataset>/<id within it>'
  dataset: str
  index: int  # in its dataset
  tokens: np.ndarray  # [prompt] int32, at least one
  text: str  # the rendered prompt, for people and logs
  answer: Any = None  # what the verifier compares with
  solution: str | None = None  # a reference answer's text, for warm starts
  reward: str = ''  # the verifier: a name in host/rewards.py, or 'module:function'
  max_reward: float | None = 1.0  # None: the verifier declares no maximum
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How the answers of one request are drawn.

  `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. Stop ids and the
  token that completes a stop string are part of the answer.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_new_tokens: int = 0
  max_new_tokens: int
  stop_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relief:
  """What is done about answers that are much longer than others.

  `spare` answers are sampled beyond G, and G are kept: the first ones in answer order
  that were not aborted, or with `first_finished` the shortest. `pause_after` tokens an
  answer waits for the next bundle and goes on there; 0: never.
  """

  spare: int = 0
  first_finished: bool = False
  pause_after: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One prompt with the number of answers it is to get."""

  draw: int  # counts requests in plan order; the noise hangs on it
  prompt: Prompt
  size: int  # G
  sampling: Sampling
  round: int = 0  # of its bundle
  dataset_pass: int = 0  # the pass over its dataset in which it was drawn
  weight: float = 1.0  # 1 / (chance that pruning asks it): corrects its whole group
  predicted_length: float | None = None  # tokens of an answer, on average
  predicted_longest: float | None = None  # what its longest answer likely stays under
  exceedance: float | None = None  # predicted chance that an answer straggles
  relief: Relief = Relief()
  begun: tuple['Completion', ...] = ()  # answers of earlier bundles, to go on with

  @property
  def missing(self) -> Sequence[int]:
    """The answers that are to be sampled, spare ones too.

    Of a request that goes on, those that are paused: what is not among `begun` was
    found not to be needed.
    """
    if self.begun:
      return sorted(c.answer for c in self.begun if c.finish == 'paused')
    return range(self.size + self.relief.spare)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """One answer as it was sampled."""

  draw: int
  answer: int  # k, in [0, G), or beyond where there are spare ones
  tokens: np.ndarray  # [length] int32, the stop token included; 0 only if aborted
  logps: np.ndarray  # [length] float32, under the distribution sampled from
  # 'stop', 'length', 'aborted' (for a reason outside the policy) or 'paused' (until the
  # next bundle)
  finish: str
  version: int  # of the weights it was sampled with, of its last tokens if of several
  # (tokens, version) of what was sampled before, with earlier weights, in order
  earlier: tuple[tuple[int, int], ...] = ()

  @property
  def versions(self) -> np.ndarray:  # [length] int32, of the weights of each token
    found = np.full(len(self.tokens), self.version, np.int32)
    at = 0
    for count, version in self.earlier:
      found[at : at + count] = version
      at += count
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """A prompt's answers, graded."""

  request: Request
  completions: tuple[Completion, ...]  # G of them, in answer order
  verdicts: np.ndarray  # [G] float32, the verifier's word, before shaping
  rewards: np.ndarray  # [G] float32, after shaping: what advantages are made of
  faults: tuple[
    str | None, ...
  ] = ()  # [G] why a verdict is 0: 'timeout', 'raised', ...
  spares: tuple[int, ...] = ()  # tokens of answers that were sampled and not kept

  @property
  def size(self) -> int:
    return len(self.completions)

  @functools.cached_property
  def lengths(self) -> np.ndarray:  # [G] int64, tokens
    return np.array([len(c.tokens) for c in self.completions])

  @functools.cached_property
  def truncated(self) -> np.ndarray:  # [G] bool
    return np.array([c.finish == 'length' for c in self.completions])

  @property
  def finishes(self) -> list[str]:
    return [c.finish for c in self.completions]

  @property
  def versions(self) -> list[int]:  # of the weights that each answer ended with
    return [c.version for c in self.completions]

  @property
  def earlier(self) -> list[tuple[tuple[int, int], ...]]:  # see `Completion.earlier`
    return [c.earlier for c in self.completions]

  @property
  def is_paused(self) -> bool:  # some answer goes on in a later bundle
    return any(c.finish == 'paused' for c in self.completions)

  @functools.cached_property
  def passed(self) -> np.ndarray:  # [G] bool, the verdict is the verifier's maximum
    best = self.request.prompt.max_reward
    return self.verdicts >= (1.0 if best is None else best) - SAME


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
  """One sampling engine's part of a round: its answers, in the order of their start."""

  requests: np.ndarray  # [n] int32, places in the round's requests
  answers: np.ndarray  # [n] int32, k
  # [m] int32, where static minibatches begin: one starts when all of that before have
  # ended. None: a slot that gets free takes the next answer.
  cuts: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lesson:
  """What a step learns from: groups, and how much of each."""

  groups: list[Group]
  advantages: list[np.ndarray]  # [G] float32 each, of the full group
  keep: list[np.ndarray]  # [G] float64 each: 0 for what was pruned, else its weight
  count: int  # Q: these groups, and candidates that pruning never asked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """Answers packed into rows. Entry t of a row speaks of the token at t.

  `logps[b, t]` is the sampler's log p(tokens[b, t] | what stands before it in its
  segment); the first token of a segment is a prompt token and has weight 0.
  """

  tokens: np.ndarray  # [B, T] int32, 0 on padding
  segments: np.ndarray  # [B, T] int32, 0 on padding, then 1, 2, ... within a row
  positions: np.ndarray  # [B, T] int32, restart at 0 in each segment
  logps: np.ndarray  # [B, T] float32, 0 off the answers
  advantages: np.ndarray  # [B, T] float32, constant along an answer
  weights: np.ndarray  # [B, T] float32, 0 on prompts and padding
  fresh: np.ndarray  # [B, T] bool, sampled with the weights that are now trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedBatch(Batch):
  """A batch whose segments are a prompt, stored once, and one or more answers to it.

  An answer sees the prompt and itself. Its positions continue from the prompt's end,
  which is where its first token is predicted, whatever stands between them.
  """

  answers: np.ndarray  # [B, T] int32, 0 on prompts and padding, then 1, 2, ... in a row
