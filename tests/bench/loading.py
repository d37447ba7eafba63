"""How much host memory does loading a sharded folder take beside the weights?

    python tests/bench/loading.py OUT [--gigabytes=2] [--dtype=float32]

Makes a folder of that size in five shards and loads it in fresh processes, on one CPU
device and on eight. There devices have the host's memory, so the weights count too.
Prints megabytes, of anonymous memory but for the last column, which also counts pages
of the files: the kernel takes those back when it needs room. Exits 1 where more than
the weights, one tensor of the file in float32 and 200 MB are held at some time.
"""

import argparse
import pathlib
import subprocess
import sys
import threading

MARGIN = 200e6  # of allocators and of compiled programs
MESHES = {'1 device': {}, '8 devices: fsdp=2, model=4': dict(fsdp=2, model=4)}

# What a fresh process does: it says when it is ready, and what it has loaded.
PROGRAM = """
import sys
import jax
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
from jaxrl_sched.device import mesh, weights
mesh = mesh.make_mesh(**eval(sys.argv[2]))
print(flush=True)
sys.stdin.readline()
_, parameters = weights.load(sys.argv[1], mesh=mesh)
print(sum(x.nbytes for x in jax.tree.leaves(parameters)), flush=True)
sys.stdin.readline()
"""


def make_folder(where: pathlib.Path, size: float, dtype: str) -> int:
  """Writes it unless it is there. Returns the bytes of its largest tensor in float32."""
  import jax
  import numpy as np

  from jaxrl_sched.device import hf_tensors, model, weights

  shape = dict(d_model=1024, d_ff=2816, heads=16, kv_heads=4, head_dim=64)
  vocab = dict(vocab_size=32_003, known_tokens=32_003)
  width = 4 if dtype == 'float32' else 2
  one = model.ModelConfig(layers=1, **shape, **vocab)
  sizes = {t.name: int(np.prod(t.shape)) for t in hf_tensors.tensors(one)}
  layer = sum(n for name, n in sizes.items() if 'layers.0' in name)
  layers = max(1, round((size / width - sum(sizes.values()) + layer) / layer))
  config = model.ModelConfig(layers=layers, **shape, **vocab)
  if not where.exists():
    # Repeated numbers, so that making it takes no memory.
    shapes = model.abstract(config)[0]
    parameters = jax.tree.map(
      lambda s: np.broadcast_to(np.float32(0.5), s.shape), shapes
    )
    weights.export(
      config,
      parameters,
      where,
      stored_dtype=dtype,
      max_shard_bytes=int(max(size / 5, width * max(sizes.values())) * 1.05),
    )
  return 4 * max(sizes.values())


def status(pid: int) -> dict[str, float]:
  """Bytes by the kernel's names."""
  lines = pathlib.Path(f'/proc/{pid}/status').read_text().splitlines()
  pairs = (line.split(':') for line in lines)
  return {k: 1024 * float(v.split()[0]) for k, v in pairs if v.endswith('kB')}


def measure(folder: pathlib.Path, mesh: dict) -> tuple[float, ...]:
  """Bytes: weights, anonymous memory before, its peak, and the peak with pages."""
  child = subprocess.Popen(
    [sys.executable, '-c', PROGRAM, str(folder), repr(mesh)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  if not child.stdout.readline():
    raise RuntimeError(f'the process that was to load {folder} failed')
  before = peak = status(child.pid)['RssAnon']
  done = threading.Event()

  def watch():
    nonlocal peak
    while not done.wait(0.001):
      peak = max(peak, status(child.pid)['RssAnon'])

  watching = threading.Thread(target=watch)
  watching.start()
  print(file=child.stdin, flush=True)
  said = child.stdout.readline()
  done.set()
  watching.join()
  if not said:
    raise RuntimeError(f'loading {folder} failed')
  with_pages = status(child.pid)['VmHWM']
  child.communicate('\n')
  return float(said), before, peak, with_pages


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('out', type=pathlib.Path)
  parser.add_argument('--gigabytes', type=float, default=2.0)
  parser.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'))
  arguments = parser.parse_args()
  folder = arguments.out / f'{arguments.gigabytes:g}-{arguments.dtype}'
  folder.parent.mkdir(parents=True, exist_ok=True)
  largest = make_folder(folder, arguments.gigabytes * 1e9, arguments.dtype)
  files = sorted(folder.glob('*.safetensors'))
  stored = sum(file.stat().st_size for file in files)
  print(
    f'{stored / 1e6:.0f} MB of {arguments.dtype} in {len(files)} files, '
    f'largest tensor {largest / 1e6:.0f} MB in float32\n'
  )
  print(
    '| on | weights | before | peak | beside weights | peak / weights | with files |'
  )
  print('|---|---|---|---|---|---|---|')
  good = True
  for name, mesh in MESHES.items():
    weights, before, peak, with_pages = measure(folder, mesh)
    beside = peak - before - weights
    good &= beside < largest + MARGIN
    numbers = ' | '.join(f'{x / 1e6:.0f}' for x in (weights, before, peak, beside))
    ratio = (peak - before) / weights
    print(f'| {name} | {numbers} | {ratio:.2f} | {with_pages / 1e6:.0f} |', flush=True)
  return 0 if good else 1


if __name__ == '__main__':
  sys.exit(main())
