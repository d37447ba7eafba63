"""The frequencies of rotary embedding: plain, or stretched to longer contexts.

They are computed once, on the host, in float32 and in the order of transformers'
operations: at position 100,000 the last bit of a frequency is seen in the angle.
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
  """Position interpolation (arXiv:2306.15595): all positions are divided."""

  factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3:
  """Llama 3.1's: only frequencies of few turns in the original context are divided."""

  factor: float
  low_freq_factor: float  # turns in the original context, below which all is divided
  high_freq_factor: float  # and above which nothing is
  original_max_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
  """YaRN (arXiv:2309.00071): a ramp over the head's width, and sharper attention."""

  factor: float
  original_max_positions: int
  attention_factor: float  # of cos and sin, so squared in the scores
  beta_fast: float = 32.0  # turns in the original context at which the ramp begins
  beta_slow: float = 1.0  # and at which it ends
  truncate: bool = True  # the ramp begins and ends at whole numbers


Scaling = Linear | Llama3 | Yarn


def yarn_attention_factor(
  factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
  """0.1 ln(factor) + 1; with both scales the quotient of two such (DeepSeek)."""

  def sharper(scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

  if mscale and mscale_all_dim:
    return sharper(mscale) / sharper(mscale_all_dim)
  return sharper(1.0)


def frequencies(
  theta: float, head_dim: int, scaling: Scaling | None
) -> tuple[np.ndarray, float]:
  """Radians a position, [H / 2] float32, and the factor of cos and sin."""
  exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  plain = np.float32(1) / np.float32(theta) ** exponent
  match scaling:
    case None:
      return plain, 1.0
    case Linear():
      return plain / np.float32(scaling.factor), 1.0
    case Llama3():
      low, high = scaling.low_freq_factor, scaling.high_freq_factor
      turns = scaling.original_max_positions / (2 * math.pi / plain)
      kept = np.clip((turns - low) / (high - low), 0, 1)
      attention_factor = 1.0
    case Yarn():
      kept = 1 - _yarn_ramp(theta, head_dim, scaling)
      attention_factor = scaling.attention_factor
  # kept is 1 where a frequency stays, 0 where it is divided.
  mixed = (1 - kept) * plain / np.float32(scaling.factor) + kept * plain
  return mixed.astype(np.float32), attention_factor


def _yarn_ramp(theta: float, head_dim: int, scaling: Yarn) -> np.ndarray:
  """0 up to the frequency of beta_fast turns, 1 from that of beta_slow turns on."""

  def index(turns: float) -> float:  # of the frequency that makes so many
    length = scaling.original_max_positions / (turns * 2 * math.pi)
    return head_dim * math.log(length) / (2 * math.log(theta))

  first, last = index(scaling.beta_fast), index(scaling.beta_slow)
  if scaling.truncate:
    first, last = math.floor(first), math.ceil(last)
  # Up to the head's width, not half of it: so it is in the models that were trained.
  first, last = max(first, 0), min(last, head_dim - 1)
  if first == last:
    last += 0.001
  place = np.arange(head_dim // 2, dtype=np.float32)
  return np.clip((place - first) / (last - first), 0, 1)
