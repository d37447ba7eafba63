"""How long answers will be, from the lengths of a prompt's earlier groups.

No network: per prompt, exponential averages of ln length and of its spread; per
dataset, a regression that answers for what a prompt has not shown yet. One answer is
taken as lognormal. Arrays, not a dict a prompt: 11 bytes each.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import numpy as np

from jaxrl_sched.control.base import check_state, visits
from jaxrl_sched.control.length_rules import (
  DatasetSums,
  expected_longest,
  padded_tokens,
  quantile_of_longest,
  rank_correlation,
)
from jaxrl_sched.journal import Journal

VERSION = 1
Keys = Sequence[tuple[str, int]]  # (dataset, index)


class LengthPredictor:
  """Predicts the length of one answer and of the longest of a group.

  Each prompt's averages are drawn towards its dataset's regression of mean ln length
  on (1, ln prompt length, last pass rate), as if by `prior_groups` groups. What a
  dataset knows forgets at each `observe` that brings groups of it, which is to be
  called once a step.

  Args:
    datasets: name -> number of prompts.
    limit: the most tokens of an answer.
    factor: weight of the newest group in a prompt's averages, 0.01 to 1.
    prior_groups: how many groups the dataset's word weighs.
    beta: share of groups whose longest answer `high` is to cover.
    calibration: how fast `high` is corrected, in ln tokens a group.
    forgetting: of a dataset's sums, a step.
    minibatch: answers padded to one length, for `lengths/padded_lost` only.
  """

  def __init__(
    self,
    datasets: Mapping[str, int],
    *,
    limit: int,
    factor: float = 0.5,
    prior_groups: float = 2.0,
    beta: float = 0.9,
    calibration: float = 0.05,
    forgetting: float = 0.99,
    minibatch: int = 8,
  ):
    def need(good: bool, key: str, value: Any, expected: str) -> None:
      if not good:
        raise ValueError(f'lengths.{key}: {value!r}, expected {expected}')

    need(len(datasets) > 0, 'datasets', dict(datasets), 'at least one')
    for name, count in datasets.items():
      need(count >= 1, f'datasets.{name}', count, 'at least 1 prompt')
    need(limit >= 1, 'limit', limit, 'at least 1 token')
    need(0.01 <= factor <= 1, 'factor', factor, '0.01 to 1')
    need(0 < prior_groups < math.inf, 'prior_groups', prior_groups, 'above 0')
    need(0 < beta < 1, 'beta', beta, 'above 0 and below 1')
    need(0 < calibration < math.inf, 'calibration', calibration, 'above 0')
    need(0 < forgetting <= 1, 'forgetting', forgetting, 'above 0, at most 1')
    need(minibatch >= 1, 'minibatch', minibatch, 'at least 1')
    self._datasets, self._limit = dict(datasets), limit
    self._factor, self._prior, self._beta = factor, prior_groups, beta
    self._calibration, self._minibatch = calibration, minibatch
    self._remembered = (2 - factor) / factor  # groups that an average remembers
    self._number = {name: d for d, name in enumerate(datasets)}
    self._counts = np.array(list(datasets.values()), np.int64)
    self._offsets = np.cumsum(self._counts) - self._counts

    # Per prompt, all datasets one after another.
    prompts = int(self._counts.sum())
    self._mean = np.zeros(prompts, np.float32)  # of ln length
    self._spread = np.zeros(prompts, np.float32)  # within a group, of ln length
    self._groups = np.zeros(prompts, np.uint8)  # seen, counted no further than needed
    self._pass_rate = np.full(prompts, 0.5, np.float16)  # of the newest group
    self._prompts = Journal(
      {
        'mean': self._mean,
        'spread': self._spread,
        'groups': self._groups,
        'pass_rate': self._pass_rate,
      }
    )
    # Per dataset.
    self._sums = DatasetSums(len(datasets), limit=limit, forgetting=forgetting)
    self._ln_c = np.zeros(len(datasets))  # calibration of `high`
    self._size = np.ones(len(datasets), np.int64)  # of the newest group
    self._told: dict[str, float] = {}  # of the newest `observe`: no state

  # --- questions ---

  def predict(
    self,
    keys: Keys,
    *,
    size: int | np.ndarray | None = None,
    prompt_lengths: np.ndarray | None = None,
  ) -> tuple[np.ndarray, np.ndarray]:
    """What to expect of answers to these prompts, in tokens from 1 to the limit.

    Args:
      keys: (dataset, index) of each.
      size: answers that each is asked for, one number or [n]. None: as many as the
        dataset's newest group had.
      prompt_lengths: [n] tokens. None: the dataset's average.

    Returns:
      The mean length of one answer, and what the longest of `size` stays under with
      chance `beta`, both [n] float64.
    """
    number, flat = self._locate(keys)
    ln_prompt = self._ln_prompt(number, prompt_lengths)
    mu, sigma, tau2, _ = self._lognormal(number, flat, ln_prompt)
    sizes = self._size[number] if size is None else np.broadcast_to(size, number.shape)
    if (sizes < 1).any():
      raise ValueError(f'lengths: size {sizes.min()}, expected at least 1')
    ln_high = self._ln_c[number] + self._ln_high(mu, sigma, tau2, sizes)
    return self._tokens(mu + (sigma**2 + tau2) / 2), self._tokens(ln_high)

  def exceedance(
    self, keys: Keys, tau: float, *, prompt_lengths: np.ndarray | None = None
  ) -> np.ndarray:
    """The chance that one answer is longer than `tau` medians of its group, [n].

    1 - Phi(ln tau / sigma) with the spread within a group; nothing where tau medians
    are past the limit; cut to [1e-4, 0.5] (see 1.5 of the specification).
    """
    if not tau >= 1:
      raise ValueError(f'tau: {tau}, expected at least 1')
    number, flat = self._locate(keys)
    ln_prompt = self._ln_prompt(number, prompt_lengths)
    mu, sigma, _, _ = self._lognormal(number, flat, ln_prompt)
    z = math.log(tau) / np.maximum(sigma, 1e-12)
    chance = [math.erfc(x / math.sqrt(2)) / 2 for x in z.tolist()]
    possible = mu + math.log(tau) < math.log(self._limit)
    return np.clip(np.where(possible, chance, 0.0), 1e-4, 0.5)

  def _locate(self, keys: Keys) -> tuple[np.ndarray, np.ndarray]:
    """Number of the dataset and place in the arrays of each key, [n] int64."""
    for name in {name for name, _ in keys} - self._number.keys():
      raise ValueError(f'lengths: dataset {name!r}, expected one of {[*self._number]}')
    number = np.array([self._number[name] for name, _ in keys], np.int64)
    index = np.array([index for _, index in keys], np.int64)
    for i in np.flatnonzero((index < 0) | (index >= self._counts[number]))[:1]:
      raise ValueError(
        f'lengths: prompt {index[i]} of {keys[i][0]!r}, expected 0 to '
        f'{self._counts[number[i]] - 1}'
      )
    return number, self._offsets[number] + index

  def _ln_prompt(self, number, prompt_lengths) -> np.ndarray | None:
    if prompt_lengths is None:
      return None
    prompt_lengths = np.asarray(prompt_lengths)
    if prompt_lengths.shape != number.shape or not (prompt_lengths >= 1).all():
      raise ValueError(
        f'lengths: prompt_lengths {prompt_lengths}, expected {len(number)} of at least 1'
      )
    return np.log(prompt_lengths)

  def _lognormal(self, number, flat, ln_prompt):
    """mu, sigma and tau^2 of each prompt [n], and the regression's (x1, x2) [n, 2]."""
    means, slopes, variance, spread = self._sums.regression()
    x = np.empty((len(number), 2))
    x[:, 0] = means[number, 1] if ln_prompt is None else ln_prompt
    x[:, 1] = self._pass_rate[flat]
    of_dataset = means[number, 3] + (slopes[number] * (x - means[number, 1:3])).sum(1)
    of_dataset = np.clip(of_dataset, 0.0, math.log(self._limit))
    groups = np.minimum(self._groups[flat], self._remembered)
    total = groups + self._prior
    mu = (groups * self._mean[flat] + self._prior * of_dataset) / total
    sigma = (groups * self._spread[flat] + self._prior * spread[number]) / total
    return mu, sigma, variance[number] * self._prior / total, x

  def _ln_high(self, mu, sigma, tau2, sizes) -> np.ndarray:
    """ln of `high` before calibration, [n]."""
    distinct, which = np.unique(sizes, return_inverse=True)
    z = np.array([quantile_of_longest(self._beta, int(g)) for g in distinct])
    return mu + np.sqrt(sigma**2 + tau2) * z[which]

  def _tokens(self, ln: np.ndarray) -> np.ndarray:
    return np.clip(np.exp(np.minimum(ln, math.log(self._limit))), 1.0, self._limit)

  # --- what happened ---

  def observe(
    self,
    keys: Keys,
    lengths: Sequence[np.ndarray],
    *,
    prompt_lengths: np.ndarray | None = None,
    pass_rates: np.ndarray | None = None,
  ) -> None:
    """Takes in the groups of a step, in draw order.

    Args:
      keys: (dataset, index) of each group's prompt; one may come twice.
      lengths: a [G] int array a group, tokens of its answers.
      prompt_lengths: [n] tokens. None: the dataset's average.
      pass_rates: [n] share of answers that passed. None: as before.
    """
    number, flat = self._locate(keys)
    self._told = {}
    if not len(keys):
      return
    answers, sizes = self._check_lengths(keys, lengths)
    ln_prompt = self._ln_prompt(number, prompt_lengths)
    if pass_rates is not None:
      pass_rates = np.asarray(pass_rates, np.float64)
      if pass_rates.shape != flat.shape or not (abs(pass_rates - 0.5) <= 0.5).all():
        raise ValueError(
          f'lengths: pass_rates {pass_rates}, expected {len(keys)} from 0 to 1'
        )
    self._prompts.note(flat)
    starts = np.cumsum(sizes) - sizes
    mean = np.add.reduceat(np.log(answers), starts) / sizes
    longest = np.log(np.maximum.reduceat(answers, starts))
    ln_mean, ln_high = np.empty(len(flat)), np.empty(len(flat))
    rows = np.ones((len(flat), 4))
    spreads = np.zeros(len(flat))
    for now in visits(flat):  # a prompt's second group meets what its first has left
      given = None if ln_prompt is None else ln_prompt[now]
      mu, sigma, tau2, rows[now, 1:3] = self._lognormal(number[now], flat[now], given)
      ln_mean[now] = mu + (sigma**2 + tau2) / 2
      ln_high[now] = self._ln_high(mu, sigma, tau2, sizes[now])
      self._average(flat[now], mean[now], longest[now], sizes[now], sigma)
      rows[now, 3] = self._mean[flat[now]]
      spreads[now] = self._spread[flat[now]]
      if pass_rates is not None:
        self._pass_rate[flat[now]] = pass_rates[now]
    self._sums.add(number, rows, spreads, sizes > 1)  # one answer shows no spread
    planned = self._ln_c[number] + ln_high
    covered = self._calibrate(number, longest - ln_high)
    self._size[number] = sizes  # of one dataset's, the last stays
    self._tell(ln_mean, planned, answers, sizes, covered)

  def _check_lengths(self, keys, lengths) -> tuple[np.ndarray, np.ndarray]:
    """All lengths in one array, and how many each group has."""
    if len(lengths) != len(keys):
      raise ValueError(f'lengths: {len(lengths)} groups, expected {len(keys)}')
    sizes = np.array([len(group) for group in lengths], np.int64)
    for i in np.flatnonzero(sizes == 0)[:1]:
      raise ValueError(f'lengths: {keys[i]} has none, expected at least 1')
    answers = np.concatenate(lengths)
    if answers.dtype.kind not in 'iu' or answers.ndim != 1:
      raise ValueError(f'lengths: {answers.dtype}, expected whole numbers of tokens')
    for i in np.flatnonzero((answers < 1) | (answers > self._limit))[:1]:
      group = int(np.searchsorted(np.cumsum(sizes), i, side='right'))
      raise ValueError(
        f'lengths: {answers[i]} tokens in {keys[group]}, expected 1 to the limit '
        f'{self._limit}'
      )
    return answers, sizes

  def _average(self, flat, mean, longest, sizes, sigma) -> None:
    """Takes one group each of different prompts into their averages."""
    distinct, which = np.unique(sizes, return_inverse=True)
    xi = np.array([expected_longest(int(g)) for g in distinct])[which]
    # A single answer says nothing of the spread: it counts as what was expected.
    spread = np.where(xi > 0, (longest - mean) / np.where(xi > 0, xi, 1.0), sigma)
    new = self._groups[flat] == 0
    f = np.where(new, 1.0, self._factor)
    self._mean[flat] += f * (mean - self._mean[flat])
    self._spread[flat] += f * (spread - self._spread[flat])
    most = math.ceil(self._remembered)
    self._groups[flat] = np.minimum(self._groups[flat].astype(np.int64) + 1, most)

  def _calibrate(self, number, surprise) -> np.ndarray:
    """Moves c after every group in turn. Returns which were covered, [n] bool.

    One after another, since a thousand steps at once would overshoot by far. `high`
    is taken before it is cut to [1, limit]: no longest answer is above the limit, and
    below 1 token c would fall for ever.
    """
    covered = np.empty(len(number), bool)
    ln_c, may_miss = self._ln_c.tolist(), 1 - self._beta
    for i, (d, x) in enumerate(zip(number.tolist(), surprise.tolist(), strict=True)):
      covered[i] = x <= ln_c[d]
      ln_c[d] += self._calibration * ((x > ln_c[d]) - may_miss)
    self._ln_c = np.array(ln_c)
    return covered

  # --- what it tells ---

  def _tell(self, ln_mean, ln_high, answers, sizes, covered) -> None:
    starts = np.cumsum(sizes) - sizes
    actual = np.add.reduceat(answers, starts) / sizes
    self._told = {'lengths/coverage': float(covered.mean())}
    agreement = rank_correlation(ln_mean, actual)
    if agreement is not None:
      self._told['lengths/rank_correlation'] = agreement
    # As a scheduler would: the answers of the group with the highest `high` first.
    groups = np.argsort(-ln_high, kind='stable')
    moved = starts[groups] - (np.cumsum(sizes[groups]) - sizes[groups])
    order = np.arange(len(answers)) + np.repeat(moved, sizes[groups])
    best = padded_tokens(np.sort(answers)[::-1], self._minibatch)
    padded = padded_tokens(answers[order], self._minibatch)
    self._told['lengths/padded_lost'] = padded / best - 1

  def metrics(self) -> dict[str, float]:
    """How good the predictions of the newest `observe` were, before it was known.

    The rank correlation is that of mean lengths over groups; `padded_lost` the
    padded tokens of static minibatches in predicted order over those in the order of
    an oracle, less 1.
    """
    c = np.exp(self._ln_c)
    return self._told | {
      f'lengths/calibration/{name}': float(c[d]) for name, d in self._number.items()
    }

  # --- state ---

  def freeze(self) -> Callable[[], dict[str, Any]]:
    """The state as of now, to be written out later, if at all.

    Costs next to nothing, and holds until the next call or load; a RuntimeError after
    that.
    """
    of_datasets, of_prompts = self._state_of_datasets(), self._prompts.freeze()
    return lambda: of_datasets | of_prompts()

  def state_dict(self) -> dict[str, Any]:
    """JSON, but for arrays."""
    return self._state_of_datasets() | self._prompts.copies()

  def _state_of_datasets(self) -> dict[str, Any]:
    arrays = {name: array.copy() for name, array in self._of_datasets().items()}
    return {'version': VERSION, 'datasets': dict(self._datasets)} | arrays

  def load_state_dict(self, state: dict[str, Any]) -> None:
    own = self._of_datasets() | self._prompts.arrays
    check_state('lengths', state, {'version': VERSION, 'datasets': {}} | own)
    for key, expected in (('version', VERSION), ('datasets', self._datasets)):
      if state[key] != expected:
        raise ValueError(f'state of lengths: {key} {state[key]}, expected {expected}')
    for name, array in own.items():
      found = np.asarray(state[name])
      if (found.shape, found.dtype) != (array.shape, array.dtype):
        raise ValueError(
          f'state of lengths: {name} is {found.dtype}{list(found.shape)}, expected '
          f'{array.dtype}{list(array.shape)}'
        )
    self._prompts.forget()
    for name, array in own.items():
      array[...] = state[name]
    self._told = {}

  def _of_datasets(self) -> dict[str, np.ndarray]:
    return {
      'sums': self._sums.products,
      'spreads': self._sums.spreads,
      'ln_c': self._ln_c,
      'size': self._size,
    }
