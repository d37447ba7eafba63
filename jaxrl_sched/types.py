"""The records that pass between stages. Frozen; numpy fields, shapes beside them."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any, NewType

import numpy as np

# Verdicts this close are equal, as a share of the largest that there may be. They are
# float32, in which 50.1 is 50.09999847.
SAME = 1e-6
LARGEST = 1e30  # size of a reward: float32 holds its sums

Unbounded = NewType('Unbounded', float)  # a setting that may be math.inf


def tolerance(best: Any, worst: Any) -> np.ndarray:
  """How far apart verdicts may be and still be equal.

  Args:
    best, worst: what the verifier declares, numbers or arrays; best None or NaN: it
      declares no maximum.
  """
  best = np.asarray(best, np.float64)
  return SAME * np.fmax(np.abs(np.where(np.isnan(best), 1.0, best)), np.abs(worst))


def passes(verdicts: Any, best: Any, worst: Any) -> np.ndarray:
  """Whether each verdict is its verifier's maximum, or 1 where it declares none.

  The one place where that is decided. Arguments as of `tolerance`; they broadcast.
  """
  best = np.asarray(best, np.float64)
  least = np.where(np.isnan(best), 1.0, best) - tolerance(best, worst)
  return np.asarray(verdicts, np.float64) >= least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
  """A verifier, what it declares, and what it counts for among others."""

  name: str = ''  # among the rewards of a dataset; '' of a single one
  verifier: str  # a name in host/rewards.py, or 'module:function'
  weight: float = 1.0
  max_reward: float | None = 1.0  # before weighting; None: it declares no maximum
  min_reward: float = 0.0  # and what a fault scores


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
  min_reward: float = 0.0
  # Several rewards, of which the first says whether an answer is right. The two bounds
  # above are then those of their weighted sum, and `reward` is ''.
  rewards: tuple[Reward, ...] = ()
  reward_options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of 'math'
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def graded_by(self) -> tuple[Reward, ...]:
    """Its rewards, of which there is one at least."""
    alone = Reward(
      verifier=self.reward, max_reward=self.max_reward, min_reward=self.min_reward
    )
    return self.rewards or (alone,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How the answers of one request are drawn.

  `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. Stop ids and the
  token that completes a stop string are part of the answer; its text ends before them.
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
  # [G] float32, the verifier's word, or the weighted sum of several; before shaping
  verdicts: np.ndarray
  rewards: np.ndarray  # [G] float32, after shaping: what advantages are made of
  # [G] why there is no verdict, so that it is the lowest: 'timeout', 'raised', ...
  faults: tuple[str | None, ...] = ()
  # Name -> [G] float32, before weighting, where the prompt has several rewards.
  components: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
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

  @property
  def deciding(self) -> tuple[np.ndarray, float | None, float]:
    """Verdicts [G] that say whether answers are right, and the best and worst there are:
    the first reward's where there are several."""
    prompt = self.request.prompt
    if not self.components:
      return self.verdicts, prompt.max_reward, prompt.min_reward
    first = prompt.rewards[0]
    return self.components[first.name], first.max_reward, first.min_reward

  @functools.cached_property
  def passed(self) -> np.ndarray:  # [G] bool
    return passes(*self.deciding)


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
