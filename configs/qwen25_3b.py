"""DAPO with SAGC: Qwen2.5-3B-Instruct on MATH (`:math`) or GSM8K (`:gsm8k`).

    python -m jaxrl_sched.train --config=configs/qwen25_3b.py:math \\
      --workdir=gs://BUCKET/RUN

What it needs on each chip, and what programs can have there, in GiB:

    python -m jaxrl_sched.preflight --config=configs/qwen25_3b.py:math --topology=...

    v5e:4x4   10.8 of 15.75
    v5p:2x2x1 36.0 of 95.74
      --config.mesh.fsdp=4 --config.learner.rows=16 --config.sampler.model=1
      --config.sampler.slots=256
    v6e:4x4   19.0 of 31.25
      --config.sampler.model=1 --config.sampler.slots=128

Source: arXiv 2606.02218 for group sizes, 2503.14476 for the loss; data: see
        `pods.py`. Nothing here was measured on a TPU.
"""

from ml_collections import ConfigDict

HF_CONFIG = dict(
  architectures=['Qwen2ForCausalLM'],
  vocab_size=151936,
  hidden_size=2048,
  intermediate_size=11008,
  num_hidden_layers=36,
  num_attention_heads=16,
  num_key_value_heads=2,
  max_position_embeddings=32768,
  rms_norm_eps=1e-6,
  rope_theta=1e6,
  tie_word_embeddings=True,
  use_sliding_window=False,
)


def get_config(variant: str = 'math') -> ConfigDict:
  import pods  # beside this file, found while a config is loaded

  model = dict(path='Qwen/Qwen2.5-3B-Instruct', hf_config=HF_CONFIG)
  c = pods.sagc(pods.config(variant, model))
  c.mesh = dict(fsdp=16)
  c.sampler = dict(slots=64, chunk=32, prefill_rows=8, model=2)
  c.learner = dict(rows=16, row_tokens=4096, remat=True)
  return c
