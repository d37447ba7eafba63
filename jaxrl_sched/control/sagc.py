"""SAGC, straggler-aware group sizes (arXiv 2606.02218).

A step waits for its longest answer. A larger group says more about its prompt, and
holds more often an answer that is much longer than the rest. The size with the best
log2(G) - lambda * p(G) is taken: p(G) is the learned chance of a straggler, and
lambda rises while there are more of them than wanted.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_sched.control import sagc_checks as checks
from jaxrl_sched.control import sagc_rules as rules

# These are names of this module too.
check_rollouts = checks.check_rollouts
Budget = rules.Budget
calibrate = rules.calibrate
exceedance = rules.exceedance
fill = rules.fill
size_for = rules.size_for

_PURPOSE = 1602  # of our random numbers, apart from those of others with our seed
_VERSION = 1


class SAGC:
  """The number of answers that prompts get in a step.

  `propose` changes nothing; `sent` says what was planned, before any refill; `observe`
  comes once a step, with all groups that were sampled for it, filtered or not. Called
  without `sent`, `observe` says that too.

  With `prompt_aware` each prompt has a size of its own under the same multiplier, from
  a predicted chance pi that an answer is longer than tau medians: `propose` gives the
  size of a prompt of average risk, `propose_sizes` the sizes, and `observe_groups`
  takes the place of `observe`.

  Args:
    sizes: rising, at least 2 each.
    tau: a group straggles if its longest answer exceeds tau medians.
    delta: the share of straggling groups to keep to.
    eta: step of lambda.
    rho: forgetting a step, towards the prior.
    prior: Beta of each size's risk.
    radius: the size moves by at most so many places in `sizes`.
    lambda_max: where lambda stops; it stays there if `delta` cannot be reached.
    mode: what counts as an event, a group each ('groups', or one averaged observation
      a step: 'mean'), the step's pooled lengths ('batch'), or 'any' group of the step.
    hold: 'rollouts' or 'prompts', what stays when the size moves. The scheduler's
      concern, except that sizes of prompts need 'rollouts'.
    start: the first size, the middle one if None.
    period: the size moves only at multiples of so many steps.
    monotone: drawn risks are made to not fall with the size.
    utility: 'log2', or 'signal': the chance that verdicts differ, from `passed`.
    trust: 0 to 1, how far predictions are followed between prompts.
    prompt_prior: Beta of the q that all prompts share, under `prompt_aware`.
  """

  def __init__(
    self,
    sizes: tuple[int, ...] = (4, 8, 16),
    tau: float = 2.0,
    delta: float = 0.4,
    eta: float = 0.05,
    rho: float = 0.99,
    prior: tuple[float, float] = (1.0, 1.0),
    radius: int = 1,
    lambda_max: float = 20.0,
    mode: str = 'groups',
    hold: str = 'rollouts',
    start: int | None = None,
    seed: int = 0,
    *,
    period: int = 1,
    monotone: bool = False,
    utility: str = 'log2',
    prompt_aware: bool = False,
    trust: float = 1.0,
    prompt_prior: tuple[float, float] = (1.0, 9.0),
  ):
    self.sizes = checks.check_sizes(sizes)
    checks.check_settings({'tau': tau, 'delta': delta, 'eta': eta, 'rho': rho})
    checks.check_settings({'radius': radius, 'lambda_max': lambda_max, 'mode': mode})
    checks.check_settings({'hold': hold, 'seed': seed, 'period': period})
    checks.check_settings({'utility': utility, 'trust': trust})
    checks.check_settings({'prior': prior, 'prompt_prior': prompt_prior})
    if prompt_aware:
      checks.check_prompt_aware(self.sizes, lambda_max, mode, hold, monotone, utility)
    if start is None:
      start = self.sizes[(len(self.sizes) - 1) // 2]
    self.hold, self.prompt_aware, self.tau = hold, prompt_aware, tau
    self._delta, self._eta, self._rho = delta, eta, rho
    self._prior = tuple(prompt_prior if prompt_aware else prior)
    self._radius, self._lambda_max, self._mode = radius, lambda_max, mode
    self._seed, self._period, self._trust = seed, period, trust
    self._monotone, self._utility = monotone, utility

    self.lam = 0.0
    # One Beta a size, or a single one: of the q that all prompts share.
    count = 1 if prompt_aware else len(self.sizes)
    self._a = np.full(count, self._prior[0], np.float64)
    self._b = np.full(count, self._prior[1], np.float64)
    self._num = self._den = 0.0  # their ratio is the mean prediction
    # A prompt of unknown pass rate p, uniform in [0, 1], stands in at first.
    self._signal = np.array([1 - 2 / (g + 1) for g in self.sizes])
    self._signal_mass = 1.0
    self._step = -1  # the newest that was sent
    self._index = self._before = self._place(start, 'start')  # since and until then
    self._seen: dict[str, float] = {}  # metrics of the last groups

  @property
  def size(self) -> int:
    """The size in use."""
    return self.sizes[self._index]

  @property
  def period(self) -> int:
    """Steps between which the size stays."""
    return self._period

  @property
  def needs_passed(self) -> bool:
    """Whether `observe` is to be told which answers passed."""
    return self._utility == 'signal'

  @property
  def pools_steps(self) -> bool:
    """Whether an event is one of a step's groups together."""
    return self._mode in ('batch', 'any')

  def posterior(self, size: int) -> tuple[float, float]:
    """Beta (a, b) of the size's risk; with prompt_aware of q, the same for all."""
    i = 0 if self.prompt_aware else self._place(size)
    return float(self._a[i]), float(self._b[i])

  def allowed(self, step: int) -> list[int]:
    """The sizes near enough for this step, the same before and after it is sent."""
    i = self._before if step == self._step else self._index
    return list(self.sizes[max(0, i - self._radius) : i + self._radius + 1])

  # --- plan ---

  def propose(self, step: int) -> int:
    """The group size of a step; within a step, and off the period, it stays."""
    if step == self._step or step % self._period:
      return self.size
    risks, allowed = self._draw(step), self.allowed(step)
    if self.prompt_aware:
      return size_for(risks[0], self.lam, allowed)
    if self._monotone:
      risks = rules.isotonic(risks, self._a + self._b)
    gains = np.log2(self.sizes)
    if self._utility == 'signal':
      gains = self._signal / self._signal_mass
    scores = dict(zip(self.sizes, gains - self.lam * risks, strict=True))
    return max(allowed, key=scores.__getitem__)  # ties: the first, the smaller

  def propose_sizes(
    self, step: int, pis: Sequence[float] | np.ndarray, rollouts: int | None = None
  ) -> list[int]:
    """Sizes for prompts in queue order, from their predicted chances.

    They end where `rollouts` are used up exactly; None, for dynamic sampling: no end.
    """
    self._check_prompt_aware(True, 'propose_sizes')
    pis, q, allowed = checks.check_chances(pis), self._draw(step)[0], self.allowed(step)
    qs = np.full(pis.shape, q)
    if self._den > 0:
      qs = calibrate(q, self._num / self._den, pis, self._trust)
    if rollouts is None:
      return size_for(qs, self.lam, allowed).tolist()
    return fill(qs, self.lam, allowed, rollouts)

  def _draw(self, step: int) -> np.ndarray:
    """Thompson draws of all risks, so that they do not depend on the size in use."""
    rng = np.random.default_rng((self._seed, _PURPOSE, step))
    return rng.beta(self._a, self._b)

  def sent(self, step: int, size: int) -> None:
    """The step goes on with `size`, what `propose` gave; refills of it change nothing."""
    place = self._place(size)
    if step < self._step:
      raise ValueError(f'step {step} was sent after step {self._step}')
    if step == self._step and place != self._index:
      raise ValueError(
        f'size of step {step}: {size}, expected {self.size}, as it began'
      )
    if step > self._step:
      self._step, self._before, self._index = step, self._index, place

  # --- results ---

  def observe(
    self,
    lengths: Sequence[np.ndarray],  # one [G] array a group
    size: int,
    step: int,
    *,
    passed: Sequence[np.ndarray] | None = None,  # one [G] bool array a group
  ) -> None:
    """Takes in a step's groups, which were planned with `size`.

    A group may have lost answers; one of fewer than two says nothing. `passed` is for
    utility 'signal'.
    """
    self._check_prompt_aware(False, 'observe')
    place = self._place(size)
    if self._utility == 'signal':
      self._count_passed(passed, len(lengths))
    if step > self._step:
      self.sent(step, size)
    self._seen = {'sagc/group_size': float(size)}
    groups = [group for group in lengths if len(group) > 1]
    if not groups:
      return
    if self._mode == 'batch':
      groups = [np.concatenate(groups)]
    straggles = rules.exceeding(groups, self.tau) > 0
    rate = float(straggles.any() if self._mode == 'any' else straggles.mean())
    if self._mode == 'groups':
      self._learn(rate, place, straggles.sum(), (~straggles).sum())
    else:
      self._learn(rate, place, rate, 1 - rate)

  def observe_groups(
    self,
    lengths: Sequence[np.ndarray],  # one [G] array a group
    pis: Sequence[float] | np.ndarray,  # [groups], as predicted when they were planned
    step: int,
  ) -> None:
    """`observe` for sizes of prompts."""
    self._check_prompt_aware(True, 'observe_groups')
    pis = checks.check_chances(pis)
    if len(pis) != len(lengths):
      raise ValueError(f'pis: {len(pis)} of them, expected {len(lengths)}, one a group')
    if step > self._step:
      self.sent(step, self.propose(step))
    sizes = np.array([len(group) for group in lengths], np.int64)
    use = sizes > 1
    self._seen = {}
    if not use.any():
      return
    above = rules.exceeding(lengths, self.tau)[use]
    sizes, pis = sizes[use], pis[use]
    straggles = above > 0
    self._num = self._rho * self._num + float(sizes @ pis)
    self._den = self._rho * self._den + float(sizes.sum())
    self._learn(straggles.mean(), 0, above.sum(), (sizes - above).sum())
    self._seen['sagc/group_size'] = float(sizes.mean())
    # A group that lost answers counts with the size it had.
    places = np.searchsorted(self.sizes, sizes)
    for i, size in enumerate(self.sizes):
      if (places == i).any():
        self._seen[f'sagc/event_rate/{size}'] = float(straggles[places == i].mean())
      self._seen[f'sagc/share/{size}'] = float((places == i).mean())

  def _learn(self, rate: float, place: int, hits: float, misses: float) -> None:
    self._seen['sagc/event_rate'] = float(rate)
    lam = self.lam + self._eta * (float(rate) - self._delta)
    self.lam = min(max(lam, 0.0), self._lambda_max)
    # Towards the prior, not towards nothing: what is not used is tried again.
    self._a = self._rho * self._a + (1 - self._rho) * self._prior[0]
    self._b = self._rho * self._b + (1 - self._rho) * self._prior[1]
    self._a[place] += hits
    self._b[place] += misses

  def _count_passed(self, passed: Sequence[np.ndarray] | None, groups: int) -> None:
    """The chance of a non-zero advantage at each size, over recent groups."""
    if passed is None or len(passed) != groups:
      raise ValueError(
        "passed: expected one array a group, as utility is 'signal', got "
        + ('None' if passed is None else f'{len(passed)} for {groups} groups')
      )
    passed = [group for group in passed if len(group) > 1]
    if not passed:
      return
    p = np.array([(np.count_nonzero(x) + 1) / (len(x) + 2) for x in passed])[:, None]
    chance = 1 - p**self.sizes - (1 - p) ** np.array(self.sizes)
    self._signal = self._rho * self._signal + chance.sum(axis=0)
    self._signal_mass = self._rho * self._signal_mass + len(passed)

  # --- what it tells ---

  def metrics(self) -> dict[str, float]:
    means = (self._a / (self._a + self._b)).tolist()
    if self.prompt_aware:
      means = [1 - (1 - means[0]) ** size for size in self.sizes]
    metrics = {'sagc/group_size': float(self.size), 'sagc/lambda': self.lam}
    metrics |= {f'sagc/p/{g}': p for g, p in zip(self.sizes, means, strict=True)}
    # An event rate that cannot be reached shows here, and is no error.
    metrics['sagc/at_cap'] = float(self.lam >= self._lambda_max)
    return metrics | self._seen

  def state_dict(self) -> dict[str, Any]:
    return {
      'version': _VERSION,
      'sizes': list(self.sizes),
      'prompt_aware': self.prompt_aware,
      'step': self._step,
      'index': self._index,
      'before': self._before,
      'lam': self.lam,
      'a': self._a.tolist(),
      'b': self._b.tolist(),
      'num': self._num,
      'den': self._den,
      'signal': self._signal.tolist(),
      'signal_mass': self._signal_mass,
      'seen': dict(self._seen),
    }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    numbers = checks.check_saved(state, self.state_dict(), self._lambda_max)
    self._step, self._seen = state['step'], dict(state['seen'])
    self._index, self._before = state['index'], state['before']
    self.lam, self._a, self._b = float(numbers['lam']), numbers['a'], numbers['b']
    self._num, self._den = float(numbers['num']), float(numbers['den'])
    self._signal, self._signal_mass = numbers['signal'], float(numbers['signal_mass'])

  def _place(self, size: int, name: str = 'size') -> int:
    checks.check(name, size, size in self.sizes, f'one of {list(self.sizes)}')
    return self.sizes.index(size)

  def _check_prompt_aware(self, wanted: bool, name: str) -> None:
    if self.prompt_aware is not wanted:
      raise ValueError(
        f'{name}: prompt_aware is {self.prompt_aware}, expected {wanted}'
      )
