"""Writes a checkpoint of a run as a Hugging Face folder, adapters merged in.

    python -m jaxrl_sched.export --workdir=DIR --step=N|latest --out=FOLDER

Weights are stored as they were trained, in float32: at the learning rates of RL many
a change is smaller than bfloat16 can show. --dtype=bfloat16 halves the folder, which
is what most servers load. Runs on the host's CPU, so it disturbs no training, and
needs neither the run's devices nor its data.
"""

import pathlib
import signal
import sys
from typing import Any

import jax

from jaxrl_sched import config, models, storage
from jaxrl_sched.device import lora, weights
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device import model as model_lib
from jaxrl_sched.device.checkpoint import Checkpoints
from jaxrl_sched.device.hf_config import DTYPES
from jaxrl_sched.device.model import ModelConfig
from jaxrl_sched.device.tokenizers import known_ids
from jaxrl_sched.terminal import quietly
from jaxrl_sched.train import overrides, parser

EPILOG = 'Without --config the settings are those in the workdir.'


def main(argv: list[str] | None = None) -> int:
  arguments = parser('export', __doc__, epilog=EPILOG, config_needed=False)
  arguments.add_argument('--step', default='latest', metavar='N', help='or latest')
  arguments.add_argument('--out', required=True, metavar='FOLDER', help='a new folder')
  arguments.add_argument(
    '--dtype', default='float32', choices=DTYPES, help='of the stored weights'
  )
  arguments.add_argument(
    '--max-shard-gb', type=float, default=5.0, metavar='GB', help='of a file; 5'
  )
  arguments, rest = arguments.parse_known_args(argv)
  out = arguments.out
  jax.config.update('jax_platforms', 'cpu')
  # As Ctrl-C does, it raises, so that nothing half written is left behind.
  before = signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    workdir = storage.path(arguments.workdir, '--workdir=')
    out = storage.path(out, '--out=')
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
      raise ValueError(f'--out={out}: exists, expected a new or empty folder')
    if arguments.step == 'all':
      raise ValueError('--step=all: expected one step')
    if not arguments.max_shard_gb > 0:
      raise ValueError(f'--max-shard-gb={arguments.max_shard_gb}: expected above 0')
    c = config.of_workdir(arguments.config, workdir, overrides(rest))
    [step] = config.checkpointed_steps(workdir, arguments.step)
    source = models.Model(**c['model'])
    tokenizer = models.open_tokenizer(source)
    generation = weights.generation_config(source.path) if source.path else None
    model, parameters = checkpointed(c, workdir, step)
    with storage.written(out) as here:
      weights.export(
        model,
        parameters,
        here,
        tokenizer=tokenizer,
        stored_dtype=arguments.dtype,
        generation_config=generation,
        max_shard_bytes=int(arguments.max_shard_gb * 1e9),
      )
  except (ValueError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print(f'error: stopped, {out} is not written', file=sys.stderr)
    return 1
  finally:
    signal.signal(signal.SIGTERM, before)
  print(f'Step {step} of {workdir} is in {out}, {arguments.dtype}')
  return 0


def checkpointed(
  c: dict[str, Any], workdir: pathlib.Path, step: int
) -> tuple[ModelConfig, dict]:
  """The policy's weights at a step, on one device, without the optimizer's state."""
  mesh, source = meshes.make_mesh(), models.Model(**c['model'])
  tokenizer = models.open_tokenizer(source)
  cut = dict(dtype=source.dtype, vocab_parts=config.vocab_parts(c))
  cut['known_tokens'] = known_ids(tokenizer)
  base = None
  if source.path is None:
    plain = models.fresh_model(source, tokenizer)
    if c['lora'] is not None:
      base = model_lib.init(plain, c['seed'])
  elif c['lora'] is None:
    plain = weights.describe(source.path, **cut)
  else:
    plain, base = weights.load(source.path, mesh=mesh, **cut)
  trained, description = models.trained_model(c, plain, base, mesh)

  shapes, _ = model_lib.abstract(trained)
  if base is not None:
    _, shapes = lora.split(shapes)
  at = meshes.sharding(mesh)
  like = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes
  )
  checkpoints = Checkpoints(workdir / 'checkpoints', model=description, read_only=True)
  try:
    _, state, _, _ = checkpoints.restore({'parameters': like}, step=step, partly=True)
  finally:
    checkpoints.close()
  parameters = state['parameters']
  if base is None:
    return plain, parameters
  # Merged in place, a parameter at a time: the base is not there twice.
  adapted = lora.map_adapted(lambda weight, _: weight, base, parameters)
  merge = jax.jit(lora.merge, static_argnums=2, donate_argnums=0)
  return plain, lora.join(base, merge(adapted, parameters, trained.lora.scale))


if __name__ == '__main__':
  sys.exit(quietly(main))
