"""Whether what a chat says reaches its rendered prompt: a chat template is a program,
and may leave out a message whose role it does not know, or a part of its text.
"""

from collections.abc import Callable, Iterator, Sequence
import json
from typing import Any

# They link a result to its call: where the order says it, a template may leave them out.
LINKS = ('id', 'type', 'tool_call_id')
_TOOL = ('name', 'description')  # of a tool's function, what a template is to write


def texts(value: Any) -> Iterator[str]:
  """All texts in a value of JSON, keys too."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, dict):
    for key, item in value.items():
      yield from (key, *texts(item))
  elif isinstance(value, list | tuple):
    for item in value:
      yield from texts(item)


class Reaching:
  """Refuses a chat of which something does not reach the prompt.

  A chat of each new form (roles, keys, which contents are empty, options) is rendered
  once more with a marker in place of every text: a short content could stand in the
  prompt by chance. And each content is looked for in the prompt, but for white space at
  its ends, in a place of its own: templates also decide by what a text holds.

  Args:
    render: (messages, tools, options) -> the prompt.
  """

  def __init__(self, render: Callable[[Sequence[dict], list | None, dict], str]):
    self._render = render
    self._known: dict[str, str | None] = {}  # form -> what it loses

  def check(
    self,
    messages: Sequence[dict[str, Any]],
    tools: list | None,
    options: dict,
    text: str,
  ) -> None:
    """Raises ValueError, naming what is lost. `text` is the chat, rendered."""
    marked = _Marked(messages, tools)
    form = f'{marked.form} {options!r}'
    if form not in self._known:
      self._known[form] = self._lost(marked, options)
    lost = self._known[form] or _missing(messages, text)
    if lost:
      raise ValueError(
        f'{lost} does not reach the prompt that the chat template writes'
      )

  def _lost(self, marked: '_Marked', options: dict) -> str | None:
    try:
      text = self._render(marked.messages, marked.tools, options)
    except Exception:  # a template may refuse a marker where it takes what was given
      return None
    return next((what for mark, what in marked.names.items() if mark not in text), None)


class _Marked:
  """A chat with markers in it: `names` says of each marker what it stands for."""

  def __init__(self, messages: Sequence[dict[str, Any]], tools: list | None):
    self.names: dict[str, str] = {}
    self.messages = [self._message(m, i) for i, m in enumerate(messages)]
    self.tools = None if tools is None else [self._tool(tool) for tool in tools]
    of_tools = None if tools is None else [_marks_of(tool) for tool in self.tools]
    self.form = json.dumps([_without_links(self.messages), of_tools], default=repr)

  def _mark(self, what: str) -> str:
    mark = f'q{len(self.names)}zq'
    self.names[mark] = what
    return mark

  def _message(self, message: dict[str, Any], place: int) -> dict[str, Any]:
    where = f'the {message["role"]!r} message at {place}'
    found = {}
    for key, value in message.items():
      what = f'messages: {"the content" if key == "content" else repr(key)} of {where}'
      if key == 'role':
        found[key] = value
      elif isinstance(value, bool) and key not in LINKS:
        found[key] = self._mark(what)
      else:
        found[key] = self._marked(value, what, key)
    return found

  def _marked(self, value: Any, what: str, key: str | None = None) -> Any:
    if key in LINKS:
      return value
    if isinstance(value, dict):
      return {k: self._marked(item, what, k) for k, item in value.items()}
    if isinstance(value, list | tuple):
      return [self._marked(item, what) for item in value]
    if value is None or isinstance(value, bool) or not str(value).strip():
      return value
    return self._mark(what)

  def _tool(self, tool: Any) -> Any:
    if isinstance(inner := tool.get('function'), dict):
      return tool | {'function': self._tool(inner)}
    return tool | {key: self._mark(f'tools: {key!r}') for key in _TOOL if tool.get(key)}


def _marks_of(tool: dict[str, Any]) -> dict[str, Any]:
  inner = tool.get('function')
  inner = inner if isinstance(inner, dict) else tool
  return {key: inner.get(key) for key in _TOOL}


def _without_links(value: Any) -> Any:
  if isinstance(value, dict):
    return {k: _without_links(item) for k, item in value.items() if k not in LINKS}
  return [_without_links(item) for item in value] if isinstance(value, list) else value


def _missing(messages: Sequence[dict[str, Any]], text: str) -> str | None:
  """The first content, longest first, that has no place of its own in the text."""
  said = [(m.get('content') or '', m['role'], i) for i, m in enumerate(messages)]
  for content, role, place in sorted(said, key=lambda one: -len(one[0])):
    inner = content.strip()
    spelled = json.dumps(inner, ensure_ascii=False)[1:-1]  # results of tools, in some
    for written in (inner, spelled):
      if written in text:
        text = text.replace(written, '\0', 1)
        break
    else:
      return f'messages: the content of the {role!r} message at {place}'
  return None
