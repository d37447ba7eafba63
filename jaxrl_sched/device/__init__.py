"""What touches accelerators: jax, flax, optax, orbax, grain, transformers."""

import os

# transformers, used for tokenizers only, would say that it misses PyTorch.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
