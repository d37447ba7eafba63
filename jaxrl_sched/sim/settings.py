"""The config's `simulate` block: what stands in for chips, weights and prompts."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulate:
  """Read by `python -m jaxrl_sched.simulate` alone.

  Args:
    workload: name -> keyword arguments of `workload.Dataset`. The config's prompts,
      model and tokenizer are then not opened. None: the config's own prompts, with
      answers as `Dataset` has them by default, a quarter of the limit long.
    costs: keyword arguments of `costs.Costs`, in seconds. None: to be fitted to a run,
      by --costs.
  """

  workload: dict | None = None
  costs: dict | None = None
