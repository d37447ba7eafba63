"""Judging a policy: n answers a prompt through the same engine, pass@k."""

from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from jaxrl_sched.engine import Engine
from jaxrl_sched.host.passk import pass_at_k
from jaxrl_sched.metrics import to_json
from jaxrl_sched.types import Completion, Group, Prompt, Request, Sampling

# Evaluation draws are counted apart, so that they neither meet the noise of training
# nor depend on when one evaluates: all checkpoints are judged under the same noise.
FIRST_DRAW = 2**31


@dataclasses.dataclass(frozen=True)
class Result:
  """One dataset's answers and what they say."""

  groups: list[Group]
  # 'pass@1', 'pass@k', 'reward' (of the maximum), 'reward_mean', lengths, 'truncated'
  numbers: dict[str, float]


def evaluate(
  engine: Engine,
  prompts: Sequence[Prompt],
  sampling: Sampling,
  *,
  samples: int,
  k: Sequence[int] = (1,),
) -> dict[str, Result]:
  """Samples every prompt `samples` times, each counted once. dataset -> Result.

  An answer passes if its verdict is its verifier's maximum, of several rewards that of
  the first. pass@k is unbiased
  (arXiv 2107.03374).
  """
  requests = [
    Request(draw=FIRST_DRAW + i, prompt=prompt, size=samples, sampling=sampling)
    for i, prompt in enumerate(prompts)
  ]
  groups = engine.evaluate(requests)
  datasets = dict.fromkeys(p.dataset for p in prompts)
  return {
    name: Result(mine, _numbers(mine, k))
    for name in datasets
    if (mine := [g for g in groups if g.request.prompt.dataset == name])
  }


def _numbers(groups: Sequence[Group], k: Sequence[int]) -> dict[str, float]:
  n = groups[0].size
  right = [int(g.passed.sum()) for g in groups]
  lengths = np.concatenate([g.lengths for g in groups])
  return {
    'prompts': len(groups),
    'samples': n,
    **{
      f'pass@{j}': float(np.mean([pass_at_k(n, c, j) for c in right]))
      for j in sorted({1, *k})
    },
    'reward_mean': float(np.mean([g.verdicts.mean() for g in groups])),
    **{
      f'reward/{name}': float(np.mean([g.components[name].mean() for g in groups]))
      for name in groups[0].components
    },
    'reward': float(
      np.mean([np.mean(g.verdicts / _most(g), dtype=float) for g in groups])
    ),
    'length_mean': float(lengths.mean()),
    'length_max': int(lengths.max()),
    'truncated': float(np.concatenate([g.truncated for g in groups]).mean()),
    'grading_faults': sum(fault is not None for g in groups for fault in g.faults),
  }


def _most(group: Group) -> float:
  """What a reward is a share of: the one that passes, where that is above 0."""
  most = group.request.prompt.max_reward
  return 1.0 if most is None or most <= 0 else most


def score(results: dict[str, Result]) -> float:
  """The mean of the datasets' rewards, each as a share of its maximum.

  Of rewards 0 and the maximum alone that is the mean pass@1.
  """
  return float(np.mean([r.numbers['reward'] for r in results.values()]))


def doubts(results: dict[str, Result]) -> list[str]:
  """What makes the numbers of a dataset say nothing about its answers."""
  found = []
  for name, result in results.items():
    n = result.numbers
    if n['grading_faults'] == n['prompts'] * n['samples']:
      faults = {fault for group in result.groups for fault in group.faults}
      found.append(
        f'{name}: no held-out answer could be graded ({", ".join(sorted(faults))})'
      )
    if n['truncated'] == 1:
      found.append(f'{name}: all held-out answers were cut off at their token limit')
  return found


def as_metrics(results: dict[str, Result]) -> dict[str, float]:
  return {
    f'eval/{name}/{key}': value
    for name, result in results.items()
    for key, value in result.numbers.items()
    if key.startswith(('pass@', 'reward/'))
    or key in ('reward', 'length_mean', 'truncated')
  }


def sample_lines(
  group: Group, text_of: Callable[[Completion], str]
) -> list[dict[str, Any]]:
  """What was asked and said, and what it was worth: a line an answer."""
  prompt = group.request.prompt
  return [
    {
      'prompt_id': prompt.id,
      'sample': completion.answer,
      'reward': float(group.rewards[k]),
      **(
        {'components': {n: float(v[k]) for n, v in group.components.items()}}
        if group.components
        else {}
      ),
      'finish': completion.finish,
      'length': len(completion.tokens),
      'prompt': prompt.text,
      'truth': prompt.answer,
      'text': text_of(completion),
    }
    for k, completion in enumerate(group.completions)
  ]


def write(
  results: dict[str, Result],
  folder: pathlib.Path,
  text_of: Callable[[Completion], str],
  settings: dict[str, Any],
) -> None:
  """<folder>/<dataset>.json and <dataset>.samples.jsonl, a line an answer."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, result in results.items():
    lines = [
      to_json(line) for group in result.groups for line in sample_lines(group, text_of)
    ]
    _replace(folder / f'{name}.samples.jsonl', ''.join(f'{line}\n' for line in lines))
    numbers = settings | result.numbers
    _replace(folder / f'{name}.json', json.dumps(numbers, indent=2) + '\n')


def _replace(path: pathlib.Path, text: str) -> None:
  """Whole or not at all."""
  half = path.with_name(f'.{path.name}.half')
  half.write_text(text, encoding='utf-8')
  half.replace(path)
