"""Group-relative advantages: how much better an answer is than its own group.

One call sees one group, so groups can never be mixed.
"""

import numpy as np

from jaxrl_sched.types import Lesson

NO_SPREAD = 1e-6  # rewards this close are the same, as a share of the largest of them


def group_advantages(
  rewards: np.ndarray,  # [G]
  *,
  divide_by_std: bool = True,
  eps: float = 1e-6,
) -> np.ndarray:  # [G] float32
  """Rewards minus their mean, and over their population std if asked.

  GRPO divides (arXiv 2402.03300), Dr. GRPO does not (arXiv 2503.20783). The std
  is that of the population, sqrt(mean((r - mean)^2)), and `eps` is added to it:
  rewards 1, 0, 0, 0 give 1.7320508 and three times -0.5773503, or 0.75 and -0.25.

  A group without spread gets exact zeros. That is decided on the rewards: their
  std is often a tiny number which is not 0, and would be blown up to about 1.
  """
  rewards = np.asarray(rewards, np.float64)
  if rewards.ndim != 1 or rewards.size == 0:
    raise ValueError(f'rewards: expected one group [G], got shape {rewards.shape}')
  if not np.isfinite(rewards).all():
    raise ValueError(f'rewards: expected finite numbers, got {rewards.tolist()}')
  # Below `eps` a reward is noise, and so is a share of it.
  if np.ptp(rewards) <= NO_SPREAD * max(np.abs(rewards).max(), eps):
    return np.zeros(rewards.shape, np.float32)
  centred = rewards - rewards.mean()
  if divide_by_std:
    centred /= rewards.std() + eps
  return centred.astype(np.float32)


def nothing_to_learn(
  lesson: Lesson, *, overlong_filter: bool, has_penalty: bool
) -> str | None:
  """Why an update from this lesson has no gradient, or None where it has one.

  Such an update would be one of momentum and weight decay alone.

  Args:
    overlong_filter: truncated answers are left out.
    has_penalty: a KL penalty, whose gradient needs no advantage.
  """
  if not lesson.groups:
    return 'nothing to train on'
  kept = [
    (keep > 0) & (group.lengths > 0)
    for group, keep in zip(lesson.groups, lesson.keep, strict=True)
  ]
  if not any(k.any() for k in kept):
    return 'all answers pruned or empty'
  if overlong_filter:
    kept = [k & ~g.truncated for k, g in zip(kept, lesson.groups, strict=True)]
  if not any(k.any() for k in kept):
    return 'all answers left truncated'
  if has_penalty or any(
    np.any(a[k]) for a, k in zip(lesson.advantages, kept, strict=True)
  ):
    return None
  return 'advantages of all answers left 0'
