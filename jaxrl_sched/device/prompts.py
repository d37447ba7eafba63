"""Prompts by dataset and index: checked once, and tokenised in one place.

All that can be wrong with the data is found here, before a model is built. A
prompt's ids are sampled from and trained on as they stand: text is never tokenised
a second time on its way.
"""

from array import array
from collections.abc import Iterator
import dataclasses
import functools
import math
import os
from typing import Any

import grain
import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from jaxrl_sched.device import contents, records, repeats
from jaxrl_sched.device.records import Dataset
from jaxrl_sched.device.sources import Source, open_source
from jaxrl_sched.device.templates import Template
from jaxrl_sched.host import maths, rewards
from jaxrl_sched.types import Prompt

_BATCH = 1024  # prompts tokenised together at the start
_LOOKED = 1000  # answers of a dataset that math-verify reads at the start: seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Item:
  index: int  # among the records chosen
  position: int  # in the source
  where: str  # for messages
  record: dict[str, Any]  # as it stands there

  def read(self, dataset: Dataset) -> dict[str, Any]:
    return records.read(self.record, dataset, position=self.position, where=self.where)


class _Chosen:
  """Some records of a source, in order: what grain reads from."""

  def __init__(self, source: Source, positions: np.ndarray):
    self._source, self._positions = source, positions

  def __len__(self) -> int:
    return len(self._positions)

  def __getitem__(self, index: int) -> _Item:
    position = int(self._positions[index])
    return _Item(
      index=int(index),
      position=position,
      where=self._source.where(position),
      record=self._source[position],
    )


class PromptSet:
  """Prompts of several datasets, by (dataset, index).

  Opening it reads, checks and tokenises every record once, and keeps only the
  positions of those short enough. `get` reads its record and makes the same ids
  again, so memory does not grow with the data.

  Attributes:
    sizes: prompts kept, by dataset; indices run from 0 up to it.
    weights: as given, by dataset.
    dropped: prompts above `max_tokens`, by dataset.
    rewards: the names of the verifiers, for the grading pool to load early.
    unanswered: dataset -> a field that may have been meant by 'answer', which none of
      its records has, though a verifier of the user's own is to grade them.
    asked: hashes of prompt and of answer, by dataset, [prompts kept, 2] uint64; see
      `repeats`.
    contents: dataset -> digests of all that a run depends on; see `contents`.
    unread: dataset -> how many answers 'math' cannot read, and where the first is; for
      these only the same text is right.
    turn_end: ids that the chat template puts after an assistant's turn, if it does.
  """

  def __init__(
    self,
    datasets: dict[str, dict[str, Any]],
    *,
    tokenizer: Tokenizer,
    template: str = 'chat',
    system: str | None = None,
    examples: str | tuple | None = None,
    template_options: dict | None = None,
    date: str | None = None,
    special_tokens: str | None = None,
    max_tokens: int,
    too_long: str = 'drop',
    ids_below: int | None = None,
    root: str | os.PathLike = '.',
  ):
    """Opens the datasets.

    Args:
      datasets: name -> the keyword arguments of `Dataset`.
      tokenizer: of the model that is sampled from.
      template: 'chat', or a text in which '{prompt}' is replaced.
      system: a system message, for 'chat'; '' is an empty one, which keeps a chat
        template from writing its own. A dataset may have another.
      examples: shown before every prompt: a path, or records with a 'solution' (else
        'answer') to reply. A dataset may have others. No example may also be a prompt.
      template_options: more for the chat template, as `enable_thinking`.
      date: '2024-07-26': the day it is for a chat template that asks.
      special_tokens: 'allow': texts of a chat may hold special tokens of the
        tokenizer, which act as such. None: they are refused, as forged turns.
      max_tokens: of the longest prompt, with all that is around it.
      too_long: 'drop' or 'refuse', for longer ones.
      ids_below: what all ids have to be below: the model's. None: not known.
      root: where relative paths start.

    Raises:
      ValueError: settings or data of which nothing sound could be learned. The
        message names the key, or the file and line, and what was expected.
    """
    if max_tokens < 1:
      raise ValueError(f'max_tokens: expected at least 1, found {max_tokens}')
    if too_long not in ('drop', 'refuse'):
      raise ValueError(f"too_long: expected 'drop' or 'refuse', found {too_long!r}")
    if special_tokens not in (None, 'allow'):
      raise ValueError(
        f"special_tokens: expected None or 'allow', found {special_tokens!r}"
      )
    if not datasets:
      raise ValueError('datasets: expected at least one, found none')
    self._max_tokens, self._too_long = max_tokens, too_long
    self._ids_below = math.inf if ids_below is None else ids_below
    self.sizes: dict[str, int] = {}
    self.weights: dict[str, float] = {}
    self.dropped: dict[str, int] = {}
    self.rewards: set[str] = set()
    self.unanswered: dict[str, str] = {}
    self.contents: dict[str, dict[str, Any]] = {}
    self.unread: dict[str, tuple[int, str]] = {}
    self.asked: dict[str, np.ndarray] = {}
    self.turn_end: list[int] = []
    self._records: dict[str, tuple[Dataset, _Chosen]] = {}
    self._prompts: dict[str, grain.MapDataset] = {}
    for name, settings in datasets.items():
      dataset = records.checked(name, settings)
      source = open_source(dataset.source, dataset.options, root)
      shown = examples if dataset.examples is None else dataset.examples
      rendering = Template(
        tokenizer,
        template,
        system if dataset.system is None else dataset.system,
        examples=records.read_examples(shown or (), root),
        options=template_options,
        date=date,
        special_tokens=special_tokens,
      )
      kept, self.asked[name] = self._scan(name, dataset, source, rendering)
      self.turn_end = rendering.turn_end()
      self.sizes[name] = len(kept)
      self.weights[name] = float(dataset.weight)
      self.rewards |= {part.verifier for part in dataset.graded_by}
      self.dropped[name] = len(source) - len(kept)
      self._records[name] = dataset, _Chosen(source, kept)
      self._prompts[name] = grain.MapDataset.source(self._records[name][1]).map(
        functools.partial(_prompt, name, dataset, rendering)
      )

  def get(self, dataset: str, index: int) -> Prompt:
    if dataset not in self.sizes:
      raise ValueError(f'No dataset {dataset!r}, expected one of {list(self.sizes)}')
    if not 0 <= index < self.sizes[dataset]:  # grain would wrap around
      raise IndexError(f'{dataset}: no prompt {index}, there are {self.sizes[dataset]}')
    return self._prompts[dataset][index]

  def all(self) -> Iterator[Prompt]:
    """Every prompt once, dataset after dataset."""
    for name, size in self.sizes.items():
      for index in range(size):
        yield self.get(name, index)

  def ids(self) -> dict[str, Iterator[str]]:
    """Dataset -> the id of each prompt, by index; nothing is rendered for it."""
    return {name: self._ids(name) for name in self.sizes}

  def _ids(self, name: str) -> Iterator[str]:
    dataset, chosen = self._records[name]
    for index in range(len(chosen)):
      yield f'{name}/{chosen[index].read(dataset)["id"]}'

  def _scan(
    self, name: str, dataset: Dataset, source: Source, template: Template
  ) -> tuple[np.ndarray, np.ndarray]:
    """Checks every record.

    Returns:
      The positions of those kept, [kept] int64, and what they ask, [kept, 2] uint64.
    """
    if not len(source):
      raise ValueError(
        f'Dataset {name!r}: 0 prompts read from {dataset.source}, it is empty'
      )
    everything = _Chosen(source, np.arange(len(source)))
    shown = {records.question(record) for record, _ in template.examples}
    first_with: dict[str, int] = {}
    own = any(':' in part.verifier for part in dataset.graded_by)
    fields: set[str] | None = set() if own else None
    is_math = any(part.verifier == 'math' for part in dataset.graded_by)
    looked, unread, first_unread, digest = 0, 0, '', contents.Digest()
    kept, asked, shortest = array('q'), array('Q'), math.inf
    for start in range(0, len(source), _BATCH):
      items = [everything[i] for i in range(start, min(start + _BATCH, len(source)))]
      texts, keys, answers, said = [], [], [], []
      for item in items:
        record = item.read(dataset)
        if shown and records.question(record) in shown:
          raise ValueError(
            f'{item.where}: is also one of the examples, so that its prompt would hold '
            f'its answer'
          )
        first = first_with.setdefault(record['id'], item.position)
        if first != item.position:
          raise ValueError(
            f'{item.where}: id {record["id"]!r} is already used at '
            f'{source.where(first)}'
          )
        if fields is not None:
          fields = None if 'answer' in record else fields | record.keys()
        if is_math and maths.number(record['answer']) is None and looked < _LOOKED:
          looked += 1
          if not rewards.is_readable(record['answer']):
            unread, first_unread = unread + 1, first_unread or item.where
        template.check_record(record, item.where)
        keys.append(record['id'])
        answers.append(repeats.hash_answer(record))
        own_id = item.record.get(dataset.fields.get('id', 'id')) is not None
        about = {k: v for k, v in record.items() if own_id or k != 'id'}
        said.append(contents.canonical(about))
        texts.append(_render(template, record, item.where))
      for item, key, answer, about, ids in zip(
        items, keys, answers, said, template.ids(texts), strict=True
      ):
        shortest = min(shortest, len(ids))
        if not len(ids):
          raise ValueError(f'{item.where}: the prompt has no token')
        if ids.max() >= self._ids_below:
          raise ValueError(
            f'{item.where}: prompt {name}/{key} has token {ids.max()}, expected ids '
            f'below {self._ids_below}, of which the model has embeddings'
          )
        if len(ids) <= self._max_tokens:
          kept.append(item.position)
          asked.extend((repeats.hashed(ids.tobytes()), answer))
          digest.add(ids.tobytes() + about)
        elif self._too_long == 'refuse':
          raise ValueError(
            f'{item.where}: prompt {name}/{key} has {len(ids)} tokens, '
            f'expected at most {self._max_tokens}'
          )
    if not kept:
      raise ValueError(
        f'Dataset {name!r}: {len(source)} prompts read from {dataset.source}, 0 kept: '
        f'the shortest has {shortest} tokens, expected at most {self._max_tokens}'
      )
    if fields and (near := records.answer_like(fields)) is not None:
      self.unanswered[name] = near
    self.contents[name] = digest.described()
    if unread:
      self.unread[name] = unread, first_unread
    return np.array(kept, np.int64), np.array(asked, np.uint64).reshape(-1, 2)


def _prompt(name: str, dataset: Dataset, template: Template, item: _Item) -> Prompt:
  record = item.read(dataset)
  text = _render(template, record, item.where)
  return Prompt(
    id=f'{name}/{record["id"]}',
    dataset=name,
    index=item.index,
    tokens=template.ids([text])[0],
    text=text,
    answer=record.get('answer'),
    solution=record.get('solution'),
    **dataset.of_prompt,
    meta={key: value for key, value in record.items() if key not in records.OURS},
  )


def _render(template: Template, record: dict[str, Any], where: str) -> str:
  try:
    text = template.text(record)
    text.encode()  # JSON can spell halves of characters, tokenizers take none
    return text
  except Exception as error:  # a chat template is somebody's program, and may refuse
    raise ValueError(f'{where}: {" ".join(str(error).split())}') from None
