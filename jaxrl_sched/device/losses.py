"""Policy losses: pure functions of arrays. No model, config or randomness here.

Every loss is a plain sum over tokens of weight x term. What is averaged over what
is in the weights (`host/packing.py`), so microbatches, rows and devices add up.
B rows of a packed batch, T tokens a row. A token is trained if its weight is
above 0; whatever stands in the other places, NaN included, has no say.
"""

import jax
import jax.numpy as jnp

KINDS = ('grpo', 'dapo', 'dr_grpo', 'gspo', 'cispo')
KL_KINDS = ('k1', 'k2', 'k3')

# exp of more is of no use to anybody: beyond it terms are flat instead of inf.
MAX_LOG_RATIO = 20.0

stop_gradient = jax.lax.stop_gradient


def policy_loss(
  logp: jax.Array,  # [B, T] under the policy being trained
  logp_old: jax.Array,  # [B, T] under the policy that the ratio starts from
  advantage: jax.Array,  # [B, T] constant along each answer
  weight: jax.Array,  # [B, T] zero on prompts and padding
  *,
  kind: str,
  clip_low: float,
  clip_high: float,
  dual_clip: float | None = None,
  tis_cap: float | None = None,
  logp_sampled: jax.Array | None = None,  # [B, T] as the sampler reported them
  segments: jax.Array | None = None,  # [B, T] int, tells answers of a row apart
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of a packed batch: minus the sum of weight x gain.

  With r = exp(logp - logp_old), A the advantage, clip(r) = clip(r, 1 - clip_low,
  1 + clip_high) and sg for no gradient, the gain of a token is

    grpo, dapo, dr_grpo   min(r A, clip(r) A); they differ in weights and range
                          (arXiv 2402.03300, 2503.14476, 2503.20783)
    gspo                  the same with s, the geometric mean of r over the answer's
                          trained tokens; each of them feels the gradient
                          (arXiv 2507.18071)
    cispo                 sg(clip(r)) A logp: clipped, yet alive for every token
                          (arXiv 2506.13585)

  No gradient flows into `logp_old`: pass `logp` itself for answers of the current
  policy (r = 1, gradient alive). All log-probs must speak of one distribution: the
  one sampled from, with its temperature and truncation.

  Args:
    dual_clip: c > 1; where A < 0 the gain is at least c A (arXiv 1912.09729).
    tis_cap: truncated importance sampling. The whole importance of a token against
      the policy that sampled it, rho = exp(logp - logp_sampled), never exceeds
      this: the gain is multiplied by sg(min(rho, cap) / r). That is min(rho, cap)
      where r is 1, and the truncation of r where logp_old is logp_sampled. gspo
      takes rho, like r, as its geometric mean over the answer; for cispo clip(r)
      stands in the place of r, in rho too.
    logp_sampled: needed by `tis_cap`; without a cap it is only reported.
    segments: needed by gspo.

  Returns:
    The loss and plain sums over the trained tokens, to divide by 'tokens' when
    logged: 'tokens', 'clip_frac' (1 where the clip acts), 'dual_clip_frac',
    'ratio', 'kl_old' (k3 of KL(old || new)), with `logp_sampled` 'tis_raw' (rho)
    and with `tis_cap` 'tis' (rho as capped).
  """
  check_settings(kind, clip_low, clip_high, dual_clip, tis_cap)
  if tis_cap is not None and logp_sampled is None:
    raise ValueError(f'tis_cap: {tis_cap} needs logp_sampled, which is None')
  if kind == 'gspo' and segments is None:
    raise ValueError('gspo: needs segments, which is None')
  for x in (logp_sampled, segments):
    assert x is None or x.shape == logp.shape
  assert logp.shape == logp_old.shape == advantage.shape == weight.shape
  trained = weight > 0

  def masked(x: jax.Array) -> jax.Array:  # before exp, or 0 * inf would make NaN
    return jnp.where(trained, x, 0.0)

  logp, logp_old = masked(logp), masked(stop_gradient(logp_old))
  advantage = masked(advantage)
  log_ratio = logp - logp_old
  if kind == 'gspo':
    log_ratio = _answer_mean(log_ratio, trained, segments)
  ratio = _exp(log_ratio)
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  past = jnp.zeros_like(trained)  # where dual clip acts

  if kind == 'cispo':
    acts = ratio != clipped
    importance = stop_gradient(clipped)
    gain = importance * advantage * logp
  else:
    # Spelled out instead of min(r A, clip(r) A), whose gradient is halved at ties.
    too_high = (advantage > 0) & (ratio > 1 + clip_high)
    acts = too_high | ((advantage < 0) & (ratio < 1 - clip_low))
    importance = stop_gradient(ratio)
    gain = jnp.where(acts, clipped, ratio) * advantage
    if dual_clip is not None:
      past = (advantage < 0) & (ratio > dual_clip)
      gain = jnp.where(past, dual_clip * advantage, gain)

  sums = {
    'tokens': trained,
    'clip_frac': acts,
    'dual_clip_frac': past,
    'ratio': ratio,
    'kl_old': kl_estimate(logp_old, logp, kind='k3'),
  }
  if logp_sampled is not None:
    # From the policy that sampled to the one that the ratio starts from.
    log_drift = logp_old - masked(stop_gradient(logp_sampled))
    if kind == 'gspo':
      log_drift = _answer_mean(log_drift, trained, segments)
    rho = importance * _exp(log_drift)
    sums['tis_raw'] = rho
    if tis_cap is not None:
      sums['tis'] = jnp.minimum(rho, tis_cap)
      gain = gain * sums['tis'] / importance
  sums = {
    name: stop_gradient(jnp.sum(trained * x, dtype=jnp.float32))
    for name, x in sums.items()
  }
  return -jnp.sum(weight * gain), sums


def kl_estimate(
  logp: jax.Array,  # under the policy that sampled the tokens
  logp_ref: jax.Array,
  *,
  kind: str,
) -> jax.Array:
  """Estimates KL(policy || reference) a token, d = logp_ref - logp.

  k1 = -d is unbiased and noisy; k2 = d^2 / 2 is biased; k3 = exp(d) - d - 1 is
  unbiased and never negative. See `kl_penalty` for their gradients.
  """
  difference = logp_ref - logp
  if kind == 'k1':
    return -difference
  if kind == 'k2':
    return jnp.square(difference) / 2
  if kind == 'k3':
    difference = jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(difference) - difference
  raise ValueError(f'kl kind: {kind!r}, expected one of {", ".join(KL_KINDS)}')


def kl_penalty(
  logp: jax.Array,  # [B, T] under the policy being trained
  logp_ref: jax.Array,  # [B, T] under the reference
  weight: jax.Array,  # [B, T]
  *,
  coef: float,
  kind: str,
) -> jax.Array:
  """What is added to the loss: coef x the sum of weight x the estimate.

  k2 and k3 are differentiated as they stand: k2 pulls along the gradient of
  KL(policy || reference), k3 along that of KL(reference || policy), as in GRPO.
  k1 so treated would pull every sampled token down, alike, and on average do
  nothing; its value is k1 and its gradient that of k2.
  """
  assert logp.shape == logp_ref.shape == weight.shape
  trained = weight > 0
  logp = jnp.where(trained, logp, 0.0)
  logp_ref = jnp.where(trained, stop_gradient(logp_ref), 0.0)
  estimate = kl_estimate(logp, logp_ref, kind=kind)
  if kind == 'k1':
    pull = kl_estimate(logp, logp_ref, kind='k2')
    estimate = stop_gradient(estimate - pull) + pull
  return coef * jnp.sum(weight * estimate)


def _exp(x: jax.Array) -> jax.Array:
  return jnp.exp(jnp.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _answer_mean(
  x: jax.Array,  # [B, T], 0 where not trained
  trained: jax.Array,  # [B, T] bool
  segments: jax.Array,  # [B, T] int
) -> jax.Array:  # [B, T]
  """The mean of x over the trained tokens of each segment, at every token of it."""

  def row(x, trained, segments):
    count = x.shape[0] + 1  # a row of T tokens has at most T segments, and padding
    total = jax.ops.segment_sum(x, segments, num_segments=count)
    tokens = jax.ops.segment_sum(trained.astype(x.dtype), segments, num_segments=count)
    return (total / jnp.maximum(tokens, 1))[segments]

  return jax.vmap(row)(x, trained, segments)


def check_settings(
  kind: str,
  clip_low: float,
  clip_high: float,
  dual_clip: float | None,
  tis_cap: float | None,
) -> None:
  """Raises ValueError for settings that no loss can have."""
  if kind not in KINDS:
    raise ValueError(f'loss kind: {kind!r}, expected one of {", ".join(KINDS)}')
  if not (0 <= clip_low < 1 and clip_high >= 0):  # ratios are above 0
    raise ValueError(
      f'clip_low and clip_high: {clip_low} and {clip_high}, expected 0 to less than 1, '
      'and at least 0'
    )
  if dual_clip is not None and (kind == 'cispo' or not dual_clip > 1):
    raise ValueError(
      f'dual_clip: {dual_clip} with {kind}, expected above 1, and None with cispo'
    )
  if tis_cap is not None and not tis_cap > 0:
    raise ValueError(f'tis_cap: {tis_cap}, expected above 0')
