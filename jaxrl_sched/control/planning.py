"""A round of requests: who comes next, who is passed over, and how many answers each.

Nothing here has a state of its own, or changes any.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

import numpy as np

from jaxrl_sched.control.filling import Turns
from jaxrl_sched.control.lengths import LengthPredictor
from jaxrl_sched.control.sagc import SAGC
from jaxrl_sched.control.source import Source
from jaxrl_sched.host.pruning import PromptPruner
from jaxrl_sched.types import Prompt, Request, Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """A round of requests, and who was passed over for them."""

  step: int
  requests: list[Request]  # in draw order
  # Stream -> (place, pass) of every prompt visited, and its draw number; None: pruned.
  visits: dict[str, list[tuple[int, int]]]
  draws: dict[str, list[int | None]]


@dataclasses.dataclass(frozen=True)
class _Candidate:
  """A prompt whose turn it is."""

  stream: str
  place: int
  number: int  # the pass
  weight: float  # 0: pruned, and not asked


class Planner:
  """Makes rounds of the controllers' decisions.

  In every method `step` is the step, `part` the round in it, and `draw` the number of
  the first request. They give None where there is nothing to ask.

  Args:
    is_mixed: requests of the streams are mixed evenly, else stream follows stream:
      where streams share one pot, the first in draw order get its places.
  """

  def __init__(
    self,
    source: Source,
    prompt_of: Callable[[str, int], Prompt],
    sampling: Sampling,
    *,
    sagc: SAGC | None,
    lengths: LengthPredictor | None,
    pruner: PromptPruner | None,
    is_mixed: bool,
  ):
    self._source, self._prompt_of, self._sampling = source, prompt_of, sampling
    self._sagc, self._lengths, self._pruner = sagc, lengths, pruner
    self._is_mixed = is_mixed

  def alike(
    self, wanted: Mapping[str, int], size: int, *, step: int, part: int, draw: int
  ) -> Plan | None:
    """So many of each stream, all groups of one size."""
    queue = self._next(wanted, step, part)
    asked = [c for c in queue if c.weight > 0]
    prompts = [self._prompt(c) for c in asked]
    requests = self._requests(asked, prompts, [size] * len(asked), None, draw)
    return _plan(step, queue, requests)

  def by_prompt(
    self, wanted: Mapping[str, int], rest: int, *, step: int, part: int, draw: int
  ) -> Plan | None:
    """So many of each stream, a size for each; none larger than the `rest` missing."""
    queue = self._next(wanted, step, part)
    asked = [c for c in queue if c.weight > 0]
    if not asked:
      return None
    prompts = [self._prompt(c) for c in asked]
    chances = self._chances(prompts)
    sizes = self._sagc.propose_sizes(step, chances)
    # A larger group than what is missing could not be taken in: it would be surplus,
    # and the batch might stay short of a few rollouts for ever.
    largest = max(g for g in self._sagc.allowed(step) if g <= rest)
    sizes = [min(size, largest) for size in sizes]
    return _plan(step, queue, self._requests(asked, prompts, sizes, chances, draw))

  def by_turns(
    self, filling: Turns, rollouts: int, *, step: int, part: int, draw: int
  ) -> Plan | None:
    """Streams take turns, a size for each, until the rollouts are used up."""
    queue = self._turns(filling, rollouts, step, part)
    sized = [i for i, c in enumerate(queue) if self._has_a_place(c)]
    prompts = [self._prompt(queue[i]) for i in sized]
    chances = self._chances(prompts)
    sizes = self._sagc.propose_sizes(step, chances, rollouts)
    queue = queue[: sized[len(sizes) - 1] + 1]
    kept = [k for k in range(len(sizes)) if queue[sized[k]].weight > 0]
    requests = self._requests(
      [queue[sized[k]] for k in kept],
      [prompts[k] for k in kept],
      [sizes[k] for k in kept],
      chances[kept],
      draw,
    )
    return _plan(step, queue, requests)

  # --- who ---

  def _next(self, wanted: Mapping[str, int], step: int, part: int) -> list[_Candidate]:
    queues = [self._ahead(stream, n, step, part) for stream, n in wanted.items()]
    queue = [candidate for queue in queues for candidate in queue]
    if self._is_mixed:
      places = [(i + 0.5) / len(queue) for queue in queues for i in range(len(queue))]
      queue = [queue[i] for i in np.argsort(places, kind='stable')]
    return queue

  def _ahead(self, stream: str, n: int, step: int, part: int) -> list[_Candidate]:
    """The next prompts of a stream: n, or with pruning by `fill` n that are kept."""
    if n == 0:
      return []
    if self._pruner is None:
      picks, weights = self._source.peek(stream, n), [1.0] * n
    elif self._pruner.fills:

      def peek(m: int) -> list[int]:
        return [place for place, _ in self._source.peek(stream, m)]

      places, _, weights = self._pruner.fill(stream, peek, n, step, part=part)
      picks, weights = self._source.peek(stream, len(places)), weights.tolist()
    else:
      picks = self._source.peek(stream, n)
      places = [place for place, _ in picks]
      weights = self._pruner.select(stream, places, step, part=part)[1].tolist()
    return [
      _Candidate(stream, place, number, weight)
      for (place, number), weight in zip(picks, weights, strict=True)
    ]

  def _turns(
    self, filling: Turns, rollouts: int, step: int, part: int
  ) -> list[_Candidate]:
    """As many as might be needed, in the order of turns."""
    order = filling.turns(rollouts // min(self._sagc.allowed(step)))
    queues = {
      stream: iter(self._ahead(stream, order.count(stream), step, part))
      for stream in dict.fromkeys(order)
    }
    queue = []
    for stream in order:
      for candidate in queues[stream]:
        queue.append(candidate)
        if self._has_a_place(candidate):
          break
    return queue

  def _has_a_place(self, candidate: _Candidate) -> bool:
    """Whether it counts in the batch: under `fill` another comes for one pruned."""
    return candidate.weight > 0 or not self._pruner.fills

  def _prompt(self, candidate: _Candidate) -> Prompt:
    index = self._source.index(candidate.stream, candidate.place)
    return self._prompt_of(self._source.dataset(candidate.stream), index)

  # --- how many answers, how long ---

  def _chances(self, prompts: Sequence[Prompt]) -> np.ndarray:  # [n]
    """Predicted chance that an answer straggles."""
    return self._lengths.exceedance(
      _keys(prompts), self._sagc.tau, prompt_lengths=_prompt_lengths(prompts)
    )

  def _requests(
    self,
    asked: Sequence[_Candidate],
    prompts: Sequence[Prompt],
    sizes: Sequence[int],
    chances: np.ndarray | None,
    draw: int,
  ) -> list[Request]:
    predicted = [None] * len(asked)
    if self._lengths is not None and asked:
      means, _ = self._lengths.predict(
        _keys(prompts), size=np.array(sizes), prompt_lengths=_prompt_lengths(prompts)
      )
      predicted = means.tolist()
    chances = [None] * len(asked) if chances is None else chances.tolist()
    return [
      Request(
        draw=draw + i,
        prompt=prompts[i],
        size=sizes[i],
        sampling=self._sampling,
        dataset_pass=candidate.number,
        weight=candidate.weight,
        predicted_length=predicted[i],
        exceedance=chances[i],
      )
      for i, candidate in enumerate(asked)
    ]


def _keys(prompts: Sequence[Prompt]) -> list[tuple[str, int]]:
  return [(prompt.dataset, prompt.index) for prompt in prompts]


def _prompt_lengths(prompts: Sequence[Prompt]) -> np.ndarray:
  return np.array([len(prompt.tokens) for prompt in prompts], np.int64)


def _plan(
  step: int, queue: Sequence[_Candidate], requests: list[Request]
) -> Plan | None:
  """`requests` are of those in the queue that are not pruned, in its order."""
  if not queue:
    return None
  plan, draws = Plan(step=step, requests=requests, visits={}, draws={}), iter(requests)
  for candidate in queue:
    visit = candidate.place, candidate.number
    plan.visits.setdefault(candidate.stream, []).append(visit)
    drawn = next(draws).draw if candidate.weight > 0 else None
    plan.draws.setdefault(candidate.stream, []).append(drawn)
  return plan
