"""Models of transformers', small and random, to compare ours with."""

import torch
import transformers


def build(name: str, **settings) -> torch.nn.Module:
  """A causal model of the class, with something in every norm and bias."""
  config = getattr(transformers, f'{name}Config')(**settings)
  torch.manual_seed(0)
  made = getattr(transformers, f'{name}ForCausalLM')(config).eval()
  with torch.no_grad():
    for name, tensor in made.named_parameters():
      noise = torch.randn(tensor.shape)
      if name.endswith('norm.weight'):
        tensor.copy_(1 + 0.3 * noise)
      elif name.endswith('bias'):
        tensor.copy_(0.5 + 0.3 * noise)
      else:
        tensor.copy_(noise * (0.5 if 'embed' in name or 'head' in name else 0.2))
  return made
