"""Prompts by dataset and index: checked once, and tokenised in one place.

All that can be wrong with the data is found here, before a model is built. A
prompt's ids are sampled from and trained on as they stand: text is never tokenised
a second time on its way.

A record has 'prompt' (text) or 'messages' (a chat), 'answer' (what the verifier
compares with) and, optionally, 'id' and 'solution' (a reference answer's text).
Whatever else it has goes to `Prompt.meta`.
"""

from array import array
from collections.abc import Callable, Iterator
import dataclasses
import functools
import math
import os
from typing import Any

import grain
import jinja2
import numpy as np
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from jaxrl_sched.device.sources import Source, nearest, open_source
from jaxrl_sched.device.tokenizers import Template
from jaxrl_sched.host import rewards
from jaxrl_sched.types import Prompt

_OURS = ('prompt', 'messages', 'answer', 'id', 'solution')
_BATCH = 1024  # prompts tokenised together at the start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
  """What may be said of a dataset."""

  source: str  # see sources.open_source
  options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the source
  reward: str | None = None  # None: 'reasoning_gym' for its own, else 'final_number'
  max_reward: float | None = 1.0  # None: the verifier declares no maximum
  weight: float = 1.0
  fields: dict[str, str] = dataclasses.field(default_factory=dict)  # ours -> theirs


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Item:
  index: int  # among the records chosen
  position: int  # in the source
  where: str  # for messages
  record: dict[str, Any]


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
  """

  def __init__(
    self,
    datasets: dict[str, dict[str, Any]],
    *,
    tokenizer: Tokenizer,
    template: str = 'chat',
    system: str | None = None,
    max_tokens: int,
    too_long: str = 'drop',
    root: str | os.PathLike = '.',
  ):
    """Opens the datasets.

    Args:
      datasets: name -> the keyword arguments of `Dataset`.
      tokenizer: of the model that is sampled from.
      template: 'chat', or a text in which '{prompt}' is replaced.
      system: a system message, for 'chat'.
      max_tokens: of the longest prompt.
      too_long: 'drop' or 'refuse', for longer ones.
      root: where relative paths start.

    Raises:
      ValueError: settings or data of which nothing sound could be learned. The
        message names the key, or the file and line, and what was expected.
    """
    if max_tokens < 1:
      raise ValueError(f'max_tokens: expected at least 1, found {max_tokens}')
    if too_long not in ('drop', 'refuse'):
      raise ValueError(f"too_long: expected 'drop' or 'refuse', found {too_long!r}")
    if not datasets:
      raise ValueError('datasets: expected at least one, found none')
    self._template = Template(tokenizer, template, system)
    self._max_tokens, self._too_long = max_tokens, too_long
    self.sizes: dict[str, int] = {}
    self.weights: dict[str, float] = {}
    self.dropped: dict[str, int] = {}
    self.rewards: set[str] = set()
    self._prompts: dict[str, grain.MapDataset] = {}
    for name, settings in datasets.items():
      dataset = _checked(name, settings)
      source = open_source(dataset.source, dataset.options, root)
      kept = self._scan(name, dataset, source)
      self.sizes[name] = len(kept)
      self.weights[name] = float(dataset.weight)
      self.rewards.add(dataset.reward)
      self.dropped[name] = len(source) - len(kept)
      self._prompts[name] = grain.MapDataset.source(_Chosen(source, kept)).map(
        functools.partial(self._prompt, name, dataset)
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

  def _scan(self, name: str, dataset: Dataset, source: Source) -> np.ndarray:
    """Checks every record. Returns the positions of those kept, [kept] int64."""
    if not len(source):
      raise ValueError(
        f'Dataset {name!r}: 0 prompts read from {dataset.source}, it is empty'
      )
    everything = _Chosen(source, np.arange(len(source)))
    first_with: dict[str, int] = {}
    kept, shortest = array('q'), math.inf
    for start in range(0, len(source), _BATCH):
      items = [everything[i] for i in range(start, min(start + _BATCH, len(source)))]
      texts, keys = [], []
      for item in items:
        record = _read(item, dataset)
        first = first_with.setdefault(record['id'], item.position)
        if first != item.position:
          raise ValueError(
            f'{item.where}: id {record["id"]!r} is already used at '
            f'{source.where(first)}'
          )
        keys.append(record['id'])
        texts.append(self._render(record, item.where))
      for item, key, ids in zip(items, keys, self._template.ids(texts), strict=True):
        shortest = min(shortest, len(ids))
        if not len(ids):
          raise ValueError(f'{item.where}: the prompt has no token')
        if len(ids) <= self._max_tokens:
          kept.append(item.position)
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
    return np.array(kept, np.int64)

  def _prompt(self, name: str, dataset: Dataset, item: _Item) -> Prompt:
    record = _read(item, dataset)
    text = self._render(record, item.where)
    return Prompt(
      id=f'{name}/{record["id"]}',
      dataset=name,
      index=item.index,
      tokens=self._template.ids([text])[0],
      text=text,
      answer=record.get('answer'),
      solution=record.get('solution'),
      reward=dataset.reward,
      max_reward=dataset.max_reward,
      meta={key: value for key, value in record.items() if key not in _OURS},
    )

  def _render(self, record: dict[str, Any], where: str) -> str:
    try:
      text = self._template.text(record)
      text.encode()  # JSON can spell halves of characters, tokenizers take none
      return text
    except (ValueError, jinja2.TemplateError) as error:  # a template may refuse
      raise ValueError(f'{where}: {error}') from None


def _checked(name: str, settings: dict[str, Any]) -> Dataset:
  """The settings of a dataset, with every value looked at and `reward` filled in."""
  if not name or '/' in name:  # part of prompt ids and of file names
    raise ValueError(f"Dataset {name!r}: expected a name without '/'")
  known = [field.name for field in dataclasses.fields(Dataset)]
  for key in settings:
    if key not in known:
      raise ValueError(f'Dataset {name!r}: unknown key {key!r}{nearest(key, known)}')
  if 'source' not in settings:
    raise ValueError(f"Dataset {name!r}: no 'source', found {sorted(settings)}")
  dataset = Dataset(**settings)
  kinds = dict(source=(str, 'text'), options=(dict, 'a dict'), fields=(dict, 'a dict'))
  kinds['reward'] = (str | None, 'a name')
  for key, (kind, expected) in kinds.items():
    if key in settings and not isinstance(value := settings[key], kind):
      raise ValueError(f'Dataset {name!r}, {key}: expected {expected}, found {value!r}')
  for key in ('weight', 'max_reward'):
    value = settings.get(key, 1.0)
    if key == 'max_reward' and value is None:
      continue
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise ValueError(f'Dataset {name!r}, {key}: expected a number, found {value!r}')
    if not 0 < value < math.inf:
      raise ValueError(f'Dataset {name!r}, {key}: expected above 0, found {value}')
  if dataset.reward is None:
    gym = dataset.source.startswith('reasoning_gym:')
    dataset = dataclasses.replace(
      dataset, reward='reasoning_gym' if gym else 'final_number'
    )
  try:
    rewards.resolve(dataset.reward)
  except ValueError as error:
    raise ValueError(f'Dataset {name!r}, reward: {error}') from None
  return dataset


def _read(item: _Item, dataset: Dataset) -> dict[str, Any]:
  """The record with its keys renamed and checked; 'id' is there and is text."""

  def wrong(what: str) -> ValueError:
    return ValueError(f'{item.where}: {what}')

  found = f'found {sorted(item.record)}'
  for ours, theirs in dataset.fields.items():
    if theirs not in item.record:
      raise wrong(f'no field {theirs!r} (for {ours!r}), {found}')
  moved = {ours: item.record[theirs] for ours, theirs in dataset.fields.items()}
  rest = {k: v for k, v in item.record.items() if k not in dataset.fields.values()}
  record = rest | moved

  prompt, messages = record.get('prompt'), record.get('messages')
  if prompt is None and messages is None:
    raise wrong(f"no field 'prompt' or 'messages', {found}")
  if prompt is not None and messages is not None:
    raise wrong(f"both 'prompt' and 'messages', expected one of them, {found}")
  if prompt is None:
    _check_messages(messages, wrong)
  elif not isinstance(prompt, str):
    hint = "; a chat goes by fields=dict(messages='prompt')" * isinstance(prompt, list)
    raise wrong(f'prompt: expected text, found {prompt!r:.40}{hint}')
  if not isinstance(record.get('solution'), str | None):
    raise wrong(f'solution: expected text, found {record["solution"]!r:.40}')
  try:
    rewards.check_answer(dataset.reward, record.get('answer'))
  except ValueError as error:
    if 'answer' not in record:
      raise wrong(f"no field 'answer', {found}") from None
    raise wrong(str(error)) from None
  try:
    rewards.check_meta(
      dataset.reward, {k: v for k, v in record.items() if k not in _OURS}
    )
  except ValueError as error:
    raise wrong(str(error)) from None

  key = record.get('id')
  if key is None:
    key = item.position
  elif isinstance(key, bool) or not isinstance(key, str | int) or key == '':
    raise wrong(f'id: expected text or a whole number, found {key!r:.40}')
  return {k: v for k, v in record.items() if v is not None or k not in _OURS} | {
    'id': str(key)
  }


def _check_messages(messages: Any, wrong: Callable[[str], ValueError]) -> None:
  if not isinstance(messages, list) or not messages:
    raise wrong(f'messages: expected a list of messages, found {messages!r:.40}')
  for message in messages:
    if not isinstance(message, dict) or not all(
      isinstance(message.get(key), str) for key in ('role', 'content')
    ):
      raise wrong(
        f"messages: expected texts 'role' and 'content' in each, found {message!r:.60}"
      )
  if messages[-1]['role'] == 'assistant':
    raise wrong("messages: the last is the assistant's, expected to end before it")


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
  """The tokenizer in a folder, or of a hub id."""
  path = os.path.expanduser(path)
  if path.startswith(('/', '.')) and not os.path.isdir(path):
    raise ValueError(f'Tokenizer {path}: no such folder')
  try:
    return AutoTokenizer.from_pretrained(path)
  except Exception as error:  # transformers raises many kinds, of many lines
    reason = ' '.join(str(error).split())[:200]
    raise ValueError(
      f'Tokenizer {path}: none in the folder, or at that hub id: {reason}'
    ) from error


def stop_ids(
  tokenizer: Tokenizer, generation_config: dict[str, Any] | None
) -> tuple[int, ...]:
  """Ids that end an answer: the tokenizer's and the generation config's, ascending."""
  ids = set()
  for eos in (tokenizer.eos_token_id, (generation_config or {}).get('eos_token_id')):
    if eos is not None:
      ids |= {eos} if isinstance(eos, int) else set(eos)
  return tuple(sorted(ids))


def answer_text(
  tokenizer: Tokenizer, tokens: np.ndarray, stop_ids: tuple[int, ...]
) -> str:
  """An answer as graders see it.

  The token that ended it is cut off, if it ended by one. All else is kept as text,
  special tokens too: what the policy said must not look better than it was.

  Args:
    tokens: [length] int, the stop token included.
  """
  end = len(tokens) - (len(tokens) > 0 and int(tokens[-1]) in stop_ids)
  return tokenizer.decode(
    np.asarray(tokens[:end]).tolist(),
    skip_special_tokens=False,
    clean_up_tokenization_spaces=False,
  )
