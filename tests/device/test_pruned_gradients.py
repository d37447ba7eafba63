"""Pruning leaves the average gradient of a model as it is, with clipping and KL on.

The average is over every outcome of pruning, each with its probability from paper;
what it must equal is autodiff's gradient of the whole batch.
"""

import dataclasses
import functools
import itertools

import jax
from masks import outcomes
import numpy as np
import pytest
import toys

from jaxrl_sched.device import learner as learning
from jaxrl_sched.device.learner import Loss
from jaxrl_sched.host import packing, pruning
from jaxrl_sched.host.advantages import group_advantages

SHAPE = dict(rows=8, row_tokens=40)
MAX_NEW = 16
REWARDS = ((1, 0, 0, 0), (0.0, 0.3, 1.0, 0.4, 0.1))  # 3 low answers; 2, graded
LENGTHS = ((3, 7, 1, 5), (9, 2, 6, 4, 8))
LOSS = Loss(kind='dapo', tis_cap=0.5, kl_coef=0.5, kl='k3')


def groups_of(rewards=REWARDS, lengths=LENGTHS):
  """Groups of version 0: the sampler's log-probs are far off, so that clips act."""
  rng, groups = np.random.default_rng(0), []
  for draw, (given, n) in enumerate(zip(rewards, lengths, strict=True)):
    given = np.array(given, np.float32)
    group = toys.group(rng, draw, n, version=draw % 2)
    groups.append(dataclasses.replace(group, verdicts=given, rewards=given))
  return groups


def weights_of(groups, keep=None, averaging='sequence'):
  return packing.answer_weights(
    [g.lengths for g in groups],
    averaging=averaging,
    max_new_tokens=MAX_NEW,
    keep=keep,
  )


@functools.lru_cache
def compiled():
  loss_of = functools.partial(
    learning.microbatch_loss,
    config=toys.CONFIG,
    loss=LOSS,
    temperature=1.0,
    remat=False,
    mesh=None,
  )
  return jax.jit(jax.grad(loss_of, has_aux=True))


@functools.lru_cache
def models():
  """Policy and reference."""
  return [toys.parameters(seed=seed, sharpness=5.0) for seed in (0, 1)]


def gradient(groups, weights, advantages=None, *, window=64, reference=None):
  """Of packed rows: a vector [parameters] float64, and the sums of the loss."""
  if advantages is None:
    advantages = [group_advantages(g.rewards) for g in groups]
  batches = packing.fill(groups, advantages, weights, version=1, window=window, **SHAPE)
  if not batches:
    return 0.0, {}
  (batch,) = batches
  arrays = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
  policy, other = models()
  reference = other if reference is None else reference
  found, sums = compiled()(policy, reference, arrays)
  leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(found)]
  return np.concatenate(leaves), jax.device_get(sums)


def off(found, expected):
  """The distance, relative to the expected gradient's length."""
  return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def joint(rule, rate=0.5, groups=None):
  """(probability, weights of each group) of all outcomes of all groups together."""
  groups = groups_of() if groups is None else groups
  each = [outcomes(group_advantages(g.rewards), rule, rate) for g in groups]
  for combination in itertools.product(*each):
    chance = np.prod([chance for chance, _, _ in combination])
    yield chance, [weight for _, _, weight in combination]


def test_clips_and_kl_are_at_work():
  _, sums = gradient(groups_of(), weights_of(groups_of()))
  assert 0 < sums['clip_frac'] < sums['tokens']
  assert sums['kl'] > 0.1 and sums['tis'] < 0.99 * sums['tis_raw']


@pytest.mark.parametrize('averaging', ['sequence', 'token', 'constant'])
@pytest.mark.parametrize('rule', pruning.RULES)
def test_the_average_gradient_is_that_of_the_whole_batch(rule, averaging):
  """Test 3 of algorithms.md 4.9; E5: the weight is neither lost nor applied twice."""
  groups = groups_of()
  full, _ = gradient(groups, weights_of(groups, averaging=averaging))
  total, mean, seen = 0.0, 0.0, 0
  for chance, keep in joint(rule):
    found, _ = gradient(groups, weights_of(groups, keep, averaging))
    total, mean, seen = total + chance, mean + chance * found, seen + 1
  assert total == pytest.approx(1, abs=1e-9) and seen > 4
  assert off(mean, full) < 1e-5


def on_survivors(groups, keep):
  """Advantages of the kept answers among themselves."""
  found = []
  for group, weight in zip(groups, keep, strict=True):
    kept, advantages = weight > 0, np.zeros(group.size, np.float32)
    advantages[kept] = group_advantages(group.rewards[kept])
    found.append(advantages)
  return found


def kept_tokens(groups, keep):
  return sum(int(g.lengths[w > 0].sum()) for g, w in zip(groups, keep, strict=True))


WRONG = {
  'no weight': lambda keep: [w > 0 for w in keep],
  'applied twice': lambda keep: [w * w for w in keep],
  'nominal weight': lambda keep: [np.where(w > 1, 2.0, w) for w in keep],
  'by the kept count': lambda keep: [w * w.size / (w > 0).sum() for w in keep],
  'self-normalised': lambda keep: [w * w.size / w.sum() for w in keep],
}


@pytest.mark.parametrize('name', [*WRONG, 'recomputed', 'by the kept tokens'])
def test_wrong_estimators_fail(name):
  """Tests 2, 3 and 9 of 4.9: the check above tells them all from the true one."""
  groups = groups_of()
  # A nominal weight differs from the true one only where a fixed number goes.
  rule = 'fixed' if name == 'nominal weight' else 'coins'
  averaging = 'token' if name == 'by the kept tokens' else 'sequence'
  full, _ = gradient(groups, weights_of(groups, averaging=averaging))
  mean = 0.0
  for chance, keep in joint(rule):
    advantages = None
    if name == 'recomputed':
      advantages = on_survivors(groups, keep)
    elif name == 'by the kept tokens':
      scale = sum(g.lengths.sum() for g in groups) / kept_tokens(groups, keep)
      keep = [w * scale for w in keep]
    else:
      keep = WRONG[name](keep)
    found, _ = gradient(groups, weights_of(groups, keep, averaging), advantages)
    mean = mean + chance * found
  assert off(mean, full) > 1e-2


@pytest.mark.parametrize('draw', ['fixed', 'coins'])
def test_skipped_prompts_leave_the_average_as_it_is(draw):
  """Both levels at once: B stays the number of candidates, whoever was answered."""
  groups = groups_of(
    [(1, 0, 0, 0), (0, 1), (1, 0, 0), (0, 1, 1)],
    [(3, 7, 1, 5), (4, 6), (2, 9, 3), (5, 4, 8)],
  )
  scores = [0.2, 0.1, 0.9, 0.8]  # the first two are low
  pruner = pruning.PromptPruner({'d': 4}, rate=0.5, draw=draw)
  pruner.observe_many('d', range(4), [[s, -s] for s in scores])
  fates = {}
  for part in range(200):
    keep, weight = pruner.select('d', range(4), 0, part=part)
    fates[tuple(keep)] = weight
  assert len(fates) == (4 if draw == 'coins' else 2)  # all of the same probability
  full, _ = gradient(groups, weights_of(groups))
  mean = 0.0
  for kept, prompt_weight in fates.items():
    answered = [g for g, k in zip(groups, kept, strict=True) if k]
    scale = [w * len(answered) / len(groups) for w in prompt_weight if w > 0]
    for chance, keep in joint('fixed', groups=answered):
      keep = [w * s for w, s in zip(keep, scale, strict=True)]
      found, _ = gradient(answered, weights_of(answered, keep))
      mean = mean + chance / len(fates) * found
  assert off(mean, full) < 1e-5


def test_the_order_and_the_rows_of_kept_answers_have_no_say():
  """Test 9 of 4.9."""
  groups = groups_of()
  (_, keep) = list(joint('balanced'))[0]
  weights, advantages = (
    weights_of(groups, keep),
    [group_advantages(g.rewards) for g in groups],
  )
  expected, sums = gradient(groups, weights)
  turned = []
  for group, a, w in zip(groups, advantages, weights, strict=True):
    order = np.random.default_rng(1).permutation(group.size)
    completions = tuple(group.completions[i] for i in order)
    turned.append(
      (dataclasses.replace(group, completions=completions), a[order], w[order])
    )
  groups, advantages, weights = zip(*turned[::-1], strict=True)
  for window in (1, 3):
    found, other = gradient(groups, weights, advantages, window=window)
    assert off(found, expected) < 1e-5
    assert other['loss'] == pytest.approx(sums['loss'], rel=1e-5)


@pytest.mark.parametrize('rule', pruning.RULES)
def test_groups_without_spread_are_not_pruned(rule):
  for _, keep in joint(rule, groups=groups_of([(1, 1, 1, 1), (0, 0, 0, 0, 0)])):
    assert all((w == 1).all() for w in keep)


def test_groups_without_spread_pull_nowhere_whatever_is_kept():
  """Test 8 of 4.9. The policy is its own reference: KL, a term of its own, is 0."""
  groups = groups_of([(1, 1, 1, 1), (0, 0, 0, 0, 0)])
  pulled, _ = gradient(groups, weights_of(groups))
  for mask in itertools.product([0.0, 2.0], repeat=4):
    keep = [np.array(mask), np.ones(5)]
    found, _ = gradient(groups, weights_of(groups, keep), reference=models()[0])
    assert np.linalg.norm(found) < 1e-6 * np.linalg.norm(pulled)


def test_what_is_kept_decides_no_shape():
  groups = groups_of()
  gradient(groups, weights_of(groups))
  with toys.compilations() as seen:
    for _, keep in itertools.islice(joint('coins'), 5):
      gradient(groups, weights_of(groups, keep))
  assert not seen
