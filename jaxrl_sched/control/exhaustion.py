"""How much is spent on what is solved or hopeless, and when nothing else is left."""

from collections.abc import Mapping, Sequence

from jaxrl_sched.control.source import Source

MOST_QUOTAS = 10  # groups of a stream that a step asks for, in quotas


class Exhaustion:
  """Bounds what a stream is asked for, and finds the end of what there is to learn.

  Args:
    groups: of a batch.

  Attributes:
    in_vain: groups of the last steps, in none of which one had spread: state.
  """

  def __init__(self, source: Source, groups: int):
    self._source, self._groups = source, groups
    self.in_vain = 0
    self._noted: set[str] = set()
    self._notes: list[str] = []

  def allowance(self, quotas: Mapping[str, int]) -> dict[str, int]:
    """Stream -> requests that there may be for a batch, in all its rounds.

    Ten quotas; but where as many prompts, or all, were asked in vain, one: what is
    solved, or hopeless, is looked at again without much being spent on it.
    """
    return {
      stream: n if self._is_barren(stream, n) else MOST_QUOTAS * n
      for stream, n in quotas.items()
    }

  def _is_barren(self, stream: str, quota: int) -> bool:
    """Whether ten quotas of prompts, or all, were asked since a group had spread."""
    enough = min(MOST_QUOTAS * quota, self._source.sizes[stream])
    return quota > 0 and self._source.in_vain(stream) >= enough

  def observe(self, useful: Sequence[bool], quotas: Mapping[str, int]) -> None:
    """Takes in all groups of a step, and who was asked for how many."""
    self.in_vain = 0 if any(useful) else self.in_vain + len(useful)
    self._noted = {stream for stream in self._noted if self._source.in_vain(stream)}
    for stream, quota in quotas.items():
      if stream not in self._noted and self._is_barren(stream, quota):
        self._noted.add(stream)
        self._notes.append(
          f'{stream}: {self._source.in_vain(stream):,} prompts were asked since a group '
          'had spread in its rewards; until one has, its share of a batch is asked for '
          f'once a step, not up to {MOST_QUOTAS} times'
        )

  def notes(self) -> list[str]:
    """What whoever watches the run should know, each once."""
    notes, self._notes = self._notes, []
    return notes

  def reason(self, step: int) -> str | None:
    """Why this step and all later ones have nothing to learn from; None: they may.

    A whole pass over all that is drawn from, and ten batches of groups at least, have
    brought none with spread.
    """
    enough = self.in_vain >= MOST_QUOTAS * self._groups
    found = self._source.exhausted(step) if enough else []
    if not found:
      return None
    return (
      f'nothing is left to learn from: a whole pass over {", ".join(found)} brought no '
      'group with spread in its rewards, every prompt is always solved or never'
    )

  def metrics(self) -> dict[str, float]:
    return {
      f'rollout/in_vain/{stream}': self._source.in_vain(stream)
      for stream in self._source.sizes
    }
