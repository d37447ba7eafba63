"""Rope settings of a config.json: every spelling is read, and none half understood."""

import math

from hf_configs import LLAMA3, LLAMA_1B, LLAMA_32, YARN, YARN_4, read, refusal
import pytest


def test_both_spellings_are_one_model():
  """I3: also with `type` for `rope_type`, whole numbers, and an object of no scaling."""
  settings = LLAMA_1B['rope_scaling']
  expected = read('llama')
  assert expected.rope_scaling == LLAMA_32
  assert expected.rope_theta == 500_000
  inside = settings | {'rope_theta': 500000}
  old = {'type' if k == 'rope_type' else k: v for k, v in settings.items()}
  for changes in (
    dict(rope_scaling=..., rope_theta=..., rope_parameters=inside),
    dict(rope_scaling=None, rope_theta=..., rope_parameters=inside),
    dict(rope_scaling=..., rope_parameters=settings),
    dict(rope_parameters=inside),
    dict(rope_scaling=inside, rope_theta=...),
    dict(rope_scaling=old),
    dict(rope_scaling=settings | {'type': 'llama3', 'factor': 32}),
    dict(original_max_position_embeddings=8192),
    dict(
      rope_scaling={
        k: v for k, v in settings.items() if k != 'original_max_position_embeddings'
      },
      original_max_position_embeddings=8192,
    ),
  ):
    assert read('llama', **changes) == expected, changes


def test_no_scaling_asked_for_is_the_plain_table():
  """I3."""
  expected = read('qwen2')
  assert (expected.rope_theta, expected.rope_scaling) == (1e6, None)
  theta = {'rope_theta': 1000000}
  for changes in (
    dict(rope_scaling=None),
    dict(rope_scaling={}),
    dict(rope_scaling={'type': 'default'}),
    dict(rope_parameters=theta | {'rope_type': 'default'}),
    dict(rope_theta=..., rope_parameters=theta),
    dict(rope_parameters={'rope_type': 'default', 'partial_rotary_factor': 1.0}),
  ):
    assert read('qwen2', **changes) == expected, changes
  assert read('qwen2', rope_theta=...).rope_theta == 10_000.0


def test_yarn_is_read_as_transformers_reads_it():
  """Left out, the trained length is max_position_embeddings and the betas 32 and 1."""
  settings = {'type': 'yarn', 'factor': 4.0}
  config = read('qwen2', rope_scaling=settings)
  assert config.rope_scaling == YARN_4
  spelt_out = settings | dict(
    original_max_position_embeddings=32768,
    beta_fast=None,
    beta_slow=1,
    attention_factor=None,
    truncate=True,
  )
  assert read('qwen2', rope_scaling=spelt_out) == config
  scales = dict(mscale=1.0, mscale_all_dim=0.5)
  with_scales = read('qwen2', rope_scaling=settings | scales).rope_scaling
  quotient = (1 + 0.1 * math.log(4)) / (1 + 0.05 * math.log(4))
  assert with_scales.attention_factor == pytest.approx(quotient, rel=1e-12)
  one = read('qwen2', rope_scaling=settings | dict(mscale=0.7))
  assert one.rope_scaling == YARN_4  # it takes both


@pytest.mark.parametrize(
  'changes, words',
  [
    (dict(rope_scaling={'type': 'dynamic', 'factor': 2.0}), ['type', "'dynamic'"]),
    (dict(rope_scaling={'rope_type': 'longrope'}), ['rope_type', "'longrope'"]),
    (dict(rope_scaling={'rope_type': 'unheard-of'}), ["'unheard-of'", 'yarn']),
    (dict(rope_scaling={'rope_type': None}), ['rope_type: None']),
    (dict(rope_scaling={'rope_type': ['yarn']}), ["rope_type: ['yarn']"]),
    (dict(rope_scaling={'type': 'yarn', 'rope_type': 'linear'}), ['yarn', 'linear']),
    (dict(rope_scaling='yarn'), ["rope_scaling: 'yarn'", 'object']),
    (dict(rope_scaling=[]), ['rope_scaling: []', 'object']),
    (dict(rope_scaling=False), ['rope_scaling: False', 'object']),
    (dict(rope_scaling={'factor': 4.0}), ['factor: 4.0', 'no keys', 'default']),
    (dict(rope_scaling={'type': 'linear'}), ['linear', 'expected factor']),
    (dict(rope_scaling={'type': 'yarn'}), ['yarn', 'expected factor']),
    (
      dict(rope_parameters={'rope_type': 'llama3', 'rope_theta': 1e6, 'factor': 8}),
      ['rope_parameters', 'llama3', 'expected original_max_position_embeddings'],
    ),
    (
      dict(
        rope_parameters={k: v for k, v in LLAMA3.items() if k != 'high_freq_factor'}
      ),
      ['rope_parameters', 'expected high_freq_factor'],
    ),
    (
      dict(rope_scaling=LLAMA3 | {'rope_theta': 1e6, 'high_freq_factor': 1.0}),
      ['high_freq_factor: 1.0', 'low_freq_factor=1.0'],
    ),
    (dict(rope_scaling={'type': 'linear', 'factor': '2'}), ["factor: '2'", 'number']),
    (dict(rope_scaling={'type': 'linear', 'factor': True}), ['factor: True']),
    (dict(rope_scaling={'type': 'linear', 'factor': None}), ['factor: None']),
    (dict(rope_scaling={'type': 'linear', 'factor': 0.5}), ['factor: 0.5', 'least 1']),
    (dict(rope_scaling={'type': 'linear', 'factor': math.nan}), ['factor: nan']),
    (dict(rope_scaling={'type': 'linear', 'factor': math.inf}), ['factor: inf']),
    (
      dict(rope_scaling={'type': 'linear', 'factor': 2.0, 'mscale': 1.0}),
      ['rope_scaling.mscale: 1.0', 'expected factor', 'linear'],
    ),
    (dict(rope_scaling=YARN | {'rope_theta': 1e6, 'llama_4': 1}), ['llama_4: 1']),
    (dict(rope_scaling=YARN | {'rope_theta': 1e6, 'truncate': 1}), ['truncate: 1']),
    (
      dict(rope_scaling=YARN | {'rope_theta': 1e6, 'beta_fast': 0.1}),
      ['beta_fast: 0.1', 'beta_slow=0.25'],
    ),
    (
      dict(rope_scaling=YARN | {'rope_theta': 1e6, 'attention_factor': -1}),
      ['attention_factor: -1'],
    ),
    (
      dict(
        rope_scaling={
          'type': 'yarn',
          'factor': 4,
          'original_max_position_embeddings': 4096.0,
        }
      ),
      ['original_max_position_embeddings: 4096.0', 'whole number'],
    ),
    (
      dict(rope_parameters={'full_attention': {'rope_type': 'default'}}),
      ['rope_parameters.full_attention'],
    ),
    (
      dict(rope_parameters={'partial_rotary_factor': 0.5}),
      ['rope_parameters.partial_rotary_factor: 0.5', 'expected 1'],
    ),
    (dict(rope_theta=-1), ['rope_theta: -1']),
    (dict(rope_theta=1.0), ['rope_theta: 1.0']),
    (dict(rope_theta='1e6'), ["rope_theta: '1e6'"]),
    (dict(rope_theta=None), ['rope_theta: None']),
    # Versions of transformers differ in what they take of these.
    (
      dict(rope_parameters={'rope_theta': 500.0}),
      ['rope_theta: 1000000.0', 'rope_parameters.rope_theta: 500.0', 'the same'],
    ),
    (
      dict(
        rope_parameters={'rope_theta': 1e6},
        rope_scaling={'type': 'linear', 'factor': 2},
      ),
      ['rope_scaling', 'linear', 'rope_parameters', 'the same'],
    ),
    (
      dict(
        rope_scaling={
          'type': 'yarn',
          'factor': 4,
          'original_max_position_embeddings': 4096,
        },
        original_max_position_embeddings=8192,
      ),
      ['original_max_position_embeddings: 4096', '8192', 'the same'],
    ),
  ],
)
def test_rope_that_is_not_whole_or_not_known_is_refused(changes, words):
  """I3: refused, not ignored. The line names key and value."""
  said = refusal('qwen2', **changes)
  assert all(word in said for word in words), said
