"""What n graded samples of a prompt say: pass@k, majority voting, intervals."""

import collections
from collections.abc import Hashable, Sequence
import math


def pass_at_k(n: int, c: int, k: int) -> float:
  """The chance that at least one of k answers is right, without bias.

  Args:
    n: samples drawn for the prompt, at least 1.
    c: how many of them are right.
    k: answers allowed, 1 to n.

  Returns:
    1 - C(n - c, k) / C(n, k), as a product that neither overflows nor cancels
    for any n. pass@1 is the mean accuracy c / n.

  Raises:
    ValueError: c is not in 0 to n, or k not in 1 to n.

  Source: arXiv 2107.03374, section 2.1.
  """
  _check_counts(n, c)
  if not 1 <= k <= n:
    raise ValueError(f'pass@k needs 1 <= k <= n: got k={k} for n={n} samples')
  if n - c < k:
    return 1.0
  # C(n-c, k) / C(n, k) is the product of (1 - k/i) over i = n-c+1 .. n.
  miss = math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))
  return 1.0 - miss


def maj_at_k(answers: Sequence[Hashable], rewards: Sequence[float]) -> float:
  """The reward of the commonest answer; of equally common ones, the first seen.

  Args:
    answers: [k] what each sample answered, in a form where equal means equal.
      `None` is no answer and has no vote.
    rewards: [k] the verdict of each sample.

  Returns:
    The reward of the first sample that gave the winning answer; 0 if none voted.
  """
  if len(answers) != len(rewards):
    raise ValueError(f'maj@k: {len(answers)} answers but {len(rewards)} rewards')
  votes = collections.Counter(a for a in answers if a is not None)
  if not votes:
    return 0.0
  winner = votes.most_common(1)[0][0]
  return float(rewards[list(answers).index(winner)])


def wilson_interval(c: int, n: int, z: float = 1.96) -> tuple[float, float]:
  """Wilson's score interval for c right out of n; z = 1.96 is 95 %.

  It stays in [0, 1] and keeps a width where c is 0 or n, unlike c/n ± z·std.

  Raises:
    ValueError: n is below 1, or c not in 0 to n.

  Source: Wilson 1927, without continuity correction.
  """
  _check_counts(n, c)
  rate = c / n
  shrink = 1.0 + z * z / n
  centre = (rate + z * z / (2 * n)) / shrink
  half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / shrink
  # At the ends the exact bound is 0 or 1; rounding would miss it by 1e-17.
  low = 0.0 if c == 0 else centre - half
  high = 1.0 if c == n else centre + half
  return low, high


def _check_counts(n: int, c: int) -> None:
  if n < 1:
    raise ValueError(f'n={n} samples, expected at least 1')
  if not 0 <= c <= n:
    raise ValueError(f'c={c} right answers, expected 0 to n={n}')
