"""Loading a tokenizer and what is asked of it; and one of bytes, as its files."""

from collections.abc import Sequence
import functools
import os
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
  AutoTokenizer,
  PreTrainedTokenizerBase,
  PreTrainedTokenizerFast,
)

SPECIAL = ('<|pad|>', '<|bos|>', '<|end|>', '<|system|>', '<|user|>', '<|assistant|>')

CHAT_TEMPLATE = (
  '{{ bos_token }}'
  '{% for message in messages %}'
  "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
  '{% endfor %}'
  "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def load_tokenizer(path: str | os.PathLike) -> PreTrainedTokenizerBase:
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


def known_ids(tokenizer: PreTrainedTokenizerBase) -> int:
  """One more than the largest id that the tokenizer gives."""
  # Not len(): where ids have holes the last ones would be taken for unknown.
  return max(tokenizer.get_vocab().values()) + 1


def stop_ids(
  tokenizer: PreTrainedTokenizerBase, generation_config: dict[str, Any] | None
) -> tuple[int, ...]:
  """Ids that end an answer: the tokenizer's and the generation config's, ascending."""
  ids = set()
  for eos in (tokenizer.eos_token_id, (generation_config or {}).get('eos_token_id')):
    if eos is not None:
      ids |= {eos} if isinstance(eos, int) else set(eos)
  return tuple(sorted(ids))


def answer_text(
  tokenizer: PreTrainedTokenizerBase,
  tokens: np.ndarray,
  stop_ids: Sequence[int] = (),
  stop_strings: Sequence[str] = (),
) -> str:
  """An answer as graders see it: the text that the policy added to its prompt.

  What ended it is cut off: the token, or, by characters, the stop string that was
  complete first, with all that its last token held beyond it. All else is kept: special
  tokens as they are spelled (what the policy said must not look better than it
  was), a space at its start, and U+FFFD for a character cut in the middle.

  Args:
    tokens: [length] int, the stop token included.
  """
  ids = np.asarray(tokens).tolist()
  before, alone = _before(tokenizer)
  is_stopped = bool(ids) and ids[-1] in stop_ids
  text = _decoded(tokenizer, [*before, *ids[: len(ids) - is_stopped]])[len(alone) :]
  if not stop_strings:
    return text
  # A stop token that shows may be part of a stop string.
  whole = _decoded(tokenizer, [*before, *ids])[len(alone) :] if is_stopped else text
  return text[: len(before_stop_string(whole, stop_strings))]


def before_stop_string(text: str, stop_strings: Sequence[str]) -> str:
  """A text up to the stop string that is complete first, of two the longer one."""
  found = [(at + len(s), at) for s in stop_strings if (at := text.find(s)) >= 0]
  return text[: min(found)[1]] if found else text


@functools.lru_cache(maxsize=8)
def _before(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str]:
  """What goes before an answer: ids, and their text alone.

  Sentencepiece's decoders drop the space that a text begins with.
  """
  ids = tokenizer('a', add_special_tokens=False).input_ids
  return ids, _decoded(tokenizer, ids)


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
  return tokenizer.decode(
    ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
  )


def build_byte_tokenizer(out_dir: str | os.PathLike) -> PreTrainedTokenizerFast:
  """Writes a tokenizer whose tokens are the 256 bytes and six special ones.

  Ids 0 to 5 are `SPECIAL`: padding, begin, end of turn, and the three roles of the
  chat template. Byte b has id 6 + b. Any UTF-8 text comes back from its ids exactly.
  Begin is written by the chat template, not added on encoding.
  """
  tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(), merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
  wrapped = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    pad_token='<|pad|>',
    bos_token='<|bos|>',
    eos_token='<|end|>',
    additional_special_tokens=list(SPECIAL[3:]),
    clean_up_tokenization_spaces=False,
  )
  wrapped.chat_template = CHAT_TEMPLATE
  wrapped.save_pretrained(out_dir)
  return wrapped


def _vocabulary() -> dict[str, int]:
  # ByteLevel writes a printable byte as the character of that code, and the others,
  # in order, as the characters from 256 on.
  printable = {c for c in pre_tokenizers.ByteLevel.alphabet() if ord(c) < 256}
  others = iter(range(256, 512))
  letters = [chr(b) if chr(b) in printable else chr(next(others)) for b in range(256)]
  return {token: i for i, token in enumerate((*SPECIAL, *letters))}
