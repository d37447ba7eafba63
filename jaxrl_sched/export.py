"""Writes a checkpoint of a run as a Hugging Face folder.

python -m jaxrl_sched.export --workdir=DIR --step=N|latest --out=FOLDER
"""

import pathlib
import sys

from jaxrl_sched import config
from jaxrl_sched.train import overrides, parser

EPILOG = 'Without --config the settings are those in the workdir.'


def main(argv: list[str] | None = None) -> int:
  arguments = parser('export', __doc__, epilog=EPILOG, config_needed=False)
  arguments.add_argument('--step', default='latest', metavar='N', help='or latest')
  arguments.add_argument('--out', required=True, metavar='FOLDER', help='a new folder')
  arguments.add_argument(
    '--dtype',
    default='float32',
    choices=('float32', 'bfloat16', 'float16'),
    help='of the stored weights',
  )
  arguments, rest = arguments.parse_known_args(argv)
  workdir = pathlib.Path(arguments.workdir)
  try:
    out = pathlib.Path(arguments.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
      raise ValueError(f'--out={out}: exists, expected a new or empty folder')
    run = config.prepare(config.of_workdir(arguments.config, workdir, overrides(rest)))
    step, *others = config.checkpointed_steps(workdir, arguments.step)
    if others:
      raise ValueError('--step=all: expected one step')
    engine = config.build_engine(run, workdir, read_only=True)
    try:
      engine.restore(step)
      engine.export(arguments.out, stored_dtype=arguments.dtype)
    finally:
      engine.close()
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  print(f'Step {step} of {workdir} is in {arguments.out}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
