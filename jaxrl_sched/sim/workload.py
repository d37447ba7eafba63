"""What the simulated policy answers: lengths and verdicts, as a real one's might be.

A prompt has a typical length, a spread of its own and a pass rate. What is trained on
gets better, and answers get longer. The answer k of draw d hangs on (seed, d, k) and on
the policy's state alone, so a request gets the same answers in any company.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from jaxrl_sched.types import Lesson, Prompt, Request

FINISHES = ('stop', 'length', 'aborted', 'paused')
STOP, LENGTH, ABORTED, PAUSED = range(4)

MOST = 10_000_000  # prompts of a dataset: some numbers of each are kept
_LONGEST = 2**30  # tokens of a prompt
_TRAITS = 1  # purposes of random numbers
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
  """Those of a round's requests, one request after another, spares included."""

  starts: np.ndarray  # [requests + 1] int64, where those of each begin; the total last
  lengths: np.ndarray  # [answers] int64, tokens in all
  finish: np.ndarray  # [answers] int8, places in FINISHES
  verdicts: np.ndarray  # [answers] float32
  rewards: np.ndarray | None = None  # [answers] float32, where shaping is recorded too
  # Place of the request -> why its verdicts are 0, where one could not be had.
  faults: Mapping[int, tuple[str | None, ...]] = dataclasses.field(default_factory=dict)
  # Place of the request -> its several rewards, by name: [its answers] float32.
  components: Mapping[int, Mapping[str, np.ndarray]] = dataclasses.field(
    default_factory=dict
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
  """How a dataset's prompts are answered. Spreads are of natural logarithms.

  `pass_rate` is that of the middle prompt at the start; over the prompts its log-odds
  are normal with `pass_spread`. A visit in training adds `gain` to a prompt's log-odds,
  and `transfer` times that, shared among all prompts, to each of the dataset; over the
  prompts, what a visit adds to their own spreads by `gain_spread`. A stubborn prompt
  never settles: its pass rate, anything from 0 to 1, stays. An answer that is cut at the
  limit is wrong.
  """

  count: int = 1000
  weight: float = 1.0
  median: float = 500.0  # tokens of the middle prompt's middle answer
  spread: float = 0.5  # over prompts, of their medians
  within: float = 0.5  # over answers of the middle prompt
  within_spread: float = 0.0  # over prompts, of `within`: some are prone to straggle
  growth: float = 0.0  # of ln length, an update
  pass_rate: float = 0.5
  pass_spread: float = 1.5
  gain: float = 0.0
  gain_spread: float = 0.0  # over prompts, of their gains
  transfer: float = 0.5
  stubborn: float = 0.0  # share of prompts that training does not change
  hard_is_long: float = 0.0  # correlation of difficulty and length over prompts
  aborts: float = 0.0  # chance that an answer is lost for a reason outside the policy
  prompt_tokens: float = 100.0  # of the middle prompt
  prompt_spread: float = 0.0
  max_reward: float = 1.0

  def check(self, name: str) -> None:
    """Raises ValueError, naming the key, for numbers that describe no dataset."""
    least = {'count': 1, 'median': 1, 'prompt_tokens': 1}
    free = {'growth', 'gain', 'hard_is_long'}  # may be negative
    for field in dataclasses.fields(self):
      value, key = getattr(self, field.name), f'workload.{name}.{field.name}'
      number = isinstance(value, int | float) and not isinstance(value, bool)
      if not number or not math.isfinite(value):
        raise ValueError(f'{key}: {value!r}, expected a number')
      low = -math.inf if field.name in free else least.get(field.name, 0)
      if value < low:
        raise ValueError(f'{key}: {value!r}, expected at least {low}')
    if type(self.count) is not int:
      raise ValueError(
        f'workload.{name}.count: {self.count!r}, expected a whole number'
      )
    if self.count > MOST:
      raise ValueError(
        f'workload.{name}.count: {self.count!r}, expected at most {MOST}'
      )
    if not 0 < self.pass_rate < 1:
      raise ValueError(
        f'workload.{name}.pass_rate: {self.pass_rate!r}, expected above 0 and below 1'
      )
    if not -1 <= self.hard_is_long <= 1:
      raise ValueError(
        f'workload.{name}.hard_is_long: {self.hard_is_long!r}, expected -1 to 1'
      )
    if self.stubborn > 1:
      raise ValueError(f'workload.{name}.stubborn: {self.stubborn!r}, expected 0 to 1')
    if self.aborts >= 1:
      raise ValueError(f'workload.{name}.aborts: {self.aborts!r}, expected below 1')
    if self.weight == 0 or self.max_reward == 0:
      raise ValueError(
        f'workload.{name}: weight={self.weight!r}, max_reward={self.max_reward!r}, '
        'expected above 0'
      )


class Prompts:
  """The prompts of a workload: what the controllers ask of a set of prompts."""

  def __init__(self, datasets: Mapping[str, Dataset], seed: int):
    self.sizes = {name: d.count for name, d in datasets.items()}
    self.weights = {name: float(d.weight) for name, d in datasets.items()}
    self.dropped = dict.fromkeys(datasets, 0)
    self.rewards: set[str] = set()
    self._datasets = dict(datasets)
    self._made: dict[tuple[str, int], Prompt] = {}
    self._lengths = {}
    for number, (name, d) in enumerate(datasets.items()):
      z = np.random.default_rng((seed, _TRAITS, number, 1)).standard_normal(d.count)
      ln = math.log(d.prompt_tokens) + d.prompt_spread * z
      lengths = np.rint(np.exp(np.clip(ln, 0, math.log(_LONGEST))))
      self._lengths[name] = lengths.astype(np.int32)
    self._zero = np.zeros((), np.int32)

  def get(self, dataset: str, index: int) -> Prompt:
    found = self._made.get((dataset, index))
    if found is None:
      found = self._made[dataset, index] = Prompt(
        id=f'{dataset}/{index}',
        dataset=dataset,
        index=index,
        tokens=np.broadcast_to(self._zero, self._lengths[dataset][index]),
        text='',
        max_reward=self._datasets[dataset].max_reward,
      )
    return found

  def ids(self) -> dict[str, Iterator[str]]:
    return {name: self._ids(name) for name in self.sizes}

  def _ids(self, name: str) -> Iterator[str]:
    for index in range(self.sizes[name]):
      yield f'{name}/{index}'


class Workload:
  """Synthetic answers; see `Dataset`.

  Attributes:
    version: updates that the policy has had.
  """

  def __init__(self, datasets: Mapping[str, Dataset], *, seed: int = 0):
    if not datasets:
      raise ValueError('workload: no dataset, expected at least one')
    for name, dataset in datasets.items():
      dataset.check(name)
    self.version = 0
    self.prompts = Prompts(datasets, seed)
    self._seed = seed
    self._number = {name: i for i, name in enumerate(datasets)}
    counts = np.array([d.count for d in datasets.values()])
    self._offsets = (np.cumsum(counts) - counts).tolist()
    # Per prompt, all datasets one after another: mean and spread of ln length, log-odds
    # of a pass, with their gains by visits, and how fast these are next to the middle's.
    traits = [
      _traits(d, np.random.default_rng((seed, _TRAITS, i)))
      for i, d in enumerate(datasets.values())
    ]
    self._mean, self._within, self._odds, self._pace = map(
      np.concatenate, zip(*traits, strict=True)
    )
    # Per dataset.
    self._growth = np.array([d.growth for d in datasets.values()])
    self._gain = np.array([d.gain for d in datasets.values()])
    self._shared = self._gain * [d.transfer / d.count for d in datasets.values()]
    self._aborts = np.array([d.aborts for d in datasets.values()])
    self._best = np.array([d.max_reward for d in datasets.values()], np.float32)
    self._visits = np.zeros(len(datasets))
    self._updates = 0  # that were not skipped

  def pass_rates(self, dataset: str) -> np.ndarray:  # [count] float64, as of now
    """The chance that an answer is right, were none ever cut."""
    number = self._number[dataset]
    begin = self._offsets[number]
    return self._rates(number, slice(begin, begin + self.prompts.sizes[dataset]))

  def _rates(self, number: Any, place: Any) -> np.ndarray:
    """Chances of a right answer of the prompts at these places, of these datasets."""
    shared = self._shared[number] * self._visits[number]
    return _sigmoid(self._odds[place] + self._pace[place] * shared)

  def answers_of(self, requests: Sequence[Request], version: int) -> Answers:
    """The answers of a round; each request has `size` and its spare ones."""
    if version != self.version:
      raise ValueError(
        f'workload: answers of version {version}, but the policy is at {self.version}'
      )
    sizes = np.array([r.size + r.relief.spare for r in requests], np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    number = np.array([self._number[r.prompt.dataset] for r in requests], np.int64)
    index = np.array([r.prompt.index for r in requests], np.int64)
    place = np.array(self._offsets)[number] + index
    draws = np.array([r.draw for r in requests], np.uint64)
    limits = np.array([r.sampling.max_new_tokens for r in requests], np.float64)
    k = np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)
    noise = uniforms(self._seed, np.repeat(draws, sizes), k.astype(np.uint64), 4)
    a, b, c, d = noise
    z = np.sqrt(-2 * np.log(a)) * np.cos(2 * np.pi * b)
    mean = self._mean[place] + self._growth[number] * self._updates
    ln = np.repeat(mean, sizes) + np.repeat(self._within[place], sizes) * z
    wanted = np.ceil(np.exp(np.minimum(ln, 40.0)))
    limits = np.repeat(limits, sizes)
    lengths = np.clip(wanted, 1, limits)
    finish = np.where(wanted > limits, LENGTH, STOP).astype(np.int8)
    if self._aborts.any():
      aborts = np.repeat(self._aborts[number], sizes)
      lost = d < aborts
      finish[lost] = ABORTED
      lengths[lost] = np.ceil(lengths[lost] * d[lost] / aborts[lost])  # at any token
    right = (c < np.repeat(self._rates(number, place), sizes)) & (finish == STOP)
    return Answers(
      starts=starts,
      lengths=lengths.astype(np.int64),
      finish=finish,
      verdicts=right * np.repeat(self._best[number], sizes),
    )

  def answers(
    self, request: Request, version: int
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths, verdicts, and what was cut at the limit, [G] each."""
    found = self.answers_of([request], version)
    return found.lengths, found.verdicts, found.finish == LENGTH

  def trained(self, lesson: Lesson) -> None:
    """An update: what was trained on gets better, and a little of it all the rest."""
    self.version += 1
    learned = [
      group.request.prompt
      for group, advantages, keep in zip(
        lesson.groups, lesson.advantages, lesson.keep, strict=True
      )
      if np.any(advantages * keep)
    ]
    if not learned:
      return
    self._updates += 1
    number = np.array([self._number[prompt.dataset] for prompt in learned])
    index = np.array([prompt.index for prompt in learned])
    place = np.array(self._offsets)[number] + index
    np.add.at(self._odds, place, self._gain[number] * self._pace[place])
    self._visits += np.bincount(number, minlength=len(self._visits))


def uniforms(
  seed: int, draws: np.ndarray, answers: np.ndarray, count: int
) -> np.ndarray:
  """[count, n] float64 in (0, 1), each a function of its (seed, draw, answer) alone.

  Args:
    draws, answers: [n] uint64.
  """
  with np.errstate(over='ignore'):  # uint64 wraps around, as it should
    key = _mixed(np.full(1, seed, np.uint64) * _GOLDEN)
    base = _mixed(_mixed(key + draws * _GOLDEN) + answers * _GOLDEN)
    rows = [_mixed(base + np.uint64(i + 1) * _GOLDEN) for i in range(count)]
  return ((np.stack(rows) >> np.uint64(11)) + 0.5) * 2.0**-53


def _mixed(x: np.ndarray) -> np.ndarray:
  """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def _traits(
  d: Dataset, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """[count] each: mean of ln length, spread of it within a group, log-odds of a pass, and
  what a visit adds to them, next to `gain`."""
  ease, own, spread = rng.standard_normal((3, d.count))
  rho = d.hard_is_long
  mean = math.log(d.median) + d.spread * (math.sqrt(1 - rho**2) * own - rho * ease)
  odds = math.log(d.pass_rate / (1 - d.pass_rate)) + d.pass_spread * ease
  pace = np.exp(d.gain_spread * rng.standard_normal(d.count))
  stubborn, rate = rng.random((2, d.count))
  odds = np.where(stubborn < d.stubborn, np.log(rate / (1 - rate)), odds)
  pace[stubborn < d.stubborn] = 0.0
  return mean, d.within * np.exp(d.within_spread * spread), odds, pace


def _sigmoid(x: np.ndarray) -> np.ndarray:
  return 1 / (1 + np.exp(-np.clip(x, -40, 40)))
