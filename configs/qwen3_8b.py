"""DAPO with DPPO: Qwen3-8B on MATH (`:math`) or GSM8K (`:gsm8k`).

    python -m jaxrl_sched.train --config=configs/qwen3_8b.py:math \\
      --workdir=gs://BUCKET/RUN

What it needs on each chip, and what programs can have there, in GiB:

    python -m jaxrl_sched.preflight --config=configs/qwen3_8b.py:math --topology=...

    v5e:4x8   13.9 of 15.75
      --config.mesh.fsdp=32 --config.learner.rows=32 --config.sampler.slots=32
    v5p:2x2x2 60.5 of 95.74
      --config.mesh.fsdp=8 --config.learner.rows=16 --config.sampler.model=1
      --config.sampler.slots=256
    v6e:4x4   24.2 of 31.25
      --config.sampler.slots=128

Source: arXiv 2603.04135 for pruning, 2503.14476 for the loss; data: see
        `pods.py`. Nothing here was measured on a TPU.
"""

from ml_collections import ConfigDict

HF_CONFIG = dict(
  architectures=['Qwen3ForCausalLM'],
  vocab_size=151936,
  hidden_size=4096,
  intermediate_size=12288,
  num_hidden_layers=36,
  num_attention_heads=32,
  num_key_value_heads=8,
  head_dim=128,
  max_position_embeddings=40960,
  rms_norm_eps=1e-6,
  rope_theta=1e6,
  tie_word_embeddings=False,
  use_sliding_window=False,
)


def get_config(variant: str = 'math') -> ConfigDict:
  import pods  # beside this file, found while a config is loaded

  model = dict(path='Qwen/Qwen3-8B', hf_config=HF_CONFIG)
  c = pods.dppo(pods.config(variant, model))
  c.prompts.template_options = dict(enable_thinking=False)
  c.mesh = dict(fsdp=16)
  c.sampler = dict(slots=64, chunk=32, prefill_rows=8, model=4)
  c.learner = dict(rows=16, row_tokens=4096, remat=True)
  return c
