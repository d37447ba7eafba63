"""Policy losses against arithmetic on paper, plain loops, and identities.

The toy policy is a table: the logits of a token depend on the token before it.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sched.device import losses
from jaxrl_sched.host import packing
from jaxrl_sched.types import Completion, Group, Prompt, Request, Sampling

CLIP = dict(clip_low=0.2, clip_high=0.28)
SURROGATES = ('grpo', 'dapo', 'dr_grpo')


def loss(logp, logp_old, advantage, weight, **settings):
  """Of one row, given as lists or numbers."""
  arrays = [
    jnp.atleast_2d(jnp.asarray(x, jnp.float32))
    for x in (logp, logp_old, advantage, weight)
  ]
  for name in ('logp_sampled', 'segments'):
    if name in settings:
      settings[name] = jnp.atleast_2d(jnp.asarray(settings[name]))
  return losses.policy_loss(*arrays, **(CLIP | settings))


def slope(f, x):
  return np.asarray(jax.grad(f)(jnp.asarray(x, jnp.float32)))


# --- one token, on paper ------------------------------------------------------


@pytest.mark.parametrize('kind', SURROGATES)
@pytest.mark.parametrize(
  'ratio, advantage, dual_clip, value, alive',
  [
    (1.0, 1, None, -1.0, True),  # on policy: the plain policy gradient
    (1.5, 1, None, -1.28, False),
    (0.5, 1, None, -0.5, True),
    (0.5, -1, None, 0.8, False),
    (1.5, -1, None, 1.5, True),
    (100, -1, None, 100.0, True),
    (100, -1, 3.0, 3.0, False),
    (1.5, -1, 3.0, 1.5, True),
    (100, 1, 3.0, -1.28, False),
  ],
)
def test_the_clip_has_two_sides(kind, ratio, advantage, dual_clip, value, alive):
  """A8: -1.28, -0.5, 0.8, 1.5, 100, and 3 with dual clip 3."""

  def f(logp):
    return loss(logp, 0, advantage, 1, kind=kind, dual_clip=dual_clip)[0]

  np.testing.assert_allclose(f(np.log(ratio)), value, rtol=1e-5)
  expected = -ratio * advantage if alive else 0.0
  np.testing.assert_allclose(slope(f, np.log(ratio)), expected, rtol=1e-5)


def test_on_policy_the_gradient_is_alive_even_without_room_to_clip():
  for kind in losses.KINDS:

    def f(logp, kind=kind):  # logp_old is logp itself: no gradient flows into it
      settings = dict(kind=kind, clip_low=0, clip_high=0, segments=[1])
      return loss(logp, logp, 2.0, 0.5, **settings)[0]

    np.testing.assert_allclose(slope(f, -1.5), -1.0, rtol=1e-6)


@pytest.mark.parametrize(
  'ratio, advantage, used',
  [(1.0, 1, 1.0), (1.5, 1, 1.28), (0.5, 1, 0.8), (0.5, -1, 0.8), (1.5, -1, 1.28)],
)
def test_cispo_clips_the_weight_and_never_the_gradient(ratio, advantage, used):
  """arXiv 2506.13585: the gradient is -sg(clip(r)) A grad logp, for every token."""

  def f(logp):
    return loss(logp, -2.0, advantage, 1, kind='cispo')[0]

  logp = -2.0 + np.log(ratio)
  np.testing.assert_allclose(f(logp), -used * advantage * logp, rtol=1e-5)
  np.testing.assert_allclose(slope(f, logp), -used * advantage, rtol=1e-5)


def test_the_same_probability_on_both_sides_is_ratio_1():
  """D1: top_p 0.6 makes 0.5 of [0.5, 0.3, 0.15, 0.05] 0.625, on both sides."""
  logp = np.log(0.5 / (0.5 + 0.3))
  np.testing.assert_allclose(logp, np.log(0.625))
  _, sums = loss(logp, np.log(0.625), 1, 1, kind='grpo')
  np.testing.assert_allclose(sums['ratio'], 1.0, rtol=1e-6)


# --- averages -----------------------------------------------------------------


@pytest.mark.parametrize('averaging, value', [('sequence', 0.0), ('token', 0.4)])
def test_on_policy_the_loss_depends_on_the_average(averaging, value):
  """A4: advantages +1 and -1, lengths 3 and 7; the gradient lives in both."""
  lengths = np.array([3, 7])
  (weight,) = packing.answer_weights([lengths], averaging=averaging, max_new_tokens=10)
  weight, advantage = np.repeat(weight, lengths), np.repeat([1, -1], lengths)

  def f(logp):
    return loss(logp, logp, advantage, weight, kind='grpo')[0]

  logp = -np.ones(10)
  np.testing.assert_allclose(f(logp), value, rtol=1e-6, atol=1e-7)
  np.testing.assert_allclose(slope(f, logp), -weight * advantage, rtol=1e-6)


@pytest.mark.parametrize('kind', losses.KINDS)
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_tokens_of_no_weight_have_no_say(kind, bad):
  """A6: not even those that are no numbers, in value, gradient or log."""
  rng = np.random.default_rng(0)
  arrays = rng.normal(size=(4, 6)).astype(np.float32)
  weight = np.array([0, 1, 2, 0, 1, 0], np.float32)
  settings = dict(kind=kind, tis_cap=1.5, segments=[1, 1, 1, 2, 2, 0])

  def f(logp, others):
    old, advantage, sampled = others
    return loss(logp, old, advantage, weight, logp_sampled=sampled, **settings)

  def value_and_grad(arrays):
    logp = jnp.asarray(arrays[0])
    return jax.value_and_grad(f, has_aux=True)(logp, arrays[1:])

  (clean, sums), grad = value_and_grad(arrays)
  (dirty, sums_), grad_ = value_and_grad(np.where(weight > 0, arrays, bad))
  assert np.isfinite(clean)
  assert clean == dirty and sums == sums_
  np.testing.assert_array_equal(grad, grad_)
  assert not grad[weight == 0].any()
  assert sums['tokens'] == 3


@pytest.mark.parametrize('kind', losses.KINDS)
def test_nothing_trained_is_loss_0_and_gradient_0(kind):
  """A6: all answers filtered, or an empty row (J3)."""
  settings = dict(kind=kind, segments=[0, 0], tis_cap=2.0, logp_sampled=[0.0, 0.0])

  def f(logp):
    return loss(logp, [np.nan, 0], [1, 1], [0, 0], **settings)

  (value, sums), grad = jax.value_and_grad(f, has_aux=True)(jnp.array([-np.inf, -1]))
  assert value == 0 and not grad.any()
  assert all(x == 0 for x in sums.values())


@pytest.mark.parametrize('kind', losses.KINDS)
def test_a_ratio_beyond_all_bounds_stays_finite(kind):
  def f(logp):
    return loss(logp, [-300.0, 0.0], [-1, 0], [1, 1], kind=kind, segments=[1, 2])[0]

  value, grad = jax.value_and_grad(f)(jnp.array([-0.1, -200.0]))
  assert np.isfinite(value) and np.isfinite(grad).all()


# --- truncated importance sampling --------------------------------------------


def test_importance_is_reported_raw_and_capped():
  """M3: raw mean 4.5359185 beside the capped 1.1417538."""
  rho = np.array([0.6065307, 12.1824940, 0.8187308])
  logp = np.log(rho) - 3.0
  _, sums = loss(
    logp, logp, [1] * 3, [1] * 3, kind='dapo', tis_cap=2, logp_sampled=[-3.0] * 3
  )
  np.testing.assert_allclose(sums['tis_raw'] / sums['tokens'], 4.5359185, rtol=1e-5)
  np.testing.assert_allclose(sums['tis'] / sums['tokens'], 1.1417538, rtol=1e-5)
  np.testing.assert_allclose(sums['ratio'], 3.0, rtol=1e-6)


@pytest.mark.parametrize('advantage', [1.0, -1.0])
@pytest.mark.parametrize('rho', [0.5, 1.1, 3.0])
def test_fresh_tokens_are_weighed_by_the_truncated_importance(rho, advantage):
  """logp_old = sg(logp): the ordinary min(rho, cap) x A x grad logp."""

  def f(logp):
    settings = dict(kind='grpo', tis_cap=2.0, logp_sampled=[-1.0])
    return loss(logp, logp, advantage, 1, **settings)[0]

  expected = -min(rho, 2.0) * advantage
  np.testing.assert_allclose(slope(f, -1.0 + np.log(rho)), expected, rtol=1e-5)


@pytest.mark.parametrize('ratio', [0.9, 1.5, 2.5, 100.0])
def test_where_the_sampler_is_the_old_policy_the_ratio_itself_is_truncated(ratio):
  """Only A < 0 lets it grow; the whole importance is then min(r, cap)."""

  def f(logp):
    settings = dict(kind='grpo', tis_cap=2.0, logp_sampled=[-1.0])
    return loss(logp, -1.0, -1.0, 1, **settings)[0]

  logp = -1.0 + np.log(ratio)
  np.testing.assert_allclose(f(logp), min(ratio, 2.0), rtol=1e-5)
  np.testing.assert_allclose(slope(f, logp), min(ratio, 2.0), rtol=1e-5)


@pytest.mark.parametrize('kind', losses.KINDS)
@given(seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_no_token_weighs_more_than_the_cap(kind, seed):
  """The slope of a gain by logp is importance x A: at most cap x |A| a token."""
  rng = np.random.default_rng(seed)
  logp, old, sampled = rng.normal(-2, 1.5, size=(3, 8)).astype(np.float32)
  advantage = np.repeat(rng.normal(size=2), 4)

  def f(logp):
    settings = dict(kind=kind, tis_cap=1.5, logp_sampled=sampled)
    segments = np.repeat([1, 2], 4)
    return loss(logp, old, advantage, np.ones(8), segments=segments, **settings)[0]

  assert (np.abs(slope(f, logp)) <= 1.5 * np.abs(advantage) * (1 + 1e-5)).all()


# --- sequence ratio -----------------------------------------------------------


def gspo_by_loops(logp, old, advantage, weight, segments):
  """arXiv 2507.18071, answer by answer: loss and its gradient by logp."""
  total, grad = 0.0, np.zeros_like(logp)
  for b in range(len(logp)):
    for segment in range(1, segments[b].max() + 1):
      tokens = [
        t
        for t in range(logp.shape[1])
        if segments[b, t] == segment and weight[b, t] > 0
      ]
      if not tokens:
        continue
      product = 1.0
      for t in tokens:
        product *= np.exp(logp[b, t] - old[b, t])
      s = product ** (1 / len(tokens))
      a, w = advantage[b, tokens[0]], weight[b, tokens].sum()
      total -= w * min(s * a, min(max(s, 0.8), 1.28) * a)
      if not (a > 0 and s > 1.28 or a < 0 and s < 0.8):
        for t in tokens:
          grad[b, t] = -w * a * s / len(tokens)
  return total, grad


@given(seed=st.integers(0, 9999))
@settings(max_examples=25, deadline=None)
def test_gspo_is_what_plain_loops_compute(seed):
  rng = np.random.default_rng(seed)
  segments = np.array([[1] * 3 + [2] * 5 + [3] * 4, [1] * 7 + [0] * 5, [0] * 12])
  prompt = np.array([[1, 0, 0] + [1, 1, 0, 0, 0] + [1, 0, 0, 0]] * 3)
  logp = rng.normal(-2, 0.5, size=(3, 12))
  old = logp + rng.normal(0, 0.4, size=(3, 12))
  by_answer = rng.normal(size=(3, 4)), rng.uniform(0.1, 1, size=(3, 4))
  advantage, weight = (np.take_along_axis(x, segments, 1) for x in by_answer)
  weight = weight * (prompt == 0) * (segments > 0)

  def f(logp):
    return loss(logp, old, advantage, weight, kind='gspo', segments=segments)[0]

  expected, grad = gspo_by_loops(logp, old, advantage, weight, segments)
  np.testing.assert_allclose(f(logp), expected, rtol=2e-5, atol=1e-6)
  np.testing.assert_allclose(slope(f, logp), grad, rtol=2e-5, atol=1e-6)


def test_gspo_takes_the_geometric_mean_and_one_clip_an_answer():
  """Ratios 4 and 1/4 make 1; each token feels s / length."""
  log_ratio = np.array([0, np.log(4), -np.log(4)])

  def f(logp):
    settings = dict(kind='gspo', segments=[1, 1, 1])
    return loss(logp, [0] * 3, [1] * 3, [0, 0.5, 0.5], **settings)[0]

  np.testing.assert_allclose(f(log_ratio), -1.0, rtol=1e-6)
  np.testing.assert_allclose(slope(f, log_ratio), [0, -0.5, -0.5], rtol=1e-6)


def test_gspo_truncates_the_importance_of_the_whole_answer():
  """Its geometric mean: rho 8 and 2 make 4, capped at 3; 0.5 and 2 make 1."""
  rho = np.log([8, 2, 0.5, 2])

  def f(logp):
    settings = dict(kind='gspo', segments=[1, 1, 2, 2], tis_cap=3.0)
    return loss(logp, logp, [1] * 4, [0.5] * 4, logp_sampled=[0.0] * 4, **settings)

  value, sums = f(rho)
  np.testing.assert_allclose(value, -(3 + 1), rtol=1e-6)
  np.testing.assert_allclose(sums['tis_raw'], 4 + 4 + 1 + 1, rtol=1e-6)
  np.testing.assert_allclose(sums['tis'], 3 + 3 + 1 + 1, rtol=1e-6)
  slopes = slope(lambda logp: f(logp)[0], rho)
  np.testing.assert_allclose(slopes, [-1.5, -1.5, -0.5, -0.5], rtol=1e-6)


# --- KL -----------------------------------------------------------------------


@pytest.mark.parametrize('coef, value', [(0, 0), (0.04, 0.0019944), (0.4, 0.0199435)])
def test_the_penalty_has_the_right_sign_and_size(coef, value):
  """A7: and a gradient step raises logp where it is below the reference."""

  def f(logp, kind='k3'):
    logp, reference = jnp.reshape(logp, (1, 1)), jnp.full((1, 1), -1.2)
    return losses.kl_penalty(logp, reference, jnp.ones((1, 1)), coef=coef, kind=kind)

  np.testing.assert_allclose(f(-1.5), value, rtol=3e-5)
  for kind in losses.KL_KINDS:
    step = -slope(lambda logp, kind=kind: f(logp, kind), -1.5)
    assert step > 0 if coef else step == 0


def test_the_three_estimates_of_one_token():
  logp, reference = jnp.float32(-1.5), jnp.float32(-1.2)
  values = [losses.kl_estimate(logp, reference, kind=k) for k in losses.KL_KINDS]
  np.testing.assert_allclose(values, [-0.3, 0.045, 0.0498588], rtol=1e-5)


def test_in_expectation_the_estimates_are_the_kl_and_the_penalty_pulls_along_it():
  """Summed over a small vocabulary with its probabilities: exact, no sampling."""
  theta = jnp.array([0.3, -0.4, 1.0, 0.1])
  reference = jax.nn.log_softmax(jnp.array([0.0, 0.5, 0.2, -0.3]))

  def kl(theta):
    logp = jax.nn.log_softmax(theta)
    return jnp.sum(jnp.exp(logp) * (logp - reference))

  def reverse_kl(theta):
    return jnp.sum(jnp.exp(reference) * (reference - jax.nn.log_softmax(theta)))

  chance = jax.nn.softmax(theta)  # of sampling each token, held fixed

  def penalty(theta, kind):
    logp = jax.nn.log_softmax(theta)
    return losses.kl_penalty(logp, reference, chance, coef=1.0, kind=kind)

  for kind in ('k1', 'k3'):
    np.testing.assert_allclose(penalty(theta, kind), kl(theta), rtol=1e-5)
  for kind, target in [('k1', kl), ('k2', kl), ('k3', reverse_kl)]:
    np.testing.assert_allclose(
      jax.grad(penalty)(theta, kind), jax.grad(target)(theta), rtol=1e-4, atol=1e-6
    )


def test_the_penalty_ignores_tokens_of_no_weight():
  def f(logp):
    reference, weight = jnp.array([-1.2, jnp.nan]), jnp.array([0.5, 0.0])
    return losses.kl_penalty(logp, reference, weight, coef=0.4, kind='k3')

  value, grad = jax.value_and_grad(f)(jnp.array([-1.5, -jnp.inf]))
  np.testing.assert_allclose(value, 0.0199435 / 2, rtol=3e-5)
  assert grad[0] < 0 and grad[1] == 0


# --- what is logged -----------------------------------------------------------


def test_logged_sums_count_trained_tokens_whatever_their_weight():
  ratio = np.array([1.0, 1.5, 0.5, 4.0, 0.5])
  advantage, weight = [1, 1, 1, -1, -1], [0.1, 0.2, 0, 5, 0.3]
  _, sums = loss(np.log(ratio), [0] * 5, advantage, weight, kind='dapo', dual_clip=3.0)
  assert sums['tokens'] == 4
  assert sums['clip_frac'] == 2  # the second and the fifth
  assert sums['dual_clip_frac'] == 1
  np.testing.assert_allclose(sums['ratio'], 1 + 1.5 + 4 + 0.5, rtol=1e-6)
  kept = ratio[[0, 1, 3, 4]]
  kl = np.sum(kept - 1 - np.log(kept))
  np.testing.assert_allclose(sums['kl_old'], kl, rtol=1e-5)
  assert sums.keys() == {'tokens', 'clip_frac', 'dual_clip_frac', 'ratio', 'kl_old'}


def test_logged_sums_carry_no_gradient():
  def f(logp):
    settings = dict(kind='cispo', tis_cap=2.0, logp_sampled=[-1.0, -1.5])
    sums = loss(logp, [-1.0, -1.0], [1, -1], [1, 1], **settings)[1]
    return sum(sums.values())

  assert not slope(f, [-1.2, -0.7]).any()


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(kind='ppo'), "loss kind: 'ppo', expected one of grpo, dapo"),
    (dict(kind='grpo', clip_low=-0.1), 'clip_low'),
    (dict(kind='grpo', dual_clip=1.0), 'dual_clip: 1.0'),
    (dict(kind='cispo', dual_clip=3.0), 'dual_clip: 3.0 with cispo'),
    (dict(kind='grpo', tis_cap=2.0), 'tis_cap: 2.0 needs logp_sampled'),
    (dict(kind='grpo', tis_cap=0.0), 'tis_cap: 0.0, expected above 0'),
    (dict(kind='gspo'), 'gspo: needs segments'),
  ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    loss(0, 0, 1, 1, **settings)


def test_an_unknown_kl_is_refused():
  with pytest.raises(ValueError, match="kl kind: 'k4', expected one of k1, k2, k3"):
    losses.kl_estimate(jnp.zeros(1), jnp.zeros(1), kind='k4')


def test_every_loss_has_its_average():
  assert set(losses.KINDS) == set(packing.AVERAGING)


# --- packing, microbatches and devices change nothing -------------------------

VOCABULARY = 12


def toy_groups(shapes, seed=0):
  """Groups of random answers: shapes gives (prompt length, answer lengths)."""
  rng = np.random.default_rng(seed)
  groups = []
  for q, (prompt, lengths) in enumerate(shapes):
    tokens = rng.integers(0, VOCABULARY, prompt).astype(np.int32)
    request = Request(
      draw=q,
      prompt=Prompt(id=f'd/{q}', dataset='d', index=q, tokens=tokens, text=''),
      size=len(lengths),
      sampling=Sampling(max_new_tokens=8),
    )
    completions = tuple(
      Completion(
        draw=q,
        answer=k,
        tokens=rng.integers(0, VOCABULARY, n).astype(np.int32),
        logps=rng.normal(-2.5, 0.5, n).astype(np.float32),
        finish='stop',
        version=q % 2,
      )
      for k, n in enumerate(lengths)
    )
    zeros = np.zeros(len(lengths), np.float32)
    groups.append(
      Group(request=request, completions=completions, verdicts=zeros, rewards=zeros)
    )
  advantages = [rng.normal(size=g.size) for g in groups]
  return groups, advantages


def fill(groups, advantages, averaging, **room):
  weights = packing.answer_weights(
    [g.lengths for g in groups], averaging=averaging, max_new_tokens=8
  )
  return packing.fill(groups, advantages, weights, version=1, **room)


def table_loss(table, arrays, kind):
  """Scores each token from the one before it, which a segment's first has not."""
  before = jnp.roll(arrays['tokens'], 1, axis=1)
  logps = jax.nn.log_softmax(table)[before, arrays['tokens']]
  old = jnp.where(arrays['fresh'], logps, arrays['logps'])
  return losses.policy_loss(
    logps,
    old,
    arrays['advantages'],
    arrays['weights'],
    kind=kind,
    segments=arrays['segments'],
    logp_sampled=arrays['logps'],
    tis_cap=2.0,
    **CLIP,
  )


_step = jax.jit(jax.value_and_grad(table_loss, has_aux=True), static_argnums=2)


def total(batches, kind, place=jnp.asarray):
  """Loss, gradient and logged sums, added up over microbatches."""
  table = jax.random.normal(jax.random.key(1), (VOCABULARY, VOCABULARY))
  outs = [
    _step(table, {name: place(x) for name, x in vars(batch).items()}, kind)
    for batch in batches
  ]
  return jax.tree.map(lambda *x: np.sum([np.asarray(y) for y in x], 0), *outs)


def assert_same(a, b):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b
  )


# 8 answers; no two neighbours fit into a row of 9.
SHAPES = [(3, [4, 6, 2]), (1, [5, 8]), (2, [5, 3, 7])]


@pytest.mark.parametrize('kind', losses.KINDS)
def test_rows_and_microbatches_change_nothing(kind):
  """J3 and A5: 8 answers in 1, 2, 4 or 8 microbatches, packed or one a row."""
  groups, advantages = toy_groups(SHAPES)
  averaging = packing.AVERAGING[kind]
  alone = fill(groups, advantages, averaging, rows=1, row_tokens=9, window=1)
  assert len(alone) == 8
  reference = total(alone, kind)
  assert np.abs(reference[1]).max() > 1e-3
  assert reference[0][1]['tokens'] == 40
  for rows, row_tokens, window in [(2, 9, 4), (4, 9, 1), (8, 9, 8), (3, 20, 4)]:
    room = dict(rows=rows, row_tokens=row_tokens, window=window)
    assert_same(total(fill(groups, advantages, averaging, **room), kind), reference)
  whole = fill(groups, advantages, averaging, rows=1, row_tokens=64, window=3)
  assert len(whole) == 1
  assert_same(total(whole, kind), reference)


@pytest.mark.parametrize('devices', [1, 2, 4])
@pytest.mark.parametrize('kind', ['dapo', 'gspo'])
def test_devices_change_nothing_though_one_gets_empty_rows(kind, devices):
  """J3."""
  groups, advantages = toy_groups(SHAPES)
  room = dict(rows=4, row_tokens=30, window=4)
  batches = fill(groups, advantages, packing.AVERAGING[kind], **room)
  assert len(batches) == 1 and not batches[0].segments[-1].any()
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ('data',))
  by_row = jax.NamedSharding(mesh, jax.P('data'))
  sharded = total(batches, kind, place=lambda x: jax.device_put(x, by_row))
  alone = fill(groups, advantages, packing.AVERAGING[kind], **(room | dict(rows=1)))
  assert_same(sharded, total(alone, kind))


@pytest.mark.parametrize('kind', losses.KINDS)
@given(seed=st.integers(0, 9999), random=st.randoms())
@settings(max_examples=8, deadline=None)
def test_the_order_of_groups_and_answers_changes_nothing(kind, seed, random):
  groups, advantages = toy_groups(SHAPES, seed)
  room = dict(rows=4, row_tokens=20, window=3)
  order = list(range(len(groups)))
  random.shuffle(order)
  shuffled = [groups[q] for q in order], [advantages[q] for q in order]
  averaging = packing.AVERAGING[kind]
  assert_same(
    total(fill(*shuffled, averaging, **room), kind),
    total(fill(groups, advantages, averaging, **room), kind),
  )


@pytest.mark.parametrize('kind', ['dapo', 'gspo', 'cispo'])
def test_answers_without_tokens_hide_nothing_of_their_neighbours(kind):
  """J1: answers of 3, 0 and 2 tokens, packed together and alone."""
  groups, advantages = toy_groups([(1, [3, 0, 2])])
  averaging = packing.AVERAGING[kind]
  packed = fill(groups, advantages, averaging, rows=1, row_tokens=16, window=3)
  alone = fill(groups, advantages, averaging, rows=1, row_tokens=4, window=1)
  assert (len(packed), len(alone)) == (1, 2)
  packed, alone = total(packed, kind), total(alone, kind)
  assert packed[0][1]['tokens'] == 5
  assert_same(packed, alone)


@pytest.mark.parametrize('averaging', ['sequence', 'token', 'constant'])
def test_slopes_are_those_of_the_formula_written_as_loops(averaging):
  """J1: nothing of a neighbour in a row leaks in. REINFORCE, answer by answer."""
  groups, advantages = toy_groups(SHAPES)
  weights = packing.answer_weights(
    [g.lengths for g in groups], averaging=averaging, max_new_tokens=8
  )
  table = np.asarray(jax.random.normal(jax.random.key(1), (VOCABULARY, VOCABULARY)))
  chance = np.exp(table) / np.exp(table).sum(1, keepdims=True)
  expected = np.zeros_like(table)
  for group, advantage, weight in zip(groups, advantages, weights, strict=True):
    for completion, a, w in zip(group.completions, advantage, weight, strict=True):
      before = group.request.prompt.tokens[-1]
      for token in completion.tokens:
        score = -chance[before]
        score = score + (np.arange(VOCABULARY) == token)
        expected[before] -= w * a * score
        before = token
  (batch,) = fill(groups, advantages, averaging, rows=3, row_tokens=25, window=4)

  def f(table):
    before = jnp.roll(batch.tokens, 1, axis=1)
    logp = jax.nn.log_softmax(table)[before, batch.tokens]
    return losses.policy_loss(
      logp, logp, batch.advantages, batch.weights, kind='grpo', **CLIP
    )[0]

  np.testing.assert_allclose(slope(f, table), expected, rtol=1e-4, atol=1e-6)
