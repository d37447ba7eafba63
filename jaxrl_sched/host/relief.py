"""Which answers of a request are kept: a function of their lengths alone.

Slots, engines and the order in which answers end change when an answer is found not
to be needed, never whether it is kept.
"""

import math

from jaxrl_sched.types import Completion, Request


class Race:
  """The answers of one request on their way to being kept or not.

  Each has a rank: its answer number, or with `first_finished` its length and then its
  number; aborted ones come after all others. The G of lowest rank are kept. What is
  still going on has at least the rank that it would have if it ended now.
  """

  def __init__(self, size: int, *, first_finished: bool):
    self.size, self.first_finished = size, first_finished
    self.open: dict[int, int] = {}  # answer -> tokens so far: waiting, running, paused
    self.ended: dict[int, tuple[float, int]] = {}  # answer -> rank
    self._last: tuple[float, int] | None = None  # G-th of them

  def end(self, answer: int, length: int, *, aborted: bool = False) -> None:
    del self.open[answer]
    self.ended[answer] = (math.inf, answer) if aborted else self._rank(answer, length)
    if len(self.ended) >= self.size:
      self._last = sorted(self.ended.values())[self.size - 1]

  def cutoff(self, answer: int) -> float:
    """Tokens with which an answer that goes on is not needed; inf: it is."""
    if self._last is None or self._last[0] == math.inf:
      return math.inf
    length, last = self._last
    if self.first_finished:
      return length - 1 if answer > last else length
    return 0 if answer > last else math.inf

  def drop(self) -> list[int]:
    """Takes out what is not needed of those that go on."""
    gone = [a for a in sorted(self.open) if self.open[a] >= self.cutoff(a)]
    for answer in gone:
      del self.open[answer]
    return gone

  def drop_ended(self) -> list[int]:
    """Takes out what is not needed of those that have ended. For when nothing runs.

    Not before: which of them ended, and which were dropped, is a matter of timing.
    """
    gone = [a for _, a in sorted(self.ended.values())[self.size :]]
    for answer in gone:
      del self.ended[answer]
    return gone

  def is_kept(self, answer: int) -> bool:
    """Whether it has ended and will be kept, however the others end."""
    if answer not in self.ended:
      return False
    if len(self.ended) + len(self.open) <= self.size:
      return True  # as all are
    mine = self.ended[answer]
    before = sum(rank < mine for rank in self.ended.values())
    return before + sum(self._least(a) < mine for a in self.open) < self.size

  def _rank(self, answer: int, length: int) -> tuple[float, int]:
    return (length if self.first_finished else 0, answer)

  def _least(self, answer: int) -> tuple[float, int]:
    return self._rank(answer, self.open[answer] + 1)


def check(request: Request) -> None:
  """Refuses settings and earlier parts that cannot be gone on with.

  Raises:
    ValueError: the message names the prompt.
  """
  name, relief = f'prompt {request.prompt.id!r}', request.relief
  if relief.spare < 0 or relief.pause_after < 0:
    raise ValueError(
      f'{name}: spare={relief.spare}, pause_after={relief.pause_after}; expected 0 or '
      'more'
    )
  most, known = request.size + relief.spare, set()
  for c in request.begun:
    if c.draw != request.draw or not 0 <= c.answer < most or c.answer in known:
      raise ValueError(
        f'{name}: begun with answer {c.answer} of draw {c.draw}, expected answers 0 to '
        f'{most - 1} of draw {request.draw}, each once'
      )
    known.add(c.answer)
    limit = request.sampling.max_new_tokens
    if c.finish == 'paused' and not 1 <= len(c.tokens) < limit:
      raise ValueError(
        f'{name}: answer {c.answer} paused after {len(c.tokens)} tokens, expected 1 to '
        f'less than max_new_tokens={limit}'
      )
  if request.begun and (len(known) < request.size or not request.missing):
    raise ValueError(
      f'{name}: begun with {len(known)} answers, {len(request.missing)} of them '
      f'paused; expected size={request.size} or more, and at least 1'
    )


def versions_before(begun: Completion, version: int) -> tuple[tuple[int, int], ...]:
  """`earlier` of an answer that went on from `begun` with weights `version`."""
  rest = len(begun.tokens) - sum(count for count, _ in begun.earlier)
  runs = list(begun.earlier)
  if begun.version != version:
    runs.append((rest, begun.version))
  return tuple(runs)
