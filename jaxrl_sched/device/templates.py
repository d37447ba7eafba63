"""From a record to the text that is sampled from, and from that to ids."""

from collections.abc import Sequence
import datetime
import inspect
import re
from typing import Any

import jinja2
from jinja2 import meta
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_sched.device import records
from jaxrl_sched.device.reaching import Reaching, texts
from jaxrl_sched.device.sources import nearest

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
    special_tokens: 'allow': texts may hold special tokens of the tokenizer, which act
      as such. None: not those of a chat, where they would begin and end turns.
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
    special_tokens: str | None = None,
  ):
    self.tokenizer, self.template, self.system = tokenizer, template, system
    self.examples, self.options = examples, options or {}
    self._refused: re.Pattern | None = None  # special tokens
    if template == 'chat':
      if not tokenizer.chat_template:
        raise ValueError(
          "template 'chat': the tokenizer has no chat template, expected a text "
          "containing '{prompt}'"
        )
      self._known_options: set[frozenset[str]] = set()
      self._check_options(self.options, 'template_options')
      self._reaching = Reaching(self._chat_text)
      self._chat = _dated(tokenizer.get_chat_template(), date)
      if special_tokens is None:
        self._refused = _special(tokenizer)
      self.check_text(system or '', 'system')
      for record, reply in examples:
        self.check_record(record, 'examples')
        self.check_text(reply, 'examples')
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
    """The rendered prompt, examples and all.

    Raises:
      ValueError: something that the record or an example says is not in it.
    """
    if self.template != 'chat':
      shown = [f'{self._plain(one)}{reply}\n\n' for one, reply in self.examples]
      return ''.join(shown) + self._plain(record)
    messages = records.turns(record)
    options = record.get('chat_template_kwargs') or {}
    self._check_options(options, 'chat_template_kwargs')
    options = self.options | options
    # A record that opens with a system message of its own keeps it.
    own = int(messages[0]['role'] == 'system')
    before = messages[:own]
    if not own and self.system is not None:
      before = [{'role': 'system', 'content': self.system}]
    for one, reply in self.examples:
      before += [*records.turns(one), {'role': 'assistant', 'content': reply}]
    chat, tools = [*before, *messages[own:]], record.get('tools') or None
    text = self._chat_text(chat, tools, options)
    self._reaching.check(chat, tools, options, text)
    return text

  def _chat_text(
    self, chat: Sequence[dict], tools: list | None, options: dict, *, asks: bool = True
  ) -> str:
    return self.tokenizer.apply_chat_template(
      chat,
      tools=tools,
      chat_template=self._chat,
      add_generation_prompt=asks,
      tokenize=False,
      **options,
    )

  def turn_end(self) -> list[int]:
    """Ids that a chat template puts after an assistant's turn; none if it puts none.

    Empty, too, where there is no chat template, or it takes no such turn.
    """
    if self.template != 'chat':
      return []
    mark = 'q0zq'
    turns = [('user', 'q'), ('assistant', mark)]
    chat = [{'role': role, 'content': content} for role, content in turns]
    try:
      text = self._chat_text(chat, None, self.options, asks=False)
    except Exception:  # somebody's program: it may want something else at the end
      return []
    _, _, after = text.partition(mark)
    return self.tokenizer(after.lstrip(), add_special_tokens=False).input_ids

  def check_record(self, record: dict[str, Any], where: str) -> None:
    """Refuses special tokens in whatever a chat template is given of the record."""
    for key in ('prompt', 'messages', 'tools', 'chat_template_kwargs'):
      for text in texts(record.get(key)):
        self.check_text(text, where)

  def check_text(self, text: str, where: str) -> None:
    """Refuses special tokens in a text that a chat template writes down."""
    if self._refused is not None and (found := self._refused.search(text)):
      raise ValueError(
        f'{where}: {found[0]!r} stands in the text and would act as a special token, '
        "which prompts.special_tokens='allow' permits"
      )

  def _check_options(self, options: dict[str, Any], what: str) -> None:
    if options and (keys := frozenset(options)) not in self._known_options:
      _check_options(options, self.tokenizer, what)
      self._known_options.add(keys)

  def _plain(self, record: dict[str, Any]) -> str:
    for key in ('tools', 'chat_template_kwargs'):
      if record.get(key):
        raise ValueError(f"{key}: need the template 'chat', found {self.template!r}")
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


def _special(tokenizer: PreTrainedTokenizerBase) -> re.Pattern | None:
  added = (t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
  found = {*added, *tokenizer.all_special_tokens} - {''}
  return re.compile('|'.join(map(re.escape, sorted(found)))) if found else None


def _check_options(
  options: dict[str, Any], tokenizer: PreTrainedTokenizerBase, what: str
) -> None:
  """Refuses options that the chat template never looks at."""
  # Transformers' own tag, which plain jinja does not know.
  tag = r'{%[-+]?\s*(end)?generation\s*[-+]?%}'
  text = re.sub(tag, '', tokenizer.get_chat_template())
  try:
    program = jinja2.Environment(extensions=['jinja2.ext.loopcontrols']).parse(text)
  except jinja2.TemplateSyntaxError as error:
    raise ValueError(f'chat template: {" ".join(str(error).split())}') from None
  reserved = {*RESERVED, *tokenizer.special_tokens_map}
  used = meta.find_undeclared_variables(program) - reserved
  for key in options:
    if key in reserved:
      raise ValueError(f'{what}: {key!r} is not for them to say')
    if key not in used:
      known = f'; known: {", ".join(sorted(used)) or "none"}'
      raise ValueError(
        f'{what}: {key!r} is unknown to the chat template{nearest(key, used) or known}'
      )


def _dated(template: str, date: str | None) -> str:
  """The chat template, for which it is always the same day.

  One that wrote today's would give a run other prompts after a resume.
  """
  day = None if date is None else _day(date)
  if 'strftime_now' not in template:
    if date is not None:
      raise ValueError(f'date: {date!r}, but the chat template asks for none')
    return template
  if day is None:
    today = (
      "{{ raise_exception('the chat template writes the date of today into prompts: "
      "fix it by prompts.date, as 2024-07-26, or by its own option') }}"
    )
  else:
    told = {f'%{c}': day.strftime(f'%{c}') for c in 'aAbBdjmyYHIMSp'}
    told |= {'%-d': str(day.day), '%-m': str(day.month)}
    filters = ' | '.join(f"replace('{c}', '{text}')" for c, text in told.items())
    refuse = (
      "raise_exception('the chat template asks for the date as ' ~ format ~ "
      f"', expected codes among {' '.join(told)}')"
    )
    told_now = f"{{{{ {refuse} if '%' in text else text }}}}"
    today = f'{{% set text = format | {filters} %}}{told_now}'
  # It hides transformers' function of that name.
  return f'{{% macro strftime_now(format) %}}{today}{{% endmacro +%}}{template}'


def _day(date: str) -> datetime.date:
  try:
    day = datetime.date.fromisoformat(date)
  except ValueError:
    day = None
  if day is None or day.isoformat() != date:  # ISO has other spellings, too
    raise ValueError(f"date: {date!r}, expected one as '2024-07-26'")
  return day
