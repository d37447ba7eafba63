"""Where prompts come from: streams, which are datasets or difficulty tiers of them."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_sched.control.base import check_state
from jaxrl_sched.control.difficulty import Tiers
from jaxrl_sched.control.quotas import RollingQuotas
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.control.snooze_rules import columns
from jaxrl_sched.types import Group, Prompt


class Source:
  """Snoozing over the streams of difficulty tiers, or over whole datasets.

  A prompt is a place in a stream here and an index in a dataset elsewhere.

  Args:
    snooze: over the streams: `tiers.streams()`, or the datasets.
    tiers: None: a dataset is a stream.
  """

  def __init__(self, snooze: Snooze, tiers: Tiers | None = None):
    self._snooze, self._tiers = snooze, tiers
    # Stream -> its dataset, and the index of each place there (None: the place).
    self._of: dict[str, tuple[str, np.ndarray | None]] = (
      {name: (name, None) for name in snooze.sizes}
      if tiers is None
      else tiers.streams()
    )
    # Of datasets, which tiers split further.
    self._quotas = None if tiers is None else RollingQuotas(tiers.datasets)
    if snooze.sizes.keys() != self._of.keys():
      raise ValueError(f'streams {sorted(snooze.sizes)}, expected {sorted(self._of)}')

  @property
  def sizes(self) -> dict[str, int]:
    """Stream -> number of prompts."""
    return self._snooze.sizes

  @property
  def tiers(self) -> Tiers | None:
    return self._tiers

  def dataset(self, stream: str) -> str:
    return self._of[stream][0]

  def index(self, stream: str, place: int) -> int:
    indices = self._of[stream][1]
    return place if indices is None else int(indices[place])

  def locate(self, prompts: Sequence[Prompt]) -> list[tuple[str, int]]:
    """Stream and place of each."""
    if self._tiers is None:
      return [(prompt.dataset, prompt.index) for prompt in prompts]
    found: list[tuple[str, int] | None] = [None] * len(prompts)
    for name in dict.fromkeys(prompt.dataset for prompt in prompts):
      mine = [i for i, prompt in enumerate(prompts) if prompt.dataset == name]
      places = self._tiers.places(name, [prompts[i].index for i in mine])
      for i, place in zip(mine, places, strict=True):
        found[i] = place
    return found

  def shares(self, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Of each dataset among these prompts of a batch, and of each tier in its dataset."""
    counts = collections.Counter(prompt.dataset for prompt in prompts)
    streams = collections.Counter(stream for stream, _ in self.locate(prompts))
    found = {}
    for stream in self.sizes if prompts else ():
      name = self.dataset(stream)
      found[f'share/{name}'] = counts[name] / len(prompts)
      if stream != name and counts[name]:
        found[f'tiers/share/{stream}'] = streams[stream] / counts[name]
    return found

  # --- plan state ---

  def weights(self, step: int) -> dict[str, float]:
    """Stream -> its share of a batch, up to a common factor; 0 for one that waits."""
    return self._snooze.weights if self._tiers is None else self._tiers.weights(step)

  def quotas(self, step: int, n: int, *, after: int = 0) -> dict[str, int]:
    """Stream -> how many of a step's n groups are to come from it.

    Args:
      after: groups of steps before, whose quotas were not taken yet; without tiers.
    """
    if self._tiers is None:
      return self._snooze.quotas(n, after=after)
    return self._tiers.quotas(step, self._quotas.next(n, self._tiers.datasets))

  def begin(self, step: int, n: int) -> None:
    """The step goes on with `quotas(step, n)`; n = 0: without any."""
    if self._tiers is None:
      self._snooze.take_quotas(n)
      return
    of = self._quotas.next(n, self._tiers.datasets)
    self._tiers.sent(step, of)
    self._quotas.take(of, self._tiers.datasets)

  def peek(self, stream: str, n: int) -> list[tuple[int, int]]:
    """(place, pass) of the next n, with nothing changed."""
    return self._snooze.peek(stream, n)

  def take(
    self,
    stream: str,
    picks: Sequence[tuple[int, int]],
    draws: Sequence[int | None],
  ) -> np.ndarray:
    """Draws what `peek` gave; see `Snooze.take`.

    Returns:
      [n] int64, places that may be drawn from now on: those asked, and those whose
      sleep ends with the pass that has begun, if one has.
    """
    before = self._snooze.number(stream)
    self._snooze.take(stream, picks, draws)
    awake = [p for (p, _), draw in zip(picks, draws, strict=True) if draw is not None]
    awake = np.array(awake, np.int64)
    if self._snooze.number(stream) == before:
      return awake
    return np.concatenate([awake, self._snooze.due(stream)])

  # --- result state ---

  def observe(
    self, stream: str, places: Sequence[int], groups: Sequence[Group]
  ) -> None:
    """Takes in results, in draw order."""
    requests = [group.request for group in groups]
    self._snooze.observe_many(
      stream,
      places,
      **columns(groups),
      draws=[request.draw for request in requests],
      drawn_passes=[request.dataset_pass for request in requests],
    )

  def asleep(self, stream: str, places: Sequence[int]) -> np.ndarray:  # [n] bool
    return self._snooze.asleep(stream, places)

  def in_vain(self, stream: str) -> int:
    """Prompts asked since a group last had spread."""
    return self._snooze.in_vain(stream)

  def exhausted(self, step: int) -> list[str]:
    """The streams drawn from, if no whole pass over any of them brings a group with
    spread, and none is to come later; else none."""
    live = [stream for stream, weight in self.weights(step).items() if weight > 0]
    waits = self._tiers is not None and self._tiers.is_release_due(step)
    return live if not waits and all(map(self._snooze.is_exhausted, live)) else []

  # --- what it tells, and its state ---

  def metrics(self) -> dict[str, float]:
    tiers = {} if self._tiers is None else self._tiers.metrics()
    return self._snooze.metrics() | tiers

  def freeze(self) -> Callable[[], dict[str, Any]]:
    """See `Snooze.freeze`."""
    tiers = None if self._tiers is None else self._tiers.state_dict()
    quotas = None if self._quotas is None else self._quotas.state_dict()
    snooze = self._snooze.freeze()
    return lambda: {'snooze': snooze(), 'tiers': tiers, 'quotas': quotas}

  def check(self, state: dict[str, Any]) -> None:
    """Refuses tiers of other datasets, or tiers where there are none."""
    check_state('source', state, dict.fromkeys(('snooze', 'tiers', 'quotas')))
    if (state['tiers'] is None) != (self._tiers is None):
      raise ValueError(
        'difficulty tiers were '
        f'{"off" if state["tiers"] is None else "on"} when this run began'
      )
    if self._tiers is not None:
      self._tiers.check(state['tiers'])

  def load_state_dict(self, state: dict[str, Any]) -> None:
    self.check(state)
    self._snooze.load_state_dict(state['snooze'])
    if self._tiers is not None:
      self._tiers.load_state_dict(state['tiers'])
      self._quotas.load_state_dict(state['quotas'])
