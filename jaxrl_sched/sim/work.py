"""What each engine has to do for its share of a round."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from jaxrl_sched.sim import slots as slots_lib
from jaxrl_sched.sim.counts import generation
from jaxrl_sched.sim.relief import Relieved
from jaxrl_sched.sim.workload import Answers
from jaxrl_sched.types import Request, Share


@dataclasses.dataclass(frozen=True)
class Work:
  """Of one engine."""

  steps: int  # of decoding
  tokens: int
  counts: np.ndarray  # [len(GENERATE)]


def whole(
  requests: Sequence[Request],
  answers: Answers,
  shares: Sequence[Share],
  slots: int,
  chunk: int,
) -> list[Work]:
  """Where all answers are sampled from their first to their last token."""
  prompts = _prompts(requests)
  works = []
  for share in shares:
    made = answers.lengths[answers.starts[share.requests] + share.answers]
    if share.cuts is None:
      decoded = slots_lib.refill(made, slots, chunk)
    else:
      decoded = slots_lib.static(made, share.cuts, slots, chunk)
    known, read = prompts[share.requests], prompts[np.unique(share.requests)]
    works.append(_work(decoded, made, known, read))
  return works


def relieved(
  requests: Sequence[Request],
  answers: Answers,
  shares: Sequence[Share],
  found: Relieved,
) -> list[Work]:
  """Where answers go on, pause, or are cut."""
  prompts = _prompts(requests)
  works = []
  for share, decoded in zip(shares, found.decoded, strict=True):
    places = answers.starts[share.requests] + share.answers
    is_sampled = found.made[places] > 0
    places, mine = places[is_sampled], share.requests[is_sampled]
    before = found.before[places]
    known = prompts[mine] + before
    # What goes on is read anew, each answer for itself.
    fresh = np.unique(mine[before == 0])
    read = np.concatenate([prompts[fresh], known[before > 0]])
    works.append(_work(decoded, found.made[places], known, read))
  return works


def _prompts(requests: Sequence[Request]) -> np.ndarray:  # [n] tokens
  return np.array([len(request.prompt.tokens) for request in requests], np.int64)


def _work(
  decoded: slots_lib.Decoded, made: np.ndarray, known: np.ndarray, read: np.ndarray
) -> Work:
  counts = generation(decoded, made, known, read)
  return Work(decoded.steps, int(made.sum()), counts)
