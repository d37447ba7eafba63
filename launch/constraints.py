"""Writes the versions that pods install: those of this environment, and what else the
extras need, as pip resolves it.

    .venv/bin/python launch/constraints.py > launch/constraints.txt

Run it in the environment in which the tests have passed.
"""

import importlib.metadata
import json
import pathlib
import subprocess
import sys
import tempfile

EXTRAS = 'tpu,gcs,gym,math,parquet,wandb'
ROOT = pathlib.Path(__file__).parents[1]


def main() -> int:
  here = {
    f'{package.name}=={package.version}'
    for package in importlib.metadata.distributions()
    # A local version, such as torch 2.13.0+cpu, is of another build than the index's.
    if package.name != 'jaxrl_sched' and '+' not in package.version
  }
  with tempfile.TemporaryDirectory() as scratch:
    known, report = pathlib.Path(scratch, 'known.txt'), pathlib.Path(scratch, 'report')
    known.write_text('\n'.join(sorted(here)))
    command = [sys.executable, '-m', 'pip', 'install', '--dry-run', '--quiet']
    command += ['--ignore-installed', '--report', report, '--constraint', known]
    subprocess.run([*command, f'{ROOT}[{EXTRAS}]'], check=True, stdout=sys.stderr)
    found = json.loads(report.read_text())['install']
  pins = {
    f'{item["metadata"]["name"]}=={item["metadata"]["version"]}'
    for item in found
    if item['metadata']['name'] != 'jaxrl_sched'
  }
  version = '.'.join(map(str, sys.version_info[:2]))
  print(f'# Versions that pods install: launch/constraints.py, Python {version}')
  print('\n'.join(sorted(pins, key=str.lower)))
  return 0


if __name__ == '__main__':
  sys.exit(main())
