"""What every controller can do. State is JSON and numpy arrays: a checkpoint and a
test can carry it."""

from typing import Any, Protocol


class Controller(Protocol):
  def metrics(self) -> dict[str, float]:
    """Numbers for the log, under the controller's own prefix."""

  def state_dict(self) -> dict[str, Any]:
    """All that a resume needs, JSON-able but for arrays, and no more."""

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Raises ValueError for a state that is not this controller's."""


def check_state(name: str, state: dict[str, Any], own: dict[str, Any]) -> None:
  """Refuses a state whose keys are not those of `own`."""
  if state.keys() != own.keys():
    raise ValueError(f'state of {name}: keys {sorted(state)}, expected {sorted(own)}')
