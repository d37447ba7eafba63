"""From a record to text to ids; and a tokenizer of bytes, as Hugging Face files."""

from collections.abc import Sequence
import datetime
import inspect
import os
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jaxrl_sched.device import records

SPECIAL = ('<|pad|>', '<|bos|>', '<|end|>', '<|system|>', '<|user|>', '<|assistant|>')

CHAT_TEMPLATE = (
  '{{ bos_token }}'
  '{% for message in messages %}'
  "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
  '{% endfor %}'
  "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


# Not for a chat template's options: they are said elsewhere, or never.
RESERVED = {'messages', 'conversations', 'strftime_now', 'raise_exception'} | {
  *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
}


class Template:
  """Turns a record into the text that is sampled from, and that into ids.

  Args:
    template: 'chat', or a text in which '{prompt}' is replaced, and nothing else.
    system: goes before what has no system message of its own; for 'chat'.
    examples: records with the reply that is shown for each. In a chat they are turns
      of user and assistant; else each is the template, the reply and a blank line.
    options: more for the chat template.
    date: that a chat template is told when it asks for today's, as '2024-07-26'.
  """

  def __init__(
    self,
    tokenizer: PreTrainedTokenizerBase,
    template: str = 'chat',
    system: str | None = None,
    *,
    examples: Sequence[tuple[dict[str, Any], str]] = (),
    options: dict[str, Any] | None = None,
    date: str | None = None,
  ):
    self.tokenizer, self.template, self.system = tokenizer, template, system
    self.examples, self.options = examples, options or {}
    if template == 'chat':
      if not tokenizer.chat_template:
        raise ValueError(
          "template 'chat': the tokenizer has no chat template, expected a text "
          "containing '{prompt}'"
        )
      for key in self.options:
        if key in RESERVED:
          raise ValueError(f'template_options: {key!r} is not for them to say')
      self._chat = _dated(tokenizer.get_chat_template(), date)
    elif '{prompt}' not in template:
      raise ValueError(
        f"template {template!r}: expected 'chat' or a text containing '{{prompt}}'"
      )
    else:
      chats = dict(system=system, template_options=options or None, date=date)
      for key, value in chats.items():
        if value is not None:
          raise ValueError(f'{key}: a plain template has it written in: {template!r}')
    # What the tokenizer does when left to itself, whatever it says of itself.
    self._bos = tokenizer.bos_token_id
    self._wants_bos = self._bos is not None and (
      list(tokenizer('a').input_ids[:1]) == [self._bos]
    )

  def text(self, record: dict[str, Any]) -> str:
    """The rendered prompt, examples and all."""
    if self.template != 'chat':
      shown = [f'{self._plain(one)}{reply}\n\n' for one, reply in self.examples]
      return ''.join(shown) + self._plain(record)
    messages = records.turns(record)
    # A record that opens with a system message of its own keeps it.
    own = int(messages[0]['role'] == 'system')
    before = messages[:own]
    if not own and self.system is not None:
      before = [{'role': 'system', 'content': self.system}]
    for one, reply in self.examples:
      before += [*records.turns(one), {'role': 'assistant', 'content': reply}]
    return self.tokenizer.apply_chat_template(
      [*before, *messages[own:]],
      chat_template=self._chat,
      add_generation_prompt=True,
      tokenize=False,
      **self.options,
    )

  def _plain(self, record: dict[str, Any]) -> str:
    if record.get('prompt') is None:
      raise ValueError(f"'messages' need the template 'chat', found {self.template!r}")
    return self.template.replace('{prompt}', record['prompt'])

  def ids(self, texts: list[str]) -> list[np.ndarray]:
    """Tokens of each text, [prompt] int32, with exactly one BOS where one is wanted.

    A template may write it or not, so the ids decide: none is added to one that is
    there, and a doubled one is made single.
    """
    result = []
    for ids in self.tokenizer(texts, add_special_tokens=False).input_ids:
      begins = 0  # how many BOS the text begins with
      while begins < len(ids) and ids[begins] == self._bos:
        begins += 1
      one = [self._bos] if begins or self._wants_bos else []
      result.append(np.array(one + ids[begins:], np.int32))
    return result


def _dated(template: str, date: str | None) -> str:
  """The chat template, for which it is always the same day.

  One that wrote today's would give a run other prompts after a resume.
  """
  if 'strftime_now' not in template:
    return template
  if date is None:
    today = (
      "{{ raise_exception('the chat template writes the date of today into prompts: "
      "fix it by prompts.date, as 2024-07-26, or by its own option') }}"
    )
  else:
    try:
      day = datetime.date.fromisoformat(date)
    except ValueError:
      raise ValueError(f"date: {date!r}, expected one as '2024-07-26'") from None
    told = {f'%{c}': day.strftime(f'%{c}') for c in 'aAbBdjmyYHIMSp'}
    told |= {'%-d': str(day.day), '%-m': str(day.month)}
    filters = ' | '.join(f"replace('{c}', '{text}')" for c, text in told.items())
    today = f'{{{{ format | {filters} }}}}'
  # It hides transformers' function of that name.
  return f'{{% macro strftime_now(format) %}}{today}{{% endmacro +%}}{template}'


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
