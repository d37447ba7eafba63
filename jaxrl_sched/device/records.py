"""What a dataset may say of itself, and what a record or a few-shot example holds.

A record has 'prompt' (text) or 'messages' (a chat), 'answer' (what the verifier
compares with) and, optionally, 'id' and 'solution' (a reference answer's text).
A chat template is also given 'tools' (a list of schemas, or the JSON text of one) and
'chat_template_kwargs' (a dict). Whatever is not one of `OURS` goes to `Prompt.meta`.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import difflib
import functools
import math
import os
from typing import Any

from jaxrl_sched.device.sources import nearest, open_source
from jaxrl_sched.host import maths, rewards, strict_json
from jaxrl_sched.types import LARGEST, Reward, tolerance

OURS = ('prompt', 'messages', 'answer', 'id', 'solution')
# What others call the answer.
_ANSWERS = ('answers', 'gold', 'ground_truth', 'label', 'labels', 'reference', 'target')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
  """What may be said of a dataset."""

  source: str  # see sources.open_source
  options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the source
  reward: str | None = None  # None: 'reasoning_gym' for its own, else 'final_number'
  max_reward: float | None = 1.0  # None: the verifier declares no maximum
  min_reward: float = 0.0  # and what a fault scores
  # Several in place of `reward`: name -> (verifier, weight), or
  # dict(verifier=..., weight=1.0, max_reward=1.0, min_reward=0.0).
  rewards: dict[str, Any] | None = None
  decides: str | None = None  # which of them; None: that of the largest weight
  weight: float = 1.0
  fields: dict[str, str] = dataclasses.field(default_factory=dict)  # ours -> theirs
  system: str | None = None  # None: that of all datasets
  examples: str | list | tuple | None = None  # None: those of all datasets; () for none
  math: dict[str, Any] | None = None  # unboxed: see `maths.answer_in`

  @functools.cached_property
  def graded_by(self) -> tuple[Reward, ...]:
    """Its rewards. Of several the first says whether an answer is right."""
    if self.rewards is None:
      bounds = dict(max_reward=self.max_reward, min_reward=self.min_reward)
      return (Reward(verifier=self.reward, **bounds),)
    return _several(self.rewards, self.decides)

  @property
  def of_prompt(self) -> dict[str, Any]:
    """What a `Prompt` says of how it is graded."""
    parts = self.graded_by
    if self.rewards is None:
      parts = ()
      low, high = self.min_reward, self.max_reward
    else:
      low = math.fsum(part.weight * part.min_reward for part in parts)
      high = None
      if all(part.max_reward is not None for part in parts):
        high = math.fsum(part.weight * part.max_reward for part in parts)
    return dict(
      reward=self.reward or '',
      max_reward=high,
      min_reward=low,
      rewards=parts,
      reward_options=self.math or {},
    )


def checked(name: str, settings: dict[str, Any]) -> Dataset:
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
  kinds['rewards'] = (dict | None, 'a dict')
  kinds['decides'] = (str | None, 'a name')
  kinds['system'] = (str | None, 'text')
  kinds['math'] = (dict | None, 'a dict')
  kinds['examples'] = (str | list | tuple | None, 'a path or a list of records')
  for key, (kind, expected) in kinds.items():
    if key in settings and not isinstance(value := settings[key], kind):
      raise ValueError(f'Dataset {name!r}, {key}: expected {expected}, found {value!r}')
  try:
    if 0 >= _number('weight', dataset.weight):
      raise ValueError(f'weight: expected above 0, found {dataset.weight}')
    if dataset.rewards is not None:
      for key in ('reward', 'max_reward', 'min_reward'):
        if key in settings:
          raise ValueError(f"{key}: expected in each of 'rewards', found beside it")
    elif dataset.decides is not None:
      raise ValueError("decides: expected beside 'rewards' only")
    else:
      _check_bounds(dataset.max_reward, dataset.min_reward)
  except ValueError as error:
    raise ValueError(f'Dataset {name!r}, {error}') from None
  if dataset.reward is None and dataset.rewards is None:
    gym = dataset.source.startswith('reasoning_gym:')
    dataset = dataclasses.replace(
      dataset, reward='reasoning_gym' if gym else 'final_number'
    )
  _check_math(name, dataset)
  key = 'reward' if dataset.rewards is None else 'rewards'
  try:
    for part in dataset.graded_by:
      rewards.resolve(part.verifier)
  except ValueError as error:
    raise ValueError(f'Dataset {name!r}, {key}: {error}') from None
  return dataset


def _check_math(name: str, dataset: Dataset) -> None:
  if dataset.math is None:
    return
  where = f'Dataset {name!r}, math'
  if all(part.verifier != 'math' for part in dataset.graded_by):
    raise ValueError(f"{where}: expected with the reward 'math' only")
  for key, value in dataset.math.items():
    if key != 'unboxed':
      raise ValueError(f'{where}: unknown key {key!r}{nearest(key, ["unboxed"])}')
    if value not in maths.UNBOXED:
      known = ', '.join(map(repr, maths.UNBOXED))
      raise ValueError(f'{where}.unboxed: expected one of {known}, found {value!r}')


def _several(given: dict[str, Any], decides: str | None) -> tuple[Reward, ...]:
  """Rewards by name, of which the first decides; the others in alphabetical order."""
  known = [field.name for field in dataclasses.fields(Reward) if field.name != 'name']
  found = []
  for name, value in sorted(given.items()):
    if isinstance(value, list | tuple) and len(value) == 2:
      value = dict(zip(('verifier', 'weight'), value, strict=True))
    if not name or '/' in name or ':' in name:  # part of keys of metrics and of faults
      raise ValueError(f"{name!r}: expected a name without '/' and ':'")
    if not isinstance(value, dict) or not isinstance(value.get('verifier'), str):
      raise ValueError(
        f"{name}: expected ('verifier', weight), or dict(verifier=..., weight=...), "
        f'found {value!r:.60}'
      )
    for key in value:
      if key not in known:
        raise ValueError(f'{name}: unknown key {key!r}{nearest(key, known)}')
    reward = Reward(name=name, **value)
    try:
      if not 0 <= _number('weight', reward.weight):
        raise ValueError(f'weight: expected 0 or more, found {reward.weight}')
      _check_bounds(reward.max_reward, reward.min_reward)
    except ValueError as error:
      raise ValueError(f'{name}, {error}') from None
    found.append(reward)
  heaviest = max((reward.weight for reward in found), default=0.0)
  if not heaviest > 0:
    raise ValueError(f'expected at least one of a weight above 0, found {given!r:.60}')
  first = [r.name for r in found if r.weight == heaviest]
  if decides is None and len(first) > 1:
    raise ValueError(
      f'{" and ".join(first)} weigh alike, expected decides={first[0]!r} or another to '
      'say whether an answer is right'
    )
  decides = first[0] if decides is None else decides
  if decides not in given:
    raise ValueError(f'decides={decides!r}, expected one of {sorted(given)}')
  return tuple(sorted(found, key=lambda reward: reward.name != decides))


def _number(key: str, value: Any) -> float:
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise ValueError(f'{key}: expected a number, found {value!r}')
  if not abs(value) <= LARGEST:
    raise ValueError(f'{key}: expected at most {LARGEST:g} in size, found {value}')
  return value


def _check_bounds(best: Any, worst: Any) -> None:
  """Whether the two are numbers, and far enough apart for float32."""
  _number('min_reward', worst)
  if best is None:
    return
  if not _number('max_reward', best) > worst:
    raise ValueError(f'max_reward: expected above {worst:g} (min_reward), found {best}')
  if not best - worst > 2 * tolerance(best, worst):
    raise ValueError(
      f'max_reward: {best} is too near to min_reward={worst} to be told from it'
    )


def read(
  given: dict[str, Any], dataset: Dataset, *, position: int, where: str
) -> dict[str, Any]:
  """The record with its keys renamed and checked; 'id' is there and is text."""

  def wrong(what: str) -> ValueError:
    return ValueError(f'{where}: {what}')

  found = f'found {sorted(given)}'
  for ours, theirs in dataset.fields.items():
    if theirs not in given:
      raise wrong(f'no field {theirs!r} (for {ours!r}), {found}')
  moved = {ours: given[theirs] for ours, theirs in dataset.fields.items()}
  rest = {k: v for k, v in given.items() if k not in dataset.fields.values()}
  record = rest | moved

  _check_question(record, wrong)
  _check_rendering(record, wrong)
  if not isinstance(record.get('solution'), str | None):
    raise wrong(f'solution: expected text, found {record["solution"]!r:.40}')
  meta = {k: v for k, v in record.items() if k not in OURS}
  verifiers = [part.verifier for part in dataset.graded_by]
  try:
    for verifier in verifiers:
      rewards.check_answer(verifier, record.get('answer'))
  except ValueError as error:
    if 'answer' not in record:
      raise wrong(f"no field 'answer', {found}") from None
    raise wrong(str(error)) from None
  try:
    for verifier in verifiers:
      rewards.check_meta(verifier, meta)
  except ValueError as error:
    raise wrong(str(error)) from None

  key = record.get('id')
  if key is None:
    key = position
  elif isinstance(key, bool) or not isinstance(key, str | int) or key == '':
    raise wrong(f'id: expected text or a whole number, found {key!r:.40}')
  return {k: v for k, v in record.items() if v is not None or k not in OURS} | {
    'id': str(key)
  }


def answer_like(fields: Iterable[str]) -> str | None:
  """The field that may have been meant by 'answer', where no record has that one."""
  fields = sorted(fields)
  near = difflib.get_close_matches('answer', fields, n=1, cutoff=0.75)
  return next((name for name in fields if name in _ANSWERS), near[0] if near else None)


def _check_question(record: dict[str, Any], wrong: Callable[[str], ValueError]) -> None:
  found = f'found {sorted(record)}'
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
  elif not prompt.strip():
    raise wrong(f'prompt: expected some text, found {prompt!r:.40}')


def _check_messages(messages: Any, wrong: Callable[[str], ValueError]) -> None:
  if not isinstance(messages, list) or not messages:
    raise wrong(f'messages: expected a list of messages, found {messages!r:.40}')
  for message in messages:
    is_message = isinstance(message, dict) and isinstance(message.get('role'), str)
    # A message that calls tools may say nothing beside.
    calls = is_message and message['role'] == 'assistant' and message.get('tool_calls')
    content = message.get('content') if is_message else None
    if not is_message or not isinstance(content, str | None if calls else str):
      raise wrong(
        f"messages: expected texts 'role' and 'content' in each, found {message!r:.60}"
      )
  if not any((message.get('content') or '').strip() for message in messages):
    raise wrong(f'messages: expected some text, found {messages!r:.60}')
  if messages[-1]['role'] == 'assistant':
    raise wrong("messages: the last is the assistant's, expected to end before it")


def _check_rendering(
  record: dict[str, Any], wrong: Callable[[str], ValueError]
) -> None:
  """What a chat template is given beside messages. Tools become a list, if they are."""
  tools, options = record.get('tools'), record.get('chat_template_kwargs')
  if isinstance(tools, str) and tools.strip():  # as columns of one type have to
    try:
      tools = record['tools'] = strict_json.loads(tools)
    except ValueError as error:
      raise wrong(f'tools: not JSON: {error}') from None
  good = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
  if tools and not good:
    raise wrong(f'tools: expected a list of schemas, found {tools!r:.40}')
  if options is not None and not isinstance(options, dict):
    raise wrong(f'chat_template_kwargs: expected a dict, found {options!r:.40}')


def turns(record: dict[str, Any]) -> list[dict[str, Any]]:
  """The record's messages, without keys of None; a prompt is the user's one."""
  if (given := record.get('messages')) is None:
    return [{'role': 'user', 'content': record['prompt']}]
  return [{k: v for k, v in turn.items() if v is not None} for turn in given]


def question(record: dict[str, Any]) -> tuple[tuple[str, str], ...]:
  """What a record asks, the same for records that ask the same."""
  return tuple(
    (turn['role'], ' '.join((turn.get('content') or '').split()))
    for turn in turns(record)
    if turn['role'] != 'system'
  )


def read_examples(
  given: str | Sequence[dict[str, Any]], root: str | os.PathLike
) -> list[tuple[dict[str, Any], str]]:
  """Few-shot examples: records, each with the reply that is shown for it.

  The reply is the record's 'solution', else its 'answer'.

  Args:
    given: a path ending in .jsonl or .parquet, or the records themselves.
    root: where a relative path starts.
  """
  if isinstance(given, str):
    source = open_source(given, {}, root)
    found = [(source[i], source.where(i)) for i in range(len(source))]
  else:
    found = [(record, f'examples, record {i}') for i, record in enumerate(given)]
  return [_example(record, where) for record, where in found]


def _example(record: Any, where: str) -> tuple[dict[str, Any], str]:
  def wrong(what: str) -> ValueError:
    return ValueError(f'{where}: {what}')

  if not isinstance(record, dict):
    raise wrong(f'expected a record, found {record!r:.40}')
  _check_question(record, wrong)
  if any(m['role'] == 'system' for m in record.get('messages') or ()):
    raise wrong('messages: an example has no system message of its own')
  for key in ('tools', 'chat_template_kwargs'):
    if record.get(key):
      raise wrong(f'{key}: an example has none of its own')
  reply = record.get('solution')
  reply = record.get('answer') if reply is None else reply
  if isinstance(reply, int | float) and not isinstance(reply, bool):
    reply = str(reply)
  if not isinstance(reply, str) or not reply:
    raise wrong(f"expected a 'solution' or an 'answer' to show, found {reply!r:.40}")
  return record, reply
