"""Every outcome of pruning a group, with its probability worked out from the rule."""

import itertools
import math

import numpy as np

from jaxrl_sched.host import pruning


def balanced_chances(pi):
  """Systematic sampling over all orders, and all intervals of u between two ends."""
  found, orders = {}, list(itertools.permutations(range(len(pi))))
  for order in orders:
    ends = np.cumsum([0.0, *(pi[i] for i in order)])
    cuts = np.unique(np.round([0, 1, *(ends % 1)], 12))
    for low, high in itertools.pairwise(cuts):
      points = (low + high) / 2 + np.arange(len(pi))
      mask = [False] * len(pi)
      for i, start, end in zip(order, ends[:-1], ends[1:], strict=True):
        mask[i] = bool(((start <= points) & (points < end)).any())
      chance = (high - low) / len(orders)
      found[tuple(mask)] = found.get(tuple(mask), 0.0) + chance
  return found


def chances(advantages, rule, rate):
  """Each mask with its probability, from the rule's words."""
  size = [abs(float(a)) for a in advantages]
  low = [i for i, s in enumerate(size) if s < sum(size) / len(size) - 1e-6]
  if max(size) == 0:  # nothing tells them apart
    return {(True,) * len(size): 1.0}
  if rule == 'balanced':
    return balanced_chances([max(0.1, s / max(size)) for s in size])
  if rule == 'coins':
    dropped = [d for n in range(len(low) + 1) for d in itertools.combinations(low, n)]
    odds = [rate ** len(d) * (1 - rate) ** (len(low) - len(d)) for d in dropped]
  else:
    dropped = list(itertools.combinations(low, int(rate * len(low) + 1e-9)))
    odds = [1 / len(dropped)] * len(dropped)
  masks = [tuple(i not in d for i in range(len(size))) for d in dropped]
  return dict(zip(masks, odds, strict=True))


def outcomes(advantages, rule, rate, draws=3000):
  """What `prune_answers` does: (probability, keep, weight) of each outcome.

  Probabilities are those of paper; how often each is seen must agree with them.
  """
  expected, seen, weights = chances(advantages, rule, rate), {}, {}
  for seed in range(draws):
    rng = np.random.default_rng((seed, pruning.ANSWERS, 5))
    keep, weight = pruning.prune_answers(advantages, rate=rate, rule=rule, rng=rng)
    mask = tuple(map(bool, keep))
    seen[mask], weights[mask] = seen.get(mask, 0) + 1, weight
  assert seen.keys() <= expected.keys()
  for mask, chance in expected.items():
    spread = math.sqrt(draws * chance * (1 - chance))
    assert abs(seen.get(mask, 0) - draws * chance) <= 5 * spread + 1e-6 * draws
  assert sum(expected[mask] for mask in seen) > 1 - 1e-9
  return [(expected[mask], np.array(mask), weights[mask]) for mask in seen]


def average(found, value):
  """The mean of value(keep, weight)."""
  return sum(chance * np.asarray(value(k, w)) for chance, k, w in found)
