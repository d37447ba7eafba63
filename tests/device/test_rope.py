"""Rotary frequencies and their scaling against transformers and against paper."""

import dataclasses
import math

from hf_configs import LLAMA_32, YARN_4, read, sized, written
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxrl_sched.device import hf_config, model, rope

TABLES = {
  'plain': (10_000.0, 128, None),
  'linear': (10_000.0, 128, rope.Linear(factor=2.5)),
  'Llama-3.2': (500_000.0, 64, LLAMA_32),
  'Llama-3.1': (500_000.0, 128, dataclasses.replace(LLAMA_32, factor=8.0)),
  'Qwen2.5': (1_000_000.0, 128, YARN_4),
  'exact ramp': (1_000_000.0, 128, dataclasses.replace(YARN_4, truncate=False)),
  # Its ramp ends past the last frequency.
  'long ramp': (
    10_000.0,
    64,
    dataclasses.replace(YARN_4, original_max_positions=131_072),
  ),
  'steep ramp': (
    10_000.0,
    64,
    dataclasses.replace(YARN_4, beta_slow=16.0, beta_fast=16.0, truncate=False),
  ),
}


def assert_close(a, b, atol: float) -> None:
  np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol)


def their_table(raw: dict) -> tuple[np.ndarray, float]:
  config = transformers.LlamaConfig.from_dict(raw)
  kind = config.rope_parameters['rope_type']
  if kind == 'default':
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    frequency, factor = rotary.compute_default_rope_parameters(config)
  else:
    frequency, factor = ROPE_INIT_FUNCTIONS[kind](config)
  return frequency.numpy(), factor


@pytest.mark.parametrize('name', TABLES)
@pytest.mark.parametrize('spelling', ['both', 'rope_scaling', 'rope_parameters'])
def test_frequencies_are_those_of_transformers(name, spelling):
  """I3: at the settings of public models, through each spelling that we write."""
  config = sized(*TABLES[name])
  raw = written(config)
  if spelling == 'rope_scaling':  # all that transformers 4 looks at
    del raw['rope_parameters']
  elif spelling == 'rope_parameters':
    del raw['rope_scaling'], raw['rope_theta']
  expected, factor = their_table(raw)
  ours, our_factor = rope.frequencies(*TABLES[name])
  assert ours.dtype == np.float32
  np.testing.assert_allclose(ours, expected, rtol=3e-7)
  assert our_factor == pytest.approx(factor, rel=1e-12)
  assert hf_config.read(raw, known_tokens=None, dtype='float32') == config


@pytest.mark.parametrize('name', TABLES)
def test_cos_and_sin_are_those_of_transformers_far_out(name):
  """At position 131,071 an angle moves 0.008 with the last bit of its frequency."""
  config = sized(*TABLES[name])
  positions = np.array([[0, 1, 16, 4095, 131_071]])
  rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
  made = rotary(transformers.LlamaConfig.from_dict(written(config)))
  expected = made(torch.zeros(1), torch.tensor(positions))
  half = config.head_dim // 2
  for ours, table in zip(
    model.rotation(jnp.asarray(positions), config), expected, strict=True
  ):
    assert_close(ours[:, :4], table[:, :4, :half], atol=1e-3)
    assert_close(ours[:, 4], table[:, 4, :half], atol=0.02)


def test_llama3_keeps_fast_frequencies_and_divides_slow_ones():
  """More than 4 turns in 8,192 positions: kept; less than 1: divided by 32."""
  plain, _ = rope.frequencies(500_000.0, 64, None)
  scaled, factor = rope.frequencies(500_000.0, 64, LLAMA_32)
  turns = 8192 * plain.astype(float) / (2 * math.pi)
  fast, slow = turns > 4.01, turns < 0.99
  np.testing.assert_array_equal(scaled[fast], plain[fast])
  np.testing.assert_array_equal(scaled[slow], plain[slow] / np.float32(32))
  between = ~fast & ~slow
  assert fast.any() and slow.any() and between.any()
  assert (scaled < plain)[between].all() and (scaled > plain / 32)[between].all()
  assert factor == 1.0


@pytest.mark.parametrize(
  'factor, expected', [(2.0, 1.0693147), (4.0, 1.1386294), (8.0, 1.2079442), (1.0, 1.0)]
)
def test_yarn_sharpens_by_a_tenth_of_the_logarithm(factor, expected):
  """I3: 0.1 ln f + 1, unless the file says otherwise; on cos and sin alike."""
  settings = {'type': 'yarn', 'factor': factor}
  config = read('qwen2', rope_scaling=settings)
  assert config.rope_scaling.attention_factor == pytest.approx(expected, abs=5e-8)
  cos, sin = model.rotation(jnp.array([5]), config)
  assert_close(jnp.hypot(cos, sin), np.full((1, 32), expected), atol=1e-6)
  told = read('qwen2', rope_scaling=settings | {'attention_factor': 0.7})
  assert told.rope_scaling.attention_factor == 0.7


@pytest.mark.parametrize(
  'scaling', [{'factor': 2.0}, rope.Linear, 'linear'], ids=['dict', 'class', 'name']
)
def test_a_scaling_that_is_none_is_refused(scaling):
  with pytest.raises(ValueError, match='model.rope_scaling: .*expected one of'):
    sized(500.0, 8, scaling)
