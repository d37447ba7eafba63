"""Changes to the files of a Hugging Face folder, for tests of how it is read."""

import json
import pathlib

from safetensors.numpy import load_file, save_file


def change(file: pathlib.Path, **tensors) -> None:
  """Rewrites a safetensors file; a value of None removes the tensor."""
  stored = load_file(file) | tensors
  kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
  save_file(kept, file, metadata={'format': 'pt'})


def edit(where: pathlib.Path, **changes) -> None:
  """Changes config.json; a value of ... removes the key."""
  file = where / 'config.json'
  raw = json.loads(file.read_text()) | changes
  file.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
