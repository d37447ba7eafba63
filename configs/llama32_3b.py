"""DAPO with SAGC: Llama-3.2-3B-Instruct on MATH (`:math`) or GSM8K (`:gsm8k`).

    python -m jaxrl_sched.train --config=configs/llama32_3b.py:math \\
      --workdir=gs://BUCKET/RUN

What it needs on each chip, and what programs can have there, in GiB:

    python -m jaxrl_sched.preflight --config=configs/llama32_3b.py:math --topology=...

    v5e:4x4   13.7 of 15.75
    v5p:2x2x1 54.2 of 95.74
      --config.mesh.fsdp=4 --config.learner.rows=16 --config.sampler.model=1
      --config.sampler.slots=256
    v6e:4x4   20.1 of 31.25
      --config.sampler.slots=128

Source: arXiv 2606.02218 for group sizes, 2503.14476 for the loss; data: see
        `pods.py`. Nothing here was measured on a TPU.
"""

from ml_collections import ConfigDict

HF_CONFIG = dict(
  architectures=['LlamaForCausalLM'],
  vocab_size=128256,
  hidden_size=3072,
  intermediate_size=8192,
  num_hidden_layers=28,
  num_attention_heads=24,
  num_key_value_heads=8,
  head_dim=128,
  max_position_embeddings=131072,
  rms_norm_eps=1e-5,
  rope_theta=5e5,
  rope_scaling=dict(
    rope_type='llama3',
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
  ),
  tie_word_embeddings=True,
)


def get_config(variant: str = 'math') -> ConfigDict:
  import pods  # beside this file, found while a config is loaded

  model = dict(path='meta-llama/Llama-3.2-3B-Instruct', hf_config=HF_CONFIG)
  c = pods.sagc(pods.config(variant, model))
  c.prompts.date = '2024-07-26'  # its chat template would write today's
  c.mesh = dict(fsdp=16)
  c.sampler = dict(slots=64, chunk=32, prefill_rows=8, model=4)
  c.learner = dict(rows=16, row_tokens=4096, remat=True)
  return c
