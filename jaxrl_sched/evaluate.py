"""Evaluates a run's checkpoints, or a Hugging Face folder, on the config's held-out sets.

    python -m jaxrl_sched.evaluate --workdir=DIR [--step=N|latest|all] [--hf=FOLDER]

Writes eval/<step>/<dataset>.json and <dataset>.samples.jsonl into the workdir
(eval/hf-<name>/ for a folder of that name) and prints a table. Without --config the
workdir's own config.json is used.
"""

import contextlib
import functools
import pathlib
import sys

from jaxrl_sched import config, evaluation, models, storage
from jaxrl_sched.device import multihost, repeats, together
from jaxrl_sched.terminal import quietly
from jaxrl_sched.train import overrides, parser, same_config

EPILOG = """\
Settings can be overridden as for train: --config.evaluate.samples=8
--config.evaluate.temperature=0.6 --config.evaluate.k=(1,8).
"""


def main(argv: list[str] | None = None) -> int:
  arguments = parser('evaluate', __doc__, epilog=EPILOG, config_needed=False)
  arguments.add_argument(
    '--step', default='latest', metavar='N', help='a step, latest (default) or all'
  )
  arguments.add_argument(
    '--hf', metavar='FOLDER', help='a Hugging Face folder to evaluate instead'
  )
  arguments, rest = arguments.parse_known_args(argv)
  return together.run(lambda: _run(arguments, overrides(rest)))


def _run(arguments, changes: list[tuple[str, str]]) -> int:
  workdir = storage.path(arguments.workdir, '--workdir=')

  def prepare() -> tuple[config.Run, list]:
    c = config.of_workdir(arguments.config, workdir, changes)
    c['tiers'] = None  # its table need not be there any more
    if c['evaluate'] is not None:
      c['evaluate']['max_overlap'] = 1.0  # nothing is trained here: it is said below
    label = None if arguments.hf is None else models.judge_folder(c, arguments.hf)
    run = config.prepare(c)
    if run.evaluate is None:
      raise ValueError('config.evaluate: missing, nothing says what to evaluate on')
    return run, label

  run, label = multihost.together(prepare, name='preparing')
  same_config(run.c)
  names = [label]
  if label is None:
    find = functools.partial(config.checkpointed_steps, workdir, arguments.step)
    names = multihost.agree(find, name='steps')
  multihost.compare('the prompts', lambda: str(run.held_out.contents))
  with contextlib.closing(config.build_engine(run, workdir, read_only=True)) as engine:
    prompts = list(run.held_out.all())
    if multihost.is_first():
      shared = repeats.overlaps(run.prompts.asked, run.held_out.asked)
      for note in repeats.overlap_notes(shared):
        print(note)
      print(f'Evaluating {len(prompts)} prompts x {run.evaluate.samples} ...')
      print(f'{"step":>8}  {"dataset":20}{"prompts":>8}{"n":>4}  pass@k', flush=True)
    for name in names:
      if arguments.hf is None:
        engine.restore(name)
      _evaluate(run, engine, prompts, name, workdir)
  return 0


def _evaluate(run, engine, prompts, name, workdir: pathlib.Path) -> None:
  e, sampling = run.evaluate, run.evaluation_sampling()
  results = evaluation.evaluate(engine, prompts, sampling, samples=e.samples, k=e.k)
  if not multihost.is_first():
    return
  about = {
    'step': name,
    'model': run.model.path,
    'temperature': sampling.temperature,
    'top_k': sampling.top_k,
    'top_p': sampling.top_p,
    'max_new_tokens': sampling.max_new_tokens,
    'seed': run.c['seed'],
  }
  folder = workdir / 'eval' / str(name)
  with storage.written(folder) as here:
    evaluation.write(results, here, lambda c: engine.text_of(c, sampling), about)
  for dataset, result in results.items():
    n = result.numbers
    passes = '  '.join(f'@{k} {n[f"pass@{k}"]:.3f}' for k in sorted({1, *e.k}))
    print(
      f'{name!s:>8}  {dataset:20}{n["prompts"]:>8}{n["samples"]:>4}  {passes}  '
      f'reward {n["reward_mean"]:.3f}  length {n["length_mean"]:.1f}  '
      f'truncated {n["truncated"]:.3f}',
      flush=True,
    )
  print(f'{name!s:>8}  written to {folder}', flush=True)


if __name__ == '__main__':
  sys.exit(quietly(main))
