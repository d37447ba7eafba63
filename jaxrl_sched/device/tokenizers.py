"""From a record to text to ids; and a tokenizer of bytes, as Hugging Face files."""

import os
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = ('<|pad|>', '<|bos|>', '<|end|>', '<|system|>', '<|user|>', '<|assistant|>')

CHAT_TEMPLATE = (
  '{{ bos_token }}'
  '{% for message in messages %}'
  "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
  '{% endfor %}'
  "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Template:
  """Turns a record into the text that is sampled from, and that into ids."""

  def __init__(
    self,
    tokenizer: PreTrainedTokenizerBase,
    template: str = 'chat',
    system: str | None = None,
  ):
    self.tokenizer, self.template, self.system = tokenizer, template, system
    if template == 'chat':
      if not tokenizer.chat_template:
        raise ValueError(
          "template 'chat': the tokenizer has no chat template, expected a text "
          "containing '{prompt}'"
        )
    elif '{prompt}' not in template:
      raise ValueError(
        f"template {template!r}: expected 'chat' or a text containing '{{prompt}}'"
      )
    elif system is not None:
      raise ValueError(f'system: a plain template has it written in: {template!r}')
    # What the tokenizer does when left to itself, whatever it says of itself.
    self._bos = tokenizer.bos_token_id
    self._wants_bos = self._bos is not None and (
      list(tokenizer('a').input_ids[:1]) == [self._bos]
    )

  def text(self, record: dict[str, Any]) -> str:
    """The rendered prompt. In a plain template only '{prompt}' is replaced."""
    if self.template != 'chat':
      if 'prompt' not in record:
        raise ValueError(
          f"'messages' need the template 'chat', found {self.template!r}"
        )
      return self.template.replace('{prompt}', record['prompt'])
    messages = record.get('messages')
    if messages is None:
      messages = [{'role': 'user', 'content': record['prompt']}]
    # A record that opens with a system message of its own keeps it.
    if self.system is not None and messages[0]['role'] != 'system':
      messages = [{'role': 'system', 'content': self.system}, *messages]
    return self.tokenizer.apply_chat_template(
      messages, add_generation_prompt=True, tokenize=False
    )

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
