"""What files held when a run began: a resume with others would be another run.

Paths may change, contents may not: a checkpoint holds the digests of what is read again.
"""

import hashlib
import json
from typing import Any
import warnings

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


class Digest:
  """Of a dataset's records, one after another; as JSON by `described`."""

  def __init__(self):
    self._count, self._ordered, self._sum = 0, hashlib.sha256(), 0

  def add(self, record: bytes) -> None:
    """A record without the id that it has by its place, if it has it by that."""
    one = hashlib.sha256(record).digest()
    self._count += 1
    self._ordered.update(one)
    # Of the records in any order: tells a file that was shuffled from a changed one.
    self._sum = (self._sum + int.from_bytes(one, 'little')) % 2**256

  def described(self) -> dict[str, Any]:
    return {
      'prompts': self._count,
      'ordered': self._ordered.hexdigest(),
      'unordered': f'{self._sum:064x}',
    }


def canonical(record: dict[str, Any]) -> bytes:
  """The same in each process: sets have an order of their own in each."""

  def default(value: Any) -> Any:
    if isinstance(value, set | frozenset):
      return sorted(map(repr, value))
    text = repr(value)
    return type(value).__name__ if ' at 0x' in text else text  # an address says nothing

  return json.dumps(record, sort_keys=True, default=default, skipkeys=True).encode()


def of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
  """Prompts have their ids in their own digests; this is of what decodes answers."""
  if isinstance(tokenizer, PreTrainedTokenizerFast):
    about = tokenizer.backend_tokenizer.to_str()
  else:
    about = repr(sorted(tokenizer.get_vocab().items()))
  return hashlib.sha256(about.encode()).hexdigest()


def check(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
  """Refuses to go on with other contents; other held-out data is a warning.

  Args:
    before, now: 'prompts' and 'held_out', each dataset -> `Digest.described`; 'model':
      what else is read again, by name.
    where: the checkpoint, for messages.

  Raises:
    ValueError: with what differs, how, and what to do.
  """
  found = _changed(before['prompts'], now['prompts'])
  found += [
    f"the model's {name} is another"
    for name, value in now['model'].items()
    if before['model'].get(name) != value
  ]
  if found:
    raise ValueError(
      f'Checkpoint {where} began with other contents: {"; ".join(found)}. Restore them, '
      'or begin anew in another --workdir'
    )
  if changed := _changed(before['held_out'], now['held_out']):
    warnings.warn(
      f'held-out {"; ".join(changed)}: scores before and after are of different prompts',
      stacklevel=2,
    )


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
  found = []
  for name in sorted(before.keys() & now.keys()):
    old, new = before[name], now[name]
    if old['ordered'] == new['ordered']:
      continue
    if old['prompts'] != new['prompts']:
      how = f'{new["prompts"]} prompts, {old["prompts"]} when the run began'
    elif old['unordered'] == new['unordered']:
      how = f'the same {new["prompts"]} prompts in another order'
    else:
      how = (
        f'{new["prompts"]} prompts as when the run began, of which some have another id, '
        'text, answer or reward'
      )
    found.append(f'dataset {name!r} has {how}')
  return found
