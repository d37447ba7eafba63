"""A round of requests: who comes next, who is passed over, and how many answers each.

Nothing here has a state of its own, or changes any.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

import numpy as np

from jaxrl_sched.control.asp import (
  Asp,
  order_bundles,
  predicted_generation,
  shares,
  windows,
)
from jaxrl_sched.control.filling import Turns
from jaxrl_sched.control.lengths import LengthPredictor
from jaxrl_sched.control.sagc import SAGC
from jaxrl_sched.control.source import Source
from jaxrl_sched.host.pruning import PromptPruner
from jaxrl_sched.types import Group, Prompt, Request, Sampling, Share


@dataclasses.dataclass(frozen=True)
class Pick:
  """A prompt whose turn it is."""

  stream: str
  place: int
  number: int  # the pass
  weight: float  # 0: pruned, and not asked
  draw: int | None = None  # once it is drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """A round of requests, and who was passed over for them."""

  step: int  # the bundle, which is the step that trains on it
  version: int  # of the weights to sample with: how many steps' results are known
  requests: list[Request]  # in draw order
  shares: tuple[Share, ...]  # one a sampling engine: every answer once
  # Stream -> (place, pass) of every prompt visited, and its draw number; None: pruned.
  visits: dict[str, list[tuple[int, int]]]
  draws: dict[str, list[int | None]]
  visited: int  # prompts for this bundle, drawn now or earlier
  pruned: int  # of them
  # Drawn together with this bundle: those of the next ones.
  ahead: tuple[tuple[Pick, ...], ...] = ()
  engines: tuple[int, ...] = ()  # of each request, where all its answers have one


@dataclasses.dataclass(frozen=True, kw_only=True)
class When:
  """Of which bundle a round is, from which snapshot, and its first draw number."""

  step: int
  version: int
  part: int  # the round
  draw: int


class Planner:
  """Makes rounds of the controllers' decisions.

  They give None where there is nothing to ask.

  Args:
    is_mixed: requests of the streams are mixed evenly, else stream follows stream:
      where streams share one pot, the first in draw order get its places.
    asp: how requests are spread, and what is done about stragglers.
    slots: answers that an engine decodes at once.
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
    asp: Asp,
    slots: int,
    seed: int,
  ):
    self._source, self._prompt_of, self._sampling = source, prompt_of, sampling
    self._sagc, self._lengths, self._pruner = sagc, lengths, pruner
    self._is_mixed = is_mixed
    self._asp, self._slots, self._seed = asp, slots, seed

  def alike(
    self,
    wanted: Mapping[str, int],
    size: int,
    when: When,
    *,
    paused: Sequence[Group] = (),
  ) -> Plan | None:
    """So many of each stream, all groups of one size; and `paused` ones go on."""
    queue = self._next(wanted, when)
    asked = [pick for pick in queue if pick.weight > 0]
    prompts = [self._prompt(pick) for pick in asked]
    requests = [self._again(group) for group in paused]
    requests += self._requests(
      asked, prompts, [size] * len(asked), None, when.draw, when.part
    )
    if not queue and not requests:
      return None
    return self._plan(when, queue, requests)

  def by_prompt(
    self, wanted: Mapping[str, int], rest: int, sizes: Sequence[int], when: When
  ) -> Plan | None:
    """So many of each stream, a size for each; none larger than the `rest` missing."""
    queue = self._next(wanted, when)
    asked = [pick for pick in queue if pick.weight > 0]
    if not asked:
      return None
    prompts = [self._prompt(pick) for pick in asked]
    chances = self._chances(prompts)
    # A larger group than what is missing could not be taken in: it would be surplus,
    # and the batch might stay short of a few rollouts for ever.
    largest = max(g for g in sizes if g <= rest)
    proposed = self._sagc.propose_sizes(when.step, chances)
    proposed = [min(size, largest) for size in proposed]
    requests = self._requests(asked, prompts, proposed, chances, when.draw, when.part)
    return self._plan(when, queue, requests)

  def by_turns(
    self, filling: Turns, rollouts: int, sizes: Sequence[int], when: When
  ) -> Plan | None:
    """Streams take turns, a size for each, until the rollouts are used up."""
    queue = self._turns(filling, rollouts // min(sizes), when)
    sized = [i for i, pick in enumerate(queue) if self._has_a_place(pick)]
    prompts = [self._prompt(queue[i]) for i in sized]
    chances = self._chances(prompts)
    proposed = self._sagc.propose_sizes(when.step, chances, rollouts)
    queue = queue[: sized[len(proposed) - 1] + 1]
    kept = [k for k in range(len(proposed)) if queue[sized[k]].weight > 0]
    requests = self._requests(
      [queue[sized[k]] for k in kept],
      [prompts[k] for k in kept],
      [proposed[k] for k in kept],
      chances[kept],
      when.draw,
    )
    return self._plan(when, queue, requests)

  def feed(
    self,
    streams: Sequence[str],
    size: int,
    when: When,
    assign: Callable[[Sequence[int], Sequence[float]], list[int]],
  ) -> Plan:
    """One group of each of these streams, in this order, perhaps none.

    Args:
      size: of a group; of a prompt of average risk, if each has its own.
      assign: sizes and predicted lengths of groups -> the engine of each.
    """
    queues = {
      stream: iter(self._ahead(stream, streams.count(stream), when))
      for stream in dict.fromkeys(streams)
    }
    queue = []
    for stream in streams:
      for pick in queues[stream]:
        queue.append(pick)
        if self._has_a_place(pick):
          break
    asked = [pick for pick in queue if pick.weight > 0]
    prompts, sizes, chances = [self._prompt(pick) for pick in asked], None, None
    if self._sagc is not None and self._sagc.prompt_aware and asked:
      chances = self._chances(prompts)
      sizes = self._sagc.propose_sizes(when.step, chances)
    sizes = [size] * len(asked) if sizes is None else list(sizes)
    requests = self._requests(asked, prompts, sizes, chances, when.draw, when.part)
    predicted = [request.predicted_length or 1.0 for request in requests]
    engines = assign(sizes, predicted)
    # A group's answers one after the other, those of the longest first.
    order = sorted(range(len(requests)), key=lambda i: (-predicted[i], i))
    spread = []
    for engine in range(self._asp.engines):
      mine = [i for i in order if engines[i] == engine]
      spread.append(
        Share(
          requests=np.repeat(mine, [sizes[i] for i in mine]).astype(np.int32),
          answers=np.concatenate(
            [np.arange(sizes[i]) for i in mine] or [np.zeros(0)]
          ).astype(np.int32),
        )
      )
    plan = self._plan(when, queue, requests, spread=tuple(spread))
    return dataclasses.replace(plan, engines=tuple(engines))

  # --- several bundles at once (3.6) ---

  def window(
    self, wanted: Sequence[Mapping[str, int]], size: int, kept: float, when: When
  ) -> Plan | None:
    """Several bundles, the prompts of each alike in predicted length.

    Args:
      wanted: of each bundle, so many of each stream.
      kept: expected share of what is sampled that is trained on.

    Returns:
      The plan of the first bundle; what is drawn for the others is in `ahead`.
    """
    queues, draw = {}, when.draw
    for stream in wanted[0]:
      queues[stream] = []
      n = sum(of_bundle[stream] for of_bundle in wanted)
      for pick in self._ahead(stream, n, when):
        if pick.weight > 0:
          pick, draw = dataclasses.replace(pick, draw=draw), draw + 1
        queues[stream].append(pick)
    if not any(queues.values()):
      return None
    # Which bundle is the how-maniest in length is settled as if they had come by length;
    # then each gets what it wants.
    blocks = self._by_length(queues, wanted, size)
    durations = [self._durations(block, size, kept) for block in blocks]
    order = self._order(durations, when)
    by_length = [wanted[order.index(rank)] for rank in range(len(wanted))]
    blocks = self._by_length(queues, by_length, size)
    ahead = [tuple(blocks[i]) for i in order]
    visits = {
      stream: [(p.place, p.number) for p in queue]
      for stream, queue in queues.items()
      if queue
    }
    draws = {stream: [p.draw for p in queues[stream]] for stream in visits}
    # Those pruned under `fill` have no place, and count with the first bundle.
    first = self.drawn(ahead[0], size, when)
    visited = sum(map(len, queues.values()))
    more = visited - sum(map(len, blocks))
    visited, pruned = first.visited + more, first.pruned + more
    return dataclasses.replace(
      first,
      visits=visits,
      draws=draws,
      visited=visited,
      pruned=pruned,
      ahead=tuple(ahead[1:]),
    )

  def _by_length(
    self,
    queues: Mapping[str, Sequence[Pick]],
    wanted: Sequence[Mapping[str, int]],
    size: int,
  ) -> list[list[Pick]]:
    """Blocks that want so many of each stream, the first one of the shortest answers."""
    blocks: list[list[Pick]] = [[] for _ in wanted]
    for stream, queue in queues.items():
      placed = [pick for pick in queue if self._has_a_place(pick)]
      highs = self._predict([self._prompt(p) for p in placed], [size] * len(placed))[1]
      sizes = [of_block[stream] for of_block in wanted]
      for block, mine in zip(blocks, windows(highs, sizes), strict=True):
        block += [placed[i] for i in mine.tolist()]
    return blocks

  def drawn(self, picks: Sequence[Pick], size: int, when: When) -> Plan:
    """The plan of a bundle whose prompts were drawn before, with newest predictions."""
    asked = [pick for pick in picks if pick.draw is not None]
    prompts = [self._prompt(pick) for pick in asked]
    requests = self._requests(asked, prompts, [size] * len(asked), None, None)
    plan = self._plan(when, (), requests)
    gone = len(picks) - len(asked)
    return dataclasses.replace(plan, visited=len(picks), pruned=gone)

  def _durations(
    self, picks: Sequence[Pick], size: int, kept: float
  ) -> tuple[np.ndarray, float]:
    """Predicted decode steps of each engine [E], and those that learning takes."""
    asked = [pick for pick in picks if pick.weight > 0]
    sizes = [size] * len(asked)
    means, highs = self._predict([self._prompt(pick) for pick in asked], sizes)
    sampled = [size + self._asp.spare] * len(asked)
    steps = [
      predicted_generation(share, means, highs, self._slots)
      for share in self._shares(sampled, means, highs)
    ]
    cost = self._asp.train_cost or 0.0
    return np.array(steps), cost * kept * size * float(np.sum(means))

  def _order(
    self, durations: Sequence[tuple[np.ndarray, float]], when: When
  ) -> Sequence[int]:
    return order_bundles(
      self._asp.order,
      np.stack([generate for generate, _ in durations]),
      np.array([train for _, train in durations]),
      lag=self._asp.lag,
      seed=self._seed,
      first=when.step,
    )

  # --- who ---

  def _next(self, wanted: Mapping[str, int], when: When) -> list[Pick]:
    queues = [self._ahead(stream, n, when) for stream, n in wanted.items()]
    queue = [pick for queue in queues for pick in queue]
    if self._is_mixed:
      places = [(i + 0.5) / len(queue) for queue in queues for i in range(len(queue))]
      queue = [queue[i] for i in np.argsort(places, kind='stable')]
    return queue

  def _ahead(self, stream: str, n: int, when: When) -> list[Pick]:
    """The next prompts of a stream: n, or with pruning by `fill` n that are kept."""
    if n == 0:
      return []
    if self._pruner is None:
      picks, weights = self._source.peek(stream, n), [1.0] * n
    elif self._pruner.fills:

      def peek(m: int) -> list[int]:
        return [place for place, _ in self._source.peek(stream, m)]

      places, _, weights = self._pruner.fill(stream, peek, n, when.step, part=when.part)
      picks, weights = self._source.peek(stream, len(places)), weights.tolist()
    else:
      picks = self._source.peek(stream, n)
      places = [place for place, _ in picks]
      weights = self._pruner.select(stream, places, when.step, part=when.part)[1]
      weights = weights.tolist()
    return [
      Pick(stream, place, number, weight)
      for (place, number), weight in zip(picks, weights, strict=True)
    ]

  def _turns(self, filling: Turns, most: int, when: When) -> list[Pick]:
    """As many as might be needed, in the order of turns."""
    order = filling.turns(most)
    queues = {
      stream: iter(self._ahead(stream, order.count(stream), when))
      for stream in dict.fromkeys(order)
    }
    queue = []
    for stream in order:
      for pick in queues[stream]:
        queue.append(pick)
        if self._has_a_place(pick):
          break
    return queue

  def _has_a_place(self, pick: Pick) -> bool:
    """Whether it counts in the batch: under `fill` another comes for one pruned."""
    return pick.weight > 0 or not self._pruner.fills

  def _prompt(self, pick: Pick) -> Prompt:
    index = self._source.index(pick.stream, pick.place)
    return self._prompt_of(self._source.dataset(pick.stream), index)

  # --- how many answers, how long, on which engine ---

  def _chances(self, prompts: Sequence[Prompt]) -> np.ndarray:  # [n]
    """Predicted chance that an answer straggles."""
    return self._lengths.exceedance(
      _keys(prompts), self._sagc.tau, prompt_lengths=_prompt_lengths(prompts)
    )

  def _predict(
    self, prompts: Sequence[Prompt], sizes: Sequence[int]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Mean length of an answer and likely bound of the longest, [n] each."""
    if self._lengths is None or not prompts:  # all alike
      return np.ones(len(prompts)), np.ones(len(prompts))
    return self._lengths.predict(
      _keys(prompts), size=np.array(sizes), prompt_lengths=_prompt_lengths(prompts)
    )

  def _requests(
    self,
    asked: Sequence[Pick],
    prompts: Sequence[Prompt],
    sizes: Sequence[int],
    chances: np.ndarray | None,
    draw: int | None,
    part: int = 0,
  ) -> list[Request]:
    """Requests for these picks. `draw` is that of the first; None: they have theirs."""
    means = highs = [None] * len(asked)
    if self._lengths is not None:
      means, highs = (x.tolist() for x in self._predict(prompts, sizes))
    chances = [None] * len(asked) if chances is None else chances.tolist()
    return [
      Request(
        draw=pick.draw if draw is None else draw + i,
        prompt=prompts[i],
        size=sizes[i],
        sampling=self._sampling,
        round=part,
        dataset_pass=pick.number,
        weight=pick.weight,
        predicted_length=means[i],
        predicted_longest=highs[i],
        exceedance=chances[i],
        relief=self._asp.relief,
      )
      for i, pick in enumerate(asked)
    ]

  def _again(self, group: Group) -> Request:
    """Asks for what is missing of a group's answers."""
    return dataclasses.replace(
      group.request, round=0, relief=self._asp.relief, begun=group.completions
    )

  def _plan(
    self,
    when: When,
    queue: Sequence[Pick],
    requests: list[Request],
    spread: tuple[Share, ...] | None = None,
  ) -> Plan:
    """`requests` end with those of the picks in the queue that are not pruned."""
    visits: dict[str, list[tuple[int, int]]] = {}
    draws: dict[str, list[int | None]] = {}
    asked = sum(pick.weight > 0 for pick in queue)
    new = iter(requests[len(requests) - asked :])
    for pick in queue:
      visits.setdefault(pick.stream, []).append((pick.place, pick.number))
      drawn = next(new).draw if pick.weight > 0 else None
      draws.setdefault(pick.stream, []).append(drawn)
    return Plan(
      step=when.step,
      version=when.version,
      requests=requests,
      shares=self._spread(requests) if spread is None else spread,
      visits=visits,
      draws=draws,
      visited=len(queue),
      pruned=len(queue) - asked,
    )

  def _spread(self, requests: Sequence[Request]) -> tuple[Share, ...]:
    """Which engine answers what, in which order (3.4)."""
    missing = [request.missing for request in requests]
    sizes = [len(answers) for answers in missing]
    means = [request.predicted_length or 1.0 for request in requests]
    highs = [request.predicted_longest or 1.0 for request in requests]
    found = self._shares(sizes, np.array(means), np.array(highs))
    if not any(request.begun for request in requests):
      return found
    return tuple(
      dataclasses.replace(
        share,
        answers=np.array(
          [
            missing[i][k]
            for i, k in zip(
              share.requests.tolist(), share.answers.tolist(), strict=True
            )
          ],
          np.int32,
        ),
      )
      for share in found
    )

  def _shares(
    self, sizes: Sequence[int], means: np.ndarray, highs: np.ndarray
  ) -> tuple[Share, ...]:
    minibatch = None if self._asp.refill else self._slots
    how = (np.array(sizes, np.int64), means, highs, self._asp.engines)
    return shares(*how, minibatch=minibatch)


def _keys(prompts: Sequence[Prompt]) -> list[tuple[str, int]]:
  return [(prompt.dataset, prompt.index) for prompt in prompts]


def _prompt_lengths(prompts: Sequence[Prompt]) -> np.ndarray:
  return np.array([len(prompt.tokens) for prompt in prompts], np.int64)
