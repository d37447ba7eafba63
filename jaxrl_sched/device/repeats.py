"""Prompts that are asked more than once: within a dataset, or held out and trained on.

Prompts are the same where their ids are, by a hash of 8 bytes: among a million the
chance of one false match is below 1e-7.
"""

from collections.abc import Mapping
import hashlib
from typing import Any

import numpy as np


def hashed(value: bytes) -> int:
  return int.from_bytes(hashlib.blake2b(value, digest_size=8).digest())


def hash_answer(record: Mapping[str, Any]) -> int:
  answer = record.get('answer')
  # 42 and '42' are one answer.
  return hashed(' '.join(f'{answer}'.split()).encode())


def notes(asked: Mapping[str, np.ndarray], kind: str) -> list[str]:
  """A line for each dataset in which prompts come again.

  Args:
    asked: dataset -> [prompts, 2] uint64: hashes of ids and of answers.
    kind: of the datasets, for the line.
  """
  found, before = [], np.zeros(0, np.uint64)
  for name, pairs in asked.items():
    prompts = np.unique(pairs[:, 0])
    again = len(pairs) - len(prompts)
    # Prompts of the distinct (prompt, answer) pairs: one that is left comes twice.
    of_pairs = np.unique(pairs, axis=0)[:, 0]
    several = len(np.unique(of_pairs[1:][of_pairs[1:] == of_pairs[:-1]]))
    if again:
      other = f', {several} of them with different answers' if several else ''
      found.append(
        f'{kind} {name}: {again} of {len(pairs)} prompts ask what another one of it '
        f'asks{other}'
      )
    elsewhere = int(np.isin(prompts, before).sum())
    if elsewhere:
      found.append(f'{kind} {name}: {elsewhere} prompts are in other datasets, too')
    before = np.union1d(before, prompts)
  return found


def overlaps(
  trained: Mapping[str, np.ndarray], held_out: Mapping[str, np.ndarray]
) -> dict[str, tuple[int, int]]:
  """Held-out dataset -> its prompts that are trained on, and all of its prompts."""
  known = np.concatenate([pairs[:, 0] for pairs in trained.values()])
  return {
    name: (int(np.isin(pairs[:, 0], known).sum()), len(pairs))
    for name, pairs in held_out.items()
  }


def overlap_notes(found: Mapping[str, tuple[int, int]]) -> list[str]:
  """A line for each held-out dataset that `overlaps` found prompts of in training."""
  return [
    f'held-out prompts {name}: {count} of {total} are also trained on'
    for name, (count, total) in found.items()
    if count
  ]


def check_overlaps(found: Mapping[str, tuple[int, int]], most: float) -> None:
  """Refuses a held-out dataset of which more than the share `most` is trained on."""
  for name, (count, total) in found.items():
    if count > most * total:
      raise ValueError(
        f'config.evaluate.datasets.{name}: {count} of {total} prompts are also trained '
        f'on, expected at most a share of {most}; take them out of one of the two, or '
        f'set evaluate.max_overlap'
      )
